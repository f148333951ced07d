"""Sources to token shards (shards.py), by several processes, in one way only: what is written depends on the sources
and settings, not on the number of processes or on where an earlier build was interrupted. No torch.

One process reads documents, in order, decides by a hash of its text whether a document is held out, and cuts each
split into shards at shard_bytes of text. The cut needs no tokens, so a shard is one job: any process tokenizes it and
writes it under another name, then renames it. manifest.jsonl takes a line for each finished shard, with a hash of its
text; the same command again reads the sources, compares these hashes and goes on. data.json comes last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from plait.data import vocabulary as vocabularies
from plait.data.pool import Pool, in_memory
from plait.data.shards import BYTES, INDEX, SPLITS, Index, Shard, digest, dtype_of
from plait.data.sources import HUB, Reader, Reading
from plait.data.vocabulary import Vocabulary
from plait.files import claim, read_json, write_json
from plait.terminal import progress_bar

MANIFEST = "manifest.jsonl"
LOCK = ".lock"
PARTIAL = ".partial"
KIB = 2**10


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """What decides the shards, beside the sources.

    Args:
        tokenizer: bytes, the path of a tokenizer (directory or tokenizer.json), or OWNER/NAME on the hub
        eos: token that ends a document (default: the tokenizer's own)
        text_field: name of the text in JSONL, parquet and datasets
        valid: share of the documents that is held out
        seed: of the choice of held-out documents
        shard_bytes: bytes of text in a shard, about
        min_tokens: leave out documents with fewer tokens
        max_document_bytes: refuse a document with more
        skip_bad: leave out documents that are no text instead of stopping at the first
    """

    tokenizer: str = BYTES
    eos: str | None = None
    text_field: str = "text"
    valid: float = 0.01
    seed: int = 0
    shard_bytes: int = 2**25
    min_tokens: int = 1
    max_document_bytes: int = 2**28
    skip_bad: bool = False

    def __post_init__(self):
        if not 0 <= self.valid < 1:
            raise ValueError(f"valid = {self.valid}; it must be at least 0 and below 1")
        if self.seed < 0:
            raise ValueError(f"seed = {self.seed}; it must be at least 0")
        for name in ("shard_bytes", "min_tokens", "max_document_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}; it must be at least 1")

    @property
    def reading(self) -> Reading:
        return Reading(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Reading)})


@dataclass(frozen=True, kw_only=True)
class Job:
    """A shard to be: documents of one split."""

    name: str
    texts: list[str]
    done_bytes: int
    """of the sources' files, read when its last document was"""

    @property
    def fingerprint(self) -> str:
        hash = hashlib.blake2b(digest_size=16)
        for text in self.texts:
            data = text.encode()
            hash.update(len(data).to_bytes(8, "little"))
            hash.update(data)
        return hash.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A line of the manifest."""

    fingerprint: str
    shard: Shard
    short: int
    """documents below min_tokens"""


@dataclass
class Writer:
    """Tokenizes jobs and writes their shards; each process has its own."""

    out: Path
    vocabulary: Vocabulary
    min_tokens: int
    _encode: Callable[[str], np.ndarray] | None = field(default=None, repr=False)

    def __call__(self, job: Job, fingerprint: str) -> Finished:
        if self._encode is None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
            folder = None if self.vocabulary.tokenizer == BYTES else self.out / "tokenizer"
            self._encode = vocabularies.encoder(folder, self.vocabulary)
        dtype = dtype_of(self.vocabulary.vocab_size)
        lengths = []
        partial = {end: self.out / f".{job.name}{end}.{os.getpid()}{PARTIAL}" for end in (".bin", ".idx")}
        sha = hashlib.sha256()
        with partial[".bin"].open("wb") as file:
            for text in job.texts:
                tokens = self._encode(text)
                if len(tokens) >= self.min_tokens:
                    data = tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
                    sha.update(data)
                    file.write(data)
                    lengths.append(len(tokens))
            _settle(file)
        ends = np.cumsum(np.array(lengths, dtype=np.uint64)).astype("<u8")
        sha.update(ends.tobytes())
        with partial[".idx"].open("wb") as file:
            file.write(ends.tobytes())
            _settle(file)
        for end, path in partial.items():
            path.replace(self.out / f"{job.name}{end}")
        shard = Shard(file=job.name, tokens=sum(lengths), documents=len(lengths), sha256=sha.hexdigest())
        return Finished(fingerprint=fingerprint, shard=shard, short=len(job.texts) - len(lengths))


def build(
    sources: Sequence[str], out: Path, options: BuildOptions, *, processes: int = 1, progress: bool = True
) -> Index:
    """Build DIR, or go on with it; ValueError in one line where the input or what is there does not allow it. A build
    that is finished is taken as it is: only its settings are compared, not the sources read again."""
    if processes < 1:
        raise ValueError(f"processes = {processes}; it must be at least 1")
    if not sources:
        raise ValueError("sources: none; give text files or folders, JSONL, parquet, or hf:NAME")
    _check_place(sources, out)
    reader = Reader(sources, options.reading)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(vocabularies.scratch()))
        vocabulary = vocabularies.prepare(options.tokenizer, options.eos, folder)
        settings = {"sources": list(sources), **dataclasses.asdict(options), "tokenizer_sha256": vocabulary.tokenizer}
        stack.enter_context(claim(out, "out", "building"))
        if (out / INDEX).exists():
            _check_settings(out, read_json(out / INDEX).get("settings", {}), settings)
            (out / MANIFEST).unlink(missing_ok=True)
            return Index.load(out)
        finished = _begin(out, settings)
        if vocabulary.tokenizer != BYTES:
            vocabularies.place(folder, out / "tokenizer")
        writer = Writer(out, vocabulary, options.min_tokens)
        shards, short = in_memory(_write, reader, options, writer, finished, processes, progress)
        index = Index(
            tokenizer=vocabulary.tokenizer,
            vocab_size=vocabulary.vocab_size,
            eos=vocabulary.eos,
            dtype=dtype_of(vocabulary.vocab_size),
            splits={split: tuple(s for s in shards if s.file.startswith(split)) for split in SPLITS},
            settings=settings,
            left_out={"empty": reader.empty, "bad": reader.bad, "short": short},
        )
        if not sum(shard.documents for shard in index.splits["train"]):
            raise ValueError(f"no document is left for training: {_left_out(index)}, valid = {options.valid}")
        write_json(out / INDEX, index.to_json())
        (out / MANIFEST).unlink()
        return index


def _write(
    reader: Reader, options: BuildOptions, writer: Writer, finished: dict[str, Finished], processes: int, progress: bool
) -> tuple[list[Shard], int]:
    """The shards, and how many documents were short."""
    shards: list[Shard] = []
    short = tokens = 0
    left = set(finished)
    with (
        progress_bar(reader.total_bytes // KIB, show=progress, label="KiB read") as show,
        (writer.out / MANIFEST).open("a", encoding="utf-8") as manifest,
        Pool(writer, processes) as pool,
    ):

        def take(job_name: str, done_bytes: int, result: Finished) -> None:
            nonlocal short, tokens
            if job_name not in finished:
                manifest.write(json.dumps(dataclasses.asdict(result)) + "\n")
                _settle(manifest)
            shards.append(result.shard)
            short, tokens = short + result.short, tokens + result.shard.tokens
            show(done_bytes // KIB, f"{tokens:,} tokens")

        for job in jobs(reader, options):
            fingerprint = job.fingerprint
            old = finished.get(job.name)
            left.discard(job.name)
            if old and old.fingerprint != fingerprint:
                raise ValueError(_changed(writer.out))
            if old and not _whole(writer.out, old.shard):
                finished.pop(job.name)
                old = None
            for done, result in pool.put((job.name, job.done_bytes), old, (job, fingerprint)):
                take(*done, result)
        for done, result in pool.rest():
            take(*done, result)
    if left:
        raise ValueError(_changed(writer.out))
    return shards, short


def jobs(reader: Reader, options: BuildOptions) -> Iterator[Job]:
    """The documents of every split, cut into shards."""
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    numbers = dict.fromkeys(SPLITS, 0)

    def close(split: str) -> Job:
        job = Job(name=f"{split}-{numbers[split]:05d}", texts=texts[split], done_bytes=reader.done_bytes)
        numbers[split] += 1
        texts[split], sizes[split] = [], 0
        return job

    for text in reader:
        data = text.encode()
        split = split_of(data, options.seed, options.valid)
        if sizes[split] and sizes[split] + len(data) > options.shard_bytes:
            yield close(split)
        texts[split].append(text)
        sizes[split] += len(data)
    for split in SPLITS:
        if texts[split]:
            yield close(split)


def split_of(data: bytes, seed: int, valid: float) -> str:
    """By the document's text alone: the same text twice is on one side, wherever it stands."""
    hash = hashlib.blake2b(data, digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return "valid" if int.from_bytes(hash, "little") < valid * 2**64 else "train"


def _check_place(sources: Sequence[str], out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file")
    known = any((out / name).exists() for name in (INDEX, MANIFEST))
    if out.exists() and not known and any(path.name != LOCK for path in out.iterdir()):
        raise ValueError(f"out: {out} has other files in it; give a new directory")
    for source in sources:
        if not source.startswith(HUB) and Path(source).resolve() in (out.resolve(), *out.resolve().parents):
            raise ValueError(f"out: {out} is inside the source {source}; give a directory outside it")


def _begin(out: Path, settings: dict[str, Any]) -> dict[str, Finished]:
    """Make or check the manifest, and remove what is not in it; the shards it has, by name."""
    path = out / MANIFEST
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found: dict[str, Finished] = {}
    if len(lines) < 3:  # no shard is finished: nothing to go on with
        path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
    else:
        _check_settings(out, json.loads(lines[0])["settings"], settings)
        if lines[-1]:  # killed while a line was written
            os.truncate(path, path.stat().st_size - len(lines[-1]))
        for line in lines[1:-1]:
            data = json.loads(line)
            done = Finished(**data | {"shard": Shard(**data["shard"])})
            found[done.shard.file] = done
    for file in out.iterdir():
        shard = file.suffix in (".bin", ".idx") and file.stem.startswith(SPLITS) and file.stem not in found
        if shard or file.name.endswith(PARTIAL):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    return found


def _check_settings(out: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    differing = [key for key in new if old.get(key) != new[key]]
    if differing:
        shown = "; ".join(f"{key}: {old.get(key)!r} there, {new[key]!r} now" for key in differing)
        raise ValueError(
            f"out {out}: it was built with other settings ({shown}); use them again, or give another"
            " directory, or remove it"
        )


def _whole(out: Path, shard: Shard) -> bool:
    try:
        return digest(out, shard.file) == shard.sha256
    except FileNotFoundError:
        return False


def _changed(out: Path) -> str:
    return f"out {out}: the sources have changed since this build began; give another directory, or remove it"


def _left_out(index: Index) -> str:
    return "left out " + ", ".join(f"{count} {why}" for why, count in index.left_out.items())


def _settle(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
