"""The runner of generative suites, with a suite small enough for models of a few thousand random weights."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from evals.tiny import WORDS, run_by_two, save_tiny, words_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from plait.cli import main
from plait.evals import runner
from plait.evals.models import Judged
from plait.evals.results import read_rows
from plait.evals.runner import read_samples
from plait.evals.samples import Sample
from plait.evals.suites import SUITES, Generative, Outcome, Subject
from plait.files import claim

NEW = 12


class Finds:
    """Two words to be said after a text of words; of the task `documents` four questions on each text."""

    names = ("words", "documents")

    def __init__(self, seed: int):
        self.seed = seed

    def sample(self, task: str, length: int, index: int) -> Sample:
        of = index // 4 if task == "documents" else index
        rng = random.Random(f"{self.seed} {task} {length} {of}")
        size = length - NEW - (3 if task == "documents" else rng.randrange(9))
        text = " ".join(rng.choices(WORDS, k=size))
        if task == "words":
            return Sample(task, length, index, text, tuple(rng.sample(WORDS, 2)), NEW, size, rng.random())
        rng = random.Random(f"question {index}")
        asked = f"{text} {' '.join(rng.choices(WORDS, k=rng.randint(1, 3)))}"
        return Sample(task, length, index, asked, tuple(rng.sample(WORDS, 2)), NEW, size + 3, None, f"{task} {of}")

    def score(self, sample: Sample, output: str) -> float:
        return 50.0 * sum(answer in output.split() for answer in sample.answers)


@dataclass(frozen=True, kw_only=True)
class FindSuite(Generative):
    suite: ClassVar[str] = "finds"

    @property
    def names(self) -> tuple[str, ...]:
        return Finds.names

    def tasks_for(self, tokenizer) -> Finds:
        return Finds(self.seed)


class Patient(FindSuite):
    """Lets every answer run to its end."""

    def answered(self, tasks, sample, output) -> bool:
        return False


SUITE = FindSuite(lengths=(40, 64), samples=9, batch_size=4)


@pytest.fixture(scope="module", params=["nope gdn", "swa[window=8] mamba2[head_dim=8]"])
def subject(request, tmp_path_factory) -> Subject:
    path = save_tiny(tmp_path_factory.mktemp("models") / "model", request.param)
    return Subject(name="tiny", path=path, dtype=torch.float64)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS) + 2, max_position_embeddings=64, **sizes)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(30)
    model.generation_config.repetition_penalty = 3.0  # is not to count
    model.save_pretrained(path)
    words_tokenizer().save_pretrained(path)
    return path


def answers(suite: Generative, subject: Subject, out: Path) -> dict[tuple, tuple]:
    """Outputs and scores by sample."""
    for _ in suite.run([subject], out):
        pass
    rows, problems = read_rows(out / "samples.jsonl")
    found = {(r["task"], r["length"], r["index"], r["prompt"]): (r["output"], r["score"]) for r in rows}
    assert len(found) == len(rows) and not problems
    return found


@pytest.fixture(scope="module")
def expected(subject, tmp_path_factory) -> dict[tuple, tuple]:
    """One at a time."""
    found = answers(dataclasses.replace(SUITE, batch_size=1), subject, tmp_path_factory.mktemp("alone"))
    scores = {score for _, score in found.values()}
    assert len(found) == 36 and {0.0, 50.0} <= scores and len({output for output, _ in found.values()}) > 25
    return found


@pytest.mark.parametrize("batch_size", [8, None])
def test_batches_change_nothing(subject, expected, batch_size, tmp_path):
    assert answers(dataclasses.replace(SUITE, batch_size=batch_size), subject, tmp_path) == expected


def test_one_task_alone_is_what_it_is_among_others(subject, expected, tmp_path):
    found = answers(dataclasses.replace(SUITE, tasks=("documents",), lengths=(64,)), subject, tmp_path)
    assert found == {key: value for key, value in expected.items() if key[:2] == ("documents", 64)}


def test_a_document_is_read_once(subject, expected, monkeypatch, tmp_path):
    seen = []

    def complete(self, prompts, new, push, shared=0):
        seen.append((len(prompts), shared))
        return whole(self, prompts, new, push, shared)

    whole = Judged.complete
    monkeypatch.setattr(Judged, "complete", complete)
    suite = dataclasses.replace(SUITE, tasks=("documents",), lengths=(64,), batch_size=None)
    found = answers(suite, subject, tmp_path)
    assert found == {key: value for key, value in expected.items() if key[:2] == ("documents", 64)}
    assert sorted((rows, shared >= 49) for rows, shared in seen) == [(1, False), (4, True), (4, True)]


def test_what_prompts_begin_with_is_read_once(subject, monkeypatch, tmp_path):
    """As those of needles do, up to the first needle: those that share more are neighbours."""
    whole, seen, rng = Judged.complete, [], random.Random(0)
    words = rng.choices(WORDS, k=40)
    tails = [words[:n] + rng.choices(WORDS, k=44 - n) for n in (10, 40, 12, 38)]
    samples = [Sample("words", 64, i, " ".join(tail), ("none",), NEW, 44) for i, tail in enumerate(tails)]
    (tmp_path / "samples.jsonl").write_text("".join(sample.to_json() + "\n" for sample in samples))
    suite = dataclasses.replace(SUITE, input=tmp_path / "samples.jsonl", lengths=())
    alone = answers(dataclasses.replace(suite, batch_size=1), subject, tmp_path / "alone")

    def complete(self, prompts, new, push, shared=0):
        seen.append(shared)
        return whole(self, prompts, new, push, shared)

    monkeypatch.setattr(Judged, "complete", complete)
    assert answers(dataclasses.replace(suite, batch_size=2), subject, tmp_path / "two") == alone
    assert len(seen) == 2 and 38 <= seen[0] <= 40 and 10 <= seen[1] <= 12


def test_stopping_at_the_answer_changes_no_score(subject, expected, tmp_path):
    patient = answers(Patient(**vars(SUITE)), subject, tmp_path)
    assert {key: score for key, (_, score) in patient.items()} == {key: score for key, (_, score) in expected.items()}
    assert all(patient[key][0].startswith(output) for key, (output, _) in expected.items())
    assert any(score == 100 and len(patient[key][0]) > len(output) for key, (output, score) in expected.items())


def test_a_run_goes_on_where_it_was_stopped(subject, expected, monkeypatch, tmp_path, capsys):
    asked, ask = [], runner.Run.ask

    def stop(self, batch):
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.extend(batch[:1])
        return ask(self, batch)

    monkeypatch.setattr(runner.Run, "ask", stop)
    with pytest.raises(KeyboardInterrupt):
        answers(SUITE, subject, tmp_path)
    file = tmp_path / "samples.jsonl"
    lines = file.read_text().splitlines()
    assert 0 < len(lines) < len(expected)
    file.write_text("\n".join([lines[0], lines[1][:50], *lines[2:-1], lines[-1][:30]]))  # a disk that was full, a crash
    left = len(lines) - 2
    again = []
    monkeypatch.setattr(runner.Run, "ask", lambda self, batch: again.extend(batch) or ask(self, batch))
    assert answers(SUITE, subject, tmp_path) == expected
    assert len(again) == len(expected) - left
    messages = capsys.readouterr().err
    for number in (2, len(lines)):
        assert f"samples.jsonl, line {number}: cut off or damaged; left out, the rest is used" in messages


def test_nothing_is_asked_twice_but_of_other_weights(subject, tmp_path, monkeypatch):
    first = list(SUITE.run([subject], tmp_path))
    monkeypatch.setattr(runner.Run, "ask", lambda *_: pytest.fail("asked again"))
    (again,) = SUITE.run([subject], tmp_path)
    assert [r.values for r in again.records] == [r.values for r in first[0].records]
    half = dataclasses.replace(SUITE, samples=4, lengths=(64,))
    (part,) = half.run([subject], tmp_path)
    assert {r.values["n"] for r in part.records if r.name == "score"} == {4.0}
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        list(SUITE.run([dataclasses.replace(subject, dtype=torch.float32)], tmp_path))


def test_short_memory_makes_smaller_batches(subject, expected, monkeypatch, tmp_path):
    sizes, ask = [], runner.Run.ask

    def limited(self, batch):
        if len(batch) > 2:
            raise torch.OutOfMemoryError
        sizes.append(len(batch))
        return ask(self, batch)

    monkeypatch.setattr(runner.Run, "ask", limited)
    suite = dataclasses.replace(SUITE, batch_size=None)
    assert answers(suite, subject, tmp_path) == expected
    assert max(sizes) == 2


def test_opaque_answers_as_imported(llama, tmp_path):
    common = {"path": llama, "dtype": torch.float64}
    imported = answers(SUITE, Subject(name="llama", **common), tmp_path / "imported")
    opaque = answers(SUITE, Subject(name="llama", opaque=True, **common), tmp_path / "opaque")
    assert imported == opaque
    assert {0.0, 50.0} <= {score for _, score in opaque.values()}


def test_samples_of_a_file(subject, expected, tmp_path):
    tasks = Finds(0)
    samples = [tasks.sample(task, length, i) for task in Finds.names for length in (40, 64) for i in range(9)]
    (tmp_path / "samples").mkdir()
    for i, part in enumerate((samples[:20], samples[20:])):
        (tmp_path / "samples" / f"{i}.jsonl").write_text("".join(sample.to_json() + "\n" for sample in part))
    suite = dataclasses.replace(SUITE, input=tmp_path / "samples", lengths=())
    assert answers(suite, subject, tmp_path / "out") == expected
    ends = dataclasses.replace(samples[0], prompt="one\u2028two\x85three")  # of lines, but not of those of JSONL
    (tmp_path / "samples" / "0.jsonl").write_text(ends.to_json() + "\n")
    assert read_samples(suite)[0] == ends


def test_processes_share_the_samples(subject, expected, tmp_path):
    """As torchrun starts them."""
    if "mamba2" in (subject.path / "spec.json").read_text():
        pytest.skip("one model is enough")
    measured = run_by_two(SUITE, subject, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["records.jsonl", "samples.jsonl"]
    rows, _ = read_rows(tmp_path / "out" / "samples.jsonl")
    found = {(r["task"], r["length"], r["index"], r["prompt"]): (r["output"], r["score"]) for r in rows}
    assert found == expected and len(rows) == len(expected)
    assert [r.values["n"] for r in measured if r.name == "score"] == [9, 9, 9, 9]


def test_commands(subject, monkeypatch, tmp_path, capsys):
    """Two models, the table, the comparison."""
    monkeypatch.setitem(SUITES, "finds", FindSuite)
    other = save_tiny(tmp_path / "other", "full")
    options = ["--suite", "finds", "--lengths", "40,64", "--samples", "6", "--dtype", "float64", "--device", "cpu"]
    assert main(["eval", str(subject.path), str(other), *options, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert out.count("documents") == out.count("state, bytes") == 2
    assert main(["show", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert f"{other} minus {subject.path}, same samples" in " ".join(out.split())
    pairs = [line.split() for line in out.splitlines() if line.startswith(("words  ", "all  "))]
    assert [line[-1] for line in pairs if line[0] == "all"] == ["24"]
    rows, _ = read_rows(tmp_path / "out" / "samples.jsonl")
    means = [sum(r["score"] for r in rows if r["model"] == str(path)) / 24 for path in (subject.path, other)]
    (difference,) = (float(line[1]) for line in pairs if line[0] == "all")
    assert difference == pytest.approx(means[1] - means[0], abs=0.051)
    assert main(["show", str(tmp_path / "out"), "--json"]) == 0
    (first, _) = json.loads(capsys.readouterr().out)
    assert {(row["task"], row["length"]) for row in first["scores"]} == {(t, n) for t in Finds.names for n in (40, 64)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "document"], "task = 'document'; nearest: documents; allowed: words, documents"),
        (["--lengths", "40,128"], "lengths: 128 tokens are more than the context_length = 64 of "),
        (["--lengths", "0"], "lengths = 0; it must be at least 1"),
        (["--samples", "0"], "samples = 0; it must be at least 1"),
        (["--input", "nowhere.jsonl"], "input: nowhere.jsonl: no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(subject, options, message, monkeypatch, capsys):
    monkeypatch.setitem(SUITES, "finds", FindSuite)
    assert main(["eval", str(subject.path), "--suite", "finds", "--device", "cpu", *options]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("plait eval")]
    assert line.startswith(f"plait eval: {message}")


def test_a_model_without_a_tokenizer(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SUITES, "finds", FindSuite)
    path = save_tiny(tmp_path / "model")
    for file in path.glob("tokenizer*"):
        file.unlink()
    assert main(["eval", str(path), "--suite", "finds", "--device", "cpu"]) == 2
    assert f"{path}: no tokenizer" in capsys.readouterr().err


def test_a_second_run_into_one_folder_is_refused(subject, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(SUITES, "finds", FindSuite)
    with claim(tmp_path, "out"):
        assert main(["eval", str(subject.path), "--suite", "finds", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert f"out {tmp_path}: another process is using it" in capsys.readouterr().err


def test_folders_without_results(tmp_path, capsys):
    assert main(["show", str(tmp_path)]) == 2
    assert "no results; plait eval --out writes" in capsys.readouterr().err


def test_outcomes_are_whole(subject):
    (outcome,) = SUITE.run([subject])
    assert isinstance(outcome, Outcome) and not outcome.samples and not outcome.notes
    values = [r for r in outcome.records if r.name == "score"]
    assert [(r.axes["task"], r.axes["length"]) for r in values] == [
        (task, length) for length in (40, 64) for task in ("words", "documents")
    ]
    for record in outcome.records:
        low, mean, high = (record.values[name] for name in ("score_low", "score", "score_high"))
        assert 0 <= low <= mean <= high <= 100 and low < high
        assert record.values["state_bytes"] > 0 and record.provenance["dtype"] == "float64"


@pytest.mark.gpu
def test_on_a_gpu_as_on_a_cpu(subject, expected, tmp_path):
    assert (
        answers(dataclasses.replace(SUITE, batch_size=None), dataclasses.replace(subject, device="cuda"), tmp_path)
        == expected
    )
