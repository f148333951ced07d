"""Spec -> Spec: the same weights for longer inputs. No torch.

Each function changes one thing, in every layer that has it, inside heads(...) and mix(...) too, and leaves the shapes
of all parameters as they are: a model's weights load into its extended Spec. They compose, as for 001's 32k training of
a SWA-NoPE hybrid (5.2): `extend.context(extend.window(spec, 2048), 32768)`. What is as asked for already stays, so that
the same call twice is the same as once. Errors are ValueErrors.

001: Mechanics of Long-Context Hybrid Models. 004: HydraHead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from typing import Literal, get_args

from plait.config import HeadPart, Heads, Layer, Leaf, Mix, Mixer, Softmax, family, leaves
from plait.fields import FieldError, fit, show, suggest
from plait.spec import Spec

LogN = Literal["loglen", "loga"]
LOGA_BASE = 500.0
"""a of loga (004)"""


def context(spec: Spec, length: int) -> Spec:
    """The Spec for rows of `length` tokens: its context_length. Positions and windows stay as they are."""
    _whole("context_length", length)
    known = spec.context_length or 1
    if length < known:
        raise FieldError("extend", "context_length", length, f"at least the spec's own, {known}")
    return dataclasses.replace(spec, context_length=length)


def rope_theta(spec: Spec, theta: float, *, families: Collection[str] | None = None) -> Spec:
    """Another RoPE base for every mixer that has RoPE, or for those of these families (full, swa, gdn, ...).

    001 takes full attention, and not its windows, from 10000 to 500000 for 32k training (table 2): families=["full"].
    """
    _theta(theta)
    present = sorted({family(leaf) for _, leaf in _leaves(spec) if leaf.rope_theta is not None})
    if not present:
        raise ValueError(f"extend: rope_theta = {show(theta)}; no layer has RoPE")
    if isinstance(families, str):  # its letters would be looked up
        raise FieldError("extend", "families", families, f"a list, as [{families!r}]")
    wanted = set(present if families is None else families)
    if not wanted:
        raise FieldError("extend", "families", families, f"some of {', '.join(present)}, or none given for all")
    for word in sorted(wanted - set(present)):
        raise ValueError(f"extend: family {show(word)}: no layer has it with RoPE; {suggest(word, present)}")

    def change(index: int, leaf: Leaf) -> Leaf:
        if leaf.rope_theta is None or family(leaf) not in wanted:
            return leaf
        return dataclasses.replace(leaf, rope_theta=float(theta))

    return _change(spec, change)


def window(spec: Spec, size: int, *, theta: float | None = None) -> Spec:
    """Windows of `size` tokens in every layer that has a window, none of them narrower than before (001, 5.2).

    theta: RoPE base of the layers whose window grows; None: the one that window_theta works out from each layer's own
    base and window. Windows without RoPE get none.
    """
    _whole("window_size", size)
    if theta is not None:
        _theta(theta)
    windowed = [(i, leaf) for i, leaf in _leaves(spec) if _window(leaf) is not None]
    if not windowed:
        raise ValueError(f"extend: window_size = {size}; no layer has a window")
    widest, index = max((_window(leaf) or 0, -i) for i, leaf in windowed)
    if size < widest:
        raise FieldError("extend", "window_size", size, f"at least {widest}, the window of layer {-index}")

    def change(index: int, leaf: Leaf) -> Leaf:
        if not isinstance(leaf, Softmax) or leaf.window_size in (None, size):
            return leaf
        base = leaf.rope_theta
        if base is not None:
            base = _wider_theta(index, leaf, size) if theta is None else float(theta)
        return dataclasses.replace(leaf, window_size=size, rope_theta=base)

    return _change(spec, change)


def window_theta(theta: float, window_size: int, wider: int) -> float:
    """RoPE base of a window that grows from `window_size` to `wider` tokens, rounded up to one digit as 001 does (A.3).

    base' = base^(ln(wider / 2 pi) / ln(window_size / 2 pi)), the scaling law of RoPE-based extrapolation (Liu et al.,
    2024) with windows for its context lengths. From 128 tokens and 10000 it comes to 90000 at 256, 700000 at 512, 6e6
    at 1024, 5e7 at 2048 and 4e8 at 4096. ValueError for windows below 7, where the rule has no meaning.
    """
    return _round_up(_scaling_law(theta, window_size, wider))


def drop_rope(spec: Spec) -> Spec:
    """RoPE -> NoPE in full attention (001, A.3, transfer training); windows and recurrent mixers keep theirs."""
    if not any(family(leaf) in ("full", "nope") for _, leaf in _leaves(spec)):
        raise ValueError("extend: drop_rope; no layer has full attention")

    def change(index: int, leaf: Leaf) -> Leaf:
        if family(leaf) != "full":
            return leaf
        unused = {"rope_fraction": 1.0, "rope_interleaved": False, "rope_scaling": None}
        return dataclasses.replace(leaf, rope_theta=None, **unused)

    return _change(spec, change)


def logn(spec: Spec, kind: LogN, *, base: float | None = None) -> Spec:
    """A log-n scale on the queries of full attention without positions (001, 3.2; 004); drop_rope comes before it.

    kind: loglen max(1, ln t / ln base), loga ln(t + base) / ln base, t the number of tokens so far.
    base: None: of a layer with this kind already its own; otherwise 500 for loga, as 004 has it, and for loglen the
    spec's context_length, which 001 takes from pretraining: hence before `context`.
    """
    if kind not in get_args(LogN):
        raise FieldError("extend", "logn", kind, f"one of {', '.join(get_args(LogN))}")
    if not any(family(leaf) == "nope" for _, leaf in _leaves(spec)):
        raise ValueError(f"extend: logn = {kind}; no layer has full attention without RoPE: drop_rope makes some")
    usual = LOGA_BASE if kind == "loga" else spec.context_length

    def change(index: int, leaf: Leaf) -> Leaf:
        if not isinstance(leaf, Softmax) or family(leaf) != "nope" or (leaf.logn == kind and base is None):
            return leaf
        if (value := usual if base is None else base) is None:
            raise ValueError("extend: logn_base is missing; loglen takes the length trained on, the spec has none")
        if not 1 < value < math.inf:
            raise FieldError("extend", "logn_base", value, "above 1")
        return dataclasses.replace(leaf, logn=kind, logn_base=float(value))

    return _change(spec, change)


def _change(spec: Spec, change: Callable[[int, Leaf], Leaf]) -> Spec:
    """The Spec with change(index of the layer, mixer) for every mixer that is no composition."""

    def mixer(index: int, old: Mixer) -> Mixer:
        match old:
            case Heads():
                parts = (HeadPart(mixer=change(index, part.mixer), heads=part.heads) for part in old.parts)
                return dataclasses.replace(old, parts=tuple(parts))
            case Mix():
                return dataclasses.replace(old, mixers=tuple(change(index, leaf) for leaf in old.mixers))
        return change(index, old)

    def layer(index: int, old: Layer) -> Layer:
        return dataclasses.replace(old, mixer=mixer(index, old.mixer))

    return dataclasses.replace(spec, layers=tuple(layer(i, old) for i, old in enumerate(spec.layers)))


def _leaves(spec: Spec) -> Iterator[tuple[int, Leaf]]:
    """(index of the layer, mixer) of every mixer that is no composition."""
    return ((i, leaf) for i, layer in enumerate(spec.layers) for leaf in leaves(layer.mixer))


def _window(leaf: Leaf) -> int | None:
    return leaf.window_size if isinstance(leaf, Softmax) else None


def _wider_theta(index: int, leaf: Softmax, size: int) -> float:
    assert leaf.rope_theta is not None and leaf.window_size is not None
    try:
        if leaf.rope_scaling is not None:
            raise ValueError(f"extend: rope_scaling = {leaf.rope_scaling}; the rule for wider windows knows none")
        return window_theta(leaf.rope_theta, leaf.window_size, size)
    except ValueError as error:
        raise ValueError(f"{error} (layer {index}); give theta for a base of your own") from None


def _scaling_law(theta: float, length: int, longer: int) -> float:
    """theta^(ln(longer / 2 pi) / ln(length / 2 pi))"""
    _theta(theta)
    turn = 2 * math.pi
    if min(length, longer) <= turn:
        raise FieldError("extend", "window_size", min(length, longer), "at least 7 for the rule of the RoPE base")
    power = math.log(longer / turn) / math.log(length / turn)
    if power * math.log10(theta) > 300:
        raise ValueError(f"extend: window_size = {longer}; from {length} the rule's RoPE base is above 1e300")
    return theta**power


def _round_up(value: float) -> float:
    """To one significant digit; a value that is there but for rounding errors stays."""
    unit = 10.0 ** math.floor(math.log10(value))
    return math.ceil(round(value / unit, 9)) * unit


def _whole(field: str, value: int) -> None:
    try:
        fit(int, value)
    except ValueError as error:
        raise FieldError("extend", field, value, str(error)) from None
    if value < 1:
        raise FieldError("extend", field, value, "at least 1")


def _theta(theta: float) -> None:
    if not 1 < theta < math.inf:
        raise FieldError("extend", "rope_theta", theta, "above 1")
