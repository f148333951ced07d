"""A pytest plugin that runs flash-linear-attention's own op tests against plait.

    export PYTHONPATH=src:tests/peers PLAIT_BACKEND=torch
    pytest -c /dev/null --rootdir CHECKOUT -p fla_ops CHECKOUT/tests/modules/test_conv.py \
        CHECKOUT/tests/ops/test_{gla,simple_gla,gdn,kda,lightning_attn,attn,attn_sink}.py

CHECKOUT is a checkout of fla's repository whose tests fit the installed fla (0.6.0). It needs a CUDA device.
PLAIT_BACKEND is what is tested: torch, fla, flex (attention only) or naive. With PLAIT_PEERS=FILE the table is also
written to that file. With PLAIT_CONFIGS=2 Triton tries the first two configurations of a kernel, not all of them: fla's
tests have so many sizes that tuning each takes hours of compilation.

While a test runs, the op under test is replaced, in the test's module, by an adapter to plait with the same arguments.
What it is compared with stays: fla's naive code, or fla's own other kernel. Some tests call one op twice, once with a
flag and once without (RECALLED): there the plain call is the reference, and is fla's own, or plait's naive form where
fla refuses its own backward (issue 640). In SAME, which ask for the rounding of one kernel, both calls are plait's.

Every tolerance is the test's own. fla loosens them when FLA_CI_ENV=1; that is refused here.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections import Counter
from pathlib import Path

os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"  # its Triton kernels; some of its tests are left out otherwise
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # as its tests of chunked kernels set it

import pytest
import torch
import torch.nn.functional as F

BACKEND = os.environ.get("PLAIT_BACKEND", "torch")

SUBSTITUTED = {
    "test_gla.py": {"test_chunk": ("chunk_gla",), "test_fused_recurrent": ("fused_recurrent_gla",)},
    "test_simple_gla.py": {
        "test_chunk": ("chunk_simple_gla",),
        "test_fused_chunk": ("fused_chunk_simple_gla",),
        "test_fused_recurrent": ("fused_recurrent_simple_gla",),
        "test_parallel_varlen": ("parallel_simple_gla",),
    },
    "test_gdn.py": {
        "test_chunk": ("chunk_gated_delta_rule",),
        "test_fused_recurrent": ("fused_recurrent_gated_delta_rule",),
    },
    "test_kda.py": {"test_chunk": ("chunk_kda",), "test_fused_recurrent": ("fused_recurrent_kda",)},
    "test_lightning_attn.py": {"test_chunk": ("chunk_lightning_attn",)},
    "test_attn.py": {"test_parallel": ("parallel_attn",), "test_varlen": ("parallel_attn",)},
    "test_attn_sink.py": {"test_parallel": ("parallel_attn",)},
    "test_conv.py": {"test_conv": ("causal_conv1d",), "test_conv_varlen": ("causal_conv1d",)},
}
"""of each file: the names to replace, by the longest prefix of a test's name"""

