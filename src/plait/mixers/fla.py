"""The backend `fla`: mixers on the Triton kernels of flash-linear-attention, https://github.com/fla-org.

fla needs triton even to be imported, so every import of it is inside a function: this module loads anywhere, and what
it cannot serve is one readable error (`why_not`, ValueError).

Sequences are dense rows [B, T, ...], or packed [1, N, ...] and told apart by cu_seqlens. A state has one entry for each
sequence and is [K, V] in memory, as everywhere in plait (fla's layers keep [V, K]: their state_v_first).

Shapes: B rows, T tokens a row, H query heads, S states a row, G = H / S, K key size, V value size, C channels,
W convolution width, N sequences.
"""

# fla and triton are not where the checker runs
# pyright: reportMissingImports=false

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from plait.mixers.base import wants_grad
from plait.mixers.seq import Seq

OLDEST, TOO_NEW = "0.6.0", "0.7.0"
"""versions of fla: what this file was written for, and the first whose interface it does not know"""
MIN_SIZE = 16
"""of keys and values: the least that a Triton matrix product takes; smaller ones are padded"""
MAX_DELTA_KEY = 256
"""fla's delta-rule kernels keep all of K on chip (asserted in chunk_delta_h.py and kda/chunk.py)"""


@cache
def why_not(device: torch.device) -> str | None:
    """Why this backend cannot serve tensors of a device, in one line; None if it can."""
    if device.type != "cuda":
        return f"its kernels run on CUDA devices only, and the tensors are on {device.type}"
    if find_spec("fla") is None or find_spec("triton") is None:
        return "flash-linear-attention is not installed; pip install 'plait[fla]'"
    found = _installed()
    if found is not None and not OLDEST <= TorchVersion(found) < TOO_NEW:
        return f"flash-linear-attention {found} is installed, and plait needs {OLDEST} or later, before {TOO_NEW}"
    return None


def why_not_delta(key_size: int) -> str | None:
    """Why this backend cannot take a delta rule with keys of this size, in one line; None if it can."""
    if key_size > MAX_DELTA_KEY:
        return f"key size {key_size}; its delta-rule kernels take at most {MAX_DELTA_KEY}"
    return None


@cache
def needs_detour() -> bool:
    """Whether the gradients of a decay that is one number per head must be taken by the kernels for one per channel.

    Triton 3.4 to 3.7.0 miscompiles fla's gated chunk_bwd_dqkwg on Hopper (fla-org/flash-linear-attention issue 640),
    through which chunk_gated_delta_rule and chunk_simple_gla go backwards, and fla refuses to run it there. chunk_kda
    and chunk_gla have kernels of their own for that step. (fla also lifts its refusal where tilelang is installed with
    a working nvcc; the detour is as right there.)
    """
    import triton

    hopper = torch.cuda.get_device_capability()[0] == 9
    return hopper and "3.4.0" <= TorchVersion(triton.__version__) < "3.7.1"


