"""Intervals against what they must cover, and pairs."""

from __future__ import annotations

import numpy as np
import pytest

from plait.evals.stats import mean_of, paired, ratio_of


def test_means_and_weights():
    found = mean_of([0, 100], [100, 100, 100, 100])
    assert (found.value, found.n) == (75.0, 6)
    assert mean_of([0, 100], [100] * 4, weights=[0.2, 0.8]).value == pytest.approx(90)
    assert (found.low, found.high) == (50.0, 100.0)
    assert mean_of([3.0]).low is None
    assert mean_of([0], [100], [100]).low is None  # one sample of each task: draws are all alike
    assert mean_of([0, 100, 0]) == mean_of([0, 100, 0])


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(300):
        groups = [100.0 * (rng.random(100) < chance) for chance in (0.3, 0.8)]
        found = mean_of(*groups)
        held += found.low <= 55 <= found.high
    assert 0.90 <= held / 300 <= 0.98


def test_a_ratio_counts_the_long_for_more():
    found = ratio_of([10, 30], [10, 10])
    assert (found.value, found.low, found.high) == (2.0, 1.0, 3.0)
    assert ratio_of([1, 99], [1, 33]).value == pytest.approx(100 / 34)
    assert ratio_of([0, 5], [0, 5]).value == 1.0  # a document without tokens


def test_pairs_see_what_means_do_not():
    rng = np.random.default_rng(2)
    first = rng.normal(50, 30, 100)
    second = first - 2 + rng.normal(0, 1, 100)
    found = paired([first], [second])
    assert 1.5 < found.difference.low < found.difference.value < found.difference.high < 2.5
    assert found.better + found.worse == 100 and found.better > 90
    assert mean_of(first).low < mean_of(second).high
