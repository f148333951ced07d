"""Layout strings <-> an explicit tuple of layers; the grammar is in syntax.py. No torch.

The pattern repeats until it fills the model, exactly. Keys are the fields of the mixer and of the layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from plait.config import (
    Gdn,
    HeadPart,
    Heads,
    Layer,
    Leaf,
    Lightning,
    Mamba2,
    Mix,
    Mixer,
    MlpKind,
    NormKind,
    Softmax,
    family,
    leaves,
)
from plait.fields import FieldError, field_types, fit, show, suggest
from plait.rope import RopeScaling
from plait.syntax import ALIASES, NAMES, SHORT, LayoutError, Node, Parser

DERIVED = {Mamba2: {"expand": float}, Lightning: {"slope_family": Literal["geometric", "linear"]}}
"""keys that only help to work out a field: num_heads = expand * d_model / head_dim; slopes from a published family"""
LAYER_KEYS = {f.name: field_types(Layer)[f.name] for f in dataclasses.fields(Layer) if f.name != "mixer"}
"""keys of the layer, with their types; a mixer's own key of the same name comes first"""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a layer has where its layout does not say. num_kv_heads and head_dim left None follow from the others."""

    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    """of softmax attention and Lightning; the other mixers are grouped only where the layout says so"""
    head_dim: int | None = None
    d_ff: int = 0
    mlp: MlpKind = "swiglu"
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """keys and values added to every mixer of a name, as if written in its brackets: {"gdn": {"expand_v": 2}};
    inside heads(...) and mix(...) those of the layer and num_heads are left out"""

    def __post_init__(self):
        for name in ("d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} = {value}; it must be at least 1")
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads = {self.num_heads}; it must divide d_model = {self.d_model} unless head_dim is given"
            )
        for name, options in self.overrides.items():
            if name not in NAMES:
                raise ValueError(f"overrides: unknown mixer {show(name)}; {suggest(name, NAMES)}")
            for key, value in options.items():
                try:
                    _read(name, key, value, {**LAYER_KEYS, **_keys(name)})
                except ValueError as error:
                    raise ValueError(f"overrides: {error}") from None

    @property
    def size(self) -> int:
        return self.head_dim or self.d_model // self.num_heads


# Nodes -> configs.


