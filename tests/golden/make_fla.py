"""Golden numbers of flash-linear-attention's own ops, for mixers that nothing on a CPU can be compared with.

    python tests/golden/make_fla.py [DIRECTORY]

on a CUDA device with fla 0.6 installed writes gla, gla_packed, gdn_grouped, kda and kda_packed.safetensors to DIRECTORY
(by default, beside this file). Each holds the inputs as small integers, with the power of two that scales them in the
metadata (exact, and a quarter of the bytes), and in fp32 the outputs, final states and gradients of everything, for
upstream gradients do of the outputs and dht of the final states. tests/mixers/test_golden.py reads them.

Every matrix product is three TF32 products (tf32x3), whose error is near that of fp32; in IEEE fp32 the delta rules'
kernels take many minutes to compile. fla leaves fp32 products to Triton's default, tf32, which TRITON_F32_DEFAULT
overrides, and asks for tf32 by name in the triangular inverse of its delta rules (SOLVE_TRIL_DOT_PRECISION), which is
replaced before anything is compiled. Of the configurations that fla would try for speed, two are.

Where fla refuses the backward of its gated delta rule (Hopper with Triton 3.4 to 3.7.0, its issue 640), the gradients
of gdn_grouped are those of its chunk_kda with that decay on every channel, once both forwards agree.
"""

# ruff: noqa: E402 - what is set here must be set before fla is imported
from __future__ import annotations

import os
import sys
import tempfile

os.environ["TRITON_F32_DEFAULT"] = "tf32x3"
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # nothing compiled at another precision

import json
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

_init = Autotuner.__init__


def _try_two(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    self.configs = self.configs[:2]


Autotuner.__init__ = _try_two

import fla
from fla.ops.gated_delta_rule import chunk_fwd as gdn_kernels
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gla import chunk_gla
from fla.ops.kda import chunk_intra as kda_kernels
from fla.ops.kda import chunk_kda
from safetensors.torch import save_file

for module in (gdn_kernels, kda_kernels):
    module.SOLVE_TRIL_DOT_PRECISION = tl.constexpr("tf32x3")
torch.backends.cuda.matmul.allow_tf32 = False
PRECISION = "tf32x3 in every product"

SCALES = {"q": 2**-7, "k": 2**-9, "v": 2**-6, "g": 2**-6, "beta": 2**-7, "h0": 2**-6, "do": 2**-6, "dht": 2**-6}
"""value = integer times this: entries of q in [-1, 1], of k in [-1/4, 1/4] (vectors at most about unit length), g in
[-2, 0], beta in [0, 1]"""
RANGES = {"g": (-127, 1), "beta": (0, 128)}


def inputs(seed: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(*RANGES.get(name, (-127, 128)), shape, generator=generator, dtype=torch.int8)
        for name, shape in shapes.items()
    }


def run(op, x: dict[str, torch.Tensor], cu_seqlens: list[int] | None) -> dict[str, torch.Tensor]:
    """Outputs and gradients of op(inputs, cu_seqlens) -> (o, ht), all in fp32."""
    x = {name: (value.cuda().float() * SCALES[name]) for name, value in x.items()}
    do, dht = x.pop("do"), x.pop("dht")
    for value in x.values():
        value.requires_grad_()
    offsets = None if cu_seqlens is None else torch.tensor(cu_seqlens, device="cuda")
    o, ht = op(x, offsets)
    grads = torch.autograd.grad([o, ht], list(x.values()), [do, dht])
    named = {f"d{name}": grad for name, grad in zip(x, grads, strict=True)}
    return {name: value.detach().contiguous().cpu() for name, value in {"o": o, "ht": ht, **named}.items()}


def gla(x, cu_seqlens):
    return chunk_gla(
        x["q"], x["k"], x["v"], x["g"], initial_state=x["h0"], output_final_state=True, cu_seqlens=cu_seqlens
    )


def kda(x, cu_seqlens):
    return chunk_kda(**_delta(x), output_final_state=True, cu_seqlens=cu_seqlens)


def grouped(op, expand: bool):
    """Query head h reads state h // G: fla has no such grouping, so each query gets a copy of its state's inputs."""

    def run_grouped(x, cu_seqlens):
        G = x["q"].shape[2] // x["k"].shape[2]
        y = {name: value.repeat_interleave(G, 1 if name == "h0" else 2) for name, value in x.items() if name != "q"}
        y["q"] = x["q"]
        if expand:
            y["g"] = y["g"][..., None].expand(y["k"].shape)
        o, ht = op(**_delta(y), output_final_state=True, cu_seqlens=cu_seqlens)
        return o, ht[:, ::G]

    return run_grouped


def _delta(x):
    return {**{name: x[name] for name in ("q", "k", "v", "g", "beta")}, "initial_state": x["h0"]}


def shapes(T: int, H: int, S: int, K: int, V: int, *, states: int, channels: bool, beta: bool):
    return {
        "q": (1, T, H, K),
        "k": (1, T, S, K),
        "v": (1, T, S, V),
        "g": (1, T, S, K) if channels else (1, T, S),
        **({"beta": (1, T, S)} if beta else {}),
        "h0": (states, S, K, V),
        "do": (1, T, H, V),
        "dht": (states, S, K, V),
    }


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def gdn_grouped(x, cu_seqlens):
    detour = run(grouped(chunk_kda, expand=True), x, cu_seqlens)
    try:
        return run(grouped(chunk_gated_delta_rule, expand=False), x, cu_seqlens), "chunk_gated_delta_rule"
    except RuntimeError as refusal:
        if "640" not in str(refusal):
            raise
    with torch.no_grad():
        y = {name: value.cuda().float() * SCALES[name] for name, value in x.items()}
        o, ht = grouped(chunk_gated_delta_rule, expand=False)(y, None)
    apart = max(distance(detour["o"], o.cpu()), distance(detour["ht"], ht.cpu()))
    assert apart < 1e-5, apart
    return {**detour, "o": o.cpu(), "ht": ht.contiguous().cpu()}, "chunk_gated_delta_rule, gradients by chunk_kda"


CASES = {
    "gla": (shapes(65, 2, 2, 16, 32, states=1, channels=True, beta=False), None),
    "gla_packed": (shapes(44, 1, 1, 16, 16, states=3, channels=True, beta=False), [0, 17, 18, 44]),
    "gdn_grouped": (shapes(17, 6, 2, 46, 46, states=1, channels=False, beta=True), None),
    "kda": (shapes(33, 2, 2, 16, 32, states=1, channels=True, beta=True), None),
    "kda_packed": (shapes(28, 1, 1, 16, 32, states=3, channels=True, beta=True), [0, 15, 16, 28]),
}


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for seed, (name, (sizes, cu_seqlens)) in enumerate(CASES.items()):
        x = inputs(seed, sizes)
        if name == "gdn_grouped":
            results, op = gdn_grouped(x, cu_seqlens)
        elif name.startswith("gla"):
            results, op = run(gla, x, cu_seqlens), "chunk_gla"
        else:
            results, op = run(kda, x, cu_seqlens), "chunk_kda"
        metadata = {
            "op": op,
            "scales": json.dumps({key: SCALES[key] for key in x}),
            "cu_seqlens": json.dumps(cu_seqlens),
            "precision": PRECISION,
            "made by": "python tests/golden/make_fla.py",
            "versions": f"fla {fla.__version__}, triton {triton.__version__}, torch {torch.__version__}",
            "device": torch.cuda.get_device_name(),
        }
        save_file({**x, **results}, directory / f"{name}.safetensors", metadata)
        print(name, op, {key: tuple(value.shape) for key, value in results.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
