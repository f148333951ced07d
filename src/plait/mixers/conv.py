"""Causal depthwise convolution of a few tokens, with a tail that carries it from piece to piece.

Shapes: C channels, W width, N tokens, S sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.mixers.seq import Seq

FEW_TOKENS = 1 << 14
"""of a batch, up to which a GPU waits for its host: copies cost less than calls of a kernel"""


class ShortConv(nn.Module):
    """y_t = sum_j weight[:, W - 1 - j] x_{t - j} + bias within each sequence, then SiLU."""

    def __init__(self, channels: int, width: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def init_weights(self, generator: torch.Generator) -> None:
        bound = self.weight.shape[1] ** -0.5
        self.weight.uniform_(-bound, bound, generator=generator)
        if self.bias is not None:
            self.bias.uniform_(-bound, bound, generator=generator)

    def fla(self, parts: list[Tensor], tail_SWC: Tensor | None, seq: Seq) -> list[Tensor]:
        """forward of inputs [B, T, *] that stand for channels side by side, on fla's kernel."""
        from plait.mixers.fla import conv_fla

        if len(parts) > 1 and parts[0].shape[:2].numel() <= FEW_TOKENS:
            y_BTC = conv_fla(torch.cat(parts, -1), self.weight, self.bias, tail_SWC, seq)
            return list(y_BTC.split([x.shape[-1] for x in parts], -1))
        outs, first = [], 0
        for x in parts:
            own = slice(first, first + x.shape[-1])
            bias = None if self.bias is None else self.bias[own]
            outs.append(conv_fla(x, self.weight[own], bias, None if tail_SWC is None else tail_SWC[..., own], seq))
            first = own.stop
        return outs

    def forward(self, x_BTC: Tensor, tail_SWC: Tensor | None, seq: Seq) -> Tensor:
        """tail_SWC: the last W - 1 inputs of every sequence, replaced in place by those after this piece."""
        before = self.weight.shape[1] - 1
        if seq.dense:
            tail = x_BTC.new_zeros(x_BTC.shape[0], before, x_BTC.shape[2]) if tail_SWC is None else tail_SWC
            x_ext = torch.cat((tail.to(x_BTC.dtype), x_BTC), 1)
            if tail_SWC is not None:
                tail_SWC.copy_(x_ext[:, -before:].detach())
            y = x_ext[:, before:] * self.weight[:, -1]
            for j in range(before):
                y = torch.addcmul(y, x_ext[:, j : j + x_BTC.shape[1]], self.weight[:, j])
        else:
            y = self._ragged(x_BTC[0], tail_SWC, seq)[None]
        y = y if self.bias is None else y + self.bias
        return F.silu(y).to(x_BTC.dtype)  # under autocast fp32 weights have made y fp32

    def _ragged(self, x_NC: Tensor, tail_SWC: Tensor | None, seq: Seq) -> Tensor:
        """Every sequence is given room for its tail in front: row s, step t lies at base_s + W - 1 + t."""
        before = self.weight.shape[1] - 1
        S, C = seq.num_sequences, x_NC.shape[1]
        base_S = seq.starts_S + before * torch.arange(S, device=x_NC.device)
        place_N = base_S[seq.row_N] + before + seq.step_BT[0]
        x_ext = x_NC.new_zeros(len(x_NC) + S * before, C).index_copy(0, place_N, x_NC)
        if tail_SWC is not None:
            steps = torch.arange(before, device=x_NC.device)
            x_ext = x_ext.index_copy(0, (base_S[:, None] + steps).flatten(), tail_SWC.flatten(0, 1).to(x_NC.dtype))
            tail_SWC.copy_(x_ext[base_S[:, None] + seq.lengths_S[:, None] + steps].detach())
        y_ext = x_ext[before:] * self.weight[:, -1]
        for j in range(before):
            y_ext = torch.addcmul(y_ext, x_ext[j : j - before], self.weight[:, j])
        return y_ext[place_N - before]
