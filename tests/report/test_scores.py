"""Charts of evaluations: what they show, and that the page needs no network."""

from __future__ import annotations

import json

import pytest

from plait.cli import main
from plait.evals.show import load_results
from plait.records import Record, append
from plait.report.marks import Look
from plait.report.scores import against_length, by_depth, by_position, by_task


@pytest.fixture
def folder(tmp_path):
    def row(model, task, length, index):
        score = 100.0 * (index < (3 if model == "a" else 1)) if length == 1024 else 25.0
        depth = {"depth": index / 4} if task == "niah_single_1" else {}
        place = {"model": model, "suite": "ruler", "task": task, "length": length, "index": index}
        return place | depth | {"prompt": f"{task}{length}{index}", "score": score}

    rows = [
        row(model, task, length, index)
        for model in ("a", "b")
        for task in ("niah_single_1", "vt")
        for length in (1024, 2048)
        for index in range(4)
    ]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path / "out"


def values(panel) -> list[dict]:
    return panel.chart.data.values


def test_what_charts_show(folder):
    found, look = load_results([folder])[0], Look()
    (line,) = against_length(found, look)
    assert [(v["model"], v["length"], v["score"]) for v in values(line)] == [
        *(("a", 1024, 75.0), ("a", 2048, 25.0), ("b", 1024, 25.0), ("b", 2048, 25.0))
    ]
    assert all(v["low"] <= v["score"] <= v["high"] for v in values(line))
    first, second = by_task(found, look)
    assert {(v["down"], v["length"]): v["score"] for v in values(first)} == {
        ("niah_single_1", 1024): 75.0,
        ("niah_single_1", 2048): 25.0,
        ("vt", 1024): 75.0,
        ("vt", 2048): 25.0,
    }
    assert "vt at 1,024: 25" in second.description
    depth = by_depth(found, look)[0]
    assert [(v["down"], v["score"]) for v in values(depth) if v["length"] == 1024] == [
        *(("0%", 100.0), ("20%", 100.0), ("50%", 100.0), ("70%", 0.0))
    ]


def test_losses_by_position(tmp_path, capsys):
    def record(model, position, loss):
        axes = {"suite": "ppl", "model": model, "length": 8, "position": position, "until": 2 * position}
        return Record(kind="eval", name="position_loss", values={"loss": loss, "n": 3}, axes=axes)

    rows = [record("a", 1, 6.0), record("a", 2, 5.0), record("b", 1, 7.0), record("b", 2, None)]
    append(tmp_path / "records.jsonl", rows)
    (panel,) = by_position(load_results([tmp_path])[0], Look())
    assert [(v["model"], v["position"], v["loss"]) for v in values(panel)] == [("a", 1, 6), ("a", 2, 5), ("b", 1, 7)]
    assert "a: 6.000 after 1, 5.000 after 2" in panel.description
    assert main(["show", str(tmp_path), "--chart", str(tmp_path / "chart.svg")]) == 0
    assert "passes of 8 tokens" in (tmp_path / "chart.svg").read_text()


def test_the_command_writes_files(folder, tmp_path, capsys):
    assert main(["show", str(folder), "--chart", str(tmp_path / "charts.html")]) == 0
    page = (tmp_path / "charts.html").read_text()
    assert "niah_single_1" in page and "<script src" not in page
    assert main(["show", str(folder), "--chart", str(tmp_path / "charts.svg")]) == 0
    assert "niah_single_1" in (tmp_path / "charts.svg").read_text()
    capsys.readouterr()
    assert main(["show", str(folder), "--chart", str(tmp_path / "charts.txt")]) == 2
    assert "its name must end in .html, .png, .svg, .pdf" in capsys.readouterr().err
    (folder / "samples.jsonl").write_text("")
    assert main(["show", str(folder), "--chart", str(tmp_path / "charts.svg")]) == 2
