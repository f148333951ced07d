"""Random models with a tokenizer, and tasks from files, as a user without a network has them."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from plait import LM, Spec, records, save
from plait.evals.suites import Subject, write_outcome

SENTENCE = "the a red blue dog cat sees finds has no big old bone and then it is was under over . : ? A B"
WORDS = SENTENCE.split()
AGGREGATE = {"metric": "acc", "aggregation": "mean", "weight_by_size": False}
HEAD = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
fewshot_split: test
"""
KINDS = {
    "tiny_choice": """\
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{options}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "tiny_last_word": """\
output_type: loglikelihood
doc_to_text: "{{text}}"
doc_to_target: " {{options[0]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "tiny_answer": """\
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{options[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "tiny_text": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
}


def words_tokenizer(*, begins: bool = False) -> PreTrainedTokenizerFast:
    """A word a token; ids 0, 1 are <eos> and <unk>. begins: every text begins with a token of its own, `A`."""
    vocab = {word: i for i, word in enumerate(["<eos>", "<unk>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<eos>"}
    if begins:
        inner.post_processor = processors.TemplateProcessing(single="A $A", special_tokens=[("A", vocab["A"])])
        names["bos_token"] = "A"
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def tiny_model(layout: str, *, vocab_size: int = len(WORDS) + 2, context: int | None = 64, **fields) -> LM:
    """Weights so large that what it says depends on what it reads."""
    sizes = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 24} | fields
    spec = Spec.from_layout(layout, vocab_size=vocab_size, context_length=context, **sizes)
    model = LM(spec, seed=3, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(20)
    return model


def save_tiny(directory: Path, layout: str = "nope gdn", **fields) -> Path:
    save(tiny_model(layout, **fields), directory)
    words_tokenizer().save_pretrained(directory)
    return directory


def write_tasks(directory: Path, docs: list[dict]) -> Path:
    directory.mkdir()
    data = directory / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, rest in KINDS.items():
        head = HEAD.format(name=name, data=data, cache=directory / "cache")
        (directory / f"{name}.yaml").write_text(head + rest)
    group = {"group": "tiny_group", "task": ["tiny_choice", "tiny_last_word"], "aggregate_metric_list": [AGGREGATE]}
    (directory / "tiny_group.yaml").write_text(json.dumps(group))  # JSON is YAML
    return directory


def documents(n: int) -> list[dict]:
    """Texts of several lengths, with options of one word and of several."""
    generator = torch.Generator().manual_seed(4)

    def words(k: int) -> str:
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (k,), generator=generator).tolist())

    return [
        {"text": words(2 + 5 * i % 13), "options": [words(1), words(1), words(1 + i % 3)], "answer": i % 3}
        for i in range(n)
    ]


def run_by_two(suite: Any, subject: Subject, out: Path) -> list[records.Record]:
    """What a suite finds in two processes, which are started as torchrun does."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=_rank, args=(i, port, suite, subject, out)) for i in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [0, 0]
    return records.read(out / "records.jsonl")


def _rank(number: int, port: str, suite: Any, subject: Subject, out: Path) -> None:
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for outcome in suite.run([subject], out):
        if number == 0:
            write_outcome(outcome, out)
