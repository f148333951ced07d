"""Capture and patch on the named points of a model.

layers.{i}.in | mixer.q | mixer.k | mixer.v | mixer.decay | mixer.beta | mixer.heads | mixer.out | mlp.out | out: those
that a layer has, the same in training, prefill and decode; of heads(...) and mix(...) also mixer.parts.{j}.q and so on.
Tensors are [B, T, ...] in the caller's own form: under a mask, zero at padded positions.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from plait.config import suggest
from plait.mixers.base import Tap
from plait.mixers.seq import Seq
from plait.model.lm import LM


def points(model: LM) -> dict[str, Tap]:
    """Every named point of a model, in order of layers."""
    found = {}
    for i, block in enumerate(model.blocks):
        mixer = {f"mixer.{name}": tap for name, tap in block.mixer.points().items()}
        own = {"in": block.taps["in"], **mixer, "mlp.out": block.taps["mlp_out"], "out": block.taps["out"]}
        found |= {f"layers.{i}.{name}": tap for name, tap in own.items()}
    return found


def _select(model: LM, patterns: tuple[str, ...]) -> dict[str, Tap]:
    """The points that match shell-style patterns (layers.*.mixer.out), in the model's order."""
    every = points(model)
    selected: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(every, pattern)
        if not matched:
            raise ValueError(f"point {pattern!r}: the model has none like it; {suggest(pattern, every)}")
        selected.update(matched)
    return {name: tap for name, tap in every.items() if name in selected}


@contextlib.contextmanager
def capture(model: LM, *patterns: str) -> Iterator[dict[str, Tensor]]:
    """Within the block, every forward pass leaves the tensors at these points in the dict, with their gradient graph.

    A later pass replaces what an earlier one left.
    """
    captured: dict[str, Tensor] = {}

    def reader(name: str):
        def hook(tap: Tap, args: tuple[Tensor, Seq], x: Tensor) -> None:
            captured[name] = args[1].pad(x)

        return hook

    with contextlib.ExitStack() as stack:
        for name, tap in _select(model, patterns).items():
            stack.callback(tap.register_forward_hook(reader(name)).remove)
        yield captured


@contextlib.contextmanager
def patch(model: LM, edits: Mapping[str, Tensor | Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Within the block, each named point has a given tensor, or fn(tensor), in place of its own."""

    def writer(name: str, edit: Tensor | Callable[[Tensor], Tensor]):
        def hook(tap: Tap, args: tuple[Tensor, Seq], x: Tensor) -> Tensor:
            seq = args[1]
            old = seq.pad(x)
            new = edit if isinstance(edit, Tensor) else edit(old)
            if new.shape != old.shape:
                raise ValueError(f"patch {name}: shape {tuple(new.shape)}; it must be {tuple(old.shape)}")
            return seq.strip(new.to(x.dtype))

        return hook

    with contextlib.ExitStack() as stack:
        for name, edit in edits.items():
            for tap in _select(model, (name,)).values():
                stack.callback(tap.register_forward_hook(writer(name, edit)).remove)
        yield
