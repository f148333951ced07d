"""What a model trains on. Batch k of a task is a pure function of (seed, k), so resuming needs no data cursor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # the processes of `plait data build` need none
    import torch
    from torch import Tensor

IGNORE = -100
"""target of a position that carries no loss"""


@dataclass(frozen=True)
class Group:
    """Rows of one length that are processed together."""

    tokens_BT: Tensor
    targets_BT: Tensor
    """next token where it is to be predicted, IGNORE elsewhere"""
    axes: Mapping[str, Any] = field(default_factory=dict)
    """what tells this group from the others of its batch, as in records ({"gap": 64})"""
    cu_seqlens: Tensor | None = None
    """where documents are not to see each other: [S + 1] offsets of S pieces of documents in the rows laid end to end,
    as LM takes them: `model(tokens_BT.reshape(1, -1), cu_seqlens=cu_seqlens)`. No piece crosses the end of a row"""

    def to(self, device: torch.device | str) -> Group:
        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        pieces = None if self.cu_seqlens is None else move(self.cu_seqlens)
        return replace(self, tokens_BT=move(self.tokens_BT), targets_BT=move(self.targets_BT), cu_seqlens=pieces)

    def split(self, rows: int) -> Iterator[Group]:
        """Its rows in order, at most so many at a time (0: all)."""
        B, T = self.tokens_BT.shape
        for start in range(0, B, rows or B):
            stop = min(start + (rows or B), B)
            pieces = self.cu_seqlens
            if pieces is not None:
                pieces = pieces[(start * T <= pieces) & (pieces <= stop * T)] - start * T
            tokens, targets = self.tokens_BT[start:stop], self.targets_BT[start:stop]
            yield replace(self, tokens_BT=tokens, targets_BT=targets, cu_seqlens=pieces)


class Task(Protocol):
    """A source of batches."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        ...

    def batch(self, step: int) -> list[Group]:
        """The groups of update `step`, from 0; their gradients are weighted by their count of targets."""
        ...

    def held_out(self) -> list[Group]:
        """Fixed groups that training never sees."""
        ...
