"""`plait bench eval`: what evaluations take. `generation`: RULER's samples, made with a model's tokenizer. `running`:
the model's answers to them, by plait's runner, by lm-evaluation-harness's hf backend as its own command calls it, and
by transformers' generate under plait's runner (--opaque), in one process.

Every batch goes to each competitor in turn. Seconds are those of all batches over the number of samples, no medians:
answers differ in length, and it is the long ones that cost. plait, and --opaque with it, ends where no further text can
change the score; `plait, whole answers` and the harness go on for as many tokens as the task has, unless the model ends
the text. `ratio` is a competitor's time over plait's; where the project promises one, `bar` is it. `agrees` counts the
samples that score as plait's answers do.
"""

# the harness is an extra
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from plait.bench.rows import OURS, Options, Row, device_name, dtype_name, judged
from plait.bench.timing import reason
from plait.evals import counting
from plait.evals.models import Judged, open_model
from plait.evals.quiet import quiet
from plait.evals.ranks import Ranks
from plait.evals.runner import Run
from plait.evals.samples import Sample, Tasks
from plait.evals.store import Store
from plait.evals.suites import RulerSuite, Subject
from plait.evals.tokenizer import tokenizer_of
from plait.evals.write import write
from plait.fields import suggest
from plait.model.tokens import Bytes

GENERATION, RUNNING = "generation", "running"
CASES = (GENERATION, RUNNING)
WHOLE, OPAQUE, HARNESS = f"{OURS}, whole answers", f"{OURS} --opaque", "lm-eval hf"
LENGTHS, SAMPLES = {GENERATION: (16_384,), RUNNING: (4096,)}, {GENERATION: 100, RUNNING: 8}
LIMIT, PROCESSES = 60.0, 2
"""seconds that 100 samples of each of the 13 tasks may take at 16,384 tokens, and by how many processes"""
BAR = 1.5
"""the harness's time over plait's, on a CPU, on niah at 4,096 tokens"""
WARM_UP = 2000
"""characters of a prompt that warms up a CPU; a GPU has the whole first batch"""


def bench_eval(
    subject: Subject,
    *,
    cases: Sequence[str] | None = None,
    tasks: Sequence[str] = ("niah_single_1",),
    lengths: Sequence[int] | None = None,
    samples: int | None = None,
    batch_size: int | None = None,
    processes: int = PROCESSES,
    without: Sequence[str] = (),
    minutes: float | None = None,
) -> Iterator[list[Row]]:
    """Rows of each case, length and, of running, task: case, length, samples, seconds and, of generation, processes,
    tokens_per_s, limit, met; of running task, batch, competitor, cpu_seconds (of all threads; they tell more where
    others use the machine), score, new_tokens, agrees, ratio, bar, met, note.

    samples: of each task. batch_size: rows of running (None: 1 on a CPU, 8 on CUDA). without: words in the names of
    competitors that are left out. minutes: no batch and no length of generation begins later.
    """
    for case in cases or ():
        if case not in CASES:
            raise ValueError(f"case: {case!r}; {suggest(case, CASES)}")
    given = {"samples": samples, "batch_size": batch_size, "processes": processes}
    for field, values in {"lengths": lengths or (), **{name: (value,) for name, value in given.items()}}.items():
        for value in values:
            if value is not None and value < 1:
                raise ValueError(f"{field}: {value}; it must be at least 1")
    options = Options(torch.device(subject.device), without=tuple(without))
    end = None if minutes is None else time.monotonic() + 60 * minutes
    suites = {
        case: RulerSuite(
            tasks=tuple(tasks) if case == RUNNING else (),
            lengths=tuple(lengths or LENGTHS[case]),
            samples=samples or SAMPLES[case],
            batch_size=batch_size or (8 if options.cuda else 1),
            beyond=True,
        )
        for case in cases or CASES
    }
    return _cases(suites, subject, options, processes, end)


