"""Gated linear attention as a mixer: a decay per key channel through a low-rank projection.

Shapes: B rows, T tokens, D = d_model, H heads, K key size, V value size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.config import Gla
from plait.kernels import usable
from plait.mixers.base import linear
from plait.mixers.norm import Norm
from plait.mixers.recurrent import LinearRule, MemoryState, wide
from plait.mixers.seq import Seq

TEMPERATURE = 16
"""alpha = sigmoid(.)^(1 / 16)"""


class GatedLinearAttention(LinearRule):
    POINTS = ("q", "k", "v", "decay", "heads", "out")

    def __init__(self, config: Gla, d_model: int):
        H, K, V = config.num_heads, config.key_dim, config.value_dim
        super().__init__(config, H, H * (2 * K + V))
        self.options = {"scale": K**-0.5}
        self.q = linear(d_model, H * K)
        self.k = linear(d_model, H * K)
        self.v = linear(d_model, H * V)
        self.decay_down = linear(d_model, config.gate_rank)
        self.decay_up = linear(config.gate_rank, H * K, bias=True)
        self.gate = linear(d_model, H * V) if config.output_gate else None
        self.norm = Norm("rms", V, config.norm_eps)
        self.o = linear(H * V, d_model)

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        self.init_parts(std, generator)

    def heads(self, x_BTD: Tensor, state: MemoryState | None, seq: Seq) -> tuple[Tensor, MemoryState | None]:
        parts = self.convolve([self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)], state, seq, activate=False)
        q, k, v = (y.unflatten(-1, (self.config.num_heads, -1)) for y in parts)
        q, k = self.rotate(q, k, seq)
        g = log_decay(self.decay_up(self.decay_down(x_BTD))).unflatten(-1, (self.config.num_heads, -1))
        inputs = self.tapped(seq, q=q, k=k, v=v, decay=g)
        o = self.recur(inputs, state, seq)
        return self.norm_and_gate(o, self.norm, None if self.gate is None else self.gate(x_BTD), "silu"), state


def log_decay(logits: Tensor) -> Tensor:
    """log alpha = logsigmoid(logits) / 16, in at least fp32. Differentiable once on CUDA."""
    if usable(logits) and logits.shape[1] > 1:  # of one token there is nothing to gain
        from plait.kernels.log_sigmoid import LogSigmoid

        return LogSigmoid.apply(logits, TEMPERATURE)  # pyright: ignore[reportReturnType]
    z = logits / TEMPERATURE
    return F.softplus(wide(z), beta=-TEMPERATURE, threshold=40)  # log(1 + exp(beta z)) / beta, in one pass
