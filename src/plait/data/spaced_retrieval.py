"""Spaced Retrieval: repeat a key of digits after a gap (003, 3.1 and its appendix).

    lead spaces | delimiter | key | g spaces | delimiter | the key again

A row is padded with spaces on its right, where a causal model cannot see them and no loss falls.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from plait.data import IGNORE, Group

DELIMITER, SPACE = 10, 11
VOCAB_SIZE = 12
KEY_LENGTH = 5
MAX_LEAD = 20
NUM_KEYS = 10**KEY_LENGTH


@dataclass(frozen=True)
class Pairs:
    """Held-out prompts in twos that differ in one source digit, for measuring what a layer does for retrieval.

    Row n asks for answer digit `place[n]`: source key `key_a` holds digit a there, `key_b` digit b.
    """

    key_a: np.ndarray
    key_b: np.ndarray
    """digits [n, KEY_LENGTH]"""
    place: np.ndarray
    lead: np.ndarray


@dataclass(frozen=True, kw_only=True)
class SpacedRetrieval:
    """gaps in tokens; gap_weights the probability of each (None: equal); the keys of training, evaluation and
    counterfactuals are disjoint."""

    gaps: tuple[int, ...]
    gap_weights: tuple[float, ...] | None = None
    batch_size: int = 32
    seed: int = 0
    train_keys: int = 50_000
    eval_pairs: int = 2_000

    def __post_init__(self):
        if not self.gaps or min(self.gaps) < 0 or len(set(self.gaps)) < len(self.gaps):
            raise ValueError(f"gaps = {list(self.gaps)}; they must be one or more different numbers, none below 0")
        weights = self.gap_weights
        if weights is not None and (len(weights) != len(self.gaps) or min(weights) < 0 or sum(weights) <= 0):
            raise ValueError(f"gap_weights = {list(weights)}; one for each of {len(self.gaps)} gaps, not all 0")
        if self.batch_size < 1:
            raise ValueError(f"batch_size = {self.batch_size}; it must be at least 1")
        if self.train_keys < 1 or self.eval_pairs < 1 or self.train_keys + 4 * self.eval_pairs > NUM_KEYS:
            raise ValueError(
                f"train_keys = {self.train_keys}, eval_pairs = {self.eval_pairs}; both at least 1,"
                f" and train_keys + 4 eval_pairs at most {NUM_KEYS}"
            )

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def length(self) -> int:
        return row_length(max(self.gaps))

    @cached_property
    def _keys(self) -> tuple[np.ndarray, Pairs]:
        rng = np.random.default_rng([self.seed, 0])
        order = rng.permutation(NUM_KEYS)
        train, spare = order[: self.train_keys], order[self.train_keys :]
        taken = np.zeros(NUM_KEYS, dtype=bool)
        taken[train] = True
        rows = []
        for key in spare:  # an evaluation key and a free neighbour of it
            if len(rows) == self.eval_pairs:
                break
            place = len(rows) % KEY_LENGTH
            unit = 10 ** (KEY_LENGTH - 1 - place)
            others = key + unit * (np.arange(10) - key // unit % 10)
            free = [other for other in rng.permutation(others) if other != key and not taken[other]]
            if taken[key] or not free:
                continue
            taken[[key, free[0]]] = True
            rows.append((key, free[0], place))
        key_a, key_b, place = np.array(rows).T
        lead = rng.integers(0, MAX_LEAD + 1, len(rows))
        return train, Pairs(digits(key_a), digits(key_b), place, lead)

    @property
    def training_keys(self) -> np.ndarray:
        return self._keys[0]

    @property
    def pairs(self) -> Pairs:
        """The same pairs for every gap."""
        return self._keys[1]

    def batch(self, step: int) -> list[Group]:
        rng = np.random.default_rng([self.seed, 1, step])
        weights = np.ones(len(self.gaps)) if self.gap_weights is None else np.array(self.gap_weights)
        gap_B = rng.choice(len(self.gaps), self.batch_size, p=weights / weights.sum())
        key_B = digits(self.training_keys[rng.integers(0, self.train_keys, self.batch_size)])
        lead_B = rng.integers(0, MAX_LEAD + 1, self.batch_size)
        return [
            _group(key_B[gap_B == i], lead_B[gap_B == i], gap) for i, gap in enumerate(self.gaps) if (gap_B == i).any()
        ]

    def held_out(self) -> list[Group]:
        return [_group(self.pairs.key_a, self.pairs.lead, gap) for gap in self.gaps]


def row_length(gap: int) -> int:
    """Tokens of a row without its last answer digit, which predicts nothing."""
    return MAX_LEAD + 1 + KEY_LENGTH + gap + 1 + KEY_LENGTH - 1


def digits(keys: np.ndarray) -> np.ndarray:
    """Keys [n] as digits [n, KEY_LENGTH], most significant first."""
    return keys[:, None] // 10 ** np.arange(KEY_LENGTH - 1, -1, -1) % 10


def rows(key: np.ndarray, answer: np.ndarray, lead: np.ndarray, gap: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows with source `key` and given answer digits, and the place [n] of the second delimiter in each."""
    n = len(key)
    tokens = np.full((n, row_length(gap)), SPACE)
    row = np.arange(n)
    ask = lead + 1 + KEY_LENGTH + gap
    tokens[row, lead] = tokens[row, ask] = DELIMITER
    for i in range(KEY_LENGTH):
        tokens[row, lead + 1 + i] = key[:, i]
        if i < KEY_LENGTH - 1:
            tokens[row, ask + 1 + i] = answer[:, i]
    return tokens, ask


def _group(key: np.ndarray, lead: np.ndarray, gap: int) -> Group:
    tokens, ask = rows(key, key, lead, gap)
    targets = np.full_like(tokens, IGNORE)
    for i in range(KEY_LENGTH):
        targets[np.arange(len(key)), ask + i] = key[:, i]
    return Group(torch.from_numpy(tokens), torch.from_numpy(targets), {"gap": gap})
