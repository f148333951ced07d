"""`plait describe`: what a Spec costs, as a table or JSON. No torch."""

from __future__ import annotations

import dataclasses
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.padding import Padding
from rich.table import Table

from plait.cost import Cost, LayerCost, cost, full_attention_twin
from plait.presets import FAMILIES
from plait.spec import Spec
from plait.terminal import console


def read_spec(text: str) -> Spec | None:
    """The Spec of a file or of a model; None if the text is a layout."""
    path = Path(text)
    if path.suffix == ".json" or (path / "spec.json").exists():  # without torch
        return Spec.load(path if path.suffix == ".json" else path / "spec.json")
    if "/" not in text and not path.is_dir():
        return None
    from plait.model.io import load_spec

    return load_spec(path)


def describe_json(spec: Spec, context: int, dtype_bytes: int) -> dict[str, Any]:
    """Everything of the table, per layer."""
    twin = full_attention_twin(spec)
    return {
        "layout": layout_text(spec),
        "spec": spec.to_json(),
        "cost": dataclasses.asdict(cost(spec, context, dtype_bytes=dtype_bytes)),
        "full_attention": dataclasses.asdict(cost(twin, context, dtype_bytes=dtype_bytes)),
    }


def layout_text(spec: Spec) -> str:
    """The layout string, or the layers' families where no string can say it."""
    try:
        return spec.layout
    except ValueError:
        return "(only as JSON)"


def describe_table(spec: Spec, context: int, dtype_bytes: int) -> None:
    """Print one row a run of equal layers, the totals, and the full-attention twin."""
    own = cost(spec, context, dtype_bytes=dtype_bytes)
    twin = cost(full_attention_twin(spec), context, dtype_bytes=dtype_bytes)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("layers", "mixer", "heads"):
        table.add_column(name, no_wrap=True)
    for name in ("parameters", "of mixer", "FLOPs/token", f"state at {context:,}"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, layer in _runs(own.layers):
        numbers = (f"{layer.params:,}", f"{layer.mixer_params:,}")
        table.add_row(label, layer.family, layer.heads, *numbers, si(layer.flops_per_token), size(layer.state_bytes))
    table.add_section()
    tied = " = head" if spec.tie_embeddings else ", head"
    embedding = own.total_params - own.non_embedding_params
    table.add_row("", f"embedding{tied}", "", f"{embedding:,}", "", si(2 * spec.d_model * spec.vocab_size), "")
    table.add_row(*_total("total", own), style="bold")
    table.add_row(*_total("full attention", twin), style="dim")
    out = console()
    out.print(f"[bold]{layout_text(spec).replace('[', chr(92) + '[')}[/bold]")
    out.print(f"{spec.num_layers} layers, d_model {spec.d_model}, vocabulary {spec.vocab_size:,}\n")
    out.print(table)
    out.print(
        f"\nAt {context:,} tokens: {times(own.flops_per_token / twin.flops_per_token, 2)} the FLOPs"
        f" and {times(own.state_bytes / twin.state_bytes, 3)} the state of full attention."
    )


def presets_table() -> None:
    """Print the names of presets, a family at a time: its sizes, then its variants, each for every size."""
    out = console()
    for name, family in FAMILIES.items():
        variants = [variant for variant in family.variants if variant]
        words = [name, "SIZE" if variants else "MODEL", *(["VARIANT"] if variants else [])]
        out.print(f"[bold]{'/'.join(words)}[/bold]  {family.about}")
        for row in filter(None, (family.sizes, variants)):
            out.print(Padding(" ".join(row), (0, 0, 0, 2), expand=False))
        out.print()
    out.print("001 and small also take other ratios, as 001/1B/GDN-NoPE-HH-7:1; a variant of small may be left out.")


def _total(label: str, total: Cost) -> tuple[str, ...]:
    mixers = sum(layer.mixer_params for layer in total.layers)
    return (
        "",
        label,
        "",
        f"{total.total_params:,}",
        f"{mixers:,}",
        si(total.flops_per_token),
        size(total.state_bytes),
    )


def _runs(layers: tuple[LayerCost, ...]) -> list[tuple[str, LayerCost]]:
    """Neighbours with equal cost as one row: ('4-6', cost of each)."""
    runs, first = [], 0
    for layer, same in groupby(layers):
        count = len(list(same))
        runs.append((f"{first}" if count == 1 else f"{first}-{first + count - 1}, each", layer))
        first += count
    return runs


def si(value: float) -> str:
    """1,234,567 as 1.23 M."""
    for unit in ("", "K", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}".rstrip()
        value /= 1000
    return f"{value:.3g} E"


def times(ratio: float, digits: int) -> str:
    """0.25 as 0.250x; what would round to 0 as less than 0.001x."""
    least = 10**-digits
    return f"{ratio:.{digits}f}x" if ratio >= least else f"less than {least}x"


def size(value: float) -> str:
    """Bytes in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1023.5:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} PiB"
