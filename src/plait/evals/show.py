"""Results as tables: of one evaluation, and of folders of results side by side. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait import records
from plait.evals.results import (
    Row,
    cells,
    compare,
    compare_losses,
    current,
    latest,
    papers,
    read_rows,
    scores,
    summarize,
)
from plait.evals.stats import Estimate, Paired, mean_of
from plait.evals.suites import Outcome
from plait.records import Record
from plait.terminal import console

BESIDE = ("_stderr", "_low", "_high")
"""ends of names of values that say how certain another is"""
QUIET = ("n", "cut", "missing", "tasks", "state_bytes", "documents", "dropped", "keys", "words", "bytes")
"""values that have no line of their own"""


@dataclass(frozen=True)
class Shown:
    """What a folder has of one model and suite."""

    label: str
    suite: str
    rows: list[Row]
    records: list[Record]


def load_results(folders: Sequence[str | Path]) -> tuple[list[Shown], list[str]]:
    """By folder, model and suite; and what was left out. ValueError where a folder holds no results."""
    found, problems = [], []
    for folder in map(Path, folders):
        if not (folder / "samples.jsonl").exists() and not (folder / "records.jsonl").exists():
            raise ValueError(f"{folder}: no results; plait eval --out writes records.jsonl and samples.jsonl there")
        rows, bad = read_rows(folder / "samples.jsonl")
        problems += bad
        kept_rows = current(rows)
        if len(kept_rows) < len(rows):
            problems.append(
                f"{folder}: {len(rows) - len(kept_rows)} samples left out: of other weights or draws than the last"
            )
        kept = [record for record in records.read(folder / "records.jsonl", problems) if record.kind == "eval"]
        by_place: dict[tuple[str, str], tuple[list[Row], list[Record]]] = {}
        for row in latest(kept_rows):
            by_place.setdefault((str(row["model"]), str(row.get("suite", "lm-eval"))), ([], []))[0].append(row)
        for record in _latest(kept):
            if "suite" in record.axes:
                place = (str(record.axes["model"]), str(record.axes["suite"]))
                by_place.setdefault(place, ([], []))[1].append(record)
        several = len(folders) > 1
        for (model, suite), (own, measured) in by_place.items():
            found.append(Shown(f"{folder}: {model}" if several else model, suite, own, measured))
    if not found:
        raise ValueError(f"{', '.join(map(str, folders))}: no results of plait eval in there")
    return found, problems


def _latest(found: Iterable[Record]) -> list[Record]:
    return list({(record.name, *sorted(map(str, record.axes.items()))): record for record in found}.values())


def show_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Tables of each model, and the notes below them."""
    found = [record for outcome in outcomes for record in outcome.records]
    others = [record for record in found if not _is_score(record)]
    if others:
        _show_records(others)
    for label in dict.fromkeys(str(record.axes["model"]) for record in found if _is_score(record)):
        _show_scores(label, [record for record in found if _is_score(record) and record.axes["model"] == label])
    for note in dict.fromkeys(note for outcome in outcomes for note in outcome.notes):
        console().print(note)


def show_folders(folders: Sequence[str | Path]) -> list[str]:
    """Tables of all results and, of models on one suite, differences from the first. Lines on what was left out."""
    found, problems = load_results(folders)
    out = console()
    for shown in found:
        if cells(shown.rows):
            sizes = {r.axes["length"]: r.values["state_bytes"] for r in shown.records if "state_bytes" in r.values}
            _show_scores(f"{shown.label}, {shown.suite}", summarize(shown.rows, None, {}, sizes.get))
        elif shown.records:
            out.print(f"{shown.label}, {shown.suite}")
            _show_records(shown.records)
    for label in dict.fromkeys(shown.label for shown in found):  # some averages are over several suites
        own = [shown for shown in found if shown.label == label]
        averages = papers(cells(row for shown in own for row in shown.rows)) if len(own) > 1 else []
        known = {name for shown in own for name, _, _ in papers(cells(shown.rows))}
        for name, about, estimate in averages:
            if name not in known:
                out.print(f"{label}: {name} {estimate.text} ({about})")
    scored = sorted((s for s in found if s.suite != "lm-eval"), key=lambda s: s.suite)
    for suite, group in itertools.groupby(scored, key=lambda s: s.suite):
        first, *others = group
        for other in others:
            _show_pair(suite, first, other)
    return problems


def _is_score(record: Record) -> bool:
    """Of a suite whose samples have scores of 0 to 100 with intervals."""
    return record.name in ("score", "average") and record.axes.get("suite") != "lm-eval"


