"""plait's models under lm-evaluation-harness: scores as by hand from logits, and as its own of transformers' models."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from evals.tiny import documents, save_tiny, tiny_model, words_tokenizer, write_tasks

from plait import load, records
from plait.cli import main
from plait.model.foreign import export_model

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and of datasets

DOCS = documents(7)
CLOSE = {"rel": 1e-10, "abs": 1e-10}
LIKE = {"rel": 1e-6}
"""transformers has the norms of a float64 model in float32"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A hybrid model in model/, tasks in tasks/."""
    folder = tmp_path_factory.mktemp("evals")
    save_tiny(folder / "model")
    write_tasks(folder / "tasks", DOCS)
    return folder


def judge(path, **options):
    from plait.evals.lm_eval import PlaitLM

    return PlaitLM(path, **({"device": "cpu", "batch_size": 3} | options))


def requests(kind: str, arguments: list[tuple]) -> list:
    from lm_eval.api.instance import Instance

    metadata = ("tiny", 0, 1)
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i, metadata=metadata) for i, a in enumerate(arguments)]


PAIRS = requests("loglikelihood", [(doc["text"], f" {option}") for doc in DOCS for option in doc["options"]])
PROMPTS = requests("generate_until", [(doc["text"], {"until": ["."], "max_gen_toks": 9}) for doc in DOCS])


@torch.no_grad()
def by_hand(model, context: str, continuation: str) -> tuple[float, bool]:
    """From whole logits of one row."""
    tokenizer = words_tokenizer()
    before, after = tokenizer.encode(context), tokenizer.encode(continuation)
    logits_TV = model(torch.tensor([before + after]))[0].log_softmax(-1)[len(before) - 1 : -1]
    value = sum(logits_TV[i, token].item() for i, token in enumerate(after))
    return value, logits_TV.argmax(-1).tolist() == after


def test_loglikelihood_is_that_of_the_logits(folder):
    model = load(folder / "model")
    found = judge(folder / "model").loglikelihood(PAIRS, disable_tqdm=True)
    for request, (value, greedy) in zip(PAIRS, found, strict=True):
        expected, same = by_hand(model, *request.args)
        assert value == pytest.approx(expected, **CLOSE)
        assert greedy == same


def test_the_size_of_a_batch_changes_nothing(folder):
    one, *others = (judge(folder / "model", batch_size=size) for size in (1, 8, "auto"))
    scores, texts = one.loglikelihood(PAIRS, True), one.generate_until(PROMPTS, True)
    for many in others:
        for a, b in zip(scores, many.loglikelihood(PAIRS, True), strict=True):
            assert a[0] == pytest.approx(b[0], **CLOSE)
            assert a[1] == b[1]
        assert texts == many.generate_until(PROMPTS, True)


def test_requests_with_one_context_run_once_and_logits_exist_only_where_they_are_read(folder, monkeypatch):
    judged = judge(folder / "model", batch_size=64)
    rows, positions = [], []
    hidden, logits = judged.model.hidden, judged.model.logits
    monkeypatch.setattr(judged.model, "hidden", lambda tokens: rows.append(len(tokens)) or hidden(tokens))
    monkeypatch.setattr(judged.model, "logits", lambda x: positions.append(x.shape[:-1].numel()) or logits(x))
    pairs = requests("loglikelihood", [("the dog sees", f" {word}") for word in ("a", "the", "it")])
    pairs += requests("loglikelihood", [("the cat", " has no bone")])
    judged.loglikelihood(pairs, True)
    assert sum(rows) == 2
    assert sum(positions) == 3 + 3


def test_a_batch_that_memory_is_too_short_for_is_halved(folder, monkeypatch):
    judged, tried = judge(folder / "model", batch_size="auto"), []
    hidden = judged.model.hidden

    def short(tokens):
        tried.append(len(tokens))
        if len(tokens) > 3:
            raise torch.OutOfMemoryError
        return hidden(tokens)

    expected = judged.loglikelihood(PAIRS, True)
    monkeypatch.setattr(judged.model, "hidden", short)
    for a, b in zip(judged.loglikelihood(PAIRS, True), expected, strict=True):
        assert a[0] == pytest.approx(b[0], **CLOSE)
    assert max(tried) > 3
    judged.batch_size_per_gpu = 8
    with pytest.raises(torch.OutOfMemoryError):
        judged.loglikelihood(PAIRS, True)


