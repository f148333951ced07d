"""RULER's eight needle tasks: keys and their values in a haystack, some of the keys asked for."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from plait.evals.counting import Draft, Refill, Units
from plait.evals.prose import insert, pairs

if TYPE_CHECKING:
    from plait.evals.ruler import Ruler

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = tuple(round(100 * i / 39) for i in range(40))
"""percent of the haystack that a needle may stand behind"""
MAX_NEW_TOKENS = 128

PROMPT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it."
    " I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {asked} mentioned in the provided text?"
    " The special magic {kind} for {asked} mentioned in the provided text are"
)
PROMPT_OF_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it."
    " I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {asked} mentioned in the provided text?"
    " The special magic {kind} for {asked} mentioned in the provided text is"
)


@dataclass(frozen=True, kw_only=True)
class Niah:
    """RULER, appendix B: what the haystack is of, what keys and values are, and how many there are of each."""

    haystack: Literal["noise", "prose", "needles"]
    key: Literal["word", "uuid"] = "word"
    value: Literal["number", "uuid"] = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def plan(self, ruler: Ruler, rng: random.Random, length: int) -> Refill:
        keys, values = KINDS[self.key](rng), KINDS[self.value](rng)
        held = {key: list(islice(values, self.values)) for key in islice(keys, self.keys)}
        queries = rng.sample(list(held), self.queries)
        needles = [(key, value) for key in held for value in held[key]]
        rng.shuffle(needles)
        depths = [depth / 100 for depth in sorted(rng.sample(DEPTHS, len(needles)))]
        texts = [self._needle(key, value) for key, value in needles]
        one = len(queries) * self.values == 1
        asked = queries[0] if len(queries) == 1 else ", ".join(queries[:-1]) + ", and " + queries[-1]
        answers = tuple(value for query in queries for value in held[query])
        first = next(depth for depth, (key, _) in zip(depths, needles, strict=True) if key == queries[0])

        units = {"prose": ruler.prose_units, "noise": ruler.noise_units}.get(self.haystack)
        units = units or Units(map(self._needle, keys, values), ruler.counter, as_line)

        def build(n: int) -> Draft:
            if self.haystack == "prose":
                context = ruler.prose.insert(n, texts, depths)
            else:
                context = "\n".join(insert(units.first(n), texts, [int(n * depth) for depth in depths]))
            kind = self.value if one else f"{self.value}s"
            prompt = (PROMPT_OF_ONE if one else PROMPT).format(kind=kind, context=context, asked=asked)
            return Draft(prompt, answers, first)

        return Refill(MAX_NEW_TOKENS, units, build)

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value}s for {key} is: {value}."


def as_line(i: int, line: str) -> str:
    return f"\n{line}"


def _distinct(draw: Callable[[], str]) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        found = draw()
        if found not in seen:
            seen.add(found)
            yield found


def _numbers(rng: random.Random) -> Iterator[str]:
    return _distinct(lambda: str(rng.randrange(1_000_000, 10_000_000)))


def _uuids(rng: random.Random) -> Iterator[str]:
    return _distinct(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))


KINDS: dict[str, Callable[[random.Random], Iterator[str]]] = {"word": pairs, "number": _numbers, "uuid": _uuids}
