"""Batched products of fp32 on tensor cores, to the precision of fp32."""

# Triton comes with torch where there are GPUs
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def square_mm(a_NCC: Tensor, x_NCX: Tensor, dtype: torch.dtype, gate_NCJ: Tensor | None = None) -> Tensor:
    """a x, or a (x * gate), rounded once. C: a power of two, at least 16; J: 1 or X; x: fp32 or narrower."""
    (N, C, X), J = x_NCX.shape, 0 if gate_NCJ is None else gate_NCJ.shape[2]
    own = (x.contiguous() for x in (x_NCX, x_NCX if gate_NCJ is None else gate_NCJ))
    out_NCX = x_NCX.new_empty(N, C, X, dtype=dtype)
    sizes = {"ROWS": min(C, 128), "COLUMNS": min(triton.next_power_of_2(max(X, 16)), 64), "STEP": min(C, 32)}
    tiles = C // sizes["ROWS"] * triton.cdiv(X, sizes["COLUMNS"])
    with torch.cuda.device_of(x_NCX):
        _square[(N * tiles,)](a_NCC, *own, out_NCX, *a_NCC.stride(), C=C, X=X, J=J, **sizes, num_warps=8)
    return out_NCX


@triton.jit
def _square(
    a, x, gate, out, a_n, a_t, a_s,
    C: tl.constexpr, X: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A program for each tile of a product."""
    across = tl.cdiv(X, COLUMNS)
    tiles = C // ROWS * across
    n, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    t, s = tile // across * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, STEP)
    c = tile % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    a += n * a_n
    x += n * C * X
    gate += n * C * J
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, C, STEP):
        left = tl.load(a + t * a_t + (first + s[None, :]) * a_s)
        right = tl.load(x + (first + s[:, None]) * X + c, mask=c < X, other=0).to(tl.float32)
        if J:
            right *= tl.load(gate + (first + s[:, None]) * J + c % J, mask=c < X, other=0)
        total = tl.dot(left, right, total, input_precision="tf32x3")
    tl.store(out + (n * C + t) * X + c, total, mask=c < X)
