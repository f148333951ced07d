"""Prefill in pieces, and generation through the cache: greedy or sampled, as a whole or token by token.

Shapes: B rows, T tokens, D = d_model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.mixers.seq import Seq
from plait.model.cache import Cache
from plait.model.decode import Decoder, Mode
from plait.model.lm import LM

PIECE = {"cpu": 2048, "cuda": 32768}
"""of a prompt: most tokens a row"""
CPU_ROOM = 1 << 29
"""bytes that a piece's activations may take in one layer, about; on a GPU a sixth of its memory"""
MIN_PIECE = 256


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen: the likeliest at temperature 0, else drawn from softmax(logits / temperature) of the top_k
    likeliest, of which those that make up a share top_p."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature}; it must be 0 (greedy) or above")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k = {self.top_k}; it must be at least 1, or none")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}; it must be above 0 and at most 1, or none")

    def pick(self, logits_BV: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """token_B of the logits after each row's last token; nothing waits for the device."""
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        logits = logits_BV.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least_B1 = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least_B1, -math.inf)
        if self.top_p is not None and self.top_p < 1:
            sorted_BV, order_BV = logits.sort(descending=True)
            share_BV = sorted_BV.softmax(-1)
            spare_BV = share_BV.cumsum(-1) - share_BV >= self.top_p  # what comes before is enough
            logits = logits.masked_fill(torch.zeros_like(spare_BV).scatter(1, order_BV, spare_BV), -math.inf)
        # Of independent exponentials at these rates the first to arrive is drawn by its share.
        arrival_BV = torch.empty_like(logits).exponential_(generator=generator)
        return (logits - arrival_BV.log()).argmax(-1)


@torch.no_grad()
def prefill(
    model: LM, tokens_BT: Tensor, cache: Cache, *, mask: Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """Feed a prompt in pieces of `chunk` tokens (None: what suits device and sizes); logits [B, V] after each row's
    last real token. Memory beyond the cache does not grow with the prompt."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk = {chunk}; it must be at least 1")
    cache.check_room(_prompt_lengths(tokens_BT, mask))  # before the first piece changes it
    chunk = chunk or _piece(model, tokens_BT)
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


def _piece(model: LM, tokens_BT: Tensor) -> int:
    spec = model.spec
    cuda = tokens_BT.is_cuda
    most = PIECE["cuda" if cuda else "cpu"]
    room = torch.cuda.get_device_properties(tokens_BT.device).total_memory // 6 if cuda else CPU_ROOM
    width = 8 * spec.d_model + 4 * max(layer.d_ff for layer in spec.layers)
    return min(most, max(MIN_PIECE, room // (len(tokens_BT) * width * model.embed.weight.element_size())))


def _prompt_lengths(tokens_BT: Tensor, mask: Tensor | None) -> tuple[int, ...]:
    """Real tokens of every row, once prompt and mask are known to be of use."""
    if tokens_BT.ndim != 2 or 0 in tokens_BT.shape:
        raise ValueError(f"tokens: shape {tuple(tokens_BT.shape)}; it must be [rows, tokens], neither empty")
    B, T = tokens_BT.shape
    return Seq.build((B, T), tokens_BT.device, mask=mask).lengths


def check_context(model: LM, prompt: int, new: int) -> None:
    """Raises ValueError where the prompt and the new tokens are more than the context that the model is known for."""
    known = model.spec.context_length
    if known is not None and prompt + new > known:
        raise ValueError(
            f"tokens: {prompt} of the prompt and {new} new ones are more than the model's context_length = {known};"
            " shorten them, or go beyond it with beyond=True (--beyond)"
        )


def stream(
    model: LM,
    tokens_BT: Tensor,
    *,
    max_new_tokens: int,
    mask: Tensor | None = None,
    stop_tokens: Collection[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | torch.Generator | None = None,
    chunk: int | None = None,
    beyond: bool = False,
    cache: Cache | None = None,
    mode: Mode = "auto",
) -> Iterator[Tensor]:
    """The tokens of `generate` as they come: token_B of every row, up to max_new_tokens times.

    cache: an empty one with room for prompt and new tokens, or one whose sequences the prompt continues; None: a new
    one. The last token is not fed to it. Errors are raised before the first token is asked for.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {max_new_tokens}; it must be at least 1")
    lengths = _prompt_lengths(tokens_BT, mask)
    if 0 in lengths:
        raise ValueError("mask: a row has no real token; every prompt needs at least one")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk = {chunk}; it must be at least 1")
    if cache is None:
        cache = model.new_cache(len(tokens_BT), max(lengths) + max_new_tokens)
    cache.check_room(tuple(n + max_new_tokens - 1 for n in lengths))
    if not beyond:
        check_context(model, max(map(sum, zip(cache.lengths, lengths, strict=True))), max_new_tokens)
    decoder = Decoder(model, cache, mode=mode)
    generator = seed if isinstance(seed, torch.Generator) else None
    if isinstance(seed, int):
        generator = torch.Generator(tokens_BT.device).manual_seed(seed)

    def steps() -> Iterator[Tensor]:
        logits_BV = prefill(model, tokens_BT, cache, mask=mask, chunk=chunk)
        stops = torch.tensor(sorted(stop_tokens), dtype=torch.long, device=tokens_BT.device)
        ended_B, token_B = torch.zeros(len(tokens_BT), dtype=torch.bool, device=tokens_BT.device), None
        for step in range(max_new_tokens):
            new_B = sampling.pick(logits_BV, generator)
            token_B = new_B if token_B is None else torch.where(ended_B, token_B, new_B)
            yield token_B
            if len(stops):
                ended_B = torch.isin(token_B, stops)
                if bool(ended_B.all()):
                    return
            if step + 1 < max_new_tokens:
                logits_BV = decoder(token_B)

    return steps()


def generate(
    model: LM,
    tokens_BT: Tensor,
    *,
    max_new_tokens: int,
    mask: Tensor | None = None,
    stop_tokens: Collection[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | torch.Generator | None = None,
    chunk: int | None = None,
    beyond: bool = False,
    mode: Mode = "auto",
) -> Tensor:
    """Continuation of every row, [B, up to max_new_tokens]; after the stop token that ended a row, more of it.

    mask: true on real tokens, as for LM.hidden; padding (on the left, usually) is no part of a prompt. temperature 0:
    greedy; top_k, top_p: Sampling. seed: a number or a generator on the model's device. chunk: tokens of a piece of
    the prompt. beyond: allow more tokens than the spec's context_length. mode: Decoder's.
    """
    return torch.stack(
        list(
            stream(
                model,
                tokens_BT,
                max_new_tokens=max_new_tokens,
                mask=mask,
                stop_tokens=stop_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                chunk=chunk,
                beyond=beyond,
                mode=mode,
            )
        ),
        1,
    )
