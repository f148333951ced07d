"""silu(gate) * up and its gradients: 8 tensors read or written instead of 14."""

# Triton comes with torch where there are GPUs
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _launch(_forward, gate, up, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
        _launch(_backward, gate, up, grad.contiguous(), gate_grad, up_grad)
        return gate_grad, up_grad


def _launch(kernel: Any, *tensors: Tensor) -> None:
    count = tensors[0].numel()
    if count:
        with torch.cuda.device_of(tensors[0]):
            kernel[(triton.cdiv(count, BLOCK),)](*tensors, count, BLOCK=BLOCK, num_warps=8)


@triton.jit
def _forward(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count).to(tl.float32)
    u = tl.load(up + at, mask=at < count).to(tl.float32)
    tl.store(out + at, g * tl.sigmoid(g) * u, mask=at < count)


@triton.jit
def _backward(gate, up, grad, gate_grad, up_grad, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count).to(tl.float32)
    u = tl.load(up + at, mask=at < count).to(tl.float32)
    d = tl.load(grad + at, mask=at < count).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(gate_grad + at, d * u * s * (1 + g * (1 - s)), mask=at < count)
    tl.store(up_grad + at, d * g * s, mask=at < count)
