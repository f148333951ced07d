"""What recurrences computed in chunks share: packing, products in at least fp32, and decays inside a chunk.

A decay g_t <= 0 (its log) is one number a head or one a key channel. With b = cumsum(g) inside a chunk of C tokens, a
recurrence needs enter = exp(b), leave = exp(b_C - b), and for rows x (queries, or keys that erase) the pair sums

    P_ts = scale * sum_c x_tc k_sc exp(b_tc - b_sc)        for s <= t, else 0.

A scalar decay leaves the sum over channels a matrix product. One per channel does not, and exp(b_t) exp(-b_s) would
overflow. So pairs are split by halves: in a block of 2h tokens those with t in the right half and s in the left are
(x_t exp(b_t - r)) (k_s exp(r - b_s)) with r at the middle: a product of matrices in which no factor exceeds one. Of
log2(C) such levels every pair lies in exactly one. The factors are products of decays within the halves, so they are
multiplied together from one level to the next and nothing cancels.

On a GPU these are passes over memory level by level; with operands in bf16 the sums come from kernels/pairs.py.

Shapes: N = chunks * states, C tokens of a chunk, G queries a state, R = G * C, K key size, J 1 or K.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import groupby
from typing import TypeGuard

import torch
from torch import Tensor

from plait.kernels import usable
from plait.mixers.seq import Chunks

LOG2_E = 1.4426950408889634
FAR = 1e9
"""2 to the power of -FAR is 0"""


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """At least fp32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def runs_in_bf16(*operands: Tensor) -> bool:
    return all(x.is_cuda and x.dtype == torch.bfloat16 for x in operands)


def working_dtype(wide: torch.dtype, *operands: Tensor) -> torch.dtype:
    """Of products: bf16 where operands are that on a GPU and nothing else is wider than fp32."""
    return torch.bfloat16 if wide == torch.float32 and runs_in_bf16(*operands) else wide


def decay_of_state(g_BS: Tensor) -> Tensor:
    """exp(g) [B, S] or [B, S, K], to multiply a state [B, S, K, V] with."""
    return g_BS.exp()[..., None] if g_BS.ndim == 3 else g_BS.exp()[..., None, None]


def chunk_length(size: int | None, longest: int, *operands: Tensor) -> int:
    """Tokens of a chunk: by default what was fastest, 128 for products in bf16 and otherwise 64; less where sequences
    are short."""
    size = size if size is not None else 128 if runs_in_bf16(*operands) else 64
    if size < 16 or size & (size - 1):
        raise ValueError(f"chunk_size: {size}; it must be a power of two, at least 16")
    while size > 16 and size >= 2 * longest:
        size //= 2
    return size


def widen(k_BTSK: Tensor, v_BTSV: Tensor, state_BSKV: Tensor | None, *others: Tensor) -> list[Tensor]:
    """All of these in at least fp32, a state of zeros where there is none."""
    dtype = wide_dtype(k_BTSK, v_BTSV, *others)
    if state_BSKV is None:
        state_BSKV = v_BTSV.new_zeros(*k_BTSK.shape[::2], k_BTSK.shape[3], v_BTSV.shape[3], dtype=dtype)
    return [x.to(dtype) for x in (k_BTSK, v_BTSV, state_BSKV, *others)]


def pack(
    x_BTH: Tensor, dtype: torch.dtype, num_states: int, chunks: Chunks, of: Callable[..., Tensor] | None = None
) -> Tensor:
    """x_BTH* -> [N, G * C, *]: the G queries of a state lie one after the other. of: Chunks.pack."""
    x = chunks.pack(x_BTH.to(dtype), of)
    return x.reshape(x.shape[0] * num_states, -1, *x.shape[3:])


def unpack(y: Tensor, num_heads: int, dtype: torch.dtype, chunks: Chunks) -> Tensor:
    """The inverse of pack."""
    return chunks.unpack(y.view(-1, num_heads, chunks.size, *y.shape[2:]), dtype)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Batched product in at least fp32."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.dtype == torch.bfloat16 else torch.bmm(a, b)


