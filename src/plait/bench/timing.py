"""Side-by-side measurement: every competitor in turn inside every repeat, medians over the repeats."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

# A single GPU call would also be charged for the host's launches that a training step hides behind the previous ones.
CALLS_PER_SAMPLE = {"cuda": 3}


def interleaved_ms(
    calls: Mapping[str, Callable[[], object]], *, device: torch.device, repeats: int = 9, warmup: int = 3
) -> dict[str, float]:
    """Median milliseconds of one call of each competitor. What compiles does so in the warm-up."""
    for call in calls.values():
        for _ in range(warmup):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(_sample_ms(call, device))
    return {name: statistics.median(values) for name, values in samples.items()}


def _sample_ms(call: Callable[[], object], device: torch.device) -> float:
    n = CALLS_PER_SAMPLE.get(device.type, 1)
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(n):
            call()
        return (time.perf_counter() - start) * 1e3 / n
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(n):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / n


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Device memory that a call takes at its height, beyond what was allocated before it. CUDA only."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes that a forward pass keeps for its backward, leaves and parameters not counted."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if not x.is_leaf or not x.requires_grad:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept = forward()  # alive until counted, so that no storage is counted under a freed one's address
    del kept
    return sum(storages.values())


def seconds_to_first_line(code: str, env: Mapping[str, str] | None = None, timeout: float = 900.0) -> float:
    """Seconds from the start of a fresh interpreter that runs the code to the first line it prints."""
    env = {**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            seconds = time.perf_counter() - start
            _, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
    if not line:
        raise RuntimeError(f"the fresh process ended without a first step:\n{errors[-2000:]}")
    return seconds