APART = {
    "test_gdn.py": {
        "test_chunk_gated_delta_rule_fwd_h_blackwell": "looks at the configurations of one of fla's kernels",
        "test_gate": "fla's fused gate alone; in plait the gate is a line of torch",
        "test_prepare_wy_repr": "an inner kernel of fla's",
        "test_flash_qla": "another package's kernels, dispatched by fla",
    },
    "test_kda.py": {
        "test_naive_chunk": "compares two of fla's references",
        "test_chunk_invalid_chunk_size": "fla's own check of an argument that plait does not have",
        "test_chunk_return_intermediate_states": "states at every chunk, which plait does not return",
        "test_fused_recurrent_vllm_decode": "paged states of an inference server, which plait does not have",
        "test_gate": "fla's fused gate alone; in plait the gate is a line of torch",
        "test_flash_kda": "another package's kernels, dispatched by fla",
        "test_triton_ascend": "another device",
    },
    "test_simple_gla.py": {
        "test_parallel[": "asks for the T x T matrix of weights, which plait never makes",
        "test_simple_gla_to_mamba2": "compares fla with mamba_ssm",
    },
    "test_attn.py": {
        "test_parallel_with_g": "forgetting attention, which plait does not have",
        "test_parallel_bwd_full_value_reduction": "forces a branch inside fla's kernel",
    },
    "test_attn_sink.py": {
        "test_attn_sink_": "compares two references",
        "test_parallel_attn_sink_with_g": "forgetting attention, which plait does not have",
        "test_parallel_attn_sink_empty_row": "a window of no tokens; plait's counts the token itself",
        "test_attn_decoding": "fla's decoding kernel; plait decodes through its cache",
    },
    "test_conv.py": {
        "test_conv_decoding": "fla's module and its update in place",
        "test_conv_varlen_decoding": "fla's module and its update in place",
        "test_conv_with_cache": "fla's module",
        "test_conv_varlen_with_cache": "fla's module",
        "test_fast_conv": "another package's kernels",
        "test_conv_cache_backward": "gradients of the tail, which plait cuts between pieces",
        "test_conv_varlen_initial_state_backward": "gradients of the tail, which plait cuts between pieces",
        "test_conv_dense_initial_state_backward": "gradients of the tail, which plait cuts between pieces",
        "test_conv_non_contiguous": "gradients of the tail, which plait cuts between pieces",
        "test_conv_varlen_non_contiguous": "gradients of the tail, which plait cuts between pieces",
    },
}
"""tests that do not apply, by the longest prefix of a test's name, and why"""

RECALLED = {
    ("test_gla.py", "test_chunk_state_v_first"),
    ("test_gla.py", "test_fused_recurrent_state_v_first"),
    ("test_simple_gla.py", "test_chunk_with_chunk_size"),
    ("test_simple_gla.py", "test_chunk_state_v_first"),
    ("test_simple_gla.py", "test_fused_recurrent_state_v_first"),
    ("test_gdn.py", "test_chunk_state_v_first"),
    ("test_gdn.py", "test_chunk_gate_in_kernel"),
    ("test_gdn.py", "test_chunk_gate_in_kernel_gqa"),
    ("test_gdn.py", "test_chunk_gate_in_kernel_varlen"),
    ("test_gdn.py", "test_chunk_beta_sigmoid_in_kernel"),
    ("test_gdn.py", "test_fused_recurrent_state_v_first"),
    ("test_gdn.py", "test_fused_recurrent_gate_in_kernel"),
    ("test_gdn.py", "test_fused_recurrent_gate_in_kernel_varlen"),
    ("test_gdn.py", "test_fused_recurrent_beta_sigmoid_in_kernel"),
    ("test_kda.py", "test_fused_recurrent_gate_in_kernel"),
    ("test_kda.py", "test_fused_recurrent_use_beta_sigmoid_in_kernel"),
}
SAME = {
    ("test_kda.py", "test_chunk_state_v_first"),
    ("test_kda.py", "test_fused_recurrent_state_v_first"),
    ("test_kda.py", "test_chunk_use_beta_sigmoid_in_kernel"),
}
if BACKEND == "fla":  # fla's own plain call has no backward there, and naive code rounds less than a kernel in fp16
    RECALLED.remove(LAYOUT := ("test_gdn.py", "test_chunk_state_v_first"))
    SAME.add(LAYOUT)
FLAGS = ("state_v_first", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "chunk_size")


# ---- adapters: fla's arguments to plait's


def recurrence(kind: str, *, stepwise: bool = False):
    """An op (q, k, v, decay, ...) -> (o, final state). kind: linear or delta; stepwise: one token at a time."""

    def op(q, k, v, decay, beta, *, scale, initial_state, output_final_state, cu_seqlens, state_v_first, backend):
        HV, K = v.shape[2], k.shape[-1]
        # fla groups values over keys: each value head has a state of its own.
        q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k))
        q, k = q.to(v.dtype), k.to(v.dtype)
        seq = _seq(q, cu_seqlens)
        state = initial_state
        if state is not None and state_v_first:
            state = state.transpose(-1, -2)
        if state is None:
            state = v.new_zeros(seq.num_sequences, HV, K, v.shape[-1], dtype=torch.float32)
        state = state.float()
        gates = (decay.float(),) if kind == "linear" else (decay.float(), beta.float())
        scale = K**-0.5 if scale is None else float(scale)
        if kind == "linear":
            o, last = _steps(_linear, (q, k, v, *gates), state, seq, stepwise, backend, scale=scale)
        else:  # plait's delta rule has 1 / sqrt(K) built in
            o, last = _steps(_delta, (q, k, v, *gates), state, seq, stepwise, backend)
            o = o * (scale * math.sqrt(K))
        if state_v_first:
            last = last.transpose(-1, -2)
        return o.to(v.dtype), last if output_final_state else None

    return op


