"""Altair charts of runs. No torch.

Each kind of chart is a list of panels, one a run, on shared axes. A page lays them out itself; for a file, join them:
`figure(loss(runs)).save("loss.png", scale_factor=2)`, or .svg or .pdf. Nothing is fetched from a network.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from plait.cost import cost, full_attention_twin
from plait.report import format as fmt
from plait.report import runs as data
from plait.report.marks import (
    DASHES,
    Axes,
    Line,
    Look,
    Panel,
    binary_axis,
    config,
    dots,
    draw,
    extent,
    frozen,
    hover,
    panel,
    training_axes,
    zero_line,
)
from plait.report.palette import Palette
from plait.report.runs import Condition, Point, Run, Series
from plait.spec import Spec

SMOOTH_FROM = 100
"""points from which a loss is drawn as dots under a moving mean"""
MOST_POINTS = 300
MOST_BEHIND = 100
"""points of a line in the panels of other runs, of which a page holds as many as runs squared"""
FEW_RUNS = 4
"""runs up to which each panel also tells the losses of the others"""
CONTEXTS = tuple(1 << power for power in range(8, 21))


def figure(panels: Sequence[Panel], *, columns: int = 3, look: Look | None = None) -> alt.ConcatChart:
    """Panels joined into one chart with one key, to be saved."""
    palette = (look or Look()).palette
    joined = alt.concat(*(panel.chart for panel in panels), columns=columns, spacing=28)
    joined = joined.resolve_scale(color="shared", strokeDash="shared", strokeWidth="shared")
    return joined.configure(**config(palette), background=palette.surface, padding=18)


def page_spec(panel: Panel, look: Look) -> dict[str, Any]:
    """One panel as the Vega-Lite spec of a page; its parts were checked as they were made, the whole is in tests."""
    sized = panel.chart.properties(autosize=alt.AutoSizeParams(type="fit", contains="padding"))
    settings = config(look.palette) | {"background": "transparent", "padding": 2, "aria": False}  # the page tells it
    return sized.configure(**settings).to_dict(validate=False)


def loss(runs: Sequence[Run], look: Look | None = None) -> list[Panel]:
    """Training loss, the other runs behind it, and the held-out loss of runs on text."""
    look = look or Look()
    palette = look.palette
    shown = {run.name: smoothed(data.training_loss(run)) for run in runs}
    held_out = {run.name: data.held_out_loss(run) for run in runs}
    raw = {run.name: _raw(run) for run in runs}
    points = itertools.chain(*shown.values(), *held_out.values(), *raw.values())
    axes = training_axes(runs, extent((point.value for point in points), runs=runs), "loss")
    others = [
        Line("other runs", thinned(series, MOST_BEHIND), palette.context, width=1.3, name=name)
        for name, series in shown.items()
    ]
    own = {
        name: [
            Line("training loss", series, palette.ink),
            *([Line("held-out loss", held_out[name], palette.accent, DASHES[1])] if held_out[name] else []),
        ]
        for name, series in shown.items()
    }
    key = [*itertools.chain(*own.values()), *(others if len(runs) > 1 else [])]
    panels = []
    for run in runs:
        behind = [line for line in others if line.name != run.name]
        lines = draw([*behind, *own[run.name]], key, axes, look)
        layers = [*dots(raw[run.name], axes, palette.muted), *lines]
        has_loss = any(line.series for line in own[run.name])
        recorded = [own[run.name][0]._replace(series=data.training_loss(run)), *own[run.name][1:]]
        pointed = [*own[run.name], *(behind if len(behind) < FEW_RUNS else [])] if has_loss else []
        layers = _training(run, layers, pointed, axes, look, fmt.loss)
        panels.append(panel(run.name, layers, look, _story("Loss", run, recorded, fmt.loss)))
    return panels


def accuracy(runs: Sequence[Run], look: Look | None = None) -> list[Panel]:
    """Held-out accuracy by gap; of a run without any, that on its training batches."""
    look = look or Look()
    axes = training_axes(runs, extent([0, 1], runs=runs), "accuracy", percent=True)
    lines = {run.name: accuracy_lines(run, runs, look.palette) for run in runs}
    key = [*itertools.chain(*lines.values())]
    panels = []
    for run in runs:
        layers = _training(run, draw(lines[run.name], key, axes, look), lines[run.name], axes, look, fmt.percent)
        what = "Held-out accuracy" if data.held_out_accuracy(run) else "Accuracy on training batches"
        panels.append(panel(run.name, layers, look, _story(what, run, lines[run.name], fmt.percent)))
    return panels


def accuracy_lines(run: Run, runs: Sequence[Run], palette: Palette) -> list[Line]:
    """The longest gap is the strongest line."""
    labels = data.condition_labels(
        condition for other in runs for condition in data.held_out_accuracy(other) or data.training_accuracy(other)
    )
    rank = {condition: place for place, condition in enumerate(reversed(labels))}
    found = data.held_out_accuracy(run) or {c: smoothed(s) for c, s in data.training_accuracy(run).items()}
    return [
        Line(
            labels[condition],
            series,
            palette.muted if rank[condition] else palette.accent,
            DASHES[rank[condition] % len(DASHES)],
            1.7 if rank[condition] else 2.4,
        )
        for condition, series in found.items()
    ]


def scores(runs: Sequence[Run], condition: Condition, look: Look | None = None) -> list[Panel]:
    """Layer retrieval scores over training: a thin line a layer, a bold one for the mean of a family.

    The y axis covers every condition, so that panels of different gaps compare too.
    """
    look = look or Look()
    axes = training_axes(runs, extent(_all_scores(runs), runs=runs, include=0.0), "score (logits)")
    lines = {run.name: score_lines(run, condition, look.palette) for run in runs}
    key = [*itertools.chain(*lines.values())]
    label = data.condition_labels([condition])[condition]
    panels = []
    for run in runs:
        layers = [*zero_line(axes, look.palette.rule), *draw(lines[run.name], key, axes, look)]
        layers = _training(run, layers, lines[run.name], axes, look, fmt.score)
        means = [line for line in lines[run.name] if line.label == f"{line.group} mean"]
        description = _story(f"Layer retrieval scores at {label}", run, means, fmt.score)
        panels.append(panel(run.name, layers, look, description))
    return panels


def score_lines(run: Run, condition: Condition, palette: Palette) -> list[Line]:
    """Family by family: the mean, then its layers, told apart by their dashes."""
    layers = data.layer_scores(run).get(condition, {})
    means = data.family_scores(run).get(condition, {})
    lines = []
    for name in dict.fromkeys([*run.families, *means]):
        colour = palette.family(name)
        own = [layer for layer in layers if data.layer_family(run, layer) == name]
        if name in means:
            lines.append(Line(f"{name} mean", means[name], colour, width=3.4, group=name))
        for place, layer in enumerate(own):
            dash = DASHES[place % len(DASHES)]
            lines.append(Line(f"{layer} {name}", layers[layer], colour, dash, width=1.3, group=name))
    return lines


def state(specs: Sequence[tuple[str, Spec]], look: Look | None = None) -> list[Panel]:
    """Bytes that one sequence keeps, against its length, beside the model with full attention everywhere."""
    look = look or Look()
    palette = look.palette
    curves = {
        name: [
            Line("full-attention twin", _state(full_attention_twin(spec)), palette.muted, DASHES[1]),
            Line("this model", _state(spec), palette.accent, width=2.4),
        ]
        for name, spec in specs
    }
    key = [*itertools.chain(*curves.values())]
    sizes = [point.value or 1.0 for line in key for point in line.series]
    powers = range(math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes))) + 1)
    units = (" B", " KiB", " MiB", " GiB", " TiB")
    axes = Axes(
        binary_axis(alt.X, "step:Q", "tokens of context", range(8, 21), 2, ("", "K", "M")),
        binary_axis(alt.Y, "value:Q", "state of one sequence", powers, max(2, len(powers) // 6), units),
    )
    panels = []
    for name, lines in curves.items():
        layers = draw(lines, key, axes, look)
        layers += [] if look.alone else hover(lines, axes, palette, "tokens", fmt.size)
        ends = "; ".join(f"{line.label} {fmt.size(line.series[-1].value or 0)}" for line in reversed(lines))
        story = f"State of one sequence against its length, {name}. At 1M tokens: {ends}."
        panels.append(panel(name, layers, look, story))
    return panels


def smoothing_window(series: Series) -> int:
    """Points that one point of the drawn line is the mean of."""
    return 2 * (len(series) // 100) + 1 if len(series) >= SMOOTH_FROM else 1


def smoothed(series: Series) -> Series:
    """A centred moving mean of a long series, thinned; a short one as it is."""
    if len(series) < SMOOTH_FROM:
        return series
    sums = [0.0, *itertools.accumulate(point.value or 0.0 for point in series)]
    counts = [0, *itertools.accumulate(int(point.value is not None) for point in series)]
    end = len(series) - 1
    half = smoothing_window(series) // 2
    result = []
    for i in _spread(len(series), MOST_POINTS):
        first, past = max(i - half, 0), min(i + half, end) + 1
        number = counts[past] - counts[first]
        result.append(Point(series[i].step, (sums[past] - sums[first]) / number if number else None))
    return result


def thinned(series: Series, most: int) -> Series:
    return [series[i] for i in _spread(len(series), most)]


def _spread(number: int, most: int) -> list[int]:
    """Indices evenly over a series, its last among them."""
    return sorted({*range(0, number, math.ceil(number / most)), number - 1}) if number else []


def _raw(run: Run) -> Series:
    """The points under a smoothed line, thinned; none under a line that shows them itself."""
    series = data.training_loss(run)
    return thinned(series, MOST_POINTS) if len(series) >= SMOOTH_FROM else []


def _all_scores(runs: Sequence[Run]) -> list[float | None]:
    groups = [
        lines for run in runs for found in (data.layer_scores(run), data.family_scores(run)) for lines in found.values()
    ]
    return [point.value for lines in groups for series in lines.values() for point in series]


def _state(spec: Spec) -> Series:
    return [Point(context, float(cost(spec, context).state_bytes)) for context in CONTEXTS]


def _training(
    run: Run, layers: list[alt.Chart], hovered: list[Line], axes: Axes, look: Look, text: Callable[[float], str]
) -> list[alt.Chart]:
    """Layers of a run, over its frozen intervals and under the pointer."""
    pointer = [] if look.alone else hover(hovered, axes, look.palette, "update", text)
    return [*frozen(run, axes, look.palette), *layers, *pointer]


def _story(what: str, run: Run, lines: Sequence[Line], text: Callable[[float], str]) -> str:
    parts = []
    for line in lines:
        first, final = data.end(line.series[::-1]), data.end(line.series)
        if first and final:
            span = f"from {text(first.value)} at update {first.step:,} to {text(final.value)} at update {final.step:,}"
            parts.append(f"{line.label} {span}")
    return f"{what} of {run.name}: {'; '.join(parts) or 'nothing recorded'}."
