"""Capture and patch: the same tensors in every form of the computation."""

from __future__ import annotations

import pytest
import torch

from plait.model.lm import LM
from plait.probes import capture, patch, points
from plait.spec import Spec

SPEC = Spec.from_layout("gdn[expand_v=2] nope", vocab_size=20, d_model=16, num_layers=2, num_heads=2, d_ff=24)


@pytest.fixture
def model() -> LM:
    return LM(SPEC, dtype=torch.float64)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 20, (3, 11), generator=torch.Generator().manual_seed(0))


def test_the_points_of_a_model(model):
    mixer = ["q", "k", "v", "decay", "beta", "heads", "out"]
    expected = ["in", *(f"mixer.{name}" for name in mixer), "mlp.out", "out"]
    assert [name.removeprefix("layers.0.") for name in points(model) if name.startswith("layers.0.")] == expected
    assert "layers.1.mixer.decay" not in points(model)


def test_shapes(model, tokens):
    with capture(model, "*") as seen:
        model(tokens)
    shapes = {name: tuple(value.shape) for name, value in seen.items()}
    assert shapes["layers.0.in"] == shapes["layers.1.out"] == shapes["layers.1.mlp.out"] == (3, 11, 16)
    assert shapes["layers.0.mixer.q"] == shapes["layers.0.mixer.k"] == (3, 11, 2, 8)
    assert shapes["layers.0.mixer.v"] == shapes["layers.0.mixer.heads"] == (3, 11, 2, 16)
    assert shapes["layers.0.mixer.decay"] == shapes["layers.0.mixer.beta"] == (3, 11, 2)


def test_prefill_decode_and_padding_show_the_same_tensors(model, tokens):
    names = tuple(points(model))
    with capture(model, *names) as whole:
        model(tokens)
    cache = model.new_cache(3, 11)
    with capture(model, *names) as first:
        model(tokens[:, :10], cache=cache)
    with capture(model, *names) as last:
        model(tokens[:, 10:], cache=cache)
    padded = torch.cat((tokens[:, :4], torch.zeros(3, 2, dtype=torch.long), tokens[:, 4:]), 1)
    mask = torch.ones(3, 13, dtype=torch.bool)
    mask[:, 4:6] = False
    with capture(model, *names) as masked:
        model(padded, mask=mask)
    for name in names:
        torch.testing.assert_close(torch.cat((first[name], last[name]), 1), whole[name], rtol=1e-9, atol=1e-12)
        assert (masked[name][:, 4:6] == 0).all()
        kept = torch.cat((masked[name][:, :4], masked[name][:, 6:]), 1)
        torch.testing.assert_close(kept, whole[name], rtol=1e-9, atol=1e-12)


def test_patch_with_a_function_and_a_tensor(model, tokens):
    clean = model(tokens)
    with patch(model, {"layers.0.mixer.out": torch.zeros_like}), capture(model, "layers.0.*") as seen:
        model(tokens)
    x = seen["layers.0.in"]
    torch.testing.assert_close(seen["layers.0.out"], x + seen["layers.0.mlp.out"])
    with capture(model, "layers.1.mixer.heads") as own:
        model(tokens)
    with patch(model, {"layers.1.mixer.heads": own["layers.1.mixer.heads"].detach()}):
        torch.testing.assert_close(model(tokens), clean)
    assert torch.equal(model(tokens), clean)  # nothing stays behind


def test_patch_under_a_mask_is_in_the_callers_form(model, tokens):
    mask = torch.ones(3, 11, dtype=torch.bool)
    mask[1, :5] = False

    def edit(x):
        assert x.shape == (3, 11, 16)
        return x + 1

    with patch(model, {"layers.0.in": edit}):
        masked = model(tokens, mask=mask)
    with patch(model, {"layers.0.in": lambda x: x + 1}):
        torch.testing.assert_close(masked[1, 5:], model(tokens[1:2, 5:])[0], rtol=1e-9, atol=1e-12)


def test_captured_tensors_carry_gradients(model, tokens):
    with capture(model, "layers.0.mixer.heads") as seen:
        loss = model(tokens).square().sum()
    (gradient,) = torch.autograd.grad(loss, seen["layers.0.mixer.heads"])
    assert gradient.abs().sum() > 0


def test_errors(model, tokens):
    with (
        pytest.raises(ValueError, match=r"point 'layers.0.mixer.qq'.*nearest: layers.0.mixer.q"),
        capture(model, "layers.0.mixer.qq"),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"patch layers.0.in: shape \(1,\)"),
        patch(model, {"layers.0.in": torch.ones(1)}),
    ):
        model(tokens)
