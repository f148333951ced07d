"""Training in stages: Better Layer Division's freezing, resets and budgets, runs that start from another's weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait import records
from plait.cli import main
from plait.config import family, leaves
from plait.extend import window_theta
from plait.model.io import load, save
from plait.model.lm import LM
from plait.runs import train_run, train_stages
from plait.train.checkpoint import checkpoints
from plait.train.config import TrainConfig
from plait.train.settings import DataOptions, ExtendOptions, ModelOptions, RunSettings
from plait.train.stages import Stage, check_stages, find_stages

SETTINGS = RunSettings(
    model=ModelOptions(layout="gdn nope", d_model=16, num_layers=2),
    data=DataOptions(task="spaced-retrieval", gaps=(4, 9), batch_size=8),
    train=TrainConfig(steps=6, eval_every=0, eval_rows=8, checkpoint_every=3, precision="fp32"),
)


def tensors(path, name="model"):
    return load_file(checkpoints(path)[-1] / f"{name}.safetensors")


def test_bld_freezes_then_starts_afresh_from_the_weights(tmp_path):
    """Recurrent blocks come out of the early stage bit for bit as they went in; the second stage moves all, with a
    new optimizer and schedule, where the data were left."""
    stages = find_stages("bld:5", SETTINGS)
    train_stages(tmp_path / "x", stages, SETTINGS, progress=False)
    fresh = load_file(checkpoints(tmp_path / "x-early")[0] / "model.safetensors")
    early, full = tensors(tmp_path / "x-early"), tensors(tmp_path / "x")
    for name, value in early.items():
        assert torch.equal(value, fresh[name]) == name.startswith("layers.0."), name
        assert not torch.equal(value, full[name]), name
    first = load_file(checkpoints(tmp_path / "x")[0] / "model.safetensors")
    assert all(torch.equal(value, early[name]) for name, value in first.items())
    steps = {key: float(value) for key, value in tensors(tmp_path / "x", "trainer").items() if key.startswith("step.")}
    assert set(steps.values()) == {6.0}
    assert not any("momentum" in key for key in tensors(tmp_path / "x-early", "trainer"))
    assert any("momentum" in key for key in tensors(tmp_path / "x", "trainer"))
    shown = [
        row for row in records.read(tmp_path / "x" / "records.jsonl") if row.name == "loss" and row.kind == "train"
    ]
    assert [row.step for row in shown] == [1, 2, 3, 4, 5, 6]
    assert RunSettings.load(tmp_path / "x").train.first_batch == 3  # 5 batches of 4 rows are 2.5 of 8
    later = dataclasses.replace(SETTINGS, train=dataclasses.replace(SETTINGS.train, first_batch=100))
    assert find_stages("bld:5", later)[1].train["first_batch"] == 53  # of 105 batches of 4 rows


def test_the_vanilla_twin_differs_in_the_freezing_alone():
    pairs = zip(find_stages("003/180M/bld", SETTINGS), find_stages("003/180M/vanilla", SETTINGS), strict=True)
    for bld, vanilla in pairs:
        assert {**bld.train, "freeze": ()} == vanilla.train
        assert bld.data == vanilla.data


@pytest.mark.parametrize(
    ("size", "tokens", "warmups", "decay"),
    [
        ("180M", (0.12, 1.2), (23, 229), 229),
        ("250M", (0.28, 2.8), (53, 534), 534),
        ("390M", (0.48, 4.8), (92, 916), 916),
        ("510M", (0.72, 7.2), (137, 1373), 1373),
        ("750M", (1.07, 10.65), (198, 2032), 2032),
        ("1B", (1.6, 16.0), (305, 3052), 3052),
    ],
)
def test_budgets_of_the_paper(size, tokens, warmups, decay):
    """003, table 7: billions of tokens, warmups and the last decay, in updates of 16 and 32 rows of 16,384."""
    stages = find_stages(f"003/{size}/bld", SETTINGS)
    early, full = (stage.apply(SETTINGS, init=None) for stage in stages)
    for settings, rows, budget, warmup in zip((early, full), (16, 32), tokens, warmups, strict=True):
        assert (settings.data.batch_size, settings.data.length) == (rows, 16384)
        assert settings.train.steps * rows * 16384 == pytest.approx(budget * 1e9, rel=2e-3)
        assert settings.train.warmup == warmup
    assert early.train.rates.at(warmups[0]) == early.train.rates.at(early.train.steps - 1) == 1
    rates, last = full.train.rates, full.train.steps
    assert full.train.decay == decay
    assert rates.at(last - decay) == 1 > rates.at(last - decay + 1)
    assert rates.at(last) == pytest.approx(0.05)
    assert early.train.freeze == ("recurrent:0-",)
    assert full.train.freeze == ()


def test_stages_go_on_where_they_stopped(tmp_path):
    """Begun again, what is done is left alone; a stage cut off goes on exactly."""
    stages = find_stages("bld:4", SETTINGS)
    train_stages(tmp_path / "whole", stages, SETTINGS, progress=False)
    early = stages[0].apply(SETTINGS, init=None)
    train_run(tmp_path / "cut-early", early, progress=False)
    before = (checkpoints(tmp_path / "cut-early")[-1] / "trainer.json").read_bytes()
    train_stages(tmp_path / "cut", stages, SETTINGS, progress=False)
    assert (checkpoints(tmp_path / "cut-early")[-1] / "trainer.json").read_bytes() == before
    for name in ("model", "trainer"):
        got, want = tensors(tmp_path / "cut", name), tensors(tmp_path / "whole", name)
        assert all(torch.equal(got[key], value) for key, value in want.items())


def test_a_run_from_the_weights_of_another_takes_its_model_too(tmp_path):
    train_run(tmp_path / "a", SETTINGS, progress=False)
    settings = dataclasses.replace(SETTINGS, model=None, init=f"{tmp_path}/a@3")
    assert RunSettings.from_json(settings.to_json()) == settings
    train_run(tmp_path / "b", settings, progress=False)
    start, want = load(checkpoints(tmp_path / "b")[0]), load(f"{tmp_path}/a/checkpoints/step-00000003")
    assert start.spec == want.spec
    assert all(torch.equal(value, want.state_dict()[name]) for name, value in start.state_dict().items())


def test_refused(tmp_path):
    train_run(tmp_path / "a", dataclasses.replace(SETTINGS, train=TrainConfig(steps=1, eval_rows=8)), progress=False)
    other = ModelOptions(layout="gdn nope", d_model=32, num_layers=2)
    there = r"init: embed.weight is \(\d+, 16\) in .*, and \(\d+, 32\) in the model asked for"
    with pytest.raises(ValueError, match=there):
        train_run(tmp_path / "b", dataclasses.replace(SETTINGS, model=other, init=f"{tmp_path}/a"), progress=False)
    assert not (tmp_path / "b").exists()
    with pytest.raises(ValueError, match="a run starts from one of them"):
        dataclasses.replace(SETTINGS, init="a", branch="a@1")
    with pytest.raises(ValueError, match="stages = '003/180M/blt'; nearest: 003/180M/bld"):
        find_stages("003/180M/blt", SETTINGS)
    with pytest.raises(ValueError, match="layout, preset: neither"):
        RunSettings.from_json({"task": "spaced-retrieval"})


def test_the_command(tmp_path, capsys):
    command = ["train", "--name", "x", "--runs", str(tmp_path), "--layout", "gdn nope", "--d-model", "16"]
    command += ["--task", "spaced-retrieval", "--gaps", "4,9", "--steps", "2", "--eval-rows", "8", "--num-layers", "2"]
    assert main([*command, "--stages", "vanilla:3"]) == 0
    assert f"{tmp_path}/x after update 2" in capsys.readouterr().out
    assert checkpoints(tmp_path / "x-early")[-1].name == "step-00000003"
    assert main([*command, "--stages", "bld:3", "--dry-run"]) == 2
    assert "a dry run is of one stage" in capsys.readouterr().err


BASE = dataclasses.replace(SETTINGS, data=DataOptions(data=Path("x")), init="x")


def test_continual_pretraining_has_the_numbers_of_the_paper():
    """001, table 2: 5B tokens in rows of 32k, 0.5M a batch, 1B of warmup, cosine to 0, AdamW at 1e-3 without decay."""
    (stage,) = find_stages("001/cpt", BASE)
    found = stage.apply(BASE, init=BASE.init)
    tokens = found.data.batch_size * found.data.length
    assert (found.data.length, found.init) == (32768, "x")
    assert tokens == pytest.approx(0.5e6, rel=0.05)
    assert found.train.steps * tokens == pytest.approx(5e9, rel=1e-3)
    assert found.train.warmup * tokens == pytest.approx(1e9, rel=1e-3)
    assert (found.train.optimizer, found.train.lr, found.train.weight_decay) == ("adamw", 1e-3, 0)
    rates = found.train.rates
    assert (rates.shape, rates.at(found.train.warmup), rates.at(found.train.steps)) == ("cosine", 1, 0)


def test_the_32k_extension_has_the_numbers_of_the_paper():
    """000, table 8, last row: 4,769 updates of 32 rows, linear from 9.766e-5 to 0, Muon, weight decay 0.1, clip 1."""
    (stage,) = find_stages("000/32k", BASE)
    found = stage.apply(BASE, init=BASE.init)
    assert (found.data.length, found.data.batch_size, found.train.steps) == (32768, 32, 4769)
    assert (found.train.optimizer, found.train.lr, found.train.muon_lr) == ("muon", 9.766e-5, 9.766e-5)
    assert (found.train.weight_decay, found.train.clip) == (0.1, 1)
    rates = found.train.rates
    assert (rates.shape, rates.warmup, rates.decay) == ("linear", 0, 4769)
    assert (rates.at(0), rates.at(4769)) == (1, 0)


@pytest.mark.parametrize(
    ("name", "layout", "bases"),
    [
        ("001/cpt", "3*full nope", {"full": 5e5}),
        ("001/cpt", "3*swa[window=128] full", {"swa": 1e4, "full": 5e5}),
        ("001/cpt", "heads(1:full, 1:gdn[rope_theta=10000])", {"full": 5e5, "gdn": 1e4}),
        ("001/cpt", "3*gdn nope", {}),
        ("000/32k", "swa[window=128] nope", {"swa": 5e5}),
        ("000/32k", "gdn full", {"full": 5e5}),
    ],
)
def test_rope_bases_of_the_presets(name, layout, bases):
    """001 raises that of full attention alone; 000 the model's."""
    (stage,) = find_stages(name, BASE)
    spec = ModelOptions(layout=layout, num_layers=4, num_heads=2).spec(99)
    found = stage.apply(BASE, init="x").extend.apply(spec)
    mixers = [leaf for layer in found.layers for leaf in leaves(layer.mixer)]
    assert {family(leaf): leaf.rope_theta for leaf in mixers if leaf.rope_theta is not None} == bases


