"""Token shards: every kind of source, the same bytes however they are built, and one line for what is wrong."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from plait.cli import main
from plait.data.build import BuildOptions, build
from plait.data.pool import Pool
from plait.data.shards import Index, TokenShards
from plait.data.vocabulary import train_tokenizer
from plait.files import claim

TEXTS = ["one", "zwei — naïve", "三", "four " * 50, "5"]


def jsonl(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)).encode()


def many(n: int = 400) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(map(str, rng.integers(0, 10**6, int(k)))) for k in rng.integers(1, 60, n)]


def documents(path: Path, split: str = "train") -> list[str]:
    shards = TokenShards.open(path, split, verify=True)
    return [bytes(shards[i]).decode() for i in range(len(shards))]


def contents(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def quiet_build(sources, out: Path, *, processes: int = 1, **options) -> Index:
    return build([str(s) for s in sources], out, BuildOptions(**options), processes=processes, progress=False)


def source(kind: str, folder: Path) -> str:
    folder.mkdir()
    if kind == "folder":
        for i, text in enumerate(TEXTS):
            (folder / f"{i}.txt").write_text(text, encoding="utf-8")
        (folder / ".hidden").write_bytes(b"\0")
        (folder / "empty.txt").touch()
        return str(folder)
    file = folder / kind
    if kind.startswith("x.jsonl"):
        data = jsonl(TEXTS)
        if kind.endswith(".zst"):
            data = pytest.importorskip("zstandard").compress(data)
        file.write_bytes({".xz": lzma.compress, ".gz": gzip.compress}.get(file.suffix, bytes)(data))
    elif kind == "x.parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": TEXTS}), file, row_group_size=2)
    else:
        datasets = pytest.importorskip("datasets")
        if kind == "saved":
            datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(file)
        else:
            (folder / "train.jsonl").write_bytes(jsonl(TEXTS))
            return f"hf:{folder}"
    return str(file)


KINDS = ["folder", "x.jsonl", "x.jsonl.xz", "x.jsonl.gz", "x.jsonl.zst", "x.parquet", "saved", "streamed"]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_every_kind_of_source_come_back(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    index = quiet_build([source(kind, tmp_path / "in")], tmp_path / "out", valid=0)
    assert documents(tmp_path / "out") == TEXTS
    assert index == Index.load(tmp_path / "out")
    assert (index.dtype, index.vocab_size, index.eos) == ("uint8", 256, 0)
    assert index.left_out == {"empty": kind == "folder", "bad": 0, "short": 0}


def test_any_tokenizer_and_the_one_that_is_trained_here(tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "a.jsonl").write_bytes(jsonl(texts := many(100)))
    size = train_tokenizer(iter(texts), tmp_path / "tok", vocab_size=400)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tok")
    assert len(tokenizer) == size == 400
    for i, given in enumerate([tmp_path / "tok", tmp_path / "tok" / "tokenizer.json"]):
        index = quiet_build([tmp_path / "a.jsonl"], tmp_path / f"{i}", tokenizer=str(given), eos="<|endoftext|>")
        assert (index.dtype, index.vocab_size, index.eos) == ("uint16", 400, tokenizer.eos_token_id)
        found = []
        for split in ("train", "valid"):
            shards = TokenShards.open(tmp_path / f"{i}", split, verify=True)
            found += [tokenizer.decode(shards[n].tolist()) for n in range(len(shards))]
        assert sorted(found) == sorted(texts)
    with pytest.raises(ValueError, match="no EOS token"):
        quiet_build([tmp_path / "a.jsonl"], tmp_path / "no", tokenizer=str(tmp_path / "tok" / "tokenizer.json"))
    with pytest.raises(ValueError, match="must be at least 257"):
        train_tokenizer(iter(texts), tmp_path / "small", vocab_size=256)
    (tmp_path / "0" / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer: altered"):
        TokenShards.open(tmp_path / "0", verify=True)


def test_held_out_documents_are_a_matter_of_seed_and_text(tmp_path):
    texts = many()
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    (tmp_path / "b.jsonl").write_bytes(jsonl(texts[::-1] + texts))
    valid = {}
    for name, seed in (("a", 0), ("b", 0), ("a", 1)):
        quiet_build([tmp_path / f"{name}.jsonl"], out := tmp_path / f"{name}{seed}", valid=0.2, seed=seed)
        valid[name, seed] = set(documents(out, "valid"))
        assert valid[name, seed] | set(documents(out)) == set(texts)
        assert not valid[name, seed] & set(documents(out))
    assert valid["a", 0] == valid["b", 0] != valid["a", 1]
    assert 50 < len(valid["a", 0]) < 110


def test_short_documents_are_left_out_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["", *TEXTS]))
    index = quiet_build([tmp_path / "a.jsonl"], tmp_path / "out", valid=0, min_tokens=4)
    assert documents(tmp_path / "out") == [TEXTS[1], TEXTS[3]]
    assert index.left_out == {"empty": 1, "bad": 0, "short": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    """A source, and what one process makes of it in one go."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(many())))
    (folder / "b.txt").write_text("the last one")
    quiet_build([folder / "a.jsonl.gz", folder / "b.txt"], folder / "out", valid=0.1, shard_bytes=3000)
    return folder, contents(folder / "out")