def _cases(
    suites: dict[str, RulerSuite], subject: Subject, options: Options, processes: int, end: float | None
) -> Iterator[list[Row]]:
    if GENERATION in suites:
        yield from _generation(suites[GENERATION], subject, processes, end)
    if RUNNING in suites:
        yield from _running(suites[RUNNING], subject, options, end)


def _late(end: float | None) -> bool:
    return end is not None and time.monotonic() >= end


def _say(*words: object) -> None:
    print(*words, sep=", ", file=sys.stderr, flush=True)


def _generation(suite: RulerSuite, subject: Subject, processes: int, end: float | None) -> Iterator[list[Row]]:
    tokenizer = tokenizer_of(subject.path)
    known: Any = counting.Bytes() if isinstance(tokenizer, Bytes) else tokenizer  # one that other processes can have
    for length in suite.lengths:
        row: Row = {"case": f"{GENERATION}: {subject.name}", "device": "cpu", "length": length}
        late = _late(end)
        _say(GENERATION, f"{length:,}", *(["not run"] if late else []))
        if late:
            yield [row | {"note": "not run: the minutes were over"}]
            continue
        with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder:
            one = dataclasses.replace(suite, lengths=(length,))
            done = write(one, known, Path(folder) / "samples", processes=processes)
        row |= {"samples": done["samples"], "processes": processes, "seconds": done["seconds"]}
        row["tokens_per_s"] = done["tokens"] / done["seconds"]
        if (length, suite.samples) == (LENGTHS[GENERATION][0], SAMPLES[GENERATION]) and processes <= PROCESSES:
            row |= {"limit": LIMIT, "met": done["seconds"] < LIMIT}
        yield [row]


class Side:
    """A competitor, and what came of the samples; what fails leaves a note."""

    def __init__(self, name: str, build: Callable[[], Callable[[Sequence[Sample]], list[Row]]]):
        """build: gives a function of a batch, to rows with output and new_tokens."""
        self.name = name
        self.note: str | None = None
        self.ask: Callable[[Sequence[Sample]], list[Row]] | None = None
        self.clear()
        try:
            self.ask = build()
        except Exception as error:  # memory, a model that transformers has not, what is not installed
            self.note = reason(error)

    def clear(self) -> None:
        self.seconds, self.cpu_seconds = 0.0, 0.0
        self.rows: list[Row] = []

    def answer(self, batch: Sequence[Sample], *, keep: bool = True) -> None:
        if self.ask is None:
            return
        start, begun = time.perf_counter(), time.process_time()
        try:
            rows = self.ask(batch)
        except Exception as error:
            self.ask, self.note = None, reason(error)
            return
        if keep:
            self.seconds += time.perf_counter() - start
            self.cpu_seconds += time.process_time() - begun
            self.rows += rows


def _running(suite: RulerSuite, subject: Subject, options: Options, end: float | None) -> Iterator[list[Row]]:
    ours = open_model(dataclasses.replace(subject, opaque=False))
    tasks = suite.tasks_for(ours.tokenizer)
    sides = list(_sides(suite, tasks, ours, options))
    common = {"case": f"{RUNNING}: {subject.name}", "device": device_name(options.device)}
    common |= {"dtype": dtype_name(ours.subject.dtype), "batch": suite.batch_size}
    for length in suite.lengths:
        for task in suite.tasks:
            samples = [tasks.sample(task, length, index) for index in range(suite.samples)]
            fields = {**common, "task": task, "length": length}
            _race(sides, samples, suite.batch_size or 1, options.cuda, end)
            bars = {HARNESS: BAR} if not options.cuda and length == 4096 and task.startswith("niah") else {}
            yield _rows(sides, samples, tasks, fields, bars)
            for side in sides:
                side.clear()


