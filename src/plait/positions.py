"""Positions as tensors: RoPE and its scalings, and the log-n scale of softmax queries."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from plait.config import Softmax
from plait.kernels import usable
from plait.rope import RopeScaling


def rope_frequencies(config: Softmax, device: torch.device | None = None) -> tuple[Tensor, float]:
    """Angles per position of each rotated pair, float64 [rotary_dim / 2], and the factor on cos and sin."""
    dim, theta, scaling = config.rotary_dim, config.rope_theta, config.rope_scaling
    assert theta is not None
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    if scaling is None:
        return frequency, 1.0
    factor = scaling.attention_factor or 1.0
    if scaling.kind == "linear":
        return frequency / scaling.factor, factor
    if scaling.kind == "llama3":
        return _llama3(frequency, scaling), factor
    factor = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1
    return _yarn(frequency, dim, theta, scaling), factor


def _llama3(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3: keep short wavelengths, interpolate long ones, blend in between."""
    assert scaling.original_length is not None
    turns = scaling.original_length * frequency / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return frequency * (keep + (1 - keep) / scaling.factor)


def _yarn(frequency: Tensor, dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN: a ramp over the pairs, between those that turn beta_fast and beta_slow times within original_length."""

    length = scaling.original_length
    assert length is not None

    def pair(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(scaling.beta_fast)), 0)
    high = min(math.ceil(pair(scaling.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64, device=frequency.device) - low) / max(high - low, 1e-3)
    interpolate = ramp.clamp(0, 1)
    return frequency * (1 - interpolate + interpolate / scaling.factor)


def rope_tables(config: Softmax, position_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, 1, rotary_dim / 2] in at least fp32."""
    frequency, factor = rope_frequencies(config, position_BT.device)
    dtype = torch.promote_types(dtype, torch.float32)
    angle = position_BT[..., None, None].to(dtype) * frequency.to(dtype)
    return angle.cos() * factor, angle.sin() * factor


def apply_rope(x_BTHD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first rotary_dim channels of every head; the rest pass."""
    if not torch.compiler.is_compiling():
        return _Rotation.apply(x_BTHD, cos, sin, interleaved, torch.is_grad_enabled())  # pyright: ignore[reportReturnType]
    dim = 2 * cos.shape[-1]
    a, b = _pairs(x_BTHD[..., :dim], interleaved)
    pairs = a * cos - b * sin, b * cos + a * sin
    rotated = (torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)).to(x_BTHD.dtype)
    return rotated if dim == x_BTHD.shape[-1] else torch.cat((rotated, x_BTHD[..., dim:]), -1)


class _Rotation(torch.autograd.Function):
    """The gradient is the rotation back; autograd's own would read and write several times as much."""

    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, trained: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x_BTHD, cos, sin, interleaved, trained)

    @staticmethod
    def backward(ctx: Any, grad_BTHD: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(grad_BTHD, cos, -sin, ctx.interleaved, True), None, None, None, None


def _rotated(x_BTHD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, trained: bool) -> Tensor:
    if trained and usable(x_BTHD):
        from plait.kernels.rotation import rotate

        return rotate(x_BTHD, cos, sin, interleaved)
    dim = 2 * cos.shape[-1]
    out = torch.empty_like(x_BTHD) if dim == x_BTHD.shape[-1] else x_BTHD.clone()
    a, b = _pairs(x_BTHD[..., :dim], interleaved)
    a_out, b_out = _pairs(out[..., :dim], interleaved)
    torch.addcmul(a * cos, b, sin, value=-1, out=a_out)
    torch.addcmul(b * cos, a, sin, out=b_out)
    return out


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return a, b


def logn_scale(config: Softmax, position_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Factor on the query of each token [B, T]: loglen max(1, ln t / ln L) (001), loga ln(t + a) / ln a (004).

    t is the number of real tokens of the row so far, the token itself included.
    """
    count = (position_BT + 1).to(torch.promote_types(dtype, torch.float32))
    base = config.logn_base
    assert base is not None
    if config.logn == "loglen":
        return (count.log() / math.log(base)).clamp(min=1)
    return (count + base).log() / math.log(base)
