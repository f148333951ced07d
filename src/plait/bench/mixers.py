"""`plait bench mixers`: token mixers against other implementations, in one process, interleaved, as rows.

A case is a function from Options to steps, each of which gives rows; to add one, write it and name it in CASES. Rows of
one step are measured together and carry `ratio`: the competitor's figure over plait's, so above 1 plait is ahead.
Where the project promises a ratio, `bar` is it and `met` says whether it holds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

from plait.bench.rows import OURS, Options, Row, Step, device_name, print_rows
from plait.fields import suggest
from plait.terminal import progress_bar

__all__ = ["CASES", "bench_mixers", "print_rows"]


def bench_mixers(
    *,
    device: str = "cpu",
    cases: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    repeats: int = 9,
    without: Sequence[str] | None = None,
    minutes: float | None = None,
) -> list[Row]:
    """Run cases and return their rows: case, competitor, device, dtype, shape, pass, median_ms, memory, ratio, ...

    cases: names in CASES; None: all. lengths: tokens a row, instead of each case's own. without: words in the names of
    competitors to leave out. minutes: no step begins later. What cannot run has a row whose `note` says why.
    """
    import torch

    cases = cases or tuple(CASES)
    for name in cases:
        if name not in CASES:
            raise ValueError(f"cases: {name!r} is unknown; {suggest(name, CASES)}")
    for field, value, least in (("repeats", repeats, 1), *(("lengths", length, 2) for length in lengths or ())):
        if value < least:
            raise ValueError(f"{field}: {value}; it must be at least {least}")
    options = Options(torch.device(device), tuple(lengths) if lengths else None, repeats, tuple(without or ()))
    steps = [(name, *step) for name in cases for step in CASES[name](options)]
    return _run(steps, options, minutes)


def _run(
    steps: Sequence[tuple[str, str, Callable[[], list[Row]]]], options: Options, minutes: float | None
) -> list[Row]:
    """Every step in turn, with a bar on a terminal and a line a step elsewhere. A step that raises is a row."""
    from plait.bench.timing import reason

    bar = sys.stderr.isatty()
    start = time.monotonic()
    rows: list[Row] = []
    with progress_bar(len(steps), show=bar, label="bench") as advance:
        for done, (case, label, step) in enumerate(steps):
            seconds = time.monotonic() - start
            advance(done, label)
            if not bar:
                eta = f", about {seconds / done * (len(steps) - done):.0f} s left" if done else ""
                print(f"{done + 1}/{len(steps)} {label} ({seconds:.0f} s{eta})", file=sys.stderr, flush=True)
            late = minutes is not None and seconds > 60 * minutes
            note = f"not run: {minutes:g} minutes were over" if late else None
            try:
                rows += [] if note else step()
            except Exception as error:
                note = reason(error)
            if note:
                rows.append({"case": case, "device": device_name(options.device), "competitor": label, "note": note})
        advance(len(steps))
    return rows


def _rule(name: str, options: Options) -> list[Step]:
    from plait.bench.rules import steps

    return steps(name, options)


def gdn_start(options: Options) -> list[Step]:
    """Seconds from the start of a fresh process to the end of its first forward + backward, imports counted: once with
    empty compilation caches, then once with those that the first process left."""
    from plait.bench.rules import RULES

    length = min(options.lengths or (4096,))
    ours: dict[str, float] = {}
    """seconds of plait, which comes first, by pass"""

    def rows(name: str) -> list[Row]:
        from plait.bench.timing import seconds_to_first_line

        fields = {"case": "gdn-start", "competitor": name, "device": device_name(options.device), "length": length}
        code = "from plait.bench.mixers import gdn_first_step; gdn_first_step"
        code += f"({name!r}, {str(options.device)!r}, {length})"
        result = []
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            for kind in ("first step, empty caches", "first step, full caches"):
                seconds = seconds_to_first_line(code, env=caches | {"FLA_CACHE_RESULTS": "1"})
                if name == OURS:
                    ours[kind] = seconds
                ratio = {"ratio": seconds / ours[kind]} if kind in ours else {}
                result.append({**fields, "pass": kind, "seconds": seconds, **ratio})
        return result

    return [(f"gdn-start, {name}", partial(rows, name)) for name in RULES["gdn"].sides(options)]


def gdn_first_step(name: str, device: str, length: int) -> None:
    """What the fresh process of gdn_start does; it prints when its first step is done."""
    import torch

    from plait.bench.rows import batch_of
    from plait.bench.rules import HEADS, RULES, Draw

    place = torch.device(device)
    H, E = HEADS["cuda" if place.type == "cuda" else "cpu"][-1]
    inputs = RULES["gdn"].inputs(Draw(place, batch_of(place, length), length, H, E))
    call, leaves = RULES["gdn"].sides(Options(place))[name](inputs)
    grads = torch.autograd.grad(call(*leaves).sum(), leaves)
    print(f"first step done, dq[0] = {grads[0].flatten()[0].item():.3g}", flush=True)


def _layers(case: str, options: Options) -> list[Step]:
    from plait.bench import layers

    return getattr(layers, case)(options)


def _roofline(options: Options) -> list[Step]:
    from plait.bench.roofline import roofline

    return roofline(options)


def _window(options: Options) -> list[Step]:
    from plait.bench.window import window

    return window(options)


CASES: dict[str, Callable[[Options], list[Step]]] = {
    "roofline": _roofline,
    **{name: partial(_rule, name) for name in ("gdn", "kda", "gla", "mamba2", "lightning")},
    "head-wise": partial(_layers, "head_wise"),
    "fla-layer": partial(_layers, "fla_layer"),
    "decode": partial(_layers, "decode"),
    "window": _window,
    "gdn-start": gdn_start,
}
