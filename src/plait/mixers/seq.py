"""Which token belongs to which sequence. LM builds one Seq per forward pass; every mixer and every probe reads it.

A batch is either *dense* (B rows of T real tokens, tensors x_BTD) or *ragged* (sequences of unequal length laid end
to end without padding, tensors x_1ND). A padding mask and cu_seqlens both become the ragged form, so mixers never see
a padded position.

Shapes: B rows, T tokens a row, N tokens in all, S sequences (= rows of the cache), C chunk size, M chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _kept(make: Callable[[Seq], Any]) -> property:
    """functools.cached_property without its lock, over which torch.compile breaks the graph on Python 3.11."""
    return property(lambda seq: seq.once(make.__name__, lambda: make(seq)))


def _words(x: Tensor) -> Tensor | None:
    """The same memory, without its gradient, as numbers of 16 bytes; None where it cannot be had so, or nothing is
    gained: a GPU moves single numbers of 2 bytes at a quarter of its speed."""
    return _as_words(x) if x.is_cuda and not torch.compiler.is_compiling() else None


def _as_words(x: Tensor) -> Tensor | None:
    n = 16 // x.element_size()
    if n == 1 or x.ndim < 4 or x.stride(-1) != 1 or x.shape[-1] == n or x.is_neg():
        return None
    return None if any(i % n for i in (x.storage_offset(), x.shape[-1], *x.stride()[:-1])) else x.view(torch.complex128)


@dataclass(frozen=True)
class Chunks:
    """Sequences cut into chunks of C tokens, ordered by step: first every sequence's chunk 0, then every chunk 1, ...

    Sequences are sorted by falling length, so step j works on the first `counts[j]` sequences and nothing is wasted
    but the tail of each sequence's last chunk. Those slots are zero after `pack`.
    """

    size: int
    counts: tuple[int, ...]
    """sequences that have a j-th chunk, for each step j; sum(counts) = M"""
    order_S: Tensor | None
    """sequence index at each sorted place; None when the order is the given one"""
    _dense: tuple[int, int] | None
    _slot_N: Tensor | None
    """slot (chunk * C + place) of every token, ragged only"""

    def pack(self, x: Tensor, of: Callable[..., Tensor] | None = None) -> Tensor:
        """x_BTH* -> x_MHC*, zero where a chunk holds no token; or a function of that, of(x, out=None)."""
        if of is None and (words := _words(x)) is not None:
            return self.pack(words).view(x.dtype)
        size = self.size
        if self._dense is not None:
            B, T = self._dense
            padding = -T % size
            if padding:
                x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, padding))
            x = x.unflatten(1, (-1, size))  # B, steps, C, H, *
            x = x.permute(1, 0, 3, 2, *range(4, x.ndim))
            if of is None:
                return x.flatten(0, 1)
            if torch.compiler.is_compiling():  # a trace loses the strides of `out`
                return of(x.flatten(0, 1))
            return of(x, out=torch.empty_like(x, memory_format=torch.contiguous_format)).flatten(0, 1)  # in one pass
        assert self._slot_N is not None
        slots = x.new_zeros(sum(self.counts) * size, *x.shape[2:])
        slots = slots.index_copy(0, self._slot_N, x[0])
        slots = slots.unflatten(0, (-1, size)).transpose(1, 2)
        return slots if of is None else of(slots)

    def unpack(self, y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """y_MHC* -> y_BTH*, the inverse of pack, in another dtype where one is given."""
        if dtype in (None, y.dtype) and (words := _words(y)) is not None:
            return self.unpack(words).view(y.dtype)
        y = y.transpose(1, 2)  # M, C, H, *
        if self._dense is not None:
            y = y.unflatten(0, (-1, self._dense[0])).transpose(0, 1)  # B, steps, C, H, *
        y = y.to(dtype or y.dtype, memory_format=torch.contiguous_format)  # cast and moved in one pass
        if self._dense is not None:
            return y.flatten(1, 2)[:, : self._dense[1]]
        return y.flatten(0, 1)[self._slot_N][None]

    def sort(self, state: Tensor) -> Tensor:
        """Rows of a state [S, ...] in the order of the chunks."""
        return state if self.order_S is None else state[self.order_S]

    def unsort(self, state: Tensor) -> Tensor:
        """The inverse of sort."""
        if self.order_S is None:
            return state
        return torch.empty_like(state).index_copy(0, self.order_S, state)


@dataclass(frozen=True)
class Seq:
    """The sequences of one forward pass."""

    lengths: tuple[int, ...]
    """new tokens of every sequence; a row that is wholly padding has 0"""
    dense: bool
    device: torch.device
    past_S: Tensor | None = None
    """tokens every sequence has had before (the cache's lengths); None: none"""
    max_past: int = 0
    """a bound on past_S known without asking the device"""
    level: bool = False
    """every sequence has had max_past tokens; never in a pass that is captured, to be replayed at other lengths"""
    _token_N: Tensor | None = None
    """place of every real token in the flattened padded batch; None unless built from a mask"""
    _shape: tuple[int, int] | None = None
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def build(
        shape: tuple[int, int],
        device: torch.device,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        past: Tensor | None = None,
        max_past: int = 0,
        level: bool = False,
    ) -> Seq:
        """Describe a batch of tokens [B, T].

        mask: bool or integer [B, T], true on real tokens, with padding anywhere. cu_seqlens: [S + 1] rising offsets
        into a batch of one row, from 0 to T. past: [S] tokens each sequence already has in the cache, at most max_past,
        and if level is true all of them max_past.
        """
        B, T = shape
        if mask is not None and cu_seqlens is not None:
            raise ValueError("mask and cu_seqlens: both are given; give one of them")
        common = {"device": device, "past_S": past, "max_past": max_past, "level": level}
        if mask is not None:
            if tuple(mask.shape) != (B, T):
                raise ValueError(f"mask: shape {tuple(mask.shape)}; it must be that of the tokens, {(B, T)}")
            if mask.is_floating_point():  # an additive mask, 0 and -inf, would be read the wrong way round
                raise ValueError(f"mask: dtype {mask.dtype}; it must be bool, or integers 0 and 1")
            mask = mask.to(device=device, dtype=torch.bool)
            lengths = tuple(mask.sum(1).tolist())
            if all(n == T for n in lengths):
                return Seq(lengths, True, **common)
            return Seq(lengths, False, **common, _token_N=mask.flatten().nonzero()[:, 0], _shape=(B, T))
        if cu_seqlens is not None:
            if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
                raise ValueError(
                    f"cu_seqlens: shape {tuple(cu_seqlens.shape)}, {cu_seqlens.dtype}; it must be integers, one more"
                    " than there are documents"
                )
            offsets = cu_seqlens.tolist()
            lengths = tuple(end - start for start, end in zip(offsets, offsets[1:], strict=False))
            if B != 1 or offsets[0] != 0 or offsets[-1] != T or min(lengths) < 0:
                raise ValueError(
                    f"cu_seqlens: {offsets if len(offsets) < 9 else [*offsets[:4], '...', *offsets[-3:]]} over tokens"
                    f" of shape {(B, T)}; it must rise from 0 to the length of a single row"
                )
            return Seq(lengths, len(lengths) == 1, **common)
        return Seq((T,) * B, True, **common)

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @_kept
    def starts(self) -> tuple[int, ...]:
        """Offset of every sequence in the flat order of tokens."""
        starts, total = [], 0
        for n in self.lengths:
            starts.append(total)
            total += n
        return tuple(starts)

    @_kept
    def starts_S(self) -> Tensor:
        return torch.tensor(self.starts, device=self.device)

    @_kept
    def lengths_S(self) -> Tensor:
        return torch.tensor(self.lengths, device=self.device)

    @_kept
    def pasts(self) -> tuple[int, ...]:
        """past_S on the host, for which a GPU is waited for."""
        return (0,) * len(self.lengths) if self.past_S is None else tuple(self.past_S.tolist())

    @_kept
    def row_N(self) -> Tensor:
        """Sequence of every token, flat."""
        rows = torch.arange(self.num_sequences, device=self.device)
        return torch.repeat_interleave(rows, self.lengths_S, output_size=sum(self.lengths))

    @_kept
    def step_BT(self) -> Tensor:
        """Place of every token within this piece of its sequence."""
        if self.dense:
            steps = torch.arange(self.lengths[0], device=self.device)
            return steps.expand(self.num_sequences, -1)
        steps = torch.arange(sum(self.lengths), device=self.device)
        return (steps - self.starts_S[self.row_N])[None]

    @_kept
    def position_BT(self) -> Tensor:
        """Position of every token in its sequence, from 0, past tokens counted, padding not."""
        if self.past_S is None:
            return self.step_BT
        return self.step_BT + (self.past_S[:, None] if self.dense else self.past_S[self.row_N][None])

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """make(), computed for the first layer that asks and kept for the others."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def chunks(self, size: int) -> Chunks:
        return self.once(("chunks", size), lambda: self._cut(size))

    def _cut(self, size: int) -> Chunks:
        if self.dense:
            B, T = self.num_sequences, self.lengths[0]
            return Chunks(size, (B,) * -(-T // size), None, (B, T), None)
        order = sorted(range(self.num_sequences), key=lambda s: -self.lengths[s])
        chunks_of = [-(-self.lengths[s] // size) for s in order]
        counts = tuple(sum(c > j for c in chunks_of) for j in range(max(chunks_of)))
        base_J = torch.tensor([0, *counts], device=self.device).cumsum(0)
        order_S = torch.tensor(order, device=self.device)
        place_S = torch.empty_like(order_S)
        place_S[order_S] = torch.arange(len(order), device=self.device)
        step_N = self.step_BT[0]
        slot_N = (base_J[step_N // size] + place_S[self.row_N]) * size + step_N % size
        return Chunks(size, counts, order_S, None, slot_N)

    def split(self, x: Tensor) -> list[Tensor]:
        """x_BT* -> one [1, n, ...] for each sequence, in order."""
        if self.dense:
            return list(x.split(1))
        return list(x.split(self.lengths, dim=1))

    def strip(self, x: Tensor) -> Tensor:
        """Padded x_BT* -> the form mixers see: unchanged when dense, [1, N, ...] when ragged."""
        return x if self._token_N is None else x.flatten(0, 1)[self._token_N][None]

    def pad(self, x: Tensor) -> Tensor:
        """The inverse of strip, zero at padded positions."""
        if self._token_N is None or self._shape is None:
            return x
        B, T = self._shape
        return x.new_zeros(B * T, *x.shape[2:]).index_copy(0, self._token_N, x[0]).unflatten(0, (B, T))
