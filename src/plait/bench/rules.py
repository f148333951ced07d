"""The rules of the linear mixers, alone: plait's chunked code against other implementations of the same function.

RULES has one entry a rule: how its inputs are drawn, plait's side, and the competitors of each kind of device. A side
takes the inputs and gives (a call, its leaves): call(*leaves) is o_BTHV, and the leaves are what gradients are taken
of. A side that raises, at any point, becomes a row with a note.

Shapes: B rows, T tokens, H heads, K key size, V value size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.bench import roofline
from plait.bench.rows import (
    COMPILED,
    OURS,
    Options,
    Row,
    Step,
    batch_of,
    device_name,
    dtype_name,
    dtype_of,
    mb,
    measure,
)
from plait.bench.timing import reason, saved_bytes
from plait.mixers.delta import delta_chunk
from plait.mixers.fla import why_not
from plait.mixers.linear import linear_chunk, linear_naive
from plait.mixers.mamba2 import scale_heads
from plait.mixers.seq import Seq

Side = tuple[Callable[..., Tensor], list[Tensor]]
Make = Callable[[list[Tensor]], Side]

HEADS = {"cpu": ((4, 64),), "cuda": ((16, 64), (8, 128))}
"""(heads, head_dim)"""
LENGTHS = {"cpu": (1024, 4096), "cuda": (4096, 32768)}
STATE_DIM = 128
"""K of Mamba-2"""
NAIVE_UP_TO = 1024
"""tokens, one by one"""
PASSES = ("forward", "forward+backward")
BARS = {"transformers": 1.0, "fla": 0.25}
"""the least ratio to a competitor whose name starts so"""


@dataclass(frozen=True)
class Draw:
    """Inputs of a shape, the same every time."""

    device: torch.device
    B: int
    T: int
    H: int
    E: int
    rng: torch.Generator = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "rng", torch.Generator(self.device).manual_seed(0))

    def normal(self, *sizes: int) -> Tensor:
        """[B, T, H, *sizes] in fp32."""
        return torch.randn(self.B, self.T, self.H, *sizes, generator=self.rng, device=self.device)

    def heads(self, size: int) -> Tensor:
        return self.normal(size).to(dtype_of(self.device))

    def unit(self, size: int) -> Tensor:
        return F.normalize(self.normal(size), dim=-1).to(dtype_of(self.device))

    def step(self, *sizes: int) -> Tensor:
        """dt or the decay's softplus as at initialization: log-uniform in [1e-3, 0.1], moved by the input."""
        bias = torch.empty(self.H, *sizes, device=self.device).uniform_(-6.9, -2.3, generator=self.rng)
        return F.softplus(self.normal(*sizes) + bias)

    def rate(self) -> Tensor:
        return torch.empty(self.H, device=self.device).uniform_(0.1, 16, generator=self.rng)


def _gdn_inputs(d: Draw) -> list[Tensor]:
    g = -d.rate() * d.step()
    return [d.unit(d.E), d.unit(d.E), d.heads(d.E), g, d.normal().sigmoid()]


def _kda_inputs(d: Draw) -> list[Tensor]:
    g = -d.rate()[:, None] * d.step(d.E)
    return [d.unit(d.E), d.unit(d.E), d.heads(d.E), g, d.normal().sigmoid()]


def _gla_inputs(d: Draw) -> list[Tensor]:
    return [d.heads(d.E), d.heads(d.E), d.heads(d.E), F.logsigmoid(d.normal(d.E)) / 16]


def _lightning_inputs(d: Draw) -> list[Tensor]:
    return [d.heads(d.E) / 8 for _ in range(3)]


def _mamba2_inputs(d: Draw) -> list[Tensor]:
    """C, B, x, dt; A is fixed."""
    return [d.heads(STATE_DIM) / 8, d.heads(STATE_DIM) / 8, d.heads(d.E), d.step()]


