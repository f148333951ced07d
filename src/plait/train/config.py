"""What a training run is told. No torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plait.train.schedule import Schedule, constant, cosine, linear, wsd

SCOPES = ("block", "mixer")


@dataclass(frozen=True)
class Freeze:
    """Parameters held still for updates start + 1 to stop (None: to the end); they pass gradients all the same."""

    families: tuple[str, ...]
    """layout names (gdn, nope, ...), `recurrent` or `softmax`"""
    scope: Literal["block", "mixer"]
    """the whole block (mixer, MLP, norms) or its mixer alone"""
    start: int
    """updates completed before freezing; 0 freezes from the start"""
    stop: int | None

    PATTERN = re.compile(r"(?P<families>.+?)(\.(?P<scope>\w+))?:(?P<start>\d+)-(?P<stop>\d*)")

    @staticmethod
    def parse(text: str) -> Freeze:
        """FAMILY[+FAMILY...][.SCOPE]:START-[STOP], as `recurrent:0-250` or `gdn.mixer:175-`."""
        match = Freeze.PATTERN.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"freeze = {text!r}; write FAMILY[.SCOPE]:START-[STOP], as recurrent:0-250 or gdn.mixer:175-"
            )
        scope = match["scope"] or "block"
        start, stop = int(match["start"]), int(match["stop"]) if match["stop"] else None
        if scope not in SCOPES:
            raise ValueError(f"freeze = {text!r}: scope {scope!r}; it must be one of {', '.join(SCOPES)}")
        if stop is not None and stop <= start:
            raise ValueError(f"freeze = {text!r}: stop {stop}; it must be above start {start}")
        return Freeze(tuple(match["families"].split("+")), scope, start, stop)

    def holds(self, step: int) -> bool:
        """Is update number `step` (from 0) within the freeze?"""
        return self.start <= step and (self.stop is None or step < self.stop)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimization of one run.

    Args:
        steps: updates in all; the learning rate's schedule ends with them
        optimizer: adamw, or muon for the matrices of the blocks with AdamW for the rest
        lr: peak learning rate of AdamW
        muon_lr: peak learning rate of Muon
        muon_scale: of Muon's updates: original, sqrt(max(1, rows / columns)), for rates about 0.02; or match_rms_adamw,
            0.2 sqrt(max(rows, columns)), for rates as AdamW's
        schedule: of the learning rates after the warmup: cosine, linear, constant, or wsd (stable, then a decay)
        decay: last updates of wsd, over which it falls
        decay_shape: of wsd's fall: linear or cosine
        min_lr: learning rate of AdamW at the end of the fall; Muon's falls to the same share
        warmup: updates of linear warmup
        weight_decay: decay of matrices; norms, biases, decay parameters and embeddings take none
        beta1: first Adam coefficient
        beta2: second Adam coefficient
        clip: largest norm of the gradient; 0: no clipping
        spike: gradient norm, in medians of the last 100, above which an update is left out; 0: only if it or the loss
            is not finite
        max_skips: updates that may be left out in a row; one more, and training stops
        clip_from: run directory whose recorded clip coefficients are used instead of this run's own norm
        seed: of weights and data
        first_batch: number of the batch that the first update takes; a later stage goes on in the data
        objective: ce (cross-entropy), or longce, which weighs a token by what a long context does for it
        z_loss: weight of the squared log-sum-exp of the logits in the objective; recorded losses are without it
        longce_context: tokens that a token sees at the least in the short passes of longce
        longce_stride: tokens that one of these passes is for
        micro_batch: rows that go through the model at a time; 0: all of one length
        recompute: compute each layer again in the backward pass instead of keeping what it needs
        compile: torch.compile for each layer; every length, and every number of rows, compiles once, which takes up to
            a minute or two
        precision: auto is bf16 autocast on a GPU and fp32 on the CPU
        backend: what computes recurrences: torch, fla (flash-linear-attention, CUDA only), auto (fla where it is
            there), or naive (token by token, for checks)
        parallel: how several processes (torchrun) share the work: ddp, each has the whole model; fsdp, each has a part
            of it; auto: fsdp from a billion parameters
        freeze: what is held still and when, as recurrent:0-250 or gdn.mixer:175-,nope:0-100
        eval_every: updates between measurements of held-out data; 0: only at the end
        eval_rows: held-out rows of each gap, or windows of text, that are measured
        probe_every: updates between layer retrieval scores (spaced-retrieval); 0: never
        probe_pairs: prompt pairs a score is averaged over
        head_grad_norms: updates between records of the gradient's norm at each head's query projection; 0: never
        tensorboard: write every number to runs/NAME/tensorboard too (extra [track])
        checkpoint_every: updates between checkpoints; 0: only at the end
        checkpoint_at: further updates after which there is one, as 1,2,4,8
        keep: latest checkpoints that stay, besides the one with the lowest held-out loss; 0: all
    """

    steps: int = 1000
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3
    muon_lr: float = 0.02
    muon_scale: Literal["original", "match_rms_adamw"] = "original"
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    decay: int = 0
    decay_shape: Literal["linear", "cosine"] = "linear"
    min_lr: float = 1e-5
    warmup: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    spike: float = 0.0
    max_skips: int = 10
    clip_from: Path | None = None
    seed: int = 0
    first_batch: int = 0
    objective: Literal["ce", "longce"] = "ce"
    z_loss: float = 0.0
    longce_context: int = 4096
    longce_stride: int = 1024
    micro_batch: int = 0
    recompute: bool = False
    compile: bool = False
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    backend: Literal["naive", "torch", "fla", "auto"] = "torch"
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    freeze: tuple[str, ...] = ()
    eval_every: int = 100
    eval_rows: int = 200
    probe_every: int = 0
    probe_pairs: int = 100
    head_grad_norms: int = 0
    tensorboard: bool = False
    checkpoint_every: int = 100
    checkpoint_at: tuple[int, ...] = ()
    keep: int = 0

    def __post_init__(self):
        for name in ("steps", "eval_rows", "probe_pairs", "longce_context", "longce_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}; it must be at least 1")
        for name in (
            "warmup",
            "decay",
            "eval_every",
            "probe_every",
            "head_grad_norms",
            "checkpoint_every",
            "keep",
            "micro_batch",
            "max_skips",
            "min_lr",
            "weight_decay",
            "z_loss",
            "clip",
            "seed",
            "first_batch",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)}; it must be 0 or above")
        for name in ("lr", "muon_lr"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} = {getattr(self, name)}; it must be above 0")
        if not (self.spike == 0 or self.spike > 1):
            raise ValueError(f"spike = {self.spike}; it must be 0 or above 1")
        if self.schedule != "constant" and self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr}; it must be at most lr = {self.lr}")
        if (self.decay > 0) != (self.schedule == "wsd"):
            raise ValueError(f"decay = {self.decay}; it must be above 0 with schedule = wsd, and 0 with another")
        _ = self.freezes, self.rates

    @property
    def freezes(self) -> tuple[Freeze, ...]:
        return tuple(Freeze.parse(text) for text in self.freeze)

    @property
    def rates(self) -> Schedule:
        """Share of the peak learning rates at every update."""
        warmup, share = min(self.warmup, self.steps), self.min_lr / self.lr
        if self.schedule == "constant":
            return constant(self.steps, warmup=warmup)
        if self.schedule == "wsd":
            return wsd(self.steps, decay=self.decay, warmup=warmup, shape=self.decay_shape, share=share)
        return (linear if self.schedule == "linear" else cosine)(self.steps, warmup=warmup, share=share)
