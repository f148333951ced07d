"""Layout strings: meaning, errors, and the way back."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import defaults, layers, layouts

from plait.config import Gdn, Heads, Layer, Lightning, Mamba2, Mix, Mixer, Softmax, family
from plait.layout import Defaults, LayoutError, format_layout, parse_layout
from plait.rope import RopeScaling

BASE = Defaults(d_model=64, num_layers=4, num_heads=8, d_ff=96)


def parse(text: str, **changes: Any) -> tuple[Layer, ...]:
    return parse_layout(text, dataclasses.replace(BASE, **changes))


def one(text: str, **changes: Any) -> Any:
    """The mixer of a layout of one layer."""
    return parse(text, **{"num_layers": 1, **changes})[0].mixer


def names(text: str, num_layers: int) -> list[str]:
    return [family(layer.mixer) for layer in parse(text, num_layers=num_layers)]


# Meaning.


@pytest.mark.parametrize(
    ("text", "num_layers", "families"),
    [
        ("full", 3, ["full"] * 3),
        ("swa[window=128] full", 4, ["swa", "full"] * 2),
        ("3*swa[window=128] nope", 4, ["swa"] * 3 + ["nope"]),
        ("nope 3*kda", 8, ["nope", "kda", "kda", "kda"] * 2),
        ("6*gdn 2*nope", 8, ["gdn"] * 6 + ["nope"] * 2),
        ("2*(gla 2*lightning) full", 7, ["gla", "lightning", "lightning"] * 2 + ["full"]),
        ("((mamba2 full) gdn)", 3, ["mamba2", "full", "gdn"]),
        ("2*(2*(gdn) full)", 6, ["gdn", "gdn", "full"] * 2),
        ("heads(3:gdn, 1:nope) full", 2, ["heads(gdn, nope)", "full"]),
        ("2*mix(swa[window=4096] + gdn + kda)", 2, ["mix(swa + gdn + kda)"] * 2),
        ("full[window=8] nope[window=8] swa[window=8, rope_theta=none]", 3, ["swa"] * 3),
        ("full[rope_theta=none]", 1, ["nope"]),
    ],
)
def test_patterns(text, num_layers, families):
    assert names(text, num_layers) == families


def test_what_the_names_mean():
    assert one("full") == Softmax(num_heads=8, num_kv_heads=8, head_dim=8, rope_theta=10_000.0)
    assert one("nope") == Softmax(num_heads=8, num_kv_heads=8, head_dim=8)
    assert one("swa[window=5]") == dataclasses.replace(one("full"), window_size=5)
    assert one("swa[window_size=5]") == one("swa[window=5]")
    assert one("gdn") == Gdn(num_heads=8, num_kv_heads=8, num_v_heads=8, head_dim=8)


def test_options_reach_the_mixer_and_the_layer():
    (layer,) = parse("gdn[expand_v=2, conv_size=0, d_ff=32, norm=layer, mixer_multiplier=0.5]", num_layers=1)
    assert isinstance(layer.mixer, Gdn)
    assert (layer.mixer.expand_v, layer.mixer.conv_size) == (2.0, 0)
    assert (layer.d_ff, layer.norm, layer.mixer_multiplier, layer.mlp) == (32, "layer", 0.5, "swiglu")
    (layer,) = parse("heads(1:gdn, 1:nope)[norm=true, d_ff=0]", num_layers=1)
    assert isinstance(layer.mixer, Heads)
    assert (layer.mixer.norm, layer.norm, layer.d_ff) == (True, "rms", 0)
    (layer,) = parse("mix(full + gdn)[fuse=gate, norm=layer, parallel=true]", num_layers=1)
    assert isinstance(layer.mixer, Mix)
    assert (layer.mixer.fuse, layer.norm, layer.parallel) == ("gate", "layer", True)


def test_a_name_that_both_have_is_the_mixers():
    (layer,) = parse("gdn[norm_eps=0.001]", num_layers=1)
    assert (layer.mixer.norm_eps, layer.norm_eps) == (0.001, 1e-6)


def test_defaults_reach_every_layer():
    given = Defaults(
        d_model=60, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16, norm_eps=1e-5, rope_theta=5e5, norm="rms1p"
    )
    for layer in parse_layout("full lightning", given):
        assert isinstance(layer.mixer, Softmax | Lightning)
        assert (layer.mixer.num_kv_heads, layer.mixer.head_dim, layer.mixer.norm_eps) == (2, 16, 1e-5)
        assert (layer.norm, layer.norm_eps, layer.d_ff) == ("rms1p", 1e-5, 0)
    assert one("full", rope_theta=5e5).rope_theta == 5e5
    assert one("nope", rope_theta=5e5).rope_theta is None
    assert one("gdn", num_kv_heads=2).num_kv_heads == 8


def test_groups_of_gdn_follow_each_other():
    gdn = one("gdn[num_kv_heads=2]")
    assert (gdn.num_heads, gdn.num_kv_heads, gdn.num_v_heads) == (8, 2, 2)
    gdn = one("gdn[num_v_heads=16]")
    assert (gdn.num_heads, gdn.num_kv_heads, gdn.num_v_heads) == (8, 8, 16)
    gdn = one("gdn[num_heads=3]")
    assert (gdn.num_heads, gdn.num_kv_heads, gdn.num_v_heads) == (3, 3, 3)


def test_heads_of_mamba2_follow_from_its_width():
    assert one("mamba2", d_model=96) == Mamba2(num_heads=3)
    assert one("mamba2[expand=1]").num_heads == 1
    assert one("mamba2[head_dim=16]").num_heads == 8
    assert one("mamba2[num_heads=5]").num_heads == 5
    assert one("mix(mamba2[head_dim=8] + full)").mixers[0].num_heads == 8
    assert [part.mixer.num_heads for part in one("heads(3:mamba2[head_dim=8], 1:nope)").parts] == [6, 2]


def test_slopes_of_lightning_are_numbers():
    first, last = (layer.mixer for layer in parse("lightning", num_layers=2))
    assert isinstance(first, Lightning)
    assert isinstance(last, Lightning)
    alibi = [2 ** (-h - 1) for h in range(8)]
    assert first.slopes == pytest.approx([slope * (1 + 1e-5) for slope in alibi])
    assert max(last.slopes) < 3e-5  # the last layer hardly forgets
    first, last = (layer.mixer for layer in parse("lightning[slope_family=linear]", num_layers=2))
    assert isinstance(first, Lightning)
    assert isinstance(last, Lightning)
    assert first.slopes == pytest.approx(range(8))
    assert last.slopes == pytest.approx([h / 2 for h in range(8)])


def test_shares_are_a_ratio_over_the_heads_in_order():
    heads = one("heads(3:gdn, 1:nope)")
    assert [part.heads for part in heads.parts] == [tuple(range(6)), (6, 7)]
    assert [part.mixer.num_heads for part in heads.parts] == [6, 2]
    assert one("heads(6:gdn, 2:nope)") == one("heads(12:gdn, 4:nope)") == heads
    assert [len(part.heads) for part in one("heads(1:gdn, 2:nope, 1:kda)").parts] == [2, 4, 2]


def test_shares_keep_whole_kv_groups():
    heads = one("heads(3:gdn, 1:nope)", num_kv_heads=4)
    assert heads.parts[1].mixer.num_kv_heads == 1
    assert one("heads(1:gdn, 3:nope[num_kv_heads=2])", num_kv_heads=2).parts[1].mixer.num_kv_heads == 2
    assert one("heads(1:gdn, 1:nope)", num_kv_heads=1).parts[1].mixer.num_kv_heads == 1
    assert one("heads(1:gdn, 3:kda)", num_kv_heads=2).parts[1].heads == (2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize("name", ["nope", "full", "swa[window=3]", "lightning"])
@pytest.mark.parametrize(
    ("text", "num_kv_heads", "groups"),
    [
        ("heads(1:gdn, 3:{})", 2, [(2, (0, 0, 1, 1, 1, 1))]),
        ("heads(3:{}, 1:gdn)", 2, [(2, (0, 0, 0, 0, 1, 1))]),
        ("heads(3:{}, 5:kda)", 4, [(2, (0, 0, 1))]),
        ("heads(1:gdn, 6:{}, 1:kda)", 4, [(4, (0, 1, 1, 2, 2, 3))]),
        ("heads(3:{}, 5:nope)", 2, [(1, None), (2, (0, 1, 1, 1, 1))]),
        ("heads(1:gdn, 6:{}, 1:kda)", 2, [(2, None)]),  # three of each group
        ("heads(1:{}, 7:kda)", 1, [(1, None)]),
        ("heads(3:{}, 1:gdn)", 8, [(6, None)]),
    ],
)
def test_parts_take_what_they_need_of_the_kv_groups(name, text, num_kv_heads, groups):
    """Unequal groups follow from where the heads are, and the string stays short."""
    text = text.format(name)
    layers = parse(text, num_kv_heads=num_kv_heads)
    mixers = [p.mixer for p in layers[0].mixer.parts if isinstance(p.mixer, Softmax | Lightning)]
    assert [(mixer.num_kv_heads, mixer.kv_map) for mixer in mixers] == groups
    again, common = format_layout(layers, 64)
    assert again == text
    assert parse_layout(again, common) == layers


def test_unequal_groups_decide_which_kv_heads_are_common():
    """They can only follow from the defaults; other mixers can name theirs."""
    layers = parse("heads(3:nope, 1:kda) nope[num_kv_heads=4] swa[window=2, num_kv_heads=4] gdn", num_kv_heads=2)
    text, common = format_layout(layers, 64)
    assert text == "heads(3:nope, 1:kda) nope[num_kv_heads=4] swa[num_kv_heads=4, window=2] gdn"
    assert common.num_kv_heads == 2
    unlike = (layers[0], parse("heads(3:nope, 5:kda)", num_kv_heads=4)[0])
    with pytest.raises(ValueError, match="layers: they hold more than a layout string can say; write them as JSON"):
        format_layout(unlike, 64)


@pytest.mark.parametrize(
    ("text", "norm_groups"),
    [
        ("heads(1:mamba2[head_dim=8], 1:nope)", 4),
        ("heads(3:mamba2[head_dim=8], 1:nope)", 6),
        ("heads(1:mamba2[head_dim=8, norm_groups=2], 1:nope)", 2),
        ("heads(1:mamba2[head_dim=8, norm_groups=0], 1:nope)", 0),
        ("heads(1:mamba2[head_dim=8, norm_groups=none], 1:nope)", None),
        ("heads(1:mamba2[head_dim=8, num_groups=2, gate_order=norm_gate], 1:gdn)[norm=true, gate=true]", 4),
    ],
)
def test_mamba2_in_heads_norms_each_head_by_itself(text, norm_groups):
    layers = parse(text, num_layers=1)
    assert layers[0].mixer.parts[0].mixer.norm_groups == norm_groups
    again, common = format_layout(layers, 64)
    assert parse_layout(again, common) == layers
    assert again in (text, text.replace("num_groups=2, gate_order=norm_gate", "gate_order=norm_gate, num_groups=2"))


def test_mamba2_of_heads_alone_norms_by_its_groups():
    assert one("mamba2[num_groups=2]").norm_groups is None
    assert one("mix(mamba2[head_dim=8] + nope)").mixers[0].norm_groups is None


def test_overrides_are_options_of_every_mixer_of_a_name():
    overrides = {"gdn": {"expand_v": 2, "d_ff": 8, "norm_eps": 1e-3}, "swa": {"window": 9}, "mamba2": {"expand": 1}}
    given = dataclasses.replace(BASE, num_layers=1, overrides=overrides)
    plain = dataclasses.replace(BASE, num_layers=1)
    assert parse_layout("gdn", given) == parse_layout("gdn[expand_v=2, d_ff=8, norm_eps=1e-3]", plain)
    assert parse_layout("gdn[expand_v=4]", given)[0].mixer.value_dim == 32
    assert parse_layout("swa", given) == parse_layout("swa[window=9]", plain)
    assert parse_layout("swa[window_size=3]", given) == parse_layout("swa[window=3]", plain)
    assert parse_layout("mamba2[num_heads=2]", given) == parse_layout("mamba2[num_heads=2]", plain)
    with_layer = dataclasses.replace(given, overrides={"gdn": {"num_heads": 2, "d_ff": 8}})
    assert parse_layout("heads(1:gdn, 1:nope)", with_layer) == parse_layout("heads(1:gdn, 1:nope)", plain)


def test_values_of_every_type():
    scaled = one("full[rope_scaling=llama3:8:8192:1:4.5]").rope_scaling
    assert scaled == RopeScaling(kind="llama3", factor=8.0, original_length=8192, high_freq_factor=4.5)
    assert one("full[rope_scaling=linear:2.5]").rope_scaling == RopeScaling(kind="linear", factor=2.5)
    mixer = one("full[qk_norm=head, sink=TRUE, rope_fraction=.5, rope_theta=1e6, window=NONE, norm_eps=1]")
    assert (mixer.qk_norm, mixer.sink, mixer.rope_fraction, mixer.rope_theta) == ("head", True, 0.5, 1e6)
    assert mixer.window_size is None
    assert isinstance(mixer.norm_eps, float)


# Errors.

MIXERS = "allowed: full, nope, swa, gla, gdn, kda, mamba2, lightning"

ERRORS = {
    # the string, the place of the error (^ stands before it) and the start of the message
    "^": "the layout is empty; name at least one mixer",
    "  ^": "the layout is empty",
    "full (^)": "the layout is empty",
    "full ^gnd": f"unknown mixer 'gnd'; nearest: gdn; {MIXERS}, heads, mix",
    "^GDN full": f"unknown mixer 'GDN'; nearest: gdn; {MIXERS}, heads, mix",
    "^softmax": f"unknown mixer 'softmax'; {MIXERS}, heads, mix",
    "^" + "x" * 300: "unknown mixer 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx... (302 characters); allowed",
    "heads(1:gdn, 1:^heads)": "unknown mixer 'heads' (heads and mix do not nest); allowed: full",
    "mix(gdn + ^mix(full + gdn))": "unknown mixer 'mix' (heads and mix do not nest); allowed: full",
    "heads(1:^(gdn full), 1:gdn)": "found '('; a mixer belongs here; allowed: full",
    "mix(gdn + ^3*full)": "found '3'; a mixer belongs here; allowed: full",
    "full ^)": "found ')'; a mixer belongs here; allowed: full",
    "full^)": "found ')'; a space separates the items of a layout",
    "full^, gdn": "found ','; a space separates the items of a layout",
    "swa[window=3]^gdn": "found 'g'; a space separates",
    "full ^é": "found 'é'; a mixer belongs here",
    "(full gdn^": "found the end; the group that starts at position 0 needs ')'",
    "3*(full (gdn)^": "found the end; the group that starts at position 2 needs ')'",
    "3^full": "found 'f'; the count 3 needs '*' here",
    "2*^": "found the end; a mixer belongs here",
    "2*^2*full": "found '2'; a mixer belongs here",
    "^0*full": "count 0; it must be at least 1",
    "full ^5*gdn": "5 layers; the model has num_layers = 4",
    "full ^3*(gdn full)": "6 layers; the model has num_layers = 4",
    "999999999^999*full": "found '9'; the count 999999999 needs '*' here",
    "(" * 20 + "(^full": "groups nest more than 20 deep",
    # heads(...)
    "heads^": "found the end; heads needs '(' here",
    "heads(^)": "found ')'; a part of heads(...) starts with its share, as 3:gdn",
    "heads(^gdn, 1:full)": "found 'g'; a part of heads(...) starts with its share, as 3:gdn",
    "heads(3^gdn, 1:full)": "found 'g'; the share 3 needs ':' here",
    "heads(3:^, 1:full)": "found ','; a mixer belongs here; allowed: full",
    "heads(^0:gdn, 1:full)": "share 0; it must be at least 1",
    "^heads(3:gdn)": "heads takes two or more parts",
    "heads(3:gdn, 1:nope^": "found the end; heads needs ')' here",
    "heads(3:gdn ^+ 1:nope)": "found '+'; heads needs ')' here",
    "^heads(2:gdn, 1:nope)": "heads: shares 2:1 sum to 3, which does not divide num_heads = 8",
    "^heads(8:gdn, 8:nope, 8:kda)": "heads: shares 1:1:1 sum to 3, which does not divide num_heads = 8",
    "heads(1:gdn[^num_heads=4], 1:nope)": "heads: num_heads of gdn follows from the share; leave it out",
    "heads(1:mamba2[^expand=2], 1:nope)": "heads: expand of mamba2 follows from the share; leave it out",
    "heads(1:gdn[^d_ff=4], 1:nope)": "d_ff is a key of the layer; write it behind heads(...) or mix(...)",
    "heads(1:gdn, 1:nope)[^fuse=mean]": "unknown key 'fuse' of heads; allowed: d_ff, gate,",
    "heads(1:gdn, 1:nope)[norm=^rms]": "heads: norm = 'rms'; it must be true or false",
    "heads(1:gdn, 1:nope)[order=^norm]": "heads: order = 'norm'; it must be one of gate_norm, norm_gate (nearest: ",
    "^heads(1:gdn, 1:mamba2)": "heads: value sizes per head differ (gdn 8, mamba2 64); they must be equal: change",
    "^heads(1:kda[expand_v=2], 1:nope, 2:gla)": "heads: value sizes per head differ (gla 8, kda 16, nope 8); they must",
    "^heads(1:gdn, 1:kda, 1:gla, 1:full, 1:nope, 1:gdn, 1:kda, 1:gla, 1:full)": "heads: shares 1:1:1:1:1:1:1:1:1 sum",
    "heads(1:nope[num_kv_heads=^3], 1:kda)": "nope: num_kv_heads = 3; it must be a divisor of num_heads = 4",
    "heads(3:lightning[num_kv_heads=^4], 1:kda)": "lightning: num_kv_heads = 4; it must be a divisor of num_heads = 6",
    "heads(3:mamba2[head_dim=8, num_groups=^4], 1:nope)": "mamba2: num_groups = 4; it must be a divisor of num_heads =",
    "heads(1:mamba2[^num_heads=4], 1:nope)": "heads: num_heads of mamba2 follows from the share; leave it out",
    "^heads(1:gdn[num_v_heads=8], 1:nope)": "heads: gdn has 8 heads but is given 4: [0, 1, 2, 3]",
    # mix(...)
    "mix ^full": "found 'f'; mix needs '(' here",
    "mix(^)": "found ')'; a mixer belongs here; allowed: full",
    "^mix(full)": "mix takes two or more mixers",
    "mix(full^, gdn)": "found ','; mix needs ')' here",
    "mix(full + ^)": "found ')'; a mixer belongs here; allowed: full",
    "mix(full + gdn)[fuse=^avg]": "mix: fuse = 'avg'; it must be one of mean, sum, scale, gate, project",
    "mix(full + gdn)[^scale=true]": "unknown key 'scale' of mix; allowed: d_ff, fuse",
    "^mix(full + gdn[num_heads=2])": "mix: the mixers have [8, 2] heads; fuse = mean needs the same number",
    "^mix(full + gdn[expand_v=2])": "mix: value sizes per head differ (full 8, gdn 16); they must be equal",
    "mix(full + gdn)[fuse=project, ^multipliers=2]": "unknown key 'multipliers' of mix",
    "mix(full[^norm=rms] + gdn)": "norm is a key of the layer; write it behind heads(...) or mix(...)",
    # options
    "swa[^]": "found ']'; an option is written key=value",
    "swa[^128]": "found '1'; an option is written key=value",
    "swa[window^]": "found ']'; the key 'window' needs '=' here",
    "swa[window=^]": "found ']'; 'window' needs a value",
    "swa[window=128^": "found the end; a list of options needs ']' here",
    "swa[window=128 ^full": "found 'f'; a list of options needs ']' here",
    "swa[window=128 ^sink=true]": "found 's'; a list of options needs ']' here",
    "swa[window=8, ^window=9]": "key 'window' is given twice",
    "swa[window=8, ^window_size=9]": "key 'window_size' is given twice",
    "swa[^windw=128]": "unknown key 'windw' of swa; nearest: window",
    "gdn[^window=128]": "unknown key 'window' of gdn; allowed: allow_neg_eigval, conv_size",
    "gdn[^slopes=1]": "unknown key 'slopes' of gdn",
    "lightning[^slopes=1]": "unknown key 'slopes' of lightning; nearest: slope_family",
    # values
    "^swa": "swa: window is missing; write swa[window=128]",
    "^swa[window=none]": "swa: window is missing; write swa[window=128]",
    "swa[window=^0]": "swa: window = 0; it must be at least 1, or none",
    "swa[window_size=^-3]": "swa: window = -3; it must be at least 1, or none",
    "swa[window=^1.5]": "swa: window = 1.5; it must be a whole number, or none",
    "swa[window=^wide]": "swa: window = 'wide'; it must be a whole number, or none",
    "full[sink=^1]": "full: sink = 1; it must be true or false",
    "full[sink=^yes]": "full: sink = 'yes'; it must be true or false",
    "nope[qk_norm=^heads]": "nope: qk_norm = 'heads'; it must be one of head, full (nearest: head), or none",
    "nope[num_heads=^0]": "nope: num_heads = 0; it must be a number above 0",
    "nope[num_kv_heads=^3]": "nope: num_kv_heads = 3; it must be a divisor of num_heads = 8",
    "^nope[num_heads=3, num_kv_heads=3] ^nope[head_dim=0]": "",
    "full[norm_eps=^nan]": "full: norm_eps = nan; it must be a finite number",
    "full[norm_eps=^1e999]": "full: norm_eps = inf; it must be a finite number",
    "full[rope_fraction=^1.5]": "full: rope_fraction = 1.5; it must be above 0 and at most 1",
    "full[rope_fraction=^0.01]": "full: rope_fraction = 0.01; it must be a share of head_dim = 8 that is an even",
    "^full[logn=loga]": "full: logn_base = None; it must be above 1 with logn = loga",
    "full[d_ff=^-1]": "full: d_ff = -1; it must be 0 (no MLP) or above",
    "full[norm=^rmsnorm]": "full: norm = 'rmsnorm'; it must be one of rms, rms1p, layer, layer_nobias (nearest: rms",
    "full[mlp=^none]": "full: mlp = None; it must be one of swiglu, geglu, geglu_tanh, gelu, relu2",
    "^full[parallel=true, d_ff=0]": "layer: parallel = True; it needs norm_placement = pre and an MLP",
    "gdn[expand_v=^0.3]": "gdn: expand_v = 0.3; it must be a factor that takes head_dim = 8 to a whole number",
    "gdn[expand_v=^inf]": "gdn: expand_v = inf; it must be a finite number",
    "gdn[num_v_heads=^12]": "gdn: num_v_heads = 12; it must be num_kv_heads = 8, or a multiple of it",
    "gdn[conv_size=^1]": "gdn: conv_size = 1; it must be 0 (none) or at least 2",
    "kda[dt_init=^zeros]": "kda: dt_init = 'zeros'; it must be one of zero, log_uniform (nearest: zero)",
    "mamba2[expand=^1.5]": "mamba2: expand = 1.5; it must be a factor that takes d_model = 64 to a multiple",
    "mamba2[expand=^1e300]": "mamba2: expand = 1e+300; it must be a factor",
    "mamba2[head_dim=^0]": "mamba2: head_dim = 0; it must be a number above 0",
    "mamba2[num_groups=^3]": "mamba2: num_groups = 3; it must be a divisor of num_heads = 2",
    "mamba2[^expand=1, num_heads=2]": "mamba2: expand gives num_heads, so one of them is too much",
    "nope[^kv_map=0]": "unknown key 'kv_map' of nope",
    "full[rope_scaling=^yarn]": "full: rope_scaling = 'yarn'; it must be linear:FACTOR, yarn:FACTOR:LENGTH or llama3:",
    "full[rope_scaling=^ntk:8]": "full: rope_scaling = 'ntk:8'; it must be linear:FACTOR",
    "full[rope_scaling=^yarn:2:x]": "full: rope_scaling = 'yarn:2:x'; it must be linear:FACTOR",
    "mamba2[^rope_theta=10]": "unknown key 'rope_theta' of mamba2",
    "mamba2[norm_groups=^3]": "mamba2: norm_groups = 3; it must be a divisor of num_heads = 2, 0 (no norm), or none",
    "mamba2[gate_order=^gate]": "mamba2: gate_order = 'gate'; it must be one of gate_norm, norm_gate",
    "gdn[rope_theta=^1]": "gdn: rope_theta = 1.0; it must be above 1, or none",
    "gla[rope_theta=^1e4, head_dim=6]": "gla: rope_theta = 10000.0; it must be none, as keys have an odd number of",
    "lightning[gate_rank=^0]": "lightning: gate_rank = 0; it must be at least 1 (for no gate, output_gate is none)",
    "lightning[output_gate=^false]": "lightning: output_gate = False; it must be one of low_rank, full, or none",
    "lightning[activation=^relu]": "lightning: activation = 'relu'; it must be one of silu, or none",
    "lightning[output_norm=^rms]": "lightning: output_norm = 'rms'; it must be one of head, full, or none",
    "lightning[slope_family=^linaer]": "lightning: slope_family = 'linaer'; it must be one of geometric, linear",
    "lightning[num_heads=^0]": "lightning: num_heads = 0; it must be a number above 0",
}
del ERRORS["^nope[num_heads=3, num_kv_heads=3] ^nope[head_dim=0]"]


@pytest.mark.parametrize("marked", ERRORS, ids=lambda text: text[:40])
def test_errors_name_the_place_the_word_and_what_is_allowed(marked):
    position = marked.index("^")
    with pytest.raises(LayoutError) as error:
        parse(marked.replace("^", ""))
    assert str(error.value).startswith(f"layout, position {position}: {ERRORS[marked]}")
    assert error.value.position == position
    assert_readable(error.value)


def assert_readable(error: ValueError) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    ("text", "num_layers", "near"),
    [("gdn full", 3, "2, 4"), ("2*gdn full", 4, "3, 6"), ("full gdn full", 2, "3")],
)
def test_a_pattern_that_does_not_fill_the_model(text, num_layers, near):
    with pytest.raises(ValueError, match=rf"num_layers = {num_layers}; .* \(nearest: {near}\)") as error:
        parse(text, num_layers=num_layers)
    assert_readable(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 0}, "d_model = 0; it must be at least 1"),
        ({"num_layers": 0}, "num_layers = 0; it must be at least 1"),
        ({"num_heads": -1}, "num_heads = -1; it must be at least 1"),
        ({"num_kv_heads": 0}, "num_kv_heads = 0; it must be at least 1"),
        ({"head_dim": 0}, "head_dim = 0; it must be at least 1"),
        ({"num_heads": 7}, "num_heads = 7; it must divide d_model = 64 unless head_dim is given"),
        ({"overrides": {"gnd": {}}}, "overrides: unknown mixer 'gnd'; nearest: gdn; allowed: full"),
        ({"overrides": {"gdn": {"expandv": 2}}}, "overrides: unknown key 'expandv' of gdn; nearest: expand_v"),
        ({"overrides": {"gdn": {"expand_v": "2"}}}, "overrides: gdn: expand_v = '2'; it must be a finite number"),
        ({"overrides": {"gdn": {"d_ff": 1.5}}}, "overrides: gdn: d_ff = 1.5; it must be a whole number"),
    ],
)
def test_defaults_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        dataclasses.replace(BASE, **change)
    assert_readable(error.value)


def test_kv_heads_that_do_not_divide_are_an_error_of_the_layer_that_uses_them():
    parse("gdn", num_kv_heads=3)
    with pytest.raises(LayoutError, match="position 4: nope: num_kv_heads = 3; it must be a divisor of num_heads = 8"):
        parse("gdn nope", num_kv_heads=3)
    with pytest.raises(LayoutError, match="num_kv_heads = 16; it must be a divisor"):
        parse("nope", num_kv_heads=16)
    for part in ("nope", "lightning"):
        with pytest.raises(
            LayoutError, match=f"position 15: {part}: num_kv_heads = 3; it must be a divisor of num_heads = 8"
        ):
            parse(f"heads(1:gdn, 1:{part})", num_kv_heads=3)
    with pytest.raises(LayoutError, match="num_kv_heads = 16; it must be a divisor"):
        parse("heads(1:gdn, 1:nope)", num_kv_heads=16)
    parse("heads(1:gdn, 1:kda)", num_kv_heads=16)
    parse("heads(1:gdn, 1:nope[num_kv_heads=2])", num_kv_heads=3)


# Properties.

SPACES = st.sampled_from(["", "", " ", "  ", "\n", "\t "])


@given(layouts(), st.data())
def test_whitespace_is_free_between_words(drawn, data):
    text, given_ = drawn
    spread = ""
    for word in re.findall(r"[A-Za-z0-9_.-]+|\s+|.", text):
        if word.isspace():
            spread += data.draw(st.sampled_from([" ", "   ", "\n", " \t"]))
        elif word in "()[]=,:+*":
            # not before "(" or behind ")": there the space is what separates two items
            before = "" if word == "(" else data.draw(SPACES)
            spread += before + word + data.draw(SPACES)
        else:
            spread += word
    assert parse_layout(f" {spread}\n", given_) == parse_layout(text, given_)


@given(layouts())
def test_format_and_parse_again(drawn):
    text, given_ = drawn
    layers = parse_layout(text, given_)
    assert len(layers) == given_.num_layers
    again, common = format_layout(layers, given_.d_model)
    assert parse_layout(again, common) == layers
    assert format_layout(layers, given_.d_model) == (again, common)


@given(st.lists(layers(), min_size=1, max_size=3).map(tuple))
def test_any_layers_format_exactly_or_not_at_all(stack):
    try:
        text, common = format_layout(stack, 64)
    except ValueError as error:
        assert str(error).startswith("layers: ")
        assert str(error).endswith("as JSON")
    else:
        assert parse_layout(text, common) == stack


ALPHABET = [
    *["full", "nope", "swa", "gla", "gdn", "kda", "mamba2", "lightning", "heads(", "mix(", "gnd"],
    *["(", ")", "[", "]", ",", ", ", "+", " + ", "*", "2*", "0*", "99999999999*", ":", "1:", "3:", " ", "\n", "é", "'"],
    *["window", "window_size", "num_heads", "num_kv_heads", "head_dim", "expand", "expand_v", "norm", "norm_eps"],
    *["d_ff", "fuse", "slope_family", "rope_fraction", "logn", "conv_size", "num_groups", "state_dim"],
    *["=", "=1", "=0", "=-1", "=0.3", "=none", "=true", "=1e999", "=nan", "=linear", "=" + "9" * 30, "=" + "9" * 400],
]


def survives(text: str, given_: Defaults) -> None:
    """Read exactly, or refused in one readable line."""
    try:
        layers = parse_layout(text, given_)
    except ValueError as error:
        assert_readable(error)
        if isinstance(error, LayoutError):
            assert 0 <= error.position <= len(text)
        return
    try:
        again, common = format_layout(layers, given_.d_model)
    except ValueError as error:
        assert_readable(error)
    else:
        assert parse_layout(again, common) == layers


@given(st.lists(st.sampled_from(ALPHABET), max_size=12).map("".join), defaults(), st.integers(1, 4))
def test_random_words_never_crash(text, given_, num_layers):
    survives(text, dataclasses.replace(given_, num_layers=num_layers))


@given(layouts(), st.data())
def test_damaged_layouts_never_crash(drawn, data):
    text, given_ = drawn
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, min(start + 3, len(text))))
        text = text[:start] + data.draw(st.sampled_from(["", *ALPHABET])) + text[stop:]
    survives(text, given_)


@given(st.text(max_size=30))
def test_random_text_never_crashes(text):
    survives(text, BASE)


@pytest.mark.parametrize("word", ["(", "2*", "9", "heads(", "full ", "[", "full[x"])
def test_long_nonsense_never_crashes(word):
    with pytest.raises(ValueError, match=r"layout|layers") as error:
        parse(word * 10_000)
    assert_readable(error.value)


# And back.


@pytest.mark.parametrize(
    "layer",
    [
        Layer(mixer=one("full"), norm_eps=0.5),
        Layer(mixer=dataclasses.replace(one("lightning"), slopes=(0.1,) * 8)),
        Layer(mixer=dataclasses.replace(one("heads(1:gdn, 1:nope)"), parts=one("heads(1:gdn, 1:nope)").parts[::-1])),
        Layer(mixer=dataclasses.replace(one("heads(1:gdn, 1:nope)"), norm_eps=0.5)),
        Layer(mixer=dataclasses.replace(one("nope"), num_kv_heads=2, kv_map=(0,) * 3 + (1,) * 5)),
        Layer(mixer=dataclasses.replace(one("mix(full + gdn)[fuse=project]"), multipliers=(2.0, 1.0))),
    ],
    ids=[
        "norm_eps of the layer",
        "slopes of no family",
        "heads out of order",
        "norm_eps of heads",
        "kv_map",
        "multipliers",
    ],
)
def test_what_a_string_cannot_say_is_refused(layer):
    with pytest.raises(ValueError, match=r"write .*as JSON"):
        format_layout((Layer(mixer=one("full")), layer), 64)


@pytest.mark.parametrize(
    ("mixer", "text"),
    [
        (Gdn(num_heads=4, num_kv_heads=4, num_v_heads=4, head_dim=8), "gdn[num_heads=4]"),
        (Gdn(num_heads=8, num_kv_heads=2, num_v_heads=2, head_dim=8), "gdn[num_kv_heads=2]"),
        (Mamba2(num_heads=4, head_dim=32), "mamba2[head_dim=32]"),
        (Mamba2(num_heads=5, head_dim=64), "mamba2[num_heads=5]"),
        (Softmax(num_heads=8, num_kv_heads=8, head_dim=8, window_size=3), "swa[rope_theta=none, window=3]"),
        (
            Softmax(num_heads=8, num_kv_heads=8, head_dim=8, logn="loga", logn_base=500.0),
            "nope[logn=loga, logn_base=500]",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_only_what_does_not_follow_is_written(mixer: Mixer, text):
    plain = Layer(mixer=one("nope"))
    written, common = format_layout((plain, plain, plain, Layer(mixer=mixer)), 64)
    assert written == f"3*nope {text}"
    assert common.num_heads == 8