def test_a_context_of_nothing_but_spaces(folder):
    judged = judge(folder / "model")
    (found,) = judged.loglikelihood(requests("loglikelihood", [("  ", "the dog")]), True)
    (bare,) = judged.loglikelihood(requests("loglikelihood", [("", "the dog")]), True)
    assert found == bare


def test_generation_in_a_batch_equals_one_by_one_without_padding(folder):
    from plait.model.generate import generate

    model, tokenizer = load(folder / "model"), words_tokenizer()
    found = judge(folder / "model", batch_size=8).generate_until(PROMPTS, True)
    assert len({len(text.split()) for text in found}) > 1  # some stop early
    for request, text in zip(PROMPTS, found, strict=True):
        prompt = torch.tensor([tokenizer.encode(request.args[0])])
        whole = generate(model, prompt, max_new_tokens=9, stop_tokens=[tokenizer.eos_token_id])[0].tolist()
        whole = whole[: whole.index(0)] if 0 in whole else whole
        assert text == tokenizer.decode(whole, skip_special_tokens=True).split(".")[0]


@pytest.fixture(scope="module", params=[False, True], ids=["bare", "begins"])
def twins(tmp_path_factory, request):
    """One llama as ours, under ours; the same as transformers', under the harness's own."""
    from lm_eval.models.huggingface import HFLM

    folder = tmp_path_factory.mktemp("llama")
    export_model(tiny_model("full", num_kv_heads=1), folder / "theirs", "llama")
    words_tokenizer(begins=request.param).save_pretrained(folder / "theirs")
    theirs = HFLM(str(folder / "theirs"), device="cpu", dtype="float64", batch_size=3)
    return judge(folder / "theirs"), theirs


def test_the_harness_on_transformers_agrees_on_loglikelihood(twins):
    ours, theirs = twins
    assert ours.max_length == theirs.max_length == 64
    for a, b in zip(ours.loglikelihood(PAIRS, True), theirs.loglikelihood(PAIRS, True), strict=True):
        assert a[0] == pytest.approx(b[0], **LIKE)
        assert a[1] == b[1]


def test_the_harness_on_transformers_agrees_on_generation(twins):
    ours, theirs = twins
    found = ours.generate_until(PROMPTS, True)
    assert len(set(found)) > 1
    assert found == theirs.generate_until(PROMPTS, True)


def test_the_harness_on_transformers_agrees_on_whole_texts(twins):
    ours, theirs = twins
    texts = requests("loglikelihood_rolling", [(" ".join(doc["text"] for doc in DOCS * 3),), ("the red dog",)])
    assert len(words_tokenizer().encode(texts[0].args[0])) > 2 * 64  # several windows
    for a, b in zip(ours.loglikelihood_rolling(texts, True), theirs.loglikelihood_rolling(texts, True), strict=True):
        assert a == pytest.approx(b, **LIKE)


def test_a_long_prompt_loses_its_left_end_and_is_counted(twins, folder):
    ours, theirs = judge(twins[0].pretrained, max_length=8), twins[1]
    text = " ".join(doc["text"] for doc in DOCS)
    long = requests("loglikelihood", [(text, " the dog")])
    theirs._max_length = 8
    try:
        assert ours.loglikelihood(long, True)[0][0] == pytest.approx(theirs.loglikelihood(long, True)[0][0], **LIKE)
    finally:
        theirs._max_length = None
    assert ours.cut_by_task == {"tiny": 1}
    with pytest.raises(ValueError, match="a continuation of 9 tokens; it must have 1 to max_length = 8"):
        ours.loglikelihood(requests("loglikelihood", [("the", " dog" * 9)]), True)
    with pytest.raises(ValueError, match="it asks for 9 new tokens; they must be 1 to max_length - 1 = 7"):
        ours.generate_until(PROMPTS, True)


