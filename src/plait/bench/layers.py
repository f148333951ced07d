"""Whole layers: plait's against fla's, head-wise hybrids against the sum of their parts, and steps of one token.

On CUDA parameters are fp32 under bf16 autocast, on both sides; a decode step has bf16 parameters. A row's `backend` is
plait's.

Shapes: B rows, T tokens, D = d_model, H heads, E head_dim; D = H * E.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.bench.rows import (
    OURS,
    Options,
    Row,
    Step,
    batch_of,
    device_name,
    dtype_name,
    dtype_of,
    judged,
    measure,
)
from plait.config import Heads, Mixer, family
from plait.layout import Defaults, parse_layout
from plait.mixers import Backend, build_mixer
from plait.mixers.base import Mixer as MixerModule
from plait.mixers.compose import HeadWise
from plait.mixers.fla import why_not
from plait.mixers.seq import Seq

SIZES = {"cpu": (4, 64), "cuda": (8, 128)}
"""H, E"""
FLA_BAR, HEADS_BAR = 1 / 1.03, 1 / 1.15
SUM = "parts, summed"
FLA_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "kda": ("KimiDeltaAttention", {"head_dim": SIZES["cuda"][1]}),
    "gla[expand_k=1]": ("GatedLinearAttention", {"expand_k": 1}),
    "gdn": ("GatedDeltaNet", {"head_dim": SIZES["cuda"][1]}),
}
"""layout -> class of fla.layers and what it takes besides sizes; expand_v is 1"""
HEAD_WISE = ("heads(3:gdn, 1:nope)", "heads(3:swa[window=256], 1:nope)", "heads(3:kda, 1:nope)")
DECODED = ("nope", "swa[window=256]", "gdn", "kda", "gla", "mamba2", "lightning")
CACHED = 4096
"""tokens that a decode step looks back on"""


def mixer_config(layout: str, num_heads: int, head_dim: int) -> Mixer:
    size = num_heads * head_dim
    defaults = Defaults(d_model=size, num_layers=1, num_heads=num_heads, head_dim=head_dim)
    return parse_layout(layout, defaults)[0].mixer


def build(config: Mixer, d_model: int, backend: Backend, device: torch.device) -> MixerModule:
    module = build_mixer(config, d_model, backend)
    with torch.no_grad():
        module.init_weights(0.02, torch.Generator().manual_seed(0))
    return module.to(device)


def passes(options: Options, module: nn.Module, x_BTD: Tensor, call: Callable[[Tensor], Tensor]) -> dict[str, Callable]:
    """pass -> a call of the layer, gradients of x and of every parameter included."""
    leaves = [x_BTD, *module.parameters()]
    dy_BTD = torch.randn_like(x_BTD, dtype=dtype_of(options.device))

    def both() -> None:
        with _autocast(options):
            y_BTD = call(x_BTD)
        torch.autograd.grad(y_BTD, leaves, dy_BTD)

    def forward() -> None:
        with torch.no_grad(), _autocast(options):
            call(x_BTD)

    return {"forward": forward, "forward+backward": both}


def _autocast(options: Options) -> AbstractContextManager:
    return torch.autocast("cuda", torch.bfloat16) if options.cuda else nullcontext()


def _sizes(options: Options) -> tuple[int, int]:
    return SIZES["cuda" if options.cuda else "cpu"]


def _backends(options: Options) -> tuple[Backend, ...]:
    return ("torch", "fla") if options.cuda and why_not(options.device) is None else ("torch",)


def _fields(case: str, options: Options, length: int, layout: str, backend: str) -> Row:
    H, E = _sizes(options)
    batch = batch_of(options.device, length)
    shape = {"batch": batch, "length": length, "heads": H, "head_dim": E}
    device, dtype = device_name(options.device), dtype_name(dtype_of(options.device))
    return {"case": case, "device": device, "dtype": dtype, **shape, "layout": layout, "backend": backend}


def _input(options: Options, length: int) -> Tensor:
    H, E = _sizes(options)
    rng = torch.Generator(options.device).manual_seed(0)
    shape = (batch_of(options.device, length), length, H * E)
    return torch.randn(shape, generator=rng, device=options.device, requires_grad=True)


def fla_layer(options: Options) -> list[Step]:
    """plait's layer on the backend fla against the layer of fla with the same sizes: what plait adds around kernels."""
    steps: list[Step] = []
    for length in options.lengths_or((), (32768,)) or (4096,):
        for layout in FLA_LAYERS:
            steps.append((f"fla-layer, {layout}, {length} tokens", partial(_fla_layer, options, layout, length)))
    return steps


