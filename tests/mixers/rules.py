"""The recurrences that are computed in chunks, as a table: what their tests have in common is stated once over it.

A rule takes inputs q, k, v, g, (beta,) state and gives o and the last state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.mixers.delta import delta_chunk, delta_naive, delta_step
from plait.mixers.linear import linear_chunk, linear_naive, linear_step
from plait.mixers.seq import Seq

CPU = torch.device("cpu")
BOUNDS = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 2e-2)}
"""relative RMS errors allowed: of values, of gradients"""
ROUNDING = torch.finfo(torch.float32).eps
"""RMS errors allowed anyhow where inputs are of size 1: in fp32 a CPU counts decays below this as 0"""
STRONG = -1e4
"""a log decay that forgets everything"""
SCALE = 0.6
"""of linear rules"""
G_INDEX = 3

Function = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rule:
    name: str
    delta: bool
    """the delta rule: keys erase, beta among the inputs, query heads that share a state"""
    channels: bool
    """one decay a key channel"""

    @property
    def names(self) -> tuple[str, ...]:
        return ("q", "k", "v", "g", *(["beta"] if self.delta else []), "state")

    @property
    def naive(self) -> Function:
        return delta_naive if self.delta else functools.partial(linear_naive, scale=SCALE)

    @property
    def step(self) -> Function:
        return delta_step if self.delta else functools.partial(linear_step, scale=SCALE)

    def chunk(self, seq: Seq, size: int | None = 16) -> Function:
        if self.delta:
            return lambda *inputs: delta_chunk(*inputs, seq, size)
        return lambda *inputs: linear_chunk(*inputs, seq, scale=SCALE, chunk_size=size)

    def make_inputs(
        self,
        B: int,
        T: int,
        S: int,
        G: int,
        K: int,
        V: int,
        *,
        decay: float = 0.3,
        strong: float = 0.0,
        seed: int = 0,
        sequences: int | None = None,
    ) -> list[Tensor]:
        """In float64. G query heads a state where states are shared; g as make_decays has it; beta in [0, 2)."""
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, dtype=torch.float64)

        q, k = (F.normalize(normal(B, T, heads, K), dim=-1) for heads in (S * G if self.delta else S, S))
        g = make_decays((B, T, S, K) if self.channels else (B, T, S), decay, strong, rng)
        beta = [2 * torch.rand(B, T, S, generator=rng, dtype=torch.float64)] if self.delta else []
        return [q, k, normal(B, T, S, V), g, *beta, normal(sequences or B, S, K, V)]

    def assert_same(self, ours: list[Tensor], theirs: list[Tensor], dtype: torch.dtype = torch.float64) -> None:
        """Two results of `gradients`."""
        results = ("o", "last state", *(f"d{name}" for name in self.names))
        for i, (name, a, b) in enumerate(zip(results, ours, theirs, strict=True)):
            bound = BOUNDS[dtype][i > 1]
            assert a.shape == b.shape
            rounding = 0 if dtype == torch.float64 else ROUNDING * a.numel() ** 0.5
            if (a.double() - b.double()).norm() > rounding:
                assert relative_rms(a, b) <= bound, f"{name}: {relative_rms(a, b):.2e} > {bound}"


DELTA = Rule("delta", delta=True, channels=False)
KDA = Rule("delta, channels", delta=True, channels=True)
LINEAR = Rule("linear", delta=False, channels=False)
GLA = Rule("linear, channels", delta=False, channels=True)
RULES = (DELTA, KDA, LINEAR, GLA)

every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def make_decays(shape: tuple[int, ...], decay: float, strong: float, rng: torch.Generator) -> Tensor:
    """In [-decay, 0], but a share `strong` of them is STRONG and as many are exactly 0, next to the others."""
    g, kind = (torch.rand(shape, generator=rng, dtype=torch.float64) for _ in range(2))
    return (-decay * g).masked_fill(kind < strong, STRONG).masked_fill(kind > 1 - strong, 0.0)


def to(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Operands in dtype; gates and state at least in fp32, as mixers give them."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [x.to(dtype if i < G_INDEX else wide) for i, x in enumerate(inputs)]


def gradients(rule: Function, inputs: list[Tensor], *, of: tuple[int, ...] | None = None) -> list[Tensor]:
    """o, the last state, and the gradients of the inputs (or those at the places `of`) for fixed random gradients of
    both outputs."""
    of = tuple(range(len(inputs))) if of is None else of
    leaves = [x.detach().clone().requires_grad_(i in of) for i, x in enumerate(inputs)]
    outputs = rule(*leaves)
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=rng).bfloat16().to(y) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, [leaves[i] for i in of], weights)]


def dense(B: int, T: int) -> Seq:
    return Seq.build((B, T), CPU)


def packed(lengths: list[int], device: torch.device = CPU) -> Seq:
    return Seq.build((1, sum(lengths)), device, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))


def by_sequence(rule: Rule, lengths: list[int]) -> Function:
    """The specification applied to every sequence of a packed row."""

    def each(*inputs):
        *tokens, state = inputs
        pieces = zip(*(x.split(lengths, 1) for x in tokens), state.split(1), strict=True)
        o, last = zip(*(rule.naive(*piece) for piece in pieces), strict=True)
        return torch.cat(o, 1), torch.cat(last)

    return each


def relative_rms(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()
