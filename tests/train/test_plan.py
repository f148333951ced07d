"""What `plait train --dry-run` foretells, against what training then does."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from plait import scoring
from plait.cost import cost
from plait.data.spaced_retrieval import SpacedRetrieval
from plait.model.lm import LM
from plait.scoring import score_tokens
from plait.spec import Spec
from plait.train import distributed
from plait.train import plan as planning
from plait.train.checkpoint import checkpoints
from plait.train.config import TrainConfig
from plait.train.loop import freeze, train
from plait.train.muon import muon_groups
from plait.train.plan import Shape, activation_bytes, plan, render

LAYOUTS = [
    "full",
    "nope[output_gate=true, qk_norm=head]",
    "swa[window=16] gdn",
    "gla kda",
    "mamba2 lightning[output_gate=low_rank]",
    "heads(3:gdn, 1:nope)[gate=true]",
    "mix(swa[window=16] + gdn)[fuse=gate] full",
    "mix(swa[window=16] + gdn)[fuse=project] full",
]
BATCH = [[Shape(rows=4, length=32, targets=128)]]


def spec_of(layout: str, *, d_model: int = 32, num_layers: int = 2, **fields) -> Spec:
    values = {"vocab_size": 50, "num_heads": 4, "d_ff": 48, **fields}
    return Spec.from_layout(layout, d_model=d_model, num_layers=num_layers, **values)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_and_matrices_are_those_of_the_model(layout, tied):
    spec = spec_of(layout, tie_embeddings=tied)
    model = LM(spec, device="meta")
    assert plan(spec, TrainConfig(), BATCH).params == model.num_params
    (matrices,) = (group["params"] for group in muon_groups(model) if group["rule"] == "muon")
    assert sum(part.matrices for part in planning._parts(spec)) == sum(p.numel() for p in matrices)


@pytest.mark.parametrize("item", ["recurrent:0-", "gdn.mixer:0-5", "nope:0-,gdn.mixer:0-", "gdn:3-"])
def test_trained_parameters_are_those_that_the_loop_leaves_free(item):
    spec, config = spec_of("gdn nope"), TrainConfig(steps=8, warmup=1, freeze=tuple(item.split(",")))
    model = LM(spec, device="meta")
    for done in (0, 4, 6):
        freeze(model, config, done)
        free = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert plan(spec, config, BATCH, done=done, fresh=False).trainable == free


def test_flops_are_three_forward_passes():
    spec, config = spec_of("swa[window=8] full"), TrainConfig(steps=10)
    two = [[Shape(rows=3, length=16, targets=1), Shape(rows=1, length=80, targets=1)]]
    found = plan(spec, config, two, done=4)
    forward = 48 * cost(spec, 16).flops_per_token + 80 * cost(spec, 80).flops_per_token
    assert found.flops == pytest.approx(3 * forward * 6)
    assert found.flops_per_token == pytest.approx(3 * forward / 128)
    assert (found.tokens_per_update, found.tokens, found.rows, found.lengths) == (128, 768, 4, (16, 80))
    longce = dataclasses.replace(config, objective="longce", longce_context=64, longce_stride=16)
    short = 2 * 79 * cost(spec, 79).flops_per_token  # windows that score tokens 64 to 79, and 80
    assert plan(spec, longce, two, done=4).flops == pytest.approx((3 * forward + short) * 6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("frozen", [(), ("gdn:0-",), ("gdn:0-2",)])
@pytest.mark.parametrize("keep", [0, 2])
def test_checkpoints_are_as_many_and_as_large_as_foretold(tmp_path, optimizer, frozen, keep):
    task = SpacedRetrieval(gaps=(2, 9), batch_size=4, eval_pairs=4)
    spec = spec_of("gdn nope", vocab_size=12)
    config = TrainConfig(
        steps=5, optimizer=optimizer, warmup=1, freeze=frozen, checkpoint_every=2, checkpoint_at=(3, 4), keep=keep
    )
    train(tmp_path / "x", spec, task, config, settings={}, progress=False)
    found = plan(spec, config, BATCH)
    written = checkpoints(tmp_path / "x")
    assert found.checkpoints == 5  # 0, 2, 3, 4, 5
    assert found.checkpoints_kept == (3 if keep else 5)
    assert len(written) in ({2, 3} if keep else {5})
    size = sum(file.stat().st_size for file in written[-1].glob("*.safetensors"))
    assert size == pytest.approx(found.checkpoint_bytes, abs=400 * len(list(LM(spec, device="meta").parameters())))


def test_memory_of_a_run_whose_layers_take_turns():
    spec = spec_of("gdn nope")
    config = TrainConfig(steps=9, warmup=1, freeze=("gdn:0-4", "nope:4-"), optimizer="adamw")
    memory = plan(spec, config, BATCH).memory
    assert memory.weights == 4 * LM(spec, device="meta").num_params
    assert memory.gradients < memory.weights
    assert memory.optimizer == 2 * memory.weights
    assert memory.total == sum(dataclasses.asdict(memory).values())
    assert plan(spec, dataclasses.replace(config, freeze=("gdn:0-",)), BATCH).memory.optimizer < memory.optimizer
    assert memory.casts == 0 < plan(spec, config, BATCH, bf16=True).memory.casts


@pytest.mark.parametrize("layout", ["full", "swa[window=32]", "gdn", "kda", "gla", "mamba2", "lightning"])
@pytest.mark.parametrize("bf16", [False, True])
def test_activations_are_roughly_what_is_kept(layout, bf16):
    spec = spec_of(layout, d_model=128, vocab_size=100, d_ff=320, num_heads=2)
    model, tokens = LM(spec), torch.randint(100, (2, 128))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        score_tokens(model, tokens, tokens)
    found = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)
    shape = Shape(rows=2, length=128, targets=256)
    foretold = activation_bytes(spec, shape, bf16=bf16, recompute=False)
    foretold += 2 * sum(part.matrices for part in planning._parts(spec)) if bf16 else 0
    assert 0.5 < foretold / found < 2
    assert activation_bytes(spec, shape, bf16=bf16, recompute=True) < foretold


def test_pieces_and_the_heads_chunks_bound_activations():
    spec, config = spec_of("full"), TrainConfig()
    whole, pieces = (plan(spec, dataclasses.replace(config, micro_batch=n), BATCH) for n in (0, 1))
    assert whole.memory.activations == pytest.approx(4 * pieces.memory.activations)
    assert pieces.piece == Shape(rows=1, length=32, targets=32)
    assert (planning.KEPT, planning.CHUNK) == (scoring.KEPT, scoring.CHUNK)


def test_memory_of_several_processes(tmp_path):
    """Each has its share of the rows; with FSDP of weights, gradients and optimizer too, and whole parts in passing."""
    spec, config = spec_of("gdn nope"), TrainConfig(steps=9, warmup=1, parallel="fsdp")
    alone = plan(spec, config, BATCH)
    ddp, fsdp = (plan(spec, config, BATCH, processes=4, sharded=sharded) for sharded in (False, True))
    assert (ddp.tokens, ddp.flops, fsdp.checkpoint_bytes) == (alone.tokens, alone.flops, alone.checkpoint_bytes)
    assert ddp.piece == fsdp.piece == Shape(rows=1, length=32, targets=32)
    assert ddp.memory.activations == fsdp.memory.activations == pytest.approx(alone.memory.activations / 4)
    assert (ddp.memory.weights, ddp.memory.optimizer) == (alone.memory.weights, alone.memory.optimizer)
    assert ddp.memory.exchange == alone.memory.gradients > alone.memory.exchange == 0
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(fsdp.memory, name) == getattr(alone.memory, name) // 4
    whole = plan(spec, config, [[*BATCH[0], *BATCH[0]]], processes=4, sharded=True)  # summed over two groups
    assert whole.memory.gradients == alone.memory.gradients
    assert fsdp.memory.exchange > 8 * spec.vocab_size * spec.d_model
    assert "memory of each of 4 processes, each with 1/4 of the model (fsdp)" in render(fsdp, "x")
    assert planning.BUCKET == distributed.BUCKET


def test_what_is_compiled_is_counted():
    config = TrainConfig(steps=9, warmup=1, compile=True, micro_batch=3)
    lengths = [[Shape(rows=rows, length=length, targets=1) for rows, length in ((4, 32), (4, 16), (9, 16))]]
    text = render(plan(spec_of("gdn nope", num_layers=4), config, lengths), "x")
    # 3 rows and 1 row, of 32 and of 16, for two kinds
    assert "compile      8 times: each kind of layer for each length and number of rows" in text


def test_a_plan_reads_like_this():
    config = TrainConfig(
        steps=1000, warmup=100, optimizer="muon", schedule="wsd", decay=300, freeze=("gdn:0-250", "nope.mixer:2000-")
    )
    text = render(plan(spec_of("3*gdn nope", num_layers=8), config, BATCH, done=40, fresh=False), "runs/x")
    for line in (
        "model        3*gdn nope",
        "frozen       gdn:0-250: 62,688 parameters, updates 1 to 250",
        "             blocks of layers 0-2, 4-6",
        "updates      41 to 1,000; 40 are done",
        "tokens       128 an update, 122,880 in all",
        "learning rate of AdamW (wsd: warmup to update 100, linear decay to 1e-05 after update 700)",
        "           Muon's has the same shape, with 0.02 at its peak",
    ):
        assert line in text.splitlines()
    assert "mixers of layers 3, 7" in text and "never" in text
    assert max(map(len, text.splitlines())) <= 100
    chart = [line.split("┤")[-1].split("│")[-1] for line in text.splitlines() if "█" in line]
    assert len(chart) == 8 and chart[0].count("█") == 36  # the stable phase
    assert chart[-1][0] != "█" and len(chart[-1].rstrip()) >= 57  # up at the left, down at the right


def test_a_plan_is_json_and_says_when_nothing_is_left():
    config = TrainConfig(steps=3, warmup=0, schedule="constant")
    found = plan(spec_of("full"), config, BATCH, done=3, fresh=False)
    assert (found.tokens, found.flops, found.checkpoints) == (0, 0, 0)
    assert "all 3 are done: nothing is left to do" in render(found, "x")
    assert json.loads(json.dumps(found.to_json()))["memory"]["total"] == found.memory.total
