"""Presets against published figures (ledger.py), counted and built, and the names themselves."""

from __future__ import annotations

import pytest
import torch
from ledger import (
    LAYERS_000,
    MAMBA2_PAPER,
    MILLIONS,
    RETRIEVAL_ATTENTION_MIXER,
    RETRIEVAL_KDA_MIXERS,
    RETRIEVAL_TOTAL,
)
from torch import nn

from plait import cost
from plait.config import Heads, Softmax, family
from plait.model.lm import LM
from plait.presets import FAMILIES, preset, preset_names
from plait.spec import Spec

ONE_OF_EACH = [
    name
    for name in preset_names()
    for group in [FAMILIES[name.split("/")[0]]]
    if name.split("/")[1] == next(iter(group.sizes)) or name.endswith(group.variants[-1])
]
"""every variant at its family's smallest size, and every size"""


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def softmaxes(spec: Spec) -> list[Softmax]:
    mixers = [layer.mixer for layer in spec.layers]
    leaves = [
        part for mixer in mixers for part in ([p.mixer for p in mixer.parts] if isinstance(mixer, Heads) else [mixer])
    ]
    return [leaf for leaf in leaves if isinstance(leaf, Softmax)]


# Published figures: what is counted, and what is built.

LAYERS = [(scale, kind, n) for scale, kinds in LAYERS_000.items() for kind, n in kinds.items()]


@pytest.mark.parametrize(("scale", "kind", "published"), LAYERS)
def test_layers_of_000(scale: str, kind: str, published: int):
    spec = preset(f"000/{scale}/{kind}")
    layer = spec.layers[0]
    sinks = layer.mixer.num_heads if kind == "Full" else 0
    assert cost.layer_params(layer, spec.d_model) - 2 * spec.d_model - sinks == published


@pytest.mark.parametrize(("scale", "kind", "published"), LAYERS)
def test_layers_of_000_as_built(scale: str, kind: str, published: int):
    block = LM(preset(f"000/{scale}/{kind}"), device="meta").blocks[0]
    sinks = block.mixer.config.num_heads if kind == "Full" else 0
    assert count(block) - count(block.norm1) - count(block.norm2) - sinks == published


def test_mamba2_layers_of_000_are_near_the_printed_table():
    difference = {scale: MAMBA2_PAPER[scale] - LAYERS_000[scale]["Mamba-2"] for scale in MAMBA2_PAPER}
    assert difference == {"S1": 528, "S2": 0, "S3": 640, "S4": 768}


@pytest.mark.parametrize("name", MILLIONS)
def test_whole_models(name: str):
    spec = preset(name)
    assert (round(cost.total_params(spec) / 1e6), round(cost.non_embedding_params(spec) / 1e6)) == MILLIONS[name]


@pytest.mark.parametrize("name", MILLIONS)
def test_whole_models_as_built(name: str):
    model = LM(preset(name), device="meta")
    embeddings = count(model.embed) + (count(model.lm_head) if model.lm_head is not None else 0)
    assert (round(count(model) / 1e6), round((count(model) - embeddings) / 1e6)) == MILLIONS[name]


def test_spaced_retrieval_model_of_003():
    spec = preset("003/spaced-retrieval")
    layers = cost.cost(spec, 128).layers
    assert cost.total_params(spec) == RETRIEVAL_TOTAL
    assert sum(layer.mixer_params for layer in layers if layer.family == "kda") == RETRIEVAL_KDA_MIXERS
    assert [layer.mixer_params for layer in layers if layer.family == "nope"] == [RETRIEVAL_ATTENTION_MIXER] * 2


def test_spaced_retrieval_model_of_003_as_built():
    model = LM(preset("003/spaced-retrieval"), device="meta")
    assert count(model) == RETRIEVAL_TOTAL
    mixers = [count(block.mixer) for block in model.blocks]
    assert mixers[0] + mixers[2] == RETRIEVAL_KDA_MIXERS
    assert mixers[1::2] == [RETRIEVAL_ATTENTION_MIXER] * 2


