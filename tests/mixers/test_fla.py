"""The fla backend: its errors anywhere; on a GPU, every function against the torch backend in float64.

Inputs are bf16 or fp32. The bound is that of bf16 for both (1e-2 for outputs and states, 2e-2 for gradients): the
kernels multiply fp32 in tf32, Triton's default, which keeps 10 bits to bf16's 7.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from contract.tools import make_mixer
from torch import Tensor

from plait.config import Gdn, Gla, Kda, Lightning, Mamba2, Mix, Mixer
from plait.mixers import base, build_mixer, fla
from plait.mixers.attention import attend
from plait.mixers.delta import delta_chunk
from plait.mixers.flex import attend_flex
from plait.mixers.linear import linear_chunk
from plait.mixers.norm import l2_norm
from plait.mixers.seq import Seq
from plait.model.lm import LM
from plait.spec import Spec

DEVICE = torch.device("cuda")
FORWARD, BACKWARD = 1e-2, 2e-2
LAYOUTS = {"dense": ((2, 150), None), "packed": ((1, 150), [0, 70, 70, 71, 150])}
DTYPES = (torch.bfloat16, torch.float32)

gpu = pytest.mark.gpu
layouts = pytest.mark.parametrize("layout", LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def seq_of(layout: str) -> Seq:
    shape, offsets = LAYOUTS[layout]
    return Seq.build(shape, DEVICE, cu_seqlens=None if offsets is None else torch.tensor(offsets))


def tokens(seq: Seq) -> tuple[int, int]:
    return (seq.num_sequences, seq.lengths[0]) if seq.dense else (1, sum(seq.lengths))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cpu", generator=GENERATOR).to(DEVICE, dtype)


GENERATOR = torch.Generator()


@pytest.fixture(autouse=True)
def _seed():
    GENERATOR.manual_seed(0)


def error(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def compare(run, reference, inputs: list[Tensor], names: str) -> None:
    """Outputs and gradients of run on `inputs` against those of reference on the same in float64."""
    upstream = None
    results = []
    for function, dtype in ((run, None), (reference, torch.float64)):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
        outs = function(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        if upstream is None:
            upstream = [draw(*out.shape, dtype=out.dtype) for out in outs]
        grads = torch.autograd.grad(outs, leaves, [d.to(out.dtype) for d, out in zip(upstream, outs, strict=True)])
        results.append((outs, grads))
    (outs, grads), (outs_64, grads_64) = results
    for place, (out, expected) in enumerate(zip(outs, outs_64, strict=True)):
        assert out.shape == expected.shape
        assert error(out, expected) < FORWARD, ("output", place, error(out, expected))
    for name, x, grad, expected in zip(names.split(), inputs, grads, grads_64, strict=True):
        assert grad.dtype == x.dtype
        assert error(grad, expected) < BACKWARD, (name, error(grad, expected))


def decays(*shape: int) -> Tensor:
    return -F.softplus(draw(*shape)) / 4


# ---- anywhere


def calls(device: str, dtype: torch.dtype = torch.float32):
    """One call of every function."""
    x = torch.zeros(1, 3, 2, 16, device=device, dtype=dtype)
    seq = Seq.build((1, 3), torch.device(device))
    return {
        "linear_fla": lambda: fla.linear_fla(x, x, x, x[..., 0], None, seq, scale=1.0),
        "delta_fla": lambda: fla.delta_fla(x, x, x, x[..., 0], x[..., 0], None, seq),
        "conv_fla": lambda: fla.conv_fla(x.flatten(2), x[0, 0].flatten()[:, None], None, None, seq),
        "norm_gate_fla": lambda: fla.norm_gate_fla(x, x, x[0, 0, 0], 1e-6, "silu"),
    }


@pytest.mark.parametrize("name", calls("cpu"))
def test_tensors_on_a_cpu_are_one_readable_error(name):
    with pytest.raises(ValueError, match=r"backend fla: its kernels run on CUDA devices only, .* are on cpu") as caught:
        calls("cpu")[name]()
    assert "\n" not in str(caught.value)


def test_a_model_on_a_cpu():
    """fla is refused and auto takes torch, when the model runs: only then is it known where it is."""
    spec = Spec.from_layout("kda nope", vocab_size=8, d_model=16, num_layers=2, num_heads=2)
    text = torch.arange(8)[None]
    with pytest.raises(ValueError, match=r"backend = 'fla': its kernels run on CUDA devices only, .* are on cpu"):
        LM(spec, backend="fla")(text)
    torch.testing.assert_close(LM(spec, backend="auto")(text), LM(spec)(text))


def test_auto_says_once_what_it_takes(capsys):
    base._announce.cache_clear()
    spec = Spec.from_layout("kda nope", vocab_size=8, d_model=16, num_layers=2, num_heads=2)
    for _ in range(2):
        LM(spec, backend="auto")(torch.arange(8)[None])
    out, err = capsys.readouterr()
    assert out == "" and err.count("backend auto: torch (its kernels run on CUDA devices only") == 1


def test_heads_that_its_kernels_cannot_take():
    large = Kda(num_heads=1, head_dim=300)
    with pytest.raises(ValueError, match="kda: key size 300; its delta-rule kernels take at most 256; use backend"):
        build_mixer(large, 16, "fla")
    with pytest.raises(ValueError, match="key size 300"):
        build_mixer(Mix(mixers=(large, large)), 16, "fla")
    mixer = build_mixer(large, 16, "torch")
    mixer.set_backend("fla", fall_back=True)
    assert mixer.backend == "torch"


def test_the_module_imports_neither_fla_nor_a_kernel():
    code = "import sys, plait.mixers.fla; assert 'fla' not in sys.modules; "  # torch imports triton itself
    code += "assert not any(name.startswith('plait.kernels.') for name in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("found", "reason"),
    [("0.5.2", "0.5.2 is installed, and plait needs 0.6.0"), ("0.7.0", "before 0.7.0"), ("0.6.1", None), (None, None)],
)
def test_versions(monkeypatch, found, reason):
    monkeypatch.setattr(fla, "find_spec", lambda name: True)
    monkeypatch.setattr(fla, "_installed", lambda: found)
    said = fla.why_not.__wrapped__(torch.device("cuda"))
    assert said is None if reason is None else reason in said


def test_not_installed(monkeypatch):
    monkeypatch.setattr(fla, "find_spec", lambda name: None)
    assert "pip install" in fla.why_not.__wrapped__(torch.device("cuda"))


def test_sizes():
    assert fla.why_not_delta(256) is None
    assert "at most 256" in fla.why_not_delta(257)


# ---- on a GPU


@gpu
def test_float64_is_refused():
    for call in calls("cuda", torch.float64).values():
        with pytest.raises(ValueError, match="float64"):
            call()


def linear_inputs(seq: Seq, dtype: torch.dtype, *, channels: bool, K=32, V=64, H=2) -> list[Tensor]:
    B, T = tokens(seq)
    g = decays(B, T, H, K) if channels else decays(B, T, H)
    q, k, v = (draw(B, T, H, size, dtype=dtype) for size in (K, K, V))
    return [q, k, v, g, draw(seq.num_sequences, H, K, V)]


@gpu
@layouts
@dtypes
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"K": 8, "V": 12}], ids=["", "small"])
def test_linear(layout, dtype, channels, sizes):
    seq = seq_of(layout)
    compare(
        lambda *x: fla.linear_fla(*x, seq, scale=0.3),
        lambda *x: linear_chunk(*x, seq, scale=0.3),
        linear_inputs(seq, dtype, channels=channels, **sizes),
        "q k v g state",
    )


def delta_inputs(seq: Seq, dtype: torch.dtype, *, channels: bool, S=2, G=1, K=32, V=64) -> list[Tensor]:
    B, T = tokens(seq)
    q, k = (l2_norm(draw(B, T, heads, K)).to(dtype) for heads in (S * G, S))
    g = decays(B, T, S, K) if channels else decays(B, T, S)
    return [q, k, draw(B, T, S, V, dtype=dtype), g, draw(B, T, S).sigmoid(), draw(seq.num_sequences, S, K, V)]


@gpu
@layouts
@dtypes
@pytest.mark.parametrize(
    ("channels", "sizes"),
    [
        (False, {}),
        (False, {"G": 3, "K": 46, "V": 46}),
        (False, {"K": 8}),
        (True, {}),
        (True, {"G": 2, "K": 64, "V": 128}),
        (True, {"K": 8, "V": 4}),
    ],
    ids=["gdn", "gdn-grouped", "gdn-small", "kda", "kda-grouped", "kda-small"],
)
def test_delta(layout, dtype, channels, sizes):
    seq = seq_of(layout)
    compare(
        lambda *x: fla.delta_fla(*x, seq),
        lambda *x: delta_chunk(*x, seq),
        delta_inputs(seq, dtype, channels=channels, **sizes),
        "q k v g beta state",
    )


@gpu
@dtypes
@pytest.mark.parametrize("channels", [False, True])
def test_without_gradients_the_direct_kernels_run(dtype, channels):
    """Where the gradients take a detour, what needs none does not."""
    seq = seq_of("dense")
    x, y = linear_inputs(seq, dtype, channels=channels), delta_inputs(seq, dtype, channels=channels, G=2)
    with torch.no_grad():
        pairs = (
            (fla.linear_fla(*x, seq, scale=0.3), linear_chunk(*(z.double() for z in x), seq, scale=0.3)),
            (fla.delta_fla(*y, seq), delta_chunk(*(z.double() for z in y), seq)),
        )
    for got, expected in pairs:
        assert error(got[0], expected[0]) < FORWARD
        assert error(got[1], expected[1]) < FORWARD


@gpu
@dtypes
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"K": 8, "V": 12}], ids=["", "small"])
@torch.no_grad()
def test_decoding_goes_on_from_a_prefill(dtype, channels, sizes):
    B, T, steps = 3, 40, 4
    whole, first, one = (Seq.build((B, n), DEVICE) for n in (T + steps, T, 1))
    x = linear_inputs(whole, dtype, channels=channels, **sizes)
    y = delta_inputs(whole, dtype, channels=channels, G=3, **sizes)
    for inputs, run, chunk in (
        (x, lambda *z: fla.linear_fla(*z, scale=0.3), lambda *z: linear_chunk(*z, scale=0.3)),
        (y, fla.delta_fla, delta_chunk),
    ):
        *z, state = inputs
        expected, last = chunk(*(u.double() for u in inputs), whole)
        o, state = run(*(u[:, :T] for u in z), state, first)
        outs = [o]
        for t in range(T, T + steps):
            o, state = run(*(u[:, t : t + 1] for u in z), state, one)
            assert state.dtype == torch.float32
            outs.append(o)
        assert error(torch.cat(outs, 1)[:, T:], expected[:, T:]) < FORWARD
        assert error(state, last) < FORWARD


@gpu
@pytest.mark.parametrize("channels", [False, True])
@torch.no_grad()
def test_no_tokens_leave_the_state(channels):
    seq = Seq.build((2, 0), DEVICE)
    *x, state = linear_inputs(seq, torch.bfloat16, channels=channels)
    o, after = fla.linear_fla(*x, state, seq, scale=1.0)
    assert o.shape == (2, 0, 2, 64)
    assert torch.equal(after, state)
    *y, state = delta_inputs(seq, torch.bfloat16, channels=channels)
    assert torch.equal(fla.delta_fla(*y, state, seq)[1], state)
    assert torch.equal(fla.delta_fla(*y, None, seq)[1], torch.zeros_like(state))


@gpu
@pytest.mark.parametrize("channels", [False, True])
def test_strong_decay_in_bf16_stays_finite(channels):
    seq = Seq.build((1, 300), DEVICE)
    for inputs, run in (
        (linear_inputs(seq, torch.bfloat16, channels=channels), lambda *x: fla.linear_fla(*x, seq, scale=0.3)),
        (delta_inputs(seq, torch.bfloat16, channels=channels), lambda *x: fla.delta_fla(*x, seq)),
    ):
        inputs[3] = inputs[3] * 100
        leaves = [x.detach().requires_grad_() for x in inputs]
        outs = run(*leaves)
        grads = torch.autograd.grad(sum(out.float().square().sum() for out in outs), leaves)
        assert all(torch.isfinite(x).all() for x in (*outs, *grads))


def conv_reference(x_BTC, weight_CW, bias_C, tail_NWC, seq: Seq) -> tuple[Tensor, Tensor]:
    outs, tails = [], []
    W = weight_CW.shape[1]
    for s, x in enumerate(seq.split(x_BTC)):
        before = x.new_zeros(1, W - 1, x.shape[2]) if tail_NWC is None else tail_NWC[s : s + 1].to(x.dtype)
        whole = torch.cat((before, x), 1)
        if x.shape[1]:
            y = F.conv1d(whole.transpose(1, 2), weight_CW[:, None], bias_C, groups=x.shape[2])
            outs.append(F.silu(y).transpose(1, 2))
        tails.append(whole[:, whole.shape[1] - W + 1 :])
    return torch.cat(outs, 0 if seq.dense else 1), torch.cat(tails)


@gpu
@layouts
@dtypes
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_conv(layout, dtype, carried, biased):
    seq = seq_of(layout)
    x, weight, bias = draw(*tokens(seq), 24, dtype=dtype), draw(24, 4), draw(24)
    tail = draw(seq.num_sequences, 3, 24, dtype=dtype) if carried else None
    old, expected_tail = None, None
    if tail is not None:
        old = tail.double()
        _, expected_tail = conv_reference(x.double(), weight.double(), None, old, seq)
    compare(
        lambda x, weight, *b: fla.conv_fla(x, weight, b[0] if b else None, tail, seq),
        lambda x, weight, *b: conv_reference(x, weight, b[0] if b else None, old, seq)[0],
        [x, weight, bias] if biased else [x, weight],
        "x weight bias" if biased else "x weight",
    )
    if tail is not None:
        assert error(tail, expected_tail) < 1e-6


@gpu
@torch.no_grad()
def test_conv_one_token_at_a_time():
    whole, one = Seq.build((2, 6), DEVICE), Seq.build((2, 1), DEVICE)
    x, weight, tail = draw(2, 6, 24), draw(24, 4), draw(2, 3, 24)
    expected, last = conv_reference(x.double(), weight.double(), None, tail.double(), whole)
    outs = [fla.conv_fla(x[:, t : t + 1], weight, None, tail, one) for t in range(6)]
    assert error(torch.cat(outs, 1), expected) < 1e-5
    assert error(tail, last) < 1e-6


@gpu
@dtypes
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("V", [46, 64, 256])
def test_norm_gate(dtype, activation, V):
    act = F.silu if activation == "silu" else torch.sigmoid

    def reference(o, gate, weight):
        return o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * weight * act(gate)

    shape = (2, 70, 3, V)
    compare(
        lambda o, gate, weight: fla.norm_gate_fla(o, gate, weight, 1e-5, activation),
        reference,
        [draw(*shape, dtype=dtype), draw(*shape, dtype=dtype), 1 + draw(V) / 4],
        "o gate weight",
    )


@gpu
@layouts
@pytest.mark.parametrize("window_size", [None, 2, 20, 64])
@pytest.mark.parametrize("with_sink", [False, True])
def test_flex_attention(layout, window_size, with_sink):
    seq = seq_of(layout)
    q, k, v = (draw(*tokens(seq), heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    compare(
        lambda q, k, v, *s: attend_flex(q, k, v, seq, window_size=window_size, sink_H=s[0] if s else None),
        lambda q, k, v, *s: attend(q, k, v, seq, window_size=window_size, sink=s[0] if s else None),
        [q, k, v, draw(4)] if with_sink else [q, k, v],
        "q k v sink" if with_sink else "q k v",
    )


@gpu
def test_flex_attention_at_many_lengths():
    """Its graph is compiled for the first length, for any at the second, and for the mask of one block: never again."""

    def graphs_after(*lengths: int) -> int:
        for T in lengths:
            seq = Seq.build((2, T), DEVICE)
            q, k, v = (draw(2, T, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
            compare(
                lambda q, k, v, s, seq=seq: attend_flex(q, k, v, seq, window_size=100, sink_H=s),
                lambda q, k, v, s, seq=seq: attend(q, k, v, seq, window_size=100, sink=s),
                [q, k, v, draw(4)],
                "q k v sink",
            )
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    compiled = graphs_after(200, 333, 128)
    assert graphs_after(1000, 4097, 129, 256, 640, 2048, 128) == compiled


# ---- whole mixers


MIXERS = {
    "kda": Kda(num_heads=2, head_dim=32, expand_v=2),
    "gdn": Gdn(num_heads=2, num_kv_heads=2, num_v_heads=2, head_dim=32, allow_neg_eigval=True),
    "gdn, more values": Gdn(num_heads=2, num_kv_heads=2, num_v_heads=4, head_dim=32),
    "gdn, grouped": Gdn(num_heads=6, num_kv_heads=2, num_v_heads=2, head_dim=46, conv_size=0),
    "gla": Gla(num_heads=2, head_dim=64, conv_size=4),
    "mamba2": Mamba2(num_heads=4, head_dim=32, state_dim=64, num_groups=2),
    "lightning": Lightning(num_heads=4, num_kv_heads=2, head_dim=32, slopes=(0.5, 0.1, 0.02, 0.0)),
}


def on_gpu(config: Mixer, backend: str, dtype: torch.dtype):
    mixer = make_mixer(config, 48, dtype=dtype).to(DEVICE)
    mixer.set_backend(backend)
    return mixer


@gpu
@pytest.mark.parametrize("watched", [False, True])
@layouts
@pytest.mark.parametrize("name", MIXERS)
def test_mixers(name, layout, watched):
    """Outputs and gradients in bf16 against the torch backend in float64; `watched`: with a hook on the queries."""
    fast, exact = on_gpu(MIXERS[name], "fla", torch.bfloat16), on_gpu(MIXERS[name], "torch", torch.float64)
    exact.load_state_dict(fast.state_dict())
    seq = seq_of(layout)
    x, dy = (draw(*tokens(seq), 48, dtype=torch.bfloat16) for _ in range(2))
    # A first output is (q k) v, normed: where q k is near 0 its gradient is a large factor times what cancels in fp32.
    dy = dy.masked_fill((seq.step_BT == 0)[..., None], 0)
    if watched:
        fast.taps["q"].register_forward_hook(lambda tap, args, y: None)
    results = []
    for mixer in (fast, exact):
        leaf = x.to(next(mixer.parameters()).dtype).requires_grad_()
        y, _ = mixer(leaf, None, seq)
        parameters = dict(mixer.named_parameters())
        grads = torch.autograd.grad(y, [leaf, *parameters.values()], dy.to(y.dtype))
        results.append({"output": y, **dict(zip(["input", *parameters], grads, strict=True))})
    floor = 1e-2 * max(float(want.norm()) for want in results[1].values())
    for key, want in results[1].items():
        off = float((results[0][key].double() - want).norm()) / max(float(want.norm()), floor)
        assert off < 2 * (FORWARD if key == "output" else BACKWARD), (key, off)  # a mixer rounds between its steps


@gpu
@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_mixers_in_pieces(name):
    whole = tokens(seq_of("dense"))
    x = draw(*whole, 48, dtype=torch.bfloat16)
    mixer = on_gpu(MIXERS[name], "fla", torch.bfloat16)
    want, _ = mixer(x, None, seq_of("dense"))
    state, outs = mixer.new_state(2, 150, dtype=torch.bfloat16, device=DEVICE), []
    for start, end in ((0, 70), (70, 71), (71, 72), (72, 150)):
        past = torch.full((2,), start, device=DEVICE)
        seq = Seq.build((2, end - start), DEVICE, past=past, max_past=start)
        outs.append(mixer(x[:, start:end], state, seq)[0])
    assert error(torch.cat(outs, 1), want) < 2 * FORWARD
