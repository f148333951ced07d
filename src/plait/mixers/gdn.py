"""Gated DeltaNet as a mixer: projections, short convolution, decay and beta, gated norm, and its recurrent state.

Shapes: B rows, T tokens, D = d_model, H query heads, S states, K key size, V value size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.config import Gdn
from plait.mixers.base import Mixer, RecurrentState, init_linear, linear
from plait.mixers.conv import ShortConv
from plait.mixers.delta import delta_chunk, delta_naive, delta_step
from plait.mixers.norm import Norm, l2_norm
from plait.mixers.seq import Seq


@dataclass
class DeltaState(RecurrentState):
    """tail: the last inputs of the convolution (None without one); memory: the fp32 matrix of every state."""

    tail_BWC: Tensor | None
    memory_BSKV: Tensor


class GatedDeltaNet(Mixer):
    POINTS = ("q", "k", "v", "decay", "beta", "heads", "out")

    def __init__(self, config: Gdn, d_model: int):
        super().__init__()
        self.config = config
        K, V, S = config.head_dim, config.value_dim, config.num_v_heads
        self.sizes = (config.num_heads * K, config.num_kv_heads * K, S * V)
        self.q = linear(d_model, self.sizes[0])
        self.k = linear(d_model, self.sizes[1])
        self.v = linear(d_model, self.sizes[2])
        self.a = linear(d_model, S)
        self.b = linear(d_model, S)
        self.conv = ShortConv(sum(self.sizes), config.conv_size) if config.conv_size else None
        self.gate = linear(d_model, config.num_out_heads * V) if config.output_gate else None
        self.A_log = nn.Parameter(torch.empty(S))
        self.dt_bias = nn.Parameter(torch.empty(S))
        self.norm = Norm("rms", V, config.norm_eps)
        self.o = linear(config.num_out_heads * V, d_model)

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        for module in (self.q, self.k, self.v, self.a, self.b, self.gate, self.o):
            if module is not None:
                init_linear(module, std, generator)
        if self.conv is not None:
            self.conv.init_weights(generator)
        self.norm.init_weights()
        # A = U(0, 16); dt log-uniform in [1e-3, 0.1], at least 1e-4, through the inverse of softplus
        self.A_log.uniform_(0, 16, generator=generator).clamp_(min=1e-6).log_()
        self.dt_bias.uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_().clamp_(min=1e-4)
        self.dt_bias.add_(torch.log(-torch.expm1(-self.dt_bias)))

    def new_state(self, batch: int, max_length: int, *, dtype: torch.dtype, device: torch.device) -> DeltaState:
        config = self.config
        tail = None
        if config.conv_size:
            tail = torch.zeros(batch, config.conv_size - 1, sum(self.sizes), dtype=dtype, device=device)
        shape = (batch, config.num_v_heads, config.head_dim, config.value_dim)
        wide = torch.promote_types(dtype, torch.float32)
        return DeltaState(tail, torch.zeros(shape, dtype=wide, device=device))

    def heads(self, x_BTD: Tensor, state: DeltaState | None, seq: Seq) -> tuple[Tensor, DeltaState | None]:
        q, k, v = self._qkv(x_BTD, state, seq)
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        g = -self.A_log.to(wide).exp() * F.softplus(self.a(x_BTD).to(wide) + self.dt_bias.to(wide))
        beta = torch.sigmoid(self.b(x_BTD).to(wide)) * (2 if self.config.allow_neg_eigval else 1)
        g, beta = self.taps["decay"](g, seq), self.taps["beta"](beta, seq)
        memory = None if state is None else state.memory_BSKV
        o, memory = self._mix(q, k, v, g, beta, memory, seq)
        if state is not None:
            state.memory_BSKV.copy_(memory.detach())
        o = self.norm(o)
        if self.gate is not None:
            o = o * F.silu(self.gate(x_BTD)).view_as(o)
        return o, state

    def _qkv(self, x_BTD: Tensor, state: DeltaState | None, seq: Seq) -> tuple[Tensor, Tensor, Tensor]:
        """Unit queries and keys, and values, one set per state."""
        config = self.config
        x = torch.cat((self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)), -1)
        x = F.silu(x) if self.conv is None else self.conv(x, None if state is None else state.tail_BWC, seq)
        q, k, v = x.split(self.sizes, -1)
        q, k = (l2_norm(y.unflatten(-1, (-1, config.head_dim))) for y in (q, k))
        if config.num_v_heads > config.num_kv_heads:
            q, k = (y.repeat_interleave(config.num_v_heads // config.num_kv_heads, 2) for y in (q, k))
        v = v.unflatten(-1, (-1, config.value_dim))
        return self.taps["q"](q, seq), self.taps["k"](k, seq), self.taps["v"](v, seq)

    def _mix(self, q, k, v, g, beta, memory: Tensor | None, seq: Seq) -> tuple[Tensor, Tensor]:
        if self.backend == "naive":
            return self._naive(q, k, v, g, beta, memory, seq)
        if memory is not None and seq.dense and q.shape[1] == 1:
            return delta_step(q, k, v, g, beta, memory)
        return delta_chunk(q, k, v, g, beta, memory, seq)

    def _naive(self, q, k, v, g, beta, memory: Tensor | None, seq: Seq) -> tuple[Tensor, Tensor]:
        """Sequence by sequence, token by token."""
        outs, memories = [], []
        for s, parts in enumerate(zip(*(seq.split(x) for x in (q, k, v, g, beta)), strict=True)):
            o_s, memory_s = delta_naive(*parts, None if memory is None else memory[s : s + 1])
            outs.append(o_s)
            memories.append(memory_s)
        return torch.cat(outs, 0 if seq.dense else 1), torch.cat(memories)
