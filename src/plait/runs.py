"""Runs from settings: what `plait train` and `plait probe` do, as functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from plait import records
from plait.data import Task
from plait.data.spaced_retrieval import SpacedRetrieval
from plait.model import io
from plait.model.io import load
from plait.model.lm import LM
from plait.probes import retrieval_records
from plait.records import Record
from plait.spec import Spec
from plait.train.checkpoint import find_checkpoint
from plait.train.config import TrainConfig
from plait.train.held_out import held_out
from plait.train.loop import Measure, autocast, device_name, train
from plait.train.settings import DataOptions, RunSettings
from plait.train.stages import Stage


def train_run(run: Path, settings: RunSettings, *, device: str = "cpu", progress: bool = True) -> LM:
    """Train a run, or go on with it: held-out data and, where asked for, layer retrieval scores along the way."""
    config = settings.train
    task = settings.data.build(config.seed)

    def losses(model: LM) -> list[Record]:
        with autocast(torch.device(device), config.precision, keep=False):
            return held_out(model, task, rows=config.eval_rows)

    measures = [Measure(config.eval_every, losses)]
    if config.probe_every:
        assert isinstance(task, SpacedRetrieval)

        def scores(model: LM, task: SpacedRetrieval = task) -> list[Record]:
            return retrieval_records(model, task, task.gaps, pairs=config.probe_pairs)

        measures.append(Measure(config.probe_every, scores))
    init = None if settings.init is None else find_model(settings.init)
    return train(
        run,
        spec_of(settings, task, init),
        task,
        config,
        settings=settings.to_json(),
        measures=measures,
        branch=find_checkpoint(settings.branch) if settings.branch else None,
        init=init,
        assets=settings.data.tokenizer,
        device=device,
        progress=progress,
    )


def train_stages(
    run: Path, stages: Sequence[Stage], settings: RunSettings, *, device: str = "cpu", progress: bool = True
) -> LM:
    """Train a run in stages, each from the weights of the one before: RUN-STAGE, and the last in `run` itself. What was
    trained before is not trained again."""
    model, before = None, settings.init
    for stage in stages:
        last = stage is stages[-1]
        place = run if last else run.with_name(f"{run.name}-{stage.name}")
        model = train_run(place, stage.apply(settings, init=before), device=device, progress=progress)
        before = str(place)
    assert model is not None
    return model


def spec_of(settings: RunSettings, task: Task, init: Path | None) -> Spec:
    if settings.model is not None:
        return settings.extend.apply(settings.model.spec(task.vocab_size, task.length))
    assert init is not None
    spec = io.load_spec(init)
    if spec.vocab_size < task.vocab_size:
        raise ValueError(
            f"init: {init} has vocab_size = {spec.vocab_size}, the data {task.vocab_size}: it has another tokenizer"
        )
    spec = dataclasses.replace(spec, context_length=spec.context_length and max(spec.context_length, task.length))
    return settings.extend.apply(spec)


def find_model(where: str) -> Path:
    """The directory of a model: a run's latest checkpoint, RUN@STEP, or whatever plait.load takes."""
    if "@" in where or (Path(where) / "checkpoints").is_dir():
        return find_checkpoint(where)
    return io.find_model(where)


def last_measurements(run: Path) -> list[Record]:
    """What was measured after a run's last update."""
    rows = [row for row in records.read(run / "records.jsonl") if row.kind != "train"]
    last = max((row.step or 0 for row in rows), default=0)
    return [row for row in rows if row.step == last]


def probe_retrieval(
    where: str, gaps: Iterable[int], *, pairs: int, seed: int | None = None, device: str = "cpu"
) -> list[Record]:
    """Layer retrieval scores of a checkpoint, on keys its run never trained on (seed None: those of that run)."""
    path = find_checkpoint(where)
    run = path.parent.parent
    if seed is None:
        seed = RunSettings.load(run).train.seed if (run / "config.json").exists() else TrainConfig().seed
    gaps = tuple(gaps)
    task = DataOptions(task="spaced-retrieval", gaps=gaps).build(seed)
    assert isinstance(task, SpacedRetrieval)
    if pairs > task.eval_pairs or pairs < 1:
        raise ValueError(f"pairs = {pairs}; it must be from 1 to {task.eval_pairs}")
    model = load(path, device=device)
    origin = records.provenance(spec_hash=model.spec.hash, device=device_name(device))
    step = int(path.name.removeprefix("step-")) if path.name.startswith("step-") else None
    rows = retrieval_records(model, task, gaps, pairs=pairs, progress=True)
    return [dataclasses.replace(row, step=step, provenance=origin) for row in rows]
