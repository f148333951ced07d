"""Texts that perplexities are taken of, and where in a text its tokens stand. No torch."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.data.shards import BYTES, INDEX, TokenShards
from plait.data.sources import Reader, Reading
from plait.model.tokens import Bytes, Pretrained, Tokenizer, load_tokenizer

Span = tuple[int, int]
"""characters of a text, from the first to before the second"""


def documents(sources: Sequence[str], text_field: str, split: str, limit: int | None) -> Iterator[str]:
    """The texts of files, folders, JSONL, parquet, datasets (as `plait data build` takes them) or token shards."""
    texts = itertools.chain.from_iterable(_source(source, text_field, split) for source in sources)
    return itertools.islice(texts, limit)


def _source(source: str, text_field: str, split: str) -> Iterator[str]:
    if not (Path(source) / INDEX).exists():
        yield from Reader([source], Reading(text_field=text_field))
        return
    shards = TokenShards.open(source, split)
    if not len(shards):
        raise ValueError(f"data {source}: its {split} split has no document; try --split train")
    of_bytes = shards.index.tokenizer == BYTES
    tokenizer = Bytes() if of_bytes else load_tokenizer(Path(source) / "tokenizer", shards.index.vocab_size)
    for i in range(len(shards)):
        yield tokenizer.decode(shards[i].tolist())


@dataclass(frozen=True)
class Tokens:
    """A text, or its beginning, as a model reads it."""

    ids: list[int]
    spans: list[Span]
    """the characters of each token, empty for tokens that are none of the text's; those of a character that is cut in
    several tokens all have the whole of it"""
    text: str
    """what the tokens cover"""


def tokenize(tokenizer: Tokenizer, text: str, *, special: bool = True, max_tokens: int | None = None) -> Tokens:
    """special: with what the tokenizer begins a text with. max_tokens: no more than the first of them."""
    if isinstance(tokenizer, Pretrained):
        try:
            found = tokenizer.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        except NotImplementedError:
            raise ValueError(
                f"{tokenizer.where}: its tokenizer does not say where tokens stand in a text; one with a tokenizer.json"
                " does"
            ) from None
        ids, spans = list(found["input_ids"]), [tuple(span) for span in found["offset_mapping"]]
    else:
        ids = tokenizer.encode(text)
        spans = [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]
    if max_tokens is None or len(ids) <= max_tokens:
        return Tokens(ids, spans, text)
    spans = spans[:max_tokens]
    return Tokens(ids[:max_tokens], spans, text[: max((end for _, end in spans), default=0)])


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans that overlap or touch as one, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def inside(spans: Sequence[Span], stretches: Sequence[Span]) -> list[int]:
    """Which spans have characters and lie within one of the stretches, which `merged` gave."""
    starts = [start for start, _ in stretches]
    found = []
    for i, (start, end) in enumerate(spans):
        k = bisect.bisect_right(starts, start) - 1
        if start < end and k >= 0 and end <= stretches[k][1]:
            found.append(i)
    return found


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