def results_json(folders: Sequence[str | Path]) -> list[dict[str, Any]]:
    """What has been found; lines on what was left out go to standard error."""
    found, problems = load_results(folders)
    for problem in problems:
        print(problem, file=sys.stderr)
    rows = []
    for shown in found:
        table = [
            {"task": task, "length": length} | mean_of(scores(group)).__dict__
            for (length, task), group in cells(shown.rows).items()
        ]
        measured = [dataclasses.asdict(record) for record in shown.records]
        rows.append({"model": shown.label, "suite": shown.suite, "scores": table, "records": measured})
    return rows


def _show_scores(title: str, found: Sequence[Record]) -> None:
    """Tasks down, lengths across, the mean and its interval in each cell; averages of papers below."""
    grid = {(r.axes["task"], r.axes["length"]): r for r in found if r.name == "score"}
    means = {r.axes["length"]: r for r in found if r.name == "average" and "length" in r.axes}
    lengths = sorted({length for _, length in grid})
    tasks = list(dict.fromkeys(task for task, _ in grid))
    table = _table("task", *(f"{length:,}" for length in lengths))
    for task in tasks:
        table.add_row(task, *(_cell(grid.get((task, length))) for length in lengths))
    if means:
        table.add_row("mean", *(_cell(means.get(length), of=len(tasks)) for length in lengths))
    sizes = {r.axes["length"]: r.values["state_bytes"] for r in found if "state_bytes" in r.values}
    if sizes:
        table.add_row("state, bytes", *(f"{sizes.get(length) or 0:,.0f}" for length in lengths))
    out = console()
    out.print(title, table, sep="\n")
    for record in found:
        if record.name == "average" and "length" not in record.axes:
            out.print(f"{record.axes['group']}: {_cell(record)} ({record.axes['about']})")


def _cell(record: Record | None, of: int = 0) -> str:
    """A mean of fewer tasks than the others says of how many."""
    if record is None:
        return ""
    values = record.values
    text = Estimate(values["score"] or 0.0, values["score_low"], values["score_high"], 0).text
    return text if values.get("tasks", of) == of else f"{text} of {values['tasks']:.0f}"


def _show_pair(suite: str, first: Shown, other: Shown) -> None:
    out = console()
    title = f"{suite}: {other.label} minus {first.label}, same samples"
    found, left = compare(other.rows, first.rows)
    table = _table("task", "length", "difference", "better", "worse", "n")
    for task, length, pair in found:
        _add_pair(table, task, f"{length:,}" if task != "all" else "", pair)
    losses = compare_losses(other.rows, first.rows)
    if losses is not None:
        gap = losses.difference
        interval = "" if gap.low is None else f" [{gap.low:+.4f}, {gap.high:+.4f}]"
        table.add_row(
            "loss (nats)", "", f"{gap.value:+.4f}{interval}", str(losses.worse), str(losses.better), str(gap.n)
        )
    if table.row_count:
        out.print(title, table, sep="\n")
    else:
        out.print(f"{title}: they have none (models with different tokenizers get different prompts)")
    if left:
        out.print(f"{left} samples are of one of the two alone, or have other prompts")


def _add_pair(table: Any, task: str, length: str, pair: Paired) -> None:
    gap = pair.difference
    interval = "" if gap.low is None else f" [{gap.low:+.1f}, {gap.high:+.1f}]"
    table.add_row(task, length, f"{gap.value:+.1f}{interval}", str(pair.better), str(pair.worse), str(gap.n))


def _table(first: str, *others: str) -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _show_records(found: Sequence[Record]) -> None:
    """One line a number."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    shots = any("num_fewshot" in record.axes for record in found)
    names = ("model", "task", *(("shots",) if shots else ()), "metric", "value", "", "n")
    for name in names:
        table.add_column(name, justify="left" if name in ("model", "task", "metric") else "right")
    for record in found:
        axes, values = record.axes, record.values
        for metric, value in values.items():
            if metric.endswith(BESIDE) or metric in QUIET:
                continue
            filtered = axes.get("filter")
            table.add_row(
                str(axes["model"]),
                _place(record),
                *((str(axes.get("num_fewshot", "")),) if shots else ()),
                f"{metric} ({filtered})" if filtered else metric,
                "" if value is None else f"{value:.4f}",
                _beside(metric, values),
                f"{values.get('n') or values.get('keys') or 0:.0f}",
            )
    console().print(table)


def _place(record: Record) -> str:
    """What a number was measured on."""
    axes = record.axes
    task = axes.get("group") if record.name == "average" else axes.get("task", axes["suite"])
    if record.name == "position_loss":
        task = f"after {axes['position']:,} tokens"
    return f"  {task}" if "part_of" in axes else str(task)


def _beside(metric: str, values: Any) -> str:
    if (error := values.get(f"{metric}_stderr")) is not None:
        return f"± {error:.4f}"
    low, high = values.get(f"{metric}_low"), values.get(f"{metric}_high")
    return "" if low is None or high is None else f"[{low:.2f}, {high:.2f}]"
