"""Losses, recomputation and adapters: what a Trainer and PEFT do to a model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from contract.tools import error
from hf.tools import every_mixer, hf, left_padded, model_of, tokens
from torch import Tensor, nn

from plait.config import Gdn, Layer, Softmax
from plait.hf import PlaitForCausalLM
from plait.hf import model as module
from plait.model.lm import LM

FULL = Layer(mixer=Softmax(num_heads=2, num_kv_heads=1, head_dim=4, rope_theta=1e4), d_ff=12)
GDN = Layer(mixer=Gdn(num_heads=2, num_kv_heads=2, num_v_heads=2, head_dim=4))
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of transformers >= 5.20


def gradients(model: PlaitForCausalLM, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_mixer()
def test_recomputed_gradients_are_the_same(lm: LM):
    model, calls = hf(lm), []
    for batch in ({"input_ids": tokens(2, 70)}, left_padded([tokens(20), tokens(9)])):
        want = gradients(model, batch)
        model.gradient_checkpointing_enable()
        recompute = lm.recompute
        lm.recompute = lambda block, *args, run=recompute: calls.append(block) or run(block, *args)
        got = gradients(model, batch)
        model.gradient_checkpointing_disable()
        assert got.keys() == want.keys()
        for name, grad in got.items():
            assert (grad - want[name]).norm() <= 1e-10 * want[name].norm(), name
    assert calls == lm.blocks * 2


def test_recomputation_is_chosen():
    """Not while a cache is filled, nor without gradients; of some layers only, if so wished."""
    model, calls = hf(model_of(FULL, GDN, FULL)), []
    model.gradient_checkpointing_enable()
    assert model.gradient_checkpointing
    recompute = model.lm.recompute
    model.lm.recompute = lambda block, *args: calls.append(block) or recompute(block, *args)
    model(tokens(2, 5), use_cache=True)
    with torch.no_grad():
        model(tokens(2, 5))
    assert not calls
    model._set_gradient_checkpointing(True, lambda block, *args: calls.append(block) or block(*args), every_n_layers=2)
    model(tokens(2, 5)).logits.sum().backward()
    assert calls == [model.lm.blocks[0], model.lm.blocks[2]]
    model.gradient_checkpointing_disable()
    assert not model.gradient_checkpointing
    assert model.lm.recompute is None


@pytest.mark.parametrize("elements", [1, 40, 1 << 26])
def test_loss(monkeypatch, elements: int):
    """Of the next real token, in pieces of any size; padding neither predicts nor is predicted."""
    monkeypatch.setattr(module, "LOSS_ELEMENTS", elements)
    model, text = hf(model_of(FULL, GDN)), tokens(3, 7)
    logits, labels = model(text).logits, text.clone()
    labels[:, 2] = -100
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(model(text, labels=labels).loss, want.sum() / 15)
    torch.testing.assert_close(model(text, labels=labels, num_items_in_batch=torch.tensor(60)).loss, want.sum() / 60)
    grads = gradients(model, {"input_ids": text})
    model.zero_grad()
    F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten()).backward()
    assert all(error(grads[name], p.grad) <= 1e-10 for name, p in model.named_parameters())
    rows = [tokens(5), tokens(1), tokens(3)]
    batch = left_padded(rows)
    got = model(**batch, labels=batch["input_ids"]).loss * 6
    alone = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in (rows[0], rows[2])]
    torch.testing.assert_close(got, alone[0] + alone[1])


def test_a_bf16_loss_is_computed_in_fp32():
    model, text = hf(model_of(FULL, GDN)).bfloat16(), tokens(2, 9)
    out = model(text, labels=text)
    assert out.logits.dtype == torch.bfloat16
    assert out.loss.dtype == torch.float32
    assert out.get("cache") is out.get("past_key_values") is None  # nobody who asks for a loss wants a cache
    want = F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), text[:, 1:].flatten())
    torch.testing.assert_close(out.loss, want)


class Lora(nn.Module):
    """In the place of a Linear, and without its attributes."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        dtype, spread = base.weight.dtype, base.in_features**-0.5
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=dtype) * spread)
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=dtype) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def adapt(model: nn.Module) -> dict[str, Lora]:
    linears = {name: child for name, child in model.named_modules() if isinstance(child, nn.Linear)}
    adapters = {name: Lora(linear) for name, linear in linears.items()}
    for name, adapter in adapters.items():
        model.set_submodule(name, adapter)
    return adapters


@every_mixer()
def test_adapters_in_place_of_every_linear(lm: LM):
    """The model with adapters is the one into whose weights they are merged; each of them learns."""
    torch.manual_seed(0)
    model, merged, text = hf(lm), hf(copy.deepcopy(lm)), tokens(2, 20)
    adapters = adapt(model)
    with torch.no_grad():
        for name, adapter in adapters.items():
            merged.get_submodule(name).weight += adapter.up @ adapter.down
        want = merged(text).logits
        cache = model.new_cache(2, 20)
        pieces = [model(piece, cache=cache).logits for piece in text.split([18, 1, 1], 1)]
    assert error(model(text).logits, want) <= 1e-10
    assert error(torch.cat(pieces, 1), want) <= 1e-10
    model(text, labels=text).loss.backward()
    for name, adapter in adapters.items():
        assert adapter.up.grad is not None and adapter.up.grad.any(), name
        assert adapter.down.grad is not None and adapter.down.grad.any(), name
    if not lm.spec.tie_embeddings:
        assert "lm_head" in adapters


def test_what_users_expect_of_a_model():
    tied, untied = hf(model_of(FULL, tied=True)), hf(model_of(FULL))
    for model in (tied, untied):
        assert model.get_input_embeddings() is model.embed is model.lm.embed
        assert model.num_parameters() == model.lm.num_params
        assert (model.device.type, model.dtype) == ("cpu", torch.float64)
        assert model.config.vocab_size == 11
        assert model.resize_token_embeddings(11) is model.resize_token_embeddings() is model.embed
        with pytest.raises(ValueError, match="resize_token_embeddings: 12 tokens; the spec's vocab_size is 11"):
            model.resize_token_embeddings(12)
    assert tied.get_output_embeddings() is None
    assert untied.get_output_embeddings() is untied.lm.lm_head
    other = copy.deepcopy(untied)
    assert other.lm is not untied.lm
    other.lm_head = nn.Linear(8, 11, bias=False).double()
    assert other.lm.lm_head is other.lm_head is not untied.lm_head
    assert not torch.equal(other(tokens(1, 3)).logits, untied(tokens(1, 3)).logits)
    untied.to(torch.float32)
    assert untied.lm.embed.weight.dtype == untied.dtype == torch.float32


def test_a_step_of_training():
    torch.manual_seed(0)
    model, batch = hf(model_of(FULL, GDN)), left_padded([tokens(9), tokens(6)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(**batch, labels=batch["input_ids"]).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
