"""Rows out of the documents of a split, in any order, without laying an epoch's tokens out.

Packed: the documents of an epoch in a seeded order, each followed by EOS, are one stream of S tokens; row k has its
tokens kT to (k + 1)T as inputs and one token further as targets. Whole: each document, with its EOS, is cut into rows
of its own. Either way an epoch has R rows, every token is an input or the last target once, and every one but the
first of the stream (of a document) is a target once; what is missing from a last row is EOS that no loss falls on.

Memory: 8 bytes a document for lengths, 8 for where it starts in its split, 8 for the chosen documents; packed, for
each of the last KEPT epochs, 16 more (order and ends).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from plait.data.shards import TokenShards

KEPT = 2
"""epochs whose order is kept: a batch may lie across the end of one"""
ROUNDS = 4
MASK = 2**64 - 1


@dataclass(frozen=True)
class Row:
    tokens: np.ndarray
    """[T + 1], int64"""
    size: int
    """of the tokens that are no filling at the end; at least 2"""
    starts: tuple[int, ...]
    """where in the row another document than the one before it begins, rising, without 0"""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """min_tokens: documents with fewer are left out. whole: rows that hold one document each."""

    shards: TokenShards
    length: int
    seed: tuple[int, ...]
    min_tokens: int = 1
    whole: bool = False
    """rows of one document each"""

    def __post_init__(self):
        if not len(self.shards):
            hint = "; hold some out: plait data build with a larger --valid" if self.shards.split == "valid" else ""
            raise ValueError(f"data {self.shards.path}: no document in its {self.shards.split} split{hint}")
        if not len(self.chosen):
            longest = self.shards.lengths.max(initial=0)
            raise ValueError(
                f"data {self.shards.path}: no document in its {self.shards.split} split has min_tokens ="
                f" {self.min_tokens} tokens (documents: {len(self.shards)}, the longest has {longest})"
            )

    @cached_property
    def chosen(self) -> np.ndarray:
        return np.flatnonzero(self.shards.lengths >= self.min_tokens)

    @cached_property
    def rows(self) -> int:
        """Of an epoch."""
        if self.whole:
            return int(self._row_ends[-1])
        tokens = int(self.shards.lengths[self.chosen].sum()) + len(self.chosen)
        return -(-(tokens - 1) // self.length)

    @cached_property
    def _row_ends(self) -> np.ndarray:
        """Whole: rows up to the end of each document."""
        return np.cumsum(-(-self.shards.lengths[self.chosen] // self.length))

    @cached_property
    def _epochs(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        return {}

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents in their order, and where each ends in the stream, its EOS included."""
        if epoch not in self._epochs:
            order = np.random.default_rng([*self.seed, epoch]).permutation(self.chosen)
            while len(self._epochs) >= KEPT:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = order, np.cumsum(self.shards.lengths[order] + 1)
        return self._epochs[epoch]

    def __getitem__(self, number: int) -> Row:
        """Row `number` of an endless sequence: all rows of an epoch in a shuffled order, so that the rows of a long
        document are not neighbours in a batch, then those of the next."""
        epoch, place = divmod(number, self.rows)
        return self.row(epoch, permuted(place, self.rows, (*self.seed, epoch)))

    def row(self, epoch: int, k: int) -> Row:
        if self.whole:
            i = int(np.searchsorted(self._row_ends, k, side="right"))
            document = int(self.chosen[i])
            start = (k - int(self._row_ends[i - 1] if i else 0)) * self.length
            return self._fill([(document, start)])
        order, ends = self._epoch(epoch)
        position = k * self.length
        i = int(np.searchsorted(ends, position, side="right"))
        start = position - int(ends[i - 1] if i else 0)
        last = int(np.searchsorted(ends, position + self.length, side="right"))
        return self._fill([(int(d), 0 if n else start) for n, d in enumerate(order[i : last + 1])])

    def _fill(self, pieces: list[tuple[int, int]]) -> Row:
        """Documents from given tokens on, one after the other, an EOS after each, up to T + 1 tokens."""
        tokens = np.full(self.length + 1, self.shards.index.eos, dtype=np.int64)
        size, starts = 0, []
        for document, start in pieces:
            if size:
                starts.append(size)
            left = len(tokens) - size
            part = self.shards.read(document, start, start + left)
            tokens[size : size + len(part)] = part
            size = min(size + len(part) + 1, len(tokens))  # with its EOS
        return Row(tokens, size, tuple(starts))


def permuted(place: int, size: int, seed: tuple[int, ...]) -> int:
    """Where a seeded permutation of range(size) sends a place: a Feistel network over the next power of 4, followed
    until it is back inside (four steps on average, at most); no memory."""
    assert 0 <= place < size
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = 0
    for part in seed:
        key = _mixed(key ^ part)
    while True:
        left, right = place >> half, place & mask
        for n in range(ROUNDS):
            left, right = right, left ^ (_mixed(key + (n << 56) + right) >> (64 - half))
        place = left << half | right
        if place < size:
            return place


def _mixed(x: int) -> int:
    """splitmix64"""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
