"""The training loop: exact resume and branches, freezing, weighting, clipping, records, refusals."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait import records, scoring
from plait.data import IGNORE
from plait.data.packed import Packed, Part
from plait.data.spaced_retrieval import SpacedRetrieval
from plait.files import claim
from plait.model.lm import LM
from plait.scoring import score_tokens
from plait.spec import Spec
from plait.train import loop
from plait.train.checkpoint import checkpoints, find_checkpoint
from plait.train.config import Freeze, TrainConfig
from plait.train.held_out import held_out
from plait.train.loop import Diverged, Guard, Interrupted, Measure, train
from plait.train.settings import DataOptions
from plait.windows import short_losses

TASK = SpacedRetrieval(gaps=(2, 9), batch_size=6, eval_pairs=10)
SPEC = Spec.from_layout("gdn nope", vocab_size=12, d_model=16, num_layers=2, num_heads=2, d_ff=24)
CONFIG = TrainConfig(steps=6, lr=1e-2, warmup=2, checkpoint_every=2)


def run(path: Path, config: TrainConfig = CONFIG, *, branch: Path | None = None, task=TASK, **options) -> LM:
    settings = json.loads(json.dumps(dataclasses.asdict(config) | {"branch": str(branch)}, default=str))
    return train(path, SPEC, task, config, settings=settings, branch=branch, progress=False, **options)


def final_bytes(path: Path) -> dict[str, bytes]:
    last = checkpoints(path)[-1]
    return {name: (last / name).read_bytes() for name in ("model.safetensors", "trainer.safetensors")}


def losses(path: Path) -> list[tuple[int, float]]:
    rows = records.read(path / "records.jsonl")
    return [(row.step, row.values["loss"]) for row in rows if row.name == "loss" and row.kind == "train"]


class StopAt:
    """A task that asks for a stop, as Ctrl-C does, while a batch is made."""

    def __init__(self, step: int):
        self.step = step

    def __getattr__(self, name):
        return getattr(TASK, name)

    def batch(self, step: int):
        if step == self.step:
            signal.raise_signal(signal.SIGINT)
        return TASK.batch(step)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "baseline"
    run(path)
    return path


def test_two_runs_are_the_same_bit_for_bit(baseline, tmp_path):
    run(tmp_path / "again")
    assert final_bytes(tmp_path / "again") == final_bytes(baseline)
    assert losses(tmp_path / "again") == losses(baseline)


@pytest.mark.parametrize("step", [0, 3, 4])
def test_ctrl_c_saves_and_the_same_command_goes_on_exactly(baseline, tmp_path, step):
    path = tmp_path / "stopped"
    with pytest.raises(Interrupted, match=f"after update {step + 1}"):
        run(path, task=StopAt(step))
    assert checkpoints(path)[-1].name == f"step-{step + 1:08d}"
    run(path)
    assert final_bytes(path) == final_bytes(baseline)
    assert losses(path) == losses(baseline)


def test_a_killed_run_goes_on_exactly(baseline, tmp_path):
    """kill -9 between checkpoints, with a record cut in the middle."""
    path = tmp_path / "killed"

    class Killed(Exception):
        pass

    class KillAt(StopAt):
        def batch(self, step):
            if step == self.step:
                raise Killed
            return TASK.batch(step)

    with pytest.raises(Killed):
        run(path, task=KillAt(5))
    assert [step for step, _ in losses(path)] == [1, 2, 3, 4, 5]
    with (path / "records.jsonl").open("a") as file:
        file.write('{"kind": "train", "na')
    half = path / "checkpoints" / ".step-00000006.partial"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    run(path)
    assert final_bytes(path) == final_bytes(baseline)
    assert losses(path) == losses(baseline)


OTHERS = {
    "muon": {"optimizer": "muon", "weight_decay": 0.01},
    "muon, constant": {"optimizer": "muon", "schedule": "constant"},
    "wsd": {"schedule": "wsd", "decay": 3, "decay_shape": "cosine"},
    "longce": {"objective": "longce", "longce_context": 4, "longce_stride": 3},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_schedules_and_objectives_go_on_exactly(baseline, tmp_path, name):
    config = dataclasses.replace(CONFIG, **OTHERS[name])
    run(tmp_path / "whole", config)
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", config, task=StopAt(3))
    run(tmp_path / "stopped", config)
    assert final_bytes(tmp_path / "stopped") == final_bytes(tmp_path / "whole") != final_bytes(baseline)


def test_longce_weighs_what_the_long_context_helps():
    """The gap of 9 hides the key from windows of 4 tokens: the gradient is that of the weighted mean."""
    model = LM(SPEC, seed=3).double()
    groups = TASK.batch(0)
    loop.backward(model, groups, dataclasses.replace(CONFIG, objective="longce", longce_context=4, longce_stride=3))
    got = model.embed.weight.grad.clone()
    model.zero_grad()
    total = sum(int((group.targets_BT != IGNORE).sum()) for group in groups)
    for group in groups:
        scores = score_tokens(model, group.tokens_BT, group.targets_BT)
        short_BT = short_losses(model, group.tokens_BT, group.targets_BT, K=4, d=3)
        weight_N = (short_BT[group.targets_BT != IGNORE] - scores.loss_N.detach()).exp().clamp(max=5)
        (weight_N * scores.loss_N / total).sum().backward()
        assert not weight_N.isnan().any() and (weight_N != 1).any()
    assert torch.allclose(got, model.embed.weight.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decay": 5}, "decay = 5; it must be above 0 with schedule = wsd"),
        ({"schedule": "wsd"}, "decay = 0"),
        ({"schedule": "wsd", "decay": 5, "steps": 6, "warmup": 2}, "schedule: decay = 5; it must be from 0 to the 4"),
        ({"min_lr": 1.0}, "min_lr = 1.0; it must be at most lr"),
        ({"muon_lr": 0.0}, "muon_lr = 0.0"),
        ({"longce_stride": 0}, "longce_stride = 0"),
    ],
)
def test_refused_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**fields)


@pytest.mark.slow
def test_kill_9_of_the_command_itself(tmp_path):
    command = [sys.executable, "-m", "plait", "train", "--name", "x", "--layout", "gdn nope", "--d-model", "16"]
    command += [
        "--task",
        "spaced-retrieval",
        "--gaps",
        "4,12",
        "--batch-size",
        "4",
        "--steps",
        "60",
        "--num-layers",
        "2",
    ]
    command += ["--checkpoint-every", "7", "--eval-every", "0"]
    subprocess.run([*command, "--runs", str(tmp_path / "whole")], check=True, capture_output=True)
    process = subprocess.Popen([*command, "--runs", str(tmp_path / "cut")], stderr=subprocess.DEVNULL)
    while len(checkpoints(tmp_path / "cut" / "x")) < 3:
        time.sleep(0.01)
    process.kill()
    process.wait()
    subprocess.run([*command, "--runs", str(tmp_path / "cut")], check=True, capture_output=True)
    assert final_bytes(tmp_path / "cut" / "x") == final_bytes(tmp_path / "whole" / "x")


def test_a_branch_continues_optimizer_schedule_and_data(baseline, tmp_path):
    """With nothing changed, a branch is the run it came from."""
    run(tmp_path / "branch", branch=baseline / "checkpoints" / "step-00000002")
    assert final_bytes(tmp_path / "branch") == final_bytes(baseline)
    assert losses(tmp_path / "branch") == losses(baseline)


@pytest.mark.parametrize("scope", ["block", "mixer"])
def test_frozen_weights_stay_and_pass_gradients(tmp_path, scope):
    config = dataclasses.replace(CONFIG, freeze=(f"nope.{scope}:0-",))
    model = run(tmp_path / "frozen", config)
    start = LM(SPEC, seed=config.seed)
    frozen = "layers.1." if scope == "block" else "layers.1.mixer."
    for name, value in model.state_dict().items():
        assert torch.equal(value, start.state_dict()[name]) == name.startswith(frozen), name


def test_gradients_pass_through_frozen_blocks():
    model = LM(SPEC)
    loop.freeze(model, dataclasses.replace(CONFIG, freeze=("nope:0-",)), 0)
    loop.backward(model, TASK.batch(0), CONFIG)
    assert all(parameter.grad is None for parameter in model.layers[1].parameters())
    expected = LM(SPEC)
    loop.backward(expected, TASK.batch(0), CONFIG)
    for (name, a), (_, b) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        if not name.startswith("layers.1."):
            assert torch.equal(a.grad, b.grad), name


def test_freezing_later_disturbs_nothing_before_and_pauses_adam(baseline, tmp_path):
    config = dataclasses.replace(CONFIG, freeze=("gdn:2-4",))
    run(tmp_path / "paused", config)
    assert losses(tmp_path / "paused")[:2] == losses(baseline)[:2]
    two, four, six = (tmp_path / "paused" / "checkpoints" / f"step-0000000{n}" for n in (2, 4, 6))
    for file in ("model.safetensors", "trainer.safetensors"):
        assert (two / file).read_bytes() == (baseline / "checkpoints" / "step-00000002" / file).read_bytes()
    states = [load_file(path / "trainer.safetensors") for path in (two, four, six)]
    weights = [load_file(path / "model.safetensors") for path in (two, four, six)]
    name = "layers.0.mixer.q.weight"
    assert torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[1][name], weights[2][name])
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(states[0][f"{key}.{name}"], states[1][f"{key}.{name}"])
    assert [float(state[f"step.{name}"]) for state in states] == [2, 2, 4]
    assert [float(state["step.layers.1.mixer.q.weight"]) for state in states] == [2, 4, 6]


def test_unfreezing_is_a_branch_of_the_frozen_run(tmp_path):
    whole = dataclasses.replace(CONFIG, freeze=("recurrent:0-4",))
    run(tmp_path / "whole", whole)
    run(tmp_path / "frozen", dataclasses.replace(CONFIG, freeze=("recurrent:0-",)))
    run(tmp_path / "released", whole, branch=tmp_path / "frozen" / "checkpoints" / "step-00000004")
    assert final_bytes(tmp_path / "released") == final_bytes(tmp_path / "whole")


def test_clip_coefficients_of_another_run(tmp_path):
    tight = dataclasses.replace(CONFIG, clip=0.05)
    run(tmp_path / "base", tight)
    rows = [
        row for row in records.read(tmp_path / "base" / "records.jsonl") if row.kind == "train" and row.name == "loss"
    ]
    for row in rows:
        assert row.values["clip"] == pytest.approx(min(1, 0.05 / row.values["grad_norm"]), rel=1e-4)
    assert min(row.values["clip"] for row in rows) < 1
    frozen = dataclasses.replace(tight, freeze=("gdn:0-",), clip_from=tmp_path / "base")
    run(tmp_path / "same", frozen)
    same = [
        row for row in records.read(tmp_path / "same" / "records.jsonl") if row.kind == "train" and row.name == "loss"
    ]
    assert [row.values["clip"] for row in same] == [row.values["clip"] for row in rows]
    with pytest.raises(ValueError, match="no clip coefficient recorded for update 7"):
        run(tmp_path / "longer", dataclasses.replace(frozen, steps=8))
    assert not (tmp_path / "longer").exists()


def test_gradients_of_gaps_are_weighted_by_count():
    """Groups processed apart give the gradient of the mean over all targets together."""
    model, config = LM(SPEC, dtype=torch.float64), CONFIG
    groups = TASK.batch(3)
    assert len({len(group.tokens_BT) for group in groups}) == 2
    loop.backward(model, groups, config)
    apart = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    width = max(group.tokens_BT.shape[1] for group in groups)

    def pad(x, value):
        return torch.nn.functional.pad(x, (0, width - x.shape[1]), value=value)

    tokens = torch.cat([pad(group.tokens_BT, 11) for group in groups])
    targets = torch.cat([pad(group.targets_BT, IGNORE) for group in groups])
    score_tokens(model, tokens, targets).loss_N.mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(apart[name], parameter.grad, rtol=1e-10, atol=1e-14)


def test_schedule_is_linear_warmup_then_cosine():
    config = TrainConfig(steps=110, lr=1.0, min_lr=0.1, warmup=10)
    assert [config.rates.at(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert [config.rates.at(step) for step in (10, 60, 110)] == pytest.approx([1.0, 0.55, 0.1])


def test_measurements_are_made_before_the_first_and_after_the_last_update(tmp_path):
    seen = []
    run(
        tmp_path / "measured",
        measures=[
            Measure(4, lambda model: held_out(model, TASK, rows=10)),
            Measure(0, lambda model: seen.append(model.embed.weight.clone()) or []),
        ],
    )
    rows = [row for row in records.read(tmp_path / "measured" / "records.jsonl") if row.kind == "eval"]
    assert sorted({row.step for row in rows}) == [0, 4, 6]
    assert {row.axes["gap"] for row in rows} == {2, 9}
    assert all(row.provenance["spec"] == SPEC.hash and row.tokens is not None for row in rows)
    assert len(seen) == 1  # every = 0: only after the last


def test_a_run_in_use_and_other_settings_are_refused(baseline):
    with claim(baseline), pytest.raises(ValueError, match="another process is using it"):
        run(baseline)
    with pytest.raises(ValueError, match=r"lr: 0.01 there, 0.5 now"):
        run(baseline, dataclasses.replace(CONFIG, lr=0.5))
    assert losses(baseline)[-1][0] == 6


def test_what_cannot_be_trained_leaves_nothing_behind(tmp_path):
    config = dataclasses.replace(CONFIG, freeze=("kda:0-",))
    with pytest.raises(ValueError, match="family 'kda': no layer has it"):
        train(tmp_path / "bad", SPEC, TASK, config, settings={}, progress=False)
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    "layout",
    ["gla kda mamba2[head_dim=8] lightning", "heads(3:swa[window=5], 1:kda) mix(gdn + nope)[fuse=scale]"],
)
def test_every_mixer_trains_and_resumes_exactly(tmp_path, layout):
    """Every parameter of every kind moves."""
    spec = Spec.from_layout(layout, vocab_size=12, d_model=16, num_layers=4, num_heads=4, num_kv_heads=2, d_ff=24)
    config = dataclasses.replace(CONFIG, steps=4, weight_decay=0.0)
    paths = (tmp_path / "whole", tmp_path / "stopped")
    model = train(paths[0], spec, TASK, config, settings={}, progress=False)
    start = LM(spec, seed=config.seed).state_dict()
    assert [name for name, value in model.state_dict().items() if torch.equal(value, start[name])] == []
    with pytest.raises(Interrupted):
        train(paths[1], spec, StopAt(1), config, settings={}, progress=False)
    train(paths[1], spec, TASK, config, settings={}, progress=False)
    assert final_bytes(paths[1]) == final_bytes(paths[0])


def test_a_branch_of_another_model_is_refused(baseline, tmp_path):
    other = dataclasses.replace(SPEC, init_std=0.5)
    checkpoint = baseline / "checkpoints" / "step-00000002"
    with pytest.raises(ValueError, match="another model"):
        train(tmp_path / "bad", other, TASK, CONFIG, settings={}, branch=checkpoint, progress=False)
    assert not (tmp_path / "bad" / "config.json").exists()


def test_find_checkpoint(baseline):
    assert find_checkpoint(baseline).name == "step-00000006"
    assert find_checkpoint(f"{baseline}@2").name == "step-00000002"
    assert find_checkpoint(baseline / "checkpoints" / "step-00000004").name == "step-00000004"
    for where, words in ((f"{baseline}@3", "it has 0, 2, 4, 6"), (baseline.parent / "no", "no run or checkpoint")):
        with pytest.raises(ValueError, match=words):
            find_checkpoint(where)


@pytest.mark.parametrize("text", ["gdn", "gdn:5-3", "gdn.mlp:0-", ":0-", "gdn:-3"])
def test_bad_freeze(text):
    with pytest.raises(ValueError, match="freeze = "):
        Freeze.parse(text)


def test_freeze_intervals():
    freeze = Freeze.parse("gdn+swa.mixer:3-5")
    assert freeze == Freeze(("gdn", "swa"), "mixer", 3, 5)
    assert [freeze.holds(step) for step in range(2, 7)] == [False, True, True, False, False]


def test_training_on_token_shards(tmp_path):
    """From text through `plait data build` to a model that has learnt something, in the command's own words."""
    from plait.cli import main

    (tmp_path / "text").mkdir()
    for i in range(30):
        (tmp_path / "text" / f"{i}.txt").write_text(f"the sea, the sea, the open sea {i}. " * 20)
    shards = str(tmp_path / "shards")
    assert main(["data", "build", str(tmp_path / "text"), "--out", shards, "--valid", "0.2"]) == 0
    command = ["train", "--name", "x", "--runs", str(tmp_path / "runs"), "--layout", "gdn nope", "--data", shards]
    sizes = ["--d-model", "16", "--num-layers", "2", "--length", "64", "--batch-size", "8", "--steps", "30"]
    assert main([*command, *sizes, "--warmup", "3", "--lr", "1e-2"]) == 0
    first, *_, last = losses(tmp_path / "runs" / "x")
    assert last[1] < 0.7 * first[1]


