"""Losses and predictions of chosen tokens, shared by training, evaluation and probes: the head runs only where asked.

Shapes: B rows, T tokens, N positions with a target, D = d_model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.data import IGNORE
from plait.model.lm import LM

CHUNK = 8192
"""positions whose logits exist at a time when no gradient is wanted"""


@dataclass(frozen=True)
class Scores:
    """One entry for every position that has a target, row by row."""

    loss_N: Tensor
    """cross-entropy in nats, at least fp32"""
    correct_N: Tensor
    row_N: Tensor

    def exact_rows(self, num_rows: int) -> Tensor:
        """Which rows have every target right, [B] bool."""
        wrong = torch.zeros(num_rows, device=self.row_N.device)
        return wrong.index_add(0, self.row_N, (~self.correct_N).float()) == 0


def score_tokens(model: LM, tokens_BT: Tensor, targets_BT: Tensor) -> Scores:
    """Loss and argmax at every position whose target is not IGNORE."""
    x_BTD = model.hidden(tokens_BT)
    wanted = targets_BT != IGNORE
    x_ND, target_N = x_BTD[wanted], targets_BT[wanted]
    size = len(target_N) if torch.is_grad_enabled() else CHUNK
    losses, correct = [], []
    for x, target in zip(x_ND.split(size), target_N.split(size), strict=True):
        logits = model.logits(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses.append(F.cross_entropy(logits, target, reduction="none"))
        correct.append(logits.argmax(-1) == target)
    return Scores(torch.cat(losses), torch.cat(correct), wanted.nonzero()[:, 0])
