"""The head and its cross-entropy as one operation: the only tensor of logits that there is becomes their gradient.

The gradient of a row's loss with respect to its logits, softmax minus one-hot, is known in the forward pass but for one
factor, how much that loss counts. It is written over the logits, in their dtype, and kept; in the backward pass the
factor multiplies rows of D numbers instead of rows of V.

Shapes: N positions, V vocabulary, D = d_model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.kernels import usable

SLICE = {"cpu": 2**19, "cuda": 2**26}
"""logits whose probabilities exist at a time, in fp32, where there is no kernel; they fit a CPU's cache"""


class HeadCrossEntropy(torch.autograd.Function):
    """(losses [N], right or not [N], log-sum-exps [N]) of logits x_ND @ weight_VD.T, which autocast may narrow."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = x_ND.dtype, weight_VD.dtype
        device = x_ND.device.type
        if torch.is_autocast_enabled(device) and x_ND.dtype != torch.float64:
            x_ND, weight_VD = (x.to(torch.get_autocast_dtype(device)) for x in (x_ND, weight_VD))
        with torch.autocast(device, enabled=False):
            logits_NV = x_ND @ weight_VD.T
            loss_N, correct_N, lse_N = cross_entropy(logits_NV, target_N, overwrite=any(ctx.needs_input_grad))
        ctx.save_for_backward(x_ND, weight_VD, target_N, logits_NV)
        ctx.mark_non_differentiable(correct_N)
        return loss_N, correct_N, lse_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, loss_grad_N: Tensor | None, _: None, lse_grad_N: Tensor | None) -> Any:
        """The gradient of a log-sum-exp is that of the loss, plus one at the target."""
        x_ND, weight_VD, target_N, grad_NV = ctx.saved_tensors
        given = [x for x in (loss_grad_N, lse_grad_N) if x is not None]
        if not given:
            return None, None, None
        factor_N1 = sum(given[1:], given[0])[:, None]
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (grad_NV @ weight_VD) * factor_N1
            if lse_grad_N is not None:
                x_grad = x_grad + weight_VD[target_N] * lse_grad_N[:, None]
            x_grad = x_grad.to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            weight_grad = (grad_NV.T @ (x_ND * factor_N1).to(grad_NV.dtype)).to(ctx.dtypes[1])
            if lse_grad_N is not None:
                weight_grad.index_add_(0, target_N, (x_ND * lse_grad_N[:, None]).to(weight_grad.dtype))
        return x_grad, weight_grad, None


def cross_entropy(logits_NV: Tensor, target_N: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(losses, whether the target has the largest logit, log-sum-exps), at least fp32.

    overwrite: the logits become the gradients of the losses with respect to them.
    """
    if usable(logits_NV):
        from plait.kernels.cross_entropy import cross_entropy as kernel

        return kernel(logits_NV, target_N, overwrite)
    size = max(1, SLICE.get(logits_NV.device.type, SLICE["cpu"]) // logits_NV.shape[-1])
    parts = zip(logits_NV.split(size), target_N.split(size), strict=True)
    loss, correct, lse = zip(*(_slice(*part, overwrite) for part in parts), strict=True)
    return torch.cat(loss), torch.cat(correct), torch.cat(lse)


def _slice(logits_NV: Tensor, target_N: Tensor, overwrite: bool) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    best_N1, target_N1 = logits_NV.argmax(-1, keepdim=True), target_N[:, None]
    p_NV = logits_NV.softmax(-1, dtype=dtype)
    largest_N1, wanted_N1 = (logits_NV.gather(-1, index).to(dtype) for index in (best_N1, target_N1))
    rest_N1 = p_NV.gather(-1, best_N1).log()
    if overwrite:
        p_NV.scatter_add_(-1, target_N1, torch.full_like(target_N1, -1, dtype=dtype))
        logits_NV.copy_(p_NV)
    loss_N1 = (largest_N1 - wanted_N1) - rest_N1  # in this order small losses keep their digits
    return loss_N1[:, 0], (best_N1 == target_N1)[:, 0], (largest_N1 - rest_N1)[:, 0]
