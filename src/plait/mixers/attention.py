"""The attention computation: softmax over visible keys, with windows and sinks, never T x T memory.

Shapes: B rows, T queries, L keys, H query heads, G KV heads, R = H / G, E head_dim, C block size.

A sink is one more key, of zero value, whose logit is s_h: an extra channel holds s_h in the query and 1 in that key
(000, B.1). Positions below 0 mark slots of a cache that hold nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from plait.mixers.base import wants_grad
from plait.mixers.flex import attend_flex, flex_serves
from plait.mixers.seq import Seq

MASK_ELEMENTS = 1 << 24
"""queries are taken in blocks whose masks have at most this many entries"""
MIN_BLOCK = 64
CUDNN_FROM = 1024
"""queries of a row"""
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend_naive(q_BTHE, k_BLGE, v_BLGE, q_position_BT, k_position_BL, window_size, sink_H) -> Tensor:
    """The specification: the whole matrix of logits, an explicit mask, one softmax with the sink in its denominator."""
    R = q_BTHE.shape[2] // k_BLGE.shape[2]
    k_BLHE, v_BLHE = k_BLGE.repeat_interleave(R, 2), v_BLGE.repeat_interleave(R, 2)
    wide = torch.promote_types(q_BTHE.dtype, torch.float32)
    logits = torch.einsum("bthe,blhe->bhtl", q_BTHE.to(wide), k_BLHE.to(wide)) / math.sqrt(q_BTHE.shape[-1])
    logits = logits.masked_fill(~_visible(q_position_BT, k_position_BL, window_size)[:, None], -math.inf)
    if sink_H is not None:
        logits = torch.cat((logits, sink_H.to(wide)[:, None, None].expand(*logits.shape[:3], 1)), -1)
    weights = logits.softmax(-1)[..., : k_BLHE.shape[1]]
    return torch.einsum("bhtl,blhe->bthe", weights, v_BLHE.to(wide)).to(v_BLHE.dtype)


def attend(
    q_BTHE: Tensor,
    k_BTGE: Tensor,
    v_BTGE: Tensor,
    seq: Seq | None,
    *,
    window_size: int | None = None,
    sink: Tensor | None = None,
    past: tuple[Tensor, Tensor, Tensor] | None = None,
    position_BT: Tensor | None = None,
) -> Tensor:
    """Causal attention of new tokens to each other, o_BTHE, in time and memory linear in T for a fixed window.

    past: keys, values and positions [B, P, ...] of the tokens just before, in order (windowed layers only; position_BT
    are then those of the new tokens). A ragged `seq` is taken sequence by sequence, except by FlexAttention, which
    takes windows and sinks on a GPU.
    """
    plain = sink is None and (window_size is None or seq is None or window_size >= max(seq.lengths))
    if seq is not None and past is None and not plain and flex_serves(q_BTHE):
        return attend_flex(q_BTHE, k_BTGE, v_BTGE, seq, window_size=window_size, sink_H=sink)
    if seq is not None and not seq.dense:
        parts = zip(seq.split(q_BTHE), seq.split(k_BTGE), seq.split(v_BTGE), strict=True)
        outs = [attend(*part, None, window_size=window_size, sink=sink) for part in parts if part[0].shape[1]]
        return torch.cat(outs, 1)
    T = q_BTHE.shape[1]
    if past is None and (window_size is None or window_size >= T):
        return _causal(q_BTHE, k_BTGE, v_BTGE, sink)
    assert window_size is not None
    block = max(window_size, MIN_BLOCK)
    if position_BT is None:
        position_BT = torch.arange(T, device=q_BTHE.device)[None]
    first_k, first_v, first_position = k_BTGE[:, :block], v_BTGE[:, :block], position_BT[:, :block]
    if past is not None:
        first_k = torch.cat((past[0].to(first_k.dtype), first_k), 1)
        first_v = torch.cat((past[1].to(first_v.dtype), first_v), 1)
        first_position = torch.cat((past[2], first_position), 1)
    first = attend_masked(
        q_BTHE[:, :block], first_k, first_v, position_BT[:, :block], first_position, window_size, sink
    )
    if block >= T:
        return first
    return torch.cat((first, _banded(q_BTHE, k_BTGE, v_BTGE, window_size, block, sink)), 1)


def attend_masked(q_BTHE, k_BLGE, v_BLGE, q_position_BT, k_position_BL, window_size, sink_H) -> Tensor:
    """Any positions of queries and keys, a block of queries at a time."""
    B, T, H, E = q_BTHE.shape
    L, G = k_BLGE.shape[1:3]
    k_BLGE, v_BLGE = k_BLGE.to(q_BTHE.dtype), v_BLGE.to(q_BTHE.dtype)
    step = max(1, MASK_ELEMENTS // (len(q_position_BT) * (H // G) * L))
    outs = []
    for start in range(0, T, step):
        q = q_BTHE[:, start : start + step]
        mask = _visible(q_position_BT[:, start : start + step], k_position_BL, window_size)
        outs.append(_grouped_sdpa(q, k_BLGE, v_BLGE, mask, sink_H))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def attend_last(q_BTHE: Tensor, k_BLGE: Tensor, v_BLGE: Tensor, sink_H: Tensor | None) -> Tensor:
    """Causal attention of the last T of L tokens, o_BTHE; a single one may have its keys in any order."""
    T, E = q_BTHE.shape[1], q_BTHE.shape[-1]
    k_BLGE, v_BLGE = k_BLGE.to(q_BTHE.dtype), v_BLGE.to(q_BTHE.dtype)
    if T == 1:
        return _grouped_sdpa(q_BTHE, k_BLGE, v_BLGE, None, sink_H)
    if k_BLGE.shape[1] == T:
        return _causal(q_BTHE, k_BLGE, v_BLGE, sink_H)
    learns = wants_grad(q_BTHE, k_BLGE, v_BLGE)
    if not _flash_serves(q_BTHE) if q_BTHE.is_cuda else learns:
        position_1L = torch.arange(k_BLGE.shape[1], device=q_BTHE.device)[None]
        return attend_masked(q_BTHE, k_BLGE, v_BLGE, position_1L[:, -T:], position_1L, None, sink_H)
    if sink_H is not None:
        q_BTHE, k_BLGE, v_BLGE = _add_sink(q_BTHE, k_BLGE, v_BLGE, sink_H)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BLGE, v_BLGE))
    if q_BTHE.is_cuda and (learns or not _cudnn_serves(q, k, v)):
        bias, gqa = causal_lower_right(T, k.shape[2]), q.shape[1] != k.shape[1]
        o = _sdpa(q, k, v, attn_mask=bias, scale=E**-0.5, enable_gqa=gqa)
    else:
        o = _in_two(q, k, v, E**-0.5)
    return o.transpose(1, 2)[..., :E]


def _in_two(q_BHTE: Tensor, k_BGLE: Tensor, v_BGLE: Tensor, scale: float) -> Tensor:
    """attend_last without gradients: all keys before, then the new ones causally, joined by their sums of exponentials.

    On a CPU nothing else avoids a mask. On a GPU cuDNN has no kernel for both, but its two are faster than others' one.
    """
    (G, L), T = k_BGLE.shape[1:3], q_BHTE.shape[2]
    (k_past, k_new), (v_past, v_new) = (x.split((L - T, T), 2) for x in (k_BGLE, v_BGLE))
    if q_BHTE.is_cuda:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        new, lse_new = cudnn(q_BHTE, k_new, v_new, None, True, 0.0, True, False, scale=scale)[:2]
        past, lse_past = cudnn(q_BHTE, k_past, v_past, None, True, 0.0, False, False, scale=scale)[:2]
        return past.float().lerp_(new.float(), torch.sigmoid(lse_new - lse_past)).to(new.dtype)
    R = q_BHTE.shape[1] // G
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    k_new, v_new = k_new.repeat_interleave(R, 1), v_new.repeat_interleave(R, 1)
    new, lse_new = flash(q_BHTE, k_new, v_new, 0.0, True, scale=scale)
    past, lse_past = flash(q_BHTE.unflatten(1, (G, R)).flatten(2, 3), k_past, v_past, scale=scale)
    share = torch.sigmoid(lse_new - lse_past.reshape(lse_new.shape))
    return torch.lerp(past.reshape(new.shape), new, share[..., None].to(new.dtype))


def _cudnn_serves(q_BHTE: Tensor, k_BGLE: Tensor, v_BGLE: Tensor) -> bool:
    """cuDNN's attention for long pieces (it plans anew for each length), from Hopper on, where PyTorch prefers it."""
    if q_BHTE.shape[2] < CUDNN_FROM or torch.cuda.get_device_capability(q_BHTE.device)[0] < 9:
        return False
    cuda = torch.backends.cuda
    return cuda.can_use_cudnn_attention(cuda.SDPAParams(q_BHTE, k_BGLE, v_BGLE, None, 0.0, False, True))


