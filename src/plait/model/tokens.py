"""Text to tokens and back: the tokenizer of a model's directory, or bytes for models that are trained on bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from plait.data.text import SEPARATOR
from plait.files import read_json
from plait.model.foreign import gguf_file

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
BYTES = 256
BROKEN = "\ufffd"
PENDING = 3
"""signs for what is broken, at most, that an unfinished character leaves at the end of a text"""
WINDOW = 64
"""tokens that are decoded together at most"""


class Tokenizer(Protocol):
    stop_tokens: frozenset[int]
    """each ends a text"""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def chat(self, text: str) -> list[int]:
        """What a user says, in the model's chat template, up to where the model answers."""
        ...


class Bytes:
    """UTF-8, a byte a token; byte 0, which `plait train` has between files, ends a text."""

    stop_tokens = frozenset({SEPARATOR})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token != SEPARATOR).decode(errors="replace")

    def chat(self, text: str) -> list[int]:
        raise ValueError("chat: the model reads bytes; it has no chat template. Leave --chat out")


class Pretrained:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Any, stop_tokens: frozenset[int], where: Path):
        self.tokenizer, self.stop_tokens, self.where = tokenizer, stop_tokens, where

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def chat(self, text: str) -> list[int]:
        if not self.tokenizer.chat_template:
            raise ValueError(f"chat: the tokenizer of {self.where} has no chat template. Leave --chat out")
        turns = [{"role": "user", "content": text}]
        whole = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return self.tokenizer.encode(whole, add_special_tokens=False)


def load_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model's directory, never from remote code; ValueError in a line if there is none."""
    gguf = gguf_file(path)
    if gguf is None and not any((path / name).exists() for name in FILES):
        if vocab_size == BYTES:
            return Bytes()
        raise ValueError(
            f"{path}: no tokenizer ({', '.join(FILES[:3])}); only models of {BYTES} tokens, which are bytes, need none:"
            f" this one's vocab_size = {vocab_size}"
        )
    from transformers import AutoTokenizer
    from transformers.utils import logging

    options = {"gguf_file": gguf} if gguf else {}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of a config.json that is plait's
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True, **options)
    except Exception as error:  # of many kinds
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{path}: its tokenizer cannot be read ({first})") from None
    finally:
        logging.set_verbosity(verbosity)
    stops = {tokenizer.eos_token_id} | _stop_tokens(path)
    return Pretrained(tokenizer, frozenset(token for token in stops if token is not None), path)


def _stop_tokens(path: Path) -> set[int]:
    """eos_token_id of generation_config.json, or of config.json: a number, a list or null."""
    for name in ("generation_config.json", "config.json"):
        data = read_json(path / name) if (path / name).exists() else {}
        stops = data.get("eos_token_id") if isinstance(data, dict) else None
        if stops is not None:
            return {stop for stop in (stops if isinstance(stops, list) else [stops]) if isinstance(stop, int)}
    return set()


class Detokenizer:
    """The text of tokens as they come, no more of it than is certain: a character made of several tokens waits for the
    last of them. Tokens are decoded after those before them, on which their spaces may depend."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.start = self.whole = 0
        """where the tokens begin that are decoded together, and up to where the text was whole"""
        self.shown = 0
        """characters of their text that have been given out"""

    def push(self, token: int) -> str:
        """What is certain with one more token and was not before."""
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens[self.start :])
        certain = len(text)
        while certain and text[certain - 1] == BROKEN and len(text) - certain < PENDING:
            certain -= 1
        new, self.shown = text[self.shown : certain], max(self.shown, certain)
        if certain == len(text) or len(self.tokens) - self.start > WINDOW:
            self.start, self.whole = self.whole, len(self.tokens)
            self.shown = len(self.tokenizer.decode(self.tokens[self.start :])) - (len(text) - certain)
        return new

    def rest(self) -> str:
        """What is left when no more tokens come, broken or not."""
        return self.tokenizer.decode(self.tokens[self.start :])[self.shown :]
