"""A small tokenizer that tests share."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "Ünïcode, naïve café: 你好，世界 🎉👩‍👩‍👧 and plain words, plain words again."
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"


def save_tokenizer(path: Path, *, template: str | None = None) -> Path:
    """A byte-level BPE tokenizer, whose tokens are parts of characters as well as words."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>", "<end>"], initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator([TEXT[:60]] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path
