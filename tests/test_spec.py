"""Spec: its JSON form, its file, its hash."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from strategies import layouts, specs

from plait.config import Gdn, Layer, Softmax
from plait.layout import parse_layout
from plait.spec import VERSION, Spec

SHAPE = {"vocab_size": 100, "d_model": 64, "num_layers": 2, "num_heads": 4}


@pytest.fixture
def spec() -> Spec:
    return Spec.from_layout("gdn[expand_v=2] nope", **SHAPE, d_ff=96)


@given(specs())
def test_json_round_trip(spec):
    again = Spec.from_json(json.loads(json.dumps(spec.to_json(), allow_nan=False)))
    assert again == spec
    assert again.hash == spec.hash


def test_file_round_trip(tmp_path, spec):
    path = tmp_path / "spec.json"
    spec.save(path)
    assert Spec.load(path) == spec
    assert Spec.load(str(path)) == spec
    assert [entry.name for entry in tmp_path.iterdir()] == ["spec.json"]


@given(layouts())
def test_layout_property_gives_the_layers_back(drawn):
    text, defaults = drawn
    fields = {key: value for key, value in vars(defaults).items() if key != "overrides"}
    spec = Spec.from_layout(text, vocab_size=10, **fields)
    assert spec.layers == parse_layout(text, defaults)
    assert spec.num_layers == defaults.num_layers
    assert spec.layout


def test_layout_is_the_shortest_pattern():
    def layout(text, **shape):
        return Spec.from_layout(text, **{**SHAPE, **shape}).layout

    assert layout("gdn nope gdn nope gdn nope", num_layers=6) == "gdn nope"
    assert layout("2*(gdn gdn gdn full)", num_layers=8) == "3*gdn full"
    assert layout("6*gdn 2*nope", num_layers=8) == "6*gdn 2*nope"
    assert layout("swa[window_size=128]  full") == "swa[window=128] full"
    assert layout("heads(6:gdn, 2:nope)[scale=true]") == "heads(3:gdn, 1:nope)[scale=true]"
    assert layout("mix(swa[window=4]+gdn)") == "mix(swa[window=4] + gdn)"
    assert layout("mamba2[expand=1] lightning") == "mamba2[num_heads=1] lightning"
    assert layout("lightning[slope_family=linear] gdn") == "lightning[slope_family=linear] gdn"


def test_heads_with_grouped_keys_have_a_layout():
    spec = Spec.from_layout("heads(3:gdn, 1:nope)", **{**SHAPE, "num_heads": 16}, num_kv_heads=4)
    assert spec.layout == "heads(3:gdn, 1:nope)"


def test_hash_names_the_content(spec):
    same = Spec.from_layout("gdn[expand_v=2.0] nope", **SHAPE, d_ff=96)
    assert spec.hash == same.hash
    assert len(spec.hash) == 12
    assert int(spec.hash, 16) >= 0
    others = [dataclasses.replace(spec, **change) for change in ({"vocab_size": 101}, {"norm_eps": 1e-5})]
    others.append(dataclasses.replace(spec, layers=spec.layers[::-1]))
    assert len({spec.hash, *(other.hash for other in others)}) == 4


def test_hash_does_not_tell_2_from_2_0(tmp_path):
    """A Spec built in Python with whole numbers, and the same one read from its file."""
    mixer = Gdn(num_heads=1, num_kv_heads=1, num_v_heads=1, head_dim=8, expand_v=2)
    spec = Spec(vocab_size=4, d_model=8, layers=(Layer(mixer=mixer, mlp_multiplier=1),), embed_multiplier=3)
    spec.save(tmp_path / "spec.json")
    loaded = Spec.load(tmp_path / "spec.json")
    assert loaded == spec
    assert loaded.hash == spec.hash


def test_hash_is_stable():
    """Records name specs by it: a change of this number breaks the link to every old record."""
    mixer = Softmax(num_heads=1, num_kv_heads=1, head_dim=8)
    assert Spec(vocab_size=4, d_model=8, layers=(Layer(mixer=mixer),)).hash == "784611903e92"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "spec: vocab_size = 0; it must be above 0"),
        ({"d_model": -8}, "spec: d_model = -8; it must be above 0"),
        ({"init_std": 0.0}, "spec: init_std = 0.0; it must be above 0"),
        ({"norm_eps": float("inf")}, "spec: norm_eps = inf; it must be above 0"),
        ({"embed_multiplier": float("nan")}, "spec: embed_multiplier = nan; it must be finite"),
        ({"norm": "batch"}, "spec: norm = 'batch'; it must be one of rms, rms1p, layer"),
        ({"context_length": 0}, "spec: context_length = 0; it must be above 0, or none"),
        ({"layers": ()}, "spec: layers is empty"),
        ({"version": VERSION + 1}, f"spec: version {VERSION + 1}; this plait reads up to version {VERSION}: upgrade"),
        ({"version": 0}, "spec: version = 0; it must be above 0"),
    ],
)
def test_refused_values(spec, change, message):
    with pytest.raises(ValueError, match="spec:") as error:
        dataclasses.replace(spec, **change)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab": 3}, "spec: unknown field 'vocab'; nearest: vocab_size; allowed: vocab_size, d_model"),
        ({"vocab_size": None}, "spec.vocab_size: None; it must be a whole number"),
        ({"layers": {}}, "spec.layers: {}; it must be a list"),
        ({"layers": [3]}, "spec.layers[0]: 3; it must be a JSON object"),
        ({"tie_embeddings": "yes"}, "spec.tie_embeddings: 'yes'; it must be true or false"),
        ({"version": "1"}, "spec.version: '1'; it must be a whole number"),
        ({"version": 99, "something": "new"}, "spec: version 99; this plait reads up to version"),
    ],
)
def test_json_errors(spec, change, message):
    with pytest.raises(ValueError, match="spec") as error:
        Spec.from_json({**spec.to_json(), **change})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_missing_field_is_named(spec):
    data = spec.to_json()
    del data["d_model"]
    with pytest.raises(ValueError, match="spec: field 'd_model' is missing"):
        Spec.from_json(data)
    data = spec.to_json()
    del data["layers"][1]["mixer"]["head_dim"]
    with pytest.raises(ValueError, match=r"spec\.layers\[1\]\.mixer: field 'head_dim' is missing"):
        Spec.from_json(data)


def test_fields_with_defaults_may_be_missing(spec):
    data = {key: spec.to_json()[key] for key in ("vocab_size", "d_model", "layers")}
    assert Spec.from_json(data) == spec


def test_files_that_are_no_spec(tmp_path, spec):
    path = tmp_path / "spec.json"
    with pytest.raises(ValueError, match=r"spec\.json: no such file"):
        Spec.load(path)
    spec.save(path)
    whole = path.read_text(encoding="utf-8")
    for cut in (0, 1, len(whole) // 2, len(whole) - 3):
        path.write_text(whole[:cut], encoding="utf-8")
        with pytest.raises(ValueError, match=r"spec\.json: not valid JSON"):
            Spec.load(path)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"spec\.json: \[\]; it must be a JSON object"):
        Spec.load(path)
    with pytest.raises(ValueError, match="cannot be read"):
        Spec.load(tmp_path)


def test_an_interrupted_save_leaves_the_old_file(tmp_path, spec, monkeypatch):
    path = tmp_path / "spec.json"
    spec.save(path)

    def full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        dataclasses.replace(spec, vocab_size=7).save(path)
    assert Spec.load(path) == spec
    assert [entry.name for entry in tmp_path.iterdir()] == ["spec.json"]
