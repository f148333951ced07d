"""RULER: lengths, purity, scoring, what is in the prompts, and files."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from plait.cli import main
from plait.evals.counting import Bytes, TokenizerFile
from plait.evals.prose import Prose, words
from plait.evals.ruler import NIAH, Ruler, score
from plait.evals.ruler.lists import zipf
from plait.evals.ruler.niah import NOISE
from plait.evals.samples import Sample
from plait.evals.suites import RulerSuite
from plait.evals.write import write

TASKS = Ruler(Bytes()).names


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> TokenizerFile:
    """Words in a token or a few, and a token before every text."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=["<s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator([" ".join(prose().words[:60_000])], trainer)
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    fast.save(str(path))
    return TokenizerFile(path, 1)


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def ruler(request) -> Ruler:
    return Ruler(Bytes() if request.param == "bytes" else request.getfixturevalue("bpe"))


@cache
def prose() -> Prose:
    return Prose()


def largest_unit(ruler: Ruler, sample: Sample) -> int:
    """Tokens of the largest unit of a sample's haystack that there may be."""
    sizes = ruler.counter.pieces
    if sample.task in ("niah_single_1", "vt"):
        return sizes(["\n" + NOISE])[0]
    if sample.task in ("niah_multikey_2", "niah_multikey_3"):
        return max(sizes(["\n" + line for line in sample.prompt.split("\n") if line.startswith("One of")]))
    if sample.task == "cwe":
        items = re.findall(r" \d+\. \S+", sample.prompt)
        return max(sizes(items)) * (3 if sample.length >= 4096 else 1)
    if sample.task == "fwe":
        return max(sizes([" " + word for word in re.findall(r"\b[a-z]{6}\b", sample.prompt)]))
    if sample.task.startswith("qa"):
        return max(sizes(re.findall(r"\n\nDocument \d+:\n[^\n]+", sample.prompt)))
    return max(sizes([" " + word for word in prose().words[: len(sample.prompt.split()) + 50]]))


@pytest.mark.parametrize(("length", "count"), [(512, 2), (777, 2), (1024, 2), (4096, 2), (16_384, 1), (65_536, 1)])
def test_prompts_fill_their_length_and_never_exceed_it(ruler, length, count):
    made = 0
    for task in TASKS:
        for index in range(count):
            try:
                sample = ruler.sample(task, length, index)
            except ValueError as error:
                least = int(re.search(r"takes at least (\d+) tokens", str(error))[1])
                assert length < least, error
                continue
            made += 1
            fast = ruler.counter.fast
            tokens = len(sample.prompt.encode()) if fast is None else len(fast.encode_batch_fast([sample.prompt])[0])
            assert sample.prompt_tokens == tokens
            free = length - tokens - sample.max_new_tokens
            unit = largest_unit(ruler, sample)
            assert 0 <= free < unit, (task, free, unit)
            if length >= 4096 and unit < 0.03 * length:
                assert free < 0.03 * length, task
    assert made >= (len(TASKS) * count if length >= 16_384 else 5)


@pytest.mark.parametrize("task", ["niah_single_1", "vt", "cwe", "fwe", "qa_syn2"])
def test_too_small_a_length_names_the_smallest(ruler, task):
    with pytest.raises(ValueError, match=f"length = 100: {task} takes at least") as error:
        ruler.sample(task, 100, 0)
    least = int(re.search(r"at least (\d+) tokens", str(error.value))[1])
    larger = least + least // 8  # of another length the sample is another, of nearly the same size
    assert ruler.sample(task, larger, 0).prompt_tokens < larger


def test_samples_depend_on_nothing_else():
    one, other = Ruler(Bytes(), seed=3), Ruler(Bytes(), seed=3)
    places = [(task, length, index) for task in TASKS for length in (8192, 9000) for index in (0, 7)]
    first = {place: one.sample(*place) for place in places}
    assert {place: other.sample(*place) for place in reversed(places)} == first
    assert Ruler(Bytes(), seed=3).sample("vt", 9000, 7) == first["vt", 9000, 7]
    assert len({sample.prompt for sample in first.values()}) == len(places)
    assert Ruler(Bytes(), seed=4).sample("vt", 9000, 7) != first["vt", 9000, 7]


def test_samples_stay_as_they_were():
    """A change here is a change of the benchmark, which the changelog must tell."""
    ruler = Ruler(Bytes())
    digests = {t: hashlib.sha256(ruler.sample(t, 8192, 1).prompt.encode()).hexdigest()[:8] for t in TASKS}
    assert digests == GOLDEN