def attend_step(q_B1HE, k_SLGE, v_SLGE, count_B1, held: int, sink_H, once: Callable) -> Tensor:
    """One query of every row to the first `count` keys of its row, in any order; no count is above `held`.

    once: Seq.once, or what calls its second argument.
    """
    B, L = k_SLGE.shape[:2]
    if q_B1HE.is_cuda and sink_H is None and _flash_serves(q_B1HE):
        make = lambda: torch.arange(B + 1, dtype=torch.int32, device=q_B1HE.device)  # noqa: E731
        rows, count_B = once("rows", make), once(("count", L), lambda: count_B1[:, 0].int())
        k, v = (x.to(q_B1HE.dtype).flatten(0, 1) for x in (k_SLGE, v_SLGE))
        sizes = (rows, once(("starts", L), lambda: rows * L), 1, L, 0.0, False, False)
        flash = torch.ops.aten._flash_attention_forward
        return flash(q_B1HE[:, 0], k, v, *sizes, scale=q_B1HE.shape[-1] ** -0.5, seqused_k=count_B)[0][:, None]
    mask_BL = once(("held", L, held), lambda: torch.arange(held, device=q_B1HE.device) < count_B1)
    k, v = (x[:, :held].to(q_B1HE.dtype) for x in (k_SLGE, v_SLGE))
    return _grouped_sdpa(q_B1HE, k, v, mask_BL[:, None], sink_H)


