"""The named points: what a hook sees there, the same in training, prefill and decode, padded and packed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.config import Gdn, Layer, Softmax
from plait.mixers.base import Tap
from plait.mixers.seq import Seq
from plait.model.lm import LM
from plait.spec import Spec

D, VOCAB = 8, 11
SOFTMAX = Softmax(num_heads=6, num_kv_heads=2, head_dim=4, rope_theta=1e4)
GROUPED = Gdn(num_heads=6, num_kv_heads=2, num_v_heads=2, head_dim=4, expand_v=1.5)
MORE = Gdn(num_heads=2, num_kv_heads=2, num_v_heads=4, head_dim=4, expand_v=2.0)
LAYERS = (
    Layer(mixer=SOFTMAX, d_ff=12),
    Layer(mixer=GROUPED, d_ff=12, parallel=True),
    Layer(mixer=MORE, norm_placement="post"),
    Layer(mixer=SOFTMAX, d_ff=12, norm_placement="sandwich"),
)
SHAPES = {
    SOFTMAX: {"q": (6, 4), "k": (2, 4), "v": (2, 4), "heads": (6, 4), "out": (D,)},
    GROUPED: {"q": (6, 4), "k": (2, 4), "v": (2, 6), "decay": (2,), "beta": (2,), "heads": (6, 6), "out": (D,)},
    # one key head serves two states: queries and keys are seen as the states read them
    MORE: {"q": (4, 4), "k": (4, 4), "v": (4, 8), "decay": (4,), "beta": (4,), "heads": (4, 8), "out": (D,)},
}


def taps_of(model: LM) -> dict[str, Tap]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Tap)}


def expected() -> dict[str, tuple[int, ...]]:
    shapes = {}
    for i, layer in enumerate(LAYERS):
        shapes |= {f"layers.{i}.taps.{name}": (D,) for name in ("in", "mlp_out", "out")}
        shapes |= {f"layers.{i}.mixer.taps.{name}": shape for name, shape in SHAPES[layer.mixer].items()}
    return shapes


@pytest.fixture
def model() -> LM:
    return LM(Spec(vocab_size=VOCAB, d_model=D, layers=LAYERS, init_std=0.4)).double()


def watch(model: LM) -> tuple[dict[str, list[Tensor]], list[Seq]]:
    seen: dict[str, list[Tensor]] = {name: [] for name in taps_of(model)}
    seqs: list[Seq] = []

    def hook(name: str):
        def look(tap: Tap, args: tuple[Tensor, Seq], out: Tensor) -> None:
            seen[name].append(out)
            seqs.append(args[1])

        return look

    for name, tap in taps_of(model).items():
        tap.register_forward_hook(hook(name))
    return seen, seqs


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(sum(shape)))


@torch.no_grad()
def test_shapes_and_values_in_prefill_and_decode(model: LM):
    """Fed in pieces, each point sees what it sees of the whole."""
    text = tokens(2, 12)
    seen, _ = watch(model)
    model(text)
    whole = {name: values.pop() for name, values in seen.items() if values}
    assert {name: tuple(value.shape) for name, value in whole.items()} == {
        name: (2, 12, *shape)
        for name, shape in expected().items()
        if name != "layers.2.taps.mlp_out"  # it has no MLP
    }
    cache = model.new_cache(2, 12)
    for piece in text.split([5, 1, 1, 5], 1):
        model(piece, cache=cache)
    for name, value in whole.items():
        assert [part.shape[1] for part in seen[name]] == [5, 1, 1, 5], name
        torch.testing.assert_close(torch.cat(seen[name], 1), value, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("form", ["mask", "packed"])
@torch.no_grad()
def test_ragged_batches(model: LM, form: str):
    """Points see real tokens only, end to end; the Seq beside them says whose they are."""
    lengths = (3, 0, 5)
    rows = [tokens(1, n + 1)[:, :n] for n in lengths]
    alone: list[dict[str, Tensor]] = []
    seen, seqs = watch(model)
    for row in rows:
        if row.shape[1]:
            model(row)
            alone.append({name: values.pop() for name, values in seen.items() if values})
    seqs.clear()
    if form == "packed":
        model(torch.cat(rows, 1), cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    else:
        mask = torch.arange(6)[None] >= 6 - torch.tensor(lengths)[:, None]
        padded = torch.zeros(3, 6, dtype=torch.long)
        padded[mask] = torch.cat(rows, 1)[0]
        model(padded, mask=mask)
    assert all(seq.lengths == lengths and seq is seqs[0] for seq in seqs)
    for name, parts in seen.items():
        for part, shape in zip(parts, [(1, 8, *expected()[name])] * len(parts), strict=True):
            assert tuple(part.shape) == shape
            want = torch.cat([values[name] for values in alone], 1)
            torch.testing.assert_close(part, want, rtol=1e-9, atol=1e-9, msg=name)
    if form == "mask":
        out = seqs[0].pad(seen["layers.3.taps.out"][0])
        assert out.shape == (3, 6, D)
        assert not out[~mask].any()


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(expected()))
def test_writing_to_a_point_changes_the_output(model: LM, name: str):
    """A hook that returns a tensor replaces what goes on: in a whole pass and in one token through a cache."""
    if name == "layers.2.taps.mlp_out":
        pytest.skip("the layer has no MLP")
    cache = model.new_cache(1, 8)
    model(tokens(1, 7), cache=cache)
    clone, whole, step = cache.clone(), model(tokens(1, 7)), model(tokens(1, 1), cache=cache)
    taps_of(model)[name].register_forward_hook(lambda tap, args, out: out * torch.linspace(0.2, 1, out.shape[-1]))
    assert not torch.allclose(model(tokens(1, 7)), whole)
    assert not torch.allclose(model(tokens(1, 1), cache=clone), step)


@torch.no_grad()
def test_a_written_key_stays_in_the_cache(model: LM):
    """Patching k and v while a prompt is fed changes what later tokens find."""
    outs = []
    taps = [taps_of(model)[f"layers.0.mixer.taps.{name}"] for name in "kv"]
    for factor in (1.0, 0.0):
        hooks = [tap.register_forward_hook(lambda tap, args, out, f=factor: f * out) for tap in taps]
        cache = model.new_cache(1, 8)
        model(tokens(1, 7), cache=cache)
        for hook in hooks:
            hook.remove()
        assert bool(cache.states[0].k_SLGE.any()) == bool(factor)
        outs.append(model(tokens(1, 1), cache=cache))
    assert not torch.allclose(*outs)


def test_decay_and_beta_are_what_they_are_called(model: LM):
    """Log decays at most 0, rates in (0, 1) or (0, 2), both in at least float32."""
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        seen, _ = watch(model)
        model(tokens(2, 12))
        for i in (1, 2):
            decay, beta = (seen[f"layers.{i}.mixer.taps.{name}"][-1] for name in ("decay", "beta"))
            assert decay.dtype == beta.dtype == torch.float32
            assert (decay <= 0).all()
            assert ((beta > 0) & (beta < 1)).all()