@torch.compiler.disable
def linear_fla(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g: Tensor,
    state_BHKV: Tensor | None,
    seq: Seq,
    *,
    scale: float,
    final: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t: (o_BTHV, state in fp32, None unless `final`).

    g: [B, T, H], a decay per head (Mamba-2, Lightning), or [B, T, H, K], one per channel (GLA).
    """
    _check(q_BTHK, k_BTHK, v_BTHV)
    if not q_BTHK.numel():
        return _nothing(q_BTHK, v_BTHV, state_BHKV, seq)
    return _padded(lambda *x: _linear(*x, seq, scale=scale, final=final), q_BTHK, k_BTHK, v_BTHV, g.float(), state_BHKV)


def _linear(q_BTHK, k_BTHK, v_BTHV, g, state_BHKV, seq: Seq, *, scale: float, final: bool):
    from fla.ops.gla import chunk_gla, fused_recurrent_gla
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    inputs, per_channel = (q_BTHK, k_BTHK, v_BTHV), g.ndim == 4
    grads = wants_grad(*inputs, g, state_BHKV)
    common = {"scale": scale, "output_final_state": final}
    if seq.dense and q_BTHK.shape[1] == 1 and not grads:
        if per_channel:
            return fused_recurrent_gla(*inputs, gk=g, initial_state=state_BHKV, **common)
        return fused_recurrent_simple_gla(*inputs, g=g, initial_state=state_BHKV, **common)
    if grads and not per_channel and needs_detour():
        g, per_channel = g[..., None].expand(k_BTHK.shape), True
    op = chunk_gla if per_channel else chunk_simple_gla
    return _by_sequence(lambda **packing: op(*inputs, g, **common, **packing), state_BHKV, k_BTHK, v_BTHV, seq)


@torch.compiler.disable
def delta_fla(
    q_BTHK: Tensor,
    k_BTSK: Tensor,
    v_BTSV: Tensor,
    g: Tensor,
    beta_BTS: Tensor,
    state_BSKV: Tensor | None,
    seq: Seq,
    *,
    final: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule of delta.py, o_t = S_t^T q_t / sqrt(K), from unit q and k: (o_BTHV, state in fp32, None
    unless `final`).

    g: [B, T, S] (Gated DeltaNet), or [B, T, S, K] applied before the delta step (Kimi Delta Attention).
    """
    _check(q_BTHK, k_BTSK, v_BTSV)
    reason = why_not_delta(k_BTSK.shape[-1])
    if reason is not None:
        raise ValueError(f"backend fla: {reason}")
    if not q_BTHK.numel():
        return _nothing(q_BTHK, v_BTSV, state_BSKV, seq)
    beta, scale = beta_BTS.float(), k_BTSK.shape[-1] ** -0.5
    return _padded(
        lambda *x: _delta(*x, beta, seq, scale=scale, final=final), q_BTHK, k_BTSK, v_BTSV, g.float(), state_BSKV
    )


def _delta(q_BTHK, k_BTSK, v_BTSV, g, state_BSKV, beta_BTS, seq: Seq, *, scale: float, final: bool):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    grads = wants_grad(q_BTHK, k_BTSK, v_BTSV, g, beta_BTS, state_BSKV)
    if seq.dense and q_BTHK.shape[1] == 1 and not grads:
        return _delta_step(q_BTHK, k_BTSK, v_BTSV, g, beta_BTS, state_BSKV, scale=scale)
    # fla's grouping goes the other way (several values for one key), so here each query of a group has a copy of the
    # state. They are equal; the first one of each group is returned.
    G = q_BTHK.shape[2] // k_BTSK.shape[2]
    k, v, g, beta = (_repeat(x, G, 2) for x in (k_BTSK, v_BTSV, g, beta_BTS))
    if g.ndim == 3 and grads and needs_detour():
        g = g[..., None].expand(k.shape)
    op = chunk_kda if g.ndim == 4 else chunk_gated_delta_rule
    o, state = _by_sequence(
        lambda **packing: op(q_BTHK, k, v, g, beta, scale=scale, output_final_state=final, **packing),
        None if state_BSKV is None else _repeat(state_BSKV, G, 1),
        k,
        v,
        seq,
    )
    return o, state if state is None or G == 1 else state[:, ::G]


@torch.compiler.disable
def delta_gated_fla(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    f: Tensor,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias: Tensor,
    state_BHKV: Tensor | None,
    seq: Seq,
    *,
    negative: bool,
) -> tuple[Tensor, Tensor | None]:
    """delta_fla from one step before: queries and keys of any length and the logits of decay and beta, out of which
    the kernels make what recurrent.DeltaRule.delta says. No grouping. The state comes back if it is given.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    _check(q_BTHK, k_BTHK, v_BTHV)
    if not q_BTHK.numel():
        return _nothing(q_BTHK, v_BTHV, state_BHKV, seq)
    gate = {"use_gate_in_kernel": True, "A_log": A_log_H.float(), "dt_bias": dt_bias.float()}
    if f.ndim == 3 and wants_grad(q_BTHK, k_BTHK, v_BTHV, f, b_BTH, A_log_H) and needs_detour():
        g_BTH = -A_log_H.float().exp() * F.softplus(f.float() + dt_bias.float())
        f, gate = g_BTH[..., None].expand(k_BTHK.shape), {}
    op = chunk_kda if f.ndim == 4 else chunk_gated_delta_rule
    common = {
        "scale": k_BTHK.shape[-1] ** -0.5,
        "output_final_state": state_BHKV is not None,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": negative,
        **gate,
    }
    return _by_sequence(
        lambda **packing: op(q_BTHK, k_BTHK, v_BTHV, f, b_BTH, **common, **packing), state_BHKV, k_BTHK, v_BTHV, seq
    )


def _delta_step(q_B1HK, k_B1SK, v_B1SV, g, beta_B1S, state_BSKV, *, scale: float) -> tuple[Tensor, Tensor]:
    """One token. The queries of a group follow each other as tokens, so that they share the state: all but the first
    come with neither decay nor beta, and write nothing."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda

    S, G = k_B1SK.shape[2], q_B1HK.shape[2] // k_B1SK.shape[2]
    q_BGSK = q_B1HK.unflatten(2, (S, G))[:, 0].transpose(1, 2)
    k, v, g, beta = (
        F.pad(x, (0, 0) * (x.ndim - 2) + (0, G - 1)) if G > 1 else x for x in (k_B1SK, v_B1SV, g, beta_B1S)
    )
    op = fused_recurrent_kda if g.ndim == 4 else fused_recurrent_gated_delta_rule
    o_BGSV, state = op(q_BGSK, k, v, g=g, beta=beta, scale=scale, initial_state=state_BSKV, output_final_state=True)
    return o_BGSV.transpose(1, 2).flatten(1, 2)[:, None], state


@torch.compiler.disable
def conv_fla(x_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, tail_NWC: Tensor | None, seq: Seq) -> Tensor:
    """Causal depthwise convolution and SiLU, y_BTC. tail_NWC: the last W - 1 inputs of every sequence, replaced in
    place by those after this piece."""
    _check(x_BTC)
    if not x_BTC.numel():
        return torch.zeros_like(x_BTC)
    from fla.modules.causal_conv1d import causal_conv1d

    cu_seqlens, kept_N = _packing(seq)
    whole = tail_NWC is not None and seq.dense and x_BTC.shape[1] >= tail_NWC.shape[1]  # the next tail is in this piece
    before_NCW = None
    if tail_NWC is not None:  # fla keeps W inputs, of which the oldest is never read, and channels first
        before = tail_NWC if kept_N is None else tail_NWC[kept_N]
        before_NCW = F.pad(before.to(x_BTC.dtype).transpose(1, 2), (1, 0))
    y_BTC, after_NCW = causal_conv1d(
        x_BTC,
        weight_CW,
        bias_C,
        initial_state=before_NCW,
        output_final_state=tail_NWC is not None and not whole,
        activation="silu",
        cu_seqlens=cu_seqlens,
    )
    if tail_NWC is None:
        return y_BTC
    if whole:
        tail_NWC.copy_(x_BTC[:, -tail_NWC.shape[1] :].detach())
        return y_BTC
    after_NWC = after_NCW.detach()[:, :, 1:].transpose(1, 2).to(tail_NWC.dtype)
    if kept_N is None:
        tail_NWC.copy_(after_NWC)
    else:
        tail_NWC.index_copy_(0, kept_N, after_NWC)
    return y_BTC


@torch.compiler.disable
def norm_gate_fla(
    o_BTHV: Tensor, gate_BTHV: Tensor, weight_V: Tensor, eps: float, activation: Literal["silu", "sigmoid"]
) -> Tensor:
    """RMSNorm over V, times weight, times activation(gate), rounded once."""
    _check(o_BTHV, gate_BTHV)
    if not o_BTHV.numel():
        return torch.zeros_like(o_BTHV)
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(o_BTHV, gate_BTHV, weight_V, None, activation=activation, eps=eps)


def _installed() -> str | None:
    """Version of the package that holds the kernels; None when it came without metadata."""
    for name in ("fla-core", "flash-linear-attention"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _check(*tensors: Tensor) -> None:
    reason = why_not(tensors[0].device)
    if reason is not None:
        raise ValueError(f"backend fla: {reason}")
    for x in tensors:
        if x.dtype == torch.float64:
            raise ValueError("backend fla: float64 tensors; its kernels take float32 and bfloat16; use backend torch")


def _nothing(q_BTHK: Tensor, v_BTSV: Tensor, state: Tensor | None, seq: Seq) -> tuple[Tensor, Tensor]:
    """Of no tokens: no outputs, and the state as it was."""
    if state is None:
        state = _zeros(q_BTHK, v_BTSV, seq)
    return v_BTSV.new_zeros(*q_BTHK.shape[:3], v_BTSV.shape[3]), state


def _zeros(k_BTSK: Tensor, v_BTSV: Tensor, seq: Seq) -> Tensor:
    shape = (seq.num_sequences, v_BTSV.shape[2], k_BTSK.shape[3], v_BTSV.shape[3])
    return v_BTSV.new_zeros(shape, dtype=torch.float32)


def _packing(seq: Seq) -> tuple[Tensor | None, Tensor | None]:
    """(cu_seqlens, the sequences it lists if not all), built once for all layers: fla keeps what it derives from
    cu_seqlens by the tensor's identity. Sequences without tokens are left out, so no kernel has to mean it."""
    if seq.dense:
        return None, None

    def make() -> tuple[Tensor, Tensor | None]:
        kept = [s for s, n in enumerate(seq.lengths) if n]
        offsets = torch.tensor([*accumulate((seq.lengths[s] for s in kept), initial=0)], device=seq.device)
        return offsets, None if len(kept) == seq.num_sequences else torch.tensor(kept, device=seq.device)

    return seq.once("fla packing", make)


def _padded(run, q_BTHK, k_BTSK, v_BTSV, g, state_BSKV):
    """run(q, k, v, g, state) -> (o, state), small heads padded with zero channels: they neither read nor write."""
    K, V = k_BTSK.shape[-1], v_BTSV.shape[-1]
    more_k, more_v = max(MIN_SIZE - K, 0), max(MIN_SIZE - V, 0)
    if not more_k and not more_v:
        return run(q_BTHK, k_BTSK, v_BTSV, g, state_BSKV)
    q, k = (F.pad(x, (0, more_k)) for x in (q_BTHK, k_BTSK))
    g = F.pad(g, (0, more_k)) if g.ndim == 4 else g
    state = None if state_BSKV is None else F.pad(state_BSKV, (0, more_v, 0, more_k))
    o, state = run(q, k, F.pad(v_BTSV, (0, more_v)), g, state)
    return o[..., :V], None if state is None else state[..., :K, :V]


def _by_sequence(run, state_NSKV: Tensor | None, k_BTSK: Tensor, v_BTSV: Tensor, seq: Seq):
    """run(initial_state=, cu_seqlens=) -> (o, final state), for those sequences that have tokens."""
    cu_seqlens, kept_N = _packing(seq)
    if state_NSKV is not None:
        state_NSKV = state_NSKV.float()
    if kept_N is None:
        return run(initial_state=state_NSKV, cu_seqlens=cu_seqlens)
    if state_NSKV is None:
        state_NSKV = _zeros(k_BTSK, v_BTSV, seq)
    o, after = run(initial_state=state_NSKV[kept_N], cu_seqlens=cu_seqlens)
    return o, None if after is None else state_NSKV.index_copy(0, kept_N, after)


def _repeat(x: Tensor, times: int, dim: int) -> Tensor:
    return x if times == 1 else x.repeat_interleave(times, dim)
