"""Pair sums of chunked recurrences in bf16, what is read by them, and their gradients (mixers/chunked.py). Nothing but
the results goes to memory.

Shapes: N = chunks * states, C tokens of a chunk, R = G * C rows of G queries (or one of keys), K key size,
V value size.
"""

# Triton comes with torch where there are GPUs
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SUB = 16
"""tokens of a sub-block, the fewest rows of a product on tensor cores"""
COLUMNS = 64
"""of a value that a program of _reads carries, the fewest. With 32 or fewer, beside 64 channels or more, ptxas 12.8
(Triton 3.6, Hopper) takes the place of a tile in shared memory from a register that nothing has written"""


def erasing_pairs(k_NCK: Tensor, b_NC: Tensor, times_NC1: Tensor) -> Tensor:
    """times_t * k_t k_s 2^(b_t - b_s) for s <= t, else 0, in fp32. b: fp64."""
    N, C, K = k_NCK.shape
    out_NCC = k_NCK.new_empty(N, C, C, dtype=torch.float32)
    tile = min(C, 64)
    sizes = {"C": C, "K": K, "TILE": tile, "CHANNELS": min(triton.next_power_of_2(max(K, 16)), 128)}
    own = (x.contiguous() for x in (k_NCK, b_NC, times_NC1))
    with torch.cuda.device_of(k_NCK):
        _erasing[(N * (C // tile) ** 2,)](*own, out_NCC, **sizes)
    return out_NCC


@triton.jit
def _erasing(
    k, b, times, out, C: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """A program for each tile of a chunk's [C, C]."""
    tiles = C // TILE
    n = (tl.program_id(0) // (tiles * tiles)).to(tl.int64)
    i, j = tl.program_id(0) // tiles % tiles, tl.program_id(0) % tiles
    t, s = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    pairs = tl.zeros((TILE, TILE), tl.float32)
    if j <= i:
        pairs = _products(k, k, n * C + t, n * C + s, K, TILE, CHANNELS) * _decays(b + n * C, t, s)
        pairs *= tl.load(times + n * C + t)[:, None]
    tl.store(out + (n * C + t[:, None]) * C + s[None, :], pairs)


@triton.jit
def _products(x, y, t, s, K: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr):
    """Rows t of x times rows s of y."""
    total = tl.zeros((TILE, TILE), tl.float32)
    for first in range(0, K, CHANNELS):
        c = first + tl.arange(0, CHANNELS)[None, :]
        left = tl.load(x + t[:, None] * K + c, mask=c < K, other=0)
        right = tl.load(y + s[:, None] * K + c, mask=c < K, other=0)
        total = tl.dot(left, tl.trans(right), total)
    return total


@triton.jit
def _decays(b, t, s, ORDER: tl.constexpr = 1):
    """2^(b_t - b_s) for s <= t, or with order -1 2^(b_s - b_t) for s >= t; else 0. Subtracted in fp64: a token of
    strong decay must not cost its neighbours their digits."""
    decay = (ORDER * (tl.load(b + t)[:, None] - tl.load(b + s)[None, :])).to(tl.float32)
    return tl.exp2(tl.where(ORDER * t[:, None] >= ORDER * s[None, :], decay, float("-inf")))


def scalar_reads(
    x_NRK: Tensor, k_NCK: Tensor, y_NCV: Tensor, state_NKV: Tensor, b_NC: Tensor, scale: float,
    times_NRV: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """O = scale * 2^b_t x_t S + P y, where P_ts = scale * x_t k_s 2^(b_t - b_s) for s <= t, else 0, and is rounded to
    the operands' dtype.

    Gives O in x's dtype and, with rows to multiply it with, the sums of these products over each row [N, R, 1]: of all
    of O, and of what comes from S.
    """
    return _read(x_NRK, k_NCK, y_NCV, state_NKV, b_NC, scale, scale, times_NRV, x_NRK.dtype, 1)


def scalar_reads_back(
    x_NRK: Tensor, k_NCK: Tensor, dy_NRV: Tensor, dstate_NKV: Tensor | None, b_NC: Tensor, scale: float,
    dtype: torch.dtype, times_NCV: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of y in a dtype: P^T dy, and with the gradient of the state after the chunk 2^(b_C - b_s) k_s dS
    besides. Sums as scalar_reads."""
    return _read(k_NCK, x_NRK, dy_NRV, dstate_NKV, b_NC, scale, 1.0, times_NCV, dtype, -1)


def _read(
    x: Tensor, k: Tensor, y: Tensor, state_NKV: Tensor | None, b_NC: Tensor, scale: float, of_state: float,
    times: Tensor | None, dtype: torch.dtype, order: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (N, C), (_, rows, K), V = b_NC.shape, x.shape, y.shape[2]
    out = x.new_empty(N, rows, V, dtype=dtype)
    tile, columns = min(C, 64), min(triton.next_power_of_2(max(V, COLUMNS)), 128)
    across = triton.cdiv(V, columns)
    assert times is None or state_NKV is not None
    sums = x.new_empty(across, 2, N, rows if times is not None else 0, 1, dtype=torch.float32)
    state = y if state_NKV is None else state_NKV
    own = (x.contiguous() for x in (x, k, y, b_NC, y if times is None else times))
    with torch.cuda.device_of(x):
        _reads[(N * rows // tile * across,)](
            *own, state, *state.stride(), out, sums, N * rows, scale, of_state, X=rows // C, Y=k.shape[1] // C,
            ORDER=order, STATE=state_NKV is not None, TIMES=times is not None, C=C, K=K, V=V, TILE=tile,
            CHANNELS=min(triton.next_power_of_2(max(K, 16)), 128), COLUMNS=columns, num_stages=1,
        )  # fmt: skip
    of_all, of_state_alone = sums.sum(0)
    return out, of_all, of_state_alone


@triton.jit
def _reads(
    x, k, y, b, times, state, s_n, s_k, s_v, out, sums, ROWS, scale, of_state,
    X: tl.constexpr, Y: tl.constexpr, ORDER: tl.constexpr, STATE: tl.constexpr, TIMES: tl.constexpr, C: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program for each tile of the result. A chunk's tokens are X times rows and Y times keys."""
    across: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    tiles: tl.constexpr = C // TILE
    query, part = (tl.program_id(0) // (tiles * across)).to(tl.int64), tl.program_id(0) % across
    n, i = query // X, tl.program_id(0) // across % tiles
    t, u = i * TILE + tl.arange(0, TILE), tl.arange(0, TILE)
    v = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = query * C + t
    b += n * C
    sums += part * 2 * ROWS
    total = tl.zeros((TILE, COLUMNS), tl.float32)
    if STATE:
        for first in range(0, K, CHANNELS):
            c = first + tl.arange(0, CHANNELS)
            left = tl.load(x + row[:, None] * K + c[None, :], mask=c[None, :] < K, other=0)
            right = state + n * s_n + c[:, None] * s_k + v * s_v
            total = tl.dot(left, tl.load(right, mask=(c[:, None] < K) & (v < V), other=0), total)
        to = tl.load(b + t)
        total *= tl.exp2((to if ORDER == 1 else tl.load(b + C - 1) - to).to(tl.float32))[:, None] * of_state
        if TIMES:
            gate = tl.load(times + row[:, None] * V + v, mask=v < V, other=0).to(tl.float32)
            tl.store(sums + ROWS + row, tl.sum(total * gate, 1))
    for j in range(tiles):
        if ORDER * j <= ORDER * i:
            s = j * TILE + u
            decay = _decays(b, t, s, ORDER) * scale
            for other in range(Y):
                at = (n * Y + other) * C + s
                pairs = _products(x, k, row, at, K, TILE, CHANNELS) * decay
                values = tl.load(y + at[:, None] * V + v, mask=v < V, other=0)
                total = tl.dot(pairs.to(y.dtype.element_ty), values, total)
    if TIMES:
        gate = tl.load(times + row[:, None] * V + v, mask=v < V, other=0).to(tl.float32)
        tl.store(sums + row, tl.sum(total * gate, 1))
    tl.store(out + row[:, None] * V + v, total, mask=v < V)


def erasing_pairs_back(
    k_NCK: Tensor, dy_NCV: Tensor, y_NCV: Tensor, b_NC: Tensor, times_NC1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of A = times_t * P = erasing_pairs without those of a token with itself, where A y has the gradient dy: D the
    gradient of k k^T, in k's dtype; row sums of P dA; and column sums of A dA, both [N, C, 1]."""
    (N, C, K), V = k_NCK.shape, y_NCV.shape[2]
    tile = min(C, 64)
    d_NCC, sums = k_NCK.new_empty(N, C, C), b_NC.new_empty(N, 2, C // tile, C, 1, dtype=torch.float32)
    steps = {f"{x}_STEP": min(triton.next_power_of_2(max(size, 16)), 128) for x, size in (("K", K), ("V", V))}
    own = (x.contiguous() for x in (k_NCK, dy_NCV, y_NCV, b_NC, times_NC1))
    with torch.cuda.device_of(k_NCK):
        _erasing_back[(N * (C // tile) ** 2,)](
            *own, d_NCC, sums, C=C, K=K, V=V, TILE=tile, **steps, num_warps=tile // 8
        )
    rows_NC1, columns_NC1 = sums.sum(2).unbind(1)
    return d_NCC, rows_NC1, columns_NC1


@triton.jit
def _erasing_back(
    k, dy, y, b, times, out, sums,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr,
):  # fmt: skip
    """A program for each tile of a chunk's [C, C]."""
    tiles = C // TILE
    n = (tl.program_id(0) // (tiles * tiles)).to(tl.int64)
    i, j = tl.program_id(0) // tiles % tiles, tl.program_id(0) % tiles
    t, s = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    d = tl.zeros((TILE, TILE), tl.float32)
    rows, columns = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    if j <= i:
        d = _products(dy, y, n * C + t, n * C + s, V, TILE, V_STEP)
        d *= tl.where(t[:, None] > s[None, :], _decays(b + n * C, t, s), 0)
        moved = _products(k, k, n * C + t, n * C + s, K, TILE, K_STEP) * d
        gate = tl.load(times + n * C + t)[:, None]
        rows, columns = tl.sum(moved, 1), tl.sum(moved * gate, 0)
        d *= gate
    tl.store(out + (n * C + t[:, None]) * C + s[None, :], d)
    # Each tile has its own places among the tiles' row sums of t and column sums of s.
    sums += n * 2 * tiles * C
    tl.store(sums + j * C + t, rows)
    tl.store(sums + (tiles + i) * C + s, columns)


def channel_pairs(
    x_NRK: Tensor, k_NCK: Tensor, factor_NCK: Tensor, scale: float, dtype: torch.dtype, times_NC1: Tensor | None = None
) -> Tensor:
    """scale * sum_c x_tc k_sc prod(factor_uc, s < u <= t) for s <= t, else 0; and times a number of row t."""
    (N, R, K), C = x_NRK.shape, k_NCK.shape[1]
    out_NRC = x_NRK.new_empty(N, R, C, dtype=dtype)
    sizes = {"C": C, "K": K, "SUB": SUB, "CHANNELS": triton.next_power_of_2(max(K, 16))}
    own = (x.contiguous() for x in (x_NRK, k_NCK, factor_NCK, factor_NCK if times_NC1 is None else times_NC1))
    options = {"TIMES": times_NC1 is not None, "num_warps": max(1, sizes["CHANNELS"] // 128)}
    with torch.cuda.device_of(x_NRK):
        _channel[(N * R // SUB,)](*own, out_NRC, R // C, scale, **sizes, **options)
    return out_NRC


@triton.jit
def _channel(
    x, k, factor, times, out, G, scale,
    C: tl.constexpr, K: tl.constexpr, TIMES: tl.constexpr, SUB: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A program for each sub-block of a query's rows. Decays are multiplied together, as in the formula: no factor
    exceeds one and nothing cancels."""
    query = (tl.program_id(0) // (C // SUB)).to(tl.int64)
    n, start = query // G, tl.program_id(0) % (C // SUB) * SUB
    u, c = tl.arange(0, SUB), tl.arange(0, CHANNELS)
    own = c < K
    at = u[:, None] * K + c[None, :]
    x += (query * C + start) * K
    k += n * C * K
    factor += n * C * K
    out += (query * C + start) * C
    gate = tl.full((SUB,), 1.0, tl.float32) * scale
    if TIMES:
        gate *= tl.load(times + n * C + start + u)

    # Within the sub-block in fp32, key by key from the last one on; rows: times what lies between key s and them.
    rows = tl.load(x + at, mask=own[None, :], other=0).to(tl.float32)
    for back in range(SUB):
        s = SUB - 1 - back
        key = tl.load(k + (start + s) * K + c, mask=own, other=0).to(tl.float32)
        step = tl.load(factor + (start + s) * K + c, mask=own, other=0)
        pairs = tl.sum(rows * key[None, :], 1) * gate
        tl.store(out + start + s + u * C, tl.where(u >= s, pairs, 0))
        rows = tl.where(u[:, None] >= s, rows * step[None, :], rows)

    # With sub-blocks before it by products of matrices, from the nearest and its last key on.
    rows = rows.to(x.dtype.element_ty)
    v = SUB - 1 - u
    from_last = v[:, None] * K + c[None, :]
    after = tl.full((1, CHANNELS), 1.0, tl.float32)
    for back in range(C // SUB - 1):
        first = start - (back + 1) * SUB
        if first >= 0:
            keys = tl.load(k + first * K + from_last, mask=own[None, :], other=0)
            later = own[None, :] & (first + 1 + v[:, None] < start)
            leave = tl.cumprod(tl.load(factor + (first + 1) * K + from_last, mask=later, other=1), 0) * after
            after = tl.sum(tl.where(v[:, None] == 0, leave, 0), 0)[None, :]
            pairs = tl.dot(rows, tl.trans((keys * leave).to(x.dtype.element_ty))) * gate[:, None]
            tl.store(out + first + u[:, None] * C + v[None, :], pairs)
        else:  # there are none: of as many after it the sums are 0
            tl.store(out + first + C + u[:, None] * C + u[None, :], tl.zeros((SUB, SUB), tl.float32))


def whole_chunks(factor_NCK: Tensor) -> tuple[Tensor, Tensor]:
    """prod(factor_u, u <= t) and prod(factor_u, u > t)."""
    (N, C, K), factor_NCK = factor_NCK.shape, factor_NCK.contiguous()
    enter_NCK, leave_NCK = torch.empty_like(factor_NCK), torch.empty_like(factor_NCK)
    with torch.cuda.device_of(factor_NCK):
        _whole[(N, triton.cdiv(K, 32))](factor_NCK, enter_NCK, leave_NCK, C=C, K=K, CHANNELS=32)
    return enter_NCK, leave_NCK


@triton.jit
def _whole(factor, enter, leave, C: tl.constexpr, K: tl.constexpr, CHANNELS: tl.constexpr):
    t, c = tl.arange(0, C)[:, None], tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    first = tl.program_id(0).to(tl.int64) * C * K
    at, from_last = first + t * K + c, first + (C - 1 - t) * K + c
    tl.store(enter + at, tl.cumprod(tl.load(factor + at, mask=c < K, other=1), 0), mask=c < K)
    after = tl.load(factor + from_last + K, mask=(c < K) & (t > 0), other=1)
    tl.store(leave + from_last, tl.cumprod(after, 0), mask=c < K)