GOLDEN = {
    "niah_single_1": "a5ab5418",
    "niah_single_2": "76f99da8",
    "niah_single_3": "2bc8f18b",
    "niah_multikey_1": "c1d1b7bd",
    "niah_multikey_2": "fc901504",
    "niah_multikey_3": "1821d7bc",
    "niah_multivalue": "1332c407",
    "niah_multiquery": "9f19f7f7",
    "vt": "67712953",
    "cwe": "90ae99dd",
    "fwe": "e555563f",
    "qa_syn1": "8cd36ddd",
    "qa_syn2": "6239a426",
}


@pytest.mark.parametrize(
    ("task", "answers", "output", "points"),
    [
        ("niah_single_1", ["1234567"], " it is 1234567.", 100),
        ("niah_single_1", ["1234567"], " it is 123456", 0),
        ("niah_single_3", ["ab-CD"], "AB-cd", 100),
        ("niah_multivalue", ["1", "22", "333", "4444"], "22 and 333", 50),
        ("niah_multiquery", ["7", "8", "9", "5"], "7\n8\n9\x005", 100),
        ("vt", ["ABCDE", "FGHIJ", "KLMNO", "PQRST", "UVWXY"], "abcde fghij zzzzz", 40),
        ("cwe", ["art", "sea"], "1. party 2. lake", 50),  # a substring, as published
        ("fwe", ["abcdef", "ghijkl", "mnopqr"], "", 0),
        ("fwe", ["abc\ndef"], "ABC\x07def\x1f", 100),
        ("qa_1", ["Denver Broncos", "Broncos"], "the broncos", 100),
        ("qa_1", ["Denver Broncos", "Broncos"], "Denver", 0),
        ("qa_syn2", ["Fenbury"], "\tFENBURY\r\n", 100),
    ],
)
def test_scores_are_as_published(task, answers, output, points):
    assert score(task, answers, output) == pytest.approx(points)


def context_of(sample: Sample) -> str:
    return sample.prompt.partition("afterwards.\n")[2].rpartition("\nWhat ")[0]


