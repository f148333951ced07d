"""Books on one CPU or GPU: do hybrids keep up with full attention, and with four times the context?

Claim (000, 001): where three of four layers see a window or are recurrent and the fourth is attention without
positions, a model predicts text about as well as its twin of full attention with RoPE, and makes use of a long context.
Counts against it, after either length: a hybrid whose loss per token of held-out books is more than 2% above its
twin's; a hybrid that loses more on tokens with at least half of the context before them than on those with an eighth to
a quarter of it.

    plait data build books.jsonl.xz --tokenizer TOKENIZER --valid 0.05 --out shards/books
    python recipes/books.py shards/books                           8M parameters, 1,024 tokens; two cores, 15 min a run
    python recipes/books.py shards/books --size gpu --device cuda  30M, 4,096 and then 16,384 tokens; one H200, minutes
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from plait import records
from plait.evals.suites import Ppl, Subject, write_outcome
from plait.report import build_report
from plait.runs import train_run
from plait.terminal import console
from plait.train.checkpoint import find_checkpoint
from plait.train.config import TrainConfig
from plait.train.settings import DataOptions, ExtendOptions, ModelOptions, RunSettings

RUNS = Path("runs/books")
WORST = 0.02
"""share of the twin's loss"""


@dataclass(frozen=True)
class Size:
    d_model: int
    num_heads: int
    window: int
    tokens: int
    """of an update"""
    lengths: tuple[int, ...]
    steps: tuple[int, ...]
    """updates at each length"""

    @property
    def layouts(self) -> dict[str, str]:
        return {"swa": f"3*swa[window={self.window}] nope", "gdn": "3*gdn nope", "twin": "full"}


SIZES = {
    "cpu": Size(d_model=256, num_heads=4, window=128, tokens=8192, lengths=(1024,), steps=(150,)),
    "gpu": Size(d_model=512, num_heads=8, window=512, tokens=65536, lengths=(4096, 16384), steps=(500, 100)),
}


def settings(data: Path, size: Size, name: str, runs: Path = RUNS) -> dict[str, RunSettings]:
    """A model's runs by length. The first begins afresh: AdamW, a peak of 1e-3, a cosine to a tenth. The next goes on
    with its weights, from 3e-4 to 0, with RoPE's base at 500,000 where there is full attention with RoPE."""
    found: dict[str, RunSettings] = {}
    for i, (length, steps) in enumerate(zip(size.lengths, size.steps, strict=True)):
        shape = {"d_model": size.d_model, "num_layers": 8, "num_heads": size.num_heads}
        lr, schedule = (3e-4, "linear") if i else (1e-3, "cosine")
        found[f"{name}-{length}"] = RunSettings(
            model=None if i else ModelOptions(layout=size.layouts[name], **shape),
            data=DataOptions(data=data, length=length, batch_size=size.tokens // length),
            train=TrainConfig(
                steps=steps,
                lr=lr,
                schedule=schedule,
                min_lr=0.0 if i else 1e-4,
                warmup=max(1, steps // 20),
                backend="auto",
                eval_every=50,
                eval_rows=16,
                checkpoint_every=50,
                keep=1,
                first_batch=0 if i == 0 else -(-size.steps[i - 1] * size.lengths[i - 1] // length),
            ),
            extend=ExtendOptions(extend_theta=("full=500000",)) if i else ExtendOptions(),
            init=str(runs / f"{name}-{size.lengths[i - 1]}") if i else None,
        )
    return found


def measure(run: Path, data: Path, length: int, device: str) -> None:
    """Loss of held-out books, in passes of the run's length: on average and against position."""
    backend = "auto" if device == "cuda" else "torch"
    subject = Subject(name=run.name, path=find_checkpoint(run), device=device, backend=backend)
    for outcome in Ppl(data=(str(data),), length=length, max_tokens=8 * length).run([subject]):
        (run / "held-out" / "records.jsonl").unlink(missing_ok=True)
        write_outcome(outcome, run / "held-out")


def curve(run: Path) -> dict[int, float]:
    """Loss by position: that of the first of positions up to twice it; at 0 the mean of all."""
    found = {}
    for row in records.read(run / "held-out" / "records.jsonl"):
        loss = row.values.get("loss")
        if loss is not None:
            found[int(row.axes.get("position", 0))] = loss
    return found


def verdict(hybrid: dict[int, float], twin: dict[int, float], length: int) -> list[str]:
    """What counts against the claim."""
    early, late = hybrid[length // 8], hybrid[length // 2]
    against = {
        f"{hybrid[0]:.3f} nats, more than 2% above the twin's {twin[0]:.3f}": hybrid[0] > (1 + WORST) * twin[0],
        f"{late:.3f} nats late in the context, {early:.3f} earlier": late > early,
    }
    return [what for what, is_so in against.items() if is_so]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="what plait data build made")
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=SIZES["cpu"].layouts, help="train this model and compare nothing")
    args = parser.parse_args()
    size, out, against = SIZES[args.size], console(), []
    for name in [args.only] if args.only else size.layouts:
        for run, asked in settings(args.data, size, name).items():
            train_run(RUNS / run, asked, device=args.device)
            measure(RUNS / run, args.data, asked.data.length, args.device)
    if args.only:
        return 0
    for length in size.lengths:
        curves = {name: curve(RUNS / f"{name}-{length}") for name in size.layouts}
        table = Table("tokens seen", *curves, title=f"loss of held-out books, {length} tokens", box=None)
        for place in curves["twin"]:
            label = "all" if place == 0 else f"{place} to {min(2 * place - 1, length)}"
            table.add_row(label, *(f"{found[place]:.3f}" for found in curves.values()))
        out.print(table)
        for name in ("swa", "gdn"):
            against += [f"{name}-{length}: {what}" for what in verdict(curves[name], curves["twin"], length)]
    build_report([RUNS / f"{name}-{length}" for name in size.layouts for length in size.lengths], RUNS / "report.html")
    out.print("The claim holds in these runs." if not against else "Against the claim: " + "; ".join(against))
    return 1 if against else 0


if __name__ == "__main__":
    sys.exit(main())
