"""The command line. Torch is imported only inside commands that compute or read checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from plait.config import suggest
from plait.files import claim
from plait.flags import BAD_USAGE, add_options, config_first, device_of, dtype_of, gather, make_parser, several
from plait.train.config import TrainConfig
from plait.train.settings import IN_TOKENS, PARTS, DataOptions, ExtendOptions, ModelOptions, RunSettings

OK, FAILED = 0, 1


def describe(arguments: Sequence[str]) -> None:
    """What a layout costs, before anything is built."""
    parser = make_parser(
        "describe",
        "Parameters, FLOPs per token and cache bytes of a layout, layer by layer, beside full attention.",
        "plait describe '3*gdn nope' --d-model 1024 --num-layers 24 --num-heads 8 --context 131072",
        "(LAYOUT | --preset NAME)",
    )
    parser.add_argument(
        "layout",
        type=str,
        nargs="?",
        metavar="LAYOUT",
        help="layout string, a spec.json, or a model: plait's or transformers' directory, OWNER/NAME on the hub",
    )
    parser.add_argument("--preset", type=str, help="a published model by name instead, as 001/776M/GDN-NoPE-HH")
    parser.add_argument("--list-presets", action="store_true", help="print the names of presets")
    sizes: dict[str, Any] = {"d_model": 512, "num_layers": 8, "num_heads": 8}
    add_options(parser, ModelOptions, ("layout", "preset"), **ModelOptions.SIZES | sizes)
    parser.add_argument("--vocab-size", type=int | None, help="entries of the vocabulary (default: 32000)")
    parser.add_argument("--context", type=int, default=32_768, help="tokens T of a sequence")
    parser.add_argument("--dtype-bytes", type=int, default=2, help="bytes of a cached number (recurrent states: 4)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)

    from plait.describe import describe_json, describe_table, presets_table, read_spec
    from plait.presets import preset_names

    if args.list_presets:
        print(json.dumps(preset_names(), indent=1)) if args.json else presets_table()
        return
    given = {name: value for name, value in gather(ModelOptions, args).items() if value is not None}
    spec = read_spec(args.layout) if args.layout and args.preset is None else None
    if spec is None and args.preset is None:
        spec = ModelOptions(**sizes | given).spec(32_000 if args.vocab_size is None else args.vocab_size)
    elif spec is None:
        spec = ModelOptions(**given).spec(args.vocab_size)
    if args.json:
        print(json.dumps(describe_json(spec, args.context, args.dtype_bytes), indent=1))
    else:
        describe_table(spec, args.context, args.dtype_bytes)


def train(arguments: Sequence[str]) -> None:
    """Train a hybrid on a synthetic task or on text."""
    parser = make_parser(
        "train",
        "Train a hybrid in runs/NAME. The same command goes on where an interrupted run stopped.",
        "plait train --name first --layout 'gdn nope' --task spaced-retrieval --gaps 16,192 --steps 300",
        "--name NAME (--layout LAYOUT | --preset NAME | --init MODEL | --config FILE)",
    )
    parser.add_argument(
        "--config", action="config", help="a run's config.json, to repeat it, or any file of options; flags override it"
    )
    parser.add_argument("--name", type=str, required=True, help="the run's name")
    parser.add_argument("--runs", type=str, default="runs", help="folder of runs")
    add_options(parser, ModelOptions, **ModelOptions.SIZES)
    for options in (DataOptions, TrainConfig, ExtendOptions):
        add_options(parser, options)
    for field, instead in IN_TOKENS.items():
        parser.add_argument(
            f"--{field.replace('_', '-')}", type=float | None, help=f"tokens, in whole updates, instead of --{instead}"
        )
    parser.add_argument(
        "--branch", type=str | None, help="go on from RUN@STEP or a checkpoint: its optimizer, its data"
    )
    parser.add_argument("--init", type=str | None, help="begin with the weights of RUN, RUN@STEP or any model, no more")
    parser.add_argument(
        "--stages",
        type=str | None,
        help="Better Layer Division: bld:EARLY (updates of the early stage in runs/NAME-early, then --steps with all),"
        " or a size of the paper's, as 003/180M/bld; vanilla:EARLY freezes nothing. Or 001/cpt, 000/32k: the model of"
        " --init trained at 32K, as there. They set optimizer and schedule, and the latter the RoPE base",
    )
    parser.add_argument("--device", type=str, default="auto", help="cpu, cuda, or auto: a GPU where there is one")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what the run would cost, and its learning rates; write nothing"
    )
    parser.add_argument(
        "--processes", type=int | None, help="of a dry run: that torchrun would start (default: as it has, or 1)"
    )
    parser.add_argument("--json", action="store_true", help="print the last measurements (or the dry run) as JSON")
    args = parser.parse_args(config_first(arguments))

    flat = {key: value for cls in PARTS.values() for key, value in gather(cls, args).items()}
    others = {name: getattr(args, name) for name in ("branch", "init", *IN_TOKENS)}
    settings = RunSettings.from_json({**flat, **others}, "options")
    run = Path(args.runs) / args.name
    from plait.train.stages import check_stages, find_stages

    stages = find_stages(args.stages, settings) if args.stages else ()
    check_stages(args.stages, stages, settings)
    if args.dry_run and len(stages) > 1:
        raise ValueError("stages, dry_run: a dry run is of one stage; leave --stages out")
    if args.dry_run:
        settings = stages[0].apply(settings, init=settings.init) if stages else settings
        _dry_run(run, settings, args)
        return
    from plait.runs import last_measurements, train_run, train_stages

    if stages:
        train_stages(run, stages, settings, device=device_of(args.device))
    else:
        train_run(run, settings, device=device_of(args.device))
    if int(os.environ.get("RANK", "0")) > 0:
        return  # of several processes the first speaks
    rows = last_measurements(run)
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        _show_rows(f"{run} after update {rows[0].step if rows else settings.train.steps}", rows)


def _dry_run(run: Path, settings: RunSettings, args: Namespace) -> None:
    from plait import runs
    from plait.train.plan import plan_run, show_plan

    if os.environ.get("RANK", "0") != "0":
        return  # one says it for all
    device, task = device_of(args.device), settings.data.build(settings.train.seed)
    init = None if settings.init is None else runs.find_model(settings.init)
    spec = runs.spec_of(settings, task, init)
    processes = int(os.environ.get("WORLD_SIZE", "1")) if args.processes is None else args.processes
    if processes < 1:
        raise ValueError(f"processes = {processes}; it must be at least 1")
    plan = plan_run(run, settings, spec, task, init=init, device=device, processes=processes)
    print(json.dumps(plan.to_json(), indent=1)) if args.json else show_plan(plan, str(run))


def probe(arguments: Sequence[str]) -> None:
    """Measure what the layers of a trained model do."""
    parser = make_parser(
        "probe",
        "Measure the layers of a checkpoint. retrieval-score: 003's layer retrieval score, in logits.",
        "plait probe runs/first retrieval-score --gap 64 --json",
        "MODEL retrieval-score",
    )
    parser.add_argument(
        "model", type=str, metavar="MODEL", help="RUN (its last checkpoint), RUN@STEP, or a checkpoint's directory"
    )
    parser.add_argument("what", type=str, help="retrieval-score")
    parser.add_argument("--gap", type=several(int), default=(64,), help="gaps to measure at, as 16,192")
    parser.add_argument("--pairs", type=int, default=2_000, help="held-out prompt pairs")
    parser.add_argument("--seed", type=int | None, help="of the keys (default: the run's own)")
    parser.add_argument("--device", type=str, default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    if args.what != "retrieval-score":
        parser.error(f"unknown probe {args.what!r}; {suggest(args.what, ['retrieval-score'])}")

    from plait.runs import probe_retrieval

    rows = probe_retrieval(args.model, args.gap, pairs=args.pairs, seed=args.seed, device=device_of(args.device))
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        _show_rows(f"{args.model}: layer retrieval score", rows)


def report(arguments: Sequence[str]) -> None:
    """Make one offline HTML page of one or more runs."""
    parser = make_parser(
        "report",
        "One self-contained page: layouts, losses, layer scores, costs, provenance.",
        "plait report runs/vanilla runs/frozen -o report.html",
        "RUN [RUN ...]",
    )
    parser.add_argument("runs", type=str, nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("-o", "--output", type=str, default="report.html", help="file to write")
    args = parser.parse_args(arguments)

    from plait.report import build_report

    build_report([Path(run) for run in args.runs], Path(args.output))
    print(args.output)


def generate(arguments: Sequence[str]) -> None:
    """Continue a text."""
    parser = make_parser(
        "generate",
        "Print the continuation of a prompt as it comes, and last, on standard error, how fast that was.",
        "plait generate runs/small --prompt 'Once upon a time' --temperature 0.8 --top-p 0.95",
        "MODEL (--prompt TEXT | --prompt-file FILE)",
    )
    parser.add_argument("model", type=str, metavar="MODEL", help="a run, a model, or OWNER/NAME on the hub")
    parser.add_argument("--prompt", type=str | None, help="text to continue; - reads standard input")
    parser.add_argument("--prompt-file", type=str | None, help="file with the text")
    parser.add_argument("--chat", action="store_true", help="the text is a user's turn, in the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="end after this many")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token; 1: as the model says")
    parser.add_argument("--top-k", type=int | None, help="draw from this many of the likeliest tokens")
    parser.add_argument("--top-p", type=float | None, help="draw from the likeliest that make up this share")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--beyond", action="store_true", help="allow more tokens than the model's context_length")
    parser.add_argument("--device", type=str, default="auto", help="cpu, cuda, or auto")
    parser.add_argument(
        "--dtype", type=str, default="auto", help="float32, bfloat16 or float16; auto: bfloat16 on a GPU, else float32"
    )
    parser.add_argument("--backend", type=str, default="torch", help="torch, fla, naive, or auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, at the end")
    args = parser.parse_args(arguments)
    if (args.prompt is None) == (args.prompt_file is None):
        raise ValueError("prompt: give one of --prompt TEXT and --prompt-file FILE")
    text = Path(args.prompt_file).read_text() if args.prompt_file else args.prompt
    text = sys.stdin.read() if args.prompt == "-" else text

    from plait.model.io import load
    from plait.model.text import continue_text
    from plait.model.tokens import load_tokenizer
    from plait.runs import find_model

    path, device = find_model(args.model), device_of(args.device)
    model = load(path, backend=args.backend, device=device, dtype=dtype_of(args.dtype, device))
    tokenizer = load_tokenizer(path, model.spec.vocab_size)
    done = continue_text(
        model,
        tokenizer,
        tokenizer.chat(text) if args.chat else tokenizer.encode(text),
        max_new_tokens=args.max_new_tokens,
        show=(lambda piece: None) if args.json else (lambda piece: print(piece, end="", flush=True)),
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        beyond=args.beyond,
    )
    if args.json:
        print(json.dumps(done.to_json(), indent=1))
        return
    print(flush=True)
    print(done.summary(), file=sys.stderr)


def bench(arguments: Sequence[str]) -> None:
    """Measure speed side by side with other implementations."""
    from plait.bench.command import bench_command

    bench_command(arguments, _find_model)


def export(arguments: Sequence[str]) -> None:
    """Write a model as a checkpoint that transformers loads as one of its own."""
    parser = make_parser(
        "export",
        "A model whose layers a stock architecture has, as a checkpoint of it; or any model in plait's own form.",
        "plait export runs/small --to qwen3 --out small-qwen3",
        "MODEL --to ARCHITECTURE --out DIRECTORY",
    )
    parser.add_argument("model", type=str, metavar="MODEL", help="a run, a model, or OWNER/NAME on the hub")
    parser.add_argument("--to", type=str, required=True, help="llama, mistral, qwen2, qwen3, smollm3, ..., or plait")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; it must not exist")
    args = parser.parse_args(arguments)
    if args.out.exists():
        raise ValueError(f"out: {args.out} exists; give a name that is free")

    from plait.model.families import FAMILIES
    from plait.model.foreign import export_model
    from plait.model.io import load, save
    from plait.runs import find_model

    if args.to not in (*FAMILIES, "plait"):
        raise ValueError(f"to = {args.to!r}; {suggest(args.to, [*FAMILIES, 'plait'])}")
    path = find_model(args.model)
    model = load(path)
    save(model, args.out, assets=path) if args.to == "plait" else export_model(model, args.out, args.to, assets=path)
    print(f"{args.out}: {model.num_params:,} parameters as {args.to}")


def evaluate(arguments: Sequence[str]) -> None:
    """Score models on tasks."""
    from plait.evals.suites import SUITES, LmEval, LongPpl, Subject, write_outcome

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--suite", nargs="?", default="lm-eval")
    name = first.parse_known_args(arguments)[0].suite
    if name not in SUITES:
        raise ValueError(f"suite = {name!r}; {suggest(name or '', SUITES)}")
    parser = make_parser(
        "eval",
        "A table of scores with their errors or intervals; with --out, also records and a row for every sample. The"
        " same command goes on where it was stopped. Under torchrun, processes share the samples.",
        EXAMPLES.get(name, f"plait eval runs/small --suite {name} --out scores"),
        "MODEL [MODEL ...]",
    )
    parser.add_argument("models", type=str, nargs="*", metavar="MODEL", help="a run, RUN@STEP, a model, or OWNER/NAME")
    parser.add_argument(
        "--opaque", type=several(str), default=(), help="models that transformers runs by its own code, as baselines"
    )
    parser.add_argument("--suite", type=str, default="lm-eval", help=f"{', '.join(SUITES)}; its options are below")
    add_options(parser, SUITES[name])
    parser.add_argument("--device", type=str, default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--dtype", type=str, default="auto", help="auto: bfloat16 on a GPU, else float32")
    parser.add_argument("--backend", type=str, default="torch", help="torch, fla, naive, or auto")
    parser.add_argument("--out", type=str | None, help="folder; adds to its records.jsonl and samples.jsonl")
    parser.add_argument("--json", action="store_true", help="print the records as JSON instead")
    args = parser.parse_args(arguments)
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in gather(SUITES[name], args).items()}
    suite = SUITES[name](**options)

    if not args.models and not args.opaque:
        raise ValueError("models: none given; name some, or --opaque ones")

    from plait.evals.ranks import Ranks
    from plait.evals.show import show_outcomes
    from plait.runs import find_model

    if isinstance(suite, LongPpl) and suite.reference:
        reference = find_model(suite.reference)
        if reference.parent.name == "checkpoints":  # of a run
            suite = dataclasses.replace(suite, reference=str(reference))
    ranks = Ranks.here()
    if ranks.world > 1 and isinstance(suite, LmEval):
        raise ValueError(f"suite {name}: it runs in one process, not in {ranks.world}")
    device = ranks.device(device_of(args.device))
    common: dict[str, Any] = {"device": device, "dtype": dtype_of(args.dtype, device), "backend": args.backend}
    subjects = [Subject(name=m, path=find_model(m), **common) for m in args.models]
    subjects += [Subject(name=f"{m} (opaque)", path=find_model(m), opaque=True, **common) for m in args.opaque]
    outcomes = []
    out = Path(args.out) if args.out else None
    with claim(out, "out") if out and ranks.first else contextlib.nullcontext():
        for outcome in suite.run(subjects, out):
            outcomes.append(outcome)
            if out and ranks.first:
                write_outcome(outcome, out)
    if not ranks.first:
        return
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for outcome in outcomes for row in outcome.records], indent=1))
    else:
        show_outcomes(outcomes)


EXAMPLES = {
    "lm-eval": "plait eval runs/small --suite lm-eval --tasks arc_easy --group 003/CSR-7 --out scores",
    "ppl": "plait eval runs/small --suite ppl --data books.jsonl --length 65536 --beyond true",
    "longppl": "plait eval runs/small --suite longppl --setting 003 --data reports.jsonl --reference Qwen/Qwen3-8B",
    "ruler": "plait eval runs/small --opaque OWNER/NAME --suite ruler --lengths 1024,4096 --out scores",
}


def show(arguments: Sequence[str]) -> None:
    """Print results of evaluations and compare models."""
    parser = make_parser(
        "show",
        "Tables of what plait eval --out wrote. Of several models on one suite, also the differences from the first on"
        " the samples that both have, with intervals (95%, bootstrap over samples).",
        "plait show scores/a scores/b",
        "DIRECTORY [DIRECTORY ...]",
    )
    parser.add_argument("folders", type=str, nargs="+", metavar="DIRECTORY", help="folders of results")
    parser.add_argument(
        "--chart",
        type=str | None,
        help="file of charts to write (.html, .png, .svg, .pdf): models against length, length x task, depth x length",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)

    from plait.evals.show import results_json, show_folders

    if args.chart:
        from plait.report.scores import save_charts

        save_charts(args.folders, Path(args.chart))
    if args.json:
        print(json.dumps(results_json(args.folders), indent=1))
        return
    for problem in show_folders(args.folders):
        print(problem, file=sys.stderr)


def data(arguments: Sequence[str]) -> None:
    """Turn text into token shards to train on; write samples of benchmarks."""
    if arguments and arguments[0] in ("ruler", "babilong"):
        from plait.evals.write import write_command

        write_command(arguments[0], arguments[1:], _find_model)
        return
    from plait.data.command import data_command

    data_command(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "describe": describe,
    "data": data,
    "train": train,
    "eval": evaluate,
    "show": show,
    "probe": probe,
    "generate": generate,
    "report": report,
    "bench": bench,
    "export": export,
}


def _find_model(name: str) -> Path:
    from plait.runs import find_model

    return find_model(name)


def _show_rows(title: str, rows: Sequence[Any]) -> None:
    """Records as a small table: one column an axis, one a value."""
    from rich.table import Table

    from plait.terminal import console

    table = Table(box=None, header_style="bold", pad_edge=False)
    axes = list(dict.fromkeys(axis for row in rows for axis in row.axes if axis != "task"))
    values = list(dict.fromkeys(value for row in rows for value in row.values))
    for name in ["measured", *axes, *values]:
        table.add_column(name, justify="right" if name in values else "left")
    for row in rows:
        numbers = [f"{row.values[v]:.3f}" if row.values.get(v) is not None else "" for v in values]
        table.add_row(row.name, *(str(row.axes.get(axis, "")) for axis in axes), *numbers)
    console().print(title, table, sep="\n")


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {(command.__doc__ or '').strip()}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: plait COMMAND ...",
            "",
            "Design, train and look inside hybrid-attention language models.",
            "",
            *lines,
            "",
            "plait COMMAND --help shows a command's options.",
            "example: plait describe '3*gdn nope' --d-model 1024 --num-layers 24",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0: done, 1: failed, 2: bad usage or bad input."""
    # Threads that spin while they wait make a shared machine ten times slower; a short spin costs little alone.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return OK
    if arguments[0] in ("-V", "--version"):
        from plait import __version__

        print(f"plait {__version__}")
        return OK
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"plait: unknown command {name!r}; {suggest(name, COMMANDS)}", file=sys.stderr)
        return BAD_USAGE
    try:
        COMMANDS[name](rest)
        return OK
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else OK
    except ValueError as error:
        print(f"plait {name}: {error}", file=sys.stderr)
        return BAD_USAGE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        print(f"plait {name}: stopped", file=sys.stderr)
        return FAILED
    except (OSError, RuntimeError) as error:
        print(f"plait {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED
