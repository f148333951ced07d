"""RULER's variable tracking and its two tasks of frequent words."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

from plait.evals.counting import Draft, Refill, Units
from plait.evals.prose import insert, words
from plait.evals.ruler.niah import NOISE

if TYPE_CHECKING:
    from plait.evals.ruler import Ruler

VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
    " Answer: According to the chain(s) of variable assignment in the text above, {number} variables are assigned"
    " the value {value}, they are:"
)
VT_NAMES = 5
"""a chain of four hops"""
VT_EXAMPLE = 5
"""lines of noise in the solved example that stands before the question"""

CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others."
    " Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
    " Answer: The top 10 words that appear most often in the list are:"
)
CWE_COMMON = 10

FWE = (
    "Read the following coded text and track the frequency of each coded word."
    " Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'."
    " What are the three most frequently appeared words in the above coded text?"
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)
FWE_ALPHA = 2.0
FWE_LEAST = 53
"""words from which on rank 4 is more frequent than rank 5"""


def vt(ruler: Ruler, rng: random.Random, length: int) -> Refill:
    """Chains of assignments among lines of noise, all names of the chain asked for."""
    drawn = _distinct_words(rng, string.ascii_uppercase, 5)
    solved, asked = list(islice(drawn, VT_NAMES)), list(islice(drawn, VT_NAMES))
    values = [str(value) for value in rng.sample(range(10_000, 100_000), 2)]
    before = _vt_prompt(solved, values[0], VT_EXAMPLE, rng.random()) + f" {' '.join(solved)}\n\n"
    key = rng.random()

    def build(n: int) -> Draft:
        depth = _gaps(n, key)[0] / n if n else 0.0
        return Draft(before + _vt_prompt(asked, values[1], n, key), tuple(asked), depth)

    return Refill(30, ruler.noise_units, build)


def _gaps(n: int, key: float) -> list[int]:
    """Where in n lines the assignments stand, in order; no two in one place if there are places enough."""
    places = range(n + 1)
    rng = random.Random(key)
    return sorted(rng.sample(places, VT_NAMES) if len(places) >= VT_NAMES else rng.choices(places, k=VT_NAMES))


def _vt_prompt(names: list[str], value: str, n: int, key: float) -> str:
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    assigned = [f"VAR {name} = {source}" for name, source in zip(names, sources, strict=True)]
    context = "\n".join(insert([NOISE] * n, assigned, _gaps(n, key)))
    return VT.format(context=context, value=value, number=len(names))


def cwe(ruler: Ruler, rng: random.Random, length: int) -> Refill:
    """A numbered list with ten words that come more often than all others. A unit is one more of the others."""
    found = words(rng)
    times, rare_times = (30, 3) if length >= 4096 else (6, 1)
    example_words, example_times, example_rare = (40, 10, 3) if length >= 4096 else (20, 3, 1)
    common = list(islice(found, CWE_COMMON))
    example = list(islice(found, example_words))
    counted = [(w, example_times if i < CWE_COMMON else example_rare) for i, w in enumerate(example)]
    before = _cwe_prompt(counted, rng.random()) + " " + _numbered(example[:CWE_COMMON]) + "\n\n"
    key, start = rng.random(), CWE_COMMON * times

    def unit(i: int, word: str) -> str:
        return "".join(f" {start + i * rare_times + j + 1}. {word}" for j in range(rare_times))

    rare = Units(found, ruler.counter, unit)

    def build(n: int) -> Draft:
        counted = [(w, times) for w in common] + [(w, rare_times) for w in rare.first(n)]
        return Draft(before + _cwe_prompt(counted, key), tuple(common))

    return Refill(120, rare, build, least=1)


def _cwe_prompt(counted: list[tuple[str, int]], key: float) -> str:
    listed = list(chain.from_iterable([word] * times for word, times in counted))
    random.Random(key).shuffle(listed)
    return CWE.format(context=_numbered(listed))


def _numbered(listed: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))


class Fwe:
    """Coded words whose frequency falls with the square of their rank (Zipf); rank 1 is dots, ranks 2 to 4 are asked.

    Of n words, rank k has n k^-2 / zeta(2), rounded down; what is left over is words that come once.
    """

    max_new_tokens = 50
    least = FWE_LEAST

    def __init__(self, ruler: Ruler, rng: random.Random, length: int):
        coded = chain(["..."], _distinct_words(rng, string.ascii_lowercase, 6))
        self.units = Units(coded, ruler.counter, lambda i, word: f" {word}")
        self.key = rng.random()

    def build(self, n: int) -> Draft:
        times = zipf(n)
        coded = self.units.first(len(times))
        listed = list(chain.from_iterable([word] * k for word, k in zip(coded, times, strict=True)))
        random.Random(self.key).shuffle(listed)
        return Draft(FWE.format(context=" ".join(listed)), tuple(coded[1:4]))

    def size(self, n: int) -> int:
        times = zipf(n)
        ends = [self.units.size(k) for k in range(len(times) + 1)]
        return sum(k * (b - a) for k, a, b in zip(times, ends, ends[1:], strict=False))

    def most(self, tokens: int) -> int:
        low, high = 0, max(1, tokens)
        while self.size(high) <= tokens:
            high *= 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.size(middle) <= tokens else (low, middle)
        return low


def zipf(n: int) -> list[int]:
    """How often each rank comes among n words."""
    share = n * 6 / math.pi**2
    times = [int(share / k**FWE_ALPHA) for k in range(1, math.isqrt(int(share)) + 1)]
    return [k for k in times if k] + [1] * (n - sum(times))


def _distinct_words(rng: random.Random, letters: str, size: int) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        word = "".join(rng.choices(letters, k=size))
        if word not in seen:
            seen.add(word)
            yield word
