"""Training in stages: each is a run of its own that starts from the weights of the one before. No torch.

What a stage sets is its own: a fresh optimizer and schedule, and the data where the stage before left off.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.fields import suggest
from plait.train.schedule import updates
from plait.train.settings import RunSettings

EARLY, FULL = "early", "full"
PARTS = ("data", "train", "extend")
"""of a run's settings, what a stage changes"""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What differs from a run's settings."""

    name: str
    train: dict[str, Any]
    """fields of TrainConfig"""
    data: dict[str, Any] = field(default_factory=dict)
    """fields of DataOptions"""
    extend: dict[str, Any] = field(default_factory=dict)
    """fields of ExtendOptions"""

    def apply(self, settings: RunSettings, *, init: str | None) -> RunSettings:
        parts = {name: dataclasses.replace(getattr(settings, name), **getattr(self, name)) for name in PARTS}
        return dataclasses.replace(settings, **parts, init=init)


LADDER = {
    "180M": (120e6, 1200e6, 23, 229, 229),
    "250M": (280e6, 2800e6, 53, 534, 534),
    "390M": (480e6, 4800e6, 92, 916, 916),
    "510M": (720e6, 7200e6, 137, 1373, 1373),
    "750M": (1070e6, 10650e6, 198, 2032, 2032),
    "1B": (1600e6, 16000e6, 305, 3052, 3052),
}
"""003, table 7: tokens of the two stages, warmups of the two, updates of the second's decay"""
LENGTH, EARLY_BATCH, FULL_BATCH = 16384, 16, 32
"""003, table 7"""


def bld(
    early: int,
    full: int,
    *,
    batch_size: int,
    early_batch_size: int | None = None,
    length: int | None = None,
    warmups: tuple[int, int] | None = None,
    decay: int | None = None,
    freeze: bool = True,
    first_batch: int = 0,
) -> tuple[Stage, Stage]:
    """Better Layer Division (003, section 4): `early` updates with the recurrent blocks frozen whole, then `full` with
    all of them, optimizer and schedule anew. freeze = False: its vanilla twin, with nothing frozen.

    early: AdamW, linear warmup of 5%, then 1e-4. full: Muon 0.02 on the matrices of blocks, AdamW 1e-3 on the rest,
    warmup of 10%, 80% constant, 10% cosine to 5%. Rows of the early stage are half of batch_size unless given, and its
    first batch is number first_batch of these.
    """
    rows = early_batch_size or max(1, batch_size // 2)
    warmups = warmups or (round(0.05 * early), round(0.1 * full))
    sizes = {} if length is None else {"length": length}
    first = {
        "optimizer": "adamw",
        "steps": early,
        "lr": 1e-4,
        "schedule": "constant",
        "warmup": warmups[0],
        "decay": 0,
        "min_lr": 0.0,
        "freeze": ("recurrent:0-",) if freeze else (),
    }
    second = {
        "optimizer": "muon",
        "steps": full,
        "lr": 1e-3,
        "muon_lr": 0.02,
        "schedule": "wsd",
        "warmup": warmups[1],
        "decay": max(1, round(0.1 * full)) if decay is None else decay,
        "decay_shape": "cosine",
        "min_lr": 0.05 * 1e-3,
        "freeze": (),
        "first_batch": -(-(first_batch + early) * rows // batch_size),
    }
    return (
        Stage(name=EARLY, train=first, data={**sizes, "batch_size": rows}),
        Stage(name=FULL, train=second, data={**sizes, "batch_size": batch_size}),
    )


LONG_BATCH = 16
"""001, table 2: 0.5M tokens"""
LONGER = {
    # 001, section 3.1 and table 2: AdamW without weight decay, 5B tokens of which 1B warm up, cosine to 0
    "001/cpt": Stage(
        name="cpt",
        data={"length": 32768, "batch_size": LONG_BATCH},
        train={
            "optimizer": "adamw",
            "steps": updates(5e9, LONG_BATCH * 32768),
            "lr": 1e-3,
            "schedule": "cosine",
            "warmup": updates(1e9, LONG_BATCH * 32768),
            "decay": 0,
            "min_lr": 0.0,
            "weight_decay": 0.0,
        },
        extend={"extend_theta": ("full=500000",)},
    ),
    # 000, appendix C and table 8: Muon, linear to 0 from where S5's rate ended. One rate is given, and it is of AdamW's
    # size: Muon's updates are scaled to match
    "000/32k": Stage(
        name="32k",
        data={"length": 32768, "batch_size": 32},
        train={
            "optimizer": "muon",
            "steps": 4769,
            "lr": 9.766e-5,
            "muon_lr": 9.766e-5,
            "muon_scale": "match_rms_adamw",
            "schedule": "linear",
            "warmup": 0,
            "decay": 0,
            "min_lr": 0.0,
            "weight_decay": 0.1,
            "clip": 1.0,
        },
        extend={"extend_theta": ("500000",)},
    ),
}
"""a trained model made longer: what the papers set; model (--init), data and objective are the user's"""


def find_stages(text: str, settings: RunSettings) -> tuple[Stage, ...]:
    """`003/SIZE/bld` and `003/SIZE/vanilla` as the paper has them; `bld:EARLY` and `vanilla:EARLY` for other sizes:
    EARLY updates and then settings.train.steps, by the paper's shares. `001/cpt` and `000/32k` make the model of
    settings.init longer."""
    if text in LONGER:
        if settings.init is None:
            raise ValueError(f"stages = {text}; it goes on with a trained model: give --init MODEL")
        return (LONGER[text],)
    first = settings.train.first_batch
    if match := re.fullmatch(r"(bld|vanilla):([1-9]\d*)", text):
        steps, rows = settings.train.steps, settings.data.batch_size
        return bld(int(match[2]), steps, batch_size=rows, freeze=match[1] == "bld", first_batch=first)
    names = {f"003/{size}/{kind}": (size, kind) for size in LADDER for kind in ("bld", "vanilla")}
    if text not in names:
        raise ValueError(f"stages = {text!r}; {suggest(text, [*LONGER, *names, 'bld:EARLY', 'vanilla:EARLY'])}")
    size, kind = names[text]
    early, full, *warmups, decay = LADDER[size]
    return bld(
        round(early / EARLY_BATCH / LENGTH),
        round(full / FULL_BATCH / LENGTH),
        batch_size=FULL_BATCH,
        early_batch_size=EARLY_BATCH,
        length=LENGTH,
        warmups=(int(warmups[0]), int(warmups[1])),
        decay=int(decay),
        freeze=kind == "bld",
        first_batch=first,
    )


def check_stages(text: str, stages: Sequence[Stage], settings: RunSettings) -> None:
    """Raises ValueError where an option was given that each stage sets to something else."""
    for part in PARTS:
        options = getattr(settings, part)
        for name in dict.fromkeys(name for stage in stages for name in getattr(stage, part)):
            given, default = getattr(options, name), type(options).__dataclass_fields__[name].default
            if given != default and all(getattr(stage, part).get(name, given) != given for stage in stages):
                values = " and ".join(str(getattr(stage, part)[name]) for stage in stages)
                raise ValueError(f"stages = {text}, {name} = {given}; these stages set it to {values}: leave it out")
