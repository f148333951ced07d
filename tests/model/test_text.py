"""`plait generate`: text as it comes, what it took, and errors in one line."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from tokenizer import TEMPLATE, save_tokenizer

from plait import records
from plait.cli import main
from plait.model import text as module
from plait.model.generate import generate
from plait.model.io import load, save
from plait.model.lm import LM
from plait.model.text import continue_text
from plait.model.tokens import Bytes
from plait.spec import Spec


def model_of(vocab_size: int, **fields) -> LM:
    sizes = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 24}
    spec = Spec.from_layout("gdn nope", vocab_size=vocab_size, **sizes, **fields)
    return LM(dataclasses.replace(spec, init_std=0.5))


@pytest.fixture(scope="module")
def on_bytes(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "bytes"
    save(model_of(256, context_length=40), path)
    return path


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "words"
    save(model_of(300), path)
    return save_tokenizer(path, template=TEMPLATE)


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    status = main(["generate", *map(str, arguments), "--device", "cpu"])
    return status, *capsys.readouterr()


def test_text_and_a_line_of_numbers(on_bytes, capsys):
    status, out, err = run(capsys, on_bytes, "--prompt", "hé", "--max-new-tokens", 12)
    prompt = torch.tensor([list("hé".encode())])
    want = generate(load(on_bytes), prompt, max_new_tokens=12, stop_tokens=[0])[0].tolist()
    assert status == 0
    assert out == Bytes().decode(want) + "\n"
    assert err.startswith("prompt: 3 tokens at ")
    assert err.count("\n") == 1
    cache = load(on_bytes).new_cache(1, 15)
    assert f"cache: {cache.num_bytes:,} bytes" in err


def test_json(with_tokenizer, capsys):
    flags = ("--prompt", "plain words", "--max-new-tokens", 5, "--temperature", 1, "--top-k", 9, "--seed", 4, "--json")
    status, out, err = run(capsys, with_tokenizer, *flags)
    assert status == 0
    done = json.loads(out)
    assert not err
    assert len(done["tokens"]) <= 5
    assert done["decode_tokens_per_second"] > 0
    assert done["prefill_tokens_per_second"] == done["prompt_tokens"] / done["prefill_seconds"]
    assert run(capsys, with_tokenizer, *flags)[1].split('"end"')[0] == out.split('"end"')[0]


def test_where_a_prompt_comes_from(on_bytes, tmp_path, capsys, monkeypatch):
    flags = ("--max-new-tokens", 4)
    want = run(capsys, on_bytes, "--prompt", "two\nlines", *flags)[1]
    (tmp_path / "prompt.txt").write_text("two\nlines")
    assert run(capsys, on_bytes, "--prompt-file", tmp_path / "prompt.txt", *flags)[1] == want
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines"))
    assert run(capsys, on_bytes, "--prompt", "-", *flags)[1] == want


def test_chat(with_tokenizer, capsys):
    flags = ("--max-new-tokens", 4, "--json", "--prompt", "plain")
    assert json.loads(run(capsys, with_tokenizer, "--chat", *flags)[1])["prompt_tokens"] > 8


def test_a_run(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some words " * 400)
    sizes = ["--layout", "gdn nope", "--d-model", "16", "--num-layers", "2", "--d-ff", "24", "--steps", "1"]
    data = ["--data", str(tmp_path / "text.txt"), "--length", "32"]
    assert main(["train", "--runs", str(tmp_path), "--name", "x", *sizes, *data]) == 0
    assert records.read(tmp_path / "x" / "records.jsonl")
    capsys.readouterr()
    assert run(capsys, tmp_path / "x", "--prompt", "some", "--max-new-tokens", 3)[0] == 0


def test_an_interrupt_keeps_what_there_is(on_bytes, monkeypatch):
    model = load(on_bytes)
    whole = continue_text(model, Bytes(), list(b"hi"), max_new_tokens=9)
    stream = module.stream

    def interrupted(*args, **options):
        for i, token in enumerate(stream(*args, **options)):
            if i == 4:
                raise KeyboardInterrupt
            yield token

    monkeypatch.setattr(module, "stream", interrupted)
    done = continue_text(model, Bytes(), list(b"hi"), max_new_tokens=9)
    assert (done.end, done.tokens) == ("interrupted", whole.tokens[:4])
    assert "interrupted" in done.summary()


def test_a_stop_token_is_not_shown(on_bytes):
    model = load(on_bytes)
    free = continue_text(model, Bytes(), list(b"hi"), max_new_tokens=9)

    class Stops(Bytes):
        stop_tokens = frozenset({free.tokens[3]})

    done = continue_text(model, Stops(), list(b"hi"), max_new_tokens=9)
    assert done.end == "stop token"
    assert done.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1]
    assert done.text == Bytes().decode(done.tokens[:-1])


MISTAKES = {
    "no prompt": ((), "prompt: give one of --prompt TEXT and --prompt-file FILE"),
    "two prompts": (("--prompt", "a", "--prompt-file", "b"), "prompt: give one of"),
    "an empty one": (("--prompt", ""), "prompt: no tokens in it"),
    "no such file": (("--prompt-file", "/nowhere/x"), "/nowhere/x"),
    "no template": (("--prompt", "a", "--chat"), "it has no chat template"),
    "too long": (("--prompt", "a" * 39, "--max-new-tokens", 2), "context_length = 40; shorten them, or go beyond it"),
    "temperature": (("--prompt", "a", "--temperature", -1), "temperature = -1.0"),
    "dtype": (("--prompt", "a", "--dtype", "float23"), "dtype = 'float23'; nearest: float32"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name: str, on_bytes, capsys):
    flags, message = MISTAKES[name]
    status, out, err = run(capsys, on_bytes, *flags)
    assert status in (1, 2)
    assert not out
    assert err.startswith("plait generate: ")
    assert message in err
    assert err.count("\n") == 1


def test_beyond(on_bytes, capsys):
    assert run(capsys, on_bytes, "--prompt", "a" * 39, "--max-new-tokens", 2, "--beyond")[0] == 0


def test_a_model_without_a_tokenizer(tmp_path, capsys):
    save(model_of(12), tmp_path / "m")
    status, _, err = run(capsys, tmp_path / "m", "--prompt", "a")
    assert status == 2
    assert "no tokenizer" in err
