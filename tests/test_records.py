"""Records: rows that survive crashes, and errors that name the line."""

from __future__ import annotations

import json
import math
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import records
from plait.records import Record, append, provenance, read, truncate

words = st.text(min_size=1, max_size=8)
values = st.dictionaries(words, st.floats(allow_nan=False, allow_infinity=False) | st.integers(-5, 5), max_size=3)
axes = st.dictionaries(words, st.integers(0, 9) | words | st.none() | st.booleans(), max_size=3)
rows = st.builds(
    Record,
    kind=st.sampled_from(["train", "eval", "probe", "bench"]),
    name=words,
    step=st.none() | st.integers(0, 9),
    tokens=st.none() | st.integers(0, 999),
    values=values,
    axes=axes,
    provenance=axes,
)


def row(step: int | None = 1, **numbers: float) -> Record:
    return Record(kind="train", name="loss", step=step, values=numbers or {"loss": 2.5})


@given(st.lists(st.lists(rows, max_size=3), max_size=3))
def test_what_is_appended_is_read(tmp_path_factory, batches):
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    for batch in batches:
        append(path, batch)
    assert read(path) == [record for batch in batches for record in batch]


@given(st.lists(rows, max_size=6), st.integers(0, 9))
def test_truncate_keeps_what_was_known_at_a_step(tmp_path_factory, batch, step):
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    append(path, batch)
    truncate(path, step)
    assert read(path) == [record for record in batch if record.step is None or record.step <= step]


def test_a_file_that_is_not_there_has_no_rows(tmp_path):
    assert read(tmp_path / "none.jsonl") == []


def test_one_line_is_one_json_object(tmp_path):
    path = tmp_path / "r.jsonl"
    append(path, [row(), Record(kind="eval", name="a\n\u2028b", values={})])
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines[-1] == ""
    assert [json.loads(line)["name"] for line in lines[:-1]] == ["loss", "a\n\u2028b"]


@given(st.integers(0, 200))
def test_a_line_cut_off_anywhere_is_left_out_and_written_over(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    append(path, [row(1), row(2)])
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    cut = second + min(cut, len(whole) - second)
    path.write_bytes(whole[:cut])
    complete = cut >= len(whole) - 1  # all but perhaps the newline
    kept = [row(1), row(2)] if complete else [row(1)]
    assert read(path) == kept
    append(path, [row(3)])
    assert read(path) == [*kept, row(3)]
    assert path.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize(
    "bad",
    [
        '{"kind": "tr',
        "nonsense",
        "3",
        "null",
        '{"kind": "train"}',
        '{"kind": "training", "name": "loss", "values": {}}',
        '{"kind": "train", "name": "loss", "values": 3}',
        '{"kind": "train", "name": "loss", "values": {"loss": "2.5"}}',
        '{"kind": "train", "name": "loss", "values": {}, "axis": {}}',
    ],
)
def test_a_bad_line_in_the_middle_is_an_error_that_names_it(tmp_path, bad):
    path = tmp_path / "records.jsonl"
    append(path, [row(1)])
    with path.open("a", encoding="utf-8") as file:
        file.write(bad + "\n")
    append(path, [row(2)])
    with pytest.raises(ValueError, match=r"records\.jsonl, line 2: not a record") as error:
        read(path)
    assert "\n" not in str(error.value)


def test_a_bad_last_line_with_its_newline_is_an_error_too(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("nonsense\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: not a record"):
        read(path)


def test_a_file_that_is_no_text_is_an_error_that_names_the_line(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(ValueError, match=r"records\.jsonl, line 1: not a record"):
        read(path)


def test_numbers_that_are_not_finite_become_none(tmp_path):
    path = tmp_path / "records.jsonl"
    append(path, [row(loss=math.nan, high=math.inf, low=-math.inf, fine=1.5)])
    assert "NaN" not in path.read_text(encoding="utf-8")
    (record,) = read(path)
    assert record.values == {"loss": None, "high": None, "low": None, "fine": 1.5}
    append(path, [record])  # and stay so
    assert read(path) == [record, record]


def test_a_row_that_cannot_be_written_leaves_the_file_alone(tmp_path):
    path = tmp_path / "records.jsonl"
    append(path, [row()])
    before = path.read_bytes()
    bad = Record(kind="train", name="loss", values={}, axes={"layer": object()})
    with pytest.raises(TypeError):
        append(path, [row(), bad])
    assert path.read_bytes() == before


def test_refused_records():
    with pytest.raises(ValueError, match="kind = 'training'; it must be one of train, eval, probe, bench"):
        Record(kind="training", name="loss", values={})
    with pytest.raises(ValueError, match="record loss: loss is of type str; a value must be a plain number"):
        Record(kind="train", name="loss", values={"loss": "2"})


def test_provenance_says_where_a_number_comes_from():
    found = provenance(spec_hash="abc", device="cpu")
    assert found["spec"] == "abc"
    assert found["device"] == "cpu"
    assert {"python", "torch", "plait"} <= set(found["versions"])
    assert found["time"].endswith("Z")
    json.dumps(found)


def test_revision_is_none_where_the_code_is_not_tracked(monkeypatch):
    """As for a package installed into an environment that happens to lie inside some other checkout."""

    def untracked(command, **_):
        if "ls-files" in command:
            raise subprocess.CalledProcessError(1, command)
        raise AssertionError("asked for the revision of a checkout that does not hold this file")

    monkeypatch.setattr("subprocess.run", untracked)
    assert records._git_revision.__wrapped__() is None
