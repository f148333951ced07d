"""The decode step of fixed shapes against the plain one, on every mixer: rows at different lengths, and a cache that is
reordered, cut and emptied between steps. On a CPU the step runs uncompiled, as a CUDA graph would replay it."""

from __future__ import annotations

import pytest
import torch
from contract.configs import COMPOSITIONS, LEAVES, VOCAB, WIDE, build
from contract.tools import error, examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.config import Gdn, Layer, Mixer, Softmax
from plait.model.decode import Decoder
from plait.model.generate import generate, prefill
from plait.model.lm import LM
from plait.spec import Spec

LENGTH = 24
"""room of the caches; WINDOW is less, so that rings wrap"""
LAYOUTS = ("nope[logn=loga, logn_base=500] gdn", "full[sink=true] swa[window=6]", "mix(gla + swa[window=6, sink=true])")


def small(layout: str, dtype: torch.dtype = torch.float64) -> LM:
    spec = Spec.from_layout(layout, vocab_size=VOCAB, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=20)
    return build(spec, 0, dtype, "torch")


def of(mixer: Mixer) -> LM:
    layers = (Layer(mixer=mixer, d_ff=8), Layer(mixer=mixer, d_ff=0))
    return build(Spec(vocab_size=VOCAB, d_model=8, layers=layers, init_std=0.4), 1, torch.float64, "torch")


