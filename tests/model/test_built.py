"""What cost.py counts is what is built: parameters of every block, bytes of every cache. Published figures are in
test_presets.py."""

from __future__ import annotations

import pytest
import torch
from contract.configs import specs
from contract.tools import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from plait import cost
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


@pytest.mark.parametrize("layout", ["kda", "gla", "mamba2", "lightning", "heads(1:gdn, 1:nope)", "mix(gdn + nope)"])
def test_what_later_versions_build_says_so(layout: str):
    spec = Spec.from_layout(layout, vocab_size=11, d_model=32, num_layers=1, num_heads=2, head_dim=16)
    with pytest.raises(ValueError, match=r"layers\.0: mixer .*: not built yet .*; built: softmax, gdn") as error:
        LM(spec)
    assert "\n" not in str(error.value)
