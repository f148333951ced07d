"""What cost.py counts is what is built: parameters of every block, bytes of every cache, the published figures."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from contract.configs import specs
from contract.tools import examples
from hypothesis import given
from hypothesis import strategies as st
from ledger import (
    RETRIEVAL_ATTENTION_MIXER,
    SCALES_000,
    TRANSFER_NON_EMBEDDING_M,
    TRANSFER_TOTAL_M,
    layer_000,
    retrieval_003,
    transfer_003,
)
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


@pytest.mark.parametrize("kind", ["full", "gdn"])
@pytest.mark.parametrize("scale", [name for name, scale in SCALES_000.items() if scale.layer])
def test_layers_of_000(scale: str, kind: str):
    """Tables 1 and 4 to 6, to the unit; they leave the two norms of a block out."""
    spec = layer_000(SCALES_000[scale], kind)
    (block,) = LM(spec, device="meta").layers
    assert count(block) - count(block.norm1) - count(block.norm2) == SCALES_000[scale].layer[kind]


def test_sinks_of_000_are_one_logit_a_head():
    spec = layer_000(SCALES_000["S1"], "full")
    mixer = dataclasses.replace(spec.layers[0].mixer, sink=True)
    with_sinks = dataclasses.replace(spec, layers=(dataclasses.replace(spec.layers[0], mixer=mixer),))
    assert LM(with_sinks, device="meta").num_params - LM(spec, device="meta").num_params == SCALES_000["S1"].num_heads


def test_attention_mixer_of_003():
    spec = retrieval_003()
    nope = dataclasses.replace(spec, layers=spec.layers[1:2])
    assert count(LM(nope, device="meta").layers[0].mixer) == RETRIEVAL_ATTENTION_MIXER


def test_gdn_transfer_model_of_003():
    """Table 22, rounded to the million."""
    model = LM(transfer_003("gdn"), device="meta")
    assert round(model.num_params / 1e6) == TRANSFER_TOTAL_M["gdn"]
    assert round((model.num_params - count(model.embed)) / 1e6) == TRANSFER_NON_EMBEDDING_M


@pytest.mark.parametrize("layout", ["kda", "gla", "mamba2", "lightning", "heads(1:gdn, 1:nope)", "mix(gdn + nope)"])
def test_what_later_versions_build_says_so(layout: str):
    spec = Spec.from_layout(layout, vocab_size=11, d_model=32, num_layers=1, num_heads=2, head_dim=16)
    with pytest.raises(ValueError, match=r"layers\.0: mixer .*: not built yet .*; built: softmax, gdn") as error:
        LM(spec)
    assert "\n" not in str(error.value)
