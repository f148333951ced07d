"""The same model on a GPU: equal to the CPU in float64, and its caches, padding and training hold there too."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
import pkgutil
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixers.rules import RULES, Rule, by_sequence, gradients, make_decays, to

from plait import kernels, records
from plait.cross_entropy import cross_entropy
from plait.data.spaced_retrieval import SpacedRetrieval
from plait.kernels import usable
from plait.mixers import attention, chunked, delta, gla, linear
from plait.mixers.attention import attend, attend_last, attend_naive
from plait.mixers.chunked import ChannelDecay, ScalarDecay
from plait.mixers.mamba2 import scale_heads
from plait.mixers.norm import Norm
from plait.mixers.seq import Seq
from plait.model.block import Mlp
from plait.model.generate import generate, prefill
from plait.model.lm import LM
from plait.positions import apply_rope
from plait.probes import layer_retrieval_scores
from plait.spec import Spec
from plait.train.checkpoint import checkpoints
from plait.train.config import TrainConfig
from plait.train.loop import train

pytestmark = pytest.mark.gpu

LAYOUTS = (
    "gdn nope",
    "swa[window=5, sink=true] gdn[expand_v=2, num_kv_heads=2]",
    "full[sink=true, qk_norm=head, output_gate=true] gdn[num_v_heads=8, conv_size=0]",
    "nope[logn=loga, logn_base=500] swa[window=70]",
    "kda[expand_v=2] gla[conv_size=4]",
    "mamba2[head_dim=8, state_dim=16] lightning",
    "heads(3:gdn, 1:nope) mix(swa[window=5] + kda)",
    "heads(1:lightning, 3:nope[sink=true]) mix(gla + full)[fuse=gate]",
)


def build(layout: str, dtype: torch.dtype, device: str) -> LM:
    spec = Spec.from_layout(layout, vocab_size=40, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48)
    return LM(dataclasses.replace(spec, init_std=0.3), dtype=dtype, device=device)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.cpu().double() - b.cpu().double()).norm() / b.cpu().double().norm())


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 40, (3, 150), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_equal_to_the_cpu(layout, tokens):
    cpu, gpu = build(layout, torch.float64, "cpu"), build(layout, torch.float64, "cuda")
    whole = gpu(tokens.cuda())
    assert error(whole, cpu(tokens)) < 1e-10
    mask = torch.rand(3, 150, generator=torch.Generator().manual_seed(1)) > 0.3
    assert error(gpu(tokens.cuda(), mask=mask.cuda()), cpu(tokens, mask=mask)) < 1e-10
    offsets = torch.tensor([0, 20, 20, 93, 150])
    assert error(gpu(tokens[:1].cuda(), cu_seqlens=offsets.cuda()), cpu(tokens[:1], cu_seqlens=offsets)) < 1e-10
    for sizes in ([149, 1], [64, 1, 1, 84], [7] * 21 + [3]):
        cache = gpu.new_cache(3, 150)
        pieces = [gpu(piece.cuda(), cache=cache) for piece in tokens.split(sizes, 1)]
        assert error(torch.cat(pieces, 1), whole) < 1e-10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_cpu(layout, tokens):
    grads = []
    for device in ("cpu", "cuda"):
        model = build(layout, torch.float64, device)
        model(tokens.to(device)).square().mean().backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in grads[0].items():
        assert error(grads[1][name], grad) < 1e-9, name


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_bf16_stays_near_fp32(layout, tokens):
    wide = build(layout, torch.float32, "cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = wide(tokens.cuda())
    assert torch.isfinite(logits).all()
    assert error(logits, wide(tokens.cuda())) < 0.05


@pytest.mark.parametrize(("H", "G", "E"), [(4, 4, 128), (9, 3, 64), (4, 2, 40)])
@pytest.mark.parametrize("T", [8, 37, 1024, 1100])
@torch.no_grad()
def test_a_further_piece_in_half_precision(H, G, E, T):
    """On Hopper by cuDNN in two calls, on other GPUs by FlashAttention in one."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((2, T, H, E), (2, 1500, G, E), (2, 1500, G, E))
    q, k, v = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    positions = torch.arange(1500, device="cuda")[None]
    expected = attend_naive(q.bfloat16(), k.bfloat16(), v.double(), positions[:, -T:], positions, None, None)
    got = attend_last(q.bfloat16(), k.bfloat16(), v.bfloat16(), None)
    assert error(got, expected) < 0.006


