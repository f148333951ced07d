"""`plait bench decode`: whole models, plait's against transformers', with the same weights, in one process.

A prompt is fed, then tokens one by one; every competitor in turn inside every repeat, medians over the repeats. A step
includes the choice of the likeliest token and the wait for it. `ratio` is a competitor's time over that of plait's
first mode. Where the project promises a ratio, `bar` is it.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import inspect
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from plait.bench.rows import OURS, Row, device_name, dtype_name, judged, mb
from plait.bench.timing import reason
from plait.fields import suggest
from plait.mixers import Backend
from plait.model.decode import Decoder, Mode
from plait.model.generate import prefill
from plait.model.io import load
from plait.model.lm import LM
from plait.presets import preset
from plait.spec import Spec

PREFILL, STEP = "prefill", "one token"
BARS = {"cpu": ("smollm2-135m", {PREFILL: 1.0, STEP: 1.2}), "cuda": (None, {PREFILL: 1.0, STEP: 1.5})}
"""of a device: the model they are for (None: each) and how many times as long transformers must take"""
WARM_UP = 4
"""steps before those that count: a graph is captured in the third"""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model with random weights: a config of transformers, and a Spec where plait's weights are its own."""

    model_type: str
    config: dict[str, Any]
    spec: Callable[[], Spec] | None = None


SHAPES = {
    "smollm2-135m": Shape(
        "llama",
        {
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "vocab_size": 49152,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-1.7b": Shape(
        "qwen3",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 6144,
            "vocab_size": 151936,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
    ),
    "gdn-1b": Shape(
        "olmo_hybrid",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 7168,
            "vocab_size": 128256,
            "layer_types": 4 * [*3 * ["linear_attention"], "full_attention"],
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_allow_neg_eigval": False,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
        lambda: preset("001/1B/GDN-NoPE-LH"),
    ),
}
"""gdn-1b: the layers and sizes of 001's `3*gdn nope`; transformers has them in Olmo-Hybrid"""


def bench_decode(
    *,
    models: Sequence[str] | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    modes: Sequence[Mode] = ("auto",),
    steps: int = 32,
    repeats: int = 3,
    minutes: float | None = None,
) -> list[Row]:
    """Rows of every model, batch, context, pass and competitor: case, batch, length, pass, competitor, median_ms,
    tokens_per_s, cache_mb, ratio, and `difference`, the largest of the prompt's logits over the largest logit.

    models: names in SHAPES or checkpoints that transformers and plait.load take. modes: of plait's Decoder. minutes: no
    combination begins later. What cannot run has a row whose `note` says why.
    """
    cuda = torch.device(device).type == "cuda"
    models = models or (tuple(SHAPES) if cuda else ("smollm2-135m",))
    contexts, batches = contexts or ((4096, 32768) if cuda else (2048,)), batches or ((1, 8) if cuda else (1,))
    for field, values in {"contexts": contexts, "batches": batches, "steps": (steps,), "repeats": (repeats,)}.items():
        if min(values) < 1:
            raise ValueError(f"{field}: {min(values)}; it must be at least 1")
    for mode in modes:
        if mode not in get_args(Mode):
            raise ValueError(f"modes: {mode!r} is unknown; {suggest(mode, get_args(Mode))}")
    for name in models:
        if name not in SHAPES and not Path(name).is_dir():
            raise ValueError(f"model: {name!r} is no directory and no shape; {suggest(name, SHAPES)}")
    start, rows = time.monotonic(), []
    for name in models:
        ours, theirs = _pair(name, torch.device(device), dtype)
        for batch in batches:
            for length in contexts:
                late = minutes is not None and time.monotonic() - start > 60 * minutes
                print(f"{name}, {batch} x {length}{', not run' if late else ''}", file=sys.stderr, flush=True)
                fields = {"case": name, "device": device_name(torch.device(device)), "dtype": dtype_name(dtype)}
                fields |= {"batch": batch, "length": length}
                if late:
                    rows.append({**fields, "competitor": OURS, "note": f"not run: {minutes:g} minutes were over"})
                    continue
                sides = [*(_Ours(ours, mode) for mode in modes), _Theirs(theirs), _Generate(theirs)]
                _race(sides, _prompt(ours, batch, length), steps, repeats)
                barred, bars = BARS["cuda" if cuda else "cpu"]
                rows += _rows(sides, fields, bars if barred in (None, name) else {})
        del ours, theirs
    return rows


def _pair(name: str, device: torch.device, dtype: torch.dtype) -> tuple[LM, nn.Module]:
    """plait's model and transformers'."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    backend: Backend = "auto" if device.type == "cuda" else "torch"
    if name not in SHAPES:
        theirs: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        return load(name, backend=backend, device=device, dtype=dtype), theirs.to(device).eval()
    shape = SHAPES[name]
    torch.manual_seed(0)
    longest = 1 << 20  # of no weight; plait reads it as the context
    config = AutoConfig.for_model(shape.model_type, max_position_embeddings=longest, **shape.config)
    with device:
        theirs = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if shape.spec is not None:
        return LM(shape.spec(), backend=backend, device=device, dtype=dtype), theirs
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return load(folder, backend=backend, device=device, dtype=dtype), theirs


class _Side:
    """A competitor, and what was measured of it."""

    name: str

    def __init__(self):
        self.ms: dict[str, list[float]] = {PREFILL: [], STEP: []}
        self.note: str | None = None
        self.token_B: Tensor | None = None
        self.logits_BV: Tensor | None = None
        """after the prompt"""
        self.cache_bytes: int | None = None

    def prompt(self, tokens_BT: Tensor, room: int) -> Tensor:
        """Feed a prompt after which `room` tokens come: logits_BV."""
        raise NotImplementedError

    def step(self, token_B: Tensor) -> Tensor:
        raise NotImplementedError

    def size(self) -> int:
        """Bytes of the cache."""
        raise NotImplementedError

    def start(self, tokens_BT: Tensor, steps: int, keep: bool) -> None:
        self.logits_BV = self._timed(PREFILL, keep, self.prompt, tokens_BT, WARM_UP + steps).float().clone()

    def advance(self, keep: bool) -> None:
        assert self.token_B is not None
        self._timed(STEP, keep, self.step, self.token_B)
        self.cache_bytes = self.size()

    def _timed(self, kind: str, keep: bool, call: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Logits of a call; its time, with that of choosing the likeliest tokens, counts if `keep`."""
        start = time.perf_counter()
        logits_BV = call(*inputs)
        self.token_B = logits_BV.argmax(-1)
        self.token_B[0].item()  # waits for the device
        if keep:
            self.ms[kind].append(1e3 * (time.perf_counter() - start))
        return logits_BV

    def attempt(self, call: Callable[..., None], *inputs: Any) -> None:
        if self.note is None:
            try:
                call(*inputs)
            except Exception as error:  # memory, most likely
                self.note = reason(error)


class _Ours(_Side):
    def __init__(self, model: LM, mode: Mode):
        super().__init__()
        self.name = OURS if mode == "auto" else f"{OURS} {mode}"
        self.model = model
        self.mode: Mode = mode
        self.decoder: Decoder | None = None

    def prompt(self, tokens_BT: Tensor, room: int) -> Tensor:
        if self.decoder is None:
            cache = self.model.new_cache(len(tokens_BT), tokens_BT.shape[1] + room)
            self.decoder = Decoder(self.model, cache, mode=self.mode)
        self.decoder.cache.reset()
        return prefill(self.model, tokens_BT, self.decoder.cache)

    def step(self, token_B: Tensor) -> Tensor:
        assert self.decoder is not None
        return self.decoder(token_B)

    def size(self) -> int:
        assert self.decoder is not None
        return self.decoder.cache.num_bytes


class _Theirs(_Side):
    """A loop over the model's forward with its growing cache."""

    name = "transformers"

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model: Any = model
        self.word = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.cache: Any = None

    def prompt(self, tokens_BT: Tensor, room: int) -> Tensor:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        return self._logits(tokens_BT)

    def step(self, token_B: Tensor) -> Tensor:
        return self._logits(token_B[:, None])

    def _logits(self, tokens_BT: Tensor) -> Tensor:
        return self.model(tokens_BT, use_cache=True, logits_to_keep=1, **{self.word: self.cache}).logits[:, -1]

    def size(self) -> int:
        return sum(x.nbytes for layer in self.cache.layers for x in _tensors(vars(layer).values()))


class _Generate(_Side):
    """transformers' generate. A step is what one more token costs it: its times are of whole calls."""

    name = "transformers generate"

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def start(self, tokens_BT: Tensor, steps: int, keep: bool) -> None:
        steps, times = steps if keep else WARM_UP, []
        for count in (1, 1 + steps):
            options: dict[str, Any] = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False}
            begin = time.perf_counter()
            mask = torch.ones_like(tokens_BT)
            self.model.generate(tokens_BT, attention_mask=mask, pad_token_id=0, **options)[0, -1].item()
            times.append(1e3 * (time.perf_counter() - begin))
        if keep:
            self.ms[PREFILL].append(times[0])
            self.ms[STEP].append((times[1] - times[0]) / steps)

    def advance(self, keep: bool) -> None:
        """Done in start."""


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from _tensors(value.values() if isinstance(value, dict) else value)


