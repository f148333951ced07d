"""`plait bench train`: updates of whole models, plait's against those of the same shapes in transformers and fla.

An update is forward, backward and AdamW (fused on CUDA), of a fixed number of tokens; under bf16 autocast over fp32
parameters on CUDA, in fp32 on a CPU. plait computes its loss as its training loop does, the others from `labels`, as
their users do. `ratio` is a competitor's time over plait's, measured in one process; where the project promises one,
`bar` is it. Hybrids also run against their own full-attention twin. MFU is of the FLOPs of plait.cost over the data
sheet's peak, or, where that does not know the device, that of a measured matrix product. Memory is all that a
competitor needs: weights, optimizer state, and an update at its height.

What runs out of memory is tried once more with its layers recomputed in the backward pass, and says so.

Shapes: B rows, T tokens.
"""

# fla is not where the checker runs
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.bench.roofline import peaks
from plait.bench.rows import COMPILED, OURS, Options, Row, device_name, dtype_name, dtype_of, mb, measure
from plait.bench.timing import reason
from plait.config import Gdn, Gla, Heads, Mix, Softmax
from plait.cost import cost, full_attention_twin, peak_flops
from plait.data import IGNORE
from plait.fields import suggest
from plait.mixers import Backend
from plait.mixers.base import check_backend
from plait.mixers.fla import why_not
from plait.model import families
from plait.model.lm import LM
from plait.presets import preset
from plait.scoring import score_tokens
from plait.spec import Spec
from plait.train.compiled import compile_blocks
from plait.train.config import TrainConfig
from plait.train.optimizer import make_optimizer

VARIANTS = ("RoPE", "SWA-NoPE-LH", "GDN-NoPE-LH", "GLA-NoPE-LH", "SWA-NoPE-HH", "GDN-NoPE-HH", "GLA-NoPE-HH")
SIZES = {"cpu": ("small/3M", (128, 512), 512), "cuda": ("001/376M", (4096, 32768), 32768)}
"""of a device: the presets' family and size, lengths, tokens of an update"""
Built = tuple[nn.Module, Callable[[Tensor], Tensor]]
"""a model, and the mean loss of tokens_BT"""
COMPILE = ("false", "true", "both")
SPREAD = ("ddp", "fsdp")
TWIN = "plait, full attention"
BAR, TWIN_BAR, LONG = 1.0, 1.5, 32768
"""competitors' time over plait's; the full-attention twin's over that of a layer-wise hybrid, from LONG tokens on"""


def bench_train(
    *,
    models: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    tokens: int | None = None,
    device: str = "cpu",
    compile: str = "false",
    backend: Backend | None = None,
    repeats: int = 5,
    without: Sequence[str] = (),
    minutes: float | None = None,
    parallel: Sequence[str] = (),
) -> Iterator[list[Row]]:
    """Rows of one model and length after another: case, batch, length, competitor, median_ms, tokens_per_s,
    mfu_percent, peak_mb, ratio, bar, met, note.

    models: presets. tokens: of an update, in whole rows, at least one. compile: plait's blocks: false, true or both.
    backend: of plait's recurrences; None: auto on CUDA, torch on a CPU.
    without: words in the names of competitors that are left out. minutes: no case begins later. parallel: ddp, fsdp, of
    the processes that torchrun started, which then compete with each of them alone (plait.bench.scaling).
    """
    options = Options(torch.device(device), None, repeats, tuple(without))
    kind = "cuda" if options.cuda else "cpu"
    size, usual_lengths, usual_tokens = SIZES[kind]
    models = models or [f"{size}/{variant}" for variant in VARIANTS]
    lengths, tokens = lengths or usual_lengths, usual_tokens if tokens is None else tokens
    for field, values in {"lengths": lengths, "tokens": (tokens,), "repeats": (repeats,)}.items():
        if min(values) < 1:
            raise ValueError(f"{field}: {min(values)}; it must be at least 1")
    if compile not in COMPILE:
        raise ValueError(f"compile: {compile!r}; {suggest(compile, COMPILE)}")
    backend = backend or ("auto" if options.cuda else "torch")
    check_backend(backend)
    specs = {name: dataclasses.replace(preset(name), context_length=max(lengths)) for name in models}
    if parallel:
        if without or compile != "false":
            raise ValueError("parallel: compile and without are for a single process; leave them out")
        for kind in parallel:
            if kind not in SPREAD:
                raise ValueError(f"parallel: {kind!r}; {suggest(kind, SPREAD)}")
        from plait.bench.scaling import bench_scaling

        shared = {"device": device, "backend": backend, "repeats": repeats, "minutes": minutes}
        return bench_scaling(specs, lengths, tokens, parallel=parallel, **shared)
    ours = partial(_ours, options.device, backend)
    fields = {"device": device_name(options.device), "dtype": dtype_name(dtype_of(options.device)), "backend": backend}
    return _cases(specs, lengths, tokens, partial(_sides, ours, compile, options), fields, options, minutes)


