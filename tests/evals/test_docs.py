"""The suite of docs/evals.md, run as it stands there."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

from evals.tiny import tiny_model

from plait import save
from plait.evals.results import read_rows
from plait.evals.suites import SUITES

TEXT = (Path(__file__).parents[2] / "docs" / "evals.md").read_text("utf-8")


def test_the_example_is_a_suite(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    save(tiny_model("nope gdn", vocab_size=256, context=None), tmp_path / "model")
    monkeypatch.setattr("plait.evals.suites.SUITES", dict(SUITES))
    command = ["eval", str(tmp_path / "model"), "--suite", "first-word", "--lengths", "64,80", "--samples", "3"]
    monkeypatch.setattr(sys, "argv", ["plait", *command, "--device", "cpu", "--out", str(tmp_path / "out")])
    (tmp_path / "first_word.py").write_text(code)
    runpy.run_path(str(tmp_path / "first_word.py"), run_name="__main__")
    assert "first_word" in capsys.readouterr().out
    rows, _ = read_rows(tmp_path / "out" / "samples.jsonl")
    assert len(rows) == 6 and all(55 < row["prompt_tokens"] + 4 <= row["length"] for row in rows)


def test_every_suite_is_told_of():
    assert set(re.findall(r"`([\w-]+)`", "\n".join(re.findall(r"^\| (`.+?) \|", TEXT, re.MULTILINE)))) >= set(SUITES)
