"""The command line as its users meet it: output, exit codes, and one readable line for every mistake."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from plait import records
from plait.cli import COMMANDS, main
from plait.presets import preset, preset_names
from plait.spec import Spec

TINY = ["--layout", "gdn nope", "--d-model", "16", "--num-layers", "2", "--d-ff", "24", "--batch-size", "4"]
SPACED = [*TINY, "--task", "spaced-retrieval", "--gaps", "2,9"]


def train(tmp_path, *options: str, name: str = "x", base: list[str] = SPACED) -> int:
    return main(["train", "--runs", str(tmp_path), "--name", name, "--steps", "3", *base, *options])


def test_help_of_every_command(capsys):
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for name in COMMANDS:
        assert name in overview
        assert main([name, "--help"]) == 0
        assert "example: plait" in capsys.readouterr().out


def test_describe_table(capsys):
    assert main(["describe", "3*gdn nope", "--d-model", "256", "--num-heads", "4", "--num-layers", "8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3*gdn nope\n8 layers, d_model 256")
    assert "0-2, each  gdn" in out
    assert "full attention" in out
    assert "x the state of full attention" in out


def test_describe_json_and_spec_files(capsys, tmp_path):
    flags = ["--d-model", "128", "--num-heads", "2", "--num-layers", "2", "--context", "1000", "--json"]
    assert main(["describe", "swa[window=64] gdn[expand_v=2]", *flags]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["layout"] == "swa[window=64] gdn[expand_v=2]"
    assert first["cost"]["layers"][0]["state_bytes"] == 2 * 2 * 64 * 64 * 2
    assert first["full_attention"]["state_bytes"] == 2 * 2 * 2 * 64 * 1000 * 2
    (tmp_path / "spec.json").write_text(json.dumps(first["spec"]))
    for where in (tmp_path, tmp_path / "spec.json"):
        assert main(["describe", str(where), "--context", "1000", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == first


def test_describe_parts_with_unequal_kv_groups(capsys):
    flags = ["--d-model", "64", "--num-layers", "2", "--num-heads", "4", "--num-kv-heads", "2"]
    assert main(["describe", "heads(3:nope, 1:kda)", *flags]) == 0
    out = capsys.readouterr().out
    assert out.startswith("heads(3:nope, 1:kda)\n")
    assert "0-1, each  heads(nope, kda)  3/2 (2, 1) x 16 + 1 x 16" in out
    assert main(["describe", "lightning", *flags, "--context", "100000"]) == 0
    assert "0.14x the FLOPs and less than 0.001x the state" in capsys.readouterr().out


def test_describe_preset(capsys):
    assert main(["describe", "--preset", "001/776m/gdn-nope-hh", "--context", "1000"]) == 0
    assert capsys.readouterr().out.startswith("heads(3:gdn, 1:nope)\n12 layers, d_model 1536, vocabulary 128,256")
    assert main(["describe", "--preset", "small/1M", "--vocab-size", "300", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert (described["layout"], described["spec"]["vocab_size"]) == ("full", 300)


def test_list_presets(capsys):
    assert main(["describe", "--list-presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == preset_names()
    assert main(["describe", "--list-presets"]) == 0
    words = capsys.readouterr().out.split()
    for name in preset_names():
        family, *rest = name.split("/", 1 if name.startswith("003") else 2)
        assert {f"{family}/{'MODEL' if len(rest) == 1 and family != 'small' else 'SIZE/VARIANT'}", *rest} <= set(words)


def test_train_probe_report_from_end_to_end(capsys, tmp_path):
    assert train(tmp_path, "--probe-every", "2", "--probe-pairs", "4") == 0
    assert "retrieval_score" in capsys.readouterr().out
    rows = records.read(tmp_path / "x" / "records.jsonl")
    assert {row.step for row in rows if row.kind == "probe"} == {0, 2, 3}
    assert main(["probe", str(tmp_path / "x"), "retrieval-score", "--gap", "9", "--pairs", "4", "--json"]) == 0
    probed = json.loads(capsys.readouterr().out)
    last = [row for row in rows if row.kind == "probe" and row.step == 3 and row.axes["gap"] == 9]
    assert [row["values"]["score"] for row in probed] == pytest.approx([row.values["score"] for row in last], abs=1e-5)
    assert probed[0]["step"] == 3
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "x"), "-o", str(page)]) == 0
    assert "gdn nope" in page.read_text()


def test_train_on_text(capsys, tmp_path):
    (tmp_path / "book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    assert train(tmp_path, "--length", "32", "--json", base=[*TINY, "--data", str(tmp_path / "book.txt")]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["kind"], row["name"], row["step"]) == ("eval", "loss", 3)


def test_the_same_command_again_does_nothing_more(capsys, tmp_path):
    assert train(tmp_path) == 0
    before = (tmp_path / "x" / "records.jsonl").read_bytes()
    assert train(tmp_path) == 0
    assert (tmp_path / "x" / "records.jsonl").read_bytes() == before


def test_a_runs_config_repeats_it(tmp_path):
    assert train(tmp_path, "--lr", "0.02", "--freeze", "gdn:0-2,nope:2-") == 0
    config = str(tmp_path / "x" / "config.json")
    assert main(["train", "--config", config, "--runs", str(tmp_path), "--name", "again"]) == 0
    for file in ("config.json", "checkpoints/step-00000003/model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "x" / file).read_bytes()


def test_train_a_preset_and_repeat_it_from_its_config(tmp_path):
    (tmp_path / "book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    data = ["--data", str(tmp_path / "book.txt"), "--length", "16", "--batch-size", "2"]
    assert train(tmp_path, "--preset", "small/1M/GDN-NoPE-LH", base=data) == 0
    config = tmp_path / "x" / "config.json"
    recorded = json.loads(config.read_text())
    assert (recorded["preset"], recorded["layout"], recorded["d_model"]) == ("small/1M/GDN-NoPE-LH", None, None)
    published = dataclasses.replace(preset("small/1M/GDN-NoPE-LH"), context_length=16)
    assert Spec.load(tmp_path / "x" / "spec.json") == published
    assert main(["train", "--config", str(config), "--runs", str(tmp_path), "--name", "again"]) == 0
    for file in ("config.json", "checkpoints/step-00000003/model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "x" / file).read_bytes()
    assert main(["train", "--config", str(config), "--runs", str(tmp_path), "--name", "no", "--d-model", "128"]) == 2


def losses(run) -> list[tuple[int | None, float | None]]:
    return [(row.step, row.values["loss"]) for row in records.read(run / "records.jsonl") if row.name == "loss"]


def test_flags_override_the_config_wherever_they_stand(tmp_path):
    assert train(tmp_path, "--lr", "0.02") == 0
    config = ["--config", str(tmp_path / "x" / "config.json")]
    common = ["--runs", str(tmp_path), "--name"]
    assert main(["train", *common, "same", *config]) == 0
    assert losses(tmp_path / "same") == losses(tmp_path / "x")
    assert main(["train", *common, "after", *config, "--steps", "2", "--seed", "1"]) == 0
    assert main(["train", "--steps", "2", "--seed", "1", *common, "before", f"--config={config[1]}"]) == 0
    assert losses(tmp_path / "before") == losses(tmp_path / "after") != losses(tmp_path / "x")
    recorded = json.loads((tmp_path / "before" / "config.json").read_text())
    assert (recorded["steps"], recorded["seed"], recorded["lr"]) == (2, 1, 0.02)


def test_weights_of_another_model_and_their_run_repeated(tmp_path):
    assert train(tmp_path) == 0
    base = SPACED[len(TINY) :]
    assert train(tmp_path, "--init", str(tmp_path / "x"), "--batch-size", "4", name="next", base=base) == 0
    config = tmp_path / "next" / "config.json"
    assert json.loads(config.read_text())["init"] == str(tmp_path / "x")
    assert main(["train", "--config", str(config), "--runs", str(tmp_path), "--name", "again"]) == 0
    file = "checkpoints/step-00000003/model.safetensors"
    assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "next" / file).read_bytes()
    first = "checkpoints/step-00000000/model.safetensors"
    assert (tmp_path / "next" / first).read_bytes() == (tmp_path / "x" / file).read_bytes()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"layout": "gdn", "lrr": 1}', "unknown field 'lrr'; nearest: lr"),
        ('{"layout": "gdn", "steps": "many"}', "--steps: it must be int; got many"),
        ('{"layout": "gdn", "freeze": ["gdn"], "task": "spaced-retrieval"}', "freeze = 'gdn'"),
        ("{", "must be JSON or YAML of options"),
        ("[1]", "must be JSON or YAML of options"),
        (None, "File does not exist"),
    ],
)
def test_mistakes_in_a_config_are_one_line_and_code_2(capsys, tmp_path, text, words):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    assert main(["train", "--config", str(file), "--runs", str(tmp_path / "runs"), "--name", "x"]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1, err
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_tells_and_writes_nothing(capsys, tmp_path):
    assert train(tmp_path, "--freeze", "gdn:0-2", "--dry-run") == 0
    out = capsys.readouterr().out
    for words in ("a dry run; nothing is written", "gdn nope", "blocks of layer 0", "learning rate of AdamW"):
        assert words in out
    assert list(tmp_path.iterdir()) == []
    assert train(tmp_path, "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"] == 2
    assert train(tmp_path, "--checkpoint-every", "1") == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    assert train(tmp_path, "--checkpoint-every", "1", "--dry-run") == 0
    assert "all 3 are done: nothing is left to do" in capsys.readouterr().out
    assert train(tmp_path, "--branch", f"{tmp_path}/x@1", "--steps", "9", "--dry-run", name="branch") == 0
    assert "2 to 9; 1 are done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    rows = [row for row in records.read(tmp_path / "x" / "records.jsonl") if row.name == "loss"]
    assert train(tmp_path, "--dry-run", "--json", name="y") == 0
    foretold = json.loads(capsys.readouterr().out)
    assert foretold["tokens"] == rows[-1].tokens == 3 * foretold["tokens_per_update"]


def test_a_dry_run_refuses_what_the_run_refuses(capsys, tmp_path):
    (tmp_path / "book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    text = [*TINY, "--data", str(tmp_path / "book.txt"), "--length", "32"]
    assert train(tmp_path) == 0
    for options, base in (
        (["--seed", "1"], SPACED),
        (["--probe-every", "1"], text),
        (["--length", "100000"], text),
        (["--clip-from", str(tmp_path / "nothing")], SPACED),
        (["--branch", f"{tmp_path}/x@2"], SPACED),
        (["--branch", f"{tmp_path}/x", "--d-ff", "32", "--name", "y"], SPACED),
        (["--init", f"{tmp_path}/x", "--d-ff", "32", "--name", "y"], SPACED),
    ):
        capsys.readouterr()
        codes = [train(tmp_path, *options, *dry, base=base) for dry in (["--dry-run"], [])]
        dry, real = capsys.readouterr().err.splitlines()
        assert codes == [2, 2] and dry == real
    assert train(tmp_path, "--batch-size", "2", "--processes", "4", "--dry-run", name="y") == 2
    assert "batch_size = 2; 4 processes train, and each needs a row of every batch" in capsys.readouterr().err


def test_a_presets_vocabulary_is_the_datas(tmp_path):
    options = ["--preset", "small/1M", "--task", "spaced-retrieval", "--gaps", "2", "--batch-size", "2", "--steps", "1"]
    assert main(["train", "--runs", str(tmp_path), "--name", "x", *options]) == 0
    assert Spec.load(tmp_path / "x" / "spec.json").vocab_size == 12


def test_branch(tmp_path):
    assert train(tmp_path, "--checkpoint-every", "1", "--freeze", "gdn:0-") == 0
    options = ["--checkpoint-every", "1", "--freeze", "gdn:0-2", "--branch", f"{tmp_path}/x@2"]
    assert train(tmp_path, *options, name="released") == 0
    steps = [row.step for row in records.read(tmp_path / "released" / "records.jsonl") if row.name == "loss"]
    assert steps == [1, 2, 3]


BAD = [
    (["describe", "gdm nope"], "layout, position 0: unknown mixer 'gdm'; nearest: gdn"),
    (["describe", "gdn[heads=3]"], "layout, position 4: unknown key 'heads'"),
    (["describe", "swa[window=0]"], "window"),
    (["describe", "gdn nope", "--num-layers", "3"], "num_layers = 3"),
    (["describe", "heads(2:gdn, 1:nope)"], "does not divide"),
    (["describe", "nope", "--num-kv-heads", "3"], "num_kv_heads = 3"),
    (["describe", "heads(1:nope, 1:kda)", "--num-kv-heads", "3"], "position 8: nope: num_kv_heads = 3; it must be a"),
    (["describe", "heads(0:gdn, 1:nope)"], "layout, position 6: share 0; it must be at least 1"),
    (["describe", "gdn", "--context", "0"], "context = 0"),
    (["describe", "gdn", "--d-modl", "3"], "--d-modl"),
    (["describe", "no/such/spec.json"], "no such file"),
    (["describe"], "layout, preset: neither is given"),
    (["describe", "--d-model", "x"], "--d-model: it must be int; got x"),
    (["describe", "--preset", "small/9M"], "unknown preset 'small/9M'; nearest: small/8M"),
    (["describe", "gdn nope", "--preset", "small/8M"], "preset = small/8M, layout = gdn nope; a preset has its own"),
    (
        ["describe", "--preset", "small/8M", "--d-model", "512"],
        "preset = small/8M, d_model = 512; a preset has its own",
    ),
    (["train", "--name", "x", "--data", "x"], "layout, preset: neither is given"),
    (["train", "--name", "x", *SPACED, "--preset", "small/8M"], "preset = small/8M, layout = gdn nope"),
    (["train", "--name", "x", "--preset", "smal/8M", "--task", "spaced-retrieval"], "nearest: small/8M"),
    (["train", "--layout", "gdn", "--task", "spaced-retrieval"], "name"),
    (["train", "--name", "x", "--layout", "gdn"], "none is given"),
    (["train", "--name", "x", "--layout", "gdn", "--task", "spaced"], "nearest: spaced-retrieval"),
    (
        ["train", "--name", "x", "--layout", "gdn", "--task", "spaced-retrieval", "--data", "x"],
        "task and data are given",
    ),
    (["train", "--name", "x", "--layout", "gdn", "--data", "no-such-file"], "no such file or folder"),
    (
        ["train", "--name", "x", *SPACED, "--layout", "heads(3:gla, 1:nope)"],
        "shares 3:1 sum to 4, which does not divide",
    ),
    (["train", "--name", "x", *SPACED, "--freeze", "kda:0-"], "family 'kda'"),
    (["train", "--name", "x", *SPACED, "--freeze", "gdn"], "freeze = 'gdn'"),
    (["train", "--name", "x", *SPACED, "--steps", "many"], "--steps"),
    (["train", "--name", "x", *SPACED, "--backend", "fla", "--device", "cpu"], "its kernels run on CUDA devices only"),
    (["train", "--name", "x", *SPACED, "--gaps", "2,x"], "gaps"),
    (["train", "--name", "x", *SPACED, "--precision", "fp8"], "precision"),
    (["train", "--name", "x", *SPACED, "--device", "tpu"], "device = 'tpu'"),
    (["train", "--name", "x", *SPACED, "--branch", "runs/nothing"], "no run or checkpoint"),
    (["probe", "runs/nothing", "retrieval-score"], "no run or checkpoint"),
    (["probe", "runs/nothing", "retrival"], "nearest: retrieval-score"),
    (["report", "runs/nothing"], "runs/nothing"),
    (["bench", "mixer"], "nearest: mixers"),
    (["descibe"], "nearest: describe"),
]
BAD += [([*arguments, "--dry-run"], words) for arguments, words in BAD if arguments[0] == "train"]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[" ".join(arguments)[:60] for arguments, _ in BAD])
def test_mistakes_are_one_line_and_code_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1, captured.err
    assert len(captured.err) < 500
    assert list(tmp_path.iterdir()) == []


def test_torch_is_not_needed_to_describe():
    code = "import sys; from plait.cli import main; main(['describe', 'gdn nope']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_failures_that_are_nobodys_mistake_are_code_1(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "plait.train.loop.save_checkpoint", lambda *_, **__: (_ for _ in ()).throw(OSError("disk is full"))
    )
    assert train(tmp_path) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "plait train: disk is full"


def test_help_of_a_flag_is_whole(capsys):
    """Also where the docstring needs a second line."""
    assert main(["train", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "0: only if it or the loss is not finite (default: 0.0)" in shown