def _fla_layer(options: Options, layout: str, length: int) -> list[Row]:
    fields = _fields("fla-layer", options, length, layout, "fla")
    if (why := why_not(options.device)) is not None:
        return [{**fields, "competitor": "fla", "note": why}]
    import fla.layers  # pyright: ignore[reportMissingImports]

    H, E = _sizes(options)
    x_BTD = _input(options, length)
    ours = build(mixer_config(layout, H, E), H * E, "fla", options.device)
    name, takes = FLA_LAYERS[layout]
    theirs = getattr(fla.layers, name)(hidden_size=H * E, num_heads=H, expand_v=1, **takes).to(options.device)
    seq = Seq.build((x_BTD.shape[0], length), options.device)
    sides = {
        OURS: passes(options, ours, x_BTD, lambda x: ours(x, None, seq)[0]),
        "fla": passes(options, theirs, x_BTD, lambda x: theirs(x)[0]),
    }
    rows = []
    for kind in sides[OURS]:
        calls = {side: calls[kind] for side, calls in sides.items()}
        rows += measure(calls, {**fields, "pass": kind}, options, bars={"fla": FLA_BAR})
    return rows


def head_wise(options: Options) -> list[Step]:
    """A head-wise layer against the sum of its parts, each a layer of its own on its own heads.

    The parts read the same x_BTD with the layer's own weights (how fast a rule is on a CPU depends on its decays) and
    each projects its own heads to [B, T, D], so that together they multiply with as many output weights as the layer
    does. What the layer has besides is the concatenation. The row of the sum has the ratio.
    """
    return [
        (f"head-wise, {layout}, {T} tokens", partial(_head_wise, options, layout, T, backend))
        for T in options.lengths_or((4096,), (4096, 32768))
        for backend in _backends(options)
        for layout in HEAD_WISE
    ]


def parts_alone(config: Heads, d_model: int, backend: Backend, device: torch.device) -> dict[str, MixerModule]:
    """The layer, then each part as a layer of its own with the layer's weights, of o its heads' columns."""
    layer = build(config, d_model, backend, device)
    assert isinstance(layer, HeadWise)
    assert layer.o is not None
    modules: dict[str, MixerModule] = {OURS: layer}
    for part, inner in zip(config.parts, layer.mixers, strict=True):
        alone = build(part.mixer, d_model, backend, device)
        columns = layer.o.weight.detach().unflatten(1, (-1, config.value_dim))[:, list(part.heads)].flatten(1)
        alone.load_state_dict({**inner.state_dict(), "o.weight": columns})
        modules[f"{family(part.mixer)} alone"] = alone
    return modules


def _head_wise(options: Options, layout: str, length: int, backend: Backend) -> list[Row]:
    H, E = _sizes(options)
    config = mixer_config(layout, H, E)
    assert isinstance(config, Heads)
    x_BTD = _input(options, length)
    seq = Seq.build((x_BTD.shape[0], length), options.device)
    sides = {}
    for name, module in parts_alone(config, H * E, backend, options.device).items():
        sides[name] = passes(options, module, x_BTD, lambda x, m=module: m(x, None, seq)[0])
    rows = []
    for kind in sides[OURS]:
        fields = {**_fields("head-wise", options, length, layout, backend), "pass": kind}
        own = measure({name: calls[kind] for name, calls in sides.items()}, fields, options)
        times = [row["median_ms"] for row in own if "median_ms" in row]
        rows += own
        if len(times) == len(own):
            layer, *parts = times
            rows.append({**fields, "competitor": SUM, "median_ms": sum(parts), **judged(sum(parts) / layer, HEADS_BAR)})
    return rows


def decode(options: Options) -> list[Step]:
    """One token of one row after CACHED, layer by layer; `ratio` is over full attention without positions."""
    return [(f"decode, {backend}", partial(_decode, options, backend)) for backend in _backends(options)]


def _decode(options: Options, backend: Backend) -> list[Row]:
    H, E = _sizes(options)
    device, dtype = options.device, dtype_of(options.device)
    x_B1D = torch.randn(1, 1, H * E, device=device, dtype=dtype)
    past = torch.full((1,), CACHED - 1, device=device)
    calls = {}
    for layout in DECODED:
        module = build(mixer_config(layout, H, E), H * E, backend, device).to(dtype)
        state = module.new_state(1, CACHED, dtype=dtype, device=device)
        seq = Seq.build((1, 1), device, past=past, max_past=CACHED - 1)

        def step(module=module, state=state, seq=seq) -> None:
            with torch.no_grad():
                module(x_B1D, state, seq)

        calls[layout] = step
    fields = _fields("decode", options, 1, "", backend) | {"batch": 1, "pass": f"one token after {CACHED}"}
    del fields["layout"]
    return measure(calls, fields, options, timed=lambda name, ms: {"us_per_token": 1e3 * ms})
