"""Questions to models: samples in batches, answers as rows that are kept as they come. A sample whose row is there is
not asked again."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from plait.evals.models import Judged, open_model
from plait.evals.ranks import Ranks
from plait.evals.results import Row, summarize
from plait.evals.samples import Sample, Tasks
from plait.evals.store import Store
from plait.evals.suites import Generative, Outcome, Subject
from plait.evals.texts import digest
from plait.model.tokens import Detokenizer
from plait.records import Record
from plait.terminal import progress_bar

ROOM = {"cpu": 1 << 15, "cuda": 1 << 18}
"""tokens of a batch, prompts and answers; halved where memory runs out"""
MOST_ROWS = 64
SIZES = ("tasks", "lengths", "samples", "batch_size", "beyond")
"""options that do not change a sample"""
SHORT = 256
"""about the tokens of a sample of length 0"""
SHARED = 1 / 8
"""of the shortest prompt, what prompts have in common at least, to be read once"""


def run_tasks(suite: Generative, subjects: Sequence[Subject], out: Path | None = None) -> Iterator[Outcome]:
    ranks = Ranks.here()
    store = Store(out, ranks)
    for subject in subjects:
        judged = open_model(subject)
        for length in () if suite.input else suite.lengths:
            judged.check_length(length, suite.beyond)
        run = Run(suite, judged, suite.tasks_for(judged.tokenizer), store, ranks)
        notes = run.work()
        store.gather()
        yield Outcome(records=run.records() if ranks.first else [], notes=notes)


@dataclass
class Run:
    """One model on one suite."""

    suite: Generative
    judged: Judged
    tasks: Tasks
    store: Store
    ranks: Ranks
    done: int = 0
    total: int = 0
    over: int = 0
    """prompts longer than they should be"""

    def __post_init__(self):
        self.room = ROOM.get(self.judged.device.type, ROOM["cpu"])

    def work(self) -> list[str]:
        """Ask what has not been asked; notes for the reader."""
        names = self.suite.tasks or self.tasks.names
        for task in () if self.suite.input else names:
            lengths = [length for length in self.suite.lengths if length] or [0]
            self.tasks.sample(task, min(lengths), 0)  # what is too short for a task is told at once
        jobs = self._from_file() if self.suite.input else self._made()
        each = -(-self.suite.samples // self.ranks.world)
        self.total = self.total or sum(length or SHORT for length in self.suite.lengths) * len(names) * each
        with progress_bar(self.total, show=self.ranks.first, label=f"{self.judged.name}: tokens") as step:
            for samples in jobs:
                new = [sample for sample in samples if self._is_new(sample)]
                self.done += sum(map(size_of, samples)) - sum(map(size_of, new))
                for group in by_document(new):
                    self._ask_all(group, step)
                step(self.done)
        note = f"{self.judged.name}: {self.over} prompts are longer than their length says: of another tokenizer"
        return [note] if self.over else []

    def _ask_all(self, group: list[Sample], step: Callable[..., None]) -> None:
        """In batches of prompts that begin alike; their rows are kept as they come."""
        group = alike(group)
        while group:
            longest = max(map(size_of, group))
            batch = group[: self.suite.batch_size or max(1, min(MOST_ROWS, self.room // longest))]
            try:
                rows = self.ask(batch)
            except torch.OutOfMemoryError:
                if self.suite.batch_size or len(batch) == 1:
                    raise
                self.room = len(batch) // 2 * longest
                continue
            self.store.add(rows)
            group = group[len(batch) :]
            self.over += sum(row["prompt_tokens"] + row["max_new_tokens"] > row["length"] > 0 for row in rows)
            self.done += sum(map(size_of, batch))
            step(self.done, f"{batch[0].task} at {batch[0].length:,}")

    def _made(self) -> Iterator[list[Sample]]:
        """By length and task, the longest first: where memory is short, that shows at once."""
        for length in sorted(set(self.suite.lengths), reverse=True):
            for task in self.suite.tasks or self.tasks.names:
                mine = range(self.ranks.rank, self.suite.samples, self.ranks.world)
                yield [self.tasks.sample(task, length, index) for index in mine]

    def _from_file(self) -> list[list[Sample]]:
        samples = read_samples(self.suite)[self.ranks.rank :: self.ranks.world]
        self.total = sum(map(size_of, samples))
        jobs: dict[tuple, list[Sample]] = {}
        for sample in samples:
            jobs.setdefault((-sample.length, sample.task), []).append(sample)
        return [jobs[key] for key in sorted(jobs)]

    def _is_new(self, sample: Sample) -> bool:
        return self._row(sample) not in self.store

    def _row(self, sample: Sample) -> Row:
        return {
            "model": self.judged.name,
            "step": self.judged.step,
            "run": self.judged.identity,
            "suite": self.suite.suite,
            "drawn": self.drawn,
            "task": sample.task,
            "length": sample.length,
            "index": sample.index,
            "depth": sample.depth,
            "prompt": digest(sample.prompt),
            "max_new_tokens": sample.max_new_tokens,
            "answers": sample.answers,
        }

    def ask(self, batch: Sequence[Sample]) -> list[Row]:
        """Their rows, with answers. What all prompts begin with is read once."""
        tokenizer = self.judged.tokenizer
        prompts = [tokenizer.encode(sample.prompt) for sample in batch]
        for sample, prompt in zip(batch, prompts, strict=True):
            size = len(prompt) + sample.max_new_tokens
            self.judged.check_length(size, self.suite.beyond, f"{sample.task}, sample {sample.index}")
        texts, outputs = [Detokenizer(tokenizer) for _ in batch], [""] * len(batch)

        def push(row: int, token: int) -> bool:
            outputs[row] += texts[row].push(token)
            if not self.suite.answered(self.tasks, batch[row], outputs[row]):
                return False
            return self.suite.answered(self.tasks, batch[row], tokenizer.decode(texts[row].tokens))

        together = common(prompts) if len(batch) > 1 else 0
        new = [sample.max_new_tokens for sample in batch]
        self.judged.complete(prompts, new, push, together if together >= SHARED * min(map(len, prompts)) else 0)
        rows = []
        for sample, prompt, text in zip(batch, prompts, texts, strict=True):
            output = tokenizer.decode(text.tokens)
            sizes = {"prompt_tokens": len(prompt), "new_tokens": len(text.tokens)}
            rows.append(self._row(sample) | sizes | {"output": output, "score": self.tasks.score(sample, output)})
        return rows

    def records(self) -> list[Record]:
        """Averages of this run's samples, with intervals."""
        rows = [row for row in self.store.rows.values() if self._asked(row)]
        return summarize(rows, self.judged.step, self.judged.origin, self.judged.state_bytes)

    def _asked(self, row: Row) -> bool:
        """Is it of this run, whoever asked it, and when."""
        suite = self.suite
        whose = (self.judged.name, self.judged.identity, suite.suite, self.drawn)
        if (row["model"], row["run"], row["suite"], row["drawn"]) != whose:
            return False
        wanted = suite.input is not None or (row["length"] in suite.lengths and row["index"] < suite.samples)
        return wanted and (not suite.tasks or row["task"] in suite.tasks)

    @cached_property
    def drawn(self) -> str:
        """Stands for what samples are made of, but for task, length and index."""
        options = {name: str(value) for name, value in vars(self.suite).items() if name not in SIZES}
        data = b"".join(file.read_bytes() for file in input_files(self.suite.input)) if self.suite.input else b""
        return hashlib.sha256(json.dumps(options, sort_keys=True).encode() + data).hexdigest()[:16]


