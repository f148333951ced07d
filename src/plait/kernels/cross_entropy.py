"""Losses of rows of logits: each logit is read from memory once, and its gradient written in its place."""

# Triton comes with torch where there are GPUs
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


def cross_entropy(logits_NV: Tensor, target_N: Tensor, overwrite: bool) -> tuple[Tensor, Tensor, Tensor]:
    N, V = logits_NV.shape
    assert logits_NV.stride(1) == 1 and target_N.is_contiguous()
    loss_N, lse_N = (torch.empty(N, dtype=torch.float32, device=logits_NV.device) for _ in range(2))
    correct_N = torch.empty(N, dtype=torch.bool, device=logits_NV.device)
    own = logits_NV, target_N, loss_N, correct_N, lse_N
    if N:
        with torch.cuda.device_of(logits_NV):
            _rows[(N,)](*own, logits_NV.stride(0), V=V, OVERWRITE=overwrite, BLOCK=BLOCK, num_warps=WARPS)
    return loss_N, correct_N, lse_N


@triton.jit
def _rows(logits, target, loss, correct, lse, stride, V: tl.constexpr, OVERWRITE: tl.constexpr, BLOCK: tl.constexpr):
    """A program for each row. It passes over the row twice; the second time it finds it in the cache."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lanes = tl.arange(0, BLOCK)
    wanted_at = tl.load(target + row)
    inside = (wanted_at >= 0) & (wanted_at < V)  # else the loss is not a number
    wanted = tl.load(logits + wanted_at, mask=inside, other=float("nan")).to(tl.float32)
    largest = tl.full((BLOCK,), -3e38, tl.float32)  # finite, so that differences are numbers
    total = tl.zeros((BLOCK,), tl.float32)
    best = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        at = start + lanes
        x = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
        larger = x > largest
        best = tl.where(larger, at, best)
        new = tl.where(larger, x, largest)
        total = total * tl.exp(largest - new) + tl.exp(x - new)
        largest = new
    top = tl.max(largest, 0)
    rest = tl.log(tl.sum(total * tl.exp(largest - top), 0))
    first = tl.min(tl.where(largest == top, best, V), 0)
    tl.store(loss + row, (top - wanted) + rest)
    tl.store(lse + row, top + rest)
    tl.store(correct + row, first == wanted_at)
    if OVERWRITE:
        for start in range(0, V, BLOCK):
            at = start + lanes
            x = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
            p = tl.exp((x - top) - rest)
            tl.store(logits + at, tl.where(at == wanted_at, p - 1, p), mask=at < V)
