"""How many tokens a text has, fast enough to build prompts of exact length. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

ANCHOR = "x"
"""stands before a piece of a text that is counted by itself, so that it is counted as inside one"""


class Encodes(Protocol):
    """A tokenizer as plait.model.tokens has them."""

    def encode(self, text: str) -> Sequence[int]: ...


class Counter:
    """Tokens of whole prompts, with what the tokenizer itself puts around them, and of pieces of them."""

    def __init__(self, tokenizer: Encodes):
        self._encode = tokenizer.encode
        self.fast = getattr(getattr(tokenizer, "tokenizer", None), "backend_tokenizer", None)
        if self.fast is not None:
            from tokenizers import Tokenizer

            self.fast = Tokenizer.from_str(self.fast.to_str())  # the model's own may cut and pad at any time
            self.fast.no_truncation()
            self.fast.no_padding()
        self.around = len(self._encode(ANCHOR)) - self._lengths([ANCHOR])[0] if self.fast is not None else 0
        self._anchor = self._lengths([ANCHOR])[0]

    def count(self, text: str) -> int:
        """Of a prompt as the model reads it."""
        return self._lengths([text])[0] + self.around

    def pieces(self, texts: Sequence[str]) -> list[int]:
        """What each adds to a text that it continues, as far as that does not depend on the text."""
        each = list(dict.fromkeys(texts))
        lengths = dict(zip(each, self._lengths([ANCHOR + text for text in each]), strict=True))
        return [lengths[text] - self._anchor for text in texts]

    def _lengths(self, texts: Sequence[str]) -> list[int]:
        if self.fast is None:
            return [len(self._encode(text)) for text in texts]
        return [len(found) for found in self.fast.encode_batch_fast(list(texts), add_special_tokens=False)]


@dataclass(frozen=True)
class Bytes:
    """UTF-8, a byte a token."""

    def encode(self, text: str) -> bytes:
        return text.encode()


@dataclass(frozen=True)
class TokenizerFile:
    """A file of the tokenizers library, and how many tokens are put around every text: a tokenizer that only counts,
    for processes that load no transformers."""

    path: Path
    around: int

    @cached_property
    def backend_tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.path))

    @property
    def tokenizer(self) -> TokenizerFile:
        return self

    def encode(self, text: str) -> list[int]:
        return [0] * self.around + self.backend_tokenizer.encode(text, add_special_tokens=False).ids


T = TypeVar("T")


class Units(Generic[T]):
    """The units that a haystack is made of, one after the other, drawn only as far as they are needed.

    Args:
        units: endless
        text: what a unit, the i-th, adds to the prompt
    """

    def __init__(self, units: Iterator[T], counter: Counter, text: Callable[[int, T], str]):
        self._source, self._counter, self._text = units, counter, text
        self.drawn: list[T] = []
        self._ends = [0]

    def first(self, n: int) -> list[T]:
        self._draw(n - len(self.drawn))
        return self.drawn[:n]

    def size(self, n: int) -> int:
        """Tokens of the first n."""
        self._draw(n - len(self.drawn))
        return self._ends[n]

    def most(self, tokens: int) -> int:
        """How many of the first fit."""
        while self._ends[-1] <= tokens:
            mean = max(1.0, self._ends[-1] / max(1, len(self.drawn)))
            self._draw(64 if not self.drawn else int((tokens - self._ends[-1]) / mean * 1.01) + 1)
        return max(0, bisect_right(self._ends, tokens) - 1)

    def _draw(self, number: int) -> None:
        if number <= 0:
            return
        new = list(islice(self._source, number))
        at = len(self.drawn)
        self.drawn += new
        for tokens in self._counter.pieces([self._text(at + i, unit) for i, unit in enumerate(new)]):
            self._ends.append(self._ends[-1] + tokens)


@dataclass(frozen=True)
class Draft:
    """A prompt with some number of units."""

    prompt: str
    answers: tuple[str, ...]
    depth: float | None = None


class Plan(Protocol):
    """A sample of which only the size of its haystack is open.

    build must give the same prompt for the same n, whatever was built before; size and most say what n units are
    thought to take, and how many are thought to fit.
    """

    @property
    def max_new_tokens(self) -> int: ...
    @property
    def least(self) -> int: ...
    @property
    def build(self) -> Callable[[int], Draft]: ...
    def size(self, n: int) -> int: ...
    def most(self, tokens: int) -> int: ...


class TooShort(ValueError):
    """Not even the least sample fits; `needed` is the length that it takes."""

    def __init__(self, needed: int):
        super().__init__(f"{needed} tokens at least")
        self.needed = needed


def fill(plan: Plan, length: int, counter: Counter) -> tuple[Draft, int]:
    """The prompt with the most units that fits, and its tokens: with the answer at most `length`, counted as a whole
    (what its parts add up to only says where to look). Less than a unit is left free. TooShort."""
    budget = length - plan.max_new_tokens
    low, high = plan.least, None
    draft = plan.build(low)
    tokens = used = counter.count(draft.prompt)
    if used > budget:
        raise TooShort(used + plan.max_new_tokens)
    n = plan.most(budget - used + plan.size(low))
    while n > low:
        tried = plan.build(n)
        used = counter.count(tried.prompt)
        n_next = plan.most(budget - used + plan.size(n))
        if used <= budget:
            draft, tokens, low = tried, used, n
        else:
            high = n
        if high is not None:
            n_next = min(n_next, high - 1)
            if n_next <= low and used > budget:
                n_next = (low + high) // 2
        n = n_next
    return draft, tokens


@dataclass
class Refill:
    """Plan out of parts, with units of one kind, of which the first `start` are left out."""

    max_new_tokens: int
    units: Units[Any]
    build: Callable[[int], Draft]
    least: int = 0
    start: int = 0

    def size(self, n: int) -> int:
        return self.units.size(self.start + n) - self.units.size(self.start)

    def most(self, tokens: int) -> int:
        return self.units.most(self.units.size(self.start) + tokens) - self.start
