"""Which parameters have weight decay."""

from __future__ import annotations

import strategies
import torch
from contract.tools import examples
from hypothesis import given

from plait.model.lm import LM
from plait.spec import Spec
from plait.train.config import TrainConfig
from plait.train.optimizer import decayed, make_optimizer

WITHOUT = ("A_log", "dt_bias", "skip", "sink", "scale", "bias")
"""last words of names"""
MATRICES = {
    *("q", "k", "v", "o", "a", "b", "gate", "up", "down", "conv", "lm_head"),
    *("decay_down", "decay_up", "f_down", "f_up", "gate_down", "gate_up", "z", "x", "c", "dt", "route"),
}
"""words before .weight; of gates in heads(...) the number of the part"""


def wants_decay(name: str) -> bool:
    *_, owner, last = ("", *name.split("."))
    if last in WITHOUT or owner == "embed" or "norm" in owner:
        return False
    assert last == "weight" and (owner in MATRICES or ".gates." in name), f"{name}: say here whether it decays"
    return True


@examples(100)
@given(spec=strategies.specs())
def test_matrices_decay_and_nothing_else(spec: Spec):
    model = LM(spec, device="meta")
    parameters = dict(model.named_parameters())
    assert decayed(model) == {name for name in parameters if wants_decay(name)}
    optimizer = make_optimizer(model, TrainConfig(weight_decay=0.3))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {id(p): 0.3 if wants_decay(name) else 0.0 for name, p in parameters.items()}


def test_a_scale_for_each_branch_and_head_is_no_matrix():
    shape = {"vocab_size": 12, "d_model": 16, "num_layers": 1, "num_heads": 2}
    model = LM(Spec.from_layout("mix(gdn + nope)[fuse=scale]", **shape))
    assert model.layers[0].mixer.scale.ndim == 2
    assert "layers.0.mixer.scale" not in decayed(model)
    assert "layers.0.mixer.parts.0.conv.weight" in decayed(model)


def test_a_tied_head_is_the_embedding_and_another_one_a_matrix():
    shape = {"vocab_size": 12, "d_model": 16, "num_layers": 1, "num_heads": 2}
    tied, untied = (decayed(LM(Spec.from_layout("nope", **shape, tie_embeddings=tie))) for tie in (True, False))
    assert untied - tied == {"lm_head.weight"}
    assert "embed.weight" not in untied


def test_decay_shrinks_only_what_decays():
    """A step without gradients: AdamW multiplies by 1 - lr * weight_decay."""
    shape = {"vocab_size": 12, "d_model": 16, "num_layers": 2, "num_heads": 2}
    model = LM(Spec.from_layout("mamba2[head_dim=8] heads(1:kda, 1:nope)[scale=true, gate=true]", **shape))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    make_optimizer(model, TrainConfig(lr=0.1, weight_decay=0.5)).step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if wants_decay(name) else 1.0))


def test_the_scale_of_muon_is_the_one_asked_for():
    """0.2 sqrt(max(rows, columns)), or sqrt(max(1, rows / columns)), of 64 rows and 16 columns."""
    spec = Spec.from_layout("nope", vocab_size=8, d_model=16, num_layers=1, num_heads=2, d_ff=64)
    moved = []
    for scale in ("original", "match_rms_adamw"):
        model = LM(spec)
        matrix = model.get_parameter("layers.0.mlp.up.weight")  # 64 x 16
        before = matrix.detach().clone()
        model(torch.arange(8)[None]).square().mean().backward()
        make_optimizer(model, TrainConfig(optimizer="muon", muon_scale=scale, weight_decay=0)).step()
        moved.append((matrix.detach() - before).norm())
    torch.testing.assert_close(moved[1] / moved[0], torch.tensor(0.2 * 8 / 2))
