"""Byte-level text from a file or a folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from plait.data import Group

SEPARATOR = 0
"""byte between the files of a folder"""


@dataclass(frozen=True, kw_only=True)
class ByteText:
    """Windows of `length` bytes at random places; the last `held_out_share` of the text is kept for evaluation."""

    path: Path
    length: int = 256
    batch_size: int = 16
    seed: int = 0
    held_out_share: float = 0.05
    held_out_rows: int = 1000
    """held-out windows, at most; in random order, so that the first few are a sample"""

    vocab_size = 256

    def __post_init__(self):
        if self.length < 1 or self.batch_size < 1:
            raise ValueError(f"length = {self.length}, batch_size = {self.batch_size}; both must be at least 1")
        needed = self.length + 1
        if min(len(part) for part in self._split) < needed:
            raise ValueError(
                f"data {self.path}: {len(self._bytes)} bytes; length = {self.length} needs at least"
                f" {int(np.ceil(needed / self.held_out_share))} (the last {self.held_out_share:.0%} is held out)"
            )

    @cached_property
    def _bytes(self) -> np.ndarray:
        return read_bytes(self.path)

    @cached_property
    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        cut = int(len(self._bytes) * (1 - self.held_out_share))
        return self._bytes[:cut], self._bytes[cut:]

    def batch(self, step: int) -> list[Group]:
        text = self._split[0]
        rng = np.random.default_rng([self.seed, 1, step])
        return [self._group(text, rng.integers(0, len(text) - self.length, self.batch_size))]

    def held_out(self) -> list[Group]:
        text = self._split[1]
        starts = np.arange(0, len(text) - self.length, self.length)
        starts = np.random.default_rng([self.seed, 2]).permutation(starts)[: self.held_out_rows]
        return [self._group(text, starts)]

    def _group(self, text: np.ndarray, starts: np.ndarray) -> Group:
        windows = torch.from_numpy(text[starts[:, None] + np.arange(self.length + 1)].astype(np.int64))
        return Group(windows[:, :-1], windows[:, 1:])


def read_bytes(path: Path) -> np.ndarray:
    """A file's bytes, or those of all files below a folder in order of their names; hidden files are left out."""
    if path.is_file():
        files = [path]
    elif path.is_dir():
        inside = (p.relative_to(path) for p in path.rglob("*") if p.is_file())
        files = [path / p for p in sorted(inside) if not any(part.startswith(".") for part in p.parts)]
    else:
        raise ValueError(f"data {path}: no such file or folder")
    texts = [data for data in map(Path.read_bytes, files) if data]
    if not texts:
        raise ValueError(f"data {path}: no text in it ({len(files)} files, all empty); give a file or folder of text")
    return np.frombuffer(bytes([SEPARATOR]).join(texts), dtype=np.uint8)
