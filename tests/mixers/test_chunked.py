"""Recurrences in chunks: what every one of them keeps to (rules.py has the table), and the pair sums they share.

The reference is a rule's token-by-token specification, in values and in every gradient.
"""

from __future__ import annotations

import math

import pytest
import torch
from contract.poison import poisoned_empty
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mixers.rules import (
    BOUNDS,
    DELTA,
    G_INDEX,
    GLA,
    KDA,
    LINEAR,
    STRONG,
    Rule,
    by_sequence,
    dense,
    every_rule,
    gradients,
    make_decays,
    packed,
    relative_rms,
    to,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.bench.timing import saved_bytes
from plait.mixers import chunked, delta, linear
from plait.mixers import seq as seq_module
from plait.mixers.chunked import ChannelDecay, ScalarDecay, exp, mul_rows, product
from plait.mixers.seq import Chunks, Seq

# Values and gradients.


@every_rule
@settings(max_examples=12)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 70),
    S=st.integers(1, 2),
    G=st.integers(1, 3),
    K=st.sampled_from([3, 8]),
    V=st.sampled_from([1, 5, 8]),
    size=st.sampled_from([16, 32, 64]),
    decay=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    strong=st.sampled_from([0.0, 0.02, 0.3]),
    seed=st.integers(0, 9),
)
@example(B=1, T=1, S=1, G=1, K=3, V=1, size=64, decay=0.1, strong=0.0, seed=0)
@example(B=2, T=64, S=2, G=3, K=8, V=5, size=16, decay=0.1, strong=0.02, seed=0)
def test_chunks_equal_the_specification(rule: Rule, B, T, S, G, K, V, size, decay, strong, seed) -> None:
    inputs = rule.make_inputs(B, T, S, G, K, V, decay=decay, strong=strong, seed=seed)
    rule.assert_same(gradients(rule.chunk(dense(B, T), size), inputs), gradients(rule.naive, inputs))


@every_rule
@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any),
    strong=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 9),
)
@example(lengths=[0, 40, 0, 16, 33], strong=0.1, seed=0)
def test_packed_sequences_equal_each_alone(rule: Rule, lengths, strong, seed) -> None:
    inputs = rule.make_inputs(1, sum(lengths), 2, 2, 4, 3, strong=strong, seed=seed, sequences=len(lengths))
    rule.assert_same(gradients(rule.chunk(packed(lengths)), inputs), gradients(by_sequence(rule, lengths), inputs))


@every_rule
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_tokens_keep_the_state(rule: Rule, lengths) -> None:
    shape = (1 if lengths else 2, 0)
    seq = packed(lengths) if lengths else dense(*shape)
    inputs = rule.make_inputs(*shape, 1, 2, 4, 3, sequences=2)
    o, state = rule.chunk(seq)(*inputs)
    assert o.shape == (*inputs[0].shape[:3], 3)
    assert torch.equal(state, inputs[-1])
    assert torch.equal(rule.naive(*inputs)[0], o)


