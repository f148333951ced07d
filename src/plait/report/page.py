"""Runs -> one HTML page with everything it needs inside: style, charts, library. No torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from string import Template

import altair
import vl_convert

from plait.cost import cost, full_attention_twin
from plait.report import charts, palette, summary, tables
from plait.report import format as fmt
from plait.report import runs as data
from plait.report.marks import DASHES, Line, Look, Panel
from plait.report.markup import details, esc, paragraph, stroke, swatch
from plait.report.runs import Condition, Run
from plait.report.strip import frozen_text, layout_text, legend, strip
from plait.spec import Spec

LOOK = Look(palette=palette.PAGE, width="container", height=210, alone=False)
SNIPPET = "window.vegaEmbed = vegaEmbed;"
MOST_LAYERS = 12
"""layers up to which the key of the scores names each"""
COST_NOTE = """Forward FLOPs per token, averaged over a causal sequence of the given length; a multiply-add counts as
2. State is what one sequence keeps in the cache: keys and values in 2 bytes, recurrent states in 4. The twin is the
same model with full softmax attention in every layer."""


def render(runs: Sequence[Run]) -> str:
    """The whole page; the same for the same run directories."""
    sections = [
        ("summary", "Summary", _summary(runs)),
        ("layout", "Layout", _layout(runs)),
        ("loss", "Loss", _loss(runs)),
        ("accuracy", "Held-out accuracy", _accuracy(runs)),
        ("retrieval", "Retrieval by layer", _retrieval(runs)),
        ("cost", "Cost", _cost(runs)),
        ("provenance", "Settings and provenance", _provenance(runs)),
    ]
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{html}</section>'
        for name, title, html in sections
    )
    names = fmt.listing([run.name for run in runs]) if len(runs) <= 4 else fmt.plural(len(runs), "run").capitalize()
    return Template(_asset("page.html")).substitute(
        title=esc(names),
        style=_style(),
        links="".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections),
        body=body,
        library=_library(),
        script=_asset("page.js"),
    )


def _asset(name: str) -> str:
    return (resources.files("plait.report") / "assets" / name).read_text(encoding="utf-8")


def _style() -> str:
    light, dark = palette.css(palette.LIGHT), palette.css(palette.DARK)
    return (
        f":root {{ color-scheme: light; {light} }}\n"
        f'@media screen and (prefers-color-scheme: dark) {{ :root:not([data-theme="light"])'
        f" {{ color-scheme: dark; {dark} }} }}\n"
        f'@media screen {{ :root[data-theme="dark"] {{ color-scheme: dark; {dark} }} }}\n'
        f"{_asset('page.css')}"
    )


@functools.cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, of the version whose specs altair writes."""
    version = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return vl_convert.javascript_bundle(SNIPPET, vl_version=version).replace("</script", "<\\/script")


def _summary(runs: Sequence[Run]) -> str:
    told = [paragraph((f"<b>{esc(run.name)}.</b> " if len(runs) > 1 else "") + _sentences(run), "told") for run in runs]
    guide = details("How to read this page", _asset("guide.html"), opened=True)
    return paragraph(summary.opening(runs), "lede") + "".join(told) + tables.results(runs) + guide


def _sentences(run: Run) -> str:
    branch = run.config.get("branch")
    origin = f"It goes on from {esc(branch)}." if branch else ""
    return " ".join(filter(None, [summary.sentences(run), frozen_text(run), origin]))


def _layout(runs: Sequence[Run]) -> str:
    def card(run: Run) -> str:
        note = frozen_text(run)
        return paragraph(layout_text(run.spec, run.freezes)) + strip(run) + (paragraph(note, "quiet") if note else "")

    timeline = " The bar under a block is its training, hatched while it is frozen." if _any_frozen(runs) else ""
    note = f"One block a layer, the first on the left.{timeline}"
    return paragraph(note, "quiet") + _side_by_side(runs, card) + legend([run.spec for run in runs])


def _loss(runs: Sequence[Run]) -> str:
    has = {run.name: bool(data.training_loss(run) or data.held_out_loss(run)) for run in runs}
    if not any(has.values()):
        return _absent("No loss was recorded.")
    window = max(charts.smoothing_window(data.training_loss(run)) for run in runs)
    entries = [stroke(LOOK.palette.ink, width=1.8) + "training loss" + _smoothing(window)]
    if any(data.held_out_loss(run) for run in runs):
        entries.append(stroke(LOOK.palette.accent, DASHES[1]) + "held-out loss")
    if len(runs) > 1:
        entries.append(stroke(LOOK.palette.context, width=1.4) + "the other runs")
    panels = {panel.name: panel for panel in charts.loss(runs, LOOK)}
    shown = _side_by_side(runs, lambda run: _chart(panels[run.name]) if has[run.name] else _absent("No loss recorded."))
    return _key([*entries, *_frozen_entry(runs)]) + shown


def _smoothing(window: int) -> str:
    return f", mean of {window} recorded updates; dots are single ones" if window > 1 else ""


def _accuracy(runs: Sequence[Run]) -> str:
    lines = {run.name: charts.accuracy_lines(run, runs, LOOK.palette) for run in runs}
    if not any(lines.values()):
        return _absent("No accuracy was recorded.")
    panels = {panel.name: panel for panel in charts.accuracy(runs, LOOK)}

    def card(run: Run) -> str:
        if not lines[run.name]:
            return _absent("No accuracy recorded.")
        stand_in = not data.held_out_accuracy(run)
        note = "Nothing held out was measured; this is the accuracy on training batches." if stand_in else ""
        return _chart(panels[run.name]) + (paragraph(note, "quiet") if note else "")

    key = {line.label: line for own in lines.values() for line in own}
    entries = [stroke(line.colour, line.dash, line.width) + esc(line.label) for line in key.values()]
    return _key([*entries, *_frozen_entry(runs)]) + _side_by_side(runs, card)