def test_the_number_of_processes_changes_no_byte(whole, tmp_path):
    folder, expected = whole
    sources = [folder / "a.jsonl.gz", folder / "b.txt"]
    quiet_build(sources, tmp_path / "out", valid=0.1, shard_bytes=3000, processes=3)
    assert contents(tmp_path / "out") == expected
    assert len(expected) > 40


KILLED = """
import sys
from plait.data import build as module
from plait.cli import main
lines, settle = 0, module._settle
def slow(file):
    global lines
    if file.name.endswith("manifest.jsonl"):
        lines += 1
        if lines == 4:  # a line is in the file by half, a shard under its other name
            file.write('{"fingerprint": "12')
            file.flush()
            open(sys.argv[2] + "/.train-00009.bin.1.partial", "w").write("x")
            print("now", flush=True)
            import time; time.sleep(60)
    settle(file)
module._settle = slow
if __name__ == "__main__":
    main(sys.argv[3:])
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_in_the_middle_the_same_command_ends_with_the_same_bytes(whole, tmp_path, processes):
    folder, expected = whole
    out = tmp_path / "out"
    command = ["data", "build", str(folder / "a.jsonl.gz"), str(folder / "b.txt"), "--out", str(out)]
    command += ["--valid", "0.1", "--shard-bytes", "3000", "--processes", str(processes)]
    (tmp_path / "killed.py").write_text(KILLED)
    arguments = [sys.executable, str(tmp_path / "killed.py"), "--out", str(out), *command]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout and process.stdout.readline() == "now\n"
        with pytest.raises(ValueError, match="another process"):
            quiet_build([folder / "b.txt"], out)
        os.kill(process.pid, signal.SIGKILL)
    assert not (out / "data.json").exists()
    with pytest.raises(ValueError, match="not finished"):
        TokenShards.open(out)
    with pytest.raises(ValueError, match=r"seed: 0 there, 1 now"):
        quiet_build([folder / "a.jsonl.gz", folder / "b.txt"], out, valid=0.1, shard_bytes=3000, seed=1)
    kept = (out / "train-00000.bin").stat().st_mtime_ns
    time.sleep(0.01)
    assert main([*command[:-1], "1"]) == 0
    assert contents(out) == expected
    assert (out / "train-00000.bin").stat().st_mtime_ns == kept
    assert main(command) == 0  # done already


def test_a_source_that_changed_while_a_build_was_interrupted_is_noticed(tmp_path):
    good = many(40)
    (tmp_path / "a.jsonl").write_bytes(jsonl(good) + b"{\n")
    with pytest.raises(ValueError, match=r"a.jsonl:41: not a line of JSON.*--skip-bad"):
        quiet_build([tmp_path / "a.jsonl"], tmp_path / "out", shard_bytes=2000)
    (tmp_path / "a.jsonl").write_bytes(jsonl(["other", *good]))
    with pytest.raises(ValueError, match="sources have changed"):
        quiet_build([tmp_path / "a.jsonl"], tmp_path / "out", shard_bytes=2000)
    (tmp_path / "a.jsonl").write_bytes(jsonl(good[:2]))
    with pytest.raises(ValueError, match="sources have changed"):
        quiet_build([tmp_path / "a.jsonl"], tmp_path / "out", shard_bytes=2000)
    (tmp_path / "a.jsonl").write_bytes(jsonl(good))
    (tmp_path / "out" / "train-00000.bin").write_bytes(b"altered")  # made anew
    quiet_build([tmp_path / "a.jsonl"], tmp_path / "out", shard_bytes=2000)
    assert sorted(documents(tmp_path / "out") + documents(tmp_path / "out", "valid")) == sorted(good)


BAD = {
    "binary.txt": (b"a\0b", r"binary.txt: a NUL character"),
    "latin.txt": ("é".encode("latin1"), r"latin.txt: not UTF-8 text \(byte 0\)"),
    "empty.txt": (b"", r"empty.txt: no document with text"),
    "large.txt": (b"x" * 2000, r"large.txt: more than max_document_bytes = 1,000"),
    "large.jsonl": (jsonl(["x" * 2000]), r"large.jsonl:1: more than max_document_bytes"),
    "field.jsonl": (jsonl(["x"], "body"), r"field.jsonl:1: no field text_field = 'text'; it has 'id', 'body'"),
    "null.jsonl": (b'{"text": null}\n', r"null.jsonl:1: the text is NoneType"),
    "list.jsonl": (b"[1]\n", r"list.jsonl:1: not a JSON object"),
    "half.jsonl": (b'{"text": "\\ud800"}\n', r"half.jsonl:1: half of a surrogate"),
    "cut.jsonl.xz": (lzma.compress(jsonl(many()))[:-50], r"cut.jsonl.xz: damaged or cut off"),
    "cut.jsonl.gz": (gzip.compress(jsonl(many()))[:-50], r"cut.jsonl.gz: damaged or cut off"),
    "no.jsonl.xz": (b"hello", r"no.jsonl.xz: damaged or cut off"),
    "cut.jsonl.zst": (b"", r"cut.jsonl.zst: damaged or cut off"),
    "no.jsonl.zst": (b"hello", r"no.jsonl.zst: damaged or cut off"),
    "no.parquet": (b"hello", r"no.parquet: not a readable parquet file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name, tmp_path):
    data, message = BAD[name]
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    if name.endswith("zst"):
        compress = pytest.importorskip("zstandard").compress
        data = data or compress(jsonl(["x"])) + compress(jsonl(many()))[:-50]  # a frame that is whole, one that is not
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        quiet_build([tmp_path / name], tmp_path / "out", max_document_bytes=1000)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "data.json").exists()
    with pytest.raises(ValueError, match=r"no data\.json"):
        TokenShards.open(tmp_path / "out")


def test_bad_documents_are_left_out_on_request(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("binary.txt", "latin.txt", "empty.txt", "null.jsonl", "half.jsonl"):
        (tmp_path / "in" / name).write_bytes(BAD[name][0])
    (tmp_path / "in" / "good.txt").write_text("good")
    index = quiet_build([tmp_path / "in"], tmp_path / "out", valid=0, skip_bad=True)
    assert documents(tmp_path / "out") == ["good"]
    assert index.left_out == {"empty": 1, "bad": 4, "short": 0}


def test_what_is_in_the_way_is_one_line_and_stays(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    with pytest.raises(ValueError, match="no such file or folder"):
        quiet_build([tmp_path / "b.txt"], tmp_path / "out")
    with pytest.raises(ValueError, match="has other files in it"):
        quiet_build([tmp_path / "a.txt"], tmp_path)
    with pytest.raises(ValueError, match="inside the source"):
        quiet_build([tmp_path], tmp_path / "out")
    with pytest.raises(ValueError, match="valid = 1"):
        BuildOptions(valid=1)
    with pytest.raises(ValueError, match="no document is left for training: left out 0 empty, 0 bad, 1 short"):
        quiet_build([tmp_path / "a.txt"], tmp_path / "long", min_tokens=7)
    with pytest.raises(ValueError, match="tokenizer nowhere/at/all: cannot be read"):
        quiet_build([tmp_path / "a.txt"], tmp_path / "out", tokenizer="nowhere/at/all")
    with claim(tmp_path / "busy"), pytest.raises(ValueError, match="another process is building it"):
        quiet_build([tmp_path / "a.txt"], tmp_path / "busy")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "busy", "long"]


def test_altered_shards_are_found(whole, tmp_path, capsys):
    folder, expected = whole
    for name, data in expected.items():
        (tmp_path / name).write_bytes(data)
    assert main(["data", "show", str(tmp_path), "--verify"]) == 0
    assert "every file as it was built" in capsys.readouterr().out
    file = tmp_path / "train-00001.bin"
    file.write_bytes(b"Z" + file.read_bytes()[1:])
    TokenShards.open(tmp_path, verify=False)
    with pytest.raises(ValueError, match="train-00001: altered since it was built"):
        TokenShards.open(tmp_path)
    assert main(["data", "show", str(tmp_path), "--verify"]) == 2
    assert "train-00001: altered since it was built" in capsys.readouterr().err
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"it has 5 bytes; data\.json says"):
        TokenShards.open(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="it is missing"):
        TokenShards.open(tmp_path)
    with pytest.raises(ValueError, match="split = 'test'"):
        TokenShards.open(tmp_path, "test")


def test_the_commands(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(jsonl(many(50), "body"))
    common = [str(tmp_path / "a.jsonl"), "--text-field", "body", "--out"]
    assert main(["data", "train-tokenizer", *common, str(tmp_path / "tok"), "--vocab-size", "300"]) == 0
    assert "300 tokens" in capsys.readouterr().out
    build_it = ["data", "build", *common, str(tmp_path / "out"), "--tokenizer", str(tmp_path / "tok"), "--valid", "0.2"]
    assert main([*build_it, "--processes", "1", "--json"]) == 0
    built = json.loads(capsys.readouterr().out)
    assert main(["data", "show", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == built
    assert sum(split["documents"] for split in built["splits"].values()) == 50
    assert main(["data", "show", str(tmp_path)]) == 2
    assert main(["data", "biuld"]) == 2
    assert "nearest: build" in capsys.readouterr().err


def ends_its_process(number: int) -> None:
    os._exit(number)


def lacks_memory() -> None:
    raise MemoryError


def test_a_lack_of_memory_is_one_line():
    with Pool(ends_its_process, 2) as pool, pytest.raises(ValueError, match="a process was ended or ran out of memory"):
        for number in range(9):
            list(pool.put(number, None, (number,)))
    with Pool(lacks_memory, 1) as pool, pytest.raises(ValueError, match="fewer --processes"):
        list(pool.put(0, None, ()))


def test_building_loads_no_torch():
    code = "import sys, plait.data.command, plait.data.build; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
