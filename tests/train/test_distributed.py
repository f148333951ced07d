"""Two processes against one: gradients of every mixer, runs whole, begun or ended alone, killed; what is exchanged."""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from contract.configs import disturb
from contract.tools import error
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait import records
from plait.data import Group
from plait.data.spaced_retrieval import SpacedRetrieval
from plait.files import claim
from plait.model.lm import LM
from plait.probes import retrieval_records
from plait.spec import Spec
from plait.train import loop
from plait.train.checkpoint import checkpoints
from plait.train.config import TrainConfig
from plait.train.distributed import ALONE, World, join, whole
from plait.train.held_out import held_out
from plait.train.loop import Interrupted, Measure, stop_signals, train
from plait.windows import short_losses

TASK = SpacedRetrieval(gaps=(2, 9, 4), batch_size=5, eval_pairs=10)
SPEC = Spec.from_layout("gdn nope", vocab_size=12, d_model=16, num_layers=2, num_heads=2, d_ff=24)
CONFIG = TrainConfig(steps=6, lr=1e-2, warmup=2, checkpoint_every=2)
LONGCE: dict[str, Any] = {"objective": "longce", "longce_context": 4, "longce_stride": 3}
EVERY = Spec.from_layout(
    "gdn kda gla mamba2[head_dim=8] lightning full swa[window=5] heads(3:gdn, 1:nope) mix(swa[window=5] + gla)",
    vocab_size=12,
    d_model=16,
    num_layers=9,
    num_heads=4,
    num_kv_heads=2,
    d_ff=25,
)
KINDS = ("ddp", "fsdp")


class Documents:
    """Rows of packed documents: rank 0 has none that LongCE has a window for, rank 1 has them all."""

    def batch(self, step: int) -> list[Group]:
        return self.rows(step, 0, 1)

    def rows(self, step: int, rank: int, world: int) -> list[Group]:
        tokens_BT = torch.randint(12, (4, 33), generator=torch.Generator().manual_seed(step))
        offsets = torch.tensor([*range(0, 64, 4), 64, 81, 96, 128])
        group = Group(tokens_BT[:, :-1], tokens_BT[:, 1:], cu_seqlens=offsets)
        return [list(group.split(4 // world))[rank]]


class SignalAt:
    """Ctrl-C, or kill -9, for one of the ranks while it makes a batch."""

    def __init__(self, step: int, rank: int, number: signal.Signals):
        self.step, self.rank, self.number = step, rank, number

    def __getattr__(self, name: str) -> Any:
        return getattr(TASK, name)

    def batch(self, step: int) -> list[Group]:
        if step == self.step and self.rank in (0, int(os.environ.get("RANK", "0"))):
            os.kill(os.getpid(), self.number)
        return TASK.batch(step)


# What is computed alone and together

GRADIENTS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "whole": (TASK, 1, {}),
    "pieces": (TASK, 2, {"micro_batch": 1, "z_loss": 0.1, "recompute": True}),
    "longce": (TASK, 1, {**LONGCE, "micro_batch": 2}),
    "longce of documents": (Documents(), 1, LONGCE),
    "bf16": (TASK, 1, {"precision": "bf16"}),
    "frozen": (TASK, 2, {"freeze": ("recurrent:0-1",), "micro_batch": 2}),
}
"""task, batches, config"""
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {"clip": 0.5},
    "muon": {"optimizer": "muon", "micro_batch": 2},
    "longce": {**LONGCE, "micro_batch": 1},
    "frozen": {"freeze": ("recurrent:0-4",), "micro_batch": 1},
}
ROUTES = {
    "ddp": {"adamw": "2", "muon": "21", "longce": "12", "frozen": "12"},
    "fsdp": {"adamw": "21", "muon": "2", "longce": "12", "frozen": "21"},
}
"""on two processes; begun on two and ended on one; the other way round"""


def gradients(name: str, world: World) -> dict[str, torch.Tensor]:
    """Whole, of some batches one after another on one model; losses and norms."""
    task, steps, fields = GRADIENTS[name]
    config = dataclasses.replace(CONFIG, **fields)
    model = LM(EVERY, seed=3)
    disturb(model, 3)
    if config.precision != "bf16":
        model = model.double()
    if config.recompute:
        model.recompute = functools.partial(loop.recompute, use_reentrant=False)
    world.shard(model)
    assert all(isinstance(p, DTensor) == world.sharded for p in model.parameters())
    found = {}
    for step in range(steps):
        loop.freeze(model, config, step)
        rows, loss = loop.backward(model, world.batch(task, step), config, world)
        norm, _ = loop.clip_gradients(model, 0.0, None)
        found[f"{step}.numbers"] = torch.tensor([loss, norm, *(x for row in rows for x in row.values.values())])
        for key, p in model.named_parameters():
            if p.grad is not None:
                found[f"{step}.{key}"] = whole(p.grad)
                p.grad = None
    return found


class Exchanges(TorchDispatchMode):
    """Counts collective calls."""

    def __init__(self):
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))


