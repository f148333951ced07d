"""Tokenizers as other libraries take them: transformers', and bytes in their form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.model.tokens import BYTES, Pretrained, Tokenizer, load_tokenizer
from plait.spec import Spec


def harness_tokenizer(path: Path, vocab_size: int) -> tuple[Any, frozenset[int]]:
    """transformers' tokenizer of a model's directory and the tokens that end a text; ValueError in a line if there is
    none, or if it has no token to end or begin a text with."""
    found = load_tokenizer(path, vocab_size)
    tokenizer = found.tokenizer if isinstance(found, Pretrained) else _bytes()
    if not found.stop_tokens and tokenizer.bos_token_id is None:
        raise ValueError(f"{path}: its tokenizer has neither a bos nor an eos token, one of which begins a bare text")
    return tokenizer, found.stop_tokens


def tokenizer_of(path: Path) -> Tokenizer:
    """Of a model's directory, or of one that has only a tokenizer's files."""
    spec = path / "spec.json"
    return load_tokenizer(path, Spec.load(spec).vocab_size if spec.exists() else 0)


def _bytes() -> Any:
    """plait.model.tokens.Bytes as transformers has tokenizers: a byte is the token of its number."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters for bytes: these are their own
    others = [byte for byte in range(BYTES) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(BYTES + i) for i, byte in enumerate(others)}
    inner = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters.items()}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)
