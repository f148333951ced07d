"""Spec: its JSON form, its file, its hash."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
from hypothesis import given
from strategies import layouts, specs

from plait.config import (
    Gdn,
    HeadPart,
    Heads,
    Layer,
    Lightning,
    Mamba2,
    Mix,
    RopeScaling,
    Softmax,
    leaves,
)
from plait.config_json import to_json
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


@pytest.mark.parametrize("layout", ["heads(3:nope, 1:kda)", "heads(2:lightning, 5:swa[window=3], 1:gdn)"])
def test_heads_with_unequal_groups_have_a_layout(layout):
    spec = Spec.from_layout(layout, **{**SHAPE, "num_heads": 8}, num_kv_heads=2)
    assert any(leaf.kv_map for leaf in leaves(spec.layers[0].mixer) if isinstance(leaf, Softmax))
    assert spec.layout == layout
    assert Spec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


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
    """Records name specs by it: a change of these numbers breaks the link to every old record."""
    mixer = Softmax(num_heads=1, num_kv_heads=1, head_dim=8)
    assert Spec(vocab_size=4, d_model=8, layers=(Layer(mixer=mixer),)).hash == "eb2ddf2abb49"
    scaling = RopeScaling(kind="yarn", factor=4, original_length=64)
    rotating = Softmax(num_heads=1, num_kv_heads=1, head_dim=8, rope_theta=1e4, rope_scaling=scaling, sink=True)
    lightning = Lightning(num_heads=2, num_kv_heads=1, head_dim=8, slopes=(0.5, 0.25), norm_eps=1e-5)
    heads = Heads(parts=(HeadPart(mixer=lightning, heads=(0, 2)), HeadPart(mixer=rotating, heads=(1,))), scale=True)
    layers = (Layer(mixer=heads, d_ff=16), Layer(mixer=Mix(mixers=(mixer, Mamba2(num_heads=1, head_dim=8)))))
    assert Spec(vocab_size=4, d_model=8, layers=layers, tie_embeddings=False).hash == "0e699f283569"


@given(specs())
def test_hash_leaves_out_defaults(spec):
    """So a new field with a default leaves the names of old specs as they are."""
    data = json.loads(json.dumps(to_json(spec, defaults=False)))
    assert Spec.from_json(data) == spec
    text = json.dumps(data, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == spec.hash


def test_hash_after_a_new_field():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Later(Softmax):
        new: bool = False

    now, later = (cls(num_heads=1, num_kv_heads=1, head_dim=8) for cls in (Softmax, Later))
    assert to_json(later, defaults=False) == to_json(now, defaults=False)
    assert to_json(dataclasses.replace(later, new=True), defaults=False) != to_json(now, defaults=False)


def test_hash_tells_false_from_0_and_none():
    """Fields of one class hold values of their type only, so equal values are the same value."""
    gdn = Gdn(num_heads=1, num_kv_heads=1, num_v_heads=1, head_dim=8)
    changes = ({}, {"conv_size": 0}, {"output_gate": False}, {"expand_v": 2.0}, {"rope_theta": 1e4})
    stacks = [(Layer(mixer=dataclasses.replace(gdn, **change)),) for change in changes]
    stacks += [(Layer(mixer=gdn), Layer(mixer=gdn))]
    assert len({Spec(vocab_size=4, d_model=8, layers=layers).hash for layers in stacks}) == len(stacks)


OLD = """{"vocab_size": 12, "d_model": 16, "layers": [
{"mixer": {"kind": "gdn", "num_heads": 2, "num_kv_heads": 2, "num_v_heads": 2, "head_dim": 8, "expand_v": 1.0,
"conv_size": 4, "output_gate": true, "allow_neg_eigval": false, "norm_eps": 1e-06}, "d_ff": 24, "mlp": "swiglu",
"norm": "rms", "norm_placement": "pre", "parallel": false, "mixer_multiplier": 1.0, "mlp_multiplier": 1.0,
"norm_eps": 1e-06},
{"mixer": {"kind": "lightning", "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "slopes": [0.5, 0.25],
"gate_rank": 0, "norm_eps": 1e-06}},
{"mixer": {"kind": "heads", "parts": [{"mixer": {"kind": "lightning", "num_heads": 1, "num_kv_heads": 1, "head_dim": 8,
"slopes": [0.5], "gate_rank": 4, "norm_eps": 1e-06}, "heads": [0]}, {"mixer": {"kind": "softmax", "num_heads": 1,
"num_kv_heads": 1, "head_dim": 8, "rope_theta": null, "rope_fraction": 1.0, "rope_interleaved": false,
"rope_scaling": null, "window_size": null, "qk_norm": null, "sink": false, "output_gate": false, "logn": null,
"logn_base": null, "norm_eps": 1e-06}, "heads": [1]}], "norm": false, "scale": false, "gate": false,
"order": "gate_norm", "norm_eps": 1e-06}}],
"tie_embeddings": true, "norm": "rms", "norm_eps": 1e-06, "embed_multiplier": 1.0, "logit_multiplier": 1.0,
"init_std": 0.02, "context_length": null, "version": 1}"""
"""a file of version 1 as it was before kv_map, output_gate of Lightning and rope_theta of the recurrent mixers"""


def test_files_older_than_some_fields_still_load(tmp_path):
    (tmp_path / "spec.json").write_text(OLD)
    spec = Spec.load(tmp_path / "spec.json")
    assert spec.layers[0] == Layer(mixer=Gdn(num_heads=2, num_kv_heads=2, num_v_heads=2, head_dim=8), d_ff=24)
    lightning = Lightning(num_heads=2, num_kv_heads=2, head_dim=8, slopes=(0.5, 0.25), output_gate=None)
    assert spec.layers[1].mixer == lightning
    inner = leaves(spec.layers[2].mixer)
    assert inner[0] == Lightning(num_heads=1, num_kv_heads=1, head_dim=8, slopes=(0.5,), gate_rank=4)
    assert inner[1] == Softmax(num_heads=1, num_kv_heads=1, head_dim=8)
    spec.save(tmp_path / "new.json")
    assert Spec.load(tmp_path / "new.json") == spec


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
