"""Run directories -> charts and one HTML page that needs nothing else. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.files import write_text
from plait.report.page import render
from plait.report.runs import load_runs


def build_report(runs: Sequence[Path], output: Path) -> None:
    """Write one self-contained HTML page about run directories, compared side by side in the order given.

    The page needs no network and no other file. ValueError where a directory is not a run.
    """
    page = render(load_runs(runs))
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, page)
