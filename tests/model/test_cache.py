"""The cache where the contract test does not look: dead slots, refusals, gradients, compilation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from contract.configs import disturb
from contract.tools import error
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from plait.config import Gdn, Gla, HeadPart, Heads, Kda, Layer, Lightning, Mamba2, Mix, Softmax
from plait.mixers.softmax import KeyValues
from plait.model.cache import Cache
from plait.model.lm import LM
from plait.spec import Spec

FULL = Softmax(num_heads=4, num_kv_heads=2, head_dim=6, rope_theta=1e4, sink=True)
NOPE = Softmax(num_heads=2, num_kv_heads=2, head_dim=4, logn="loga", logn_base=30.0)
SWA = Softmax(num_heads=3, num_kv_heads=1, head_dim=4, rope_theta=1e4, window_size=5)
GDN = Gdn(num_heads=2, num_kv_heads=2, num_v_heads=4, head_dim=4, expand_v=1.5)
RAGGED = Softmax(num_heads=3, num_kv_heads=2, kv_map=(0, 0, 1), head_dim=4)
KDA = Kda(num_heads=2, head_dim=4)
VOCAB = 11


def model_of(*mixers, dtype: torch.dtype = torch.float64, **fields) -> LM:
    layers = tuple(Layer(mixer=mixer, d_ff=12) for mixer in mixers)
    model = LM(Spec(vocab_size=VOCAB, d_model=8, layers=layers, init_std=0.4, **fields))
    disturb(model, 1)
    return model.to(dtype)


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(sum(shape)))


def buffers(cache: Cache) -> list[Tensor]:
    return [buffer for state in cache.states for _, buffer in state.tensors()] + [cache.lengths_S]


@torch.no_grad()
def fill_dead_slots(cache: Cache, value: float) -> int:
    """Overwrite every slot of keys and values that no token of its row is in."""
    filled = 0
    for state in cache.states:
        if isinstance(state, KeyValues):
            for row, n in enumerate(cache.lengths):
                live = {p % state.size for p in range(max(0, n - state.size), n)}
                for slot in set(range(state.size)) - live:
                    state.k_SLGE[row, slot] = value
                    state.v_SLGE[row, slot] = value
                    filled += 1
    return filled


@pytest.mark.parametrize("T", [1, 2, 7])
@pytest.mark.parametrize("mixers", [(FULL,), (SWA,), (FULL, SWA, NOPE)], ids=["full", "window", "both"])
@torch.no_grad()
def test_dead_slots_do_not_matter(mixers, T: int):
    """Rows at different lengths; slots after a row's last token hold garbage."""
    model, cache = model_of(*mixers), None
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]])
    outs = []
    for garbage in (0.0, 1e3, -1e3):
        cache = model.new_cache(3, 20)
        model(tokens(3, 7), mask=mask, cache=cache)
        assert fill_dead_slots(cache, garbage) > 0
        outs.append(model(tokens(3, T), cache=cache))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@torch.no_grad()
def test_crop_then_other_tokens():
    """What was cropped away leaves nothing behind."""
    model = model_of(FULL, NOPE)
    cache, fresh = model.new_cache(2, 20), model.new_cache(2, 20)
    prompt, wrong, right = tokens(2, 6), tokens(2, 9), tokens(2, 4)
    model(prompt, cache=cache)
    model(prompt, cache=fresh)
    model(wrong, cache=cache)
    cache.crop(6)
    assert cache.lengths == (6, 6)
    assert error(model(right, cache=cache), model(right, cache=fresh)) <= 1e-10


@torch.no_grad()
def test_a_ring_is_cropped_once():
    """One token back is there; after that a second has been overwritten, though the length says otherwise."""
    model, text = model_of(SWA), tokens(1, 12)
    for length in (8, 6):  # 6: cropping makes the length that of the ring, which has wrapped all the same
        cache = model.new_cache(1, 20)
        model(text[:, :length], cache=cache)
        cache.crop(length - 1)
        with pytest.raises(ValueError, match=r"cannot crop .*layers\.0: a window of 5 tokens"):
            cache.crop(length - 2)
        assert cache.lengths == (length - 1,)
        got = model(text[:, length - 1 :], cache=cache)
        assert error(got, model(text)[:, length - 1 :]) <= 1e-10
    cache.reset()
    model(text[:, :4], cache=cache)
    cache.crop(1)  # not wrapped since the reset
    assert error(model(text[:, 1:], cache=cache), model(text)[:, 1:]) <= 1e-10


@torch.no_grad()
def test_crop_is_all_or_nothing():
    """Full attention could go back, the recurrence cannot: nobody does."""
    model = model_of(FULL, GDN)
    cache = model.new_cache(2, 20)
    model(tokens(2, 6), cache=cache)
    before = [buffer.clone() for buffer in buffers(cache)]
    with pytest.raises(ValueError, match=r"cannot crop 6 tokens to 5: layers\.1: a recurrent state"):
        cache.crop(5)
    cache.crop(6)
    with pytest.raises(ValueError, match="length = -1"):
        cache.crop(-1)
    assert all(torch.equal(a, b) for a, b in zip(before, buffers(cache), strict=True))
    assert cache.lengths == (6, 6)


