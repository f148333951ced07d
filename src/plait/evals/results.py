"""Rows of samples read back, and what they come to: averages with intervals, groupings, pairs. No torch.

A row is a JSON object of one sample and model: model, suite, task, length, index, prompt (a hash) and score, 0 to 100;
or loss and tokens instead of a score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.evals.ruler.averages import LONG_GROUPINGS, long_averages
from plait.evals.stats import Estimate, Paired, mean_of, paired
from plait.files import write_text
from plait.records import Record

Row = dict[str, Any]
NEEDED = ("model", "suite", "task", "index")


def read_rows(path: Path, *, mend: bool = False) -> tuple[list[Row], list[str]]:
    """Whole rows of a file, and a line about each that is not (a crash, a full disk). mend: take those out of it."""
    rows, problems, kept = [], [], []
    data = path.read_text("utf-8", "replace") if path.exists() else ""
    for number, line in enumerate(data.split("\n"), 1):
        if not line:
            continue
        try:
            row = json.loads(line)
            # samples of lm-eval are told by doc and have other fields
            whole = isinstance(row, dict) and ("doc" in row or all(name in row for name in NEEDED))
        except ValueError:
            whole = False
        if whole:
            rows.append(row)
            kept.append(line)
        else:
            problems.append(f"{path}, line {number}: cut off or damaged; left out, the rest is used")
    if mend and (problems or not data.endswith("\n")) and data:
        write_text(path, "".join(f"{line}\n" for line in kept))
    return rows, problems


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of rows of one sample and model the last."""
    names = ("model", "suite", "task", "length", "stride", "pairs", "gap", "drawn", "index", "prompt")
    return list({tuple(row.get(name) for name in names): row for row in rows}.values())


def current(rows: Sequence[Row]) -> list[Row]:
    """An average is of one model, on one set of samples. Of each model and suite the rows of the weights and dtype that
    its last row is of; of these, for each length, those drawn as the last one (seed, texts, settings)."""

    def last(rows: Sequence[Row], names: Sequence[str], what: str) -> list[Row]:
        places = [tuple(row.get(name) for name in names) for row in rows]
        found = {place: row.get(what) for place, row in zip(places, rows, strict=True)}
        return [row for place, row in zip(places, rows, strict=True) if row.get(what) == found[place]]

    return last(last(rows, ("model", "suite"), "run"), ("model", "suite", "length", "stride"), "drawn")


Cells = dict[tuple[int, str], list[Row]]


def cells(rows: Iterable[Row]) -> Cells:
    """Rows by length and task, each in the order of its samples."""
    found: Cells = {}
    for row in rows:
        if "score" in row and "length" in row:
            found.setdefault((row["length"], row["task"]), []).append(row)
    by_length = sorted(found, key=lambda key: key[0])
    return {key: sorted(found[key], key=lambda row: row["index"]) for key in by_length}


def scores(rows: Sequence[Row]) -> list[float]:
    return [float(row["score"]) for row in rows]


def values_of(estimate: Estimate) -> dict[str, float | None]:
    return {
        "score": estimate.value,
        "score_low": estimate.low,
        "score_high": estimate.high,
        "n": estimate.n,
    }


def summarize(
    rows: Sequence[Row],
    step: int | None,
    origin: Mapping[str, Any],
    state_bytes: Callable[[int], float | None] = lambda length: None,
) -> list[Record]:
    """A record for every task and length, and one for the mean over the tasks of each length."""
    found = []
    by_cell = cells(rows)

    def add(name: str, values: dict, axes: dict, length: int) -> None:
        size = state_bytes(length)
        values |= {} if size is None else {"state_bytes": size}
        axes = {"suite": rows[0]["suite"], "model": rows[0]["model"], **axes, "length": length}
        found.append(Record(kind="eval", name=name, step=step, values=values, axes=axes, provenance=origin))

    for (length, task), group in by_cell.items():
        add("score", values_of(mean_of(scores(group))), {"task": task, **extra_axes(group)}, length)
    for length in dict.fromkeys(length for length, _ in by_cell):
        groups = [scores(group) for (at, _), group in by_cell.items() if at == length]
        if len(groups) > 1:
            add("average", values_of(mean_of(*groups)) | {"tasks": len(groups)}, {"group": "all tasks"}, length)
    for group, about, estimate in papers(by_cell):
        axes = {"suite": rows[0]["suite"], "model": rows[0]["model"], "group": group, "about": about}
        values = values_of(estimate)
        found.append(Record(kind="eval", name="average", step=step, values=values, axes=axes, provenance=origin))
    return found


def papers(by_cell: Cells) -> list[tuple[str, str, Estimate]]:
    """The papers' averages over RULER and BABILong of which nothing is missing: name, what it is over, value."""
    means = {(task, length): mean_of(scores(rows)).value for (length, task), rows in by_cell.items()}
    found = []
    for average in long_averages(means):
        if average.missing:
            continue
        columns = LONG_GROUPINGS[average.name].columns
        weights = [1 / len(columns) / len(column) for column in columns for _ in column]
        groups = [scores(by_cell[length, task]) for task, length in average.found]
        found.append((average.name, average.about, mean_of(*groups, weights=weights)))
    return found


def extra_axes(rows: Sequence[Row]) -> dict[str, Any]:
    """What else all of these rows have in common of their place."""
    return {name: rows[0][name] for name in ("pairs", "gap") if name in rows[0]}


def compare(first: Sequence[Row], second: Sequence[Row]) -> tuple[list[tuple[str, int, Paired]], int]:
    """Differences of two models on the samples that both have, by task and length and, where there are several, over
    all; and how many samples only one has, or have other prompts."""
    a, b = cells(first), cells(second)
    found, left, groups = [], 0, ([], [])
    for length, task in [*a, *(key for key in b if key not in a)]:
        x = {(row["index"], row["prompt"]): row for row in a.get((length, task), ())}
        y = {(row["index"], row["prompt"]): row for row in b.get((length, task), ())}
        both = [key for key in x if key in y]
        left += len(x) + len(y) - 2 * len(both)
        if both:
            pair = [scores([rows[key] for key in both]) for rows in (x, y)]
            found.append((task, length, paired([pair[0]], [pair[1]])))
            groups[0].append(pair[0])
            groups[1].append(pair[1])
    if len(found) > 1:
        found.append(("all", 0, paired(*groups)))
    return found, left


def compare_losses(first: Sequence[Row], second: Sequence[Row]) -> Paired | None:
    """Differences of the mean loss in nats of documents that both models read in as many tokens, or None; below 0 the
    first is better."""
    names = ("suite", "length", "stride", "drawn", "index", "prompt", "tokens")
    pairs = [{tuple(r.get(name) for name in names): r for r in rows if r.get("tokens")} for rows in (first, second)]
    both = [key for key in pairs[0] if key in pairs[1]]
    if not both:
        return None
    means = [[rows[key]["loss"] / rows[key]["tokens"] for key in both] for rows in pairs]
    found = paired([means[0]], [means[1]])
    return found if math.isfinite(found.difference.value) else None
