"""What recurrences computed in chunks share: packing, products in at least fp32, and decays inside a chunk.

A decay g_t <= 0 (its log) is one number a head or one a key channel. With b = cumsum(g) inside a chunk of C tokens, a
recurrence needs enter = exp(b), leave = exp(b_C - b), and for rows x (queries, or keys that erase) the pair sums

    P_ts = scale * sum_c x_tc k_sc exp(b_tc - b_sc)        for s <= t, else 0.

A scalar decay leaves the sum over channels a matrix product. One per channel does not, and exp(b_t) exp(-b_s) would
overflow. So pairs are split by halves: in a block of 2h tokens those with t in the right half and s in the left are
(x_t exp(b_t - r)) (k_s exp(r - b_s)) with r at the middle: a product of matrices in which no factor exceeds one. Of
log2(C) such levels every pair lies in exactly one. The factors are products of decays within the halves, so they are
multiplied together from one level to the next and nothing cancels.

Shapes: N = chunks * states, C tokens of a chunk, G queries a state, R = G * C, K key size, J 1 or K.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.mixers.seq import Chunks

LOG2_E = 1.4426950408889634


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """At least fp32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def runs_in_bf16(*operands: Tensor) -> bool:
    return all(x.is_cuda and x.dtype == torch.bfloat16 for x in operands)


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


def pack(x_BTH: Tensor, dtype: torch.dtype, num_states: int, chunks: Chunks) -> Tensor:
    """x_BTH* -> [N, G * C, *]: the G queries of a state lie one after the other."""
    x = chunks.pack(x_BTH.to(dtype))
    return x.reshape(x.shape[0] * num_states, -1, *x.shape[3:])


def unpack(y: Tensor, num_heads: int, dtype: torch.dtype, chunks: Chunks) -> Tensor:
    """The inverse of pack."""
    return chunks.unpack(y.to(dtype).view(-1, num_heads, chunks.size, *y.shape[2:]))


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Batched product in at least fp32."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.dtype == torch.bfloat16 else torch.bmm(a, b)


