"""Losses of tokens that see a short context: the windows of LongPPL and LongCE.

Shapes: B rows, T tokens, W windows, L positions of the longest window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plait.data import IGNORE
from plait.scoring import Scored, score_tokens

CONTEXT = 4096
"""K, the tokens that every scored token sees at the least"""
STRIDE = 1024
"""d, the tokens a window scores"""
AT_ONCE = 65536
"""tokens of windows that go through the model together"""


def windows(T: int, K: int = CONTEXT, d: int = STRIDE) -> list[tuple[int, int, int]]:
    """Short passes over a document of T tokens: (start, first scored, end).

    Each covers tokens start to end - 1 and scores those from start + K on, d of them or what the document has left;
    together they score every token but the first K, once.
    """
    if K < 1 or d < 1:
        raise ValueError(f"windows: K = {K}, d = {d}; both must be at least 1")
    return [(s, s + K, min(s + K + d, T)) for s in range(0, T - K, d)]


@torch.no_grad()
def short_losses(
    model: Scored,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    *,
    K: int = CONTEXT,
    d: int = STRIDE,
    cu_seqlens: Tensor | None = None,
    at_once: int = AT_ONCE,
    level: Callable[[Sequence[int]], Sequence[int]] = list,
) -> Tensor:
    """Loss of every target that has more than K tokens before it, from a window of K to K + d of them, [B, T].

    targets_BT: the next token, as a Group has it: position t scores token t + 1. cu_seqlens: offsets of documents
    packed in a single row; windows stay within them. NaN where no window scores: the first K tokens of a document
    (which see the same tokens in the full pass) and targets that are IGNORE. level: of [n] passes, how many to make;
    those added are of one token, and keep other processes company.
    """
    B, T = tokens_BT.shape
    offsets = list(range(0, B * T + 1, T)) if cu_seqlens is None else cu_seqlens.tolist()
    found = [  # in flat positions, each of which scores the token after it
        (begin + start, begin + first - 1, begin + end - 1)
        for begin, stop in zip(offsets, offsets[1:], strict=False)
        for start, first, end in windows(stop - begin + 1, K, d)
    ]
    losses_N = torch.full((B * T,), torch.nan, device=tokens_BT.device)
    L = max((end - start for start, _, end in found), default=1)  # K + d - 1: a window's last token is a target alone
    steps_L = torch.arange(L, device=tokens_BT.device)
    passes = torch.tensor(found, device=tokens_BT.device).split(max(1, at_once // L)) if found else ()
    for _ in range(len(passes), level([len(passes)])[0]):
        model.hidden(tokens_BT[:1, :1])
    for spans_W3 in passes:
        start_W1, first_W1, end_W1 = spans_W3[:, :, None].unbind(1)
        place_WL = start_W1 + steps_L
        scored_WL = (first_W1 <= place_WL) & (place_WL < end_W1)
        place_WL = place_WL.minimum(end_W1 - 1)  # a short window is filled up behind its end, which nothing sees
        targets_WL = targets_BT.flatten()[place_WL].where(scored_WL, IGNORE)
        loss_N = score_tokens(model, tokens_BT.flatten()[place_WL], targets_WL).loss_N
        losses_N = losses_N.to(loss_N.dtype)
        losses_N[place_WL[targets_WL != IGNORE]] = loss_N
    return losses_N.view(B, T)
