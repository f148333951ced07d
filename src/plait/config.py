"""Frozen configs of mixers and layers. Fully resolved: nothing asks for d_model or a layer index.

Vocabulary: H query heads, head_dim the size of a query / key head, value_dim the size of an output head. No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from plait.fields import (
    check,
    check_choice,
    check_divides,
    check_positive,
    show,
    suggest,
)
from plait.rope import RopeScaling

NormKind = Literal["rms", "rms1p", "layer", "layer_nobias"]
NORMS: tuple[NormKind, ...] = get_args(NormKind)
MlpKind = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "relu2"]
GATED: tuple[MlpKind, ...] = ("swiglu", "geglu", "geglu_tanh")
"""MLPs of three matrices"""


def _check_conv(config: Any) -> None:
    check(config, config.conv_size == 0 or config.conv_size >= 2, "conv_size", "0 (none) or at least 2")


def _check_expands(config: Any, *fields: str) -> None:
    """head_dim times each of these factors is a whole number above 0."""
    for field in fields:
        factor = getattr(config, field)
        size = config.head_dim * factor if 0 < factor < 2**31 else 0
        whole = size >= 1 and abs(size - round(size)) <= 1e-9
        check(config, whole, field, f"a factor that takes head_dim = {config.head_dim} to a whole number above 0")


class _Leaf:
    """The heads that come out of a mixer, and its positions, where it does not say otherwise."""

    num_heads: int
    head_dim: int
    rope_theta: float | None
    rope_fraction: float = 1.0
    rope_interleaved: bool = False
    rope_scaling: RopeScaling | None = None

    @property
    def value_dim(self) -> int:
        return round(self.head_dim * getattr(self, "expand_v", 1))

    @property
    def num_out_heads(self) -> int:
        return self.num_heads

    @property
    def key_dim(self) -> int:
        return self.head_dim

    @property
    def rotary_dim(self) -> int:
        return int(self.key_dim * self.rope_fraction) if self.rope_theta is not None else 0


def _check_rope(config: Any) -> None:
    """RoPE of a mixer without options of it: all channels of the keys rotate."""
    check(config, config.rope_theta is None or 1 < config.rope_theta < math.inf, "rope_theta", "above 1, or none")
    odd = config.rope_theta is not None and config.key_dim % 2
    check(config, not odd, "rope_theta", f"none, as keys have an odd number of channels ({config.key_dim})")


def _check_groups(config: Any) -> None:
    """num_kv_heads divide num_heads, or kv_map says which query head reads which."""
    if config.kv_map is None:
        check_divides(config, "num_kv_heads", "num_heads")
        return
    check_positive(config, "num_kv_heads")
    ok = len(config.kv_map) == config.num_heads and set(config.kv_map) == set(range(config.num_kv_heads))
    allowed = f"a KV head from 0 to {config.num_kv_heads - 1} for each of {config.num_heads} heads, in rising order"
    check(config, ok and list(config.kv_map) == sorted(config.kv_map), "kv_map", f"{allowed}, none left out")


@dataclass(frozen=True, kw_only=True)
class Softmax(_Leaf):
    """Softmax attention: full, nope and swa of a layout are three settings of it."""

    kind: ClassVar[str] = "softmax"
    recurrent: ClassVar[bool] = False

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_map: tuple[int, ...] | None = None
    """KV head that each query head reads, where groups are of unequal size; None: num_heads / num_kv_heads read one"""
    rope_theta: float | None = None
    """None: no positional encoding (NoPE)"""
    rope_fraction: float = 1.0
    """share of head_dim that rotates, from the front"""
    rope_interleaved: bool = False
    """rotate pairs (0, 1), (2, 3), ... instead of (0, d/2), (1, d/2 + 1), ..."""
    rope_scaling: RopeScaling | None = None
    window_size: int | None = None
    """visible keys, the token itself included; None: all"""
    qk_norm: Literal["head", "full"] | None = None
    """RMSNorm of q and k before RoPE: over each head, or over all heads together"""
    qk_norm_kind: Literal["rms", "rms1p"] = "rms"
    """with weight w or 1 + w"""
    bias: Literal["qkv", "all"] | None = None
    """biases of the projections: none, of queries, keys and values, or of the output too"""
    softmax_scale: float | None = None
    """factor on q.k; None: 1 / sqrt(head_dim)"""
    sink: bool = False
    """a learnable logit per head in the softmax denominator (000, B.1)"""
    output_gate: bool = False
    """sigmoid gate on the head outputs, projected from the layer's input"""
    logn: Literal["loglen", "loga"] | None = None
    """scale of the queries that grows with the number t of tokens so far: loglen max(1, ln t / ln logn_base)
    (001, logn_base the pretraining length), loga ln(t + a) / ln a (004, a = logn_base)"""
    logn_base: float | None = None
    norm_eps: float = 1e-6

    def __post_init__(self):
        check_positive(self, "num_heads", "head_dim", "norm_eps")
        _check_groups(self)
        check_choice(self, "qk_norm", "qk_norm_kind", "bias", "logn")
        scale = self.softmax_scale
        check(self, scale is None or 0 < scale < math.inf, "softmax_scale", "above 0, or none")
        check(self, self.window_size is None or self.window_size >= 1, "window_size", "at least 1, or none")
        check(self, self.rope_theta is None or 1 < self.rope_theta < math.inf, "rope_theta", "above 1, or none")
        check(self, 0 < self.rope_fraction <= 1, "rope_fraction", "above 0 and at most 1")
        even = self.rope_theta is None or (self.rotary_dim >= 2 and self.rotary_dim % 2 == 0)
        check(self, even, "rope_fraction", f"a share of head_dim = {self.head_dim} that is an even number, 2 or more")
        if self.logn is not None:
            check(self, 1 < (self.logn_base or 0) < math.inf, "logn_base", f"above 1 with logn = {self.logn}")


