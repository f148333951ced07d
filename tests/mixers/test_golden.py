"""Linear mixers against golden numbers of flash-linear-attention's kernels (tests/golden/make_fla.py made them).

Each of the kernels' products was three TF32 products, near fp32, so the house's tolerances for fp32 hold: 1e-5 for
outputs and states, 1e-4 for gradients.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from plait.mixers.delta import delta_chunk, delta_naive
from plait.mixers.linear import linear_chunk, linear_naive
from plait.mixers.seq import Seq

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ("gla", "gla_packed", "gdn_grouped", "kda", "kda_packed")
ORDER = ("q", "k", "v", "g", "beta", "h0")


def load(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int] | None]:
    """Inputs, results and cu_seqlens of a case."""
    path = GOLDEN / f"{name}.safetensors"
    if not path.exists():
        pytest.skip(f"{path.name} is absent; tests/golden/make_fla.py makes it, on a GPU")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    scales = json.loads(metadata["scales"])
    inputs = {key: tensors.pop(key).float() * scale for key, scale in scales.items()}
    return inputs, tensors, json.loads(metadata["cu_seqlens"])


def run(case: str, backend: str, inputs: list[Tensor], offsets: list[int] | None) -> tuple[Tensor, Tensor]:
    *x, state = inputs
    scale = {"scale": x[0].shape[-1] ** -0.5} if case.startswith("gla") else {}
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    seq = Seq.build(tuple(x[0].shape[:2]), x[0].device, cu_seqlens=cu_seqlens)
    if backend == "torch":
        chunk = linear_chunk if case.startswith("gla") else delta_chunk
        return chunk(*x, state, seq, **scale)
    naive = linear_naive if case.startswith("gla") else delta_naive
    parts = zip(*(seq.split(y) for y in x), state.split(1), strict=True)
    outs, states = zip(*(naive(*part, **scale) for part in parts), strict=True)
    return torch.cat(outs, 0 if seq.dense else 1), torch.cat(states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["naive", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_kernels(case, backend, dtype):
    x, golden, offsets = load(case)
    do, dht = (x.pop(name).to(dtype) for name in ("do", "dht"))
    inputs = [x[name].to(dtype).requires_grad_() for name in ORDER if name in x]
    o, ht = run(case, backend, inputs, offsets)
    grads = torch.autograd.grad([o, ht], inputs, [do, dht])
    names = [f"d{name}" for name in ORDER if name in x]
    for name, value in zip(("o", "ht", *names), (o, ht, *grads), strict=True):
        expected = golden[name].double()
        error = float((value.detach().double() - expected).norm() / expected.norm())
        assert error < (1e-4 if name.startswith("d") else 1e-5), (name, error)
