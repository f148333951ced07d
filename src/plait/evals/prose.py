"""The text that generated questions hide in, and words for names. No torch."""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from importlib.resources import files
from itertools import chain, islice, repeat
from pathlib import Path

from plait.data.sources import Reader, Reading
from plait.evals.counting import Counter, Units

LONGEST = 200
"""words of a sentence; what goes on longer is taken as several"""
_TITLE = re.compile(r"(Mr|Mrs|Dr|St|Capt|Messrs|Rev|Hon|No|Vol|viz|i\.e|e\.g|[A-Z])\.")
_END = re.compile(r"[.!?][\"')\]”’]*$")
_START = re.compile(r"[\"'(\[“‘—]*[A-Z0-9]")


def rng_of(*key: str | int) -> random.Random:
    """The same draws for the same key, on every machine and in every process."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))


class Prose:
    """A text as words between single spaces, and as sentences; without a path, what plait ships."""

    def __init__(self, path: Path | None = None):
        text = _own() if path is None else "\n".join(Reader([str(path)], Reading()))
        self.words = text.split()
        if not self.words:
            raise ValueError(f"haystack {path}: no text in it; give a file or folder of text")

    def units(self, counter: Counter) -> Units[str]:
        """Its words, and again from the start."""
        return Units(chain.from_iterable(repeat(self.words)), counter, lambda i, word: f" {word}")

    @cached_property
    def starts(self) -> list[int]:
        """The words that sentences begin with."""
        found = [0]
        for i, (before, word) in enumerate(zip(self.words, self.words[1:], strict=False), 1):
            if i - found[-1] == LONGEST or (_ends(before) and _START.match(word)):
                found.append(i)
        return found

    def insert(self, n: int, pieces: Sequence[str], shares: Sequence[float], sentence: int = 0) -> str:
        """n words from that sentence on, the pieces between sentences of theirs: each behind its share of them (0 to 1,
        rising)."""
        start = self.starts[sentence]
        words = list(islice(chain.from_iterable(repeat(self.words)), start, start + n))
        gaps = [self._gap(n, share, sentence) for share in shares]
        return " ".join(insert(words, pieces, gaps))

    def _gap(self, n: int, share: float, sentence: int) -> int:
        start, total = self.starts[sentence], len(self.starts)
        rounds, rest = divmod(start + n, len(self.words))
        here = rounds * total + bisect_right(self.starts, rest - 1) - sentence
        before = int(here * share)
        if before >= here:
            return n
        rounds, at = divmod(sentence + before, total)
        return rounds * len(self.words) + self.starts[at] - start


def insert(units: Sequence[str], pieces: Sequence[str], gaps: Sequence[int]) -> list[str]:
    """Each piece before the unit of that place; places rise."""
    found, at = [], 0
    for piece, gap in zip(pieces, gaps, strict=True):
        found += [*units[at:gap], piece]
        at = gap
    return [*found, *units[at:]]


def _ends(word: str) -> bool:
    return bool(_END.search(word)) and not _TITLE.fullmatch(word)


def _data(name: str) -> bytes:
    return (files("plait.evals") / "data" / name).read_bytes()


@cache
def _own() -> str:
    return lzma.decompress(_data("prose.txt.xz")).decode()


@cache
def _vocabulary() -> tuple[str, ...]:
    return tuple(sorted({word for word in _own().split() if re.fullmatch(r"[a-z]{4,10}", word)}))


@cache
def _names() -> tuple[list[str], list[str]]:
    adjectives, nouns = (_data(f"{name}.txt").decode().split() for name in ("adjectives", "nouns"))
    return adjectives, nouns


def pairs(rng: random.Random) -> Iterator[str]:
    """Adjective-noun, each another one; three words where most pairs are taken."""
    adjectives, nouns = _names()
    seen: set[str] = set()
    while True:
        word = f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
        if len(seen) > len(adjectives) * len(nouns) // 2:
            word = f"{rng.choice(adjectives)}-{word}"
        if word not in seen:
            seen.add(word)
            yield word


def words(rng: random.Random) -> Iterator[str]:
    """English words, each another one; then pairs."""
    found = list(_vocabulary())
    rng.shuffle(found)
    return chain(found, pairs(rng))
