"""Every block of the README does what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from plait.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
SHOWN = [body for language, body in BLOCKS if not language and body.startswith("$ ")]
PYTHON = [body for language, body in BLOCKS if language == "python"]
COMMANDS = [line for language, body in BLOCKS if language == "sh" for line in body.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("block", SHOWN, ids=[block.splitlines()[0][2:50] for block in SHOWN])
def test_commands_print_what_is_shown(block, capsys):
    command, *expected = block.splitlines()
    main(shlex.split(command.removeprefix("$ plait ")))
    captured = capsys.readouterr()
    printed = [line.rstrip() for line in (captured.out + captured.err).splitlines()]
    assert printed == [line.rstrip() for line in expected]


@pytest.mark.parametrize("block", PYTHON)
def test_python_blocks_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(block, {})


def test_the_commands_work_one_after_another(tmp_path, monkeypatch, capsys):
    """In order, in one folder, with fewer steps of a smaller model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 400)
    smaller = ["--steps", "4", "--d-model", "16", "--batch-size", "2", "--probe-pairs", "2", "--eval-rows", "2"]
    assert COMMANDS
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        assert words[0] == "plait"
        extra = smaller if words[1] == "train" else ["--pairs", "2"] if words[1] == "probe" else []
        assert main([*words[1:], *extra]) == 0, capsys.readouterr().err
    assert (tmp_path / "report.html").exists()