def _retrieval(runs: Sequence[Run]) -> str:
    labels = data.condition_labels(c for run in runs for c in [*data.layer_scores(run), *data.family_scores(run)])
    if not labels:
        return _absent("No retrieval scores were recorded.")
    rows = []
    for condition, label in labels.items():
        panels = {panel.name: panel for panel in charts.scores(runs, condition, LOOK)}
        scored = {run.name for run in runs if charts.score_lines(run, condition, LOOK.palette)}
        cards = [_chart(panels[run.name]) if run.name in scored else _absent("No scores recorded.") for run in runs]
        rows.append((label[:1].upper() + label[1:], cards))
    if len(runs) == 1:
        blocks = [_panels([(title, cards[0]) for title, cards in rows])]
    else:
        names = [run.name for run in runs]
        blocks = [f"<h3>{esc(title)}</h3>{_panels(list(zip(names, cards, strict=True)))}" for title, cards in rows]
    every = details("Every layer at the last probe", tables.layer_scores(runs))
    return _score_key(runs, labels) + "".join(blocks) + every


def _score_key(runs: Sequence[Run], conditions: Iterable[Condition]) -> str:
    """Families, and layers where they are few, as buttons that bring their lines forward."""
    found = [line for run in runs for c in conditions for line in charts.score_lines(run, c, LOOK.palette)]
    groups: dict[str, dict[str, Line]] = {}
    for line in found:
        groups.setdefault(line.group, {})[line.label] = line
    few = max(run.spec.num_layers for run in runs) <= MOST_LAYERS
    entries = []
    for group, lines in groups.items():
        mean = f"{group} mean"
        shown = [line for line in lines.values() if few or line.label == mean]
        buttons = [
            f'<button type="button" data-line="{esc(group if line.label == mean else line.label)}">'
            f"{stroke(line.colour, line.dash, line.width)}{esc(line.label)}</button>"
            for line in sorted(shown, key=lambda line: line.label != mean)
        ]
        entries.append(f'<span class="group">{"".join(buttons)}</span>')
    note = [] if few else ["thin lines are single layers"]
    return _key([*entries, *note, *_frozen_entry(runs)])


def _cost(runs: Sequence[Run]) -> str:
    owners: dict[Spec, list[str]] = {}
    for run in runs:
        owners.setdefault(run.spec, []).append(run.name)
    named = {fmt.listing(names) if len(owners) > 1 else "this model": spec for spec, names in owners.items()}
    panels = {panel.name: panel for panel in charts.state(list(named.items()), LOOK)}
    entries = [
        stroke(LOOK.palette.accent, width=2.4) + "this model",
        stroke(LOOK.palette.muted, DASHES[1]) + "full-attention twin",
    ]
    key, blocks = _key(entries), []
    for name, spec in named.items():
        caption = "Cost by family" + (f", {name}" if len(named) > 1 else "")
        chart = f'<div class="beside"><div>{key}{_chart(panels[name])}</div>{paragraph(_state_text(spec))}</div>'
        blocks.append(f"{tables.costs(spec, caption)}{chart}")
    return paragraph(COST_NOTE, "quiet") + "".join(blocks)


def _state_text(spec: Spec) -> str:
    parts = []
    for context in tables.CONTEXTS:
        own, twin = (cost(s, context).state_bytes for s in (spec, full_attention_twin(spec)))
        share = f"{fmt.percent(own / twin)} of the twin\u2019s {fmt.size(twin)}"
        parts.append(f"{fmt.size(own)} at {fmt.context(context)} tokens, {share}")
    return f"One sequence keeps {'; '.join(parts)}."


def _provenance(runs: Sequence[Run]) -> str:
    without = [run.name for run in runs if not run.config]
    missing = _absent(f"No config.json: the settings of {fmt.listing(without)} are not known.") if without else ""
    differing = tables.settings(runs, differing=True) if len(runs) - len(without) > 1 else ""
    every = tables.settings(runs, differing=False)
    return (
        tables.provenance(runs)
        + differing
        + (details("All settings", every, opened=len(runs) == 1) if every else "")
        + missing
    )


def _side_by_side(runs: Sequence[Run], card: Callable[[Run], str]) -> str:
    return _panels([(run.name if len(runs) > 1 else "", card(run)) for run in runs])


def _panels(cards: Sequence[tuple[str, str]]) -> str:
    """Figures with their captions in a row, or in as many rows as they need."""
    cells = "".join(
        f"<figure>{f'<figcaption>{esc(caption)}</figcaption>' if caption else ''}{html}</figure>"
        for caption, html in cards
    )
    return f'<div class="panels">{cells}</div>'


def _chart(panel: Panel) -> str:
    """A place for a chart, and its spec beside it; `<` cannot end the script that holds the spec."""
    spec = json.dumps(charts.page_spec(panel, LOOK), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div class="chart" role="img" aria-label="{esc(panel.description)}"><div></div></div>'
        f'<script type="application/json" class="spec">{spec}</script>'
    )


def _key(entries: Sequence[str]) -> str:
    return f'<ul class="legend">{"".join(f"<li>{entry}</li>" for entry in entries)}</ul>'


def _any_frozen(runs: Sequence[Run]) -> bool:
    return any(run.freezes for run in runs)


def _frozen_entry(runs: Sequence[Run]) -> list[str]:
    return [swatch(LOOK.palette.shade) + "frozen"] if _any_frozen(runs) else []


def _absent(text: str) -> str:
    return paragraph(esc(text), "absent")
