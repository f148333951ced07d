"""RoPE's rotation: each number read and written once.

Shapes: B rows, T tokens, H heads, E channels of a head, J rotated pairs.
"""

# Triton comes with torch where there are GPUs
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate(x_BTHE: Tensor, cos_BT1J: Tensor, sin_BT1J: Tensor, interleaved: bool) -> Tensor:
    """cos, sin: of every row, or of one for all. The channels after the first 2 J pass."""
    B, T, H, E = x_BTHE.shape
    J = cos_BT1J.shape[-1]
    out_BTHE = torch.empty_like(x_BTHE) if 2 * J == E else x_BTHE.clone()
    cos, sin = (x.contiguous().expand(B, T, 1, J) for x in (cos_BT1J, sin_BT1J))
    if out_BTHE.numel():
        sizes = {"H": H, "J": J, "HEADS": triton.next_power_of_2(H), "PAIRS": triton.next_power_of_2(J)}
        strides = *x_BTHE.stride(), *out_BTHE.stride(), *cos.stride()[:2]
        with torch.cuda.device_of(x_BTHE):
            _rotate[(B * T,)](x_BTHE, cos, sin, out_BTHE, T, *strides, INTERLEAVED=interleaved, **sizes)
    return out_BTHE


@triton.jit
def _rotate(
    x, cos, sin, out, T, x_b, x_t, x_h, x_e, out_b, out_t, out_h, out_e, cos_b, cos_t,
    H: tl.constexpr, J: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A program for each token."""
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    h, j = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    own = (h < H) & (j < J)
    first, second = (2 * j, 2 * j + 1) if INTERLEAVED else (j, j + J)
    turn = b * cos_b + t * cos_t + j
    c, s = tl.load(cos + turn, mask=j < J), tl.load(sin + turn, mask=j < J)
    x += b * x_b + t * x_t + h * x_h
    out += b * out_b + t * out_t + h * out_h
    p = tl.load(x + first * x_e, mask=own).to(tl.float32)
    q = tl.load(x + second * x_e, mask=own).to(tl.float32)
    tl.store(out + first * out_e, p * c - q * s, mask=own)
    tl.store(out + second * out_e, q * c + p * s, mask=own)