def add_mm(c: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """c + scale * a b in c's dtype, that of a and b or fp32; what was c may be overwritten."""
    if torch.compiler.is_compiling():  # torch 2.11 cannot trace baddbmm with an out_dtype
        return (c + scale * mm(a, b)).to(c.dtype)
    if a.dtype != c.dtype:  # without `out` it would copy c first
        return torch.baddbmm(c, a, b, alpha=scale, out_dtype=torch.float32, out=c)
    return c.baddbmm_(a, b, alpha=scale)


def add_both(c_NCK: Tensor, d_NCC: Tensor, k_NCK: Tensor) -> Tensor:
    """c plus what the gradient d of k k^T gives."""
    return add_mm(add_mm(c_NCK, d_NCC.mT, k_NCK), d_NCC, k_NCK)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a * b, computed in the wider dtype of the two and rounded once, without a wide copy in between."""
    return _rounded(torch.mul, a, b, dtype=dtype)


def _rounded(op: Callable[..., Tensor], *operands: Tensor, dtype: torch.dtype) -> Tensor:
    if torch.compiler.is_compiling() or functools.reduce(torch.promote_types, (x.dtype for x in operands)) == dtype:
        return op(*operands).to(dtype)
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    return op(*operands, out=operands[0].new_empty(shape, dtype=dtype))


def store(place: Tensor, x: Tensor, scale: float) -> None:
    """place = x * scale, in a view."""
    if torch.compiler.is_compiling():
        place.copy_(x * scale)
    else:
        torch.mul(x, scale, out=place)


def mul_rows(x_NRX: Tensor, gate_NCX: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of all queries times something each token has once, in the rows' dtype or another."""
    if usable(x_NRX) and gate_NCX.dtype == torch.float32:
        from plait.kernels.rows import times_rows

        return times_rows(x_NRX, gate_NCX, dtype or x_NRX.dtype)
    x = x_NRX.unflatten(1, (-1, gate_NCX.shape[1]))
    return product(x, gate_NCX[:, None], dtype or x_NRX.dtype).flatten(1, 2)


def use_rows(x_NRX: Tensor, gate_NCX: Tensor, dtype: torch.dtype) -> Tensor:
    """The same of rows that nobody needs any more: in place where the dtype is theirs."""
    return mul_rows_(x_NRX, gate_NCX) if x_NRX.dtype == dtype else mul_rows(x_NRX, gate_NCX, dtype)


def mul_rows_(x_NRX: Tensor, gate_NCX: Tensor, scale: float = 1.0) -> Tensor:
    """The same in place, times a number."""
    x = x_NRX.unflatten(1, (-1, gate_NCX.shape[1]))
    if scale == 1:
        x.mul_(gate_NCX[:, None])
    elif gate_NCX.shape[2] == 1:
        x.mul_(gate_NCX[:, None] * scale)
    else:  # in one pass
        torch.addcmul(x.new_zeros(()), x, gate_NCX[:, None], value=scale, out=x)
    return x_NRX


def sum_rows(x_NRX: Tensor, size: int) -> Tensor:
    """Sum over the queries of a token: [N, C, *]."""
    return x_NRX if x_NRX.shape[1] == size else x_NRX.unflatten(1, (-1, size)).sum(1)


def least(dtype: torch.dtype) -> float:
    """Products of five factors below this would leave the normal floating-point numbers, which a CPU multiplies some
    hundred times slower: they count as 0 there. In fp32 it is 3e-8, under the rounding of one."""
    return torch.finfo(dtype).tiny ** 0.2


def takes_kernel(work: torch.dtype, x: Tensor) -> bool:
    """Whether kernels compute with operands of the dtype `work` on x's device."""
    return work == torch.bfloat16 and usable(x)


def runs(state_EKV: Tensor, rows: list[int], *steps: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
    """Steps of the same states: (these, what the steps have, each [L, states, ...])."""
    sizes = [(n, len(list(run))) for n, run in groupby(rows)]
    pieces = zip(*(x.split([n * length for n, length in sizes]) for x in steps), strict=True)
    return [(state_EKV[:n], [x.unflatten(0, (-1, n)) for x in own]) for (n, _), own in zip(sizes, pieces, strict=True)]


def scan_runs(
    step: Callable[..., None],
    first_EKV: Tensor,
    own_N: Tensor,
    w_NKV: Tensor,
    rows: list[int],
    dtype: torch.dtype,
    order: int,
) -> tuple[Tensor, Tensor]:
    """step(state, own, w, before, order) on every run of steps, in their order (1) or against it (-1): what it leaves
    in `before`, in a dtype, and in the state of each sequence, which starts as `first`."""
    before_NKV = w_NKV.new_empty(w_NKV.shape, dtype=dtype)
    state_EKV = first_EKV.clone(memory_format=torch.contiguous_format)
    for going, parts in runs(state_EKV, rows, own_N, w_NKV, before_NKV)[::order]:
        step(going, *parts, order)
    return before_NKV, state_EKV


def drop_small_(x: Tensor) -> Tensor:
    return x if x.is_cuda else torch.threshold_(x, least(x.dtype), 0.0)


def sum_after(x_NCJ: Tensor, rest_N1J: Tensor) -> Tensor:
    """Of every token: what it has, what those after it have, and the rest. May overwrite x."""
    x_NCJ[:, -1:] += rest_N1J
    return x_NCJ.flip(1).cumsum(1).flip(1)


def exp2_(x: Tensor) -> Tensor:
    """2^x in place. (A CPU's exp is slow wherever the result is near zero; exp2 is not.)"""
    return x.exp2_() if x.is_cuda else torch.threshold_(x, math.log2(least(x.dtype)), -math.inf).exp2_()


def exp(x: Tensor, out: Tensor | None = None) -> Tensor:
    """e^x."""
    if x.is_cuda:
        return torch.exp(x, out=out)
    return exp2_(torch.mul(x, LOG2_E, out=out))


def make_decay(
    g_BTS: Tensor, dtype: torch.dtype, scale: float, chunks: Chunks, kernel: bool
) -> ScalarDecay | ChannelDecay:
    """Of g [B, T, S], or [B, T, S, K] with one decay a channel. kernel: whether pair sums come from one."""
    num_states = g_BTS.shape[2]
    if g_BTS.ndim == 4:
        return ChannelDecay(pack(g_BTS, dtype, num_states, chunks, exp), scale, kernel)
    return ScalarDecay(pack(g_BTS, torch.float64, num_states, chunks), dtype, scale, kernel)


class ScalarDecay:
    """One decay a head."""

    saves_pairs = False
    """pair sums are cheaper made again in the backward pass than kept"""

    def __init__(self, g_NC: Tensor, dtype: torch.dtype, scale: float, kernel: bool = False):
        # Sums over a chunk in fp64: a token of strong decay must not cost its neighbours their digits.
        sum_NC = (g_NC * LOG2_E).cumsum(-1)
        self._sum_NC, self._dtype, self._scale, self.kernel = sum_NC, dtype, scale, kernel
        self._pair_NCC: Tensor | None = None
        self.enter_NCJ = exp2_(sum_NC[..., None].to(dtype, copy=True))
        self.leave_NCJ = exp2_((sum_NC[:, -1:] - sum_NC)[..., None].to(dtype))

    @property
    def pair_NCC(self) -> Tensor:
        """scale exp(b_t - b_s)"""
        if self._pair_NCC is None:
            # b_t - b_s as (b_t - top) + (top - b_s) * past; past is -FAR above the diagonal, where 0 must come of it.
            sum_NC, C = self._sum_NC, self._sum_NC.shape[1]
            top_N1 = sum_NC.amax(-1, keepdim=True) + 1
            past_CC = sum_NC.new_full((C, C), -FAR).triu_(1) + sum_NC.new_ones(C, C).tril_()
            to, since = (sum_NC - top_N1 + math.log2(self._scale))[:, :, None], (top_N1 - sum_NC)[:, None]
            self._pair_NCC = exp2_(_rounded(torch.addcmul, to, since, past_CC, dtype=self._dtype))
        return self._pair_NCC

    @staticmethod
    def fold(x_NCK: Tensor) -> Tensor:
        """The gradient of a log decay from that of each channel."""
        return x_NCK.sum(-1, keepdim=True)

    def pairs(
        self, k_NCK: Tensor, *rows: Tensor, first: torch.dtype | None = None, times: Tensor | None = None
    ) -> list[Tensor]:
        """P_NRC of each of `rows` [N, R, K], of the first in a dtype of its own; of the last times a number each row,
        [N, C, 1], if that is given."""
        dtypes = [first or self._dtype, *[self._dtype] * (len(rows) - 1)]
        pairs = [use_rows(mm(x, k_NCK.mT), self.pair_NCC, dtype) for x, dtype in zip(rows, dtypes, strict=True)]
        if times is not None:
            mul_rows_(pairs[-1], times)
        return pairs

    # Where there are kernels:

    def read(self, x_NRK: Tensor, k_NCK: Tensor, y_NCV: Tensor, state_NKV: Tensor) -> Tensor:
        """What rows x read: O = Q' S + P y of P = pairs(k, x), in x's dtype."""
        from plait.kernels.pairs import scalar_reads

        return scalar_reads(x_NRK, k_NCK, y_NCV, state_NKV, self._sum_NC, self._scale)[0]

    def read_back(
        self, x_NRK: Tensor, k_NCK: Tensor, do_NRV: Tensor, dtype: torch.dtype, dstate_NKV: Tensor | None = None
    ) -> Tensor:
        """The gradient of y in a dtype: P^T dO; with the gradient of S' = .. + K'^T y, K' dS' besides."""
        from plait.kernels.pairs import scalar_reads_back

        return scalar_reads_back(x_NRK, k_NCK, do_NRV, dstate_NKV, self._sum_NC, self._scale, dtype)[0]

    def read_grads(
        self,
        x_NRK: Tensor,
        k_NCK: Tensor,
        y_NCV: Tensor,
        do_NRV: Tensor,
        state_NKV: Tensor,
        dstate_NKV: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of x, in its dtype, of k in a dtype, of b [N, C, 1] and, [N, C, 1], that of b_C by each token's
        K' alone. For x and k, dO and y are what x and k are for y: dx = scale exp(b) dO S^T + (..) k.

        b_t - b_s has the gradient of P_ts times P_ts, which is summed as x dx - k dk before these are rounded.
        """
        from plait.kernels.pairs import scalar_reads, scalar_reads_back

        own = self._sum_NC, self._scale
        dx_NRK, x_moved_NR1, _ = scalar_reads(do_NRV, y_NCV, k_NCK, state_NKV.mT, *own, x_NRK)
        dk_NCK, k_moved_NC1, leave_NC1 = scalar_reads_back(do_NRV, y_NCV, x_NRK, dstate_NKV.mT, *own, dtype, k_NCK)
        return dx_NRK, dk_NCK, sum_rows(x_moved_NR1, k_NCK.shape[1]) - k_moved_NC1, leave_NC1

    def erase(self, k_NCK: Tensor, times_NC1: Tensor) -> Tensor:
        """A = times * P of P = pairs(k, k) with scale 1, in fp32."""
        from plait.kernels.pairs import erasing_pairs

        return erasing_pairs(k_NCK, self._sum_NC, times_NC1)

    def erase_grads(
        self, k_NCK: Tensor, dy_NCV: Tensor, y_NCV: Tensor, times_NC1: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the gradient dy of A y, below the diagonal, gives: the gradient of k k^T; of `times`, row sums; and
        column sums, what it takes from that of b. Both [N, C, 1]."""
        from plait.kernels.pairs import erasing_pairs_back

        return erasing_pairs_back(k_NCK, dy_NCV, y_NCV, self._sum_NC, times_NC1)

    def pairs_back(
        self,
        k_NCK: Tensor,
        q_NRK: Tensor,
        pairs: list[Tensor],
        dpairs: list[Tensor],
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and b [N, C, J]: `grads`, plus what comes through pairs(k, q) or pairs(k, q, k), of which
        keys with themselves (t = s) must have none. Overwrites pairs, dpairs and grads."""
        dq_NRK, dk_NCK, db_NC1 = grads
        products = []
        for p_NRC, dp_NRC in zip(pairs, dpairs, strict=True):
            # The gradient of b_t - b_s is that of P_ts times P_ts: row sums minus column sums. (q dq - k dk is the
            # same sum, but in bf16 what should cancel there has been rounded apart.)
            moved_NRC = p_NRC.mul_(dp_NRC)
            db_NC1 = db_NC1 + (sum_rows(moved_NRC.sum(-1), k_NCK.shape[1]) - moved_NRC.sum(1))[..., None]
            products.append(use_rows(dp_NRC, self.pair_NCC, k_NCK.dtype))
        dq_NRK, dk_NCK = add_mm(dq_NRK, products[0], k_NCK), add_mm(dk_NCK, products[0].mT, q_NRK)
        for d_NCC in products[1:]:
            dk_NCK = add_both(dk_NCK, d_NCC, k_NCK)
        return dq_NRK, dk_NCK, db_NC1


def reads_by_kernel(decay: ScalarDecay | ChannelDecay) -> TypeGuard[ScalarDecay]:
    """Whether it reads by kernels, and has the gradients from them."""
    return isinstance(decay, ScalarDecay) and decay.kernel


class ChannelDecay:
    """One decay a key channel."""

    def __init__(self, factor_NCK: Tensor, scale: float, kernel: bool = False):
        self.saves_pairs = not kernel  # a kernel makes them again for less than it costs to keep them
        self._kernel = kernel
        self.factor_NCK = factor_NCK
        self.scale = scale
        self._whole: tuple[Tensor, Tensor] | None = None

    @property
    def enter_NCJ(self) -> Tensor:
        return self._of_whole_chunks()[0]

    @property
    def leave_NCJ(self) -> Tensor:
        return self._of_whole_chunks()[1]

    def _of_whole_chunks(self) -> tuple[Tensor, Tensor]:
        """What the levels end with, if they have been gone through; otherwise the same without their pairs."""
        if self._whole is None and self._kernel:
            from plait.kernels.pairs import whole_chunks

            self._whole = whole_chunks(self.factor_NCK)
        if self._whole is None:
            enter, leave = self._first_double()
            h = 2
            while h < enter.shape[1]:
                self._double(enter, leave, h)
                h *= 2
            self._whole = enter, leave
        return self._whole

    @staticmethod
    def fold(x_NCK: Tensor) -> Tensor:
        return x_NCK

    def _first_double(self) -> tuple[Tensor, Tensor]:
        """_double from halves of one token, which have only their own factor."""
        enter, leave = (torch.empty_like(self.factor_NCK) for _ in range(2))
        one, other = self.factor_NCK[:, ::2], self.factor_NCK[:, 1::2]
        enter[:, ::2], enter[:, 1::2] = one, drop_small_(one * other)
        leave[:, ::2], leave[:, 1::2] = other, 1
        return enter, leave

    @staticmethod
    def _double(enter_NCK: Tensor, leave_NCK: Tensor, h: int) -> None:
        """From halves of h tokens to blocks of 2h: enter holds the product of the decays from the first token of a
        half to token t, leave that from the one after token s to the last."""
        enter, leave = (x.unflatten(1, (-1, 2, h)) for x in (enter_NCK, leave_NCK))
        drop_small_(leave[:, :, 0].mul_(enter[:, :, 1, -1:]))
        drop_small_(enter[:, :, 1].mul_(enter[:, :, 0, -1:]))

    def _levels(self, k_NCK: Tensor, rows_NXCK: Tensor):
        """Of every level: (h, factors of the right halves [N, c, m, h, K], their rows [N, c, X, m, h, K], factors of
        the left halves [N, c, m, h, K], or None for ones, and their keys [N, c, m, h, K]).

        On a GPU the m blocks within MIN_BLOCK tokens share a product, of which only each block's own entries are read:
        as many products of a few rows would take longer.
        """
        enter, leave, C = self.factor_NCK, None, k_NCK.shape[1]
        h = 1
        while h < C:
            m = _together(k_NCK, h)
            enter_NcmhK = enter.unflatten(1, (-1, m, 2, h))[:, :, :, 1]
            left_NcmhK = k_NCK.unflatten(1, (-1, m, 2, h))[:, :, :, 0]
            leave_NcmhK = None if leave is None else leave.unflatten(1, (-1, m, 2, h))[:, :, :, 0]
            rows_NcXmhK = rows_NXCK.unflatten(2, (-1, m, 2, h))[:, :, :, :, 1].transpose(1, 2)
            right_NcXmhK = product(rows_NcXmhK, enter_NcmhK[:, :, None], k_NCK.dtype)
            if leave_NcmhK is not None:
                left_NcmhK = product(left_NcmhK, leave_NcmhK, k_NCK.dtype)
            yield h, enter_NcmhK, right_NcXmhK, leave_NcmhK, left_NcmhK
            if leave is None:
                enter, leave = self._first_double()
            elif 2 * h < C or self._whole is None:
                self._double(enter, leave, h)
            h *= 2
        assert leave is not None
        self._whole = self._whole or (enter, leave)

    @staticmethod
    def _blocks(p_NXCC: Tensor, h: int) -> Tensor:
        """The entries of one level, right halves against left ones: a view [N, X, c, h, h, m]."""
        m = _together(p_NXCC, h)
        p = p_NXCC.unflatten(3, (-1, m, 2, h)).unflatten(2, (-1, m, 2, h))  # N, X, c, m, 2, h, c, m, 2, h
        return p[:, :, :, :, 1, :, :, :, 0].diagonal(dim1=2, dim2=5).diagonal(dim1=2, dim2=4)  # N, X, h, h, c, m

    def pairs(
        self, k_NCK: Tensor, *rows: Tensor, first: torch.dtype | None = None, times: Tensor | None = None
    ) -> list[Tensor]:
        """As ScalarDecay's."""
        N, C = k_NCK.shape[:2]
        wide = self.factor_NCK.dtype
        dtypes = [first or wide, *[wide] * (len(rows) - 1)]
        if self._kernel:
            from plait.kernels.pairs import channel_pairs

            gates, own = [*[None] * (len(rows) - 1), times], (k_NCK, self.factor_NCK, self.scale)
            return [channel_pairs(x, *own, d, gate) for x, d, gate in zip(rows, dtypes, gates, strict=True)]
        assert times is None  # they are saved as they are
        x_NXCK = self._stack(rows, C)
        sizes = [x.shape[1] // C for x in rows]
        pairs = [k_NCK.new_zeros(N, size, C, C, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
        for h, _, right, _, left in self._levels(k_NCK, x_NXCK):
            m = left.shape[2]
            block = mm(right.flatten(2, 4).flatten(0, 1), left.flatten(2, 3).flatten(0, 1).mT)
            block = block.unflatten(0, (N, -1)).unflatten(3, (m, h)).unflatten(2, (-1, m, h))  # N, c, X, m, h, m, h
            block = block.diagonal(dim1=3, dim2=5).permute(0, 2, 3, 4, 1, 5)  # N, X, h, h, c, m
            for p_NXCC, own in zip(pairs, block.split(sizes, 1), strict=True):
                store(self._blocks(p_NXCC, h), own, self.scale)
        same_NXC = (x_NXCK * k_NCK[:, None]).sum(-1, dtype=wide)  # t = s: no decay lies between
        for p_NXCC, own in zip(pairs, same_NXC.split(sizes, 1), strict=True):
            store(p_NXCC.diagonal(dim1=2, dim2=3), own, self.scale)
        return [p_NXCC.flatten(1, 2) for p_NXCC in pairs]

    def pairs_back(
        self,
        k_NCK: Tensor,
        q_NRK: Tensor,
        pairs: list[Tensor],
        dpairs: list[Tensor],
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As ScalarDecay's, all in place."""
        C, scale = k_NCK.shape[1], self.scale
        dq_NRK, dk_NCK, db_NCK = grads
        x_NXCK, dq_NGCK = self._stack((q_NRK, k_NCK)[: len(pairs)], C), dq_NRK.unflatten(1, (-1, C))
        dp_NXCC = [dp.unflatten(1, (-1, C)) for dp in dpairs]
        G = dq_NGCK.shape[1]
        same_NGC1 = dp_NXCC[0].diagonal(dim1=2, dim2=3)[..., None] * scale
        dq_NGCK.addcmul_(same_NGC1, k_NCK[:, None])
        for x_NCK, same_NC1 in zip(x_NXCK.unbind(1), same_NGC1.unbind(1), strict=False):
            dk_NCK.addcmul_(x_NCK, same_NC1)
        for h, enter, right, leave, left in self._levels(k_NCK, x_NXCK):
            d = self._level_back(dp_NXCC, right, h)
            dright = mm(d, left.flatten(2, 3).flatten(0, 1)).view_as(right)
            dleft = mm(d.mT, right.flatten(2, 4).flatten(0, 1)).view_as(left)
            split = (-1, enter.shape[2], 2, h)
            dq_right = dq_NGCK.unflatten(2, split)[:, :, :, :, 1].transpose(1, 2)
            dq_right.addcmul_(dright[:, :, :G], enter[:, :, None], value=scale)
            dk_left, dk_right = dk_NCK.unflatten(1, split).unbind(3)
            db_left, db_right = db_NCK.unflatten(1, split).unbind(3)
            dk_left.add_(dleft, alpha=scale) if leave is None else dk_left.addcmul_(dleft, leave, value=scale)
            for dkeys in dright[:, :, G:].unbind(2):
                dk_right.addcmul_(dkeys, enter, value=scale)
            # b moves the factors as they were multiplied: rounded. Then what the halves of a block give adds up to 0,
            # where q dq - k dk would leave a rest to all tokens before the block.
            db_left.addcmul_(left, dleft, value=-scale)
            for x, dx in zip(right.unbind(2), dright.unbind(2), strict=True):
                db_right.addcmul_(x, dx, value=scale)
        return dq_NRK, dk_NCK, db_NCK

    def _level_back(self, dp_NXCC: list[Tensor], right_NcXmhK: Tensor, h: int) -> Tensor:
        """The gradient of a level's products [N * c, X * m * h, m * h], 0 where halves of different blocks meet."""
        N, c, X, m = right_NcXmhK.shape[:4]
        d = right_NcXmhK.new_zeros(N, c, X, m, h, m, h)
        own = d.diagonal(dim1=3, dim2=5).permute(0, 2, 3, 4, 1, 5)  # N, X, h, h, c, m
        for part, dp in zip(own.split([dp.shape[1] for dp in dp_NXCC], 1), dp_NXCC, strict=True):
            part.copy_(self._blocks(dp, h))
        return d.flatten(5, 6).flatten(2, 4).flatten(0, 1)

    @staticmethod
    def _stack(rows, C: int) -> Tensor:
        """[N, R, *] each -> [N, X, C, *], C rows of one query (or of the keys) after another."""
        x = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        return x.unflatten(1, (-1, C))


MIN_BLOCK = 16
"""tokens; half of them are rows of a product"""


def _together(x: Tensor, h: int) -> int:
    """How many blocks of 2h tokens share a product."""
    return max(1, MIN_BLOCK // (2 * h)) if x.is_cuda else 1