def parse_layout(layout: str, defaults: Defaults) -> tuple[Layer, ...]:
    """The explicit layers of a layout string, one for each of `defaults.num_layers`."""
    pattern = Parser(layout, defaults.num_layers).layout("")
    length, num_layers = len(pattern), defaults.num_layers
    if num_layers % length:
        near = [str(n) for n in (num_layers - num_layers % length, num_layers - num_layers % length + length) if n]
        raise ValueError(
            f"num_layers = {num_layers}; it must be a multiple of the {length} layers of the layout's pattern"
            f" (nearest: {', '.join(near)})"
        )
    return tuple(_layer(node, i, defaults) for i, node in enumerate(pattern * (num_layers // length)))


def _layer(node: Node, index: int, defaults: Defaults) -> Layer:
    own = _keys(node.name)
    given = _given(node, {**LAYER_KEYS, **own})
    values = _layer_defaults(defaults) | _overrides(node.name, defaults, LAYER_KEYS.keys() - own.keys())
    values |= {key: value for key, value in given.items() if key not in own}
    mixer = _mixer(node, {key: value for key, value in given.items() if key in own}, index, defaults)
    with _placed(node):
        return Layer(mixer=mixer, **values)


def _layer_defaults(defaults: Defaults) -> dict[str, Any]:
    return {name: getattr(defaults, name) for name in ("d_ff", "mlp", "norm", "norm_eps")}


@functools.cache
def _keys(name: str) -> dict[str, Any]:
    """Fields that the brackets behind a name may set, with their types; the layer's come on top."""
    cls = {"heads": Heads, "mix": Mix}.get(name) or NAMES[name]
    hints = field_types(cls)
    hidden = {"parts", "mixers", "multipliers", "slopes", "kv_map"}
    hidden |= {"norm_eps"} if cls in (Heads, Mix) else set()
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.name not in hidden} | DERIVED.get(cls, {})


def _read(name: str, key: str, value: Any, hints: Mapping[str, Any]) -> tuple[str, Any]:
    """(field, value) of an option; FieldError for its value, another ValueError for its key."""
    field = ALIASES.get(key, key)
    if field not in hints:
        raise ValueError(f"unknown key {show(key)} of {name}; {suggest(key, sorted(SHORT.get(h, h) for h in hints))}")
    try:
        if field == "rope_scaling":
            return field, None if value is None else RopeScaling.parse(str(value))
        return field, fit(hints[field], value)
    except ValueError as error:
        raise FieldError(name, key, value, str(error)) from None


def _overrides(name: str, defaults: Defaults, fields: Set[str]) -> dict[str, Any]:
    hints = {**LAYER_KEYS, **_keys(name)}
    options = dict(_read(name, key, value, hints) for key, value in defaults.overrides.get(name, {}).items())
    return {field: value for field, value in options.items() if field in fields}


def _given(node: Node, hints: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a node, by field."""
    values = {}
    for key, option in node.options.items():
        try:
            field, value = _read(node.name, key, option.value, hints)
        except FieldError as error:
            raise LayoutError(str(error), option.at) from None
        except ValueError as error:
            raise LayoutError(str(error), option.key_at) from None
        values[field] = value
    return values


@contextlib.contextmanager
def _placed(node: Node) -> Iterator[None]:
    """Errors of a node's config, in the words of the layout and at the place they are about."""
    try:
        yield
    except LayoutError:
        raise
    except FieldError as error:
        key = SHORT.get(error.field, error.field)
        option = node.options.get(key) or node.options.get(error.field)
        message = f"{node.name}: {key} = {show(error.value)}; it must be {error.allowed}"
        raise LayoutError(message, option.at if option else node.at) from None
    except ValueError as error:
        raise LayoutError(str(error), node.at) from None


def _mixer(node: Node, given: dict[str, Any], index: int, defaults: Defaults) -> Mixer:
    if node.name == "heads":
        return _heads(node, given, index, defaults)
    if node.name != "mix":
        return _leaf(node, given, _Place(index, defaults.num_heads), defaults)
    place = _Place(index, defaults.num_heads, inside=True)
    mixers = tuple(_child(child, place, defaults) for child in node.children)
    with _placed(node):
        return Mix(mixers=mixers, norm_eps=defaults.norm_eps, **given)


@dataclass(frozen=True)
class _Place:
    """Where a mixer stands, and what it gets from there."""

    index: int
    """of the layer"""
    num_heads: int
    heads: tuple[int, ...] | None = None
    """in heads(...): those of the layer's heads that the mixer has"""
    inside: bool = False
    """in heads(...) or mix(...)"""


def _child(node: Node, place: _Place, defaults: Defaults) -> Leaf:
    """A mixer inside heads(...) or mix(...)."""
    own = _keys(node.name)
    for key, option in node.options.items():
        if key in LAYER_KEYS and key not in own:
            raise LayoutError(f"{key} is a key of the layer; write it behind heads(...) or mix(...)", option.key_at)
        if key in ("num_heads", "expand") and place.heads is not None:
            raise LayoutError(f"heads: {key} of {node.name} follows from the share; leave it out", option.key_at)
    return _leaf(node, _given(node, own), place, defaults)


def _leaf(node: Node, given: dict[str, Any], place: _Place, defaults: Defaults) -> Leaf:
    if "expand" in given and "num_heads" in given:
        raise LayoutError("mamba2: expand gives num_heads, so one of them is too much", node.options["expand"].key_at)
    inherited = _keys(node.name).keys() - ({"num_heads", "expand"} if place.inside else set())
    given = _overrides(node.name, defaults, inherited) | given
    if node.name == "swa" and given.get("window_size") is None:
        raise LayoutError("swa: window is missing; write swa[window=128]", node.at)
    with _placed(node):
        return NAMES[node.name](**_fill(node.name, given, place, defaults))


def _fill(name: str, given: Mapping[str, Any], place: _Place, defaults: Defaults) -> dict[str, Any]:
    """The fields of one mixer: what the layout gives, over what it inherits."""
    cls, num_heads = NAMES[name], given.get("num_heads", place.num_heads)
    values: dict[str, Any] = {"num_heads": num_heads, "head_dim": defaults.size, "norm_eps": defaults.norm_eps}
    if cls is Mamba2:
        values["head_dim"] = 64
        if "num_heads" not in given and ("expand" in given or not place.inside):
            values["num_heads"] = _mamba_heads(given.get("expand", 2.0), given.get("head_dim", 64), defaults.d_model)
        if place.heads is not None:
            values["norm_groups"] = values["num_heads"]  # in heads(...) it norms per head, as the other kinds do
    elif cls in (Softmax, Lightning):
        values["num_kv_heads"] = defaults.num_kv_heads or num_heads
        if place.heads is not None and "num_kv_heads" not in given:
            total = defaults.num_kv_heads or defaults.num_heads
            if defaults.num_heads % total:
                raise FieldError(name, "num_kv_heads", total, f"a divisor of num_heads = {defaults.num_heads}")
            values["num_kv_heads"], values["kv_map"] = kv_groups(place.heads, defaults.num_heads // total)
    elif cls is Gdn:
        values["num_kv_heads"] = num_heads
        values["num_v_heads"] = given.get("num_kv_heads", num_heads)
    if cls is Softmax and name != "nope":
        values["rope_theta"] = defaults.rope_theta
    if cls is Lightning:
        values["slopes"] = _slopes(given.get("slope_family", "geometric"), num_heads, place.index, defaults.num_layers)
    return values | {key: value for key, value in given.items() if key not in DERIVED.get(cls, ())}


def _mamba_heads(expand: float, head_dim: int, d_model: int) -> int:
    heads = expand * d_model / head_dim if head_dim > 0 else 1.0  # Mamba2 itself refuses the size
    if not (1 <= heads < 2**31 and heads == int(heads)):
        allowed = f"a factor that takes d_model = {d_model} to a multiple of head_dim = {head_dim}"
        raise FieldError("mamba2", "expand", expand, allowed)
    return int(heads)


def _slopes(slope_family: str, num_heads: int, index: int, num_layers: int) -> tuple[float, ...]:
    if slope_family == "linear":  # fla's op: linear in the head index
        return tuple(8 / num_heads * (1 - index / num_layers) * h for h in range(num_heads))
    depth = 1 - index / (num_layers - 1 + 1e-5) + 1e-5  # MiniMax: ALiBi slopes times a factor that falls with depth
    return tuple(2 ** (-8 * (h + 1) / num_heads) * depth for h in range(num_heads))


def _heads(node: Node, given: dict[str, Any], index: int, defaults: Defaults) -> Heads:
    """Shares are a ratio over the query heads; the first part takes the first heads."""
    common, unit = math.gcd(*node.shares), defaults.num_heads
    shares = [share // common for share in node.shares]
    total = sum(shares)
    if unit % total:
        ratio = ":".join(map(str, shares))
        raise LayoutError(f"heads: shares {ratio} sum to {total}, which does not divide num_heads = {unit}", node.at)
    parts, first = [], 0
    for child, share in zip(node.children, shares, strict=True):
        heads = tuple(range(first, first + share * unit // total))
        place = _Place(index, len(heads), heads, inside=True)
        parts.append(HeadPart(mixer=_child(child, place, defaults), heads=heads))
        first += len(heads)
    with _placed(node):
        return Heads(parts=tuple(parts), norm_eps=defaults.norm_eps, **given)


def kv_groups(heads: tuple[int, ...], size: int) -> tuple[int, tuple[int, ...] | None]:
    """(num_kv_heads, kv_map) of a part with these of a layer's query heads, `size` of which read one KV head."""
    groups = [head // size for head in heads]
    places = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    ragged = len(set(Counter(groups).values())) > 1
    return len(places), tuple(places[group] for group in groups) if ragged else None


# And back: configs -> text.


def format_layout(layers: tuple[Layer, ...], d_model: int) -> tuple[str, Defaults]:
    """The shortest pattern that gives these layers, with the defaults under which it does.

    Raises ValueError where a layer says more than a layout string can (slopes of its own, a head map out of order).
    """
    defaults = _common_defaults(layers, d_model)
    words = [_layer_text(layer, i, defaults) for i, layer in enumerate(layers)]
    length = next(n for n in range(1, len(words) + 1) if len(words) % n == 0 and words == words[:n] * (len(words) // n))
    runs = [(word, len(list(run))) for word, run in itertools.groupby(words[:length])]
    text = " ".join(word if count == 1 else f"{count}*{word}" for word, count in runs)
    try:
        same = parse_layout(text, defaults) == layers
    except ValueError:
        same = False
    if not same:
        raise ValueError("layers: they hold more than a layout string can say; write them as JSON")
    return text, defaults


def _common_defaults(layers: tuple[Layer, ...], d_model: int) -> Defaults:
    def most(values: list, fallback: Any) -> Any:
        return Counter(values).most_common(1)[0][0] if values else fallback

    mixers = [leaf for layer in layers for leaf in leaves(layer.mixer)]
    softmax = [leaf for leaf in mixers if isinstance(leaf, Softmax)]
    other = [leaf for leaf in mixers if not isinstance(leaf, Mamba2)]  # whose size is its own
    headwise = [layer for layer in layers if isinstance(layer.mixer, Heads)]  # cannot say their num_heads and norm
    counted = headwise or [layer for layer in layers if not isinstance(layer.mixer, Mamba2)]
    composed = [layer.mixer.norm_eps for layer in layers if isinstance(layer.mixer, Heads | Mix)]
    plain = [layer.norm_eps for layer in layers if not isinstance(layer.mixer, Heads | Mix)]
    return Defaults(
        d_model=d_model,
        num_layers=len(layers),
        num_heads=most([layer.mixer.num_heads for layer in counted], 1),
        num_kv_heads=likely_kv_heads([layer.mixer for layer in layers]),
        head_dim=most([leaf.head_dim for leaf in softmax or other or mixers], None),
        d_ff=most([layer.d_ff for layer in layers], 0),
        mlp=most([layer.mlp for layer in layers], "swiglu"),
        norm=most([layer.norm for layer in headwise or layers], "rms"),
        norm_eps=most(composed + plain, 1e-6),
        rope_theta=most([leaf.rope_theta for leaf in softmax if leaf.rope_theta is not None], 10_000.0),
    )


def likely_kv_heads(mixers: Iterable[Mixer]) -> int | None:
    """KV heads for all query heads of a layer with which most softmax and Lightning mixers have theirs; the most, where
    several would do. Parts with unequal groups come first, as no option can say those."""
    votes, ragged = Counter(), Counter()
    for mixer in mixers:
        for part in mixer.parts if isinstance(mixer, Heads) else ():
            own, total = part.mixer, mixer.num_heads
            if isinstance(own, Softmax | Lightning):
                sizes = [size for size in range(1, total + 1) if total % size == 0]
                fitting = [total // n for n in sizes if kv_groups(part.heads, n) == (own.num_kv_heads, own.kv_map)]
                votes.update(fitting)
                ragged.update(fitting if own.kv_map else ())
        if not isinstance(mixer, Heads):
            votes.update(leaf.num_kv_heads for leaf in leaves(mixer) if isinstance(leaf, Softmax | Lightning))
    return max(votes, key=lambda count: (ragged[count], votes[count]), default=None)


def _layer_text(layer: Layer, index: int, defaults: Defaults) -> str:
    mixer = layer.mixer
    if isinstance(mixer, Heads | Mix):
        text, own = _composition_text(mixer, index, defaults), _keys(mixer.kind)
        blank = {f.name: f.default for f in dataclasses.fields(mixer)}
        given = {key: value for key, value in vars(mixer).items() if key in own and value != blank[key]}
    else:
        text, own = family(mixer), _keys(family(mixer))
        given = _leaf_options(mixer, _Place(index, defaults.num_heads), defaults)
    plain = {f.name: f.default for f in dataclasses.fields(layer)} | _layer_defaults(defaults)
    given |= {key: getattr(layer, key) for key in LAYER_KEYS if key not in own and getattr(layer, key) != plain[key]}
    return text + _options_text(given)


def _composition_text(mixer: Heads | Mix, index: int, defaults: Defaults) -> str:
    if isinstance(mixer, Mix):
        place = _Place(index, defaults.num_heads, inside=True)
        texts = [family(part) + _options_text(_leaf_options(part, place, defaults)) for part in mixer.mixers]
        return f"mix({' + '.join(texts)})"
    common, texts = math.gcd(*(len(part.heads) for part in mixer.parts)), []
    for part in mixer.parts:
        place = _Place(index, len(part.heads), part.heads, inside=True)
        options = _options_text(_leaf_options(part.mixer, place, defaults))
        texts.append(f"{len(part.heads) // common}:{family(part.mixer)}{options}")
    return f"heads({', '.join(texts)})"


def _leaf_options(mixer: Leaf, place: _Place, defaults: Defaults) -> dict[str, Any]:
    """The options that make a name this mixer: all of its fields, less each that follows from the others."""
    name = family(mixer)
    fields = vars(mixer)
    blank = {f.name: f.default for f in dataclasses.fields(mixer)}

    def fill(given: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return blank | _fill(name, given, place, defaults)
        except ValueError:  # some follow from nothing: Mamba-2's heads, KV heads that do not divide
            return {}

    given = {key: fields[key] for key in _keys(name) if key in fields}
    if fields.get("kv_map") is not None:
        del given["num_kv_heads"]  # a map follows from where the heads are
    if "slopes" in fields and fill(given).get("slopes") != fields["slopes"]:
        given["slope_family"] = "linear"
    for key in list(given)[::-1]:
        rest = {other: value for other, value in given.items() if other != key}
        if fill(rest) == fields:
            given = rest
    return given


def _options_text(given: Mapping[str, Any]) -> str:
    options = [f"{SHORT.get(key, key)}={_show(value)}" for key, value in given.items()]
    return f"[{', '.join(options)}]" if options else ""


def _show(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
