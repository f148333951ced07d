"""The gated delta rule: chunks against the token-by-token specification, in values and in every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from contract.poison import poisoned_empty
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.mixers.delta import delta_chunk, delta_naive, delta_step
from plait.mixers.seq import Seq

CPU = torch.device("cpu")
RESULTS = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
BOUNDS = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 2e-2)}


def make_inputs(
    B: int, T: int, S: int, G: int, K: int, V: int, *, decay: float = 0.3, seed: int = 0, sequences: int | None = None
) -> list[Tensor]:
    """q, k, v, g in [-decay, 0], beta in [0, 2), state, in float64."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=rng, dtype=torch.float64)

    q, k = (F.normalize(normal(B, T, heads, K), dim=-1) for heads in (S * G, S))
    g, beta = -decay * uniform(B, T, S), 2 * uniform(B, T, S)
    return [q, k, normal(B, T, S, V), g, beta, normal(sequences or B, S, K, V)]


def to(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Operands in dtype; gates and state at least in fp32, as mixers give them."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [x.to(dtype if i < 3 else wide) for i, x in enumerate(inputs)]


def gradients(rule, inputs: list[Tensor]) -> list[Tensor]:
    """RESULTS of rule(*inputs) for fixed random gradients of both outputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = rule(*leaves)
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=rng).bfloat16().to(y) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, weights)]


def chunked(seq: Seq, size: int | None = 16):
    return lambda *inputs: delta_chunk(*inputs, seq, size)


def by_sequence(lengths: list[int]):
    """The specification applied to every sequence of a packed row."""

    def rule(q, k, v, g, beta, state):
        pieces = zip(*(x.split(lengths, 1) for x in (q, k, v, g, beta)), state.split(1), strict=True)
        o, last = zip(*(delta_naive(*piece) for piece in pieces), strict=True)
        return torch.cat(o, 1), torch.cat(last)

    return rule


def packed(lengths: list[int]) -> Seq:
    return Seq.build((1, sum(lengths)), CPU, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))


def relative_rms(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()


def assert_same(ours: list[Tensor], theirs: list[Tensor], dtype: torch.dtype = torch.float64) -> None:
    for i, (name, a, b) in enumerate(zip(RESULTS, ours, theirs, strict=True)):
        bound = BOUNDS[dtype][i > 1]
        assert a.shape == b.shape
        assert relative_rms(a, b) <= bound, f"{name}: {relative_rms(a, b):.2e} > {bound}"


@settings(max_examples=12)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 70),
    S=st.integers(1, 2),
    G=st.integers(1, 3),
    K=st.sampled_from([3, 8]),
    V=st.sampled_from([1, 5, 8]),
    size=st.sampled_from([16, 32, 64]),
    decay=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    seed=st.integers(0, 9),
)
@example(B=1, T=1, S=1, G=1, K=3, V=1, size=64, decay=0.1, seed=0)
@example(B=2, T=64, S=2, G=3, K=8, V=5, size=16, decay=0.1, seed=0)
def test_chunks_equal_the_specification(B, T, S, G, K, V, size, decay, seed) -> None:
    inputs = make_inputs(B, T, S, G, K, V, decay=decay, seed=seed)
    ours = gradients(chunked(Seq.build((B, T), CPU), size), inputs)
    assert_same(ours, gradients(delta_naive, inputs))


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any), seed=st.integers(0, 9))
@example(lengths=[0, 40, 0, 16, 33], seed=0)
def test_packed_sequences_equal_each_alone(lengths, seed) -> None:
    inputs = make_inputs(1, sum(lengths), 2, 2, 4, 3, seed=seed, sequences=len(lengths))
    assert_same(gradients(chunked(packed(lengths)), inputs), gradients(by_sequence(lengths), inputs))


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_tokens_keep_the_state(lengths) -> None:
    sequences = len(lengths) or 2
    shape = (1 if lengths else 2, 0)
    seq = packed(lengths) if lengths else Seq.build(shape, CPU)
    inputs = make_inputs(*shape, 1, 2, 4, 3, sequences=sequences)
    o, state = delta_chunk(*inputs, seq)
    assert o.shape == (*shape, 2, 3)
    assert torch.equal(state, inputs[5])
    assert torch.equal(delta_naive(*inputs)[0], o)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.02, 2.0, 50.0])
def test_precision(dtype, decay) -> None:
    inputs = to(make_inputs(1, 200, 2, 2, 32, 32, decay=decay), dtype)
    ours = gradients(chunked(Seq.build((1, 200), CPU), None), inputs)
    assert ours[0].dtype == dtype and ours[1].dtype == torch.float32
    assert_same(ours, gradients(delta_naive, to(inputs, torch.float64)), dtype)


def test_a_strong_decay_leaves_the_digits_of_its_neighbours() -> None:
    inputs = make_inputs(1, 128, 1, 1, 16, 16, decay=0.01)
    inputs[3][:, 5::16] = -1e4
    inputs = to(inputs, torch.float32)
    ours = gradients(chunked(Seq.build((1, 128), CPU), 64), inputs)
    assert_same(ours, gradients(delta_naive, to(inputs, torch.float64)), torch.float32)


@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, 60), min_size=1, max_size=3).map(sorted))
def test_pieces_through_the_state_equal_the_whole(cuts) -> None:
    *inputs, state = make_inputs(2, 60, 1, 2, 4, 3)
    whole, last = delta_chunk(*inputs, state, Seq.build((2, 60), CPU), 16)
    outputs = []
    for start, end in zip([0, *cuts], [*cuts, 60], strict=True):
        seq = Seq.build((2, end - start), CPU)
        o, state = delta_chunk(*(x[:, start:end] for x in inputs), state, seq, 16)
        outputs.append(o)
    assert relative_rms(torch.cat(outputs, 1), whole) < 1e-10
    assert relative_rms(state, last) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_steps_equal_the_specification(dtype) -> None:
    inputs = to(make_inputs(2, 1, 2, 3, 8, 5), dtype)
    naive = gradients(delta_naive, to(inputs, torch.float64))
    assert_same(gradients(delta_step, inputs), naive, dtype)
    o, state = delta_step(*inputs[:5])
    assert (o.dtype, state.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_rms(state, delta_naive(*to(inputs, torch.float64)[:5])[1]) < BOUNDS[dtype][0]


def test_no_state_is_a_state_of_zeros() -> None:
    *inputs, state = make_inputs(2, 40, 1, 1, 4, 4)
    seq = Seq.build((2, 40), CPU)
    for ours, theirs in zip(
        delta_chunk(*inputs, None, seq), delta_chunk(*inputs, torch.zeros_like(state), seq), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_outputs_depend_on_no_later_token() -> None:
    inputs = [x.requires_grad_() for x in make_inputs(1, 40, 1, 2, 4, 3)]
    o_BTHV, _ = delta_chunk(*inputs, Seq.build((1, 40), CPU), 16)
    for t in (0, 7, 15, 16, 30):
        grads = torch.autograd.grad(o_BTHV[:, t].sum(), inputs[:5], retain_graph=True)
        for name, grad in zip("qkvgb", grads, strict=True):
            assert not grad[:, t + 1 :].any(), f"o_{t} depends on later {name}"
            assert name == "q" or t == 0 or grad[:, :t].any()


def test_packed_documents_do_not_see_each_other() -> None:
    lengths = [20, 33, 7]
    inputs = [x.requires_grad_() for x in make_inputs(1, 60, 1, 1, 4, 3, sequences=3)]
    o_BTHV, _ = delta_chunk(*inputs, packed(lengths), 16)
    for grad in torch.autograd.grad(o_BTHV[:, 20:53].sum(), inputs[:5]):
        assert not grad[:, :20].any() and not grad[:, 53:].any() and grad[:, 20:53].any()


def test_nothing_uninitialized_is_read() -> None:
    lengths = [20, 0, 33]
    inputs = make_inputs(1, 53, 2, 1, 4, 3, sequences=3)
    clean = gradients(chunked(packed(lengths)), inputs)
    with poisoned_empty():
        poisoned = gradients(chunked(packed(lengths)), inputs)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def test_inputs_are_left_alone() -> None:
    # One head and one row: packing is then a view of the input.
    inputs = make_inputs(1, 32, 1, 1, 4, 4)
    copies = [x.clone() for x in inputs]
    gradients(lambda *x: delta_chunk(*x, Seq.build((1, 32), CPU), 16), inputs)
    leaves = [x.requires_grad_() for x in inputs]
    sum(y.sum() for y in delta_chunk(*leaves, Seq.build((1, 32), CPU), 16)).backward()
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [1.0, 1e3, 1e30])
def test_long_rows_with_strong_decay_are_finite(dtype, decay) -> None:
    inputs = to(make_inputs(1, 65536, 1, 1, 8, 8, decay=decay), dtype)
    results = gradients(chunked(Seq.build((1, 65536), CPU), None), inputs)
    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize(
    ("dtype", "beta"), [(torch.float64, b) for b in (0.0, 1.0, 1.9, 2.0)] + [(torch.float32, b) for b in (0.0, 1.0)]
)
def test_repeated_keys(dtype, beta) -> None:
    # Near beta 2 every token reflects the state at its key and nothing is forgotten: rounding only adds up there.
    inputs = make_inputs(1, 200, 1, 1, 16, 8, decay=1e-3)
    inputs[1] = inputs[1][:, :1].expand_as(inputs[1])
    inputs[4].fill_(beta)
    inputs = to(inputs, dtype)
    ours = gradients(chunked(Seq.build((1, 200), CPU), 64), inputs)
    assert_same(ours, gradients(delta_naive, to(inputs, torch.float64)), dtype)


def test_autocast_changes_nothing() -> None:
    inputs = to(make_inputs(1, 40, 1, 1, 8, 8), torch.float32)
    for rule in (chunked(Seq.build((1, 40), CPU)), delta_naive):
        plain = gradients(rule, inputs)
        with torch.autocast("cpu", torch.bfloat16):
            cast = gradients(rule, inputs)
        assert torch.equal(plain[0], cast[0]) and torch.equal(plain[1], cast[1])
    chunk = gradients(chunked(Seq.build((1, 40), CPU)), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        cast = gradients(chunked(Seq.build((1, 40), CPU)), inputs)
    assert all(torch.equal(a, b) for a, b in zip(chunk, cast, strict=True))


@pytest.mark.parametrize("size", [0, 8, 48, -64])
def test_odd_chunk_sizes_are_refused(size) -> None:
    with pytest.raises(ValueError, match=f"chunk_size: {size}"):
        delta_chunk(*make_inputs(1, 4, 1, 1, 4, 4), Seq.build((1, 4), CPU), size)


@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid"])
def test_transformers(family) -> None:
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    *inputs, state = to(make_inputs(2, 150, 2, 1, 16, 24), torch.float32)
    o, last = delta_chunk(*inputs, state, Seq.build((2, 150), CPU))
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        rule = getattr(module, name)
        theirs = rule(*inputs[:3], g=inputs[3], beta=inputs[4], initial_state=state, output_final_state=True)
        assert relative_rms(o, theirs[0]) < 1e-5
        assert relative_rms(last, theirs[1]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True])
def test_compiled(ragged) -> None:
    lengths = [70, 0, 50]
    seq = packed(lengths) if ragged else Seq.build((1, 120), CPU)
    inputs = make_inputs(1, 120, 1, 2, 8, 8, sequences=3 if ragged else 1)
    rule = chunked(seq)
    assert_same(gradients(torch.compile(rule, fullgraph=True, dynamic=False), inputs), gradients(rule, inputs))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 128])
def test_cuda(dtype, size) -> None:
    cuda = torch.device("cuda")
    inputs = [x.to(cuda) for x in to(make_inputs(2, 300, 2, 2, 64, 128), dtype)]

    def on_cuda(rule, inputs):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = rule(*leaves)
        rng = torch.Generator().manual_seed(1)
        weights = [torch.randn(y.shape, generator=rng).bfloat16().to(y) for y in outputs]
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, weights)]

    ours = on_cuda(chunked(Seq.build((2, 300), cuda), size), inputs)
    assert_same(ours, on_cuda(delta_naive, to(inputs, torch.float64)), dtype)
