"""Blocks and the model around them: the equations written out, weights at the start, whole models of transformers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from contract.configs import disturb
from contract.tools import dense, error
from torch import Tensor, nn

from plait import cost
from plait.config import NORMS, Gdn, Layer, MlpKind, Softmax
from plait.mixers.norm import Norm
from plait.model.block import Block
from plait.model.lm import LM
from plait.spec import Spec

D, T = 8, 9
MIXER = Softmax(num_heads=2, num_kv_heads=1, head_dim=4)


def block_of(**fields) -> Block:
    block = Block(Layer(mixer=MIXER, **fields), D, "torch")
    with torch.no_grad():
        block.init_weights(0.4, torch.Generator().manual_seed(0))
    disturb(block, 0)
    return block.double()


def x_BTD() -> Tensor:
    return torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mlp(block: Block, x: Tensor) -> Tensor:
    up, kind = x @ block.mlp.up.weight.T, block.layer.mlp
    inner = {
        "swiglu": lambda: F.silu(x @ block.mlp.gate.weight.T) * up,
        "geglu": lambda: F.gelu(x @ block.mlp.gate.weight.T) * up,
        "geglu_tanh": lambda: F.gelu(x @ block.mlp.gate.weight.T, approximate="tanh") * up,
        "gelu": lambda: F.gelu(up),
        "relu2": lambda: up.clamp(min=0) ** 2,
    }[kind]()
    return inner @ block.mlp.down.weight.T


def mixer(block: Block, x: Tensor) -> Tensor:
    return block.mixer(x, None, dense(2, T))[0]


EQUATIONS = {
    "pre": lambda b, x: (
        h := x + 0.5 * mixer(b, b.norm1(x)),
        h - 2 * mlp(b, b.norm2(h)),
    )[-1],
    "post": lambda b, x: (
        h := x + 0.5 * b.norm1(mixer(b, x)),
        h - 2 * b.norm2(mlp(b, h)),
    )[-1],
    "sandwich": lambda b, x: (
        h := x + 0.5 * b.post_norm1(mixer(b, b.norm1(x))),
        h - 2 * b.post_norm2(mlp(b, b.norm2(h))),
    )[-1],
}


@pytest.mark.parametrize("kind", get_args(MlpKind))
@pytest.mark.parametrize("placement", EQUATIONS)
@torch.no_grad()
def test_equations(placement: str, kind: str):
    block = block_of(d_ff=12, mlp=kind, norm_placement=placement, mixer_multiplier=0.5, mlp_multiplier=-2.0)
    assert error(block(x_BTD(), None, dense(2, T)), EQUATIONS[placement](block, x_BTD())) <= 1e-12


@torch.no_grad()
def test_parallel():
    block, x = block_of(d_ff=12, parallel=True, mixer_multiplier=0.5, mlp_multiplier=-2.0), x_BTD()
    n = block.norm1(x)
    assert error(block(x, None, dense(2, T)), x + 0.5 * mixer(block, n) - 2 * mlp(block, n)) <= 1e-12
    assert not list(block.norm2.parameters())


@torch.no_grad()
def test_biases():
    """Of every projection and of the MLP: with weights at zero they are all there is."""
    mixer = dataclasses.replace(MIXER, bias="all", qk_norm="head", qk_norm_kind="rms1p")
    block = Block(Layer(mixer=mixer, d_ff=12, mlp="geglu_tanh", mlp_bias=True), D, "torch")
    block.init_weights(0.4, torch.Generator().manual_seed(0))
    assert not any(module.bias.any() for module in block.modules() if isinstance(module, nn.Linear))
    disturb(block, 0)
    for module in block.modules():
        if isinstance(module, nn.Linear):
            module.weight.zero_()
    block, x = block.double(), x_BTD()
    attended = block.mixer(x, None, dense(2, T))[0]
    assert error(attended, block.mixer.o.bias.expand_as(x)) <= 1e-12
    assert error(block.mlp(x), block.mlp.down.bias.expand_as(x)) <= 1e-12
    assert cost.layer_params(block.layer, D) == sum(p.numel() for p in block.parameters())


@torch.no_grad()
def test_without_mlp():
    block, x = block_of(), x_BTD()
    assert error(block(x, None, dense(2, T)), x + mixer(block, block.norm1(x))) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", NORMS)
@torch.no_grad()
def test_norms(kind: str, dtype: torch.dtype):
    norm = Norm(kind, D, 1e-3)
    norm.init_weights()
    x = 3 * x_BTD() + 1
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    if kind.startswith("layer"):
        centred = x - x.mean(-1, keepdim=True)
        plain = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 5e-3}[dtype]
    norm.to(dtype)
    assert error(norm(x.to(dtype)), plain) <= tolerance  # at the start a norm is only a norm
    disturb(norm, 0)
    weight = norm.weight.double() + (1 if kind == "rms1p" else 0)
    want = plain * weight + (norm.bias.double() if kind == "layer" else 0)
    assert error(norm(x.to(dtype)), want) <= tolerance


def spec_of(**fields) -> Spec:
    layers = (Layer(mixer=MIXER, d_ff=12), Layer(mixer=Gdn(num_heads=2, num_kv_heads=2, num_v_heads=2, head_dim=64)))
    return Spec(vocab_size=11, d_model=D, layers=layers, **fields)


@torch.no_grad()
def test_multipliers_and_head():
    model = LM(spec_of(embed_multiplier=3.0, logit_multiplier=0.5, init_std=0.4)).double()
    tokens = torch.arange(11)[None]
    x = 3 * model.embed.weight[tokens]
    for block in model.layers:
        x = block(x, None, dense(1, 11))
    hidden = model.norm(x)
    assert torch.equal(model.hidden(tokens), hidden)
    assert error(model(tokens), 0.5 * hidden @ model.embed.weight.T) <= 1e-12
    untied = LM(spec_of(tie_embeddings=False)).double()
    assert error(untied(tokens), untied.hidden(tokens) @ untied.lm_head.weight.T) <= 1e-12


def test_weights_at_the_start():
    """A seed fixes them; matrices are normal(0, init_std); GDN's own parameters are as published."""
    model, again, other = LM(spec_of(init_std=0.1)), LM(spec_of(init_std=0.1)), LM(spec_of(init_std=0.1), seed=1)
    for (name, p), q, r in zip(model.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert not torch.equal(p, r) or p.ndim == 1, name
    mixer = model.layers[1].mixer
    for p in (mixer.q.weight, mixer.v.weight, mixer.o.weight):
        assert p.std().item() == pytest.approx(0.1, rel=0.1)
        assert abs(p.mean().item()) < 0.01
    assert torch.equal(mixer.norm.weight, torch.ones(64))
    assert mixer.conv.weight.abs().max() <= 0.5  # uniform, 1 / sqrt(width)


def test_decays_at_the_start():
    """A = U(0, 16); softplus(dt_bias) log-uniform in [1e-3, 0.1] (Gated DeltaNet)."""
    many = Gdn(num_heads=1, num_kv_heads=1, num_v_heads=4000, head_dim=1)
    mixer = LM(Spec(vocab_size=2, d_model=1, layers=(Layer(mixer=many),))).layers[0].mixer
    A, dt = mixer.A_log.detach().exp(), F.softplus(mixer.dt_bias.detach())
    assert 0 <= A.min() < 0.1 < 15.9 < A.max() <= 16
    assert float(A.mean()) == pytest.approx(8, rel=0.05)
    assert 9.9e-4 <= dt.min() < 1.1e-3 < 0.09 < dt.max() <= 0.101
    assert float(dt.log().mean()) == pytest.approx((math.log(1e-3) + math.log(0.1)) / 2, rel=0.05)


@pytest.mark.parametrize("device", ["meta"])
def test_meta_models_cost_nothing(device: str):
    layer = Layer(mixer=Softmax(num_heads=64, num_kv_heads=8, head_dim=128), d_ff=28_672)
    model = LM(Spec(vocab_size=128_000, d_model=8192, layers=(layer,) * 80), device=device)
    assert model.num_params > 60e9
    assert {p.device.type for p in model.parameters()} == {"meta"}


# Whole models of transformers, their weights copied: 1e-4 of the largest logit.

COMMON: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "pad_token_id": 0,
}  # fmt: skip
PEERS: dict[str, tuple[str, dict, dict, dict]] = {
    "llama": ("Llama", {"head_dim": 6}, {}, {}),
    "qwen3": ("Qwen3", {"head_dim": 8}, {"qk_norm": "head"}, {}),
    "olmo2": ("Olmo2", {}, {"qk_norm": "full", "norm_eps": 1e-5}, {"norm_placement": "post", "norm_eps": 1e-5}),
}