def _cases(
    specs: dict[str, Spec],
    lengths: Sequence[int],
    tokens: int,
    build: Callable[[Spec], Iterator[Side]],
    common: Row,
    options: Options,
    minutes: float | None,
) -> Iterator[list[Row]]:
    start = time.monotonic()
    for name, spec in specs.items():
        sides: list[Side] = []
        for length in lengths:
            batch = max(1, tokens // length)
            fields = {"case": name, **common, "batch": batch, "length": length}
            late = minutes is not None and time.monotonic() - start > 60 * minutes
            print(f"{name}, {batch} x {length}{', not run' if late else ''}", file=sys.stderr, flush=True)
            if late:
                yield [{**fields, "competitor": OURS, "note": f"not run: {minutes:g} minutes were over"}]
                continue
            sides = sides or list(build(spec))
            yield _race(sides, spec, fields, options)
        sides.clear()
        gc.collect()
        if options.cuda:
            torch.cuda.empty_cache()


class Side:
    """A competitor; what fails anywhere leaves a note."""

    def __init__(self, name: str, build: Callable[[], Built], device: torch.device):
        self.name, self.device = name, device
        self.failed = False
        self.note: str | None = None
        self.model: Any = None
        self.loss: Callable[[Tensor], Tensor] | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.attempt(partial(self._build, build))

    def _build(self, build: Callable[[], Built]) -> None:
        self.model, self.loss = build()
        self.model.train()
        config = TrainConfig()
        own = isinstance(self.model, LM)
        if own:
            self.optimizer = make_optimizer(self.model, config)
        else:
            fused = True if self.device.type == "cuda" else None
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=fused)

    def attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # memory, a kernel that refuses, what is not installed
            self.failed, self.note = True, reason(error)

    def update(self, tokens_BT: Tensor) -> None:
        assert self.loss is not None and self.optimizer is not None
        with _autocast(self.device):
            loss = self.loss(tokens_BT)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def warm_up(self, tokens_BT: Tensor) -> None:
        """An update; one that memory is too small for again, with layers recomputed."""
        if self.failed:
            return
        self.attempt(lambda: self.update(tokens_BT))
        if self.failed and self.note == "out of memory":
            self.model.zero_grad(set_to_none=True)
            gc.collect()
            self.failed, self.note = False, "layers recomputed: out of memory otherwise"
            if isinstance(self.model, LM):
                self.model.recompute = partial(checkpoint, use_reentrant=False)
            else:
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.attempt(lambda: self.update(tokens_BT))
        if self.failed:  # others need the memory
            self.model = self.loss = self.optimizer = None
            gc.collect()

    def held_bytes(self) -> int:
        """Of weights and optimizer state."""
        assert self.optimizer is not None
        states = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        return sum(x.nbytes for x in itertools.chain(self.model.parameters(), states))


