"""What rows come to: averages of papers, pairs, files that are damaged."""

from __future__ import annotations

import json

import pytest

from plait import records
from plait.cli import main
from plait.evals.results import cells, compare, compare_losses, latest, papers, read_rows, summarize
from plait.records import Record

SINGLE = ("niah_single_1", "niah_single_2", "niah_single_3")


def row(task: str, length: int, index: int, score: float, **changed) -> dict:
    place = {"model": "a", "suite": "ruler", "task": task, "length": length, "index": index}
    return place | {"prompt": f"{task} {length} {index}", "score": score} | changed


def test_the_papers_averages():
    rows = [
        row(task, length, index, 100.0 * (index < 2 + 3 * (length < 20_000)))
        for task in SINGLE
        for length in (16_384, 32_768)
        for index in range(10)
    ]
    ((name, about, estimate),) = papers(cells(rows))
    assert (name, about) == ("004/Single-Native", "3 tasks")
    assert estimate.value == pytest.approx((50 + 20) / 2) and estimate.low < 35 < estimate.high
    records = summarize(rows, 7, {"git": "x"})
    assert [(r.name, r.axes.get("length"), r.values["score"]) for r in records if r.name == "average"] == [
        *(("average", 16_384, pytest.approx(50)), ("average", 32_768, pytest.approx(20))),
        ("average", None, pytest.approx(35)),
    ]
    assert {(r.step, r.provenance["git"]) for r in records} == {(7, "x")}
    assert papers(cells(row for row in rows if row["task"] != "niah_single_3")) == []


def test_an_average_over_two_suites_says_what_stands_in(tmp_path, capsys):
    tasks = [
        *(f"niah_{name}" for name in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3"))
    ]
    tasks += ["niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_syn1", "qa_syn2"]
    rows = [row(task, 4096, i, 50.0) for task in tasks for i in range(2)]
    rows += [
        row(f"babilong_gen_qa{k}", length, i, 10.0, suite="babilong")
        for k in range(1, 6)
        for length in (0, 2048, 4096)
        for i in range(2)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert main(["show", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "001/within-4K 20.0 [20.0, 20.0] (11 tasks + 7 synthetic)" in " ".join(out.split())


def test_samples_of_earlier_weights_are_no_part_of_an_average(tmp_path, capsys):
    rows = [row("vt", 64, i, 0.0, run="old") for i in range(6)] + [row("fwe", 64, 0, 30.0, suite="other", run="old")]
    rows += [row("vt", 64, i, 100.0, run="new") for i in range(2)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "vt 100.0 [100.0, 100.0]" in " ".join(shown.out.split()) and "30.0" in shown.out
    assert "6 samples left out: of other weights or draws than the last" in shown.err
    assert main(["show", str(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    (found,) = (each for each in json.loads(shown.out) if each["suite"] == "ruler")
    assert found["scores"][0]["value"] == 100.0 and "6 samples left out" in shown.err


def test_a_damaged_record_is_told_and_the_rest_is_shown(tmp_path, capsys):
    axes = {"suite": "ppl", "model": "a"}
    kept = Record(kind="eval", name="perplexity", values={"loss": 1.25}, axes=axes)
    records.append(tmp_path / "records.jsonl", [kept, kept])
    whole = (tmp_path / "records.jsonl").read_text()
    (tmp_path / "records.jsonl").write_text(whole[:40] + "\n" + whole)
    assert main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "1.2500" in shown.out and "records.jsonl, line 1: not a record" in shown.err


def test_pairs_are_of_the_same_prompts():
    first = [row("vt", 64, i, 100.0 * (i % 2)) for i in range(6)]
    second = [row("vt", 64, i, 100.0, model="b") for i in range(4)] + [row("vt", 64, 4, 0.0, prompt="other")]
    ((task, length, pair),), left = compare(second, first)
    assert (task, length, left) == ("vt", 64, 3)
    assert (pair.difference.value, pair.better, pair.worse, pair.difference.n) == (50.0, 2, 0, 4)


def test_losses_are_compared_where_tokens_are_the_same():
    def loss(index, tokens, value):
        place = {"model": "m", "suite": "ppl", "task": "text", "index": index, "prompt": str(index)}
        return place | {"tokens": tokens, "loss": tokens * value}

    first = [loss(0, 10, 2.0), loss(1, 20, 3.0), loss(2, 5, 1.0)]
    second = [loss(0, 10, 2.5), loss(1, 20, 2.0), loss(2, 6, 1.0)]
    found = compare_losses(first, second)
    assert found is not None and found.difference.value == pytest.approx((-0.5 + 1) / 2)
    assert (found.difference.n, found.better, found.worse) == (2, 1, 1)
    assert compare_losses(first[2:], second[2:]) is None


def test_the_last_of_a_sample_counts():
    rows = [row("vt", 64, 0, 10.0), row("vt", 64, 0, 20.0), row("vt", 64, 1, 30.0)]
    assert [each["score"] for each in latest(rows)] == [20.0, 30.0]


def test_damaged_files(tmp_path):
    path = tmp_path / "samples.jsonl"
    good = [json.dumps(row("vt", 64, i, 1.0)) for i in range(4)]
    path.write_bytes("\n".join([good[0], '{"model": "a"}', "[]", good[1], "\xff", good[2]]).encode() + good[3].encode())
    text = path.read_bytes()
    rows, problems = read_rows(path)
    assert [each["index"] for each in rows] == [0, 1] and path.read_bytes() == text
    assert [line.split(": ")[0][-1] for line in problems] == ["2", "3", "5", "6"]
    assert read_rows(path, mend=True) == (rows, problems)
    assert path.read_text() == f"{good[0]}\n{good[1]}\n"
    assert read_rows(path, mend=True) == (rows, [])
    path.write_text(good[0])  # whole but for its end
    read_rows(path, mend=True)
    assert path.read_text() == f"{good[0]}\n"
    assert read_rows(tmp_path / "none.jsonl") == ([], [])
