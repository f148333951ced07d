"""Run directories with plausible records: a race for retrieval in a small gdn / nope hybrid."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from plait.records import Record, append
from plait.spec import Spec

GAPS = (64, 8192)
STEPS = 600


def small_spec(layout: str = "gdn nope", **sizes) -> Spec:
    sizes = {"vocab_size": 12, "d_model": 128, "num_layers": 4, "num_heads": 2, "d_ff": 256} | sizes
    return Spec.from_layout(layout, context_length=8448, **sizes)


def freeze(start: int, stop: int | None) -> str:
    return f"recurrent:{start}-{'' if stop is None else stop}"


def provenance(spec_hash: str, step: int = 0) -> dict:
    return {
        "spec": spec_hash,
        "versions": {"python": "3.12.4", "plait": "0.1.0", "torch": "2.11.0+cu130"},
        "device": "NVIDIA H200",
        "git": "3f2a9c1d77e0",
        "time": f"2026-05-04T10:{step * 14 // 600:02d}:{step * 7 % 60:02d}Z",
    }


def write_run(path: Path, spec: Spec, records: list[Record], config: dict | None = None) -> Path:
    path.mkdir(parents=True)
    spec.save(path / "spec.json")
    (path / "records.jsonl").touch()
    append(path / "records.jsonl", records)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def settings(freezes: list, **more) -> dict:
    base = {"task": "spaced-retrieval", "gaps": list(GAPS), "steps": STEPS, "batch_size": 32}
    return base | {"lr": 3e-4, "warmup": 100, "seed": 0, "freeze": freezes} | more


def rise(step: float, at: float, width: float, height: float = 1.0) -> float:
    return height / (1 + math.exp(-(step - at) / width))


def vanilla_score(family: str, step: int) -> float:
    if family == "gdn":
        return rise(step, 230, 25, 6) + rise(step, 420, 70, 6.5)
    return 2.1 * math.exp(-(((step - 190) / 50) ** 2)) + 0.05


def frozen_score(family: str, step: int) -> float:
    return rise(step, 120, 22, 7.4) + rise(step, 400, 90, 1.6) if family == "nope" else 0.02 * math.sin(step / 40)


def released_score(family: str, step: int) -> float:
    if family == "nope":
        return rise(step, 120, 22, 7.4) + rise(step, 400, 60, 3.1)
    return rise(step, 330, 30, 0.7) - 0.1


def synthetic_records(spec: Spec, score: Callable[[str, int], float], learnt: int, seed: int) -> Iterator[Record]:
    rng, spec_hash = random.Random(seed), spec.hash

    def row(kind: str, name: str, step: int, values: dict, **axes) -> Record:
        made = {"tokens": step * 32 * 4140, "provenance": provenance(spec_hash, step)}
        return Record(kind=kind, name=name, step=step, values=values, axes=axes, **made)

    for step in range(1, STEPS + 1):
        loss = 0.008 + 2.3 * (1 - rise(step, learnt, 28)) * (1 + 0.05 * rng.gauss(0, 1)) + 0.004 * rng.random()
        values = {"loss": loss, "lr": 3e-4, "grad_norm": 1 + rng.random(), "clip": 1.0, "seconds": step * 0.35}
        yield row("train", "loss", step, values)
    for step in range(0, STEPS + 1, 20):
        families = ("gdn", "nope")
        for gap in GAPS:
            share = max(0.1, rise(step, learnt + (12 if gap == 64 else 45), 20, 0.999))
            values = {"accuracy": round(min(share + 0.01 * rng.random(), 1.0), 4), "loss": 0.1}
            yield row("eval", "accuracy", step, values, task="spaced-retrieval", gap=gap)
            shares = {"gdn": (0.7, 1.3), "nope": (1.4, 0.6)}
            means = {}
            for family in families:
                mean = score(family, step) * (1.0 if gap == 64 else 0.93) + rng.gauss(0, 0.03)
                means[family] = mean
                for layer, part in zip((0, 2) if family == "gdn" else (1, 3), shares[family], strict=True):
                    axes = {"layer": layer, "family": family, "gap": gap, "task": "spaced-retrieval"}
                    yield row("probe", "retrieval_score", step, {"score": mean * part}, **axes)
            for family, mean in means.items():
                yield row("probe", "retrieval_score", step, {"score": mean}, family=family, gap=gap, reduce="mean")


def write_competition(root: Path) -> list[Path]:
    """vanilla, frozen for good, and released at update 250."""
    spec = small_spec()
    plan = [
        ("vanilla", vanilla_score, 210, [], {}),
        ("frozen", frozen_score, 150, [freeze(0, None)], {}),
        ("released", released_score, 150, [freeze(0, 250)], {"branch": "frozen@250"}),
    ]
    paths = []
    for seed, (name, score, learnt, freezes, more) in enumerate(plan):
        records = list(synthetic_records(spec, score, learnt, seed))
        paths.append(write_run(root / name, spec, records, settings(freezes, **more)))
        (paths[-1] / "checkpoints" / "step-00000600").mkdir(parents=True)
    return paths


def text_records(spec: Spec, steps: int = 2000) -> list[Record]:
    rng = random.Random(7)
    made = {"provenance": provenance(spec.hash)}
    rows = []
    for step in range(10, steps + 1, 10):
        loss = 3.1 + 5.5 * (step / 10 + 1) ** -0.42 + 0.04 * rng.gauss(0, 1)
        rows.append(Record(kind="train", name="loss", step=step, tokens=step * 65536, values={"loss": loss}, **made))
        if step % 200 == 0:
            rows.append(Record(kind="eval", name="loss", step=step, values={"loss": loss + 0.06}, **made))
    return rows
