"""Norms over the last dimension, computed in at least fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.config import NormKind
from plait.kernels import usable

LARGEST = 16384
"""channels that fit into the registers of the kernel for training"""


class Norm(nn.Module):
    """RMSNorm, RMSNorm with weight 1 + w (rms1p), or LayerNorm, with a bias or without."""

    def __init__(self, kind: NormKind, size: int, eps: float):
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if kind == "layer" else None

    def init_weights(self) -> None:
        self.weight.fill_(0.0 if self.kind == "rms1p" else 1.0)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """dtype: of the result; None: x's."""
        dtype = dtype or x.dtype
        if self.kind in ("layer", "layer_nobias"):
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), bias, self.eps).to(dtype)
        weight = 1 + wide(self.weight) if self.kind == "rms1p" else self.weight
        return rms_norm(x, weight, self.eps, dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """x / rms(x) * weight over the last dimension, in x's dtype or the one given. Differentiable once on CUDA."""
    dtype, row = dtype or x.dtype, weight is None or weight.shape == x.shape[-1:]
    if row and torch.is_grad_enabled() and usable(x) and x.shape[-1] <= LARGEST:
        from plait.kernels.norm import RmsNorm

        return RmsNorm.apply(x, weight, eps, dtype)  # pyright: ignore[reportReturnType]
    if row and x.is_cuda and (weight is None or weight.dtype == x.dtype):  # one kernel, with the same sums in fp32
        return F.rms_norm(x, x.shape[-1:], weight, eps).to(dtype)
    x_wide = wide(x)
    normed = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(dtype)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last dimension, in x's dtype."""
    x_wide = wide(x)
    return (x_wide * torch.rsqrt(x_wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """At least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