@dataclass(frozen=True, kw_only=True)
class Gdn(_Leaf):
    """Gated DeltaNet. Each of num_v_heads states is read by one or more query heads.

    Grouped: num_heads a multiple of num_kv_heads = num_v_heads (000: 6 query heads read 2 states).
    More value than key heads: num_v_heads a multiple of num_heads = num_kv_heads (Qwen3-Next).
    """

    kind: ClassVar[str] = "gdn"
    recurrent: ClassVar[bool] = True

    num_heads: int
    num_kv_heads: int
    num_v_heads: int
    head_dim: int
    expand_v: float = 1.0
    conv_size: int = 4
    """width of the causal depthwise convolution on q, k and v; 0: none"""
    output_gate: bool = True
    """SiLU gate after the per-head RMSNorm"""
    allow_neg_eigval: bool = False
    """beta in (0, 2) instead of (0, 1)"""
    rope_theta: float | None = None
    """RoPE on queries and keys, as 004 has it in linear heads; None: none"""
    norm_eps: float = 1e-6

    def __post_init__(self):
        check_positive(self, "num_heads", "num_kv_heads", "num_v_heads", "head_dim", "norm_eps")
        _check_conv(self)
        check_divides(self, "num_kv_heads", "num_heads")
        check(
            self,
            self.num_v_heads == self.num_kv_heads
            or (self.num_heads == self.num_kv_heads and self.num_v_heads % self.num_heads == 0),
            "num_v_heads",
            f"num_kv_heads = {self.num_kv_heads}, or a multiple of it when num_heads = num_kv_heads",
        )
        _check_expands(self, "expand_v")
        _check_rope(self)

    @property
    def num_out_heads(self) -> int:
        return max(self.num_heads, self.num_v_heads)


@dataclass(frozen=True, kw_only=True)
class Gla(_Leaf):
    """Gated linear attention: a decay per key channel from a low-rank projection."""

    kind: ClassVar[str] = "gla"
    recurrent: ClassVar[bool] = True

    num_heads: int
    head_dim: int
    expand_k: float = 0.5
    expand_v: float = 1.0
    conv_size: int = 0
    gate_rank: int = 16
    output_gate: bool = True
    rope_theta: float | None = None
    """RoPE on queries and keys, as 004 has it in linear heads; None: none"""
    norm_eps: float = 1e-6

    def __post_init__(self):
        check_positive(self, "num_heads", "head_dim", "gate_rank", "norm_eps")
        _check_conv(self)
        _check_expands(self, "expand_k", "expand_v")
        _check_rope(self)

    @property
    def key_dim(self) -> int:
        return round(self.head_dim * self.expand_k)


