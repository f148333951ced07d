"""Linear attention with a decay (Lightning, Mamba-2, GLA): token by token, one step, and in chunks.

    S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

g <= 0 is a log decay, one a head or one a key channel. Mamba-2's state-space duality is the first with (q, k, v, g) =
(C, B, dt x, dt A) and scale 1 (arXiv 2405.21060); GLA is the second (arXiv 2312.06635).

Inside a chunk of C tokens that starts from the state S, with b = cumsum(g), M the pair sums of q and k (chunked.py):

    O  = Q' S + M V                   Q' = scale * exp(b) Q
    S' = exp(b_C) S + K'^T V          K' = exp(b_C - b) K

so the state is carried from chunk to chunk by a multiplication and an addition, and all else is batched.

Shapes: B rows, T tokens a row, H heads, K key size, V value size, C chunk size, N = chunks * heads,
E = sequences * heads, J 1 or K.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.kernels import usable
from plait.mixers.chunked import (
    ChannelDecay,
    ScalarDecay,
    add_mm,
    chunk_length,
    decay_of_state,
    make_decay,
    mm,
    mul_rows,
    mul_rows_,
    pack,
    reads_by_kernel,
    scan_runs,
    sum_after,
    takes_kernel,
    unpack,
    wide_dtype,
    widen,
    working_dtype,
)
from plait.mixers.seq import Chunks, Seq


def linear_naive(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    state_BHKV: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The specification, token by token: (o_BTHV in v's dtype, state_BHKV in fp32, or fp64 for fp64 inputs)."""
    dtype = v_BTHV.dtype
    k, v, state, q, g = widen(k_BTHK, v_BTHV, state_BHKV, q_BTHK, g_BTH)
    outputs = []
    with torch.autocast(q.device.type, enabled=False):
        for t in range(q.shape[1]):
            state = state * decay_of_state(g[:, t]) + k[:, t, :, :, None] * v[:, t, :, None, :]
            outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    o_BTHV = torch.stack(outputs, 1) if outputs else v.new_empty(v.shape)
    return o_BTHV.to(dtype), state


