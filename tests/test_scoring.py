"""Token scores against plain cross-entropy."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait import cross_entropy, scoring
from plait.cross_entropy import HeadCrossEntropy
from plait.data import IGNORE
from plait.model.lm import LM
from plait.scoring import score_tokens
from plait.spec import Spec


def test_losses_and_exact_rows(monkeypatch):
    spec = Spec.from_layout("nope", vocab_size=9, d_model=16, num_layers=1, num_heads=2)
    model = LM(spec)
    tokens = torch.randint(0, 9, (4, 7), generator=torch.Generator().manual_seed(0))
    targets = model(tokens).argmax(-1)
    targets[1, 3] = (targets[1, 3] + 1) % 9
    targets[2] = IGNORE
    targets[:, :2] = IGNORE
    expected = F.cross_entropy(model(tokens).transpose(1, 2), targets, ignore_index=IGNORE, reduction="none")
    monkeypatch.setattr(scoring, "CHUNK", 3)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            scores = score_tokens(model, tokens, targets)
        torch.testing.assert_close(scores.loss_N, expected[targets != IGNORE])
        assert scores.exact_rows(4).tolist() == [True, False, True, True]
        assert scores.correct_N.sum() == 14


@pytest.fixture
def drawn(monkeypatch):
    """Hidden states, a head and targets; logits come in slices of three rows."""
    monkeypatch.setitem(cross_entropy.SLICE, "cpu", 15)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 6, dtype=torch.float64, generator=generator) for n in (8, 5))
    return x, 2 * weight, torch.randint(5, (8,), generator=generator)


def test_gradients_of_losses_and_log_sum_exps(drawn):
    x, weight, target = drawn
    inputs = x.requires_grad_(), weight.requires_grad_()
    for parts in (slice(0, 3, 2), 0, 2):
        assert torch.autograd.gradcheck(lambda *xs, at=parts: HeadCrossEntropy.apply(*xs, target)[at], inputs)
    for some in ((x, weight.detach()), (x.detach(), weight)):
        assert torch.autograd.gradcheck(lambda *xs: HeadCrossEntropy.apply(*xs, target)[::2], some)


@pytest.mark.parametrize(("bf16", "error"), [(False, 1e-6), (True, 2**-7)])
def test_one_tensor_of_logits(drawn, bf16, error):
    x, weight, target = (v.float() if v.is_floating_point() else v for v in drawn)
    x, weight, kept = x.requires_grad_(), weight.requires_grad_(), []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        loss, correct, lse = HeadCrossEntropy.apply(x, weight, target)
    dtype = torch.bfloat16 if bf16 else torch.float32
    assert [(tuple(t.shape), t.dtype) for t in kept if 5 in t.shape[1:]] == [((8, 5), dtype)]
    assert loss.dtype == lse.dtype == torch.float32
    x_exact, weight_exact = (v.detach().to(dtype).double().requires_grad_() for v in (x, weight))
    logits = x_exact @ weight_exact.T
    want = F.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(loss, want.float(), rtol=error, atol=3 * error)
    torch.testing.assert_close(lse, logits.logsumexp(-1).float(), rtol=error, atol=3 * error)
    assert torch.equal(correct, logits.argmax(-1) == target)
    factor = torch.linspace(0.1, 2, 8)
    (factor * loss + 0.01 * lse.square()).sum().backward()
    (factor * want + 0.01 * logits.logsumexp(-1).square()).sum().backward()
    for got, exact in ((x, x_exact), (weight, weight_exact)):
        assert got.grad is not None and exact.grad is not None and got.grad.dtype == torch.float32
        torch.testing.assert_close(got.grad.double(), exact.grad, rtol=2 * error, atol=6 * error)


def test_small_losses_keep_their_digits():
    loss, _, _ = cross_entropy.cross_entropy(logits := torch.tensor([[40.0, 24.0]]), torch.tensor([0]), overwrite=True)
    assert loss.item() == pytest.approx(1.125e-7, rel=0.1)
    assert logits[0].tolist() == pytest.approx([-1.125e-7, 1.125e-7], rel=0.1)


def test_logits_stay_as_they_are_without_gradients():
    logits = torch.randn(3, 7)
    before = logits.clone()
    cross_entropy.cross_entropy(logits, torch.tensor([0, 3, 6]))
    assert torch.equal(logits, before)


def test_no_targets_no_gradient():
    spec = Spec.from_layout("nope", vocab_size=9, d_model=16, num_layers=1, num_heads=2)
    model, tokens = LM(spec), torch.zeros(2, 3, dtype=torch.long)
    scores = score_tokens(model, tokens, torch.full_like(tokens, IGNORE))
    assert len(scores.loss_N) == 0
    scores.loss_N.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_another_module_in_the_place_of_the_head():
    spec = Spec.from_layout("nope", vocab_size=9, d_model=16, num_layers=1, num_heads=2)
    model = LM(dataclasses.replace(spec, tie_embeddings=False, logit_multiplier=0.5)).double()
    tokens, targets = torch.randint(9, (2, 2, 5), generator=torch.Generator().manual_seed(0))
    assert model.lm_head is not None
    found = []
    for head in (model.lm_head, nn.Sequential(model.lm_head)):
        model.lm_head = head  # pyright: ignore[reportAttributeAccessIssue]
        scores = score_tokens(model, tokens, targets)
        (scores.loss_N.mean() + scores.lse_N.square().mean()).backward()
        found.append([scores.loss_N, scores.lse_N, scores.correct_N, *(p.grad for p in model.parameters())])
        model.zero_grad(set_to_none=True)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
