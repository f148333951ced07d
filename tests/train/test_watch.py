"""What is watched while a model trains, against what is worked out by hand."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from plait import records
from plait.cost import cost
from plait.data import Group
from plait.data.spaced_retrieval import SpacedRetrieval
from plait.model.lm import LM
from plait.scoring import score_tokens
from plait.spec import Spec
from plait.train import watch
from plait.train.config import TrainConfig
from plait.train.loop import train
from plait.train.watch import Watch, head_grad_norms, note

TASK = SpacedRetrieval(gaps=(2, 9), batch_size=4, eval_pairs=4)
LAYOUT = "heads(1:gdn, 2:nope, 1:gla) mamba2[head_dim=8] full[num_kv_heads=2] mix(kda + swa[window=4])"
SPEC = Spec.from_layout(LAYOUT, vocab_size=12, d_model=16, num_layers=4, num_heads=4, d_ff=24)


def test_gradient_norms_of_heads():
    """Norms of the rows of each query projection that make one head, under the head's number in its layer."""
    model, tokens_BT = LM(SPEC), torch.randint(12, (2, 20), generator=torch.Generator().manual_seed(0))
    score_tokens(model, tokens_BT, tokens_BT).loss_N.mean().backward()
    found = {tuple(row.axes.values()): row.values["q"] for row in head_grad_norms(model)}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    places = {
        (0, 0, "gdn"): ("layers.0.mixer.parts.0.q.weight", slice(None)),
        (0, 1, "nope"): ("layers.0.mixer.parts.1.q.weight", slice(0, 4)),
        (0, 2, "nope"): ("layers.0.mixer.parts.1.q.weight", slice(4, 8)),
        (0, 3, "gla"): ("layers.0.mixer.parts.2.q.weight", slice(None)),
        **{(2, h, "full"): ("layers.2.mixer.q.weight", slice(4 * h, 4 * h + 4)) for h in range(4)},
        **{(3, h, "kda"): ("layers.3.mixer.parts.0.q.weight", slice(4 * h, 4 * h + 4)) for h in range(4)},
        **{(3, h, "swa"): ("layers.3.mixer.parts.1.q.weight", slice(4 * h, 4 * h + 4)) for h in range(4)},
    }
    assert found.keys() == places.keys()
    for place, (name, rows) in places.items():
        want = sum(x * x for x in gradients[name][rows].flatten().tolist()) ** 0.5
        assert found[place] == pytest.approx(want, rel=1e-5), place
        assert want > 0


def test_they_are_recorded_when_asked_for_and_before_clipping(tmp_path):
    spec = dataclasses.replace(SPEC, layers=SPEC.layers[2:3])

    def recorded(name: str, **fields) -> dict:
        config = TrainConfig(steps=5, warmup=5, eval_every=0, **fields)
        train(tmp_path / name, spec, TASK, config, settings={}, progress=False)
        rows = records.read(tmp_path / name / "records.jsonl")
        return {(row.step, row.axes["head"]): row.values["q"] for row in rows if row.name == "head_grad_norm"}

    each, clipped = recorded("each", head_grad_norms=1, clip=0), recorded("clipped", head_grad_norms=1, clip=1e-9)
    assert [place for place in each if place[0] == 1] == [(1, head) for head in range(4)]
    assert all(clipped[1, head] == each[1, head] > 1e-9 for head in range(4))
    assert recorded("second", head_grad_norms=2, clip=0) == {place: each[place] for place in each if place[0] in (2, 4)}
    assert recorded("frozen", head_grad_norms=2, freeze=("full.mixer:0-",)) == recorded("none") == {}


def test_mfu_and_memory(monkeypatch):
    """Three forward passes over the peak, of groups of several lengths; of an unknown device only memory."""
    now = iter((10.0, 12.0))
    monkeypatch.setattr(watch.time, "monotonic", functools.partial(next, now))
    for name, value in {"get_device_name": "NVIDIA H200", "max_memory_allocated": 3 * 2**30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    groups = [Group(torch.zeros(shape, dtype=torch.long), torch.zeros(shape)) for shape in ((3, 8), (1, 32), (0, 5))]
    seen = Watch(SPEC, TrainConfig(), torch.device("cuda"))
    seen.start()
    values = seen.values(groups)
    forward = 24 * cost(SPEC, 8).flops_per_token + 32 * cost(SPEC, 32).flops_per_token
    assert values == {"memory": 3 * 2**30, "mfu": pytest.approx(3 * forward / 2 / 989e12)}
    assert note(values | {"mfu": 0.414}) == ", 41% MFU, 3.0 GiB"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    assert Watch(SPEC, TrainConfig(), torch.device("cuda")).values(groups).keys() == {"memory"}
    assert Watch(SPEC, TrainConfig(), torch.device("cpu")).values(groups) == {}
    assert note({}) == ""
