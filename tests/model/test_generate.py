"""Generation and chunked prefill against full forward passes; draws against their distribution."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from contract.configs import disturb
from torch import Tensor

from plait.config import Gdn, Layer, Softmax
from plait.model import generate as generation
from plait.model.generate import Sampling, generate, prefill, stream
from plait.model.lm import LM
from plait.spec import Spec

VOCAB, NEW = 23, 12
MIXERS = (
    Gdn(num_heads=2, num_kv_heads=2, num_v_heads=2, head_dim=4),
    Softmax(num_heads=2, num_kv_heads=1, head_dim=4, rope_theta=1e4, window_size=5, sink=True),
    Softmax(num_heads=2, num_kv_heads=2, head_dim=4, logn="loga", logn_base=30.0),
)


@pytest.fixture(scope="module")
def model() -> LM:
    layers = tuple(Layer(mixer=mixer, d_ff=12) for mixer in MIXERS)
    model = LM(Spec(vocab_size=VOCAB, d_model=8, layers=layers, init_std=0.5, tie_embeddings=False))
    disturb(model, 2)
    return model.double()


def prompt(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def by_full_forward(model: LM, row: Tensor, count: int) -> list[int]:
    tokens = row.tolist()
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(row) :]


@pytest.mark.parametrize("chunk", [1, 2, 5, 64, 2048])
@pytest.mark.parametrize("length", [1, 7, 66])
def test_greedy_is_argmax_of_full_forward(model: LM, length: int, chunk: int):
    tokens = prompt(2, length)
    got = generate(model, tokens, max_new_tokens=NEW, chunk=chunk)
    assert got.tolist() == [by_full_forward(model, row, NEW) for row in tokens]
    assert len({tuple(row) for row in got.tolist()} | {(t,) for t in got.flatten().tolist()}) > 3  # it says something


@pytest.mark.parametrize("chunk", [1, 3, 4, 2048])
@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_padded_batch_is_one_by_one(model: LM, side: str, chunk: int):
    """Pieces of nothing but padding included."""
    prompts = [prompt(1, n, seed=n)[0] for n in (9, 1, 4)]
    tokens, mask = torch.zeros(3, 10, dtype=torch.long), torch.zeros(3, 10, dtype=torch.long)
    for row, text in enumerate(prompts):
        n = len(text)
        place = {"left": slice(10 - n, 10), "right": slice(0, n), "inside": slice(0, n)}[side]
        where = torch.arange(10)[place]
        if side == "inside":
            where = torch.randperm(10, generator=torch.Generator().manual_seed(row))[:n].sort().values
        tokens[row, where], mask[row, where] = text, 1
    got = generate(model, tokens, max_new_tokens=NEW, mask=mask, chunk=chunk)
    assert got.tolist() == [generate(model, text[None], max_new_tokens=NEW)[0].tolist() for text in prompts]


@pytest.mark.parametrize("chunk", [1, 5, 2048])
@torch.no_grad()
def test_prefill_gives_the_last_logits(model: LM, chunk: int):
    tokens = prompt(2, 17)
    cache = model.new_cache(2, 17)
    logits = prefill(model, tokens, cache, chunk=chunk)
    torch.testing.assert_close(logits, model(tokens)[:, -1], rtol=1e-9, atol=1e-9)
    assert cache.lengths == (17, 17)


def test_stop_token(model: LM):
    tokens = prompt(3, 7)
    free = generate(model, tokens, max_new_tokens=NEW)
    stop = int(free[0, 2])
    got = generate(model, tokens, max_new_tokens=NEW, stop_tokens=[stop])
    ends = []
    for row, whole in zip(got.tolist(), free.tolist(), strict=True):
        end = whole.index(stop) + 1 if stop in whole else NEW
        ends.append(end)
        assert row[:end] == whole[:end][: len(row)]
        assert all(token == stop for token in row[end:])
    assert got.shape == (3, max(ends))


def test_it_stops_when_all_rows_have(model: LM):
    tokens = prompt(1, 7).expand(2, -1)
    stop = int(generate(model, tokens, max_new_tokens=1)[0, 0])
    assert generate(model, tokens, max_new_tokens=NEW, stop_tokens=[stop]).tolist() == [[stop], [stop]]


BAD = {
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens = 0; it must be at least 1"),
    "chunk": ({"chunk": 0}, "chunk = 0; it must be at least 1"),
    "temperature": ({"temperature": -1.0}, "temperature = -1.0; it must be 0"),
    "top_k": ({"top_k": 0}, "top_k = 0; it must be at least 1"),
    "top_p": ({"top_p": 1.5}, "top_p = 1.5; it must be above 0 and at most 1"),
    "a row of padding": ({"mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "mask: a row has no real token"),
    "mask of another shape": ({"mask": torch.ones(2, 4, dtype=torch.long)}, r"mask: shape \(2, 4\)"),
    "mask of one dimension": ({"mask": torch.ones(3, dtype=torch.long)}, r"mask: shape \(3,\)"),
    "additive mask": ({"mask": torch.zeros(2, 3)}, "mask: dtype torch.float32"),
    "empty prompt": ({"tokens_BT": torch.zeros(2, 0, dtype=torch.long)}, r"tokens: shape \(2, 0\)"),
    "flat prompt": ({"tokens_BT": torch.zeros(3, dtype=torch.long)}, r"tokens: shape \(3,\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(model: LM, name: str):
    change, message = BAD[name]
    arguments = {"tokens_BT": prompt(2, 3), "max_new_tokens": 2} | change
    with pytest.raises(ValueError, match=message) as error:
        generate(model, arguments.pop("tokens_BT"), **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mask", [None, torch.ones(2, 9, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)])
@torch.no_grad()
def test_a_refused_prefill_changes_nothing(model: LM, mask: Tensor | None):
    """Its first pieces would fit."""
    cache = model.new_cache(2, 10)
    model(prompt(2, 2), cache=cache)
    before = [buffer.clone() for state in cache.states for _, buffer in state.tensors()]
    with pytest.raises(ValueError):
        prefill(model, prompt(2, 9), cache, mask=mask, chunk=2)
    assert cache.lengths == (2, 2)
    after = [buffer for state in cache.states for _, buffer in state.tensors()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_stop_tokens_end_a_row_each(model: LM):
    tokens = prompt(3, 7)
    free = generate(model, tokens, max_new_tokens=NEW).tolist()
    stops = {free[0][1], free[1][4]}
    got = generate(model, tokens, max_new_tokens=NEW, stop_tokens=stops).tolist()
    for row, whole in zip(got, free, strict=True):
        end = next((i for i, token in enumerate(whole) if token in stops), NEW)
        assert row == (whole[: end + 1] + [whole[min(end, NEW - 1)]] * NEW)[: len(row)]


def test_a_stream_is_what_generate_gives(model: LM):
    tokens, cache = prompt(2, 7), model.new_cache(2, 7 + NEW)
    steps = list(stream(model, tokens, max_new_tokens=NEW, cache=cache))
    assert torch.equal(torch.stack(steps, 1), generate(model, tokens, max_new_tokens=NEW))
    assert cache.lengths == (7 + NEW - 1,) * 2  # the last token has not been fed
    more = next(stream(model, steps[-1][:, None], max_new_tokens=1, cache=cache))
    assert torch.equal(more, generate(model, tokens, max_new_tokens=NEW + 1)[:, -1])


def test_a_stream_computes_no_more_than_is_asked_for(model: LM):
    cache = model.new_cache(1, 99)
    steps = stream(model, prompt(1, 7), max_new_tokens=NEW, cache=cache)
    assert cache.lengths == (0,)
    next(steps)
    assert cache.lengths == (7,)
    next(steps)
    assert cache.lengths == (8,)


LOGITS = torch.tensor([[2.0, 0.0, 1.0, -1.0], [0.0, 0.0, 5.0, 0.0]]).expand(20_000, 2, 4).flatten(0, 1)
DRAWS = {
    "plain": ({}, LOGITS[:2]),
    "hot": ({"temperature": 3.0}, LOGITS[:2] / 3),
    "top_k": ({"top_k": 2}, torch.tensor([[2.0, -9e9, 1.0, -9e9], [0.0, 0.0, 5.0, 0.0]])),
    "top_k of all": ({"top_k": 9}, LOGITS[:2]),
    "top_p": ({"top_p": 0.7}, torch.tensor([[2.0, -9e9, 1.0, -9e9], [-9e9, -9e9, 5.0, -9e9]])),
    "top_p of a tiny share": ({"top_p": 1e-6}, torch.tensor([[2.0, -9e9, -9e9, -9e9], [-9e9, -9e9, 5.0, -9e9]])),
    "both, and cold": (
        {"top_p": 0.9, "top_k": 2, "temperature": 0.5},
        torch.tensor([[4.0, -9e9, 2, -9e9], [0, 0, 10, 0.0]]),
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_follow_the_distribution(name: str):
    options, logits = DRAWS[name]
    drawn = Sampling(**{"temperature": 1.0, **options}).pick(LOGITS, torch.Generator().manual_seed(0))
    for row, want in enumerate(logits.softmax(-1)):
        if name.startswith("both") and row == 1:
            want = torch.tensor([0.0, 0.0, 1.0, 0.0])  # the rest is no part of the first nine tenths
        share = torch.bincount(drawn[row::2], minlength=4) / 20_000
        torch.testing.assert_close(share, want.float(), rtol=0, atol=0.015)
        assert not share[want == 0].any()


def test_seeds(model: LM):
    tokens, options = prompt(2, 7), {"max_new_tokens": NEW, "temperature": 1.0}
    first = generate(model, tokens, seed=1, **options)
    assert torch.equal(generate(model, tokens, seed=1, **options), first)
    assert torch.equal(generate(model, tokens, seed=torch.Generator().manual_seed(1), **options), first)
    assert not torch.equal(generate(model, tokens, seed=2, **options), first)
    assert torch.equal(generate(model, tokens, seed=3, top_k=1, **options), generate(model, tokens, max_new_tokens=NEW))


def test_context(model: LM):
    known = LM(dataclasses.replace(model.spec, context_length=10))
    assert generate(known, prompt(1, 7), max_new_tokens=3).shape == (1, 3)
    with pytest.raises(
        ValueError, match=r"7 of the prompt and 4 new ones are more than the model's context_length = 10"
    ):
        generate(known, prompt(1, 7), max_new_tokens=4)
    assert generate(known, prompt(1, 7), max_new_tokens=4, beyond=True).shape == (1, 4)
    mask = torch.arange(9).expand(2, -1) >= 3  # padding is no part of a prompt
    assert generate(known, prompt(2, 9), max_new_tokens=4, mask=mask).shape == (2, 4)


@torch.no_grad()
def test_a_prompt_is_cut_by_itself(model: LM, monkeypatch):
    monkeypatch.setitem(generation.PIECE, "cpu", 5)
    pieces, hidden = [], model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda tokens, **rest: pieces.append(tokens.shape[1]) or hidden(tokens, **rest)
    )
    logits = prefill(model, prompt(2, 17), model.new_cache(2, 17))
    assert pieces == [5, 5, 5, 2]
    torch.testing.assert_close(logits, model(prompt(2, 17))[:, -1], rtol=1e-9, atol=1e-9)
