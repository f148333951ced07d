"""The training loop.

Shapes: B rows, T tokens, N positions that carry loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from plait import records
from plait.config import select_layers
from plait.cost import total_params
from plait.data import IGNORE, Group, Task
from plait.files import claim, write_json
from plait.mixers.base import resolve
from plait.model.io import load, load_spec
from plait.model.lm import LM
from plait.records import Record
from plait.scoring import Scores, score_tokens
from plait.spec import Spec
from plait.terminal import progress_bar
from plait.train.board import Board, writer_class
from plait.train.checkpoint import Checkpoint, check_settings, last_whole, load_optimizer, prune, save_checkpoint
from plait.train.config import TrainConfig
from plait.train.distributed import ALONE, World, abandon, join, whole
from plait.train.longce import longce_weights
from plait.train.optimizer import make_optimizer
from plait.train.watch import Watch, head_grad_norms, note
from plait.windows import short_losses


class Interrupted(RuntimeError):
    """Training was asked to stop; everything up to `step` is saved."""

    def __init__(self, step: int):
        super().__init__(f"interrupted after update {step}; saved: the same command goes on from there")
        self.step = step


class Diverged(ValueError):
    """Too many updates in a row were left out."""


@dataclass(frozen=True)
class Measure:
    """A measurement made before the first update and after every `every`-th (0: none of these), and after the last."""

    every: int
    measure: Callable[[LM], list[Record]]


def train(
    run: Path,
    spec: Spec,
    task: Task,
    config: TrainConfig,
    *,
    settings: dict[str, Any],
    measures: Sequence[Measure] = (),
    branch: Path | None = None,
    init: Path | None = None,
    assets: Path | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> LM:
    """Train in a run directory, new or begun; returns the model after config.steps updates.

    Under torchrun every process calls this alike; with FSDP, each has its part of the model that is returned.

    settings: everything the run was asked for, as JSON; written to config.json and compared when the run goes on.
    assets: a directory whose tokenizer files go into every checkpoint.
    branch: a checkpoint to start from instead of fresh weights: optimizer, schedule and data go on as they were there.
    init: a model whose weights a fresh run starts from, of the same shapes; all else is new.
    Raises Interrupted after Ctrl-C or SIGTERM, once all is saved; Diverged if more than config.max_skips updates in a
    row have a loss or gradient that is not finite, or a spike.
    """
    check(spec, config, device, init)
    clip_of, rates = recorded_clips(config), config.rates
    world = join(config.parallel, total_params(spec), device)
    if world.size > 1:
        world.batch(task, config.first_batch)  # refuses one that is too small
    device = world.device
    with contextlib.ExitStack() as held:
        held.push(abandon)

        def begin() -> Checkpoint | None:
            held.enter_context(claim(run))
            return _begin(run, spec, settings, branch)

        start = world.first(begin)
        place = "cpu" if world.sharded else device  # a device may not hold all of what is sharded
        model = _model(spec, config, start, init, place)
        eager: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        if config.compile:
            from plait.train.compiled import compiled, eager

            held.enter_context(compiled(model))
        world.shard(model)
        optimizer = make_optimizer(model, config)
        if start:
            load_optimizer(start, model, optimizer)
        step, tokens, before = (start.step, start.tokens, start.seconds) if start else (0, 0, 0.0)
        origin = records.provenance(spec_hash=spec.hash, device=device_name(device))
        clock, guard, done = time.monotonic(), Guard(config, run), tokens
        watch = Watch(spec, config, world.device)
        board = Board(run, step) if config.tensorboard and world.leads else None

        def write(rows: Sequence[Record]) -> None:
            if not world.leads:
                return
            now = records.provenance(spec_hash=spec.hash, device=origin["device"])
            stamp = {"step": step, "tokens": tokens, "provenance": now}
            records.append(run / "records.jsonl", [dataclasses.replace(row, **stamp) for row in rows])
            if board is not None:
                board.write(rows, step)

        def measured(item: Measure) -> None:
            with eager():
                write(item.measure(model))

        def measure(due: Callable[[int], bool]) -> None:
            for item in measures:
                if due(item.every) and world.sharded:  # all take part; else rank 0 alone
                    measured(item)
                    world.settle(model)
                elif due(item.every):
                    world.first(lambda item=item: measured(item))

        def save() -> None:
            seconds = before + time.monotonic() - clock
            save_checkpoint(run, model, optimizer, step, tokens, seconds, world=world, assets=assets)
            world.first(lambda: prune(run, config.keep))

        if start is None:
            measure(bool)
            save()
        shown = progress and world.leads
        with progress_bar(config.steps, done=step, show=shown, label=run.name) as show, stop_signals() as stopped:
            while step < config.steps:
                watch.start()
                freeze(model, config, step)
                groups = [group.to(device) for group in world.batch(task, config.first_batch + step)]
                rows, loss = backward(model, groups, config, world)
                if config.head_grad_norms and (step + 1) % config.head_grad_norms == 0:
                    rows += head_grad_norms(model)
                norm, clip = clip_gradients(model, config.clip, None if clip_of is None else clip_of[step])
                taken = guard.takes(loss, norm)
                share = rates.at(step)
                for parameters in optimizer.param_groups:
                    parameters["lr"] = share * parameters["initial_lr"]
                if taken:
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1
                tokens += int(world.total([sum(group.tokens_BT.numel() for group in groups)])[0])
                seconds = before + time.monotonic() - clock
                values = {"loss": loss, "lr": share * config.lr, "grad_norm": norm, "clip": clip, "seconds": seconds}
                values |= watch.values(groups)
                if not taken:
                    values["skipped"] = 1
                write([Record(kind="train", name="loss", values=values), *rows])
                guard.stop(step)
                show(step, f"loss {loss:.4f}, {(tokens - done) / (seconds - before):,.0f} tokens/s{note(values)}")
                last = step == config.steps
                measure(lambda every: last or (every > 0 and step % every == 0))  # noqa: B023
                regular = config.checkpoint_every and step % config.checkpoint_every == 0
                stop = world.any(stopped())
                if last or stop or regular or step in config.checkpoint_at:
                    save()
                if stop and not last:
                    raise Interrupted(step)
        unfreeze(model)
        model.recompute = None
        return model


def check(spec: Spec, config: TrainConfig, device: torch.device | str = "cpu", init: Path | None = None) -> None:
    """Refuse what cannot be trained before anything is written."""
    if config.backend == "fla":
        resolve("fla", torch.device(device), torch.bfloat16)
    if config.tensorboard:
        writer_class()
    here = LM(spec, device="meta", backend=config.backend).state_dict()
    there = here if init is None else LM(load_spec(init), device="meta").state_dict()
    for name in sorted(here.keys() | there.keys()):
        shapes = [tuple(x[name].shape) if name in x else "absent" for x in (there, here)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"init: {name} is {shapes[0]} in {init}, and {shapes[1]} in the model asked for")
    for item in config.freezes:
        select_layers(spec.layers, item.families)


def _model(
    spec: Spec, config: TrainConfig, start: Checkpoint | None, init: Path | None, device: torch.device | str
) -> LM:
    if start:
        model = load(start.path, device=device, backend=config.backend)
    else:
        model = LM(spec, seed=config.seed, device=device, backend=config.backend)
        if init is not None:
            model.load_state_dict(load(init).state_dict())
    if config.recompute:
        model.recompute = partial(recompute, use_reentrant=False)
    return model.train()


def _begin(run: Path, spec: Spec, settings: dict[str, Any], branch: Path | None) -> Checkpoint | None:
    """Make or check a run's files; where to go on from, if anywhere."""
    rows = run / "records.jsonl"
    if (run / "config.json").exists():
        check_settings(run, settings)
        start = last_whole(run) or (Checkpoint.read(branch) if branch else None)
    else:
        start = Checkpoint.read(branch) if branch else None
        if start and Spec.load(start.path / "spec.json") != spec:
            raise ValueError(f"branch: {start.path} holds another model than the one asked for")
    if start and branch and start.path == branch:  # the past it branches off is its own
        parent = records.read(branch.parent.parent / "records.jsonl")
        rows.write_text("")
        records.append(rows, [row for row in parent if row.step is not None and row.step <= start.step])
    elif start:
        records.truncate(rows, start.step)
    elif rows.exists():
        rows.unlink()
    spec.save(run / "spec.json")
    write_json(run / "config.json", settings)
    return start


