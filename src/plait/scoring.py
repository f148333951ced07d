"""Losses and predictions of chosen tokens, shared by training, evaluation and probes: the head runs only where asked.

Shapes: B rows, T tokens, N positions with a target, D = d_model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from plait.data import IGNORE

CHUNK = 8192
"""positions whose logits exist at a time"""
KEPT = 2**27
"""logits whose gradients are kept, on a CPU; of more they are computed again, CHUNK positions at a time"""
SLICE = {"cpu": 2**19, "cuda": 2**26}
"""logits whose probabilities exist at a time, in fp32; they fit a CPU's cache"""
FEWEST = 256
"""positions at a time, without a gradient, where CHUNK of them would be more than KEPT logits"""


class Scored(Protocol):
    """What predicts tokens: an LM, or what can be asked the same."""

    spec: Any
    """has the vocab_size"""

    def hidden(self, tokens_BT: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor: ...

    def logits(self, x: Tensor) -> Tensor: ...


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
    """KEPT; on a GPU as many as take a sixteenth of its memory in bf16, where that is more."""
    if device.type != "cuda":
        return KEPT
    return max(KEPT, torch.cuda.get_device_properties(device).total_memory // 32)


def _score(model: Scored, x_ND: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return CrossEntropy.apply(model.logits(x_ND), target_N)  # pyright: ignore[reportReturnType]


class CrossEntropy(torch.autograd.Function):
    """(losses, right or not, log-sum-exps) of logits. Forward makes the gradient of each row's loss, which is all that
    is kept, in the dtype of the logits; backward multiplies it by what each loss counts for."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = max(1, SLICE.get(logits_NV.device.type, SLICE["cpu"]) // logits_NV.shape[-1])
        grad_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        found = [
            _cross_entropy(*part, None if grad_NV is None else grad_NV[i * size : (i + 1) * size])
            for i, part in enumerate(zip(logits_NV.split(size), target_N.split(size), strict=True))
        ]
        loss_N, correct_N, lse_N = map(torch.cat, zip(*found, strict=True))
        ctx.save_for_backward(grad_NV, target_N)
        ctx.mark_non_differentiable(correct_N)
        return loss_N, correct_N, lse_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, loss_grad_N: Tensor, _: None, lse_grad_N: Tensor) -> tuple[Tensor, None]:
        """The gradient of a log-sum-exp is that of the loss, plus one at the target."""
        grad_NV, target_N = ctx.saved_tensors
        out_NV = torch.empty_like(grad_NV)
        torch.mul(grad_NV, (loss_grad_N + lse_grad_N)[:, None], out=out_NV)
        return out_NV.scatter_add_(1, target_N[:, None], lse_grad_N[:, None].to(out_NV.dtype)), None


def _cross_entropy(logits_NV: Tensor, target_N: Tensor, grad_NV: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """grad_NV: filled with the gradients of the losses."""
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    best_N, target_N1 = logits_NV.argmax(-1), target_N[:, None]
    p_NV = logits_NV.softmax(-1, dtype=dtype)
    largest_N, wanted_N = (logits_NV.gather(-1, i_N1)[:, 0].to(dtype) for i_N1 in (best_N[:, None], target_N1))
    rest_N = p_NV.gather(-1, best_N[:, None])[
        :, 0
    ].log()  # of the largest, so that it is exact where that is the target
    if grad_NV is not None:
        p_NV.scatter_add_(-1, target_N1, torch.full_like(target_N1, -1, dtype=dtype))
        grad_NV.copy_(p_NV)
    loss_N = (largest_N - wanted_N) - rest_N  # in this order small losses keep their digits
    return loss_N, best_N == target_N, largest_N - rest_N
