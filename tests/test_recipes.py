"""Every recipe: its models build, and each of its runs takes a few tiny steps and is measured."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from plait.data.build import BuildOptions, build
from plait.model.lm import LM
from plait.runs import last_measurements, train_run

RECIPES = Path(__file__).parents[1] / "recipes"


def load(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert found is not None and found.loader is not None
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)  # where dataclasses look themselves up
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.py")))
def test_says_what_counts_against_it(name: str):
    recipe = load(name)
    assert "Claim" in recipe.__doc__ and "Counts against it" in recipe.__doc__


@pytest.mark.parametrize("name", ["demo", "spaced_retrieval"])
def test_runs(name: str, tmp_path: Path):
    recipe = load(name)
    for run_name, run in recipe.settings().items():
        LM(run.model.spec(12), device="meta")
        few = {"eval_every": 1, "eval_rows": 2, "probe_every": 1, "probe_pairs": 2, "checkpoint_every": 1}
        tiny = dataclasses.replace(
            run,
            data=dataclasses.replace(run.data, gaps=(2, 9), batch_size=4),
            train=dataclasses.replace(run.train, steps=2, warmup=1, **few),
            branch=None,
        )
        train_run(tmp_path / run_name, tiny, progress=False)
        families = {row.axes["family"] for row in last_measurements(tmp_path / run_name) if row.kind == "probe"}
        assert families == {"kda", "nope"}


def test_what_counts_against_spaced_retrieval():
    verdict = load("spaced_retrieval").verdict
    vanilla = {"kda": {0: 0, 200: 2, 500: 7, 1500: 12.8}, "nope": {0: 0, 200: 2, 500: 0.5, 1500: 0.05}}
    vanilla["accuracy"] = {0: 0.1, 200: 0.6, 500: 1.0, 1500: 1.0}
    frozen = {"kda": {0: 0, 1500: 0.1}, "nope": {0: 0, 1500: 9}, "accuracy": {0: 0.1, 1500: 1.0}}
    assert verdict(vanilla, frozen) == []
    assert len(verdict({**vanilla, "nope": {0: 0, 200: 2, 500: 3, 1500: 4}}, frozen)) == 3
    assert verdict({**vanilla, "accuracy": {0: 0.1, 500: 0.9}}, frozen) == ["accuracy is under 99% at update 500"]
    assert verdict(vanilla, {**frozen, "nope": {1500: 0.0}}) == ["frozen KDA keeps the job"]


@pytest.mark.parametrize("name", ["swa", "gdn", "twin"])
def test_books(name: str, tmp_path: Path):
    books = load("books")
    for size in books.SIZES.values():
        LM(books.settings(tmp_path, size, name)[f"{name}-{size.lengths[0]}"].model.spec(8192), device="meta")
    (tmp_path / "texts").mkdir()
    for i in range(8):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"{i} and then {i + 1}, " * 20)
    build([str(tmp_path / "texts")], tmp_path / "data", BuildOptions(valid=0.3), progress=False)
    tiny = dataclasses.replace(
        books.SIZES["gpu"], d_model=16, num_heads=2, window=5, tokens=64, lengths=(16, 32), steps=(2, 1)
    )
    for run, asked in books.settings(tmp_path / "data", tiny, name, tmp_path).items():
        train_run(tmp_path / run, asked, progress=False)
        books.measure(tmp_path / run, tmp_path / "data", asked.data.length, "cpu")
        assert list(books.curve(tmp_path / run)) == [0, 1, 2, 4, 8, 16, 32][: asked.data.length.bit_length() + 1]


def test_what_counts_against_books():
    books, twin = load("books"), {0: 4.0, 128: 4.1, 512: 3.9}
    assert books.verdict({0: 4.07, 128: 4.1, 512: 3.9}, twin, 1024) == []
    assert len(books.verdict({0: 4.09, 128: 4.0, 512: 4.1}, twin, 1024)) == 2
