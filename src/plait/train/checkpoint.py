"""Run directories and checkpoints.

runs/NAME/{config.json, spec.json, records.jsonl, checkpoints/step-00001234/}; a checkpoint is a model's directory plus
trainer.json and trainer.safetensors, the optimizer's state by parameter name. Nothing else needs saving: batches and
initial weights are functions of the seed and the step.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from plait import records
from plait.files import new_directory, read_json, write_json
from plait.model.foreign import copy_assets
from plait.model.io import write_model
from plait.model.lm import LM
from plait.model.tensors import read_tensors
from plait.train.distributed import ALONE, World, gathered, placed_like
from plait.train.settings import defaults


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    """updates done"""
    tokens: int
    seconds: float
    """time spent in training"""

    @staticmethod
    def read(path: Path) -> Checkpoint:
        data = read_json(path / "trainer.json")
        try:
            return Checkpoint(path, int(data["step"]), int(data["tokens"]), float(data["seconds"]))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path / 'trainer.json'}: it must hold step, tokens and seconds") from None


def save_checkpoint(
    run: Path,
    model: LM,
    optimizer: torch.optim.Optimizer,
    step: int,
    tokens: int,
    seconds: float,
    *,
    world: World = ALONE,
    assets: Path | None = None,
) -> Path:
    """Complete or absent; all ranks call it, rank 0 writes. assets: a directory whose tokenizer files go along. OSError
    where that fails, as on a full disk."""
    path = run / "checkpoints" / f"step-{step:08d}"
    states = {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    tensors, whole_model = gathered(states, keep=world.leads), model
    if world.sharded:
        weights = gathered(model.state_dict(), keep=world.leads)
        whole_model = LM(model.spec, device="meta")
        if world.leads:
            whole_model.assign(weights)

    def write() -> None:
        with new_directory(path) as directory:
            write_model(whole_model, directory)
            if assets is not None:
                copy_assets(assets, directory)
            save_file(tensors, directory / "trainer.safetensors")
            write_json(directory / "trainer.json", {"step": step, "tokens": tokens, "seconds": seconds})

    try:
        world.first(write)
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error})") from None
    return path


def load_optimizer(checkpoint: Checkpoint, model: LM, optimizer: torch.optim.Optimizer) -> None:
    """Put the saved state of every parameter back; those that were never updated have none."""
    parameters = dict(model.named_parameters())
    fused = any(group.get("fused") for group in optimizer.param_groups)  # these count updates where parameters are
    for full_name, value in read_tensors(checkpoint.path, "trainer").items():
        key, name = full_name.split(".", 1)
        if name not in parameters:
            raise ValueError(f"{checkpoint.path}: optimizer state of {name}, which this model does not have")
        parameter = parameters[name]
        if key == "step":
            optimizer.state[parameter][key] = value.to(parameter.device) if fused else value
        else:
            optimizer.state[parameter][key] = placed_like(value, parameter)


def checkpoints(run: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step-*") if (path / "trainer.json").exists())


def last_whole(run: Path) -> Checkpoint | None:
    """The latest checkpoint of a run that can be read; of later ones that cannot, standard error says why."""
    found = checkpoints(run)
    for path in reversed(found):
        try:
            checkpoint = Checkpoint.read(path)
            for name in {path / "trainer.safetensors", *path.glob("*.safetensors")}:
                with safe_open(name, "pt"):  # reads the header and compares it with the size
                    pass
            return checkpoint
        except (ValueError, OSError, SafetensorError) as error:
            print(f"{path}: damaged, left aside ({error})", file=sys.stderr)
    if found:
        raise ValueError(f"run {run}: none of its checkpoints can be read; train under another --name")
    return None


def prune(run: Path, keep: int) -> None:
    """Remove all checkpoints but the last `keep` and the one with the lowest held-out loss. keep 0: remove none."""
    found = checkpoints(run)
    if not keep or len(found) <= keep:
        return
    losses: dict[int, list[float]] = {}
    for row in records.read(run / "records.jsonl"):
        loss = row.values.get("loss")
        if row.kind == "eval" and row.step is not None and loss is not None:
            losses.setdefault(row.step, []).append(loss)
    known = [path for path in found if _step(path) in losses]
    best = min(known, key=lambda path: sum(losses[_step(path)]) / len(losses[_step(path)]), default=None)
    for path in found[:-keep]:
        if path != best:
            gone = path.with_name(f".{path.name}.old")  # never half a checkpoint under its name
            path.rename(gone)
            shutil.rmtree(gone)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def find_checkpoint(where: str | Path) -> Path:
    """A checkpoint directory: RUN (its latest), RUN@STEP, or the directory itself."""
    text = str(where)
    run, at, step = text.rpartition("@") if not Path(text).exists() else (text, "", "")
    path = Path(run or text)
    if (path / "model.safetensors").exists() or (path / "model.safetensors.index.json").exists():
        return path
    if not (path / "spec.json").exists():
        raise ValueError(f"{path}: no run or checkpoint there; give RUN, RUN@STEP or a checkpoint's directory")
    found = {_step(p): p for p in checkpoints(path)}
    if not found:
        raise ValueError(f"{path}: the run has no checkpoint yet")
    if not at:
        return found[max(found)]
    if not step.isdigit() or int(step) not in found:
        raise ValueError(f"{path}: no checkpoint at step {step!r}; it has {', '.join(map(str, sorted(found)))}")
    return found[int(step)]


def check_settings(run: Path, settings: dict[str, Any]) -> None:
    """A run continues only with the settings it began with; how processes share its work may change."""
    old, settings = defaults() | read_json(run / "config.json"), defaults() | settings
    keys = sorted((old.keys() | settings.keys()) - {"parallel"})
    differing = [key for key in keys if old.get(key) != settings.get(key)]
    if differing:
        shown = "; ".join(f"{key}: {old.get(key)!r} there, {settings.get(key)!r} now" for key in differing)
        raise ValueError(f"run {run}: it began with other settings ({shown}); use them again, or another --name")
