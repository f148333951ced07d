"""Records: typed result rows with provenance, one JSON object a line. All that reports and fits read. No torch."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from plait.files import write_text

Kind = Literal["train", "eval", "probe", "bench"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measurement.

    name says what was measured (`loss`, `retrieval_score`); values are its numbers; axes say where in the space of
    measurements it sits (layer, head, mixer, task, gap, length, position, seed, ...).
    """

    kind: Kind
    name: str
    step: int | None = None
    tokens: int | None = None
    """tokens trained on so far"""
    values: Mapping[str, float | None]
    """None: not finite, once it has been through a file"""
    axes: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.kind not in get_args(Kind):
            raise ValueError(f"record: kind = {self.kind!r}; it must be one of {', '.join(get_args(Kind))}")
        if not all(isinstance(part, Mapping) for part in (self.values, self.axes, self.provenance)):
            raise ValueError(f"record {self.name}: values, axes and provenance must be mappings")
        for key, value in self.values.items():
            if not isinstance(value, int | float | None):
                kind = type(value).__name__
                raise ValueError(f"record {self.name}: {key} is of type {kind}; a value must be a plain number")


def provenance(*, spec_hash: str | None, device: str) -> dict[str, Any]:
    """Where a number comes from: spec, versions, device, git revision, time (UTC)."""
    return {
        "spec": spec_hash,
        "versions": _versions(),
        "device": device,
        "git": _git_revision(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("plait", "torch", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return versions


@functools.cache
def _git_revision() -> str | None:
    """Of the checkout this plait runs from; None for an installed package, also in an environment inside a checkout."""

    def git(*command: str) -> str:
        whole = ["git", "-C", str(Path(__file__).parent), *command]
        return subprocess.run(whole, capture_output=True, text=True, check=True, timeout=5).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.SubprocessError):
        return None


def append(path: Path, records: Iterable[Record]) -> None:
    """Add rows to the end of a file. A last line that a crash cut off, which `read` leaves out, is removed."""
    lines = "".join(map(_line, records))
    with path.open("a+b") as file:
        _mend(file)
        file.write(lines.encode())


def _mend(file: BinaryIO) -> None:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(end - 1, 0))
    if file.read(1) in (b"", b"\n"):
        return
    file.seek(0)
    data = file.read()
    start = data.rfind(b"\n") + 1
    try:
        Record(**json.loads(data[start:]))
        file.write(b"\n")
    except (TypeError, ValueError):
        file.truncate(start)


def read(path: Path, left_out: list[str] | None = None) -> list[Record]:
    """The rows of a file. A last line cut off by a crash is left out; any other bad line is an error, or told in
    `left_out` if given."""
    rows: list[Record] = []
    lines = path.read_text("utf-8", "backslashreplace").split("\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            rows.append(Record(**json.loads(line)))
        except (TypeError, ValueError) as error:
            if number == len(lines):  # no newline behind it: the write did not finish
                break
            problem = f"{path}, line {number}: not a record ({error})"
            if left_out is None:
                raise ValueError(problem) from None
            left_out.append(f"{problem}; left out")
    return rows


def truncate(path: Path, step: int) -> None:
    """Drop the rows after a training step, so that a resumed run writes each of them once."""
    rows = [record for record in read(path) if record.step is None or record.step <= step]
    write_text(path, "".join(map(_line, rows)))


def _line(record: Record) -> str:
    """JSON has no NaN or infinity: they become null."""
    row = asdict(record)
    row["values"] = {k: None if v is None or not math.isfinite(v) else v for k, v in record.values.items()}
    return json.dumps(row, allow_nan=False) + "\n"
