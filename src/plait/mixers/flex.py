"""Windowed attention by FlexAttention: one fused kernel for windows, sinks and packed documents.

The mask is described by blocks of BLOCK queries and keys, which ones are seen in whole, in part or not at all, so it
costs (T / BLOCK)^2, never T x T. A sink comes in through the log-sum-exp: a softmax with one more logit s in its
denominator is the softmax without, times sigmoid(lse - s).

Shapes: B rows, T tokens, N tokens of all sequences, H query heads, G KV heads, E head_dim, M blocks.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention

from plait.mixers.seq import Seq

BLOCK = 128
MIN_HEAD = 16
"""the least head_dim that the kernel takes"""
KERNEL: FlexKernelOptions = {"BACKEND": "TRITON"}
"""never flex's decoding kernel, which under 128 queries has no configuration for blocks of BLOCK"""


def flex_serves(q_BTHE: Tensor) -> bool:
    """On a GPU in half precision, where its kernel is both right and the fastest; compiled anew for every head size and
    group, which takes seconds, so not inside of another compilation."""
    half = q_BTHE.dtype in (torch.bfloat16, torch.float16)
    sizes = q_BTHE.numel() > 0 and q_BTHE.shape[-1] >= MIN_HEAD
    return q_BTHE.is_cuda and half and sizes and not torch.compiler.is_compiling()


def attend_flex(
    q_BTHE: Tensor, k_BTGE: Tensor, v_BTGE: Tensor, seq: Seq, *, window_size: int | None, sink_H: Tensor | None
) -> Tensor:
    """Causal softmax attention of tokens to each other, o_BTHE, by grouped queries, in a window, with a sink logit."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTGE, v_BTGE))
    mask = seq.once(("flex mask", window_size), lambda: block_mask(seq, window_size))
    # fullgraph: past the limit of recompilations an error, not the uncompiled form, which would take T x T memory
    with torch._dynamo.config.patch(recompile_limit=256):
        o_BHTE, lse_BHT = _compiled()(q, k, v, mask, sink_H is not None)
    if sink_H is not None:
        assert lse_BHT is not None
        o_BHTE = (o_BHTE * torch.sigmoid(lse_BHT - sink_H[:, None])[..., None]).to(o_BHTE.dtype)
    return o_BHTE.transpose(1, 2)


@cache
def _compiled():
    def run(q, k, v, mask: BlockMask, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
        gqa = q.shape[1] != k.shape[1]
        if not wants_lse:
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=gqa, kernel_options=KERNEL), None
        want = AuxRequest(lse=True)
        o, aux = flex_attention(q, k, v, block_mask=mask, enable_gqa=gqa, kernel_options=KERNEL, return_aux=want)
        return o, aux.lse

    return torch.compile(run, fullgraph=True)


def block_mask(seq: Seq, window_size: int | None) -> BlockMask:
    """Of which blocks of keys each block of queries sees some or all, and which tokens."""
    N = seq.lengths[0] if seq.dense else sum(seq.lengths)
    first_N = torch.zeros(N, dtype=torch.long, device=seq.device) if seq.dense else seq.starts_S[seq.row_N]
    if window_size is not None:  # of each query, the first key that it sees
        first_N = torch.maximum(first_N, torch.arange(1 - window_size, N + 1 - window_size, device=seq.device))

    def sees(b, h, q, k):
        return (k <= q) & (k >= first_N[q])

    begin_M = torch.arange(0, N, BLOCK, device=seq.device)
    end_M = (begin_M + BLOCK - 1).clamp(max=N - 1)
    # What the first query of a block sees first is first for all of it; for the last query it is last.
    some_MM = (begin_M[None] <= end_M[:, None]) & (end_M[None] >= first_N[begin_M][:, None])
    all_MM = (end_M[None] <= begin_M[:, None]) & (begin_M[None] >= first_N[end_M][:, None])
    return BlockMask.from_kv_blocks(
        *_listed(some_MM & ~all_MM), *_listed(all_MM), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(N, N)
    )


def _listed(mask_MM: Tensor) -> tuple[Tensor, Tensor]:
    """Of a mask over blocks, how many each row has, and their indices in front."""
    mask = mask_MM[None, None].int()
    return mask.sum(-1, dtype=torch.int32), mask.argsort(dim=-1, descending=True, stable=True).int()
