"""The cache: what every layer keeps of every sequence, and how long each sequence is.

Lengths live here once, not per layer, so the order of the layers cannot matter. Caches are for inference: gradients
do not flow through them.
"""

from __future__ import annotations

import copy

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
        self.lengths = tuple(a + b for a, b in zip(self.lengths, seq.lengths, strict=True))
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

    def reorder(self, index: Tensor) -> None:
        """Row s becomes what row index[s] was (beam search); index: [S]."""
        if tuple(index.shape) != (self.batch,):
            raise ValueError(f"cache: index has shape {tuple(index.shape)}; it must be {(self.batch,)}")
        rows = index.tolist()
        if not all(0 <= row < self.batch for row in rows):
            raise ValueError(f"cache: index {rows} names a row outside 0..{self.batch - 1}")
        index = index.to(self.lengths_S.device)
        for state in self.states:
            for _, buffer in state.tensors():
                buffer.copy_(buffer[index])
        self.lengths_S.copy_(self.lengths_S[index])
        self.lengths = tuple(self.lengths[row] for row in rows)
        self.peaks = tuple(self.peaks[row] for row in rows)

    def crop(self, length: int) -> None:
        """Forget what came after the first `length` tokens of every row; refused where a layer cannot go back."""
        if length < 0:
            raise ValueError(f"cache: length = {length}; it must be 0 or above")
        longest = max(self.lengths)
        for i, state in enumerate(self.states):
            why = state.why_not_crop(length, max(self.peaks))
            if why is not None:
                raise ValueError(f"cache: cannot crop {longest} tokens to {length}: layers.{i}: {why}")
        self.lengths_S.clamp_(max=length)
        self.lengths = tuple(min(n, length) for n in self.lengths)

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
