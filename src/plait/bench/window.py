"""Windowed attention with sinks against full causal attention, as the sequence grows: both should be linear in T."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from plait.bench.rows import Options, Row, Step, device_name, dtype_name, dtype_of, mb, measure
from plait.bench.timing import saved_bytes
from plait.mixers.attention import attend
from plait.mixers.seq import Seq

WINDOW = 256
LENGTHS = (2048, 4096, 8192, 16384)


def window(options: Options) -> list[Step]:
    """Forward + backward of one row, 4 query heads and 2 KV heads of 64, window 256; us_per_token tells the growth."""
    return [(f"window, {T} tokens", partial(_window, options, T)) for T in options.lengths_or(LENGTHS, LENGTHS)]


def _window(options: Options, length: int) -> list[Row]:
    device, dtype = options.device, dtype_of(options.device)
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, length, heads, 64) for heads in (4, 2, 2, 4)]
    q, k, v, do = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    sink_H = torch.zeros(4, device=device, requires_grad=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seq = Seq.build((1, length), device)

    def windowed() -> Tensor:
        return attend(*leaves, seq, window_size=WINDOW, sink=sink_H)

    def full() -> Tensor:
        return attend(*leaves, seq)

    forwards = {f"window {WINDOW}, sink": windowed, "full": full}
    calls = {name: lambda run=run: torch.autograd.grad(run(), leaves, do) for name, run in forwards.items()}
    fields = {"case": "window", "device": device_name(device), "dtype": dtype_name(dtype), "batch": 1, "length": length}

    def more(name: str, ms: float) -> Row:
        return {"us_per_token": 1e3 * ms / length, "saved_mb": mb(saved_bytes(forwards[name]))}

    return measure(calls, fields | {"heads": 4, "head_dim": 64, "pass": "forward+backward"}, options, timed=more)