@torch.no_grad()
def test_left_padded_generation_equals_one_by_one(tokens):
    model = build(LAYOUTS[0], torch.float64, "cuda")
    mask = torch.ones(3, 150, dtype=torch.bool, device="cuda")
    mask[0, :40] = mask[2, :99] = False
    together = generate(model, tokens.cuda(), max_new_tokens=12, mask=mask, chunk=33)
    for row in range(3):
        alone = generate(model, tokens.cuda()[row : row + 1, mask[row]], max_new_tokens=12)
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.parametrize("layout", ["gdn swa[window=5, sink=true]", *LAYOUTS[4:], "heads(3:nope, 1:kda) lightning"])
@torch.no_grad()
def test_a_decode_step_can_be_captured_in_a_cuda_graph(layout, tokens):
    """Nothing in it waits for the host or depends on a Python number that changes."""
    model = build(layout, torch.float32, "cuda")
    plain, static = model.new_cache(3, 64), model.new_cache(3, 64)
    for cache in (plain, static):
        prefill(model, tokens[:, :20].cuda(), cache)
    token = tokens[:, 20:21].cuda().clone()
    mixer_states = [state.map(torch.clone) for state in static.states]
    model(token, cache=static)  # warms up
    for state, saved in zip(static.states, mixer_states, strict=True):
        for (_, buffer), (_, old) in zip(state.tensors(), saved.tensors(), strict=True):
            buffer.copy_(old)
    static.lengths_S.fill_(20)
    graph = torch.cuda.CUDAGraph()
    lengths = static.lengths
    with torch.cuda.graph(graph):
        logits = model(token, cache=static)
    assert lengths is not None
    for step in range(20, 30):
        token.copy_(tokens[:, step : step + 1].cuda())
        expected = model(token, cache=plain)
        graph.replay()
        torch.cuda.synchronize()
        assert error(logits, expected) < 1e-5, step


def test_training_and_scores(tmp_path):
    task = SpacedRetrieval(gaps=(4, 30), batch_size=8, eval_pairs=10)
    spec = Spec.from_layout("gdn[expand_v=2] nope", vocab_size=12, d_model=64, num_layers=2, num_heads=2, d_ff=64)
    config = TrainConfig(steps=30, warmup=5, freeze=("gdn:10-20",), checkpoint_every=10)
    model = train(tmp_path / "x", spec, task, config, settings={}, device="cuda", progress=False)
    losses = [row.values["loss"] for row in records.read(tmp_path / "x" / "records.jsonl") if row.name == "loss"]
    assert losses[-1] < losses[0]
    scores = layer_retrieval_scores(model, task, 30)
    on_cpu = layer_retrieval_scores(model.cpu(), task, 30)
    torch.testing.assert_close(scores, on_cpu, rtol=1e-2, atol=1e-3)


