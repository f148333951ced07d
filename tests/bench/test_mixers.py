"""`plait bench mixers` at a tiny size: every case gives its rows, and what cannot run gives a note, never a crash."""

from __future__ import annotations

import dataclasses
import sys
import time
from types import ModuleType

import pytest
import torch

from plait.bench import layers, mixers, roofline, rules
from plait.bench.mixers import CASES, bench_mixers, print_rows
from plait.bench.rows import Options
from plait.bench.timing import NOTE_LENGTH, interleaved, reason
from plait.cli import main
from plait.config import Heads
from plait.mixers.delta import delta_chunk
from plait.mixers.linear import linear_chunk
from plait.mixers.seq import Seq

CPU = torch.device("cpu")
LENGTH = 40
PEAKS = roofline.peaks
SAME = 1e-4
"""the same function, no more: in one process of about twenty, transformers' first gated delta rule is 5e-5 off"""


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(rules.HEADS, "cpu", ((2, 16),))
    monkeypatch.setitem(layers.SIZES, "cpu", (4, 16))
    monkeypatch.setattr(layers, "CACHED", 8)
    monkeypatch.setitem(roofline.MATRIX, "cpu", 32)
    monkeypatch.setitem(roofline.COPY_BYTES, "cpu", 1024)
    roofline.peaks.cache_clear()
    yield
    PEAKS.cache_clear()


def run(case: str, **options):
    rows = bench_mixers(cases=[case], **{"lengths": [LENGTH], "repeats": 1, **options})
    assert rows
    for row in rows:
        assert {"case", "competitor", "device"} <= set(row)
        assert row["case"] == case
    return rows


@pytest.mark.parametrize(
    ("case", "rival"),
    [
        ("gdn", "transformers"),
        ("kda", "transformers"),
        ("gla", "naive"),
        ("mamba2", "transformers"),
        ("lightning", "transformers"),
    ],
)
def test_rules(case, rival):
    """The competitor computes the same function."""
    rows = run(case)
    assert [(row["competitor"], row["pass"]) for row in rows] == [
        (name, kind) for kind in ("forward", "forward+backward") for name in ("plait", rival)
    ]
    for row in rows:
        shape = {key: row[key] for key in ("dtype", "batch", "length", "heads", "head_dim")}
        assert shape == {"dtype": "float32", "batch": 1, "length": LENGTH, "heads": 2, "head_dim": 16}
        assert row["median_ms"] > 0
        assert row["percent"] > 0
        assert row["bound"] in ("compute", "memory")
        assert ("saved_mb" in row) == (row["pass"] == "forward+backward")
        if row["competitor"] == rival:
            assert row["difference"] < SAME
            if rival == "transformers":
                assert row["bar"] == (5 if case == "kda" and row["pass"] == "forward+backward" else 1)
                assert row["met"] == (row["ratio"] >= row["bar"])
        else:
            assert row["ratio"] == 1


def test_head_wise():
    rows = run("head-wise")
    for layout in layers.HEAD_WISE:
        for kind in ("forward", "forward+backward"):
            layer, *parts, total = [row for row in rows if (row["layout"], row["pass"]) == (layout, kind)]
            assert total["competitor"] == layers.SUM
            assert total["median_ms"] == sum(part["median_ms"] for part in parts)
            assert total["ratio"] == total["median_ms"] / layer["median_ms"]
            assert total["met"] == (layer["median_ms"] <= 1.15 * total["median_ms"])


@pytest.mark.parametrize("layout", layers.HEAD_WISE)
def test_the_parts_alone_sum_to_the_layer(layout):
    """In what they compute, and in their weights: no output projection is counted twice."""
    config = layers.mixer_config(layout, 4, 16)
    assert isinstance(config, Heads)
    whole, *parts = layers.parts_alone(config, 64, "torch", CPU).values()
    sizes = [sum(p.numel() for p in module.parameters()) for module in (whole, *parts)]
    assert sizes[0] == sum(sizes[1:])
    x_BTD, seq = torch.randn(2, LENGTH, 64), Seq.build((2, LENGTH), CPU)
    y_BTD, *terms = (module(x_BTD, None, seq)[0] for module in (whole, *parts))
    torch.testing.assert_close(sum(terms), y_BTD)


def test_decode_window_and_roofline():
    assert [row["competitor"] for row in run("decode")] == list(layers.DECODED)
    assert all(row["us_per_token"] > 0 for row in run("decode"))
    assert [row["competitor"] for row in run("window")] == ["window 256, sink", "full"]
    matmul, copy = run("roofline")
    assert matmul["tflops"] > 0
    assert copy["gb_per_s"] > 0