def _steps(run, x, state, seq, stepwise: bool, backend: str, **options):
    if not stepwise or backend == "naive":
        return run(x, state, seq, backend, **options)
    from plait.mixers.seq import Seq

    rows = [(x, state)] if seq.dense else zip(zip(*map(seq.split, x), strict=True), state.split(1), strict=True)
    outs, states = [], []
    with torch.no_grad():
        for row, memory in rows:
            one = Seq.build((len(memory), 1), seq.device)
            for token in zip(*(y.split(1, 1) for y in row), strict=True):
                o, memory = run(token, memory, one, backend, **options)
                outs.append(o)
            states.append(memory)
    return torch.cat(outs, 1), torch.cat(states)


def _linear(x, state, seq, backend: str, *, scale: float):
    from plait.mixers import fla, linear

    if backend == "fla":
        return fla.linear_fla(*x, state, seq, scale=scale)
    if backend == "naive":
        return _each(linear.linear_naive, x, state, seq, scale=scale)
    if x[0].shape[1] == 1 and seq.dense and hasattr(linear, "linear_step"):
        return linear.linear_step(*x, state, scale=scale)
    return linear.linear_chunk(*x, state, seq, scale=scale)


def _delta(x, state, seq, backend: str):
    from plait.mixers import delta, fla

    if backend == "fla":
        return fla.delta_fla(*x, state, seq)
    if backend == "naive":
        return _each(delta.delta_naive, x, state, seq)
    if x[0].shape[1] == 1 and seq.dense:
        return delta.delta_step(*x, state)
    return delta.delta_chunk(*x, state, seq)


def _each(naive, x, state, seq, **options):
    parts = zip(*(seq.split(y) for y in x), state.split(1), strict=True)
    outs, states = zip(*(naive(*part, **options) for part in parts), strict=True)
    return torch.cat(outs, 0 if seq.dense else 1), torch.cat(states)


def _seq(x, cu_seqlens):
    from plait.mixers.seq import Seq

    return Seq.build(tuple(x.shape[:2]), x.device, cu_seqlens=cu_seqlens)


def adapt(name: str):
    """The adapter for one of fla's ops: (args of the op) -> its results, with `backend` chosen by the caller."""
    if name == "parallel_attn":
        return attention
    if name == "causal_conv1d":
        return convolution
    linear = recurrence("linear")
    delta = recurrence("delta", stepwise=name.startswith("fused_recurrent"))

    def op(q, k, v, g=None, *rest, backend, **given):
        known = dict(zip(POSITIONAL.get(name, ()), rest, strict=False)) | given
        if "transpose_state_layout" in known:
            if known.get("state_v_first"):
                raise ValueError("state_v_first and transpose_state_layout are one argument")
            warnings.warn("transpose_state_layout is state_v_first", DeprecationWarning, stacklevel=2)
            known["state_v_first"] = known.pop("transpose_state_layout")
        decay = known.pop("gk", g)
        beta = known.pop("beta", None)
        if name.endswith("lightning_attn"):
            H = q.shape[2]
            slope = 8 / H * (1 - known.pop("layer_idx") / known.pop("num_layers"))
            decay = (-slope * torch.arange(H, device=q.device)).expand(*q.shape[:2], H)
        if decay is None and name.endswith("simple_gla"):
            decay = q.new_zeros(q.shape[:3])
        if known.pop("use_qk_l2norm_in_kernel", False):
            q, k = (F.normalize(x.float(), p=2, dim=-1).to(x.dtype) for x in (q, k))
        if known.pop("use_gate_in_kernel", False):
            decay = _gate(decay, known, per_channel=name.endswith("kda"))
        for unused in ("A_log", "dt_bias", "lower_bound"):
            known.pop(unused, None)
        if known.pop("use_beta_sigmoid_in_kernel", False):
            beta = torch.sigmoid(beta.float()) * (2 if known.pop("allow_neg_eigval", False) else 1)
        known.pop("allow_neg_eigval", None)
        for unused in ("chunk_size", "cu_seqlens_cpu", "safe_gate", "disable_recompute"):
            known.pop(unused, None)  # how fla computes, not what
        options = {
            key: known.pop(key, default)
            for key, default in (
                ("scale", None),
                ("initial_state", None),
                ("output_final_state", False),
                ("cu_seqlens", None),
                ("state_v_first", False),
            )
        }
        if known:
            raise NotImplementedError(f"{name}: the adapter does not know {sorted(known)}")
        run = delta if name.endswith(("delta_rule", "kda")) else linear
        return run(q, k, v, decay, beta, **options, backend=backend)

    return op


