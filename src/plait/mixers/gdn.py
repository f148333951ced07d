"""Gated DeltaNet as a mixer: projections, short convolution, decay and beta, gated norm.

Shapes: B rows, T tokens, D = d_model, H query heads, S states, K key size, V value size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.config import Gdn
from plait.mixers.base import linear
from plait.mixers.norm import Norm
from plait.mixers.recurrent import DeltaRule, MemoryState, init_dt_bias
from plait.mixers.seq import Seq


class GatedDeltaNet(DeltaRule):
    POINTS = ("q", "k", "v", "decay", "beta", "heads", "out")

    def __init__(self, config: Gdn, d_model: int):
        K, V, S = config.head_dim, config.value_dim, config.num_v_heads
        qkv = (config.num_heads * K, config.num_kv_heads * K, S * V)
        super().__init__(config, S, sum(qkv))
        self.q, self.k, self.v = (linear(d_model, size) for size in qkv)
        self.a = linear(d_model, S)
        self.b = linear(d_model, S)
        self.gate = linear(d_model, config.num_out_heads * V) if config.output_gate else None
        self.A_log = nn.Parameter(torch.empty(S))
        self.dt_bias = nn.Parameter(torch.empty(S))
        self.norm = Norm("rms", V, config.norm_eps)
        self.o = linear(config.num_out_heads * V, d_model)

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        self.init_parts(std, generator)
        self.A_log.uniform_(0, 16, generator=generator).clamp_(min=1e-6).log_()
        init_dt_bias(self.dt_bias, generator)

    def heads(self, x_BTD: Tensor, state: MemoryState | None, seq: Seq) -> tuple[Tensor, MemoryState | None]:
        config = self.config
        q, k, v = self.convolve([self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)], state, seq)
        q, k = self.rotate(*(y.unflatten(-1, (-1, config.head_dim)) for y in (q, k)), seq)
        if config.num_v_heads > config.num_kv_heads:
            q, k = (y.repeat_interleave(config.num_v_heads // config.num_kv_heads, 2) for y in (q, k))
        o = self.delta(q, k, v.unflatten(-1, (-1, config.value_dim)), self.a(x_BTD), self.b(x_BTD), state, seq)
        return self.norm_and_gate(o, self.norm, None if self.gate is None else self.gate(x_BTD), "silu"), state
