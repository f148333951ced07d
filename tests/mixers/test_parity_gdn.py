"""Gated DeltaNet against the layers of transformers, with the same weights and inputs, in float32: their delta rule
computes in nothing wider."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from contract.tools import dense, error, make_mixer
from torch import Tensor, nn

from plait.config import Gdn
from plait.mixers.seq import Seq

D = 24
LINEAR = ["linear_attention", "full_attention"]


def load(family: str, name: str, config: Gdn, **extra: Any) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if not hasattr(module, f"{name}GatedDeltaNet"):
        pytest.skip(f"transformers has no {name}GatedDeltaNet")
    theirs = getattr(importlib.import_module("transformers"), f"{name}Config")(
        hidden_size=D,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=2,
        layer_types=LINEAR,
        linear_num_key_heads=config.num_kv_heads,
        linear_num_value_heads=config.num_v_heads,
        linear_key_head_dim=config.head_dim,
        linear_value_head_dim=config.value_dim,
        linear_conv_kernel_dim=config.conv_size,
        rms_norm_eps=config.norm_eps,
        **extra,
    )
    return getattr(module, f"{name}GatedDeltaNet")(theirs, 0)


def per_key_head(config: Gdn, *weights: Tensor) -> Tensor:
    """Rows of several projections, those of one key head together."""
    return torch.cat([w.unflatten(0, (config.num_kv_heads, -1)) for w in weights], 1).flatten(0, 1)


@torch.no_grad()
def to_qwen3_next(ours: nn.Module) -> nn.Module:
    theirs, config = load("qwen3_next", "Qwen3Next", ours.config), ours.config
    q, k, v, gate, a, b = (getattr(ours, name).weight for name in ("q", "k", "v", "gate", "a", "b"))
    theirs.in_proj_qkvz.weight.copy_(per_key_head(config, q, k, v, gate))
    theirs.in_proj_ba.weight.copy_(per_key_head(config, b, a))
    theirs.norm.weight.copy_(ours.norm.weight)
    theirs.out_proj.weight.copy_(ours.o.weight)
    return theirs


@torch.no_grad()
def to_olmo_hybrid(ours: nn.Module) -> nn.Module:
    theirs = load("olmo_hybrid", "OlmoHybrid", ours.config, linear_allow_neg_eigval=ours.config.allow_neg_eigval)
    for name in ("q", "k", "v", "a", "b", "o"):
        getattr(theirs, f"{name}_proj").weight.copy_(getattr(ours, name).weight)
    theirs.g_proj.weight.copy_(ours.gate.weight)
    theirs.o_norm.weight.copy_(ours.norm.weight)
    return theirs


PLAIN = {"num_heads": 3, "num_kv_heads": 3, "num_v_heads": 3, "head_dim": 8}
MORE = {"num_heads": 2, "num_kv_heads": 2, "num_v_heads": 6, "head_dim": 8}
CASES = {
    "qwen3_next": (to_qwen3_next, Gdn(**PLAIN)),
    "qwen3_next: more value than key heads": (to_qwen3_next, Gdn(**MORE, norm_eps=1e-5)),
    "qwen3_next: expand_v, conv 3": (to_qwen3_next, Gdn(**MORE, expand_v=1.5, conv_size=3)),
    "olmo_hybrid": (to_olmo_hybrid, Gdn(**PLAIN, expand_v=2.0, norm_eps=1e-5)),
    "olmo_hybrid: negative eigenvalues": (to_olmo_hybrid, Gdn(**PLAIN, allow_neg_eigval=True, norm_eps=1e-5)),
    "olmo_hybrid: more value than key heads": (
        to_olmo_hybrid,
        Gdn(**MORE, expand_v=2.0, allow_neg_eigval=True, norm_eps=1e-5),
    ),
}


@pytest.mark.parametrize(("T", "scale"), [(1, 1.0), (5, 1.0), (64, 1.0), (150, 1.0), (64, 1e-3)])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_parity(name: str, T: int, scale: float):
    """scale 1e-3: keys so short that the epsilon under their norm counts."""
    make, config = CASES[name]
    ours = make_mixer(config, D, dtype=torch.float32)
    theirs = make(ours).eval()
    theirs.conv1d.weight.copy_(ours.conv.weight[:, None])
    theirs.A_log.copy_(ours.A_log)
    theirs.dt_bias.copy_(ours.dt_bias)
    x = scale * torch.randn(2, T, D, generator=torch.Generator().manual_seed(1))
    want = theirs(x)
    for backend in ("torch", "naive"):
        ours.backend = backend
        assert error(ours(x, None, dense(2, T))[0], want) <= 1e-5
    ours.backend = "torch"
    state = ours.new_state(2, T, dtype=x.dtype, device=x.device)
    cuts = sorted({0, T // 3, T // 3 + 1, T - 1, T})
    pieces = [
        ours(x[:, start:end], state, Seq.build((2, end - start), x.device, max_past=start))[0]
        for start, end in zip(cuts, cuts[1:], strict=False)
    ]
    assert error(torch.cat(pieces, 1), want) <= 1e-5


@pytest.mark.parametrize("name", ["qwen3_next: more value than key heads", "olmo_hybrid: negative eigenvalues"])
def test_gradients(name: str):
    make, config = CASES[name]
    ours = make_mixer(config, D, dtype=torch.float32)
    theirs = make(ours).train()
    with torch.no_grad():
        theirs.conv1d.weight.copy_(ours.conv.weight[:, None])
        theirs.A_log.copy_(ours.A_log)
        theirs.dt_bias.copy_(ours.dt_bias)
    x = torch.randn(2, 100, D, generator=torch.Generator().manual_seed(1))
    grads = []
    for module, run in ((ours, lambda x: ours(x, None, dense(2, 100))[0]), (theirs, theirs)):
        y = x.clone().requires_grad_()
        (run(y) * x).sum().backward()
        conv = ours.conv.weight.grad if module is ours else theirs.conv1d.weight.grad[:, 0]
        grads.append([y.grad, module.A_log.grad, module.dt_bias.grad, conv])
    for got, want in zip(*grads, strict=True):
        assert error(got, want) <= 1e-4
