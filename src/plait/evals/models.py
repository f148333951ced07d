"""Models as evaluations ask them: plait's own, and any causal LM of transformers as it is (opaque).

Shapes: B rows, T tokens, D = d_model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from plait.cost import cost
from plait.data import IGNORE
from plait.evals.suites import Subject
from plait.model.cache import Cache
from plait.model.decode import Decoder
from plait.model.foreign import gguf_file
from plait.model.generate import prefill
from plait.model.io import load
from plait.model.lm import LM
from plait.model.tokens import Tokenizer, load_tokenizer
from plait.records import provenance
from plait.scoring import Scored, score_hidden, score_tokens

PIECE = {"cpu": 2048, "cuda": 16384}
"""tokens that pass through a model at a time where their losses are wanted; beyond the cache, memory holds no more"""
LEAST = 256
"""of these a row"""
PLACES, PIECE_BYTES = 32, 2**16
"""of a file, how many pieces over its length tell it from another of its size"""

Push = Callable[[int, int], bool]
"""(row, its new token) -> is its answer complete"""


@dataclass(frozen=True)
class Judged:
    """A model with its tokenizer and where it comes from."""

    subject: Subject
    model: Scored
    tokenizer: Tokenizer
    """None, which no type says, in suites that know no text"""
    context: int | None
    """tokens that it is known for"""
    device: torch.device
    spec_hash: str | None

    @property
    def name(self) -> str:
        return self.subject.name

    @property
    def step(self) -> int | None:
        return self.subject.step

    @property
    def origin(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        asked = self.subject.dtype
        dtype = {} if asked is None else {"dtype": str(asked).removeprefix("torch.")}
        return provenance(spec_hash=self.spec_hash, device=name) | dtype

    @cached_property
    def identity(self) -> str:
        """Changes with the weights and with what computes them."""
        parts = (weights_digest(self.subject.path), str(self.subject.dtype), str(self.subject.opaque))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def check_length(self, length: int, beyond: bool, what: str = "lengths") -> None:
        if self.context is not None and length > self.context and not beyond:
            raise ValueError(
                f"{what}: {length} tokens are more than the context_length = {self.context} of {self.name};"
                " shorten them, or go beyond it with --beyond true"
            )

    def state_bytes(self, length: int) -> int | None:
        """What one sequence keeps; None where that is not known."""
        if not isinstance(self.model, LM) or length < 1:
            return None
        return cost(self.model.spec, length, dtype_bytes=self.model.embed.weight.element_size()).state_bytes

    @torch.no_grad()
    def losses(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Loss of every target [B, T], NaN where it is IGNORE. plait's models read long rows in pieces, through the
        cache; logits exist for some positions at a time."""
        tokens_BT, targets_BT = tokens_BT.to(self.device), targets_BT.to(self.device)
        B, T = tokens_BT.shape
        piece = max(LEAST, PIECE.get(self.device.type, PIECE["cpu"]) // B)
        if piece >= T or not isinstance(self.model, LM):
            return _spread(targets_BT, score_tokens(self.model, tokens_BT, targets_BT).loss_N)
        cache, found = self.model.new_cache(B, T), []
        for start in range(0, T, piece):
            part = slice(start, start + piece)
            x_BTD = self.model.hidden(tokens_BT[:, part], cache=cache)
            targets = targets_BT[:, part]
            found.append(_spread(targets, score_hidden(self.model, x_BTD, targets).loss_N))
        return torch.cat(found, 1)

    @torch.no_grad()
    def complete(self, prompts: Sequence[list[int]], new: Sequence[int], push: Push, shared: int = 0) -> None:
        """Continue prompts greedily, each by up to new[row] tokens; every one is pushed, but for tokens that end a
        text, until push says that the answer is complete. shared: first tokens that all prompts have in common."""
        if isinstance(self.model, Opaque):
            self.model.complete(prompts, new, push, self.tokenizer.stop_tokens)
            return
        assert isinstance(self.model, LM)
        B, longest = len(prompts), max(len(p) + n for p, n in zip(prompts, new, strict=True))
        cache = self.model.new_cache(1 if shared else B, longest)
        if shared:
            prefill(self.model, torch.tensor([prompts[0][:shared]], device=self.device), cache)
            cache = cache.select(torch.zeros(B, dtype=torch.long))
        tokens_BT, mask_BT = left_padded([p[shared:] for p in prompts])
        mask = None if mask_BT.all() else mask_BT.to(self.device)
        logits_BV = prefill(self.model, tokens_BT.to(self.device), cache, mask=mask)
        _decode(self.model, cache, logits_BV, new, push, self.tokenizer.stop_tokens)


def _decode(model: LM, cache: Cache, logits_BV: Tensor, new: Sequence[int], push: Push, stops: frozenset[int]) -> None:
    """Greedy steps. Rows that are done leave the batch once they are half of it."""
    rows = list(range(len(new)))
    left, decoder = list(new), Decoder(model, cache)
    while True:
        token_B = logits_BV.argmax(-1)
        for row, token in zip(rows, token_B.tolist(), strict=True):
            if left[row]:
                left[row] = 0 if token in stops or push(row, token) else left[row] - 1
        going = [slot for slot, row in enumerate(rows) if left[row]]
        if not going:
            return
        if 2 * len(going) <= len(rows):
            index = torch.tensor(going)
            cache, rows = cache.select(index), [rows[slot] for slot in going]
            decoder, token_B = Decoder(model, cache), token_B[index.to(token_B.device)]
        logits_BV = decoder(token_B)


class Opaque:
    """A causal LM of transformers, run by its own code: forward and generate."""

    def __init__(self, model: Any, vocab_size: int):
        self.model = model
        self.spec = SimpleNamespace(vocab_size=vocab_size)
        self._head = self._find_head()

    @torch.no_grad()
    def _find_head(self) -> Any:
        """Its output embedding, where logits are that of the last hidden state and no more: then they need not exist
        for all positions at once."""
        head, base = self.model.get_output_embeddings(), self.model.base_model
        if head is None or base is self.model:
            return None
        tokens = torch.arange(4, device=self.model.device)[None] % self.spec.vocab_size
        whole, parts = self.model(tokens).logits, head(base(tokens).last_hidden_state)
        return head if torch.equal(whole, parts) else None

    def hidden(self, tokens_BT: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens: a model of transformers takes no packed documents")
        if self._head is None:
            return self.model(tokens_BT, use_cache=False).logits
        return self.model.base_model(tokens_BT, use_cache=False).last_hidden_state

    def logits(self, x: Tensor) -> Tensor:
        return x if self._head is None else self._head(x)

    def complete(self, prompts: Sequence[list[int]], new: Sequence[int], push: Push, stops: frozenset[int]) -> None:
        from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

        tokens_BT, mask_BT = left_padded(prompts)
        left = list(new)

        class Answered(StoppingCriteria):
            def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:  # pyright: ignore
                for row, token in enumerate(input_ids[:, -1].tolist()):
                    if left[row]:
                        left[row] = 0 if token in stops or push(row, token) else left[row] - 1
                return torch.tensor([not n for n in left], device=input_ids.device)

        device = self.model.device
        self.model.generate(
            tokens_BT.to(device),
            attention_mask=mask_BT.long().to(device),
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=max(new), pad_token_id=0, eos_token_id=sorted(stops) or None
            ),
            stopping_criteria=StoppingCriteriaList([Answered()]),
        )


def open_model(subject: Subject, *, text: bool = True) -> Judged:
    """ValueError in a line where the model, or with text its tokenizer, cannot be read."""
    if subject.opaque:
        model, context, spec_hash = _open_opaque(subject)
        device = torch.device(subject.device)
    else:
        model = load(subject.path, backend=subject.backend, device=subject.device, dtype=subject.dtype)  # pyright: ignore[reportArgumentType]
        model.eval()
        context, spec_hash, device = model.spec.context_length, model.spec.hash, model.embed.weight.device
    tokenizer = load_tokenizer(subject.path, model.spec.vocab_size) if text else None
    return Judged(subject, model, tokenizer, context, device, spec_hash)  # pyright: ignore[reportArgumentType]


def _open_opaque(subject: Subject) -> tuple[Opaque, int | None, None]:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    options: dict[str, Any] = {
        "dtype": subject.dtype,
        "trust_remote_code": False,
        "local_files_only": True,
        "use_safetensors": True,
    }
    if gguf := gguf_file(subject.path):
        del options["use_safetensors"]
        options["gguf_file"] = gguf
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(subject.path, **options)
    except Exception as error:  # of many kinds
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{subject.path}: transformers cannot load it ({first})") from None
    finally:
        logging.enable_progress_bar()
    model.generation_config = GenerationConfig()  # its own sampling settings stay out
    model = model.eval()
    model.to(subject.device)  # pyright: ignore[reportArgumentType]
    config = model.config.get_text_config()
    return Opaque(model, config.vocab_size), getattr(config, "max_position_embeddings", None), None


def left_padded(prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] and which of them are real."""
    T = max(map(len, prompts))
    tokens_BT = torch.tensor([[0] * (T - len(p)) + p for p in prompts])
    mask_BT = torch.tensor([[False] * (T - len(p)) + [True] * len(p) for p in prompts])
    return tokens_BT, mask_BT


def weights_digest(path: Path) -> str:
    """Of what makes a model in its directory, weights, settings and tokenizer: names, sizes and pieces of files."""
    sha = hashlib.sha256()
    kinds = (".safetensors", ".gguf", ".json", ".model")
    for file in sorted(f for f in path.iterdir() if f.suffix in kinds and not f.name.startswith("trainer.")):
        size = file.stat().st_size
        sha.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as data:
            for place in range(PLACES):
                data.seek(max(0, size - PIECE_BYTES) * place // (PLACES - 1))
                sha.update(data.read(PIECE_BYTES))
    return sha.hexdigest()


def _spread(targets_BT: Tensor, loss_N: Tensor) -> Tensor:
    losses_BT = torch.full(targets_BT.shape, torch.nan, dtype=loss_N.dtype, device=targets_BT.device)
    losses_BT[targets_BT != IGNORE] = loss_N
    return losses_BT
