"""Mamba-2 against the mixers of transformers (mamba2, bamba), with the same weights and inputs, in float32: their scan
computes in nothing wider."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from contract.configs import disturb
from contract.tools import dense, error, pieces
from torch import Tensor, nn
from torch.func import functional_call

from plait.config import Mamba2
from plait.mixers import MixerModule, build_mixer

D = 24
FAMILIES = ("mamba2", "bamba")
CASES = {
    "one group": Mamba2(num_heads=6, head_dim=8, state_dim=16, norm_eps=1e-5),
    "two groups": Mamba2(num_heads=6, head_dim=8, state_dim=5, num_groups=2, norm_eps=1e-5),
    "a group a head, conv 3": Mamba2(num_heads=4, head_dim=12, state_dim=8, num_groups=4, conv_size=3, norm_eps=1e-6),
    "expand 1, wide state": Mamba2(num_heads=3, head_dim=8, state_dim=64, num_groups=3, norm_eps=1e-5),
}


@torch.no_grad()
def load(family: str, config: Mamba2, conv_bias: bool = True, seed: int = 0) -> tuple[Mamba2, nn.Module]:
    """Our config and their layer, its weights moved away from where they start."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    expand = config.num_heads * config.head_dim // D
    if family == "mamba2":
        theirs = module.Mamba2Config(
            hidden_size=D,
            num_hidden_layers=1,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            state_size=config.state_dim,
            n_groups=config.num_groups,
            conv_kernel=config.conv_size,
            use_conv_bias=conv_bias,
            layer_norm_epsilon=config.norm_eps,
            expand=expand,
            chunk_size=32,
        )
    else:
        theirs = module.BambaConfig(
            hidden_size=D,
            num_hidden_layers=1,
            mamba_n_heads=config.num_heads,
            mamba_d_head=config.head_dim,
            mamba_d_state=config.state_dim,
            mamba_n_groups=config.num_groups,
            mamba_d_conv=config.conv_size,
            mamba_conv_bias=conv_bias,
            rms_norm_eps=config.norm_eps,
            mamba_expand=expand,
            mamba_chunk_size=32,
        )
    torch.manual_seed(seed)
    layer = {"mamba2": "Mamba2Mixer", "bamba": "BambaMixer"}[family]
    mixer = getattr(module, layer)(theirs, 0)
    for parameter in mixer.parameters():
        if parameter.ndim == 2:
            parameter.mul_(2)
    disturb(mixer, seed)
    # Their norm went over all channels before it went over groups of them (transformers 5.17, 5.24).
    return config if hasattr(mixer.norm, "group_size") else dataclasses.replace(config, norm_groups=1), mixer


def ours_of(config: Mamba2, theirs: nn.Module) -> dict[str, Tensor]:
    """Our weights, as functions of theirs: gradients pass through. The rows of their in_proj: z, x, B, C, dt."""
    width, states = config.num_heads * config.head_dim, config.num_groups * config.state_dim
    rows = theirs.in_proj.weight.split((width, width, states, states, config.num_heads))
    conv = theirs.conv1d
    return {
        **{f"{name}.weight": weight for name, weight in zip(("z", "x", "b", "c", "dt"), rows, strict=True)},
        "conv.weight": conv.weight[:, 0],
        "conv.bias": torch.zeros(len(conv.weight)) if conv.bias is None else conv.bias,
        "A_log": theirs.A_log,
        "dt_bias": theirs.dt_bias,
        "skip": theirs.D,
        "norm.weight": theirs.norm.weight,
        "o.weight": theirs.out_proj.weight,
    }


def build(config: Mamba2, theirs: nn.Module) -> MixerModule:
    ours = build_mixer(config, D, "torch")
    ours.load_state_dict(ours_of(config, theirs))
    return ours


def inputs(T: int) -> Tensor:
    return torch.randn(2, T, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("T", [1, 2, 16, 31, 32, 33, 64, 65, 150])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_parity(family: str, name: str, T: int):
    config, theirs = load(family, CASES[name])
    ours, x = build(config, theirs), inputs(T)
    want = theirs(x)
    cuts = tuple(t for t in (T // 2, T // 2 + 1, T // 2 + 2, T - 1) if 0 < t < T)
    for backend in ("torch", "naive"):
        ours.set_backend(backend)
        assert error(ours(x, None, dense(2, T))[0], want) <= 1e-5
        assert error(pieces(ours, x, cuts), want) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_decode_token_by_token_without_a_bias_of_the_convolution(family: str):
    config, theirs = load(family, CASES["two groups"], conv_bias=False)
    ours, x = build(config, theirs), inputs(70)
    assert error(pieces(ours, x, tuple(range(1, 70))), theirs(x)) <= 1e-5


@pytest.mark.parametrize("dt_bias", [-9.0, 15.0, 40.0])
@torch.no_grad()
def test_steps_from_tiny_to_large(dt_bias: float):
    config, theirs = load("mamba2", CASES["two groups"])
    theirs.dt_bias[::2] = dt_bias
    ours, x = build(config, theirs), inputs(100)
    want = theirs(x)
    for backend in ("torch", "naive"):
        ours.set_backend(backend)
        assert error(ours(x, None, dense(2, 100))[0], want) <= 1e-5


@pytest.mark.parametrize("name", ["one group", "two groups"])
@torch.no_grad()
def test_the_groups_of_the_norm_matter(name: str):
    """With other groups than theirs the outputs differ: the comparisons above would see it."""
    config, theirs = load("mamba2", CASES[name])
    x = inputs(40)
    for groups in {1, 2, 6} - {config.num_groups if config.norm_groups is None else config.norm_groups}:
        other = build(dataclasses.replace(config, norm_groups=groups), theirs)
        assert error(other(x, None, dense(2, 40))[0], theirs(x)) > 0.01


@pytest.mark.parametrize("backend", ["torch", "naive"])
@pytest.mark.parametrize("T", [7, 32, 100])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family: str, name: str, T: int, backend: str):
    """Of the input and of all their weights."""
    config, theirs = load(family, CASES[name])
    ours, x = build_mixer(config, D, backend), inputs(T).requires_grad_()
    y = functional_call(ours, ours_of(config, theirs.train()), (x, None, dense(2, T)))[0]
    wanted = {"x": x, **dict(theirs.named_parameters())}
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    want = torch.autograd.grad((theirs(x) * direction).sum(), list(wanted.values()))
    got = torch.autograd.grad((y * direction).sum(), list(wanted.values()))
    errors = {leaf: error(g, w) for leaf, g, w in zip(wanted, got, want, strict=True)}
    assert max(errors.values()) <= 1e-4, errors
