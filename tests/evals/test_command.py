"""`plait eval` where lm-evaluation-harness is not installed, and mistakes that need no harness."""

from __future__ import annotations

import sys

import pytest

from plait.cli import main
from plait.evals.suites import SUITES


@pytest.fixture
def without_harness(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "plait.evals.lm_eval", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # importing it raises ImportError


def model(tmp_path):
    from evals.tiny import save_tiny

    return str(save_tiny(tmp_path / "model"))


def test_without_the_extra(without_harness, tmp_path, capsys):
    assert main(["eval", model(tmp_path), "--tasks", "arc_easy"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plait eval: suite lm-eval: it needs lm-evaluation-harness")
    assert "pip install 'plait[eval]'" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "tasks: none given; name some with --tasks or an average with --group"),
        (["--suite", "lm_eval"], "suite = 'lm_eval'; nearest: lm-eval; allowed: lm-eval, ppl, "),
        (["--group", "003/CSR"], "group = '003/CSR'; nearest: 003/CSR-7"),
        (["--tasks", "x", "--limit", "0"], "limit = 0; it must be at least 1"),
        (["--tasks", "x", "--num-fewshot", "-1"], "num_fewshot = -1; it must be at least 0"),
        (["--tasks", "x", "--include-path", "no/where"], "include_path: no/where: no such folder"),
        (["--tasks", "x"], "nowhere: no such directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(options, message, capsys):
    assert main(["eval", "nowhere", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"plait eval: {message}")


def test_every_suite_tells_its_options(capsys):
    for name in SUITES:
        assert main(["eval", "--suite", name, "--help"]) == 0
        assert "example: plait eval" in capsys.readouterr().out


def test_opaque_models_and_several_processes(tmp_path, monkeypatch, capsys):
    path = model(tmp_path)
    assert main(["eval", "--tasks", "x"]) == 2
    assert capsys.readouterr().err == "plait eval: models: none given; name some, or --opaque ones\n"
    assert main(["eval", "--opaque", path, "--tasks", "x"]) == 2
    assert "suite lm-eval: it imports its models" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "of nobody"}')
    assert main(["eval", "--opaque", str(other), "--suite", "ppl", "--data", "README.md"]) == 2
    assert f"{other}: transformers cannot load it" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["eval", path, "--tasks", "x"]) == 2
    assert capsys.readouterr().err == "plait eval: suite lm-eval: it runs in one process, not in 2\n"
    for suite in (["ruler", "--lengths", "32"], ["ppl", "--data", "README.md"]):
        assert main(["eval", path, "--suite", *suite]) == 2
        assert "out: none given; several processes (torchrun) need a folder" in capsys.readouterr().err