@pytest.mark.parametrize("task", NIAH)
@pytest.mark.parametrize("index", range(3))
def test_needles_stand_where_they_are_said_to(ruler, task, index):
    sample, niah = ruler.sample(task, 8192, index), NIAH[task]
    context = context_of(sample)
    needles = re.findall(r"One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.", context)
    keys, values = [key for key, _ in needles], [value for _, value in needles]
    assert len(set(values)) == len(values)
    if niah.haystack != "needles":
        assert len(needles) == niah.keys * niah.values and len(set(keys)) == niah.keys
    else:
        assert len(set(keys)) == len(keys)
    asked = re.search(r" for (.+) mentioned in the provided text\?", sample.prompt)[1]
    queries = re.split(r", and |, ", asked)
    assert len(queries) == niah.queries
    assert sorted(sample.answers) == sorted(value for key, value in needles if key in queries)
    first = next(value for key, value in needles if key == queries[0])
    before = context.partition(first)[0].rpartition("One of")[0]
    if niah.haystack == "prose":
        where, whole = len(before), len(context)
        assert where / whole == pytest.approx(sample.depth, abs=0.12)  # sentences are not of one size
        positions = [m.start() for m in re.finditer("One of the special magic", context)]
        for at in positions:  # each behind a whole sentence, or behind everything
            assert at == 0 or re.search(r"[.!?][\"')]* $", context[:at]) or len(context) - at < 120
    else:
        where, whole = before.count("\n"), context.count("\n")
        assert where / whole == pytest.approx(sample.depth, abs=1.5 / whole)
    form = {"word": r"[a-z]+(-[a-z]+)+", "number": r"\d{7}", "uuid": r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"}
    assert all(re.fullmatch(form[niah.key], key) for key in keys)
    assert all(re.fullmatch(form[niah.value], value) for value in values)


def test_depths_are_spread(bpe):
    ruler = Ruler(bpe)
    depths = {ruler.sample("niah_single_1", 700, index).depth for index in range(200)}
    assert len(depths) > 30 and min(depths) == 0 and max(depths) == 1


def test_chains_of_variables_hold_together(ruler):
    sample = ruler.sample("vt", 4096, 0)
    question = sample.prompt.rpartition("Memorize")[2]
    assigned = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", question)
    value = re.search(r"assigned the value (\d{5}) in the text", question)[1]
    assert [source for _, source in assigned] == [value, *(name for name, _ in assigned[:-1])]
    assert sample.answers == tuple(name for name, _ in assigned)
    assert "5 variables" in question
    example = sample.prompt.removesuffix("Memorize" + question)
    solved = re.findall(r"VAR (\w+) =", example)
    assert example.rstrip().endswith("they are: " + " ".join(solved)) and not {*solved} & {*sample.answers}


@pytest.mark.parametrize(("length", "times", "rare"), [(3000, 6, 1), (16_384, 30, 3)])
def test_common_words_are_the_most_common(bpe, length, times, rare):
    sample = Ruler(bpe).sample("cwe", length, 1)
    listed = re.findall(r"(\d+)\. (\S+)", sample.prompt.rpartition("appear most often.\n")[2])
    assert [int(number) for number, _ in listed] == [*range(1, len(listed) + 1)]
    counted = Counter(word for _, word in listed)
    assert {word for word, n in counted.items() if n == times} == {*sample.answers}
    assert {n for word, n in counted.items() if word not in sample.answers} == {rare}
    assert len(sample.answers) == 10


@pytest.mark.parametrize("index", range(3))
def test_frequent_coded_words_are_the_most_frequent(ruler, index):
    sample = ruler.sample("fwe", 2048, index)
    coded = sample.prompt.partition("coded words. ")[2].partition("\nQuestion")[0].split()
    ranked = Counter(coded).most_common(5)
    assert ranked[0][0] == "..." and tuple(word for word, _ in ranked[1:4]) == sample.answers
    assert len({n for _, n in ranked}) == 5
    assert sum(zipf(len(coded))) == len(coded)


def test_every_number_of_coded_words_has_three_clear_winners():
    for n in range(53, 3000):
        times = zipf(n)
        assert sum(times) == n and times[0] > times[1] > times[2] > times[3] > times[4], n


def test_words_of_lists_are_distinct_and_never_end():
    import random
    from itertools import islice

    found = list(islice(words(random.Random(0)), 40_000))
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("task", ["qa_syn1", "qa_syn2"])
def test_generated_documents_answer_the_question(bpe, task):
    sample = Ruler(bpe).sample(task, 4096, 2)
    documents = re.findall(r"Document \d+:\n([^\n]+)", sample.prompt)
    asked = re.search(r"Question: (.+) Answer:$", sample.prompt)[1]
    (answer,) = sample.answers
    if task == "qa_syn1":
        person = re.search(r"was (\w+) born", asked)[1]
        (own,) = (text for text in documents if text.startswith(person + " was born"))
        assert f"born in {answer} in" in own
    else:
        person = re.search(r"that (\w+) founded", asked)[1]
        (firm,) = re.findall(rf"{person} founded the company (\w+)\.", sample.prompt)
        (own,) = (text for text in documents if text.startswith(f"{firm} is a company"))
        assert f"head office is in {answer}," in own and answer not in "".join(set(documents) - {own})
    at = documents.index(own) / (len(documents) - 1)
    assert sample.depth <= at and 0 <= sample.depth <= 1
    assert len(documents) == len(set(documents))


def squad(path):
    paragraph = lambda i, asked: {"context": f"Paragraph {i} says {i * i}.", "qas": asked}  # noqa: E731
    question = {"question": "How much is it?", "answers": [{"text": "49"}, {"text": "forty-nine"}, {"text": "49"}]}
    never = {"question": "Why?", "answers": [], "is_impossible": True}
    articles = [{"paragraphs": [paragraph(i, [question, never] if i == 7 else []) for i in range(5, 9)]}]
    articles += [{"paragraphs": [paragraph(i, []) for i in range(20, 60)]}]
    path.write_text(json.dumps({"version": "2", "data": articles}))
    return path


def hotpot(path):
    rows = [
        {"question": f"Q{i}?", "answer": f"A{i}", "context": [[f"T{i}", ["One. ", f"A{i}."]], [f"U{i}", ["Two."]]]}
        for i in range(30)
    ]
    path.write_text(json.dumps(rows))
    return path


def test_documents_of_the_users(tmp_path):
    ruler = Ruler(Bytes(), qa_data=[squad(tmp_path / "squad.json"), hotpot(tmp_path / "hotpot.json")])
    assert ruler.names[-2:] == ("qa_1", "qa_2")
    before = ruler.documents["qa_1"].texts
    for index in range(3):  # one question, asked again with other distractors
        sample = ruler.sample("qa_1", 700, index)
        assert sample.answers == ("49", "forty-nine") and "Question: How much is it? Answer:" in sample.prompt
        shown = re.findall(r"Paragraph (\d+)", sample.prompt)
        assert "7" in shown and len(shown) == len(set(shown)) and {"5", "6", "8"} & set(shown)
    assert ruler.documents["qa_1"].texts == before
    assert len(re.findall("Paragraph 7 ", ruler.sample("qa_1", 6000, 0).prompt)) == 1  # all come again, but for its own
    sample = ruler.sample("qa_2", 1000, 31)
    assert sample.answers == ("A1",) and "T1\nOne. A1." in sample.prompt and "U1\nTwo." in sample.prompt
    assert Ruler(Bytes(), qa_data=[tmp_path / "hotpot.json"]).names[-2:] == ("qa_syn1", "qa_2")
    only = {"data": [{"paragraphs": [{"context": "A.", "qas": [{"question": "Q", "answers": [{"text": "A"}]}]}]}]}
    (tmp_path / "only.json").write_text(json.dumps(only))
    with pytest.raises(ValueError, match="no documents beside"):
        Ruler(Bytes(), qa_data=[tmp_path / "only.json"]).sample("qa_1", 900, 0)
    with pytest.raises(ValueError, match="second file for qa_1"):
        Ruler(Bytes(), qa_data=[tmp_path / "squad.json"] * 2)


@pytest.mark.parametrize("text", ["[]", "{}", '{"data": [{}]}', '[{"context": 1}]', "nothing"])
def test_other_files_are_no_documents(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json") as error:
        Ruler(Bytes(), qa_data=[tmp_path / "x.json"])
    assert "\n" not in str(error.value)


def test_prose_is_long_enough_and_may_be_the_users(tmp_path):
    assert len(prose().words) >= 300_000
    assert not re.search(r"gutenberg|ebook|copyright ©", " ".join(prose().words), re.IGNORECASE)
    (tmp_path / "a.txt").write_text("One two three. Four five! " * 40)
    sample = Ruler(Bytes(), haystack=tmp_path / "a.txt").sample("niah_single_2", 4000, 0)  # longer than the text
    assert context_of(sample).count("Four five! One") > 50
    assert re.search(r"(^|[.!] )One of the special", context_of(sample))
    for name, text in (("empty.txt", ""), ("blank.txt", " \n ")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=name):
            Ruler(Bytes(), haystack=tmp_path / name)
    with pytest.raises(ValueError, match="no such file"):
        Ruler(Bytes(), haystack=tmp_path / "none.txt")


def test_a_text_without_sentences_is_cut_into_some(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 5000)
    ruler = Ruler(Bytes(), haystack=tmp_path / "a.txt")
    for index in range(5):
        sample = ruler.sample("niah_single_2", 16_384, index)
        before = context_of(sample).partition("One of")[0]
        assert len(before) / 16_000 == pytest.approx(sample.depth, abs=0.1)


def test_names_with_typos_get_suggestions():
    with pytest.raises(ValueError, match="task = 'niah_singel_1'; nearest: niah_single_1"):
        Ruler(Bytes()).sample("niah_singel_1", 4096, 0)
    with pytest.raises(
        ValueError, match="task = qa_1; it needs its questions, --qa-data FILE; without them there is qa_s"
    ):
        Ruler(Bytes()).sample("qa_1", 4096, 0)


def test_files_hold_the_same_samples(tmp_path, bpe):
    options = RulerSuite(lengths=(1024, 2048), tasks=("fwe", "niah_single_2"), samples=21, seed=5)
    done = write(options, bpe, tmp_path / "one")
    assert done["samples"] == 84 and done["full"] > 0.98
    write(options, bpe, tmp_path / "two", processes=2)
    ruler = Ruler(bpe, seed=5)
    for length in (1024, 2048):
        for task in ("fwe", "niah_single_2"):
            text = (tmp_path / "one" / str(length) / f"{task}.jsonl").read_text()
            assert (tmp_path / "two" / str(length) / f"{task}.jsonl").read_text() == text
            samples = [Sample.from_json(line) for line in text.splitlines()]
            assert samples == [ruler.sample(task, length, index) for index in range(21)]
            assert json.loads(text.splitlines()[0])["outputs"] == list(samples[0].answers)
    with pytest.raises(ValueError, match="no field 'outputs'"):
        Sample.from_json('{"task": "vt", "length": 1, "index": 0, "input": ""}')
    for line in ('{"task": "vt", "inp', "[]", '{"task": "vt", "length": 1, "index": 0, "input": "", "outputs": null}'):
        with pytest.raises(ValueError, match="no line of plait data ruler"):
            Sample.from_json(line)


def test_the_command_writes_all_or_nothing(tmp_path, capsys):
    common = ["data", "ruler", "--tokenizer", "bytes", "--samples", "2", "--processes", "1"]
    some = [*common, "--tasks", "niah_single_1,cwe"]
    assert main([*some, "--lengths", "1024", "--out", str(tmp_path / "x")]) == 2  # CWE has no room
    assert "length = 1024: cwe takes at least" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main([*some, "--lengths", "8192", "--out", str(tmp_path / "x"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 4
    assert main([*some, "--lengths", "8192", "--out", str(tmp_path / "x")]) == 2
    assert "exists" in capsys.readouterr().err
    assert main([*common, "--tasks", "niah_singel_1", "--out", str(tmp_path / "y")]) == 2
    assert "nearest: niah_single_1" in capsys.readouterr().err
    assert main([*common, "--tokenizer", str(tmp_path / "none"), "--out", str(tmp_path / "y")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_making_samples_loads_no_torch():
    code = "import sys; from plait.evals.write import write; from plait.evals.ruler.averages import long_average;"
    code += " assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
