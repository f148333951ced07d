"""`plait bench train --parallel` under torchrun: updates of all processes together against those of each alone.

Every process has the same number of tokens in each case, its own. Alone it trains a model of its own and exchanges
nothing, all of them at the same time, so that they share the host, its power and its memory just as they do together.
`efficiency` is the time of the slowest alone over that together: 1 where the exchange is free. An update is one of the
training loop: forward, backward, gradients added up, their norm, AdamW.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from plait.bench.rows import OURS, Row, device_name, dtype_name, dtype_of, mb
from plait.bench.timing import peak_bytes
from plait.bench.train import best_flops
from plait.cost import cost
from plait.data import IGNORE, Group
from plait.mixers import Backend
from plait.model.lm import LM
from plait.spec import Spec
from plait.train.config import TrainConfig
from plait.train.distributed import World, join
from plait.train.loop import backward, clip_gradients
from plait.train.optimizer import make_optimizer

ALONE = f"{OURS}, each alone"


@dataclass(frozen=True)
class Side:
    update: Callable[[], None]
    held_bytes: int
    """of weights, optimizer and buffers between updates, on this process's GPU"""


def bench_scaling(
    specs: dict[str, Spec],
    lengths: Sequence[int],
    tokens: int,
    *,
    parallel: Sequence[str],
    device: str,
    backend: Backend,
    repeats: int,
    minutes: float | None,
) -> Iterator[list[Row]]:
    """Rows of one model and length after another, on every process; those of rank 0 are of all: processes, batch (of
    one), median_ms, tokens_per_s (of all), mfu_percent and peak_mb (of one), efficiency.

    tokens: of one process's update. parallel: ddp, fsdp. Raises ValueError where torchrun has not started several.
    """
    worlds = {f"{OURS} {kind}": join(kind, 0, device) for kind in parallel}
    world = next(iter(worlds.values()))
    if world.size == 1:
        raise ValueError("parallel: one process runs, and scaling takes several: torchrun --nproc-per-node 2")
    worlds = {ALONE: World(device=world.device), **worlds}
    start = time.monotonic()
    for name, spec in specs.items():
        for length in lengths:
            batch = max(1, tokens // length)
            late = world.any(minutes is not None and time.monotonic() - start > 60 * minutes)
            if world.leads:
                label = f"{name}, {world.size} x {batch} x {length}{', not run' if late else ''}"
                print(label, file=sys.stderr, flush=True)
            fields = {
                "case": name,
                "device": device_name(world.device),
                "dtype": dtype_name(dtype_of(world.device)),
                "backend": backend,
                "processes": world.size,
                "batch": batch,
                "length": length,
            }
            if late:
                yield [{**fields, "competitor": ALONE, "note": f"not run: {minutes:g} minutes were over"}]
            else:
                yield _race(spec, worlds, backend, repeats, fields)


def _race(spec: Spec, worlds: dict[str, World], backend: Backend, repeats: int, fields: Row) -> list[Row]:
    batch, length, device = fields["batch"], fields["length"], worlds[ALONE].device
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens_BT = torch.randint(spec.vocab_size, (batch, length), generator=generator).to(device)
    group = Group(tokens_BT, F.pad(tokens_BT[:, 1:], (0, 1), value=IGNORE))
    sides = {name: _side(replace(spec, context_length=length), world, backend, group) for name, world in worlds.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            seconds[name].append(_seconds(side.update, device))
    flops = 3 * cost(spec, length).flops_per_token
    peak = best_flops(device)
    alone, rows = statistics.median(seconds[ALONE]), []
    for name, side in sides.items():
        median = statistics.median(seconds[name])
        rate = batch * length / median
        row = {**fields, "competitor": name, "median_ms": 1e3 * median, "repeats": repeats}
        row |= {"tokens_per_s": dist.get_world_size() * rate, "mfu_percent": 100 * rate * flops / peak}
        row |= {"efficiency": alone / median} if name != ALONE else {}
        peak_of = peak_bytes(side.update, device)
        rows.append(row | ({} if peak_of is None else {"peak_mb": mb(side.held_bytes + peak_of)}))
    return rows


def _side(spec: Spec, world: World, backend: Backend, group: Group) -> Side:
    """A model that has made its first updates: what compiles has done so."""
    gc.collect()
    before = _allocated(world.device)
    config = TrainConfig(backend=backend)
    model = LM(spec, device=world.device, backend=backend)
    world.shard(model)
    optimizer = make_optimizer(model, config)

    def update() -> None:
        backward(model, [group], config, world)
        clip_gradients(model, config.clip, None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(2):
        update()
    return Side(update, _allocated(world.device) - before)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _seconds(update: Callable[[], None], device: torch.device) -> float:
    """Of the slowest process, which all wait for before the next measurement."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else (lambda: None)
    dist.barrier()
    wait()
    start = time.perf_counter()
    update()
    wait()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()
