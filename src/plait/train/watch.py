"""What is watched while a model trains: how busy the device is, and how much gradient each head gets.

Shapes: H query heads, K key size, D = d_model.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from plait.config import Heads, Leaf, family, leaves
from plait.config import Mixer as MixerConfig
from plait.cost import peak_flops
from plait.data import Group
from plait.mixers.base import Mixer
from plait.mixers.compose import Composition
from plait.model.lm import LM
from plait.records import Record
from plait.spec import Spec
from plait.train.config import TrainConfig
from plait.train.distributed import whole
from plait.train.plan import Shape, group_flops


class Watch:
    """MFU and memory of this process's updates, on CUDA."""

    def __init__(self, spec: Spec, config: TrainConfig, device: torch.device):
        self.device = device
        self.peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.flops = functools.cache(functools.partial(group_flops, spec, config))
        self.began = 0.0

    def start(self) -> None:
        """An update begins."""
        self.began = time.monotonic()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def values(self, groups: Sequence[Group]) -> dict[str, float]:
        """Of the update with these groups: `memory`, the bytes of tensors on the device at its height, and `mfu`, its
        share of the device's peak FLOP/s, where that is known."""
        found: dict[str, float] = {}
        if self.device.type == "cuda":
            found["memory"] = torch.cuda.max_memory_allocated(self.device)
        if self.peak is not None:
            sizes = [group.tokens_BT.shape for group in groups]
            flops = sum(self.flops(Shape(rows=rows, length=length, targets=0)) for rows, length in sizes if rows)
            found["mfu"] = flops / (time.monotonic() - self.began) / self.peak
        return found


def note(values: dict[str, float]) -> str:
    """For the progress line: `, 41% MFU, 12.3 GiB`, as far as known."""
    mfu = f", {100 * values['mfu']:.0f}% MFU" if "mfu" in values else ""
    return mfu + (f", {values['memory'] / 2**30:.1f} GiB" if "memory" in values else "")


def head_grad_norms(model: LM) -> list[Record]:
    """Frobenius norm of the gradient at every head's rows of the query projection (000, D.4), before clipping.

    One record a layer, head and mixer, value `q`; none of frozen weights, and of Mamba-2, which has no queries of
    single heads. Under FSDP every rank must ask.
    """
    found = []
    for i, block in enumerate(model.blocks):
        for mixer, config, heads in _parts(block.mixer, block.layer.mixer):
            projection = getattr(mixer, "q", None)
            if not isinstance(projection, nn.Linear) or projection.weight.grad is None:
                continue
            gradient_HKD = whole(projection.weight.grad).unflatten(0, (config.num_heads, -1))
            norm_H = gradient_HKD.float().flatten(1).norm(dim=1)
            for head, norm in enumerate(norm_H.tolist()):
                axes = {"layer": i, "head": heads[head * len(heads) // config.num_heads], "mixer": family(config)}
                found.append(Record(kind="train", name="head_grad_norm", values={"q": norm}, axes=axes))
    return found


def _parts(mixer: Mixer, config: MixerConfig) -> Iterator[tuple[Mixer, Leaf, Sequence[int]]]:
    """Mixers that are no compositions, with their heads as the layer counts them."""
    modules, configs = mixer.mixers if isinstance(mixer, Composition) else [mixer], leaves(config)
    own = [part.heads for part in config.parts] if isinstance(config, Heads) else [range(c.num_heads) for c in configs]
    return zip(modules, configs, own, strict=True)
