"""The suites mqar and spaced-retrieval: synthetic recall, on models that were trained on it. Answers are scored where
they are to be predicted, what stands before them being given. A row that has a score is not asked again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.data import Group
from plait.data.mqar import MQAR
from plait.data.spaced_retrieval import VOCAB_SIZE, SpacedRetrieval
from plait.evals.models import Judged, open_model
from plait.evals.ranks import Ranks
from plait.evals.results import Row, summarize
from plait.evals.store import Store
from plait.evals.suites import Mqar, Outcome, Spaced, Subject
from plait.scoring import score_tokens
from plait.terminal import progress_bar

AT_ONCE = {"cpu": 1 << 14, "cuda": 1 << 18}
"""tokens"""


@dataclass(frozen=True)
class Part:
    task: str
    axes: dict[str, int]
    group: Group


def run_recall(suite: Mqar | Spaced, subjects: Sequence[Subject], out: Path | None = None) -> Iterator[Outcome]:
    store = Store(out, Ranks.here())
    for subject in subjects:
        judged = open_model(subject, text=False)
        parts = _mqar(suite, judged) if isinstance(suite, Mqar) else _spaced(suite, judged)
        for part in parts:
            judged.check_length(part.group.tokens_BT.shape[1], suite.beyond, part.task)
        rows, total = [], sum(len(part.group.tokens_BT) for part in parts)
        with progress_bar(total, show=store.ranks.first, label=f"{judged.name}: rows") as step:
            for part in parts:
                rows += (own := _rows(judged, suite, part))
                for batch in _batches(judged, suite, part, own, store):
                    store.add(batch)
                step(len(rows))
        store.gather()
        if not store.ranks.first:
            yield Outcome()
            continue
        rows = store.whole(rows)
        found = summarize(rows, judged.step, judged.origin, judged.state_bytes)
        yield Outcome(records=found, samples=store.loose(rows))


def _mqar(suite: Mqar, judged: Judged) -> list[Part]:
    vocab_size = suite.vocab_size or judged.model.spec.vocab_size
    task = MQAR(
        vocab_size=vocab_size,
        pairs=suite.pairs,
        row_length=suite.length,
        seed=suite.seed,
        eval_rows=suite.samples,
    )
    return [Part(f"{group.axes['pairs']} pairs", dict(group.axes), group) for group in task.held_out()]


def _spaced(suite: Spaced, judged: Judged) -> list[Part]:
    if judged.model.spec.vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"{judged.name}: vocab_size = {judged.model.spec.vocab_size}; spaced retrieval has {VOCAB_SIZE} tokens"
        )
    task = SpacedRetrieval(gaps=suite.gaps, seed=suite.seed)
    if suite.samples > task.eval_pairs:
        raise ValueError(f"samples = {suite.samples}; there are {task.eval_pairs} keys that training never sees")
    groups = [next(group.split(suite.samples)) for group in task.held_out()]
    return [Part(f"gap {group.axes['gap']}", dict(group.axes), group) for group in groups]


def _rows(judged: Judged, suite: Mqar | Spaced, part: Part) -> list[Row]:
    """Without scores."""
    about = {"model": judged.name, "step": judged.step, "run": judged.identity, "suite": suite.suite}
    about |= {"task": part.task, **part.axes, "length": part.group.tokens_BT.shape[1]}
    prompts = [hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16] for tokens in part.group.tokens_BT]
    return [about | {"index": i, "prompt": prompt} for i, prompt in enumerate(prompts)]


@torch.no_grad()
def _batches(
    judged: Judged, suite: Mqar | Spaced, part: Part, rows: Sequence[Row], store: Store
) -> Iterator[list[Row]]:
    """Rows with their scores, of those that have none yet."""
    mine = range(store.ranks.rank, len(rows), store.ranks.world)
    new = [i for i in mine if rows[i] not in store]
    size = suite.batch_size or max(1, AT_ONCE.get(judged.device.type, AT_ONCE["cpu"]) // rows[0]["length"])
    for start in range(0, len(new), size):
        batch = new[start : start + size]
        tokens_BT, targets_BT = (x[batch].to(judged.device) for x in (part.group.tokens_BT, part.group.targets_BT))
        scores = score_tokens(judged.model, tokens_BT, targets_BT)
        right = [scores.correct_N[scores.row_N == row].double() for row in range(len(batch))]
        yield [
            rows[i] | {"score": 100 * float(found.mean()), "exact": bool(found.all())}
            for i, found in zip(batch, right, strict=True)
        ]
