"""The tables of a report: results, layer scores, costs, settings, provenance. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from plait.cost import Cost, cost, full_attention_twin
from plait.report import format as fmt
from plait.report import runs as data
from plait.report.markup import Cell, code, esc, swatch, table
from plait.report.palette import PAGE
from plait.report.runs import Run
from plait.report.summary import final_accuracy, final_scores
from plait.spec import Spec

CONTEXTS = (1 << 10, 1 << 15, 1 << 20)
ABSENT = "\u2013"
MOST_VALUES = 4


def results(runs: Sequence[Run]) -> str:
    """Where every run ends: a row a run."""
    accuracy = data.condition_labels(condition for run in runs for condition in final_accuracy(run))
    scored = data.condition_labels(condition for run in runs for condition in data.family_scores(run))
    families = {
        condition: list(dict.fromkeys(name for run in runs for name in final_scores(run, condition)))
        for condition in scored
    }
    held_out = any(data.held_out_loss(run) for run in runs)
    span = len(accuracy) + held_out
    head = [[Cell("", 3), *([Cell("held out", span)] if span else [])], ["run", "updates", "training loss"]]
    head[1] += [esc(label) for label in accuracy.values()] + ["loss"] * held_out
    for condition, label in scored.items():
        if families[condition]:
            head[0].append(Cell(f"retrieval score, {esc(label)}", len(families[condition])))
            head[1] += [f"{swatch(PAGE.family(name))}{esc(name)}" for name in families[condition]]
    body = []
    for run in runs:
        accurate = final_accuracy(run)
        row: list[Cell | str] = [esc(run.name), fmt.count(run.last_step), _end(data.training_loss(run), fmt.loss)]
        row += [fmt.percent(accurate[c].value) if c in accurate else ABSENT for c in accuracy]
        row += [_end(data.held_out_loss(run), fmt.loss)] * held_out
        for condition in scored:
            ends = final_scores(run, condition)
            top = max((point.value for point in ends.values()), default=None)
            row += [
                Cell(fmt.score(ends[name].value), kind="top" if ends[name].value == top else "")
                if name in ends
                else ABSENT
                for name in families[condition]
            ]
        body.append(row)
    return table("Where each run ends", head, body)


def layer_scores(runs: Sequence[Run]) -> str:
    """Scores at the last probe: a row a layer, a column a run and condition."""
    found = {run.name: data.layer_scores(run) for run in runs}
    labels = data.condition_labels(condition for layers in found.values() for condition in layers)
    shown = [run for run in runs if found[run.name]]
    layers = sorted({layer for by in found.values() for lines in by.values() for layer in lines})
    columns = [(run, condition) for run in shown for condition in labels]
    head = [
        ["", *(Cell(esc(run.name), len(labels)) for run in shown)],
        ["layer", *(esc(labels[c]) for _, c in columns)],
    ]
    body = []
    for layer in layers:
        names = list(dict.fromkeys(data.layer_family(run, layer) for run in shown))
        keys = "".join(swatch(PAGE.family(name)) for name in names)
        cells = [_end(found[run.name].get(c, {}).get(layer, []), fmt.score) for run, c in columns]
        body.append([f"{keys}{layer} {esc(' / '.join(names))}", *cells])
    return table("Layer retrieval scores at the last probe, in logits", head, body)


def _end(series: data.Series, text: Callable[[float], str]) -> str:
    point = data.end(series)
    return ABSENT if point is None else text(point.value)


def costs(spec: Spec, caption: str) -> str:
    """By family, in whole and beside the twin with full attention in every layer."""
    own = [cost(spec, context) for context in CONTEXTS]
    twin = [cost(full_attention_twin(spec), context) for context in CONTEXTS]
    head = [
        [Cell("", 3), Cell("FLOPs per token, at context", 3), Cell("state of one sequence, at context", 3)],
        ["layers", "number", "parameters", *[fmt.context(context) for context in CONTEXTS] * 2],
    ]
    body = [_family_row(own, name) for name in dict.fromkeys(layer.family for layer in own[0].layers)]
    rest = own[0].total_params - sum(layer.params for layer in own[0].layers)
    flops = [fmt.flops(at.flops_per_token - sum(layer.flops_per_token for layer in at.layers)) for at in own]
    body.append(["embedding, last norm, head", "", fmt.count(rest), *flops, *[ABSENT] * len(CONTEXTS)])
    body.append(_total_row("whole model", own))
    body.append(_total_row("full-attention twin", twin))
    pairs = list(zip(own, twin, strict=True))
    ratios = [_share(own[0].total_params, twin[0].total_params)]
    ratios += [_share(a.flops_per_token, b.flops_per_token) for a, b in pairs]
    ratios += [_share(a.state_bytes, b.state_bytes) for a, b in pairs]
    body.append([Cell(text, kind="ratio") for text in ["model / twin", "", *ratios]])
    return table(caption, head, body)


def _family_row(own: Sequence[Cost], name: str) -> list[Cell | str]:
    layers = [[layer for layer in at.layers if layer.family == name] for at in own]
    return [
        f"{swatch(PAGE.family(name))}{esc(name)}",
        fmt.count(len(layers[0])),
        fmt.count(sum(layer.params for layer in layers[0])),
        *(fmt.flops(sum(layer.flops_per_token for layer in at)) for at in layers),
        *(fmt.size(sum(layer.state_bytes for layer in at)) for at in layers),
    ]


def _total_row(name: str, at: Sequence[Cost]) -> list[Cell | str]:
    cells = [name, fmt.count(len(at[0].layers)), fmt.count(at[0].total_params)]
    cells += [fmt.flops(one.flops_per_token) for one in at] + [fmt.size(one.state_bytes) for one in at]
    return [Cell(cell, kind="total") for cell in cells]


def _share(part: float, whole: float) -> str:
    return fmt.percent(part / whole) if whole else ABSENT


def settings(runs: Sequence[Run], *, differing: bool) -> str:
    """The settings that differ between the runs, or all of them; empty where there are none."""
    flat = {run.name: flatten(run.config) for run in runs if run.config}
    keys = list(dict.fromkeys(key for values in flat.values() for key in values))
    if differing:
        keys = [key for key in keys if key != "name" and len({values.get(key) for values in flat.values()}) > 1]
    if not keys:
        return ""
    body = [[code(key), *(esc(values.get(key, ABSENT)) for values in flat.values())] for key in keys]
    caption = "Settings that differ" if differing else "All settings"
    return table(caption, [["setting", *map(esc, flat)]], body, kind="words")


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings under dotted keys; a list of plain values is one value."""
    if isinstance(value, Mapping) and value:
        items: Iterable = ((f"{prefix}.{key}" if prefix else str(key), item) for key, item in value.items())
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        items = ((f"{prefix}[{i}]", item) for i, item in enumerate(value))
    else:
        return {prefix: _plain(value)}
    return {key: text for name, item in items for key, text in flatten(item, name).items()}


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    if value is None or value == {}:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def provenance(runs: Sequence[Run]) -> str:
    """Where the numbers come from: a column a run."""
    facts = [_provenance(run) for run in runs]
    keys = dict.fromkeys(key for fact in facts for key in fact)
    body = [[esc(key), *(fact.get(key, ABSENT) for fact in facts)] for key in keys]
    return table("Provenance", [["", *(esc(run.name) for run in runs)]], body, kind="words")


