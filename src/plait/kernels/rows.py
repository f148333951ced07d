"""Rows times numbers of their own: the product is rounded once, and nothing wider goes to memory."""

# Triton comes with torch where there are GPUs
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def times_rows(x_NRX: Tensor, gate_NCJ: Tensor, dtype: torch.dtype) -> Tensor:
    """x * gate, which each of the R / C queries of a token shares. J: 1 or X; both at most fp32."""
    (N, R, X), (_, C, J) = x_NRX.shape, gate_NCJ.shape
    if x_NRX.stride(2) != 1:
        x_NRX = x_NRX.contiguous()
    out_NRX = x_NRX.new_empty(N, R, X, dtype=dtype)
    columns = min(triton.next_power_of_2(X), 256)
    sizes = {"X": X, "J": J, "ROWS": BLOCK // columns, "COLUMNS": columns}
    tiles = triton.cdiv(N * R, sizes["ROWS"]) * triton.cdiv(X, columns)
    if tiles:
        with torch.cuda.device_of(x_NRX):
            own = x_NRX, gate_NCJ.contiguous(), out_NRX
            _times[(tiles,)](*own, *x_NRX.stride()[:2], N * R, R=R, C=C, **sizes, num_warps=8)
    return out_NRX


@triton.jit
def _times(
    x, gate, out, s_n, s_r, count,
    R: tl.constexpr, C: tl.constexpr, X: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program for each tile of the rows of all N."""
    across: tl.constexpr = (X + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    own = (row < count) & (column < X)
    n, r = row // R, row % R
    token = n * C + r % C
    times = tl.load(gate + token, mask=row < count) if J == 1 else tl.load(gate + token * X + column, mask=own)
    value = tl.load(x + n * s_n + r * s_r + column, mask=own)
    tl.store(out + row * X + column, value.to(tl.float32) * times.to(tl.float32), mask=own)
