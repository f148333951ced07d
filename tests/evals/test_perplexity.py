"""Perplexity against passes run one by one, and where tokens stand in texts."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from evals.tiny import tiny_model, words_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizer import TEXT, save_tokenizer
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from plait import save, scoring
from plait.cli import main
from plait.data.build import BuildOptions, build
from plait.evals import models, perplexity
from plait.evals.models import Judged, open_model
from plait.evals.perplexity import passes, run_ppl
from plait.evals.results import read_rows
from plait.evals.suites import Outcome, Ppl, Subject
from plait.evals.texts import documents, inside, merged, tokenize
from plait.model.tokens import Bytes, load_tokenizer

TEXTS = [TEXT, "Ein Wort – zwei Wörter. " * 3, "a", "plain words, plain words again, and again"]


@pytest.fixture(scope="module", params=["nope gdn", "swa[window=8] kda"])
def subject(request, tmp_path_factory) -> Subject:
    path = tmp_path_factory.mktemp("models") / "model"
    save(tiny_model(request.param, vocab_size=300, context=512), path)
    save_tokenizer(path)
    return Subject(name="tiny", path=path, dtype=torch.float64)


def opaque_of(cls, config, path) -> Subject:
    torch.manual_seed(0)
    model = cls(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim == 2 else 1)
    model.save_pretrained(path)
    save_tokenizer(path)
    return Subject(name="theirs", path=path, dtype=torch.float64, opaque=True)


SIZES = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


def one(options: Ppl, subject: Subject) -> Outcome:
    (outcome,) = run_ppl(options, [subject])
    return outcome


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 20))
def test_passes_score_every_token_but_the_first_once(T, length, stride):
    stride = min(stride, length)
    found = list(passes(0, T, length, stride))
    assert [i + 1 for each in found for i in range(each.first, each.end)] == list(range(1, T))
    for each in found[1:]:
        assert each.end - each.start <= length and each.first - each.start == length - stride


def alone(judged: Judged, ids: list[int], length: int, stride: int) -> dict[int, float]:
    """Losses by place in the text, a pass of its own for every token, all logits."""
    losses = {}
    for place in range(1, len(ids)):
        first = 0 if place <= length else length + (place - 1 - length) // stride * stride
        start = 0 if place <= length else first + stride - length
        context = torch.tensor([ids[start:place]], device=judged.device)
        logits = judged.model.logits(judged.model.hidden(context))[0, -1]
        losses[place] = float(F.cross_entropy(logits, torch.tensor(ids[place])))
    return losses


@pytest.mark.parametrize(("length", "stride"), [(16, 5), (7, 1), (500, None)])
@torch.no_grad()
def test_losses_are_those_of_single_passes(subject, data, length, stride, monkeypatch):
    judged = open_model(subject)
    ids = [load_tokenizer(subject.path, 300).encode(text) for text in TEXTS]
    expected = [alone(judged, each, length, stride or length) for each in ids]
    total, count = sum(sum(each.values()) for each in expected), sum(map(len, expected))
    monkeypatch.setattr(scoring, "CHUNK", 11)
    for batch_size, piece in ((1, 2048), (8, 2048), (None, 6)):
        monkeypatch.setitem(models.PIECE, "cpu", piece)
        monkeypatch.setattr(models, "LEAST", 1)
        outcome = one(Ppl(data=(data,), length=length, stride=stride, batch_size=batch_size), subject)
        values = outcome.records[0].values
        assert values["n"] == count
        assert values["loss"] == pytest.approx(total / count, rel=1e-10)
        assert values["token_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-9)
        assert values["word_perplexity"] == pytest.approx(
            math.exp(total / sum(len(text.split()) for text in TEXTS)), rel=1e-9
        )
        assert values["bits_per_byte"] == pytest.approx(
            total / math.log(2) / sum(len(text.encode()) for text in TEXTS), rel=1e-9
        )
        assert [row["loss"] for row in outcome.samples] == pytest.approx([sum(each.values()) for each in expected])
        low, high = (values[f"token_perplexity_{end}"] for end in ("low", "high"))
        assert low < values["token_perplexity"] < high


@torch.no_grad()
def test_loss_against_position(subject, data):
    judged, ids = open_model(subject), load_tokenizer(subject.path, 300).encode(TEXTS[1])
    losses = alone(judged, ids, 500, 500)
    outcome = one(Ppl(data=(data,), length=500, max_tokens=len(ids), limit=2), subject)
    first = alone(judged, load_tokenizer(subject.path, 300).encode(TEXTS[0]), 500, 500)
    found = [record for record in outcome.records if record.name == "position_loss"]
    assert [record.axes["position"] for record in found] == [1, 2, 4, 8, 16, 32, 64, 128][: len(found)]
    for record in found:
        inside_bucket = range(record.axes["position"], record.axes["until"])
        values = [each[p] for each in (first, losses) for p in inside_bucket if p in each]
        assert record.values["n"] == len(values)
        assert record.values["loss"] == pytest.approx(sum(values) / len(values))


def test_a_run_goes_on_where_it_was_stopped(subject, data, tmp_path, monkeypatch):
    monkeypatch.setitem(perplexity.AT_ONCE, "cpu", 8)
    scored, losses = [], perplexity._losses
    options = Ppl(data=(data,), length=16, stride=5)

    def stop(judged, tokens, todo, *rest):
        if len(scored) == 2:
            raise KeyboardInterrupt
        scored.append({each.document for each in todo})
        return losses(judged, tokens, todo, *rest)

    (expected,) = run_ppl(options, [subject], tmp_path / "whole")
    monkeypatch.setattr(perplexity, "_losses", stop)
    with pytest.raises(KeyboardInterrupt):
        list(run_ppl(options, [subject], tmp_path / "out"))
    done = scored.copy()
    monkeypatch.setattr(
        perplexity, "_losses", lambda *given: scored.append({p.document for p in given[2]}) or losses(*given)
    )
    (outcome,) = run_ppl(options, [subject], tmp_path / "out")
    assert len(set.union(*done)) == 2 and sorted(i for each in scored for i in each) == [0, 1, 3]  # 2 has one token
    assert [r.values for r in outcome.records] == [r.values for r in expected.records] and not outcome.samples
    found = [read_rows(tmp_path / name / "samples.jsonl")[0] for name in ("out", "whole")]
    assert found[0] == found[1] and len(found[0]) == len(TEXTS)
    scored.clear()
    for changed in ({"stride": 6}, {"length": 15}, {"max_tokens": 9}):
        list(run_ppl(dataclasses.replace(options, **changed), [subject], tmp_path / "out"))
        assert len(set.union(*scored)) == 3, changed
        scored.clear()
    (again,) = run_ppl(dataclasses.replace(options, batch_size=1, limit=2), [subject], tmp_path / "out")
    assert not any(scored) and again.records[0].values["documents"] == 2


def test_long_texts_are_cut(subject, data):
    outcome = one(Ppl(data=(data,), length=64, max_tokens=9), subject)
    assert [row["tokens"] for row in outcome.samples] == [8, 8, 0, 8]
    words = tokenize(load_tokenizer(subject.path, 300), TEXTS[1], max_tokens=9)
    assert TEXTS[1].startswith(words.text) and 0 < len(words.text) < len(TEXTS[1])
    assert outcome.samples[1]["words"] == len(words.text.split())


@pytest.mark.parametrize("soft_capped", [False, True])
def test_an_opaque_model(soft_capped, data, tmp_path):
    """As imported; or, where its logits are more than its head's, as it gives them."""
    if soft_capped:
        config = Gemma2Config(**SIZES, **HEADS, head_dim=8, final_logit_softcapping=5.0)
        subject = opaque_of(Gemma2ForCausalLM, config, tmp_path / "gemma")
    else:
        subject = opaque_of(LlamaForCausalLM, LlamaConfig(**SIZES, **HEADS), tmp_path / "llama")
    judged = open_model(subject)
    options = Ppl(data=(data,), length=16, stride=5)
    outcome = one(options, subject)
    if soft_capped:
        ids = torch.tensor([load_tokenizer(subject.path, 300).encode(TEXTS[0])[:17]])
        with torch.no_grad():
            logits = judged.model.model(ids[:, :-1]).logits[0]  # pyright: ignore[reportAttributeAccessIssue]
        expected = F.cross_entropy(logits, ids[0, 1:], reduction="sum")
        short = one(Ppl(data=(data,), length=16, max_tokens=17, limit=1), subject)
        assert short.samples[0]["loss"] == pytest.approx(float(expected))
        return
    imported = one(options, Subject(name="ours", path=subject.path, dtype=torch.float64))
    assert [row["loss"] for row in outcome.samples] == pytest.approx([row["loss"] for row in imported.samples])