def _provenance(run: Run) -> dict[str, str]:
    times = sorted(str(record.provenance["time"]) for record in run.records if record.provenance.get("time"))
    seconds = next((row.values.get("seconds") for row in reversed(run.rows("train", "loss"))), None)
    packages = dict.fromkeys(name for record in run.records for name in record.provenance.get("versions") or {})
    hashes = [name for name in _distinct(run, "spec") if name != run.spec.hash]
    strangers = f", but records of {', '.join(map(code, hashes))}" if hashes else ""
    return {
        "spec": code(run.spec.hash) + strangers,
        "device": _join(_distinct(run, "device")),
        "git": _join(_distinct(run, "git"), code),
        **{name: _join(_distinct(run, "versions", name)) for name in packages},
        "first record": _time(times[0]) if times else ABSENT,
        "last record": _time(times[-1]) if times else ABSENT,
        "records": fmt.count(len(run.records)),
        "training time": fmt.duration(seconds) if seconds is not None else ABSENT,
        "tokens": fmt.count(run.tokens) if run.tokens is not None else ABSENT,
        "checkpoints": ", ".join(f"{step:,}" for step in run.checkpoints[-MOST_VALUES:]) or "none",
    }


def _distinct(run: Run, *path: str) -> list[str]:
    """The values at this place of the records' provenance, in order of appearance."""
    values: dict[str, None] = {}
    for record in run.records:
        value: Any = record.provenance
        for key in path:
            value = (value or {}).get(key)
        if value:
            values[str(value)] = None
    return [*values]


def _join(values: Sequence[str], markup: Callable[[object], str] = esc) -> str:
    more = f" and {len(values) - MOST_VALUES} more" if len(values) > MOST_VALUES else ""
    return ", ".join(map(markup, values[:MOST_VALUES])) + more or ABSENT


def _time(text: str) -> str:
    return esc(text.replace("T", " ").replace("Z", " UTC"))
