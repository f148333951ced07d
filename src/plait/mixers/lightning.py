"""Lightning attention as a mixer: linear attention with a fixed decay per head.

Shapes: B rows, T tokens, D = d_model, H query heads, G KV heads, E head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.config import Lightning
from plait.mixers.base import constant, linear
from plait.mixers.norm import Norm, rms_norm
from plait.mixers.recurrent import LinearRule, MemoryState
from plait.mixers.seq import Seq


class LightningAttention(LinearRule):
    POINTS = ("q", "k", "v", "heads", "out")

    def __init__(self, config: Lightning, d_model: int):
        H, G, E = config.num_heads, config.num_kv_heads, config.head_dim
        super().__init__(config, H)
        self.options = {"scale": 1.0}
        self.q = linear(d_model, H * E)
        self.k = linear(d_model, G * E)
        self.v = linear(d_model, G * E)
        low = config.output_gate == "low_rank"
        self.gate_down = linear(d_model, config.gate_rank) if low else None
        self.gate_up = None
        if config.output_gate is not None:
            self.gate_up = linear(config.gate_rank if low else d_model, H * E)
        self.norm = Norm("rms", H * E, config.norm_eps) if config.output_norm == "full" else None
        self.o = linear(H * E, d_model)

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        self.init_parts(std, generator)

    def heads(self, x_BTD: Tensor, state: MemoryState | None, seq: Seq) -> tuple[Tensor, MemoryState | None]:
        config = self.config
        q, k, v = (p(x_BTD).unflatten(-1, (-1, config.head_dim)) for p in (self.q, self.k, self.v))
        if config.activation == "silu":
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        q, k = self.rotate(q, k, seq)
        q, k, v = self.tapped(seq, q=q, k=k, v=v)
        # Every query head has a decay of its own, so keys and values are as many as queries.
        if config.num_kv_heads < config.num_heads:
            group = config.kv_map or [h * config.num_kv_heads // config.num_heads for h in range(config.num_heads)]
            group_H = constant(group, torch.long, q.device)
            k, v = k[:, :, group_H], v[:, :, group_H]
        g_H = constant([-slope for slope in config.slopes], torch.promote_types(q.dtype, torch.float32), q.device)
        o = self.recur((q, k, v, g_H.expand(q.shape[:3])), state, seq)
        if config.output_norm == "head":
            o = rms_norm(o, None, config.norm_eps)
        elif self.norm is not None:
            o = self.norm(o.flatten(-2)).view_as(o)
        gate = None
        if self.gate_up is not None:
            gate = self.gate_up(x_BTD if self.gate_down is None else self.gate_down(x_BTD))
        return self.norm_and_gate(o, None, gate, "sigmoid"), state
