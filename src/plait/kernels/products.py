"""Batched products of fp32 on tensor cores, to the precision of fp32."""

# Triton comes with torch where there are GPUs
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def square_mm(a_NCC: Tensor, x_NCX: Tensor, dtype: torch.dtype) -> Tensor:
    """a x, rounded once. C: a power of two from 16 to 128; x: fp32 or narrower."""
    N, C, X = x_NCX.shape
    x_NCX, out_NCX = x_NCX.contiguous(), x_NCX.new_empty(N, C, X, dtype=dtype)
    tile = min(64, triton.next_power_of_2(max(X, 16)))
    with torch.cuda.device_of(x_NCX):
        grid, sizes = (N * triton.cdiv(X, tile),), {"C": C, "X": X, "TILE": tile, "STEP": min(C, 32)}
        _square[grid](a_NCC, x_NCX, out_NCX, *a_NCC.stride(), **sizes, num_warps=8)
    return out_NCX


@triton.jit
def _square(a, x, out, a_n, a_t, a_s, C: tl.constexpr, X: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr):
    tiles = tl.cdiv(X, TILE)
    n = (tl.program_id(0) // tiles).to(tl.int64)
    a += n * a_n
    x += n * C * X
    t, s = tl.arange(0, C)[:, None], tl.arange(0, STEP)
    at = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)[None, :]
    total = tl.zeros((C, TILE), tl.float32)
    for first in range(0, C, STEP):
        rows = tl.load(a + t * a_t + (first + s[None, :]) * a_s)
        columns = tl.load(x + (first + s[:, None]) * X + at, mask=at < X, other=0).to(tl.float32)
        total = tl.dot(rows, columns, total, input_precision="tf32x3")
    tl.store(out + (n * C + t) * X + at, total, mask=at < X)