@dataclass(frozen=True, kw_only=True)
class Kda(_Leaf):
    """Kimi Delta Attention: the gated delta rule with a decay per key channel, applied before the delta step."""

    kind: ClassVar[str] = "kda"
    recurrent: ClassVar[bool] = True

    num_heads: int
    head_dim: int
    expand_v: float = 1.0
    conv_size: int = 4
    output_gate: bool = True
    dt_init: Literal["zero", "log_uniform"] = "log_uniform"
    """start of dt_bias: 0 (decays of 0.5 down to 1e-5 a step) or the inverse softplus of log-uniform [1e-3, 0.1]
    (0.2 to 0.999)"""
    allow_neg_eigval: bool = False
    """beta in (0, 2) instead of (0, 1)"""
    rope_theta: float | None = None
    """RoPE on queries and keys, as 004 has it in linear heads; None: none"""
    norm_eps: float = 1e-6

    def __post_init__(self):
        check_positive(self, "num_heads", "head_dim", "norm_eps")
        _check_conv(self)
        check_choice(self, "dt_init")
        _check_expands(self, "expand_v")
        _check_rope(self)


@dataclass(frozen=True, kw_only=True)
class Mamba2(_Leaf):
    """Mamba-2 (SSD): a scalar decay per head, keys and queries (B, C) shared by the heads of a group."""

    kind: ClassVar[str] = "mamba2"
    recurrent: ClassVar[bool] = True

    num_heads: int
    head_dim: int = 64
    state_dim: int = 128
    num_groups: int = 1
    conv_size: int = 4
    norm_groups: int | None = None
    """groups of heads over which the gated RMSNorm goes; None: num_groups; 0: no norm, the gate alone"""
    gate_order: Literal["gate_norm", "norm_gate"] = "gate_norm"
    norm_eps: float = 1e-6

    rope_theta: ClassVar[float | None] = None

    def __post_init__(self):
        check_positive(self, "num_heads", "head_dim", "state_dim", "norm_eps")
        check_divides(self, "num_groups", "num_heads")
        check_choice(self, "gate_order")
        groups = self.norm_groups or self.num_heads
        whole = groups > 0 and self.num_heads % groups == 0
        check(self, whole, "norm_groups", f"a divisor of num_heads = {self.num_heads}, 0 (no norm), or none")
        _check_conv(self)

    @property
    def key_dim(self) -> int:
        return self.state_dim


@dataclass(frozen=True, kw_only=True)
class Lightning(_Leaf):
    """Lightning attention: a fixed decay exp(-slope) per head."""

    kind: ClassVar[str] = "lightning"
    recurrent: ClassVar[bool] = True

    num_heads: int
    num_kv_heads: int
    head_dim: int
    slopes: tuple[float, ...]
    """-log of the decay of each query head, already scaled for the layer's depth"""
    kv_map: tuple[int, ...] | None = None
    """as that of softmax attention"""
    activation: Literal["silu"] | None = "silu"
    """of q, k and v"""
    output_norm: Literal["head", "full"] | None = "head"
    """RMSNorm of the outputs: over each head, without a weight (000), or over all together, with one (MiniMax)"""
    output_gate: Literal["low_rank", "full"] | None = "low_rank"
    """sigmoid gate after the norm, through gate_rank channels (000) or one matrix (MiniMax)"""
    gate_rank: int = 64
    rope_theta: float | None = None
    """RoPE on queries and keys, as 004 has it in linear heads; None: none"""
    norm_eps: float = 1e-6

    def __post_init__(self):
        check_positive(self, "num_heads", "head_dim", "norm_eps")
        check(self, self.gate_rank >= 1, "gate_rank", "at least 1 (for no gate, output_gate is none)")
        _check_groups(self)
        check_choice(self, "activation", "output_norm", "output_gate")
        _check_rope(self)
        check(self, len(self.slopes) == self.num_heads, "slopes", f"one number for each of {self.num_heads} heads")
        check(self, all(0 <= slope < math.inf for slope in self.slopes), "slopes", "numbers of 0 or above")


