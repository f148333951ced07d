"""`plait data`: build, train-tokenizer, show. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plait.config import suggest
from plait.data.build import BuildOptions, build
from plait.data.shards import BYTES, SPLITS, Index, TokenShards
from plait.data.sources import Reader, Reading
from plait.data.vocabulary import train_tokenizer
from plait.flags import Parser, add_options, gather, make_parser
from plait.terminal import console, progress_bar

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
SOURCES = "text file or folder, .jsonl, .parquet (.xz, .gz, .zst too, but of parquet), or hf:NAME[:CONFIG[:SPLIT]]"


def data_command(arguments: Sequence[str]) -> None:
    first, *rest = arguments or [""]
    if first in ACTIONS:
        ACTIONS[first](rest)
        return
    parser = make_parser(
        "data",
        "Token shards: memory-mapped files of tokens that training reads. build: make them. train-tokenizer: a"
        " byte-level BPE first. show: what is in them. ruler, babilong: write samples of these benchmarks. Their"
        " options: plait data build --help.",
        "plait data build books/ --out shards/books --tokenizer bytes",
        "build|train-tokenizer|show|ruler|babilong",
    )
    parser.add_argument("what", type=str, help=", ".join(ALL))
    args = parser.parse_args(arguments)
    parser.error(f"unknown action {args.what!r}; {suggest(args.what, ALL)}")


def _build(arguments: Sequence[str]) -> None:
    parser = _parser(
        "build",
        "Tokenize documents into a directory of shards. The same command goes on where an interrupted build stopped;"
        " the number of processes changes nothing in the result.",
        "plait data build books.jsonl.xz notes/ --out shards/books --tokenizer tokenizers/books-8k --processes 8",
        "SOURCE [SOURCE ...] --out DIR",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    add_options(parser, BuildOptions)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--processes", type=int, default=cores, help="processes that tokenize and write")
    parser.add_argument("--json", action="store_true", help="print what is in it as JSON")
    args = parser.parse_args(arguments)
    build(args.sources, args.out, BuildOptions(**gather(BuildOptions, args)), processes=args.processes)
    _print(args.out, verify=False, as_json=args.json)


def _train_tokenizer(arguments: Sequence[str]) -> None:
    parser = _parser(
        "train-tokenizer",
        "A byte-level BPE tokenizer with an EOS token, as a directory that transformers' AutoTokenizer loads.",
        "plait data train-tokenizer books.jsonl.xz --out tokenizers/books-8k --vocab-size 8192",
        "SOURCE [SOURCE ...] --out DIR --vocab-size N",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--vocab-size", type=int, required=True, help="tokens, 256 bytes and EOS among them")
    parser.add_argument("--max-bytes", type=int, default=2**30, help="learn from the first so many bytes of text")
    add_options(parser, Reading)
    args = parser.parse_args(arguments)
    reader = Reader(args.sources, Reading(**gather(Reading, args)))
    with progress_bar(reader.total_bytes // 2**10, label="KiB read") as show:
        size = train_tokenizer(_first(reader, args.max_bytes, show), args.out, vocab_size=args.vocab_size)
    print(f"{args.out}: {size:,} tokens")


def _first(reader: Reader, max_bytes: int, show: Any) -> Iterator[str]:
    """Documents until they hold max_bytes."""
    size = 0
    for text in reader:
        yield text
        size += len(text.encode())
        show(reader.done_bytes // 2**10)
        if size >= max_bytes:
            return


def _show(arguments: Sequence[str]) -> None:
    parser = make_parser(
        "data show",
        "Documents, tokens and lengths of a directory of shards.",
        "plait data show shards/books --verify",
        "DIR",
    )
    parser.add_argument("path", type=Path, metavar="DIR", help="what plait data build made")
    parser.add_argument("--verify", action="store_true", help="compare every file with its sha256")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    _print(args.path, verify=args.verify, as_json=args.json)


ACTIONS = {"build": _build, "train-tokenizer": _train_tokenizer, "show": _show}
ALL = (*ACTIONS, "ruler", "babilong")
"""those of evals too, which plait.cli dispatches"""


def _parser(action: str, about: str, example: str, usage: str) -> Parser:
    parser = make_parser(f"data {action}", about, example, usage)
    parser.add_argument("sources", type=str, nargs="+", metavar="SOURCE", help=SOURCES)
    return parser


def _print(path: Path, *, verify: bool, as_json: bool) -> None:
    summary = summarize(path, verify=verify)
    if as_json:
        print(json.dumps(summary, indent=1))
        return
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    names = [f"{q:.0%}" for q in QUANTILES]
    for name in ("split", "shards", "documents", "tokens", *names):
        table.add_column(name, justify="left" if name == "split" else "right")
    for split, values in summary["splits"].items():
        numbers = [values["shards"], values["documents"], values["tokens"], *(values["lengths"] or [])]
        table.add_row(split, *(f"{number:,}" for number in numbers))
    left_out = ", ".join(f"{count:,} {why}" for why, count in summary["left_out"].items() if count)
    words = BYTES if summary["tokenizer"] == BYTES else f"tokenizer of {summary['vocab_size']:,} tokens"
    title = f"{path}: {words}, {summary['dtype']}" + (f"; left out: {left_out}" if left_out else "")
    console().print(title + ("; every file as it was built" if verify else ""), table, sep="\n")
    console().print("Percent: tokens of a document at that quantile.")
    if not summary["splits"]["valid"]["documents"]:
        console().print("No document is held out, as training needs for its measurements: build with a larger --valid.")


def summarize(path: Path, *, verify: bool = False) -> dict[str, Any]:
    """What `show` shows; lengths are the QUANTILES of documents' tokens."""
    index = Index.load(path)
    splits = {}
    for split in SPLITS:
        shards = TokenShards.open(path, split, verify=verify)
        quantiles = np.quantile(shards.lengths, QUANTILES, method="nearest") if len(shards) else None
        splits[split] = {
            "shards": len(shards.files),
            "documents": len(shards),
            "tokens": shards.tokens,
            "lengths": quantiles if quantiles is None else [int(q) for q in quantiles],
        }
    about = {name: getattr(index, name) for name in ("tokenizer", "vocab_size", "eos", "dtype", "left_out")}
    return {**about, "splits": splits}
