"""Suites of tasks by the names that users type. No torch: what a suite runs on is imported when it runs.

A suite is a frozen dataclass of its options, each of them a flag of `plait eval`, with a method `run`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from plait import records
from plait.records import Record


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to evaluate."""

    name: str
    """as the user calls it"""
    path: Path
    """its directory"""
    device: str = "cpu"
    dtype: Any = None
    """a torch.dtype; None: that of the file"""
    backend: str = "torch"


@dataclass
class Outcome:
    """What a suite found out about one model."""

    records: list[Record] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    """one row a sample and model, plain JSON"""
    notes: list[str] = field(default_factory=list)
    """lines for the reader: what was cut, what is missing"""


class Suite(Protocol):
    def run(self, subjects: Sequence[Subject]) -> Iterator[Outcome]:
        """One outcome a model, as they are done. ValueError in a line where options or a model cannot be used."""
        ...


@dataclass(frozen=True, kw_only=True)
class LmEval:
    """Tasks of lm-evaluation-harness, and the papers' averages over them.

    Args:
        tasks: tasks, groups or tags of the harness, or of --include-path, as arc_easy,piqa
        group: averages of the papers, as 003/CSR-7,004/Easy-6; each runs its tasks within the paper's limits
        include_path: folder of task files (YAML), which go before the harness's own
        num_fewshot: examples in the prompt (default: each task's own)
        limit: only the first documents of every task, for trying things out
        batch_size: rows at a time (default: as many as fit)
        max_length: tokens of prompt and answer (default: the group's, or the model's context)
        allow_code: run code that the model writes, which tasks as mbpp need: true or false
    """

    tasks: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int | None = None
    max_length: int | None = None
    allow_code: bool = False

    def __post_init__(self):
        from plait.evals.groupings import grouping

        for name in self.group:
            grouping(name)
        if not self.tasks and not self.group:
            raise ValueError("tasks: none given; name some with --tasks or an average with --group")
        for name in ("limit", "batch_size", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}; it must be at least 1")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"num_fewshot = {self.num_fewshot}; it must be at least 0")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ValueError(f"include_path: {self.include_path}: no such folder")

    def run(self, subjects: Sequence[Subject]) -> Iterator[Outcome]:
        from plait.evals.harness import run_harness

        return run_harness(self, subjects)


SUITES: Mapping[str, type[Any]] = {"lm-eval": LmEval}


def write_outcome(outcome: Outcome, directory: Path) -> None:
    """Add to the directory's records.jsonl and samples.jsonl."""
    directory.mkdir(parents=True, exist_ok=True)
    records.append(directory / "records.jsonl", outcome.records)
    with (directory / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in outcome.samples)


def show_outcomes(outcomes: Iterable[Outcome]) -> None:
    """A table, one line a number, and the notes below it."""
    from rich.table import Table

    from plait.terminal import console

    rows = [record for outcome in outcomes for record in outcome.records]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("model", "task", "shots", "metric", "value", "", "n"):
        table.add_column(name, justify="left" if name in ("model", "task", "metric") else "right")
    for record in rows:
        axes, values = record.axes, record.values
        task = axes.get("group") if record.name == "average" else axes.get("task")
        for metric, value in values.items():
            if metric.endswith("_stderr") or metric in ("n", "cut", "missing"):
                continue
            error, filtered = values.get(f"{metric}_stderr"), axes.get("filter")
            table.add_row(
                str(axes["model"]),
                f"  {task}" if "part_of" in axes else str(task),
                str(axes.get("num_fewshot", "")),
                f"{metric} ({filtered})" if filtered else metric,
                "" if value is None else f"{value:.4f}",
                "" if error is None else f"± {error:.4f}",
                f"{values.get('n') or 0:.0f}",
            )
    out = console()
    out.print(table)
    for note in dict.fromkeys(note for outcome in outcomes for note in outcome.notes):
        out.print(note)