def add_mm(c: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """c + scale * a b, c being fp32 or wider; what was c may be overwritten."""
    if torch.compiler.is_compiling():  # torch 2.11 cannot trace baddbmm with an out_dtype
        return c + scale * mm(a, b)
    if a.dtype == torch.bfloat16:
        return torch.baddbmm(c, a, b, alpha=scale, out_dtype=torch.float32)
    return c.baddbmm_(a, b, alpha=scale)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a * b, computed in the wider dtype of the two and rounded once, without a wide copy in between."""
    if torch.compiler.is_compiling() or torch.promote_types(a.dtype, b.dtype) == dtype:
        return (a * b).to(dtype)
    return torch.mul(a, b, out=a.new_empty(torch.broadcast_shapes(a.shape, b.shape), dtype=dtype))


def store(place: Tensor, x: Tensor, scale: float) -> None:
    """place = x * scale, in a view."""
    if torch.compiler.is_compiling():
        place.copy_(x * scale)
    else:
        torch.mul(x, scale, out=place)


def mul_rows(x_NRX: Tensor, gate_NCX: Tensor) -> Tensor:
    """Rows of all queries times something each token has once, in the rows' dtype."""
    return product(x_NRX.unflatten(1, (-1, gate_NCX.shape[1])), gate_NCX[:, None], x_NRX.dtype).flatten(1, 2)


def mul_rows_(x_NRX: Tensor, gate_NCX: Tensor) -> Tensor:
    """The same in place."""
    x_NRX.unflatten(1, (-1, gate_NCX.shape[1])).mul_(gate_NCX[:, None])
    return x_NRX


def sum_rows(x_NRX: Tensor, size: int) -> Tensor:
    """Sum over the queries of a token: [N, C, *]."""
    return x_NRX if x_NRX.shape[1] == size else x_NRX.unflatten(1, (-1, size)).sum(1)


def least(dtype: torch.dtype) -> float:
    """Products of five factors below this would leave the normal floating-point numbers, which a CPU multiplies some
    hundred times slower: they count as 0 there. In fp32 it is 3e-8, under the rounding of one."""
    return torch.finfo(dtype).tiny ** 0.2


def drop_small_(x: Tensor) -> Tensor:
    return x if x.is_cuda else torch.threshold_(x, least(x.dtype), 0.0)


def exp2_(x: Tensor) -> Tensor:
    """2^x in place. (A CPU's exp is slow wherever the result is near zero; exp2 is not.)"""
    return x.exp2_() if x.is_cuda else torch.threshold_(x, math.log2(least(x.dtype)), -math.inf).exp2_()


def make_decay(g_BTS: Tensor, dtype: torch.dtype, scale: float, chunks: Chunks) -> ScalarDecay | ChannelDecay:
    """Of g [B, T, S], or [B, T, S, K] with one decay a channel."""
    num_states = g_BTS.shape[2]
    if g_BTS.ndim == 4:
        return ChannelDecay(pack(g_BTS, dtype, num_states, chunks), scale)
    return ScalarDecay(pack(g_BTS, torch.float64, num_states, chunks), dtype, scale)


class ScalarDecay:
    """One decay a head."""

    saves_pairs = False
    """pair sums are cheaper made again in the backward pass than kept"""

    def __init__(self, g_NC: Tensor, dtype: torch.dtype, scale: float):
        # Sums over a chunk in fp64: a token of strong decay must not cost its neighbours their digits.
        sum_NC = (g_NC * LOG2_E).cumsum(-1)
        steps_NCC = (sum_NC[:, :, None] + math.log2(scale) - sum_NC[:, None, :]).to(dtype).tril_()
        self.pair_NCC = exp2_(steps_NCC).tril_()
        """scale exp(b_t - b_s)"""
        self.enter_NCJ = exp2_(sum_NC[..., None].to(dtype, copy=True))
        self.leave_NCJ = exp2_((sum_NC[:, -1:] - sum_NC)[..., None].to(dtype))

    @staticmethod
    def fold(x_NCK: Tensor) -> Tensor:
        """The gradient of a log decay from that of each channel."""
        return x_NCK.sum(-1, keepdim=True)

    def pairs(self, k_NCK: Tensor, *rows: Tensor) -> list[Tensor]:
        """P_NRC of each of `rows` [N, R, K]."""
        return [mul_rows_(mm(x_NRK, k_NCK.mT), self.pair_NCC) for x_NRK in rows]

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
        for x_NRK, p_NRC, dp_NRC, keys in zip((q_NRK, k_NCK), pairs, dpairs, (False, True), strict=False):
            # The gradient of b_t - b_s is that of P_ts times P_ts: row sums minus column sums. (q dq - k dk is the
            # same sum, but in bf16 what should cancel there has been rounded apart.)
            moved_NRC = p_NRC.mul_(dp_NRC)
            db_NC1 = db_NC1 + (sum_rows(moved_NRC.sum(-1), k_NCK.shape[1]) - moved_NRC.sum(1))[..., None]
            d_NRC = mul_rows_(dp_NRC, self.pair_NCC).to(k_NCK.dtype)
            dk_NCK = add_mm(dk_NCK, d_NRC.mT, x_NRK)
            if keys:
                dk_NCK = add_mm(dk_NCK, d_NRC, k_NCK)
            else:
                dq_NRK = add_mm(dq_NRK, d_NRC, k_NCK)
        return dq_NRK, dk_NCK, db_NC1


class ChannelDecay:
    """One decay a key channel."""

    saves_pairs = True

    def __init__(self, g_NCK: Tensor, scale: float):
        self.factor_NCK = exp2_(g_NCK * LOG2_E)
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
        if self._whole is None:
            enter, leave, h = self.factor_NCK.clone(), torch.ones_like(self.factor_NCK), 1
            while h < enter.shape[1]:
                self._double(enter, leave, h)
                h *= 2
            self._whole = enter, leave
        return self._whole

    @staticmethod
    def fold(x_NCK: Tensor) -> Tensor:
        return x_NCK

    @staticmethod
    def _double(enter_NCK: Tensor, leave_NCK: Tensor, h: int) -> None:
        """From halves of h tokens to blocks of 2h: enter holds the product of the decays from the first token of a
        half to token t, leave that from the one after token s to the last."""
        enter, leave = (x.unflatten(1, (-1, 2, h)) for x in (enter_NCK, leave_NCK))
        drop_small_(leave[:, :, 0].mul_(enter[:, :, 1, -1:]))
        drop_small_(enter[:, :, 1].mul_(enter[:, :, 0, -1:]))

    def _levels(self, k_NCK: Tensor, rows_NXCK: Tensor):
        """Of every level: (h, factors of the right halves, their rows [N * n, X * h, K], factors of the left halves,
        their keys [N * n, h, K])."""
        enter, leave, C = self.factor_NCK.clone(), torch.ones_like(self.factor_NCK), k_NCK.shape[1]
        h = 1
        while h < C:
            enter_Nn1hK = enter.unflatten(1, (-1, 2, h))[:, :, 1, None]
            leave_NnhK = leave.unflatten(1, (-1, 2, h))[:, :, 0]
            rows_NnXhK = rows_NXCK.unflatten(2, (-1, 2, h))[:, :, :, 1].transpose(1, 2)
            right_NnXhK = product(rows_NnXhK, enter_Nn1hK, k_NCK.dtype)
            left_NnhK = product(k_NCK.unflatten(1, (-1, 2, h))[:, :, 0], leave_NnhK, k_NCK.dtype)
            yield h, enter_Nn1hK, right_NnXhK.flatten(0, 1).flatten(1, 2), leave_NnhK, left_NnhK.flatten(0, 1)
            if 2 * h < C or self._whole is None:
                self._double(enter, leave, h)
            h *= 2
        self._whole = self._whole or (enter, leave)

    @staticmethod
    def _blocks(p_NXCC: Tensor, h: int) -> Tensor:
        """The entries of one level, right halves against left ones: a view [N, X, h, h, n]."""
        n = p_NXCC.shape[-1] // (2 * h)
        p = p_NXCC.unflatten(3, (n, 2, h)).unflatten(2, (n, 2, h))
        return p[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4)

    def pairs(self, k_NCK: Tensor, *rows: Tensor) -> list[Tensor]:
        C = k_NCK.shape[1]
        x_NXCK = self._stack(rows, C)
        p_NXCC = self.factor_NCK.new_zeros(*x_NXCK.shape[:3], C)
        for h, _, right, _, left in self._levels(k_NCK, x_NXCK):
            block = mm(right, left.mT).unflatten(0, (len(k_NCK), -1)).unflatten(2, (-1, h))  # N, n, X, h, h
            store(self._blocks(p_NXCC, h), block.permute(0, 2, 3, 4, 1), self.scale)
        same_NXC = (x_NXCK * k_NCK[:, None]).sum(-1, dtype=p_NXCC.dtype)  # t = s: no decay lies between
        store(p_NXCC.diagonal(dim1=2, dim2=3), same_NXC, self.scale)
        return list(p_NXCC.flatten(1, 2).split([x.shape[1] for x in rows], 1))

    def pairs_back(
        self,
        k_NCK: Tensor,
        q_NRK: Tensor,
        pairs: list[Tensor],
        dpairs: list[Tensor],
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As ScalarDecay's, all in place."""
        N, C, work = len(k_NCK), k_NCK.shape[1], k_NCK.dtype
        dq_NRK, dk_NCK, db_NCK = grads
        x_NXCK, dq_NGCK = self._stack((q_NRK, k_NCK)[: len(pairs)], C), dq_NRK.unflatten(1, (-1, C))
        dp_NXCC = [dp.unflatten(1, (-1, C)) for dp in dpairs]
        G = dq_NGCK.shape[1]
        same_NGC1 = dp_NXCC[0].diagonal(dim1=2, dim2=3)[..., None] * self.scale
        dq_NGCK.addcmul_(same_NGC1, k_NCK[:, None])
        for x_NCK, same_NC1 in zip(x_NXCK.unbind(1), same_NGC1.unbind(1), strict=False):
            dk_NCK.addcmul_(x_NCK, same_NC1)
        for h, enter, right, leave, left in self._levels(k_NCK, x_NXCK):
            d = torch.cat([self._blocks(dp, h).permute(0, 4, 1, 2, 3) for dp in dp_NXCC], 2)  # N, n, X, h, h
            d = (d * self.scale).to(work).flatten(2, 3).flatten(0, 1)
            dright_NnXhK = mm(d, left).unflatten(1, (-1, h)).unflatten(0, (N, -1))
            dleft_NnhK = mm(d.mT, right).unflatten(0, (N, -1))
            dq_NGCK.unflatten(2, (-1, 2, h))[:, :, :, 1].transpose(1, 2).addcmul_(dright_NnXhK[:, :, :G], enter)
            dk_left, dk_right = dk_NCK.unflatten(1, (-1, 2, h)).unbind(2)
            db_left, db_right = db_NCK.unflatten(1, (-1, 2, h)).unbind(2)
            dk_left.addcmul_(dleft_NnhK, leave)
            for dkeys in dright_NnXhK[:, :, G:].unbind(2):
                dk_right.addcmul_(dkeys, enter[:, :, 0])
            # b moves the factors as they were multiplied: rounded. Then what the halves of a block give adds up to 0,
            # where q dq - k dk would leave a rest to all tokens before the block.
            db_left.addcmul_(left.view_as(dleft_NnhK), dleft_NnhK, value=-1)
            for x, dx in zip(right.view_as(dright_NnXhK).unbind(2), dright_NnXhK.unbind(2), strict=True):
                db_right.addcmul_(x, dx)
        return dq_NRK, dk_NCK, db_NCK

    @staticmethod
    def _stack(rows, C: int) -> Tensor:
        """[N, R, *] each -> [N, X, C, *], C rows of one query (or of the keys) after another."""
        x = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        return x.unflatten(1, (-1, C))
