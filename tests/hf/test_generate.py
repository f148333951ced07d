"""generate of transformers on plait's models, against full forward passes of the LM inside."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hf.tools import every_mixer, hf, left_padded, model_of, tokens
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria

from plait.config import Gdn, Layer, Softmax
from plait.hf import PlaitCache, PlaitForCausalLM
from plait.hf.model import CACHE
from plait.model.lm import LM

NEW = 4
PROMPTS = [tokens(n, seed=n) for n in (5, 1, 3)]
FULL = Layer(mixer=Softmax(num_heads=2, num_kv_heads=1, head_dim=4, rope_theta=1e4), d_ff=12)
NOPE = Layer(mixer=Softmax(num_heads=2, num_kv_heads=2, head_dim=4))
SWA = Layer(mixer=Softmax(num_heads=2, num_kv_heads=1, head_dim=4, rope_theta=1e4, window_size=3), d_ff=12)
GDN = Layer(mixer=Gdn(num_heads=2, num_kv_heads=2, num_v_heads=2, head_dim=4))


@pytest.fixture(scope="module")
def model() -> PlaitForCausalLM:
    return hf(model_of(GDN, SWA, FULL))


@torch.no_grad()
def greedy(lm: LM, text: Tensor, count: int = NEW) -> list[int]:
    """By full forward passes, alone and unpadded."""
    row = text.tolist()
    for _ in range(count):
        row.append(int(lm(torch.tensor([row]))[0, -1].float().argmax()))
    return row[len(text) :]


def new(model: PlaitForCausalLM, inputs: dict[str, Tensor], count: int = NEW, **arguments) -> list[list[int]]:
    out = model.generate(**inputs, max_new_tokens=count, **arguments)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


@every_mixer(2)
def test_a_padded_batch_is_one_by_one(lm: LM):
    batch, model = left_padded(PROMPTS), hf(lm)
    want = [greedy(lm, text) for text in PROMPTS]
    assert new(model, batch) == want
    assert new(model, batch, use_cache=False) == want
    assert new(model, batch, prefill_chunk_size=2) == want


@every_mixer(vocab_size=5)
@torch.no_grad()
def test_beams_are_exhaustive_search(lm: LM):
    """With a beam for every beginning."""
    model, prompts = hf(lm), [text % 5 for text in PROMPTS[:2]]
    ends = torch.tensor(list(itertools.product(range(5), repeat=3)))
    batch = left_padded(prompts)
    arguments = {"num_beams": 25, "num_return_sequences": 3, "max_new_tokens": 3, "return_dict_in_generate": True}
    for use_cache in (True, False):
        out = model.generate(**batch, **arguments, output_scores=True, use_cache=use_cache)
        for row, text in enumerate(prompts):
            whole = torch.cat((text.expand(len(ends), -1), ends), 1)
            log_probs = lm(whole)[:, :-1].log_softmax(-1).gather(2, whole[:, 1:, None])[:, -3:, 0].sum(1)
            best, places = (log_probs / 3).topk(3)
            assert out.sequences[3 * row : 3 * row + 3, -3:].tolist() == ends[places].tolist()
            torch.testing.assert_close(out.sequences_scores[3 * row : 3 * row + 3].double(), best, rtol=1e-5, atol=1e-5)


@every_mixer()
def test_sampling_is_reproducible(lm: LM):
    model, batch, outs = hf(lm), left_padded(PROMPTS), []
    for use_cache in (True, True, False):
        torch.manual_seed(3)
        outs.append(new(model, batch, count=6, do_sample=True, num_return_sequences=2, use_cache=use_cache))
    assert outs[0] == outs[1] == outs[2]
    assert len({tuple(row) for row in outs[0]}) > 3


@every_mixer()
def test_a_returned_cache_continues(lm: LM):
    """A second turn, and one with another conversation between."""
    model, batch = hf(lm), left_padded(PROMPTS)
    other = model.generate(tokens(2, 4), max_new_tokens=2, return_dict_in_generate=True)
    first = model.generate(**batch, max_new_tokens=NEW, return_dict_in_generate=True)
    assert [row[-NEW:] for row in first.sequences.tolist()] == [greedy(lm, text) for text in PROMPTS]
    model.generate(other.sequences, max_new_tokens=2, **{CACHE: other[CACHE]})
    more = tokens(3, 2, seed=5)
    ids = torch.cat((first.sequences, more), 1)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, NEW + 2), value=1)
    second = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **{CACHE: first[CACHE]})
    texts = [torch.cat((text, end)) for text, end in zip(PROMPTS, ids[:, -NEW - 2 :], strict=True)]
    assert second[:, -NEW:].tolist() == [greedy(lm, text) for text in texts]


@every_mixer()
@torch.no_grad()
def test_a_cache_is_cloned_moved_and_resumed(lm: LM):
    model, text = hf(lm), tokens(2, 5)
    want = [greedy(lm, row) for row in text]
    out = model(text, use_cache=True)
    kept = out[CACHE]
    for make in (PlaitCache.clone, copy.deepcopy, lambda cache: cache.to("cpu").clone()):
        cache, logits, got = make(kept), out.logits, []
        for _ in range(2):
            token = logits[:, -1:].argmax(-1)
            logits = model(token, use_cache=True, **{CACHE: cache}).logits
            got.append(token)
        ids = torch.cat((text, *got, logits[:, -1:].argmax(-1)), 1)
        assert model.generate(ids, max_new_tokens=1, **{CACHE: make(cache)})[:, 5:].tolist() == want
        assert kept.get_seq_length() == 5
    assert model.generate(torch.cat((text, got[0]), 1), max_new_tokens=NEW - 1, **{CACHE: kept})[:, 5:].tolist() == want


class AtSeven(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores, **_) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 7)


def test_stopping(model: PlaitForCausalLM):
    batch = left_padded(PROMPTS)
    free = new(model, batch, count=8)
    stop = free[0][2]
    got = new(model, batch, count=8, eos_token_id=stop, pad_token_id=10)
    for row, whole in zip(got, free, strict=True):
        end = whole.index(stop) + 1 if stop in whole else 8
        assert row == (whole[:end] + [10] * 8)[: len(row)]
    criterion = type(
        "AtTwo", (StoppingCriteria,), {"__call__": lambda self, ids, _: torch.full((3,), ids.shape[1] > 6)}
    )
    assert [len(row) for row in new(model, batch, stopping_criteria=[criterion()])] == [2] * 3


def test_a_decode_step_has_no_mask(model: PlaitForCausalLM, monkeypatch):
    seen, hidden = [], model.lm.hidden

    def spy(ids: Tensor, *, mask, cache) -> Tensor:
        seen.append(mask)
        return hidden(ids, mask=mask, cache=cache)

    monkeypatch.setattr(
        model.lm, "hidden", lambda *args, mask, **kw: seen.append(mask) or hidden(*args, mask=mask, **kw)
    )
    for arguments in ({}, {"num_beams": 2}, {"do_sample": True}):
        new(model, left_padded(PROMPTS), **arguments)
        assert seen[0] is not None
        assert seen[1:] == [None] * (NEW - 1)
        seen.clear()


def test_assisted_decoding(model: PlaitForCausalLM):
    """Where all layers can go back: by prompt lookup, by a smaller model, and for another."""
    lm = model_of(FULL, NOPE)
    able, text = hf(lm), torch.tensor([[1, 2, 3, 4, 1, 2, 3]])
    want = [greedy(lm, text[0], 12)]
    inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    assert new(able, inputs, 12, prompt_lookup_num_tokens=3) == want
    helper = hf(model_of(NOPE))
    assert new(able, inputs, 12, assistant_model=helper) == want
    padded = {"input_ids": torch.nn.functional.pad(text, (2, 0)), "attention_mask": torch.tensor([[0] * 2 + [1] * 7])}
    assert new(able, padded, 12, prompt_lookup_num_tokens=3) == want
    assert new(able, padded, 12, assistant_model=helper) == want
    for layers, why in (((FULL, GDN), "recurrent state"), ((FULL, SWA), "window of 3 tokens")):
        unable = hf(model_of(*layers))
        for one, arguments in ((unable, {"prompt_lookup_num_tokens": 3}), (able, {"assistant_model": unable})):
            with pytest.raises(ValueError, match=rf"layers\.1: a {why}") as refusal:
                new(one, inputs, 4, **arguments)
            assert "\n" not in str(refusal.value)


def test_logits_to_keep_and_both_names(model: PlaitForCausalLM):
    text = tokens(2, 6)
    whole = model(text)
    assert torch.equal(model(text, logits_to_keep=2).logits, whole.logits[:, -2:])
    assert torch.equal(model(text, logits_to_keep=torch.tensor([0, 3])).logits, whole.logits[:, [0, 3]])
    for name in ("past_key_values", "cache"):
        cache = model.new_cache(2, 2)
        got = [model(piece, **{name: cache}) for piece in text.split([1, 2, 3], 1)]
        torch.testing.assert_close(torch.cat([out.logits for out in got], 1), whole.logits, rtol=1e-9, atol=1e-9)
        assert all(out[CACHE] is cache for out in got)
    plain = model(text, return_dict=False, use_cache=False)
    assert isinstance(plain, tuple)
    assert torch.equal(plain[0], whole.logits)


ONES = torch.ones(2, 4, dtype=torch.long)
BAD = {
    "embeddings": ({"inputs_embeds": torch.zeros(2, 4, 8)}, "inputs_embeds: plait's models read token ids"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states: not kept; plait.capture"),
    "no ids": ({"input_ids": None}, "input_ids: they must be given"),
    "wide mask": ({"attention_mask": torch.ones(2, 5)}, r"attention_mask: shape \(2, 5\); it must be \(2, 4\)"),
    "deep mask": ({"attention_mask": torch.ones(2, 1, 4, 4)}, "attention_mask: shape"),
    "labels of some": ({"labels": ONES, "logits_to_keep": 1}, "logits_to_keep: with labels it must be 0"),
    "another's cache": ({CACHE: DynamicCache()}, f"{CACHE}: a DynamicCache; it must be a PlaitCache"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_calls(model: PlaitForCausalLM, name: str):
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message) as refusal:
        model(**{"input_ids": tokens(2, 4)} | change)
    assert "\n" not in str(refusal.value)


BAD_GENERATION = {
    "right padding": ({"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}, "a prompt ends in padding"),
    "a kind of cache": ({"cache_implementation": "static"}, "cache_implementation = 'static'"),
    "another's cache": ({CACHE: DynamicCache()}, "must be a PlaitCache"),
    "another model's cache": (None, "cache: it belongs to a model of spec"),
}


@pytest.mark.parametrize("name", BAD_GENERATION)
def test_refused_generation(model: PlaitForCausalLM, name: str):
    change, message = BAD_GENERATION[name]
    change = {CACHE: hf(model_of(FULL)).new_cache(2, 9)} if change is None else change
    with pytest.raises(ValueError, match=message) as refusal:
        model.generate(tokens(2, 4), max_new_tokens=2, **change)
    assert "\n" not in str(refusal.value)


def test_a_mask_cannot_take_back_what_was_read(model: PlaitForCausalLM):
    cache, mask = model.new_cache(2, 9), torch.ones(2, 5, dtype=torch.long)
    model(tokens(2, 4), **{CACHE: cache})
    mask[1, 0] = 0
    with pytest.raises(ValueError, match="row 1 has 3 past tokens; the cache has had 4 of it"):
        model(tokens(2, 1), attention_mask=mask, **{CACHE: cache})
