"""What commands show: tables on standard output, progress with an ETA on standard error. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

WIDTH = 140


def console() -> Console:
    """Standard output, wide where it is no terminal, so that tables in files and pipes are whole."""
    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = WIDTH
    return out


@contextlib.contextmanager
def progress_bar(total: int, *, done: int = 0, show: bool = True, label: str) -> Iterator[Callable[..., None]]:
    """Yields a function of (steps done, note)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(label, total=total, completed=done, note="")
        yield lambda step, note="": bar.update(task, completed=step, note=note)
