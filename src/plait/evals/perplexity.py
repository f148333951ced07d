"""The suite ppl: perplexity of texts by token, word and byte, in passes that may overlap, and loss against position. A
text whose row is there is not read again.

Shapes: B passes, L tokens of the longest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from plait.data import IGNORE
from plait.evals.models import Judged, open_model
from plait.evals.ranks import Ranks
from plait.evals.results import Row
from plait.evals.stats import ratio_of
from plait.evals.store import Store
from plait.evals.suites import Outcome, Ppl, Subject
from plait.evals.texts import Tokens, digest, documents, tokenize
from plait.records import Record
from plait.terminal import progress_bar

LENGTH = 4096
"""of a pass where neither an option nor the model says one"""
AT_ONCE = {"cpu": 8192, "cuda": 65536}
"""tokens of the passes that run together"""
KEPT = 4
"""times as many tokens are of documents that are scored together, and whose rows are kept then"""


class Pass(NamedTuple):
    """Tokens start to end - 1 of a document go in; those from first on have their next tokens scored."""

    document: int
    start: int
    first: int
    end: int


def passes(document: int, T: int, length: int, stride: int) -> Iterator[Pass]:
    """Of a document of T tokens: together they score every token but the first once. The first pass scores `length` of
    them, each later one `stride`, which see `length - stride` tokens or more."""
    inputs = T - 1
    end = min(length, inputs)
    if end > 0:
        yield Pass(document, 0, 0, end)
    while end < inputs:
        yield Pass(document, end + stride - length, end, min(end + stride, inputs))
        end = min(end + stride, inputs)


def run_ppl(options: Ppl, subjects: Sequence[Subject], out: Path | None = None) -> Iterator[Outcome]:
    store = Store(out, Ranks.here())
    texts = list(documents(options.data, options.text_field, options.split, options.limit))
    for subject in subjects:
        judged = open_model(subject)
        length = options.length or judged.context or LENGTH
        judged.check_length(length, options.beyond, "length")
        yield measure(judged, texts, options, length, store)


def measure(judged: Judged, texts: Sequence[str], options: Ppl, length: int, store: Store) -> Outcome:
    stride = length if options.stride is None else options.stride
    if stride > length:
        raise ValueError(f"stride = {stride}; it must be at most length = {length}")
    tokens = [tokenize(judged.tokenizer, text, max_tokens=options.max_tokens) for text in texts]
    if not any(len(found.ids) > 1 for found in tokens):
        raise ValueError("data: no document has two tokens; there is nothing to score")
    axes = {"suite": "ppl", "model": judged.name, "length": length, "stride": stride, "max_tokens": options.max_tokens}
    rows = [_row(judged, i, found, axes) for i, found in enumerate(tokens)]
    at_once = AT_ONCE.get(judged.device.type, AT_ONCE["cpu"])
    groups = list(together(tokens, KEPT * at_once))[store.ranks.rank :: store.ranks.world]
    missing = [[i for i in group if rows[i] not in store] for group in groups]
    total, done = sum(len(tokens[i].ids) for new in missing for i in new), 0
    with progress_bar(total, show=store.ranks.first, label=f"{judged.name}: tokens") as step:
        for new in missing:
            places = {i: np.zeros((2, length.bit_length())) for i in new}
            todo = [each for i in new for each in passes(i, len(tokens[i].ids), length, stride)]
            for batch, losses in _losses(judged, tokens, todo, options.batch_size, at_once):
                for each, row in zip(batch, losses, strict=True):
                    _add(places[each.document], each, row)
                done += sum(each.end - each.first for each in batch)
                step(done)
            store.add([rows[i] | _found(places[i]) for i in new])
    store.gather()
    return _outcome(judged, tokens, store.whole(rows), axes, store) if store.ranks.first else Outcome()


def together(tokens: Sequence[Tokens], size: int) -> Iterator[list[int]]:
    """Numbers of documents in groups of at least `size` tokens, the last but for what is left; the longest first: where
    memory is short, that shows at once."""
    group, held = [], 0
    for i in sorted(range(len(tokens)), key=lambda i: -len(tokens[i].ids)):
        group.append(i)
        held += len(tokens[i].ids)
        if held >= size:
            yield group
            group, held = [], 0
    yield group


def _row(judged: Judged, index: int, found: Tokens, axes: dict) -> Row:
    about = {"model": judged.name, "step": judged.step, "run": judged.identity}
    about |= {key: axes[key] for key in ("suite", "length", "stride")}
    about["drawn"] = digest(json.dumps([axes["stride"], axes["max_tokens"]]))
    return about | {"task": "text", "index": index, "prompt": digest(found.text), "words": len(found.text.split())}


def _losses(judged: Judged, tokens: Sequence[Tokens], todo: Sequence[Pass], batch_size: int | None, at_once: int):
    """Batches of passes and their losses, a float64 row each; the longest first."""
    order = sorted(todo, key=lambda p: p.start - p.end)
    while order:
        L = order[0].end - order[0].start
        size = batch_size or max(1, at_once // L)
        batch, order = order[:size], order[size:]
        rows_BL = torch.zeros(len(batch), L, dtype=torch.long)  # a shorter pass is filled up behind its end
        targets_BL = torch.full((len(batch), L), IGNORE)
        for row, each in enumerate(batch):
            ids = torch.tensor(tokens[each.document].ids[each.start : each.end + 1])
            rows_BL[row, : len(ids) - 1] = ids[:-1]
            targets_BL[row, each.first - each.start : len(ids) - 1] = ids[each.first - each.start + 1 :]
        yield batch, judged.losses(rows_BL, targets_BL).double().cpu().numpy()


def _add(places: np.ndarray, each: Pass, losses: np.ndarray) -> None:
    """To sums and counts by power of two of the tokens seen."""
    seen = np.arange(each.first - each.start, each.end - each.start)
    bucket = np.log2(seen + 1).astype(int)
    np.add.at(places[0], bucket, losses[seen])
    np.add.at(places[1], bucket, 1)


def _found(places: np.ndarray) -> Row:
    """A document's part of its row."""
    (loss, count), (losses, counts) = places.sum(1), places.tolist()
    return {"loss": float(loss), "tokens": int(count), "by_place": losses, "tokens_by_place": counts}


