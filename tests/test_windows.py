"""Losses under a short context against every window run alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from plait import scoring
from plait.data import IGNORE
from plait.model.lm import LM
from plait.spec import Spec
from plait.windows import short_losses, windows

LAYOUTS = ["full nope", "swa[window=5] gdn", "gla kda", "mamba2[head_dim=8] lightning", "heads(1:gdn, 1:nope) nope"]


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 20))
def test_windows_score_every_token_but_the_first_once(T, K, d):
    found = windows(T, K, d)
    scored = [token for _, first, end in found for token in range(first, end)]
    assert scored == list(range(K, T))
    for start, first, end in found:
        assert first - start == K and 0 < end - first <= d
    assert all(end - first == d for _, first, end in found[:-1])


def test_windows_of_the_papers():
    assert windows(4096) == []
    assert windows(4097) == [(0, 4096, 4097)]
    assert windows(6000) == [(0, 4096, 5120), (1024, 5120, 6000)]
    assert len(windows(32_768)) == 28


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_empty_windows_are_refused(sizes):
    with pytest.raises(ValueError, match=r"K = \d, d = \d; both must be at least 1"):
        windows(10, *sizes)


def alone(model: LM, tokens_T: torch.Tensor, targets_T: torch.Tensor, K: int, d: int) -> torch.Tensor:
    """One document of T tokens, each of which has the next as its target: a pass for every window, all logits."""
    T = len(tokens_T)
    losses_T = torch.full((T,), torch.nan, dtype=torch.float64)
    start = 0
    while start + K < T + 1:
        stop = min(start + K + d, T + 1) - 1  # the last token is a target alone
        logits = model(tokens_T[None, start:stop])[0]
        for position in range(start + K - 1, stop):
            if targets_T[position] != IGNORE:
                losses_T[position] = F.cross_entropy(logits[position - start], targets_T[position])
        start += d
    return losses_T


def text(rows: int, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 11, (rows, T + 1), generator=torch.Generator().manual_seed(T))
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def model_of(layout: str) -> LM:
    spec = Spec.from_layout(layout, vocab_size=11, d_model=16, num_layers=2, num_heads=2)
    return LM(dataclasses.replace(spec, init_std=0.4), dtype=torch.float64).eval()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("T", [6, 8, 9, 24, 27], ids="T={}".format)
@torch.no_grad()
def test_losses_are_those_of_windows_run_alone(layout, T, monkeypatch):
    """K = 8, d = 5: of T + 1 tokens none beyond K, one, two, whole windows, or a last one with one token."""
    model, (tokens, targets), K, d = model_of(layout), text(3, T), 8, 5
    targets[0, T - 2], targets[1, :] = IGNORE, targets[1].where(torch.arange(T) % 3 > 0, IGNORE)
    expected = torch.stack([alone(model, *row, K, d) for row in zip(tokens, targets, strict=True)])
    monkeypatch.setattr(scoring, "CHUNK", 7)
    for at_once in (1, 30, 10_000):
        found = short_losses(model, tokens, targets, K=K, d=d, at_once=at_once)
        torch.testing.assert_close(
            found, expected, rtol=1e-10, atol=1e-12, equal_nan=True, check_dtype=not found.isnan().all()
        )
    assert found.isnan()[:, : K - 1].all() and (T < K or not found.isnan()[2, K - 1 :].any())


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_windows_stay_within_documents(layout):
    """Of 6, 19, 8, 0 and 14 tokens."""
    model, (tokens, targets), K, d = model_of(layout), text(1, 47), 8, 5
    offsets = [0, 6, 25, 33, 33, 47]
    for end in offsets[1:]:
        targets[0, end - 1] = IGNORE
    pairs = zip(offsets, offsets[1:], strict=False)
    expected = torch.cat([alone(model, tokens[0, a:b], targets[0, a:b], K, d) for a, b in pairs])
    found = short_losses(model, tokens, targets, K=K, d=d, cu_seqlens=torch.tensor(offsets), at_once=40)
    torch.testing.assert_close(found[0], expected, rtol=1e-10, atol=1e-12, equal_nan=True)
    assert not expected.isnan().all()


def test_the_first_window_sees_what_the_full_pass_sees():
    model, (tokens, targets), K, d = model_of("nope gdn"), text(2, 30), 8, 5
    full = F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")
    short = short_losses(model, tokens, targets, K=K, d=d)
    assert not short.requires_grad
    torch.testing.assert_close(short[:, K - 1 : K + d - 1], full.detach()[:, K - 1 : K + d - 1])
    assert (short - full)[:, K + d - 1 :].abs().min() > 1e-9


def test_memory_is_bounded(monkeypatch):
    """No more tokens at once than asked for, no more logits than a chunk, no gradient."""
    model, (tokens, targets), K, d = model_of("nope gdn"), text(3, 60), 8, 5
    seen: dict[str, list[int]] = {"hidden": [], "logits": []}
    for name, numbers in seen.items():
        monkeypatch.setattr(model, name, count(getattr(model, name), numbers))
    monkeypatch.setattr(scoring, "CHUNK", 11)
    short_losses(model, tokens, targets, K=K, d=d, at_once=50)
    windows_of_a_row = len(windows(61, K, d))
    assert max(seen["hidden"]) == 4 * (K + d - 1) <= 50
    assert len(seen["hidden"]) == -(-3 * windows_of_a_row // 4)
    assert max(seen["logits"]) == 11 and sum(seen["logits"]) == 3 * (61 - K)


def count(function, numbers: list[int]):
    def counted(x, **kwargs):
        numbers.append(x.shape[0] * x.shape[1] if x.ndim == 2 and not x.is_floating_point() else len(x))
        y = function(x, **kwargs)
        assert not y.requires_grad
        return y

    return counted
