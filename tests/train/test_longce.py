"""Weights of LongCE, and the loss they make, against two plain passes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from plait.model.lm import LM
from plait.spec import Spec
from plait.train.longce import longce_weights
from plait.windows import short_losses


def test_weights():
    full = torch.tensor([[1.0, 1.0, 3.0, 1.0, 0.0, 7.0]], requires_grad=True)
    short = torch.tensor([[math.nan, 1.0, 2.0, 1.5, 900.0, math.nan]])
    weights = longce_weights(full, short)
    assert weights.tolist()[0] == pytest.approx([1, 1, math.exp(-1), math.exp(0.5), 5, 1])
    assert not weights.requires_grad
    assert longce_weights(full, short, limit=1.2).max() == pytest.approx(1.2)


@pytest.mark.parametrize("layout", ["nope swa[window=6]", "gdn nope", "mamba2[head_dim=8] gla"])
def test_loss_and_gradient_are_those_of_two_plain_passes(layout):
    """Every token alone: its context is cut to what its window starts with."""
    spec = Spec.from_layout(layout, vocab_size=11, d_model=16, num_layers=2, num_heads=2)
    model, K, d = LM(dataclasses.replace(spec, init_std=0.4), dtype=torch.float64), 7, 4
    tokens = torch.randint(0, 11, (2, 26), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:]

    def full() -> torch.Tensor:
        return F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")

    def gradient(weights: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        (weights * full()).mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected = torch.ones(2, 25, dtype=torch.float64)
    with torch.no_grad():
        losses = full()
        for token in range(K, 26):
            start = (token - K) // d * d
            logits = model(tokens[:, start:token])[:, -1]
            short = F.cross_entropy(logits, tokens[:, token], reduction="none")
            expected[:, token - 1] = (short - losses[:, token - 1]).exp().clamp(max=5)
    weights = longce_weights(full(), short_losses(model, x, y, K=K, d=d))
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=0)
    assert (weights == 5).any() or weights.max() > 1.1
    torch.testing.assert_close(gradient(weights), gradient(expected), rtol=1e-9, atol=1e-12)