def prompts(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three rows of 9, 1 and 5 tokens, padded on the left."""
    tokens = torch.randint(VOCAB, (3, 9), generator=torch.Generator().manual_seed(seed))
    return tokens, torch.arange(9) >= torch.tensor([[0], [8], [4]])


@pytest.fixture
def eager(monkeypatch):
    """mode compile, without compiling."""
    monkeypatch.setattr(torch, "compile", lambda step, **options: step)


@torch.no_grad()
def check(model: LM, mode: str, device: str = "cpu", tolerance: float = 1e-10) -> None:
    tokens, mask = (x.to(device) for x in prompts())
    caches = [model.new_cache(3, LENGTH) for _ in range(2)]
    plain, static = (Decoder(model, cache, mode=kind) for cache, kind in zip(caches, ("plain", mode), strict=True))

    def both(steps: int) -> None:
        for step in range(steps):
            token = (tokens[:, step % 9] + step) % VOCAB
            want, got = plain(token), static(token)
            assert error(got.cpu(), want.cpu()) <= tolerance, step
        assert caches[0].lengths == caches[1].lengths == tuple(caches[1].lengths_S.tolist())
        assert caches[0].peaks == caches[1].peaks

    for cache in caches:
        prefill(model, tokens, cache, mask=mask, chunk=4)
    both(6)
    for cache in caches:
        cache.reorder(torch.tensor([2, 2, 0]))
    both(2)
    for cache in caches:  # more of a prompt, whole, between steps
        model(tokens[:, :3], cache=cache)
    both(1)
    for cache in caches:
        cache.reset()
        prefill(model, tokens, cache)
    both(LENGTH - 9)
    with pytest.raises(ValueError, match="max_length = 24"):
        static(tokens[:, 0])
    assert caches[1].lengths == (LENGTH,) * 3


@examples(10)
@given(st.data())
@pytest.mark.parametrize("name", [*LEAVES, *COMPOSITIONS])
def test_a_step_of_fixed_shapes_is_the_plain_one(name: str, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda step, **options: step)
        check(of(data.draw((LEAVES | COMPOSITIONS)[name]((3, 8)))), "compile")


def test_a_step_may_follow_a_crop(eager):
    model = small("full[sink=true] nope")
    tokens, mask = prompts()
    caches = [model.new_cache(3, LENGTH) for _ in range(2)]
    decoders = [Decoder(model, cache, mode=mode) for cache, mode in zip(caches, ("plain", "compile"), strict=True)]
    for cache, decoder in zip(caches, decoders, strict=True):
        with torch.no_grad():
            prefill(model, tokens, cache, mask=mask)
        decoder(tokens[:, 0])
        cache.crop(4)
    assert error(decoders[1](tokens[:, 1]), decoders[0](tokens[:, 1])) <= 1e-10


@torch.no_grad()
def test_a_plain_step_reads_what_the_cache_holds():
    """Of a long cache that is nearly empty, and no mask where all rows are equally long."""
    model = small("nope full[sink=true]", torch.float32)
    cache = model.new_cache(2, 5000)
    prefill(model, torch.zeros(2, 20, dtype=torch.long), cache)
    with torch.profiler.profile(record_shapes=True) as profile:
        Decoder(model, cache)(torch.tensor([1, 2]))
    sizes = [n for event in profile.events() for shape in event.input_shapes or () for n in shape if n > 1000]
    assert set(sizes) <= {5000}  # the buffers that are sliced
    assert not any(event.name in ("aten::where", "aten::le", "aten::lt") for event in profile.events())
    attention = [event for event in profile.events() if event.name == "aten::scaled_dot_product_attention"]
    assert [event.input_shapes[1][2] for event in attention] == [21, 22]


@pytest.mark.parametrize("mode", ["compile", "plain"])
def test_generate_in_a_mode(mode: str, eager):
    model = small("gdn swa[window=6]")
    tokens, mask = prompts()
    want = generate(model, tokens, max_new_tokens=8, mask=mask)
    assert torch.equal(generate(model, tokens, max_new_tokens=8, mask=mask, mode=mode), want)


def test_bad_arguments():
    model = small("full")
    with pytest.raises(ValueError, match="mode = 'grahp'; nearest: graph"):
        Decoder(model, model.new_cache(1, 4), mode="grahp")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="CUDA graphs need a GPU"):
        Decoder(model, model.new_cache(1, 4), mode="graph")
    with pytest.raises(ValueError, match="it belongs to a model of spec"):
        Decoder(model, small("nope").new_cache(1, 4))


@pytest.mark.slow
def test_compiled():
    for layout in LAYOUTS:
        check(small(layout, torch.float32), "compile", tolerance=1e-4)


WINDOW = 6
ON_GPU: dict[str, Mixer] = {
    "full": Softmax(num_heads=4, num_kv_heads=2, head_dim=16, rope_theta=1e4),
    "groups of unequal size": Softmax(num_heads=3, num_kv_heads=2, kv_map=(0, 1, 1), head_dim=16),
    "window": Softmax(num_heads=4, num_kv_heads=4, head_dim=16, rope_theta=1e4, window_size=WINDOW),
    "sinks": Softmax(num_heads=4, num_kv_heads=2, head_dim=16, window_size=WINDOW, sink=True),
    "gdn": Gdn(num_heads=2, num_kv_heads=2, num_v_heads=2, head_dim=16),
}


@pytest.mark.gpu
@examples(5)
@given(st.data())
@pytest.mark.parametrize("name", [*LEAVES, *COMPOSITIONS])
def test_a_graph_is_the_plain_step(name: str, data):
    check(of(data.draw((LEAVES | COMPOSITIONS)[name](WIDE))).cuda(), "graph", "cuda", 1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_a_graph_in_bf16(name: str):
    """Where FlashAttention takes the step."""
    check(of(ON_GPU[name]).to("cuda", torch.bfloat16), "graph", "cuda", 0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_and_captured(layout: str):
    check(small(layout, torch.float32).cuda(), "compile", "cuda", 1e-4)


@pytest.mark.gpu
def test_generate_on_a_gpu_takes_the_graph():
    model = small("gdn swa[window=6]").cuda()
    tokens, mask = (x.cuda() for x in prompts())
    want = generate(model, tokens, max_new_tokens=12, mask=mask, mode="plain")
    assert torch.equal(generate(model, tokens, max_new_tokens=12, mask=mask), want)


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window", [None, 40])
@torch.no_grad()
def test_pieces_of_a_prompt_in_bf16(sink: bool, window: int | None):
    """FlashAttention continues a prompt as it does a whole one."""
    mixer = Softmax(num_heads=4, num_kv_heads=2, head_dim=64, rope_theta=1e4, sink=sink, window_size=window)
    model = of(mixer).to("cuda", torch.bfloat16)
    tokens = torch.randint(VOCAB, (2, 300), generator=torch.Generator().manual_seed(0)).cuda()
    whole = model(tokens)[:, -1]
    for chunk in (7, 100, 299):
        assert error(prefill(model, tokens, model.new_cache(2, 300), chunk=chunk).cpu(), whole.cpu()) <= 0.03
