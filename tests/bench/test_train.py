"""`plait bench train` at a tiny size: the models compared have one shape, and what cannot run has a note."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import partial

import pytest
import torch

from plait.bench import train
from plait.bench.roofline import Peaks
from plait.bench.train import TWIN, Side, bench_train, fla_settings
from plait.cli import main
from plait.cost import cost, full_attention_twin, peak_flops
from plait.model.lm import LM
from plait.presets import preset

PEAK = 1e12


@pytest.fixture(autouse=True)
def _no_measured_peak(monkeypatch):
    monkeypatch.setattr(train, "peaks", lambda device, dtype: Peaks(PEAK, PEAK))


def spec_of(name: str):
    return dataclasses.replace(preset(name), context_length=64)


def test_rows(monkeypatch):
    monkeypatch.setattr(train, "LONG", 16)
    name = "small/1M/SWA-NoPE-LH"
    (rows,) = bench_train(models=[name], lengths=[16], tokens=32, repeats=1)
    assert [row["competitor"] for row in rows] == ["plait", TWIN, "transformers"]
    for row, spec in zip(rows, (preset(name), full_attention_twin(preset(name)), preset(name)), strict=True):
        assert (row["case"], row["batch"], row["length"]) == (name, 2, 16)
        assert row["tokens_per_s"] == pytest.approx(32e3 / row["median_ms"])
        flops = 3 * cost(spec, 16).flops_per_token * row["tokens_per_s"]
        assert row["mfu_percent"] == pytest.approx(100 * flops / PEAK)
        assert row["ratio"] == pytest.approx(row["median_ms"] / rows[0]["median_ms"])
    assert [row.get("bar") for row in rows] == [None, 1.5, 1.0]


def test_bars_of_the_twin_are_for_long_rows_of_layer_wise_hybrids():
    def bars(name):
        (rows,) = bench_train(models=[f"small/1M/{name}"], lengths=[8], tokens=8, repeats=1, without=["transformers"])
        return {row["competitor"]: row.get("bar") for row in rows}

    assert bars("GDN-NoPE-LH") == {"plait": None, TWIN: None}
    assert bars("RoPE") == {"plait": None}


@pytest.mark.parametrize("variant", ["RoPE", "SWA-NoPE-LH", "GDN-NoPE-LH"])
def test_transformers_has_the_same_shape(variant):
    spec = spec_of(f"small/1M/{variant}")
    theirs, _ = train._transformers(spec, torch.device("meta"))
    ours = LM(spec, device="meta").num_params
    norms = 2 * spec.d_model * sum(layer.mixer.kind == "softmax" for layer in spec.layers) if "GDN" in variant else 0
    assert sum(p.numel() for p in theirs.parameters()) == ours + norms  # of queries and keys


def test_settings_of_fla():
    name, settings = fla_settings(spec_of("001/376M/GDN-NoPE-LH"))
    assert (name, settings["attn"]) == ("GatedDeltaNet", {"layers": [3, 7], "num_heads": 8})
    assert (settings["head_dim"], settings["expand_v"], settings["hidden_size"]) == (128, 1, 1024)
    name, settings = fla_settings(spec_of("001/376M/GLA-NoPE-LH"))
    assert (name, settings["expand_k"], settings["use_short_conv"]) == ("GLA", 0.5, False)
    assert fla_settings(spec_of("001/376M/RoPE"))[0] == "Transformer"
    for variant in ("GDN-NoPE-HH", "SWA-NoPE-LH"):
        with pytest.raises(ValueError, match="it has no such layers"):
            fla_settings(spec_of(f"001/376M/{variant}"))


@pytest.mark.parametrize("always", [False, True])
def test_what_memory_is_too_small_for_is_tried_with_recomputed_layers(monkeypatch, always):
    update = Side.update

    def small(self, tokens_BT):
        if self.name == "plait" and (always or self.model.recompute is None):
            raise RuntimeError("can't allocate memory")
        update(self, tokens_BT)

    monkeypatch.setattr(Side, "update", small)
    (rows,) = bench_train(models=["small/1M/RoPE"], lengths=[8], tokens=8, repeats=1)
    ours = next(row for row in rows if row["competitor"] == "plait")
    theirs = next(row for row in rows if row["competitor"] == "transformers")
    assert ours["note"] == ("out of memory" if always else "layers recomputed: out of memory otherwise")
    assert ("median_ms" in ours) == ("ratio" in theirs) == (not always)
    assert theirs["median_ms"] > 0


def test_an_update_trains():
    spec = spec_of("small/1M/RoPE")
    options = train.Options(torch.device("cpu"))
    (ours, theirs) = train._sides(partial(train._ours, options.device, "torch"), "false", options, spec)
    tokens_BT = torch.arange(16).view(1, 16)
    for side in (ours, theirs):
        before = side.loss(tokens_BT).item()
        for _ in range(3):
            side.update(tokens_BT)
        assert side.loss(tokens_BT).item() < before
        weights = sum(p.nbytes for p in side.model.parameters())
        assert side.held_bytes() == pytest.approx(3 * weights, rel=1e-4)


def test_command(capsys, tmp_path):
    flags = ["--models", "small/1M/RoPE", "--lengths", "8", "--tokens", "8", "--repeats", "1"]
    assert main(["bench", "train", *flags, "--out", str(tmp_path / "rows.json")]) == 0
    out, err = capsys.readouterr()
    assert "MFU %" in out
    assert "small/1M/RoPE, 1 x 8" in err
    assert json.loads((tmp_path / "rows.json").read_text())[0]["competitor"] == "plait"
    assert main(["bench", "train", "--minutes", "0", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)[0]["note"] == "not run: 0 minutes were over"
    assert main(["bench", "train", "--help"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--models", "small/1M/ROPE-NOP"], "unknown preset"),
        (["--compile", "bot"], "compile: 'bot'; nearest: both"),
        (["--backend", "triton"], "backend = 'triton'"),
        (["--lengths", "0"], "lengths: 0; it must be at least 1"),
        (["--tokens", "0"], "tokens: 0; it must be at least 1"),
        (["--parallel", "fspd"], "parallel: 'fspd'; nearest: fsdp"),
        (["--parallel", "ddp"], "parallel = ddp; a single process runs"),
        (["--parallel", "ddp", "--compile", "true"], "parallel: compile and without are for a single process"),
    ],
)
def test_mistakes(capsys, flags, message):
    assert main(["bench", "train", *flags]) == 2
    assert message in capsys.readouterr().err


def test_two_processes_against_each_alone(tmp_path):
    out = tmp_path / "rows.json"
    flags = ["--models", "small/1M/GDN-NoPE-HH", "--lengths", "16", "--tokens", "32", "--repeats", "2"]
    flags += ["--parallel", "ddp,fsdp", "--device", "cpu", "--out", str(out)]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "plait"]
    done = subprocess.run([*start, "bench", "train", *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("plait fsdp") == 1  # the first process shows rows, for all
    alone, *together = json.loads(out.read_text())
    assert [row["competitor"] for row in (alone, *together)] == ["plait, each alone", "plait ddp", "plait fsdp"]
    for row in together:
        assert row["efficiency"] == pytest.approx(alone["median_ms"] / row["median_ms"])
        assert row["tokens_per_s"] == pytest.approx(2 * 32e3 / row["median_ms"])


def test_peaks_of_devices():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA L40S") != peak_flops("NVIDIA L4")
    assert peak_flops("cpu") is None


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch):
    monkeypatch.undo()
    for rows in bench_train(models=["small/1M/RoPE", "small/1M/SWA-NoPE-LH"], lengths=[256], tokens=512, device="cuda"):
        for row in rows:
            assert row["competitor"] == "fla" or (row["peak_mb"] > 0 and 0 < row["mfu_percent"] < 100), row
