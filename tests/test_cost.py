"""Parameters, FLOPs and state bytes against counts by hand and by brute force; published counts: test_presets.py."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import mixers, specs

from plait import cost
from plait.config import Gdn, Heads, Layer, Mix, Mixer, Softmax
from plait.layout import Defaults, parse_layout
from plait.spec import Spec


def mixer_of(layout: str, **changes) -> Mixer:
    shape = {"d_model": 64, "num_layers": 1, "num_heads": 4} | changes
    return parse_layout(layout, Defaults(**shape))[0].mixer


# Parameters.


@pytest.mark.parametrize(
    ("layout", "changes", "count"),
    [
        # d = 64, 4 heads of 16
        ("full", {}, 4 * 64 * 64),
        ("full", {"num_kv_heads": 2}, 64 * 16 * (4 + 2 + 2 + 4)),
        ("full[qk_norm=head]", {}, 4 * 64 * 64 + 2 * 16),
        ("full[qk_norm=full]", {"num_kv_heads": 2}, 64 * 16 * 12 + (4 + 2) * 16),
        ("full[sink=true]", {"num_kv_heads": 2}, 64 * 16 * 12 + 4),
        ("full[output_gate=true]", {"num_kv_heads": 2}, 64 * 16 * (12 + 4)),
        # q, k of half size, v, gate, o; decay of rank 16 with its bias; norm
        ("gla", {}, 2 * 64 * 32 + 3 * 64 * 64 + 16 * (64 + 32) + 32 + 16),
        # q, k, v, o; beta; decay and gate of rank 16, the gate with a bias; conv; A_log, dt_bias; norm
        ("kda", {}, 4 * 64 * 64 + 64 * 4 + 2 * 16 * (64 + 64) + 64 + 4 * 192 + 4 + 64 + 16),
        ("kda[output_gate=false, conv_size=0]", {}, 4 * 64 * 64 + 64 * 4 + 16 * (64 + 64) + 4 + 64 + 16),
        # z and x of 8 heads, B and C of 8, dt; conv with its bias; A_log, D, dt_bias; norm; o
        (
            "mamba2[head_dim=16, state_dim=8]",
            {},
            64 * (2 * 128 + 2 * 8 + 8) + (4 + 1) * (128 + 2 * 8) + 3 * 8 + 128 + 128 * 64,
        ),
        ("mamba2[head_dim=16, state_dim=8, conv_size=0]", {}, 64 * (2 * 128 + 2 * 8 + 8) + 3 * 8 + 128 + 128 * 64),
        ("lightning[gate_rank=5]", {"num_kv_heads": 2}, 64 * 16 * 12 + 5 * (64 + 64)),
        # two more heads' worth of values: q, k of 4 heads; v, gate, o of 8; a, b; conv; A_log, dt_bias; norm
        (
            "gdn[num_v_heads=8]",
            {},
            64 * (2 * 64 + 3 * 128 + 2 * 8) + 4 * (64 + 64 + 128) + 2 * 8 + 16,
        ),
        # two parts share one output projection; a scale per head; a gate with its bias on the softmax heads
        (
            "heads(1:gdn[conv_size=0], 1:nope)[scale=true, gate=true]",
            {},
            64 * (4 * 32 + 2 * 2) + 2 * 2 + 16 + 64 * 3 * 32 + 64 * 64 + 4 + (64 * 32 + 32),
        ),
        ("mix(full + nope)", {}, 2 * 3 * 64 * 64 + 64 * 64),
        ("mix(full + nope)[fuse=scale]", {}, 7 * 64 * 64 + 2 * 4),
        ("mix(full + nope)[fuse=gate]", {}, 7 * 64 * 64 + 2 * 64),
        ("mix(full + nope)[fuse=project]", {}, 8 * 64 * 64),
        # gates through 5 channels, through one matrix, none; a norm over all heads together has weights
        ("lightning[output_gate=full]", {"num_kv_heads": 2}, 64 * 16 * 12 + 64 * 64),
        ("lightning[output_gate=none]", {"num_kv_heads": 2}, 64 * 16 * 12),
        ("lightning[output_gate=none, output_norm=full, activation=none, rope_theta=1e4]", {}, 4 * 64 * 64 + 64),
        ("lightning[output_gate=none, output_norm=none]", {}, 4 * 64 * 64),
        ("gla[rope_theta=1e4]", {}, 2 * 64 * 32 + 3 * 64 * 64 + 16 * (64 + 32) + 32 + 16),
        ("kda[output_gate=false, conv_size=0, rope_theta=1e4]", {}, 4 * 64 * 64 + 64 * 4 + 16 * 128 + 4 + 64 + 16),
        ("mamba2[head_dim=16, state_dim=8, conv_size=0, norm_groups=0]", {}, 64 * (256 + 16 + 8) + 3 * 8 + 128 * 64),
        (
            "mamba2[head_dim=16, state_dim=8, conv_size=0, norm_groups=4, gate_order=norm_gate]",
            {},
            64 * (256 + 16 + 8) + 3 * 8 + 128 + 128 * 64,
        ),
        # three heads of softmax read two KV heads, two the first and one the second; q, k, v of 2 Lightning heads
        (
            "heads(3:nope, 1:lightning[output_gate=none])",
            {"num_kv_heads": 2},
            64 * 16 * (3 + 2 + 2) + 64 * 16 * 3 + 64 * 64,
        ),
    ],
)
def test_mixers_by_hand(layout, changes, count):
    assert cost.mixer_params(mixer_of(layout, **changes), 64) == count


@pytest.mark.parametrize(
    ("fields", "beside_the_mixer"),
    [
        ({}, 3 * 64 * 96 + 2 * 64),
        ({"mlp": "geglu"}, 3 * 64 * 96 + 2 * 64),
        ({"mlp": "gelu"}, 2 * 64 * 96 + 2 * 64),
        ({"mlp": "relu2"}, 2 * 64 * 96 + 2 * 64),
        ({"norm": "layer"}, 3 * 64 * 96 + 4 * 64),
        ({"norm_placement": "sandwich"}, 3 * 64 * 96 + 4 * 64),
        ({"norm_placement": "post"}, 3 * 64 * 96 + 2 * 64),
        ({"parallel": True}, 3 * 64 * 96 + 64),
        ({"d_ff": 0}, 64),
        ({"d_ff": 0, "norm_placement": "sandwich"}, 2 * 64),
    ],
)
def test_blocks_by_hand(fields, beside_the_mixer):
    mixer = mixer_of("full")
    layer = Layer(**{"mixer": mixer, "d_ff": 96, **fields})
    assert cost.layer_params(layer, 64) - cost.mixer_params(mixer, 64) == beside_the_mixer


def test_embeddings_count_once_when_tied():
    shape = {"vocab_size": 100, "d_model": 64, "num_layers": 1, "num_heads": 4}
    tied, untied = (Spec.from_layout("full", tie_embeddings=tie, **shape) for tie in (True, False))
    assert cost.non_embedding_params(tied) == cost.non_embedding_params(untied) == 4 * 64 * 64 + 2 * 64
    assert cost.total_params(tied) == cost.non_embedding_params(tied) + 6400
    assert cost.total_params(untied) == cost.total_params(tied) + 6400


# FLOPs.


@given(st.integers(1, 200), st.none() | st.integers(1, 250))
def test_visible_keys_are_those_of_the_mask(context, window):
    mask = [[j <= i and (window is None or i - j < window) for j in range(context)] for i in range(context)]
    assert cost.visible_keys(context, window) == pytest.approx(float(Fraction(sum(map(sum, mask)), context)))


def matmul(m: int, k: int, n: int) -> int:
    return 2 * m * k * n


@pytest.mark.parametrize("window", [None, 1, 5, 300])
def test_attention_flops_by_brute_force(window):
    """Every product of a causal sequence, query by query, over T."""
    T, d, H, KV, D = 33, 64, 4, 2, 16
    total = 0
    for t in range(1, T + 1):
        seen = min(t, window or t)
        total += matmul(1, d, H * D) + 2 * matmul(1, d, KV * D) + matmul(1, H * D, d)
        total += H * (matmul(1, D, seen) + matmul(1, seen, D))
    layer = Layer(mixer=Softmax(num_heads=H, num_kv_heads=KV, head_dim=D, window_size=window))
    assert cost.layer_flops(layer, d, T) == pytest.approx(total / T)


def test_gdn_flops_by_brute_force():
    """One token: projections, convolutions, read at k, rank-1 write, read at q; the grouped queries share a state."""
    d, H, HK, HV, K, V, W = 64, 6, 2, 2, 16, 32, 4
    mixer = Gdn(num_heads=H, num_kv_heads=HK, num_v_heads=HV, head_dim=K, expand_v=2, conv_size=W)
    total = matmul(1, d, H * K) + matmul(1, d, HK * K) + matmul(1, d, HV * V)  # q, k, v
    total += 2 * matmul(1, d, HV) + matmul(1, d, H * V) + matmul(1, H * V, d)  # a, b, gate, o
    total += 2 * W * (H * K + HK * K + HV * V)
    total += HV * (matmul(1, K, V) + matmul(K, 1, V)) + H * matmul(1, K, V)
    assert cost.layer_flops(Layer(mixer=mixer), d, 1000) == total


@pytest.mark.parametrize(
    ("layout", "flops"),
    [
        # one token, 4 heads; writing and reading a K x V state are 2 K V each, the delta rule reads once more
        ("gla[expand_k=0.5]", 4 * 4 * 8 * 16),
        ("kda[conv_size=0, expand_v=2]", 4 * 6 * 16 * 32),
        ("kda[conv_size=4]", 4 * 6 * 16 * 16 + 2 * 4 * 3 * 64),
        ("mamba2[num_heads=4, head_dim=16, state_dim=8, conv_size=0]", 4 * 4 * 16 * 8),
        ("mamba2[num_heads=4, head_dim=16, state_dim=8, conv_size=2]", 4 * 4 * 16 * 8 + 2 * 2 * (64 + 2 * 8)),
        ("lightning", 4 * 4 * 16 * 16),
        ("heads(1:gla[expand_k=1], 1:lightning)", 4 * 4 * 16 * 16),
        ("mix(gla[expand_k=1] + lightning)", 2 * 4 * 4 * 16 * 16),
    ],
)
def test_recurrences_by_hand(layout, flops):
    assert cost.mixing_flops(mixer_of(layout), 999) == flops


def test_the_whole_model_is_its_layers_and_the_head():
    spec = Spec.from_layout("gdn full", vocab_size=100, d_model=64, num_layers=4, num_heads=4, d_ff=96)
    whole = cost.cost(spec, 50)
    assert whole.flops_per_token == sum(cost.layer_flops(layer, 64, 50) for layer in spec.layers) + 2 * 64 * 100
    assert whole.total_params == cost.total_params(spec)
    assert whole.state_bytes == sum(layer.state_bytes for layer in whole.layers)
    assert [layer.family for layer in whole.layers] == ["gdn", "full"] * 2
    assert [layer.params for layer in whole.layers] == [cost.layer_params(layer, 64) for layer in spec.layers]
    with pytest.raises(ValueError, match="context = 0"):
        cost.cost(spec, 0)


# State.


@pytest.mark.parametrize(
    ("layout", "changes", "size"),
    [
        ("full", {}, 2 * 4 * 16 * 100 * 2),
        ("full", {"num_kv_heads": 1}, 2 * 1 * 16 * 100 * 2),
        ("swa[window=30]", {}, 2 * 4 * 16 * 30 * 2),
        ("swa[window=300]", {}, 2 * 4 * 16 * 100 * 2),
        # recurrent states are fp32; the tail of a convolution of 4 is 3 tokens of q, k and v
        ("gdn", {}, 4 * 16 * 16 * 4 + 3 * (3 * 64) * 2),
        ("gdn[num_kv_heads=2, conv_size=0]", {}, 2 * 16 * 16 * 4),
        ("gdn[expand_v=2, conv_size=0]", {}, 4 * 16 * 32 * 4),
        ("gdn[num_v_heads=8, conv_size=0]", {}, 8 * 16 * 16 * 4),
        ("kda[expand_v=2, conv_size=0]", {}, 4 * 16 * 32 * 4),
        ("gla", {}, 4 * 8 * 16 * 4),
        ("mamba2[head_dim=16, state_dim=8, conv_size=0]", {}, 8 * 16 * 8 * 4),
        ("mamba2[head_dim=16, state_dim=8]", {}, 8 * 16 * 8 * 4 + 3 * (128 + 2 * 8) * 2),
        ("lightning", {}, 4 * 16 * 16 * 4),
        ("lightning", {"num_kv_heads": 2}, 4 * 16 * 16 * 4),  # each query head has a decay, so a state
        ("heads(3:nope, 1:lightning)", {"num_kv_heads": 2}, 2 * 2 * 16 * 100 * 2 + 1 * 16 * 16 * 4),
        ("heads(3:swa[window=30], 1:nope)", {"num_kv_heads": 2}, 2 * 2 * 16 * 30 * 2 + 2 * 1 * 16 * 100 * 2),
        ("heads(1:nope, 1:lightning)", {}, 2 * 2 * 16 * 100 * 2 + 2 * 16 * 16 * 4),
        ("mix(swa[window=30] + lightning)", {}, 2 * 4 * 16 * 30 * 2 + 4 * 16 * 16 * 4),
    ],
)
def test_state_bytes_by_hand(layout, changes, size):
    assert cost.state_bytes(mixer_of(layout, **changes), 100) == size


def test_state_bytes_follow_the_dtype_where_they_should():
    assert cost.state_bytes(mixer_of("full"), 100, dtype_bytes=4) == 2 * cost.state_bytes(mixer_of("full"), 100)
    lightning = mixer_of("lightning")
    assert cost.state_bytes(lightning, 100, dtype_bytes=4) == cost.state_bytes(lightning, 100)


@given(mixers(), st.integers(1, 1000))
def test_costs_of_any_mixer_are_sane(mixer, context):
    """Whole, positive; a recurrence costs the same at any length; no cost falls with length."""
    assert isinstance(cost.mixer_params(mixer, 64), int)
    assert isinstance(cost.state_bytes(mixer, context), int)
    assert 0 < cost.mixing_flops(mixer, context) <= cost.mixing_flops(mixer, 2 * context)
    assert 0 < cost.state_bytes(mixer, context) <= cost.state_bytes(mixer, 2 * context)
    leaves = [p.mixer for p in mixer.parts] if isinstance(mixer, Heads) else getattr(mixer, "mixers", [mixer])
    assert sum(cost.mixing_flops(leaf, context) for leaf in leaves) == pytest.approx(cost.mixing_flops(mixer, context))
    if all(leaf.recurrent for leaf in leaves):
        assert cost.mixing_flops(mixer, context) == cost.mixing_flops(mixer, 2 * context)
        assert cost.state_bytes(mixer, context) == cost.state_bytes(mixer, 2 * context)


# The twin.


@given(specs())
def test_the_twin_attends_to_everything_and_keeps_the_rest(spec):
    twin = cost.full_attention_twin(spec)
    assert dataclasses.replace(twin, layers=spec.layers) == spec
    for old, new in zip(spec.layers, twin.layers, strict=True):
        assert isinstance(new.mixer, Softmax)
        assert new.mixer.window_size is None
        assert dataclasses.replace(new, mixer=old.mixer) == old
        if isinstance(old.mixer, Softmax):
            assert dataclasses.replace(new.mixer, window_size=old.mixer.window_size) == old.mixer
    assert cost.full_attention_twin(twin) == twin


@pytest.mark.parametrize(
    ("layout", "heads"),
    [
        ("gdn nope[num_kv_heads=2, head_dim=32]", [(4, 2, 32), (4, 2, 32)]),
        ("gdn lightning", [(4, 4, 16), (4, 4, 16)]),
        ("heads(1:gdn[head_dim=32], 1:nope[head_dim=32, num_kv_heads=1]) gdn", [(4, 2, 32), (4, 2, 32)]),
        ("mix(swa[window=4, head_dim=32] + gdn[head_dim=32]) gdn", [(4, 4, 32), (4, 4, 32)]),
        ("mamba2[head_dim=16] gla", [(8, 8, 8), (4, 4, 16)]),
        ("lightning[num_kv_heads=2] gdn", [(4, 2, 16), (4, 4, 16)]),
    ],
)
def test_heads_of_the_twin(layout, heads):
    spec = Spec.from_layout(layout, vocab_size=8, d_model=64, num_layers=2, num_heads=4)
    mixers = [layer.mixer for layer in cost.full_attention_twin(spec).layers]
    assert [(m.num_heads, m.num_kv_heads, m.head_dim) for m in mixers if isinstance(m, Softmax)] == heads


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "layout", ["heads(5:full, 1:kda)", "heads(1:gdn, 5:full)", "heads(4:full, 1:lightning, 1:gdn)"]
)
def test_the_twin_of_parts_with_unequal_groups_has_the_kv_heads_of_the_layout(layout, num_kv_heads):
    shape = {"vocab_size": 8, "d_model": 96, "num_layers": 2, "num_heads": 6, "num_kv_heads": num_kv_heads}
    assert cost.full_attention_twin(Spec.from_layout(layout, **shape)) == Spec.from_layout("full", **shape)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("full", "4 x 16"),
        ("full[num_kv_heads=2]", "4/2 x 16"),
        ("gdn[num_kv_heads=2, expand_v=2]", "4/2 x 32"),
        ("gdn[num_v_heads=8]", "4/8 x 16"),
        ("heads(3:gdn, 1:nope)", "3 x 16 + 1 x 16"),
        ("mix(full + gdn)", "4 x 16 + 4 x 16"),
    ],
)
def test_heads_in_words(layout, text):
    spec = Spec.from_layout(layout, vocab_size=8, d_model=64, num_layers=1, num_heads=4)
    assert cost.cost(spec, 8).layers[0].heads == text


@pytest.mark.parametrize(
    ("layout", "num_kv_heads", "text"),
    [
        ("heads(3:nope, 1:kda)", 4, "18/3 x 16 + 6 x 16"),
        ("heads(3:nope, 1:kda)", 3, "18/3 (2*8, 2) x 16 + 6 x 16"),
        ("heads(1:gdn, 5:nope)", 8, "4 x 16 + 20/7 (2, 6*3) x 16"),
        ("heads(1:lightning, 1:kda)", 2, "12/1 x 16 + 12 x 16"),
    ],
)
def test_unequal_groups_in_words(layout, num_kv_heads, text):
    shape = {"vocab_size": 8, "d_model": 96, "num_layers": 1, "num_heads": 24, "head_dim": 16}
    spec = Spec.from_layout(layout, **shape, num_kv_heads=num_kv_heads)
    assert cost.cost(spec, 8).layers[0].heads == text


def test_mix_of_unlike_branches_needs_projections():
    parts = {"mixers": (mixer_of("full"), mixer_of("full", num_heads=2))}
    assert cost.mixer_params(Mix(**parts, fuse="project"), 64) == 8 * 64 * 64
    assert cost.mixer_params(Mix(**parts, fuse="project", multipliers=(0.5, 2.0)), 64) == 8 * 64 * 64
    with pytest.raises(ValueError, match="value sizes per head differ"):
        Mix(**parts)
