"""Side-by-side measurement: every competitor in turn inside every repeat, medians over the repeats."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# A single GPU call would also be charged for the host's launches that a training step hides behind the previous ones.
CALLS_PER_SAMPLE = {"cuda": 3}
SLOW_MS = 300.0
NOTE_LENGTH = 150


@dataclass(frozen=True)
class Timing:
    """One competitor's: the median of `repeats` samples, or a note that says why there is none."""

    median_ms: float | None = None
    repeats: int = 0
    note: str | None = None


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, device: torch.device, repeats: int = 9, budget_s: float = 2.0
) -> dict[str, Timing]:
    """Milliseconds of one call of each competitor, in the order given. What compiles does so in the warm-up.

    A competitor slower than budget_s / repeats has fewer samples, so that one slow one does not cost minutes, and one
    slower than budget_s no sample but its warm-up. One that raises has a note.
    """
    timings: dict[str, Timing] = {}
    planned: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        try:
            ms = _warm_up_ms(call, device)
            planned[name] = min(repeats, int(budget_s * 1e3 / (ms * CALLS_PER_SAMPLE.get(device.type, 1))))
            if not planned[name]:
                samples[name].append(ms)
        except Exception as error:
            timings[name] = Timing(note=reason(error))
    for i in range(repeats):
        for name in [name for name, count in planned.items() if i < count and name not in timings]:
            try:
                samples[name].append(_sample_ms(calls[name], device))
            except Exception as error:
                timings[name] = Timing(note=reason(error))
    medians = {
        name: Timing(median_ms=statistics.median(values), repeats=len(values))
        for name, values in samples.items()
        if name not in timings
    }
    return {name: {**medians, **timings}[name] for name in calls}


def reason(error: Exception) -> str:
    """An exception in one short line. Frees what an exhausted GPU still holds for reuse."""
    text = " ".join(str(error).split())
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in text:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return "out of memory"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name} is not installed"
    words = text or type(error).__name__
    return words if len(words) <= NOTE_LENGTH else words[: NOTE_LENGTH - 3] + "..."


def _warm_up_ms(call: Callable[[], object], device: torch.device) -> float:
    """What a call takes after what compiles has done so; on a CPU nothing does, and a slow call is not made again."""
    ms = _sample_ms(call, device)
    return ms if device.type != "cuda" and ms > SLOW_MS else _sample_ms(call, device)


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