def _autocast(device: torch.device) -> contextlib.AbstractContextManager:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def _race(sides: Sequence[Side], spec: Spec, fields: Row, options: Options) -> list[Row]:
    batch, length = fields["batch"], fields["length"]
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(spec.vocab_size, (batch, length), generator=generator).to(options.device)
    for side in sides:
        side.warm_up(tokens_BT)
    running = [side for side in sides if not side.failed]
    peak = best_flops(options.device)
    held = {side.name: side.held_bytes() for side in running}
    flops = {
        name: 3 * cost(full_attention_twin(spec) if name == TWIN else spec, length).flops_per_token for name in held
    }

    def timed(name: str, ms: float) -> Row:
        rate = batch * length / ms * 1e3
        return {"tokens_per_s": rate, "mfu_percent": 100 * rate * flops[name] / peak}

    bars = {side.name: BAR for side in running if not side.name.startswith(OURS)}
    if length >= LONG and not any(isinstance(layer.mixer, Heads | Mix) for layer in spec.layers):
        bars[TWIN] = TWIN_BAR
    calls = {side.name: partial(side.update, tokens_BT) for side in running}
    rows = measure(calls, fields, options, reference=sides[0].name, bars=bars, timed=timed) if calls else []
    for row in rows:
        if row.get("peak_mb") is not None:
            row["peak_mb"] += mb(held[row["competitor"]])
    rows += [{**fields, "competitor": side.name} for side in sides if side.failed]
    notes = {side.name: {"note": side.note} for side in sides if side.note}
    return [{**notes.get(row["competitor"], {}), **row} for row in rows]


def best_flops(device: torch.device) -> float:
    """A second: the data sheet's, or measured where that does not know the device."""
    peak = peak_flops(device_name(device)) if device.type == "cuda" else None
    return peak or peaks(device, dtype_of(device)).flops


def _sides(ours: Callable[..., Any], compile: str, options: Options, spec: Spec) -> Iterator[Side]:
    """plait's come first: the first is what the others are compared with."""
    twin, first = full_attention_twin(spec), COMPILED if compile == "true" else OURS
    builds: dict[str, Callable[[], Any] | None] = {
        OURS: partial(ours, spec) if compile != "true" else None,
        COMPILED: partial(ours, spec, compiled=True) if compile != "false" else None,
        TWIN: partial(ours, twin, compiled=compile == "true") if twin != spec else None,
        "transformers": partial(_transformers, spec, options.device),
        "fla": partial(_fla, spec, options.device) if options.cuda else None,
    }
    for name, build in builds.items():
        if build is not None and (name == first or options.keeps(name)):
            yield Side(name, build, options.device)


def _ours(device: torch.device, backend: Backend, spec: Spec, compiled: bool = False) -> Built:
    model = LM(spec, device=device, backend=backend)
    if compiled:
        compile_blocks(model)

    def loss(tokens_BT: Tensor) -> Tensor:
        return score_tokens(model, tokens_BT, F.pad(tokens_BT[:, 1:], (0, 1), value=IGNORE)).loss_N.mean()

    return model, loss


def _labelled(model: Any) -> Built:
    return model, lambda tokens_BT: model(tokens_BT, labels=tokens_BT, use_cache=False).loss