def test_start(monkeypatch, capsys):
    """Each side's first step runs; the fresh processes are left to the real command."""
    for name in rules.RULES["gdn"].sides(Options(CPU)):
        mixers.gdn_first_step(name, "cpu", LENGTH)
        assert "first step done" in capsys.readouterr().out
    seconds = iter((1.0, 2.0, 3.0, 8.0))
    monkeypatch.setattr("plait.bench.timing.seconds_to_first_line", lambda code, env: next(seconds))
    assert [row["ratio"] for row in run("gdn-start")] == [1, 1, 3, 4]


def test_all_cases_are_tried_here():
    tried = {*rules.RULES, "head-wise", "decode", "window", "roofline", "gdn-start", "fla-layer"}
    assert tried == set(CASES)


# ---- what cannot run


def test_fla_is_absent_on_a_cpu():
    for row in run("fla-layer"):
        assert "CUDA devices only" in row["note"]
    for rule in rules.RULES.values():
        with pytest.raises(ValueError, match="CUDA devices only"):
            next(iter(rule.cuda.values()))(rule.inputs(rules.Draw(CPU, 1, 20, 2, 16)))


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        raise RuntimeError("this backward is\nwrong on this GPU, " + "and long " * 50)


def rivals(monkeypatch, **makes):
    monkeypatch.setitem(rules.RULES, "gla", dataclasses.replace(rules.RULES["gla"], cpu=makes))


def test_a_competitor_that_raises_is_a_note(monkeypatch):
    def absent(x):
        import no_such_module  # noqa: F401  # pyright: ignore[reportMissingImports]

    def exhausts(x):
        def call(*y):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")

        return call, x

    rivals(
        monkeypatch,
        absent=absent,
        exhausts=exhausts,
        refuses=lambda x: rules._of(lambda q, k, v, g: Refuses.apply(v), x),
    )
    rows = run("gla")
    notes = {row["competitor"]: row["note"] for row in rows if "note" in row}
    assert notes["absent"] == "no_such_module is not installed"
    assert notes["exhausts"] == "out of memory"
    assert notes["refuses"].startswith("this backward is wrong on this GPU, and long")
    assert len(notes["refuses"]) == NOTE_LENGTH
    measured = [(row["competitor"], row["pass"]) for row in rows if "median_ms" in row]
    assert measured == [("plait", "forward"), ("refuses", "forward"), ("plait", "forward+backward")]


def test_without_plait_itself_there_are_no_ratios(monkeypatch):
    def broken(x):
        raise RuntimeError("broken")

    monkeypatch.setitem(rules.RULES, "gla", dataclasses.replace(rules.RULES["gla"], ours=broken))
    *measured, ours = run("gla")
    assert (ours["competitor"], ours["note"]) == ("plait", "broken")
    assert len(measured) == 2
    assert not any("ratio" in row for row in measured)


def test_a_step_that_raises_is_a_note(monkeypatch):
    monkeypatch.setattr("plait.bench.window.attend", lambda *x, **y: 1 / 0)
    assert {row["note"] for row in run("window")} == {"division by zero"}
    monkeypatch.setattr(roofline, "peaks", lambda *x: (_ for _ in ()).throw(MemoryError))
    (row,) = run("roofline")
    assert row["note"] == "out of memory"


def test_without_and_minutes():
    assert {row["competitor"] for row in run("gdn", without=["transf"])} == {"plait"}
    (row,) = run("gdn", minutes=0)
    assert "0 minutes were over" in row["note"]


# ---- the sides of fla, against stand-ins with its signatures


def module(name: str, **functions) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(functions)
    return made


def chunk_delta(q, k, v, g, beta):
    return delta_chunk(q, k, v, g, beta, None, Seq.build(q.shape[:2], CPU))


def chunk_linear(q, k, v, g, scale=None):
    return linear_chunk(q, k, v, g, None, Seq.build(q.shape[:2], CPU), scale=scale or k.shape[-1] ** -0.5)


def chunk_lightning_attn(q, k, v, layer_idx, num_layers, scale=None):
    H = q.shape[2]
    g_H = -(8 / H * (1 - layer_idx / num_layers)) * torch.arange(H)
    return chunk_linear(q, k, v, g_H.expand(q.shape[:3]), scale)


FLA = {
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_delta},
    "fla.ops.kda": {"chunk_kda": chunk_delta},
    "fla.ops.gla": {"chunk_gla": chunk_linear},
    "fla.ops.simple_gla": {"chunk_simple_gla": chunk_linear},
    "fla.ops.lightning_attn": {"chunk_lightning_attn": chunk_lightning_attn},
}


