"""Mistakes that the contract must catch, each a patch of the library: what keeps the test from passing on nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import plait.mixers.attention as attention
import plait.mixers.delta as delta
import plait.mixers.linear as linear
import plait.mixers.softmax as softmax
from plait.mixers.conv import ShortConv
from plait.mixers.recurrent import DeltaRule, LinearRule
from plait.mixers.seq import Chunks, Seq
from plait.mixers.softmax import KeyValues, _Groups
from plait.model.cache import Cache


def window_one_too_wide(q_position_BT, k_position_BL, window_size):
    q, k = q_position_BT[:, :, None], k_position_BL[:, None, :]
    mask = (k <= q) & (k >= 0)
    return mask if window_size is None else mask & (k >= q - window_size)


def sink_only_in_prefill(make):
    return lambda q, k, v, sink: make(q, k, v, None)


def ring_slots_shifted(make):
    return lambda self, k, v, past: make(self, k, v, past + (self.window_size is not None))


def ring_keeps_the_first(make):
    def write(self, k, v, position):
        n = self.size if self.window_size is not None else k.shape[1]
        return make(self, k[:, :n], v[:, :n], position[:, :n])

    return write


def crop_always(make):
    return lambda self, length, longest: None


def conv_forgets_its_tail(make):
    return lambda self, x, tail, seq: make(self, x, None if tail is None else tail.zero_(), seq)


def conv_sees_other_documents(make):
    def forward(self, x, tail, seq):
        whole = seq if tail is not None or seq.dense else Seq((x.shape[1],), True, seq.device)
        return make(self, x, tail, whole)

    return forward


def empty_slots_decay(make):
    """A chunk's unused places have a decay, as a padded step that only zeroes v would."""

    def pack(self, x, *of):
        real = make(self, torch.ones_like(x[..., :1].flatten(3))) if x.ndim == 3 else None
        return make(self, x, *of) if real is None else torch.where(real > 0, make(self, x, *of), -0.5)

    return pack


def states_in_the_order_of_chunks(make):
    return lambda self, state: state


def step_without_decay(make):
    return staticmethod(lambda q, k, v, g, *rest, **options: make(q, k, v, torch.zeros_like(g), *rest, **options))


def chunks_start_from_zero(make):
    return staticmethod(lambda *inputs, **options: make(*inputs[:-2], None, inputs[-1], **options))


def decay_without_channels(make):
    """The mean of the channels' decays in place of each."""
    return lambda g, *rest: make(g.mean(-1, keepdim=True).expand_as(g) if g.ndim == 4 else g, *rest)


def groups_put_back_wrong(make):
    """Outputs of ragged groups in a wrong order of heads."""

    def each(self, attend, q, k, v, state, seq, sink):
        back, self.back = self.back, self.back[::-1]
        try:
            return make(self, attend, q, k, v, state, seq, sink)
        finally:
            self.back = back

    return each


def scale_counts_this_piece_only(make):
    return lambda config, position_BT, dtype: make(config, position_BT - position_BT[:, :1], dtype)


def positions_count_padding(make):
    def position_BT(self):
        if self._token_N is None:
            return make.fget(self)
        place = (self._token_N % self._shape[1])[None]
        return place if self.past_S is None else place + self.past_S[self.row_N][None]

    return property(position_BT)


def clone_shares_buffers(make):
    def clone(self):
        new = copy.copy(self)
        new.lengths_S = self.lengths_S.clone()
        return new

    return clone


def reorder_keeps_lengths(make):
    def reorder(self, index):
        lengths_S, lengths, peaks = self.lengths_S.clone(), self.lengths, self.peaks
        make(self, index)
        self.lengths_S, self.lengths, self.peaks = lengths_S, lengths, peaks

    return reorder


def too_long_is_taken(make):
    return lambda self, new: None


SOFTMAX, CONV = ("softmax",), ("gdn", "kda", "gla", "mamba2")
RECURRENT = (*CONV, "lightning")

MUTATIONS: dict[str, tuple[tuple[str, ...], Any, str, Callable]] = {
    "window one too wide": (SOFTMAX, attention, "_visible", lambda make: window_one_too_wide),
    "sink only in prefill": (SOFTMAX, softmax, "attend_last", sink_only_in_prefill),
    "ring slots shifted": (SOFTMAX, KeyValues, "append", ring_slots_shifted),
    "ring keeps the first tokens": (SOFTMAX, KeyValues, "write", ring_keeps_the_first),
    "crop where tokens are lost": (SOFTMAX, KeyValues, "why_not_crop", crop_always),
    "convolution forgets its tail": (CONV, ShortConv, "forward", conv_forgets_its_tail),
    "convolution sees other documents": (CONV, ShortConv, "forward", conv_sees_other_documents),
    "padding decays the state": (RECURRENT, Chunks, "pack", empty_slots_decay),
    "states in the order of chunks": (RECURRENT, Chunks, "unsort", states_in_the_order_of_chunks),
    "one delta step without decay": (("gdn", "kda"), DeltaRule, "step", step_without_decay),
    "one linear step without decay": (("gla", "mamba2", "lightning"), LinearRule, "step", step_without_decay),
    "delta chunks start from zero": (("gdn", "kda"), DeltaRule, "chunk", chunks_start_from_zero),
    "linear chunks start from zero": (("gla", "mamba2", "lightning"), LinearRule, "chunk", chunks_start_from_zero),
    "one decay for all channels (delta)": (("kda", "heads"), delta, "make_decay", decay_without_channels),
    "one decay for all channels (linear)": (("gla", "mix"), linear, "make_decay", decay_without_channels),
    "ragged groups put back wrong": (("softmax", "heads"), _Groups, "each", groups_put_back_wrong),
    "log-n counts this piece only": (SOFTMAX, softmax, "logn_scale", scale_counts_this_piece_only),
    "positions count padding": (("softmax", "lightning"), Seq, "position_BT", positions_count_padding),
    "a clone shares buffers": ((), Cache, "clone", clone_shares_buffers),
    "reorder keeps lengths": (SOFTMAX, Cache, "reorder", reorder_keeps_lengths),
    "too long is taken": (SOFTMAX, Cache, "check_room", too_long_is_taken),
}
"""name -> kinds of mixers in which it shows (none: all), and what is patched"""


def mutated(name: str):
    _, owner, attribute, mutate = MUTATIONS[name]
    return mock.patch.object(owner, attribute, mutate(vars(owner)[attribute]))