Leaf = Softmax | Gdn | Gla | Kda | Mamba2 | Lightning
"""a mixer that is no composition"""


@dataclass(frozen=True, kw_only=True)
class HeadPart:
    """Query heads of a head-wise hybrid that one mixer computes."""

    mixer: Leaf
    heads: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Head-wise hybrid: disjoint query heads to different mixers, one output projection (004, 4.2)."""

    kind: ClassVar[str] = "heads"

    parts: tuple[HeadPart, ...]
    norm: bool = False
    """RMSNorm per head before the output projection"""
    scale: bool = False
    """one learnable scale per head after it"""
    gate: bool = False
    """sigmoid gate on the heads of softmax parts"""
    order: Literal["gate_norm", "norm_gate"] = "gate_norm"
    norm_eps: float = 1e-6

    def __post_init__(self):
        check_choice(self, "order")
        if len(self.parts) < 2:
            raise ValueError(f"heads: {len(self.parts)} part; it takes two or more")
        for part in self.parts:
            if len(part.heads) != part.mixer.num_out_heads:
                raise ValueError(
                    f"heads: {family(part.mixer)} has {part.mixer.num_out_heads} heads but is given {len(part.heads)}:"
                    f" {show(list(part.heads))}"
                )
        _check_head_map([head for part in self.parts for head in part.heads])
        _no_output_bias(self, [part.mixer for part in self.parts])
        _same_value_dim(self, [part.mixer for part in self.parts])

    @property
    def recurrent(self) -> bool:
        return any(part.mixer.recurrent for part in self.parts)

    @property
    def num_heads(self) -> int:
        return sum(part.mixer.num_heads for part in self.parts)

    @property
    def num_out_heads(self) -> int:
        return sum(len(part.heads) for part in self.parts)

    @property
    def value_dim(self) -> int:
        return self.parts[0].mixer.value_dim


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Several mixers on all heads, fused."""

    kind: ClassVar[str] = "mix"

    mixers: tuple[Leaf, ...]
    fuse: Literal["mean", "sum", "scale", "gate", "project"] = "mean"
    """mean: of the RMS-normalized branch outputs (Hymba); sum; scale: a sum with a learnable factor for each head and
    branch; gate: a mean weighted by a softmax over the branches, from the input; project: every branch through an
    output projection of its own, then a sum (Falcon-H1)"""
    multipliers: tuple[float, ...] | None = None
    """of every branch in that last sum; None: 1"""
    norm_eps: float = 1e-6

    def __post_init__(self):
        check_choice(self, "fuse")
        if len(self.mixers) < 2:
            raise ValueError(f"mix: {len(self.mixers)} mixer; it takes two or more")
        given = self.multipliers is not None
        check(self, not given or self.fuse == "project", "multipliers", f"none with fuse = {self.fuse}")
        matching = not given or len(self.multipliers or ()) == len(self.mixers)
        check(self, matching, "multipliers", f"one for each of {len(self.mixers)} mixers, or none")
        check(self, all(map(math.isfinite, self.multipliers or ())), "multipliers", "finite numbers")
        if self.fuse != "project":
            _no_output_bias(self, self.mixers)
            _same_value_dim(self, self.mixers)
            counts = [mixer.num_out_heads for mixer in self.mixers]
            if len(set(counts)) > 1:
                raise ValueError(f"mix: the mixers have {counts} heads; fuse = {self.fuse} needs the same number")

    @property
    def recurrent(self) -> bool:
        return any(mixer.recurrent for mixer in self.mixers)

    @property
    def num_heads(self) -> int:
        return self.mixers[0].num_heads

    @property
    def num_out_heads(self) -> int:
        return self.mixers[0].num_out_heads

    @property
    def value_dim(self) -> int:
        return self.mixers[0].value_dim