def _flash_serves(q_BTHE: Tensor) -> bool:
    """FlashAttention on a GPU: half precision, heads of whole eights, up to 256 channels with those of a sink."""
    E = q_BTHE.shape[-1]
    return q_BTHE.dtype in (torch.bfloat16, torch.float16) and E % 8 == 0 and E + _SINK_CHANNELS <= 256


def _visible(q_position_BT: Tensor, k_position_BL: Tensor, window_size: int | None) -> Tensor:
    """mask_BTL of the keys each query sees."""
    q, k = q_position_BT[:, :, None], k_position_BL[:, None, :]
    mask = (k <= q) & (k >= 0)
    return mask if window_size is None else mask & (k > q - window_size)


def _causal(q_BTHE, k_BTGE, v_BTGE, sink_H) -> Tensor:
    """Plain causal attention. With a sink, a dummy query in front keeps rows and columns aligned with its key."""
    scale = q_BTHE.shape[-1] ** -0.5
    if sink_H is not None:
        q_BTHE, k_BTGE, v_BTGE = _add_sink(q_BTHE, k_BTGE, v_BTGE, sink_H)
        q_BTHE = F.pad(q_BTHE, (0, 0, 0, 0, 1, 0))
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTGE, v_BTGE))
    o = _sdpa(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)
    return o if sink_H is None else o[:, 1:, :, :-_SINK_CHANNELS]


