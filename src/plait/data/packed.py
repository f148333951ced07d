"""Batches out of token shards (a Task): packed rows, mixtures, document masks, parts for ranks.

Shapes: B rows, T tokens of a row, S pieces of documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from plait.data import IGNORE, Group
from plait.data.shards import BYTES, TokenShards
from plait.data.stream import Row, Stream

UNIT = 2**32
"""weights are taken to this part"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the sources of a mixture.

    Args:
        path: directory that plait data build made
        weight: its share of the rows, in relation to the others'
        min_tokens: only documents with at least this many (000's long documents)
        whole: rows that hold one document each; else documents are packed end to end
        name: what records call it (default: the directory's name)
    """

    path: Path
    weight: float = 1.0
    min_tokens: int = 1
    whole: bool = False
    name: str | None = None

    def __post_init__(self):
        if not 0 <= self.weight < float("inf"):
            raise ValueError(f"weight = {self.weight} of {self.path}; it must be at least 0 and finite")
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens = {self.min_tokens} of {self.path}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Rows of `length` tokens from one or more directories of token shards.

    Row i of all rows, batch by batch, comes from a part by weight. The choice is not drawn but spread evenly
    (systematic sampling with a seeded start), so that any n rows in sequence hold a part's share of n to within one
    row for it and each part before it, and how many rows a part has given before row i needs no counting.
    """

    parts: tuple[Part, ...]
    length: int
    batch_size: int = 16
    seed: int = 0
    document_masks: bool = False
    """groups have cu_seqlens, so that documents do not see each other; a document's first token is then no target"""
    held_out_rows: int = 1000
    """of each part, at most, in random order, so that the first few are a sample"""

    def __post_init__(self):
        if self.length < 1 or self.batch_size < 1 or self.held_out_rows < 1:
            raise ValueError(
                f"length = {self.length}, batch_size = {self.batch_size}, held_out_rows = {self.held_out_rows};"
                " all must be at least 1"
            )
        if self.seed < 0:
            raise ValueError(f"seed = {self.seed}; it must be at least 0")
        if not self.parts or not sum(part.weight for part in self.parts) > 0:
            raise ValueError(f"weights = {[part.weight for part in self.parts]}; they must not all be 0")
        first, *others = self._train
        for other in others:
            a, b = first.shards.index, other.shards.index
            if (a.tokenizer, a.vocab_size, a.eos) != (b.tokenizer, b.vocab_size, b.eos):
                raise ValueError(
                    f"data {other.shards.path}: its tokenizer ({_about(other.shards)}) is not that of"
                    f" {first.shards.path} ({_about(first.shards)}); build both with one"
                )
        _ = self._valid  # what cannot be measured is refused here, not after the last update

    @property
    def vocab_size(self) -> int:
        return self._train[0].shards.index.vocab_size

    @cached_property
    def _train(self) -> tuple[Stream, ...]:
        return tuple(self._stream(i, "train") for i in range(len(self.parts)))

    @cached_property
    def _valid(self) -> tuple[Stream, ...]:
        return tuple(self._stream(i, "valid") for i in range(len(self.parts)))

    def _stream(self, i: int, split: str) -> Stream:
        part = self.parts[i]
        shards = TokenShards.open(part.path, split)
        seed = (self.seed, i, int(split == "valid"))
        return Stream(shards=shards, length=self.length, seed=seed, min_tokens=part.min_tokens, whole=part.whole)

    def check_model(self, vocab_size: int, context_length: int | None) -> None:
        """ValueError where a model cannot take these tokens or rows of this length."""
        if vocab_size < self.vocab_size:
            raise ValueError(
                f"data {self.parts[0].path}: vocab_size = {self.vocab_size} ({_about(self._train[0].shards)});"
                f" the model's {vocab_size} is smaller: it has another tokenizer"
            )
        if context_length is not None and self.length > context_length:
            raise ValueError(f"length = {self.length}; the model takes at most context_length = {context_length}")

    def batch(self, step: int) -> list[Group]:
        return self.rows(step, 0, 1)

    def rows(self, step: int, rank: int, world: int) -> list[Group]:
        """A rank's rows of batch `step`: those of all ranks, in their order, are the batch."""
        if not 0 <= rank < world <= self.batch_size:
            raise ValueError(
                f"rank = {rank}, world = {world}; rank must be below world, which must be at most batch_size ="
                f" {self.batch_size}"
            )
        start, stop = (self.batch_size * n // world for n in (rank, rank + 1))
        numbers = range(step * self.batch_size + start, step * self.batch_size + stop)
        return [self._group([self._train[part][row] for part, row in map(self.source, numbers)])]

    def source(self, number: int) -> tuple[int, int]:
        """(part, row of its own) of row `number`, counted over all batches."""
        for i, (share, start) in enumerate(self._shares):
            before, after = ((n * share + start) // UNIT for n in (number, number + 1))
            if after > before:
                return i, before
            number -= before
        raise AssertionError("the last share is all that is left")

    @cached_property
    def _shares(self) -> tuple[tuple[int, int], ...]:
        """Of each part, in UNITs of the rows that parts before it leave; and the seeded start."""
        left = np.cumsum([part.weight for part in self.parts][::-1])[::-1]
        starts = np.random.default_rng([self.seed, 3]).integers(0, UNIT, len(self.parts)).tolist()
        shares = [round(part.weight / rest * UNIT) if rest else 0 for part, rest in zip(self.parts, left, strict=True)]
        return tuple(zip(shares, starts, strict=True))

    def held_out(self) -> list[Group]:
        """Rows of the valid split, a group for each part."""
        groups = []
        for i, stream in enumerate(self._valid):
            rows = [stream[n] for n in range(min(stream.rows, self.held_out_rows))]
            name = self.parts[i].name or self.parts[i].path.name
            groups.append(self._group(rows, {"source": name} if len(self.parts) > 1 else {}))
        return groups

    def _group(self, rows: Sequence[Row], axes: dict[str, str] | None = None) -> Group:
        tokens = torch.from_numpy(np.stack([row.tokens for row in rows]))
        if (largest := int(tokens.max())) >= self.vocab_size:
            where = ", ".join(str(part.path) for part in self.parts)
            raise ValueError(
                f"data {where}: token {largest} of {self.vocab_size}: a file is damaged; plait data show --verify says"
                " which"
            )
        targets = tokens[:, 1:].clone()
        offsets = [0]
        for n, row in enumerate(rows):
            targets[n, row.size - 1 :] = IGNORE
            if self.document_masks:
                for start in row.starts:
                    targets[n, start - 1] = IGNORE
                begin = n * self.length
                offsets += [begin + at for at in (*row.starts, row.size) if at < self.length] + [begin + self.length]
        pieces = torch.tensor(offsets) if self.document_masks else None
        return Group(tokens[:, :-1], targets, axes or {}, pieces)


def _about(shards: TokenShards) -> str:
    index = shards.index
    return index.tokenizer if index.tokenizer == BYTES else f"{index.vocab_size} tokens, sha256 {index.tokenizer[:8]}"
