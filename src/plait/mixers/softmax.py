"""Softmax attention as a mixer: projections, positions, norms, gate, and its cache of keys and values.

Shapes: B rows, T tokens, D = d_model, H query heads, G KV heads, E head_dim, S sequences, L slots of the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.config import Softmax
from plait.mixers.attention import attend, attend_last, attend_masked, attend_naive, attend_step
from plait.mixers.base import Mixer, State, constant, init_linear, linear
from plait.mixers.norm import Norm
from plait.mixers.seq import Seq
from plait.positions import apply_rope, logn_scale, rope_tables


@dataclass
class KeyValues(State):
    """Keys and values of the tokens so far; with a window, a ring in which position p lies in slot p mod L."""

    k_SLGE: Tensor
    v_SLGE: Tensor
    window_size: int | None

    @property
    def size(self) -> int:
        return self.k_SLGE.shape[1]

    def write(self, k_BTGE: Tensor, v_BTGE: Tensor, position_BT: Tensor) -> None:
        """Keep these tokens of every row; of more than fit in a ring, the last."""
        if self.window_size is not None:
            k_BTGE, v_BTGE, position_BT = (x[:, -self.size :] for x in (k_BTGE, v_BTGE, position_BT))
            position_BT = position_BT % self.size
        rows = torch.arange(len(position_BT), device=position_BT.device)[:, None]
        self.k_SLGE[rows, position_BT] = k_BTGE.detach().to(self.k_SLGE.dtype)
        self.v_SLGE[rows, position_BT] = v_BTGE.detach().to(self.v_SLGE.dtype)

    def append(self, k_BTGE: Tensor, v_BTGE: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Keep what follows the first `past` tokens of every row, in a ring one token; all keys and values held."""
        first = past % self.size
        self.k_SLGE[:, first : first + k_BTGE.shape[1]] = k_BTGE.detach()
        self.v_SLGE[:, first : first + v_BTGE.shape[1]] = v_BTGE.detach()
        held = min(past + k_BTGE.shape[1], self.size)
        return self.k_SLGE[:, :held], self.v_SLGE[:, :held]

    def history(self, count_S1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The ring unrolled: keys, values and positions of the last L tokens in order of time."""
        position_SL = count_S1 - self.size + torch.arange(self.size, device=count_S1.device)
        rows = torch.arange(len(count_S1), device=count_S1.device)[:, None]
        slots = position_SL % self.size
        return self.k_SLGE[rows, slots], self.v_SLGE[rows, slots], position_SL

    def resized(self, max_length: int) -> Self:
        """The size of a ring changes only while it is less than its window. It has not wrapped then, and every position
        lies in the slot of its number, in the larger ring too."""
        more = min(max_length, self.window_size or max_length) - self.size
        return self.map(lambda buffer: F.pad(buffer, (0, 0, 0, 0, 0, more)) if more else buffer.clone())

    def why_not_crop(self, length: int, longest: int) -> str | None:
        if self.window_size is None or longest <= self.size:
            return None
        # The next query needs the window_size - 1 tokens before it; a ring that has wrapped holds the last L.
        most = longest - (self.size - self.window_size) - 1
        return None if length >= most else f"a window of {self.window_size} tokens no longer holds what came before"


class _Groups:
    """KV heads with unequal numbers of query heads: those with equal numbers are computed together, none is expanded.

    They lie in the cache in the order of these runs.
    """

    def __init__(self, kv_map: tuple[int, ...]):
        sizes = Counter(kv_map)
        self.kv_order = sorted(sizes, key=lambda kv: sizes[kv])
        self.q_order = [head for kv in self.kv_order for head, own in enumerate(kv_map) if own == kv]
        self.back = [self.q_order.index(head) for head in range(len(kv_map))]
        self.runs = [(size, len(list(run))) for size, run in groupby(sizes[kv] for kv in self.kv_order)]
        """(query heads of each KV head, KV heads)"""

    def each(self, attend: Callable[..., Tensor], q, k, v, state: KeyValues | None, seq: Seq, sink) -> Tensor:
        """attend on every run, outputs in the order of the query heads."""
        kv_order, q_order, back = (
            constant(order, torch.long, q.device) for order in (self.kv_order, self.q_order, self.back)
        )
        q, k, v = q[:, :, q_order], k[:, :, kv_order], v[:, :, kv_order]
        sink = None if sink is None else sink[q_order]
        outs, first_q, first_kv = [], 0, 0
        for size, count in self.runs:
            heads, groups = slice(first_q, first_q + size * count), slice(first_kv, first_kv + count)
            own = None
            if state is not None:
                own = KeyValues(state.k_SLGE[:, :, groups], state.v_SLGE[:, :, groups], state.window_size)
            parts = (q[:, :, heads], k[:, :, groups], v[:, :, groups])
            outs.append(attend(*parts, own, seq, None if sink is None else sink[heads]))
            first_q, first_kv = heads.stop, groups.stop
        return torch.cat(outs, 2)[:, :, back]


class SoftmaxAttention(Mixer):
    POINTS = ("q", "k", "v", "heads", "out")

    def __init__(self, config: Softmax, d_model: int):
        super().__init__()
        self.config = config
        H, G, E = config.num_heads, config.num_kv_heads, config.head_dim
        self.q, self.k, self.v = (linear(d_model, size * E, bias=config.bias is not None) for size in (H, G, G))
        self.o = linear(H * E, d_model, bias=config.bias == "all")
        self.gate = linear(d_model, H * E) if config.output_gate else None
        sizes = {None: None, "head": (E, E), "full": (H * E, G * E)}[config.qk_norm]
        self.q_norm = Norm(config.qk_norm_kind, sizes[0], config.norm_eps) if sizes else None
        self.k_norm = Norm(config.qk_norm_kind, sizes[1], config.norm_eps) if sizes else None
        self.sink = nn.Parameter(torch.empty(H)) if config.sink else None
        self.groups = _Groups(config.kv_map) if config.kv_map else None

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        for module in (self.q, self.k, self.v, self.o, self.gate):
            if module is not None:
                init_linear(module, std, generator)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.init_weights()
        if self.sink is not None:
            self.sink.zero_()

    def new_state(self, batch: int, max_length: int, *, dtype: torch.dtype, device: torch.device) -> KeyValues:
        config = self.config
        size = min(max_length, config.window_size or max_length)
        shape = (batch, size, config.num_kv_heads, config.head_dim)
        k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
        return KeyValues(k, v, config.window_size)

    def heads(self, x_BTD: Tensor, state: KeyValues | None, seq: Seq) -> tuple[Tensor, KeyValues | None]:
        q, k, v = self._qkv(x_BTD, seq)
        if self.backend == "naive":
            o = self._each(q, k, v, state, seq, lambda _, *row: self._naive(*row))
        elif self.groups is None:
            o = self._attend(q, k, v, state, seq, self.sink)
        else:
            o = self.groups.each(self._attend, q, k, v, state, seq, self.sink)
        if self.gate is not None:
            o = o * torch.sigmoid(self.gate(x_BTD)).view_as(o)
        return o, state

    def _attend(self, q, k, v, state: KeyValues | None, seq: Seq, sink: Tensor | None) -> Tensor:
        first = seq.max_past == 0 and max(seq.lengths) > 1  # nothing to look back on, and no step to be captured
        if first and state is not None:
            self._fill(k, v, state, seq)
        if first or state is None:
            return attend(q, k, v, seq, window_size=self.config.window_size, sink=sink)
        if seq.dense:
            return self._cached(q, k, v, state, seq.position_BT, seq, sink, seq.max_past if seq.level else None)
        return self._each(q, k, v, state, seq, lambda s, *row: self._cached(*row, seq, sink, seq.pasts[s]))

    def _qkv(self, x_BTD: Tensor, seq: Seq) -> tuple[Tensor, Tensor, Tensor]:
        config, E = self.config, self.config.head_dim
        q, k, v = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD).unflatten(-1, (-1, E))
        if self.q_norm is not None and self.k_norm is not None and config.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.unflatten(-1, (-1, E)), k.unflatten(-1, (-1, E))
        if self.q_norm is not None and self.k_norm is not None and config.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if config.rope_theta is not None:
            key = ("rope", config.rotary_dim, config.rope_theta, config.rope_scaling, x_BTD.dtype)
            cos, sin = seq.once(key, lambda: rope_tables(config, seq.position_BT, x_BTD.dtype))
            q = apply_rope(q, cos, sin, config.rope_interleaved)
            k = apply_rope(k, cos, sin, config.rope_interleaved)
        if config.logn is not None:
            key = ("logn", config.logn, config.logn_base, x_BTD.dtype)
            scale_BT = seq.once(key, lambda: logn_scale(config, seq.position_BT, x_BTD.dtype))
            q = (q * scale_BT[..., None, None]).to(q.dtype)
        if config.softmax_scale is not None:
            q = q * (config.softmax_scale * E**0.5)
        return self.taps["q"](q, seq), self.taps["k"](k, seq), self.taps["v"](v, seq)

    @staticmethod
    def _fill(k, v, state: KeyValues, seq: Seq) -> None:
        """The first tokens of every sequence into the cache."""
        if seq.dense and seq.level and k.shape[1] <= state.size:
            state.append(k, v, 0)
            return
        if seq.dense:
            state.write(k, v, seq.position_BT)
            return
        for s, (k_1, v_1, position_1) in enumerate(zip(*(seq.split(x) for x in (k, v, seq.position_BT)), strict=True)):
            state.row(s).write(k_1, v_1, position_1)

    def _cached(
        self, q, k, v, state: KeyValues, position_BT: Tensor, seq: Seq, sink: Tensor | None, past: int | None
    ) -> Tensor:
        """Rows of equally many tokens, after any number of others: attend to what the cache holds and to the new.

        past: how many others, if all rows have had as many.
        """
        window, T = self.config.window_size, q.shape[1]
        if past is not None and (T == 1 or window is None):
            return attend_last(q, *state.append(k, v, past), sink)
        if window is not None and T > 1:
            before = state.history(position_BT[:, :1])
            o = attend(q, k, v, None, window_size=window, sink=sink, past=before, position_BT=position_BT)
            state.write(k, v, position_BT)
            return o
        state.write(k, v, position_BT)
        k, v, held = state.k_SLGE, state.v_SLGE, min(seq.max_past + T, state.size)
        if T > 1:
            slots_1L = torch.arange(held, device=q.device)[None]
            return attend_masked(q, k[:, :held], v[:, :held], position_BT, slots_1L, None, sink)
        count_S1 = seq.once(("held", state.size), lambda: (position_BT + 1).clamp(max=state.size))
        return attend_step(q, k, v, count_S1, held, sink, seq.once)

    def _naive(self, q, k, v, state: KeyValues | None, position_1T: Tensor) -> Tensor:
        """One sequence: every key, copied for each query head that reads it, and an explicit mask."""
        kv_order = self.groups.kv_order if self.groups else list(range(k.shape[2]))
        k, v, positions = k[:, :, kv_order], v[:, :, kv_order], position_1T
        if state is not None:
            start = position_1T[:, :1]
            if state.window_size is None:
                past_k, past_v = state.k_SLGE[:, : int(start)], state.v_SLGE[:, : int(start)]
                past_positions = torch.arange(int(start), device=q.device)[None]
            else:
                past_k, past_v, past_positions = state.history(start)
            state.write(k, v, position_1T)
            k, v = torch.cat((past_k.to(k), k), 1), torch.cat((past_v.to(v), v), 1)
            positions = torch.cat((past_positions, positions), 1)
        H, G = self.config.num_heads, self.config.num_kv_heads
        read = [kv_order.index(kv) for kv in self.config.kv_map or (h * G // H for h in range(H))]
        return attend_naive(q, k[:, :, read], v[:, :, read], position_1T, positions, self.config.window_size, self.sink)

    @staticmethod
    def _each(q, k, v, state: KeyValues | None, seq: Seq, fn: Callable[..., Tensor]) -> Tensor:
        """fn on every sequence by itself, and on its number."""
        parts = zip(*(seq.split(x) for x in (q, k, v, seq.position_BT)), strict=True)
        outs = [
            fn(s, q_1, k_1, v_1, None if state is None else state.row(s), position_1)
            for s, (q_1, k_1, v_1, position_1) in enumerate(parts)
            if q_1.shape[1]
        ]
        return torch.cat(outs, 0 if seq.dense else 1)