def test_checkpoints_carry_the_tokenizer_of_their_shards(tmp_path, capsys):
    from plait.cli import main

    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / "text" / f"{i}.txt").write_text(f"the sea, the open sea {i}. " * 30)
    text, words, shards = (str(tmp_path / name) for name in ("text", "words", "shards"))
    assert main(["data", "train-tokenizer", text, "--out", words, "--vocab-size", "300"]) == 0
    assert main(["data", "build", text, "--out", shards, "--tokenizer", words, "--valid", "0.3"]) == 0
    command = ["train", "--name", "x", "--runs", str(tmp_path / "runs"), "--layout", "gdn nope", "--data", shards]
    sizes = ["--d-model", "16", "--num-layers", "2", "--length", "16", "--batch-size", "2", "--steps", "2"]
    assert main([*command, *sizes]) == 0
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "runs/x"), "--prompt", "the sea", "--max-new-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] >= 1


def test_pieces_of_a_batch_give_its_gradient():
    groups = TASK.batch(0)
    found = {}
    for config in (CONFIG, dataclasses.replace(CONFIG, micro_batch=2), dataclasses.replace(CONFIG, micro_batch=4)):
        model = LM(SPEC, seed=3).double()
        rows, loss = loop.backward(model, groups, config)
        found[config.micro_batch] = (model.embed.weight.grad, loss, [row.values for row in rows])
    for grad, loss, values in (found[2], found[4]):
        assert torch.allclose(grad, found[0][0], rtol=1e-10, atol=1e-14)
        assert loss == pytest.approx(found[0][1], rel=1e-12)
        assert values == [pytest.approx(row, rel=1e-12) for row in found[0][2]]


