"""The training loop.

Shapes: B rows, T tokens, N positions that carry loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait import records
from plait.config import select_layers
from plait.data import IGNORE, Group, Task
from plait.files import write_json
from plait.mixers.base import resolve
from plait.model.io import load
from plait.model.lm import LM
from plait.records import Record
from plait.scoring import Scores, score_tokens
from plait.spec import Spec
from plait.terminal import progress_bar
from plait.train.checkpoint import Checkpoint, check_settings, checkpoints, claim, load_optimizer, save_checkpoint
from plait.train.config import TrainConfig
from plait.train.longce import longce_weights
from plait.train.optimizer import make_optimizer
from plait.windows import short_losses


class Interrupted(RuntimeError):
    """Training was asked to stop; everything up to `step` is saved."""

    def __init__(self, step: int):
        super().__init__(f"interrupted after update {step}; saved: the same command goes on from there")
        self.step = step


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
    assets: Path | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> LM:
    """Train in a run directory, new or begun; returns the model after config.steps updates.

    settings: everything the run was asked for, as JSON; written to config.json and compared when the run goes on.
    assets: a directory whose tokenizer files go into every checkpoint.
    branch: a checkpoint to start from instead of fresh weights: optimizer, schedule and data go on as they were there.
    Raises Interrupted after Ctrl-C or SIGTERM, once all is saved.
    """
    check(spec, config, device)
    clip_of, rates = _recorded_clips(config), config.rates
    with claim(run):
        start = _begin(run, spec, settings, branch)
        if start:
            model = load(start.path, device=device, backend=config.backend)
        else:
            model = LM(spec, seed=config.seed, device=device, backend=config.backend)
        model.train()
        optimizer = make_optimizer(model, config)
        if start:
            load_optimizer(start, model, optimizer)
        step, tokens, before = (start.step, start.tokens, start.seconds) if start else (0, 0, 0.0)
        origin = records.provenance(spec_hash=spec.hash, device=device_name(device))
        clock = time.monotonic()

        def write(rows: Sequence[Record]) -> None:
            now = records.provenance(spec_hash=spec.hash, device=origin["device"])
            stamp = {"step": step, "tokens": tokens, "provenance": now}
            records.append(run / "records.jsonl", [dataclasses.replace(row, **stamp) for row in rows])

        def measure(due: Callable[[int], bool]) -> None:
            for item in measures:
                if due(item.every):
                    write(item.measure(model))

        def save() -> None:
            seconds = before + time.monotonic() - clock
            save_checkpoint(run, model, optimizer, step, tokens, seconds, assets=assets)

        if start is None:
            measure(bool)
            save()
        with progress_bar(config.steps, done=step, show=progress, label=run.name) as show, stop_signals() as stopped:
            while step < config.steps:
                freeze(model, config, step)
                groups = [_on(group, device) for group in task.batch(step)]
                rows, loss = backward(model, groups, config)
                norm, clip = clip_gradients(model, config.clip, None if clip_of is None else clip_of[step])
                share = rates.at(step)
                for parameters in optimizer.param_groups:
                    parameters["lr"] = share * parameters["initial_lr"]
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1
                tokens += sum(group.tokens_BT.numel() for group in groups)
                seconds = before + time.monotonic() - clock
                values = {"loss": loss, "lr": share * config.lr, "grad_norm": norm, "clip": clip, "seconds": seconds}
                write([Record(kind="train", name="loss", values=values), *rows])
                show(step, f"loss {loss:.4f}")
                last = step == config.steps
                measure(lambda every: last or (every > 0 and step % every == 0))  # noqa: B023
                if last or stopped() or (config.checkpoint_every and step % config.checkpoint_every == 0):
                    save()
                if stopped() and not last:
                    raise Interrupted(step)
        unfreeze(model)
        return model


def check(spec: Spec, config: TrainConfig, device: torch.device | str = "cpu") -> None:
    """Refuse what cannot be trained before anything is written."""
    if config.backend == "fla":
        resolve("fla", torch.device(device), torch.bfloat16)
    LM(spec, device="meta", backend=config.backend)
    for item in config.freezes:
        select_layers(spec.layers, item.families)


def _begin(run: Path, spec: Spec, settings: dict[str, Any], branch: Path | None) -> Checkpoint | None:
    """Make or check a run's files; where to go on from, if anywhere."""
    rows = run / "records.jsonl"
    if (run / "config.json").exists():
        check_settings(run, settings)
        found = checkpoints(run)
        start = Checkpoint.read(found[-1]) if found else Checkpoint.read(branch) if branch else None
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


def backward(model: LM, groups: Sequence[Group], config: TrainConfig) -> tuple[list[Record], float]:
    """Gradients of the mean loss over all targets of an update, a group at a time; records of the groups, the loss."""
    total = sum(int((group.targets_BT != IGNORE).sum()) for group in groups)
    device = groups[0].tokens_BT.device
    rows, losses = [], []
    for group in groups:
        with autocast(device, config.precision):
            scores = score_tokens(model, group.tokens_BT, group.targets_BT)
            weight_N = _weights(model, group, scores, config)
        loss = (scores.loss_N if weight_N is None else weight_N * scores.loss_N).sum() / total
        loss.backward()
        losses.append(loss.detach())
        if group.axes:
            values = {"loss": scores.loss_N.mean().item(), "accuracy": scores.correct_N.float().mean().item()}
            rows.append(Record(kind="train", name="gap_loss", values=values, axes=group.axes))
    return rows, torch.stack(losses).sum().item()


def _weights(model: LM, group: Group, scores: Scores, config: TrainConfig) -> Tensor | None:
    """LongCE's weight of every target (001, 5.2); None: all weigh the same."""
    if config.objective == "ce":
        return None
    tokens, targets = group.tokens_BT, group.targets_BT
    short_BT = short_losses(model, tokens, targets, K=config.longce_context, d=config.longce_stride)
    return longce_weights(scores.loss_N, short_BT[targets != IGNORE])


def clip_gradients(model: LM, largest: float, recorded: float | None) -> tuple[float, float]:
    """Scale gradients so that their norm is at most `largest`, or by a recorded coefficient; (norm, coefficient)."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients).item()
    clip = recorded if recorded is not None else min(1.0, largest / (norm + 1e-6)) if largest else 1.0
    if clip != 1:
        torch._foreach_mul_(gradients, clip)
    return norm, clip


def _recorded_clips(config: TrainConfig) -> dict[int, float] | None:
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


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """bf16 matrix products over fp32 weights: on a GPU unless told otherwise, on the CPU when asked."""
    enabled = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def device_name(device: torch.device | str) -> str:
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _on(group: Group, device: torch.device | str) -> Group:
    def move(x: Tensor) -> Tensor:
        return x.to(device, non_blocking=True)

    return dataclasses.replace(group, tokens_BT=move(group.tokens_BT), targets_BT=move(group.targets_BT))


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask for a stop after the current update; a second one ends the process."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handle(number, frame):
        if asked.is_set():
            signal.default_int_handler(number, frame)
        asked.set()

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