def test_a_prompt_can_be_cut_in_the_middle(folder):
    judged = judge(folder / "model", max_length=12, cut="middle")
    prompt = judged._prompt(requests("generate_until", [("the dog sees a cat and then it is over", {})])[0], 5)
    assert judged.tok_decode(prompt) == "the dog it is over"
    assert judged.cut_by_task == {"tiny": 1}


def test_no_limit_but_the_models_own(folder, tmp_path):
    """Not 2,048: what the spec says, or an error where it says nothing."""
    save_tiny(tmp_path / "long", context=5000)
    judged = judge(tmp_path / "long")
    assert judged.max_length == 5000
    text = "the dog " * 1100
    value, _ = judged.loglikelihood(requests("loglikelihood", [(text, " cat")]), True)[0]
    assert value == pytest.approx(by_hand(judged.model, text, " cat")[0], **CLOSE)
    assert not judged.cut_by_task
    save_tiny(tmp_path / "unknown", context=None)
    with pytest.raises(ValueError, match="the model's spec has no context_length; give --max-length"):
        judge(tmp_path / "unknown")


def test_models_of_bytes_need_no_tokenizer(tmp_path):
    from plait import save
    from plait.model.tokens import Bytes

    save(tiny_model("nope gdn", vocab_size=256), tmp_path / "bytes")
    judged = judge(tmp_path / "bytes")
    text = "Ünïcode, Ā & 日本\n\x01 end"
    assert judged.tok_encode(text) == Bytes().encode(text)
    assert judged.tok_decode(Bytes().encode(text)) == text
    (value, _), tokens = judged.loglikelihood(requests("loglikelihood", [("ab", " é")]), True)[0], list(b"ab \xc3\xa9")
    logits_TV = judged.model(torch.tensor([tokens]))[0].log_softmax(-1)
    assert value == pytest.approx(sum(logits_TV[i - 1, tokens[i]].item() for i in (2, 3, 4)), **CLOSE)
    assert len(judged.generate_until(PROMPTS, True)) == len(PROMPTS)


def test_sampling_settings(folder):
    judged = judge(folder / "model")
    drawn = {"until": [], "max_gen_toks": 5, "do_sample": True, "temperature": 2.0, "top_k": 4}
    prompts = requests("generate_until", [("the dog", drawn)] * 6)
    assert len(set(judged.generate_until(prompts, True))) > 1
    with pytest.raises(ValueError, match="tiny: generation_kwargs: num_beams = 4; plait has do_sample"):
        judged.generate_until(requests("generate_until", [("the dog", {"num_beams": 4})]), True)


def test_a_directory_without_a_tokenizer(tmp_path):
    from plait import save

    save(tiny_model("nope"), tmp_path / "bare")
    with pytest.raises(ValueError, match="no tokenizer"):
        judge(tmp_path / "bare")


# The command.


def evaluate(folder, *options: str) -> int:
    return main(
        ["eval", str(folder / "model"), "--include-path", str(folder / "tasks"), "--dtype", "float64", *options]
    )


