"""Text to tokens and back, piece by piece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer import TEMPLATE, TEXT, save_tokenizer

from plait.model.tokens import Bytes, Detokenizer, load_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=TEMPLATE)


def pieces(tokenizer, tokens: list[int]) -> list[str]:
    text = Detokenizer(tokenizer)
    return [*(text.push(token) for token in tokens), text.rest()]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_no_piece_has_a_broken_character(kind: str, directory: Path):
    tokenizer = Bytes() if kind == "bytes" else load_tokenizer(directory, 300)
    tokens = tokenizer.encode(TEXT)
    shown = pieces(tokenizer, tokens)
    assert "".join(shown) == TEXT
    assert not any("\ufffd" in piece for piece in shown)
    assert len([piece for piece in shown if piece]) > len(TEXT) / 3  # it comes as it is made
    assert pieces(tokenizer, tokens[: tokens.index(tokens[-1])])


@given(st.text(max_size=60))
def test_any_text_comes_back(text: str):
    tokens = Bytes().encode(text.replace("\0", ""))
    assert "".join(pieces(Bytes(), tokens)) == text.replace("\0", "")


@given(st.lists(st.integers(1, 255), max_size=150))
def test_what_is_no_text_is_shown_once_as_such(tokens: list[int]):
    assert "".join(pieces(Bytes(), tokens)) == bytes(tokens).decode(errors="replace")


def test_an_unfinished_character_waits_for_the_end():
    tokens = Bytes().encode("a🎉")[:-1]
    assert pieces(Bytes(), tokens) == ["a", "", "", "", "\ufffd"]


def test_stop_tokens(directory: Path, tmp_path: Path):
    eos = load_tokenizer(directory, 300).stop_tokens
    assert len(eos) == 1
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "model_type": "llama"}))
    assert load_tokenizer(tmp_path, 300).stop_tokens == eos | {7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_tokenizer(tmp_path, 300).stop_tokens == eos | {5, 6}


def test_chat(directory: Path, tmp_path: Path):
    tokenizer = load_tokenizer(directory, 300)
    assert tokenizer.decode(tokenizer.chat("plain")) == "<user>plain<assistant>"
    with pytest.raises(ValueError, match="has no chat template"):
        load_tokenizer(save_tokenizer(tmp_path), 300).chat("plain")
    with pytest.raises(ValueError, match="bytes"):
        Bytes().chat("plain")


def test_a_directory_without(tmp_path: Path):
    assert isinstance(load_tokenizer(tmp_path, 256), Bytes)
    with pytest.raises(ValueError, match=r"no tokenizer .*vocab_size = 12"):
        load_tokenizer(tmp_path, 12)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="its tokenizer cannot be read") as error:
        load_tokenizer(tmp_path, 256)
    assert "\n" not in str(error.value)
