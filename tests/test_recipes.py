"""Every recipe: its models build, and each of its runs takes two tiny steps and is measured."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from plait.model.lm import LM
from plait.runs import last_measurements, train_run

RECIPES = Path(__file__).parents[1] / "recipes"


def load(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.py")))
def test_runs(name: str, tmp_path: Path):
    recipe = load(name)
    assert "Claim" in recipe.__doc__ and "Counts against it" in recipe.__doc__
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