@torch.no_grad()
def test_reset_is_a_new_cache():
    model = model_of(FULL, SWA, GDN)
    cache = model.new_cache(2, 20)
    model(tokens(2, 9), cache=cache)
    cache.reset()
    assert torch.equal(model(tokens(2, 9), cache=cache), model(tokens(2, 9), cache=model.new_cache(2, 20)))


@torch.no_grad()
def test_clone_and_to():
    model = model_of(FULL, SWA, GDN)
    cache = model.new_cache(2, 20)
    model(tokens(2, 9), cache=cache)
    copy = cache.clone()
    assert not {b.data_ptr() for b in buffers(cache)} & {b.data_ptr() for b in buffers(copy)}
    assert cache.to("cpu") is cache
    elsewhere = cache.to("meta")
    assert {b.device.type for b in buffers(elsewhere)} == {"meta"}
    assert elsewhere.lengths == cache.lengths
    model(tokens(2, 1), cache=copy)
    assert (cache.lengths, copy.lengths) == ((9, 9), (10, 10))
    assert cache.lengths_S.tolist() == [9, 9]


@pytest.mark.parametrize("index", [[0], [0, 1, 1], [0, 2], [-1, 0], [[0, 1]]])
def test_reorder_refuses(index):
    model = model_of(GDN)
    cache = model.new_cache(2, 20)
    model(tokens(2, 9), cache=cache)
    before = [buffer.clone() for buffer in buffers(cache)]
    with pytest.raises(ValueError, match="cache: index"):
        cache.reorder(torch.tensor(index))
    assert all(torch.equal(a, b) for a, b in zip(before, buffers(cache), strict=True))


def test_a_cache_of_another_model_is_refused():
    model, other = model_of(FULL, GDN), model_of(FULL, dataclasses.replace(GDN, conv_size=3))
    cache = other.new_cache(1, 20)
    with pytest.raises(ValueError, match="cache: it belongs to a model of spec") as refusal:
        model(tokens(1, 3), cache=cache)
    assert model.spec.hash in str(refusal.value)
    assert other.spec.hash in str(refusal.value)
    assert cache.lengths == (0,)
    assert not any(buffer.any() for buffer in buffers(cache))


BAD_CALLS = {
    "too long": (tokens(2, 8), {}, "a sequence would be 21 tokens long; max_length = 20"),
    "too long under a mask": (
        tokens(2, 9),
        {"mask": torch.tensor([[1] * 9, [0] * 9])},
        "a sequence would be 22 tokens long",
    ),
    "more rows": (tokens(3, 2), {}, "holds 2 sequences; the tokens are of 3"),
    "more documents": (
        tokens(1, 6),
        {"cu_seqlens": torch.tensor([0, 2, 4, 6])},
        "holds 2 sequences; the tokens are of 3",
    ),
    "mask and cu_seqlens": (
        tokens(1, 6),
        {"cu_seqlens": torch.tensor([0, 2, 6]), "mask": torch.ones(1, 6, dtype=torch.bool)},
        "mask and cu_seqlens: both are given",
    ),
    "mask of another shape": (tokens(2, 3), {"mask": torch.ones(2, 4, dtype=torch.bool)}, r"mask: shape \(2, 4\)"),
    "additive mask": (tokens(2, 3), {"mask": torch.zeros(2, 3)}, "mask: dtype torch.float32"),
    "cu_seqlens that fall": (tokens(1, 6), {"cu_seqlens": torch.tensor([0, 4, 2, 6])}, "cu_seqlens: "),
    "cu_seqlens not to the end": (tokens(1, 6), {"cu_seqlens": torch.tensor([0, 2, 5])}, "cu_seqlens: "),
    "cu_seqlens not from 0": (tokens(1, 6), {"cu_seqlens": torch.tensor([1, 2, 6])}, "cu_seqlens: "),
    "cu_seqlens over rows": (tokens(2, 6), {"cu_seqlens": torch.tensor([0, 2, 6])}, "cu_seqlens: "),
    "cu_seqlens of nothing": (tokens(1, 6), {"cu_seqlens": torch.tensor([0])}, "cu_seqlens: shape"),
    "cu_seqlens of floats": (tokens(1, 6), {"cu_seqlens": torch.tensor([0.0, 6.0])}, "cu_seqlens: shape"),
    "no tokens": (tokens(2, 0), {}, r"tokens: shape \(2, 0\)"),
    "one dimension": (tokens(6), {}, r"tokens: shape \(6,\)"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
@torch.no_grad()
def test_a_refused_call_changes_nothing(name: str):
    bad, arguments, message = BAD_CALLS[name]
    model = model_of(FULL, SWA, GDN)
    cache = model.new_cache(2, 20)
    model(tokens(2, 13), cache=cache)
    before = [buffer.clone() for buffer in buffers(cache)]
    with pytest.raises(ValueError, match=message) as refusal:
        model(bad, cache=cache, **arguments)
    assert "\n" not in str(refusal.value)
    assert all(torch.equal(a, b) for a, b in zip(before, buffers(cache), strict=True))
    assert cache.lengths == (13, 13)
    if "holds" not in message and "long" not in message:
        with pytest.raises(ValueError, match=message):
            model(bad, **arguments)


@torch.no_grad()
def test_an_unknown_token_changes_nothing():
    model = model_of(FULL, SWA, GDN)
    cache = model.new_cache(1, 20)
    with pytest.raises(IndexError):
        model(torch.tensor([[0, VOCAB]]), cache=cache)
    assert not any(buffer.any() for buffer in buffers(cache))


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (-1, 5)])
def test_new_cache_refuses(batch: int, length: int):
    with pytest.raises(ValueError, match="both must be at least 1"):
        model_of(FULL).new_cache(batch, length)


