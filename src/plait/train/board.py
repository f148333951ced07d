"""TensorBoard beside the records, for who watches runs there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.records import Record


def writer_class() -> type:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("tensorboard = true; it is not installed: pip install 'plait[track]'") from None
    return SummaryWriter


class Board:
    """Scalars in RUN/tensorboard, by the record's kind, its name and axes: `eval/accuracy/gap=64/loss`."""

    def __init__(self, run: Path, step: int):
        # what a resumed run does again hides what was there
        self.writer = writer_class()(str(run / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, rows: Sequence[Record], step: int) -> None:
        for row in rows:
            place = "/".join([row.kind, row.name, *(f"{key}={value}" for key, value in row.axes.items())])
            for key, value in row.values.items():
                if value is not None:
                    self.writer.add_scalar(f"{place}/{key}", value, step)
        self.writer.flush()
