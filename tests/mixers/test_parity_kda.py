"""Kimi Delta Attention against the layer of transformers, with the same weights and inputs, in float32: their delta
rule computes in nothing wider."""

from __future__ import annotations

import importlib

import pytest
import torch
from contract.configs import disturb
from contract.tools import dense, error, pieces
from torch import Tensor, nn
from torch.func import functional_call

from plait.config import Kda
from plait.mixers import MixerModule, build_mixer

D = 24
SMALL = Kda(num_heads=3, head_dim=8, norm_eps=1e-5)
CASES = {
    "small": SMALL,
    "one head, conv 3": Kda(num_heads=1, head_dim=16, conv_size=3, norm_eps=1e-6),
    "heads wider than the model": Kda(num_heads=2, head_dim=32, norm_eps=1e-5),
}


@torch.no_grad()
def load(config: Kda, seed: int = 0) -> nn.Module:
    """Their layer, its weights moved away from where they start."""
    try:
        module = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    except ModuleNotFoundError:
        pytest.skip("transformers has no kimi_linear")
    theirs = module.KimiLinearConfig(
        hidden_size=D,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_heads=config.num_heads,
        linear_head_dim=config.head_dim,
        linear_conv_kernel_dim=config.conv_size,
        rms_norm_eps=config.norm_eps,
    )
    torch.manual_seed(seed)
    layer = module.KimiLinearDeltaAttention(theirs, 0)
    for parameter in layer.parameters():
        if parameter.ndim == 2:
            parameter.mul_(2)
    disturb(layer, seed)
    return layer


def ours_of(theirs: nn.Module) -> dict[str, Tensor]:
    """Our weights, as functions of theirs: gradients pass through."""
    w = dict(theirs.named_parameters())
    plain = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "b": "b_proj", "o": "o_proj", "norm": "o_norm"}
    low_rank = {"f_down": "forget_gate.f_a_proj", "f_up": "forget_gate.f_b_proj"}
    low_rank |= {"gate_down": "g_a_proj", "gate_up": "g_b_proj"}
    weights = {f"{name}.weight": w[f"{other}.weight"] for name, other in (plain | low_rank).items()}
    return weights | {
        "gate_up.bias": torch.zeros(len(w["g_b_proj.weight"])),  # theirs has none
        "conv.weight": w["conv1d.weight"][:, 0],
        "A_log": w["forget_gate.A_log"].flatten(),
        "dt_bias": w["forget_gate.dt_bias"],
    }


def build(config: Kda, theirs: nn.Module) -> MixerModule:
    ours = build_mixer(config, D, "torch")
    ours.load_state_dict(ours_of(theirs))
    return ours


def inputs(T: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(2, T, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("T", [1, 2, 5, 16, 63, 64, 65, 150])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_parity(name: str, T: int):
    theirs = load(CASES[name])
    ours, x = build(CASES[name], theirs), inputs(T)
    want = theirs(x)
    cuts = tuple(t for t in (T // 2, T // 2 + 1, T // 2 + 2, T - 1) if 0 < t < T)
    for backend in ("torch", "naive"):
        ours.set_backend(backend)
        assert error(ours(x, None, dense(2, T))[0], want) <= 1e-5
        assert error(pieces(ours, x, cuts), want) <= 1e-5


@torch.no_grad()
def test_decode_token_by_token():
    theirs = load(SMALL)
    ours, x = build(SMALL, theirs), inputs(70)
    assert error(pieces(ours, x, tuple(range(1, 70))), theirs(x)) <= 1e-5


@torch.no_grad()
def test_short_keys():
    """Keys so short that the epsilon under their norm counts."""
    theirs = load(SMALL)
    ours, x = build(SMALL, theirs), inputs(64, scale=1e-3)
    want = theirs(x)
    for backend in ("torch", "naive"):
        ours.set_backend(backend)
        assert error(ours(x, None, dense(2, 64))[0], want) <= 1e-5


@pytest.mark.parametrize("dt_bias", [-12.0, 19.0, 25.0, 120.0])
@torch.no_grad()
def test_the_ends_of_the_forget_gate(dt_bias: float):
    """Theirs is log(1 + exp(x)) up to 20 and x above it: exp(120) overflows but is not taken. Below, log(1 + exp(-12))
    keeps few digits, of a decay so near 1 that they do not count."""
    theirs = load(SMALL)
    theirs.forget_gate.dt_bias[::2] = dt_bias
    theirs.forget_gate.A_log[:] = torch.tensor([-7.0, -2.0, 0.5])[:, None]
    ours, x = build(SMALL, theirs), inputs(100)
    want = theirs(x)
    for backend in ("torch", "naive"):
        ours.set_backend(backend)
        assert error(ours(x, None, dense(2, 100))[0], want) <= 1e-5


@pytest.mark.parametrize("backend", ["torch", "naive"])
@pytest.mark.parametrize("T", [7, 64, 100])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, T: int, backend: str):
    """Of the input and of all their weights."""
    theirs = load(CASES[name]).train()
    ours, x = build_mixer(CASES[name], D, backend), inputs(T).requires_grad_()
    y = functional_call(ours, ours_of(theirs), (x, None, dense(2, T)))[0]
    wanted = {"x": x, **dict(theirs.named_parameters())}
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    want = torch.autograd.grad((theirs(x) * direction).sum(), list(wanted.values()))
    got = torch.autograd.grad((y * direction).sum(), list(wanted.values()))
    errors = {leaf: error(g, w) for leaf, g, w in zip(wanted, got, want, strict=True)}
    assert max(errors.values()) <= 1e-4, errors