def test_the_command_on_local_tasks(folder, capsys, tmp_path):
    tasks = "tiny_choice,tiny_last_word,tiny_answer,tiny_text"
    assert evaluate(folder, "--tasks", tasks, "--out", str(tmp_path / "out"), "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    scores = {row["axes"]["task"]: row["values"] for row in rows}
    model = load(folder / "model", dtype=torch.float64)
    values = [[by_hand(model, doc["text"], f" {option}")[0] for option in doc["options"]] for doc in DOCS]
    best = [row.index(max(row)) == doc["answer"] for row, doc in zip(values, DOCS, strict=True)]
    assert scores["tiny_choice"]["acc"] == pytest.approx(sum(best) / 7)
    per_letter = [
        [v / len(o) for v, o in zip(row, doc["options"], strict=True)] for row, doc in zip(values, DOCS, strict=True)
    ]
    best = [row.index(max(row)) == doc["answer"] for row, doc in zip(per_letter, DOCS, strict=True)]
    assert scores["tiny_choice"]["acc_norm"] == pytest.approx(sum(best) / 7)
    assert scores["tiny_choice"]["acc"] != scores["tiny_choice"]["acc_norm"]
    assert scores["tiny_choice"]["acc_stderr"] > 0
    assert scores["tiny_choice"]["n"] == 7
    assert scores["tiny_last_word"]["perplexity"] == pytest.approx(math.exp(-sum(row[0] for row in values) / 7))
    assert set(scores) == set(tasks.split(","))

    kept = records.read(tmp_path / "out" / "records.jsonl")
    assert [dict(row.values) for row in kept] == [row["values"] for row in rows]
    assert {row.kind for row in kept} == {"eval"}
    assert kept[0].provenance["spec"] == model.spec.hash
    assert {"plait", "torch", "lm_eval"} <= kept[0].provenance["versions"].keys()
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4 * 7
    first = next(row for row in samples if row["task"] == "tiny_choice" and row["doc"] == 0)
    assert first["prompt"] and first["scores"].keys() == {"acc", "acc_norm"}
    assert [value for value, _ in first["output"]] == pytest.approx(values[0])


def test_the_command_shows_a_table(folder, capsys):
    assert evaluate(folder, "--tasks", "tiny_choice", "--limit", "2", "--num-fewshot", "1", "--max-length", "9") == 0
    out = capsys.readouterr().out
    assert "tiny_choice" in out and "acc_norm" in out and "±" in out
    assert "prompts cut on the left to max_length = 9" in out


def test_several_models_give_each_its_own_scores(folder, capsys, tmp_path):
    save_tiny(tmp_path / "other", "swa[window=4] kda")
    paths = [str(folder / "model"), str(tmp_path / "other")]
    flags = ["--include-path", str(folder / "tasks"), "--dtype", "float64", "--tasks", "tiny_last_word", "--json"]
    assert main(["eval", *paths, *flags]) == 0
    both = json.loads(capsys.readouterr().out)
    for path, row in zip(paths, both, strict=True):
        assert main(["eval", path, *flags]) == 0
        (alone,) = json.loads(capsys.readouterr().out)
        assert (alone["axes"], alone["values"]) == (row["axes"], row["values"])
    assert both[0]["values"] != both[1]["values"]


def test_a_papers_average_over_local_tasks(folder, capsys, tmp_path, monkeypatch):
    """Tasks of a grouping from files; a metric that a task leaves out is measured where the paper averages it."""
    from plait.evals import groupings
    from plait.evals.groupings import Grouping, Member

    members = (
        Member(name="Choice", task="tiny_choice", metric="acc_norm"),
        Member(name="Last", task="tiny_last_word"),
        Member(name="Lost", task="tiny_lost", in_harness=False),
    )
    each = Grouping(name="x/tiny", source="", members=members, max_length=32, unstated="nothing much")
    monkeypatch.setattr(groupings, "GROUPINGS", {"x/tiny": each})
    only_acc = (folder / "tasks" / "tiny_choice.yaml").read_text().replace(", {metric: acc_norm}", "")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "tiny_choice.yaml").write_text(only_acc)
    (tasks / "tiny_last_word.yaml").write_text((folder / "tasks" / "tiny_last_word.yaml").read_text())
    fake_index(monkeypatch)
    flags = ["--include-path", str(tasks), "--dtype", "float64", "--group", "x/tiny"]
    assert main(["eval", str(folder / "model"), *flags, "--json"]) == 0
    *scores, mean = json.loads(capsys.readouterr().out)
    values = {row["axes"]["task"]: row["values"] for row in scores}
    assert mean["name"] == "average" and mean["axes"]["group"] == "x/tiny" and mean["axes"]["max_length"] == 32
    expected = (values["tiny_choice"]["acc_norm"] + values["tiny_last_word"]["acc"]) / 2
    assert mean["values"]["partial_average"] == pytest.approx(expected)
    assert mean["values"]["missing"] == 1
    assert main(["eval", str(folder / "model"), *flags]) == 0
    out = capsys.readouterr().out
    assert "x/tiny: Lost is missing: the harness has no tiny_lost; give it by --include-path" in out
    assert "the paper leaves open nothing much" in out


