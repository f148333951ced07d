"""`plait bench eval` at a tiny size: every competitor gets the same prompts, and what cannot run has a note."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from evals.tiny import WORDS, words_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from plait.bench import evals
from plait.bench.evals import GENERATION, HARNESS, OPAQUE, RUNNING, WHOLE, Side, _rows, bench_eval
from plait.bench.rows import OURS
from plait.cli import main
from plait.evals import runner
from plait.evals.samples import Sample
from plait.evals.suites import Subject

SHORT = 200
"""tokens, enough for a needle"""


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> Subject:
    path = tmp_path_factory.mktemp("models") / "llama"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(WORDS) + 2, max_position_embeddings=64, **sizes)
    LlamaForCausalLM(config).save_pretrained(path)
    words_tokenizer().save_pretrained(path)
    return Subject(name="llama", path=path, dtype=torch.float32)


def running(subject: Subject, **options) -> list[dict]:
    (rows,) = bench_eval(subject, cases=[RUNNING], lengths=[SHORT], **options)
    return rows


def test_competitors_answer_the_same_prompts(subject, monkeypatch):
    asked, ask = [], runner.Run.ask

    def seen(self, batch):
        asked.append((len(batch), *(sample.index for sample in batch), len(batch[0].prompt) > evals.WARM_UP))
        return ask(self, batch)

    monkeypatch.setattr(evals, "WARM_UP", 100)
    monkeypatch.setattr(runner.Run, "ask", seen)
    rows = running(subject, samples=3, batch_size=2, without=["lm-eval"])
    assert asked == 3 * [(2, 0, 1, False)] + 3 * [(2, 0, 1, True)] + 3 * [(1, 2, True)]
    assert [row["competitor"] for row in rows] == [OURS, WHOLE, OPAQUE]
    for row in rows:
        assert (row["task"], row["length"], row["batch"], row["samples"]) == ("niah_single_1", SHORT, 2, 3)
        assert row["ratio"] == pytest.approx(row["seconds"] / rows[0]["seconds"]) if row is not rows[0] else True
        assert row["new_tokens"] == rows[0]["new_tokens"] and row["score"] == 0
        assert "note" not in row and "bar" not in row
    assert [row.get("agrees") for row in rows] == [None, "3 of 3", "3 of 3"]


def test_answers_that_are_right_end_early(subject, monkeypatch):
    made = evals.RulerSuite.tasks_for

    def tasks_for(self, tokenizer):
        """Five words are right, but of the second sample."""
        tasks = made(self, tokenizer)
        tasks.score = lambda sample, output: 100.0 * (len(output.split()) >= 5 and sample.index != 1)
        return tasks

    monkeypatch.setattr(evals.RulerSuite, "tasks_for", tasks_for)
    ours, whole = running(subject, samples=2, without=["lm-eval", "opaque"])
    assert ours["new_tokens"] < whole["new_tokens"]
    assert ours["score"] == whole["score"] == 50 and whole["agrees"] == "2 of 2"


def test_scores_are_compared():
    class Tasks:
        def score(self, sample: Sample, output: str) -> float:
            return 100.0 * (sample.answers[0] in output)

    samples = [Sample("niah", 9, index, "", ("dog",), 1, 1) for index in range(3)]
    said = {OURS: ["dog", "cat", "a dog"], HARNESS: ["dog", "dog", "the dog"]}
    sides = [
        Side(name, lambda rows=rows: lambda _: [{"output": each, "new_tokens": 1} for each in rows])
        for name, rows in said.items()
    ]
    for side in sides:
        side.answer(samples)
        side.seconds = 1.0 if side.name == OURS else 1.2
    rows = _rows(sides, samples, Tasks(), {}, {HARNESS: 1.5})  # pyright: ignore[reportArgumentType]
    assert rows[1]["agrees"] == "2 of 3" and [row["score"] for row in rows] == pytest.approx([200 / 3, 100])
    assert (rows[1]["ratio"], rows[1]["met"]) == (pytest.approx(1.2), False)


def test_the_harness(subject):
    pytest.importorskip("lm_eval.models.huggingface")
    rows = running(subject, samples=3, batch_size=2, without=["whole", "opaque"])
    assert rows[1]["competitor"] == HARNESS and rows[1]["agrees"] == "3 of 3" and rows[1]["ratio"] > 0
    assert rows[1]["new_tokens"] >= rows[0]["new_tokens"]


def test_what_cannot_run_has_a_note(subject, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # importing it raises ImportError
    rows = running(subject, samples=1, without=["whole", "opaque"])
    assert rows[1]["note"].startswith("not installed (no module lm_eval")
    assert rows[1]["samples"] == 0 and "ratio" not in rows[1]

    def refuse(subject: Subject):
        raise ValueError(f"{subject.path}: transformers cannot load it")

    monkeypatch.setattr("plait.evals.models._open_opaque", refuse)
    rows = running(subject, samples=1, without=["whole", "lm-eval"])
    assert "transformers cannot load it" in rows[1]["note"] and rows[0]["seconds"] > 0


def test_generation(subject):
    (first,), (second,) = bench_eval(subject, cases=[GENERATION], lengths=[500, 600], samples=1, processes=1)
    for row, length in ((first, 500), (second, 600)):
        assert (row["length"], row["samples"], row["processes"]) == (length, 13, 1)
        tokens = row["tokens_per_s"] * row["seconds"]
        assert 0.9 < tokens / (13 * length) <= 1 and "limit" not in row


def test_the_limit_of_generation(subject, monkeypatch):
    def write(options, tokenizer, out: Path, *, processes: int) -> dict:
        return {"samples": 13 * options.samples, "tokens": 6500, "seconds": 65.0}

    monkeypatch.setattr(evals, "write", write)

    def row(**options) -> dict:
        ((found,),) = bench_eval(subject, cases=[GENERATION], **options)
        return found

    assert (row()["limit"], row()["met"], row()["samples"], row()["tokens_per_s"]) == (60.0, False, 1300, 100)
    for options in ({"samples": 99}, {"lengths": [8192]}, {"processes": 3}):
        assert "limit" not in row(**options)


def test_the_command(subject, tmp_path, capsys):
    command = ["bench", "eval", str(subject.path), "--device", "cpu", "--lengths", "500", "--samples", "1"]
    command += ["--processes", "1", "--without", "whole,opaque,lm-eval", "--out", str(tmp_path / "rows.json")]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "tokens/s" in out and "new tokens" in out and "niah_single_1, 500, 0 of 1" in err
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["case"].split(":")[0] for row in rows] == [GENERATION, RUNNING]
    assert main([*command, "--minutes", "0", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["note"] for row in rows] == 2 * ["not run: the minutes were over"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", "runing"], "case: 'runing'; nearest: running"),
        (["--samples", "0"], "samples: 0; it must be at least 1"),
        (["--lengths", "400,0"], "lengths: 0; it must be at least 1"),
        (["--tasks", "niah_singel_1"], "task = 'niah_singel_1'; nearest: niah_single_"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(subject, options, message, capsys):
    assert main(["bench", "eval", str(subject.path), "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err
