"""What the contract test draws from. A new mixer or feature joins by an entry in MIXERS; everything else follows.

Sizes are small and unrelated to each other (head_dim does not divide d_model), and lie around the edges where code
changes its way: windows and their neighbours, chunks of 16 to 64 tokens, the block of 64 queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from plait.config import (
    NORMS,
    Gdn,
    Gla,
    HeadPart,
    Heads,
    Kda,
    Layer,
    Lightning,
    Mamba2,
    Mix,
    Mixer,
    MlpKind,
    RopeScaling,
    Softmax,
    leaves,
)
from plait.model.lm import LM
from plait.spec import Spec

VOCAB = 11
WINDOWS = (1, 2, 3, 5, 8, 16, 17, 63, 64, 65, 66, 80)
LENGTHS = (1, 2, 3, 4, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 66, 80, 96, 127, 128, 129, 150)
EPS = (1e-6, 1e-5, 1e-3)
SMALL, WIDE = (1, 2, 3, 4, 5, 8, 12), (16, 32)
"""head sizes: odd and tiny ones, and those at which bf16 means something"""


@st.composite
def rope_scalings(draw: DrawFn) -> RopeScaling:
    kind = draw(st.sampled_from(("linear", "yarn", "llama3")))
    length = None if kind == "linear" else draw(st.sampled_from((8, 32, 64)))
    factor, attention = draw(st.sampled_from((1.0, 2.0, 4.0))), draw(st.sampled_from((None, 1.3)))
    return RopeScaling(kind=kind, factor=factor, original_length=length, attention_factor=attention)


@st.composite
def softmaxes(draw: DrawFn, sizes: tuple[int, ...]) -> Softmax:
    groups, kv_map = draw(kv_groups())
    head_dim = draw(st.sampled_from(sizes))
    rope = {}
    if head_dim >= 2 and draw(st.booleans()):
        rope = {
            "rope_theta": draw(st.sampled_from((30.0, 1e4, 5e5))),
            "rope_fraction": draw(st.sampled_from([n / head_dim for n in range(2, head_dim + 1, 2)])),
            "rope_interleaved": draw(st.booleans()),
            "rope_scaling": draw(st.none() | rope_scalings()),
        }
    logn = draw(st.sampled_from((None, "loglen", "loga")))
    return Softmax(
        num_heads=sum(groups),
        num_kv_heads=len(groups),
        kv_map=kv_map,
        head_dim=head_dim,
        **rope,
        window_size=draw(st.none() | st.sampled_from(WINDOWS)),
        qk_norm=draw(st.sampled_from((None, "head", "full"))),
        qk_norm_kind=draw(st.sampled_from(("rms", "rms1p"))),
        bias=draw(st.sampled_from((None, "qkv"))),
        softmax_scale=draw(st.sampled_from((None, 0.2, 1.1))),
        sink=draw(st.booleans()),
        output_gate=draw(st.booleans()),
        logn=logn,
        logn_base=None if logn is None else draw(st.sampled_from((4.0, 30.0, 500.0))),
        norm_eps=draw(st.sampled_from(EPS)),
    )


@st.composite
def gdns(draw: DrawFn, sizes: tuple[int, ...]) -> Gdn:
    """plain; grouped queries (several read one state); more value than key heads (several states have one key)"""
    form = draw(st.sampled_from(("plain", "grouped", "values")))
    few, times = draw(st.integers(1, 2)), draw(st.integers(2, 3))
    head_dim, value_dim = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
    return Gdn(
        num_heads=few * times if form == "grouped" else few,
        num_kv_heads=few,
        num_v_heads=few * times if form == "values" else few,
        head_dim=head_dim,
        expand_v=value_dim / head_dim,
        conv_size=draw(st.sampled_from((0, 2, 3, 4, 5))),
        output_gate=draw(st.booleans()),
        allow_neg_eigval=draw(st.booleans()),
        rope_theta=draw(st.sampled_from((None, 30.0))) if head_dim % 2 == 0 else None,
        norm_eps=draw(st.sampled_from(EPS)),
    )


@st.composite
def glas(draw: DrawFn, sizes: tuple[int, ...]) -> Gla:
    head_dim, key_dim, value_dim = (draw(st.sampled_from(sizes)) for _ in range(3))
    return Gla(
        num_heads=draw(st.integers(1, 3)),
        head_dim=head_dim,
        expand_k=key_dim / head_dim,
        expand_v=value_dim / head_dim,
        conv_size=draw(st.sampled_from((0, 2, 4))),
        gate_rank=draw(st.integers(1, 4)),
        output_gate=draw(st.booleans()),
        rope_theta=draw(st.sampled_from((None, 30.0))) if key_dim % 2 == 0 else None,
        norm_eps=draw(st.sampled_from(EPS)),
    )


@st.composite
def kdas(draw: DrawFn, sizes: tuple[int, ...]) -> Kda:
    head_dim, value_dim = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
    return Kda(
        num_heads=draw(st.integers(1, 3)),
        head_dim=head_dim,
        expand_v=value_dim / head_dim,
        conv_size=draw(st.sampled_from((0, 3, 4))),
        output_gate=draw(st.booleans()),
        dt_init=draw(st.sampled_from(("zero", "log_uniform"))),
        allow_neg_eigval=draw(st.booleans()),
        rope_theta=draw(st.sampled_from((None, 30.0))) if head_dim % 2 == 0 else None,
        norm_eps=draw(st.sampled_from(EPS)),
    )


@st.composite
def mamba2s(draw: DrawFn, sizes: tuple[int, ...]) -> Mamba2:
    groups, per_group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return Mamba2(
        num_heads=groups * per_group,
        head_dim=draw(st.sampled_from(sizes)),
        state_dim=draw(st.sampled_from(sizes)),
        num_groups=groups,
        conv_size=draw(st.sampled_from((0, 2, 4))),
        norm_groups=draw(st.sampled_from((None, 0, 1, groups * per_group))),
        gate_order=draw(st.sampled_from(("gate_norm", "norm_gate"))),
        norm_eps=draw(st.sampled_from(EPS)),
    )


@st.composite
def lightnings(draw: DrawFn, sizes: tuple[int, ...]) -> Lightning:
    groups, kv_map = draw(kv_groups())
    num_heads, head_dim = sum(groups), draw(st.sampled_from(sizes))
    slopes = st.sampled_from((0.0, 1e-3, 0.1, 1.0, 30.0))
    return Lightning(
        num_heads=num_heads,
        num_kv_heads=len(groups),
        kv_map=kv_map,
        head_dim=head_dim,
        slopes=tuple(draw(slopes) for _ in range(num_heads)),
        activation=draw(st.sampled_from((None, "silu"))),
        output_norm=draw(st.sampled_from(("head", "full"))),
        output_gate=draw(st.sampled_from((None, "low_rank", "full"))),
        gate_rank=draw(st.integers(1, 4)),
        rope_theta=draw(st.sampled_from((None, 30.0))) if head_dim % 2 == 0 else None,
        norm_eps=draw(st.sampled_from(EPS)),
    )


@st.composite
def kv_groups(draw: DrawFn) -> tuple[list[int], tuple[int, ...] | None]:
    """Query heads of each KV head, and the map that says so where they are unequal."""
    groups = [draw(st.integers(1, 3))] * draw(st.integers(1, 3))
    if draw(st.sampled_from((False, False, True))):
        groups = [draw(st.integers(1, 3)) for _ in groups]
    ragged = len(set(groups)) > 1
    return groups, tuple(kv for kv, n in enumerate(groups) for _ in range(n)) if ragged else None


@st.composite
def headwises(draw: DrawFn, sizes: tuple[int, ...]) -> Heads:
    """Two or three parts, whose heads lie anywhere; all of one value size."""
    parts = _of_one_size(draw, draw(st.integers(2, 3)), draw(st.sampled_from(sizes)))
    heads = draw(st.permutations(range(sum(part.num_out_heads for part in parts))))
    places, first = [], 0
    for part in parts:
        own = heads[first : first + part.num_out_heads]
        places.append(tuple(sorted(own) if draw(st.booleans()) else own))
        first += part.num_out_heads
    return Heads(
        parts=tuple(HeadPart(mixer=part, heads=own) for part, own in zip(parts, places, strict=True)),
        norm=draw(st.booleans()),
        scale=draw(st.booleans()),
        gate=draw(st.booleans()),
        order=draw(st.sampled_from(("gate_norm", "norm_gate"))),
        norm_eps=draw(st.sampled_from(EPS)),
    )


@st.composite
def mixes(draw: DrawFn, sizes: tuple[int, ...]) -> Mix:
    fuse = draw(st.sampled_from(("mean", "sum", "scale", "gate", "project")))
    parts = _of_one_size(draw, draw(st.integers(2, 3)), draw(st.sampled_from(sizes)))
    if fuse == "project":
        multipliers = draw(st.sampled_from((None, (0.7, -1.3, 0.4)[: len(parts)])))
        return Mix(mixers=tuple(parts), fuse=fuse, multipliers=multipliers)
    same = [part for part in parts if part.num_out_heads == parts[0].num_out_heads]
    return Mix(mixers=(*same, same[0])[: max(len(same), 2)], fuse=fuse, norm_eps=draw(st.sampled_from(EPS)))


def _of_one_size(draw: DrawFn, count: int, size: int) -> list:
    """Mixers of one value size. Of one or two channels a norm would be nearly a sign, and norms of norms no better."""
    size = max(size, 3)
    names = [draw(st.sampled_from(sorted(LEAVES))) for _ in range(count)]
    return [draw(LEAVES[name]((size,))) for name in names]


LEAVES = {"softmax": softmaxes, "gdn": gdns, "gla": glas, "kda": kdas, "mamba2": mamba2s, "lightning": lightnings}


@dataclass(frozen=True)
class Entry:
    """A mixer or a feature of one. `without`: what a config is excused from, each with its reason; names of DTYPES, of
    backends, or of program.OPS in lower case."""

    configs: Callable[[tuple[int, ...]], SearchStrategy[Mixer]]
    """strategy of configs with heads of these sizes"""
    without: Callable[[Mixer], dict[str, str]] = lambda config: {}


def without(config: Mixer) -> dict[str, str]:
    small = {"float32": "the norm of so few channels is nearly a sign, and rounding near 0 flips it"}
    sizes = [size for leaf in leaves(config) if leaf.recurrent for size in (leaf.key_dim, leaf.value_dim)]
    return small if min(sizes, default=3) < 3 else {}


COMPOSITIONS = {"heads": headwises, "mix": mixes}
MIXERS: dict[str, Entry] = {name: Entry(strategy, without) for name, strategy in {**LEAVES, **COMPOSITIONS}.items()}
DTYPES = {"float64": 1e-10, "float32": 1e-5}
"""and the tolerance; bf16, whose rounding depth multiplies past any tolerance, is tested mixer by mixer"""


def mixers(sizes: tuple[int, ...] = SMALL) -> SearchStrategy[Mixer]:
    return st.sampled_from(sorted(MIXERS)).flatmap(lambda name: MIXERS[name].configs(sizes))


@st.composite
def layers(draw: DrawFn, mixer: Mixer) -> Layer:
    d_ff = draw(st.sampled_from((0, 5, 8)))
    parallel = d_ff > 0 and draw(st.sampled_from((False, False, True)))
    return Layer(
        mixer=mixer,
        d_ff=d_ff,
        mlp=draw(st.sampled_from(get_args(MlpKind))),
        mlp_bias=draw(st.booleans()),
        norm=draw(st.sampled_from(NORMS)),
        norm_placement="pre" if parallel else draw(st.sampled_from(("pre", "post", "sandwich"))),
        parallel=parallel,
        mixer_multiplier=draw(st.sampled_from((1.0, 0.7, -1.5))),
        mlp_multiplier=draw(st.sampled_from((1.0, 0.5))),
        norm_eps=draw(st.sampled_from(EPS)),
    )


@st.composite
def specs(draw: DrawFn, max_layers: int = 4, among: tuple[str, ...] = ()) -> tuple[Spec, frozenset[str]]:
    """A model of random layers in a random order, of some of these kinds, and what it is excused from."""
    kinds = draw(
        st.lists(st.sampled_from(among or sorted(MIXERS)), min_size=1, unique=True)
    )  # pure models as well as hybrids
    entries = [MIXERS[name] for name in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=max_layers))]
    drawn = [draw(entry.configs(SMALL)) for entry in entries]
    d_model = draw(st.sampled_from((6, 8, 10)))
    spec = Spec(
        vocab_size=VOCAB,
        d_model=d_model,
        layers=tuple(draw(layers(mixer)) for mixer in drawn),
        tie_embeddings=draw(st.booleans()),
        norm=draw(st.sampled_from(("rms", "rms1p", "layer"))),
        embed_multiplier=draw(st.sampled_from((1.0, 3.0))),
        logit_multiplier=draw(st.sampled_from((1.0, 0.5))),
        init_std=1.2 / math.sqrt(d_model),  # at 0.02 mixers hardly change the logits and nothing could fail
    )
    return spec, frozenset().union(*(entry.without(mixer) for entry, mixer in zip(entries, drawn, strict=True)))


@torch.no_grad()
def disturb(module: torch.nn.Module, seed: int) -> None:
    """Move every vector of parameters away from its neutral start: norms, sinks, biases, decays that remember."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.copy_(1.5 * noise - 2)
        elif name.endswith("dt_bias"):
            parameter.copy_(noise)
        elif name.endswith(("conv.weight", "scale")) or parameter.ndim == 1:
            parameter.add_(0.4 * noise)


def build(spec: Spec, seed: int, dtype: torch.dtype, backend: str) -> LM:
    model = LM(spec, seed=seed, backend=backend)
    disturb(model, seed)
    return model.to(dtype)
