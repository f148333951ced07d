"""Linear attention with a decay alone. What it shares with every recurrence in chunks is in test_chunked.py."""

from __future__ import annotations

import pytest
import torch
from mixers.rules import GLA, LINEAR, Rule, dense, relative_rms
from torch import Tensor

from plait.mixers.linear import fade, fade_back, linear_chunk, linear_naive, linear_step

both = pytest.mark.parametrize("rule", [LINEAR, GLA], ids=lambda rule: rule.name)


@both
def test_the_specification_is_attention_with_decayed_scores(rule: Rule) -> None:
    # o_t = scale * sum over s <= t of (sum_c q_tc k_sc exp(g_s+1,c + ... + g_t,c)) v_s, and the first state's part.
    q, k, v, g, state = rule.make_inputs(2, 20, 2, 1, 4, 3, strong=0.1)
    g_BTHK = g if rule.channels else g[..., None].expand_as(k)
    later_TT = torch.ones(20, 20, dtype=torch.bool).tril(-1)[:, :, None, None]
    steps_BTTHK = torch.where(later_TT, g_BTHK[:, :, None], 0).cumsum(1)
    scores_BHTT = torch.einsum("bthc,bshc,btshc->bhts", q, k, steps_BTTHK.exp()).tril()
    o = torch.einsum("bhts,bshv->bthv", scores_BHTT, v)
    o = 0.3 * (o + torch.einsum("bthc,bhcv->bthv", q * g_BTHK.cumsum(1).exp(), state))
    last = torch.einsum("bshc,bshv->bhcv", k * steps_BTTHK[:, -1].exp(), v)
    last = last + g_BTHK.sum(1).exp()[..., None] * state
    ours = linear_naive(q, k, v, g, state, scale=0.3)
    assert relative_rms(ours[0], o) < 1e-10
    assert relative_rms(ours[1], last) < 1e-10


@both
@pytest.mark.parametrize("scale", [1.0, 16**-0.5, 3.0])
def test_the_scale_multiplies_outputs_only(rule: Rule, scale) -> None:
    inputs = rule.make_inputs(1, 40, 2, 1, 4, 3, strong=0.05)
    first = [*(x[:, :1] for x in inputs[:-1]), inputs[-1]]
    for outputs, (o, state) in (
        (linear_chunk(*inputs, dense(1, 40), scale=scale, chunk_size=16), linear_naive(*inputs, scale=1.0)),
        (linear_step(*first, scale=scale), linear_naive(*first, scale=1.0)),
    ):
        assert relative_rms(outputs[0], scale * o) < 1e-10
        assert relative_rms(outputs[1], state) < 1e-10


@both
@pytest.mark.parametrize("frozen", [False, True])
def test_fixed_decays(rule: Rule, frozen) -> None:
    # Lightning's: one for each head (here also one a channel), the same at all tokens and without storage for them.
    *inputs, state = rule.make_inputs(2, 70, 3, 1, 4, 3)
    slopes = -torch.rand(inputs[3].shape[2:], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slopes.view(-1)[0] = 0.0

    def run(function) -> list[Tensor]:
        q, k, v, s = (x.clone().requires_grad_() for x in (*inputs[:3], state))
        g = slopes.clone().requires_grad_(not frozen)
        outputs = function(q, k, v, g.expand(2, 70, *g.shape), s)
        leaves = [q, k, v, s, *([] if frozen else [g])]
        return [*outputs, *torch.autograd.grad(sum((y * y).sum() for y in outputs), leaves)]

    ours = run(rule.chunk(dense(2, 70), 32))
    for a, b in zip(ours, run(rule.naive), strict=True):
        assert relative_rms(a, b) < 1e-10


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(
    "rows",
    [[3], [3] * 5, [2] * 257, [4] * 7 + [3] * 2 + [1] * 3, [5, 4, 3, 2, 1]],
    ids=lambda rows: f"{len(rows)} steps, {rows[0]} to {rows[-1]} states",
)
def test_scan(rows, channels) -> None:
    """Of the first states only, fewer and fewer of them, and its gradient."""
    rng = torch.Generator().manual_seed(0)
    N, E = sum(rows), rows[0] + 1  # one has no chunk at all
    first_EKV, w_NKV, do_NKV, dlast_EKV = (torch.randn(n, 3, 2, generator=rng).double() for n in (E, N, N, E))
    keep_NJ1 = torch.rand(N, 3 if channels else 1, 1, generator=rng).double() ** 0.1
    leaves = [first_EKV.requires_grad_(), w_NKV.requires_grad_()]
    state, starts = first_EKV, []
    for keep, w in zip(keep_NJ1.split(rows), w_NKV.split(rows), strict=True):
        starts.append(state[: len(w)])
        state = torch.cat((keep * state[: len(w)] + w, state[len(w) :]))
    theirs = torch.cat(starts), state
    with torch.no_grad():
        for dtype in (torch.float64, torch.float32):  # the narrower one as bf16 on a GPU
            ours = fade(first_EKV, keep_NJ1, w_NKV, rows, dtype)
            back = fade_back(dlast_EKV, keep_NJ1, do_NKV, rows, dtype)
            torch.testing.assert_close(ours, (theirs[0].to(dtype), theirs[1]))
            wanted = torch.autograd.grad(theirs, leaves, (do_NKV, dlast_EKV), retain_graph=True)
            torch.testing.assert_close(back, (wanted[0], wanted[1].to(dtype)))
