"""Rescalings of RoPE's frequencies, and their text in layouts. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from plait.fields import FieldError


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A rescaling of RoPE's frequencies for inputs longer than those trained on; formulas in positions.py."""

    kind: Literal["linear", "yarn", "llama3"]
    factor: float
    original_length: int | None = None
    """length trained on, in tokens (yarn, llama3)"""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """yarn: full turns over original_length above which a frequency is kept, below which it is interpolated"""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """llama3: the same two edges, as original_length / wavelength"""
    attention_factor: float | None = None
    """multiplies cos and sin; None: yarn's 0.1 ln(factor) + 1, otherwise 1"""

    FIELDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "linear": ("factor", "attention_factor"),
        "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "attention_factor"),
        "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor", "attention_factor"),
    }
    """what each kind goes by, in the order of its text"""

    @staticmethod
    def parse(text: str) -> RopeScaling:
        """KIND:FACTOR[:ORIGINAL_LENGTH[:...]], as linear:4 or llama3:8:8192:1:4; the fields are those of FIELDS."""
        kind, *values = text.split(":")
        names = RopeScaling.FIELDS.get(kind, ())
        try:
            pairs = list(zip(names[: len(values)], values, strict=True))
            numbers = {name: (int if name == "original_length" else float)(value) for name, value in pairs}
        except ValueError:
            numbers = {}
        if not numbers:
            raise ValueError("linear:FACTOR, yarn:FACTOR:LENGTH or llama3:FACTOR:LENGTH, as llama3:8:8192")
        return RopeScaling(kind=kind, **numbers)  # pyright: ignore[reportArgumentType]

    def __str__(self) -> str:
        """The shortest text that `parse` takes for it."""
        names = self.FIELDS[self.kind]
        values = [getattr(self, name) for name in names]
        while len(values) > 1 and values[-1] == RopeScaling.__dataclass_fields__[names[len(values) - 1]].default:
            values.pop()
        return ":".join([self.kind, *(str(int(value) if value == int(value) else value) for value in values)])

    def __post_init__(self):
        def check(ok: bool, field: str, allowed: str) -> None:
            if not ok:
                raise FieldError("rope_scaling", field, getattr(self, field), allowed)

        check(self.kind in ("linear", "yarn", "llama3"), "kind", "one of linear, yarn, llama3")
        check(1 <= self.factor < math.inf, "factor", "at least 1")
        if self.kind != "linear":
            check((self.original_length or 0) >= 1, "original_length", f"the length trained on: {self.kind} needs it")
        slow, low = self.beta_slow, self.low_freq_factor
        check(0 < slow < math.inf, "beta_slow", "above 0")
        check(slow < self.beta_fast < math.inf, "beta_fast", f"above beta_slow = {slow}")
        check(0 < low < math.inf, "low_freq_factor", "above 0")
        check(low < self.high_freq_factor < math.inf, "high_freq_factor", f"above low_freq_factor = {low}")
        factor = self.attention_factor
        check(factor is None or 0 < factor < math.inf, "attention_factor", "above 0, or none")
