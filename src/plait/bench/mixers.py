"""`plait bench mixers`: token mixers against other implementations, in one process, interleaved, as rows.

A case is a function (device, lengths, repeats) -> rows; to add one, write it and name it in CASES. Rows of one case
and length come from one run and carry `ratio`: the competitor's figure over plait's, so above 1 plait is ahead.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Row = dict[str, Any]


def bench_mixers(
    *,
    device: str = "cpu",
    cases: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    repeats: int = 9,
) -> list[Row]:
    """Run cases and return their rows: case, competitor, device, shape, pass, median_ms or seconds, memory, ratio.

    cases: names in CASES; None: all. lengths: tokens a row, instead of each case's own. A competitor that cannot run
    has a row whose `note` says why.
    """
    import torch

    cases = cases or tuple(CASES)
    unknown = [name for name in cases if name not in CASES]
    if unknown:
        raise ValueError(f"cases: {unknown[0]!r} is unknown; choose from {', '.join(CASES)}")
    return [row for name in cases for row in CASES[name](torch.device(device), lengths, repeats)]


def gdn(device: torch.device, lengths: Sequence[int] | None, repeats: int) -> list[Row]:
    """The gated delta rule, forward and forward + backward.

    CPU: fp32, 4 heads of 64, against the torch code of transformers. CUDA: bf16, 8 heads of 128, against
    flash-linear-attention's KDA with one decay for all channels, which is the same function (its own gated delta rule
    refuses the backward on Hopper GPUs with the Triton that torch 2.11 brings).
    """
    import torch

    from plait.bench.timing import interleaved_ms, peak_bytes, saved_bytes

    rows: list[Row] = []
    for length in lengths or ((4096, 32768) if device.type == "cuda" else (4096,)):
        competitors, absent = _gdn_competitors(device)
        inputs = gdn_inputs(device, length)
        shape = _shape_fields(inputs)
        runs = {name: make(inputs) for name, make in competitors.items()}
        do_BTHV = torch.randn_like(inputs[2])

        def forward(name: str, runs=runs) -> None:
            call, leaves = runs[name]
            with torch.no_grad():
                call(*leaves)

        def both(name: str, runs=runs, do_BTHV=do_BTHV) -> None:
            call, leaves = runs[name]
            torch.autograd.grad(call(*leaves), leaves, do_BTHV)

        for kind, run in (("forward", forward), ("forward+backward", both)):
            calls = {name: lambda name=name, run=run: run(name) for name in runs}
            medians = interleaved_ms(calls, device=device, repeats=repeats)
            for name, ms in medians.items():
                row = {"case": "gdn", "competitor": name, **shape, "pass": kind, "median_ms": ms}
                row["ratio"] = ms / medians["plait"]
                row["peak_mb"] = _mb(peak_bytes(calls[name], device))
                if kind == "forward+backward" and not name.endswith("compiled"):
                    call, leaves = runs[name]
                    row["saved_mb"] = _mb(saved_bytes(lambda call=call, leaves=leaves: call(*leaves)))
                rows.append(row)
        rows += [{"case": "gdn", "competitor": name, **shape, "note": why} for name, why in absent.items()]
    return rows


def gdn_start(device: torch.device, lengths: Sequence[int] | None, repeats: int) -> list[Row]:
    """Seconds from the start of a fresh process to the end of its first forward + backward, imports counted: once with
    empty compilation caches, then once with those that the first process left."""
    from plait.bench.timing import seconds_to_first_line

    length = min(lengths) if lengths else 4096
    competitors, absent = _gdn_competitors(device)
    shape = {"device": _device_name(device), "length": length}
    rows: list[Row] = []
    for name in competitors:
        code = f"from plait.bench.mixers import gdn_first_step; gdn_first_step({name!r}, {str(device)!r}, {length})"
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            for kind in ("first step, empty caches", "first step, full caches"):
                seconds = seconds_to_first_line(code, env=caches | {"FLA_CACHE_RESULTS": "1"})
                rows.append({"case": "gdn-start", "competitor": name, **shape, "pass": kind, "seconds": seconds})
    ours = {row["pass"]: row["seconds"] for row in rows if row["competitor"] == "plait"}
    for row in rows:
        row["ratio"] = row["seconds"] / ours[row["pass"]]
    return rows + [{"case": "gdn-start", "competitor": name, **shape, "note": why} for name, why in absent.items()]


def _window(device: torch.device, lengths: Sequence[int] | None, repeats: int) -> list[Row]:
    from plait.bench.window import window

    return [{"device": _device_name(device), **row} for row in window(device, lengths, repeats)]


CASES: dict[str, Callable[[torch.device, Sequence[int] | None, int], list[Row]]] = {
    "gdn": gdn,
    "gdn-start": gdn_start,
    "window": _window,
}


def gdn_first_step(name: str, device: str, length: int) -> None:
    """What the fresh process of gdn_start does; it prints when its first step is done."""
    import torch

    inputs = gdn_inputs(torch.device(device), length)
    call, leaves = _gdn_competitors(torch.device(device))[0][name](inputs)
    grads = torch.autograd.grad(call(*leaves).sum(), leaves)
    print(f"first step done, dq[0] = {grads[0].flatten()[0].item():.3g}", flush=True)


def gdn_inputs(device: torch.device, length: int) -> list[Tensor]:
    """q, k, v, g, beta with decays as at Gated DeltaNet's initialization."""
    import torch
    import torch.nn.functional as F

    cuda = device.type == "cuda"
    B, H, K = (min(8, max(1, 65536 // length)), 8, 128) if cuda else (1, 4, 64)
    dtype = torch.bfloat16 if cuda else torch.float32
    rng = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=device)

    q_BTHK, k_BTHK = (F.normalize(normal(B, length, H, K), dim=-1).to(dtype) for _ in range(2))
    rate_H = torch.empty(H, device=device).uniform_(0.1, 16, generator=rng)
    bias_H = torch.empty(H, device=device).uniform_(-6.9, -2.3, generator=rng)  # log-uniform in [1e-3, 0.1]
    g_BTH = -rate_H * F.softplus(normal(B, length, H) + bias_H)
    return [q_BTHK, k_BTHK, normal(B, length, H, K).to(dtype), g_BTH, normal(B, length, H).sigmoid()]


def _gdn_competitors(device: torch.device) -> tuple[dict[str, Callable], dict[str, str]]:
    """name -> function from inputs to (a call giving o_BTHV, its leaves), and the absent ones with the reason."""
    import torch

    from plait.mixers.delta import delta_chunk
    from plait.mixers.seq import Seq

    def leaves_of(inputs: Sequence[Tensor]) -> list[Tensor]:
        return [x.detach().clone().requires_grad_() for x in inputs]

    def plait(inputs: Sequence[Tensor]) -> tuple[Callable, list[Tensor]]:
        B, T = inputs[0].shape[:2]
        seq = Seq.build((B, T), inputs[0].device)
        return (lambda *x: delta_chunk(*x, None, seq)[0]), leaves_of(inputs)

    def plait_compiled(inputs: Sequence[Tensor]) -> tuple[Callable, list[Tensor]]:
        call, leaves = plait(inputs)
        return torch.compile(call, dynamic=False), leaves

    def transformers(inputs: Sequence[Tensor]) -> tuple[Callable, list[Tensor]]:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        return (lambda q, k, v, g, beta: torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]), leaves_of(inputs)

    def fla(inputs: Sequence[Tensor]) -> tuple[Callable, list[Tensor]]:
        from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

        q, k, v, g, beta = inputs
        g_BTHK = g[..., None].expand_as(k)
        return (lambda q, k, v, g, beta: chunk_kda(q, k, v, g=g, beta=beta)[0]), leaves_of((q, k, v, g_BTHK, beta))

    if device.type != "cuda":
        return {"plait": plait, "transformers": transformers}, {}
    ours = {"plait": plait, "plait compiled": plait_compiled}
    if importlib.util.find_spec("fla") is None:
        return ours, {"fla": "not installed: pip install flash-linear-attention"}
    return ours | {"fla": fla}, {}


COLUMNS = {
    "length": "length",
    "batch": "batch",
    "pass": "pass",
    "competitor": "competitor",
    "median_ms": "ms",
    "seconds": "seconds",
    "us_per_token": "us/token",
    "ratio": "x plait",
    "peak_mb": "peak MB",
    "saved_mb": "saved MB",
    "note": "",
}
"""fields of a row that the table shows, and their headings"""


def print_rows(rows: Sequence[Row]) -> None:
    """One table a case, competitors side by side; columns that a case does not fill are left out."""
    from rich.table import Table

    from plait.terminal import console

    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        shown = [key for key in COLUMNS if any(row.get(key) is not None for row in own)]
        device = own[0].get("device", "")
        table = Table(box=None, header_style="bold", pad_edge=False)
        for key in shown:
            words = key in ("pass", "competitor", "note")
            table.add_column(COLUMNS[key], justify="left" if words else "right", no_wrap=True)
        for row in own:
            table.add_row(*(_shown(row.get(key)) for key in shown))
        console().print(f"{case}, {device}", table, "", sep="\n")


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _shape_fields(inputs: Sequence[Tensor]) -> Row:
    q_BTHK = inputs[0]
    B, T, H, K = q_BTHK.shape
    dtype = str(q_BTHK.dtype).removeprefix("torch.")
    return {"device": _device_name(q_BTHK.device), "dtype": dtype, "batch": B, "length": T, "heads": H, "head_dim": K}


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)"


def _mb(size: int | None) -> float | None:
    return None if size is None else size / 2**20
