"""RoPE, its scalings against transformers' own, and the log-n scale."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.config import Softmax
from plait.positions import apply_rope, logn_scale, rope_frequencies, rope_tables
from plait.rope import RopeScaling

PAIRS = st.integers(1, 64)
THETAS = st.sampled_from([100.0, 1e4, 5e5, 1e7])


def softmax(head_dim: int, **fields) -> Softmax:
    return Softmax(num_heads=1, num_kv_heads=1, head_dim=head_dim, **fields)


def theirs(kind: str, head_dim: int, fraction: float, theta: float, **rope) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=1 << 20,
        rope_parameters={"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": fraction, **rope},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


def assert_frequencies(config: Softmax, want: tuple[Tensor, float]) -> None:
    frequency, factor = rope_frequencies(config)
    torch.testing.assert_close(frequency, want[0].double(), rtol=1e-5, atol=0)  # theirs are float32
    assert factor == pytest.approx(want[1], rel=1e-12)


@given(pairs=PAIRS, theta=THETAS, factor=st.floats(1, 64), half=st.booleans())
def test_linear_scaling(pairs: int, theta: float, factor: float, half: bool):
    head_dim, fraction = (4 * pairs, 0.5) if half else (2 * pairs, 1.0)
    scaling = RopeScaling(kind="linear", factor=factor)
    config = softmax(head_dim, rope_theta=theta, rope_fraction=fraction, rope_scaling=scaling)
    assert_frequencies(config, theirs("linear", head_dim, fraction, theta, factor=factor))


@given(
    pairs=PAIRS,
    theta=THETAS,
    factor=st.floats(1, 64),
    length=st.sampled_from([64, 2048, 8192]),
    edges=st.sampled_from([(1.0, 4.0), (1.0, 32.0), (0.5, 2.0)]),
)
def test_llama3_scaling(pairs: int, theta: float, factor: float, length: int, edges: tuple[float, float]):
    low, high = edges
    scaling = RopeScaling(
        kind="llama3", factor=factor, original_length=length, low_freq_factor=low, high_freq_factor=high
    )
    want = theirs(
        "llama3", 2 * pairs, 1.0, theta, factor=factor, original_max_position_embeddings=length,
        low_freq_factor=low, high_freq_factor=high,
    )  # fmt: skip
    assert_frequencies(softmax(2 * pairs, rope_theta=theta, rope_scaling=scaling), want)


@given(
    pairs=st.integers(4, 64),
    theta=THETAS,
    factor=st.floats(1, 64),
    length=st.sampled_from([256, 2048, 8192]),
    betas=st.sampled_from([(32.0, 1.0), (16.0, 2.0)]),
    attention=st.sampled_from([None, 1.0, 1.5]),
)
def test_yarn_scaling(pairs: int, theta: float, factor: float, length: int, betas, attention: float | None):
    fast, slow = betas
    scaling = RopeScaling(
        kind="yarn", factor=factor, original_length=length, beta_fast=fast, beta_slow=slow, attention_factor=attention
    )
    own = {} if attention is None else {"attention_factor": attention}
    want = theirs(
        "yarn", 2 * pairs, 1.0, theta, factor=factor, original_max_position_embeddings=length,
        beta_fast=fast, beta_slow=slow, **own,
    )  # fmt: skip
    assert_frequencies(softmax(2 * pairs, rope_theta=theta, rope_scaling=scaling), want)


def rotate(config: Softmax, x: Tensor, position: Tensor) -> Tensor:
    return apply_rope(x, *rope_tables(config, position, x.dtype), config.rope_interleaved)


@given(
    head_dim=st.integers(1, 8).map(lambda n: 2 * n),
    interleaved=st.booleans(),
    shift=st.integers(0, 1000),
    data=st.data(),
)
def test_scores_depend_on_distance_only(head_dim: int, interleaved: bool, shift: int, data):
    rotary = data.draw(st.integers(1, head_dim // 2)) * 2
    config = softmax(head_dim, rope_theta=1e4, rope_fraction=rotary / head_dim, rope_interleaved=interleaved)
    x = torch.randn(1, 6, 2, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(shift))
    position = torch.arange(6)[None]
    near, far = rotate(config, x, position), rotate(config, x, position + shift)
    scores = [torch.einsum("bihe,bjhe->bhij", y, y) for y in (near, far)]
    torch.testing.assert_close(*scores, rtol=1e-10, atol=1e-10)
    assert torch.equal(near[..., rotary:], x[..., rotary:])
    torch.testing.assert_close(near.norm(dim=-1), x.norm(dim=-1))


def test_interleaved_is_halves_permuted():
    halves = softmax(8, rope_theta=1e4)
    pairs = softmax(8, rope_theta=1e4, rope_interleaved=True)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    order = torch.arange(8).view(2, 4).T.flatten()  # channel pairs (0, 4), (1, 5), ... brought together
    position = torch.arange(5)[None]
    assert torch.equal(rotate(pairs, x[..., order], position), rotate(halves, x, position)[..., order])


@pytest.mark.parametrize("position", [0, 1, 4095, 131_072, 1_000_000])
def test_rotation_is_that_of_the_formula(position: int):
    config = softmax(4, rope_theta=1e4)
    cos, sin = rope_tables(config, torch.tensor([[position]]), torch.float64)
    for pair, theta in enumerate((1.0, 0.01)):
        assert float(cos[0, 0, 0, pair]) == pytest.approx(math.cos(position * theta), abs=1e-9)
        assert float(sin[0, 0, 0, pair]) == pytest.approx(math.sin(position * theta), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tables_are_at_least_float32(dtype: torch.dtype):
    config = softmax(8, rope_theta=1e4, logn="loga", logn_base=500.0)
    cos, sin = rope_tables(config, torch.arange(300)[None], dtype)
    scale = logn_scale(config, torch.arange(300)[None], dtype)
    assert cos.dtype == sin.dtype == scale.dtype == torch.float32
    x = torch.randn(1, 300, 1, 8, dtype=dtype)
    assert rotate(config, x, torch.arange(300)[None]).dtype == dtype


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_of_a_rotation(interleaved: bool):
    x = torch.randn(2, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(1, 3, 1, 2, dtype=torch.float64)

    def rotated(x: Tensor) -> Tensor:
        return apply_rope(x, angle.cos(), angle.sin(), interleaved)

    assert torch.autograd.gradcheck(rotated, x)
    assert torch.autograd.gradgradcheck(rotated, x)


def test_logn_scales():
    position = torch.tensor([[0, 1, 3, 15, 16, 99, 9999]])
    loglen = logn_scale(softmax(4, logn="loglen", logn_base=16.0), position, torch.float64)[0].tolist()
    assert loglen == pytest.approx(
        [1, 1, 1, 1, math.log(17) / math.log(16), math.log(100) / math.log(16), math.log(1e4) / math.log(16)]
    )
    loga = logn_scale(softmax(4, logn="loga", logn_base=500.0), position, torch.float64)[0].tolist()
    assert loga == pytest.approx([math.log(t + 501) / math.log(500) for t in position[0].tolist()])
