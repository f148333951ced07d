"""Triton kernels by its interpreter, on a CPU, against the formulas that they stand for; test_gpu has them on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NUMBERS = """
from triton.runtime import interpreter
wrapped = interpreter._implicit_cvt  # makes arrays of one of them, which NumPy 2.4 does not take as the end of a loop
interpreter._implicit_cvt = lambda x: x if isinstance(x, int) else wrapped(x)
"""
CROSS_ENTROPY = """
import torch
from plait.cross_entropy import _slice
from plait.kernels.cross_entropy import cross_entropy
for dtype in (torch.float32, torch.bfloat16):
    logits, target = 9 * torch.randn(5, 9001).to(dtype), torch.tensor([0, 9000, 4096, 17, 5])
    logits[3, 17] = logits[3, 4100] = logits[3].max() + 5
    mine = logits.clone()
    for got, want in zip(cross_entropy(mine, target, True), _slice(logits, target, True)):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine, logits)
    loss, _, lse = cross_entropy(logits, torch.tensor([0, 9001, -100, 2**40, 3]), False)
    assert loss.isnan().tolist() == [False, True, True, True, False] and lse.isfinite().all()
"""
ROTATION = """
import torch
from plait.kernels.rotation import rotate
from plait.positions import _rotated
for B, H, E, dim, interleaved, dtype in (
    (2, 3, 8, 8, False, torch.float32),
    (1, 4, 12, 6, True, torch.float32),
    (3, 1, 16, 16, True, torch.bfloat16),
    (2, 5, 10, 6, False, torch.bfloat16),
):
    x = torch.randn(B, 7, H + 1, 2 * E).to(dtype)[:, :, 1:, ::2].transpose(1, 2).contiguous().transpose(1, 2)
    angle = torch.randn(1 if B > 2 else B, 7, 1, dim // 2)
    got, want = (f(x, angle.cos(), angle.sin(), interleaved) for f in (rotate, lambda *a: _rotated(*a, trained=False)))
    torch.testing.assert_close(got, want)
"""
SWIGLU = """
import torch
import torch.nn.functional as F
from plait.kernels.swiglu import Swiglu
for dtype in (torch.float32, torch.bfloat16):
    gate, up, grad = (3 * torch.randn(2, 3, 1501) for _ in range(3))
    gate, up, grad = (x.to(dtype) for x in (gate, up, grad))
    leaves = gate.requires_grad_(), up.requires_grad_()
    out = Swiglu.apply(gate, up.transpose(0, 1).contiguous().transpose(0, 1))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = F.silu(exact[0]) * exact[1]
    torch.testing.assert_close(out, want.to(dtype))
    for got, grads in zip(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(want, exact, grad.double())):
        torch.testing.assert_close(got, grads.to(dtype))
"""
LOG_SIGMOID = """
import torch
import torch.nn.functional as F
from plait.kernels.log_sigmoid import LogSigmoid
extreme = torch.tensor([float("inf"), float("-inf"), float("nan"), 0, 3e38, -3e38])
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x = torch.cat([torch.linspace(-100, 60, 3 * 1501 - len(extreme)), extreme]).to(dtype).requires_grad_()
    out = LogSigmoid.apply(x.view(3, 1501).T, 16)
    grad, exact = torch.randn(3, 1501).T, x.detach().double().requires_grad_()
    want = F.logsigmoid(exact.view(3, 1501).T) / 16
    torch.testing.assert_close(out, want.float(), rtol=1e-6, atol=0, equal_nan=True)
    (got,), (grads,) = torch.autograd.grad(out, x, grad), torch.autograd.grad(want, exact, grad.double())
    limits = torch.finfo(dtype)
    close = {"rtol": max(limits.eps, 1e-6), "atol": limits.smallest_normal * limits.eps, "equal_nan": True}
    torch.testing.assert_close(got, grads.to(dtype), **close)
none = torch.empty(2, 0, 3, requires_grad=True)
assert torch.autograd.grad(LogSigmoid.apply(none, 16).sum(), none)[0].shape == none.shape
"""
PAIRS = """
import torch
from plait.kernels.inverse import unit_inverse
from plait.kernels.pairs import (
    channel_pairs, erasing_pairs, erasing_pairs_back, scalar_reads, scalar_reads_back, whole_chunks
)
from plait.kernels.products import square_mm
from plait.mixers.chunked import LOG2_E, ChannelDecay, ScalarDecay
f32 = torch.float32
for C, K, V, G, decay in ((16, 128, 5, 3, 0), (32, 64, 130, 1, 50), (64, 96, 64, 3, 0.1), (128, 5, 40, 2, 3)):
    k, q, times = torch.randn(2, C, K), torch.randn(2, G * C, K), 2 * torch.rand(2, C, 1)
    g = (-decay * torch.rand(2, C, K)).masked_fill(torch.rand(2, C, K) < 0.02, -1e9)
    one, each = ScalarDecay(g[..., 0].double(), torch.float64, 0.7), ChannelDecay(g.double().exp(), 0.7)
    b, factor = (g[..., 0].double() * LOG2_E).cumsum(1), g.exp()
    mix = one.pairs(k.double(), q.double())[0]
    same = torch.testing.assert_close
    y, dy, erasing = torch.randn(2, C, V), torch.randn(2, C, V), ScalarDecay(g[..., 0].double(), torch.float64, 1.0)
    same(erasing_pairs(k, b, times), (erasing.pairs(k.double(), k.double())[0] * times).float(), rtol=1e-5, atol=1e-4)
    d = (dy.double() @ y.double().mT).tril(-1) * erasing.pair_NCC
    moved = d * (k.double() @ k.double().mT)
    want = d * times, moved.sum(-1, keepdim=True), (moved * times).sum(1)[..., None]
    for got, exact in zip(erasing_pairs_back(k, dy, y, b, times), want):
        same(got, exact.float(), rtol=1e-5, atol=1e-3)
    s, ds, do = torch.randn(2, K, V), torch.randn(2, K, V), torch.randn(2, G * C, V)
    enter = one.enter_NCJ.repeat(1, G, 1)
    entered = 0.7 * enter * (q @ s).double()
    for gate in (None, do):
        got, sums, of_state = scalar_reads(q, k, y, s, b, 0.7, gate)
        want = entered + mix @ y.double()
        same(got, want.float(), rtol=1e-5, atol=1e-3)
        if gate is not None:
            for own, exact in ((sums, want), (of_state, entered)):
                same(own, (exact * gate).sum(-1, keepdim=True).float(), rtol=1e-5, atol=1e-2)
    left = one.leave_NCJ * (k @ ds).double()
    for state, gate in ((None, None), (ds, None), (ds.mT.contiguous().mT, dy)):
        got, sums, of_state = scalar_reads_back(q, k, do, state, b, 0.7, f32, gate)
        want = mix.mT @ do.double() + (0 if state is None else left)
        same(got, want.float(), rtol=1e-5, atol=1e-3)
        if gate is not None:
            for own, exact in ((sums, want), (of_state, left)):
                same(own, (exact * gate).sum(-1, keepdim=True).float(), rtol=1e-5, atol=1e-2)
    for x, pairs in zip((q, k), each.pairs(k.double(), q.double(), k.double())):
        same(channel_pairs(x, k, factor, 0.7, f32), pairs.float(), rtol=1e-5, atol=1e-5)
    same(channel_pairs(k, k, factor, 0.7, f32, times), pairs.float() * times, rtol=1e-5, atol=1e-5)
    for got, want in zip(whole_chunks(factor), (each.enter_NCJ, each.leave_NCJ)):
        same(got, want.float(), rtol=1e-5, atol=1e-7)
    for a in (torch.randn(2, C, C) / 4, torch.randn(2, C, C).mT / 4):
        same(unit_inverse(a), torch.linalg.inv(a.double().tril(-1) + torch.eye(C)).float(), rtol=1e-4, atol=1e-4)
    for a in (torch.randn(2, C, C), torch.randn(2, C, C).mT):
        same(square_mm(a, k, f32), a @ k, rtol=1e-5, atol=1e-4)
        for gate in (factor, times):
            same(square_mm(a, k, f32, gate), a @ (k * gate), rtol=1e-5, atol=1e-4)
"""
RULES = """
import torch
from plait.mixers import chunked, delta, linear
from plait.mixers.seq import Seq
def run(dtype, kernel, f, inputs, grads):
    delta.takes_kernel = linear.takes_kernel = linear.usable = chunked.usable = lambda *_: kernel
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out = f(*leaves)
    return *out, *torch.autograd.grad(out, leaves, [x.to(dtype) for x in grads])
for G, lengths in ((1, [150, 150]), (2, [70, 0, 33])):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    seq = Seq.build((1, sum(lengths)), torch.device("cpu"), cu_seqlens=offsets)
    q, k, v, do = (torch.randn(1, sum(lengths), *shape) for shape in ((2 * G, 24), (2, 24), (2, 40), (2 * G, 40)))
    g, each, beta = -torch.rand(k.shape[:3]), -torch.rand(k.shape), 2 * torch.rand(k.shape[:3])
    g[:, 40], each[:, 40, :, ::3], beta[:, 3] = -1e4, -1e4, 0
    k, start, dlast = k / k.norm(dim=-1, keepdim=True), *torch.randn(2, len(lengths), 2, 24, 40)
    cases = [(lambda *x: delta.delta_chunk(*x, seq, 128), (q, k, v, decay, beta, start)) for decay in (g, each)]
    if G == 1:
        linear_chunk = lambda *x: linear.linear_chunk(*x, seq, scale=0.3, chunk_size=32)
        cases += [(linear_chunk, (q, k, v, decay, start)) for decay in (g, each)]
    for case in cases:
        want = run(torch.float64, False, *case, (do, dlast))
        for got, exact in zip(run(torch.float32, True, *case, (do, dlast)), want):
            assert (got - exact).norm() < 1e-5 * exact.norm()
"""
NORM = """
import torch
import torch.nn.functional as F
from plait.kernels.norm import RmsNorm
for shape, dtype, narrow, weighted in (
    ((2, 40, 1000), torch.float32, torch.bfloat16, True),
    ((5, 3, 96), torch.bfloat16, torch.bfloat16, True),
    ((7, 3, 6000), torch.float32, torch.float32, False),
    ((2, 300, 32), torch.bfloat16, torch.float32, False),
):
    x = (3 * torch.randn(shape)).to(dtype).transpose(0, 1).requires_grad_()
    weight = torch.randn(2 * shape[-1])[::2].requires_grad_() if weighted else None
    leaves = [x, weight] if weighted else [x]
    out = RmsNorm.apply(x, weight, 1e-3, narrow)
    grad = torch.randn(out.shape).to(narrow)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = F.rms_norm(exact[0], shape[-1:], *(exact[1:] or [None]), 1e-3)
    torch.testing.assert_close(out, want.to(narrow))
    for got, grads in zip(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(want, exact, grad.double())):
        limit = 1.6e-2 if got.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(got, grads.to(got.dtype), rtol=limit, atol=1e-4)
"""
SCANS = """
import torch
from plait.mixers import delta, linear
def use(kernel):
    delta.takes_kernel = linear.usable = lambda *_: kernel
for (K, V), rows, dtype in (
    ((64, 40), [2] * 20, torch.float32),
    ((128, 64), [1] * 3, torch.bfloat16),
    ((5, 300), [3, 3, 2, 1, 1], torch.float32),
    ((96, 16), [2], torch.bfloat16),
    ((200, 3), [2], torch.bfloat16),
):
    N, E = sum(rows), rows[0] + 1
    first, w, p = torch.randn(E, V, K).mT, torch.randn(N, V, K).mT, torch.randn(N, K, K).mT / K**0.5
    one, each = (torch.rand(N, 7, J)[:, -1, :, None] ** 0.1 for J in (1, K))  # strided, as a user's state may be
    cases = [(f, keep) for f in (linear.fade, linear.fade_back) for keep in (one, each)]
    cases += [(f, p) for f in (delta.scan, delta.scan_back)] if K <= 128 else []
    for f, own in cases:
        use(False)
        want = f(first.double(), own.double(), w.double(), rows, torch.float64)
        use(True)
        for got, exact in zip(f(first, own, w.clone(), rows, dtype), want):
            assert got.is_contiguous()
            limit = 2**-7 if got.dtype == torch.bfloat16 else 1e-5 if own is not p else 1e-4
            torch.testing.assert_close(got, exact.to(got.dtype), atol=1e-5 if own is not p else 1e-4, rtol=limit)
"""
ROWS = """
import torch
from plait.kernels.rows import times_rows
for N, C, G, X, J, dtype in (
    (3, 16, 2, 5, 1, torch.float32),
    (2, 40, 1, 300, 300, torch.bfloat16),
    (0, 4, 3, 8, 1, torch.float32),
):
    x, gate = torch.randn(N, G * C + 1, 2 * X)[:, 1:, X:], torch.randn(N, J, C).mT
    want = (x.unflatten(1, (G, C)) * gate[:, None]).flatten(1, 2)
    for own in (x, x.mT.contiguous().mT):
        got = times_rows(own, gate, dtype)
        assert got.is_contiguous()
        torch.testing.assert_close(got, want.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
"""
KERNELS = {
    "rows": ROWS,
    "scans": SCANS,
    "cross_entropy": CROSS_ENTROPY,
    "rotation": ROTATION,
    "swiglu": SWIGLU,
    "norm": NORM,
    "log_sigmoid": LOG_SIGMOID,
    "pairs": PAIRS,
    "rules": RULES,
}


@pytest.mark.parametrize("code", KERNELS.values(), ids=KERNELS)
def test_by_the_interpreter(code):
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", NUMBERS + code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
