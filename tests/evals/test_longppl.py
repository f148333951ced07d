"""LongPPL against every window run alone, with tokenizers that agree on nothing but the text."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from evals.tiny import run_by_two, tiny_model
from tokenizer import TEXT, save_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from plait import save
from plait.cli import main
from plait.evals import longppl, perplexity
from plait.evals.longppl import key_losses, key_stretches, run_longppl
from plait.evals.models import Judged, open_model
from plait.evals.results import read_rows
from plait.evals.suites import LongPpl, Outcome, Ppl, Subject
from plait.evals.texts import tokenize
from plait.model.tokens import Bytes

K, D, GAIN, MOST = 8, 5, 0.5, 9.0
TEXTS = [TEXT, "naïve 你好 café 🎉 " * 3, "short", f"{TEXT[30:]} {TEXT[:20]}", "Ü"]


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory) -> Subject:
    path = tmp_path_factory.mktemp("models") / "bytes"
    save(tiny_model("nope gdn", vocab_size=256, context=None), path)
    return Subject(name="bytes", path=path, dtype=torch.float64)


@pytest.fixture(scope="module")
def words_model(tmp_path_factory) -> Subject:
    path = tmp_path_factory.mktemp("models") / "words"
    save(tiny_model("full", vocab_size=300, context=None), path)
    save_tokenizer(path)
    return Subject(name="words", path=path, dtype=torch.float64)


@pytest.fixture
def data(tmp_path) -> str:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


def all_losses(judged: Judged, ids: list[int]) -> list[float]:
    """Of tokens 1, 2, ...; one pass, all logits."""
    model = judged.model
    logits = model.logits(model.hidden(torch.tensor([ids])))[0]
    return F.cross_entropy(logits[:-1], torch.tensor(ids[1:], dtype=torch.long), reduction="none").tolist()


def naive_keys(reference: Judged, text: str) -> set[int]:
    """Characters of key tokens, window by window."""
    tokens = tokenize(reference.tokenizer, text)
    ids, found = tokens.ids, set()
    full = all_losses(reference, ids)
    start = 0
    while start + K < len(ids):
        window = ids[start : start + K + D]
        short = all_losses(reference, window)
        for place in range(start + K, start + len(window)):
            loss = full[place - 1]
            if short[place - start - 1] - loss > GAIN and loss < MOST:
                found |= set(range(*tokens.spans[place]))
        start += D
    return found


def naive_losses(judged: Judged, text: str, keys: set[int]) -> list[float]:
    """Of the model's tokens all of whose characters are key tokens'; its first token has no loss."""
    tokens = tokenize(judged.tokenizer, text)
    if len(tokens.ids) < 2:
        return []
    losses = all_losses(judged, tokens.ids)
    return [losses[i - 1] for i, (a, b) in enumerate(tokens.spans) if i and a < b and keys >= set(range(a, b))]


def options(data: str, reference: Subject, **changed) -> LongPpl:
    values = {"context": K, "stride": D, "gain": GAIN, "most": MOST, "cache": Path(data).parent / "cache"} | changed
    return LongPpl(data=(data,), reference=str(reference.path), **values)


def one(chosen: LongPpl, subject: Subject) -> Outcome:
    (outcome,) = run_longppl(chosen, [subject])
    return outcome


@pytest.mark.parametrize("pair", ["bytes words", "words bytes", "bytes bytes", "words words"])
@torch.no_grad()
def test_as_windows_run_alone(pair, bytes_model, words_model, data):
    reference, subject = ({"bytes": bytes_model, "words": words_model}[name] for name in pair.split())
    judge, judged = open_model(reference), open_model(subject)
    keys = [naive_keys(judge, text) for text in TEXTS]
    losses = [naive_losses(judged, text, each) for text, each in zip(TEXTS, keys, strict=True)]
    assert any(ord(TEXTS[0][i]) > 127 for i in keys[0]) and sum(map(len, losses)) > 9
    outcome = one(options(data, reference), subject)
    assert [row["tokens"] for row in outcome.samples] == [len(found) for found in losses]
    assert [row["loss"] for row in outcome.samples] == pytest.approx([sum(found) for found in losses], rel=1e-10)
    kept = [found for found in losses if found]
    values = outcome.records[0].values
    assert values["pooled"] == pytest.approx(math.exp(sum(map(sum, kept)) / sum(map(len, kept))), rel=1e-9)
    per_document = [math.exp(sum(found) / len(found)) for found in kept]
    assert values["per_document"] == pytest.approx(sum(per_document) / len(kept), rel=1e-9)
    assert (values["documents"], values["dropped"]) == (len(kept), len(TEXTS) - len(kept))


@torch.no_grad()
def test_a_last_window_of_one_token(bytes_model, data):
    """Lengths about K and K + d: no window, one of one token, a whole one, and one more of one token."""
    judge = open_model(bytes_model)
    rule = options(data, bytes_model, gain=-100.0, most=1000.0).rule
    text = "plain words, plain words again"
    for T in (K, K + 1, K + D, K + D + 1):
        found = key_stretches(judge, text[:T], rule)
        assert found == ([(K, T)] if T > K else [])


@torch.no_grad()
def test_a_key_at_the_first_token_has_no_loss_and_wraps_nowhere(words_model, bytes_model, data):
    for subject in (words_model, bytes_model):
        judged = open_model(subject)
        tokens = tokenize(judged.tokenizer, TEXT)
        losses, rule = all_losses(judged, tokens.ids), options(data, words_model).rule
        assert key_losses(judged, TEXT, [(0, tokens.spans[0][1])], rule) == pytest.approx(
            [loss for i, loss in enumerate(losses, 1) if tokens.spans[i][1] <= tokens.spans[0][1]]
        )
        assert key_losses(judged, TEXT, [(0, len(TEXT))], rule) == pytest.approx(losses)
        assert key_losses(judged, TEXT, [], rule) == []


def test_no_keys_at_all(bytes_model, data):
    outcome = one(options(data, bytes_model, gain=1e6), bytes_model)
    values = outcome.records[0].values
    assert (values["keys"], values["pooled"], values["per_document"]) == (0, None, None)
    assert outcome.notes == ["bytes: 5 of 5 documents have fewer than 1 key tokens"]


def test_keys_are_found_once(bytes_model, words_model, data, monkeypatch):
    first = one(options(data, bytes_model), words_model)
    with monkeypatch.context() as patched:
        patched.setattr(longppl, "key_stretches", lambda *_: pytest.fail("the reference was asked again"))
        again = one(options(data, bytes_model), words_model)
        assert again.records[0].values == first.records[0].values
        for changed in ({"gain": 0.6}, {"stride": 6}, {"max_tokens": 40}, {"special": False}):
            with pytest.raises(pytest.fail.Exception, match="asked again"):
                one(options(data, bytes_model, **changed), words_model)
        other = dataclasses.replace(words_model, dtype=torch.float32)
        with pytest.raises(pytest.fail.Exception, match="asked again"):
            one(options(data, bytes_model), other)


def test_a_run_goes_on_where_it_was_stopped(bytes_model, words_model, data, monkeypatch, tmp_path):
    chosen, read, losses = options(data, bytes_model), [], longppl.key_losses

    def stop(judged, text, *rest):
        if len(read) == 2:
            raise KeyboardInterrupt
        read.append(text)
        return losses(judged, text, *rest)

    expected = one(chosen, words_model)
    monkeypatch.setattr(longppl, "key_losses", stop)
    with pytest.raises(KeyboardInterrupt):
        list(run_longppl(chosen, [words_model], tmp_path / "out"))
    monkeypatch.setattr(
        longppl, "key_losses", lambda judged, text, *rest: read.append(text) or losses(judged, text, *rest)
    )
    for _ in range(2):
        (outcome,) = run_longppl(chosen, [words_model], tmp_path / "out")
        assert read == TEXTS
        assert outcome.records[0].values == expected.records[0].values
    assert read_rows(tmp_path / "out" / "samples.jsonl")[0] == expected.samples
    (few,) = run_longppl(dataclasses.replace(chosen, min_keys=1000), [words_model], tmp_path / "out")
    assert read == TEXTS and few.records[0].values["dropped"] == len(TEXTS)
    for changed, model in (({"gain": 0.6}, words_model), ({}, bytes_model)):
        list(run_longppl(dataclasses.replace(chosen, **changed), [model], tmp_path / "out"))
        assert read[len(TEXTS) :] == TEXTS
        del read[len(TEXTS) :]


def test_processes_share_the_documents(bytes_model, words_model, data, monkeypatch, tmp_path):
    """As torchrun starts them; also those of the suite ppl."""
    monkeypatch.setitem(perplexity.AT_ONCE, "cpu", 8)
    for suite in (options(data, bytes_model), Ppl(data=(data,), length=16)):
        (expected,) = suite.run([words_model])
        found = run_by_two(suite, words_model, tmp_path / type(suite).__name__)
        assert [r.values for r in found] == [r.values for r in expected.records]
        assert len(read_rows(tmp_path / type(suite).__name__ / "samples.jsonl")[0]) == len(TEXTS)


def test_an_opaque_reference(bytes_model, data, tmp_path):
    """Finds the keys that the same model finds when it is imported."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=512, **sizes)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20 if parameter.ndim == 2 else 1)
    model.save_pretrained(tmp_path / "llama")
    reference = Subject(name="llama", path=save_tokenizer(tmp_path / "llama"), dtype=torch.float64)
    found = [
        one(options(data, reference, reference_opaque=opaque, cache=tmp_path / str(opaque)), bytes_model)
        for opaque in (False, True)
    ]
    assert found[0].records[0].values == found[1].records[0].values
    assert found[0].records[0].values["keys"] > 9