def _transformers(spec: Spec, device: torch.device) -> Built:
    """llama for RoPE, smollm3 for windows and layers without positions, olmo_hybrid for GDN (its attention normalizes
    queries and keys, and the branch's output instead of its input)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = None
    for name in ("llama", "smollm3"):
        with contextlib.suppress(ValueError):
            config = config or families.write(spec, name)
    if config is None:
        if {type(layer.mixer) for layer in spec.layers} != {Gdn, Softmax}:
            raise ValueError("it has no such layers")
        config = AutoConfig.for_model("olmo_hybrid", **_olmo_hybrid(spec))
    with device:
        return _labelled(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def _olmo_hybrid(spec: Spec) -> dict[str, Any]:
    mixers = [layer.mixer for layer in spec.layers]
    gdn, softmax = (next(mixer for mixer in mixers if isinstance(mixer, kind)) for kind in (Gdn, Softmax))
    assert isinstance(gdn, Gdn) and isinstance(softmax, Softmax)
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "intermediate_size": spec.layers[0].d_ff,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": softmax.num_heads,
        "num_key_value_heads": softmax.num_kv_heads,
        "layer_types": ["linear_attention" if isinstance(mixer, Gdn) else "full_attention" for mixer in mixers],
        "linear_num_key_heads": gdn.num_heads,
        "linear_num_value_heads": gdn.num_v_heads,
        "linear_key_head_dim": gdn.head_dim,
        "linear_value_head_dim": gdn.value_dim,
        "linear_conv_kernel_dim": gdn.conv_size,
        "linear_allow_neg_eigval": gdn.allow_neg_eigval,
        "max_position_embeddings": spec.context_length,
        "tie_word_embeddings": spec.tie_embeddings,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _fla(spec: Spec, device: torch.device) -> Built:
    """Its Transformer, GLA or Gated DeltaNet model, whose attention layers are full; without RoPE where ours are."""
    if (why := why_not(device)) is not None:
        raise ValueError(why)
    name, settings = fla_settings(spec)
    import fla.layers.attn
    import fla.models

    if fla.layers.attn.flash_attn_func is None:  # flash-attn is not installed: torch's own flash kernels
        fla.layers.attn.flash_attn_func = _flash_attention
    with device:
        model: Any = getattr(fla.models, f"{name}ForCausalLM")(getattr(fla.models, f"{name}Config")(**settings))
    for layer, ours in zip(model.model.layers, spec.layers, strict=True):
        if isinstance(ours.mixer, Softmax) and ours.mixer.rope_theta is None:
            layer.attn.rotary = _NoPositions()
    return _labelled(model)


def fla_settings(spec: Spec) -> tuple[str, dict[str, Any]]:
    """The model of fla with these layers, and its config's settings; ValueError where it has none."""
    mixers = [layer.mixer for layer in spec.layers]
    attention = [i for i, mixer in enumerate(mixers) if isinstance(mixer, Softmax)]
    others = [mixer for mixer in mixers if not isinstance(mixer, Softmax)]
    if len(set(others)) > 1 or any(isinstance(m, Softmax) and m.window_size for m in mixers):
        raise ValueError("it has no such layers")
    settings = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "intermediate_size": spec.layers[0].d_ff,
        "num_hidden_layers": spec.num_layers,
        "max_position_embeddings": spec.context_length,
        "tie_word_embeddings": spec.tie_embeddings,
        "num_heads": mixers[0].num_heads,
    }
    attn = {"layers": attention, "num_heads": mixers[attention[0]].num_heads} if attention else None
    match others[:1]:
        case []:
            return "Transformer", settings
        case [Gdn() as gdn]:
            own = {"head_dim": gdn.head_dim, "expand_v": gdn.expand_v, "conv_size": gdn.conv_size}
            return "GatedDeltaNet", {**settings, **own, "use_gate": gdn.output_gate, "attn": attn}
        case [Gla() as gla]:
            own = {"expand_k": gla.num_heads * gla.key_dim / spec.d_model, "use_short_conv": gla.conv_size > 0}
            return "GLA", {**settings, **own, "use_output_gate": gla.output_gate, "attn": attn}
    raise ValueError("it has no such layers")


class _NoPositions(nn.Module):
    def forward(self, q: Tensor, k: Tensor, **unused: Any) -> tuple[Tensor, Tensor]:
        return q, k


def _flash_attention(q_BTHE: Tensor, k_BTHE: Tensor, v_BTHE: Tensor, **unused: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTHE, v_BTHE))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
