"""What a model trains on. Batch k of a task is a pure function of (seed, k), so resuming needs no data cursor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # the processes of `plait data build` need none
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
