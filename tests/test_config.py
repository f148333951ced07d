"""Configs: what they refuse, and their JSON form."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import layers, mixers

from plait.config import (
    Gdn,
    Gla,
    HeadPart,
    Heads,
    Kda,
    Layer,
    Lightning,
    Mamba2,
    Mix,
    RopeScaling,
    Softmax,
    family,
    select_layers,
)
from plait.config_json import from_json, to_json
from plait.fields import fit, suggest

SOFTMAX = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
GDN = {"num_heads": 4, "num_kv_heads": 4, "num_v_heads": 4, "head_dim": 16}
SIMPLE = {"num_heads": 4, "head_dim": 16}
LIGHTNING = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "slopes": (0.5, 0.25)}
INF, NAN = math.inf, math.nan
MIX = {"mixers": (Softmax(**SOFTMAX), Gdn(**GDN))}
ROTATING = ((Gdn, GDN), (Gla, {**SIMPLE, "expand_k": 1.0}), (Kda, SIMPLE), (Lightning, LIGHTNING))
WRONG_KV_MAPS = ((), (0, 0, 1), (0, 0, 1, 1, 1), (0, 0, 0, 0), (0, 1, 0, 1), (0, 0, 1, 2), (-1, 0, 0, 1))
"""of 4 heads and 2 KV heads: too short, too long, one left out, out of order, one too many, below 0"""
KV_MAP = "a KV head from 0 to 1 for each of 4 heads, in rising order, none left out"
YARN = {"kind": "yarn", "factor": 2.0, "original_length": 64}
LLAMA3 = {**YARN, "kind": "llama3"}


@pytest.mark.parametrize(
    ("cls", "base", "field", "value", "allowed"),
    [
        (Softmax, SOFTMAX, "num_heads", 0, "a number above 0"),
        (Softmax, SOFTMAX, "head_dim", -1, "a number above 0"),
        (Softmax, SOFTMAX, "num_kv_heads", 3, "a divisor of num_heads = 4"),
        (Softmax, SOFTMAX, "num_kv_heads", 0, "a divisor of num_heads = 4"),
        (Softmax, SOFTMAX, "window_size", 0, "at least 1, or none"),
        (Softmax, SOFTMAX, "rope_theta", 1.0, "above 1, or none"),
        (Softmax, SOFTMAX, "rope_theta", INF, "above 1, or none"),
        (Softmax, SOFTMAX, "rope_fraction", 0.0, "above 0 and at most 1"),
        (Softmax, SOFTMAX, "rope_fraction", NAN, "above 0 and at most 1"),
        (Softmax, {**SOFTMAX, "rope_theta": 1e4}, "rope_fraction", 0.07, "a share of head_dim = 16 that is an even"),
        (Softmax, {**SOFTMAX, "rope_theta": 1e4}, "rope_fraction", 0.2, "a share of head_dim = 16 that is an even"),
        (Softmax, SOFTMAX, "qk_norm", "heads", "one of head, full (nearest: head), or none"),
        (Softmax, SOFTMAX, "logn", "log", "one of loglen, loga (nearest: loga, loglen), or none"),
        (Softmax, {**SOFTMAX, "logn": "loga"}, "logn_base", None, "above 1 with logn = loga"),
        (Softmax, {**SOFTMAX, "logn": "loglen"}, "logn_base", 1.0, "above 1 with logn = loglen"),
        (Softmax, SOFTMAX, "norm_eps", INF, "a finite number above 0"),
        (Gdn, GDN, "num_kv_heads", 3, "a divisor of num_heads = 4"),
        (Gdn, GDN, "num_v_heads", 6, "num_kv_heads = 4, or a multiple of it when num_heads = num_kv_heads"),
        (Gdn, {**GDN, "num_kv_heads": 2}, "num_v_heads", 4, "num_kv_heads = 2, or a multiple"),
        (Gdn, GDN, "conv_size", 1, "0 (none) or at least 2"),
        (Gdn, GDN, "expand_v", 0.3, "a factor that takes head_dim = 16 to a whole number above 0"),
        (Gdn, GDN, "expand_v", 0.0, "a factor that takes head_dim = 16 to a whole number above 0"),
        (Gdn, GDN, "expand_v", INF, "a factor that takes head_dim = 16 to a whole number above 0"),
        (Gdn, GDN, "expand_v", NAN, "a factor that takes head_dim = 16 to a whole number above 0"),
        (Gla, SIMPLE, "expand_k", 0.01, "a factor that takes head_dim = 16 to a whole number above 0"),
        (Gla, SIMPLE, "gate_rank", 0, "a number above 0"),
        (Gla, SIMPLE, "conv_size", -4, "0 (none) or at least 2"),
        (Kda, SIMPLE, "dt_init", "ones", "one of zero, log_uniform"),
        (Kda, SIMPLE, "expand_v", -2.0, "a factor that takes head_dim = 16 to a whole number above 0"),
        (Mamba2, SIMPLE, "num_groups", 3, "a divisor of num_heads = 4"),
        (Mamba2, SIMPLE, "state_dim", 0, "a number above 0"),
        (Mamba2, SIMPLE, "norm_groups", 3, "a divisor of num_heads = 4, 0 (no norm), or none"),
        (Mamba2, SIMPLE, "norm_groups", -1, "a divisor of num_heads = 4, 0 (no norm), or none"),
        (Mamba2, SIMPLE, "gate_order", "norm", "one of gate_norm, norm_gate"),
        (Lightning, LIGHTNING, "gate_rank", -1, "at least 1 (for no gate, output_gate is none)"),
        (Lightning, LIGHTNING, "gate_rank", 0, "at least 1 (for no gate, output_gate is none)"),
        (Lightning, LIGHTNING, "num_kv_heads", 3, "a divisor of num_heads = 2"),
        (Lightning, LIGHTNING, "activation", "relu", "one of silu, or none"),
        (Lightning, LIGHTNING, "output_norm", "rms", "one of head, full, or none"),
        (Lightning, LIGHTNING, "output_gate", "low", "one of low_rank, full, or none"),
        (Lightning, {**LIGHTNING, "kv_map": (0, 0)}, "num_kv_heads", 0, "a number above 0"),
        (Mix, MIX, "multipliers", (1.0, 2.0), "none with fuse = mean"),
        (Mix, {**MIX, "fuse": "project"}, "multipliers", (1.0,), "one for each of 2 mixers, or none"),
        (Mix, {**MIX, "fuse": "project"}, "multipliers", (), "one for each of 2 mixers, or none"),
        (Mix, {**MIX, "fuse": "project"}, "multipliers", (1.0, NAN), "finite numbers"),
        *((Softmax, SOFTMAX, "kv_map", kv_map, KV_MAP) for kv_map in WRONG_KV_MAPS),
        (Lightning, LIGHTNING, "kv_map", (1, 0), "a KV head from 0 to 1 for each of 2 heads, in rising order"),
        *((cls, base, "rope_theta", theta, "above 1, or none") for cls, base in ROTATING for theta in (1.0, INF, NAN)),
        *(
            (cls, {**base, "head_dim": 5}, "rope_theta", 1e4, "none, as keys have an odd number of channels (5)")
            for cls, base in ROTATING
        ),
        (Gla, {**SIMPLE, "head_dim": 6, "expand_k": 0.5}, "rope_theta", 1e4, "an odd number of channels (3)"),
        (Lightning, LIGHTNING, "slopes", (0.5,), "one number for each of 2 heads"),
        (Lightning, LIGHTNING, "slopes", (0.5, -1.0), "numbers of 0 or above"),
        (Lightning, LIGHTNING, "slopes", (0.5, NAN), "numbers of 0 or above"),
        (Layer, {"mixer": Softmax(**SOFTMAX)}, "d_ff", -1, "0 (no MLP) or above"),
        (
            Layer,
            {"mixer": Softmax(**SOFTMAX)},
            "norm",
            "rmsnorm",
            "one of rms, rms1p, layer, layer_nobias",
        ),
        (Layer, {"mixer": Softmax(**SOFTMAX)}, "mlp", "silu", "one of swiglu, geglu, geglu_tanh, gelu, relu2"),
        (Layer, {"mixer": Softmax(**SOFTMAX)}, "norm_placement", "front", "one of pre, post, sandwich"),
        (Layer, {"mixer": Softmax(**SOFTMAX)}, "mlp_multiplier", NAN, "finite"),
        (Layer, {"mixer": Softmax(**SOFTMAX)}, "norm_eps", 0.0, "a finite number above 0"),
        (RopeScaling, {"kind": "linear", "factor": 2.0}, "kind", "ntk", "one of linear, yarn, llama3"),
        (RopeScaling, {"kind": "linear"}, "factor", 0.5, "at least 1"),
        (RopeScaling, {"kind": "linear"}, "factor", NAN, "at least 1"),
        (RopeScaling, {"kind": "linear", "factor": 2.0}, "attention_factor", 0.0, "above 0, or none"),
        (RopeScaling, YARN, "beta_fast", 1.0, "above beta_slow = 1.0"),
        (RopeScaling, YARN, "beta_slow", 0.0, "above 0"),
        (RopeScaling, LLAMA3, "high_freq_factor", 1.0, "above low_freq_factor = 1.0"),
        (RopeScaling, LLAMA3, "low_freq_factor", NAN, "above 0"),
        (RopeScaling, {"kind": "yarn", "factor": 2.0}, "original_length", None, "the length trained on: yarn needs it"),
        (RopeScaling, {"kind": "llama3", "factor": 2.0}, "original_length", -5, "the length trained on: llama3"),
    ],
)
def test_refused_values_are_named_with_what_is_allowed(cls, base, field, value, allowed):
    with pytest.raises(ValueError, match="must be") as error:
        cls(**{**base, field: value})
    message = str(error.value)
    assert f": {field} = " in message
    assert allowed in message
    assert "\n" not in message
    assert len(message) < 400


def test_parallel_blocks_need_a_norm_before_and_an_mlp():
    mixer = Softmax(**SOFTMAX)
    for fields in ({"d_ff": 0}, {"d_ff": 64, "norm_placement": "post"}):
        with pytest.raises(ValueError, match="parallel = True; it needs norm_placement = pre and an MLP"):
            Layer(mixer=mixer, parallel=True, **fields)


def part(cls=Softmax, heads=(0, 1), **fields) -> HeadPart:
    base = {"num_heads": len(heads), "head_dim": 16}
    base |= {"num_kv_heads": len(heads)} if cls in (Softmax, Gdn) else {}
    base |= {"num_v_heads": len(heads)} if cls is Gdn else {}
    return HeadPart(mixer=cls(**{**base, **fields}), heads=heads)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((part(),), "heads: 1 part; it takes two or more"),
        ((part(), part(heads=(1, 2))), "head 1 is named more than once, head 3 not at all; each of 0 to 3"),
        ((part(), part(heads=(3, 4))), "heads: a part names head 4; the parts have 4 heads, 0 to 3"),
        ((part(), part(heads=(2, -1))), "heads: a part names head -1; the parts have 4 heads, 0 to 3"),
        ((part(), part(heads=(0, 0))), "head 0 is named more than once, head 2 not at all; each of 0 to 3"),
        ((part(), part(Gdn, heads=(2, 3), num_v_heads=4)), r"gdn has 4 heads but is given 2: \[2, 3\]"),
        (
            (part(), part(Kda, heads=(2, 3), expand_v=2.0)),
            r"value sizes per head differ \(kda 32, nope 16\); they must be equal: change",
        ),
        ((part(heads=tuple(range(100))), part(heads=(5,))), "head 5 is named more than once, head 100 not at all"),
    ],
)
def test_head_maps_that_do_not_fit(parts, message):
    with pytest.raises(ValueError, match=message) as error:
        Heads(parts=parts)
    assert len(str(error.value)) < 400


def test_mixes_that_do_not_fit():
    softmax, gdn = Softmax(**SOFTMAX), Gdn(**GDN)
    with pytest.raises(ValueError, match="mix: 1 mixer; it takes two or more"):
        Mix(mixers=(softmax,))
    with pytest.raises(ValueError, match="fuse = 'avg'; it must be one of mean, sum, scale, gate, project"):
        Mix(mixers=(softmax, gdn), fuse="avg")
    two = dataclasses.replace(gdn, num_heads=2, num_kv_heads=2, num_v_heads=2)
    with pytest.raises(ValueError, match=r"mix: the mixers have \[4, 2\] heads; fuse = mean needs the same number"):
        Mix(mixers=(softmax, two))
    assert Mix(mixers=(softmax, two), fuse="project").num_out_heads == 4


def test_configs_are_frozen_and_keyword_only():
    softmax = Softmax(**SOFTMAX)
    with pytest.raises(dataclasses.FrozenInstanceError):
        softmax.num_heads = 8
    with pytest.raises(TypeError):
        Softmax(4, 2, 16)
    assert hash(softmax) == hash(Softmax(**SOFTMAX))


# JSON.


@given(layers())
def test_json_round_trip(layer):
    text = json.dumps(to_json(layer), allow_nan=False)
    assert from_json(Layer, json.loads(text), "layer") == layer


@given(mixers())
def test_json_names_the_kind_of_a_mixer_first(mixer):
    assert next(iter(to_json(mixer))) == "kind"
    assert to_json(mixer)["kind"] == type(mixer).kind


JUNK = [None, True, 0, -1, 10**20, 10**400, 0.5, INF, NAN, "", "softmax", "x" * 500, "a\nb", [], [[]], {}, {"kind": []}]


def _places(data: Any, path: tuple = ()) -> list[tuple]:
    here = [path] if path else []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return here + [place for key, item in items for place in _places(item, (*path, key))]


@given(layers(), st.data())
def test_broken_json_is_one_readable_line(layer, data):
    """Anything in place of any value: read as a layer, or a ValueError that says where."""
    broken = copy.deepcopy(to_json(layer))
    *outer, last = data.draw(st.sampled_from(_places(broken)))
    target = broken
    for key in outer:
        target = target[key]
    action = data.draw(st.sampled_from(["replace", "delete", "rename"]))
    if action == "replace" or isinstance(target, list):
        target[last] = data.draw(st.sampled_from(JUNK))
    elif action == "delete":
        del target[last]
    else:
        target[f"{last}_"] = target.pop(last)
    try:
        read = from_json(Layer, broken, "layer")
    except ValueError as error:
        assert str(error).startswith("layer")
        assert "\n" not in str(error)
        assert len(str(error)) < 400
    else:
        assert from_json(Layer, to_json(read), "layer") == read


NOPE_JSON = {"kind": "softmax", **SOFTMAX, "num_heads": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_fff": 8}, "layer: unknown field 'd_fff'; nearest: d_ff; allowed: mixer, d_ff, mlp, mlp_bias, norm"),
        ({"d_ff": 8.5}, "layer.d_ff: 8.5; it must be a whole number"),
        ({"d_ff": "8"}, "layer.d_ff: '8'; it must be a whole number"),
        ({"d_ff": True}, "layer.d_ff: True; it must be a whole number"),
        ({"d_ff": 2**60}, "layer.d_ff: 1152921504606846976; it must be a whole number"),
        ({"d_ff": None}, "layer.d_ff: None; it must be a whole number"),
        ({"norm_eps": NAN}, "layer.norm_eps: nan; it must be a finite number"),
        ({"norm_eps": "1e-6"}, "layer.norm_eps: '1e-6'; it must be a finite number"),
        ({"parallel": 1}, "layer.parallel: 1; it must be true or false"),
        ({"norm": "rmsnrm"}, "layer.norm: 'rmsnrm'; it must be one of rms, rms1p, layer, layer_nobias (nearest: rms"),
        ({"mixer": "full"}, "layer.mixer: kind None; allowed: softmax, gdn, gla, kda, mamba2, lightning, heads, mix"),
        ({"mixer": {"kind": "sofmax"}}, "layer.mixer: kind 'sofmax'; nearest: softmax; allowed: "),
        ({"mixer": {"kind": ["x"]}}, "layer.mixer: kind ['x']; allowed: softmax"),
        ({"mixer": {"kind": "gla"}}, "layer.mixer: field 'num_heads' is missing"),
        (
            {"mixer": {"kind": "gla", **SIMPLE, "conv_size": 1}},
            "layer.mixer: gla: conv_size = 1; it must be 0 (none) or at least 2",
        ),
        (
            {"mixer": {"kind": "softmax", **SOFTMAX, "rope_scaling": 3}},
            "layer.mixer.rope_scaling: 3; it must be a JSON",
        ),
        (
            {"mixer": {"kind": "softmax", **SOFTMAX, "rope_scaling": {"kind": "ntk", "factor": 2}}},
            "layer.mixer.rope_scaling.kind: 'ntk'; it must be one of linear, yarn, llama3",
        ),
        (
            {"mixer": {"kind": "softmax", **SOFTMAX, "kv_map": [0, 0, 1]}},
            f"layer.mixer: softmax: kv_map = (0, 0, 1); it must be {KV_MAP}",
        ),
        (
            {"mixer": {"kind": "softmax", **SOFTMAX, "kv_map": [0, 0, 0.5, 1]}},
            "layer.mixer.kv_map[2]: 0.5; it must be a whole number",
        ),
        ({"mixer": {"kind": "softmax", **SOFTMAX, "kv_map": 2}}, "layer.mixer.kv_map: 2; it must be a list"),
        (
            {"mixer": {"kind": "heads", "parts": [{"mixer": NOPE_JSON, "heads": heads} for heads in ([0, 1], [1, 2])]}},
            "layer.mixer: heads: head 1 is named more than once, head 3 not at all; each of 0 to 3 must be named once",
        ),
        (
            {"mixer": {"kind": "heads", "parts": [{"mixer": NOPE_JSON, "heads": heads} for heads in ([0, 1], [2, 4])]}},
            "layer.mixer: heads: a part names head 4; the parts have 4 heads, 0 to 3",
        ),
        (
            {"mixer": {"kind": "heads", "parts": [{"mixer": NOPE_JSON, "heads": [0]}] * 2}},
            "layer.mixer: heads: nope has 2 heads but is given 1: [0]",
        ),
        (
            {"mixer": {"kind": "lightning", **LIGHTNING, "output_gate": "low_rank", "gate_rank": 0}},
            "layer.mixer: lightning: gate_rank = 0; it must be at least 1 (for no gate, output_gate is none)",
        ),
        ({"mixer": {"kind": "lightning", **LIGHTNING, "slopes": 0.5}}, "layer.mixer.slopes: 0.5; it must be a list"),
        (
            {"mixer": {"kind": "lightning", **LIGHTNING, "slopes": [0.5, "x"]}},
            "layer.mixer.slopes[1]: 'x'; it must be a finite number",
        ),
        (
            {"mixer": {"kind": "mix", "mixers": [{"kind": "gla", **SIMPLE}, {"kind": "mix", "mixers": []}]}},
            "layer.mixer.mixers[1]: kind 'mix'; allowed: softmax, gdn, gla, kda, mamba2, lightning",
        ),
    ],
)
def test_json_errors(change, message):
    data = {**to_json(Layer(mixer=Softmax(**SOFTMAX))), **change}
    with pytest.raises(ValueError, match="layer") as error:
        from_json(Layer, data, "layer")
    assert str(error.value).startswith(message)


def test_fields_with_their_defaults_may_be_left_out():
    layer = Layer(mixer=Softmax(**SOFTMAX, window_size=3), d_ff=0, norm_eps=1e-6, mlp_multiplier=2)
    short = to_json(layer, defaults=False)
    assert short == {"mixer": {"kind": "softmax", **SOFTMAX, "window_size": 3}, "mlp_multiplier": 2}


@given(layers())
def test_json_without_defaults_reads_as_the_same(layer):
    assert from_json(Layer, json.loads(json.dumps(to_json(layer, defaults=False))), "layer") == layer


def test_old_files_of_lightning_without_a_gate():
    """Before output_gate, gate_rank = 0 was no gate."""
    old = {"kind": "lightning", **LIGHTNING, "slopes": [0.5, 0.25], "norm_eps": 1e-6}
    for rank, want in ((0, {"output_gate": None}), (8, {"gate_rank": 8})):
        layer = from_json(Layer, {"mixer": {**old, "gate_rank": rank}}, "layer")
        assert layer.mixer == Lightning(**LIGHTNING, **want)


def test_a_whole_number_passes_as_a_float():
    data = to_json(Layer(mixer=Softmax(**SOFTMAX), mlp_multiplier=2.0))
    layer = from_json(Layer, {**data, "mlp_multiplier": 2}, "layer")
    assert type(layer.mlp_multiplier) is float
    with pytest.raises(ValueError, match="a finite number"):
        fit(float, 10**400)


def test_data_that_is_no_object():
    for data in (None, 3, "x", [1]):
        with pytest.raises(ValueError, match="it must be a JSON object"):
            from_json(Layer, data, "layer")


# Names.


def test_families():
    softmax = Softmax(**SOFTMAX)
    full = dataclasses.replace(softmax, rope_theta=1e4)
    swa = dataclasses.replace(full, window_size=8)
    gdn = Gdn(**GDN)
    assert [family(mixer) for mixer in (softmax, full, swa, gdn)] == ["nope", "full", "swa", "gdn"]
    assert family(Heads(parts=(part(), part(Gdn, heads=(2, 3))))) == "heads(nope, gdn)"
    assert family(Mix(mixers=(swa, gdn))) == "mix(swa + gdn)"


def test_select_layers():
    softmax, gdn = Softmax(**SOFTMAX), Gdn(**GDN)
    stack = tuple(Layer(mixer=mixer) for mixer in (gdn, softmax, Mix(mixers=(softmax, gdn)), softmax))
    assert select_layers(stack, ["nope"]) == (1, 3)
    assert select_layers(stack, ["softmax"]) == (1, 3)
    assert select_layers(stack, ["recurrent"]) == (0, 2)
    assert select_layers(stack, ["gdn", "nope"]) == (0, 1, 3)
    assert select_layers(stack, []) == ()
    with pytest.raises(ValueError, match=r"family 'gnd': no layer has it; nearest: gdn; allowed: gdn, mix"):
        select_layers(stack, ["gnd"])


def test_suggestions_ignore_case():
    assert suggest("GDN", ["full", "gdn"]) == "nearest: gdn; allowed: full, gdn"
    assert suggest("zzz", ["full", "gdn"]) == "allowed: full, gdn"


@given(mixers())
def test_shapes_that_others_rely_on(mixer):
    assert mixer.num_out_heads >= mixer.num_heads > 0
    assert mixer.value_dim > 0
    assert isinstance(mixer.recurrent, bool)
