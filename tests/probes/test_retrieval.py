"""The layer retrieval score equals its definition, run the long way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.data.spaced_retrieval import SpacedRetrieval, rows
from plait.model.lm import LM
from plait.probes import capture, layer_retrieval_scores, patch, retrieval_records
from plait.spec import Spec

TASK = SpacedRetrieval(gaps=(6,), eval_pairs=12)


def model_of(layout: str, seed: int) -> LM:
    spec = Spec.from_layout(layout, vocab_size=12, d_model=16, num_layers=4, num_heads=2, d_ff=24)
    model = LM(spec, seed=seed, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12 if parameter.ndim == 2 else 1)  # so that mixers matter
    return model


@torch.no_grad()
def scores_by_definition(model: LM, gap: int) -> torch.Tensor:
    """One full forward pass per layer, direction and pair, each prefix cut just before its answer digit."""
    pairs, total = TASK.pairs, torch.zeros(model.spec.num_layers, dtype=torch.float64)
    for i in range(len(pairs.place)):
        part = slice(i, i + 1)
        prefixes = []
        for key in (pairs.key_a, pairs.key_b):
            tokens, ask = rows(key[part], pairs.key_a[part], pairs.lead[part], gap)
            prefixes.append(torch.from_numpy(tokens[:, : ask[0] + pairs.place[i] + 1]))
        a, b = (int(key[i, pairs.place[i]]) for key in (pairs.key_a, pairs.key_b))
        for mine, theirs, x, other in ((a, b, *prefixes), (b, a, *prefixes[::-1])):
            clean = model(x)[0, -1]
            with capture(model, "layers.*.mixer.out") as outs:
                model(other)
            for layer in range(model.spec.num_layers):
                name = f"layers.{layer}.mixer.out"

                def replace_last(out, new=outs[name]):
                    return torch.cat((out[:, :-1], new[:, -1:]), 1)

                with patch(model, {name: replace_last}):
                    patched = model(x)[0, -1]
                total[layer] += (clean[mine] - clean[theirs]) - (patched[mine] - patched[theirs])
    return total / (2 * len(pairs.place))


@pytest.mark.parametrize("layout", ["gdn nope", "swa[window=5] gdn", "nope 3*gdn[conv_size=0]"])
def test_equal_to_the_definition(layout):
    model = model_of(layout, seed=1)
    fast = layer_retrieval_scores(model, TASK, 6, pairs_at_a_time=5)
    slow = scores_by_definition(model, 6)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-11)
    assert slow.abs().max() > 0.05


def test_a_layer_that_sees_no_source_scores_nothing():
    model = model_of("swa[window=3] nope", seed=2)
    with torch.no_grad():
        for block in model.layers[1::2]:
            block.mixer.o.weight.zero_()
    assert layer_retrieval_scores(model, TASK, 50).tolist() == [0] * 4


def test_records_have_layers_and_family_means():
    found = retrieval_records(model_of("gdn nope", seed=3), TASK, (6, 20), pairs=4)
    layers = [row for row in found if "layer" in row.axes and row.axes["gap"] == 6]
    assert [(row.axes["layer"], row.axes["family"]) for row in layers] == list(enumerate(["gdn", "nope"] * 2))
    mean = next(row for row in found if row.axes.get("reduce") == "mean" and row.axes["family"] == "nope")
    assert mean.values["score"] == pytest.approx(np.mean([row.values["score"] for row in layers[1::2]]))


def test_errors():
    with pytest.raises(ValueError, match="gap = -1"):
        layer_retrieval_scores(model_of("gdn nope", 0), TASK, -1)
