"""What charts are made of: lines with one key, dots, frozen intervals, a rule under the pointer. No torch."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import altair as alt

from plait.report.palette import LIGHT, Palette
from plait.report.runs import Run, Series

SOLID = (1, 0)
DASHES = (SOLID, (6, 3), (2, 2), (9, 3, 2, 3), (12, 4))
FONT = "system-ui, -apple-system, Segoe UI, Roboto, Noto Sans, Liberation Sans, sans-serif"
FEW = 12
"""points up to which a line shows each of them"""
MOST_HOVERED = 200


@dataclass(frozen=True, kw_only=True)
class Look:
    """How panels are drawn. `alone`: with a title and a key of their own, without what needs a pointer or a page."""

    palette: Palette = LIGHT
    width: int | Literal["container"] = 300
    height: int = 200
    alone: bool = True


class Panel(NamedTuple):
    name: str
    chart: alt.LayerChart
    description: str
    """what the chart shows, for those who do not see it"""


class Line(NamedTuple):
    """A series and how it is drawn."""

    label: str
    """in the key, which may hold for several lines"""
    series: Series
    colour: str
    dash: Sequence[int] = SOLID
    width: float = 1.8
    name: str = ""
    """under the pointer; the label where it is empty"""
    group: str = ""
    """lines that a page brings forward together"""


class Axes(NamedTuple):
    x: alt.X
    y: alt.Y


def training_axes(runs: Sequence[Run], domain: tuple[float, float], title: str, *, percent: bool = False) -> Axes:
    """Updates from 0 to the end of the longest run."""
    end = max([1, *(run.last_step for run in runs)])
    return Axes(
        alt.X(
            "step:Q",
            title="update",
            scale=alt.Scale(domain=[0, end], nice=False),
            axis=alt.Axis(format=",d" if end < 100_000 else "~s", tickCount=5, grid=False),
        ),
        alt.Y(
            "value:Q",
            title=title,
            scale=alt.Scale(domain=list(domain), nice=False),
            axis=alt.Axis(format="%" if percent else ".4~g", tickCount=5),
        ),
    )


def binary_axis(channel: type, field: str, title: str, powers: range, every: int, units: Sequence[str]) -> Any:
    """A log axis over powers of two whose labels step through the units, 1024 of one to the next."""
    names = "".join(
        f"datum.value < {1024.0 ** (i + 1)} ? datum.value / {1024**i} + '{u}' : " for i, u in enumerate(units)
    )
    return channel(
        field,
        title=title,
        scale=alt.Scale(type="log", base=2, domain=[2 ** powers[0], 2 ** powers[-1]]),
        axis=alt.Axis(values=[2**p for p in powers if p % every == 0], labelExpr=names + "datum.value"),
    )


def extent(
    values: Iterable[float | None], *, runs: Sequence[Run] = (), include: float | None = None
) -> tuple[float, float]:
    """The range of an axis, from 0 where 0 is near, with some air: more where the bands of frozen layers have names."""
    finite = [value for value in values if value is not None] + ([include] if include is not None else [])
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    low = 0.0 if 0 <= low < 0.3 * high else low
    span = (high - low) or abs(high) or 1.0
    names = max((len(run.freezes) for run in runs), default=0)
    return low - (0.04 * span if low else 0), high + span * (0.04 + 0.09 * names)


def draw(lines: Sequence[Line], key: Iterable[Line], axes: Axes, look: Look) -> list[alt.Chart]:
    """Lines of one panel; `key` holds those of all panels, so that one legend serves them together."""
    entries = {line.label: line for line in [*key, *lines]}
    legend = alt.Legend(title=None) if look.alone else None

    def by_label(channel: type, range_: list) -> Any:
        return channel("label:O", scale=alt.Scale(type="ordinal", domain=[*entries], range=range_), legend=legend)

    rows = [row for line in lines for row in _rows(line)]
    chart = alt.Chart(alt.InlineData(values=rows)).encode(
        *axes,
        by_label(alt.Color, [line.colour for line in entries.values()]),
        detail="name:N",
    )
    drawn = chart.mark_line(strokeCap="butt", strokeJoin="round", clip=True).encode(
        by_label(alt.StrokeDash, [list(line.dash) for line in entries.values()]),
        by_label(alt.StrokeWidth, [line.width for line in entries.values()]),
    )
    if any(line.group for line in lines) and not look.alone:
        chosen = alt.param(name="chosen", value="")
        test = "chosen == '' || chosen == datum.group || chosen == datum.label"
        drawn = drawn.encode(opacity=alt.when(test).then(alt.value(1)).otherwise(alt.value(0.12))).add_params(chosen)
    few = [row for line in lines if len(line.series) <= FEW for row in _rows(line)]
    points = chart.properties(data=alt.InlineData(values=few)).mark_point(filled=True, size=26, opacity=1)
    return [drawn, points] if few else [drawn]


def _rows(line: Line) -> list[dict[str, Any]]:
    names = {key: text for key, text in (("name", line.name), ("group", line.group)) if text}
    return [{"step": p.step, "value": rounded(p.value), "label": line.label} | names for p in line.series]


def dots(series: Series, axes: Axes, colour: str) -> list[alt.Chart]:
    """Single measurements below a smoothed line."""
    rows = [{"step": point.step, "value": rounded(point.value)} for point in series]
    mark = alt.Chart(alt.InlineData(values=rows)).mark_circle(size=7, opacity=0.35, color=colour, clip=True)
    return [mark.encode(*axes)] if rows else []


def zero_line(axes: Axes, colour: str) -> list[alt.Chart]:
    data = alt.InlineData(values=[{"value": 0}])
    return [alt.Chart(data).mark_rule(color=colour, strokeWidth=1.2).encode(axes.y)]


def frozen(run: Run, axes: Axes, palette: Palette) -> list[alt.Chart]:
    """A band over each interval in which layers of a run are frozen."""
    rows = [
        {
            "step": freeze.start,
            "stop": freeze.stop if freeze.stop is not None else run.last_step,
            "text": f"{freeze.name} frozen",
            "place": 5 + 14 * i,
        }
        for i, freeze in enumerate(run.freezes)
    ]
    if not rows:
        return []
    chart = alt.Chart(alt.InlineData(values=rows))
    band = chart.mark_rect(color=palette.shade, opacity=0.55, clip=True).encode(axes.x, x2="stop:Q")
    text = chart.mark_text(align="left", baseline="top", dx=5, fontSize=11, fontStyle="italic", color=palette.muted)
    return [band, text.encode(axes.x, text="text:N", y=alt.Y("place:Q", scale=None, axis=None))]


def hover(
    lines: Sequence[Line], axes: Axes, palette: Palette, step: str, text: Callable[[float], str]
) -> list[alt.Chart]:
    """A rule at the step nearest to the pointer, and the value of every line there."""
    steps = sorted({point.step for line in lines for point in line.series})
    steps = steps[:: math.ceil(len(steps) / MOST_HOVERED) or 1]
    if not steps:
        return []
    names = {line.name or line.label: line for line in lines if line.series}
    middles = [(left + right) / 2 for left, right in itertools.pairwise(steps)]
    rows = [
        {"step": at, "at": f"{at:,}", "low": low, "high": high}
        | {f"v{i}": _text_at(line.series, at, text) for i, line in enumerate(names.values())}
        for at, low, high in zip(steps, [steps[0], *middles], [*middles, steps[-1]], strict=True)
    ]
    base = alt.Chart(alt.InlineData(values=rows))
    over = alt.selection_point(name="over", fields=["step"], on="pointermove", clear="pointerout", empty=False)
    shown = alt.when(over).then(alt.value(0.7)).otherwise(alt.value(0))
    rule = base.mark_rule(color=palette.rule, strokeWidth=1).encode(axes.x, opacity=shown)
    tooltip = [alt.Tooltip("at:N", title=step), *(alt.Tooltip(f"v{i}:N", title=name) for i, name in enumerate(names))]
    low = axes.x.copy()
    low.shorthand = "low:Q"
    strips = base.mark_rect(opacity=0).encode(low, x2="high:Q", tooltip=tooltip).add_params(over)
    return [rule, strips.properties(name="pointer")]


def _text_at(series: Series, step: int, text: Callable[[float], str]) -> str:
    """The value at the nearest step, between a line's first and last."""
    steps = [point.step for point in series]
    if not steps[0] <= step <= steps[-1]:
        return "\u2013"
    right = bisect.bisect_left(steps, step)
    point = min(series[max(right - 1, 0) : right + 1], key=lambda p: abs(p.step - step))
    return "not finite" if point.value is None else text(point.value)


