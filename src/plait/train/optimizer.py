"""The optimizer, and which parameters it pulls towards 0."""

from __future__ import annotations

import torch
from torch import nn

from plait.mixers.conv import ShortConv
from plait.model.lm import LM
from plait.train.config import TrainConfig


def decayed(model: nn.Module) -> set[str]:
    """Names of the parameters with weight decay: weights of linear maps and of short convolutions, nothing else.

    Without it are the embedding (and the head tied to it), norms, biases, sinks, scales of heads, decays (A_log,
    dt_bias) and Mamba-2's skip. Convolutions are linear maps too, and published code of Mamba-2, GDN and KDA exempts
    only A_log, dt_bias and D, which is that skip.
    """
    return {
        f"{name}.weight".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | ShortConv)
    }


def make_optimizer(model: LM, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on what `decayed` names, or Muon; `initial_lr` of a group is its peak."""
    betas = (config.beta1, config.beta2)
    if config.optimizer == "muon":
        from plait.train.muon import Muon, muon_groups

        rates = {"lr": config.muon_lr, "adamw_lr": config.lr, "weight_decay": config.weight_decay}
        return Muon(muon_groups(model, **rates), scale=config.muon_scale, betas=betas)
    names, groups = decayed(model), ([], [])
    for name, parameter in model.named_parameters():
        groups[name not in names].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[0], "weight_decay": config.weight_decay, "initial_lr": config.lr},
            {"params": groups[1], "weight_decay": 0.0, "initial_lr": config.lr},
        ],
        lr=config.lr,
        betas=betas,
        fused=True if all(p.is_cuda for p in model.parameters()) else None,
    )
