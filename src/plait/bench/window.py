"""Windowed attention with sinks against full causal attention, as the sequence grows: both should be linear in T."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.bench.timing import interleaved_ms, peak_bytes, saved_bytes
from plait.mixers.attention import attend
from plait.mixers.seq import Seq

WINDOW = 256
LENGTHS = (2048, 4096, 8192, 16384)


def window(device: torch.device, lengths: Sequence[int] | None, repeats: int) -> list[dict[str, Any]]:
    """Forward + backward of one row, 4 query heads and 2 KV heads of 64, window 256; us_per_token tells the growth."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    for length in lengths or LENGTHS:
        generator = torch.Generator(device).manual_seed(0)
        shapes = [(1, length, heads, 64) for heads in (4, 2, 2, 4)]
        q, k, v, do = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
        sink = torch.zeros(4, device=device, requires_grad=True)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        seq = Seq.build((1, length), device)

        def windowed(leaves=leaves, seq=seq, sink=sink) -> torch.Tensor:
            return attend(*leaves, seq, window_size=WINDOW, sink=sink)

        def full(leaves=leaves, seq=seq) -> torch.Tensor:
            return attend(*leaves, seq)

        forwards = {f"window {WINDOW}, sink": windowed, "full": full}

        def both(forward, leaves=leaves, do=do) -> None:
            torch.autograd.grad(forward(), leaves, do)

        calls = {name: lambda forward=forward: both(forward) for name, forward in forwards.items()}
        medians = interleaved_ms(calls, device=device, repeats=repeats)
        first = next(iter(medians.values()))
        for name, ms in medians.items():
            peak = peak_bytes(calls[name], device)
            rows.append(
                {
                    "case": "window",
                    "competitor": name,
                    "length": length,
                    "batch": 1,
                    "pass": "forward+backward",
                    "median_ms": ms,
                    "us_per_token": 1e3 * ms / length,
                    "ratio": ms / first,
                    "saved_mb": saved_bytes(forwards[name]) / 2**20,
                    "peak_mb": None if peak is None else peak / 2**20,
                }
            )
    return rows
