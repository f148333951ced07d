"""PlaitCache: plait's cache as generation in transformers holds it.

transformers counts columns of a padded batch, plait the real tokens of each row; both counts are kept here.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import Cache as HfCache

from plait.model.cache import Cache


class PlaitCache(HfCache):
    """Made by PlaitForCausalLM.new_cache, or by a forward pass with use_cache; it grows when it must."""

    def __init__(self, cache: Cache):
        super().__init__(layers=[])  # what transformers keeps in layers is in plait's cache
        self.cache = cache
        self.columns = 0
        """columns of the batches fed so far, padding included"""
        self.padded = 0
        """of those, the first ones, up to the last that has padding in it"""

    def reserve(self, length: int) -> None:
        """Room for rows of `length` tokens; what is there stays."""
        if length > self.cache.max_length:
            self.cache = self.cache.resized(length)

    def make_room(self, new: int) -> None:
        """Room for `new` tokens more in every row; twice the room there was, so that steps seldom copy."""
        needed = max(self.cache.lengths) + new
        if needed > self.cache.max_length:
            self.reserve(max(needed, 2 * self.cache.max_length))

    def advance(self, columns: int, mask_BT: Tensor | None) -> None:
        """Count the columns of a batch, and its mask's."""
        if mask_BT is not None:
            holes = (~mask_BT.bool()).any(0).nonzero()
            self.padded = self.columns + int(holes.max()) + 1 if len(holes) else self.padded
        self.columns += columns

    def check_past(self, mask_BT: Tensor) -> None:
        """Whether a mask agrees with what was fed: a token once taken in cannot be masked out later."""
        counts = tuple(mask_BT.bool().sum(1).tolist())
        for row, (now, had) in enumerate(zip(counts, self.cache.lengths, strict=False)):
            if now != had:
                raise ValueError(f"attention_mask: row {row} has {now} past tokens; the cache has had {had} of it")

    # What generation asks of a cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # it grows

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.cache.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.cache = self.cache.select(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove columns; refused where a layer cannot go back."""
        count = -tokens_to_remove
        if count < 0 or count > self.columns:
            raise ValueError(f"cache: crop({tokens_to_remove}); it must be 0, or -1 to -{self.columns}")
        if count == 0:
            return
        if self.columns - count < self.padded:
            raise ValueError(f"cache: crop({tokens_to_remove}) reaches back to padding")
        self.cache.crop([n - count for n in self.cache.lengths])
        self.columns -= count

    def reset(self) -> None:
        self.cache.reset()
        self.columns = self.padded = 0

    def clone(self) -> PlaitCache:
        return self._with(self.cache.clone())

    def to(self, device: torch.device | str) -> PlaitCache:
        """On another device; itself when it is there already."""
        moved = self.cache.to(device)
        return self if moved is self.cache else self._with(moved)

    def _with(self, cache: Cache) -> PlaitCache:
        new = copy.copy(self)
        new.cache = cache
        return new

    def __len__(self) -> int:
        return len(self.cache.states)

    def __repr__(self) -> str:
        return f"PlaitCache(lengths={list(self.cache.lengths)}, max_length={self.cache.max_length})"

    @property
    def batch_size(self) -> int:
        return self.cache.batch

    @property
    def is_compileable(self) -> bool:
        return False  # transformers would build a 4D mask and compile by itself

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def is_croppable(self) -> bool:
        length = self.cache.max_length
        return all(state.why_not_crop(0, length) is None for state in self.cache.states)

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self)  # layers that know no length; here the cache knows it for all
