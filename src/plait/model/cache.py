"""The cache: what every layer keeps of every sequence, and how long each sequence is.

Lengths live here once, not per layer, so the order of the layers cannot matter. Caches are for inference: gradients
do not flow through them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.mixers.base import State
from plait.mixers.seq import Seq


class Cache:
    """States of S sequences of up to max_length tokens. Made by LM.new_cache, mutated by LM.forward."""

    def __init__(self, states: list[State], batch: int, max_length: int, device: torch.device, owner: str):
        self.states = states
        self.max_length = max_length
        self.owner = owner
        """hash of the Spec it was made for"""
        self.lengths_S = torch.zeros(batch, dtype=torch.long, device=device)
        self.lengths: tuple[int, ...] = (0,) * batch
        """the same numbers where the host can read them without waiting for the device"""
        self.peaks: tuple[int, ...] = self.lengths
        """the most tokens every sequence has had; crop lowers its length, but a ring has overwritten what it has"""

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers of all layers."""
        return sum(buffer.nbytes for state in self.states for _, buffer in state.tensors())

    def check_room(self, new: tuple[int, ...]) -> None:
        if len(new) != self.batch:
            raise ValueError(f"cache: it holds {self.batch} sequences; the tokens are of {len(new)}")
        longest = max(a + b for a, b in zip(self.lengths, new, strict=True))
        if longest > self.max_length:
            raise ValueError(f"cache: a sequence would be {longest} tokens long; max_length = {self.max_length}")

    def advance(self, seq: Seq) -> None:
        """Count the tokens of a forward pass."""
        self.lengths_S += seq.lengths[0] if seq.dense else seq.lengths_S
        self.count(seq.lengths)

    def count(self, new: tuple[int, ...]) -> None:
        """Count tokens on the host, where the device has counted them itself."""
        self.lengths = tuple(a + b for a, b in zip(self.lengths, new, strict=True))
        self.peaks = tuple(map(max, self.peaks, self.lengths))

    def clone(self) -> Cache:
        new = self._with([state.map(torch.Tensor.clone) for state in self.states])
        new.lengths_S = self.lengths_S.clone()
        return new

    def to(self, device: torch.device | str) -> Cache:
        """A copy of this cache on another device; as torch's `to`, itself when it is there already."""
        lengths_S = self.lengths_S.to(device)
        if lengths_S is self.lengths_S:
            return self
        new = self._with([state.map(lambda buffer: buffer.to(device)) for state in self.states])
        new.lengths_S = lengths_S
        return new

    def resized(self, max_length: int) -> Cache:
        """A copy with room for max_length tokens a row, which may not be less than there are."""
        if max_length < max(1, *self.lengths):
            raise ValueError(f"cache: max_length = {max_length}; a sequence has {max(self.lengths)} tokens")
        new = self._with([state.resized(max_length) for state in self.states])
        new.max_length = max_length
        new.lengths_S = self.lengths_S.clone()
        return new

    def select(self, index: Tensor) -> Cache:
        """A cache of these rows, in this order, each as often as it is named; index: [rows]."""
        rows = self._rows(index)
        index = index.to(self.lengths_S.device)
        new = self._with([state.map(lambda buffer: buffer[index]) for state in self.states])
        new.lengths_S = self.lengths_S[index]
        new.lengths, new.peaks = (tuple(numbers[row] for row in rows) for numbers in (self.lengths, self.peaks))
        return new

    def reorder(self, index: Tensor) -> None:
        """Row s becomes what row index[s] was (beam search); index: [S]."""
        if tuple(index.shape) != (self.batch,):
            raise ValueError(f"cache: index has shape {tuple(index.shape)}; it must be {(self.batch,)}")
        rows = self._rows(index)
        index = index.to(self.lengths_S.device)
        for state in self.states:
            for _, buffer in state.tensors():
                buffer.copy_(buffer[index])
        self.lengths_S.copy_(self.lengths_S[index])
        self.lengths = tuple(self.lengths[row] for row in rows)
        self.peaks = tuple(self.peaks[row] for row in rows)

    def _rows(self, index: Tensor) -> list[int]:
        if index.ndim != 1 or len(index) == 0 or index.dtype not in (torch.long, torch.int):
            raise ValueError(f"cache: index has shape {tuple(index.shape)}, {index.dtype}; it must be a list of rows")
        rows = index.tolist()
        if not all(0 <= row < self.batch for row in rows):
            raise ValueError(f"cache: index {rows} names a row outside 0..{self.batch - 1}")
        return rows

    def crop(self, length: int | Sequence[int]) -> None:
        """Forget what came after the first `length` tokens of every row, one number for all or each its own; refused
        where a layer cannot go back."""
        lengths = (length,) * self.batch if isinstance(length, int) else tuple(length)
        if min(lengths) < 0:
            raise ValueError(f"cache: length = {min(lengths)}; it must be 0 or above")
        kept = tuple(min(now, n) for now, n in zip(self.lengths, lengths, strict=True))
        for now, n, peak in zip(self.lengths, kept, self.peaks, strict=True):
            for i, state in enumerate(self.states if n < now else ()):
                why = state.why_not_crop(n, peak)
                if why is not None:
                    raise ValueError(f"cache: cannot crop {now} tokens to {n}: layers.{i}: {why}")
        self.lengths_S.copy_(torch.tensor(kept))
        self.lengths = kept

    def reset(self) -> None:
        """Empty every row, keeping the buffers."""
        for state in self.states:
            state.reset()
        self.lengths_S.zero_()
        self.lengths = self.peaks = (0,) * self.batch

    def _with(self, states: list[State]) -> Cache:
        new = copy.copy(self)
        new.states = states
        return new