class Guard:
    """Which updates are left out. What it knows is in the run's records, so that a resumed run decides alike."""

    SEEN = 100
    """gradient norms a spike is measured by; before there are so many, none is one"""

    def __init__(self, config: TrainConfig, run: Path):
        self.spike, self.most = config.spike, config.max_skips
        self.norms: deque[float] = deque(maxlen=self.SEEN)
        self.skips = 0
        for row in records.read(run / "records.jsonl"):
            if row.kind == "train" and row.name == "loss":
                self._count(row.values.get("grad_norm"), "skipped" not in row.values)

    def takes(self, loss: float, norm: float) -> bool:
        """Is an update with this loss and gradient norm to be made?"""
        usual = statistics.median(self.norms) if self.spike and len(self.norms) == self.SEEN else math.inf
        taken = math.isfinite(loss) and math.isfinite(norm) and not (self.spike and norm > self.spike * usual)
        self._count(norm, taken)
        return taken

    def _count(self, norm: float | None, taken: bool) -> None:
        self.skips = 0 if taken else self.skips + 1
        if taken and norm is not None:
            self.norms.append(norm)

    def stop(self, step: int) -> None:
        if self.skips > self.most:
            raise Diverged(
                f"update {step}: the loss or gradient of {self.skips} in a row is not finite, or a spike (max_skips ="
                f" {self.most}); branch from an earlier checkpoint with a lower lr"
            )