def panel(name: str, layers: Sequence[alt.Chart], look: Look, description: str) -> Panel:
    chart = alt.LayerChart(layer=list(layers), width=look.width, height=look.height, description=description)
    return Panel(name, chart.properties(title=name) if look.alone else chart, description)


def config(palette: Palette) -> dict[str, Any]:
    """Quiet axes: the y title lies above its axis, the grid is faint, nothing is boxed."""
    return {
        "font": FONT,
        "view": {"stroke": None},
        "axis": {
            "domain": False,
            "gridColor": palette.grid,
            "labelColor": palette.muted,
            "labelFontSize": 11.5,
            "labelFlush": True,
            "tickColor": palette.rule,
            "tickSize": 4,
            "titleColor": palette.muted,
            "titleFontSize": 11.5,
            "titleFontWeight": "normal",
        },
        "axisX": {"domain": True, "domainColor": palette.rule, "titleAnchor": "end", "titlePadding": 6},
        "axisY": {
            "ticks": False,
            "labelFlush": False,
            "labelPadding": 6,
            "titleAngle": 0,
            "titleAlign": "left",
            "titleAnchor": "end",
            "titleBaseline": "bottom",
            "titleX": 0,
            "titleY": -7,
        },
        "legend": {
            "labelColor": palette.ink,
            "labelFontSize": 12,
            "labelLimit": 260,
            "symbolSize": 300,
            "symbolType": "stroke",
            "orient": "right",
            "offset": 20,
        },
        "title": {"color": palette.ink, "fontSize": 13.5, "fontWeight": 600, "anchor": "start", "offset": 20},
    }


def rounded(value: float | None) -> float | None:
    """Five digits, which is more than a chart shows."""
    return None if value is None else float(f"{value:.5g}")