def test_document_masks_hold_in_the_loop_in_pieces_and_in_held_out_losses(tmp_path):
    """As each document alone in a row."""
    from plait.cli import main

    (tmp_path / "books").mkdir()
    for i in range(40):
        (tmp_path / "books" / f"{i:02}.txt").write_text(f"{i} {'to be or not to be'[: 3 + i % 14]}")
    assert main(["data", "build", str(tmp_path / "books"), "--out", str(tmp_path / "shards"), "--valid", "0.3"]) == 0
    task = Packed(parts=(Part(path=tmp_path / "shards"),), length=32, batch_size=4, document_masks=True)
    (group,) = task.batch(0)
    assert group.cu_seqlens is not None and len(group.cu_seqlens) > 6
    model = LM(dataclasses.replace(SPEC, vocab_size=task.vocab_size), seed=3).double()
    _, loss = loop.backward(model, [group], dataclasses.replace(CONFIG, micro_batch=3))
    tokens, targets = group.tokens_BT.flatten(), group.targets_BT.flatten()
    pieces = zip(group.cu_seqlens, group.cu_seqlens[1:], strict=False)
    alone = [score_tokens(model, tokens[a:b][None], targets[a:b][None]).loss_N for a, b in pieces]
    assert loss == pytest.approx(torch.cat(alone).mean().item(), rel=1e-10)
    few, many = (held_out(model, task, rows=3, rows_at_a_time=n)[0].values["loss"] for n in (2, 64))
    assert few == pytest.approx(many, rel=1e-10)


