"""How near a rule comes to what the machine allows: FLOPs and bytes of the ideal algorithm against measured peaks.

Ideal means: the chunked form with chunks of 64 tokens and whole squares, as tensor cores work; every input read once
and every output written once, by a forward pass, and by a backward pass again. A backward pass counts twice the forward
FLOPs: each product has two gradients. Nothing is counted for what an implementation recomputes or keeps.

A pass is then bound by the larger of FLOPs / peak FLOP/s and bytes / peak bytes/s. Peaks are those of a large matrix
product in the dtype of the rule and of a large copy, measured in the same process.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from plait.bench.rows import Options, Row, Step, device_name, dtype_name, dtype_of
from plait.bench.timing import interleaved

CHUNK = 64
MATRIX = {"cuda": 8192, "cpu": 2048}
COPY_BYTES = {"cuda": 2**31, "cpu": 2**28}


@dataclass(frozen=True)
class Peaks:
    flops: float
    """per second"""
    bytes: float
    """per second, read and written"""


@functools.cache
def peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    kind = "cuda" if device.type == "cuda" else "cpu"
    n, size = MATRIX[kind], COPY_BYTES[kind]
    a = torch.randn(n, n, device=device, dtype=dtype)
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    timings = interleaved({"matmul": lambda: a @ a, "copy": lambda: target.copy_(source)}, device=device, repeats=5)
    matmul_ms, copy_ms = (timing.median_ms for timing in timings.values())
    if matmul_ms is None or copy_ms is None:
        raise RuntimeError(f"peaks: {timings['matmul'].note or timings['copy'].note}")
    return Peaks(2 * n**3 / matmul_ms * 1e3, 2 * size / copy_ms * 1e3)


def flops_per_token(key_dim: int, value_dim: int, *, delta: bool) -> float:
    """Forward, of one head.

    Linear attention: Q K^T and M V in the chunk, Q S and K^T V with the state. The delta rule besides: K K^T, the
    triangular inverse, its products with V and K, and K S.
    """
    K, V, C = key_dim, value_dim, CHUNK
    flops = 2 * C * (K + V) + 4 * K * V
    if delta:
        flops += 2 * C * K + C * C / 3 + 2 * C * (K + V) + 2 * K * V
    return flops


@dataclass(frozen=True)
class Ideal:
    """One pass of a rule over a batch."""

    flops: float
    bytes: float

    @staticmethod
    def of(forward_flops: float, input_bytes: int, output_bytes: int, *, backward: bool) -> Ideal:
        moved = input_bytes + output_bytes
        return Ideal(3 * forward_flops, 3 * input_bytes + 2 * output_bytes) if backward else Ideal(forward_flops, moved)

    def place(self, ms: float, peak: Peaks) -> Row:
        """Columns of a row that took `ms`."""
        compute_ms, memory_ms = (1e3 * self.flops / peak.flops, 1e3 * self.bytes / peak.bytes)
        return {
            "intensity": self.flops / self.bytes,
            "bound": "compute" if compute_ms > memory_ms else "memory",
            "bound_ms": max(compute_ms, memory_ms),
            "percent": 100 * max(compute_ms, memory_ms) / ms,
        }


def roofline(options: Options) -> list[Step]:
    """The machine's peaks. The rows of each rule tell their share of them."""

    def rows() -> list[Row]:
        device, dtype = options.device, dtype_of(options.device)
        peak = peaks(device, dtype)
        fields = {"case": "roofline", "device": device_name(device), "dtype": dtype_name(dtype)}
        return [
            {**fields, "competitor": f"matmul {MATRIX.get(device.type)}", "tflops": peak.flops / 1e12},
            {**fields, "competitor": "copy", "gb_per_s": peak.bytes / 1e9},
        ]

    return [("roofline", rows)]