def test_a_model_made_longer(tmp_path):
    """The stage's changes to the Spec are made once, recorded, and the same when the run is begun again."""
    settings = dataclasses.replace(SETTINGS, model=ModelOptions(layout="swa[window=8] full", d_model=16, num_layers=2))
    train_run(tmp_path / "a", settings, progress=False)
    options = {"extend_theta": ("full=500000",), "extend_window": 16}
    stage = Stage(name="long", train={"steps": 2}, extend=options)
    settings = dataclasses.replace(settings, model=None, init=str(tmp_path / "a"))
    for _ in range(2):
        model = train_stages(tmp_path / "b", [stage], settings, progress=False)
    swa, full = (layer.mixer for layer in model.spec.layers)
    assert (swa.window_size, swa.rope_theta, full.rope_theta) == (16, window_theta(1e4, 8, 16), 5e5)
    assert RunSettings.load(tmp_path / "b").extend == ExtendOptions(**options)
    want = tensors(tmp_path / "a")
    first = load_file(checkpoints(tmp_path / "b")[0] / "model.safetensors")
    assert all(torch.equal(value, want[name]) for name, value in first.items())


def test_presets_that_go_on_need_a_model():
    with pytest.raises(ValueError, match="stages = 001/cpt; it goes on with a trained model: give --init MODEL"):
        find_stages("001/cpt", SETTINGS)


