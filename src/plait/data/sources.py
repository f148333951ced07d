"""Documents out of what people have: text files and folders, JSONL, parquet, Hugging Face datasets. No torch.

A source is a path or `hf:NAME[:CONFIG[:SPLIT]]`. Every document comes as (text, where it stands), always in one order.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

HUB = "hf:"
JSONL = (".jsonl", ".ndjson", ".json")
PACKED = (".xz", ".gz", ".zst")
SAVED = ("dataset_info.json", "dataset_dict.json")
"""what datasets.save_to_disk leaves in a folder"""


class BadDocument(ValueError):
    """One document that cannot be used; the ones after it can."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Args:
    text_field: name of the text in JSONL, parquet and datasets
    max_document_bytes: refuse a document or file that holds more
    skip_bad: leave out what is no text instead of stopping at it
    """

    text_field: str = "text"
    max_document_bytes: int = 2**28
    skip_bad: bool = False


@dataclass
class Reader:
    """Reads sources one after the other; counts what it leaves out, and the bytes of files it is through with."""

    sources: Sequence[str]
    options: Reading
    empty: int = 0
    bad: int = 0
    done_bytes: int = 0

    def __post_init__(self):
        self._files = {source: files_of(source) for source in self.sources if not source.startswith(HUB)}
        self.total_bytes = sum(file.stat().st_size for files in self._files.values() for file in files)

    def __iter__(self) -> Iterator[str]:
        for source in self.sources:
            found = 0
            for text in self._source(source):
                found += 1
                yield text
            if not found:
                raise ValueError(f"{source}: no document with text in it")

    def _source(self, source: str) -> Iterator[str]:
        if source not in self._files:
            yield from self._usable(_dataset(source, self.options))
            return
        for file in self._files[source]:
            start = self.done_bytes
            stem = Path(file.name.removesuffix(file.suffix)) if file.suffix in PACKED else file
            if file.suffix == ".parquet":
                yield from self._usable(_parquet(file, self.options))
            elif file.is_dir():
                yield from self._usable(_dataset(f"{HUB}{file}", self.options))
            else:
                with _open(file) as (raw, lines):
                    read = _jsonl if stem.suffix in JSONL else _whole
                    for text in self._usable(read(file, lines, self.options)):
                        self.done_bytes = start + raw.tell()
                        yield text
            self.done_bytes = start + file.stat().st_size

    def _usable(self, documents: Iterator[Callable[[], str]]) -> Iterator[str]:
        """Each document is a function that gives its text or raises BadDocument."""
        limit = self.options.max_document_bytes
        for document in documents:
            try:
                text = document()
                if len(text) > limit or (len(text) * 4 > limit and len(text.encode()) > limit):
                    raise ValueError(too_large(f"a document of {len(text):,} characters", limit))
            except BadDocument as error:
                if not self.options.skip_bad:
                    raise ValueError(f"{error}; --skip-bad true leaves such documents out") from None
                self.bad += 1
                continue
            if text:
                yield text
            else:
                self.empty += 1


def files_of(source: str) -> list[Path]:
    """A file; or those below a folder in order of their names, without hidden ones; or a saved dataset's folder."""
    path = Path(source)
    if path.is_file() or any((path / name).exists() for name in SAVED):
        return [path]
    if not path.is_dir():
        raise ValueError(f"source {source}: no such file or folder; a dataset of the hub is {HUB}NAME")
    inside = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
    files = [path / file for file in inside if not any(part.startswith(".") for part in file.parts)]
    if not files:
        raise ValueError(f"source {source}: no files in it")
    return files


def too_large(what: str, limit: int) -> str:
    return f"{what}: more than max_document_bytes = {limit:,}; cut it into smaller ones, or allow more"


