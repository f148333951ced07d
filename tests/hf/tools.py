"""Models of every mixer beside softmax attention, in both orders, with the interface of transformers."""

from __future__ import annotations

import itertools

import pytest
import torch
from contract.configs import MIXERS, SMALL, build, layers, softmaxes
from contract.tools import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from plait.config import Layer
from plait.hf import PlaitForCausalLM
from plait.model.lm import LM
from plait.spec import Spec

CASES = list(itertools.product(sorted(MIXERS), ("before", "after")))


@st.composite
def models(draw: DrawFn, kind: str, place: str, vocab_size: int = 11) -> LM:
    """Two random layers, one of this mixer, before or after one of softmax attention; float64."""
    assume(draw(st.booleans()))  # hypothesis begins with the simplest model of all, and that is always the same
    pair = [draw(layers(draw(MIXERS[kind].configs(SMALL)))), draw(layers(draw(softmaxes(SMALL))))]
    return model_of(*(pair if place == "before" else pair[::-1]), vocab_size=vocab_size, tied=draw(st.booleans()))


def model_of(*layers: Layer, vocab_size: int = 11, tied: bool = False, **fields) -> LM:
    """Weights so large that its choices depend on what it reads."""
    fields = {"d_model": 8, "init_std": 0.45, "tie_embeddings": tied} | fields
    return build(Spec(vocab_size=vocab_size, layers=layers, **fields), 1, torch.float64, "torch")


def every_mixer(n: int = 1, **arguments):
    """A test of `lm`, for n random models of every mixer in both orders."""

    def decorate(test):
        def run(kind: str, place: str):
            examples(n)(given(models(kind, place, **arguments))(test))()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return pytest.mark.parametrize(("kind", "place"), CASES)(run)

    return decorate


def hf(lm: LM) -> PlaitForCausalLM:
    return PlaitForCausalLM.from_lm(lm)


def tokens(*shape: int, vocab_size: int = 11, seed: int = 0) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def left_padded(rows: list[Tensor]) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for row, text in enumerate(rows):
        ids[row, width - len(text) :], mask[row, width - len(text) :] = text, 1
    return {"input_ids": ids, "attention_mask": mask}
