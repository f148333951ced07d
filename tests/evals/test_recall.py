"""MQAR's rows, and recall suites on models that cannot and that can."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from evals.tiny import tiny_model

from plait import LM, Spec, cost, records, save
from plait.cli import main
from plait.data import IGNORE
from plait.data.mqar import MQAR
from plait.data.spaced_retrieval import VOCAB_SIZE, SpacedRetrieval
from plait.evals import recall
from plait.evals.results import read_rows
from plait.evals.suites import Mqar, Spaced, Subject
from plait.train.held_out import held_out


@pytest.mark.parametrize(("pairs", "vocab_size"), [(4, 64), (16, 64), (64, 256), (256, 8192)])
def test_rows_of_mqar(pairs, vocab_size):
    task = MQAR(vocab_size=vocab_size, pairs=(pairs,), eval_rows=20)
    (group,) = task.held_out()
    assert group.axes == {"pairs": pairs} and group.tokens_BT.shape == (20, max(64, 4 * pairs))
    for tokens, targets in zip(group.tokens_BT.numpy(), group.targets_BT.numpy(), strict=True):
        keys, values = tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == pairs and keys.min() >= 1 and keys.max() < vocab_size // 2 <= values.min()
        (asked,) = np.nonzero(targets != IGNORE)
        assert len(asked) == pairs and asked.min() >= 2 * pairs and len(set(tokens[asked])) == pairs
        told = dict(zip(keys, values, strict=True))
        assert [told[key] for key in tokens[asked]] == list(targets[asked])
        assert set(np.nonzero(np.isin(tokens, keys))[0]) == {*range(0, 2 * pairs, 2), *asked}


def test_gaps_follow_a_power_law():
    task = MQAR(vocab_size=256, pairs=(4,), row_length=256, eval_rows=400)
    (group,) = task.held_out()
    asked = (group.targets_BT != IGNORE).nonzero()[:, 1] - 8
    assert (asked < 16).float().mean() > 0.45 and asked.max() > 200


def test_a_row_depends_on_nothing_but_its_number():
    some, more = (MQAR(vocab_size=64, pairs=pairs, eval_rows=n) for pairs, n in (((4,), 3), ((8, 4), 9)))
    assert torch.equal(some.held_out()[0].tokens_BT, more.held_out()[1].tokens_BT[:3])
    first, second = more.batch(0), more.batch(1)
    assert sum(len(group.tokens_BT) for group in first) == more.batch_size
    assert not torch.equal(first[0].tokens_BT, second[0].tokens_BT)
    assert torch.equal(more.batch(1)[0].tokens_BT, second[0].tokens_BT)
    held = {tuple(row) for group in more.held_out() for row in group.tokens_BT.tolist()}
    assert not held & {tuple(row) for group in first for row in group.tokens_BT.tolist()}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pairs": (4, 4)}, "different numbers"),
        ({"pairs": (16,), "row_length": 60}, "length = 60; 16 pairs take at least 64 tokens"),
        ({"pairs": (32,)}, "a vocabulary of 64 has keys for 31"),
    ],
)
def test_what_mqar_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        MQAR(vocab_size=64, **fields)


class Knows(torch.nn.Module):
    """Says the right token to every key, by looking it up."""

    def __init__(self, vocab_size: int, wrong: int = -1):
        super().__init__()
        self.spec, self.wrong = Spec.from_layout("full", vocab_size=vocab_size, **SIZES), wrong
        self.vocab_size = vocab_size

    def hidden(self, tokens_BT, *, cu_seqlens=None):
        said = torch.zeros_like(tokens_BT)
        for row, tokens in enumerate(tokens_BT.tolist()):
            told: dict[int, int] = {}
            for place, token in enumerate(tokens):
                said[row, place] = told.get(token, 0)
                if place + 1 < len(tokens):
                    told.setdefault(token, tokens[place + 1])
            said[row, self.wrong :: 10**6] = 0
        return torch.nn.functional.one_hot(said, self.vocab_size).double()

    def logits(self, x):
        return x


SIZES = {"d_model": 16, "num_layers": 1, "num_heads": 2}


def run(suite, subject):
    (outcome,) = suite.run([subject])
    return outcome


def test_a_model_that_looks_up_is_right(tmp_path, monkeypatch):
    save(tiny_model("nope gdn", vocab_size=64, context=None), tmp_path / "model")
    subject = Subject(name="tiny", path=tmp_path / "model", dtype=torch.float64)
    opened = recall.open_model
    monkeypatch.setattr(
        recall, "open_model", lambda s, text: dataclasses.replace(opened(s, text=text), model=Knows(64))
    )
    outcome = run(Mqar(pairs=(4, 16), samples=10, batch_size=3), subject)
    assert [r.values["score"] for r in outcome.records] == [100, 100, 100]
    assert [(row["pairs"], row["index"]) for row in outcome.samples] == [(p, i) for p in (4, 16) for i in range(10)]


def test_scores_do_not_depend_on_batches_and_tell_the_state(tmp_path):
    model = tiny_model("nope gdn", vocab_size=64, context=None)
    save(model, tmp_path / "model")
    subject = Subject(name="tiny", path=tmp_path / "model", dtype=torch.float64)
    found = [run(Mqar(pairs=(2, 4), samples=30, batch_size=n), subject) for n in (1, 8, None)]
    assert found[0].samples == found[1].samples == found[2].samples
    assert len({row["score"] for row in found[0].samples}) > 1
    (first, *_) = found[0].records
    assert first.axes["pairs"] == 2
    assert first.values["state_bytes"] == cost.cost(model.spec, 64, dtype_bytes=8).state_bytes


def test_spaced_retrieval_is_what_training_measures(tmp_path):
    spec = Spec.from_layout("nope gdn", vocab_size=VOCAB_SIZE, **SIZES | {"num_layers": 2})
    model = LM(spec, seed=1, dtype=torch.float64)
    save(model, tmp_path / "model")
    subject = Subject(name="tiny", path=tmp_path / "model", dtype=torch.float64)
    outcome = run(Spaced(gaps=(8, 20), samples=200), subject)
    expected = held_out(model, SpacedRetrieval(gaps=(8, 20)), rows=200)
    scores = [r for r in outcome.records if r.name == "score"]
    assert [r.values["score"] / 100 for r in scores] == pytest.approx([r.values["accuracy"] for r in expected])
    assert [r.axes["gap"] for r in scores] == [8, 20]


def test_a_model_is_trained_on_mqar_and_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = ["--task", "mqar", "--pairs", "2,4", "--mqar-vocab", "32", "--batch-size", "4", "--eval-rows", "8"]
    sizes = ["--layout", "gdn nope", "--d-model", "16", "--num-layers", "2", "--steps", "4", "--eval-every", "2"]
    assert main(["train", "--name", "recall", *data, *sizes, "--device", "cpu"]) == 0
    command = [
        "eval",
        "runs/recall",
        "--suite",
        "mqar",
        "--pairs",
        "2,4",
        "--samples",
        "8",
        "--device",
        "cpu",
        "--json",
    ]
    capsys.readouterr()
    assert main(command) == 0
    found = [row for row in json.loads(capsys.readouterr().out) if row["name"] == "score"]
    trained = [
        row for row in records.read(tmp_path / "runs/recall/records.jsonl") if row.kind == "eval" and row.step == 4
    ]
    assert [row["values"]["score"] / 100 for row in found] == pytest.approx([row.values["accuracy"] for row in trained])
    assert [row["step"] for row in found] == [4, 4]
    assert main(["report", "runs/recall"]) == 0
    assert "2 pairs" in (tmp_path / "report.html").read_text()


def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    save(tiny_model("nope gdn", vocab_size=64, context=None), tmp_path / "model")
    subject = Subject(name="tiny", path=tmp_path / "model", dtype=torch.float64)
    suite, score, asked = Mqar(pairs=(2, 4), samples=10, batch_size=4), recall.score_tokens, []

    def stop(model, tokens, targets):
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.append(len(tokens))
        return score(model, tokens, targets)

    expected = run(suite, subject)
    monkeypatch.setattr(recall, "score_tokens", stop)
    with pytest.raises(KeyboardInterrupt):
        list(suite.run([subject], tmp_path / "out"))
    monkeypatch.setattr(recall, "score_tokens", lambda *given: asked.append(len(given[1])) or score(*given))
    for _ in range(2):
        (outcome,) = suite.run([subject], tmp_path / "out")
        assert asked == [4, 4, 2, 4, 4, 2]
        assert [r.values for r in outcome.records] == [r.values for r in expected.records]
    assert read_rows(tmp_path / "out" / "samples.jsonl")[0] == expected.samples
    (more,) = dataclasses.replace(suite, samples=11).run([subject], tmp_path / "out")
    assert asked[6:] == [1, 1] and {r.values["n"] for r in more.records} == {11, 22}


def test_the_command(tmp_path, capsys):
    save(tiny_model("nope gdn", vocab_size=64), tmp_path / "model")
    command = ["eval", str(tmp_path / "model"), "--suite", "mqar", "--device", "cpu", "--samples", "5"]
    assert main([*command, "--pairs", "4,16", "--out", str(tmp_path / "out")]) == 0
    assert "state, bytes" in capsys.readouterr().out
    assert len(read_rows(tmp_path / "out" / "samples.jsonl")[0]) == 10
    assert main(["show", str(tmp_path / "out")]) == 0
    assert "state, bytes" in capsys.readouterr().out
    assert main([*command[:2], "--suite", "spaced-retrieval", "--samples", "2001"]) == 2
    assert "samples = 2001; there are 2000 keys that training never sees" in capsys.readouterr().err
    assert main([*command, "--pairs", "32"]) == 2
    assert "a vocabulary of 64 has keys for 31" in capsys.readouterr().err
    assert main([*command, "--pairs", "16", "--length", "80"]) == 2
    assert "16 pairs: 80 tokens are more than the context_length = 64" in capsys.readouterr().err
