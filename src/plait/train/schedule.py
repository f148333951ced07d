"""Learning-rate schedules: a factor of the peak for every update. No torch.

One form holds them all: a linear warmup, a stable phase at the peak, a decay to a share of it. Constant has no decay,
linear and cosine have no stable phase, wsd (warmup, stable, decay) has all three.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from plait.fields import check, check_choice

Shape = Literal["linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """warmup + stable + decay = steps; the stable phase is what the other two leave."""

    kind: ClassVar[str] = "schedule"

    steps: int
    """updates in all"""
    warmup: int = 0
    """first updates, over which the factor rises to 1"""
    decay: int = 0
    """last updates, over which it falls to `share`"""
    shape: Shape = "linear"
    """of the fall"""
    share: float = 0.0
    """of the peak, where the fall ends"""

    def __post_init__(self):
        check(self, self.steps >= 1, "steps", "at least 1")
        check(self, 0 <= self.warmup <= self.steps, "warmup", f"from 0 to steps = {self.steps}")
        left = self.steps - self.warmup
        check(self, 0 <= self.decay <= left, "decay", f"from 0 to the {left} updates after the warmup")
        check_choice(self, "shape")
        check(self, 0 <= self.share <= 1, "share", "from 0 to 1")

    def at(self, step: int) -> float:
        """Factor of update number `step`, from 0.

        Update `warmup` - 1 is the first at the peak, the decay's first update the last one: the share is the factor
        after the last update.
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        begin = self.steps - self.decay
        if step <= begin or not self.decay:
            return 1.0
        progress = min((step - begin) / self.decay, 1.0)
        left = 1 - progress if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.share + (1 - self.share) * left


def constant(steps: int, *, warmup: int = 0) -> Schedule:
    return Schedule(steps=steps, warmup=warmup)


def linear(steps: int, *, warmup: int = 0, share: float = 0.0) -> Schedule:
    return Schedule(steps=steps, warmup=warmup, decay=max(0, steps - warmup), shape="linear", share=share)


def cosine(steps: int, *, warmup: int = 0, share: float = 0.0) -> Schedule:
    return Schedule(steps=steps, warmup=warmup, decay=max(0, steps - warmup), shape="cosine", share=share)


def wsd(steps: int, *, decay: int, warmup: int = 0, shape: Shape = "linear", share: float = 0.0) -> Schedule:
    return Schedule(steps=steps, warmup=warmup, decay=decay, shape=shape, share=share)


def branch(schedule: Schedule, at_step: int, decay_steps: int) -> Schedule:
    """The schedule that follows a trunk for `at_step` updates, then decays over `decay_steps` as the trunk would.

    A scaling study trains one trunk and a branch for every token budget: each is a complete schedule (000, appendix C).
    Raises ValueError where the trunk is not at its peak at `at_step`.
    """
    stable = schedule.steps - schedule.decay
    if not schedule.warmup <= at_step <= stable:
        raise ValueError(
            f"branch: at_step = {at_step}; it must be in the trunk's stable phase, {schedule.warmup} to {stable}"
        )
    return dataclasses.replace(schedule, steps=at_step + decay_steps, decay=decay_steps)


def updates(tokens: float, tokens_per_update: float) -> int:
    """Updates it takes to see that many tokens: how a budget or a warmup in tokens becomes one in updates."""
    if tokens_per_update <= 0:
        raise ValueError(f"tokens_per_update = {tokens_per_update}; it must be above 0")
    return math.ceil(tokens / tokens_per_update)


BLOCKS = " ▁▂▃▄▅▆▇█"


def draw(schedule: Schedule, steps: int, width: int = 60, height: int = 8) -> str:
    """The factor over updates 0 to `steps` as a bar chart of text, `height` lines and an axis."""
    bars = [schedule.at(steps * (2 * column + 1) // (2 * width)) * height for column in range(width)]
    lines = []
    for floor in reversed(range(height)):
        label = "1.0 " if floor == height - 1 else "0.0 " if floor == 0 else "    "
        lines.append(label + "".join(BLOCKS[round(8 * min(max(bar - floor, 0), 1))] for bar in bars).rstrip())
    return "\n".join([*lines, f"    0{f'{steps:,}':>{width - 1}}"])