def test_recomputed_layers_and_logits_change_nothing(baseline, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "KEPT", 0)
    monkeypatch.setattr(scoring, "CHUNK", 5)
    model = run(tmp_path / "x", dataclasses.replace(CONFIG, recompute=True))
    assert model.recompute is None
    want = load_file(checkpoints(baseline)[-1] / "model.safetensors")
    for name, value in load_file(checkpoints(tmp_path / "x")[-1] / "model.safetensors").items():
        assert torch.allclose(value, want[name], rtol=1e-4, atol=1e-6)


class Poisoned:
    """Gradients that are not numbers in some updates."""

    def __init__(self, steps: set[int], start: int = 0):
        self.steps, self.step, self.backward = steps, start, loop.backward

    def __call__(self, model, groups, config, world):
        rows, loss = self.backward(model, groups, config, world)
        self.step += 1
        if self.step in self.steps:
            model.embed.weight.grad[0, 0] = float("nan")
        return rows, loss


def test_updates_that_are_not_finite_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "backward", Poisoned({3}))
    run(tmp_path / "x")
    rows = [row for row in records.read(tmp_path / "x" / "records.jsonl") if row.name == "loss" and row.kind == "train"]
    assert [row.step for row in rows if row.values.get("skipped")] == [3]
    assert rows[2].values["grad_norm"] is None
    final = load_file(checkpoints(tmp_path / "x")[-1] / "model.safetensors")
    assert all(value.isfinite().all() for value in final.values())
    assert losses(tmp_path / "x")[2] != losses(tmp_path / "x")[3]