def exchanges(micro_batch: int, world: World) -> dict[str, int]:
    """Of one update after another."""
    model, config = LM(SPEC), dataclasses.replace(CONFIG, micro_batch=micro_batch)
    world.shard(model)
    for _ in range(2):
        with Exchanges() as seen:
            loop.backward(model, world.batch(TASK, 0), config, world)
    return dict(seen.count)


def run(path: Path, fields: dict[str, Any], *, task: Any = TASK) -> LM:
    config = dataclasses.replace(CONFIG, **fields)
    settings = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    measures = [
        Measure(4, lambda model: held_out(model, TASK, rows=5)),
        Measure(0, lambda model: retrieval_records(model, TASK, (2,), pairs=2)),
    ]
    return train(path, SPEC, task, config, settings=settings, measures=measures, progress=False)


def begin(path: Path, fields: dict[str, Any], rank: int) -> None:
    with pytest.raises(Interrupted, match="after update 3"):
        run(path, fields, task=SignalAt(2, rank, signal.SIGINT))


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except (Exception, SystemExit) as caught:
        return f"{type(caught).__name__}: {caught}"
    return "done"


def together(rank: int, folder: Path, part: Callable[[Path], dict[str, Any]]) -> None:
    """One of two processes, as torchrun starts them."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    store = f"file://{folder}/{part.__name__}.rendezvous"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        torch.save(part(folder), folder / f"{part.__name__}-{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def killed(folder: Path) -> dict[str, Any]:
    run(folder / "killed", {"parallel": "fsdp", **RUNS["muon"]}, task=SignalAt(4, 1, signal.SIGKILL))
    return {}


def survivors(folder: Path) -> dict[str, Any]:
    loop.short_losses = functools.partial(short_losses, at_once=20)
    found: dict[str, Any] = {}
    for kind, routes in ROUTES.items():
        world = join(kind, 0, "cpu")
        found |= {f"{kind} {name}": gradients(name, world) for name in GRADIENTS}
        found |= {f"{kind} exchanges {rows}": exchanges(rows, world) for rows in (0, 1)}
        for name, route in routes.items():
            path, fields = folder / f"{kind} {name}", {"parallel": kind, **RUNS[name]}
            begin(path, fields, rank=1) if route == "21" else run(path, fields)
    run(folder / "killed", {"parallel": "fsdp", **RUNS["muon"]})
    found["taken"] = outcome(lambda: run(folder / "taken", {}))
    found["small"] = outcome(lambda: run(folder / "small", {}, task=SpacedRetrieval(gaps=(2,), batch_size=1)))
    return found


def start(part: Callable[[Path], dict[str, Any]], folder: Path) -> None:
    multiprocessing.set_forkserver_preload(["plait.train.loop", "plait.probes", "hypothesis.strategies", "pytest"])
    mp.start_processes(together, (folder, part), nprocs=2, start_method="forkserver")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of all runs, alone and together."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        start(killed, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "short_losses", functools.partial(short_losses, at_once=20))
        torch.save({name: gradients(name, ALONE) for name in GRADIENTS}, folder / "alone.pt")
        for name, fields in RUNS.items():
            run(folder / name, fields)
        paths = {folder / f"{kind} {name}": (RUNS[name], ROUTES[kind][name]) for kind in KINDS for name in RUNS}
        for path, (fields, route) in paths.items():
            if route == "12":
                begin(path, fields, rank=0)
        with claim(folder / "taken"):
            start(survivors, folder)
        for path, (fields, route) in paths.items():
            if route == "21":
                run(path, fields)
    return folder


@pytest.fixture(scope="module")
def found(folder) -> list[dict[str, Any]]:
    """Of one process, of rank 0, of rank 1."""
    return [torch.load(folder / f"{name}.pt") for name in ("alone", "survivors-0", "survivors-1")]


def rows(path: Path) -> list[tuple[int | None, str, dict[str, Any], dict[str, Any]]]:
    """All records of a run, but for the clock."""
    found = records.read(path / "records.jsonl")
    return [
        (row.step, row.name, dict(row.axes), {key: x for key, x in row.values.items() if key != "seconds"})
        for row in found
    ]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    last = checkpoints(path)[-1]
    assert last.name == "step-00000006"
    return load_file(last / "model.safetensors") | load_file(last / "trainer.safetensors")


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_mixer_are_those_of_one_process(found, kind, name):
    want, *got = found[0][name], found[1][f"{kind} {name}"], found[2][f"{kind} {name}"]
    assert got[0].keys() == got[1].keys() == want.keys()
    assert {key.split(".", 1)[1] for key in want} >= {key for key, _ in LM(EVERY, device="meta").named_parameters()}
    for key, x in want.items():
        assert got[0][key].equal(got[1][key]), key
        assert error(got[0][key], x) < (2e-2 if name == "bf16" else 1e-10), key
        assert x.dtype == got[0][key].dtype


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_runs_are_those_of_one_process(folder, kind, name):
    """To the rounding of sums in another order: whole runs, and runs that go on with another number of processes."""
    path, alone = folder / f"{kind} {name}", folder / name
    got, want = rows(path), rows(alone)
    assert [row[:3] for row in got] == [row[:3] for row in want]
    for a, b in zip(got, want, strict=True):
        assert a[3] == pytest.approx(b[3], rel=1e-4, abs=1e-5), a[:3]
    a, b = tensors(path), tensors(alone)
    assert a.keys() == b.keys()
    for key in a:
        assert error(a[key], b[key]) < 1e-3, key


def test_a_killed_run_goes_on_exactly(folder):
    assert {path.name for path in checkpoints(folder / "killed")} >= {"step-00000004"}
    assert rows(folder / "killed") == rows(folder / "fsdp muon")
    a, b = tensors(folder / "killed"), tensors(folder / "fsdp muon")
    assert a.keys() == b.keys() and all(a[key].equal(b[key]) for key in a)


def test_frozen_blocks_stay_on_every_rank(folder):
    """FSDP keeps two copies of what a parameter is told: this one must reach both."""
    start = LM(SPEC, seed=CONFIG.seed).state_dict()
    for kind in KINDS:
        early = load_file(folder / f"{kind} frozen" / "checkpoints" / "step-00000002" / "model.safetensors")
        for name, value in early.items():
            assert value.equal(start[name]) == name.startswith("layers.0."), (kind, name)


def test_accumulation_exchanges_gradients_once(found):
    """Under FSDP too, unit by unit; what is gathered for every piece are parameters."""
    for rank in (1, 2):
        whole, pieces = (found[rank][f"ddp exchanges {rows}"] for rows in (0, 1))
        assert whole == pieces == {"allreduce_": 3}  # counts, gradients, losses
        whole, pieces = (found[rank][f"fsdp exchanges {rows}"] for rows in (0, 1))
        units = SPEC.num_layers + 1
        assert whole["_reduce_scatter_base_"] == pieces["_reduce_scatter_base_"] == units
        assert whole["allreduce_"] == pieces["allreduce_"] == 3
        assert pieces["_allgather_base_"] > whole["_allgather_base_"]


def test_what_rank_0_cannot_do_ends_the_others(found):
    assert "another process is using it" in found[1]["taken"] and found[1]["taken"].startswith("ValueError: run ")
    assert found[2]["taken"] == "SystemExit: 2"


def test_more_processes_than_rows(folder, found):
    for rank in (1, 2):
        assert found[rank]["small"].startswith("ValueError: batch_size = 1; 2 processes train, and each needs a row")
    assert not (folder / "small").exists()


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_command_under_torchrun(tmp_path, kind, device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    command = ["plait", "train", "--runs", str(tmp_path), "--layout", "3*gdn nope", "--num-layers", "4"]
    command += ["--task", "spaced-retrieval", "--gaps", "4,20", "--batch-size", "7", "--steps", "8", "--warmup", "2"]
    command += ["--optimizer", "muon", "--micro-batch", "2", "--eval-rows", "20", "--device", device]
    command += ["--precision", "fp32", "--checkpoint-every", "3"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    for start, options in (([], ["--name", "alone"]), (torchrun, ["--name", "together", "--parallel", kind])):
        subprocess.run([sys.executable, "-m", *start, *command, *options], check=True, capture_output=True)
    losses = [
        [(row.step, row.name, row.values["loss"]) for row in records.read(tmp_path / name / "records.jsonl")]
        for name in ("alone", "together")
    ]
    assert len(losses[0]) > 20
    for a, b in zip(*losses, strict=True):
        assert a[:2] == b[:2] and a[2] == pytest.approx(b[2], rel=1e-3 if device == "cpu" else 1e-2)  # Muon in bf16


def test_a_second_sigterm_leaves_time_to_save():
    """Under Slurm both it and torchrun send one; a second Ctrl-C means it."""
    with stop_signals() as stopped:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_sharing_needs_others(tmp_path):
    with pytest.raises(ValueError, match="parallel = fsdp; a single process runs: start several with torchrun"):
        run(tmp_path / "x", {"parallel": "fsdp"})
    assert not (tmp_path / "x").exists()