def test_what_the_stages_set_is_not_to_be_asked_for():
    def check(text, **train):
        settings = dataclasses.replace(SETTINGS, train=dataclasses.replace(SETTINGS.train, **train))
        check_stages(text, find_stages(text, settings), settings)

    check("bld:5", steps=7, first_batch=3, optimizer="muon")
    with pytest.raises(ValueError, match=r"stages = bld:5, lr = 0.002; these stages set it to 0.0001 and 0.001: leave"):
        check("bld:5", lr=2e-3)
    with pytest.raises(ValueError, match=r"stages = 003/180M/bld, batch_size = 8; these stages set it to 16 and 32"):
        check("003/180M/bld")


def test_a_dry_run_of_a_stage_that_goes_on(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("text " * 140_000)
    save(LM(ModelOptions(layout="swa[window=16] full", d_model=16, num_layers=2).spec(256)), tmp_path / "model")
    command = [
        "train",
        "--name",
        "b",
        "--runs",
        str(tmp_path),
        "--data",
        str(tmp_path / "text.txt"),
        "--dry-run",
        "--json",
    ]
    command += ["--init", str(tmp_path / "model"), "--stages", "001/cpt", "--processes", "4", "--parallel", "fsdp"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["lengths"], found["piece"]["rows"]) == (9537, [32768], 4)
    assert (found["processes"], found["sharded"]) == (4, True)
    assert not (tmp_path / "b").exists()