@torch.no_grad()
def test_the_published_settings(bytes_model, words_model, data):
    """000 drops documents of few keys, and reads its own beginning of a text; 003 pools and adds no token."""
    chosen = options(data, bytes_model, setting="000")
    assert (chosen.rule.max_tokens, chosen.rule.special, chosen.published.min_keys) == (16_384, True, 10)
    outcome = one(chosen, words_model)
    counts = [row["tokens"] for row in outcome.samples]
    assert outcome.records[0].values["documents"] == sum(n >= 10 for n in counts) < sum(n > 0 for n in counts)
    assert outcome.records[0].axes["headline"] == "per_document"
    chosen = options(data, bytes_model, setting="003")
    assert (chosen.rule.max_tokens, chosen.rule.special, chosen.published.min_keys) == (32_768, False, 1)
    assert one(chosen, words_model).records[0].axes["headline"] == "pooled"
    assert options(data, bytes_model, setting="001").rule.max_tokens is None
    assert options(data, bytes_model, setting="003", max_tokens=7).rule.max_tokens == 7
    assert LongPpl(data=("x",), reference="y").rule.__dict__ == {
        "K": 4096,
        "d": 1024,
        "gain": 2.0,
        "most": 2.0,
        "max_tokens": None,
        "special": True,
    }


