"""A run directory as a report sees it, and the series that its records hold. No torch."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from plait.config import family, select_layers
from plait.files import read_json
from plait.records import Record, read
from plait.spec import Spec
from plait.train.config import Freeze


class Point(NamedTuple):
    step: int
    value: float | None
    """None: not finite"""


Series = list[Point]


class End(NamedTuple):
    """The last finite point of a series."""

    step: int
    value: float


class Condition(NamedTuple):
    """What a retrieval measurement was made on."""

    task: str | None
    gap: int | None
    pairs: int | None = None


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """Layers that took no part in updates start + 1 to stop (None: to the end)."""

    layers: tuple[int, ...]
    name: str
    """their families; as the settings say it where there are many"""
    scope: str
    start: int
    stop: int | None

    @property
    def updates(self) -> str:
        if self.stop is None:
            return f"from update {self.start + 1:,} on"
        return f"updates {self.start + 1:,} to {self.stop:,}"


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    spec: Spec
    config: Mapping[str, Any]
    """empty where config.json is absent"""
    records: tuple[Record, ...]
    freezes: tuple[Frozen, ...] = ()
    checkpoints: tuple[int, ...] = ()
    """steps"""

    @functools.cached_property
    def _index(self) -> dict[tuple[str, str], list[Record]]:
        index: dict[tuple[str, str], list[Record]] = {}
        for record in self.records:
            index.setdefault((record.kind, record.name), []).append(record)
        return index

    def rows(self, kind: str, name: str) -> list[Record]:
        return self._index.get((kind, name), [])

    @functools.cached_property
    def only_task(self) -> str | None:
        """The task, where all records that name one name the same."""
        tasks = {record.axes["task"] for record in self.records if record.axes.get("task")}
        return next(iter(tasks)) if len(tasks) == 1 else None

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(family(layer.mixer) for layer in self.spec.layers))

    @functools.cached_property
    def last_step(self) -> int:
        """The last update that a record names; without records the number that the settings plan, or 0."""
        steps = [record.step for record in self.records if record.step is not None]
        planned = self.config.get("steps")
        return max(steps) if steps else planned if isinstance(planned, int) else 0

    @property
    def tokens(self) -> int | None:
        return max((record.tokens for record in self.records if record.tokens is not None), default=None)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Read run directories; runs of one name are told apart by their parents'."""
    if not paths:
        raise ValueError("report: no run directory is given; name at least one, as runs/NAME")
    resolved = [Path(path).resolve() for path in paths]
    clashes = Counter(path.name for path in resolved)
    names = [path.name if clashes[path.name] == 1 else f"{path.parent.name}/{path.name}" for path in resolved]
    return [load_run(Path(path), name) for path, name in zip(paths, names, strict=True)]


def load_run(path: Path, name: str | None = None) -> Run:
    """Read one run directory: spec.json and records.jsonl must be there, config.json and checkpoints may be."""
    if not path.is_dir():
        raise ValueError(f"run {path}: no such directory; a run is a directory with spec.json and records.jsonl")
    for file in ("spec.json", "records.jsonl"):
        if not (path / file).is_file():
            raise ValueError(f"run {path}: {file} is missing; a run is a directory with spec.json and records.jsonl")
    spec = Spec.load(path / "spec.json")
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    if not isinstance(config, dict):
        raise ValueError(f"{path / 'config.json'}: {type(config).__name__}; it must be a JSON object")
    steps = [re.fullmatch(r"step-(\d+)", entry.name) for entry in (path / "checkpoints").glob("step-*")]
    return Run(
        name=name or path.resolve().name,
        spec=spec,
        config=config,
        records=tuple(read(path / "records.jsonl")),
        freezes=_frozen(config.get("freeze"), spec, path / "config.json"),
        checkpoints=tuple(sorted(int(step[1]) for step in steps if step)),
    )


def _frozen(entries: Any, spec: Spec, path: Path) -> tuple[Frozen, ...]:
    """From the settings: `recurrent:0-250`, or the same as an object with families, scope, start and stop."""
    entries = entries if isinstance(entries, list) else [entries] if entries else []
    found = []
    for i, entry in enumerate(entries):
        try:
            told = Freeze.parse(entry) if isinstance(entry, str) else Freeze(**entry)
            layers = select_layers(spec.layers, told.families)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: freeze[{i}]: {error}") from None
        families = list(dict.fromkeys(family(spec.layers[layer].mixer) for layer in layers))
        name = ", ".join(families if len(families) < 3 else told.families)
        found.append(Frozen(layers=layers, name=name, scope=told.scope, start=told.start, stop=told.stop))
    return tuple(found)


