"""`plait bench`: its commands. Torch is imported only where something is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from plait.fields import suggest
from plait.flags import device_of, dtype_of, make_parser, several

BENCHMARKS = ("mixers", "decode", "train", "eval")


def bench_command(arguments: Sequence[str], find_model: Callable[[str], Path]) -> None:
    """find_model: the directory of a model by the name that a user calls it."""
    if arguments and arguments[0] == "decode":
        _bench_decode(arguments[1:])
        return
    if arguments and arguments[0] == "train":
        _bench_train(arguments[1:])
        return
    if arguments and arguments[0] == "eval":
        _bench_eval(arguments[1:], find_model)
        return
    parser = make_parser(
        "bench",
        "Medians of interleaved repeats, as ratios measured in one process. mixers: token mixers. decode: prompts and"
        " single tokens of whole models; train: their updates; eval: samples and answers of evaluations; their options:"
        " plait bench decode --help.",
        "plait bench mixers --case kda,gla --lengths 1024,4096",
        "mixers",
    )
    parser.add_argument("what", type=str, help="mixers, decode, train, eval")
    parser.add_argument("--device", type=str, default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--lengths", type=several(int), help="tokens T (default: those of the project's own bars)")
    parser.add_argument(
        "--case",
        "--cases",
        type=several(str),
        help="roofline, gdn, kda, gla, mamba2, lightning, head-wise, fla-layer, decode, window or gdn-start, or several"
        " (default: all)",
    )
    parser.add_argument("--repeats", type=int, default=9, help="measurements each median is of, fewer if slow")
    parser.add_argument("--without", type=several(str), help="leave out competitors: words of names, as compiled,fla")
    parser.add_argument("--minutes", type=float | None, help="begin nothing after this time")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    if args.what != "mixers":
        parser.error(f"unknown benchmark {args.what!r}; {suggest(args.what, BENCHMARKS)}")

    from plait.bench.mixers import bench_mixers, print_rows

    rows = bench_mixers(
        device=device_of(args.device),
        cases=args.case,
        lengths=args.lengths,
        repeats=args.repeats,
        without=args.without,
        minutes=args.minutes,
    )
    print(json.dumps(rows, indent=1)) if args.json else print_rows(rows)


def _bench_decode(arguments: Sequence[str]) -> None:
    parser = make_parser(
        "bench decode",
        "Whole models, plait's and transformers' with the same weights: the prompt, then single tokens after it.",
        "plait bench decode --model runs/small-llama --contexts 2048 --batches 1,8",
    )
    parser.add_argument(
        "--model",
        type=several(str),
        help="checkpoints of transformers, or shapes with random weights: smollm2-135m, qwen3-1.7b, gdn-1b (default:"
        " smollm2-135m, and on CUDA all three)",
    )
    parser.add_argument("--device", type=str, default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--dtype", type=str, default="auto", help="auto: bfloat16 on a GPU, else float32")
    parser.add_argument("--contexts", type=several(int), help="tokens of a prompt (default: 2048; CUDA: 4096,32768)")
    parser.add_argument("--batches", type=several(int), help="rows (default: 1; CUDA: 1,8)")
    parser.add_argument("--modes", type=several(str), help="of plait's step: plain, compile, graph (default: auto's)")
    parser.add_argument("--steps", type=int, default=32, help="single tokens that a median is of")
    parser.add_argument("--repeats", type=int, default=3, help="prompts that a median is of")
    parser.add_argument("--minutes", type=float | None, help="begin nothing after this time")
    parser.add_argument("--out", type=str | None, help="file to write the rows to, as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)

    from plait.bench.decode import bench_decode
    from plait.bench.rows import print_rows

    device = device_of(args.device)
    rows = bench_decode(
        models=args.model,
        device=device,
        dtype=dtype_of(args.dtype, device),
        contexts=args.contexts,
        batches=args.batches,
        modes=args.modes or ("auto",),
        steps=args.steps,
        repeats=args.repeats,
        minutes=args.minutes,
    )
    if args.out:
        Path(args.out).write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows, indent=1)) if args.json else print_rows(rows)


def _bench_train(arguments: Sequence[str]) -> None:
    parser = make_parser(
        "bench train",
        "Updates (forward, backward, AdamW) of whole models, plait's beside transformers' and fla's of their shapes.",
        "plait bench train --models small/3M/RoPE,small/3M/GDN-NoPE-LH --lengths 128,512 --tokens 512",
    )
    parser.add_argument(
        "--models",
        type=several(str),
        help="presets (default: RoPE, and SWA, GDN and GLA with NoPE by layers and by heads, of small/3M; on CUDA of"
        " 001/376M)",
    )
    parser.add_argument("--lengths", type=several(int), help="tokens T of a row (default: 128,512; CUDA: 4096,32768)")
    parser.add_argument("--tokens", type=int | None, help="of an update, in whole rows (default: 512; CUDA: 32768)")
    parser.add_argument("--device", type=str, default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--compile", type=str, default="false", help="plait's blocks: false, true or both")
    parser.add_argument("--backend", type=str | None, help="plait's: torch, fla or auto (default: torch; CUDA: auto)")
    parser.add_argument(
        "--parallel",
        type=several(str),
        help="under torchrun: ddp, fsdp, or both, against each process alone, and no other competitors",
    )
    parser.add_argument("--repeats", type=int, default=5, help="measurements each median is of, fewer if slow")
    parser.add_argument("--without", type=several(str), help="leave out competitors: words of names, as attention,fla")
    parser.add_argument("--minutes", type=float | None, help="begin no model and length after this time")
    parser.add_argument("--out", type=str | None, help="file for the rows as JSON, written again after each case")
    parser.add_argument("--json", action="store_true", help="print JSON, at the end")
    args = parser.parse_args(arguments)

    from plait.bench.train import bench_train

    cases = bench_train(
        models=args.models,
        lengths=args.lengths,
        tokens=args.tokens,
        device=device_of(args.device),
        compile=args.compile,
        backend=args.backend,
        repeats=args.repeats,
        without=args.without or (),
        minutes=args.minutes,
        parallel=args.parallel or (),
    )
    _print_cases(cases, args)


def _bench_eval(arguments: Sequence[str], find_model: Callable[[str], Path]) -> None:
    parser = make_parser(
        "bench eval",
        "Seconds to make RULER's samples (generation), and a sample's seconds in a model (running): by plait, by"
        " lm-evaluation-harness's hf backend, and by transformers' generate, on the same prompts.",
        "plait bench eval runs/small-llama --case running --tasks niah_single_1 --lengths 4096 --samples 8",
        "MODEL",
    )
    parser.add_argument("model", type=str, metavar="MODEL", help="a run, RUN@STEP, a model, or OWNER/NAME")
    parser.add_argument("--case", "--cases", type=several(str), help="generation, running (default: both)")
    parser.add_argument("--tasks", type=several(str), help="of running (default: niah_single_1); generation makes all")
    parser.add_argument("--lengths", type=several(int), help="tokens (default: generation 16384, running 4096)")
    parser.add_argument("--samples", type=int | None, help="of each task (default: generation 100, running 8)")
    parser.add_argument("--batch-size", type=int | None, help="rows at a time (default: 1; CUDA: 8)")
    parser.add_argument("--processes", type=int, default=2, help="that make samples")
    parser.add_argument("--device", type=str, default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--dtype", type=str, default="auto", help="auto: bfloat16 on a GPU, else float32")
    parser.add_argument("--backend", type=str, default="torch", help="plait's: torch, fla, naive, or auto")
    parser.add_argument("--without", type=several(str), help="leave out competitors: words of names, as whole,opaque")
    parser.add_argument("--minutes", type=float | None, help="begin no batch after this time")
    parser.add_argument("--out", type=str | None, help="file for the rows as JSON, written again after each case")
    parser.add_argument("--json", action="store_true", help="print JSON, at the end")
    args = parser.parse_args(arguments)

    from plait.bench.evals import bench_eval
    from plait.evals.suites import Subject

    device = device_of(args.device)
    _print_cases(
        bench_eval(
            Subject(
                name=args.model,
                path=find_model(args.model),
                device=device,
                dtype=dtype_of(args.dtype, device),
                backend=args.backend,
            ),
            cases=args.case,
            tasks=args.tasks or ("niah_single_1",),
            lengths=args.lengths,
            samples=args.samples,
            batch_size=args.batch_size,
            processes=args.processes,
            without=args.without or (),
            minutes=args.minutes,
        ),
        args,
    )


def _print_cases(cases: Iterable[list[dict[str, Any]]], args: Namespace) -> None:
    """Rows of a benchmark as they come; under torchrun the first process shows them, for all."""
    from plait.bench.rows import print_rows

    leads, rows = os.environ.get("RANK", "0") == "0", []
    for case in cases:
        if not leads:
            continue
        rows += case
        if args.out:
            Path(args.out).write_text(json.dumps(rows, indent=1) + "\n")
        if not args.json:
            print_rows(case)
    if args.json and leads:
        print(json.dumps(rows, indent=1))
