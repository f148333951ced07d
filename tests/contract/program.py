"""A random program of forward passes and cache operations, and the interpreter that checks every output of it.

The interpreter keeps, beside each cache, the tokens each of its rows has had. Whatever was fed, padded, packed, cut,
cloned, reordered or cropped, the logits of a token must be those of its row fed whole, alone and unpadded through the
naive backend in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from contract.configs import DTYPES, LENGTHS, VOCAB, build, specs
from contract.poison import poisoned_empty
from contract.tools import error
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from plait.config import Softmax, leaves
from plait.model.cache import Cache
from plait.spec import Spec


@dataclass(frozen=True)
class Feed:
    """New tokens: `dense` rows of lengths[0] tokens, rows padded under a `mask`, or documents `packed` in one row."""

    form: str
    lengths: tuple[int, ...]
    padding: tuple[str, ...]
    extra: int
    """columns of the padded batch that no row needs"""
    cached: bool = True


@dataclass(frozen=True)
class Decode:
    """Single tokens of every row, dense."""

    steps: int


@dataclass(frozen=True)
class Clone:
    """Go on with a clone; the original is kept and may be chosen again."""


@dataclass(frozen=True)
class New:
    """Another cache of the same model."""


@dataclass(frozen=True)
class Switch:
    """Go on with another of the caches."""

    to: int


@dataclass(frozen=True)
class Move:
    """Cache.to the device where it is."""


@dataclass(frozen=True)
class Reorder:
    index: tuple[int, ...]


@dataclass(frozen=True)
class Crop:
    """Forget the last `drop` tokens of the longest row, or be refused and change nothing."""

    drop: int


@dataclass(frozen=True)
class Reset:
    pass


@dataclass(frozen=True)
class Refused:
    """A forward pass that must raise and change nothing: one token more than there is room for, or a wrong batch."""

    why: str


OPS = (Feed, Decode, Clone, New, Switch, Move, Reorder, Crop, Reset, Refused)
PADDINGS = ("left", "right", "inside", "both")


@dataclass(frozen=True)
class Case:
    spec: Spec
    seed: int
    dtype: str
    backend: str
    batch: int
    spare: int
    """room in the cache beyond what the program needs"""
    ops: tuple


@st.composite
def feeds(draw: DrawFn, batch: int, windows: list[int]) -> Feed:
    near = [n for w in windows for n in (w - 1, w, w + 1)]
    lengths = st.one_of(st.sampled_from((0, 1, 2, 5)), st.sampled_from([0, *LENGTHS, *near]), st.integers(0, 140))
    form = draw(st.sampled_from(("mask", "packed", "dense")))
    if form == "dense":
        return Feed(form, (max(draw(lengths), 1),) * batch, (), 0, draw(st.sampled_from((True, True, False))))
    return Feed(
        form,
        tuple(draw(lengths) for _ in range(batch)),
        tuple(draw(st.sampled_from(PADDINGS)) for _ in range(batch)) if form == "mask" else (),
        draw(st.sampled_from((0, 1, 5))) if form == "mask" else 0,
        draw(st.sampled_from((True, True, True, False))),
    )


@st.composite
def programs(draw: DrawFn, batch: int, windows: list[int], without: frozenset[str]) -> tuple:
    ops = {
        Feed: feeds(batch, windows),
        Decode: st.builds(Decode, st.integers(1, 5)),
        Clone: st.just(Clone()),
        New: st.just(New()),
        Switch: st.builds(Switch, st.integers(0, 2)),
        Move: st.just(Move()),
        Reorder: st.builds(Reorder, st.tuples(*[st.integers(0, batch - 1)] * batch)),
        Crop: st.builds(Crop, st.sampled_from((0, 1, 1, 2, 3, 20, 1000))),
        Reset: st.just(Reset()),
        Refused: st.builds(Refused, st.sampled_from(("room", "batch"))),
    }
    often = [op for op in (Feed,) * 6 + (Decode,) * 3 + (Crop, *OPS) if op.__name__.lower() not in without]
    kinds = [Feed, *draw(st.lists(st.sampled_from(often), min_size=2, max_size=8))]
    return tuple(draw(ops[kind]) for kind in kinds)


@st.composite
def cases(draw: DrawFn, max_layers: int = 4, among: tuple[str, ...] = ()) -> Case:
    dtype = draw(st.sampled_from(("float64", "float64", "float32")))
    spec, without = draw(specs(2 if dtype == "float32" else max_layers, among))  # depth multiplies rounding
    batch = draw(st.integers(1, 4))
    parts = [leaf for layer in spec.layers for leaf in leaves(layer.mixer)]
    windows = [leaf.window_size for leaf in parts if isinstance(leaf, Softmax) and leaf.window_size]
    return Case(
        spec=spec,
        seed=draw(st.integers(0, 2**16)),
        dtype="float64" if dtype in without else dtype,
        backend=draw(st.sampled_from([name for name in ("torch",) * 5 + ("naive",) if name not in without])),
        batch=batch,
        spare=draw(st.sampled_from((0, 0, 1, 100))),
        ops=draw(programs(batch, windows, without)),
    )


@dataclass
class Track:
    """A cache and the tokens its rows have had."""

    cache: Cache
    rows: list[tuple[int, ...]]


@dataclass
class Interpreter:
    case: Case
    outputs: list[tuple[str, tuple[int, ...], Tensor]] = field(default_factory=list)
    """(what made it, tokens of the row, logits of the last of them)"""

    def __post_init__(self):
        case = self.case
        self.model = build(case.spec, case.seed, getattr(torch, case.dtype), case.backend)
        self.reference = build(case.spec, case.seed, torch.float64, "naive")
        self.generator = torch.Generator().manual_seed(case.seed)
        needs = [max(op.lengths) if isinstance(op, Feed) else getattr(op, "steps", 0) for op in case.ops]
        self.max_length = sum(needs) + 1 + case.spare
        self.tracks = [self.new_track()]
        self.current = 0

    def new_track(self) -> Track:
        return Track(self.model.new_cache(self.case.batch, self.max_length), [()] * self.case.batch)

    @property
    def track(self) -> Track:
        return self.tracks[self.current]

    def tokens(self, *shape: int) -> Tensor:
        return torch.randint(VOCAB, shape, generator=self.generator)

    def run(self) -> None:
        for i, op in enumerate(self.case.ops):
            getattr(self, type(op).__name__.lower())(op, f"op {i} {op}")
        for i in range(len(self.tracks)):  # what later operations did to caches left behind shows here
            self.current = i
            self.decode(Decode(1), f"one token more through cache {i}")
        self.check_lengths()
        self.check_outputs()

    # Forward passes.

    def feed(self, op: Feed, name: str) -> None:
        rows = self.track.rows if op.cached else [()] * self.case.batch
        cache = self.track.cache if op.cached else None
        if op.form == "packed" and sum(op.lengths):
            news = [self.tokens(n) for n in op.lengths]
            ends = torch.tensor([0, *op.lengths]).cumsum(0)
            logits = self.model(torch.cat(news)[None], cu_seqlens=ends, cache=cache)[0].split(op.lengths)
        else:
            width = max(1, max(op.lengths) + op.extra)
            tokens, mask = self.tokens(self.case.batch, width), self.mask(op, width)
            out = self.model(tokens, mask=None if op.form == "dense" else mask, cache=cache)
            assert torch.equal(out[~mask], torch.zeros_like(out[~mask])), f"{name}: a padded output is not zero"
            news, logits = ([row[real] for row, real in zip(x, mask, strict=True)] for x in (tokens, out))
        rows = [(*row, *new.tolist()) for row, new in zip(rows, news, strict=True)]
        self.outputs += [(name, row, part) for row, part in zip(rows, logits, strict=True) if len(part)]
        if op.cached:
            self.track.rows = rows

    def mask(self, op: Feed, width: int) -> Tensor:
        mask = torch.zeros(len(op.lengths), width, dtype=torch.bool)
        for row, n, place in zip(mask, op.lengths, op.padding or ("right",) * len(op.lengths), strict=True):
            free = width - n
            first = {"left": free, "right": 0, "both": free // 2, "inside": 0}[place]
            row[first : first + n] = True
            if place == "inside":
                row.zero_()[torch.randperm(width, generator=self.generator)[:n]] = True
        return mask

    def decode(self, op: Decode, name: str) -> None:
        for step in range(op.steps):
            self.feed(Feed("dense", (1,) * self.case.batch, (), 0), f"{name} step {step}")

    # The cache.

    def clone(self, op: Clone, name: str) -> None:
        self.tracks.append(Track(self.track.cache.clone(), list(self.track.rows)))
        self.current = len(self.tracks) - 1

    def new(self, op: New, name: str) -> None:
        self.tracks.append(self.new_track())
        self.current = len(self.tracks) - 1

    def switch(self, op: Switch, name: str) -> None:
        self.current = op.to % len(self.tracks)

    def move(self, op: Move, name: str) -> None:
        self.track.cache = self.track.cache.to("cpu")

    def reorder(self, op: Reorder, name: str) -> None:
        self.track.cache.reorder(torch.tensor(op.index))
        self.track.rows = [self.track.rows[i] for i in op.index]

    def crop(self, op: Crop, name: str) -> None:
        rows, mixers = self.track.rows, [leaf for layer in self.case.spec.layers for leaf in leaves(layer.mixer)]
        longest = max(map(len, rows))
        length = max(longest - op.drop, 0)
        before = self.track.cache.clone()
        try:
            self.track.cache.crop(length)
        except ValueError:
            assert length < longest, f"{name}: refused to do nothing"
            backs = [isinstance(m, Softmax) and not m.window_size for m in mixers]
            assert not all(backs), f"{name}: refused by full attention"
            assert_same(self.track.cache, before, name)
        else:
            refuse = length < longest and any(m.recurrent for m in mixers)
            assert not refuse, f"{name}: a recurrent state was cropped"
            self.track.rows = [row[:length] for row in rows]

    def reset(self, op: Reset, name: str) -> None:
        self.track.cache.reset()
        self.track.rows = [()] * self.case.batch

    def refused(self, op: Refused, name: str) -> None:
        cache, batch = self.track.cache, self.case.batch + (op.why == "batch")
        room = self.max_length - max(map(len, self.track.rows))
        before = cache.clone()
        try:
            self.model(self.tokens(batch, room + 1), cache=cache)
        except ValueError:
            assert_same(cache, before, name)
        else:
            raise AssertionError(f"{name}: not refused")

    # The verdict.

    def check_lengths(self) -> None:
        for track in self.tracks:
            want = tuple(map(len, track.rows))
            assert track.cache.lengths == tuple(track.cache.lengths_S.tolist()) == want, "lengths of a cache"

    def check_outputs(self) -> None:
        """One reference for every history that is not the beginning of another: causality gives the rest."""
        whole: list[tuple[int, ...]] = []
        for _, row, _ in sorted(self.outputs, key=lambda output: -len(output[1])):
            if not any(longer[: len(row)] == row for longer in whole):
                whole.append(row)
        self.wants = {row: self.reference(torch.tensor([row]))[0] for row in whole}
        for row, want in self.wants.items():
            self.expect("whole, alone", row, self.model(torch.tensor([row]))[0], want)
        for name, row, got in self.outputs:
            want = next(want for longer, want in self.wants.items() if longer[: len(row)] == row)
            self.expect(name, row, got, want[len(row) - len(got) : len(row)])

    def expect(self, name: str, row: tuple[int, ...], got: Tensor, want: Tensor) -> None:
        off, tolerance = error(got, want), DTYPES[self.case.dtype]
        if tolerance < off < 100 * tolerance and self.case.dtype != "float64":
            tolerance = max(tolerance, 3 * self.rounding)
        assert off <= tolerance, f"{name}: relative RMS error {off:.2e} in the last {len(got)} of {len(row)} tokens"

    @cached_property
    def rounding(self) -> float:
        """What the naive backend in this dtype is off by at the worst token of all: some models multiply rounding."""
        naive = build(self.case.spec, self.case.seed, self.model.embed.weight.dtype, "naive")
        rows = [(naive(torch.tensor([row]))[0], want) for row, want in self.wants.items()]
        return max(error(*token) for got, want in rows for token in zip(got, want, strict=True))


def assert_same(cache: Cache, before: Cache, name: str) -> None:
    """Bit for bit what it was before something was refused."""
    assert cache.lengths == before.lengths, f"{name}: lengths changed"
    assert torch.equal(cache.lengths_S, before.lengths_S), f"{name}: lengths changed"
    for state, old in zip(cache.states, before.states, strict=True):
        for (field_name, buffer), (_, was) in zip(state.tensors(), old.tensors(), strict=True):
            assert torch.equal(buffer, was), f"{name}: {field_name} changed"


@torch.no_grad()
def check(case: Case) -> None:
    with poisoned_empty():
        Interpreter(case).run()
