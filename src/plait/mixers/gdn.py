"""Gated DeltaNet as a mixer: projections, short convolution, decay and beta, gated norm.

Shapes: B rows, T tokens, D = d_model, H query heads, S states, K key size, V value size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.config import Gdn
from plait.mixers.base import linear
from plait.mixers.norm import Norm
from plait.mixers.recurrent import DeltaRule, MemoryState, init_dt_bias, wide
from plait.mixers.seq import Seq


class GatedDeltaNet(DeltaRule):
    POINTS = ("q", "k", "v", "decay", "beta", "heads", "out")

    def __init__(self, config: Gdn, d_model: int):
        K, V, S = config.head_dim, config.value_dim, config.num_v_heads
        sizes = (config.num_heads * K, config.num_kv_heads * K, S * V)
        super().__init__(config, S, sum(sizes))
        self.sizes = sizes
        self.q = linear(d_model, self.sizes[0])
        self.k = linear(d_model, self.sizes[1])
        self.v = linear(d_model, self.sizes[2])
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
        q, k, v = self.qkv(torch.cat((self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)), -1), self.sizes, state, seq)
        if config.num_v_heads > config.num_kv_heads:
            q, k = (y.repeat_interleave(config.num_v_heads // config.num_kv_heads, 2) for y in (q, k))
        g = -wide(self.A_log).exp() * F.softplus(wide(self.a(x_BTD)) + wide(self.dt_bias))
        beta = torch.sigmoid(wide(self.b(x_BTD))) * (2 if config.allow_neg_eigval else 1)
        inputs = self.tapped(seq, q=q, k=k, v=v, decay=g, beta=beta)
        o = self.recur(inputs, state, seq)
        return self.norm_and_gate(o, self.norm, None if self.gate is None else self.gate(x_BTD), "silu"), state
