"""What a Spec costs: parameters, FLOPs, state bytes. No torch.

Conventions: a multiply-add is 2 FLOPs; forward FLOPs per token are averaged over a causal sequence of T tokens, softmax
counts visible keys only, recurrences are counted in their recurrent form (write the state, read it), norms,
activations and lookups are free, the head is counted; backward is twice forward. State is what one sequence keeps in
the cache after T tokens: keys and values and convolution tails in `dtype_bytes`, recurrent states in fp32.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from plait.config import (
    GATED,
    Gdn,
    Gla,
    Heads,
    Kda,
    Layer,
    Lightning,
    Mamba2,
    Mix,
    Mixer,
    NormKind,
    Softmax,
    family,
    leaves,
)
from plait.layout import likely_kv_heads
from plait.spec import Spec

STATE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    family: str
    heads: str
    """query heads, / KV heads or states where they are fewer or more, (query heads of each) where those differ, x value
    size"""
    params: int
    mixer_params: int
    flops_per_token: float
    state_bytes: int


@dataclass(frozen=True, kw_only=True)
class Cost:
    context: int
    layers: tuple[LayerCost, ...]
    total_params: int
    non_embedding_params: int
    flops_per_token: float
    state_bytes: int


def cost(spec: Spec, context: int, *, dtype_bytes: int = 2) -> Cost:
    """Everything below at once, for sequences of `context` tokens."""
    if context < 1:
        raise ValueError(f"context = {context}; it must be at least 1")
    d = spec.d_model
    layers = tuple(
        LayerCost(
            family=family(layer.mixer),
            heads=_heads_text(layer.mixer),
            params=layer_params(layer, d),
            mixer_params=mixer_params(layer.mixer, d),
            flops_per_token=layer_flops(layer, d, context),
            state_bytes=state_bytes(layer.mixer, context, dtype_bytes=dtype_bytes),
        )
        for layer in spec.layers
    )
    return Cost(
        context=context,
        layers=layers,
        total_params=total_params(spec),
        non_embedding_params=non_embedding_params(spec),
        flops_per_token=sum(layer.flops_per_token for layer in layers) + 2 * d * spec.vocab_size,
        state_bytes=sum(layer.state_bytes for layer in layers),
    )


def total_params(spec: Spec) -> int:
    embeddings = spec.vocab_size * spec.d_model * (1 if spec.tie_embeddings else 2)
    return embeddings + non_embedding_params(spec)


def non_embedding_params(spec: Spec) -> int:
    """All but the embedding and the head."""
    return sum(layer_params(layer, spec.d_model) for layer in spec.layers) + norm_params(spec.norm, spec.d_model)


def norm_params(norm: NormKind, size: int) -> int:
    return 2 * size if norm == "layer" else size


def layer_params(layer: Layer, d_model: int) -> int:
    """Mixer, MLP and norms of one block."""
    branches = 1 if layer.parallel or layer.d_ff == 0 else 2
    norms = branches * (2 if layer.norm_placement == "sandwich" else 1)
    return mixer_params(layer.mixer, d_model) + mlp_params(layer, d_model) + norms * norm_params(layer.norm, d_model)


def mlp_params(layer: Layer, d_model: int) -> int:
    """Matrices, and biases where it has them."""
    gated = layer.mlp in GATED and layer.d_ff > 0
    bias = layer.d_ff * (2 if gated else 1) + d_model if layer.mlp_bias and layer.d_ff else 0
    return (3 if gated else 2) * d_model * layer.d_ff + bias


def mixer_params(mixer: Mixer, d_model: int) -> int:
    """Every parameter of a token mixer: its matrices and the rest."""
    output_bias = d_model * sum(getattr(leaf, "bias", None) == "all" for leaf in leaves(mixer))
    return _matrices(mixer, d_model) + _vectors(mixer) + output_bias


def _projection(mixer: Mixer, d_model: int) -> int:
    """The output projection, which compositions share."""
    return mixer.num_out_heads * mixer.value_dim * d_model


def _matrices(mixer: Mixer, d: int) -> int:
    """Entries of the matrices that every token is multiplied with."""
    match mixer:
        case Softmax(num_heads=H, num_kv_heads=KV, head_dim=D):
            heads = d * D * (H + 2 * KV + (H if mixer.output_gate else 0))
        case Gdn(num_heads=H, num_kv_heads=HK, num_v_heads=HV, head_dim=K, value_dim=V):
            gate = mixer.num_out_heads * V if mixer.output_gate else 0
            heads = d * (H * K + HK * K + HV * V + gate + 2 * HV)
        case Gla(num_heads=H, key_dim=K, value_dim=V, gate_rank=rank):
            gate = H * V if mixer.output_gate else 0
            heads = d * (2 * H * K + H * V + gate) + rank * (d + H * K)
        case Kda(num_heads=H, head_dim=K, value_dim=V):
            gate = V * (d + H * V) if mixer.output_gate else 0
            heads = d * (2 * H * K + H * V + H) + V * (d + H * K) + gate
        case Mamba2(num_heads=H, head_dim=P, state_dim=N, num_groups=G):
            heads = d * (2 * H * P + 2 * G * N + H)
        case Lightning(num_heads=H, num_kv_heads=KV, head_dim=D, gate_rank=rank):
            gate = {None: 0, "low_rank": rank * (d + H * D), "full": d * H * D}[mixer.output_gate]
            heads = d * D * (H + 2 * KV) + gate
        case Heads():
            parts = [part.mixer for part in mixer.parts]
            heads = sum(_matrices(part, d) - _projection(part, d) for part in parts)
            heads += sum(_projection(part, d) for part in parts if mixer.gate and isinstance(part, Softmax))
        case Mix():
            heads = sum(_matrices(part, d) - _projection(part, d) for part in mixer.mixers)
            heads += d * len(mixer.mixers) if mixer.fuse == "gate" else 0
            if mixer.fuse == "project":
                return heads + sum(_projection(part, d) for part in mixer.mixers)
    return heads + _projection(mixer, d)


def conv_channels(mixer: Mixer) -> int:
    """Channels that a leaf's short convolution would run over."""
    match mixer:
        case Gdn(num_heads=H, num_kv_heads=HK, num_v_heads=HV, head_dim=K, value_dim=V):
            return H * K + HK * K + HV * V
        case Gla(num_heads=H, key_dim=K, value_dim=V) | Kda(num_heads=H, head_dim=K, value_dim=V):
            return H * (2 * K + V)
        case Mamba2(num_heads=H, head_dim=P, state_dim=N, num_groups=G):
            return H * P + 2 * G * N
    return 0


