"""Lightning attention: against MiniMax's layer in transformers, with the same weights and inputs, in float32; the two
families of slopes against their published formulas."""

from __future__ import annotations

import importlib

import pytest
import torch
from contract.configs import disturb
from contract.tools import dense, error, pieces
from torch import Tensor, nn
from torch.func import functional_call

from plait.config import Lightning
from plait.mixers import MixerModule, build_mixer
from plait.spec import Spec

D = 24


def from_layout(layout: str, index: int, depth: int, num_heads: int, head_dim: int = 8) -> Lightning:
    """The mixer that a layout of one kind of layer gives layer `index` of `depth`. The norm of MiniMax's layer has an
    epsilon of 1e-6 whatever its config says."""
    spec = Spec.from_layout(
        layout, vocab_size=8, d_model=D, num_layers=depth, num_heads=num_heads, num_kv_heads=num_heads,
        head_dim=head_dim, norm_eps=1e-6,
    )  # fmt: skip
    mixer = spec.layers[index].mixer
    assert isinstance(mixer, Lightning)
    return mixer


def minimax(index: int, depth: int, num_heads: int, head_dim: int = 8) -> Lightning:
    return from_layout("lightning[output_norm=full, output_gate=full]", index, depth, num_heads, head_dim)


CASES = {
    "first of one": (0, 1, 3, 8),
    "first": (0, 4, 4, 8),
    "middle, heads not a power of two": (2, 5, 6, 6),
    "last, hardly a decay": (3, 4, 2, 16),
    "a deep model's second": (1, 80, 8, 4),
}
"""layer, depth, heads, head_dim"""


@torch.no_grad()
def load(index: int, depth: int, num_heads: int, head_dim: int, block_size: int = 16, seed: int = 0) -> nn.Module:
    """Their layer, its weights moved away from where they start."""
    module = importlib.import_module("transformers.models.minimax.modeling_minimax")
    config = module.MiniMaxConfig(
        hidden_size=D,
        num_hidden_layers=depth,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=head_dim,
        layer_types=["linear_attention"] * depth,
        block_size=block_size,
    )
    torch.manual_seed(seed)
    layer = module.MiniMaxLightningAttention(config, index)
    for parameter in layer.parameters():
        if parameter.ndim == 2:
            parameter.mul_(2)
    disturb(layer, seed)
    return layer


def ours_of(theirs: nn.Module) -> dict[str, Tensor]:
    """Our weights, as functions of theirs: gradients pass through. Their rows: a head's q, k and v, then the next's."""
    qkv = theirs.qkv_proj.weight.view(theirs.num_attention_heads, 3, -1, D)
    return {
        **{f"{name}.weight": qkv[:, i].flatten(0, 1) for i, name in enumerate("qkv")},
        "gate_up.weight": theirs.output_gate.weight,
        "norm.weight": theirs.norm.weight,
        "o.weight": theirs.out_proj.weight,
    }


def build(config: Lightning, theirs: nn.Module) -> MixerModule:
    ours = build_mixer(config, D, "torch")
    ours.load_state_dict(ours_of(theirs))
    return ours


def run(theirs: nn.Module, x: Tensor) -> Tensor:
    return theirs(x, position_embeddings=None, attention_mask=None)[0]


def inputs(T: int) -> Tensor:
    return torch.randn(2, T, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 150])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_parity(name: str, T: int):
    theirs = load(*CASES[name])
    ours, x = build(minimax(*CASES[name]), theirs), inputs(T)
    want = run(theirs, x)
    cuts = tuple(t for t in (T // 2, T // 2 + 1, T // 2 + 2, T - 1) if 0 < t < T)
    for backend in ("torch", "naive"):
        ours.set_backend(backend)
        assert error(ours(x, None, dense(2, T))[0], want) <= 1e-5
        assert error(pieces(ours, x, cuts), want) <= 1e-5


@pytest.mark.parametrize("block_size", [1, 7, 256])
@torch.no_grad()
def test_decode_token_by_token(block_size: int):
    """And their blocks of any size."""
    case = CASES["middle, heads not a power of two"]
    theirs = load(*case, block_size=block_size)
    ours, x = build(minimax(*case), theirs), inputs(70)
    assert error(pieces(ours, x, tuple(range(1, 70))), run(theirs, x)) <= 1e-5


@pytest.mark.parametrize("backend", ["torch", "naive"])
@pytest.mark.parametrize("T", [7, 64, 100])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, T: int, backend: str):
    """Of the input and of all their weights."""
    theirs = load(*CASES[name]).train()
    ours, x = build_mixer(minimax(*CASES[name]), D, backend), inputs(T).requires_grad_()
    y = functional_call(ours, ours_of(theirs), (x, None, dense(2, T)))[0]
    wanted = {"x": x, **dict(theirs.named_parameters())}
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    want = torch.autograd.grad((run(theirs, x) * direction).sum(), list(wanted.values()))
    got = torch.autograd.grad((y * direction).sum(), list(wanted.values()))
    errors = {leaf: error(g, w) for leaf, g, w in zip(wanted, got, want, strict=True)}
    assert max(errors.values()) <= 1e-4, errors


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8])
@pytest.mark.parametrize(("index", "depth"), [(0, 1), (0, 2), (1, 2), (3, 12), (11, 12), (40, 80)])
def test_geometric_slopes_are_minimaxs(index: int, depth: int, num_heads: int):
    got = torch.tensor(minimax(index, depth, num_heads).slopes)
    want = load(index, depth, num_heads, 8).slope_rate.flatten()
    assert got.tolist() == pytest.approx(want.tolist(), rel=2e-6, abs=0)


LINEAR = {
    (0, 2, 4): [0.0, 2.0, 4.0, 6.0],
    (1, 2, 4): [0.0, 1.0, 2.0, 3.0],
    (0, 12, 8): [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    (9, 12, 8): [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75],
    (2, 4, 16): [0.25 * h for h in range(16)],
    (1, 4, 3): [0.0, 2.0, 4.0],
    (5, 6, 1): [0.0],
}
"""layer l, depth L, heads H: head h has 8 h (1 - l / L) / H (flash-linear-attention's lightning_attn)"""


@pytest.mark.parametrize("place", LINEAR, ids=str)
def test_linear_slopes(place: tuple[int, int, int]):
    got = from_layout("lightning[slope_family=linear]", *place).slopes
    assert list(got) == pytest.approx(LINEAR[place], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("backend", ["torch", "naive"])
@pytest.mark.parametrize("family", ["geometric", "linear"])
@torch.no_grad()
def test_a_slope_is_the_decay_of_a_step(family: str, backend: str):
    """o_t = sum_s exp(-slope (t - s)) (q_t . k_s) v_s, without a scale, in float64."""
    layout = f"lightning[slope_family={family}, output_norm=none, output_gate=none, activation=none]"
    config, T = from_layout(layout, 1, 3, 4), 150
    ours = build_mixer(config, D, backend)
    ours.init_weights(D**-0.5, torch.Generator().manual_seed(0))
    ours, x = ours.double(), inputs(T).double()
    q, k, v = (projection(x).unflatten(-1, (4, 8)) for projection in (ours.q, ours.k, ours.v))
    ago = torch.arange(T)[:, None] - torch.arange(T)
    decay_HTS = torch.exp(-torch.tensor(config.slopes, dtype=torch.float64)[:, None, None] * ago).tril()
    want = torch.einsum("hts,bthe,bshe,bshv->bthv", decay_HTS, q, k, v)
    assert error(ours.heads(x, None, dense(2, T))[0], want) <= 1e-10