def linear_step(
    q_B1HK: Tensor,
    k_B1HK: Tensor,
    v_B1HV: Tensor,
    g_B1H: Tensor,
    state_BHKV: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """One token: (o_B1HV, state_BHKV). Waits for nothing on the host."""
    k, v, state, q, g = widen(k_B1HK, v_B1HV, state_BHKV, q_B1HK, g_B1H)
    with torch.autocast(q.device.type, enabled=False):
        state = torch.addcmul(state * decay_of_state(g[:, 0]), k[:, 0, :, :, None], v[:, 0, :, None, :])
        o_BH1V = (q[:, 0, :, None] * scale) @ state
    return o_BH1V.transpose(1, 2).to(v_B1HV.dtype), state


def linear_chunk(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    state_BHKV: Tensor | None,
    seq: Seq,
    *,
    scale: float,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """In chunks: (o_BTHV in v's dtype, state in fp32, or fp64 for fp64 inputs), differentiable once.

    g: [B, T, H] or [B, T, H, K]. Dense rows, or packed sequences [1, N, ...] with one state for each. On CUDA the
    products of bf16 inputs run in bf16 with fp32 accumulation; decays and states stay in fp32. chunk_size:
    chunked.chunk_length.
    """
    longest = max(seq.lengths, default=0)
    chunk_size = chunk_length(chunk_size, longest, q_BTHK, k_BTHK, v_BTHV)
    wide = wide_dtype(q_BTHK, k_BTHK, v_BTHV, g_BTH)
    if state_BHKV is None:
        state_BHKV = v_BTHV.new_zeros(seq.num_sequences, *k_BTHK.shape[2:], v_BTHV.shape[3], dtype=wide)
    if longest == 0:
        return v_BTHV.new_zeros(v_BTHV.shape), state_BHKV.to(wide)
    return _LinearChunk.apply(q_BTHK, k_BTHK, v_BTHV, g_BTH, state_BHKV, seq.chunks(chunk_size), scale)


class _Chunked(NamedTuple):
    """One call's chunks: operands in the working dtype."""

    q_NCK: Tensor
    k_NCK: Tensor
    v_NCV: Tensor
    decay: ScalarDecay | ChannelDecay
    scale: float
    rows: list[int]
    """chunks * heads of each step of the scan"""

    @staticmethod
    def build(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, chunks: Chunks, scale: float) -> _Chunked:
        wide = wide_dtype(q_BTHK, k_BTHK, v_BTHV, g_BTH)
        work = working_dtype(wide, q_BTHK, k_BTHK, v_BTHV)
        H = k_BTHK.shape[2]
        return _Chunked(
            *(pack(x, work, H, chunks) for x in (q_BTHK, k_BTHK, v_BTHV)),
            decay=make_decay(g_BTH, wide, scale, chunks, takes_kernel(work, k_BTHK)),
            scale=scale,
            rows=[count * H for count in chunks.counts],
        )

    def read(self) -> Tensor:
        """Q' without its scale."""
        return mul_rows(self.q_NCK, self.decay.enter_NCJ)

    def write(self) -> Tensor:
        """K'."""
        return mul_rows(self.k_NCK, self.decay.leave_NCJ)

    @property
    def keep_NJ1(self) -> Tensor:
        """exp(b_C), to multiply a state with."""
        return self.decay.enter_NCJ[:, -1, :, None]


class _LinearChunk(torch.autograd.Function):
    """Saves its inputs, the state each chunk starts from and, with one decay a channel and no kernel for it, M;
    recomputes the rest."""

    @staticmethod
    def forward(ctx, q_BTHK, k_BTHK, v_BTHV, g_BTH, state_BHKV, chunks, scale):
        with torch.autocast(q_BTHK.device.type, enabled=False):
            x = _Chunked.build(q_BTHK, k_BTHK, v_BTHV, g_BTH, chunks, scale)
            work = x.k_NCK.dtype
            pairs = [] if reads_by_kernel(x.decay) else x.decay.pairs(x.k_NCK, x.q_NCK, first=work)
            w_NKV = mm(x.write().mT, x.v_NCV)
            first_EKV = chunks.sort(state_BHKV).flatten(0, 1).to(w_NKV.dtype)
            start_NKV, last_EKV = fade(first_EKV, x.keep_NJ1, w_NKV, x.rows, work)
            if reads_by_kernel(x.decay):
                o_NCV = x.decay.read(x.q_NCK, x.k_NCK, x.v_NCV, start_NKV)
            else:
                o_NCV = add_mm(torch.bmm(pairs[0], x.v_NCV), x.read(), start_NKV, x.scale)
        ctx.chunks, ctx.scale = chunks, scale
        ctx.save_for_backward(q_BTHK, k_BTHK, v_BTHV, g_BTH, start_NKV, *(pairs if x.decay.saves_pairs else []))
        last_BHKV = chunks.unsort(last_EKV.view(state_BHKV.shape))
        return unpack(o_NCV, q_BTHK.shape[2], v_BTHV.dtype, chunks), last_BHKV

    @staticmethod
    @once_differentiable
    def backward(ctx, do_BTHV, dlast_BHKV):
        saved, chunks = ctx.saved_tensors, ctx.chunks  # read once: activation checkpointing makes them anew each time
        inputs, start_NKV = saved[:4], saved[4]
        with torch.autocast(do_BTHV.device.type, enabled=False):
            x = _Chunked.build(*inputs, chunks, ctx.scale)
            decay, work = x.decay, x.k_NCK.dtype
            do_NCV = pack(do_BTHV, work, inputs[1].shape[2], chunks)
            dw_NKV = mm(x.read().mT, do_NCV).mul_(x.scale)
            dlast_EKV = chunks.sort(dlast_BHKV).flatten(0, 1)
            dfirst_EKV, dend_NKV = fade_back(dlast_EKV, x.keep_NJ1, dw_NKV, x.rows, work)

            if reads_by_kernel(decay):
                dv_NCV = decay.read_back(x.q_NCK, x.k_NCK, do_NCV, work, dend_NKV)
                operands = (x.q_NCK, x.k_NCK, x.v_NCV, do_NCV, start_NKV, dend_NKV)
                dq_NCK, dk_NCK, db_NCJ, leave_NCJ = decay.read_grads(*operands, work)
            else:
                mix_NCC = saved[5] if len(saved) > 5 else decay.pairs(x.k_NCK, x.q_NCK)[0]
                dv_NCV = add_mm(mm(x.write(), dend_NKV), mix_NCC.to(work).mT, do_NCV)
                dq_NCK = mul_rows_(mm(do_NCV, start_NKV.mT), decay.enter_NCJ, x.scale)
                dk_NCK = mm(x.v_NCV, dend_NKV.mT).mul_(decay.leave_NCJ)
                leave_NCJ = decay.fold(x.k_NCK * dk_NCK)
                db_NCJ = decay.fold(x.q_NCK * dq_NCK) - leave_NCJ
                dpairs, grads = mm(do_NCV, x.v_NCV.mT), (dq_NCK, dk_NCK, db_NCJ)
                dq_NCK, dk_NCK, db_NCJ = decay.pairs_back(x.k_NCK, x.q_NCK, [mix_NCC], [dpairs], grads)
            keep_N1J = decay.fold((start_NKV * dend_NKV).sum(-1, dtype=db_NCJ.dtype)[:, None]) * decay.enter_NCJ[:, -1:]
            dg_NCJ = sum_after(db_NCJ, leave_NCJ.sum(1, keepdim=True).add_(keep_N1J))
            grads = (dq_NCK, dk_NCK, dv_NCV, dg_NCJ)
        grads = [
            unpack(grad.view(*grad.shape[:2], *like.shape[3:]), like.shape[2], like.dtype, chunks)
            for grad, like in zip(grads, inputs, strict=True)
        ]
        return *grads, chunks.unsort(dfirst_EKV.view(dlast_BHKV.shape)), None, None


@torch.library.custom_op("plait::fade", mutates_args=())
def fade(
    first_EKV: Tensor, keep_NJ1: Tensor, w_NKV: Tensor, rows: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """S <- keep S + W over the steps: the state before each chunk [N, K, V], rounded to the dtype, and the last of each
    sequence [E, K, V].

    rows: how many states take part in each step, falling; they are the first ones. One opaque operator, as delta.scan.
    """
    return scan_runs(_fade, first_EKV, keep_NJ1, w_NKV, rows, dtype, 1)


@torch.library.custom_op("plait::fade_back", mutates_args=())
def fade_back(
    dlast_EKV: Tensor, keep_NJ1: Tensor, dw_NKV: Tensor, rows: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradient of fade: dS <- keep dS + dW against the steps. Gives that of first [E, K, V] and, rounded to the
    dtype, of every chunk's outgoing state [N, K, V]."""
    dend_NKV, dfirst_EKV = scan_runs(_fade, dlast_EKV, keep_NJ1, dw_NKV, rows, dtype, -1)
    return dfirst_EKV, dend_NKV


def _fade(state_EKV: Tensor, keep_LEJ1: Tensor, w_LEKV: Tensor, before_LEKV: Tensor, order: int) -> None:
    """S <- keep S + W in place over L steps, or with order -1 against them, noting what S was before each."""
    if usable(w_LEKV):
        from plait.kernels.fade import fade_

        fade_(state_EKV, keep_LEJ1, w_LEKV, before_LEKV, order)
        return
    wide_LEKV = before_LEKV if before_LEKV.dtype == w_LEKV.dtype else torch.empty_like(w_LEKV)
    keep, w, before = (x.unbind()[::order] for x in (keep_LEJ1, w_LEKV, wide_LEKV))
    before[0].copy_(state_EKV)
    for keep_j, w_j, before_j, after_j in zip(keep, w, before, (*before[1:], state_EKV), strict=True):
        torch.addcmul(w_j, before_j, keep_j, out=after_j)
    if wide_LEKV is not before_LEKV:
        before_LEKV.copy_(wide_LEKV)


@fade.register_fake
def _(first_EKV: Tensor, keep_NJ1: Tensor, w_NKV: Tensor, rows: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return w_NKV.new_empty(w_NKV.shape, dtype=dtype), first_EKV.new_empty(first_EKV.shape)


@fade_back.register_fake
def _(
    dlast_EKV: Tensor, keep_NJ1: Tensor, dw_NKV: Tensor, rows: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return dlast_EKV.new_empty(dlast_EKV.shape), dw_NKV.new_empty(dw_NKV.shape, dtype=dtype)