@pytest.mark.parametrize("name", PEERS)
@torch.no_grad()
def test_logits_of_transformers(name: str):
    import transformers

    family, theirs_fields, mixer_fields, layer_fields = PEERS[name]
    theirs = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**COMMON, **theirs_fields)
    ).eval()
    eps = theirs.config.rms_norm_eps
    mixer = Softmax(
        num_heads=4, num_kv_heads=2, head_dim=theirs_fields.get("head_dim", 6), rope_theta=10_000.0,
        **{"norm_eps": eps} | mixer_fields,
    )  # fmt: skip
    layer = Layer(mixer=mixer, d_ff=40, **{"norm_eps": eps} | layer_fields)
    ours = LM(Spec(vocab_size=31, d_model=24, layers=(layer,) * 3, tie_embeddings=False, norm_eps=eps))
    first, second = ("post_attention", "post_feedforward") if name == "olmo2" else ("input", "post_attention")
    table = {
        "model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "lm_head", "model.layers": "layers",
        f"{first}_layernorm": "norm1", f"{second}_layernorm": "norm2", "self_attn": "mixer", "_proj": "",
    }  # fmt: skip
    renamed = {}
    for key, value in theirs.state_dict().items():
        for old, new in table.items():
            key = key.replace(old, new)
        renamed[key] = value + (0.3 * torch.randn(value.shape) if value.ndim == 1 else 0)
        value.copy_(renamed[key])
    ours.load_state_dict(renamed)
    tokens = torch.randint(1, 31, (2, 50), generator=torch.Generator().manual_seed(0))
    want = theirs(input_ids=tokens).logits
    assert (ours(tokens) - want).abs().max() <= 1e-4 * want.abs().max()
    mask = torch.arange(50)[None] >= torch.tensor([[0], [13]])  # left padding
    want = theirs(input_ids=tokens, attention_mask=mask.long(), position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    got = ours(tokens, mask=mask)
    assert (got - want)[mask].abs().max() <= 1e-4 * want[mask].abs().max()
