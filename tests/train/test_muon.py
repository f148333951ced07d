"""Muon against torch's and the polar factor, AdamW within it against torch's, and two processes against one."""

from __future__ import annotations

import copy

import pytest
import strategies
import torch
import torch.multiprocessing as mp
from contract.tools import examples
from hypothesis import given
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from plait.model.lm import LM
from plait.spec import Spec
from plait.train.checkpoint import Checkpoint, load_optimizer, save_checkpoint
from plait.train.muon import Muon, muon_groups, orthogonalize, update_scale
from plait.train.optimizer import decayed

SHAPE = {"vocab_size": 12, "d_model": 16, "num_layers": 2, "num_heads": 2}
LAYOUT = "gdn[d_ff=24] nope[d_ff=24]"


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def give_gradients(model: nn.Module, seed: int) -> None:
    """The same gradients for the same names, whatever the placement."""
    for i, p in enumerate(model.parameters()):
        whole = random(*p.shape, seed=1000 * seed + i).to(p.dtype)
        p.grad = distribute_tensor(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole


# One matrix


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (1, 7)], ids=str)
def test_five_steps_are_near_the_polar_factor(shape):
    """The published coefficients do not converge to 1: singular values end in 0.7 to 1.2, singular vectors are kept."""
    U, _, Vh = torch.linalg.svd(random(*shape), full_matrices=False)
    g = U @ torch.diag(torch.linspace(1, 3, min(shape), dtype=torch.float64)) @ Vh
    x = orthogonalize(g)
    assert x.dtype == torch.float64 and x.shape == g.shape
    inner = U.mT @ x @ Vh.mT
    values = inner.diagonal()
    assert values.min() > 0.68 and values.max() < 1.21
    torch.testing.assert_close(inner, torch.diag(values), rtol=0, atol=1e-12)
    assert (x - U @ Vh).norm() / (U @ Vh).norm() < 0.32
    torch.testing.assert_close(orthogonalize(1000 * g), x)
    torch.testing.assert_close(orthogonalize(g.T), x.T)


def test_nothing_stays_nothing():
    assert orthogonalize(torch.zeros(3, 5)).equal(torch.zeros(3, 5))


def test_scales():
    assert update_scale("original", 4, 16) == 1 and update_scale("original", 16, 4) == 2
    assert update_scale("match_rms_adamw", 4, 16) == update_scale("match_rms_adamw", 16, 4) == pytest.approx(0.8)


def test_the_matched_update_is_of_adamw_size():
    x = orthogonalize(random(64, 256)) * update_scale("match_rms_adamw", 64, 256)
    assert x.square().mean().sqrt() == pytest.approx(0.2, rel=0.2)


# Against torch


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_torch(scale, nesterov):
    """torch.optim.Muon always runs Newton-Schulz in bf16."""
    ours = [nn.Parameter(random(*shape).float()) for shape in ((6, 10), (10, 6), (5, 5))]
    theirs = copy.deepcopy(ours)
    settings = {"lr": 0.02, "weight_decay": 0.1}
    optimizer = Muon(
        [{"params": ours, "rule": "muon", **settings}], scale=scale, nesterov=nesterov, ns_dtype=torch.bfloat16
    )
    reference = torch.optim.Muon(theirs, **settings, momentum=0.95, nesterov=nesterov, adjust_lr_fn=scale)
    for step in range(4):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = random(*p.shape, seed=10 * step + i).float()
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_the_rest_is_adamw():
    ours = LM(Spec.from_layout(LAYOUT, **SHAPE))
    theirs = copy.deepcopy(ours)
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    optimizer = Muon([{"params": list(ours.parameters()), "rule": "adamw", **settings}])
    reference = torch.optim.AdamW(theirs.parameters(), **settings, betas=(0.9, 0.95))
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.equal(q)


# A model


@examples(50)
@given(spec=strategies.specs())
def test_hidden_matrices_go_to_muon(spec: Spec):
    model = LM(spec, device="meta")
    groups = muon_groups(model, lr=0.5, adamw_lr=0.25, weight_decay=0.1)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    group_of = {id(p): group for group in groups for p in group["params"]}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, p in model.named_parameters():
        group = group_of[id(p)]
        muon = name in linear and name.startswith("layers.")
        assert group["rule"] == ("muon" if muon else "adamw"), name
        assert group["lr"] == group["initial_lr"] == (0.5 if muon else 0.25)
        assert group["weight_decay"] == (0.1 if name in decayed(model) else 0), name
    Muon(groups)


