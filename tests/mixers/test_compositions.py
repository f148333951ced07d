"""heads(...) and mix(...) are what their parts give by themselves, put together by formulas written out here; attention
with KV groups of unequal size is plain attention with keys and values repeated. In float64."""

from __future__ import annotations

import pytest
import torch
from contract.configs import build as build_model
from contract.tools import dense, error, examples, make_mixer, pieces
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from plait.config import Gdn, Gla, HeadPart, Heads, Kda, Leaf, Lightning, Mamba2, Mix, Softmax
from plait.mixers import MixerModule, build_mixer
from plait.mixers.seq import Seq
from plait.probes import capture, patch, points
from plait.spec import Spec

D, V, T, EPS = 10, 6, 20, 1e-3
LONG = 70
"""over the 64 queries that attention takes at once, and chunks of 16 to 64 tokens"""
TOLERANCE = 1e-10
NOPE = Softmax(num_heads=2, num_kv_heads=1, head_dim=V)
SWA = Softmax(num_heads=3, num_kv_heads=3, head_dim=V, rope_theta=30.0, window_size=5, sink=True, output_gate=True)
RAGGED = Softmax(num_heads=3, num_kv_heads=2, kv_map=(0, 1, 1), head_dim=V, qk_norm="head", rope_theta=30.0)
GDN = Gdn(num_heads=4, num_kv_heads=2, num_v_heads=2, head_dim=4, expand_v=V / 4)
KDA = Kda(num_heads=2, head_dim=3, expand_v=2.0)
GLA = Gla(num_heads=2, head_dim=4, expand_v=V / 4, conv_size=3)
MAMBA2 = Mamba2(num_heads=2, head_dim=V, state_dim=5, num_groups=1, norm_groups=2)
LIGHTNING = Lightning(num_heads=3, num_kv_heads=2, kv_map=(0, 0, 1), head_dim=V, slopes=(0.1, 1.0, 0.01), gate_rank=3)
HEADS = {
    "gdn, nope": ((GDN, (0, 1, 2, 3)), (NOPE, (4, 5))),
    "nope, gdn, interleaved": ((NOPE, (1, 4)), (GDN, (0, 2, 3, 5))),
    "gdn, nope, out of order": ((GDN, (5, 0, 3, 2)), (NOPE, (4, 1))),
    "kda, swa, lightning": ((KDA, (2, 7)), (SWA, (6, 0, 3)), (LIGHTNING, (1, 5, 4))),
    "mamba2, ragged, gla": ((MAMBA2, (3, 0)), (RAGGED, (1, 4, 6)), (GLA, (2, 5))),
    "nope, swa: two kinds of softmax": ((NOPE, (4, 0)), (SWA, (1, 3, 2))),
}
OPTIONS = {
    "plain": {},
    "norm": {"norm": True},
    "gate, scale": {"scale": True, "gate": True},
    "gate, norm, scale": {"norm": True, "scale": True, "gate": True},
    "norm, gate, scale": {"norm": True, "scale": True, "gate": True, "order": "norm_gate"},
}


def headwise(name: str, **options) -> Heads:
    parts = tuple(HeadPart(mixer=mixer, heads=heads) for mixer, heads in HEADS[name])
    return Heads(parts=parts, norm_eps=EPS, **options)


