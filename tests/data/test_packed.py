"""Batches of token shards: nothing lost or doubled in an epoch, batches pure, mixtures, masks, ranks, errors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data import IGNORE
from plait.data.packed import Packed, Part
from plait.data.shards import INDEX, Index, Shard, TokenShards
from plait.data.stream import Stream, permuted
from plait.files import write_json
from plait.mixers.seq import Seq

EOS = 0


def write(path: Path, train: list[int], valid: list[int] = (), *, per_shard: int = 3, **index) -> Path:
    """Documents of given lengths; document d has the tokens 1000 d + 1, 1000 d + 2, ..., and d from 500 on if valid."""
    path.mkdir()
    splits: dict[str, tuple[Shard, ...]] = {"train": (), "valid": ()}
    for split, lengths, first in (("train", train, 0), ("valid", valid, 500)):
        for number, start in enumerate(range(0, len(lengths), per_shard)):
            part = list(lengths[start : start + per_shard])
            tokens = np.concatenate([1000 * (first + start + i) + 1 + np.arange(n) for i, n in enumerate(part)])
            name, ends = f"{split}-{number:05d}", np.cumsum(part).astype("<u8")
            tokens.astype("<u4").tofile(path / f"{name}.bin")
            ends.tofile(path / f"{name}.idx")
            sha = hashlib.sha256(tokens.astype("<u4").tobytes() + ends.tobytes()).hexdigest()
            splits[split] += (Shard(file=name, tokens=sum(part), documents=len(part), sha256=sha),)
    given = {"tokenizer": "0" * 64, "vocab_size": 10**6, "eos": EOS, "dtype": "uint32", "settings": {}, "left_out": {}}
    write_json(path / INDEX, Index(**given | index | {"splits": splits}).to_json())
    return path


def document(d: int, length: int) -> list[int]:
    return [*(1000 * d + 1 + np.arange(length)).tolist(), EOS]


def pieces(row, length: int) -> tuple[list[int], int]:
    """A row's inputs that are no filling, and its last target."""
    return row.tokens[: min(row.size - 1, length)].tolist(), int(row.tokens[row.size - 1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


lengths_of = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_of, T=st.integers(1, 50), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_packed_rows_hold_every_token_of_an_epoch_once_in_order(folder, lengths, T, seed, epoch):
    path = write(folder / str(len(list(folder.iterdir()))), lengths)
    stream = Stream(shards=TokenShards.open(path), length=T, seed=(seed,))
    laid_out: list[int] = []
    for k in range(stream.rows):
        row = stream.row(epoch, k)
        inputs, target = pieces(row, T)
        laid_out += inputs
        assert (row.tokens[row.size :] == EOS).all()
        assert len(inputs) == T or k == stream.rows - 1
        assert row.starts == tuple(i for i in range(1, row.size) if row.tokens[i - 1] == EOS)
        assert target == (stream.row(epoch, k + 1).tokens[0] if k + 1 < stream.rows else EOS)
    laid_out.append(target)
    order = [token // 1000 for token in laid_out if token % 1000 == 1]
    assert sorted(order) == list(range(len(lengths)))
    assert laid_out == [token for d in order for token in document(d, lengths[d])]


@settings(max_examples=40, deadline=None)
@given(lengths=lengths_of, T=st.integers(1, 50), least=st.integers(1, 20))
def test_whole_rows_hold_one_document_each(folder, lengths, T, least):
    lengths = [*lengths, 20]
    path = write(folder / str(len(list(folder.iterdir()))), lengths)
    stream = Stream(shards=TokenShards.open(path), length=T, seed=(0,), min_tokens=least, whole=True)
    found: dict[int, list[int]] = {}
    for k in range(stream.rows):
        row = stream.row(0, k)
        inputs, target = pieces(row, T)
        assert row.starts == () and len({token // 1000 for token in inputs}) == 1
        found.setdefault(inputs[0] // 1000, [0])[-1:] = [*inputs, target]
    assert found == {d: document(d, n) for d, n in enumerate(lengths) if n >= least}


@given(size=st.integers(1, 500), seed=st.integers(0, 10))
@settings(max_examples=50, deadline=None)
def test_the_order_of_rows_is_a_permutation(size, seed):
    assert sorted(permuted(i, size, (seed, 1)) for i in range(size)) == list(range(size))


def test_orders_differ_by_seed_and_epoch_and_are_spread():
    orders = [[permuted(i, 1000, seed) for i in range(1000)] for seed in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.1
        assert np.mean(np.abs(np.diff(order))) == pytest.approx(1000 / 3, rel=0.1)
    assert len({tuple(order) for order in orders}) == 3


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> tuple[Path, Path]:
    rng = np.random.default_rng(1)
    folder = tmp_path_factory.mktemp("two")
    long = write(folder / "long", rng.integers(30, 200, 20).tolist(), [100, 90])
    return long, write(folder / "short", rng.integers(1, 30, 90).tolist(), [9, 8, 7, 30], per_shard=20)


def task(*parts: Part | Path, length: int = 16, **options) -> Packed:
    given = tuple(part if isinstance(part, Part) else Part(path=part) for part in parts)
    return Packed(parts=given, length=length, **{"batch_size": 6, **options})


def same(a, b) -> bool:
    return all(
        torch.equal(x.tokens_BT, y.tokens_BT) and torch.equal(x.targets_BT, y.targets_BT)
        for x, y in zip(a, b, strict=True)
    )


def test_a_batch_is_a_function_of_seed_and_step(shards):
    a, b = (task(*shards, seed=3) for _ in "ab")
    in_order = [a.batch(step) for step in range(40)]
    for step in (39, 0, 17, 39, 3):
        assert same(b.batch(step), in_order[step])
    assert same(b.held_out(), a.held_out())
    assert not same(task(*shards, seed=4).batch(0), in_order[0])
    assert len({tuple(group.tokens_BT.flatten().tolist()) for (group,) in in_order}) == 40


def test_epochs_follow_each_other_without_replacement(shards):
    one = task(shards[0], batch_size=1)
    rows = one._train[0].rows
    seen = [tuple(one.batch(step)[0].tokens_BT[0].tolist()) for step in range(2 * rows)]
    assert len(set(seen[:rows])) == len(set(seen[rows:])) == rows
    assert seen[:rows] != seen[rows:]
    targets = torch.cat([one.batch(step)[0].targets_BT for step in range(rows)])
    assert (targets != IGNORE).sum() == one._train[0].shards.tokens + len(one._train[0].shards) - 1


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_ranks_take_disjoint_parts_that_are_the_batch(shards, world):
    for masks in (False, True):
        both = task(*shards, document_masks=masks)
        for step in (0, 5):
            (batch,) = both.batch(step)
            parts = [both.rows(step, rank, world)[0] for rank in range(world)]
            assert torch.equal(torch.cat([part.tokens_BT for part in parts]), batch.tokens_BT)
            assert torch.equal(torch.cat([part.targets_BT for part in parts]), batch.targets_BT)
            assert max(len(part.tokens_BT) for part in parts) - min(len(part.tokens_BT) for part in parts) <= 1
    with pytest.raises(ValueError, match="rank = 2, world = 2"):
        both.rows(0, 2, 2)
    with pytest.raises(ValueError, match="at most batch_size = 6"):
        both.rows(0, 0, 7)


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.sampled_from([0, 1, 2, 0.3, 7.5]), min_size=1, max_size=4), seed=st.integers(0, 9))
def test_mixtures_hold_their_weights_and_use_every_row_of_a_part_in_turn(shards, weights, seed):
    weights = [*weights, 1.0]
    mixed = task(*(Part(path=shards[0], weight=w) for w in weights), seed=seed)
    rows = [mixed.source(n) for n in range(500)]
    for start, stop in ((0, 500), (100, 200)):
        counts = np.bincount([part for part, _ in rows[start:stop]], minlength=len(weights))
        assert np.abs(counts - np.array(weights) / sum(weights) * (stop - start)).max() <= len(weights)
    for i in range(len(weights)):
        assert [row for part, row in rows if part == i] == list(range(sum(part == i for part, _ in rows)))


def test_long_and_short_documents_one_to_one(shards):
    mixed = task(Part(path=shards[0], min_tokens=100, whole=True, name="books"), shards[1], batch_size=8)
    for step in range(5):
        (group,) = mixed.batch(step)
        assert [mixed.source(8 * step + n)[0] for n in range(8)].count(0) == 4
        assert group.axes == {}
    assert (mixed._train[0].shards.lengths[mixed._train[0].chosen] >= 100).all()
    long, short = mixed.held_out()
    assert (long.axes, short.axes) == ({"source": "books"}, {"source": "short"})
    assert set((long.tokens_BT // 1000).flatten().tolist()) <= {500, 0}  # of document 1, 90 tokens: too short


def test_held_out_rows_are_of_the_valid_split_and_no_more_than_asked_for(shards):
    (group,) = task(shards[1], held_out_rows=2).held_out()
    assert group.tokens_BT.shape == (2, 16) and group.axes == {}
    (group,) = task(shards[1]).held_out()
    real = group.tokens_BT[group.tokens_BT != EOS]
    assert set((real // 1000).tolist()) == {500, 501, 502, 503}


@pytest.mark.parametrize("T", [5, 16, 64])
def test_document_masks_tell_where_documents_begin_and_let_no_loss_cross(shards, T):
    plain, masked = (task(shards[1], length=T, document_masks=masks) for masks in (False, True))
    assert plain.batch(0)[0].cu_seqlens is None
    for step in range(30):
        (a,), (b,) = plain.batch(step), masked.batch(step)
        assert torch.equal(a.tokens_BT, b.tokens_BT)
        flat, offsets = b.tokens_BT.flatten(), b.cu_seqlens.tolist()
        assert offsets[0] == 0 and offsets[-1] == flat.numel() and offsets == sorted(set(offsets))
        assert set(range(0, flat.numel() + 1, T)) <= set(offsets)
        for start, stop in zip(offsets, offsets[1:], strict=False):
            piece = flat[start:stop]
            assert len({int(token) // 1000 for token in piece if token != EOS}) <= 1
            assert (piece[:-1] != EOS).all() or (piece == EOS).all()
        crossing = b.tokens_BT == EOS
        assert (b.targets_BT[crossing] == IGNORE).all()
        assert torch.equal(a.targets_BT[~crossing], b.targets_BT[~crossing])
        Seq.build((1, flat.numel()), flat.device, cu_seqlens=b.cu_seqlens)  # as LM takes them


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length = 0"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_bad_options_are_one_line(shards, options, message):
    with pytest.raises(ValueError, match=message):
        task(shards[0], **options)


def test_what_does_not_fit_is_one_line(shards, tmp_path, monkeypatch):
    long, short = shards
    with pytest.raises(ValueError, match=r"weights = \[0.0, 0.0\]; they must not all be 0"):
        task(Part(path=long, weight=0.0), Part(path=short, weight=0.0))
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be at least 0 and finite"):
            Part(path=long, weight=weight)
    with pytest.raises(ValueError, match=r"no document in its train split has min_tokens = 31"):
        task(Part(path=short, min_tokens=31))
    other = write(tmp_path / "other", [3], tokenizer="bytes", vocab_size=256)
    with pytest.raises(ValueError, match=r"other: its tokenizer \(bytes\) is not that of .*1000000 tokens"):
        task(long, other)
    with pytest.raises(ValueError, match=r"other: no document in its valid split; .* larger --valid"):
        task(other)
    task(long).check_model(10**6, None)
    with pytest.raises(ValueError, match=r"vocab_size = 1000000 .* the model's 256 is smaller"):
        task(long).check_model(256, None)
    with pytest.raises(ValueError, match="length = 16; the model takes at most context_length = 8"):
        task(long).check_model(10**6, 8)
    monkeypatch.setattr("plait.data.shards.CHECKED", 0)  # too large to be compared with its sha256 when it is opened
    (tmp_path / "other" / "train-00000.idx").write_bytes(np.array([4], dtype="<u8").tobytes())
    with pytest.raises(ValueError, match="do not rise to 3"):
        task(other)


def test_a_damaged_shard_is_one_line(tmp_path, monkeypatch):
    path = write(tmp_path / "x", [40], [9])
    monkeypatch.setattr("plait.data.shards.CHECKED", 0)  # too large to be compared with its sha256 when it is opened
    (path / "train-00000.bin").write_bytes(np.full(40, 2**31, dtype="<u4").tobytes())
    with pytest.raises(ValueError, match=r"data .*x: token 2147483648 of 1000000: a file is damaged; .* --verify"):
        task(path).batch(0)


def test_an_altered_token_is_found_when_small_shards_are_opened(tmp_path, monkeypatch):
    path = write(tmp_path / "x", [40], [9])
    tokens = np.fromfile(path / "train-00000.bin", dtype="<u4")
    tokens[7] += 1
    tokens.tofile(path / "train-00000.bin")
    with pytest.raises(ValueError, match=r"train-00000: altered since it was built \(its sha256 is another\)"):
        task(path)
    monkeypatch.setattr("plait.data.shards.CHECKED", 0)
    task(path)
