"""Tokenizers for building token shards: bytes, or any that transformers loads. No torch."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plait.data.shards import BYTES, tokenizer_digest
from plait.files import new_directory

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257
"""every byte and END_OF_TEXT"""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    tokenizer: str
    """"bytes", or the sha256 of its saved files"""
    vocab_size: int
    eos: int


def prepare(name: str, eos: str | None, folder: Path) -> Vocabulary:
    """Load a tokenizer by path (a directory, or a tokenizer.json) or hub name and save it to `folder`, whose sha256
    then stands for it. eos: the token that ends a document, where it is not the tokenizer's own."""
    if name == BYTES:
        if eos is not None:
            raise ValueError(f"eos = {eos!r}; documents of bytes end with byte 0")
        return Vocabulary(tokenizer=BYTES, vocab_size=256, eos=0)  # the byte of plait.data.text.SEPARATOR
    tokenizer = _load(name)
    end = tokenizer.eos_token if eos is None else eos
    if end is None:
        raise ValueError(f"tokenizer {name}: it has no EOS token; name the one that ends a document with --eos TOKEN")
    known = tokenizer.get_vocab()
    if end not in known:
        raise ValueError(f"eos = {end!r}; the tokenizer {name} has no such token")
    tokenizer.save_pretrained(folder)
    size = max(len(tokenizer), max(known.values()) + 1)
    return Vocabulary(tokenizer=tokenizer_digest(folder), vocab_size=size, eos=known[end])


def _load(name: str) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(name)
    try:
        if path.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=path.exists())
    except Exception as error:  # of many kinds
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"tokenizer {name}: cannot be read ({first}); give {BYTES}, or a tokenizer's path") from None


def encoder(folder: Path | None, vocabulary: Vocabulary) -> Callable[[str], np.ndarray]:
    """Text to token ids, no special tokens added. folder: where the tokenizer is saved; None: bytes."""
    if folder is None:
        return lambda text: np.frombuffer(text.encode(), dtype=np.uint8)
    if (folder / "tokenizer.json").exists():  # loads in a moment, without transformers
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
        fast.no_truncation()
        fast.no_padding()
        # "fast" leaves out where in the text each token stands: half as fast again
        ids_of = lambda text: fast.encode_batch_fast([text], add_special_tokens=False)[0].ids  # noqa: E731
    else:
        slow = _load(str(folder))
        ids_of = lambda text: slow.encode(text, add_special_tokens=False)  # noqa: E731

    def encode(text: str) -> np.ndarray:
        ids = np.asarray(ids_of(text), dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary.vocab_size:
            raise ValueError(f"tokenizer {folder}: gives token {ids.max()}; vocab_size = {vocabulary.vocab_size}")
        return ids

    return encode


def train_tokenizer(texts: Iterator[str], out: Path, *, vocab_size: int) -> int:
    """A byte-level BPE with END_OF_TEXT as EOS, which transformers' AutoTokenizer loads; its number of tokens, which
    is less than vocab_size where the texts have too few pairs to merge."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size = {vocab_size}; it must be at least {MIN_VOCAB_SIZE}: the bytes and an EOS token")
    if out.exists():
        raise ValueError(f"out: {out} exists; give a name that is free")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    with new_directory(out) as folder:
        PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT).save_pretrained(folder)
    return bpe.get_vocab_size()


def place(folder: Path, out: Path) -> None:
    """Copy a prepared tokenizer to where the shards are."""
    if out.exists() and tokenizer_digest(out) == tokenizer_digest(folder):
        return
    with new_directory(out) as new:
        shutil.copytree(folder, new, dirs_exist_ok=True)


def scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="plait-tokenizer-")