@pytest.mark.parametrize(
    ("name", "layers", "d", "d_ff"),
    [  # 001, table 2
        ("001/376M/RoPE", 8, 1024, 3584),
        ("001/776M/RoPE", 12, 1536, 5376),
        ("001/1B/RoPE", 16, 2048, 7168),
        ("001/3B/RoPE", 24, 3072, 10752),
    ],
)
def test_models_of_001(name: str, layers: int, d: int, d_ff: int):
    spec = preset(name)
    assert cost.non_embedding_params(spec) == layers * (4 * d * d + 3 * d * d_ff + 2 * d) + d
    assert (
        count(LM(spec, device="meta")) == cost.total_params(spec) == cost.non_embedding_params(spec) + 2 * 128_256 * d
    )
    assert {(leaf.num_heads, leaf.num_kv_heads, leaf.head_dim) for leaf in softmaxes(spec)} == {
        (d // 128, d // 128, 128)
    }


def test_teacher_of_004_is_qwen3():
    """transformers' own model of the shape, which has no parameters that we do not."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        theirs = Qwen3ForCausalLM(config)
    spec = preset("004/Qwen3-1.7B")
    assert count(LM(spec, device="meta")) == cost.total_params(spec) == count(theirs)
    assert sum(leaf.num_heads for leaf in softmaxes(spec)) == 448  # 004, section 5.7
    assert sum(leaf.num_kv_heads for leaf in softmaxes(spec)) == 224


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_what_is_built_is_what_is_counted(name: str):
    spec = preset(name)
    assert count(LM(spec, device="meta")) == cost.total_params(spec)


# What the names mean.


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("000/S2/SWA-2048", "swa[window=2048, sink=true] full[sink=true]"),
        ("000/S4/GDN", "gdn[num_kv_heads=2, head_dim=46, conv_size=0] full[sink=true]"),
        ("000/S1/Mamba-2", "mamba2[num_heads=6, state_dim=16, num_groups=2, conv_size=0] full[sink=true]"),
        ("000/S2/SWA-128(1:3)", "3*swa[window=128, sink=true] full[sink=true]"),
        ("000/S3/SWA-128-Headwise", "heads(1:swa[window=128, sink=true], 1:full[sink=true])"),
        ("000/S5/SWA-128-NoPE", "swa[window=128, sink=true] nope[sink=true]"),
        ("001/376M/NoPE", "nope"),
        ("001/1B/SWA-NoPE-LH", "3*swa[window=128] nope"),
        ("001/1B/SWA-RoPE-HH", "heads(3:swa[window=128], 1:full)"),
        ("001/776M/GDN-NoPE-HH-1:3", "heads(1:gdn, 3:nope)"),
        ("001/776M/NoPE-RoPE-LH-1:3", "nope 3*full"),
        ("001/1B/GLA-NoPE-LH-YOCO", "12*gla 4*nope"),
        ("001/1B/GDN-NoPE-LH-1:1-YOCO", "8*gdn 8*nope"),
        ("001/1B/GDN-NoPE-HH-7:1", "heads(7:gdn, 1:nope)"),
        ("001/3B/gdn-nope-lh-7:1", "7*gdn nope"),
        ("003/transfer/GDN", "nope 3*gdn[expand_v=2]"),
        ("003/transfer/GLA", "nope 3*gla[expand_k=1, expand_v=2, conv_size=4]"),
        ("004/Qwen3-1.7B", "full[qk_norm=head]"),
        (
            "004/HydraHead-3:1",
            "heads(3:gdn[rope_theta=1000000], 1:nope[qk_norm=head, logn=loga, logn_base=500])"
            "[norm=true, scale=true, gate=true]",
        ),
        ("small/8M", "full"),
        ("SMALL/8m/GDN-NoPE-LH", "3*gdn nope"),
    ],
)
def test_layouts(name: str, layout: str):
    assert preset(name).layout == layout


@pytest.mark.parametrize("size", FAMILIES["000"].sizes)
def test_layers_of_the_sparser_hybrid_of_000(size: str):
    """One layer of full attention after each three of SWA; what is over is SWA."""
    words = [family(layer.mixer) for layer in preset(f"000/{size}/SWA-128(1:3)").layers]
    assert words == ["full" if i % 4 == 3 else "swa" for i in range(len(words))]


@pytest.mark.parametrize("name", [name for name in preset_names() if name.startswith("000/")])
def test_models_of_000(name: str):
    spec = preset(name)
    assert spec.vocab_size == 73_448
    assert not spec.tie_embeddings
    assert {leaf.sink for leaf in softmaxes(spec)} == {True}
    assert {leaf.rope_theta for leaf in softmaxes(spec)} <= {1e5, None}
    assert {layer.d_ff for layer in spec.layers if layer.mixer.kind != "lightning"} == {spec.d_model * 5 // 2}
    assert {layer.d_ff for layer in spec.layers if layer.mixer.kind == "lightning"} <= {spec.d_model * 5 // 2 - 40}


@pytest.mark.parametrize("name", [name for name in preset_names() if name.startswith("small/")])
def test_small_models_are_as_large_as_they_say(name: str):
    label = name.split("/")[1]
    assert cost.total_params(preset(name)) == pytest.approx(float(label.removesuffix("M")) * 1e6, rel=0.15)


def test_names():
    names = preset_names()
    assert len(set(map(str.lower, names))) == len(names)
    for name in names:
        spec = preset(name)
        assert spec == preset(name.upper()) == Spec.from_json(spec.to_json())
        assert spec.context_length is None  # not trained


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("001/776M/GDM-NoPE-HH", "unknown preset '001/776M/GDM-NoPE-HH'; nearest: 001/776M/GDN-NoPE-HH"),
        ("003/750", "nearest: 003/750M"),
        ("001/1B/GDN-NoPE-HH-YOCO", "nearest: 001/1B/GDN-NoPE-LH-YOCO"),
        ("001/1B/NoPE-NoPE-LH", "unknown preset"),
        ("001/1B", "unknown preset"),
        ("003/750M/GDN", "unknown preset"),
        ("", "plait describe --list-presets shows all"),
        ("001/776M/GDN-NoPE-HH-7:1", "preset 001/776M/GDN-NoPE-HH-7:1: layout, position 0: heads: shares 7:1 sum to 8"),
        ("001/776M/GDN-NoPE-LH-7:1", "num_layers = 12; it must be a multiple of the 8 layers"),
        ("001/1B/GDN-NoPE-LH-5:2-YOCO", "num_layers = 16; it must be a multiple of"),
        ("001/1B/GDN-NoPE-LH-99:1-YOCO", "99 layers; the model has num_layers = 16"),
        ("001/1B/GDN-NoPE-LH-0:0-YOCO", "count 0"),
    ],
)
def test_names_that_are_none(name: str, words: str):
    with pytest.raises(ValueError) as error:
        preset(name)
    assert words in str(error.value)
    assert len(str(error.value)) < 200
    assert "\n" not in str(error.value)