@pytest.mark.parametrize("form", ["dense", "ragged"])
def test_gradients_do_not_enter_a_cache(form: str):
    """Its buffers hold numbers, not graphs: a step in training mode does not tie the next one to it."""
    model, mask = model_of(FULL, SWA, GDN), None
    if form == "ragged":
        mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1]])
    cache = model.new_cache(2, 20)
    for _ in range(2):
        model(tokens(2, 4), mask=mask, cache=cache).sum().backward()
        assert not any(buffer.requires_grad for buffer in buffers(cache))


@torch.no_grad()
def test_states_are_at_least_float32():
    models = [model_of(FULL, GDN, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    for cache in (models[0].new_cache(1, 4), models[1].new_cache(1, 4, dtype=torch.bfloat16)):
        keys, recurrent = cache.states
        assert keys.k_SLGE.dtype == recurrent.tail_BWC.dtype == torch.bfloat16
        assert recurrent.memory_BSKV.dtype == torch.float32
    assert model_of(GDN).new_cache(1, 4).states[0].memory_BSKV.dtype == torch.float64


@torch.no_grad()
def test_a_bf16_cache_of_a_float32_model():
    model = model_of(FULL, SWA, GDN, dtype=torch.float32)
    cache = model.new_cache(2, 40, dtype=torch.bfloat16)
    text = tokens(2, 30)
    got = torch.cat([model(piece, cache=cache) for piece in text.split([11, 1, 1, 17], 1)], 1)
    assert error(got, model(text)) <= 5e-2


MODELS = {
    "softmax, gdn": (FULL, SWA, NOPE, GDN),
    "recurrences": (
        KDA,
        Gla(num_heads=2, head_dim=4, conv_size=4),
        Mamba2(num_heads=2, head_dim=4, state_dim=6),
        Lightning(num_heads=4, num_kv_heads=2, head_dim=4, slopes=(1.0, 0.5, 0.1, 0.0)),
    ),
    "compositions": (
        Heads(parts=(HeadPart(mixer=RAGGED, heads=(0, 2, 4)), HeadPart(mixer=KDA, heads=(1, 3)))),
        Mix(mixers=(Softmax(num_heads=2, num_kv_heads=1, head_dim=4, window_size=3), KDA)),
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_compiles_once(name):
    """Lengths change at every step; the graph does not (two graphs: the second takes sizes as variables)."""
    torch._dynamo.reset()
    model, counter = model_of(*MODELS[name]), CompileCounter()
    step = torch.compile(lambda token, cache: model(token, cache=cache), backend=counter, fullgraph=True)
    cache = model.new_cache(2, 40)
    mask = torch.tensor([[1] * 6, [0] * 4 + [1] * 2])
    model(tokens(2, 6), mask=mask, cache=cache)
    other = cache.clone()
    counts = []
    for i in range(8):
        token = tokens(2, i + 1)[:, -1:]
        assert error(step(token, cache), model(token, cache=other)) <= 1e-10
        counts.append(counter.frame_count)
    assert counts[1:] == counts[1:2] * 7
    assert counts[-1] <= 2
    assert cache.lengths == other.lengths == (14, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_training_compiles_to_one_graph(name):
    torch._dynamo.reset()
    model = model_of(*MODELS[name])
    text, grads = tokens(2, 70), []
    for run in (model, torch.compile(lambda t: model(t), backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        run(text).square().mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    scale = max(g.norm() for g in grads[0].values())
    for name, want in grads[0].items():
        assert (grads[1][name] - want).norm() <= 1e-10 * max(want.norm(), 1e-3 * scale), name


def test_two_layers_of_unlike_groups():
    """Their heads lie in the same order, their KV heads do not."""
    maps = ((0, 1, 1, 1), (0, 1, 2, 2), (0, 0, 1, 1))
    mixers = [Softmax(num_heads=4, num_kv_heads=max(m) + 1, kv_map=m, head_dim=4) for m in maps]
    model, text = model_of(*mixers), tokens(2, 9)
    logits = model(text)
    for block in model.blocks:
        block.mixer.set_backend("naive")
    assert error(logits, model(text)) <= 1e-10
