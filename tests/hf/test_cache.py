"""Caches of other sizes and rows: plait's own, and as generation holds them."""

from __future__ import annotations

import pytest
import torch
from contract.configs import build, specs
from contract.tools import error, examples
from hf.tools import hf, model_of, tokens
from hypothesis import given
from hypothesis import strategies as st

from plait.config import Gdn, Layer, Softmax
from plait.hf import PlaitCache

FULL = Layer(mixer=Softmax(num_heads=2, num_kv_heads=1, head_dim=4, rope_theta=1e4))
SWA = Layer(mixer=Softmax(num_heads=2, num_kv_heads=1, head_dim=4, window_size=5))
GDN = Layer(mixer=Gdn(num_heads=2, num_kv_heads=2, num_v_heads=2, head_dim=4))
LENGTHS = st.integers(1, 4) | st.integers(1, 70)


@examples(25)
@given(specs(3), st.lists(LENGTHS, min_size=2, max_size=4), st.integers(0, 5), st.booleans(), st.integers(0, 99))
@torch.no_grad()
def test_a_cache_grows(drawn, lengths: list[int], spare: int, decode: bool, seed: int):
    """Before every piece it gets just the room it needs; rings of less than their window grow too."""
    model, text = build(drawn[0], seed, torch.float64, "torch"), tokens(2, sum(lengths) + 2, seed=seed)
    mask = torch.ones(2, lengths[0], dtype=torch.bool)
    mask[1, : lengths[0] // 2] = False
    cache, outs, done = model.new_cache(2, lengths[0]), [], 0
    for i, n in enumerate([*lengths, *([1, 1] if decode else [])]):
        cache = cache.resized(max(cache.lengths) + n + spare)
        before = cache.clone()
        outs.append(model(text[:, done : done + n], mask=None if i else mask, cache=cache))
        done += n
        again = before.resized(before.max_length + 3)  # what the buffers are after the next growth
        model(text[:, done - n : done], mask=None if i else mask, cache=again)
        assert cache.lengths == again.lengths
    whole = model(text[:, :done], mask=torch.nn.functional.pad(mask, (0, done - lengths[0]), value=True))
    assert error(torch.cat(outs, 1), whole) <= 1e-10


@examples(15)
@given(specs(3), st.integers(1, 40), st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, 99))
@torch.no_grad()
def test_rows_are_chosen(drawn, length: int, rows: list[int], seed: int):
    model, text = build(drawn[0], seed, torch.float64, "torch"), tokens(3, length, seed=seed)
    cache, mask = model.new_cache(3, length + 2), torch.ones(3, length, dtype=torch.bool)
    mask[2, : length // 2] = False
    model(text, mask=mask, cache=cache)
    before = [buffer.clone() for state in cache.states for _, buffer in state.tensors()]
    chosen = cache.select(torch.tensor(rows))
    new = tokens(len(rows), 2, seed=seed)
    got = model(new, cache=chosen)
    for row, source in enumerate(rows):
        alone = torch.cat((text[source][mask[source]], new[row]))[None]
        assert error(got[row], model(alone)[0, -2:]) <= 1e-10
    assert all(
        torch.equal(a, b) for a, (_, b) in zip(before, (x for s in cache.states for x in s.tensors()), strict=True)
    )


@torch.no_grad()
def test_each_row_is_cropped_by_itself():
    model, text = model_of(FULL, SWA), tokens(3, 8)
    mask = torch.tensor([[1] * 8, [0] * 3 + [1] * 5, [0] * 6 + [1] * 2], dtype=torch.bool)
    cache = model.new_cache(3, 9)
    model(text, mask=mask, cache=cache)
    with pytest.raises(ValueError, match=r"cannot crop 8 tokens to 6: layers\.1: a window of 5 tokens"):
        cache.crop([6, 5, 2])
    cache.crop([7, 1, 9])
    assert cache.lengths == tuple(cache.lengths_S.tolist()) == (7, 1, 2)
    got = model(text[:, -1:], cache=cache)
    for row, n in enumerate((7, 1, 2)):
        alone = torch.cat((text[row][mask[row]][:n], text[row, -1:]))[None]
        assert error(got[row], model(alone)[0, -1:]) <= 1e-10


def test_refusals():
    cache = model_of(FULL).new_cache(2, 5)
    with pytest.raises(ValueError, match="max_length = 0; a sequence has 0 tokens"):
        cache.resized(0)
    for index in (torch.tensor(1), torch.tensor([True, False]), torch.zeros(0, dtype=torch.long)):
        with pytest.raises(ValueError, match="it must be a list of rows"):
            cache.select(index)
    with pytest.raises(ValueError, match=r"names a row outside 0\.\.1"):
        cache.select(torch.tensor([0, 2]))


@torch.no_grad()
def test_what_generation_asks_of_a_cache():
    model, text = hf(model_of(FULL, GDN, SWA)), tokens(2, 6)
    cache = model.new_cache(2, 1)
    model(text, cache=cache)
    assert (cache.get_seq_length(), cache.batch_size, len(cache), cache.get_max_length()) == (6, 2, 3, -1)
    assert not cache.is_croppable
    assert not cache.is_compileable
    assert cache.is_linear == cache.is_sliding == [False] * 3
    assert repr(cache) == "PlaitCache(lengths=[6, 6], max_length=6)"
    copies = cache.clone()
    copies.batch_repeat_interleave(2)
    copies.batch_select_indices(torch.tensor([3, 0, 1]))
    copies.reorder_cache(torch.tensor([0, 0, 2]))
    rows, new = text[[1, 1, 0]], tokens(3, 1)
    got = model(new, cache=copies).logits
    want = model(torch.cat((rows, new), 1), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert cache.cache.lengths == (6, 6)
    with pytest.raises(ValueError, match=r"layers\.1: a recurrent state cannot be rolled back"):
        cache.crop(-1)
    assert cache.get_seq_length() == 6
    cache.crop(0)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(text, cache=cache).logits, model(text, use_cache=False).logits)


@torch.no_grad()
def test_cropping_columns():
    model, text = hf(model_of(FULL)), tokens(2, 6)
    cache = model.new_cache(2, 6)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    model(text, attention_mask=mask, cache=cache)
    for count in (1, -7):
        with pytest.raises(ValueError, match=rf"crop\({count}\); it must be 0, or -1 to -6"):
            cache.crop(count)
    with pytest.raises(ValueError, match=r"crop\(-5\) reaches back to padding"):
        cache.crop(-5)
    cache.crop(-2)
    assert (cache.get_seq_length(), cache.cache.lengths) == (4, (4, 2))
    got = model(text[:, 4:], attention_mask=mask, cache=cache).logits
    want = model(text, attention_mask=mask, use_cache=False).logits[:, 4:]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_it_is_true():
    assert model_of(FULL).new_cache(1, 1) and PlaitCache(model_of(FULL).new_cache(1, 1))  # `if cache:` asks for len