def inputs(length: int = T) -> Tensor:
    return torch.randn(2, length, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def alone(config: Leaf, whole: nn.Module, i: int, x: Tensor) -> Tensor:
    """Head outputs [B, T, H, V] of a mixer of its own with the weights of part i of `whole`, which gradients reach: the
    projection that it has by itself is the identity."""
    own = build_mixer(config, D, "torch")
    weights = {name: weight for name, weight in whole.parts[i].named_parameters() if not name.startswith("o.")}
    identity = torch.eye(config.num_out_heads * config.value_dim, dtype=x.dtype)
    y = functional_call(own, {**weights, "o.weight": identity}, (x, None, dense(*x.shape[:2])), strict=True)[0]
    return y.unflatten(-1, (config.num_out_heads, config.value_dim))


def same(mixer: MixerModule, x: Tensor, want: Tensor) -> None:
    """Outputs of both backends, whole and in pieces, and the gradients of the input and of every weight."""
    with torch.no_grad():
        for backend in ("naive", "torch"):
            mixer.set_backend(backend)
            assert error(mixer(x, None, dense(*x.shape[:2]))[0], want) <= TOLERANCE
            length = x.shape[1]
            cuts = tuple(t for t in (length // 2, length // 2 + 1, length // 2 + 2, length - 1) if 0 < t < length)
            assert error(pieces(mixer, x, cuts), want) <= TOLERANCE
    same_gradients(mixer(x, None, dense(*x.shape[:2]))[0], want, {"x": x, **dict(mixer.named_parameters())})


def same_gradients(got: Tensor, want: Tensor, leaves: dict[str, Tensor]) -> None:
    direction = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=want.dtype)
    got_grads, want_grads = (torch.autograd.grad((y * direction).sum(), list(leaves.values())) for y in (got, want))
    least = 1e-4 * max(float(grad.norm()) for grad in want_grads)  # that of q and k is 0 where a query sees one key
    trios = zip(leaves, got_grads, want_grads, strict=True)
    errors = {name: float((g - w).norm() / w.norm().clamp(min=least)) for name, g, w in trios}
    assert all(each <= TOLERANCE for each in errors.values()), errors


def rms(x: Tensor, eps: float = EPS) -> Tensor:
    """Over the last dimension, without a weight."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_every_head_is_that_of_its_mixer(name: str):
    """Before the output projection, at the head's own index."""
    config, x = headwise(name), inputs(LONG)
    whole = make_mixer(config, D)
    o_BTHV, _ = whole.heads(x, None, dense(2, LONG))
    for i, part in enumerate(config.parts):
        own = alone(part.mixer, whole, i, x)
        for j, head in enumerate(part.heads):
            assert error(o_BTHV[:, :, head], own[:, :, j]) <= TOLERANCE


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", HEADS)
def test_heads(name: str, options: str):
    """Of head h of part p: o = mixer_p(x)_h, gate_h = sigmoid(W_h x + b_h) in softmax parts and 1 in others; then
    gamma_h (gate_h o) / rms(gate_h o), or gamma_h gate_h o / rms(o)."""
    config, x = headwise(name, **OPTIONS[options]), inputs().requires_grad_()
    whole = make_mixer(config, D)
    outs: dict[int, Tensor] = {}
    for i, part in enumerate(config.parts):
        own = alone(part.mixer, whole, i, x)
        gated = config.gate and isinstance(part.mixer, Softmax)
        for j, head in enumerate(part.heads):
            o, rows = own[:, :, j], slice(j * V, (j + 1) * V)
            gate = 1.0
            if gated:
                gate = sigmoid(x @ whole.gates[str(i)].weight[rows].T + whole.gates[str(i)].bias[rows])
            if config.order == "norm_gate":
                o = gate * (rms(o) if config.norm else o)
            else:
                o = rms(gate * o) if config.norm else gate * o
            outs[head] = whole.scale[head] * o if config.scale else o
    same(whole, x, torch.cat([outs[head] for head in sorted(outs)], -1) @ whole.o.weight.T)


def test_only_softmax_parts_are_gated():
    whole = make_mixer(headwise("kda, swa, lightning", gate=True), D)
    assert list(whole.gates) == ["1"]
    assert whole.gates["1"].weight.shape == (3 * V, D)


def plain_of(config: Softmax | Lightning, ragged: nn.Module) -> dict[str, Tensor]:
    """The weights of multi-head attention, a row of keys and values for every query head, which gradients reach."""
    weights = dict(ragged.named_parameters())
    for name in ("k.weight", "v.weight"):
        weights[name] = weights[name].unflatten(0, (config.num_kv_heads, -1))[list(config.kv_map)].flatten(0, 1)
    return weights


MAPS = {"3:1": (0, 0, 0, 1), "1:2:3": (0, 1, 1, 2, 2, 2), "2:1:2:1": (0, 0, 1, 2, 2, 3), "1:1:4": (0, 1, 2, 2, 2, 2)}
ATTENTION = {
    "nope": {},
    "rope": {"rope_theta": 30.0, "rope_fraction": 2 / 3},
    "window": {"window_size": 5, "rope_theta": 30.0},
    "window over a block": {"window_size": 66},
    "window of one token": {"window_size": 1, "sink": True},
    "sink": {"sink": True},
    "sink, window, norm, gate, log-n": {
        "sink": True,
        "window_size": 9,
        "qk_norm": "head",
        "output_gate": True,
        "logn": "loga",
        "logn_base": 4.0,
    },
}


@pytest.mark.parametrize("options", ATTENTION)
@pytest.mark.parametrize("groups", MAPS)
def test_ragged_groups_are_plain_attention_with_keys_repeated(groups: str, options: str):
    """The gradients of a KV head's weights are the sums of those of its query heads."""
    kv_map = MAPS[groups]
    H, x = len(kv_map), inputs(LONG).requires_grad_()
    config = Softmax(num_heads=H, num_kv_heads=kv_map[-1] + 1, kv_map=kv_map, head_dim=V, **ATTENTION[options])
    ragged = make_mixer(config, D)
    plain = build_mixer(Softmax(num_heads=H, num_kv_heads=H, head_dim=V, **ATTENTION[options]), D, "naive")
    want = functional_call(plain, plain_of(config, ragged), (x, None, dense(2, LONG)))[0]
    same(ragged, x, want)
    with torch.no_grad():
        assert error(pieces(ragged, x, (*range(1, 13), *range(64, LONG))), want) <= TOLERANCE


@examples(25)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    length=st.sampled_from((1, 2, 7, 64, 65)),
    window=st.none() | st.sampled_from((1, 2, 5, 64, 65)),
    sink=st.booleans(),
)
def test_ragged_groups_of_any_sizes(sizes: list[int], length: int, window: int | None, sink: bool):
    kv_map = tuple(kv for kv, size in enumerate(sizes) for _ in range(size))
    H, x = len(kv_map), inputs(length).requires_grad_()
    config = Softmax(
        num_heads=H, num_kv_heads=len(sizes), kv_map=kv_map, head_dim=4, window_size=window, sink=sink, rope_theta=30.0
    )
    ragged = make_mixer(config, D)
    plain = Softmax(num_heads=H, num_kv_heads=H, head_dim=4, window_size=window, sink=sink, rope_theta=30.0)
    weights = plain_of(config, ragged)
    same(ragged, x, functional_call(build_mixer(plain, D, "naive"), weights, (x, None, dense(2, length)))[0])


@pytest.mark.parametrize("groups", MAPS)
def test_ragged_groups_of_lightning(groups: str):
    kv_map = MAPS[groups]
    slopes = tuple(0.02 * (h + 1) ** 2 for h in range(len(kv_map)))
    config = Lightning(
        num_heads=len(kv_map), num_kv_heads=kv_map[-1] + 1, kv_map=kv_map, head_dim=4, slopes=slopes, gate_rank=3
    )
    ragged, x = make_mixer(config, D), inputs().requires_grad_()
    plain = Lightning(num_heads=len(kv_map), num_kv_heads=len(kv_map), head_dim=4, slopes=slopes, gate_rank=3)
    weights = plain_of(config, ragged)
    same(ragged, x, functional_call(build_mixer(plain, D, "naive"), weights, (x, None, dense(2, T)))[0])


def test_the_cache_holds_the_kv_heads():
    """Not one for each query head, and of a window no more than its tokens; so does what a whole model keeps."""
    ragged = Softmax(num_heads=6, num_kv_heads=3, kv_map=MAPS["1:2:3"], head_dim=V)
    for config, slots in ((ragged, 40), (Softmax(**{**vars(ragged), "window_size": 9}), 9)):
        state = make_mixer(config, D).new_state(2, 40, dtype=torch.float64, device=torch.device("cpu"))
        assert {name: tuple(x.shape) for name, x in state.tensors()} == {
            "k_SLGE": (2, slots, 3, V),
            "v_SLGE": (2, slots, 3, V),
        }
    whole = make_mixer(headwise("mamba2, ragged, gla"), D)
    state = whole.new_state(2, 40, dtype=torch.float64, device=torch.device("cpu"))
    assert {name: tuple(x.shape) for name, x in state.tensors() if name.startswith("parts.1.")} == {
        "parts.1.k_SLGE": (2, 40, 2, V),
        "parts.1.v_SLGE": (2, 40, 2, V),
    }


class Largest(TorchDispatchMode):
    """Entries of the largest tensor that an operation made, views by what they are views of."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("window", [None, 30])
@torch.no_grad()
def test_a_step_over_ragged_groups_expands_no_keys(window: int | None):
    """Four query heads read the last KV head: repeated for them alone, its keys would be more than the whole cache."""
    config = Softmax(num_heads=6, num_kv_heads=3, kv_map=MAPS["1:1:4"], head_dim=16, window_size=window)
    ragged, x = make_mixer(config, D), inputs(40)
    state = ragged.new_state(2, 40, dtype=x.dtype, device=x.device)
    ragged(x[:, :39], state, Seq.build((2, 39), x.device, past=torch.zeros(2, dtype=torch.long)))
    seq = Seq.build((2, 1), x.device, past=torch.full((2,), 39), max_past=39)
    with Largest() as largest:
        ragged(x[:, 39:], state, seq)
    assert largest.numel <= state.k_SLGE.numel()


BRANCHES = {
    "swa, lightning": (SWA, LIGHTNING),
    "nope, kda, mamba2": (NOPE, KDA, MAMBA2),
    "gdn, gdn": (GDN, GDN),
    "gla, ragged": (GLA, Softmax(num_heads=2, num_kv_heads=1, head_dim=V, window_size=4)),
}


@pytest.mark.parametrize("fuse", ["mean", "sum", "scale", "gate"])
@pytest.mark.parametrize("name", BRANCHES)
def test_mix(name: str, fuse: str):
    """mean: of o_p / rms(o_p), over all heads of a branch; scale: sum_p s_ph o_ph; gate: sum_p softmax(R x)_p o_p."""
    config, x = Mix(mixers=BRANCHES[name], fuse=fuse, norm_eps=EPS), inputs().requires_grad_()
    whole, P = make_mixer(config, D), len(BRANCHES[name])
    outs = torch.stack([alone(mixer, whole, p, x) for p, mixer in enumerate(config.mixers)])
    if fuse == "mean":
        fused = rms(outs.flatten(-2)).mean(0)
    elif fuse == "sum":
        fused = outs.sum(0).flatten(-2)
    elif fuse == "scale":
        assert whole.scale.shape == (P, config.num_out_heads)
        fused = torch.einsum("ph,pbthv->bthv", whole.scale, outs).flatten(-2)
    else:
        exps = torch.exp(x @ whole.route.weight.T)
        fused = torch.einsum("btp,pbthv->bthv", exps / exps.sum(-1, keepdim=True), outs).flatten(-2)
    same(whole, x, fused @ whole.o.weight.T)


@pytest.mark.parametrize("multipliers", [None, (0.7, -1.3, 0.4)])
def test_mix_project(multipliers: tuple[float, ...] | None):
    """sum_p m_p W_p o_p: branches may differ in heads and value sizes."""
    branches = (NOPE, GDN, Mamba2(num_heads=1, head_dim=8, state_dim=3))
    config, x = Mix(mixers=branches, fuse="project", multipliers=multipliers), inputs().requires_grad_()
    whole = make_mixer(config, D)
    terms = [
        m * alone(mixer, whole, p, x).flatten(-2) @ whole.parts[p].o.weight.T
        for p, (mixer, m) in enumerate(zip(branches, multipliers or (1.0, 1.0, 1.0), strict=True))
    ]
    same(whole, x, terms[0] + terms[1] + terms[2])


LAYOUT = (
    "heads(2:gdn, 1:nope)[norm=true, gate=true] mix(swa[window=4] + kda) mix(full + mamba2[head_dim=4])[fuse=project]"
)


def model():
    spec = Spec.from_layout(LAYOUT, vocab_size=11, d_model=12, num_layers=3, num_heads=3, head_dim=4, d_ff=8)
    return build_model(spec, 0, torch.float64, "torch")


TOKENS = torch.randint(0, 11, (3, 12), generator=torch.Generator().manual_seed(0))
DELTA, SOFTMAX = ("q", "k", "v", "decay", "beta", "heads"), ("q", "k", "v", "heads")


def test_points_of_parts():
    """Those of every part, but for its `out`: a part has none of its own."""
    parts = {0: (DELTA, SOFTMAX), 1: (SOFTMAX, DELTA), 2: (SOFTMAX, ("q", "k", "v", "decay", "heads"))}
    own = {0: ["heads", "out"], 1: ["heads", "out"], 2: ["out"]}
    for i, names in parts.items():
        inner = [f"parts.{j}.{name}" for j, part in enumerate(names) for name in part]
        found = [name for name in points(model()) if name.startswith(f"layers.{i}.mixer.")]
        assert found == [f"layers.{i}.mixer.{name}" for name in (*inner, *own[i])]


@torch.no_grad()
def test_capture_of_parts_in_prefill_and_decode():
    lm = model()
    names = [name for name in points(lm) if ".parts." in name]
    with capture(lm, *names) as whole:
        lm(TOKENS)
    assert set(whole) == set(names)
    assert whole["layers.0.mixer.parts.0.q"].shape == (3, 12, 2, 4)
    assert whole["layers.0.mixer.parts.1.heads"].shape == (3, 12, 1, 4)
    cache, seen = lm.new_cache(3, 12), []
    for start, end in ((0, 7), (7, 8), (8, 9), (9, 11), (11, 12)):
        with capture(lm, *names) as piece:
            lm(TOKENS[:, start:end], cache=cache)
        seen.append(piece)
    for name in names:
        assert error(torch.cat([piece[name] for piece in seen], 1), whole[name]) <= TOLERANCE, name


@torch.no_grad()
def test_parts_capture_what_a_mixer_alone_has():
    """The norm and the gate of heads(...) come after the part's `heads`."""
    lm = model()
    block = lm.blocks[0]
    with capture(lm, "layers.0.*") as seen:
        lm(TOKENS)
    x = block.norm1(seen["layers.0.in"])
    for i, part in enumerate(block.mixer.config.parts):
        own = alone(part.mixer, block.mixer, i, x)
        assert error(seen[f"layers.0.mixer.parts.{i}.heads"], own) <= TOLERANCE
    q = (x @ block.mixer.parts[1].q.weight.T).unflatten(-1, (1, 4))
    assert error(seen["layers.0.mixer.parts.1.q"], q) <= TOLERANCE


@torch.no_grad()
def test_patch_of_a_part_removes_its_heads():
    lm = model()
    with patch(lm, {"layers.0.mixer.parts.1.heads": torch.zeros_like}), capture(lm, "layers.0.mixer.heads") as seen:
        lm(TOKENS)
    heads = seen["layers.0.mixer.heads"]
    assert (heads[:, :, 2] == 0).all()
    assert (heads[:, :, :2] != 0).all()