class _OneLayout(torch.autograd.Function):
    """Gives the backward pass its gradient as if from [B, T, H, E]. PyTorch (2.11) keeps cuDNN's plans for backward
    passes by the layout of q, k and v alone, and runs one that was made for strided gradients, as come from the
    concatenation of heads, with others: what it gives is wrong then, or it reads outside of them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(o_BHTE: Tensor) -> Tensor:
        return o_BHTE.view_as(o_BHTE)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad_BHTE: Tensor) -> Tensor:
        return grad_BHTE.transpose(1, 2).contiguous().transpose(1, 2)


def _sdpa(q_BHTE: Tensor, k_BGLE: Tensor, v_BGLE: Tensor, **options: Any) -> Tensor:
    """o_BHTE. With a mask cuDNN, which PyTorch prefers from Hopper on, does not learn: its gradients may not be numbers
    (PyTorch issue 196678)."""
    learns = q_BHTE.is_cuda and wants_grad(q_BHTE, k_BGLE, v_BGLE)
    masked = options.get("attn_mask") is not None
    with sdpa_kernel(WITHOUT_CUDNN) if learns and masked else nullcontext():
        o_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BGLE, v_BGLE, **options)
    if not learns or o_BHTE.dtype not in (torch.bfloat16, torch.float16):
        return o_BHTE
    return _OneLayout.apply(o_BHTE)  # pyright: ignore[reportReturnType]


def _banded(q_BTHE, k_BTGE, v_BTGE, window_size: int, block: int, sink_H) -> Tensor:
    """Queries from the second block on: each block sees itself and the block before (block >= window)."""
    B, T, H, E = q_BTHE.shape
    padding = -T % block
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, block)) for x in (q_BTHE, k_BTGE, v_BTGE))
    k, v = (torch.cat((x[:, :-1], x[:, 1:]), 2).flatten(0, 1) for x in (k, v))
    q, places = q[:, 1:].flatten(0, 1), torch.arange(2 * block, device=q.device)[None]
    step = max(1, MASK_ELEMENTS // (H // k.shape[2] * 2 * block))
    outs = []
    for start in range(0, block, step):
        first = max(block + start - window_size + 1, 0) // 8 * 8  # fast kernels want masks of whole eights
        seen = slice(first, block + start + step)
        mask = _visible(places[:, block + start : block + start + step], places[:, seen], window_size)
        outs.append(_grouped_sdpa(q[:, start : start + step], k[:, seen], v[:, seen], mask, sink_H))
    o = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
    return o.unflatten(0, (B, -1)).flatten(1, 2)[:, : T - block]


def _grouped_sdpa(q_BTHE, k_BLGE, v_BLGE, mask_BTL, sink_H) -> Tensor:
    """SDPA, the R query heads of a KV head folded into its queries so that keys are not repeated. mask None: none."""
    B, T, H, E = q_BTHE.shape
    G = k_BLGE.shape[2]
    R = H // G
    if sink_H is not None:
        q_BTHE, k_BLGE, v_BLGE = _add_sink(q_BTHE, k_BLGE, v_BLGE, sink_H)
        mask_BTL = None if mask_BTL is None else F.pad(mask_BTL, (1, 0), value=True)
    q = q_BTHE.unflatten(2, (G, R)).transpose(1, 2).flatten(2, 3)  # B, G, T * R, E
    mask = mask_BTL
    if mask is not None:
        mask = mask[:, None] if T == 1 else mask.repeat_interleave(R, 1)[:, None]
    o = _sdpa(q, k_BLGE.transpose(1, 2), v_BLGE.transpose(1, 2), attn_mask=mask, scale=E**-0.5)
    o = o.unflatten(2, (T, R)).transpose(1, 2).flatten(2, 3)
    return o[..., :E]


_SINK_CHANNELS = 8
"""one holds the sink; the others keep head sizes multiples of eight, as fast kernels want"""


def _add_sink(q_BTHE, k_BLGE, v_BLGE, sink_H) -> tuple[Tensor, Tensor, Tensor]:
    """The same tensors with extra channels, and the sink's key in front."""
    B, T, H, E = q_BTHE.shape
    logit = (sink_H * math.sqrt(E)).to(q_BTHE.dtype)[:, None].expand(B, T, H, 1)
    q = torch.cat((q_BTHE, F.pad(logit, (0, _SINK_CHANNELS - 1))), -1)
    k, v = (F.pad(x, (0, _SINK_CHANNELS, 0, 0, 1, 0)) for x in (k_BLGE, v_BLGE))
    one = torch.zeros_like(k[:1, :1, :1])
    one[..., E] = 1
    sink_key = F.pad(one.expand(k.shape[0], 1, k.shape[2], -1), (0, 0, 0, 0, 0, k.shape[1] - 1))
    return q, k + sink_key, v
