"""Spaced Retrieval, symbol by symbol against its definition (003, 3.1)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.data import IGNORE
from plait.data.spaced_retrieval import DELIMITER, MAX_LEAD, SPACE, SpacedRetrieval, rows


def number(digits: np.ndarray) -> np.ndarray:
    return digits @ 10 ** np.arange(4, -1, -1)


@pytest.fixture(scope="module")
def task() -> SpacedRetrieval:
    return SpacedRetrieval(gaps=(3, 40), gap_weights=(0.25, 0.75), batch_size=64, seed=3)


def parse(row: list[int], targets: list[int], gap: int) -> tuple[int, list[int]]:
    """(lead, key) of a row, after checking every symbol of it."""
    lead = row.index(DELIMITER)
    key = row[lead + 1 : lead + 6]
    ask = lead + 6 + gap
    assert lead <= MAX_LEAD
    assert row[:lead] == [SPACE] * lead
    assert all(0 <= digit <= 9 for digit in key)
    assert row[lead + 6 : ask] == [SPACE] * gap
    assert row[ask] == DELIMITER
    assert row[ask + 1 : ask + 5] == key[:4]
    assert row[ask + 5 :] == [SPACE] * (MAX_LEAD - lead)
    assert targets[ask : ask + 5] == key
    assert targets[:ask] + targets[ask + 5 :] == [IGNORE] * (len(row) - 5)
    return lead, key


def test_rows_are_as_defined(task):
    leads = set()
    for step in range(4):
        for group in task.batch(step):
            for row, targets in zip(group.tokens_BT.tolist(), group.targets_BT.tolist(), strict=True):
                lead, key = parse(row, targets, group.axes["gap"])
                leads.add(lead)
                assert number(np.array(key)) in task.training_keys
    assert min(leads) == 0
    assert max(leads) == MAX_LEAD


def test_examples_differ_across_gaps_only_in_the_gap(task):
    short, long = task.held_out()
    for a, ta, b, tb in zip(short.tokens_BT, short.targets_BT, long.tokens_BT, long.targets_BT, strict=True):
        assert parse(a.tolist(), ta.tolist(), 3) == parse(b.tolist(), tb.tolist(), 40)


def test_keys_of_training_evaluation_and_counterfactuals_are_disjoint(task):
    pairs = task.pairs
    sets = [set(task.training_keys), set(number(pairs.key_a)), set(number(pairs.key_b))]
    assert [len(keys) for keys in sets] == [50_000, 2_000, 2_000]
    assert not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2])


def test_pairs_differ_in_the_digit_asked_for_alone(task):
    pairs = task.pairs
    differ = pairs.key_a != pairs.key_b
    assert (differ.sum(1) == 1).all()
    assert (differ.argmax(1) == pairs.place).all()
    assert np.bincount(pairs.place).tolist() == [400] * 5


def test_counterfactual_rows_share_the_answer_so_far(task):
    pairs = task.pairs
    a, ask = rows(pairs.key_a, pairs.key_a, pairs.lead, 7)
    b, _ = rows(pairs.key_b, pairs.key_a, pairs.lead, 7)
    differ = a != b
    assert (differ.sum(1) == 1).all()
    assert (differ.argmax(1) == pairs.lead + 1 + pairs.place).all()
    assert (ask == pairs.lead + 13).all()


def test_gap_weights_are_probabilities(task):
    counts = {3: 0, 40: 0}
    for step in range(60):
        for group in task.batch(step):
            counts[group.axes["gap"]] += len(group.tokens_BT)
    assert sum(counts.values()) == 60 * 64
    assert abs(counts[3] / (60 * 64) - 0.25) < 0.03


def test_a_batch_is_a_function_of_seed_and_step(task):
    again = SpacedRetrieval(gaps=(3, 40), gap_weights=(0.25, 0.75), batch_size=64, seed=3)
    other = SpacedRetrieval(gaps=(3, 40), gap_weights=(0.25, 0.75), batch_size=64, seed=4)

    def tokens(source: SpacedRetrieval, step: int) -> torch.Tensor:
        return torch.cat([group.tokens_BT.flatten() for group in source.batch(step)])

    task.batch(1)
    assert torch.equal(tokens(task, 7), tokens(again, 7))
    assert tokens(task, 7).tolist() != tokens(task, 8).tolist()
    assert tokens(task, 7).tolist() != tokens(other, 7).tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gaps": ()}, "gaps = []"),
        ({"gaps": (4, 4)}, "gaps = [4, 4]"),
        ({"gaps": (-1,)}, "gaps = [-1]"),
        ({"gaps": (4, 8), "gap_weights": (1.0,)}, "gap_weights = [1.0]"),
        ({"gaps": (4, 8), "gap_weights": (0.0, 0.0)}, "gap_weights = [0.0, 0.0]"),
        ({"gaps": (4,), "batch_size": 0}, "batch_size = 0"),
        ({"gaps": (4,), "eval_pairs": 50_000}, "eval_pairs = 50000"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError) as error:
        SpacedRetrieval(**options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