@every_rule
@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, 60), min_size=1, max_size=3).map(sorted))
def test_pieces_through_the_state_equal_the_whole(rule: Rule, cuts) -> None:
    *inputs, state = rule.make_inputs(2, 60, 1, 2, 4, 3)
    whole, last = rule.chunk(dense(2, 60))(*inputs, state)
    outputs = []
    for start, end in zip([0, *cuts], [*cuts, 60], strict=True):
        o, state = rule.chunk(dense(2, end - start))(*(x[:, start:end] for x in inputs), state)
        outputs.append(o)
    assert relative_rms(torch.cat(outputs, 1), whole) < 1e-10
    assert relative_rms(state, last) < 1e-10


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_steps_equal_the_specification(rule: Rule, dtype) -> None:
    inputs = to(rule.make_inputs(2, 1, 2, 3, 8, 5, strong=0.2), dtype)
    naive = gradients(rule.naive, to(inputs, torch.float64))
    rule.assert_same(gradients(rule.step, inputs), naive, dtype)
    o, state = rule.step(*inputs[:-1])
    assert (o.dtype, state.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_rms(state, rule.naive(*to(inputs, torch.float64)[:-1])[1]) < BOUNDS[dtype][0]


@every_rule
def test_no_state_is_a_state_of_zeros(rule: Rule) -> None:
    *inputs, state = rule.make_inputs(2, 40, 1, 1, 4, 4)
    chunk = rule.chunk(dense(2, 40))
    for ours, theirs in zip(chunk(*inputs, None), chunk(*inputs, torch.zeros_like(state)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("one", "each"), [(DELTA, KDA), (LINEAR, GLA)], ids=["delta", "linear"])
def test_equal_decays_on_all_channels_are_one_decay(one: Rule, each: Rule) -> None:
    inputs = one.make_inputs(2, 70, 2, 2, 4, 3, strong=0.05)

    def expand(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        g_BTSK = inputs[G_INDEX][..., None].expand(-1, -1, -1, 4)
        return each.chunk(dense(2, 70))(*inputs[:G_INDEX], g_BTSK, *inputs[G_INDEX + 1 :])

    one.assert_same(gradients(expand, inputs), gradients(one.chunk(dense(2, 70)), inputs))


@every_rule
def test_a_gradient_does_not_depend_on_which_others_are_taken(rule: Rule) -> None:
    # Lightning's decays are constants, and a first piece has a constant state.
    inputs = rule.make_inputs(1, 40, 2, 2, 4, 3, strong=0.05)
    chunk = rule.chunk(dense(1, 40))
    whole = gradients(chunk, inputs)
    places = range(len(inputs))
    for of in [*((i,) for i in places), *(tuple(i for i in places if i != left_out) for left_out in places)]:
        some = gradients(chunk, inputs, of=of)
        for ours, theirs in zip(some, [*whole[:2], *(whole[2 + i] for i in of)], strict=True):
            assert torch.equal(ours, theirs)


# What may not be seen, read or written.


@every_rule
def test_outputs_depend_on_no_later_token(rule: Rule) -> None:
    *inputs, state = (x.requires_grad_() for x in rule.make_inputs(1, 40, 1, 2, 4, 3))
    o_BTHV, _ = rule.chunk(dense(1, 40))(*inputs, state)
    for t in (0, 7, 15, 16, 30):
        grads = torch.autograd.grad(o_BTHV[:, t].sum(), inputs, retain_graph=True)
        for name, grad in zip(rule.names, grads, strict=False):
            assert not grad[:, t + 1 :].any(), f"o_{t} depends on later {name}"
            assert name == "q" or t == 0 or grad[:, :t].any()


@every_rule
def test_packed_documents_do_not_see_each_other(rule: Rule) -> None:
    lengths = [20, 33, 7]
    inputs = [x.requires_grad_() for x in rule.make_inputs(1, 60, 1, 1, 4, 3, sequences=3)]
    o_BTHV, _ = rule.chunk(packed(lengths))(*inputs)
    *grads, dstate = torch.autograd.grad(o_BTHV[:, 20:53].sum(), inputs)
    for grad in grads:
        assert not grad[:, :20].any() and not grad[:, 53:].any() and grad[:, 20:53].any()
    assert not dstate[0].any() and not dstate[2].any() and dstate[1].any()


@every_rule
def test_nothing_uninitialized_is_read(rule: Rule) -> None:
    lengths = [20, 0, 33]
    inputs = rule.make_inputs(1, 53, 2, 1, 4, 3, strong=0.05, sequences=3)
    clean = gradients(rule.chunk(packed(lengths)), inputs)
    with poisoned_empty():
        poisoned = gradients(rule.chunk(packed(lengths)), inputs)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


@every_rule
def test_inputs_are_left_alone(rule: Rule) -> None:
    # One head and one row: packing is then a view of the input.
    inputs = rule.make_inputs(1, 32, 1, 1, 4, 4)
    copies = [x.clone() for x in inputs]
    leaves = [x.requires_grad_() for x in inputs]
    outputs = rule.chunk(dense(1, 32))(*leaves)
    weights = [torch.ones_like(y) for y in outputs]
    torch.autograd.backward(outputs, weights)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
    assert all((weight == 1).all() for weight in weights)


# Precision.


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("decay", "strong"), [(0.02, 0.0), (0.02, 0.1), (2.0, 0.0), (50.0, 0.0)])
def test_precision(rule: Rule, dtype, decay, strong) -> None:
    inputs = to(rule.make_inputs(1, 150, 2, 2, 32, 32, decay=decay, strong=strong), dtype)
    ours = gradients(rule.chunk(dense(1, 150), None), inputs)
    assert ours[0].dtype == dtype and ours[1].dtype == torch.float32
    rule.assert_same(ours, gradients(rule.naive, to(inputs, torch.float64)), dtype)


@every_rule
def test_a_strong_decay_leaves_the_digits_of_its_neighbours(rule: Rule) -> None:
    inputs = rule.make_inputs(1, 128, 1, 1, 16, 16, decay=0.01)
    g = inputs[G_INDEX]
    g[:, 5::16] = STRONG
    if rule.channels:
        g[:, 5::16, :, ::2] = -0.01
        g[:, 9::16, :, ::3] = STRONG
        g[:, :, :, 7] = 0.0
    inputs = to(inputs, torch.float32)
    ours = gradients(rule.chunk(dense(1, 128), 64), inputs)
    theirs = gradients(rule.naive, to(inputs, torch.float64))
    rule.assert_same(ours, theirs, torch.float32)
    if rule.channels:  # channels that forget nothing, beside channels that forget all, have all digits of their own
        for i in (1, 2, 3, 2 + G_INDEX):  # the state, dq, dk, dg
            a, b = (results[i].select(2 if i == 1 else 3, 7) for results in (ours, theirs))
            assert relative_rms(a, b) <= BOUNDS[torch.float32][i > 1]


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_strong_decays(rule: Rule, dtype) -> None:
    # Hardly anything passes a strong decay, and its gradient is as small. It comes out of a sum over the chunk: to the
    # precision of what the largest gradients have, which in fp64 still is that of its own digits.
    inputs = rule.make_inputs(2, 100, 2, 1, 16, 16, decay=0.05)
    g, strong = inputs[G_INDEX], (-1.0, -3.0, -6.0, -9.0, STRONG)
    kind = torch.randint(20, g.shape, generator=torch.Generator().manual_seed(4))
    for i, value in enumerate(strong):
        g[kind == i] = value
    inputs = to(inputs, dtype)
    ours = gradients(rule.chunk(dense(2, 100), 64), inputs)[2 + G_INDEX]
    theirs = gradients(rule.naive, to(inputs, torch.float64))[2 + G_INDEX]
    for value in strong:
        a, b = ours[g == value].double(), theirs[g == value]
        assert (a - b).square().mean() <= (1e-2 * BOUNDS[dtype][1]) ** 2 * theirs.square().mean(), value
        assert dtype != torch.float64 or value == STRONG or relative_rms(a, b) <= 1e-10, value
    assert not theirs[g == STRONG].any()


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [1.0, 1e3, 1e30])
def test_long_rows_with_strong_decay_are_finite(rule: Rule, dtype, decay) -> None:
    inputs = to(rule.make_inputs(1, 16384, 1, 1, 8, 8, decay=decay), dtype)
    results = gradients(rule.chunk(dense(1, 16384), None), inputs)
    assert all(x.isfinite().all() for x in results)


@every_rule
def test_autocast_changes_nothing(rule: Rule) -> None:
    inputs = to(rule.make_inputs(1, 40, 1, 1, 8, 8), torch.float32)
    chunk, step = rule.chunk(dense(1, 40)), [x[:, :1] for x in inputs[:-1]]
    plain, naive, one = gradients(chunk, inputs), rule.naive(*inputs), rule.step(*step)
    with torch.autocast("cpu", torch.bfloat16):
        cast = [*gradients(chunk, inputs), *rule.naive(*inputs), *rule.step(*step)]
    assert all(torch.equal(a, b) for a, b in zip([*plain, *naive, *one], cast, strict=True))


@every_rule
@pytest.mark.parametrize("size", [0, 8, 48, -64])
def test_odd_chunk_sizes_are_refused(rule: Rule, size) -> None:
    with pytest.raises(ValueError, match=f"chunk_size: {size}"):
        rule.chunk(dense(1, 4), size)(*rule.make_inputs(1, 4, 1, 1, 4, 4))


# Memory and time.


ATEN = torch.ops.aten
UNUSED = {ATEN.linalg_solve_triangular.default, ATEN.empty_like.default, ATEN.new_empty.default}


class Watch(TorchDispatchMode):
    """Sees every tensor made: the largest one's elements, and how many numbers are subnormal."""

    def __init__(self):
        super().__init__()
        self.largest = self.subnormal = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, Tensor) and x.is_floating_point():
                self.largest = max(self.largest, x.numel())
                # What the solver makes is cleared of them before it is used; what is empty has no numbers yet.
                self.subnormal += 0 if func in UNUSED or func.is_view else count_subnormal(x)
        return out


