"""A parallel hybrid: what transformers' Falcon-H1 layer adds to the residual stream before its MLP, from attention and
Mamba-2 on one input with an output projection each, is mix(...)[fuse=project] with the same weights; in float32, as
theirs computes in nothing wider.

Their multipliers on inputs, keys and the channels of the Mamba-2 projection are linear and go into our weights; those
on the two outputs are `multipliers`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from contract.configs import disturb
from contract.tools import dense, error, pieces
from torch import Tensor, nn
from torch.func import functional_call

from plait.config import Mamba2, Mix, Softmax
from plait.mixers import MixerModule, build_mixer

D, THETA, EPS = 24, 500.0, 1e-5
MULTIPLIERS = {
    "attention_in_multiplier": 0.7,
    "attention_out_multiplier": 1.6,
    "key_multiplier": 0.4,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.8, 1.2, 0.5, 1.5, 0.9],
}


@dataclass(frozen=True)
class Case:
    mamba: dict[str, Any]
    norm: bool = True
    """mamba_rms_norm: otherwise the gate alone"""
    norm_before_gate: bool = True
    kv: int = 2
    multipliers: bool = True

    @property
    def config(self) -> Mix:
        softmax = Softmax(num_heads=4, num_kv_heads=self.kv, head_dim=6, rope_theta=THETA)
        order = "norm_gate" if self.norm_before_gate else "gate_norm"
        groups = None if self.norm else 0
        mamba = Mamba2(**self.mamba, norm_groups=groups, gate_order=order, norm_eps=EPS)
        outs = (MULTIPLIERS["attention_out_multiplier"], MULTIPLIERS["ssm_out_multiplier"])
        return Mix(mixers=(softmax, mamba), fuse="project", multipliers=outs if self.multipliers else None)


NARROW = {"num_heads": 4, "head_dim": 5, "state_dim": 6, "num_groups": 2}
WIDE = {"num_heads": 6, "head_dim": 8, "state_dim": 16, "num_groups": 1, "conv_size": 3}
CASES = {
    "norm, then gate": Case(NARROW),
    "gate, then norm": Case(NARROW, norm_before_gate=False),
    "gate alone": Case(NARROW, norm=False),
    "wide, norm, then gate": Case(WIDE, kv=4),
    "wide, gate, then norm": Case(WIDE, norm_before_gate=False, kv=1),
    "wide, gate alone, no multipliers": Case(WIDE, norm=False, multipliers=False),
}


@torch.no_grad()
def load(case: Case, seed: int = 0) -> nn.Module:
    """Their model of one layer, whose MLP adds nothing; its weights moved away from where they start."""
    module = importlib.import_module("transformers.models.falcon_h1.modeling_falcon_h1")
    mamba = case.config.mixers[1]
    assert isinstance(mamba, Mamba2)
    config = module.FalconH1Config(
        vocab_size=8,
        hidden_size=D,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=case.kv,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        mamba_d_ssm=mamba.num_heads * mamba.head_dim,
        mamba_n_heads=mamba.num_heads,
        mamba_d_head=mamba.head_dim,
        mamba_n_groups=mamba.num_groups,
        mamba_d_state=mamba.state_dim,
        mamba_d_conv=mamba.conv_size,
        mamba_rms_norm=case.norm,
        mamba_norm_before_gate=case.norm_before_gate,
        mamba_chunk_size=32,
        mlp_multipliers=[1.0, 0.0],
        attn_implementation="sdpa",
        **(MULTIPLIERS if case.multipliers else {}),
    )
    torch.manual_seed(seed)
    model = module.FalconH1Model(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, 1.2 * parameter.shape[1] ** -0.5)
    disturb(model, seed)
    return model


def added(model: nn.Module, x: Tensor) -> Tensor:
    """By their mixers to the residual stream."""
    places = model.rotary_emb(x, torch.arange(x.shape[1])[None])
    return model.layers[0](x, position_embeddings=places)[0] - x


def ours_of(case: Case, layer: nn.Module) -> dict[str, Tensor]:
    """Our weights, as functions of theirs: gradients pass through. The rows of their in_proj: z, x, B, C, dt."""
    config, attention, theirs = case.config.mixers[1], layer.self_attn, layer.mamba
    assert isinstance(config, Mamba2)
    m = MULTIPLIERS if case.multipliers else dict.fromkeys(MULTIPLIERS, 1.0) | {"ssm_multipliers": [1.0] * 5}
    width, states = config.num_heads * config.head_dim, config.num_groups * config.state_dim
    rows = theirs.in_proj.weight.split((width, width, states, states, config.num_heads))
    rows = [m["ssm_in_multiplier"] * each * weight for each, weight in zip(m["ssm_multipliers"], rows, strict=True)]
    weights = {
        "0.q.weight": m["attention_in_multiplier"] * attention.q_proj.weight,
        "0.k.weight": m["attention_in_multiplier"] * m["key_multiplier"] * attention.k_proj.weight,
        "0.v.weight": m["attention_in_multiplier"] * attention.v_proj.weight,
        "0.o.weight": attention.o_proj.weight,
        **{f"1.{name}.weight": weight for name, weight in zip(("z", "x", "b", "c", "dt"), rows, strict=True)},
        "1.conv.weight": theirs.conv1d.weight[:, 0],
        "1.conv.bias": theirs.conv1d.bias,
        "1.A_log": theirs.A_log,
        "1.dt_bias": theirs.dt_bias,
        "1.skip": theirs.D,
        "1.o.weight": theirs.out_proj.weight,
    }
    if case.norm:
        weights["1.norm.weight"] = theirs.norm.weight
    return {f"parts.{name}": weight for name, weight in weights.items()}


def inputs(T: int) -> Tensor:
    return torch.randn(2, T, D, generator=torch.Generator().manual_seed(1))


def build(case: Case, layer: nn.Module) -> MixerModule:
    ours = build_mixer(case.config, D, "torch")
    ours.load_state_dict(ours_of(case, layer))
    return ours


@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 64, 65, 150])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_parity(name: str, T: int):
    case, x = CASES[name], inputs(T)
    model = load(case).eval()
    ours, want = build(case, model.layers[0]), added(model, x)
    if T == 1 and want.shape != x.shape:
        pytest.skip("the norm of this transformers (5.17) loses the axis of a single token, and rows are mixed")
    normed = model.layers[0].input_layernorm(x)
    cuts = tuple(t for t in (T // 2, T // 2 + 1, T // 2 + 2, T - 1) if 0 < t < T)
    for backend in ("torch", "naive"):
        ours.set_backend(backend)
        assert error(ours(normed, None, dense(2, T))[0], want) <= 1e-5
        assert error(pieces(ours, normed, cuts), want) <= 1e-5


@pytest.mark.parametrize("name", ["norm, then gate", "gate, then norm", "gate alone"])
@torch.no_grad()
def test_decode_token_by_token(name: str):
    model, x = load(CASES[name]).eval(), inputs(70)
    ours = build(CASES[name], model.layers[0])
    normed = model.layers[0].input_layernorm(x)
    assert error(pieces(ours, normed, tuple(range(1, 70))), added(model, x)) <= 1e-5


@pytest.mark.parametrize("part", [0, 1])
@torch.no_grad()
def test_each_part_counts(part: int):
    """Either branch is a good share of the sum, so the comparisons above see both."""
    case, x = CASES["norm, then gate"], inputs(40)
    model = load(case).eval()
    ours = build(case, model.layers[0])
    ours.get_parameter(f"parts.{part}.o.weight").zero_()
    assert error(ours(model.layers[0].input_layernorm(x), None, dense(2, 40))[0], added(model, x)) > 0.2


@pytest.mark.parametrize("backend", ["torch", "naive"])
@pytest.mark.parametrize("T", [7, 32, 100])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, T: int, backend: str):
    """Of the input, through their norm, and of all weights of their two mixers."""
    case, x = CASES[name], inputs(T).requires_grad_()
    model = load(case).train()
    layer, ours = model.layers[0], build_mixer(case.config, D, backend)
    y = functional_call(ours, ours_of(case, layer), (layer.input_layernorm(x), None, dense(2, T)))[0]
    leaves = {"x": x, "norm": layer.input_layernorm.weight}
    leaves |= dict(layer.self_attn.named_parameters()) | dict(layer.mamba.named_parameters())
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    want = torch.autograd.grad((added(model, x) * direction).sum(), list(leaves.values()))
    got = torch.autograd.grad((y * direction).sum(), list(leaves.values()))
    errors = {leaf: error(g, w) for leaf, g, w in zip(leaves, got, want, strict=True)}
    assert max(errors.values()) <= 1e-4, errors