def _vectors(mixer: Mixer) -> int:
    """Parameters that are not matrices: convolutions, decays, norms, biases, sinks, scales."""
    conv = conv_channels(mixer) * getattr(mixer, "conv_size", 0)
    match mixer:
        case Softmax(num_heads=H, num_kv_heads=KV, head_dim=D):
            norm = {None: 0, "head": 2 * D, "full": (H + KV) * D}[mixer.qk_norm]
            return norm + (H if mixer.sink else 0) + ((H + 2 * KV) * D if mixer.bias else 0)
        case Gdn(num_v_heads=HV, value_dim=V):
            return conv + 2 * HV + V
        case Gla(num_heads=H, key_dim=K, value_dim=V):
            return conv + H * K + V
        case Kda(num_heads=H, head_dim=K, value_dim=V):
            return conv + H + H * K + V + (H * V if mixer.output_gate else 0)
        case Mamba2(num_heads=H, head_dim=P):
            bias = conv_channels(mixer) if mixer.conv_size else 0
            return conv + bias + 3 * H + (0 if mixer.norm_groups == 0 else H * P)
        case Lightning(num_heads=H, head_dim=D):
            return H * D if mixer.output_norm == "full" else 0
        case Heads():
            gated = sum(part.mixer.num_heads for part in mixer.parts if isinstance(part.mixer, Softmax))
            bias = gated * mixer.value_dim if mixer.gate else 0
            return sum(_vectors(p.mixer) for p in mixer.parts) + bias + (mixer.num_out_heads if mixer.scale else 0)
        case Mix():
            own = len(mixer.mixers) * mixer.num_out_heads if mixer.fuse == "scale" else 0
            return sum(map(_vectors, mixer.mixers)) + own
    return 0


def visible_keys(context: int, window_size: int | None) -> float:
    """Keys a query sees, averaged over a causal sequence."""
    if window_size is None or window_size >= context:
        return (context + 1) / 2
    return (window_size * (window_size + 1) / 2 + (context - window_size) * window_size) / context


def layer_flops(layer: Layer, d_model: int, context: int) -> float:
    """Forward FLOPs of one block per token."""
    return 2 * (_matrices(layer.mixer, d_model) + mlp_params(layer, d_model)) + mixing_flops(layer.mixer, context)


def mixing_flops(mixer: Mixer, context: int) -> float:
    """The part of a mixer's FLOPs that mixes tokens: attention or recurrence, and convolutions."""
    conv = 2 * conv_channels(mixer) * getattr(mixer, "conv_size", 0)
    match mixer:
        case Softmax(num_heads=H, head_dim=D):
            return 4 * H * D * visible_keys(context, mixer.window_size)
        case Gdn(num_v_heads=HV, head_dim=K, value_dim=V):  # read at k, write, then one read per query head
            return conv + K * V * (4 * HV + 2 * mixer.num_out_heads)
        case Kda(num_heads=H, head_dim=K, value_dim=V):
            return conv + 6 * H * K * V
        case Gla(num_heads=H, key_dim=K, value_dim=V):
            return conv + 4 * H * K * V
        case Mamba2(num_heads=H, head_dim=P, state_dim=N):
            return conv + 4 * H * P * N
        case Lightning(num_heads=H, head_dim=D):
            return 4 * H * D * D
        case Heads():
            return sum(mixing_flops(part.mixer, context) for part in mixer.parts)
        case Mix():
            return sum(mixing_flops(part, context) for part in mixer.mixers)
    raise AssertionError(mixer)