def _prompt(model: LM, batch: int, length: int) -> Tensor:
    tokens_BT = torch.randint(model.spec.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    return tokens_BT.to(model.embed.weight.device)


@torch.no_grad()
def _race(sides: Sequence[_Side], tokens_BT: Tensor, steps: int, repeats: int) -> None:
    """Prompts one after another, then a step of each in turn, again and again; what raises drops out with a note."""
    for keep in (False, *repeats * [True]):  # the first warms up
        for side in sides:
            side.attempt(side.start, tokens_BT, steps, keep)
        for i in range(WARM_UP + steps * keep):
            for side in sides:
                side.attempt(side.advance, i >= WARM_UP)


def _rows(sides: Sequence[_Side], fields: Row, bars: dict[str, float]) -> list[Row]:
    rows, first = [], sides[0]
    for kind in (PREFILL, STEP):
        for side in sides:
            row = {**fields, "pass": kind, "competitor": side.name}
            if side.note is not None or not side.ms[kind]:
                rows.append({**row, "note": side.note})
                continue
            ms = statistics.median(side.ms[kind])
            tokens = fields["batch"] * (fields["length"] if kind == PREFILL else 1)
            row |= {"median_ms": ms, "repeats": len(side.ms[kind]), "tokens_per_s": 1e3 * tokens / ms}
            if first.ms[kind]:
                own = None if isinstance(side, _Ours) else bars.get(kind)
                row |= judged(ms / statistics.median(first.ms[kind]), own)
            row["cache_mb"] = mb(side.cache_bytes)
            rows.append(row | (_difference(side, first) if kind == PREFILL else {}))
    return rows


def _difference(side: _Side, first: _Side) -> Row:
    a, b = side.logits_BV, first.logits_BV
    return {} if a is None or b is None or side is first else {"difference": float((a - b).abs().max() / b.abs().max())}
