"""Charts of evaluations: length x task and depth x length of every model; models against length, and their losses
against position. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from plait.evals.results import Row, cells, scores
from plait.evals.show import Shown, load_results
from plait.evals.stats import Estimate, mean_of
from plait.report.marks import Look, Panel, config, panel

DEPTHS = 10
"""parts of a depth of 0 to 100%"""
FORMATS = (".html", ".png", ".svg", ".pdf")


def save_charts(folders: Sequence[str | Path], output: Path, look: Look | None = None) -> None:
    """One file of all charts of folders of results; ValueError where they hold no scores or the file has another ending
    than FORMATS."""
    look = look or Look()
    if output.suffix not in FORMATS:
        raise ValueError(f"chart = {output}; its name must end in {', '.join(FORMATS)}")
    everything = load_results(folders)[0]
    found = [shown for shown in everything if cells(shown.rows)]
    rows = [against_length(found, look), by_task(found, look), by_depth(found, look), by_position(everything, look)]
    if not any(rows):
        raise ValueError(
            f"chart: {', '.join(map(str, folders))}: no scores of samples and no losses by position in there"
        )
    joined = alt.vconcat(
        *(alt.concat(*(panel.chart for panel in panels), columns=3, spacing=36) for panels in rows if panels),
        spacing=36,
    ).resolve_scale(color="independent")
    chart = joined.configure(**config(look.palette), background=look.palette.surface, padding=18)
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".html":
        chart.save(output, inline=True)
    else:
        chart.save(output, scale_factor=2)


def against_length(found: Sequence[Shown], look: Look) -> list[Panel]:
    """Of each suite a panel, with a line and the interval of the mean over tasks for each model."""
    panels = []
    colour = _colour(found, look)
    for suite in dict.fromkeys(shown.suite for shown in found):
        means = {shown.label: means_of(shown.rows) for shown in found if shown.suite == suite}
        values = [
            {"length": max(length, 1), "score": e.value, "low": e.low, "high": e.high, "model": label}
            for label, by_length in means.items()
            for length, e in by_length.items()
        ]
        axis = alt.Axis(values=sorted({row["length"] for row in values}), format=",d")
        base = alt.Chart(alt.InlineData(values=values)).encode(
            alt.X("length:Q", title="tokens", scale=alt.Scale(type="log", base=2, nice=False), axis=axis),
            colour,
        )
        score = alt.Y("score:Q", title="score", scale=alt.Scale(domain=[0, 100]))
        bars = base.mark_rule(opacity=0.5, strokeWidth=1.5).encode(alt.Y("low:Q", title="score"), alt.Y2("high:Q"))
        layers: list[Any] = [bars, base.mark_line(strokeWidth=1.8).encode(score)]
        layers.append(base.mark_point(filled=True, size=30, opacity=1).encode(score))
        panels.append(panel(f"{suite}: mean over tasks", layers, look, _story(f"{suite}, mean over tasks", means)))
    return panels


def _colour(found: Sequence[Shown], look: Look) -> alt.Color:
    """One for each model."""
    colours = list(look.palette.families.values())
    labels = list(dict.fromkeys(shown.label for shown in found))
    scale = alt.Scale(domain=labels, range=[colours[i % len(colours)] for i in range(len(labels))])
    return alt.Color("model:N", title=None, scale=scale, legend=alt.Legend(labelLimit=0))


def by_position(found: Sequence[Shown], look: Look) -> list[Panel]:
    """Of each length of a pass a panel with a line for each model: its loss where so many tokens came before."""
    losses: dict[int, dict[str, dict[int, float]]] = {}
    for shown in found:
        for record in shown.records:
            if record.name == "position_loss" and (loss := record.values["loss"]) is not None:
                axes = record.axes
                losses.setdefault(int(axes["length"]), {}).setdefault(shown.label, {})[int(axes["position"])] = loss
    panels = []
    for length, of_models in sorted(losses.items()):
        values = [
            {"position": position, "loss": loss, "model": label}
            for label, curve in of_models.items()
            for position, loss in curve.items()
        ]
        base = alt.Chart(alt.InlineData(values=values)).encode(
            alt.X("position:Q", title="tokens before", scale=alt.Scale(type="log", base=2, nice=False)),
            alt.Y("loss:Q", title="nats a token", scale=alt.Scale(zero=False)),
            _colour(found, look),
        )
        layers: list[Any] = [base.mark_line(strokeWidth=1.8), base.mark_point(filled=True, size=20, opacity=1)]
        told = [
            f"{label}: " + ", ".join(f"{loss:.3f} after {position:,}" for position, loss in curve.items())
            for label, curve in of_models.items()
        ]
        name = f"loss by position, passes of {length:,} tokens"
        panels.append(panel(name, layers, look, f"{name}. {'; '.join(told)}."))
    return panels


def means_of(rows: Sequence[Row]) -> dict[int, Estimate]:
    """By length, over all tasks that it has."""
    grid = cells(rows)
    lengths = dict.fromkeys(length for length, _ in grid)
    return {n: mean_of(*(scores(group) for (at, _), group in grid.items() if at == n)) for n in lengths}


def by_task(found: Sequence[Shown], look: Look) -> list[Panel]:
    """Length across, task down."""
    panels = []
    for shown in found:
        grid = {(task, length): mean_of(scores(rows)).value for (length, task), rows in cells(shown.rows).items()}
        panels.append(_heat(f"{shown.label}, {shown.suite}", grid, "task", look))
    return panels


def by_depth(found: Sequence[Shown], look: Look) -> list[Panel]:
    """Length across, depth of the needle down: over all tasks that have one."""
    panels = []
    for shown in found:
        parts: dict[tuple[str, int], list[float]] = {}
        for (length, _), rows in cells(shown.rows).items():
            for row in rows:
                if row.get("depth") is not None:
                    part = min(int(row["depth"] * DEPTHS), DEPTHS - 1)
                    parts.setdefault((f"{100 * part // DEPTHS}%", length), []).append(row["score"])
        if parts:
            order = sorted(parts, key=lambda key: int(key[0][:-1]))
            grid = {key: sum(parts[key]) / len(parts[key]) for key in order}
            panels.append(_heat(f"{shown.label}, {shown.suite}", grid, "depth", look))
    return panels


def _heat(name: str, grid: dict[tuple[str, int], float], what: str, look: Look) -> Panel:
    """A map of the mean score, each cell with its number."""
    palette = look.palette
    rows = [{"down": down, "length": length, "score": score} for (down, length), score in grid.items()]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        alt.X("length:O", title="tokens", axis=alt.Axis(format=",d", labelAngle=0)),
        alt.Y("down:N", title=what, sort=list(dict.fromkeys(down for down, _ in grid))),
    )
    colour = alt.Scale(domain=[0, 100], range=[palette.raised, palette.accent], interpolate="rgb")
    colour_of_text = alt.when("datum.score > 55").then(alt.value(palette.on_family)).otherwise(alt.value(palette.ink))
    layers: list[Any] = [
        base.mark_rect().encode(alt.Color("score:Q", scale=colour, legend=None)),
        base.mark_text(fontSize=10).encode(text=alt.Text("score:Q", format=".0f"), color=colour_of_text),
    ]
    numbers = "; ".join(f"{down} at {length:,}: {score:.0f}" for (down, length), score in grid.items())
    return panel(name, layers, look, f"Mean score by length and {what} of {name}. {numbers}.")


def _story(what: str, means: dict[str, dict[int, Estimate]]) -> str:
    lines = [
        f"{label}: " + ", ".join(f"{e.text} at {length:,}" for length, e in by_length.items())
        for label, by_length in means.items()
    ]
    return f"{what}, against length. {'; '.join(lines)}."
