"""What a training run would do: `plait train --dry-run`. No torch, but in plan_run, which looks at the data and files.

FLOPs are those of plait.cost: backward is twice forward; recomputed layers and what freezing saves are not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.config import GATED, Layer, Softmax, leaves, select_layers
from plait.cost import cost, layer_flops, layer_params, mixer_params, mixing_flops, total_params
from plait.spec import Spec
from plait.terminal import console
from plait.train.config import TrainConfig
from plait.train.schedule import Schedule, draw
from plait.train.settings import RunSettings

if TYPE_CHECKING:
    import torch

    from plait.data import Task

KEPT, CHUNK = 2**27, 8192
"""plait.scoring's: logits that are kept for a gradient on a CPU, and the positions at a time of those that are not"""
SAMPLES = 32
"""batches that the size of an update is averaged over, where it varies"""
BUCKET = 2**25
"""plait.train.distributed's: numbers of gradients that are added up at a time"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Rows of one length that go through the model together."""

    rows: int
    length: int
    targets: int
    """positions with a loss"""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one process at the fullest update. Not counted: what an operation needs while it runs, held-out
    measurements, and what the device's allocator keeps."""

    weights: int
    """fp32"""
    gradients: int
    """fp32, of the update with the most trained parameters"""
    optimizer: int
    """fp32: two numbers a parameter for AdamW, one for a matrix under Muon"""
    casts: int
    """bf16 copies of matrices under autocast"""
    activations: int
    """a rough estimate, to a factor of about 2, for the torch backend; see activation_bytes"""
    exchange: int = 0
    """fp32, of what processes exchange: gradients that are added up; where the model is in parts, whole parameters and
    gradients of embedding, last norm and head, and of the layer at work, and the parameters of the next one"""

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class Held:
    """A freeze, spelled out."""

    text: str
    """as it was asked for"""
    scope: str
    layers: tuple[int, ...]
    params: int
    first: int
    """update, from 1"""
    last: int | None
    """None: to the end"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    layout: str
    num_layers: int
    d_model: int
    vocab_size: int
    params: int
    trainable: int
    """at the first update that is still to come"""
    done: int
    """updates made before: of a run that goes on, or of what it branches from"""
    steps: int
    rows: float
    """an update; an average where `varies`"""
    lengths: tuple[int, ...]
    """tokens of a row"""
    varies: bool
    """updates differ in their tokens: numbers that depend on them are averages"""
    tokens_per_update: float
    tokens: float
    """from update `done` + 1 to the last"""
    flops_per_token: float
    """forward and backward"""
    flops: float
    """of these tokens"""
    piece: Shape
    """what the estimate of activations is for: the largest piece that goes through the model at a time"""
    bf16: bool
    recompute: bool
    compilations: int
    """with compile: kinds of layers times shapes of pieces"""
    processes: int
    sharded: bool
    """each process has a part of the model (FSDP)"""
    memory: Memory
    """of each process"""
    checkpoints: int
    """that are written"""
    checkpoints_kept: int
    checkpoint_bytes: int
    """of the last: weights and the optimizer's state, fp32"""
    freezes: tuple[Held, ...]
    schedule: str
    rates: Schedule
    peaks: dict[str, float]
    """learning rate by optimizer"""

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["memory"]["total"] = self.memory.total
        return data


