"""What the cases share: options, steps, and rows, which are measured here and shown here. No torch until one runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]
Step = tuple[str, Callable[[], list[Row]]]
"""a label for the progress line, and what measures"""

OURS, COMPILED = "plait", "plait compiled"


@dataclass(frozen=True)
class Options:
    device: torch.device
    lengths: tuple[int, ...] | None = None
    """tokens T, instead of each case's own"""
    repeats: int = 9
    without: tuple[str, ...] = ()
    """words in the names of competitors that are left out"""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def keeps(self, name: str) -> bool:
        return name == OURS or not any(word in name for word in self.without)

    def lengths_or(self, cpu: Sequence[int], cuda: Sequence[int]) -> tuple[int, ...]:
        return self.lengths or tuple(cuda if self.cuda else cpu)


def measure(
    calls: Mapping[str, Callable[[], object]],
    fields: Row,
    options: Options,
    *,
    reference: str | None = None,
    bars: Mapping[str, float] | None = None,
    timed: Callable[[str, float], Row] = lambda name, ms: {},
) -> list[Row]:
    """A row of each competitor: median, peak memory, and `ratio`, its figure over that of the reference.

    reference: a competitor, by default the first; without its figure there are no ratios. bars: by competitor, the
    least ratio that the project promises. timed: more fields of a competitor, from its median.
    """
    from plait.bench.timing import Timing, interleaved, peak_bytes, reason

    timings = interleaved(calls, device=options.device, repeats=options.repeats)
    first = timings.get(reference or next(iter(calls)), Timing()).median_ms
    compiled = timings.get(COMPILED, Timing()).median_ms
    rows = []
    for name, timing in timings.items():
        row = {**fields, "competitor": name}
        ms = timing.median_ms
        if ms is None:
            rows.append({**row, "note": timing.note})
            continue
        row |= {"median_ms": ms, "repeats": timing.repeats}
        if first is not None:
            row |= judged(ms / first, (bars or {}).get(name))
        if compiled is not None:
            row["ratio_compiled"] = ms / compiled
        try:
            row["peak_mb"] = mb(peak_bytes(calls[name], options.device))
            row |= timed(name, ms)
        except Exception as error:  # memory, most likely
            row["note"] = reason(error)
        rows.append(row)
    return rows


def judged(ratio: float, bar: float | None) -> Row:
    return {"ratio": ratio} if bar is None else {"ratio": ratio, "bar": bar, "met": ratio >= bar}


def device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)"


def dtype_of(device: torch.device) -> torch.dtype:
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def batch_of(device: torch.device, length: int) -> int:
    """Rows that give a GPU some 32,768 to 65,536 tokens; one on a CPU."""
    return min(8, max(1, 65536 // length)) if device.type == "cuda" else 1


def mb(size: int | None) -> float | None:
    return None if size is None else size / 2**20


COLUMNS = {
    "task": "task",
    "length": "length",
    "batch": "batch",
    "heads": "heads",
    "head_dim": "size",
    "layout": "layout",
    "backend": "backend",
    "pass": "pass",
    "competitor": "competitor",
    "samples": "samples",
    "processes": "processes",
    "median_ms": "ms",
    "seconds": "seconds",
    "cpu_seconds": "CPU s",
    "us_per_token": "us/token",
    "tokens_per_s": "tokens/s",
    "mfu_percent": "MFU %",
    "efficiency": "efficiency",
    "ratio": "x plait",
    "ratio_compiled": "x compiled",
    "bar": "bar",
    "limit": "limit",
    "score": "score",
    "agrees": "agrees",
    "new_tokens": "new tokens",
    "cache_mb": "cache MB",
    "peak_mb": "peak MB",
    "saved_mb": "saved MB",
    "intensity": "FLOP/byte",
    "bound": "bound by",
    "percent": "% of it",
    "tflops": "TFLOP/s",
    "gb_per_s": "GB/s",
    "difference": "differs",
    "note": "",
}
"""fields of a row that the table shows, and their headings"""
WORDS = ("task", "layout", "backend", "pass", "competitor", "bar", "limit", "agrees", "bound", "note")


def print_rows(rows: Sequence[Row]) -> None:
    """One table a case, competitors side by side; columns that a case does not fill are left out."""
    from rich.markup import escape
    from rich.table import Table

    from plait.terminal import console

    out = console()
    if not out.is_terminal:
        out.width = 220
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        shown = [key for key in COLUMNS if any(row.get(key) is not None for row in own)]
        title = ", ".join(str(own[0][key]) for key in ("device", "dtype") if own[0].get(key))
        table = Table(box=None, header_style="bold", pad_edge=False)
        for key in shown:
            words = key in WORDS
            table.add_column(COLUMNS[key], justify="left" if words else "right", no_wrap=key != "note")
        for row in own:
            table.add_row(*(escape(_shown(row, key)) for key in shown))
        out.print(f"{case}, {title}", table, "", sep="\n")


def _shown(row: Row, key: str) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if key == "bar":
        return f">= {value:.2f} {'met' if row['met'] else 'missed'}"
    if key == "limit":
        return f"< {value:.0f} s {'met' if row['met'] else 'missed'}"
    if key == "difference":
        return f"{value:.0e}"
    if isinstance(value, float):
        return f"{value:.0f}" if key in ("intensity", "percent") else f"{value:.2f}"
    return str(value)
