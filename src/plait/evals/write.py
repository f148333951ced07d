"""`plait data ruler` and `plait data babilong`: generated samples as JSON lines, for whoever asks models. The processes
that write load no torch."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from plait.data.pool import Pool
from plait.evals.counting import Bytes, Counter, TokenizerFile
from plait.evals.samples import Tasks
from plait.evals.suites import SUITES, Generative
from plait.files import new_directory
from plait.flags import add_options, gather, make_parser
from plait.terminal import progress_bar

CHUNK = 20
"""samples that a process makes at a time"""
BYTES = "bytes"


def write_command(suite: str, arguments: Sequence[str], find_model: Callable[[str], Path]) -> None:
    """find_model: a model's directory by the name that a user gives it."""
    parser = make_parser(
        f"data {suite}",
        "Samples of the benchmark as DIR/LENGTH/TASK.jsonl, for plait eval and other tools: input, outputs, length,"
        " index as RULER has them. They are made with a model's own tokenizer, as their lengths are its tokens.",
        f"plait data {suite} --tokenizer runs/small --lengths 4096,8192 --samples 100 --out samples/{suite}",
        "--tokenizer MODEL --out DIR",
    )
    parser.add_argument(
        "--tokenizer", type=str, required=True, help="a run, a model, a tokenizer's folder, OWNER/NAME, or bytes"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to make; it must not exist")
    add_options(parser, SUITES[suite], ("input", "batch_size", "beyond"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--processes", type=int, default=cores, help="processes that make samples")
    parser.add_argument("--json", action="store_true", help="print how many there are, and how long it took, as JSON")
    args = parser.parse_args(arguments)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in gather(SUITES[suite], args).items()}
    options = SUITES[suite](**given)
    tokenizer = Bytes() if args.tokenizer == BYTES else _load(args.tokenizer, find_model)
    done = write(options, tokenizer, args.out, processes=args.processes)
    text = "{out}: {samples:,} samples, {tokens:,} tokens in {seconds:.1f} s; {full:.1%} of the lengths asked for"
    print(json.dumps(done, indent=1) if args.json else text.format(**done))


def write(options: Generative, tokenizer: Any, out: Path, *, processes: int = 1) -> dict[str, Any]:
    """All samples, complete or none; what they come to. ValueError in a line."""
    if out.exists():
        raise ValueError(f"out: {out} exists; give a name that is free")
    if processes < 1:
        raise ValueError(f"processes = {processes}; it must be at least 1")
    begun, names = time.monotonic(), _names(options, tokenizer)
    jobs = [
        (task, length, index, min(index + CHUNK, options.samples))
        for length in sorted(set(options.lengths))
        for task in names
        for index in range(0, options.samples, CHUNK)
    ]
    total, count, tokens, asked = sum(job[3] - job[2] for job in jobs), 0, 0, 0
    with new_directory(out) as new, _countable(tokenizer) as counts, progress_bar(total, label="samples") as show:
        processes = processes if isinstance(counts, Bytes | TokenizerFile) else 1
        for (task, length, *_), (lines, used, wanted) in _made(jobs, options, counts, processes):
            (new / str(length)).mkdir(exist_ok=True)
            with (new / str(length) / f"{task}.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(lines)
            count, tokens, asked = count + len(lines), tokens + used, asked + wanted
            show(count, f"{task} at {length:,}")
    full = tokens / asked if asked else 0.0
    return {"out": str(out), "samples": count, "tokens": tokens, "full": full, "seconds": time.monotonic() - begun}


def _names(options: Generative, tokenizer: Any) -> tuple[str, ...]:
    tasks = options.tasks_for(tokenizer)
    for task in options.tasks:
        if task not in tasks.names:
            tasks.sample(task, max(options.lengths), 0)  # raises, and says why
    return tuple(dict.fromkeys(options.tasks)) or tasks.names


def _made(jobs: list[Any], options: Generative, counts: Any, processes: int) -> Iterator[tuple[Any, Any]]:
    """Each job with what came of it, in their order."""
    with Pool(_make, processes) as pool:
        for job in jobs:
            yield from pool.put(job, None, (options, counts, *job))
        yield from pool.rest()


def _make(options: Generative, counts: Any, task: str, length: int, start: int, stop: int) -> tuple:
    """Lines of some samples, their tokens with room for the answers, and the tokens that they might have."""
    tasks = _tasks(options, counts)
    made = [tasks.sample(task, length, index) for index in range(start, stop)]
    tokens = sum(sample.prompt_tokens + sample.max_new_tokens for sample in made)
    return [sample.to_json() + "\n" for sample in made], tokens, length * len(made) or tokens


@cache
def _tasks(options: Generative, tokenizer: Any) -> Tasks:
    return options.tasks_for(tokenizer)


def _load(name: str, find_model: Callable[[str], Path]) -> Any:
    """As plait eval reads a model's."""
    from plait.evals.tokenizer import tokenizer_of

    path = Path(name)
    return tokenizer_of(path if (path / "tokenizer.json").exists() else find_model(name))


@contextlib.contextmanager
def _countable(tokenizer: Any) -> Iterator[Any]:
    """The same, so that other processes have it in a moment; where it is one that cannot be, itself."""
    counter = Counter(tokenizer)
    if counter.fast is None:
        yield tokenizer
        return
    with tempfile.TemporaryDirectory(prefix="plait-tokenizer-") as folder:
        file = Path(folder) / "tokenizer.json"
        counter.fast.save(str(file))
        yield TokenizerFile(file, counter.around)
