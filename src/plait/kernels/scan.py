"""The scan of the chunked delta rule, S <- P S + W over steps, in one pass: the state stays in registers.

Shapes: L steps, E states [K, V].
"""

# Triton comes with torch where there are GPUs
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HALF = 64
"""rows of a state in one tile; there are at most two"""
LARGEST = 2 * HALF
COLUMNS = 16
"""of a state that a program carries, the fewest: where there are few states many must share the work of a step"""


def scan_(state_EKV: Tensor, p_LEKK: Tensor, w_LEKV: Tensor, before_LEKV: Tensor, order: int) -> None:
    """In place over the steps, or with order -1 by P^T against them; what S was before each goes to `before`, in its
    dtype. Products to the precision of fp32."""
    L, E, K, V = w_LEKV.shape
    assert state_EKV.is_contiguous() and before_LEKV.is_contiguous()
    p_LEKK, w_LEKV = p_LEKK.contiguous(), w_LEKV.contiguous()
    rows = min(max(triton.next_power_of_2(K), 16), HALF)
    with torch.cuda.device_of(w_LEKV):
        _scan[(E * triton.cdiv(V, COLUMNS),)](
            state_EKV, p_LEKK, w_LEKV, before_LEKV, L, E,
            BACK=order < 0, TWO=rows < K, K=K, V=V, ROWS=rows, COLUMNS=COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=("L", "E"))
def _scan(
    state, p, w, before, L, E,
    BACK: tl.constexpr, TWO: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program for each tile of columns."""
    across: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    e = (tl.program_id(0) // across).to(tl.int64)
    k = tl.arange(0, ROWS)
    v = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    at, own = k[:, None] * V + v, (k[:, None] < K) & (v < V)
    at_2, own_2 = at + ROWS * V, (k[:, None] + ROWS < K) & (v < V)
    state += e * K * V
    top = tl.load(state + at, mask=own, other=0)
    if TWO:
        bottom = tl.load(state + at_2, mask=own_2, other=0)
    # P of the next steps is under way: it does not wait for the state. As many as fit into every GPU's shared memory.
    for step in tl.range(L, num_stages=2 if TWO else 3):
        n = (L - 1 - step if BACK else step) * E + e
        tl.store(before + n * K * V + at, top, mask=own)
        after = tl.load(w + n * K * V + at, mask=own, other=0)
        after = tl.dot(_block(p + n * K * K, k, k, K, BACK), top, after, input_precision="tf32x3")
        if TWO:
            tl.store(before + n * K * V + at_2, bottom, mask=own_2)
            after_2 = tl.load(w + n * K * V + at_2, mask=own_2, other=0)
            after_2 = tl.dot(_block(p + n * K * K, ROWS + k, k, K, BACK), top, after_2, input_precision="tf32x3")
            after = tl.dot(_block(p + n * K * K, k, ROWS + k, K, BACK), bottom, after, input_precision="tf32x3")
            bottom = tl.dot(
                _block(p + n * K * K, ROWS + k, ROWS + k, K, BACK), bottom, after_2, input_precision="tf32x3"
            )
        top = after
    tl.store(state + at, top, mask=own)
    if TWO:
        tl.store(state + at_2, bottom, mask=own_2)


@triton.jit
def _block(p, row, column, K: tl.constexpr, BACK: tl.constexpr):
    """Of P, or of P^T."""
    row, column = row[:, None], column[None, :]
    return tl.load(p + (column * K + row if BACK else row * K + column), mask=(row < K) & (column < K), other=0)