def read_samples(suite: Generative) -> list[Sample]:
    """Of the suite's input file, those of its tasks."""
    assert suite.input is not None
    found = []
    for file in input_files(suite.input):
        for number, line in enumerate(file.read_text("utf-8").rstrip("\n").split("\n"), 1):
            try:
                sample = Sample.from_json(line)
            except (ValueError, TypeError) as error:
                raise ValueError(f"input: {file}, line {number}: {error}") from None
            if not suite.tasks or sample.task in suite.tasks:
                found.append(sample)
    if not found:
        raise ValueError(f"input: {suite.input}: no sample in it" + (" of these tasks" if suite.tasks else ""))
    return found


def input_files(path: Path) -> list[Path]:
    """A file, or those of a folder."""
    path = Path(path)
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(f"input: {path}: no such file, or a folder without .jsonl files")
    return files


def size_of(sample: Sample) -> int:
    return sample.length or SHORT


def by_document(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples that share a document together, all others in one group, in their order."""
    groups: dict[str | None, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.document, []).append(sample)
    alone = [s for document, group in groups.items() if document is None or len(group) == 1 for s in group]
    together = [group for document, group in groups.items() if document is not None and len(group) > 1]
    return [*together, *([alone] if alone else [])]


def alike(samples: Sequence[Sample]) -> list[Sample]:
    """Neighbours begin alike: sorted by what each shares with the one that shares most with another. Prompts with
    needles are one text up to the first needle, so by its place."""
    ordered = sorted(samples, key=lambda sample: sample.prompt)
    shares = [beginning(a.prompt, b.prompt) for a, b in itertools.pairwise(ordered)]
    if not shares:
        return ordered
    like = ordered[shares.index(max(shares))].prompt
    return sorted(ordered, key=lambda sample: -beginning(sample.prompt, like))


def beginning(a: str, b: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def common(prompts: Sequence[Sequence[int]]) -> int:
    """First tokens that all have in common, one of each left over."""
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    return min(sum(1 for _ in columns), min(map(len, prompts)) - 1)
