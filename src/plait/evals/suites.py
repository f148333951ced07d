"""Suites of tasks by the names that users type. No torch: what a suite runs on is imported when it runs.

A suite is a frozen dataclass of its options, each of them a flag of `plait eval`, with a method `run`. One that asks
questions and scores answers is a `Generative` (docs/evals.md shows how to add one).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from plait import records
from plait.evals.samples import Sample, Tasks
from plait.fields import suggest
from plait.records import Record

if TYPE_CHECKING:
    from plait.evals.settings import Rule, Setting
    from plait.model.tokens import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to evaluate."""

    name: str
    """as the user calls it"""
    path: Path
    """its directory"""
    device: str = "cpu"
    dtype: Any = None
    """a torch.dtype; None: that of the file"""
    backend: str = "torch"
    opaque: bool = False
    """run by transformers instead of imported"""

    @property
    def step(self) -> int | None:
        """Of a training run's checkpoint."""
        number = self.path.name.removeprefix("step-")
        return int(number) if self.path.name.startswith("step-") and number.isdigit() else None


@dataclass
class Outcome:
    """What a suite found out about one model."""

    records: list[Record] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    """one row a sample and model, plain JSON; those that are in the folder of results already are not here"""
    notes: list[str] = field(default_factory=list)
    """lines for the reader: what was cut, what is missing"""


class Suite(Protocol):
    def run(self, subjects: Sequence[Subject], out: Path | None = None) -> Iterator[Outcome]:
        """One outcome a model, as they are done; out: the folder of results, where there is one. ValueError in a line
        where options or a model cannot be used."""
        ...


