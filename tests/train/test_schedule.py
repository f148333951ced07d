"""Schedules against the papers' figures, branches against their trunk."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.train.config import TrainConfig
from plait.train.schedule import Schedule, branch, constant, cosine, draw, linear, updates, wsd

# 003, tables 9 to 11: tokens, warmup and final decay in updates
BLD = {
    "180M": (120e6, 23, 1.20e9, 229, 229),
    "250M": (280e6, 53, 2.80e9, 534, 534),
    "390M": (480e6, 92, 4.80e9, 916, 916),
    "510M": (720e6, 137, 7.20e9, 1373, 1373),
    "750M": (1.07e9, 198, 10.65e9, 2032, 2032),
    "1B": (1.60e9, 305, 16.00e9, 3052, 3052),
}
EARLY_TOKENS, REMAINING_TOKENS = 16 * 16_384, 32 * 16_384
"""of an update"""

# 000, table 8: stable learning rate, last one, stable, decaying and all updates
WSD_000 = {
    "S1": (1.953e-3, 1.953e-4, 25_764, 2_862, 28_626),
    "S2": (9.766e-4, 9.766e-5, 111_938, 12_438, 124_376),
    "S3": (9.542e-4, 9.542e-5, 119_740, 13_304, 133_044),
    "S4": (9.766e-4, 9.766e-5, 94_318, 10_480, 104_798),
    "S5": (9.766e-4, 9.766e-5, 81_900, 9_100, 91_000),
}


def phases(schedule: Schedule) -> tuple[int, int, int]:
    """Updates that are below the peak before it, at it, and below it after it."""
    factors = [schedule.at(step) for step in range(schedule.steps + 1)]
    first, last = factors.index(1.0), len(factors) - 1 - factors[::-1].index(1.0)
    return first, last - first + 1, schedule.steps - last - 1


@pytest.mark.parametrize("size", BLD)
def test_the_early_stage_of_003(size):
    tokens, warmup, *_ = BLD[size]
    schedule = constant(updates(tokens, EARLY_TOKENS), warmup=warmup)
    assert 0 <= schedule.steps * EARLY_TOKENS - tokens < EARLY_TOKENS
    assert warmup / schedule.steps == pytest.approx(0.05, abs=0.002)
    assert phases(schedule)[0] == warmup - 1  # the last update of the warmup is at the peak
    assert 1e-4 * schedule.at(0) == pytest.approx(1e-4 / warmup)
    assert 1e-4 * schedule.at(schedule.steps - 1) == 1e-4


@pytest.mark.parametrize("size", BLD)
def test_the_remaining_stage_of_003(size):
    *_, tokens, warmup, decay = BLD[size]
    steps = updates(tokens, REMAINING_TOKENS)
    schedule = wsd(steps, warmup=warmup, decay=decay, shape="cosine", share=0.05)
    assert 0 <= steps * REMAINING_TOKENS - tokens < REMAINING_TOKENS
    assert (warmup / steps, decay / steps) == pytest.approx((0.1, 0.1), abs=1e-4)
    rising, peak, falling = phases(schedule)
    assert (rising, falling) == (warmup - 1, decay - 1)
    assert peak == steps - warmup - decay + 2  # and the last of the warmup and the first of the decay
    assert schedule.at(steps - decay // 2) == pytest.approx(0.525, abs=0.01)
    for lr, lowest in ((0.02, 0.001), (0.001, 5e-5)):  # Muon, AdamW
        assert lr * schedule.at(steps) == pytest.approx(lowest, rel=1e-12)
        assert lowest < lr * schedule.at(steps - 1) < lowest * 1.01


@pytest.mark.parametrize("size", WSD_000)
def test_the_schedules_of_000(size):
    lr, last, stable, decay, steps = WSD_000[size]
    schedule = wsd(steps, decay=decay, share=0.1)
    assert stable + decay == steps
    assert phases(schedule) == (0, stable + 1, decay - 1)
    assert lr * schedule.at(steps) == pytest.approx(last, rel=1e-12)
    assert schedule.at(stable + decay // 2) == pytest.approx(0.55)


def test_the_extension_of_000():
    schedule = linear(4_769)
    assert [schedule.at(step) for step in (0, 4_769)] == [1, 0]
    assert schedule.at(4_768) == pytest.approx(1 / 4_769)


@pytest.mark.parametrize(
    ("tokens", "batch", "warmup_tokens", "steps", "warmup"),
    [(50e9, 1e6, 0.5e9, 50_000, 500), (5e9, 5e5, 1e9, 10_000, 2_000)],
    ids=["pretraining", "extension"],
)
def test_the_schedules_of_001(tokens, batch, warmup_tokens, steps, warmup):
    """001, appendix A.1 and table 2."""
    assert (updates(tokens, batch), updates(warmup_tokens, batch)) == (steps, warmup)
    schedule = cosine(steps, warmup=warmup)
    assert phases(schedule)[0] == warmup - 1
    assert schedule.at(steps) == 0
    assert schedule.at((steps + warmup) // 2) == pytest.approx(0.5)


def test_the_retrieval_cosine_is_the_one_of_train_config():
    config = TrainConfig(steps=1500, lr=3e-4, min_lr=1e-5, warmup=100)
    schedule = cosine(1500, warmup=100, share=1e-5 / 3e-4)
    assert config.rates == schedule
    for step in range(100, 1501):  # the usual formula, from the peak to min_lr
        rate = 1e-5 + (3e-4 - 1e-5) * 0.5 * (1 + math.cos(math.pi * (step - 100) / 1400))
        assert config.lr * schedule.at(step) == pytest.approx(rate, rel=1e-12)


def test_tokens_become_whole_updates():
    assert [updates(tokens, 100) for tokens in (0, 1, 100, 101)] == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="tokens_per_update = 0"):
        updates(1, 0)


@st.composite
def schedules(draw) -> Schedule:
    warmup, stable, decay = (draw(st.integers(0, 20)) for _ in range(3))
    steps = max(1, warmup + stable + decay)
    shape, share = draw(st.sampled_from(["linear", "cosine"])), draw(st.floats(0, 1))
    return Schedule(steps=steps, warmup=warmup, decay=decay, shape=shape, share=share)


@given(schedules())
def test_factors_rise_stay_and_fall(schedule):
    factors = [schedule.at(step) for step in range(schedule.steps + 5)]
    top = max(0, schedule.warmup - 1)
    assert all(a < b for a, b in itertools.pairwise(factors[: top + 1]))
    assert all(a >= b for a, b in itertools.pairwise(factors[top:]))
    assert factors[0] > 0 and max(factors) == 1
    end = schedule.share if schedule.decay else 1.0
    assert all(math.isclose(factor, end, abs_tol=1e-15) for factor in factors[schedule.steps :])
    assert Schedule(**dataclasses.asdict(schedule)) == schedule


@given(schedules(), st.data())
def test_a_branch_follows_its_trunk_and_then_decays(trunk, data):
    at_step = data.draw(st.integers(max(1, trunk.warmup), max(1, trunk.steps - trunk.decay)))
    if at_step > trunk.steps - trunk.decay:
        return
    decay = data.draw(st.integers(1, 30))
    found = branch(trunk, at_step, decay)
    assert found.steps == at_step + decay
    assert all(found.at(step) == trunk.at(step) for step in range(at_step + 1))
    assert found.at(found.steps) == pytest.approx(trunk.share)
    if at_step == trunk.steps - trunk.decay and trunk.decay:
        assert branch(trunk, at_step, trunk.decay) == trunk


def test_every_budget_of_000_is_a_branch_of_one_trunk():
    steps = 104_798  # S4 at D / N = 1000
    trunk = wsd(steps, decay=10_480, share=0.1)
    for budget in (100, 200, 300, 400, 500):
        total = round(steps * budget / 1000)
        decay = round(total / 10)
        assert branch(trunk, total - decay, decay) == wsd(total, decay=decay, share=0.1)


@pytest.mark.parametrize("at_step", [9, 91])
def test_no_branch_leaves_a_trunk_that_is_not_at_its_peak(at_step):
    with pytest.raises(ValueError, match=f"branch: at_step = {at_step}; .* 10 to 90"):
        branch(wsd(100, warmup=10, decay=10), at_step, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "schedule: steps = 0; it must be at least 1"),
        ({"steps": 10, "warmup": 11}, "warmup = 11; it must be from 0 to steps = 10"),
        ({"steps": 10, "warmup": 4, "decay": 7}, "decay = 7; it must be from 0 to the 6 updates after the warmup"),
        ({"steps": 10, "share": 1.5}, "share = 1.5; it must be from 0 to 1"),
        ({"steps": 10, "shape": "sqrt"}, "shape = 'sqrt'"),
    ],
)
def test_impossible_schedules_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**fields)


def test_a_warmup_longer_than_a_cosine_is_refused():
    with pytest.raises(ValueError, match="warmup = 11"):
        cosine(10, warmup=11)


def test_drawing():  # golden: print(draw(...)), looked at
    assert draw(wsd(100, warmup=20, decay=40), 100, width=20, height=4).splitlines() == [
        "1.0    ▅████████▆▂",
        "      ▅███████████▆▂",
        "     ▅██████████████▆▂",
        "0.0 ▅█████████████████▆▂",
        "    0                100",
    ]
    lines = draw(constant(1_000_000), 1_000_000).splitlines()
    assert lines[0] == "1.0 " + "█" * 60
    assert len(lines) == 9 and lines[-1].endswith("1,000,000") and len(lines[-1]) == 64
