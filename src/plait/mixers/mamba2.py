"""Mamba-2 (state-space duality, arXiv 2405.21060) as a mixer: linear attention with a decay per head, in which keys and
queries (B and C) are shared by a group of heads and values are scaled by the step size.

Shapes: B rows, T tokens, D = d_model, H heads, P head_dim, G groups, N state_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.config import Mamba2
from plait.mixers.base import linear
from plait.mixers.chunked import mul_rows
from plait.mixers.norm import Norm, rms_norm, wide
from plait.mixers.recurrent import LinearRule, MemoryState, init_dt_bias
from plait.mixers.seq import Seq


class Mamba2Mixer(LinearRule):
    POINTS = ("q", "k", "v", "decay", "heads", "out")

    def __init__(self, config: Mamba2, d_model: int):
        H, P, G, N = config.num_heads, config.head_dim, config.num_groups, config.state_dim
        super().__init__(config, H, H * P + 2 * G * N, conv_bias=True)
        self.options = {"scale": 1.0}
        self.z = linear(d_model, H * P)
        self.x = linear(d_model, H * P)
        self.b = linear(d_model, G * N)
        self.c = linear(d_model, G * N)
        self.dt = linear(d_model, H)
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.skip = nn.Parameter(torch.empty(H))
        self.norm_groups = config.num_groups if config.norm_groups is None else config.norm_groups
        self.norm = Norm("rms", H * P, config.norm_eps) if self.norm_groups else None
        self.o = linear(H * P, d_model)

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        self.init_parts(std, generator)
        self.A_log.uniform_(1, 16, generator=generator).log_()
        init_dt_bias(self.dt_bias, generator)
        self.skip.fill_(1)

    def heads(self, x_BTD: Tensor, state: MemoryState | None, seq: Seq) -> tuple[Tensor, MemoryState | None]:
        config = self.config
        x, b, c = self.convolve([self.x(x_BTD), self.b(x_BTD), self.c(x_BTD)], state, seq)
        x_BTHP = x.unflatten(-1, (config.num_heads, -1))
        b_BTGN, c_BTGN = (y.unflatten(-1, (config.num_groups, -1)) for y in (b, c))
        dt_BTH = F.softplus(wide(self.dt(x_BTD)) + wide(self.dt_bias))
        v = scale_heads(x_BTHP, dt_BTH)
        inputs = self.tapped(seq, q=c_BTGN, k=b_BTGN, v=v, decay=-wide(self.A_log).exp() * dt_BTH)
        q, k, v, g = inputs
        if config.num_groups < config.num_heads:
            q, k = (y.repeat_interleave(config.num_heads // config.num_groups, 2) for y in (q, k))
        o = self.recur((q, k, v, g), state, seq)
        o = o + (x_BTHP * wide(self.skip)[:, None]).to(o.dtype)
        return self._gated(o, self.z(x_BTD).view_as(o)), state

    def _gated(self, o_BTHP: Tensor, z_BTHP: Tensor) -> Tensor:
        """SiLU gate and RMSNorm over groups of heads, in the order the config says."""
        if self.norm is None:
            return o_BTHP * F.silu(z_BTHP)
        gate_first = self.config.gate_order == "gate_norm"
        o_BTHP = wide(o_BTHP) * F.silu(wide(z_BTHP)) if gate_first else o_BTHP
        grouped = o_BTHP.unflatten(2, (self.norm_groups, -1)).flatten(-2)  # B, T, norm groups, channels
        o = rms_norm(grouped, self.norm.weight.view(self.norm_groups, -1), self.config.norm_eps).view_as(o_BTHP)
        return o.to(z_BTHP.dtype) if gate_first else o * F.silu(z_BTHP)


class _ScaleHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTHV, by_BTH):
        ctx.save_for_backward(x_BTHV, by_BTH)
        return _scaled(x_BTHV, by_BTH)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BTHV):
        x_BTHV, by_BTH = ctx.saved_tensors
        return _scaled(grad_BTHV, by_BTH), (grad_BTHV.to(by_BTH.dtype) * x_BTHV).sum(-1)


def _scaled(x_BTHV: Tensor, by_BTH: Tensor) -> Tensor:
    return mul_rows(x_BTHV.flatten(0, 1), by_BTH.flatten(0, 1)[..., None]).view(x_BTHV.shape)


def scale_heads(x_BTHV: Tensor, by_BTH: Tensor) -> Tensor:
    """x times a number for each head, at least as wide, rounded once."""
    if not x_BTHV.is_cuda:
        return (x_BTHV * by_BTH[..., None]).to(x_BTHV.dtype)
    return _ScaleHeads.apply(x_BTHV, by_BTH)