@pytest.mark.parametrize("case", rules.RULES)
def test_sides_of_fla_compute_the_same(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", module("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", module("fla.ops"))
    for name, functions in FLA.items():
        monkeypatch.setitem(sys.modules, name, module(name, **functions))
    monkeypatch.setattr(rules, "why_not", lambda device: None)
    monkeypatch.setattr(rules, "_slopes", lambda q: 8 / q.shape[2] * torch.arange(q.shape[2]))
    rule = rules.RULES[case]
    monkeypatch.setitem(rules.RULES, case, dataclasses.replace(rule, cpu=rule.cuda))
    rows = [row for row in run(case) if row["competitor"] != "plait"]
    assert {row["competitor"] for row in rows} == set(rule.cuda)
    for row in rows:
        assert "note" not in row
        assert row["bar"] == 0.25
        assert row["difference"] < SAME


class Layer(torch.nn.Linear):
    """Stands for a layer of fla."""

    def __init__(self, *, hidden_size, num_heads, expand_v, head_dim=None, expand_k=None):
        assert (num_heads, expand_v) == (4, 1)
        assert (head_dim, expand_k) in ((128, None), (None, 1))
        super().__init__(hidden_size, hidden_size)

    def forward(self, x):
        return super().forward(x), None, None


def test_fla_layer(monkeypatch):
    names = dict.fromkeys(("KimiDeltaAttention", "GatedLinearAttention", "GatedDeltaNet"), Layer)
    monkeypatch.setitem(sys.modules, "fla", module("fla", layers=module("fla.layers", **names)))
    monkeypatch.setitem(sys.modules, "fla.layers", sys.modules["fla"].layers)
    monkeypatch.setattr(layers, "why_not", lambda device: None)
    build = layers.build
    monkeypatch.setattr(
        layers, "build", lambda config, d_model, backend, device: build(config, d_model, "torch", device)
    )
    rows = run("fla-layer")
    assert len(rows) == 3 * 2 * 2
    assert {row["bar"] for row in rows if row["competitor"] == "fla"} == {1 / 1.03}
    assert not any("note" in row for row in rows)


# ---- timing, roofline, output


def test_a_slow_competitor_has_fewer_samples():
    count = {"fast": 0, "slow": 0, "slowest": 0}

    def call(name: str, seconds: float):
        def wait() -> None:
            count[name] += 1
            time.sleep(seconds)

        return wait

    calls = {"fast": call("fast", 0), "slow": call("slow", 0.02), "slowest": call("slowest", 0.1)}
    timings = interleaved(calls, device=CPU, repeats=5, budget_s=0.07)
    assert timings["fast"].repeats == 5
    assert 1 <= timings["slow"].repeats <= 3
    assert (timings["slowest"].repeats, timings["slowest"].note) == (1, None)
    assert (timings["slowest"].median_ms or 0) >= 100
    assert list(timings) == list(calls)


def test_reason():
    assert reason(RuntimeError()) == "RuntimeError"
    assert reason(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")) == "out of memory"


def test_roofline_by_hand():
    # K 2, V 3, chunks of 64: pairs 2*64*2, their product with V 2*64*3, read and write of the state 2*2*3 each
    assert roofline.flops_per_token(2, 3, delta=False) == 256 + 384 + 24
    # besides: K K^T, the inverse, its products with K and V, K S
    assert roofline.flops_per_token(2, 3, delta=True) == 664 + 256 + 64 * 64 / 3 + 256 + 384 + 12
    assert roofline.Ideal.of(10, 100, 20, backward=False) == roofline.Ideal(10, 120)
    assert roofline.Ideal.of(10, 100, 20, backward=True) == roofline.Ideal(30, 340)
    place = roofline.Ideal(10, 100).place(100, roofline.Peaks(flops=1e3, bytes=2e3))
    assert place == {"intensity": 0.1, "bound": "memory", "bound_ms": 50, "percent": 50}
    assert roofline.Ideal(10, 100).place(100, roofline.Peaks(flops=100, bytes=1e4))["bound"] == "compute"


def test_table(capsys):
    print_rows(run("head-wise"))
    out = capsys.readouterr().out
    assert "heads(3:swa[window=256], 1:nope)" in out
    assert ">= 0.87 " in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--case", "kdb"], "cases: 'kdb' is unknown; nearest: kda"),
        (["--repeats", "0"], "repeats: 0; it must be at least 1"),
        (["--lengths", "1"], "lengths: 1; it must be at least 2"),
    ],
)
def test_mistakes(options, words, capsys):
    assert main(["bench", "mixers", "--device", "cpu", *options]) == 2
    assert words in capsys.readouterr().err


def test_command(capsys):
    options = ["--device", "cpu", "--lengths", str(LENGTH), "--repeats", "1", "--case", "gla,roofline"]
    assert main(["bench", "mixers", *options, "--without", "naive"]) == 0
    out, err = capsys.readouterr()
    assert "gla, cpu" in out
    assert "naive" not in out
    assert f"1/2 gla, {LENGTH} tokens, 2 x 16" in err
