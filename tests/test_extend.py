"""Spec -> Spec for longer inputs: 001's bases, every kind of layer, weights that still fit, errors."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import specs

from plait import cost, extend
from plait.config import RopeScaling, Softmax, family, leaves
from plait.model.lm import LM
from plait.presets import preset
from plait.spec import Spec

SHAPE = {"vocab_size": 50, "d_model": 64, "num_heads": 4, "d_ff": 96, "context_length": 4096}


def build(layout: str, num_layers: int = 2, **fields) -> Spec:
    return Spec.from_layout(layout, num_layers=num_layers, **{**SHAPE, **fields})


def softmaxes(spec: Spec) -> list[Softmax]:
    return [leaf for layer in spec.layers for leaf in leaves(layer.mixer) if isinstance(leaf, Softmax)]


def bases(spec: Spec) -> list[float | None]:
    return [leaf.rope_theta for layer in spec.layers for leaf in leaves(layer.mixer)]


def as_json(spec: Spec) -> Spec:
    return Spec.from_json(json.loads(json.dumps(spec.to_json(), allow_nan=False)))


# 001, A.3: bases of windows that grow from 128 tokens and 10000, as the rule gives them and as printed.

BASES_001 = {
    256: (83148.91821905608, 90_000),
    512: (691374.2600999275, 700_000),
    1024: (5748702.181180929, 6_000_000),
    2048: (47799836.752872236, 50_000_000),
    4096: (397450471.7048804, 400_000_000),
}


@pytest.mark.parametrize(("size", "rule", "printed"), [(size, *figures) for size, figures in BASES_001.items()])
def test_window_bases_of_001(size, rule, printed):
    assert extend._scaling_law(1e4, 128, size) == pytest.approx(rule, rel=1e-12)
    assert extend.window_theta(1e4, 128, size) == printed
    wider = extend.window(preset("001/776M/SWA-NoPE-LH"), size)
    assert {(leaf.window_size, leaf.rope_theta) for leaf in softmaxes(wider)} == {(size, printed), (None, None)}


def test_the_same_law_takes_full_attention_of_001_to_about_64k():
    """Table 2: 10000 to 500000 `to support contexts of around 64k tokens`."""
    assert 5e5 < extend._scaling_law(1e4, 4096, 65536) < 5.2e5
    assert 60_000 < next(T for T in range(4096, 70_000, 64) if extend._scaling_law(1e4, 4096, T) >= 5e5) < 65_536


@given(st.floats(100, 1e6), *[st.integers(128, 4096)] * 3)
def test_the_law_without_rounding_goes_by_any_way(theta, a, b, c):
    a, b, c = sorted((a, b, c))
    through = extend._scaling_law(extend._scaling_law(theta, a, b), b, c)
    assert through == pytest.approx(extend._scaling_law(theta, a, c), rel=1e-9)
    assert extend._scaling_law(theta, a, b) >= theta * (1 - 1e-12)
    assert extend.window_theta(theta, a, b) >= extend._scaling_law(theta, a, b) * (1 - 1e-8)


@pytest.mark.parametrize(
    ("value", "rounded"), [(1.0, 1), (1.2, 2), (9.1, 10), (90_000.00000001, 90_000), (90_001, 100_000), (1e5, 1e5)]
)
def test_rounding_up_to_one_digit(value, rounded):
    assert extend._round_up(value) == rounded


# One function at a time. Layout strings say what becomes of a layer.

COMPOSED = "heads(3:swa[window=128], 1:full) mix(swa[window=128] + gdn)"


def test_context():
    spec = build("swa[window=128] full")
    longer = extend.context(spec, 32768)
    assert longer == dataclasses.replace(spec, context_length=32768)
    assert extend.context(dataclasses.replace(spec, context_length=None), 10).context_length == 10


def test_window():
    assert extend.window(build("3*swa[window=128] nope", 4), 2048).layout == "3*swa[window=2048] nope"
    assert extend.window(build("swa[window=128] full"), 512) == build("swa[window=512, rope_theta=7e5] full")
    assert extend.window(build("swa[window=128, rope_theta=none] full"), 512) == build(
        "swa[window=512, rope_theta=none] full"
    )
    assert extend.window(build("swa[window=128] full"), 512, theta=1e4) == build("swa[window=512] full")
    composed = extend.window(build(COMPOSED), 512)
    swa = "swa[window=512, rope_theta=7e5]"
    assert composed == build(f"heads(3:{swa}, 1:full) mix({swa} + gdn)")
    assert composed.layout == "heads(3:swa[window=512], 1:full[rope_theta=10000]) mix(swa[window=512] + gdn)"


def test_every_window_grows_from_its_own():
    wider = extend.window(build("swa[window=128] swa[window=512, rope_theta=7e5]"), 512)
    assert wider == build("swa[window=512, rope_theta=7e5]")


def test_rope_theta():
    spec = build("swa[window=128] full gdn[rope_theta=1e4] gdn nope mamba2", 6)
    assert bases(extend.rope_theta(spec, 5e5)) == [5e5, 5e5, 5e5, None, None, None]
    assert bases(extend.rope_theta(spec, 5e5, families=["full"])) == [1e4, 5e5, 1e4, None, None, None]
    assert bases(extend.rope_theta(spec, 5e5, families=("swa", "gdn"))) == [5e5, 1e4, 5e5, None, None, None]
    composed = extend.rope_theta(build(COMPOSED), 500_000, families=["full"])
    assert composed == build("heads(3:swa[window=128], 1:full[rope_theta=5e5]) mix(swa[window=128] + gdn)")


def test_drop_rope():
    spec = build("swa[window=128] full[rope_scaling=yarn:4:4096, rope_fraction=0.5, rope_interleaved=true]")
    assert extend.drop_rope(spec) == build("swa[window=128] nope")
    assert extend.drop_rope(build("full[qk_norm=head, sink=true]")) == build("nope[qk_norm=head, sink=true]")
    assert extend.drop_rope(build("gdn[rope_theta=1e4] full")) == build("gdn[rope_theta=1e4] nope")
    assert extend.drop_rope(build(COMPOSED)).layout == COMPOSED.replace("full", "nope")
    assert extend.drop_rope(build("mix(full + gdn)[fuse=sum]")) == build("mix(nope + gdn)[fuse=sum]")


def test_logn():
    spec = build("swa[window=128, rope_theta=none] full nope heads(3:gdn, 1:nope)", 4)
    scaled = "nope[logn=loglen, logn_base=4096]"
    rest = "swa[window=128, rope_theta=none] full"
    assert extend.logn(spec, "loglen") == build(f"{rest} {scaled} heads(3:gdn, 1:{scaled})", 4)
    assert {leaf.logn_base for leaf in softmaxes(extend.logn(spec, "loga"))} == {None, 500}
    assert {leaf.logn_base for leaf in softmaxes(extend.logn(spec, "loga", base=100))} == {None, 100}
    again = extend.logn(extend.logn(spec, "loga"), "loglen", base=1000)
    assert {(leaf.logn, leaf.logn_base) for leaf in softmaxes(again)} == {(None, None), ("loglen", 1000)}


def test_a_scale_keeps_its_base_when_the_context_grows():
    spec = extend.context(extend.logn(build("swa[window=128] nope"), "loglen"), 32768)
    assert extend.logn(spec, "loglen") == spec
    assert softmaxes(spec)[1].logn_base == 4096
    assert softmaxes(extend.logn(spec, "loglen", base=32768))[1].logn_base == 32768


def test_published_hybrids():
    swa = extend.context(extend.window(preset("001/376M/SWA-NoPE-HH"), 2048), 32768)
    assert swa.layout == "heads(3:swa[window=2048], 1:nope)"
    swa = extend.rope_theta(extend.window(preset("001/376M/SWA-RoPE-LH"), 2048), 5e5, families=["full"])
    assert bases(swa)[:4] == [5e7, 5e7, 5e7, 5e5]
    dropped = extend.drop_rope(preset("001/376M/GDN-RoPE-HH"))
    assert dropped == preset("001/376M/GDN-NoPE-HH")


# All of them: pure, once is as good as twice, JSON, the same parameters.

CALLS = {
    "context": partial(extend.context, length=1 << 21),
    "window": partial(extend.window, size=512, theta=9e5),
    "window by the rule": partial(extend.window, size=512),
    "rope_theta": partial(extend.rope_theta, theta=5e5),
    "drop_rope": extend.drop_rope,
    "loglen": partial(extend.logn, kind="loglen"),
    "loga": partial(extend.logn, kind="loga", base=200),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@given(specs())
def test_any_spec(call, spec):
    """Extended as it should be, or refused in one line, as where no layer has what the call changes."""
    before = spec.to_json()
    try:
        extended = call(spec)
    except ValueError as error:
        assert str(error).startswith("extend: ") and "\n" not in str(error)
        return
    assert spec.to_json() == before
    assert call(extended) == extended
    assert as_json(extended) == extended
    assert as_json(extended).hash == extended.hash
    assert cost.total_params(extended) == cost.total_params(spec)
    kinds = [[type(leaf) for leaf in leaves(layer.mixer)] for layer in spec.layers]
    assert kinds == [[type(leaf) for leaf in leaves(layer.mixer)] for layer in extended.layers]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_layouts_of_extended_specs_give_them_back(call):
    spec = build("swa[window=128] full nope heads(1:swa[window=128], 1:gdn) mix(nope + gdn)", 5)
    extended = call(spec)
    assert extended != spec
    theta = next((leaf.rope_theta for leaf in softmaxes(extended) if leaf.rope_theta is not None), 1e4)
    again = build(extended.layout, 5, rope_theta=theta, context_length=extended.context_length)
    assert again == extended


@pytest.mark.parametrize(
    "layout",
    [
        "swa[window=8, qk_norm=head, sink=true, output_gate=true] full[rope_fraction=0.5, num_kv_heads=2, bias=all]",
        "heads(1:swa[window=8], 1:full)[norm=true, scale=true, gate=true] mix(full + swa[window=8])[fuse=gate]",
    ],
)
def test_weights_fit_the_extended_spec_and_short_inputs_with_the_same_bases_give_the_same(layout):
    spec = build(layout, context_length=16)
    model = LM(spec).eval()
    extended = extend.logn(extend.drop_rope(extend.window(spec, 32)), "loglen")
    extended = extend.rope_theta(extend.context(extended, 64), 5e5)
    other = LM(extended, seed=1).eval()
    other.load_state_dict(model.state_dict(), strict=True)
    tokens = torch.arange(24)[None] % 50
    with torch.no_grad():
        assert torch.isfinite(other(tokens)).all()
        assert not torch.allclose(other(tokens), model(tokens))
        wider = LM(extend.window(spec, 32, theta=1e4)).eval()
        wider.load_state_dict(model.state_dict(), strict=True)
        torch.testing.assert_close(wider(tokens)[:, :8], model(tokens)[:, :8])
        assert not torch.allclose(wider(tokens)[:, 8:], model(tokens)[:, 8:])


# Errors: one line that says what, which field, the value, and what is allowed.

MIXED = build("swa[window=128] full gdn nope", 4)
LINEAR = build("gdn kda")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: extend.context(MIXED, 2048), "context_length = 2048; it must be at least the spec's own, 4096"),
        (lambda: extend.context(MIXED, 0), "context_length = 0; it must be at least 1"),
        (lambda: extend.context(MIXED, 1e4), "context_length = 10000.0; it must be a whole number"),
        (lambda: extend.window(MIXED, 64), "window_size = 64; it must be at least 128, the window of layer 0"),
        (lambda: extend.window(MIXED, True), "window_size = True; it must be a whole number"),
        (lambda: extend.window(MIXED, -1), "window_size = -1; it must be at least 1"),
        (lambda: extend.window(LINEAR, 64), "window_size = 64; no layer has a window"),
        (lambda: extend.window(MIXED, 512, theta=0), "rope_theta = 0; it must be above 1"),
        (
            lambda: extend.window(build("full swa[window=6]"), 64),
            "window_size = 6; it must be at least 7 for the rule of the RoPE base (layer 1); give theta for a base of"
            " your own",
        ),
        (
            lambda: extend.window(build("heads(1:gdn, 1:swa[window=128, rope_scaling=linear:4])"), 256),
            "rope_scaling = linear:4; the rule for wider windows knows none (layer 0); give theta for a base of your"
            " own",
        ),
        (
            lambda: extend.window(build("swa[window=7]"), 10**6),
            "window_size = 1000000; from 7 the rule's RoPE base is above 1e300 (layer 0); give theta for a base of your"
            " own",
        ),
        (lambda: extend.window_theta(0.5, 128, 256), "rope_theta = 0.5; it must be above 1"),
        (lambda: extend.rope_theta(MIXED, 0), "rope_theta = 0; it must be above 1"),
        (lambda: extend.rope_theta(MIXED, -1e4), "rope_theta = -10000.0; it must be above 1"),
        (lambda: extend.rope_theta(MIXED, math.nan), "rope_theta = nan; it must be above 1"),
        (lambda: extend.rope_theta(MIXED, math.inf), "rope_theta = inf; it must be above 1"),
        (lambda: extend.rope_theta(LINEAR, 5e5), "rope_theta = 500000.0; no layer has RoPE"),
        (
            lambda: extend.rope_theta(MIXED, 5e5, families=["ful"]),
            "family 'ful': no layer has it with RoPE; nearest: full; allowed: full, swa",
        ),
        (
            lambda: extend.rope_theta(MIXED, 5e5, families=["nope"]),
            "family 'nope': no layer has it with RoPE; allowed: full, swa",
        ),
        (
            lambda: extend.rope_theta(MIXED, 5e5, families="full"),
            "families = 'full'; it must be a list, as ['full']",
        ),
        (
            lambda: extend.rope_theta(MIXED, 5e5, families=[]),
            "families = []; it must be some of full, swa, or none given for all",
        ),
        (lambda: extend.drop_rope(LINEAR), "drop_rope; no layer has full attention"),
        (
            lambda: extend.logn(build("full"), "loglen"),
            "logn = loglen; no layer has full attention without RoPE: drop_rope makes some",
        ),
        (lambda: extend.logn(MIXED, "log"), "logn = 'log'; it must be one of loglen, loga"),  # pyright: ignore
        (lambda: extend.logn(MIXED, "loga", base=1), "logn_base = 1; it must be above 1"),
        (lambda: extend.logn(MIXED, "loga", base=0), "logn_base = 0; it must be above 1"),
        (lambda: extend.logn(build("nope", context_length=1), "loglen"), "logn_base = 1; it must be above 1"),
        (
            lambda: extend.logn(build("nope", context_length=None), "loglen"),
            "logn_base is missing; loglen takes the length trained on, the spec has none",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == f"extend: {message}"


def test_scalings_stay_where_a_base_is_given():
    spec = build("swa[window=128, rope_scaling=linear:4] full")
    scaled = softmaxes(extend.window(spec, 256, theta=9e4))[0]
    assert (scaled.window_size, scaled.rope_theta) == (256, 9e4)
    assert scaled.rope_scaling == RopeScaling(kind="linear", factor=4)
    assert family(scaled) == "swa"


def test_the_public_name_is_the_module_whatever_was_imported_before():
    code = "import plait; first = plait.extend; import plait.extend as again; assert first is again; first.window"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
