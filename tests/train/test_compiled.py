"""Training with compiled blocks is training."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from plait import records
from plait.data.spaced_retrieval import SpacedRetrieval
from plait.model.lm import LM
from plait.probes.points import capture
from plait.records import Record
from plait.spec import Spec
from plait.train.config import TrainConfig
from plait.train.loop import Measure, train

TASK = SpacedRetrieval(gaps=(2,), batch_size=4, eval_pairs=4)
CONFIG = TrainConfig(steps=2, warmup=1, lr=1e-2)


def losses(path) -> list[float]:
    return [row.values["loss"] for row in records.read(path / "records.jsonl") if row.name == "loss"]


def compared(tmp_path, layout: str, **fields) -> tuple[LM, LM]:
    """A model trained eagerly and one in compiled blocks, whose losses agree; measurements see all taps in both."""
    spec = Spec.from_layout(layout, vocab_size=12, d_model=16, num_layers=2, num_heads=2, d_ff=24)
    seen = []

    def measure(model: LM) -> list[Record]:
        with capture(model, "layers.*.mixer.heads") as found, torch.no_grad():
            model.hidden(torch.zeros(1, 7, dtype=torch.long))
        seen.append(len(found))
        return []

    models = []
    for compile in (False, True):
        config = dataclasses.replace(CONFIG, compile=compile, **fields)
        path = tmp_path / str(compile)
        models.append(train(path, spec, TASK, config, settings={}, measures=[Measure(1, measure)], progress=False))
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-5)
    assert seen == 2 * [2, 2, 2]
    return models[0], models[1]


def assert_close(a: LM, b: LM) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert (x - y).norm() <= 1e-4 * x.norm(), name


def test_blocks_are_compiled_for_updates_and_measured_as_they_are(tmp_path, monkeypatch):
    calls = []

    def compiler(graph: torch.fx.GraphModule, inputs):
        calls.append(len(inputs))
        return graph

    def compile(self: nn.Module, **options) -> None:
        self._compiled_call_impl = torch.compile(self._call_impl, backend=compiler, **options)

    monkeypatch.setattr(nn.Module, "compile", compile)
    eager, compiled = compared(tmp_path, "nope full")
    assert_close(eager, compiled)
    assert len(calls) == 2  # a form for each kind of layer, none for what is measured
    assert all(block._compiled_call_impl is None for block in compiled.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_updates_equal_eager_ones(tmp_path, recompute):
    assert_close(*compared(tmp_path, "gdn nope", recompute=recompute))