def checked(text: Any, where: str) -> str:
    """A str that is text: no other type, no NUL (which ends documents as bytes), nothing that UTF-8 cannot hold."""
    if not isinstance(text, str):
        raise BadDocument(f"{where}: the text is {type(text).__name__}, not a string")
    if "\0" in text:
        raise BadDocument(f"{where}: a NUL character; this is no text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadDocument(f"{where}: half of a surrogate pair; this is no text") from None
    return text


class _open:
    """(file as it lies on disk, what it holds); errors of compression are one line."""

    def __init__(self, file: Path):
        self.file = file

    def __enter__(self) -> tuple[BinaryIO, Any]:
        self.raw = self.file.open("rb")
        if self.file.suffix == ".xz":
            return self.raw, lzma.open(self.raw)
        if self.file.suffix == ".gz":
            return self.raw, gzip.open(self.raw)
        if self.file.suffix == ".zst":
            return self.raw, io.BufferedReader(_Zstd(self.raw, needed("zstandard", self.file)))
        return self.raw, self.raw

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.raw.close()
        broken = isinstance(error, EOFError | lzma.LZMAError | gzip.BadGzipFile | zlib.error)
        if broken or (kind is not None and kind.__name__ == "ZstdError"):
            raise ValueError(f"{self.file}: damaged or cut off ({error})") from None


class _Zstd(io.RawIOBase):
    """What frames of zstd hold, one after the other. (The package's own reader takes one cut off as whole.)"""

    def __init__(self, raw: BinaryIO, zstandard: Any):
        self.raw, self.zstandard = raw, zstandard
        self.frame: Any = None
        self.out = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.out:
            data = (self.frame.unused_data if self.frame and self.frame.eof else b"") or self.raw.read(2**14)
            if not data:
                if self.frame and not self.frame.eof:
                    raise EOFError("it ends within a frame")
                return 0
            if self.frame is None or self.frame.eof:
                self.frame = self.zstandard.ZstdDecompressor().decompressobj()
            self.out = memoryview(self.frame.decompress(data))
        count = min(len(buffer), len(self.out))
        buffer[:count], self.out = self.out[:count], self.out[count:]
        return count


def needed(module: str, what: Any) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(f"{what}: reading it needs {module}; pip install 'plait[data]'") from None


def _whole(file: Path, stream: BinaryIO, options: Reading) -> Iterator[Callable[[], str]]:
    """One document."""
    data = stream.read(options.max_document_bytes + 1)
    if len(data) > options.max_document_bytes:
        raise ValueError(too_large(str(file), options.max_document_bytes))

    def text() -> str:
        try:
            return checked(data.decode(), str(file))
        except UnicodeDecodeError as error:
            raise BadDocument(f"{file}: not UTF-8 text (byte {error.start})") from None

    yield text


def _jsonl(file: Path, stream: BinaryIO, options: Reading) -> Iterator[Callable[[], str]]:
    number = 0
    while line := stream.readline(options.max_document_bytes + 1):
        number += 1
        where = f"{file}:{number}"
        if len(line) > options.max_document_bytes:
            raise ValueError(too_large(where, options.max_document_bytes))
        if not line.isspace():
            yield lambda line=line, where=where: _field_of_line(line, where, options.text_field)


def _field_of_line(line: bytes, where: str, field: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadDocument(f"{where}: not a line of JSON ({error})") from None
    if not isinstance(row, dict):
        raise BadDocument(f"{where}: not a JSON object")
    if field not in row:
        raise ValueError(no_field(where, field, list(row)))
    return checked(row[field], where)


def no_field(where: str, field: str, fields: Sequence[str]) -> str:
    return f"{where}: no field text_field = {field!r}; it has {', '.join(map(repr, fields[:12])) or 'none'}"


def _parquet(file: Path, options: Reading) -> Iterator[Callable[[], str]]:
    needed("pyarrow", file)
    import pyarrow  # pyright: ignore[reportMissingImports]
    import pyarrow.parquet  # pyright: ignore[reportMissingImports]

    try:
        table = pyarrow.parquet.ParquetFile(file)
        if options.text_field not in table.schema_arrow.names:
            raise ValueError(no_field(str(file), options.text_field, table.schema_arrow.names))
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=[options.text_field]):
            for value in batch.column(0):
                number += 1
                yield lambda value=value, number=number: checked(value.as_py(), f"{file}, row {number}")
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file}: not a readable parquet file ({str(error).splitlines()[0]})") from None


def _dataset(source: str, options: Reading) -> Iterator[Callable[[], str]]:
    """hf:NAME[:CONFIG[:SPLIT]], streamed; or hf:FOLDER[::SPLIT] that datasets has saved."""
    datasets = needed("datasets", source)
    name, config, split = (*source.removeprefix(HUB).split(":"), "", "")[:3]
    split = split or "train"
    try:
        if any((Path(name) / file).exists() for file in SAVED):
            data = datasets.load_from_disk(name)
            data = data[split] if isinstance(data, dict) else data
        else:
            data = datasets.load_dataset(name, config or None, split=split, streaming=True)
    except Exception as error:  # of many kinds
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{source}: cannot be opened ({first})") from None
    rows, number = iter(data), -1
    while (row := _next_row(rows, source)) is not None:
        number += 1
        where = f"{source}, row {number}"
        if options.text_field not in row:
            raise ValueError(no_field(where, options.text_field, list(row)))
        yield lambda row=row, where=where: checked(row[options.text_field], where)


def _next_row(rows: Iterator[dict[str, Any]], source: str) -> dict[str, Any] | None:
    try:
        return next(rows, None)
    except Exception as error:  # of many kinds: files, formats, the network
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{source}: cannot be read further ({first})") from None