def test_training_stops_after_too_many(tmp_path, monkeypatch):
    honest = loop.backward
    monkeypatch.setattr(loop, "backward", Poisoned({3, 4, 5, 6}))
    with pytest.raises(Diverged, match=r"update 5: the loss or gradient of 3 in a row .*max_skips = 2"):
        run(tmp_path / "x", dataclasses.replace(CONFIG, max_skips=2))
    assert [path.name for path in checkpoints(tmp_path / "x")] == ["step-00000000", "step-00000002", "step-00000004"]
    monkeypatch.setattr(loop, "backward", honest)
    monkeypatch.setattr(loop, "backward", Poisoned({5, 6}, start=4))  # a resumed run knows of the two before
    with pytest.raises(Diverged, match="update 5: the loss or gradient of 3 in a row"):
        run(tmp_path / "x", dataclasses.replace(CONFIG, max_skips=2))


def test_a_spike_is_measured_by_the_norms_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(Guard, "SEEN", 4)
    guard = Guard(dataclasses.replace(CONFIG, spike=3.0), tmp_path)
    norms = [9.0, 1.0, 1.2, 1.1, 5.0, 2.9, float("inf"), 1.0]
    assert [guard.takes(1.0, norm) for norm in norms] == [True, True, True, True, False, True, False, True]


