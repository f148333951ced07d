"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464): token by token, one step, and in chunks.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = S_t^T q_t / sqrt(K)

q and k come L2-normalized; g <= 0 is a log decay; beta lies in [0, 2). Query head h reads state h // G: grouped
queries share a state.

Inside a chunk of C tokens that starts from the state S, let b = cumsum(g) and D_ts = exp(b_t - b_s) for s <= t, else
0. The tokens write U = T R into the state, where R = beta V + K' S with K' = -beta exp(b) K, T = (I + A)^-1 and A is
the strictly lower part of beta D * K K^T. Then

    O  = Q' S + M U                Q' = exp(b) Q / sqrt(K),    M = D * Q K^T / sqrt(K)
    S' = P S + X^T beta V          P = exp(b_C) I + X^T K',    X = T^T (exp(b_C - b) K)

so one product a chunk carries the state, and all else is batched over the chunks. P is a product of contractions, so
the products of many do not grow. T comes by substitution: a Neumann series in A cancels catastrophically when keys
repeat. Backwards the state's gradient goes the same way, dS = P^T dS' + Q'^T dO + K'^T T^T M^T dO.

Shapes: B rows, T tokens a row, S states a row, H = S * G query heads, K key size, V value size, C chunk size,
N = chunks * states, R = G * C queries that read a chunk, E = sequences * states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.mixers.chunked import (
    ChannelDecay,
    ScalarDecay,
    add_both,
    add_mm,
    chunk_length,
    decay_of_state,
    least,
    make_decay,
    mm,
    mul_rows,
    mul_rows_,
    pack,
    reads_by_kernel,
    scan_runs,
    sum_after,
    sum_rows,
    takes_kernel,
    unpack,
    use_rows,
    wide_dtype,
    widen,
    working_dtype,
)
from plait.mixers.seq import Chunks, Seq