def count_subnormal(x: Tensor) -> int:
    return int(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).sum())


C, K, V, G = 64, 32, 16, 2


@every_rule
def test_memory_is_linear_in_length(rule: Rule) -> None:
    """What is kept for the backward pass: no more than the states, and per token what the docstrings name."""

    def kept(T: int) -> int:
        inputs = [x.requires_grad_() for x in to(rule.make_inputs(1, T, 1, G, K, V), torch.float32)]
        node = rule.chunk(dense(1, T), C)(*inputs)[0].grad_fn
        assert not {type(x) for x in vars(node).values()} - {Chunks, float}  # nothing is kept past the hooks
        return saved_bytes(lambda: rule.chunk(dense(1, T), C)(*inputs))

    def bound(T: int) -> int:
        M, A = (G if rule.delta else 1) * rule.channels * C, rule.delta * rule.channels * C
        T_and_U = (C + V) if rule.delta else 0
        return 4 * T * (K * V // C + M + A + T_and_U) + 4 * K * V  # and the state before the first chunk

    assert kept(512) <= 1.02 * bound(512)
    assert kept(1024) <= 2 * kept(512)


@every_rule
def test_no_tensor_has_pairs_of_tokens_by_channels(rule: Rule) -> None:
    T, queries = 256, G if rule.delta else 1
    inputs = to(rule.make_inputs(1, T, 1, G, K, V), torch.float32)
    with Watch() as watch:
        gradients(rule.chunk(dense(1, T), C), inputs)
    assert watch.largest <= T * (queries + rule.delta) * max(C, K)


@every_rule
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("decay", [0.3, 8.0, 20.0, 60.0])
def test_no_subnormal_number_is_made(rule: Rule, size, decay) -> None:
    # Decays of 1e-4 to 1e-44, or slow ones: fp32 has subnormal numbers there, or where some are multiplied.
    inputs = rule.make_inputs(1, 128, 1, 1, 16, 16, decay=decay)
    if decay < 1:
        g, rng = inputs[G_INDEX], torch.Generator().manual_seed(5)
        kind, power = (torch.rand(g.shape, generator=rng, dtype=g.dtype) for _ in range(2))
        g[kind < 0.3] = -math.log(10) * (4 + 40 * power[kind < 0.3])
    with Watch() as watch:
        gradients(rule.chunk(dense(1, 128), size), to(inputs, torch.float32))
    assert watch.largest and not watch.subnormal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [False, True])