POSITIONAL = {"chunk_kda": ("beta",), "fused_recurrent_kda": ("beta",), "chunk_gated_delta_rule": ("beta",)}
"""arguments after q, k, v and the decay that tests give by position"""


def _gate(g, known, *, per_channel: bool):
    """fla's gates, as its references have them: -exp(A) softplus(g + bias), or bound sigmoid(exp(A) (g + bias))."""
    A_log, bias, bound = (known.get(key) for key in ("A_log", "dt_bias", "lower_bound"))
    heads = g.shape[2]
    g = g.float()
    if bias is not None:
        g = g + bias.float().view(heads, *((-1,) if per_channel else ()))
    rate = None
    if A_log is not None:
        rate = A_log.float().view(heads, *((1,) if per_channel else ())).exp()
    if bound is not None:
        return bound * torch.sigmoid(g if rate is None else rate * g)
    return -rate * F.softplus(g)


def attention(
    q, k, v, g=None, scale=None, window_size=None, cu_seqlens=None, chunk_indices=None, *, sink_bias=None, backend
):
    """parallel_attn."""
    from plait.mixers import attention as torch_attention

    assert g is None
    if scale is not None:  # plait's scale is 1 / sqrt(E)
        q = q * (scale * math.sqrt(q.shape[-1]))
    seq = _seq(q, cu_seqlens)
    if backend == "naive":
        outs = []
        for part in zip(*(seq.split(x) for x in (q, k, v)), strict=True):
            places = torch.arange(part[0].shape[1], device=q.device)[None]
            outs.append(torch_attention.attend_naive(*part, places, places, window_size, sink_bias))
        return torch.cat(outs, 0 if seq.dense else 1)
    return torch_attention.attend(q, k, v, seq, window_size=window_size, sink=sink_bias)


def convolution(x, weight, bias=None, residual=None, activation=None, cu_seqlens=None, *, backend, **given):
    """causal_conv1d without carried inputs: the tests with them ask for gradients that plait does not have."""
    from plait.mixers import conv, fla

    if given.pop("backend_", "triton") != "triton" or any(value is not None for value in given.values()):
        raise NotImplementedError(f"causal_conv1d: the adapter does not know {sorted(given)}")
    if activation is None:
        pytest.skip("plait: does not apply: no activation; plait's convolution has SiLU")
    seq = _seq(x, cu_seqlens)
    if backend == "fla":
        y = fla.conv_fla(x, weight, bias, None, seq)
    else:
        try:
            module = conv.ShortConv(*weight.shape, **({} if bias is None else {"bias": True}))
        except TypeError:
            pytest.skip("plait: does not apply: this convolution has no bias")
        tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        y = torch.func.functional_call(module, tensors, (x, None, seq))
    return y if residual is None else y + residual, None