def test_logits_never_exist_for_a_whole_text(subject, monkeypatch, tmp_path):
    (tmp_path / "long.txt").write_text("words " * 200)
    sizes = []
    model_of = models.load

    def load(*args, **options):
        model = model_of(*args, **options)
        logits, hidden = model.logits, model.hidden
        model.logits = lambda x: sizes.append(("logits", x[..., 0].numel())) or logits(x)
        model.hidden = lambda t, **o: sizes.append(("hidden", t.numel())) or hidden(t, **o)
        return model

    monkeypatch.setattr(models, "load", load)
    monkeypatch.setitem(models.PIECE, "cpu", 64)
    monkeypatch.setattr(models, "LEAST", 1)
    monkeypatch.setattr(scoring, "CHUNK", 50)
    outcome = one(Ppl(data=(str(tmp_path / "long.txt"),), length=4096, beyond=True), subject)
    assert outcome.records[0].values["n"] > 350
    assert max(n for what, n in sizes if what == "logits") == 50
    assert max(n for what, n in sizes if what == "hidden") == 64


def test_texts_of_token_shards(subject, tmp_path):
    texts = [f"{TEXT} {i}" for i in range(40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, tokenizer in (("bytes", "bytes"), ("words", str(subject.path))):
        build([str(tmp_path / "texts.jsonl")], tmp_path / name, BuildOptions(tokenizer=tokenizer, valid=0.3))
        found = [list(documents([str(tmp_path / name)], "text", split, None)) for split in ("train", "valid")]
        assert sorted(found[0] + found[1]) == sorted(texts) and all(found)


def test_where_tokens_stand(tmp_path):
    for tokenizer in (Bytes(), load_tokenizer(save_tokenizer(tmp_path / "t"), 300)):
        found = tokenize(tokenizer, TEXT)
        assert found.ids == tokenizer.encode(TEXT)
        covered = {i for start, end in found.spans for i in range(start, end)}
        assert covered == set(range(len(TEXT)))
        for k in (1, 5, 30):
            part = tokenize(tokenizer, TEXT, max_tokens=k)
            assert part.ids == found.ids[:k] and TEXT.startswith(part.text)


def test_a_token_before_the_text_stands_nowhere(tmp_path):
    words_tokenizer(begins=True).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, 99)
    found, bare = tokenize(tokenizer, "red dog"), tokenize(tokenizer, "red dog", special=False)
    assert (found.ids[1:], found.spans) == (bare.ids, [(0, 0), (0, 3), (4, 7)])
    assert inside(found.spans, [(0, 7)]) == [1, 2]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5))),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5))),
)
def test_stretches(keys, tokens):
    keys = [(start, start + size) for start, size in keys]
    tokens = [(start, start + size) for start, size in tokens]
    covered = {i for start, end in keys for i in range(start, end)}
    expected = [i for i, (start, end) in enumerate(tokens) if start < end and covered >= set(range(start, end))]
    assert inside(tokens, merged(keys)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "data: none given; name texts with --data"),
        (["--data", "nowhere"], "source nowhere: no such file or folder"),
        (["--data", "README.md", "--length", "0"], "length = 0; it must be at least 1"),
        (["--data", "README.md", "--length", "8", "--stride", "9"], "stride = 9; it must be at most length = 8"),
        (["--data", "README.md", "--length", "1000"], "length: 1000 tokens are more than the context_length = 512 of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(subject, options, message, capsys):
    assert main(["eval", str(subject.path), "--suite", "ppl", "--device", "cpu", *options]) == 2
    assert f"plait eval: {message}" in capsys.readouterr().err


def test_the_command(subject, data, tmp_path, capsys):
    """Twice into one folder. Two models are compared document by document."""
    other = tmp_path / "other"
    save(tiny_model("full", vocab_size=300, context=512), other)
    save_tokenizer(other)
    command = ["eval", str(subject.path), str(other), "--suite", "ppl", "--device", "cpu", "--data", data]
    command += ["--dtype", "float64", "--out", str(tmp_path / "out")]
    for _ in range(2):
        assert main(command) == 0
    assert capsys.readouterr().out.count("token_perplexity") == 4
    rows = read_rows(tmp_path / "out" / "samples.jsonl")[0]
    assert len(rows) == 2 * len(TEXTS)
    assert main(["show", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert out.count("bits_per_byte") == 2
    means = [
        [r["loss"] / r["tokens"] for r in rows if r["model"] == str(m) and r["tokens"]] for m in (other, subject.path)
    ]
    (line,) = [line.split() for line in out.splitlines() if line.startswith("loss (nats)")]
    assert float(line[2]) == pytest.approx(sum(means[0]) / len(means[0]) - sum(means[1]) / len(means[1]), abs=1e-4)
    assert line[-1] == str(sum(bool(r["tokens"]) for r in rows[: len(TEXTS)]))