def test_training_goes_on_from_a_checkpoint(tmp_path):
    task = SpacedRetrieval(gaps=(4, 30), batch_size=8, eval_pairs=10)
    spec = Spec.from_layout("gdn nope", vocab_size=12, d_model=64, num_layers=2, num_heads=2, d_ff=64)
    config = TrainConfig(steps=6, warmup=2, checkpoint_every=3, keep=0)
    whole = train(tmp_path / "x", spec, task, config, settings={}, device="cuda", progress=False).state_dict()
    shutil.rmtree(checkpoints(tmp_path / "x")[-1])
    again = train(tmp_path / "x", spec, task, config, settings={}, device="cuda", progress=False).state_dict()
    for name, value in whole.items():
        torch.testing.assert_close(again[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_losses_of_a_large_vocabulary(dtype):
    """The kernel: its losses, and the gradients it writes over the logits."""
    torch.manual_seed(0)
    logits = torch.randn(500, 300_000, device="cuda").to(dtype)
    target = torch.arange(500, device="cuda")
    target[7] = logits[7].argmax()
    exact = logits.double().requires_grad_()
    want = F.cross_entropy(exact, target, reduction="none")
    want.sum().backward()
    loss, correct, lse = cross_entropy(logits, target, overwrite=True)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact.logsumexp(-1), rtol=1e-6, atol=1e-5)
    assert correct.nonzero().flatten().tolist() == [7]
    assert exact.grad is not None
    assert error(logits, exact.grad) < (2**-8 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize(("kind", "size", "dtype"), [("rms", 1000, torch.float32), ("rms1p", 128, torch.bfloat16)])
def test_kernel_of_rms_norm(kind, size, dtype):
    """Rounded to bf16, as before products under autocast, or in bf16 throughout; gradients are those of float64."""
    torch.manual_seed(0)
    norm, x = Norm(kind, size, 1e-5), torch.randn(3, 700, size).to(dtype)
    grad = torch.randn(3, 700, size).bfloat16()
    norm.weight.data.normal_()
    found = []
    for device, wanted, out_dtype in (("cuda", dtype, torch.bfloat16), ("cpu", torch.float64, torch.float64)):
        own = copy.deepcopy(norm).to(device, torch.float32 if device == "cuda" else wanted)
        leaf = x.to(device, wanted).requires_grad_()
        out = own(leaf, out_dtype)
        assert out.dtype == out_dtype and out.grad_fn is not None
        assert (type(out.grad_fn).__name__ == "RmsNormBackward") == (device == "cuda")
        found.append((out, *torch.autograd.grad(out, (leaf, own.weight), grad.to(device, out_dtype))))
    for got, want, limit in zip(*found, (3e-3, 3e-3 if dtype == torch.bfloat16 else 1e-6, 1e-5), strict=True):
        assert error(got, want) < limit


def test_kernels_of_rope_and_swiglu():
    """Outputs and gradients in fp32 are those of the formulas in float64."""
    torch.manual_seed(0)
    mlp, angle = Mlp("swiglu", 64, 200, False), torch.randn(1, 9, 1, 6)
    with torch.no_grad():
        mlp.init_weights(0.3, torch.Generator().manual_seed(0))
    x, grad = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 64)
    found = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        own = copy.deepcopy(mlp).to(device, dtype)
        leaf = x.to(device, dtype).requires_grad_()
        cos, sin = (table.to(device, dtype) for table in (angle.cos(), angle.sin()))
        rotated = [apply_rope(leaf, cos, sin, interleaved) for interleaved in (False, True)]
        out = own(torch.cat(rotated, -1).flatten(2).view(2, 9, 2, 64).sum(2))
        grads = torch.autograd.grad(out, (leaf, *own.parameters()), grad.to(device, dtype))
        found.append((*rotated, out, *grads))
    for got, want in zip(*found, strict=True):
        assert error(got, want) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernel_of_log_decays(dtype):
    """In fp32, and gradients in the dtype of logits: each near the formula's in float64, the tiny ones too."""
    torch.manual_seed(0)
    x, grad = torch.linspace(-100, 70, 120_003).to("cuda", dtype), torch.randn(120_003, device="cuda")
    found = []
    for wanted in (dtype, torch.float64):
        leaf = x.to(wanted).requires_grad_()
        g = gla.log_decay(leaf.view(3, -1).T)
        assert g.grad_fn is not None
        assert (type(g.grad_fn).__name__ == "LogSigmoidBackward") == (wanted == dtype)
        found.append((g, *torch.autograd.grad(g, leaf, grad.view(3, -1).T.to(g.dtype))))
    (g, x_grad), (exact, exact_grad) = found
    torch.testing.assert_close(g, exact.float(), rtol=1e-5, atol=0)
    limits = torch.finfo(dtype)
    close = {"rtol": max(limits.eps, 1e-5), "atol": limits.smallest_normal * limits.eps}
    torch.testing.assert_close(x_grad, exact_grad.to(dtype), **close)


def test_gla_takes_its_decays_from_the_kernel(tokens, monkeypatch):
    """In bf16, with gradients and without. The model's outputs are near those by the formula."""
    from plait.kernels import log_sigmoid

    launched, launch = [], log_sigmoid._launch
    monkeypatch.setattr(log_sigmoid, "_launch", lambda kernel, *own: (launched.append(kernel), launch(kernel, *own)))
    model, tokens = build("gla", torch.bfloat16, "cuda"), tokens.cuda()
    logits = model(tokens)
    logits.float().square().mean().backward()
    with torch.no_grad():
        model(tokens)
        forward, backward = log_sigmoid._forward, log_sigmoid._backward
        assert launched == [forward, forward, backward, backward, forward, forward]
        monkeypatch.setattr(gla, "usable", lambda x: False)
        assert error(model(tokens), logits) < 0.02
    assert len(launched) == 6


@pytest.mark.parametrize("strong", [0.0, 0.02])
@pytest.mark.parametrize(("C", "G", "K"), [(16, 1, 64), (32, 3, 5), (64, 1, 256), (128, 3, 96)])
def test_kernels_of_pair_sums_by_channels(C, G, K, strong):
    """In bf16, beside the formulas in float64. The factors of products are rounded."""
    rng = torch.Generator().manual_seed(0)
    k, q = (torch.randn(5, n * C, K, generator=rng).bfloat16().cuda() for n in (1, G))
    g = make_decays((5, C, K), 0.2, strong, rng).cuda()
    times = torch.rand(5, C, 1, generator=rng).cuda()
    found = []
    for x, dtype in ((k, torch.float32), (k.double(), torch.float64)):
        kernel = dtype == torch.float32
        decay = ChannelDecay(g.to(dtype).exp(), 0.7, kernel)
        pairs = decay.pairs(x, q.to(x), x, first=x.dtype, times=times if kernel else None)
        if not kernel:
            pairs[1] *= times
        assert not any(p.unflatten(1, (-1, C)).triu(1).any() for p in pairs)
        found.append((*pairs, decay.enter_NCJ, decay.leave_NCJ))
    for got, want, bound in zip(*found, (4e-3, 3e-3, 1e-5, 1e-5), strict=True):
        assert error(got, want) < bound


@pytest.mark.parametrize(("C", "K", "V"), [(16, 64, 5), (32, 5, 256), (128, 96, 128), (256, 256, 64)])
def test_kernels_of_erasing_pairs(C, K, V):
    """In bf16, beside the formula in float64, and its gradients."""
    rng = torch.Generator().manual_seed(0)
    k, dy, y = (torch.randn(5, C, size, generator=rng).bfloat16().cuda() for size in (K, V, V))
    g, times = make_decays((5, C), 0.2, 0.02, rng).cuda(), torch.rand(5, C, 1, generator=rng).cuda()
    kernel, decay, gate = ScalarDecay(g, torch.float32, 0.7, True), ScalarDecay(g, torch.float64, 1.0), times.double()
    assert error(kernel.erase(k, times), decay.pairs(k.double(), k.double())[0] * gate) < 1e-5
    got = kernel.erase_grads(k, dy, y, times)
    d = (dy.double() @ y.double().mT).tril(-1) * decay.pair_NCC
    moved = d * (k.double() @ k.double().mT)
    want = d * gate, moved.sum(-1, keepdim=True), (moved * gate).sum(1)[..., None]
    for mine, exact, bound in zip(got, want, (4e-3, 1e-5, 1e-5), strict=True):
        assert error(mine, exact) < bound


@pytest.mark.parametrize(
    ("C", "G", "K", "V"), [(16, 3, 64, 5), (32, 1, 5, 256), (64, 1, 64, 32), (128, 2, 96, 128), (256, 1, 256, 64)]
)
def test_kernel_of_what_is_read_from_a_chunk(C, G, K, V):
    """In bf16, beside the formula in float64 and its gradients; pairs are rounded in between."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((G * C, K), (C, K), (C, V), (K, V), (G * C, V), (K, V))
    x, k, y, state, do, dstate = (torch.randn(5, *shape, generator=rng).bfloat16().cuda() for shape in shapes)
    g = make_decays((5, C), 0.2, 0.02, rng).cuda()
    decay, b = ScalarDecay(g, torch.float32, 0.7, True), g.double().cumsum(1).requires_grad_()
    leaves = [z.double().requires_grad_() for z in (x, k, y)]
    past = torch.ones(C, C, device="cuda").tril().bool()
    p = 0.7 * (leaves[0] @ leaves[1].mT) * (b[:, :, None] - b[:, None]).where(past, -torch.inf).exp().repeat(1, G, 1)
    o = 0.7 * b.exp()[..., None].repeat(1, G, 1) * (leaves[0] @ state.double()) + p @ leaves[2]
    leave = (b.detach()[:, -1:] - b).exp()[..., None]
    w = (leave * leaves[1]).mT @ leaves[2]
    dx, dk, dy, db = torch.autograd.grad((o, w), (*leaves, b), (do.double(), dstate.double()))
    moved = leaves[1] * (leave * (leaves[2] @ dstate.double().mT))
    assert error(decay.read(x, k, y, state), o) < 5e-3
    assert error(decay.read_back(x, k, do, torch.bfloat16, dstate), dy) < 5e-3
    assert error(decay.read_back(x, k, do, torch.float32), p.mT @ do.double()) < 4e-3
    got = decay.read_grads(x, k, y, do, state, dstate, torch.float32)
    want = dx, dk, db[..., None], moved.sum(-1, keepdim=True)
    for mine, exact, bound in zip(got, want, (5e-3, 4e-3, 4e-3, 1e-5), strict=True):
        assert error(mine, exact) < bound


@pytest.mark.parametrize(("C", "X"), [(16, 5), (64, 200), (128, 128)])
def test_products_of_the_precision_of_fp32(C, X):
    from plait.kernels.products import square_mm

    rng = torch.Generator().manual_seed(0)
    a, x = (torch.randn(5, C, size, generator=rng).cuda() for size in (C, X))
    for own in (a, a.mT):
        for columns in (x, x.bfloat16()):
            assert error(square_mm(own, columns, torch.float32), own.double() @ columns.double()) < 1e-5
            assert error(square_mm(own, columns, torch.bfloat16), own.double() @ columns.double()) < 4e-3
            for gate in (x, x[..., :1]):
                gated = columns.double() * gate.double()
                assert error(square_mm(own, columns, torch.float32, gate), own.double() @ gated) < 1e-5


@pytest.mark.parametrize("C", [16, 32, 64, 128])
def test_inverses_of_the_precision_of_fp32(C):
    from plait.kernels.inverse import unit_inverse

    a = torch.randn(70, C, C, generator=torch.Generator().manual_seed(0)).cuda() / 4
    want = torch.linalg.inv(a.double().tril(-1) + torch.eye(C, device="cuda"))
    got = unit_inverse(a)
    assert error(got, want) < 1e-5 and not got.triu(1).any()


@pytest.mark.parametrize("scan", [delta.scan, delta.scan_back], ids=["forth", "back"])
@pytest.mark.parametrize(("K", "V"), [(96, 40), (128, 128), (5, 300), (64, 64)])
@pytest.mark.parametrize("rows", [[8], [16] * 3, [40] * 70 + [7] * 2 + [1]], ids=lambda rows: str(len(rows)))
def test_kernel_of_the_scan_of_the_delta_rule(rows, K, V, scan):
    """As the formula in float64."""
    rng, N, E = torch.Generator().manual_seed(0), sum(rows), rows[0] + 1
    first, w = (torch.randn(n, K, V, generator=rng).cuda() for n in (E, N))
    p = torch.randn(N, K, K, generator=rng).cuda() / (2 * K**0.5)
    assert delta._scans_in_kernel(w, torch.bfloat16)
    want = scan(first.double(), p.double(), w.double(), rows, torch.float64)
    for got, exact in zip(scan(first, p, w, rows, torch.bfloat16), want, strict=True):
        assert error(got, exact) < (1e-6 if got.dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("scan", [linear.fade, linear.fade_back], ids=["forth", "back"])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("K", "V"), [(96, 40), (128, 128), (5, 300)])
@pytest.mark.parametrize("rows", [[8], [16] * 3, [3] * 70, [40] * 70 + [7] * 2 + [1]], ids=lambda rows: str(len(rows)))
def test_kernel_of_the_scan_of_linear_attention(rows, K, V, channels, scan):
    """As the formula in float64."""
    rng, N, E = torch.Generator().manual_seed(0), sum(rows), rows[0] + 1
    first, w = (torch.randn(n, K, V, generator=rng).cuda() for n in (E, N))
    keep = (torch.rand(N, 2, K if channels else 1, generator=rng) ** 0.1).cuda()[:, -1, :, None]
    assert usable(w)
    want = scan(first.double(), keep.double(), w.double(), rows, torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        for got, exact in zip(scan(first, keep, w, rows, dtype), want, strict=True):
            assert error(got, exact) < (1e-6 if got.dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("shape", [(16, 96), (20, 5), (128, 1000)], ids=str)
def test_kernel_of_rows_times_numbers(shape):
    C, X = shape
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3 * C, 2 * X, generator=rng).bfloat16().cuda()[..., X:]
    assert usable(x)
    for gate in (torch.randn(7, C, size, generator=rng).cuda() for size in (1, X)):
        want = (x.unflatten(1, (3, C)) * gate[:, None]).flatten(1, 2)
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(chunked.mul_rows(x, gate, dtype), want.to(dtype))


def test_values_of_mamba2():
    """x times a step size of each head, rounded once, and the gradients of both."""
    rng = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(2, 70, 3, 80, generator=rng).bfloat16().cuda()[..., 40:] for _ in range(2))
    dt = torch.rand(2, 70, 3, generator=rng).cuda()
    leaves = x.requires_grad_(), dt.requires_grad_()
    v, want = scale_heads(*leaves), x.float() * dt[..., None]
    assert torch.equal(v, want.bfloat16())
    exact = torch.autograd.grad(want, leaves, grad.float())
    for got, y, bound in zip(torch.autograd.grad(v, leaves, grad), exact, (4e-3, 1e-5), strict=True):
        assert error(got, y) < bound


def test_gradients_of_attention_whatever_their_layout():
    """Of a part of the heads, then of a tensor of its own: cuDNN's plan for one is not the other's."""
    torch.manual_seed(0)
    q, k, v, do = torch.randn(4, 2, 2048, 8, 128, device="cuda").bfloat16()
    do[:, 64:] = 0  # so that the specification need not look at later tokens
    leaves = [x[:, :, :2].clone().requires_grad_() for x in (q, k, v)]
    exact = [x.detach()[:, :64].double().requires_grad_() for x in leaves]
    seq, position = Seq.build((2, 2048), q.device), torch.arange(64, device="cuda")[None]
    for grad in (do[:, :, :2], do[:, :, :2].contiguous(), do[:, :, 5:7]):
        got = torch.autograd.grad(attend(*leaves, seq), leaves, grad)
        o = attend_naive(*exact, position, position, None, None)
        for x, y in zip(got, torch.autograd.grad(o, exact, grad[:, :64].double()), strict=True):
            assert error(x[:, :64], y) < 0.01 and not x[:, 64:].any()


@pytest.mark.parametrize("T", [60, 1024])
@pytest.mark.parametrize("masked", [False, True])
def test_masks_learn_without_cudnn(T, masked):
    q, k, v = (torch.randn(1, 2, T, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = torch.ones(T, T, dtype=torch.bool, device="cuda").tril() if masked else None
    o = attention._sdpa(q, k, v, attn_mask=mask, is_causal=not masked)
    (attends, _), *_ = o.grad_fn.next_functions
    assert not (masked and "Cudnn" in attends.name())
    position = torch.arange(T, device="cuda")[None]
    want = attend_naive(*(x.double().transpose(1, 2) for x in (q, k, v)), position, position, None, None)
    assert error(o.transpose(1, 2), want) < 5e-3


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("lengths", [None, [300, 0, 17, 129], [40, 0]])
@pytest.mark.parametrize(("G", "K", "strong"), [(1, 128, 0.0), (3, 96, 0.01)])
def test_chunks_in_bf16(rule: Rule, lengths, G, K, strong, monkeypatch):
    """Outputs and gradients are those of the specification in float64, by the kernels and without them."""
    B, T = (2, 300) if lengths is None else (1, sum(lengths))
    offsets = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    seq = Seq.build((B, T), torch.device("cuda"), cu_seqlens=offsets)
    inputs = rule.make_inputs(B, T, 2, G, K, 64, strong=strong, sequences=seq.num_sequences)
    inputs = [x.cuda() for x in to(inputs, torch.bfloat16)]
    naive = rule.naive if lengths is None else by_sequence(rule, lengths)
    exact = gradients(naive, to(inputs, torch.float64))
    rule.assert_same(gradients(rule.chunk(seq, None), inputs), exact, torch.bfloat16)
    for module in (chunked, linear):
        monkeypatch.setattr(module, "usable", lambda x: False)
    rule.assert_same(gradients(rule.chunk(seq, None), inputs), exact, torch.bfloat16)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize(("K", "V"), [*itertools.product((32, 64, 128), repeat=2), (16, 64), (64, 16)])
def test_sizes_of_keys_and_values_in_bf16(rule: Rule, K, V):
    """In chunks of 64 and of 128 tokens, one query a state and two. No kernel that ran reads what nothing has written:
    ptxas 12.8 can make it so (kernels/pairs.py, COLUMNS)."""
    for T, G in ((60, 1), (150, 2)):
        inputs = [x.cuda() for x in to(rule.make_inputs(2, T, 2, G, K, V), torch.bfloat16)]
        seq = Seq.build((2, T), torch.device("cuda"))
        exact = gradients(rule.naive, to(inputs, torch.float64))
        rule.assert_same(gradients(rule.chunk(seq, None), inputs), exact, torch.bfloat16)
    found = [(kernel.name, unwritten(kernel.asm["sass"])) for kernel in launched_kernels()]
    assert found
    assert not [(name, registers) for name, registers in found if registers]


def launched_kernels() -> Iterator[Any]:
    """plait's, as compiled in this process."""
    import triton

    for name in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for item in vars(importlib.import_module(name.name)).values():
            if isinstance(item, triton.JITFunction):
                yield from item.device_caches[torch.cuda.current_device()][0].values()


def unwritten(machine_code: str) -> set[str]:
    """Uniform registers that are read and never written."""
    read, written = set(), set()
    for line in machine_code.splitlines():
        operation, _, operands = re.sub(r"^@!?U?P\w+ ", "", line.split("\t")[-1]).partition(" ")
        # a product of tiles reads where its second one lies from the third register named
        operands = re.sub(r"gdesc\[UR(\d+)\]", lambda found: f"UR{int(found[1]) + 2}", operands)
        target = re.match(r"UR(\d+),", operands)
        if target:
            width = 4 if ".128" in operation else 2 if re.search(r"\.64|WIDE", operation) else 1
            written |= {f"UR{int(target[1]) + i}" for i in range(width)}
        read |= set(re.findall(r"\bUR\d+", operands[target.end() if target else 0 :]))
    return read - written


def test_unwritten_registers_are_found():
    code = (
        "ULDC.64 UR4, c[0x0];",
        "@P0 UIADD3 UR6, UP0, UR5, 0x1, URZ;",
        "HGMMA.64x32x16.F32.BF16 R8, R4, gdesc[UR4];",
    )
    assert unwritten("\n".join(f"--:-:-:Y:1\t{line}" for line in code)) == set()
    assert unwritten("\n".join(f"--:-:-:Y:1\t{line}" for line in code[1:])) == {"UR5"}
