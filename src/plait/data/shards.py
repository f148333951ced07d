"""Token shards on disk: documents end to end in memory-mapped files. No torch.

DIR/data.json, written last, says what is there; DIR/{train,valid}-00000.bin holds tokens, .idx the end of every
document as uint64, DIR/tokenizer/ the tokenizer if it is not bytes. Tokens are stored without EOS between documents:
packing puts it there.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from plait.files import read_json

VERSION = 1
INDEX = "data.json"
SPLITS: tuple[str, ...] = ("train", "valid")
BYTES = "bytes"
ENDS_BYTES = 8
CHECKED = 2**30
"""bytes of tokens up to which shards are compared with their sha256 whenever they are opened, in a second or two"""


@dataclass(frozen=True, kw_only=True)
class Shard:
    file: str
    """name without .bin and .idx"""
    tokens: int
    documents: int
    sha256: str
    """of the tokens, then the ends"""


@dataclass(frozen=True, kw_only=True)
class Index:
    """What data.json says."""

    tokenizer: str
    """"bytes", or the sha256 of the files in DIR/tokenizer"""
    vocab_size: int
    eos: int
    dtype: str
    splits: dict[str, tuple[Shard, ...]]
    settings: dict[str, Any]
    left_out: dict[str, int]
    """documents that were empty, bad, short (below min_tokens)"""

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self)}

    @staticmethod
    def load(path: Path) -> Index:
        file = path / INDEX
        if not file.exists():
            begun = (
                " (a build that is not finished: run its command again)" if (path / "manifest.jsonl").exists() else ""
            )
            raise ValueError(f"data {path}: no {INDEX} in it{begun}; plait data build makes such a directory")
        data = read_json(file)
        try:
            if data.pop("version") != VERSION:
                raise ValueError(f"{file}: its version is not {VERSION}, the one that this plait reads")
            splits = {name: tuple(Shard(**shard) for shard in data["splits"][name]) for name in SPLITS}
            return Index(**data | {"splits": splits})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: not an index of token shards ({error})") from None


def dtype_of(vocab_size: int) -> str:
    return "uint8" if vocab_size <= 2**8 else "uint16" if vocab_size <= 2**16 else "uint32"


@dataclass(frozen=True, kw_only=True)
class TokenShards:
    """The documents of one split, by number; opened with `open`, which checks sizes, and every byte of up to CHECKED;
    with verify of all, and of the tokenizer."""

    path: Path
    split: str
    index: Index

    @staticmethod
    def open(path: Path | str, split: str = "train", *, verify: bool | None = None) -> TokenShards:
        path = Path(path)
        index = Index.load(path)
        if split not in index.splits:
            raise ValueError(f"split = {split!r}; it must be one of {', '.join(SPLITS)}")
        shards = TokenShards(path=path, split=split, index=index)
        size = np.dtype(index.dtype).itemsize
        few = verify is None and shards.tokens * size <= CHECKED
        for shard in shards.files:
            for end, expected in ((".bin", shard.tokens * size), (".idx", shard.documents * ENDS_BYTES)):
                file = path / f"{shard.file}{end}"
                found = file.stat().st_size if file.exists() else None
                if found != expected:
                    have = "it is missing" if found is None else f"it has {found:,} bytes"
                    raise ValueError(f"{file}: {have}; {INDEX} says {expected:,} bytes: altered, or copied in part")
            if (verify or few) and digest(path, shard.file) != shard.sha256:
                raise ValueError(f"{path / shard.file}: altered since it was built (its sha256 is another)")
        if verify and index.tokenizer != BYTES and tokenizer_digest(path / "tokenizer") != index.tokenizer:
            raise ValueError(f"{path / 'tokenizer'}: altered since the shards were built (its sha256 is another)")
        return shards

    @property
    def files(self) -> tuple[Shard, ...]:
        return self.index.splits[self.split]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.files)

    def __len__(self) -> int:
        return sum(shard.documents for shard in self.files)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every document, int64: 8 bytes a document of memory."""
        parts = [np.fromfile(self.path / f"{shard.file}.idx", dtype="<u8") for shard in self.files]
        for shard, ends in zip(self.files, parts, strict=True):
            rising = len(ends) == 0 or (ends[0] > 0 and (ends[1:] > ends[:-1]).all() and ends[-1] == shard.tokens)
            if not rising:
                raise ValueError(
                    f"{self.path / shard.file}.idx: altered; the ends of documents do not rise to {shard.tokens}"
                )
        return np.concatenate([np.diff(ends.astype(np.int64), prepend=0) for ends in parts] or [np.zeros(0, np.int64)])

    @cached_property
    def _starts(self) -> np.ndarray:
        """Of every document in the split's tokens."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def _first(self) -> tuple[np.ndarray, np.ndarray]:
        """First document and first token of every shard."""
        documents = np.array([0, *(shard.documents for shard in self.files)])
        tokens = np.array([0, *(shard.tokens for shard in self.files)])
        return np.cumsum(documents), np.cumsum(tokens)

    @cached_property
    def _maps(self) -> dict[int, np.ndarray]:
        return {}

    def read(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens start to stop of a document, as they lie on disk (a view of the map)."""
        length = int(self.lengths[document])
        stop = length if stop is None else min(stop, length)
        documents, tokens = self._first
        i = int(np.searchsorted(documents, document, side="right")) - 1
        if i not in self._maps:
            self._maps[i] = np.memmap(self.path / f"{self.files[i].file}.bin", dtype=self.index.dtype, mode="r")
        at = int(self._starts[document] - tokens[i])
        return self._maps[i][at + start : at + stop]

    def __getitem__(self, document: int) -> np.ndarray:
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        return self.read(document)


def digest(path: Path, name: str) -> str:
    sha = hashlib.sha256()
    for end in (".bin", ".idx"):
        with (path / f"{name}{end}").open("rb") as file:
            while piece := file.read(2**20):
                sha.update(piece)
    return sha.hexdigest()


def tokenizer_digest(path: Path) -> str:
    """Of the names and bytes of a directory's files."""
    sha = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            sha.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode())
            sha.update(file.read_bytes())
    return sha.hexdigest()
