"""What cost.py counts is what is built: parameters and matrices of every block, bytes of every cache. Published figures
are in test_presets.py."""

from __future__ import annotations

import pytest
import strategies
import torch
from contract.configs import specs
from contract.tools import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from plait import cost
from plait.config import Layer, Mixer, Softmax, leaves
from plait.mixers import build_mixer
from plait.model.lm import LM
from plait.spec import Spec


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@examples(100)
@given(drawn=specs())
def test_parameters(drawn: tuple[Spec, frozenset[str]]):
    spec, _ = drawn
    model = LM(spec, device="meta")
    assert model.num_params == count(model) == cost.total_params(spec)
    for layer, block in zip(spec.layers, model.layers, strict=True):
        assert count(block) == cost.layer_params(layer, spec.d_model)
        assert count(block.mixer) == cost.mixer_params(layer.mixer, spec.d_model)
    whole = cost.cost(spec, 100)
    assert sum(layer.params for layer in whole.layers) == sum(map(count, model.layers))


@examples(200)
@given(mixer=strategies.mixers(), d_model=st.sampled_from((24, 64)))
def test_matrices_and_the_rest(mixer: Mixer, d_model: int):
    """FLOPs that are no mixing are a multiply-add for every entry of a matrix; what else a mixer has are vectors."""
    with torch.device("meta"):
        module = build_mixer(mixer, d_model, "torch")
    matrices = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
    assert cost.layer_flops(Layer(mixer=mixer), d_model, 10) - cost.mixing_flops(mixer, 10) == pytest.approx(
        2 * matrices
    )
    assert count(module) == cost.mixer_params(mixer, d_model)
    convolutions = sum(p.numel() for name, p in module.named_parameters() if name.endswith("conv.weight"))
    widths = [(cost.conv_channels(leaf), getattr(leaf, "conv_size", 0)) for leaf in leaves(mixer)]
    assert convolutions == sum(channels * width for channels, width in widths)


@examples(100)
@given(drawn=specs(), batch=st.integers(1, 3), length=st.integers(1, 200), half=st.booleans())
def test_cache_bytes(drawn: tuple[Spec, frozenset[str]], batch: int, length: int, half: bool):
    """States of batch rows of max_length tokens; recurrent states stay in fp32 under bf16."""
    spec, _ = drawn
    dtype, size = (torch.bfloat16, 2) if half else (torch.float32, 4)
    want = batch * sum(cost.state_bytes(layer.mixer, length, dtype_bytes=size) for layer in spec.layers)
    assert want == batch * cost.cost(spec, length, dtype_bytes=size).state_bytes
    assert LM(spec).to(dtype).new_cache(batch, length).num_bytes == want
    assert LM(spec).new_cache(batch, length, dtype=dtype).num_bytes == want
    assert LM(spec, device="meta").new_cache(batch, length, dtype=dtype).num_bytes == want


@examples(100)
@given(spec=strategies.specs(), length=st.sampled_from((1, 2, 100, 10_000)))
def test_cache_bytes_of_long_contexts(spec: Spec, length: int):
    """And on both sides of every window."""
    model = LM(spec, device="meta")
    windows = [leaf.window_size for layer in spec.layers for leaf in leaves(layer.mixer) if isinstance(leaf, Softmax)]
    for tokens in {length, *(w + more for w in windows if w is not None for more in (-1, 0, 1))} - {0}:
        for dtype, size in ((torch.bfloat16, 2), (torch.float32, 4)):
            assert (
                model.new_cache(1, tokens, dtype=dtype).num_bytes
                == cost.cost(spec, tokens, dtype_bytes=size).state_bytes
            )


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "layout",
    [
        *("full", "swa[window=5]", "gdn", "kda", "gla", "mamba2[head_dim=16]", "lightning"),
        *("heads(5:nope, 1:kda)", "heads(1:lightning, 4:swa[window=5], 1:mamba2[head_dim=16])"),
        *("mix(gdn + nope)", "mix(lightning + full + kda)[fuse=project]"),
    ],
)
def test_every_mixer_of_a_layout_is_built_and_counted(layout: str, num_kv_heads: int):
    shape = {"vocab_size": 11, "d_model": 96, "num_layers": 2, "num_heads": 6, "num_kv_heads": num_kv_heads}
    spec = Spec.from_layout(layout, **shape, d_ff=32)
    model = LM(spec)
    assert count(model) == cost.total_params(spec)
    for length in (4, 5, 6, 40):
        assert model.new_cache(2, length).num_bytes == 2 * cost.cost(spec, length, dtype_bytes=4).state_bytes
    logits = model(torch.arange(20).view(2, 10) % 11)
    assert logits.shape == (2, 10, 11)
    assert torch.isfinite(logits).all()