def test_frozen_parameters_and_their_state_stay():
    model = LM(Spec.from_layout(LAYOUT, **SHAPE))
    optimizer = Muon(muon_groups(model))
    give_gradients(model, 0)
    still = [p for i, p in enumerate(model.parameters()) if i % 2]
    before = [p.detach().clone() for p in still]
    for p in still:
        p.grad = None
    optimizer.step()
    assert all(p.equal(q) for p, q in zip(still, before, strict=True))
    assert not any(p in optimizer.state for p in still)


def test_checkpoints_by_name_go_on_where_they_were(tmp_path):
    def make() -> tuple[LM, Muon]:
        model = LM(Spec.from_layout(LAYOUT, **SHAPE))
        return model, Muon(muon_groups(model))

    model, optimizer = make()
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
    path = save_checkpoint(tmp_path, model, optimizer, 2, 0, 0.0)
    again, optimizer_again = make()
    again.load_state_dict(model.state_dict())
    load_optimizer(Checkpoint.read(path), again, optimizer_again)
    whole, optimizer_whole = make()
    whole.load_state_dict(model.state_dict())
    optimizer_whole.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # which holds the tensors themselves
    pairs = ((model, optimizer), (again, optimizer_again), (whole, optimizer_whole))
    for m, o in pairs:
        give_gradients(m, 2)
        o.step()
    for p, q, r in zip(*(m.parameters() for m, _ in pairs), strict=True):
        assert p.equal(q) and p.equal(r)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 1.0}, "momentum = 1.0"),
        ({"steps": 0}, "steps = 0"),
        ({"scale": "spectral"}, "scale = 'spectral'; it must be one of match_rms_adamw, original"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "rule": "muon", "lr": 1, "weight_decay": 0}], **settings)


def test_impossible_groups_are_refused():
    vector = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"shape \(3,\); it takes matrices only"):
        Muon([{"params": [vector], "rule": "muon", "lr": 1, "weight_decay": 0}])
    with pytest.raises(ValueError, match="rule = 'sgd'"):
        Muon([{"params": [vector], "rule": "sgd", "lr": 1, "weight_decay": 0}])


# Processes


def train_sharded(rank: int, size: int, path: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}.rendezvous", rank=rank, world_size=size)
    try:
        mesh = init_device_mesh("cpu", (size,))
        model = tiny()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        updated = run(model)
        wrong = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(1)]))
        wrong.grad = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(1)])
        with pytest.raises(ValueError, match="sharded once, by its rows"):
            Muon([{"params": [wrong], "rule": "muon", "lr": 1.0, "weight_decay": 0.0}]).step()
        copies = init_device_mesh("cpu", (size, 1), mesh_dim_names=("copies", "shards"))
        replicated = tiny()
        for module in (*replicated.blocks, replicated):
            fully_shard(module, mesh=copies)
        assert any(isinstance(x, Replicate) for x in next(replicated.parameters()).placements)
        results = {"shards": updated, "copies": run(replicated)}
        if rank == 0:
            torch.save(results, path)
    finally:
        torch.distributed.destroy_process_group()


def tiny() -> LM:
    """With matrices whose rows two ranks cannot halve, and one of a single row."""
    spec = Spec.from_layout("gdn[d_ff=25] nope[d_ff=25]", vocab_size=13, d_model=6, num_layers=2, num_heads=1)
    return LM(spec, dtype=torch.float64)


def run(model: LM) -> dict[str, torch.Tensor]:
    """Three updates; parameters and momenta, whole."""
    optimizer = Muon(muon_groups(model), ns_dtype=torch.float32)
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
    found = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{key}.{name}": value for key, value in optimizer.state[p].items()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}


def test_two_processes_update_as_one_does(tmp_path):
    path = str(tmp_path / "two.pt")
    mp.spawn(train_sharded, (2, path), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    one, two = run(tiny()), torch.load(path)
    shapes = {p.shape[0] for p in tiny().parameters()}
    assert {1, 25} <= shapes
    for found in two.values():
        assert found.keys() == one.keys()
        for name, x in one.items():
            assert x.equal(found[name]), name
