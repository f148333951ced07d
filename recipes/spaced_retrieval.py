"""Spaced Retrieval at 003's own settings: who gets the retrieval job, KDA or softmax attention?

Claim (003, 3.2 and 3.3.1): trained together at gaps 64 and 8192, attention's layer retrieval score first rises, then
falls, while KDA's ends far above it; accuracy at the long gap is 100% long before. Frozen from the start, KDA leaves
the job to attention.
Counts against it, at the longer gap: in `vanilla`, an attention score after the last update that is above a tenth of
KDA's or above half of attention's own peak, a peak after update 600, or an accuracy under 99% at update 500; in
`frozen`, an attention score after the last update that is not above KDA's.

    python recipes/spaced_retrieval.py [--device cuda]       two runs of 1,500 updates of 32; minutes on one H200
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.table import Table

from plait import records
from plait.report import build_report
from plait.runs import train_run
from plait.terminal import console
from plait.train.config import TrainConfig
from plait.train.settings import DataOptions, ModelOptions, RunSettings

RUNS = Path("runs/spaced-retrieval")
GAPS = (64, 8192)


def settings(steps: int = 1500, seed: int = 0) -> dict[str, RunSettings]:
    """The two runs (003, tables 3 and 24): AdamW, peak 3e-4, 100 updates of warmup, cosine to 1e-5, p = 0.5."""

    def run(*freeze: str) -> RunSettings:
        return RunSettings(
            model=ModelOptions(preset="003/spaced-retrieval"),
            data=DataOptions(task="spaced-retrieval", gaps=GAPS, batch_size=32),
            train=TrainConfig(
                steps=steps,
                lr=3e-4,
                warmup=100,
                seed=seed,
                backend="auto",
                freeze=freeze,
                eval_every=50,
                eval_rows=100,
                probe_every=50,
                probe_pairs=100,
                checkpoint_every=500,
            ),
        )

    return {"vanilla": run(), "frozen": run("kda:0-")}


def curves(run: Path) -> dict[str, dict[int, float]]:
    """By update, at the longer gap: held-out accuracy and the mean score of each kind of layer."""
    found: dict[str, dict[int, float]] = {"kda": {}, "nope": {}, "accuracy": {}}
    for row in records.read(run / "records.jsonl"):
        if row.kind == "train" or row.step is None or row.axes.get("gap") != max(GAPS):
            continue
        if row.kind == "eval":
            found["accuracy"][row.step] = row.values["accuracy"]
        elif row.axes.get("reduce") == "mean":
            found[str(row.axes["family"])][row.step] = row.values["score"]
    return found


def verdict(vanilla: dict[str, dict[int, float]], frozen: dict[str, dict[int, float]]) -> list[str]:
    """What counts against the claim."""
    last = max(vanilla["kda"])
    kda, attention = vanilla["kda"][last], vanilla["nope"]
    peak = max(attention, key=attention.__getitem__)
    known = [step for step in vanilla["accuracy"] if step <= 500]
    against = {
        f"attention ends at {attention[last]:.2f}, above a tenth of KDA's {kda:.2f}": attention[last] > kda / 10,
        f"attention ends above half of its peak {attention[peak]:.2f}": attention[last] > attention[peak] / 2,
        f"attention peaks at update {peak}, after 600": peak > 600,
        "accuracy is under 99% at update 500": vanilla["accuracy"][max(known)] < 0.99,
        "frozen KDA keeps the job": frozen["nope"][last] <= frozen["kda"][last],
    }
    return [what for what, is_so in against.items() if is_so]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    out, found = console(), {}
    for name, run in settings(args.steps).items():
        train_run(RUNS / name, run, device=args.device)
        found[name] = curves(RUNS / name)
        table = Table("update", "KDA", "attention", "accuracy", title=f"{name}, gap {max(GAPS)}", box=None)
        for step, score in found[name]["kda"].items():
            if step % 200 in (0, 50, 100) or step == args.steps:
                values = (score, found[name]["nope"][step])
                table.add_row(str(step), *(f"{value:.2f}" for value in values), f"{found[name]['accuracy'][step]:.0%}")
        out.print(table)
    build_report([RUNS / name for name in found], RUNS / "report.html")
    against = verdict(found["vanilla"], found["frozen"])
    out.print("The claim holds in these runs." if not against else "Against the claim: " + "; ".join(against))
    return 1 if against else 0


if __name__ == "__main__":
    sys.exit(main())
