"""Intervals of means by the bootstrap over samples, and paired differences. Seeded; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 2000
LEVEL = 0.95
SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval (percentile bootstrap, LEVEL); low and high are None where one sample, of all or of a
    group, tells nothing of how much others would differ."""

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def text(self) -> str:
        """With one digit."""
        return f"{self.value:.1f}" + ("" if self.low is None else f" [{self.low:.1f}, {self.high:.1f}]")


def mean_of(*groups: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """The mean over groups (tasks) of the mean over each group's samples; samples are drawn within their group, so a
    group's weight stays. weights: of the groups, which sum to 1 (None: all the same)."""
    rng = np.random.default_rng(SEED)
    value, draws = 0.0, np.zeros(DRAWS)
    for group, weight in zip(groups, weights or [1 / len(groups)] * len(groups), strict=True):
        values = np.asarray(group, dtype=float)
        value += weight * float(values.mean())
        draws += weight * values[rng.integers(0, len(values), (DRAWS, len(values)))].mean(1)
    return _estimate(value, draws, sum(map(len, groups)), min(map(len, groups)))


def ratio_of(sums: Sequence[float], counts: Sequence[float]) -> Estimate:
    """sum(sums) / sum(counts), as of losses and tokens of documents, which are drawn together."""
    rng = np.random.default_rng(SEED)
    a, b = np.asarray(sums, dtype=float), np.asarray(counts, dtype=float)
    index = rng.integers(0, len(a), (DRAWS, len(a)))
    below = b[index].sum(1)
    draws = np.divide(a[index].sum(1), below, out=np.full(DRAWS, a.sum() / b.sum()), where=below > 0)
    return _estimate(float(a.sum() / b.sum()), draws, len(a), len(a))


def _estimate(value: float, draws: np.ndarray, n: int, fewest: int) -> Estimate:
    if fewest < 2:
        return Estimate(value, None, None, n)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high), n)


@dataclass(frozen=True)
class Paired:
    """What one model has over another on the same samples."""

    difference: Estimate
    better: int
    worse: int
    """samples that the first does better or worse"""


def paired(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Paired:
    """Scores of the same samples, group by group (tasks), in the same order."""
    gaps = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]
    flat = [gap for group in gaps for gap in group]
    return Paired(mean_of(*gaps), sum(gap > 0 for gap in flat), sum(gap < 0 for gap in flat))
