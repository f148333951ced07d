"""The attention computation against its specification, in every way it may cut the work, and what memory it takes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from contract.configs import WINDOWS
from contract.tools import dense, error, examples, make_mixer
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from plait.config import Gdn, Softmax
from plait.mixers import attention
from plait.mixers.attention import attend, attend_last, attend_masked, attend_naive, attend_step
from plait.mixers.seq import Seq


class Largest(TorchDispatchMode):
    """Entries of the largest tensor that any operation made while this was on."""

    def __init__(self):
        super().__init__()
        self.numel, self.op = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                numel = x.untyped_storage().nbytes() // x.element_size()
                if numel > self.numel:
                    self.numel, self.op = numel, str(func)
        return out


sizes = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.sampled_from((1, 3, 8)))  # B, G, R, E
budgets = st.sampled_from((1, 40, 700, 1 << 24))


def tensors(B: int, T: int, P: int, G: int, R: int, E: int, sink: bool):
    """q of T tokens; k and v of P tokens before and of those."""
    generator = torch.Generator().manual_seed(T * 31 + P)
    shapes = ((B, T, G * R, E), (B, P + T, G, E), (B, P + T, G, E))
    make: list = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    make.append(2 * torch.randn(G * R, dtype=torch.float64, generator=generator) if sink else None)
    return [x if x is None else x.requires_grad_() for x in make]


@examples(150)
@given(
    size=sizes,
    T=st.integers(1, 40) | st.sampled_from((63, 64, 65, 128, 130)),
    window=st.none() | st.sampled_from(WINDOWS),
    sink=st.booleans(),
    budget=budgets,
    block=st.sampled_from((1, 4, 64)),
)
def test_attend_is_the_specification(size, T: int, window: int | None, sink: bool, budget: int, block: int):
    B, G, R, E = size
    q, k, v, s = tensors(B, T, 0, G, R, E, sink)
    place = torch.arange(T)[None]
    want = attend_naive(q, k, v, place, place, window, s)
    with mock.patch.object(attention, "MASK_ELEMENTS", budget), mock.patch.object(attention, "MIN_BLOCK", block):
        got = attend(q, k, v, None, window_size=window, sink=s)
    assert error(got, want) <= 1e-10
    inputs = [x for x in (q, k, v, s) if x is not None]
    weight = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(0))
    grads = [torch.autograd.grad((o * weight).sum(), inputs) for o in (got, want)]
    floor = max(g.norm() for g in grads[1])
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() <= 1e-10 * max(b.norm(), 1e-3 * floor)


@examples(150)
@given(
    size=sizes,
    T=st.integers(1, 70),
    past=st.integers(0, 70),
    window=st.sampled_from(WINDOWS),
    sink=st.booleans(),
    budget=budgets,
    block=st.sampled_from((1, 4, 64)),
)
@torch.no_grad()
def test_attend_after_a_past(size, T: int, past: int, window: int, sink: bool, budget: int, block: int):
    """The tokens before in order, some of them not there yet (positions below 0), rows at different lengths."""
    B, G, R, E = size
    q, k, v, s = tensors(B, T, past, G, R, E, sink)
    first = torch.arange(B)[:, None] * 3  # tokens each row already has
    q_position = first + torch.arange(T)
    k_position = first - past + torch.arange(past + T)
    want = attend_naive(q, k, v, q_position, k_position, window, s)
    before = (k[:, :past], v[:, :past], k_position[:, :past])
    with mock.patch.object(attention, "MASK_ELEMENTS", budget), mock.patch.object(attention, "MIN_BLOCK", block):
        got = attend(q, k[:, past:], v[:, past:], None, window_size=window, sink=s, past=before, position_BT=q_position)
        masked = attend_masked(q, k, v, q_position, k_position, window, s)
    assert error(masked, want) <= 1e-10
    assert error(got, want) <= 1e-10


@pytest.mark.parametrize("window", [1, 2, 5, 64, 65, 200])
def test_window_counts_the_token_itself(window: int):
    """A value can be seen by exactly `window` tokens, its own first."""
    config = Softmax(num_heads=1, num_kv_heads=1, head_dim=4, window_size=window)
    mixer, T = make_mixer(config, 4), 150
    x = torch.randn(1, T, 4, dtype=torch.float64, requires_grad=True)
    y, _ = mixer(x, None, dense(1, T))
    for t in (0, window - 1, window, 149):
        if t < T:
            (grad,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
            assert (grad[0].abs().sum(-1) > 0).nonzero()[:, 0].tolist() == list(range(max(0, t - window + 1), t + 1))


def test_window_as_long_as_the_input_is_full():
    x = torch.randn(1, 50, 6, dtype=torch.float64)
    full = make_mixer(Softmax(num_heads=2, num_kv_heads=1, head_dim=4, rope_theta=1e4, sink=True), 6)
    for window in (50, 51, 1000):
        fields = {"window_size": window, "rope_theta": 1e4, "sink": True}
        wide = make_mixer(Softmax(num_heads=2, num_kv_heads=1, head_dim=4, **fields), 6)
        assert torch.equal(wide(x, None, dense(1, 50))[0], full(x, None, dense(1, 50))[0])


def test_sink_of_the_formula():
    """Two keys and a sink by hand: the weights of one query sum to less than one (000, B.1)."""
    q, k = torch.tensor([2.0, 1.0], dtype=torch.float64), torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    v, s = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64), 0.7
    e = torch.exp(k @ q / 2**0.5)
    want = (e @ v) / (e.sum() + torch.tensor(s).double().exp())
    q_1T = torch.stack((q, q)).view(1, 2, 1, 2)
    got = attend(q_1T, k.view(1, 2, 1, 2), v.view(1, 2, 1, 2), None, sink=torch.tensor([s], dtype=torch.float64))
    torch.testing.assert_close(got[0, 1, 0], want)


LINEAR = {
    "full": Softmax(num_heads=4, num_kv_heads=2, head_dim=16, rope_theta=1e4),
    "full, sink": Softmax(num_heads=4, num_kv_heads=2, head_dim=16, sink=True),
    "window": Softmax(num_heads=4, num_kv_heads=2, head_dim=16, window_size=256),
    "window, sink": Softmax(num_heads=4, num_kv_heads=2, head_dim=16, window_size=256, sink=True, rope_theta=1e4),
    "gdn": Gdn(num_heads=2, num_kv_heads=2, num_v_heads=2, head_dim=16),
}


@pytest.mark.parametrize("form", ["dense", "packed"])
@pytest.mark.parametrize("name", LINEAR)
def test_memory_is_linear(name: str, form: str):
    """No tensor of T x T, forward or backward: at T = 8192 the largest is of the size of a few activations."""
    T, d_model = 8192, 32
    mixer = make_mixer(LINEAR[name], d_model, dtype=torch.float32)
    x = torch.randn(1, T, d_model, requires_grad=True)
    seq = dense(1, T) if form == "dense" else Seq.build((1, T), x.device, cu_seqlens=torch.tensor([0, 5, 5, T]))
    with Largest() as largest:
        mixer(x, None, seq)[0].sum().backward()
    assert largest.numel <= 4 * T * 4 * 24, f"{largest.op} makes {largest.numel} entries"


@examples(100)
@given(size=sizes, T=st.integers(1, 40), P=st.integers(1, 70), sink=st.booleans(), learns=st.booleans())
def test_the_last_tokens_of_many(size, T: int, P: int, sink: bool, learns: bool):
    B, G, R, E = size
    q, k, v, s = (x if x is None else x.detach().requires_grad_(learns) for x in tensors(B, T, P, G, R, E, sink))
    place = torch.arange(P + T)[None]
    want = attend_naive(q, k, v, place[:, P:], place, None, s)
    got = attend_last(q, k, v, s)
    assert error(got, want) <= 1e-10
    if learns:
        inputs = [x for x in (q, k, v, s) if x is not None]
        grads = [torch.autograd.grad(o.square().sum(), inputs) for o in (got, want)]
        assert all(error(a, b) <= 1e-9 for a, b in zip(*grads, strict=True))


@examples(100)
@given(size=sizes, L=st.integers(1, 70), sink=st.booleans(), data=st.data())
def test_one_token_of_rows_at_different_lengths(size, L: int, sink: bool, data):
    B, G, R, E = size
    q, k, v, s = tensors(B, 1, L - 1, G, R, E, sink)
    counts = torch.tensor(data.draw(st.lists(st.integers(1, L), min_size=B, max_size=B)))[:, None]
    held = data.draw(st.integers(int(counts.max()), L))
    want = attend_naive(q, k, v, counts - 1, torch.arange(L)[None], None, s)
    assert error(attend_step(q, k, v, counts, held, s, lambda key, make: make()), want) <= 1e-10


@pytest.mark.parametrize("sink", [False, True])
@torch.no_grad()
def test_a_long_prompt_is_continued_without_masks(sink: bool):
    config = Softmax(num_heads=4, num_kv_heads=2, head_dim=16, sink=sink)
    mixer, T, piece = make_mixer(config, 32, dtype=torch.float32), 8192, 512
    state = mixer.new_state(1, T, dtype=torch.float32, device=torch.device("cpu"))
    with Largest() as largest:
        for start in range(0, T, piece):
            seq = Seq.build((1, piece), torch.device("cpu"), past=torch.tensor([start]), max_past=start, level=True)
            mixer(torch.randn(1, piece, 32), state, seq)
    assert largest.numel <= (T + 1) * 2 * (16 + 8 * sink), largest.op  # the keys of the cache


@pytest.mark.parametrize("window", [2048, 4096])
def test_wide_windows_are_cut(window: int):
    """The mask of a wide window is made piece by piece: it never exceeds its budget, whatever the window."""
    config = Softmax(num_heads=8, num_kv_heads=1, head_dim=4, window_size=window)
    mixer = make_mixer(config, 8, dtype=torch.float32)
    with mock.patch.object(attention, "MASK_ELEMENTS", 1 << 21), Largest() as largest, torch.no_grad():
        mixer(torch.randn(1, 6000, 8), None, dense(1, 6000))
    assert largest.numel <= 1.1 * (1 << 21), largest.op


@pytest.mark.parametrize("window", [None, 256])
@torch.no_grad()
def test_prefill_in_pieces_is_not_quadratic(window: int | None):
    config = Softmax(num_heads=4, num_kv_heads=2, head_dim=16, window_size=window, sink=True)
    mixer, T, piece = make_mixer(config, 32, dtype=torch.float32), 8192, 512
    state = mixer.new_state(1, T, dtype=torch.float32, device=torch.device("cpu"))
    with Largest() as largest:
        for start in range(0, T, piece):
            seq = Seq.build((1, piece), state.k_SLGE.device, past=torch.tensor([start]), max_past=start)
            mixer(torch.randn(1, piece, 32), state, seq)
    most = 2 * piece * (T + 8) if window is None else 2 * window * (2 * window + 8)  # masks, for 2 heads a KV head
    assert largest.numel <= most, largest.op
