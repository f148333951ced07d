"""Byte-level text from files and folders."""

from __future__ import annotations

import pytest
import torch

from plait.data.text import ByteText, read_bytes


def test_windows_predict_the_next_byte_and_stay_out_of_the_held_out_end(tmp_path):
    path = tmp_path / "book.txt"
    text = bytes(range(1, 251)) * 40
    path.write_bytes(text)
    task = ByteText(path=path, length=32, batch_size=8, seed=1)
    cut = int(len(text) * 0.95)
    for step in range(20):
        (group,) = task.batch(step)
        assert group.tokens_BT.shape == (8, 32)
        assert torch.equal(group.tokens_BT[:, 1:], group.targets_BT[:, :-1])
        for row, targets in zip(group.tokens_BT.tolist(), group.targets_BT.tolist(), strict=True):
            assert bytes([*row, targets[-1]]) in text[:cut]
    (held_out,) = task.held_out()
    assert {bytes(row) for row in held_out.tokens_BT.tolist()} == {text[i : i + 32] for i in range(cut, 9968, 32)}


def test_a_batch_is_a_function_of_seed_and_step(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(i * i % 251 for i in range(5000)))
    a, b = (ByteText(path=path, length=16, batch_size=4, seed=5) for _ in "ab")
    a.batch(0)
    assert torch.equal(a.batch(9)[0].tokens_BT, b.batch(9)[0].tokens_BT)
    assert not torch.equal(a.batch(9)[0].tokens_BT, a.batch(10)[0].tokens_BT)


def test_a_folder_is_read_in_order_of_names_with_a_separator(tmp_path):
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_text("one")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "empty.txt").write_text("")
    assert bytes(read_bytes(tmp_path)) == b"one\0two"


def test_errors_say_what_is_wrong(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    for name, words in (
        ("nowhere", "no such file"),
        ("empty.txt", "no text in it"),
        ("short.txt", "5 bytes; length = 64 needs at least 1300"),
    ):
        with pytest.raises(ValueError, match=words):
            ByteText(path=tmp_path / name, length=64)