def freeze(model: LM, config: TrainConfig, step: int) -> None:
    """Hold still what update `step` must not touch. A frozen parameter gets no gradient, so its Adam state pauses."""
    frozen: set[int] = set()
    for item in config.freezes:
        if item.holds(step):
            for i in select_layers(model.spec.layers, item.families):
                module = model.blocks[i] if item.scope == "block" else model.blocks[i].mixer
                frozen |= {id(parameter) for parameter in module.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) not in frozen)


def unfreeze(model: LM) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def backward(
    model: LM, groups: Sequence[Group], config: TrainConfig, world: World = ALONE
) -> tuple[list[Record], float]:
    """Gradients of the mean loss over all targets of an update, a group at a time; records of the groups, the loss.

    groups: of this rank. What comes out is of all ranks.
    """
    counts = world.total([int((group.targets_BT != IGNORE).sum()) for group in groups])
    total, device = sum(counts), groups[0].tokens_BT.device
    pieces = world.pieces(groups, config.micro_batch)
    losses, left = [], sum(map(len, pieces))
    sums = torch.zeros(len(groups), 2, dtype=torch.float64, device=device)  # of each group's losses and right answers
    for i, own in enumerate(pieces):
        for piece in own:
            left -= 1
            world.hold_gradients(model, left > 0)
            with autocast(device, config.precision, keep=not world.sharded):
                scores = score_tokens(model, piece.tokens_BT, piece.targets_BT, cu_seqlens=piece.cu_seqlens)
                weight_N = _weights(model, piece, scores, config, world)
            loss = (scores.loss_N if weight_N is None else weight_N * scores.loss_N).sum() / total
            (loss + config.z_loss * scores.lse_N.square().sum() / total if config.z_loss else loss).backward()
            losses.append(loss.detach())
            sums[i] += torch.stack([scores.loss_N.detach().sum(), scores.correct_N.sum()])
    world.reduce_gradients(model)
    loss, *found = world.total([torch.stack(losses).sum().item(), *sums.flatten().tolist()])
    means = zip(groups, counts, found[::2], found[1::2], strict=True)
    values = [(group, {"loss": a / n, "accuracy": b / n}) for group, n, a, b in means if group.axes]
    return [Record(kind="train", name="gap_loss", values=row, axes=group.axes) for group, row in values], loss


def _weights(model: LM, group: Group, scores: Scores, config: TrainConfig, world: World) -> Tensor | None:
    """LongCE's weight of every target (001, 5.2); None: all weigh the same."""
    if config.objective == "ce":
        return None
    tokens, targets = group.tokens_BT, group.targets_BT
    K, d = config.longce_context, config.longce_stride
    short_BT = short_losses(model, tokens, targets, K=K, d=d, cu_seqlens=group.cu_seqlens, level=world.level)
    return longce_weights(scores.loss_N, short_BT[targets != IGNORE])


def clip_gradients(model: LM, largest: float, recorded: float | None) -> tuple[float, float]:
    """Scale gradients so that their norm is at most `largest`, or by a recorded coefficient; (norm, coefficient)."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = whole(nn.utils.get_total_norm(gradients)).item()
    clip = recorded if recorded is not None else min(1.0, largest / (norm + 1e-6)) if largest else 1.0
    if clip != 1:
        torch._foreach_mul_(gradients, clip)
    return norm, clip


def recorded_clips(config: TrainConfig) -> dict[int, float] | None:
    """Clip coefficient of every update of another run, by number from 0."""
    if config.clip_from is None:
        return None
    rows = records.read(Path(config.clip_from) / "records.jsonl")
    found = ((row.step, row.values.get("clip")) for row in rows if row.name == "loss")
    clips = {step - 1: clip for step, clip in found if step is not None and clip is not None}
    missing = next((step for step in range(config.steps) if step not in clips), None)
    if missing is not None:
        raise ValueError(f"clip_from = {config.clip_from}: no clip coefficient recorded for update {missing + 1}")
    return clips


def autocast(device: torch.device, precision: str, *, keep: bool = True) -> contextlib.AbstractContextManager:
    """bf16 matrix products over fp32 weights: on a GPU unless told otherwise, on the CPU when asked. keep False: copies
    of weights in bf16 do not outlive the layer that made them, as all of them would be a model that is not sharded."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=in_bf16(device, precision), cache_enabled=keep)


def in_bf16(device: torch.device, precision: str) -> bool:
    return precision == "bf16" or (precision == "auto" and device.type == "cuda")


def device_name(device: torch.device | str) -> str:
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask for a stop after the current update; a second Ctrl-C ends the process. A second SIGTERM
    does not: under Slurm both it and torchrun send one."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handle(number, frame):
        if asked.is_set() and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        asked.set()

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
