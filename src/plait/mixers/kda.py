"""Kimi Delta Attention as a mixer: the gated delta rule with a decay per key channel, applied before the delta step.

Shapes: B rows, T tokens, D = d_model, H heads, K key size, V value size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.config import Kda
from plait.mixers.base import linear
from plait.mixers.norm import Norm
from plait.mixers.recurrent import DeltaRule, MemoryState, init_dt_bias
from plait.mixers.seq import Seq


class KimiDeltaAttention(DeltaRule):
    POINTS = ("q", "k", "v", "decay", "beta", "heads", "out")

    def __init__(self, config: Kda, d_model: int):
        H, K, V = config.num_heads, config.head_dim, config.value_dim
        super().__init__(config, H, H * (2 * K + V))
        self.q = linear(d_model, H * K)
        self.k = linear(d_model, H * K)
        self.v = linear(d_model, H * V)
        self.f_down, self.f_up = linear(d_model, V), linear(V, H * K)
        self.b = linear(d_model, H)
        self.gate_down = linear(d_model, V) if config.output_gate else None
        self.gate_up = linear(V, H * V, bias=True) if config.output_gate else None
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H * K))
        self.norm = Norm("rms", V, config.norm_eps)
        self.o = linear(H * V, d_model)

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        self.init_parts(std, generator)
        self.A_log.uniform_(1, 16, generator=generator).log_()
        if self.config.dt_init == "zero":
            self.dt_bias.zero_()
        else:
            init_dt_bias(self.dt_bias, generator)

    def heads(self, x_BTD: Tensor, state: MemoryState | None, seq: Seq) -> tuple[Tensor, MemoryState | None]:
        config = self.config
        q, k, v = self.convolve([self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)], state, seq)
        f = self.f_up(self.f_down(x_BTD))
        q, k, v, f = (y.unflatten(-1, (config.num_heads, -1)) for y in (q, k, v, f))
        o = self.delta(*self.rotate(q, k, seq), v, f, self.b(x_BTD), state, seq)
        gate = None
        if self.gate_down is not None and self.gate_up is not None:
            gate = self.gate_up(self.gate_down(x_BTD))
        return self.norm_and_gate(o, self.norm, gate, "sigmoid"), state