def test_a_papers_limits(folder, capsys, tmp_path, monkeypatch):
    from plait.evals import groupings
    from plait.evals.groupings import Grouping, Member

    member = Member(name="Answer", task="tiny_answer", metric="exact_match")
    limits = {"max_length": 8, "max_new_tokens": 3, "cut": "middle", "num_fewshot": 2}
    monkeypatch.setattr(groupings, "GROUPINGS", {"x": Grouping(name="x", source="", members=(member,), **limits)})
    assert evaluate(folder, "--group", "x", "--out", str(tmp_path)) == 0
    assert "tiny_answer: 7 prompts cut in the middle to max_length = 8" in capsys.readouterr().out
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {len(row["output"][0].split()) for row in samples} <= {0, 1, 2, 3}
    score, mean = records.read(tmp_path / "records.jsonl")
    assert score.axes["num_fewshot"] == 2
    assert mean.values["average"] == score.values["exact_match"]


def test_code_of_a_model_runs_only_where_that_is_allowed(folder, capsys, tmp_path):
    text = (folder / "tasks" / "tiny_answer.yaml").read_text() + "unsafe_code: true\n"
    (tmp_path / "t.yaml").write_text(text)
    flags = ["--include-path", str(tmp_path), "--tasks", "tiny_answer", "--limit", "1", "--max-length", "40"]
    assert main(["eval", str(folder / "model"), *flags]) == 2
    assert "task tiny_answer: it runs code that the model writes" in capsys.readouterr().err
    assert main(["eval", str(folder / "model"), *flags, "--allow-code", "true"]) == 0


def fake_index(monkeypatch) -> None:
    """Without the harness's own tasks, whose thousands of files take seconds to read."""
    from lm_eval import tasks

    whole = tasks.TaskManager
    monkeypatch.setattr(tasks, "TaskManager", lambda **options: whole(**options | {"include_defaults": False}))


def test_a_group_of_the_harness(folder, capsys):
    assert evaluate(folder, "--tasks", "tiny_group", "--json") == 0
    rows = {row["axes"]["task"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["tiny_group", "tiny_choice", "tiny_last_word"]
    parts = [rows[task] for task in ("tiny_choice", "tiny_last_word")]
    assert rows["tiny_group"]["values"]["acc"] == pytest.approx(sum(part["values"]["acc"] for part in parts) / 2)
    assert rows["tiny_group"]["values"]["n"] == 14
    assert {part["axes"]["part_of"] for part in parts} == {"tiny_group"}


@pytest.mark.slow
def test_the_harness_has_the_tasks_of_the_groupings():
    from lm_eval.tasks import TaskManager

    from plait.evals.groupings import GROUPINGS

    known = set(TaskManager().all_tasks)
    for member in (member for each in GROUPINGS.values() for member in each.members):
        assert (set(member.tasks) <= known) == member.in_harness, member


def test_an_unknown_task(folder, capsys, monkeypatch):
    fake_index(monkeypatch)
    assert evaluate(folder, "--tasks", "tiny_choise") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plait eval: task = 'tiny_choise'; nearest: tiny_choice")


def test_data_that_is_not_to_be_had(folder, capsys, tmp_path):
    text = (folder / "tasks" / "tiny_choice.yaml").read_text().replace("docs.jsonl", "gone.jsonl")
    (tmp_path / "t.yaml").write_text(text)
    flags = ["--include-path", str(tmp_path), "--tasks", "tiny_choice"]
    assert main(["eval", str(folder / "model"), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "task tiny_choice: its data cannot be had" in line and "dataset_path: json" in line


def test_the_harness_finds_the_model_by_its_name(folder):
    from lm_eval.api.registry import get_model

    import plait.evals.lm_eval as ours

    judged = get_model("plait").create_from_arg_string(
        f"pretrained={folder / 'model'},dtype=float32,max_length=40", {"batch_size": "auto", "device": "cpu"}
    )
    assert isinstance(judged, ours.PlaitLM)
    assert judged.max_length == 40
    assert judged.model.embed.weight.dtype == torch.float32


def test_nothing_loads_the_harness_before_it_is_asked_for():
    import subprocess

    code = "import sys, plait, plait.evals.suites, plait.cli; assert not {'lm_eval', 'torch'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
