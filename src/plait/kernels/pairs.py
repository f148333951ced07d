"""Pair sums of chunked recurrences in bf16, of which nothing but the result goes to memory (mixers/chunked.py).

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


def scalar_pairs(
    x_NRK: Tensor, k_NCK: Tensor, b_NC: Tensor, scale: float, dtype: torch.dtype, times_NC1: Tensor | None = None
) -> Tensor:
    """scale * x_t k_s 2^(b_t - b_s) for s <= t, else 0; and times a number of row t. b: fp64."""
    (N, R, K), C = x_NRK.shape, k_NCK.shape[1]
    out_NRC = x_NRK.new_empty(N, R, C, dtype=dtype)
    tile = min(C, 64)
    sizes = {"C": C, "K": K, "TILE": tile, "CHANNELS": min(triton.next_power_of_2(max(K, 16)), 128)}
    own = (x.contiguous() for x in (x_NRK, k_NCK, b_NC, b_NC if times_NC1 is None else times_NC1))
    with torch.cuda.device_of(x_NRK):
        _scalar[(N * R // C * (C // tile) ** 2,)](*own, out_NRC, R // C, scale, TIMES=times_NC1 is not None, **sizes)
    return out_NRC


@triton.jit
def _scalar(
    x, k, b, times, out, G, scale,
    C: tl.constexpr, K: tl.constexpr, TIMES: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A program for each tile of a query's [C, C]."""
    tiles = C // TILE
    query = (tl.program_id(0) // (tiles * tiles)).to(tl.int64)
    n, i, j = query // G, tl.program_id(0) // tiles % tiles, tl.program_id(0) % tiles
    t, s = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    pairs = tl.zeros((TILE, TILE), tl.float32)
    if j <= i:
        pairs = _products(x, k, query * C + t, n * C + s, K, TILE, CHANNELS)
        decay = _decays(b + n * C, t, s) * scale
        if TIMES:
            decay *= tl.load(times + n * C + t)[:, None]
        pairs *= decay
    tl.store(out + (query * C + t[:, None]) * C + s[None, :], pairs)


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


def scalar_reads(x_NRK: Tensor, k_NCK: Tensor, y_NCV: Tensor, state_NKV: Tensor, b_NC: Tensor, scale: float) -> Tensor:
    """scale * 2^b_t x_t S + P y, with P = scalar_pairs(x, k, b, scale), which is rounded to the operands' dtype."""
    return _read(x_NRK, k_NCK, y_NCV, state_NKV, b_NC, scale, scale, x_NRK.dtype, 1)


def scalar_reads_back(
    x_NRK: Tensor, k_NCK: Tensor, dy_NRV: Tensor, b_NC: Tensor, scale: float, dtype: torch.dtype,
    dstate_NKV: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of y: P^T dy, and with the gradient of the state after the chunk 2^(b_C - b_s) k_s dS besides."""
    return _read(k_NCK, x_NRK, dy_NRV, dstate_NKV, b_NC, scale, 1.0, dtype, -1)


def _read(
    x: Tensor, k: Tensor, y: Tensor, state_NKV: Tensor | None, b_NC: Tensor, scale: float, of_state: float,
    dtype: torch.dtype, order: int,
) -> Tensor:  # fmt: skip
    (N, C), (_, rows, K), V = b_NC.shape, x.shape, y.shape[2]
    out = x.new_empty(N, rows, V, dtype=dtype)
    tile, columns = min(C, 64), min(triton.next_power_of_2(max(V, 16)), 128)
    own = (x.contiguous() for x in (x, k, y, y if state_NKV is None else state_NKV, b_NC))
    with torch.cuda.device_of(x):
        _reads[(N * rows // tile * triton.cdiv(V, columns),)](
            *own, out, scale, of_state, X=rows // C, Y=k.shape[1] // C, ORDER=order, STATE=state_NKV is not None,
            C=C, K=K, V=V, TILE=tile, CHANNELS=min(triton.next_power_of_2(max(K, 16)), 128), COLUMNS=columns,
            num_stages=1,
        )  # fmt: skip
    return out


@triton.jit
def _reads(
    x, k, y, state, b, out, scale, of_state,
    X: tl.constexpr, Y: tl.constexpr, ORDER: tl.constexpr, STATE: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program for each tile of the result. A chunk's tokens are X times rows and Y times keys."""
    across: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    tiles: tl.constexpr = C // TILE
    query = (tl.program_id(0) // (tiles * across)).to(tl.int64)
    n, i = query // X, tl.program_id(0) // across % tiles
    t, u = i * TILE + tl.arange(0, TILE), tl.arange(0, TILE)
    v = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    b += n * C
    total = tl.zeros((TILE, COLUMNS), tl.float32)
    if STATE:
        for first in range(0, K, CHANNELS):
            c = first + tl.arange(0, CHANNELS)
            rows = tl.load(x + (query * C + t[:, None]) * K + c[None, :], mask=c[None, :] < K, other=0)
            own = (c[:, None] < K) & (v < V)
            total = tl.dot(rows, tl.load(state + (n * K + c[:, None]) * V + v, mask=own, other=0), total)
        to = tl.load(b + t)
        total *= tl.exp2((to if ORDER == 1 else tl.load(b + C - 1) - to).to(tl.float32))[:, None] * of_state
    for j in range(tiles):
        if ORDER * j <= ORDER * i:
            s = j * TILE + u
            decay = _decays(b, t, s, ORDER) * scale
            for other in range(Y):
                at = (n * Y + other) * C + s
                pairs = _products(x, k, query * C + t, at, K, TILE, CHANNELS) * decay
                values = tl.load(y + at[:, None] * V + v, mask=v < V, other=0)
                total = tl.dot(pairs.to(y.dtype.element_ty), values, total)
    tl.store(out + (query * C + t[:, None]) * V + v, total, mask=v < V)


def scalar_pairs_back(
    x_NRK: Tensor, k_NCK: Tensor, dy_NRV: Tensor, y_NCV: Tensor, b_NC: Tensor, scale: float,
    times_NC1: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of P = scalar_pairs(x, k, b, scale), where P y has the gradient dy: (D the gradient of x k^T, in x's dtype, row
    sums and column sums [N, C, 1] of P dP).

    With times the gradient of row t is times_t dy_t, and none of a token with itself. Then D and the column sums have
    that factor, the row sums do not.
    """
    (N, R, K), C, V = x_NRK.shape, k_NCK.shape[1], y_NCV.shape[2]
    erases, tile = times_NC1 is not None, min(C, 64)
    d_NRC, sums = x_NRK.new_empty(N, R, C), b_NC.new_empty(N, R // C, 2, C // tile, C, 1, dtype=torch.float32)
    steps = {f"{x}_STEP": min(triton.next_power_of_2(max(size, 16)), 128) for x, size in (("K", K), ("V", V))}
    own = (x.contiguous() for x in (x_NRK, k_NCK, dy_NRV, y_NCV, b_NC, b_NC if times_NC1 is None else times_NC1))
    with torch.cuda.device_of(x_NRK):
        _scalar_back[(N * R // C * (C // tile) ** 2,)](
            *own, d_NRC, sums, R // C, scale,
            ERASES=erases, C=C, K=K, V=V, TILE=tile, **steps, num_warps=tile // 8,
        )  # fmt: skip
    rows_NC1, columns_NC1 = sums.sum((1, 3)).unbind(1)
    return d_NRC, rows_NC1, columns_NC1


@triton.jit
def _scalar_back(
    x, k, dy, y, b, times, out, sums, G, scale,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ERASES: tl.constexpr, TILE: tl.constexpr,
    K_STEP: tl.constexpr, V_STEP: tl.constexpr,
):  # fmt: skip
    """A program for each tile of a query's [C, C]."""
    tiles = C // TILE
    query = (tl.program_id(0) // (tiles * tiles)).to(tl.int64)
    n, i, j = query // G, tl.program_id(0) // tiles % tiles, tl.program_id(0) % tiles
    t, s = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    d = tl.zeros((TILE, TILE), tl.float32)
    rows, columns = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    if j <= i:
        pairs = _products(x, k, query * C + t, n * C + s, K, TILE, K_STEP)
        d = _products(dy, y, query * C + t, n * C + s, V, TILE, V_STEP)
        decay = _decays(b + n * C, t, s) * scale
        if ERASES:
            decay = tl.where(t[:, None] > s[None, :], decay, 0)
        moved = pairs * decay * d
        rows = tl.sum(moved, 1)
        if ERASES:
            gate = tl.load(times + n * C + t)[:, None]
            moved *= gate
            decay *= gate
        columns = tl.sum(moved, 0)
        d *= decay
    tl.store(out + (query * C + t[:, None]) * C + s[None, :], d)
    # Each tile has its own places among the tiles' row sums of t and column sums of s.
    sums += query * 2 * tiles * C
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