def test_the_last_checkpoints_and_the_best_are_kept(tmp_path):
    scores = {0: 9.0, 1: 5.0, 2: 1.0, 3: 2.0, 4: 3.0, 5: 4.0, 6: 5.0}
    steps = iter(scores)

    def measure(model):
        return [records.Record(kind="eval", name="loss", values={"loss": scores[next(steps)]})]

    config = dataclasses.replace(CONFIG, checkpoint_every=1, keep=2)
    run(tmp_path / "x", config, measures=[Measure(1, measure)])
    assert [path.name[-1] for path in sorted((tmp_path / "x" / "checkpoints").iterdir())] == ["2", "5", "6"]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(baseline, tmp_path, capsys):
    path = tmp_path / "x"
    with pytest.raises(Interrupted):
        run(path, task=StopAt(4))
    last = checkpoints(path)[-1]
    whole = (last / "trainer.safetensors").read_bytes()
    (last / "trainer.safetensors").write_bytes(whole[: len(whole) // 2])
    run(path)
    assert f"{last}: damaged, left aside" in capsys.readouterr().err
    assert final_bytes(path) == final_bytes(baseline)
    for checkpoint in checkpoints(path):
        (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="none of its checkpoints can be read"):
        run(path)


def test_a_full_disk_is_an_error_of_the_system_and_loses_nothing(baseline, tmp_path):
    """A limit on the size of a file stands for it: the optimizer's state is too large, the model is not."""
    last, old = checkpoints(baseline)[-1], resource.getrlimit(resource.RLIMIT_FSIZE)
    model, state = ((last / f"{name}.safetensors").stat().st_size for name in ("model", "trainer"))
    resource.setrlimit(resource.RLIMIT_FSIZE, ((model + state) // 2, old[1]))
    try:
        with pytest.raises(OSError, match="step-00000002: cannot be written"):
            run(tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert [path.name for path in (tmp_path / "x" / "checkpoints").iterdir()] == ["step-00000000"]
    run(tmp_path / "x")
    assert final_bytes(tmp_path / "x") == final_bytes(baseline)


def test_a_mixture_of_shards_goes_on_exactly(tmp_path, capsys):
    from plait.cli import main

    for name, words in {"sea": "the open sea", "land": "a hill, a field"}.items():
        (tmp_path / name).mkdir()
        for i in range(20):
            (tmp_path / name / f"{i}.txt").write_text(f"{words} {i}. " * (1 + i))
        assert (
            main(["data", "build", str(tmp_path / name), "--out", str(tmp_path / f"{name}-shards"), "--valid", "0.3"])
            == 0
        )
    sources = (f"{tmp_path}/sea-shards=3", f"{tmp_path}/land-shards@60")
    options = DataOptions(mixture=sources, document_masks=True, length=48, batch_size=4)
    assert options.sources[1][1:] == (60, 1.0)
    task = options.build(seed=1)
    rows = [bytes(row.clamp(max=255).tolist()) for step in range(8) for row in task.batch(step)[0].tokens_BT]
    assert sum(b"sea" in row for row in rows) == 24
    command = ["train", "--runs", str(tmp_path / "runs"), "--layout", "gdn nope", "--mixture", ",".join(sources)]
    command += ["--document-masks", "true", "--d-model", "16", "--num-layers", "2", "--length", "48"]
    command += ["--batch-size", "4", "--micro-batch", "3", "--steps", "4", "--checkpoint-every", "1"]
    assert main([*command, "--name", "whole"]) == 0
    assert main([*command, "--name", "cut"]) == 0
    for path in checkpoints(tmp_path / "runs/cut")[-2:]:
        shutil.rmtree(path)
    assert main([*command, "--name", "cut"]) == 0
    assert final_bytes(tmp_path / "runs/cut") == final_bytes(tmp_path / "runs/whole")
    found = {row.axes["source"] for row in records.read(tmp_path / "runs/cut/records.jsonl") if row.kind == "eval"}
    assert found == {"sea-shards", "land-shards"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "task, data, mixture: none is given"),
        ({"task": "spaced-retrieval", "mixture": ("x",)}, "task and mixture are given"),
        ({"mixture": ("x=much",)}, "mixture: 'x=much'; write PATH"),
    ],
)
def test_refused_data(fields, message):
    with pytest.raises(ValueError, match=message):
        DataOptions(**fields)


def test_masks_need_documents():
    with pytest.raises(ValueError, match="document_masks = true"):
        DataOptions(task="spaced-retrieval", document_masks=True).build(0)


def test_z_loss_pulls_the_normalizer_to_one():
    model = LM(SPEC, seed=3).double()
    groups = TASK.batch(0)
    _, plain = loop.backward(model, groups, CONFIG)
    without = model.embed.weight.grad.clone()
    model.zero_grad()
    _, loss = loop.backward(model, groups, dataclasses.replace(CONFIG, z_loss=0.1))
    got = model.embed.weight.grad.clone()
    model.zero_grad()
    total = sum(int((group.targets_BT != IGNORE).sum()) for group in groups)
    for group in groups:
        logits = model(group.tokens_BT)[group.targets_BT != IGNORE]
        (0.1 * logits.logsumexp(-1).square().sum() / total).backward()
    assert loss == plain
    assert torch.allclose(got - without, model.embed.weight.grad, rtol=1e-9, atol=1e-12)


def test_checkpoints_at_chosen_updates(tmp_path):
    run(tmp_path / "x", dataclasses.replace(CONFIG, checkpoint_every=0, checkpoint_at=(1, 3)))
    assert [int(path.name[-1]) for path in checkpoints(tmp_path / "x")] == [0, 1, 3, 6]


def test_tensorboard_has_the_numbers(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = dataclasses.replace(CONFIG, tensorboard=True)
    with pytest.raises(Interrupted):
        run(tmp_path / "x", config, task=StopAt(4))
    run(tmp_path / "x", config)
    events = loader.EventAccumulator(str(tmp_path / "x" / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss/loss")]
    assert found == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses(tmp_path / "x")]


def test_tensorboard_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="tensorboard = true; it is not installed"):
        run(tmp_path / "x", dataclasses.replace(CONFIG, tensorboard=True))
    assert not (tmp_path / "x").exists()