def _outcome(judged: Judged, tokens: Sequence[Tokens], rows: Sequence[Row], axes: dict, store: Store) -> Outcome:
    sums, counts, words = ([row[key] for row in rows] for key in ("loss", "tokens", "words"))
    size = sum(len(found.text.encode()) for found in tokens)
    by_token, by_word = ratio_of(sums, counts), ratio_of(sums, words)
    values = {
        "token_perplexity": _exp(by_token.value),
        "token_perplexity_low": _exp(by_token.low),
        "token_perplexity_high": _exp(by_token.high),
        "word_perplexity": _exp(by_word.value),
        "word_perplexity_low": _exp(by_word.low),
        "word_perplexity_high": _exp(by_word.high),
        "bits_per_byte": sum(sums) / math.log(2) / size,
        "loss": by_token.value,
        "n": sum(counts),
        "documents": len(rows),
        "words": sum(words),
        "bytes": size,
    }
    found = [_record(judged, "perplexity", values, axes)]
    by_place = [np.sum([row[key] for row in rows], 0) for key in ("by_place", "tokens_by_place")]
    for k, (total, count) in enumerate(zip(*by_place, strict=True)):
        if count:
            place = {"position": 2**k, "until": min(2 ** (k + 1), axes["length"] + 1)}
            found.append(_record(judged, "position_loss", {"loss": total / count, "n": count}, axes | place))
    return Outcome(records=found, samples=store.loose(rows))


def _record(judged: Judged, name: str, values: dict, axes: dict) -> Record:
    values = {key: None if value is None else float(value) for key, value in values.items()}
    return Record(kind="eval", name=name, step=judged.step, values=values, axes=axes, provenance=judged.origin)


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(min(value, 700.0))
