"""Losses and predictions of chosen tokens, shared by training, evaluation and probes: the head runs only where asked.

Shapes: B rows, T tokens, N positions with a target, D = d_model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from plait.cross_entropy import HeadCrossEntropy, cross_entropy
from plait.data import IGNORE

CHUNK = 8192
"""positions whose logits exist at a time"""
KEPT = 2**27
"""logits whose gradients are kept, on a CPU; of more they are computed again, CHUNK positions at a time"""
FEWEST = 256
"""positions at a time, without a gradient, where CHUNK of them would be more than KEPT logits"""


class Scored(Protocol):
    """What predicts tokens: an LM, or what can be asked the same."""

    spec: Any
    """has the vocab_size"""

    def hidden(self, tokens_BT: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor: ...

    def logits(self, x: Tensor) -> Tensor: ...

    def head(self) -> tuple[Tensor, float] | None:
        """For gradients: (matrix [V, D], factor) where logits are no more than both times x."""
        ...


@dataclass(frozen=True)
class Scores:
    """One entry for every position that has a target, row by row."""

    loss_N: Tensor
    """cross-entropy in nats, at least fp32"""
    correct_N: Tensor
    row_N: Tensor
    lse_N: Tensor
    """log-sum-exp of the logits"""

    def exact_rows(self, num_rows: int) -> Tensor:
        """Which rows have every target right, [B] bool."""
        wrong = torch.zeros(num_rows, device=self.row_N.device)
        return wrong.index_add(0, self.row_N, (~self.correct_N).float()) == 0


def score_tokens(model: Scored, tokens_BT: Tensor, targets_BT: Tensor, *, cu_seqlens: Tensor | None = None) -> Scores:
    """Loss and argmax at every position whose target is not IGNORE. cu_seqlens: as in a Group."""
    if cu_seqlens is None:
        x_BTD = model.hidden(tokens_BT)
    else:
        x_BTD = model.hidden(tokens_BT.reshape(1, -1), cu_seqlens=cu_seqlens).view(*tokens_BT.shape, -1)
    return score_hidden(model, x_BTD, targets_BT)


def score_hidden(model: Scored, x_BTD: Tensor, targets_BT: Tensor) -> Scores:
    """`score_tokens` of what model.hidden gave."""
    V = model.spec.vocab_size
    place_N = (targets_BT.flatten() != IGNORE).nonzero()[:, 0]
    x_ND, target_N = (x.index_select(0, place_N) for x in (x_BTD.flatten(0, 1), targets_BT.flatten()))
    grad = torch.is_grad_enabled()
    short = getattr(model, "recompute", None) is not None  # of memory
    kept = grad and len(target_N) * V <= (KEPT if short else most_kept(x_ND.device))
    size = max(1, len(target_N)) if kept else CHUNK if grad else min(CHUNK, max(FEWEST, KEPT // V))
    found = []
    for x, target in zip(x_ND.split(size), target_N.split(size), strict=True):
        if kept or not grad:
            found.append(_score(model, x, target))
        else:
            found.append(checkpoint(_score, model, x, target, use_reentrant=False))
    loss_N, correct_N, lse_N = map(torch.cat, zip(*found, strict=True))
    return Scores(loss_N, correct_N, place_N // targets_BT.shape[1], lse_N)


def most_kept(device: torch.device) -> int:
    """KEPT; on a GPU as many as take an eighth of its memory in bf16, where that is more."""
    if device.type != "cuda":
        return KEPT
    return max(KEPT, torch.cuda.get_device_properties(device).total_memory // 16)


def _score(model: Scored, x_ND: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(losses, right or not, log-sum-exps)."""
    if not torch.is_grad_enabled():
        return cross_entropy(model.logits(x_ND), target_N)
    if (head := model.head()) is not None:
        weight_VD, factor = head
        x_ND = x_ND if factor == 1 else x_ND * factor
        return HeadCrossEntropy.apply(x_ND, weight_VD, target_N)  # pyright: ignore[reportReturnType]
    logits_NV = model.logits(x_ND)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    loss_N = F.cross_entropy(logits_NV, target_N, reduction="none")
    return loss_N, logits_NV.argmax(-1) == target_N, logits_NV.logsumexp(-1)
