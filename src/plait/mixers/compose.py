"""Compositions of mixers in one layer: heads(...), each kind on heads of its own, and mix(...), each kind on all heads.

A part is a mixer without its output projection; the composition calls its `heads` half. Parts do not nest.

Shapes: B rows, T tokens, D = d_model, H output heads, V value size of a head, P branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Self

import torch
from torch import Tensor, nn

from plait.config import Heads, Leaf, Mix, Softmax
from plait.mixers.base import Backend, Mixer, State, Tap, constant, init_linear, linear, taps
from plait.mixers.norm import rms_norm
from plait.mixers.seq import Seq


class States(State):
    """The states of a composition's parts; each part keeps only what its kind needs."""

    def __init__(self, parts: list[State]):
        self.parts = parts

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for i, part in enumerate(self.parts):
            for name, tensor in part.tensors():
                yield f"parts.{i}.{name}", tensor

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        return type(self)([part.map(fn) for part in self.parts])

    def resized(self, max_length: int) -> Self:
        return type(self)([part.resized(max_length) for part in self.parts])

    def why_not_crop(self, length: int, longest: int) -> str | None:
        return next((why for part in self.parts if (why := part.why_not_crop(length, longest))), None)


class Composition(Mixer):
    parts: nn.ModuleList

    def __init__(self, parts: list[Mixer], *, share_output: bool = True):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        if share_output:
            for part in parts:
                part.o = None

    @property
    def mixers(self) -> list[Mixer]:
        """The parts, by their type."""
        return list(self.parts)  # pyright: ignore[reportReturnType]

    def set_backend(self, backend: Backend, *, fall_back: bool = False) -> None:
        super().set_backend(backend, fall_back=fall_back)
        for part in self.mixers:
            part.set_backend(backend, fall_back=fall_back)

    def points(self) -> dict[str, Tap]:
        inner = {f"parts.{i}.{name}": tap for i, part in enumerate(self.mixers) for name, tap in part.points().items()}
        return {name: tap for name, tap in inner.items() if not name.endswith(".out")} | super().points()

    def new_state(self, batch: int, max_length: int, *, dtype: torch.dtype, device: torch.device) -> States:
        return States([part.new_state(batch, max_length, dtype=dtype, device=device) for part in self.mixers])

    def each(self, x_BTD: Tensor, state: State | None, seq: Seq) -> list[Tensor]:
        """Head outputs [B, T, H, V] of every part."""
        states = state.parts if isinstance(state, States) else [None] * len(self.parts)
        outs = [part.heads(x_BTD, s, seq)[0] for part, s in zip(self.mixers, states, strict=True)]
        return [part.taps["heads"](o, seq) for part, o in zip(self.mixers, outs, strict=True)]


class HeadWise(Composition):
    """Disjoint heads by kind, concatenated in the original head order, one output projection (004, 4.2)."""

    def __init__(self, config: Heads, d_model: int, build: Callable[[Leaf, int], Mixer]):
        super().__init__([build(part.mixer, d_model) for part in config.parts])
        self.config = config
        H, V = config.num_out_heads, config.value_dim
        order = [head for part in config.parts for head in part.heads]
        self.place = None if order == list(range(H)) else tuple(order.index(head) for head in range(H))
        """where in the parts' concatenated outputs each head lies; None: in order"""
        self.gates = nn.ModuleDict()
        for i, part in enumerate(config.parts):
            if config.gate and isinstance(part.mixer, Softmax):
                self.gates[str(i)] = linear(d_model, len(part.heads) * V, bias=True)
        self.scale = nn.Parameter(torch.empty(H)) if config.scale else None
        self.o = linear(H * V, d_model)

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        for part in self.mixers:
            part.init_weights(std, generator)
        for gate in self.gates.values():
            # 004, 4.3.1: weights near 0 and a bias such that gates start close to 1
            assert isinstance(gate, nn.Linear)
            init_linear(gate, 0.1 * std, generator)
            gate.bias.fill_(4.0)
        if self.scale is not None:
            self.scale.fill_(1.0)
        assert self.o is not None
        init_linear(self.o, std, generator)

    def heads(self, x_BTD: Tensor, state: State | None, seq: Seq) -> tuple[Tensor, State | None]:
        """004 (13), (14), with the gate before the norm or after it."""
        config, outs = self.config, self.each(x_BTD, state, seq)
        gates = {int(i): torch.sigmoid(gate(x_BTD)).view_as(outs[int(i)]) for i, gate in self.gates.items()}
        if config.order == "gate_norm":
            outs = [o * gates[i] if i in gates else o for i, o in enumerate(outs)]
        if config.norm:
            outs = [rms_norm(o, None, config.norm_eps) for o in outs]
        if config.order == "norm_gate":
            outs = [o * gates[i] if i in gates else o for i, o in enumerate(outs)]
        o_BTHV = torch.cat(outs, 2)
        if self.place is not None:
            o_BTHV = o_BTHV.index_select(2, constant(self.place, torch.long, o_BTHV.device))
        if self.scale is not None:
            o_BTHV = o_BTHV * self.scale.to(o_BTHV.dtype)[:, None]
        return o_BTHV, state


class Mixed(Composition):
    """Every kind on all heads, fused."""

    def __init__(self, config: Mix, d_model: int, build: Callable[[Leaf, int], Mixer]):
        project = config.fuse == "project"
        super().__init__([build(mixer, d_model) for mixer in config.mixers], share_output=not project)
        self.config = config
        P, H, V = len(config.mixers), config.num_out_heads, config.value_dim
        self.scale = nn.Parameter(torch.empty(P, H)) if config.fuse == "scale" else None
        self.route = linear(d_model, P) if config.fuse == "gate" else None
        self.o = None if project else linear(H * V, d_model)
        if project:
            self.taps = taps("out")

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        for part in self.mixers:
            part.init_weights(std, generator)
        if self.scale is not None:
            self.scale.fill_(1.0)
        for module in (self.route, self.o):
            if module is not None:
                init_linear(module, std, generator)

    def forward(self, x_BTD: Tensor, state: State | None, seq: Seq) -> tuple[Tensor, State | None]:
        if self.config.fuse != "project":
            return super().forward(x_BTD, state, seq)
        outs = self.each(x_BTD, state, seq)
        multipliers = self.config.multipliers or (1.0,) * len(outs)
        y_BTD = sum(m * part.project(o) for m, part, o in zip(multipliers, self.mixers, outs, strict=True))
        assert isinstance(y_BTD, Tensor)
        return self.taps["out"](y_BTD, seq), state

    def heads(self, x_BTD: Tensor, state: State | None, seq: Seq) -> tuple[Tensor, State | None]:
        config, outs = self.config, self.each(x_BTD, state, seq)
        if config.fuse == "mean":
            outs = [rms_norm(o.flatten(2), None, config.norm_eps).view_as(o) / len(outs) for o in outs]
        elif self.scale is not None:
            outs = [o * scale_H.to(o.dtype)[:, None] for o, scale_H in zip(outs, self.scale, strict=True)]
        elif self.route is not None:
            weight_BTP = self.route(x_BTD).softmax(-1).to(outs[0].dtype)
            outs = [o * weight_BTP[..., i, None, None] for i, o in enumerate(outs)]
        total = outs[0]
        for o in outs[1:]:
            total = total + o
        return total, state