def _rates(dt_BTH: Tensor) -> Tensor:
    """A of Mamba-2."""
    return -torch.linspace(1, 16, dt_BTH.shape[-1], device=dt_BTH.device)


def _slopes(q_BTHK: Tensor) -> Tensor:
    """Of Lightning: those of fla's op on CUDA, those of MiniMax's first layer elsewhere."""
    H = q_BTHK.shape[2]
    heads_H = torch.arange(H, dtype=torch.float32, device=q_BTHK.device)
    return 8 / H * heads_H if q_BTHK.is_cuda else 2 ** (-8 * (heads_H + 1) / H) * (1 + 1e-5)


def _of(call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Side:
    return call, [x.detach().clone().requires_grad_() for x in inputs]


def _seq(x_BTHK: Tensor) -> Seq:
    B, T = x_BTHK.shape[:2]
    return Seq.build((B, T), x_BTHK.device)


# ---- plait


def _delta(x: list[Tensor]) -> Side:
    seq = _seq(x[0])
    return _of(lambda *y: delta_chunk(*y, None, seq)[0], x)


def _gla(x: list[Tensor]) -> Side:
    seq, scale = _seq(x[0]), x[0].shape[-1] ** -0.5
    return _of(lambda *y: linear_chunk(*y, None, seq, scale=scale)[0], x)


def _lightning(x: list[Tensor]) -> Side:
    seq, g_BTH = _seq(x[0]), -_slopes(x[0]).expand(x[0].shape[:3])
    return _of(lambda *y: linear_chunk(*y, g_BTH, None, seq, scale=1.0)[0], x)


def _mamba2(inputs: list[Tensor]) -> Side:
    seq, a_H = _seq(inputs[0]), _rates(inputs[3])

    def call(c: Tensor, b: Tensor, x: Tensor, dt: Tensor) -> Tensor:
        return linear_chunk(c, b, scale_heads(x, dt), dt * a_H, None, seq, scale=1.0)[0]

    return _of(call, inputs)


def _gla_naive(x: list[Tensor]) -> Side:
    T = x[0].shape[1]
    if T > NAIVE_UP_TO:
        raise ValueError(f"token by token, so not measured past {NAIVE_UP_TO} tokens")
    return _of(lambda *y: linear_naive(*y, scale=x[0].shape[-1] ** -0.5)[0], x)


# ---- transformers: its fallbacks in torch


def _gdn_transformers(x: list[Tensor]) -> Side:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule

    return _of(lambda q, k, v, g, beta: rule(q, k, v, g=g, beta=beta)[0], x)


def _kda_transformers(x: list[Tensor]) -> Side:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention as rule

    return _of(lambda *y: rule(*y)[0], x)


def _mamba2_transformers(inputs: list[Tensor]) -> Side:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    a_H, size = _rates(inputs[3]), Mamba2Config().chunk_size
    return _of(lambda c, b, x, dt: mamba2_chunk_scan(x, dt, a_H, b, c, size), inputs)


class _Open(nn.Module):
    """A gate that lets everything through."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_full((1,), torch.inf)


def _lightning_transformers(x: list[Tensor]) -> Side:
    """MiniMax's layer without its projections, activation and norm; what is left of its gate is one multiplication."""
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    H, E = x[0].shape[2:]
    sizes: dict[str, Any] = {"hidden_size": H * E, "num_attention_heads": H, "num_key_value_heads": H, "head_dim": E}
    config = MiniMaxConfig(**sizes, num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    layer = MiniMaxLightningAttention(config, 0).to(x[0].device)
    layer.qkv_proj = layer.act_fn = layer.norm = layer.out_proj = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    layer.output_gate = _Open()  # pyright: ignore[reportAttributeAccessIssue]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        qkv_BTX = torch.cat((q, k, v), -1).flatten(2)
        return layer(qkv_BTX, None, None)[0].view_as(v)  # pyright: ignore[reportArgumentType]

    return _of(call, x)


# ---- flash-linear-attention: its kernels, called directly


def _fla_ready(device: torch.device) -> None:
    if (why := why_not(device)) is not None:
        raise ValueError(why)


def _gdn_fla(x: list[Tensor]) -> Side:
    _fla_ready(x[0].device)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    return _of(lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0], x)


def _kda_fla(x: list[Tensor]) -> Side:
    """With one decay for all channels it is the gated delta rule."""
    _fla_ready(x[0].device)
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    q, k, v, g, beta = x
    g_BTHK = g[..., None].expand_as(k) if g.ndim == 3 else g
    return _of(lambda q, k, v, g, beta: chunk_kda(q, k, v, g=g, beta=beta)[0], (q, k, v, g_BTHK, beta))


def _gla_fla(x: list[Tensor]) -> Side:
    _fla_ready(x[0].device)
    from fla.ops.gla import chunk_gla  # pyright: ignore[reportMissingImports]

    return _of(lambda *y: chunk_gla(*y)[0], x)


def _mamba2_fla(inputs: list[Tensor], *, channels: bool = False) -> Side:
    """From v = x dt and g = A dt, which cost it nothing here; with `channels` by the kernel for a decay per channel."""
    _fla_ready(inputs[0].device)
    from fla.ops.gla import chunk_gla  # pyright: ignore[reportMissingImports]
    from fla.ops.simple_gla import chunk_simple_gla  # pyright: ignore[reportMissingImports]

    c, b, x, dt = inputs
    g = dt * _rates(dt)
    leaves = (c, b, (x * dt[..., None]).to(x.dtype), g[..., None].expand_as(c) if channels else g)
    op = chunk_gla if channels else chunk_simple_gla
    return _of(lambda *y: op(*y, scale=1.0)[0], leaves)


def _lightning_fla(x: list[Tensor]) -> Side:
    _fla_ready(x[0].device)
    from fla.ops.lightning_attn import chunk_lightning_attn  # pyright: ignore[reportMissingImports]

    return _of(lambda *y: chunk_lightning_attn(*y, layer_idx=0, num_layers=1, scale=1.0)[0], x)


@dataclass(frozen=True)
class Rule:
    inputs: Callable[[Draw], list[Tensor]]
    ours: Make
    cpu: Mapping[str, Make]
    cuda: Mapping[str, Make]
    delta: bool = False
    trains: float = BARS["transformers"]
    """the least ratio to transformers with gradients"""

    def sides(self, options: Options) -> dict[str, Make]:
        """plait's first, then the competitors that this device has."""
        compiled = {COMPILED: partial(_compiled, self.ours)} if options.cuda else {}
        sides = {OURS: self.ours, **compiled, **(self.cuda if options.cuda else self.cpu)}
        return {name: make for name, make in sides.items() if options.keeps(name)}


RULES = {
    "gdn": Rule(
        _gdn_inputs,
        _delta,
        cpu={"transformers": _gdn_transformers},
        cuda={"fla gated_delta_rule": _gdn_fla, "fla kda": _kda_fla},
        delta=True,
    ),
    "kda": Rule(
        _kda_inputs,
        _delta,
        cpu={"transformers": _kda_transformers},
        cuda={"fla kda": _kda_fla},
        delta=True,
        trains=5.0,
    ),
    "gla": Rule(_gla_inputs, _gla, cpu={"naive": _gla_naive}, cuda={"fla gla": _gla_fla}),
    "mamba2": Rule(
        _mamba2_inputs,
        _mamba2,
        cpu={"transformers": _mamba2_transformers},
        cuda={"fla simple_gla": _mamba2_fla, "fla gla": partial(_mamba2_fla, channels=True)},
    ),
    "lightning": Rule(
        _lightning_inputs,
        _lightning,
        cpu={"transformers": _lightning_transformers},
        cuda={"fla lightning_attn": _lightning_fla},
    ),
}


def _compiled(ours: Make, inputs: list[Tensor]) -> Side:
    torch.compiler.reset()  # at its limit of shapes a function would silently run as it is
    call, leaves = ours(inputs)
    return torch.compile(call, dynamic=False), leaves


def steps(name: str, options: Options) -> list[Step]:
    """One step for each length and shape of heads."""
    lengths = options.lengths_or(LENGTHS["cpu"], LENGTHS["cuda"])
    shapes = [(T, H, E) for T in lengths for H, E in HEADS["cuda" if options.cuda else "cpu"]]
    return [(f"{name}, {T} tokens, {H} x {E}", partial(rows, name, options, T, H, E)) for T, H, E in shapes]


def rows(name: str, options: Options, length: int, num_heads: int, head_dim: int) -> list[Row]:
    """Every side of a rule on one shape, forward alone and forward + backward."""
    rule, device = RULES[name], options.device
    inputs = rule.inputs(Draw(device, batch_of(device, length), length, num_heads, head_dim))
    fields = {"case": name, **_shape_fields(inputs, head_dim)}
    sides, absent = _set_up(rule, inputs, options)
    least = {side: bar for side in sides for start, bar in BARS.items() if side.startswith(start)}
    do_BTHV = torch.randn_like(inputs[2])
    result = []
    for kind in PASSES:
        backward = kind == PASSES[1]
        bars = least | {"transformers": rule.trains} if backward else least
        calls = {side: partial(_run, *own, do_BTHV if backward else None) for side, (own, _) in sides.items()}
        ideal = _ideal(rule, inputs, backward)

        def more(side: str, ms: float, backward=backward, ideal=ideal) -> Row:
            (call, leaves), difference = sides[side]
            row = {**ideal.place(ms, roofline.peaks(device, dtype_of(device))), "difference": difference}
            if backward and side != COMPILED:
                row["saved_mb"] = mb(saved_bytes(lambda: call(*leaves)))
            return row

        if calls:
            result += measure(calls, {**fields, "pass": kind}, options, reference=OURS, bars=bars, timed=more)
    return result + [{**fields, "competitor": side, "note": why} for side, why in absent.items()]


def _set_up(
    rule: Rule, inputs: list[Tensor], options: Options
) -> tuple[dict[str, tuple[Side, float | None]], dict[str, str]]:
    """The sides that run, with the relative RMS difference of their outputs from plait's; and why others do not."""
    sides: dict[str, tuple[Side, float | None]] = {}
    absent: dict[str, str] = {}
    ours = None
    for name, make in rule.sides(options).items():
        try:
            side = make(inputs)
            with torch.no_grad():
                o = side[0](*side[1]).float()
            ours = o if name == OURS else ours
            sides[name] = side, None if name == OURS or ours is None else float((o - ours).norm() / ours.norm())
        except Exception as error:
            absent[name] = reason(error)
    return sides, absent


def _run(call: Callable[..., Tensor], leaves: list[Tensor], do_BTHV: Tensor | None) -> None:
    if do_BTHV is None:
        with torch.no_grad():
            call(*leaves)
    else:
        o_BTHV = call(*leaves)
        torch.autograd.grad(o_BTHV, leaves, do_BTHV.to(o_BTHV.dtype))


def _ideal(rule: Rule, inputs: list[Tensor], backward: bool) -> roofline.Ideal:
    q, v = inputs[0], inputs[2]
    B, T, H, K = q.shape
    V = v.shape[-1]
    flops = B * T * H * roofline.flops_per_token(K, V, delta=rule.delta)
    moved = sum(x.numel() * x.element_size() for x in inputs)
    return roofline.Ideal.of(flops, moved, v.numel() * v.element_size(), backward=backward)


def _shape_fields(inputs: list[Tensor], head_dim: int) -> Row:
    q = inputs[0]
    B, T, H, _ = q.shape
    shape = {"batch": B, "length": T, "heads": H, "head_dim": head_dim}
    return {"device": device_name(q.device), "dtype": dtype_name(q.dtype), **shape}
