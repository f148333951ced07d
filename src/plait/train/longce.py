"""LongCE: cross-entropy that weighs tokens by what the long context does for them (001, 5.2)."""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT = 5.0
"""largest weight"""


@torch.no_grad()
def longce_weights(loss_full_BT: Tensor, loss_short_BT: Tensor, limit: float = LIMIT) -> Tensor:
    """min(exp(loss_short - loss_full), limit), without gradient; 1 where loss_short is NaN. Of any shape.

    loss_short_BT: of plait.windows.short_losses by the same model, NaN for the first K tokens of every document. The
    loss is the mean of weight * loss_full over all targets; the weights are not made to average 1.
    """
    weight_BT = (loss_short_BT - loss_full_BT).exp().clamp(max=limit)
    return torch.where(loss_short_BT.isnan(), 1.0, weight_BT)
