"""RMSNorm and its gradients, in one pass each, rounded once to the dtype that the next product reads.

Shapes: N rows, D channels.
"""

# Triton comes with torch where there are GPUs
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 4096, 8
TILES = 16
"""of a program of the backward pass, which has one sum of them for the weight"""


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
        x, weight = x.contiguous(), None if weight is None else weight.contiguous()
        D = x.shape[-1]
        N = x.numel() // D
        out = torch.empty_like(x, dtype=dtype)
        scale_N = torch.empty(N, dtype=torch.float32, device=x.device)
        if N:
            sizes = _sizes(D)
            with torch.cuda.device_of(x):
                _forward[(triton.cdiv(N, sizes["ROWS"]),)](x, weight, out, scale_N, N, eps, D, num_warps=WARPS, **sizes)
        ctx.save_for_backward(x, weight, scale_N)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, scale_N = ctx.saved_tensors
        D, N = x.shape[-1], scale_N.numel()
        sizes = _sizes(D)
        programs = triton.cdiv(N, sizes["ROWS"] * TILES)
        x_grad = torch.empty_like(x)
        sums_PD = x.new_empty(0 if weight is None else programs, D, dtype=torch.float32)
        if N:
            own = x, weight, scale_N, grad.contiguous(), x_grad, sums_PD
            with torch.cuda.device_of(x):
                _backward[(programs,)](*own, N, D, TILES=TILES, num_warps=WARPS, **sizes)
        return x_grad, None if weight is None else sums_PD.sum(0).to(weight.dtype), None, None


def _sizes(D: int) -> dict[str, int]:
    columns = triton.next_power_of_2(D)
    return {"ROWS": max(1, TILE // columns), "COLUMNS": columns}


@triton.jit
def _forward(x, weight, out, scale, N, eps, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    n, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = n[:, None].to(tl.int64) * D + d[None, :]
    own = (n < N)[:, None] & (d < D)[None, :]
    v = tl.load(x + at, mask=own, other=0).to(tl.float32)
    s = tl.rsqrt(tl.sum(v * v, 1) / D + eps)
    y = v * s[:, None]
    if weight is not None:
        y *= tl.load(weight + d, mask=d < D, other=0).to(tl.float32)[None, :]
    tl.store(out + at, y, mask=own)
    tl.store(scale + n, s, mask=n < N)


@triton.jit
def _backward(
    x, weight, scale, grad, x_grad, sums, N,
    D: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for tile in range(TILES):
        n = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        at = n[:, None].to(tl.int64) * D + d[None, :]
        own = (n < N)[:, None] & (d < D)[None, :]
        s = tl.load(scale + n, mask=n < N, other=0)[:, None]
        y = tl.load(x + at, mask=own, other=0).to(tl.float32) * s
        g = tl.load(grad + at, mask=own, other=0).to(tl.float32)
        if weight is not None:
            total += tl.sum(g * y, 0)
            g *= tl.load(weight + d, mask=d < D, other=0).to(tl.float32)[None, :]
        tl.store(x_grad + at, (g - y * (tl.sum(g * y, 1) / D)[:, None]) * s, mask=own)
    if weight is not None:
        tl.store(sums + tl.program_id(0) * D + d, total, mask=d < D)
