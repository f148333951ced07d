"""What a report says in words. Every number is one of the records or a mean of them. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from plait.cost import total_params
from plait.report import format as fmt
from plait.report import runs as data
from plait.report.markup import esc
from plait.report.runs import Condition, End, Run
from plait.report.strip import layout_text

TAIL = 0.1
"""share of the recorded losses whose mean stands beside the last one"""


def opening(runs: Sequence[Run]) -> str:
    """What the page is about: the models and how long they were trained."""
    specs = list(dict.fromkeys(run.spec for run in runs))
    what = f"{fmt.plural(len(runs), 'run').capitalize()} of {fmt.plural(len(specs), 'model')}"
    if len(specs) == 1:
        spec = specs[0]
        layers = fmt.plural(spec.num_layers, "layer")
        what += f": {layers}, {fmt.count(total_params(spec))} parameters, layout {layout_text(spec)}"
    steps = sorted({run.last_step for run in runs if run.records})
    trained = f", {fmt.listing([f'{step:,}' for step in steps])} updates" if steps and steps[-1] else ""
    return f"{what}{trained}."


def sentences(run: Run) -> str:
    """Loss, held-out accuracy and retrieval at the end of one run; an update is named where it is not the last."""
    if not run.records:
        return "Nothing has been recorded yet."
    return " ".join([_loss(run), _held_out(run), _retrieval(run)])


def _loss(run: Run) -> str:
    series = data.training_loss(run)
    final = data.end(series)
    if final is None:
        return "No finite training loss was recorded." if series else "No training loss was recorded."
    text = f"The training loss ends at {fmt.loss(final.value)}{_when(run, [final])}"
    tail = [point.value for point in series[-math.ceil(TAIL * len(series)) :] if point.value is not None]
    if len(tail) >= 10:
        text += f"; the mean of the last {len(tail)} recorded is {fmt.loss(fmean(tail))}"
    missing = sum(point.value is None for point in series)
    if missing:
        verb = "is" if missing == 1 else "are"
        text += f". {missing:,} of {len(series):,} recorded losses {verb} not finite"
        text += ", the last one among them" if series[-1].value is None else ""
    return f"{text}."


def _held_out(run: Run) -> str:
    found = final_accuracy(run)
    if not found:
        loss = data.end(data.held_out_loss(run))
        if loss is not None:
            return f"The held-out loss ends at {fmt.loss(loss.value)}{_when(run, [loss])}."
        return "No held-out measurement was recorded."
    labels = data.condition_labels(found)
    parts = [f"{fmt.percent(found[condition].value)} at {esc(labels[condition])}" for condition in labels]
    return f"Held-out accuracy is {fmt.listing(parts)}{_when(run, found.values())}."


def _retrieval(run: Run) -> str:
    ends = {condition: final_scores(run, condition) for condition in data.family_scores(run)}
    found = {condition: points for condition, points in ends.items() if points}
    if not found:
        return "No retrieval scores were recorded."
    labels = data.condition_labels(found)
    parts = [f"at {esc(labels[condition])} {_leader(found[condition])}" for condition in labels]
    when = _when(run, [point for points in found.values() for point in points.values()])
    return f"Retrieval scores by family, in logits{when}: {'; '.join(parts)}."


def _leader(points: dict[str, End]) -> str:
    """Which family scores highest, and by how much."""
    (name, top), *rest = sorted(points.items(), key=lambda item: -item[1].value)
    others = [f"{esc(other)} ({fmt.score(point.value)})" for other, point in rest]
    if not rest:
        return f"<b>{esc(name)}</b>, the only family, has {fmt.score(top.value)}"
    lead = round(top.value, 2) - round(rest[0][1].value, 2)  # so that it is the difference of the numbers shown
    text = f"<b>{esc(name)}</b> is highest with {fmt.score(top.value)}, {fmt.score(lead)} above"
    return f"{text} {others[0]}" if len(rest) == 1 else f"{text} the next, {others[0]}; then {fmt.listing(others[1:])}"


def final_accuracy(run: Run) -> dict[Condition, End]:
    """The last finite held-out accuracy of every condition."""
    ends = {condition: data.end(series) for condition, series in data.held_out_accuracy(run).items()}
    return {condition: point for condition, point in ends.items() if point is not None}


def final_scores(run: Run, condition: Condition) -> dict[str, End]:
    """The last finite mean of every family."""
    ends = {name: data.end(series) for name, series in data.family_scores(run).get(condition, {}).items()}
    return {name: point for name, point in ends.items() if point is not None}


def _when(run: Run, points: Iterable[End]) -> str:
    steps = sorted({point.step for point in points})
    return "" if steps == [run.last_step] else f" (update {fmt.listing([f'{step:,}' for step in steps])})"
