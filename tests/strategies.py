"""Random configs and layouts for property tests. Small sizes, all legal."""

from __future__ import annotations

import itertools
import math
from typing import Any, get_args

from hypothesis import strategies as st

from plait.config import (
    NORMS,
    Gdn,
    Gla,
    HeadPart,
    Heads,
    Kda,
    Layer,
    Leaf,
    Lightning,
    Mamba2,
    Mix,
    Mixer,
    MlpKind,
    RopeScaling,
    Softmax,
)
from plait.layout import Defaults
from plait.spec import Spec

EPS = st.sampled_from([1e-6, 1e-5, 0.001])
BOOL = st.booleans()
DIMS = st.sampled_from([2, 8, 16, 64])


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# Configs, drawn field by field.

rope_scalings = st.one_of(
    st.builds(RopeScaling, kind=st.just("linear"), factor=st.floats(1, 64)),
    st.builds(
        RopeScaling,
        kind=st.sampled_from(["yarn", "llama3"]),
        factor=st.floats(1, 64),
        original_length=st.integers(1, 8192),
        attention_factor=st.none() | st.floats(0.5, 2),
    ),
)


@st.composite
def kv_heads(draw, num_heads: int) -> dict[str, Any]:
    """num_kv_heads, with a kv_map or without."""
    if draw(st.integers(0, 2)):
        return {"num_kv_heads": draw(st.sampled_from(divisors(num_heads)))}
    steps = draw(st.lists(st.integers(0, 1), min_size=num_heads - 1, max_size=num_heads - 1))
    return {"num_kv_heads": 1 + sum(steps), "kv_map": tuple(itertools.accumulate(steps, initial=0))}


ROPE_THETA = st.none() | st.floats(2, 1e7)


@st.composite
def softmaxes(draw, num_heads: int | None = None, head_dim: int | None = None) -> Softmax:
    heads = num_heads or draw(st.integers(1, 8))
    logn = draw(st.sampled_from([None, "loglen", "loga"]))
    return Softmax(
        num_heads=heads,
        **draw(kv_heads(heads)),
        head_dim=head_dim or draw(DIMS),
        rope_theta=draw(ROPE_THETA),
        rope_interleaved=draw(BOOL),
        rope_scaling=draw(st.none() | rope_scalings),
        window_size=draw(st.none() | st.integers(1, 300)),
        qk_norm=draw(st.sampled_from([None, "head", "full"])),
        qk_norm_kind=draw(st.sampled_from(["rms", "rms1p"])),
        bias=draw(st.sampled_from([None, "qkv"])),
        softmax_scale=draw(st.none() | st.floats(0.01, 2)),
        sink=draw(BOOL),
        output_gate=draw(BOOL),
        logn=logn,
        logn_base=draw(st.floats(2, 1e5)) if logn else None,
        norm_eps=draw(EPS),
    )


@st.composite
def recurrents(draw, num_heads: int | None = None, value_dim: int | None = None) -> Leaf:
    heads, size = num_heads or draw(st.integers(1, 8)), value_dim or draw(DIMS)
    common = {"num_heads": heads, "head_dim": size, "norm_eps": draw(EPS)}
    conv = {"conv_size": draw(st.sampled_from([0, 2, 4]))}
    gate = {"output_gate": draw(BOOL)}
    expand = {"expand_v": 1.0 if value_dim else draw(st.sampled_from([0.5, 1.0, 1.5, 2.0]))}
    rope = {"rope_theta": draw(ROPE_THETA)}
    cls = draw(st.sampled_from([Gdn, Gla, Kda, Mamba2, Lightning]))
    if cls is Gdn:
        few = draw(st.sampled_from(divisors(heads)))
        more = draw(st.integers(1, 3)) if few == heads and not num_heads else 1
        states = {"num_kv_heads": few, "num_v_heads": few * more, "allow_neg_eigval": draw(BOOL)}
        return Gdn(**common, **conv, **gate, **expand, **states, **rope)
    if cls is Gla:
        expand_k = draw(st.sampled_from([0.5, 1.0, 2.0]))
        rope = rope if size * expand_k % 2 == 0 else {}
        return Gla(**common, **conv, **gate, **expand, **rope, expand_k=expand_k, gate_rank=draw(st.integers(1, 16)))
    if cls is Kda:
        dt_init = draw(st.sampled_from(["zero", "log_uniform"]))
        return Kda(**common, **conv, **gate, **expand, **rope, dt_init=dt_init, allow_neg_eigval=draw(BOOL))
    if cls is Mamba2:
        return Mamba2(
            **common,
            **conv,
            num_groups=draw(st.sampled_from(divisors(heads))),
            state_dim=draw(DIMS),
            norm_groups=draw(st.sampled_from([None, 0, *divisors(heads)])),
            gate_order=draw(st.sampled_from(["gate_norm", "norm_gate"])),
        )
    return Lightning(
        **common,
        **rope,
        **draw(kv_heads(heads)),
        slopes=tuple(draw(st.lists(st.floats(0, 8), min_size=heads, max_size=heads))),
        activation=draw(st.sampled_from([None, "silu"])),
        output_norm=draw(st.sampled_from([None, "head", "full"])),
        output_gate=draw(st.sampled_from([None, "low_rank", "full"])),
        gate_rank=draw(st.integers(1, 16)),
    )