def training_loss(run: Run) -> Series:
    return _series(run.rows("train", "loss"), "loss")


def held_out_loss(run: Run) -> Series:
    """Of runs on text; those on a task have their loss beside the accuracy."""
    return _series(run.rows("eval", "loss"), "loss")


def held_out_accuracy(run: Run) -> dict[Condition, Series]:
    return _by_condition(run, "eval", "accuracy", "accuracy")


def training_accuracy(run: Run) -> dict[Condition, Series]:
    """On training batches."""
    return _by_condition(run, "train", "gap_loss", "accuracy")


def layer_scores(run: Run) -> dict[Condition, dict[int, Series]]:
    """Layer retrieval scores: condition -> layer -> series."""
    rows = [row for row in run.rows("probe", "retrieval_score") if row.axes.get("layer") is not None]
    return {
        condition: dict(sorted(_scores(group, "layer").items())) for condition, group in _conditions(run, rows).items()
    }


def family_scores(run: Run) -> dict[Condition, dict[str, Series]]:
    """The mean over each family's layers: as recorded, or taken here where only layers were."""
    rows = [row for row in run.rows("probe", "retrieval_score") if row.axes.get("reduce") == "mean"]
    means = {condition: _scores(group, "family") for condition, group in _conditions(run, rows).items()}
    for condition, layers in layer_scores(run).items():
        if condition not in means:
            names = {layer: layer_family(run, layer) for layer in layers}
            means[condition] = {
                name: _mean([layers[layer] for layer in layers if names[layer] == name])
                for name in dict.fromkeys(names.values())
            }
    return {condition: means[condition] for condition in sorted(means, key=_order)}


def layer_family(run: Run, layer: int) -> str:
    return family(run.spec.layers[layer].mixer) if 0 <= layer < run.spec.num_layers else "unknown"


def condition_labels(conditions: Iterable[Condition]) -> dict[Condition, str]:
    """Short names in ascending order, of the task only where there are several."""
    ordered = sorted(set(conditions), key=_order)
    several = len({condition.task for condition in ordered}) > 1

    def label(condition: Condition) -> str:
        gap = f"gap {condition.gap:,}" if condition.gap is not None else ""
        pairs = f"{condition.pairs:,} pairs" if condition.pairs is not None else ""
        task = condition.task if several or not (gap or pairs) else ""
        return ", ".join(word for word in (task, gap, pairs) if word) or "all examples"

    return {condition: label(condition) for condition in ordered}


def end(series: Series) -> End | None:
    return next((End(p.step, p.value) for p in reversed(series) if p.value is not None), None)


def _series(rows: Iterable[Record], value: str) -> Series:
    """One point a step, in order; of two rows of one step the later counts."""
    points: dict[int, float | None] = {}
    for row in rows:
        if row.step is not None and value in row.values:
            number = row.values[value]
            points[row.step] = float(number) if number is not None and math.isfinite(number) else None
    return [Point(step, points[step]) for step in sorted(points)]


def _scores(rows: Iterable[Record], axis: str) -> dict[Any, Series]:
    groups: dict[Any, list[Record]] = {}
    for row in rows:
        groups.setdefault(row.axes.get(axis), []).append(row)
    return {key: _series(group, "score") for key, group in groups.items()}


def _by_condition(run: Run, kind: str, name: str, value: str) -> dict[Condition, Series]:
    groups = _conditions(run, run.rows(kind, name))
    series = {condition: _series(group, value) for condition, group in groups.items()}
    return {condition: points for condition, points in series.items() if points}


def _conditions(run: Run, rows: Iterable[Record]) -> dict[Condition, list[Record]]:
    """Rows by what they were measured on; where a run has one task, rows that name none are of it."""
    groups: dict[Condition, list[Record]] = {}
    for row in rows:
        place = Condition(row.axes.get("task") or run.only_task, row.axes.get("gap"), row.axes.get("pairs"))
        groups.setdefault(place, []).append(row)
    return {condition: groups[condition] for condition in sorted(groups, key=_order)}


def _order(condition: Condition) -> tuple[str, int, int]:
    gap, pairs = (-1 if size is None else size for size in (condition.gap, condition.pairs))
    return condition.task or "", gap, pairs


def _mean(group: list[Series]) -> Series:
    values: dict[int, list[float]] = {}
    for series in group:
        for point in series:
            values.setdefault(point.step, []).extend([] if point.value is None else [point.value])
    return [Point(step, sum(v) / len(v) if v else None) for step, v in sorted(values.items())]
