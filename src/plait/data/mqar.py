"""MQAR: multi-query associative recall (Arora et al. 2023, Zoology, appendix "MQAR").

A row has pairs of a key and a value first; then each key comes once more, at a gap drawn from a power law, and there
its value is to be predicted. Keys are of the vocabulary's first half, values of its second; what stands elsewhere is
drawn from both, but is never a key of the row, which would make its answer a matter of opinion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from plait.data import IGNORE, Group

POWER = 0.01
"""a of the density a x^(a - 1) of gaps, as published"""


@dataclass(frozen=True, kw_only=True)
class MQAR:
    """pairs: of a row, one group of rows for each number. row_length: its tokens (None: 4 for every pair, at least 64).
    Every row is drawn by a generator of its own, from (seed, split, pairs, length, number of the row)."""

    vocab_size: int
    pairs: tuple[int, ...] = (4, 16, 64, 256)
    row_length: int | None = None
    batch_size: int = 32
    seed: int = 0
    eval_rows: int = 200

    def __post_init__(self):
        if not self.pairs or min(self.pairs) < 1 or len(set(self.pairs)) < len(self.pairs):
            raise ValueError(f"pairs = {list(self.pairs)}; they must be one or more different numbers, none below 1")
        if self.row_length is not None and self.row_length < 4 * max(self.pairs):
            raise ValueError(
                f"length = {self.row_length}; {max(self.pairs)} pairs take at least {4 * max(self.pairs)} tokens"
            )
        if self.vocab_size // 2 - 1 < max(self.pairs):
            raise ValueError(
                f"pairs = {max(self.pairs)}; a vocabulary of {self.vocab_size} has keys for {self.vocab_size // 2 - 1}"
            )
        if self.batch_size < 1 or self.eval_rows < 1:
            raise ValueError(f"batch_size = {self.batch_size}, eval_rows = {self.eval_rows}; both must be at least 1")

    def length_of(self, pairs: int) -> int:
        return self.row_length or max(64, 4 * pairs)

    @property
    def length(self) -> int:
        return self.length_of(max(self.pairs))

    def batch(self, step: int) -> list[Group]:
        """Rows of all numbers of pairs in turn."""
        rows = range(step * self.batch_size, (step + 1) * self.batch_size)
        parts = {pairs: [row for row in rows if row % len(self.pairs) == i] for i, pairs in enumerate(self.pairs)}
        return [self.group(pairs, numbers, split=0) for pairs, numbers in parts.items() if numbers]

    def held_out(self) -> list[Group]:
        return [self.group(pairs, range(self.eval_rows), split=1) for pairs in self.pairs]

    def group(self, pairs: int, numbers: Sequence[int], split: int) -> Group:
        rows = [self._row(pairs, split, number) for number in numbers]
        tokens, targets = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        return Group(tokens, targets, {"pairs": pairs})

    def _row(self, pairs: int, split: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        T, half = self.length_of(pairs), self.vocab_size // 2
        rng = np.random.default_rng([self.seed, split, pairs, T, number])
        keys = 1 + rng.choice(half - 1, pairs, replace=False)
        values = half + rng.choice(self.vocab_size - half, pairs, replace=pairs > self.vocab_size - half)
        places = (T - 2 * pairs) // 2
        chance = np.arange(1, places + 1) ** (POWER - 1.0)
        asked = 2 * pairs + 2 * rng.choice(places, pairs, replace=False, p=chance / chance.sum())
        others = np.setdiff1d(np.arange(1, self.vocab_size), keys)
        tokens = rng.choice(others, T)
        tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2] = keys, values
        tokens[asked] = keys
        targets = np.full(T, IGNORE)
        targets[asked] = values
        return tokens, targets
