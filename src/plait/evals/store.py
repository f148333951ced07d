"""The rows of samples in a folder of results, where an evaluation that was stopped finds what it has done. No torch.

DIR/samples.jsonl holds a row for each sample and model; processes after the first write samples.rank1.jsonl and so on,
which the first joins to it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plait.evals.ranks import Ranks
from plait.evals.results import Row, read_rows

KEY = ("model", "run", "suite", "drawn", "task", "length", "index", "prompt", "max_new_tokens")
"""what of a row makes it another sample's, or another model's"""


@dataclass
class Store:
    """The rows of a folder of results, or of none."""

    folder: Path | None
    ranks: Ranks
    rows: dict[tuple, Row] = field(default_factory=dict)

    def __post_init__(self):
        if self.folder is None:
            if self.ranks.world > 1:
                raise ValueError("out: none given; several processes (torchrun) need a folder for their samples")
            return
        if self.ranks.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._join()
        self.ranks.meet()
        self._read(report=self.ranks.first)

    @property
    def file(self) -> Path:
        assert self.folder is not None
        return self.folder / ("samples.jsonl" if self.ranks.first else f"samples.rank{self.ranks.rank}.jsonl")

    def __contains__(self, row: Row) -> bool:
        """Is this sample done? The row need not have its outcome."""
        return key_of(row) in self.rows

    def whole(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of these samples, which are all there, with their outcomes."""
        return [self.rows[key_of(row)] for row in rows]

    def loose(self, rows: Sequence[Row]) -> list[Row]:
        """Those of them that are in no folder."""
        return list(rows) if self.folder is None else []

    def add(self, rows: Sequence[Row]) -> None:
        self.rows |= {key_of(row): row for row in rows}
        if self.folder is not None:
            with self.file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def gather(self) -> None:
        """All processes' rows, in the first."""
        if self.folder is not None and self.ranks.world > 1:
            self.ranks.meet()
            if self.ranks.first:
                self._join()
                self._read(report=False)
            self.ranks.meet()

    def _join(self) -> None:
        """What other processes wrote, also those of a run that was interrupted, to the end of samples.jsonl."""
        assert self.folder is not None
        for part in sorted(self.folder.glob("samples.rank*.jsonl")):
            rows, _ = read_rows(part)
            read_rows(self.folder / "samples.jsonl", mend=True)
            with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            part.unlink()

    def _read(self, *, report: bool) -> None:
        assert self.folder is not None
        rows, problems = read_rows(self.folder / "samples.jsonl", mend=self.ranks.first)
        self.rows = {key_of(row): row for row in rows if "run" in row}
        for line in problems if report else ():
            print(line, file=sys.stderr)


def key_of(row: Row) -> tuple:
    return tuple(row.get(name) for name in KEY)