def delta_naive(
    q_BTHK: Tensor,
    k_BTSK: Tensor,
    v_BTSV: Tensor,
    g_BTS: Tensor,
    beta_BTS: Tensor,
    state_BSKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The specification, token by token: (o_BTHV in v's dtype, state_BSKV in fp32, or fp64 for fp64 inputs)."""
    dtype = v_BTSV.dtype
    k, v, state, q, g, beta = widen(k_BTSK, v_BTSV, state_BSKV, q_BTHK, g_BTS, beta_BTS)
    q = q.unflatten(2, (k.shape[2], -1)) * k.shape[-1] ** -0.5  # B, T, S, G, K
    outputs = []
    with torch.autocast(q.device.type, enabled=False):
        for t in range(q.shape[1]):
            state = state * decay_of_state(g[:, t])
            old_BSV = torch.einsum("bsk,bskv->bsv", k[:, t], state)
            new_BSV = beta[:, t, :, None] * (v[:, t] - old_BSV)
            state = state + k[:, t, :, :, None] * new_BSV[:, :, None, :]
            outputs.append(torch.einsum("bsgk,bskv->bsgv", q[:, t], state))
    o_BTHV = torch.stack(outputs, 1).flatten(2, 3) if outputs else v.new_empty(*q_BTHK.shape[:3], v.shape[-1])
    return o_BTHV.to(dtype), state


def delta_step(
    q_B1HK: Tensor,
    k_B1SK: Tensor,
    v_B1SV: Tensor,
    g_B1S: Tensor,
    beta_B1S: Tensor,
    state_BSKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token: (o_B1HV, state_BSKV). Reads the state once for key and queries; waits for nothing on the host."""
    dtype = v_B1SV.dtype
    k, v, state, q, g, beta = widen(k_B1SK, v_B1SV, state_BSKV, q_B1HK, g_B1S, beta_B1S)
    k_BSK, v_BSV, beta_BS1 = k[:, 0], v[:, 0], beta[:, 0, :, None]
    q_BSGK = q[:, 0].unflatten(1, (k.shape[2], -1)) * k.shape[-1] ** -0.5
    with torch.autocast(q.device.type, enabled=False):
        state = state * decay_of_state(g[:, 0])
        reads = torch.cat((k_BSK[:, :, None], q_BSGK), 2) @ state  # B, S, 1 + G, V
        new_BS1V = (beta_BS1 * (v_BSV - reads[:, :, 0]))[:, :, None]
        state = torch.addcmul(state, k_BSK[..., None], new_BS1V)
        o_BSGV = torch.addcmul(reads[:, :, 1:], q_BSGK @ k_BSK[..., None], new_BS1V)
    return o_BSGV.flatten(1, 2)[:, None].to(dtype), state


def delta_chunk(
    q_BTHK: Tensor,
    k_BTSK: Tensor,
    v_BTSV: Tensor,
    g_BTS: Tensor,
    beta_BTS: Tensor,
    state_BSKV: Tensor | None,
    seq: Seq,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """In chunks: (o_BTHV in v's dtype, state in fp32, or fp64 for fp64 inputs), differentiable once.

    Dense rows, or packed sequences [1, N, ...] with one state for each, in the order of the sequences. On CUDA the
    products of bf16 inputs run in bf16 with fp32 accumulation; gates, decays, the triangular inverse and the states
    stay in fp32. chunk_size: chunked.chunk_length.
    """
    longest = max(seq.lengths, default=0)
    chunk_size = chunk_length(chunk_size, longest, q_BTHK, k_BTSK, v_BTSV)
    wide = wide_dtype(q_BTHK, k_BTSK, v_BTSV, g_BTS, beta_BTS)
    if state_BSKV is None:
        state_BSKV = v_BTSV.new_zeros(seq.num_sequences, *k_BTSK.shape[2:], v_BTSV.shape[3], dtype=wide)
    if longest == 0:
        return v_BTSV.new_zeros(*q_BTHK.shape[:3], v_BTSV.shape[3]), state_BSKV.to(wide)
    return _DeltaChunk.apply(q_BTHK, k_BTSK, v_BTSV, g_BTS, beta_BTS, state_BSKV, seq.chunks(chunk_size))


class _Chunked(NamedTuple):
    """One call's chunks: operands in the working dtype, beta in fp32 or fp64."""

    q_NRK: Tensor
    k_NCK: Tensor
    v_NCV: Tensor
    beta_NC1: Tensor
    decay: ScalarDecay | ChannelDecay
    scale: float
    rows: list[int]
    """chunks * states of each step of the scan"""

    @staticmethod
    def build(
        q_BTHK: Tensor, k_BTSK: Tensor, v_BTSV: Tensor, g_BTS: Tensor, beta_BTS: Tensor, chunks: Chunks
    ) -> _Chunked:
        wide = wide_dtype(q_BTHK, k_BTSK, v_BTSV, g_BTS, beta_BTS)
        work = working_dtype(wide, q_BTHK, k_BTSK, v_BTSV)
        S, scale = k_BTSK.shape[2], k_BTSK.shape[3] ** -0.5
        return _Chunked(
            q_NRK=pack(q_BTHK, work, S, chunks),
            k_NCK=pack(k_BTSK, work, S, chunks),
            v_NCV=pack(v_BTSV, work, S, chunks),
            beta_NC1=pack(beta_BTS, wide, S, chunks)[..., None],
            decay=make_decay(g_BTS, wide, scale, chunks, takes_kernel(work, k_BTSK)),
            scale=scale,
            rows=[count * S for count in chunks.counts],
        )

    def read(self) -> Tensor:
        """Q' without its 1/sqrt(K)."""
        return mul_rows(self.q_NRK, self.decay.enter_NCJ)

    def transfer(self, inverse_NCC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """K', X and P from T."""
        work, decay = self.k_NCK.dtype, self.decay
        old_NCK = mul_rows(self.k_NCK, decay.enter_NCJ * -self.beta_NC1)
        x_NCK = _solved(inverse_NCC.mT, self.k_NCK, work, decay.leave_NCJ)
        p_NKK = mm(x_NCK.mT, old_NCK)
        p_NKK.diagonal(dim1=1, dim2=2).add_(decay.enter_NCJ[:, -1])
        return old_NCK, x_NCK, p_NKK


class _DeltaChunk(torch.autograd.Function):
    """Saves its inputs, T, U, the state each chunk starts from and, with one decay a channel and no kernel for them, M
    and A / beta; recomputes the rest."""

    @staticmethod
    def forward(ctx, q_BTHK, k_BTSK, v_BTSV, g_BTS, beta_BTS, state_BSKV, chunks):
        with torch.autocast(q_BTHK.device.type, enabled=False):
            x = _Chunked.build(q_BTHK, k_BTSK, v_BTSV, g_BTS, beta_BTS, chunks)
            work = x.k_NCK.dtype
            pairs, saves = [], x.decay.saves_pairs
            if reads_by_kernel(x.decay):
                erase_NCC = x.decay.erase(x.k_NCK, x.beta_NC1)
            else:
                beta_NC1 = x.beta_NC1 / x.scale
                times = None if saves else beta_NC1
                pairs = x.decay.pairs(x.k_NCK, x.q_NRK, x.k_NCK, first=work, times=times)
                erase_NCC = pairs[1] * beta_NC1 if saves else pairs[1]
            inverse_NCC = _unit_inverse(erase_NCC, work)
            old_NCK, x_NCK, p_NKK = x.transfer(inverse_NCC)
            r_NCV = mul_rows(x.v_NCV, x.beta_NC1)
            w_NKV = mm(x_NCK.mT, r_NCV)
            first_EKV = chunks.sort(state_BSKV).flatten(0, 1).to(w_NKV.dtype)
            start_NKV, last_EKV = scan(first_EKV, p_NKK, w_NKV, x.rows, work)
            u_NCV = _solved(inverse_NCC, add_mm(r_NCV, old_NCK, start_NKV), work)
            if reads_by_kernel(x.decay):
                o_NRV = x.decay.read(x.q_NRK, x.k_NCK, u_NCV, start_NKV)
            else:
                o_NRV = add_mm(torch.bmm(pairs[0], u_NCV), x.read(), start_NKV, x.scale)
        ctx.chunks = chunks
        kept = (inverse_NCC, start_NKV, u_NCV, *(pairs if saves else []))
        ctx.save_for_backward(q_BTHK, k_BTSK, v_BTSV, g_BTS, beta_BTS, *kept)
        last_BSKV = chunks.unsort(last_EKV.view(state_BSKV.shape))
        return unpack(o_NRV, q_BTHK.shape[2], v_BTSV.dtype, chunks), last_BSKV

    @staticmethod
    @once_differentiable
    def backward(ctx, do_BTHV, dlast_BSKV):
        saved, chunks = ctx.saved_tensors, ctx.chunks  # read once: activation checkpointing makes them anew each time
        inputs, (inverse_NCC, start_NKV, u_NCV), pairs = saved[:5], saved[5:8], list(saved[8:])
        with torch.autocast(do_BTHV.device.type, enabled=False):
            x = _Chunked.build(*inputs, chunks)
            work = x.k_NCK.dtype
            do_NRV = pack(do_BTHV, work, inputs[1].shape[2], chunks)
            if reads_by_kernel(x.decay):
                du_NCV = x.decay.read_back(x.q_NRK, x.k_NCK, do_NRV, inverse_NCC.dtype)
            else:
                pairs = pairs or x.decay.pairs(x.k_NCK, x.q_NRK, x.k_NCK)
                du_NCV = mm(pairs[0].to(work).mT, do_NRV)
            old_NCK, x_NCK, p_NKK = x.transfer(inverse_NCC)

            # dR from the outputs of the chunk, then dS across the chunks, then the rest of dR.
            dr_NCV = torch.bmm(inverse_NCC.mT, du_NCV)
            dw_NKV = add_mm(mm(old_NCK.mT, dr_NCV.to(work)), x.read().mT, do_NRV, x.scale)
            dlast_EKV = chunks.sort(dlast_BSKV).flatten(0, 1)
            dfirst_EKV, dend_NKV = scan_back(dlast_EKV, p_NKK, dw_NKV, x.rows, work)
            dr_NCV = add_mm(dr_NCV, x_NCK, dend_NKV)

            dq, dk, dg, dbeta = _grads(x, pairs, start_NKV, u_NCV, do_NRV, dr_NCV.to(work), dend_NKV)
            dbeta += (dr_NCV * x.v_NCV).sum(-1)
            dv = use_rows(dr_NCV, x.beta_NC1, inputs[2].dtype)
        grads = [
            unpack(grad.view(*grad.shape[:2], *like.shape[3:]), like.shape[2], like.dtype, chunks)
            for grad, like in zip((dq, dk, dv, dg, dbeta), inputs, strict=True)
        ]
        return *grads, chunks.unsort(dfirst_EKV.view(dlast_BSKV.shape)), None


def _grads(
    x: _Chunked,
    pairs: list[Tensor],
    start_NKV: Tensor,
    u_NCV: Tensor,
    do_NRV: Tensor,
    dr_NCV: Tensor,
    dend_NKV: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq_NRK, dk_NCK, dg_NCJ, dbeta_NC but for what reaches beta by V. pairs: none where reads_by_kernel."""
    decay, C = x.decay, x.k_NCK.shape[1]

    # What k_t erases from the state before the chunk. It is proportional to beta_t, which comes last.
    erase_NCK = mm(dr_NCV, start_NKV.mT).mul_(decay.enter_NCJ)
    erased_NCK = x.k_NCK * erase_NCK
    dbeta_NC = erased_NCK.sum(-1).neg_()
    # Then through the states by what is read and written, and between tokens of the chunk: dM = dO U^T and
    # dA = -dR U^T, below the diagonal: above it the pairs are 0.
    if reads_by_kernel(decay):
        operands = (x.q_NRK, x.k_NCK, u_NCV, do_NRV, start_NKV, dend_NKV)
        dq_NRK, dk_NCK, db_NCJ, leave_NCJ = decay.read_grads(*operands, erase_NCK.dtype)
        derase_NCC, rows_NC1, columns_NC1 = decay.erase_grads(x.k_NCK, dr_NCV, u_NCV, -x.beta_NC1)
        dbeta_NC -= rows_NC1[..., 0]
        db_NCJ += dbeta_NC[..., None] * x.beta_NC1 - columns_NC1
        dk_NCK = add_both(dk_NCK, derase_NCC, x.k_NCK)
    else:
        dq_NRK = mul_rows_(mm(do_NRV, start_NKV.mT), decay.enter_NCJ, x.scale)
        dk_NCK = mm(u_NCV, dend_NKV.mT).mul_(decay.leave_NCJ)
        leave_NCK = x.k_NCK * dk_NCK
        leave_NCJ = decay.fold(leave_NCK)
        db_NCJ = decay.fold(sum_rows(x.q_NRK * dq_NRK, C).addcmul_(erased_NCK, x.beta_NC1, value=-1).sub_(leave_NCK))
        derase_NCC = mm(dr_NCV, u_NCV.mT)
        derase_NCC.diagonal(dim1=1, dim2=2).zero_()
        dbeta_NC -= (derase_NCC * pairs[1]).sum(-1) / x.scale
        dpairs = [mm(do_NRV, u_NCV.mT), derase_NCC.mul_(x.beta_NC1 * (-1 / x.scale))]
        dq_NRK, dk_NCK, db_NCJ = decay.pairs_back(x.k_NCK, x.q_NRK, pairs, dpairs, (dq_NRK, dk_NCK, db_NCJ))
    dk_NCK.addcmul_(erase_NCK, x.beta_NC1, value=-1)
    keep_N1J = decay.fold((start_NKV * dend_NKV).sum(-1, dtype=db_NCJ.dtype)[:, None]) * decay.enter_NCJ[:, -1:]

    # g_t moves b of every token from t on, and what leaves the chunk from all before.
    dg_NCJ = sum_after(db_NCJ, leave_NCJ.sum(1, keepdim=True).add_(keep_N1J))
    return dq_NRK, dk_NCK, dg_NCJ, dbeta_NC


def _unit_inverse(a_NCC: Tensor, work: torch.dtype) -> Tensor:
    """(I + A)^-1 by substitution, A being the strictly lower part of what is given. work: of the operands."""
    if takes_kernel(work, a_NCC):
        from plait.kernels.inverse import LARGEST, unit_inverse

        if a_NCC.shape[-1] <= LARGEST:
            return unit_inverse(a_NCC)
    eye_CC = torch.eye(a_NCC.shape[-1], dtype=a_NCC.dtype, device=a_NCC.device)
    inverse_NCC = torch.linalg.solve_triangular(a_NCC, eye_CC.expand_as(a_NCC), upper=False, unitriangular=True)
    return inverse_NCC if a_NCC.is_cuda else F.hardshrink(inverse_NCC, least(a_NCC.dtype))


def _solved(inverse_NCC: Tensor, x_NCX: Tensor, dtype: torch.dtype, gate_NCJ: Tensor | None = None) -> Tensor:
    """The product with x, or with x * gate, in at least fp32, rounded once."""
    if takes_kernel(dtype, x_NCX):
        from plait.kernels.products import square_mm

        return square_mm(inverse_NCC, x_NCX, dtype, gate_NCJ)
    if gate_NCJ is not None:
        x_NCX = x_NCX * gate_NCJ
    return torch.bmm(inverse_NCC, x_NCX.to(inverse_NCC.dtype)).to(dtype)


@torch.library.custom_op("plait::scan", mutates_args=("w_NKV",))
def scan(first_EKV: Tensor, p_NKK: Tensor, w_NKV: Tensor, rows: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """S <- P S + W over the steps: the state before each chunk [N, K, V], rounded to the dtype, and the last of each
    sequence [E, K, V]. W may be overwritten.

    rows: how many states take part in each step, falling; they are the first ones. One opaque operator, so that a
    compiled graph does not grow with the length.
    """
    if _scans_in_kernel(w_NKV, dtype):
        from plait.kernels.scan import scan_

        return scan_runs(scan_, first_EKV, p_NKK, w_NKV, rows, dtype, 1)
    E, blocks = len(first_EKV), [first_EKV, *w_NKV.split(rows)]
    for n, p, before, after in zip(rows, p_NKK.split(rows), blocks, blocks[1:], strict=False):
        after.baddbmm_(p, before if n == len(before) else before[:n])  # the host, too, has little time for a step
    if all(n == E for n in rows):
        states = w_NKV.new_empty(w_NKV.shape, dtype=dtype)
        states[:E], states[E:] = first_EKV, w_NKV[:-E]
        return states, w_NKV[-E:].clone(memory_format=torch.contiguous_format)
    # Sequences are sorted by falling length: of each block the first go on and the others are at their end.
    blocks = [block.split([n, len(block) - n]) for block, n in zip(blocks, [*rows, 0], strict=True)]
    return torch.cat([going for going, _ in blocks]).to(dtype), torch.cat([ended for _, ended in reversed(blocks)])


@torch.library.custom_op("plait::scan_back", mutates_args=())
def scan_back(
    dlast_EKV: Tensor, p_NKK: Tensor, dw_NKV: Tensor, rows: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The scan's gradient: dS <- P^T dS + dW against the steps. Gives that of first [E, K, V] and, rounded to the
    dtype, of every chunk's outgoing state [N, K, V]."""
    if _scans_in_kernel(dw_NKV, dtype):
        from plait.kernels.scan import scan_

        dend_NKV, dfirst_EKV = scan_runs(scan_, dlast_EKV, p_NKK, dw_NKV, rows, dtype, -1)
        return dfirst_EKV, dend_NKV
    sizes = [len(dlast_EKV), *rows]
    ended = [size - n for size, n in zip(sizes, [*rows, 0], strict=True)]
    pieces = zip(dw_NKV.split([*rows, 0]), reversed(dlast_EKV.split(ended[::-1])), strict=True)
    states = torch.cat([piece for pair in pieces for piece in pair])
    blocks = states.split(sizes)
    steps = list(zip(rows, p_NKK.split(rows), blocks, blocks[1:], strict=False))
    for n, p, before, after in reversed(steps):
        before[:n].baddbmm_(p.mT, after)
    return blocks[0].clone(), states[len(dlast_EKV) :].to(dtype, copy=True)


def _scans_in_kernel(w_NKV: Tensor, dtype: torch.dtype) -> bool:
    if not takes_kernel(dtype, w_NKV):
        return False
    from plait.kernels.scan import LARGEST

    return w_NKV.shape[1] <= LARGEST


@scan.register_fake
def _(first_EKV: Tensor, p_NKK: Tensor, w_NKV: Tensor, rows: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return w_NKV.new_empty(w_NKV.shape, dtype=dtype), first_EKV.new_empty(first_EKV.shape)


@scan_back.register_fake
def _(dlast_EKV: Tensor, p_NKK: Tensor, dw_NKV: Tensor, rows: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return dlast_EKV.new_empty(dlast_EKV.shape), dw_NKV.new_empty(dw_NKV.shape, dtype=dtype)
