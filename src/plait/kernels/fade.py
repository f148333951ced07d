"""The scan of chunked linear attention, S <- keep S + W over steps, in one pass: the state stays in registers.

Shapes: L steps, E states [K, V], J 1 or K.
"""

# Triton comes with torch where there are GPUs
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 256, 2
"""numbers of a state that a program carries: 1 KB a step, and few enough that 8 states of 128 x 128 fill a GPU. Each
thread has four and reads whole sectors with its neighbours; of eight, as Triton would have for bf16, halves."""
STAGES = tl.constexpr(8)
"""W of seven steps to come are under way: they do not wait for the state, and few programs must keep memory busy"""


def fade_(state_EKV: Tensor, keep_LEJ1: Tensor, w_LEKV: Tensor, before_LEKV: Tensor, order: int) -> None:
    """In place over the steps, or with order -1 against them; what S was before each goes to `before`, in its dtype."""
    L, E, K, V = w_LEKV.shape
    assert state_EKV.is_contiguous() and before_LEKV.is_contiguous()
    columns = min(triton.next_power_of_2(V), TILE)
    sizes = {"K": K, "V": V, "ROWS": TILE // columns, "COLUMNS": columns}
    _, *strides, _ = keep_LEJ1.expand(L, E, K, 1).stride()  # one for all channels is one again and again
    grid = (E * triton.cdiv(K, TILE // columns) * triton.cdiv(V, columns),)
    with torch.cuda.device_of(w_LEKV):
        _fade[grid](
            state_EKV, keep_LEJ1, w_LEKV.contiguous(), before_LEKV, L, E, *strides,
            BACK=order < 0, num_warps=WARPS, **sizes,
        )  # fmt: skip


@triton.jit(do_not_specialize=("L", "E"))
def _fade(
    state, keep, w, before, L, E, E_STRIDE, K_STRIDE,
    BACK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program for each tile of a state."""
    across: tl.constexpr = tl.cdiv(V, COLUMNS)
    tiles: tl.constexpr = tl.cdiv(K, ROWS) * across
    tile, e = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    k = (tile // across * ROWS + tl.arange(0, ROWS))[:, None]
    v = (tile % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    at, own = k * V + v, (k < K) & (v < V)
    s = tl.load(state + e * K * V + at, mask=own, other=0)
    for step in tl.range(L, num_stages=STAGES):
        n = (L - 1 - step if BACK else step) * E + e
        add = tl.load(w + n * K * V + at, mask=own, other=0)
        times = tl.load(keep + n * E_STRIDE + k * K_STRIDE, mask=k < K, other=0)
        tl.store(before + n * K * V + at, s, mask=own)
        s = s * times + add
    tl.store(state + e * K * V + at, s, mask=own)