def leaves(num_heads: int | None = None, value_dim: int | None = None) -> st.SearchStrategy[Leaf]:
    return softmaxes(num_heads, value_dim) | recurrents(num_heads, value_dim)


@st.composite
def head_wise(draw) -> Heads:
    """Any map of heads to parts, in order or not."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    order = draw(st.permutations(range(sum(sizes))))
    value_dim, parts = draw(DIMS), []
    for size in sizes:
        parts.append(HeadPart(mixer=draw(leaves(size, value_dim)), heads=tuple(order[:size])))
        order = order[size:]
    fields = {"norm": draw(BOOL), "scale": draw(BOOL), "gate": draw(BOOL), "norm_eps": draw(EPS)}
    return Heads(parts=tuple(parts), order=draw(st.sampled_from(["gate_norm", "norm_gate"])), **fields)


@st.composite
def mixes(draw) -> Mix:
    fuse = draw(st.sampled_from(["mean", "sum", "scale", "gate", "project"]))
    heads, value_dim = (None, None) if fuse == "project" else (draw(st.integers(1, 4)), draw(DIMS))
    mixers = draw(st.lists(leaves(heads, value_dim), min_size=2, max_size=3))
    multipliers = tuple(draw(st.floats(-2, 2)) for _ in mixers) if fuse == "project" and draw(BOOL) else None
    return Mix(mixers=tuple(mixers), fuse=fuse, multipliers=multipliers, norm_eps=draw(EPS))


def mixers() -> st.SearchStrategy[Mixer]:
    return leaves() | head_wise() | mixes()


@st.composite
def layers(draw) -> Layer:
    d_ff = draw(st.sampled_from([0, 64, 96]))
    placement = draw(st.sampled_from(["pre", "post", "sandwich"]))
    return Layer(
        mixer=draw(mixers()),
        d_ff=d_ff,
        mlp=draw(st.sampled_from(get_args(MlpKind))),
        mlp_bias=draw(BOOL),
        norm=draw(st.sampled_from(NORMS)),
        norm_placement=placement,
        parallel=d_ff > 0 and placement == "pre" and draw(BOOL),
        mixer_multiplier=draw(st.floats(-2, 2)),
        mlp_multiplier=draw(st.floats(-2, 2)),
        norm_eps=draw(EPS),
    )


def specs() -> st.SearchStrategy[Spec]:
    return st.builds(
        Spec,
        vocab_size=st.integers(1, 1000),
        d_model=st.sampled_from([16, 48, 64]),
        layers=st.lists(layers(), min_size=1, max_size=3).map(tuple),
        tie_embeddings=BOOL,
        norm=st.sampled_from(NORMS),
        norm_eps=EPS,
        embed_multiplier=st.floats(0.5, 12),
        logit_multiplier=st.floats(0.5, 12),
        init_std=st.floats(0.001, 0.1),
        context_length=st.none() | st.integers(1, 1 << 20),
    )


# Layout strings, drawn from the grammar.


@st.composite
def defaults(draw) -> Defaults:
    """num_layers is 1; a layout sets it."""
    heads = draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    return Defaults(
        d_model=draw(st.sampled_from([64, 128, 192])),
        num_layers=1,
        num_heads=heads,
        num_kv_heads=draw(st.none() | st.sampled_from(divisors(heads))),
        head_dim=draw(st.sampled_from([16, 32])),
        d_ff=draw(st.sampled_from([0, 96])),
        mlp=draw(st.sampled_from(["swiglu", "gelu"])),
        norm=draw(st.sampled_from(["rms", "layer"])),
        norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        rope_theta=draw(st.sampled_from([10_000.0, 500_000.0])),
    )


SOFTMAX_OPTIONS = (
    "qk_norm=head",
    "sink=true",
    "output_gate=true",
    "logn=loga, logn_base=500",
    "norm_eps=0.001",
    "num_kv_heads=1",
)
ROPE_OPTIONS = ("rope_fraction=0.5", "rope_interleaved=true", "rope_theta=1e6")
OPTIONS = {
    "full": (*SOFTMAX_OPTIONS, *ROPE_OPTIONS),
    "swa": (*SOFTMAX_OPTIONS, *ROPE_OPTIONS, "rope_theta=none"),
    "nope": SOFTMAX_OPTIONS,
    "gdn": (
        *("conv_size=0", "output_gate=false", "allow_neg_eigval=true", "num_kv_heads=1", "norm_eps=1e-4"),
        "rope_theta=1e4",
    ),
    "gla": ("expand_k=1", "conv_size=4", "gate_rank=8", "output_gate=false", "rope_theta=1e4"),
    "kda": ("dt_init=zero", "conv_size=2", "output_gate=false", "allow_neg_eigval=true", "rope_theta=1e4"),
    "mamba2": (
        "state_dim=16",
        "conv_size=0",
        "norm_groups=0",
        "norm_groups=1",
        "norm_groups=none",
        "gate_order=norm_gate",
    ),
    "lightning": (
        *("slope_family=linear", "num_kv_heads=1", "activation=none", "output_norm=full", "output_norm=none"),
        *("output_gate=full", "output_gate=none", "gate_rank=8", "rope_theta=1e4"),
    ),
}
SIZE_OPTIONS = {
    "gdn": ("expand_v=2", "head_dim=8", "num_v_heads=24", "num_heads=3"),
    "gla": ("expand_v=2", "head_dim=8", "num_heads=3"),
    "kda": ("expand_v=0.5", "head_dim=8", "num_heads=3"),
    "mamba2": ("expand=1", "head_dim=16", "num_heads=3"),
    "full": ("head_dim=64", "window=9"),
    "nope": ("head_dim=64", "window_size=9"),
}
"""that change the number or size of the output heads, so only outside heads(...) and mix(...)"""
CLASHES = {
    "gdn": ("num_kv_heads=1", "num_v_heads=24"),
    "mamba2": ("expand=1", "num_heads=3"),
}
"""pairs that do not go together"""
LAYER_OPTIONS = ("d_ff=64", "mlp=relu2", "norm=rms1p", "norm_placement=sandwich", "mixer_multiplier=0.5")


def _bracket(draw, options: tuple[str, ...], always: tuple[str, ...] = ()) -> str:
    chosen = [*always, *(option for option in options if draw(st.integers(0, 5)) == 0)]
    keys = [option.split("=")[0].replace("window_size", "window") for option in chosen]
    chosen = [option for i, option in enumerate(chosen) if keys[i] not in keys[:i]]
    return f"[{', '.join(chosen)}]" if chosen else ""


@st.composite
def _mixer_text(draw, given: Defaults, inside: bool) -> str:
    name = draw(st.sampled_from(list(OPTIONS)))
    options = OPTIONS[name] if inside else (*OPTIONS[name], *SIZE_OPTIONS.get(name, ()), *LAYER_OPTIONS)
    clash = CLASHES.get(name)
    if clash and not inside:
        left_out = draw(st.sampled_from(clash))
        options = tuple(option for option in options if option != left_out)
    always = ("window=7",) if name == "swa" else (f"head_dim={given.size}",) if name == "mamba2" and inside else ()
    return name + _bracket(draw, options, always)


@st.composite
def _atom_text(draw, given: Defaults) -> str:
    kind = draw(st.sampled_from(["mixer", "mixer", "mixer", "heads", "mix"]))
    units = given.num_heads  # shares need not keep KV groups together
    if kind == "mix":
        names = draw(st.lists(_mixer_text(given, True), min_size=2, max_size=3))
        return f"mix({' + '.join(names)})" + _bracket(draw, ("fuse=gate", "norm=layer", "d_ff=32"))
    if kind == "mixer" or units < 2:
        return draw(_mixer_text(given, False))
    cuts = sorted(draw(st.sets(st.integers(1, units - 1), min_size=1, max_size=2)))
    shares = [b - a for a, b in zip([0, *cuts], [*cuts, units], strict=True)]
    common = math.gcd(*shares)
    parts = [f"{share // common}:{draw(_mixer_text(given, True))}" for share in shares]
    return f"heads({', '.join(parts)})" + _bracket(draw, ("norm=true", "scale=true", "gate=true", "order=norm_gate"))


@st.composite
def layouts(draw) -> tuple[str, Defaults]:
    """A layout string and defaults under which it is legal."""
    given = draw(defaults())

    def sequence(depth: int) -> tuple[str, int]:
        texts, total = [], 0
        for _ in range(draw(st.integers(1, 3))):
            count = draw(st.sampled_from([None, 1, 2, 3]))
            if depth and draw(st.integers(0, 3)) == 0:
                inner, length = sequence(depth - 1)
                text = f"({inner})"
            else:
                text, length = draw(_atom_text(given)), 1
            texts.append(text if count is None else f"{count}*{text}")
            total += length * (count or 1)
        return " ".join(texts), total

    text, length = sequence(2)
    repeats = draw(st.integers(1, 2))
    fields = {**vars(given), "num_layers": length * repeats}
    return text, Defaults(**fields)
