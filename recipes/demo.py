"""Competing learning on a laptop: who gets the retrieval job, the recurrent layers or softmax attention?

Claim (003, 3.3.1), at toy size: trained together, the recurrent layers take over retrieval; frozen from the start,
they leave it to attention; released later, they no longer win it back.
Counts against it: an attention score above the recurrent one in `vanilla`, or below it in `frozen`, at the longer gap
after the last update. What `released` does is reported, not judged: at this size it may go either way.

    python recipes/demo.py            trains three small models (a few minutes on two cores) and writes the page
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.table import Table

from plait.report import build_report
from plait.runs import last_measurements, train_run
from plait.terminal import console
from plait.train.config import TrainConfig
from plait.train.settings import DataOptions, ModelOptions, RunSettings

RUNS = Path("runs/demo")
STEPS, RELEASE = 160, 80
GAPS = (16, 128)


def settings() -> dict[str, RunSettings]:
    """The three runs, in the order they are made: `released` is a branch of `frozen`."""

    def run(*freeze: str, branch: str | None = None) -> RunSettings:
        return RunSettings(
            model=ModelOptions(layout="kda[expand_v=2] nope", d_model=128, num_layers=4, num_heads=2, d_ff=256),
            data=DataOptions(task="spaced-retrieval", gaps=GAPS, batch_size=32),
            train=TrainConfig(
                steps=STEPS,
                lr=1e-3,
                warmup=20,
                freeze=freeze,
                eval_every=20,
                eval_rows=40,
                probe_every=20,
                probe_pairs=40,
                checkpoint_every=RELEASE,
            ),
            branch=branch,
        )

    return {
        "vanilla": run(),
        "frozen": run("recurrent:0-"),
        "released": run(f"recurrent:0-{RELEASE}", branch=f"{RUNS}/frozen@{RELEASE}"),
    }


def outcome(run: Path) -> dict[str, float]:
    """Held-out accuracy and the mean score of each kind of layer at the longer gap, after the last update."""
    rows = [row for row in last_measurements(run) if row.axes.get("gap") == max(GAPS)]
    values = {row.axes["family"]: row.values["score"] for row in rows if row.axes.get("reduce") == "mean"}
    accuracy = next(row.values["accuracy"] for row in rows if row.kind == "eval")
    return {"recurrent": values["kda"], "attention": values["nope"], "accuracy": accuracy}


def main() -> int:
    out = console()
    out.print(f"Three models of 4 layers (kda nope kda nope) learn to repeat 5 digits after {GAPS[1]} blanks.\n")
    start = time.monotonic()
    results = {}
    for name, run in settings().items():
        train_run(RUNS / name, run)
        results[name] = outcome(RUNS / name)
    out.print("\nLayer retrieval score (logits), mean of each kind's layers")
    table = Table(box=None, pad_edge=False)
    for column in ("run", "recurrent", "attention", "accuracy", "retrieval is done by"):
        table.add_column(column, justify="left" if column in ("run", "retrieval is done by") else "right")
    winners = {}
    for name, result in results.items():
        winners[name] = max(("recurrent", "attention"), key=result.__getitem__)
        scores = (f"{result['recurrent']:.2f}", f"{result['attention']:.2f}", f"{result['accuracy']:.0%}")
        table.add_row(name, *scores, f"{winners[name]} layers")
    out.print(table)
    page = RUNS / "report.html"
    build_report([RUNS / name for name in results], page)
    held = winners["vanilla"] == "recurrent" and winners["frozen"] == "attention"
    out.print(f"\nThe claim {'holds' if held else 'does not hold'} in this run ({time.monotonic() - start:.0f} s).")
    out.print(f"The page: {page}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