@torch.no_grad()
def test_max_tokens_are_each_models_own(bytes_model, words_model, data):
    judge, judged, T = open_model(bytes_model), open_model(words_model), 25
    outcome = one(options(data, bytes_model, max_tokens=T), words_model)
    for text, row in zip(TEXTS, outcome.samples, strict=True):
        seen = tokenize(Bytes(), text, max_tokens=T).text
        whole = seen if seen.encode() == text.encode()[:T] else seen[:-1]  # no part of a character
        keys = naive_keys(judge, whole) & set(range(len(tokenize(judged.tokenizer, text, max_tokens=T).text)))
        losses = naive_losses(judged, text, keys)
        if len(seen) == len(whole):
            assert row["loss"] == pytest.approx(sum(losses))


def test_a_run_as_reference_is_its_last_checkpoint(bytes_model, data, tmp_path, capsys):
    for step in ("step-00000001", "step-00000002"):
        shutil.copytree(bytes_model.path, tmp_path / "run" / "checkpoints" / step)
        (tmp_path / "run" / "checkpoints" / step / "trainer.json").write_text("{}")
    shutil.copy(bytes_model.path / "spec.json", tmp_path / "run")
    command = ["eval", str(bytes_model.path), "--suite", "longppl", "--device", "cpu", "--data", data, "--json"]
    assert main([*command, "--reference", str(tmp_path / "run"), "--cache", str(tmp_path / "cache")]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["axes"]["reference"] == str(tmp_path / "run" / "checkpoints" / "step-00000002")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--reference", "x"], "data: none given; name texts with --data"),
        (["--data", "README.md"], "reference: none given; --reference MODEL finds the key tokens"),
        (
            ["--data", "README.md", "--reference", "x", "--setting", "004"],
            "setting = '004'; nearest: 003, 001, 000; allowed: ",
        ),
        (["--data", "README.md", "--reference", "nowhere"], "nowhere: no such directory"),
        (["--data", "README.md", "--reference", "x", "--stride", "0"], "stride = 0; it must be at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(bytes_model, given, message, capsys):
    assert main(["eval", str(bytes_model.path), "--suite", "longppl", "--device", "cpu", *given]) == 2
    assert capsys.readouterr().err.startswith(f"plait eval: {message}")
