"""The layout as a strip of coloured blocks, one a layer, with the intervals in which a layer is frozen. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from plait.config import Heads, Layer, Mix, Mixer, Softmax, family
from plait.cost import LayerCost, cost
from plait.report import format as fmt
from plait.report.markup import code, esc, swatch
from plait.report.palette import FAMILIES, PAGE
from plait.report.runs import Frozen, Run
from plait.spec import Spec

STATE_AT = 32 * 1024
"""context length of the state that a block tells"""
ONE_ROW = 6
"""layers up to which they stand in one row whatever the width"""


def strip(run: Run) -> str:
    """A list of blocks; what each holds is told on hover and focus, and to screen readers."""
    costs = cost(run.spec, STATE_AT).layers
    blocks = "".join(_block(run, i, layer, costs[i]) for i, layer in enumerate(run.spec.layers))
    kind = 'strip many"' if run.spec.num_layers > ONE_ROW else f'strip" style="--layers:{run.spec.num_layers}"'
    return f'<ol class="{kind} aria-label="Layers of {esc(run.name)}, first to last">{blocks}</ol>'


def _block(run: Run, index: int, layer: Layer, costs: LayerCost) -> str:
    name = family(layer.mixer)
    facts = [
        ("heads", costs.heads.replace(" x ", " \u00d7 ")),
        ("parameters", f"{fmt.count(costs.params)}, mixer {fmt.count(costs.mixer_params)}"),
        ("MLP", f"{layer.mlp}, width {layer.d_ff:,}" if layer.d_ff else "none"),
        (f"state at {fmt.context(STATE_AT)} tokens", fmt.size(costs.state_bytes)),
        *(("frozen", f"{_scope(freeze)}, {freeze.updates}") for freeze in run.freezes if index in freeze.layers),
    ]
    told = "; ".join(f"{key} {value}" for key, value in facts)
    rows = "\n".join(f"{key}\t{value}" for key, value in facts)
    return (
        f'<li tabindex="0" data-line="{index} {esc(name)}" data-title="Layer {index}: {esc(name)}"'
        f' data-facts="{esc(rows)}" aria-label="Layer {index}, {esc(name)}: {esc(told)}">'
        f"{_face(layer.mixer, index)}{_timeline(run, index)}</li>"
    )


def _face(mixer: Mixer, index: int) -> str:
    """One colour; for heads(...) bands as high as each part's share, for mix(...) a slanted part each."""
    match mixer:
        case Heads():
            parts = [(f"{len(part.heads)} {family(part.mixer)}", part.mixer, len(part.heads)) for part in mixer.parts]
        case Mix():
            parts = [(family(part), part, 1) for part in mixer.mixers]
        case _:
            parts = [(family(mixer), mixer, 1)]
    faces = "".join(
        f'<span style="flex-grow:{share};background:{PAGE.family(family(part))}"><span>{esc(text)}</span></span>'
        for text, part, share in parts
    )
    return f'<span class="block {mixer.kind if len(parts) > 1 else "whole"}"><b>{index}</b>{faces}</span>'


def _timeline(run: Run, index: int) -> str:
    """The training of a layer from left to right, hatched where it is frozen; nothing where no layer ever is."""
    if not run.freezes:
        return ""
    end = max(run.last_step, *(freeze.stop or freeze.start + 1 for freeze in run.freezes), 1)
    spans = ""
    for freeze in run.freezes:
        if index in freeze.layers:
            left, right = freeze.start / end, (end if freeze.stop is None else freeze.stop) / end
            spans += f'<i style="left:{100 * left:.4g}%;width:{100 * (right - left):.4g}%"></i>'
    return f'<span class="time" aria-hidden="true">{spans}</span>'


def layout_text(spec: Spec, freezes: Sequence[Frozen] = ()) -> str:
    """The layout string, with what is frozen at some time marked in it."""
    try:
        words = split_layout(spec.layout)
    except ValueError:  # layers that say more than a layout string can
        return code(", ".join(family(layer.mixer) for layer in spec.layers))
    length = sum(count for _, count in words)
    frozen = {layer for freeze in freezes for layer in freeze.layers}
    shown, place = [], 0
    for word, count in words:
        layers = {i for i in range(spec.num_layers) if place <= i % length < place + count}
        place += count
        shown.append(f"<mark>{esc(word)}</mark>" if layers & frozen else esc(word))
    times = spec.num_layers // length
    repeat = f" <span class='quiet'>&times;{fmt.SPACE}{times}</span>" if times > 1 else ""
    return f'<code class="layout">{" ".join(shown)}</code>{repeat}'


def split_layout(layout: str) -> list[tuple[str, int]]:
    """The items of a formatted layout, and how many layers each stands for: '3*kda nope' -> 3*kda, 3 and nope, 1"""
    words, depth = [""], 0
    for char in layout:
        depth += (char in "([") - (char in ")]")
        if char == " " and depth == 0:
            words.append("")
        else:
            words[-1] += char
    counts = [word.split("*")[0] for word in words]
    return [(word, int(count) if count.isdigit() else 1) for word, count in zip(words, counts, strict=True)]


def frozen_text(run: Run) -> str:
    """One sentence on what is frozen and when; empty where nothing is."""
    if not run.freezes:
        return ""
    spans = []
    for freeze in run.freezes:
        which = fmt.listing([str(layer) for layer in freeze.layers]) if len(freeze.layers) <= 8 else None
        layers = f"layer{'s' * (len(freeze.layers) > 1)} {which}" if which else fmt.plural(len(freeze.layers), "layer")
        spans.append(f"{esc(freeze.name)} ({layers}; {esc(_scope(freeze))}) {freeze.updates}")
    return f"Frozen: {'; '.join(spans)}."


def _scope(freeze: Frozen) -> str:
    return {"block": "whole block", "mixer": "mixer only"}.get(freeze.scope, freeze.scope)


def legend(specs: Sequence[Spec]) -> str:
    """The families that these models hold, softmax first, with what each name means."""
    leaves = {family(leaf): leaf for spec in specs for layer in spec.layers for leaf in _leaves(layer.mixer)}
    order = sorted(leaves, key=lambda name: ([*FAMILIES].index(name), name))
    entries = [
        f"<li>{swatch(PAGE.family(name))}<b>{esc(name)}</b> <span class='quiet'>{FAMILIES[name]}"
        f"{'' if isinstance(leaves[name], Softmax) else ', recurrent'}</span></li>"
        for name in order
    ]
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _leaves(mixer: Mixer) -> list[Mixer]:
    match mixer:
        case Heads():
            return [part.mixer for part in mixer.parts]
        case Mix():
            return list(mixer.mixers)
    return [mixer]
