"""What mixers with a matrix for a state share: a short convolution, a rule in three forms, a gated norm, the cache.

Shapes: B rows, T tokens, S states, H query heads, K key size, V value size, C channels of the convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.mixers.base import Mixer, RecurrentState, init_linear
from plait.mixers.conv import ShortConv
from plait.mixers.delta import delta_chunk, delta_naive, delta_step
from plait.mixers.linear import linear_chunk, linear_naive, linear_step
from plait.mixers.norm import Norm, l2_norm, wide
from plait.mixers.seq import Seq
from plait.positions import apply_rope, rope_tables

ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}


@dataclass
class MemoryState(RecurrentState):
    """tail: the last inputs of the convolution (None without one); memory: the matrix of every state, at least fp32."""

    tail_BWC: Tensor | None
    memory_BSKV: Tensor


class Recurrent(Mixer):
    """A subclass projects, calls `recur` and gates. The rule's forms are static: naive(..., state), step(..., state)
    and chunk(..., state, seq), all giving (o, state)."""

    naive: ClassVar[Callable]
    step: ClassVar[Callable]
    chunk: ClassVar[Callable]
    fla: ClassVar[str]
    """name of the rule in the fla backend"""

    def __init__(self, config: Any, num_states: int, conv_channels: int = 0, conv_bias: bool = False):
        super().__init__()
        self.config = config
        self.memory_shape = (num_states, config.key_dim, config.value_dim)
        self.options: dict[str, Any] = {}
        """of the rule"""
        width = getattr(config, "conv_size", 0)
        self.conv = ShortConv(conv_channels, width, conv_bias) if width else None

    def why_not_fla(self) -> str | None:
        if self.fla == "delta_fla":
            from plait.mixers.fla import why_not_delta

            why = why_not_delta(self.config.key_dim)
            return None if why is None else f"{self.config.kind}: {why}"
        return None

    def init_parts(self, std: float, generator: torch.Generator) -> None:
        """Matrices normal(0, std), biases 0, convolutions and norms as they are."""
        for module in self.children():
            if isinstance(module, nn.Linear):
                init_linear(module, std, generator)
            elif isinstance(module, ShortConv):
                module.init_weights(generator)
            elif isinstance(module, Norm):
                module.init_weights()

    def new_state(self, batch: int, max_length: int, *, dtype: torch.dtype, device: torch.device) -> MemoryState:
        tail = None
        if self.conv is not None:
            channels, width = self.conv.weight.shape
            tail = torch.zeros(batch, width - 1, channels, dtype=dtype, device=device)
        wide = torch.promote_types(dtype, torch.float32)
        return MemoryState(tail, torch.zeros(batch, *self.memory_shape, dtype=wide, device=device))

    def convolve(
        self, parts: list[Tensor], state: MemoryState | None, seq: Seq, *, activate: bool = True
    ) -> list[Tensor]:
        """Projections, each through its channels of the short convolution and SiLU; without a convolution SiLU alone,
        or with activate false nothing."""
        if self.conv is None:
            return [F.silu(x) for x in parts] if activate else parts
        tail = None if state is None else state.tail_BWC
        if self.backend == "fla":
            return self.conv.fla(parts, tail, seq)
        x = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return list(self.conv(x, tail, seq).split([x.shape[-1] for x in parts], -1))

    def rotate(self, q_BTHK: Tensor, k_BTSK: Tensor, seq: Seq) -> tuple[Tensor, Tensor]:
        """RoPE, where the config has one."""
        config = self.config
        if config.rope_theta is None:
            return q_BTHK, k_BTSK
        key = ("rope", config.rotary_dim, config.rope_theta, None, q_BTHK.dtype)
        cos, sin = seq.once(key, lambda: rope_tables(config, seq.position_BT, q_BTHK.dtype))
        return apply_rope(q_BTHK, cos, sin, False), apply_rope(k_BTSK, cos, sin, False)

    def recur(self, inputs: tuple[Tensor, ...], state: MemoryState | None, seq: Seq) -> Tensor:
        """o_BTHV of the rule over these tokens, after those that the state has seen."""
        memory = None if state is None else state.memory_BSKV
        return self.keep(*self._mix(inputs, memory, seq), state)

    @staticmethod
    def keep(o_BTHV: Tensor, memory_BSKV: Tensor | None, state: MemoryState | None) -> Tensor:
        """o, once the state has what is to be remembered."""
        if state is not None:
            assert memory_BSKV is not None
            state.memory_BSKV.copy_(memory_BSKV.detach())
        return o_BTHV

    def _mix(self, inputs: tuple[Tensor, ...], memory: Tensor | None, seq: Seq) -> tuple[Tensor, Tensor | None]:
        rule = type(self)
        if self.backend == "naive":
            return self._naive(inputs, memory, seq)
        if self.backend == "fla":
            from plait.mixers import fla

            return getattr(fla, rule.fla)(*inputs, memory, seq, final=memory is not None, **self.options)
        if memory is not None and seq.dense and inputs[0].shape[1] == 1:
            return rule.step(*inputs, memory, **self.options)
        return rule.chunk(*inputs, memory, seq, **self.options)

    def _naive(self, inputs: tuple[Tensor, ...], memory: Tensor | None, seq: Seq) -> tuple[Tensor, Tensor]:
        """Sequence by sequence, token by token."""
        outs, memories = [], []
        for s, parts in enumerate(zip(*(seq.split(x) for x in inputs), strict=True)):
            own = None if memory is None else memory[s : s + 1]
            o_s, memory_s = type(self).naive(*parts, own, **self.options)
            outs.append(o_s)
            memories.append(memory_s)
        return torch.cat(outs, 0 if seq.dense else 1), torch.cat(memories)

    def norm_and_gate(
        self, o_BTHV: Tensor, norm: Norm | None, gate: Tensor | None, activation: Literal["silu", "sigmoid"]
    ) -> Tensor:
        """RMSNorm over each head, times an activation of the gate [B, T, H * V]; either may be missing."""
        if norm is not None and gate is not None and self.backend == "fla":
            from plait.mixers.fla import norm_gate_fla

            return norm_gate_fla(o_BTHV, gate.view_as(o_BTHV), norm.weight, norm.eps, activation)
        o_BTHV = o_BTHV if norm is None else norm(o_BTHV)
        return o_BTHV if gate is None else o_BTHV * ACTIVATIONS[activation](gate).view_as(o_BTHV)


class DeltaRule(Recurrent):
    naive, step, chunk = staticmethod(delta_naive), staticmethod(delta_step), staticmethod(delta_chunk)
    fla = "delta_fla"

    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def delta(
        self,
        q_BTHK: Tensor,
        k_BTSK: Tensor,
        v_BTSV: Tensor,
        f: Tensor,
        b_BTS: Tensor,
        state: MemoryState | None,
        seq: Seq,
    ) -> Tensor:
        """The rule, from queries and keys of any length and the logits of decay ([B, T, S] or [B, T, S, K]) and beta.

        g = -exp(A_log) softplus(f + dt_bias), beta = sigmoid(b), or twice that where it may be negative.
        """
        negative = self.config.allow_neg_eigval
        if self._gates_in_kernel(q_BTHK, k_BTSK, v_BTSV):
            from plait.mixers.fla import delta_gated_fla

            (v_BTSV,) = self.tapped(seq, v=v_BTSV)
            gates = (f, b_BTS, self.A_log, self.dt_bias)
            memory = None if state is None else state.memory_BSKV
            o, memory = delta_gated_fla(q_BTHK, k_BTSK, v_BTSV, *gates, memory, seq, negative=negative)
            return self.keep(o, memory, state)
        rate = wide(self.A_log).exp()
        g = -(rate if f.ndim == 3 else rate[:, None]) * F.softplus(wide(f) + wide(self.dt_bias).view(f.shape[2:]))
        beta = torch.sigmoid(wide(b_BTS)) * (2 if negative else 1)
        q, k = l2_norm(q_BTHK), l2_norm(k_BTSK)
        return self.recur(self.tapped(seq, q=q, k=k, v=v_BTSV, decay=g, beta=beta), state, seq)

    def _gates_in_kernel(self, q_BTHK: Tensor, k_BTSK: Tensor, v_BTSV: Tensor) -> bool:
        """fla's chunk kernels can norm queries and keys and make decay and beta themselves, where nobody looks."""
        if self.backend != "fla" or q_BTHK.shape[1] == 1 or q_BTHK.shape[2] != k_BTSK.shape[2]:
            return False
        from plait.mixers.fla import MIN_SIZE

        watched = any(self.taps[name]._forward_hooks for name in ("q", "k", "decay", "beta"))
        return not watched and min(k_BTSK.shape[-1], v_BTSV.shape[-1]) >= MIN_SIZE


class LinearRule(Recurrent):
    naive, step, chunk = staticmethod(linear_naive), staticmethod(linear_step), staticmethod(linear_chunk)
    fla = "linear_fla"


def init_dt_bias(dt_bias: Tensor, generator: torch.Generator) -> None:
    """softplus(dt_bias) log-uniform in [1e-3, 0.1], at least 1e-4."""
    dt_bias.uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_().clamp_(min=1e-4)
    dt_bias.add_(torch.log(-torch.expm1(-dt_bias)))