def at_least(options: Any, least: int, *names: str) -> None:
    """ValueError where one of these options is given and less."""
    for name in names:
        value = getattr(options, name)
        if value is not None and min(value if isinstance(value, tuple) else (value,), default=least) < least:
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise ValueError(f"{name} = {shown}; it must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class LmEval:
    """Tasks of lm-evaluation-harness, and the papers' averages over them.

    Args:
        tasks: tasks, groups or tags of the harness, or of --include-path, as arc_easy,piqa
        group: averages of the papers, as 003/CSR-7,004/Easy-6; each runs its tasks within the paper's limits
        include_path: folder of task files (YAML), which go before the harness's own
        num_fewshot: examples in the prompt (default: each task's own)
        limit: only the first documents of every task, for trying things out
        batch_size: rows at a time (default: as many as fit)
        max_length: tokens of prompt and answer (default: the group's, or the model's context)
        allow_code: run code that the model writes, which tasks as mbpp need: true or false
    """

    tasks: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int | None = None
    max_length: int | None = None
    allow_code: bool = False

    def __post_init__(self):
        from plait.evals.groupings import grouping

        for name in self.group:
            grouping(name)
        if not self.tasks and not self.group:
            raise ValueError("tasks: none given; name some with --tasks or an average with --group")
        at_least(self, 1, "limit", "batch_size", "max_length")
        at_least(self, 0, "num_fewshot")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ValueError(f"include_path: {self.include_path}: no such folder")

    def run(self, subjects: Sequence[Subject], out: Path | None = None) -> Iterator[Outcome]:
        from plait.evals.harness import run_harness

        if any(subject.opaque for subject in subjects):
            raise ValueError("suite lm-eval: it imports its models; the harness itself runs others: lm_eval --model hf")
        return run_harness(self, subjects)


@dataclass(frozen=True, kw_only=True)
class Ppl:
    """Perplexity of texts.

    Args:
        data: text files, folders, JSONL, parquet, hf:NAME, or what plait data build made; a document a file or row
        text_field: name of the text in JSONL, parquet and datasets
        split: of token shards: train or valid
        length: tokens of a pass (default: the model's context, or 4096); 65536 and more are read in pieces
        stride: tokens that each pass after the first scores (default: length, so that passes do not overlap)
        max_tokens: only so many of a document, from its beginning
        limit: only the first documents
        batch_size: passes at a time (default: by their length)
        beyond: allow more tokens than the model's context_length: true or false
    """

    data: tuple[str, ...] = ()
    text_field: str = "text"
    split: str = "valid"
    length: int | None = None
    stride: int | None = None
    max_tokens: int | None = None
    limit: int | None = None
    batch_size: int | None = None
    beyond: bool = False

    def __post_init__(self):
        if not self.data:
            raise ValueError("data: none given; name texts with --data")
        at_least(self, 1, "length", "stride", "limit", "batch_size")
        at_least(self, 2, "max_tokens")

    def run(self, subjects: Sequence[Subject], out: Path | None = None) -> Iterator[Outcome]:
        from plait.evals.perplexity import run_ppl

        return run_ppl(self, subjects, out)


@dataclass(frozen=True, kw_only=True)
class LongPpl:
    """LongPPL: perplexity on the tokens that a reference model needs a long context for.

    Args:
        data: text files, folders, JSONL, parquet, hf:NAME, or what plait data build made; a document a file or row
        reference: the model that finds key tokens, with any tokenizer
        setting: as published: 000 (16,384 tokens, 10 keys or more), 001 (books), 003 (32,768 tokens, raw text)
        text_field: name of the text in JSONL, parquet and datasets
        split: of token shards: train or valid
        context: K, tokens that the short pass sees at least
        stride: d, tokens that a short pass scores
        gain: nats that the long context must gain
        most: nats that a key token costs at most with the long context
        max_tokens: only so many of a document (default: the setting's, or all)
        min_keys: leave out documents with fewer key tokens (default: the setting's, or 1)
        special: begin texts with what the tokenizer begins them with: true or false (default: the setting's, or true)
        limit: only the first documents
        cache: folder of key tokens that were found before (default: ~/.cache/plait/longppl)
        reference_opaque: let transformers run the reference: true or false
        beyond: allow more tokens than the model's context_length: true or false
    """

    data: tuple[str, ...] = ()
    reference: str | None = None
    setting: str | None = None
    text_field: str = "text"
    split: str = "valid"
    context: int = 4096
    stride: int = 1024
    gain: float = 2.0
    most: float = 2.0
    max_tokens: int | None = None
    min_keys: int | None = None
    special: bool | None = None
    limit: int | None = None
    cache: Path | None = None
    reference_opaque: bool = False
    beyond: bool = False

    def __post_init__(self):
        from plait.evals.settings import SETTINGS

        if not self.data:
            raise ValueError("data: none given; name texts with --data")
        if self.reference is None:
            raise ValueError("reference: none given; --reference MODEL finds the key tokens")
        if self.setting is not None and self.setting not in SETTINGS:
            raise ValueError(f"setting = {self.setting!r}; {suggest(self.setting, SETTINGS)}")
        at_least(self, 1, "context", "stride", "limit", "min_keys")
        at_least(self, 2, "max_tokens")

    @cached_property
    def published(self) -> Setting:
        """The setting, with what was given instead of its own values."""
        from plait.evals.settings import SETTINGS, Setting

        given = {name: getattr(self, name) for name in ("max_tokens", "min_keys", "special")}
        setting = SETTINGS[self.setting] if self.setting else Setting(source="")
        return dataclasses.replace(setting, **{name: value for name, value in given.items() if value is not None})

    @cached_property
    def rule(self) -> Rule:
        from plait.evals.settings import Rule

        setting = self.published
        return Rule(
            K=self.context,
            d=self.stride,
            gain=self.gain,
            most=self.most,
            max_tokens=setting.max_tokens,
            special=setting.special,
        )

    def run(self, subjects: Sequence[Subject], out: Path | None = None) -> Iterator[Outcome]:
        from plait.evals.longppl import run_longppl

        return run_longppl(self, subjects, out)


@dataclass(frozen=True, kw_only=True)
class Generative:
    """Questions that a model answers greedily; every sample has a score of its own.

    Args:
        tasks: some of the suite's tasks, with commas between (default: all)
        lengths: tokens of prompt and answer together, as 1024,4096
        samples: how many of each task and length
        seed: of the samples
        input: samples from this JSONL file or folder of them instead, as plait data ruler writes them
        batch_size: rows at a time (default: by their length)
        beyond: allow more tokens than the model's context_length: true or false
    """

    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (4096,)
    samples: int = 100
    seed: int = 0
    input: Path | None = None
    batch_size: int | None = None
    beyond: bool = False

    suite: ClassVar[str]
    """its name"""
    shortest: ClassVar[int] = 1
    """length"""

    def __post_init__(self):
        if not self.lengths and self.input is None:
            raise ValueError("lengths: none given; give some, as 1024,4096")
        at_least(self, self.shortest, "lengths")
        at_least(self, 1, "samples", "batch_size")
        for name in self.tasks:
            if name not in self.names:
                raise ValueError(f"task = {name!r}; {suggest(name, self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tasks."""
        raise NotImplementedError

    def tasks_for(self, tokenizer: Tokenizer) -> Tasks:
        """The tasks with a model's tokenizer."""
        raise NotImplementedError

    def answered(self, tasks: Tasks, sample: Sample, output: str) -> bool:
        """Can no further text change the score? Asked after every token. As it is here it is for scores that more text
        never lowers."""
        return tasks.score(sample, output) >= 100

    def run(self, subjects: Sequence[Subject], out: Path | None = None) -> Iterator[Outcome]:
        from plait.evals.runner import run_tasks

        return run_tasks(self, subjects, out)


@dataclass(frozen=True, kw_only=True)
class RulerSuite(Generative):
    """RULER's 13 tasks, made with each model's own tokenizer.

    Args:
        haystack: text for the prose haystack, a file or folder (default: plait's own, of public-domain books)
        qa_data: files of SQuAD (makes qa_1) and HotpotQA (qa_2); without them qa_syn1 and qa_syn2 stand in
    """

    haystack: Path | None = None
    qa_data: tuple[str, ...] = ()

    suite: ClassVar[str] = "ruler"

    @property
    def names(self) -> tuple[str, ...]:
        from plait.evals.ruler import LISTS, NIAH, QA

        return (*NIAH, *LISTS, *QA, *QA.values())

    def tasks_for(self, tokenizer: Tokenizer) -> Tasks:
        from plait.evals.ruler import Ruler

        return Ruler(tokenizer, seed=self.seed, haystack=self.haystack, qa_data=[Path(file) for file in self.qa_data])


@dataclass(frozen=True, kw_only=True)
class BabilongSuite(Generative):
    """BABILong's qa1 to qa5 on stories made by program.

    Args:
        lengths: tokens of prompt and answer together, as 0,4096; 0 is the facts alone
        haystack: text that the facts stand in, a file or folder (default: plait's own, of public-domain books)
    """

    haystack: Path | None = None

    suite: ClassVar[str] = "babilong"
    shortest: ClassVar[int] = 0

    @property
    def names(self) -> tuple[str, ...]:
        from plait.evals.babilong import Babilong

        return Babilong.names

    def tasks_for(self, tokenizer: Tokenizer) -> Tasks:
        from plait.evals.babilong import Babilong

        return Babilong(tokenizer, seed=self.seed, haystack=self.haystack)

    def answered(self, tasks: Tasks, sample: Sample, output: str) -> bool:
        """Only the first sentence counts."""
        return "." in output


@dataclass(frozen=True, kw_only=True)
class Mqar:
    """Multi-query associative recall (Zoology), of models that were trained on it.

    Args:
        pairs: of keys and values in a row, as 4,16,64,256
        length: tokens of a row (default: 4 for every pair, at least 64)
        vocab_size: tokens that are used, keys of the first half and values of the second (default: the model's)
        samples: rows of each number of pairs
        seed: of the rows
        batch_size: rows at a time (default: by their length)
        beyond: allow more tokens than the model's context_length: true or false
    """

    pairs: tuple[int, ...] = (4, 16, 64, 256)
    length: int | None = None
    vocab_size: int | None = None
    samples: int = 100
    seed: int = 0
    batch_size: int | None = None
    beyond: bool = False

    suite: ClassVar[str] = "mqar"

    def __post_init__(self):
        at_least(self, 1, "pairs", "length", "samples", "batch_size")
        at_least(self, 4, "vocab_size")

    def run(self, subjects: Sequence[Subject], out: Path | None = None) -> Iterator[Outcome]:
        from plait.evals.recall import run_recall

        return run_recall(self, subjects, out)


@dataclass(frozen=True, kw_only=True)
class Spaced:
    """Spaced Retrieval (003): five digits repeated after a gap, of models that were trained on it.

    Args:
        gaps: tokens between a key and its repetition, as 16,192
        samples: keys of each gap, which training with this seed never sees
        seed: of the keys; that of the model's training, since others may hold keys it was trained on
        batch_size: rows at a time (default: by their length)
        beyond: allow more tokens than the model's context_length: true or false
    """

    gaps: tuple[int, ...] = (16, 192)
    samples: int = 500
    seed: int = 0
    batch_size: int | None = None
    beyond: bool = False

    suite: ClassVar[str] = "spaced-retrieval"

    def __post_init__(self):
        at_least(self, 0, "gaps")
        at_least(self, 1, "samples", "batch_size")

    def run(self, subjects: Sequence[Subject], out: Path | None = None) -> Iterator[Outcome]:
        from plait.evals.recall import run_recall

        return run_recall(self, subjects, out)


SUITES: dict[str, type[Any]] = {
    "lm-eval": LmEval,
    "ppl": Ppl,
    "longppl": LongPpl,
    "ruler": RulerSuite,
    "babilong": BabilongSuite,
    "mqar": Mqar,
    "spaced-retrieval": Spaced,
}


def write_outcome(outcome: Outcome, directory: Path) -> None:
    """Add to the directory's records.jsonl and samples.jsonl."""
    from plait.evals.results import read_rows

    directory.mkdir(parents=True, exist_ok=True)
    read_rows(directory / "samples.jsonl", mend=True)
    records.append(directory / "records.jsonl", outcome.records)
    with (directory / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in outcome.samples)
