"""Token scores against plain cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from plait import scoring
from plait.data import IGNORE
from plait.model.lm import LM
from plait.scoring import CrossEntropy, score_tokens
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
    """Logits and targets, in slices of three rows."""
    monkeypatch.setitem(scoring.SLICE, "cpu", 15)
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(8, 5, dtype=torch.float64, generator=generator)
    return logits, torch.randint(5, (8,), generator=generator)


def test_gradients_of_losses_and_log_sum_exps(drawn):
    logits, target = drawn
    assert torch.autograd.gradcheck(lambda x: CrossEntropy.apply(x, target)[::2], logits.requires_grad_())
    for part in (0, 2):
        assert torch.autograd.gradcheck(lambda x, part=part: CrossEntropy.apply(x, target)[part], logits)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_what_is_kept_is_one_tensor_of_the_logits_dtype(drawn, dtype, error):
    logits, target = drawn[0].to(dtype).requires_grad_(), drawn[1]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss, correct, lse = CrossEntropy.apply(logits, target)
    assert [x.dtype for x in kept if x.is_floating_point()] == [dtype]
    assert loss.dtype == lse.dtype == torch.float32
    exact = logits.detach().double().requires_grad_()
    want = F.cross_entropy(exact, target, reduction="none")
    torch.testing.assert_close(loss, want.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, exact.logsumexp(-1).float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(correct, exact.argmax(-1) == target)
    weight = torch.linspace(0.1, 2, 8)
    (weight * loss + 0.01 * lse.square()).sum().backward()
    (weight * want + 0.01 * exact.logsumexp(-1).square()).sum().backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=2 * error, atol=error)


def test_small_losses_keep_their_digits():
    logits = torch.tensor([[40.0, 24.0]], requires_grad=True)
    loss, _, _ = CrossEntropy.apply(logits, torch.tensor([0]))
    assert loss.item() == pytest.approx(1.125e-7, rel=0.1)
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist()[0] == pytest.approx([-1.125e-7, 1.125e-7], rel=0.1)


def test_no_targets_no_gradient():
    spec = Spec.from_layout("nope", vocab_size=9, d_model=16, num_layers=1, num_heads=2)
    model, tokens = LM(spec), torch.zeros(2, 3, dtype=torch.long)
    scores = score_tokens(model, tokens, torch.full_like(tokens, IGNORE))
    assert len(scores.loss_N) == 0
    scores.loss_N.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