def plan(
    spec: Spec,
    config: TrainConfig,
    batches: Sequence[Sequence[Shape]],
    *,
    done: int = 0,
    fresh: bool = True,
    bf16: bool = False,
    kept: int = KEPT,
    processes: int = 1,
    sharded: bool = False,
) -> Plan:
    """What config.steps - done updates come to.

    batches: groups of one or more updates, as the data has them; all updates are taken to be like these on average.
    fresh: the run begins with new weights, and so with a checkpoint before its first update.
    bf16: under autocast. kept: plait.scoring.most_kept of the device.
    processes: that share the rows of every batch, and, if `sharded`, weights, gradients and the optimizer's state.
    """
    rates = config.rates
    left, count = max(config.steps - done, 0), len(batches)
    groups = [group for batch in batches for group in batch]
    tokens = sum(group.rows * group.length for group in groups) / count
    flops = sum(group_flops(spec, config, group) for group in groups) / count
    pieces = [piece for group in groups for piece in _pieces(config, group, processes)]
    activations = partial(activation_bytes, spec, bf16=bf16, recompute=config.recompute, kept=kept)
    piece = max(pieces, key=activations)

    changes = {0, done, *(x for f in config.freezes for x in (f.start, f.stop) if x and x < config.steps)}
    trained = {step: list(_trained(spec, config, step)) for step in changes}
    ever = {part for step in changes for part in trained[step]}
    optimizer = sum(_state_bytes(config, part) for part in ever)
    shares = processes if sharded else 1
    cut = any(0 < config.micro_batch < -(-group.rows // processes) for group in groups)
    summed = len(groups) > count or cut  # gradients, over pieces before they are exchanged, each process its own
    gradients = 4 * max(sum(part.params for part in parts) for parts in trained.values())
    memory = Memory(
        weights=4 * total_params(spec) // shares,
        gradients=gradients if summed else gradients // shares,
        optimizer=optimizer // shares,
        casts=2 * sum(part.matrices for part in _parts(spec)) if bf16 else 0,
        activations=activations(piece),
        exchange=_exchanged(spec, sharded) if processes > 1 else 0,
    )
    every = config.checkpoint_every
    regular = range(every, config.steps, every) if every else ()
    saved = {step for step in (*regular, *config.checkpoint_at, config.steps) if done < step <= config.steps}
    written = len(saved) + fresh
    return Plan(
        layout=_layout(spec),
        num_layers=spec.num_layers,
        d_model=spec.d_model,
        vocab_size=spec.vocab_size,
        params=total_params(spec),
        trainable=sum(part.params for part in trained[done]),
        done=done,
        steps=config.steps,
        rows=sum(group.rows for group in groups) / count,
        lengths=tuple(sorted({group.length for group in groups})),
        varies=len({sum(group.rows * group.length for group in batch) for batch in batches}) > 1,
        tokens_per_update=tokens,
        tokens=tokens * left,
        flops_per_token=flops / tokens,
        flops=flops * left,
        piece=piece,
        bf16=bf16,
        recompute=config.recompute,
        compilations=len(set(spec.layers)) * len({(p.rows, p.length) for p in pieces}) if config.compile else 0,
        processes=processes,
        sharded=sharded,
        memory=memory,
        checkpoints=written,
        checkpoints_kept=min(written, config.keep + 1) if config.keep else written,
        checkpoint_bytes=4 * total_params(spec) + optimizer,
        freezes=tuple(_held(spec, config)),
        schedule=config.schedule,
        rates=rates,
        peaks={"Muon": config.muon_lr, "AdamW": config.lr} if config.optimizer == "muon" else {"AdamW": config.lr},
    )


def _pieces(config: TrainConfig, group: Shape, processes: int) -> Iterator[Shape]:
    """What goes through the model of one process at a time, each kind once."""
    own = -(-group.rows // processes)
    most = min(own, config.micro_batch or own)
    for rows in filter(None, (most, own % most)):
        yield dataclasses.replace(group, rows=rows, targets=group.targets * rows // group.rows)


def _exchanged(spec: Spec, sharded: bool) -> int:
    blocks = [layer_params(layer, spec.d_model) for layer in spec.layers]
    outside = total_params(spec) - sum(blocks)
    return 8 * outside + 12 * max(blocks) if sharded else 4 * min(BUCKET, total_params(spec))


def plan_run(
    run: Path,
    settings: RunSettings,
    spec: Spec,
    task: Task,
    *,
    init: Path | None,
    device: torch.device | str,
    processes: int = 1,
) -> Plan:
    """The plan of a run directory, new or begun, with its data at hand; nothing is written.

    Raises ValueError for all that training refuses before its first update.
    """
    import torch

    from plait.data import IGNORE
    from plait.scoring import most_kept
    from plait.train import loop
    from plait.train.checkpoint import Checkpoint, check_settings, find_checkpoint, last_whole
    from plait.train.distributed import shards

    config, branch = settings.train, find_checkpoint(settings.branch) if settings.branch else None
    loop.check(spec, config, device, init)
    loop.recorded_clips(config)
    start = Checkpoint.read(branch) if branch else None
    if (run / "config.json").exists():
        check_settings(run, settings.to_json())
        start = last_whole(run) or start
    elif start and Spec.load(start.path / "spec.json") != spec:
        raise ValueError(f"branch: {start.path} holds another model than the one asked for")
    done = start.step if start else 0
    batches = []
    for step in range(SAMPLES):
        found = task.batch(config.first_batch + done + step)
        if (rows := sum(len(group.tokens_BT) for group in found)) < processes:
            raise ValueError(f"batch_size = {rows}; {processes} processes train, and each needs a row of every batch")
        shapes = [(*group.tokens_BT.shape, int((group.targets_BT != IGNORE).sum())) for group in found]
        batches.append([Shape(rows=rows, length=length, targets=targets) for rows, length, targets in shapes])
        if not any(group.axes for group in found) or done + step + 1 >= config.steps:
            break  # rows of one kind: all batches are alike
    autocast = loop.in_bf16(torch.device(device), config.precision)
    sharded = shards(config.parallel, processes, total_params(spec))
    begun = {"done": done, "fresh": start is None}
    most = most_kept(torch.device(device))
    return plan(spec, config, batches, **begun, bf16=autocast, kept=most, processes=processes, sharded=sharded)


@dataclass(frozen=True)
class Part:
    """What freezing holds or leaves as a whole."""

    layer: int | None
    """None: embedding, head, last norm"""
    mixer: bool
    params: int
    matrices: int
    """of params, weights of linear maps within blocks"""


def _parts(spec: Spec) -> Iterator[Part]:
    blocks = 0
    for i, layer in enumerate(spec.layers):
        mixer, whole = mixer_params(layer.mixer, spec.d_model), layer_params(layer, spec.d_model)
        yield Part(i, True, mixer, mixer_matrices(layer, spec.d_model))
        yield Part(i, False, whole - mixer, mlp_matrices(layer, spec.d_model))
        blocks += whole
    yield Part(None, False, total_params(spec) - blocks, 0)


def mlp_matrices(layer: Layer, d_model: int) -> int:
    return (3 if layer.mlp in GATED else 2) * d_model * layer.d_ff


def mixer_matrices(layer: Layer, d_model: int) -> int:
    """Entries of the matrices of a layer's mixer: a token meets each in one multiply-add."""
    bare = dataclasses.replace(layer, d_ff=0)
    return round((layer_flops(bare, d_model, 1) - mixing_flops(layer.mixer, 1)) / 2)


def _trained(spec: Spec, config: TrainConfig, step: int) -> Iterator[Part]:
    """Parts that update number `step`, from 0, changes."""
    held = [(item.scope, select_layers(spec.layers, item.families)) for item in config.freezes if item.holds(step)]
    for part in _parts(spec):
        if not any(part.layer in layers and (scope == "block" or part.mixer) for scope, layers in held):
            yield part


def _state_bytes(config: TrainConfig, part: Part) -> int:
    """AdamW keeps two numbers a parameter, Muon one."""
    return 8 * part.params - (4 * part.matrices if config.optimizer == "muon" else 0)


def _held(spec: Spec, config: TrainConfig) -> Iterator[Held]:
    for text, item in zip(config.freeze, config.freezes, strict=True):
        layers = select_layers(spec.layers, item.families)
        block = item.scope == "block"
        params = sum(part.params for part in _parts(spec) if part.layer in layers and (block or part.mixer))
        yield Held(text=text, scope=item.scope, layers=layers, params=params, first=item.start + 1, last=item.stop)


def group_flops(spec: Spec, config: TrainConfig, group: Shape) -> float:
    """Forward and backward; with LongCE also its short passes, forward alone."""
    flops = 3 * cost(spec, group.length).flops_per_token * group.rows * group.length
    K, d = config.longce_context, config.longce_stride
    if config.objective == "longce" and group.length >= K:
        passes, length = -(-(group.length + 1 - K) // d), min(K + d - 1, group.length)
        flops += cost(spec, length).flops_per_token * group.rows * passes * length
    return flops


def activation_bytes(spec: Spec, piece: Shape, *, bf16: bool, recompute: bool, kept: int = KEPT) -> int:
    """About what forward keeps for backward, and the logits.

    A token keeps: of a norm's input and output and the residual stream, 16 bytes a channel for each norm; of an MLP,
    the outputs of its matrices, of its activation and their product; of softmax attention, 1.5 numbers (with a window
    2.5) for every channel of its projections; of a recurrence, whose chunks are in fp32, 16 bytes. Fitted to models of
    256 channels. Of a logit, one number. recompute: of all blocks but one, their input alone.
    kept: plait.scoring.most_kept of the device.
    """
    number = 2 if bf16 else 4
    blocks = [_block_bytes(layer, spec.d_model, number) for layer in spec.layers]
    each = max(blocks) + 4 * spec.d_model * len(blocks) if recompute else sum(blocks)
    whole = piece.targets * spec.vocab_size <= (KEPT if recompute else kept)
    positions = piece.targets if whole else min(piece.targets, CHUNK)
    return round(piece.rows * piece.length * each + number * positions * spec.vocab_size)


def _block_bytes(layer: Layer, d: int, number: int) -> float:
    """Of one token."""
    parts = list(leaves(layer.mixer))
    windows = any(isinstance(part, Softmax) and part.window_size for part in parts)
    each = 16 if any(part.recurrent for part in parts) else (2.5 if windows else 1.5) * number
    mlp = 4 / 3 * mlp_matrices(layer, d) / d * number
    return 16 * d * (2 if layer.d_ff else 1) + mlp + each * mixer_matrices(layer, d) / d


def _layout(spec: Spec) -> str:
    try:
        return spec.layout
    except ValueError:
        return "layers of its own"


def show_plan(plan: Plan, title: str) -> None:
    """Print a plan for people."""
    console().print(render(plan, title), markup=False, soft_wrap=True)


def render(plan: Plan, title: str) -> str:
    about = "about " if plan.varies else ""
    left, first = plan.steps - plan.done, plan.done + 1
    lengths = [str(length) for length in plan.lengths]
    lengths = lengths if len(lengths) < 6 else [*lengths[:4], "...", lengths[-1]]
    frozen = plan.params - plan.trainable
    updates = f"{plan.steps:,}" if not plan.done else f"{first:,} to {plan.steps:,}; {plan.done:,} are done"
    lines = [
        f"{title}: a dry run; nothing is written",
        "",
        f"model        {plan.layout}",
        f"             {plan.num_layers} layers, d_model {plan.d_model}, vocabulary {plan.vocab_size:,}",
        f"parameters   {plan.params:,}",
        f"             {plan.trainable:,} trained at update {first:,}" + (f", {frozen:,} frozen" if frozen else ""),
        *_freezes(plan),
        f"updates      {updates}" if left > 0 else f"updates      all {plan.steps:,} are done: nothing is left to do",
        f"             each of {plan.rows:g} rows of {' or '.join(lengths)} tokens",
        f"tokens       {about}{plan.tokens_per_update:,.0f} an update, {about}{plan.tokens:,.0f} in all",
        f"FLOPs        {_si(plan.flops_per_token)} a token, forward and backward (taken as twice forward);"
        f" {about}{_si(plan.flops)} in all",
        f"checkpoints  {plan.checkpoints}{_kept(plan)}; the last is {_size(plan.checkpoint_bytes)}:"
        " weights and optimizer",
        *_compiled(plan),
        "",
        *_memory(plan),
        "",
        *_chart(plan),
    ]
    return "\n".join(lines)


def _kept(plan: Plan) -> str:
    size = _size(plan.checkpoint_bytes * plan.checkpoints_kept)
    kept = f", of which {plan.checkpoints_kept} stay" if plan.checkpoints_kept < plan.checkpoints else ""
    return f"{kept}, up to {size} on disk"


def _compiled(plan: Plan) -> Iterator[str]:
    if plan.compilations:
        yield f"compile      {plan.compilations} times: each kind of layer for each length and number of rows"


def _freezes(plan: Plan) -> Iterator[str]:
    for item in plan.freezes:
        last = plan.steps if item.last is None else min(item.last, plan.steps)
        when = f"updates {item.first:,} to {last:,}" if item.first <= last else "after the last update: never"
        what = "blocks" if item.scope == "block" else "mixers"
        yield f"frozen       {item.text}: {item.params:,} parameters, {when}"
        yield f"             {what} of {_layers(item.layers)}"


def _layers(layers: Sequence[int]) -> str:
    """[0, 1, 2, 4] as "layers 0-2, 4"."""
    runs: list[list[int]] = []
    for i in layers:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    shown = shown if len(shown) < 9 else [*shown[:6], "...", shown[-1]]
    return f"layer{'s' if len(layers) != 1 else ''} {', '.join(shown) or '(none)'}"


def _memory(plan: Plan) -> Iterator[str]:
    memory, piece = plan.memory, plan.piece
    kind = "fp32; AdamW: two numbers a parameter"
    if "Muon" in plan.peaks:
        kind = "fp32; Muon: one number a parameter in matrices of blocks; AdamW: two"
    kept = "one layer, inputs of all, logits" if plan.recompute else "all layers and logits"
    rough = f"rough (half to twice): {kept}; {piece.rows} x {piece.length} tokens at once"
    exchange = "fp32: embedding and head whole, two layers, gradients" if plan.sharded else "fp32, gradients"
    rows = [
        ("weights", memory.weights, "fp32"),
        ("gradients", memory.gradients, "fp32, at the update with the most trained parameters"),
        ("optimizer", memory.optimizer, kind),
        ("bf16 copies", memory.casts, "of matrices, under autocast"),
        ("activations", memory.activations, rough),
        ("exchange", memory.exchange, exchange),
        ("in all", memory.total, "without what single operations need while they run"),
    ]
    share = f", each with 1/{plan.processes} of the model (fsdp)" if plan.sharded else " (ddp)"
    yield f"memory of each of {plan.processes} processes{share}" if plan.processes > 1 else "memory of one process"
    for name, value, note in rows:
        if value:
            yield f"  {name:12} {_size(value):>9}  {note}"


def _chart(plan: Plan) -> Iterator[str]:
    rates = plan.rates
    peak, end = plan.peaks["AdamW"], plan.peaks["AdamW"] * rates.share
    warmup = f"warmup to update {rates.warmup:,}" if rates.warmup else "no warmup"
    fall = f"{rates.shape} decay to {end:.3g} after update {plan.steps - rates.decay:,}" if rates.decay else "no decay"
    yield f"learning rate of AdamW ({plan.schedule}: {warmup}, {fall})"
    bars = [line[4:] for line in draw(rates, plan.steps).splitlines()[:-1]]
    labels = {0: f"{peak:.3g}", len(bars) // 2: f"{peak / 2:.3g}"}
    for i, bar in enumerate(bars):
        yield f"{labels.get(i, ''):>9} {'┤' if i in labels else '│'}{bar}".rstrip()
    yield f"{0:>9} └{'─' * 60}"
    yield f"{'':11}{'0':<30}{f'{plan.steps:,} updates':>30}"
    if "Muon" in plan.peaks:
        yield f"{'':11}Muon's has the same shape, with {plan.peaks['Muon']:.3g} at its peak"


def _si(value: float) -> str:
    return _scaled(value, 1000, ("", " K", " M", " G", " T", " P", " E"))


def _size(value: float) -> str:
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    """To three digits or four, with the unit it needs."""
    digits = 3 if base == 1000 else 4
    for unit in units[:-1]:
        if abs(value) < base - 0.5:
            return f"{value:.{digits}g}{unit}"
        value /= base
    return f"{value:,.{digits}g}{units[-1]}"
