"""Text in, text out: one prompt continued, with what it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from plait.model.generate import stream
from plait.model.lm import LM
from plait.model.tokens import Detokenizer, Tokenizer


@dataclass
class Continuation:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """the stop token that ended it included"""
    end: Literal["stop token", "max_new_tokens", "interrupted"] = "max_new_tokens"
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    """until the first token was there"""
    decode_seconds: float = 0.0
    cache_bytes: int = 0

    @property
    def prefill_rate(self) -> float | None:
        """Tokens a second; None: there was nothing to measure."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else None

    @property
    def decode_rate(self) -> float | None:
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else None

    def summary(self) -> str:
        """One line."""
        rate = {name: "" if value is None else f" at {value:,.1f} tokens/s" for name, value in self._rates().items()}
        ended = ", interrupted" if self.end == "interrupted" else ""
        return (
            f"prompt: {self.prompt_tokens} tokens{rate['prefill']}; new: {len(self.tokens)}{rate['decode']}{ended};"
            f" cache: {self.cache_bytes:,} bytes"
        )

    def to_json(self) -> dict[str, Any]:
        rates = {f"{name}_tokens_per_second": value for name, value in self._rates().items()}
        return {**self.__dict__, **rates}

    def _rates(self) -> dict[str, float | None]:
        return {"prefill": self.prefill_rate, "decode": self.decode_rate}


def continue_text(
    model: LM,
    tokenizer: Tokenizer,
    prompt: list[int],
    *,
    max_new_tokens: int,
    show: Callable[[str], object] = lambda text: None,
    **options: Any,
) -> Continuation:
    """Continue a prompt's tokens; `show` gets every piece of text as it comes. options: further ones of `stream`.

    An interrupt (Ctrl-C) ends it with what there is.
    """
    if not prompt:
        raise ValueError("prompt: no tokens in it; give some text")
    if not 0 <= min(prompt) <= max(prompt) < model.spec.vocab_size:
        raise ValueError(
            f"prompt: token {max(prompt)} has no place in the model's vocab_size = {model.spec.vocab_size}"
        )
    tokens_BT = torch.tensor([prompt], device=model.embed.weight.device)
    cache = model.new_cache(1, len(prompt) + max(max_new_tokens, 1))
    done = Continuation(prompt_tokens=len(prompt), cache_bytes=cache.num_bytes)
    text = Detokenizer(tokenizer)

    def give(piece: str) -> None:
        done.text += piece
        show(piece)

    stops = tokenizer.stop_tokens
    steps = stream(model, tokens_BT, max_new_tokens=max_new_tokens, stop_tokens=stops, cache=cache, **options)
    start = time.perf_counter()
    try:
        for token_B in steps:
            token = int(token_B)
            seconds = time.perf_counter() - start
            if not done.tokens:
                done.prefill_seconds = seconds
            done.decode_seconds = seconds - done.prefill_seconds
            done.tokens.append(token)
            if token in stops:
                done.end = "stop token"
                break
            give(text.push(token))
    except KeyboardInterrupt:
        done.end = "interrupted"
    give(text.rest())
    return done
