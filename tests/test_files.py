"""Files and directories that are complete or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.files import new_directory, read_json, write_json, write_text


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_json_round_trip(tmp_path):
    path = tmp_path / "x.json"
    for data in ({"a": [1, 2.5, None, "é\n"]}, [], 3):
        write_json(path, data)
        assert read_json(path) == data
    assert names(tmp_path) == ["x.json"]


def test_text_is_utf8_whatever_the_locale(tmp_path):
    write_text(tmp_path / "x", "é → ∞")
    assert (tmp_path / "x").read_bytes().decode("utf-8") == "é → ∞"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"a": 1', b"\xff\xfe", b"[" * 100_000, b"1" * 10_000],
    ids=lambda content: content[:5].hex(),
)
def test_bad_json_is_a_value_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.json: not valid JSON"):
        read_json(path)


def test_unreadable_files_are_value_errors(tmp_path):
    with pytest.raises(ValueError, match="missing: no such file"):
        read_json(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\)"):
        read_json(tmp_path)


class Stop(BaseException):
    """As a keyboard interrupt: no Exception."""


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    path = tmp_path / "x"
    write_text(path, "old")

    def stop(*_):
        raise Stop

    if step == "fsync":
        monkeypatch.setattr("os.fsync", stop)
    else:
        monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(Stop):
        write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert names(tmp_path) == ["x"]


def test_data_that_is_no_json_writes_nothing(tmp_path):
    with pytest.raises(TypeError):
        write_json(tmp_path / "x", {"a": object()})
    assert names(tmp_path) == []


def fill(path: Path, text: str) -> None:
    (path / "a").write_text(text, encoding="utf-8")
    (path / "sub").mkdir()
    (path / "sub" / "b").write_text(text, encoding="utf-8")


def test_a_new_directory_appears_when_whole(tmp_path):
    target = tmp_path / "deep" / "run"
    with new_directory(target) as path:
        fill(path, "new")
        assert path.parent == target.parent  # the same file system: the rename is atomic
        assert not target.exists()
    assert names(target) == ["a", "sub"]
    assert names(target.parent) == ["run"]


@pytest.mark.parametrize("error", [ValueError, Stop])
def test_a_failed_directory_is_absent(tmp_path, error):
    with pytest.raises(error), new_directory(tmp_path / "run") as path:
        fill(path, "new")
        raise error
    assert names(tmp_path) == []


def test_a_failed_directory_leaves_the_old_one(tmp_path):
    target = tmp_path / "run"
    with new_directory(target) as path:
        fill(path, "old")
    with pytest.raises(Stop), new_directory(target) as path:
        fill(path, "new")
        assert (target / "a").read_text(encoding="utf-8") == "old"
        raise Stop
    assert (target / "sub" / "b").read_text(encoding="utf-8") == "old"
    assert names(tmp_path) == ["run"]


def test_a_whole_directory_takes_the_place_of_the_old_one(tmp_path):
    target = tmp_path / "run"
    for text in ("old", "new"):
        with new_directory(target) as path:
            fill(path, text)
    assert (target / "a").read_text(encoding="utf-8") == "new"
    assert names(tmp_path) == ["run"]


def test_what_a_killed_process_left_is_cleared(tmp_path):
    (tmp_path / ".run.partial").mkdir()
    fill(tmp_path / ".run.partial", "cut off")
    with new_directory(tmp_path / "run") as path:
        assert names(path) == []
    assert names(tmp_path) == ["run"]


def test_a_kill_between_the_renames_loses_nothing(tmp_path, monkeypatch):
    """The old directory has stepped aside, the new one has not taken its name: the next use puts the old one back."""
    target = tmp_path / "run"
    with new_directory(target) as path:
        fill(path, "old")
    rename = Path.rename

    def dies(self: Path, to: Path) -> Path:
        if self.name.endswith(".partial"):
            raise Stop
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(Stop), new_directory(target) as path:
        fill(path, "new")
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(ValueError, match="later"), new_directory(target):
        raise ValueError("later")
    assert (target / "a").read_text(encoding="utf-8") == "old"
    assert names(tmp_path) == ["run"]