def _check_head_map(named: list[int]) -> None:
    count = len(named)
    outside = next((head for head in named if not 0 <= head < count), None)
    if outside is not None:
        raise ValueError(f"heads: a part names head {show(outside)}; the parts have {count} heads, 0 to {count - 1}")
    twice = [head for head, times in Counter(named).items() if times > 1]
    if twice:
        never = min(set(range(count)) - set(named))
        raise ValueError(
            f"heads: head {twice[0]} is named more than once, head {never} not at all;"
            f" each of 0 to {count - 1} must be named once"
        )


def _no_output_bias(config: Heads | Mix, mixers: Iterable) -> None:
    if any(getattr(mixer, "bias", None) == "all" for mixer in mixers):
        raise ValueError(f"{config.kind}: bias = all; it must be qkv or none, as the mixers share an output projection")


def _same_value_dim(config: Heads | Mix, mixers: Iterable) -> None:
    sizes = {f"{family(mixer)} {mixer.value_dim}" for mixer in mixers}
    if len({size.split()[1] for size in sizes}) > 1:
        raise ValueError(
            f"{config.kind}: value sizes per head differ ({', '.join(sorted(sizes))}); they must be equal:"
            " change a head_dim or an expand_v"
        )


Mixer = Softmax | Gdn | Gla | Kda | Mamba2 | Lightning | Heads | Mix
KINDS: dict[str, type] = {cls.kind: cls for cls in get_args(Mixer)}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One block: a token mixer, an MLP or none, and how the two join the residual stream."""

    kind: ClassVar[str] = "layer"

    mixer: Mixer
    d_ff: int = 0
    """width of the MLP; 0: no MLP"""
    mlp: MlpKind = "swiglu"
    """swiglu, geglu and geglu_tanh (GELU by its tanh form) have a gate; gelu and relu2 (ReLU squared) have none"""
    mlp_bias: bool = False
    norm: NormKind = "rms"
    """rms1p is RMSNorm with weight 1 + w; layer_nobias LayerNorm without a bias"""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """norm of each branch's input, of its output, or of both"""
    parallel: bool = False
    """x + mixer(n) + mlp(n), n = norm1(x), instead of one after the other"""
    mixer_multiplier: float = 1.0
    mlp_multiplier: float = 1.0
    """factors on each branch's output before it joins the residual stream"""
    norm_eps: float = 1e-6

    def __post_init__(self):
        check_choice(self, "mlp", "norm", "norm_placement")
        check(self, self.d_ff >= 0, "d_ff", "0 (no MLP) or above")
        check_positive(self, "norm_eps")
        for field in ("mixer_multiplier", "mlp_multiplier"):
            check(self, math.isfinite(getattr(self, field)), field, "finite")
        if self.parallel and (self.norm_placement != "pre" or self.d_ff == 0):
            raise ValueError("layer: parallel = True; it needs norm_placement = pre and an MLP")


def family(mixer: Mixer) -> str:
    """The name a layout gives this mixer: full, nope, swa, gdn, ..., or heads(a, b) and mix(a + b)."""
    match mixer:
        case Softmax():
            return "swa" if mixer.window_size is not None else "nope" if mixer.rope_theta is None else "full"
        case Heads():
            return f"heads({', '.join(family(part.mixer) for part in mixer.parts)})"
        case Mix():
            return f"mix({' + '.join(map(family, mixer.mixers))})"
    return mixer.kind


def leaves(mixer: Mixer) -> tuple[Leaf, ...]:
    """The mixers that a composition is made of; otherwise the mixer itself."""
    match mixer:
        case Heads():
            return tuple(part.mixer for part in mixer.parts)
        case Mix():
            return mixer.mixers
    return (mixer,)


def select_layers(layers: tuple[Layer, ...], families: Iterable[str]) -> tuple[int, ...]:
    """Indices of the layers whose mixer is of one of these families (or of `recurrent`, `softmax`)."""
    wanted = set(families)
    present = {family(layer.mixer) for layer in layers}
    for word in wanted - present - {"recurrent", "softmax"}:
        allowed = [*sorted(present), "recurrent", "softmax"]
        raise ValueError(f"family {show(word)}: no layer has it; {suggest(word, allowed)}")
    return tuple(
        i
        for i, layer in enumerate(layers)
        if {family(layer.mixer), "recurrent" if layer.mixer.recurrent else "softmax"} & wanted
    )
