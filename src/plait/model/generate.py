"""Prefill in pieces and greedy generation through the cache.

Shapes: B rows, T tokens, D = d_model, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.mixers.seq import Seq
from plait.model.cache import Cache
from plait.model.lm import LM

CHUNK = 2048


@torch.no_grad()
def prefill(model: LM, tokens_BT: Tensor, cache: Cache, *, mask: Tensor | None = None, chunk: int = CHUNK) -> Tensor:
    """Feed a prompt in pieces of `chunk` tokens; logits [B, V] after each row's last real token."""
    if chunk < 1:
        raise ValueError(f"chunk = {chunk}; it must be at least 1")
    cache.check_room(_prompt_lengths(tokens_BT, mask))  # before the first piece changes it
    last_BD = None
    for start in range(0, tokens_BT.shape[1], chunk):
        piece = slice(start, start + chunk)
        real = None if mask is None else mask[:, piece].bool()
        x_BTD = model.hidden(tokens_BT[:, piece], mask=real, cache=cache)
        if real is None:
            last_BD = x_BTD[:, -1]
            continue
        steps = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        place_B = torch.where(real, steps, -1).amax(1)
        new_BD = x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), place_B.clamp(min=0)]
        last_BD = new_BD if last_BD is None else torch.where((place_B >= 0)[:, None], new_BD, last_BD)
    assert last_BD is not None
    return model.logits(last_BD)


def _prompt_lengths(tokens_BT: Tensor, mask: Tensor | None) -> tuple[int, ...]:
    """Real tokens of every row, once prompt and mask are known to be of use."""
    if tokens_BT.ndim != 2 or 0 in tokens_BT.shape:
        raise ValueError(f"tokens: shape {tuple(tokens_BT.shape)}; it must be [rows, tokens], neither empty")
    B, T = tokens_BT.shape
    return Seq.build((B, T), tokens_BT.device, mask=mask).lengths


@torch.no_grad()
def generate(
    model: LM,
    tokens_BT: Tensor,
    *,
    max_new_tokens: int,
    mask: Tensor | None = None,
    stop_token: int | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Greedy continuation of every row, [B, up to max_new_tokens]; after a row's stop_token, more of it.

    mask: true on real tokens, as for LM.hidden; padding (on the left, usually) is no part of a prompt.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens}; it must be at least 1")
    if 0 in _prompt_lengths(tokens_BT, mask):
        raise ValueError("mask: a row has no real token; every prompt needs at least one")
    cache = model.new_cache(len(tokens_BT), tokens_BT.shape[1] + max_new_tokens)
    logits_BV = prefill(model, tokens_BT, cache, mask=mask, chunk=chunk)
    new: list[Tensor] = []
    ended_B = torch.zeros(len(tokens_BT), dtype=torch.bool, device=tokens_BT.device)
    while True:
        token_B = logits_BV.argmax(-1)
        if stop_token is not None:
            token_B = torch.where(ended_B, stop_token, token_B)
            ended_B |= token_B == stop_token
        new.append(token_B)
        if len(new) == max_new_tokens or (stop_token is not None and bool(ended_B.all())):
            return torch.stack(new, 1)
        logits_BV = model(token_B[:, None], cache=cache)[:, 0]