def state_bytes(mixer: Mixer, context: int, *, dtype_bytes: int = 2) -> int:
    """Bytes one sequence keeps in the cache after `context` tokens."""
    tail = conv_channels(mixer) * max(getattr(mixer, "conv_size", 0) - 1, 0) * dtype_bytes
    match mixer:
        case Softmax(num_kv_heads=KV, head_dim=D):
            return 2 * KV * D * min(context, mixer.window_size or context) * dtype_bytes
        case Gdn(num_v_heads=H, head_dim=K, value_dim=V) | Kda(num_heads=H, head_dim=K, value_dim=V):
            return tail + H * K * V * STATE_BYTES
        case Gla(num_heads=H, key_dim=K, value_dim=V):
            return tail + H * K * V * STATE_BYTES
        case Mamba2(num_heads=H, head_dim=P, state_dim=N):
            return tail + H * P * N * STATE_BYTES
        case Lightning(num_heads=H, head_dim=D):
            return H * D * D * STATE_BYTES
        case Heads():
            return sum(state_bytes(part.mixer, context, dtype_bytes=dtype_bytes) for part in mixer.parts)
        case Mix():
            return sum(state_bytes(part, context, dtype_bytes=dtype_bytes) for part in mixer.mixers)
    raise AssertionError(mixer)


BF16_FLOPS = {
    "B200": 2250e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""bf16 FLOP/s of dense matrix products, summed in fp32, by the makers' data sheets; by a word of the device's name, the
first that fits"""


def peak_flops(device_name: str) -> float | None:
    """What MFU (model FLOPs utilization: FLOPs of forward and backward a second, over the peak) is a share of; None for
    a device that BF16_FLOPS does not have."""
    return next((flops for name, flops in BF16_FLOPS.items() if name in device_name), None)


def full_attention_twin(spec: Spec) -> Spec:
    """The same model with softmax attention over everything in every layer.

    Its heads are those of the layer's own softmax (all heads of a heads(...), with the KV heads that its parts show),
    then those of the Spec's first softmax, and without any as many as the mixer replaced has, d_model wide together.
    """

    def own(mixer: Mixer) -> Softmax | None:
        match mixer:
            case Heads():
                part = next((p.mixer for p in mixer.parts if isinstance(p.mixer, Softmax)), None)
                if part is None:
                    return None
                kv_heads = likely_kv_heads([mixer]) or mixer.num_heads
                return dataclasses.replace(part, num_heads=mixer.num_heads, num_kv_heads=kv_heads, kv_map=None)
            case Mix():
                return next((part for part in mixer.mixers if isinstance(part, Softmax)), None)
        return mixer if isinstance(mixer, Softmax) else None

    first = next((found for layer in spec.layers if (found := own(layer.mixer))), None)

    def twin(mixer: Mixer) -> Softmax:
        if softmax := own(mixer) or first:
            return dataclasses.replace(softmax, window_size=None)
        head_dim = max(spec.d_model // mixer.num_heads, 1)
        kv_heads = likely_kv_heads([mixer]) or 0  # of Lightning
        kv_heads = kv_heads if kv_heads and mixer.num_heads % kv_heads == 0 else mixer.num_heads
        return Softmax(num_heads=mixer.num_heads, num_kv_heads=kv_heads, head_dim=head_dim)

    layers = tuple(dataclasses.replace(layer, mixer=twin(layer.mixer)) for layer in spec.layers)
    return dataclasses.replace(spec, layers=layers)


def _heads_text(mixer: Mixer) -> str:
    match mixer:
        case Heads():
            return " + ".join(_heads_text(part.mixer) for part in mixer.parts)
        case Mix():
            return " + ".join(_heads_text(part) for part in mixer.mixers)
    states = mixer.num_v_heads if isinstance(mixer, Gdn) else getattr(mixer, "num_kv_heads", mixer.num_heads)
    groups = f"/{states}" if states != mixer.num_heads else ""
    if isinstance(mixer, Softmax | Lightning) and mixer.kv_map:
        runs = [(size, len(list(run))) for size, run in groupby(Counter(mixer.kv_map).values())]
        groups += f" ({', '.join(f'{size}' if count == 1 else f'{count}*{size}' for size, count in runs)})"
    return f"{mixer.num_heads}{groups} x {mixer.value_dim}"
