"""`plait bench decode` at a tiny size: both sides compute the same, and what cannot run has a note."""

from __future__ import annotations

import dataclasses
import json

import pytest

from plait.bench import decode
from plait.bench.decode import SHAPES, bench_decode
from plait.cli import main
from plait.model.generate import prefill
from plait.model.lm import LM
from plait.spec import Spec

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
HYBRID = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    for name, shape in SHAPES.items():
        own = shape.config | TINY | (HEADS if shape.spec is None else HYBRID)
        spec = None
        if shape.spec is not None:
            sizes = {"vocab_size": 64, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 48}
            spec = lambda sizes=sizes: Spec.from_layout("gdn nope", **sizes)  # noqa: E731
        monkeypatch.setitem(SHAPES, name, dataclasses.replace(shape, config=own, spec=spec))


@pytest.mark.parametrize("name", SHAPES)
def test_rows(name: str):
    rows = bench_decode(models=[name], contexts=[20], batches=[2], steps=2, repeats=1)
    sides = ("plait", "transformers", "transformers generate")
    assert [(row["pass"], row["competitor"]) for row in rows] == [
        (kind, side) for kind in ("prefill", "one token") for side in sides
    ]
    for row in rows:
        assert row["case"] == name
        if row["competitor"] != "transformers generate":  # the difference of two times
            assert row["median_ms"] > 0
        assert row["tokens_per_s"] == pytest.approx(2e3 * (20 if row["pass"] == "prefill" else 1) / row["median_ms"])
        if row["competitor"] == "transformers" and row["pass"] == "prefill" and SHAPES[name].spec is None:
            assert row["difference"] < 1e-5
        assert ("bar" in row) == (name == "smollm2-135m" and row["competitor"] != "plait")
    ours, theirs = rows[3], rows[4]
    if SHAPES[name].spec is None:  # transformers' cache has the tokens so far, ours has room for the rest
        room = 20 + decode.WARM_UP + 2
        assert ours["cache_mb"] == pytest.approx(theirs["cache_mb"], rel=2 / room)


def test_what_cannot_run_has_a_note(monkeypatch):
    def fails(model, tokens, cache):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(decode, "prefill", fails)
    rows = bench_decode(models=["smollm2-135m"], contexts=[20], batches=[1], steps=2, repeats=1)
    assert rows[0]["note"] == "out of memory"
    assert "ratio" not in rows[1]
    assert prefill is not fails


def test_command(capsys, tmp_path):
    flags = ["--contexts", "9", "--steps", "1", "--repeats", "1"]
    assert main(["bench", "decode", *flags, "--out", str(tmp_path / "rows.json"), "--modes", "plain"]) == 0
    out, err = capsys.readouterr()
    assert "x plait" in out
    assert "smollm2-135m, 1 x 9" in err
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows[0]["competitor"] == "plait plain"
    assert main(["bench", "decode", "--minutes", "0", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)[0]["note"] == "not run: 0 minutes were over"
    assert main(["bench", "decode", "--help"]) == 0


def test_mistakes(capsys):
    assert main(["bench", "decode", "--model", "smollm3"]) == 2
    assert "nearest: smollm2-135m" in capsys.readouterr().err
    assert main(["bench", "decode", "--modes", "plane"]) == 2
    assert "modes: 'plane' is unknown; nearest: plain" in capsys.readouterr().err
    assert main(["bench", "decode", "--contexts", "0"]) == 2
    assert "contexts: 0; it must be at least 1" in capsys.readouterr().err


def test_the_hybrid_has_the_sizes_of_its_preset(monkeypatch):
    monkeypatch.undo()
    shape = SHAPES["gdn-1b"]
    assert shape.spec is not None
    spec = shape.spec()
    config = shape.config
    assert spec.num_layers == config["num_hidden_layers"] == len(config["layer_types"])
    assert (spec.d_model, spec.vocab_size) == (config["hidden_size"], config["vocab_size"])
    assert [layer.mixer.kind == "gdn" for layer in spec.layers] == [
        kind == "linear_attention" for kind in config["layer_types"]
    ]
    assert LM(spec, device="meta").num_params > 1e9
