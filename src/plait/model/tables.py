"""How tensors of transformers' checkpoints are called and laid out, against ours: tables that are read both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.config import Gdn


class Same:
    """One tensor of theirs is one of ours. Other forms say how several are held together."""

    def store(self, ours: list[Tensor]) -> list[Tensor]:
        return ours

    def load(self, theirs: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """sizes: rows of each of ours."""
        return theirs


class Stacked(Same):
    """Several of ours on top of each other."""

    def store(self, ours: list[Tensor]) -> list[Tensor]:
        return [torch.cat(ours)]

    def load(self, theirs: list[Tensor], sizes: list[int]) -> list[Tensor]:
        return list(theirs[0].split(sizes))


@dataclass(frozen=True)
class PerHead(Same):
    """Several of ours of the same size, those of one head together."""

    head_dim: int

    def store(self, ours: list[Tensor]) -> list[Tensor]:
        return [torch.cat([x.unflatten(0, (-1, self.head_dim)) for x in ours], 1).flatten(0, 1)]

    def load(self, theirs: list[Tensor], sizes: list[int]) -> list[Tensor]:
        by_head = theirs[0].unflatten(0, (-1, len(sizes) * self.head_dim))
        return [x.flatten(0, 1) for x in by_head.split(self.head_dim, 1)]


@dataclass(frozen=True)
class Depthwise(Same):
    """A depthwise convolution, whose weights have an axis of one input channel in theirs, in one piece or several."""

    sizes: tuple[int, ...] | None = None

    def store(self, ours: list[Tensor]) -> list[Tensor]:
        pieces = ours[0].split(self.sizes) if self.sizes else ours
        return [x[:, None] if x.ndim == 2 else x for x in pieces]

    def load(self, theirs: list[Tensor], sizes: list[int]) -> list[Tensor]:
        return [torch.cat([x[:, 0] if x.ndim == 3 else x for x in theirs])]


@dataclass(frozen=True)
class Row:
    """Modules or parameters of theirs and what they are in ours, without what they share: `layers.{i}.`, `.weight`."""

    theirs: str
    ours: str
    """several names apart by spaces, on either side, where one holds what the other has apart"""
    form: Callable[[Any], Same] = lambda mixer: Same()
    """how, given the layer's mixer"""
    alias: str | None = None
    """another name of theirs that is read too"""


def rows(text: str) -> tuple[Row, ...]:
    """`theirs = ours`, a line each; `theirs | alias = ours` where there is another name."""
    found = []
    for line in text.strip().splitlines():
        theirs, ours = (side.strip() for side in line.split("="))
        name, _, alias = (part.strip() for part in theirs.partition("|"))
        found.append(Row(name, ours, alias=alias or None))
    return tuple(found)


def _conv_sizes(mixer: Gdn) -> tuple[int, ...]:
    K = mixer.head_dim
    return mixer.num_heads * K, mixer.num_kv_heads * K, mixer.num_v_heads * mixer.value_dim


ATTENTION = rows("""
    self_attn.q_proj = mixer.q
    self_attn.k_proj = mixer.k
    self_attn.v_proj = mixer.v
    self_attn.o_proj = mixer.o
    self_attn.q_norm = mixer.q_norm
    self_attn.k_norm = mixer.k_norm
""")
MLP = rows("""
    mlp.gate_proj = mlp.gate
    mlp.up_proj = mlp.up
    mlp.down_proj = mlp.down
""")
PRE = rows("""
    input_layernorm = norm1
    post_attention_layernorm = norm2
""")
OLMO_PRE = rows("""
    attention_layer_norm | input_layernorm = norm1
    feedforward_layer_norm | post_attention_layernorm = norm2
""")
OLMO_POST = rows("""
    post_attention_layernorm | feedforward_layer_norm = norm1
    post_feedforward_layernorm = norm2
""")
SANDWICH = rows("""
    input_layernorm = norm1
    post_attention_layernorm = post_norm1
    pre_feedforward_layernorm = norm2
    post_feedforward_layernorm = post_norm2
""")
GATED_ATTENTION = (
    Row("self_attn.q_proj", "mixer.q mixer.gate", lambda mixer: PerHead(mixer.head_dim)),
    *ATTENTION[1:],
)
OLMO_CONVS = "linear_attn.q_conv1d linear_attn.k_conv1d linear_attn.v_conv1d"
DECAY = rows("""
    linear_attn.A_log = mixer.A_log
    linear_attn.dt_bias = mixer.dt_bias
""")
OLMO_GDN = (
    Row(OLMO_CONVS, "mixer.conv", lambda mixer: Depthwise(_conv_sizes(mixer))),
    *DECAY,
    *rows("""
        linear_attn.q_proj = mixer.q
        linear_attn.k_proj = mixer.k
        linear_attn.v_proj = mixer.v
        linear_attn.a_proj = mixer.a
        linear_attn.b_proj = mixer.b
        linear_attn.g_proj = mixer.gate
        linear_attn.o_norm = mixer.norm
        linear_attn.o_proj = mixer.o
    """),
)
QWEN_GDN = (
    Row("linear_attn.conv1d", "mixer.conv", lambda mixer: Depthwise()),
    *DECAY,
    Row("linear_attn.in_proj_qkv", "mixer.q mixer.k mixer.v", lambda mixer: Stacked()),
    *rows("""
        linear_attn.in_proj_z = mixer.gate
        linear_attn.in_proj_b = mixer.b
        linear_attn.in_proj_a = mixer.a
        linear_attn.norm = mixer.norm
        linear_attn.out_proj = mixer.o
    """),
)
BAMBA_BLOCK = rows("""
    input_layernorm = norm1
    pre_ff_layernorm = norm2
    feed_forward.gate_proj = mlp.gate
    feed_forward.up_proj = mlp.up
    feed_forward.down_proj = mlp.down
""")
BAMBA_MAMBA = (
    Row("mamba.in_proj", "mixer.z mixer.x mixer.b mixer.c mixer.dt", lambda mixer: Stacked()),
    Row("mamba.conv1d", "mixer.conv", lambda mixer: Depthwise()),
    *rows("""
        mamba.A_log = mixer.A_log
        mamba.dt_bias = mixer.dt_bias
        mamba.D = mixer.skip
        mamba.norm = mixer.norm
        mamba.out_proj = mixer.o
    """),
)