def try_few(configs: int) -> None:
    """Shorten the list of every autotuned kernel that is made from now on."""
    from triton.runtime.autotuner import Autotuner

    init = Autotuner.__init__

    def short(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.configs = self.configs[:configs]

    Autotuner.__init__ = short


if os.environ.get("PLAIT_CONFIGS"):  # not in pytest_configure: fla's conftest, which imports its kernels, comes before
    try_few(int(os.environ["PLAIT_CONFIGS"]))


def refused(name: str) -> bool:
    """Whether fla refuses the backward of one of its ops here."""
    from plait.mixers.fla import needs_detour

    return name in ("chunk_gated_delta_rule", "chunk_simple_gla") and needs_detour()


class Substitute:
    """Stands in for one of fla's ops during one test, and notes which implementation each call went to."""

    def __init__(self, name: str, own, where: tuple[str, str], calls: Counter):
        self.name, self.own, self.where, self.calls = name, own, where, calls
        self.adapter = adapt(name)

    def __call__(self, *args, **kwargs):
        flagged = any(kwargs.get(flag) for flag in (*FLAGS, "transpose_state_layout"))
        if "backend" in kwargs:  # fla's name for who computes a convolution
            kwargs["backend_"] = kwargs.pop("backend")
        if self.where in RECALLED and not flagged:
            if not refused(self.name):
                self.calls["reference: fla"] += 1
                return self.own(*args, **kwargs)
            self.calls["reference: plait naive"] += 1
            return self.adapter(*args, **kwargs, backend="naive")
        self.calls[f"plait {BACKEND}"] += 1
        return self.adapter(*args, **kwargs, backend=BACKEND)


# ---- the plugin


def prefixed(table: dict[str, str | tuple[str, ...]], test: str):
    """The entry of the longest prefix of a test's name."""
    found = [prefix for prefix in table if test.startswith(prefix)]
    return table[max(found, key=len)] if found else None


def pytest_configure(config) -> None:
    if os.environ.get("FLA_CI_ENV") == "1":
        raise pytest.UsageError("FLA_CI_ENV=1 loosens the tolerances of fla's tests; unset it")
    if BACKEND not in ("torch", "fla", "flex", "naive"):
        raise pytest.UsageError(f"PLAIT_BACKEND={BACKEND}; it must be torch, fla, flex or naive")
    import fla.modules

    try:
        import fla.modules.convolution  # its name until 0.6
    except ModuleNotFoundError:
        import fla.modules.causal_conv1d

        sys.modules["fla.modules.convolution"] = fla.modules.causal_conv1d


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        reason = prefixed(APART.get(item.path.name, {}), item.name)
        if reason is None and BACKEND == "flex" and not item.path.name.startswith("test_attn"):
            reason = "flex is a backend of attention only"
        if reason is None and prefixed(SUBSTITUTED.get(item.path.name, {}), item.name) is None:
            reason = "nothing of it has a counterpart in plait"
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"plait: does not apply: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    where = (item.path.name, item.originalname)
    calls: Counter = Counter()
    patch = pytest.MonkeyPatch()
    for name in prefixed(SUBSTITUTED.get(where[0], {}), item.name) or ():
        patch.setattr(item.module, name, Substitute(name, getattr(item.module, name), where, calls))
    try:
        result = yield
    finally:
        patch.undo()
        item.user_properties.append(("plait", dict(calls)))
    if not any(call.startswith("plait") for call in calls):
        pytest.fail("no call reached plait")
    return result


def pytest_terminal_summary(terminalreporter) -> None:
    rows, reasons = Counter(), Counter()
    lines = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            file = Path(report.nodeid.split("::")[0]).name
            rows[file, outcome] += 1
            if outcome == "skipped" and isinstance(report.longrepr, tuple):
                reasons[file, report.longrepr[2].removeprefix("Skipped: ").removeprefix("plait: ")] += 1
            calls = dict(report.user_properties).get("plait", {})
            lines.append(f"{outcome:8} {report.nodeid.split('/')[-1]}  {calls or ''}")
            if outcome in ("failed", "error"):
                lines[-1] += "\n    " + str(report.longrepr).strip().splitlines()[-1]
    files = sorted({file for file, _ in rows})
    table = [f"fla's op tests against plait, backend {BACKEND}"]
    for file in files:
        counts = ", ".join(f"{rows[file, outcome]} {outcome}" for outcome in ("passed", "failed", "error", "skipped"))
        table.append(f"  {file:26} {counts}")
        table += [f"      {n:3} {reason}" for (of, reason), n in sorted(reasons.items()) if of == file]
    terminalreporter.write_line("\n".join(table))
    if os.environ.get("PLAIT_PEERS"):
        Path(os.environ["PLAIT_PEERS"]).write_text("\n".join([*table, "", *sorted(lines), ""]), encoding="utf-8")
