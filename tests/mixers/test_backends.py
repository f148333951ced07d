"""Mixer by mixer: the torch backend is the naive one, in outputs, states and every gradient; and looks only back."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from contract.configs import LENGTHS, WIDE, mixers
from contract.poison import poisoned_empty
from contract.tools import dense, error, examples, make_mixer
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from plait.config import Gdn, Gla, Heads, Kda, Lightning, Mamba2, Mix, Mixer
from plait.mixers import MixerModule
from plait.mixers.gla import GatedLinearAttention
from plait.mixers.lightning import LightningAttention
from plait.mixers.seq import Seq

D = 7


@dataclass(frozen=True)
class Batch:
    """Sequences of these lengths: rows (all equal), rows under a mask, or packed documents."""

    form: str
    lengths: tuple[int, ...]

    def seq(self, past: tuple[int, ...] | None = None) -> Seq:
        device = torch.device("cpu")
        since = {} if past is None else {"past": torch.tensor(past), "max_past": max(past)}
        if self.form == "dense":
            return Seq.build((len(self.lengths), self.lengths[0]), device, **since)
        if self.form == "packed":
            ends = torch.tensor([0, *self.lengths]).cumsum(0)
            return Seq.build((1, sum(self.lengths)), device, cu_seqlens=ends, **since)
        mask = torch.arange(max(self.lengths) + 1)[None] < torch.tensor(self.lengths)[:, None]
        return Seq.build(tuple(mask.shape), device, mask=mask, **since)

    def inputs(self, seed: int) -> Tensor:
        shape = (len(self.lengths), self.lengths[0]) if self.form == "dense" else (1, sum(self.lengths))
        return torch.randn(*shape, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@st.composite
def batches(draw: DrawFn, longest: int = 130, rows: int | None = None) -> Batch:
    length = st.one_of(st.sampled_from([n for n in LENGTHS if n <= longest]), st.integers(1, longest))
    form, rows = draw(st.sampled_from(("dense", "mask", "packed"))), rows or draw(st.integers(1, 4))
    if form == "dense":
        return Batch(form, (draw(length),) * rows)
    return Batch(form, (*(draw(st.just(0) | length) for _ in range(rows - 1)), draw(length)))


def both(config: Mixer, seed: int) -> tuple[MixerModule, MixerModule]:
    return make_mixer(config, D, seed=seed), make_mixer(config, D, seed=seed, backend="naive")


def gradients(mixer: MixerModule, x: Tensor, seq: Seq) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y, _ = mixer(x, None, seq)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    (y * weight).sum().backward()
    return {"output": y.detach(), "input": x.grad} | {name: p.grad for name, p in mixer.named_parameters()}


@examples(80)
@given(config=mixers(), batch=batches(), seed=st.integers(0, 1000))
def test_outputs_and_gradients(config: Mixer, batch: Batch, seed: int):
    x = batch.inputs(seed)
    with poisoned_empty():
        got, want = (gradients(mixer, x, batch.seq()) for mixer in both(config, seed))
    floor = 1e-3 * max(float(w.norm()) for w in want.values())  # under it a gradient may be rounding only (window 1)
    for name in want:
        off = float((got[name] - want[name]).norm()) / max(float(want[name].norm()), floor)
        assert off <= 1e-10, f"{name}: {off:.1e}"


@examples(60)
@given(config=mixers(), rows=st.integers(1, 3), data=st.data(), seed=st.integers(0, 1000))
@torch.no_grad()
def test_states(config: Mixer, rows: int, data, seed: int):
    """After several pieces, some through one form and some through another, both keep the same."""
    pair = both(config, seed)
    pieces = data.draw(st.lists(batches(70, rows), min_size=1, max_size=3))
    longest = sum(max(piece.lengths) for piece in pieces)
    states = [m.new_state(rows, longest, dtype=torch.float64, device=torch.device("cpu")) for m in pair]
    past = (0,) * rows
    for piece in pieces:
        x = piece.inputs(seed)
        got, want = (m(x, state, piece.seq(past))[0] for m, state in zip(pair, states, strict=True))
        assert error(got, want) <= 1e-10
        past = tuple(a + b for a, b in zip(past, piece.lengths, strict=True))
    for (name, got), (_, want) in zip(states[0].tensors(), states[1].tensors(), strict=True):
        assert error(got, want) <= 1e-10, name


@examples(40)
@given(config=mixers(), batch=batches(), seed=st.integers(0, 1000), data=st.data())
def test_causal_and_separate_by_gradient(config: Mixer, batch: Batch, seed: int, data):
    """No output has the least gradient from a later token or from another sequence."""
    mixer, x, seq = make_mixer(config, D, seed=seed), batch.inputs(seed).requires_grad_(), batch.seq()
    y, _ = mixer(x, None, seq)
    row = data.draw(st.sampled_from([s for s, n in enumerate(batch.lengths) if n]))
    t = data.draw(st.integers(0, batch.lengths[row] - 1))
    (grad,) = torch.autograd.grad(seq.split(y)[row][0, t].sum(), x)
    for s, part in enumerate(seq.split(grad)):
        seen = t + 1 if s == row else 0
        assert torch.equal(part[:, seen:], torch.zeros_like(part[:, seen:])), f"sequence {s}"
    assert seq.split(grad)[row][0, t].abs().max() > 0


EXTREMES = [20.0, -20.0]
GDN = Gdn(num_heads=2, num_kv_heads=2, num_v_heads=4, head_dim=4, expand_v=1.5, allow_neg_eigval=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dt_bias", [*EXTREMES, 0.0])
@pytest.mark.parametrize("A_log", EXTREMES)
@pytest.mark.parametrize("T", [1, 150])
def test_gradients_with_extreme_decays(A_log: float, dt_bias: float, dtype: torch.dtype, T: int):
    mixer = make_mixer(GDN, D, dtype=dtype)
    with torch.no_grad():
        mixer.A_log.fill_(A_log)
        mixer.dt_bias.fill_(dt_bias)
    found = gradients(mixer, Batch("dense", (T,) * 2).inputs(0).to(dtype), dense(2, T))
    for name, value in found.items():
        assert torch.isfinite(value).all(), name
    if dtype == torch.float64:
        naive = make_mixer(GDN, D, backend="naive")
        naive.load_state_dict(mixer.state_dict())
        want = gradients(naive, Batch("dense", (T,) * 2).inputs(0), dense(2, T))
        scale = max(float(w.norm()) for w in want.values())
        for name in want:
            assert float((found[name] - want[name]).norm()) <= 1e-10 * max(float(want[name].norm()), 1e-3 * scale), name


@examples(25)
@given(config=mixers(), batch=batches(), seed=st.integers(0, 1000))
def test_no_uninitialized_memory_is_read(config: Mixer, batch: Batch, seed: int):
    """torch fills what it would leave uninitialized with NaN, also inside its own operations."""
    mixer, x = make_mixer(config, D, seed=seed), batch.inputs(seed)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        found = gradients(mixer, x, batch.seq())
    finally:
        torch.use_deterministic_algorithms(before)
    assert torch.utils.deterministic.fill_uninitialized_memory
    for name, value in found.items():
        assert torch.isfinite(value).all(), name


@examples(25)
@given(config=mixers(WIDE), T=st.sampled_from((1, 65)), seed=st.integers(0, 1000))
def test_autocast(config: Mixer, T: int, seed: int):
    """bf16 autocast over float32 parameters, as in training: close, differentiable, states still float32."""
    mixer, exact = (make_mixer(config, 48, seed=seed, dtype=dtype) for dtype in (torch.float32, torch.float64))
    x = torch.randn(2, T, 48, generator=torch.Generator().manual_seed(seed))
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(mixer, x, dense(2, T))
        state = mixer.new_state(2, T + 1, dtype=torch.float32, device=x.device)
        with torch.no_grad():
            mixer(x, state, dense(2, T))
            mixer(x[:, :1], state, Seq.build((2, 1), x.device, past=torch.full((2,), T), max_past=T))
    for name, value in found.items():
        assert torch.isfinite(value).all(), name
    assert all(torch.isfinite(b).all() and b.dtype == torch.float32 for _, b in state.tensors())
    if T > 1:
        assert error(found["output"], exact(x.double(), None, dense(2, T))[0]) <= 3e-2


STRONG = {"strong": [4.0, 8.0], "weak": [-8.0, -12.0], "mixed": [6.0, -12.0]}
LONG: dict[str, Mixer] = {
    "gdn": Gdn(num_heads=2, num_kv_heads=2, num_v_heads=2, head_dim=8),
    "kda": Kda(num_heads=2, head_dim=8),
    "mamba2": Mamba2(num_heads=2, head_dim=8, state_dim=8),
    "gla": Gla(num_heads=2, head_dim=8, expand_k=1),
    "lightning": Lightning(num_heads=2, num_kv_heads=2, head_dim=8, slopes=(0.0, 0.0)),
}


@torch.no_grad()
def set_decay(mixer: MixerModule, logs: list[float]) -> None:
    """About exp(log) nats a token, for each of two heads."""
    if isinstance(mixer, GatedLinearAttention):
        mixer.decay_up.bias.copy_(-16 * torch.tensor(logs).exp().repeat_interleave(8).clamp(max=1e4))
    elif isinstance(mixer, LightningAttention):
        mixer.config = dataclasses.replace(mixer.config, slopes=tuple(math.exp(log) for log in logs))
    else:
        mixer.A_log.copy_(torch.tensor(logs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", STRONG)
@pytest.mark.parametrize("name", LONG)
def test_long_input(name: str, decay: str, dtype: torch.dtype):
    """T = 45,000: outputs, states and gradients stay finite, and the last outputs are those of a late start."""
    T, late = 45_000, 512
    mixer = make_mixer(LONG[name], D, dtype=dtype)
    set_decay(mixer, STRONG[decay])
    x = torch.randn(1, T, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = gradients(mixer, x, dense(1, T))
    for name, value in found.items():
        assert torch.isfinite(value).all(), name
    with torch.no_grad():
        if dtype == torch.float32:
            assert error(found["output"], mixer.double()(x.double(), None, dense(1, T))[0]) <= 1e-5
            mixer.float()
        state = mixer.new_state(1, T, dtype=dtype, device=x.device)
        mixer(x, state, dense(1, T))
        assert all(torch.isfinite(buffer).all() for _, buffer in state.tensors())
        if decay == "strong":
            y, _ = mixer(x[:, -late:], None, dense(1, late))
            assert error(found["output"][:, -late // 2 :], y[:, -late // 2 :]) <= 1e-2


@examples(40)
@given(config=mixers(WIDE), T=st.sampled_from((17, 65, 150)), seed=st.integers(0, 1000))
def test_bf16(config: Mixer, T: int, seed: int):
    """Against float64 with the same rounded weights and inputs: whole, in pieces, and gradients.

    A mixer rounds between its projections, norms and gates whatever the backend. Where the naive backend alone is
    past the tolerance (a single head, large logits), the torch backend may be about as far, but no further.
    """
    d_model = 48
    mixer, naive = (make_mixer(config, d_model, seed=seed, dtype=torch.bfloat16, backend=b) for b in ("torch", "naive"))
    exact = make_mixer(config, d_model, seed=seed, backend="naive")
    exact.load_state_dict(mixer.state_dict())
    x = torch.randn(2, T, d_model, generator=torch.Generator().manual_seed(seed)).bfloat16()
    got, rounded, want = (gradients(m, x.to(next(m.parameters()).dtype), dense(2, T)) for m in (mixer, naive, exact))
    more = 1.5 if isinstance(config, Heads | Mix) else 1  # rounds once more between its parts and the projection
    floor = 1e-2 * max(float(w.norm()) for w in want.values())

    def off(value: Tensor, name: str) -> float:
        return float((value.double() - want[name]).norm()) / max(float(want[name].norm()), floor)

    for name in want:
        if name.endswith("k.bias"):  # without positions softmax does not see it: a gradient of nothing but rounding
            continue
        tolerance = max(1e-2 if name == "output" else 2e-2, 1.5 * off(rounded[name], name)) * more
        assert off(got[name], name) <= tolerance, name
    with torch.no_grad():
        state = mixer.new_state(2, T, dtype=torch.bfloat16, device=x.device)
        cuts = sorted({0, T // 3, T // 3 + 1, T - 1, T})
        pieces = []
        for start, end in zip(cuts, cuts[1:], strict=False):
            seq = Seq.build((2, end - start), x.device, past=torch.full((2,), start), max_past=start)
            pieces.append(mixer(x[:, start:end], state, seq)[0])
    assert off(torch.cat(pieces, 1), "output") <= max(1e-2, 1.5 * off(rounded["output"], "output")) * more