def test_factors_are_normal_numbers_or_zero(channels, dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    # From single decays below the smallest number there is to slow ones whose sum over a chunk passes it.
    for lowest in (1.3 * math.log(torch.finfo(dtype).tiny), -60.0, -8.0, -2.0):
        g = lowest * torch.rand((16, 64, *([6] if channels else [])), generator=rng, dtype=torch.float64)
        decay = ChannelDecay(exp(g.to(dtype)), 0.5) if channels else ScalarDecay(g, dtype, 0.5)
        for x in (decay.enter_NCJ, decay.leave_NCJ, decay.factor_NCK if channels else decay.pair_NCC):
            assert x.dtype == dtype and (x > 0).any()
            assert not count_subnormal(x)
            assert not count_subnormal(x.flatten(1)[:, :, None] * x.flatten(1)[:, None, ::97])  # nor is a product


# Pair sums.


def segments(g_NCK: Tensor) -> Tensor:
    """b_t - b_s for s <= t, each summed by itself: [N, t, s, K]. (A difference of sums would lose digits.)"""
    C = g_NCK.shape[1]
    later_CC1 = torch.ones(C, C, dtype=torch.bool).tril(-1)[..., None]  # a token that moves the pair with s before it
    return torch.where(later_CC1, g_NCK[:, :, None], 0).cumsum(1)


def formula(k_NCK: Tensor, x_NRK: Tensor, steps_NCCK: Tensor, scale: float) -> Tensor:
    """The plain sum over channels, of every query against every key: [N, R, C]."""
    x_NXCK = x_NRK.unflatten(1, (-1, k_NCK.shape[1]))
    return (scale * torch.einsum("nxtc,nsc,ntsc->nxts", x_NXCK, k_NCK, steps_NCCK.exp())).tril().flatten(1, 2)


def make_pairs(C: int, K: int, channels: bool, strong: float, dtype: torch.dtype = torch.float64):
    """k, rows of three queries and of the keys, g [N, C, K], scale, and the decay under test."""
    rng = torch.Generator().manual_seed(C)
    k, q = (torch.randn(2, n * C, K, generator=rng, dtype=torch.float64).to(dtype) for n in (1, 3))
    g = make_decays((2, C, K if channels else 1), 0.2, strong, rng).to(dtype)
    decay = ChannelDecay(exp(g), 0.7) if channels else ScalarDecay(g[..., 0].double(), dtype, 0.7)
    return k, [q, k], g.expand(-1, -1, K).double(), decay


@pytest.mark.parametrize("channels, shared", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("strong", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("C", [16, 32, 64, 128])
def test_pair_sums_and_their_gradients(C, strong, channels, shared, monkeypatch) -> None:
    if shared:  # products, as on a GPU
        monkeypatch.setattr(chunked, "_together", lambda x, h: max(1, chunked.MIN_BLOCK // (2 * h)))
    k, rows, g, decay = make_pairs(C, 5, channels, strong)
    steps = segments(g)
    assert relative_rms(decay.enter_NCJ.expand_as(g), g.cumsum(1).exp()) < 1e-10
    assert relative_rms(decay.leave_NCJ.expand_as(g), steps[:, -1].exp()) < 1e-10

    # b is a shift of 0 that only its gradient sees.
    leaves = [x.clone().requires_grad_() for x in (k, *rows, torch.zeros_like(g))]
    b = leaves[-1]
    steps = steps + b[:, :, None] - b[:, None]
    theirs = [formula(leaves[0], x, steps, 0.7) for x in leaves[1:-1]]
    ours = decay.pairs(k, *rows)
    for a, p in zip(ours, theirs, strict=True):
        assert a.shape == p.shape and relative_rms(a, p) < 1e-10
        assert not a.unflatten(1, (-1, C)).triu(1).any()

    # What comes from above the diagonal, where the sums are 0, must not count; all is added to what there was.
    rng = torch.Generator().manual_seed(7)
    grads = [torch.randn(p.shape, generator=rng, dtype=p.dtype) for p in ours]
    grads[1].diagonal(dim1=1, dim2=2).zero_()
    dk, dq, dkeys, db = torch.autograd.grad(theirs, leaves, grads)
    wanted = dq, dk + dkeys, decay.fold(db)
    before = [torch.randn(x.shape, generator=rng, dtype=x.dtype) for x in wanted]
    found = decay.pairs_back(k, rows[0], ours, [x.clone() for x in grads], tuple(x.clone() for x in before))
    for a, w, was in zip(found, wanted, before, strict=True):
        assert a.shape == w.shape and relative_rms(a - was, w) < 1e-10


@pytest.mark.parametrize("channels", [False, True])
def test_pair_sums_keep_the_digits_of_each_pair(channels) -> None:
    # Not only in the mean: every pair to the precision of fp32, beside strong decays of other tokens and channels.
    k, rows, g, decay = make_pairs(64, 5, channels, 0.05, torch.float32)
    for a, x in zip(decay.pairs(k, *rows), rows, strict=True):
        p = formula(k.double(), x.double(), segments(g), 0.7)
        size = formula(k.double().abs(), x.double().abs(), segments(g), 0.7)
        assert ((a - p).abs() <= 4e-6 * size + 1e-12).all()


def test_what_bf16_pairs_give_to_b_cancels(monkeypatch) -> None:
    # A pair moves b_t up and b_s down, whatever its factors were rounded to. A rest would reach all tokens before.
    monkeypatch.setattr(chunked, "mm", lambda a, b: torch.bmm(a.float(), b.float()))  # as CUDA has it
    k, (q, _), _, decay = make_pairs(64, 32, True, 0.05, torch.float32)
    nothing = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(k)
    k, q = k.bfloat16(), q.bfloat16()
    pairs = decay.pairs(k, q, k)
    rng = torch.Generator().manual_seed(7)
    dpairs = [torch.randn(p.shape, generator=rng) for p in pairs]
    dpairs[1].diagonal(dim1=1, dim2=2).zero_()
    _, _, db = decay.pairs_back(k, q, pairs, dpairs, nothing)
    assert (db.sum(1).abs() < 1e-5 * db.abs().sum(1)).all()


def test_a_product_rounds_once() -> None:
    rng = torch.Generator().manual_seed(0)
    a_NCK, b_NC1 = torch.randn(4, 64, 16, generator=rng).bfloat16(), torch.rand(4, 64, 1, generator=rng)
    for x, y in ((a_NCK, b_NC1), (b_NC1, a_NCK)):
        once = (x.double() * y.double()).float().bfloat16()
        assert product(x, y, torch.bfloat16).dtype == torch.bfloat16
        assert torch.equal(product(x, y, torch.bfloat16), once)
    assert not torch.equal(product(a_NCK, b_NC1, torch.bfloat16), a_NCK * b_NC1.bfloat16())
    rows = mul_rows(torch.cat((a_NCK, -a_NCK), 1), b_NC1)
    assert torch.equal(rows, torch.cat((once, -once), 1))
    for x, y, dtype in ((b_NC1, b_NC1, torch.float32), (a_NCK, b_NC1, torch.float32), (a_NCK, b_NC1, torch.float64)):
        assert torch.equal(product(x, y, dtype), (x.float() * y.float()).to(dtype))


# Compiled, and on a GPU.


@pytest.mark.slow
@every_rule
@pytest.mark.parametrize("ragged", [False, True])
def test_compiled(rule: Rule, ragged) -> None:
    B, seq = (1, packed([70, 0, 50])) if ragged else (2, dense(2, 120))
    inputs = rule.make_inputs(B, 120, 2, 2, 8, 8, strong=0.05, sequences=3 if ragged else 2)
    chunk = rule.chunk(seq)
    torch.compiler.reset()
    compiled = gradients(torch.compile(chunk, fullgraph=True, dynamic=False), inputs)
    rule.assert_same(compiled, gradients(chunk, inputs))


@pytest.mark.parametrize("of", [exp, lambda x, out=None: torch.exp(x, out=out)])
def test_a_function_of_packed_rows_can_be_traced(of) -> None:
    x, chunks = -torch.rand(2, 40, 3, 5), dense(2, 40).chunks(16)
    torch.compiler.reset()
    traced = torch.compile(lambda x: chunks.pack(x, of), backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(traced, chunks.pack(x, of))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_rule
def test_compiled_cuda(rule: Rule) -> None:
    inputs = [x.cuda() for x in to(rule.make_inputs(2, 300, 2, 2, 64, 64), torch.bfloat16)]
    chunk = rule.chunk(Seq.build((2, 300), torch.device("cuda")))
    torch.compiler.reset()
    compiled = gradients(torch.compile(chunk, fullgraph=True, dynamic=False), inputs)
    rule.assert_same(compiled, gradients(rule.naive, to(inputs, torch.float64)), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("strong", [0.0, 0.05])
def test_cuda(rule: Rule, dtype, size, strong) -> None:
    cuda = torch.device("cuda")
    inputs = [x.to(cuda) for x in to(rule.make_inputs(2, 300, 2, 2, 64, 128, strong=strong), dtype)]
    ours = gradients(rule.chunk(Seq.build((2, 300), cuda), size), inputs)
    rule.assert_same(ours, gradients(rule.naive, to(inputs, torch.float64)), dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_rule
def test_cuda_packed(rule: Rule) -> None:
    lengths = [70, 0, 133]
    inputs = rule.make_inputs(1, 203, 2, 2, 16, 8, strong=0.05, sequences=3)
    ours = gradients(rule.chunk(packed(lengths, torch.device("cuda"))), [x.cuda() for x in inputs])
    rule.assert_same([x.cpu() for x in ours], gradients(by_sequence(rule, lengths), inputs))


@pytest.mark.parametrize(("T", "lengths"), [(50, None), (1, None), (150, [70, 0, 80])])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("heads_first", [False, True])
def test_words_are_packed_as_numbers_are(T, lengths, dtype, heads_first, monkeypatch) -> None:
    """As on a GPU: several numbers at a time, where they lie so."""
    seq, B = (dense(3, T), 3) if lengths is None else (packed(lengths), 1)
    for size in (64, 40, 8, 5):
        x = torch.randn(B, 4, T, 3 * size).transpose(1, 2) if heads_first else torch.randn(B, T, 4, 3 * size)
        x = x.to(dtype)[..., size : 2 * size]
        found = []
        for words in (lambda x: None, seq_module._as_words):
            monkeypatch.setattr(seq_module, "_words", words)
            chunks = seq.chunks(16).pack(x)
            found.append((chunks, seq.chunks(16).unpack(chunks)))
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[1][1], x)


def test_words_of_memory() -> None:
    x = torch.randn(2, 3, 4, 48)
    words = seq_module._as_words(x[..., 4:20])
    assert words is not None and words.shape == (2, 3, 4, 4) and words.data_ptr() == x.data_ptr() + 16
    for other in (x[..., 1:17], x[..., :6], x[..., ::2], x.double()[..., :3], x[..., :4], x[0], torch._neg_view(x)):
        assert seq_module._as_words(other) is None


@pytest.mark.parametrize("rows", [[3] * 4, [3, 2, 2, 1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_what_they_are_traced_as(rows, dtype) -> None:
    """Shapes, strides and what is written to."""
    N, E, K, V = sum(rows), 3, 5, 4
    first, w, p, keep = (torch.randn(n, *shape) for n, shape in ((E, (K, V)), (N, (K, V)), (N, (K, K)), (N, (K, 1))))
    for op, own in ((linear.fade, keep), (linear.fade_back, keep), (delta.scan, p), (delta.scan_back, p)):
        torch.library.opcheck(op, (first, own, w, rows, dtype))