def _race(sides: Sequence[Side], samples: Sequence[Sample], size: int, cuda: bool, end: float | None) -> None:
    batches = [samples[start : start + size] for start in range(0, len(samples), size)]
    if not _late(end):
        short = [dataclasses.replace(sample, prompt=sample.prompt[-WARM_UP:]) for sample in batches[0]]
        for side in sides:
            side.answer(batches[0] if cuda else short, keep=False)
    for number, batch in enumerate(batches):
        late = _late(end)
        _say(
            batch[0].task, f"{batch[0].length:,}", f"{number * size} of {len(samples)}", *(["not run"] if late else [])
        )
        if late:
            return
        for side in sides:
            side.answer(batch)


def _rows(
    sides: Sequence[Side], samples: Sequence[Sample], tasks: Tasks, fields: Row, bars: dict[str, float]
) -> list[Row]:
    rows, first = [], [tasks.score(sample, row["output"]) for sample, row in zip(samples, sides[0].rows, strict=False)]
    for side in sides:
        row = {**fields, "competitor": side.name, "samples": len(side.rows)}
        if side.rows:
            scores = [tasks.score(sample, found["output"]) for sample, found in zip(samples, side.rows, strict=False)]
            row |= {"seconds": side.seconds / len(side.rows), "cpu_seconds": side.cpu_seconds / len(side.rows)}
            row |= {"score": statistics.mean(scores)}
            row["new_tokens"] = statistics.mean(found["new_tokens"] for found in side.rows)
        if side.rows and first and side is not sides[0]:
            same = sum(a == b for a, b in zip(scores, first, strict=False))
            row["agrees"] = f"{same} of {min(len(scores), len(first))}"
            row |= judged(row["seconds"] / rows[0]["seconds"], bars.get(side.name))
        if side.note or not side.rows:
            row["note"] = side.note or "not run: the minutes were over"
        rows.append(row)
    return rows


def _sides(suite: RulerSuite, tasks: Tasks, ours: Judged, options: Options) -> Iterator[Side]:
    """plait's comes first: it is what the others are compared with."""

    def run(judged: Judged, suite: RulerSuite) -> Callable[[Sequence[Sample]], list[Row]]:
        return Run(suite, judged, tasks, Store(None, Ranks()), Ranks()).ask

    whole = _Whole(**{field.name: getattr(suite, field.name) for field in dataclasses.fields(suite)})
    opaque = dataclasses.replace(ours.subject, opaque=True)
    builds = {
        OURS: lambda: run(ours, suite),
        WHOLE: lambda: run(ours, whole),
        OPAQUE: lambda: run(open_model(opaque), suite),
        HARNESS: lambda: _harness(ours.subject, suite),
    }
    for name, build in builds.items():
        if options.keeps(name):
            yield Side(name, build)


class _Whole(RulerSuite):
    def answered(self, tasks: Tasks, sample: Sample, output: str) -> bool:
        return False


def _harness(subject: Subject, suite: RulerSuite) -> Callable[[Sequence[Sample]], list[Row]]:
    """lm-evaluation-harness with the settings that its own RULER tasks have."""
    try:
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ValueError(f"not installed (no module {error.name}): pip install 'plait[eval]'") from None
    from transformers.utils import logging

    logging.disable_progress_bar()

    class Counted(HFLM):
        new_tokens = 0
        """of the last batch, each row"""

        def _model_generate(self, context: Any, *given: Any, **options: Any) -> Any:
            found = super()._model_generate(context, *given, **options)
            self.new_tokens = found.shape[1] - context.shape[1]
            return found

    with quiet():
        model = Counted(
            str(subject.path),
            device=subject.device,
            dtype=dtype_name(subject.dtype),
            batch_size=suite.batch_size,
            max_length=max(suite.lengths),
        )

    def ask(batch: Sequence[Sample]) -> list[Row]:
        requests = []
        for i, sample in enumerate(batch):
            settings = {"do_sample": False, "temperature": 0.0, "max_gen_toks": sample.max_new_tokens, "until": []}
            requests.append(Instance("generate_until", {}, (sample.prompt, settings), i))
        with quiet():
            outputs = model.generate_until(requests, disable_tqdm=True)
        return [{"output": output, "new_tokens": model.new_tokens} for output in outputs]

    return ask
