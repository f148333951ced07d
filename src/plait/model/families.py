"""Models of transformers that plait reads and writes: their settings and tensors against ours, both ways.

`read` makes a Spec of a config. `write` makes the config of a Spec, and proves it by reading it back: what comes out
must be the same Spec. `moves` pairs the tensors. Neither computes: no family has a forward pass of its own.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.config import Gdn, Layer, Mamba2, Mixer, MlpKind, NormKind, Softmax
from plait.fields import show, suggest
from plait.model.tables import (
    ATTENTION,
    BAMBA_BLOCK,
    BAMBA_MAMBA,
    GATED_ATTENTION,
    MLP,
    OLMO_GDN,
    OLMO_POST,
    OLMO_PRE,
    PRE,
    QWEN_GDN,
    SANDWICH,
    Row,
    Same,
)
from plait.rope import RopeScaling
from plait.spec import Spec

MLPS: dict[str, MlpKind] = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type of transformers."""

    architecture: str
    mixer: Callable[[Any, int], Mixer]
    """of layer i, from a config"""
    rows: Mapping[str, tuple[Row, ...]]
    """tensors of a block by the kind of its mixer"""
    settings: Callable[[Spec], dict[str, Any]] = lambda spec: {}
    """settings of a Spec besides those that all families share"""
    layer: Mapping[str, Any] = field(default_factory=dict)
    recurrent_layer: Mapping[str, Any] = field(default_factory=dict)
    """fields of every Layer, and of those with a recurrent mixer"""
    spec: Callable[[Any], dict[str, Any]] = lambda config: {}
    """further fields of the Spec, from a config"""
    norm: NormKind = "rms"
    eps: str = "rms_norm_eps"
    activation: str = "hidden_act"
    final_norm: str = "norm"
    only: Mapping[str, Any] = field(default_factory=dict)
    """settings that plait knows at this value alone"""


def _rope(config: Any, kind: str | None = None) -> dict[str, Any]:
    """Positions of a softmax mixer; kind: the layer type whose they are, where they differ."""
    found = config.rope_parameters
    found = found[kind] if found and kind else found
    if not found or found.get("rope_theta") is None:
        return {}
    return {
        "rope_theta": float(found["rope_theta"]),
        "rope_fraction": float(found.get("partial_rotary_factor") or 1.0),
        "rope_scaling": _scaling(found),
    }


SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "attention_factor": "attention_factor",
}
"""their names of RopeScaling's fields"""
SCALINGS = {
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


def _scaling(found: dict[str, Any]) -> RopeScaling | None:
    kind = found.get("rope_type", "default")
    if kind == "default":
        return None
    if kind not in SCALINGS:
        raise ValueError(f"rope_type = {show(kind)}; plait has default, {', '.join(SCALINGS)}")
    known = {*SCALINGS[kind], "rope_type", "rope_theta", "partial_rotary_factor", "type"}
    odd = next((key for key, value in found.items() if key not in known and value not in (None, True)), None)
    if odd is not None:
        raise ValueError(f"rope_parameters.{odd} = {show(found[odd])}; plait's {kind} scaling has no such setting")
    fields = {SCALING[key]: found[key] for key in SCALINGS[kind] if found.get(key) is not None}
    return RopeScaling(kind=kind, **fields)  # pyright: ignore[reportArgumentType]


def _attention(config: Any, *, window: int | None = None, **fields: Any) -> Softmax:
    """Softmax attention as most configs describe it; fields: what is other than that."""
    heads = config.num_attention_heads
    common = {
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "bias": "all" if getattr(config, "attention_bias", False) else None,
        "window_size": window,
        "norm_eps": getattr(config, "rms_norm_eps", Softmax.norm_eps),
    }
    return Softmax(**{**common, **fields})


def _window(config: Any, i: int) -> int | None:
    return config.sliding_window if config.layer_types[i] == "sliding_attention" else None


def _gemma3(config: Any, i: int) -> Softmax:
    mixer = _attention(config, window=_window(config, i), **_rope(config, config.layer_types[i]))
    scale = None if config.query_pre_attn_scalar == mixer.head_dim else config.query_pre_attn_scalar**-0.5
    return dataclasses.replace(mixer, qk_norm="head", qk_norm_kind="rms1p", softmax_scale=scale)


def _cohere2(config: Any, i: int) -> Softmax:
    """RoPE where there is a window, no positions elsewhere."""
    window = _window(config, i)
    return _attention(config, window=window, **({"rope_interleaved": True, **_rope(config)} if window else {}))


def _gdn(config: Any, **fields: Any) -> Gdn:
    return Gdn(
        num_heads=config.linear_num_key_heads,
        num_kv_heads=config.linear_num_key_heads,
        num_v_heads=config.linear_num_value_heads,
        head_dim=config.linear_key_head_dim,
        expand_v=config.linear_value_head_dim / config.linear_key_head_dim,
        conv_size=config.linear_conv_kernel_dim,
        **fields,
    )


def _olmo_hybrid(config: Any, i: int) -> Mixer:
    if config.layer_types[i] == "linear_attention":
        return _gdn(config, allow_neg_eigval=config.linear_allow_neg_eigval, norm_eps=1e-5)
    return _attention(config, qk_norm="full", **_rope(config))


def _qwen3_5(config: Any, i: int) -> Mixer:
    if config.layer_types[i] == "linear_attention":
        return _gdn(config, norm_eps=config.rms_norm_eps)
    return _attention(config, qk_norm="head", qk_norm_kind="rms1p", output_gate=True, **_rope(config))


def _bamba(config: Any, i: int) -> Mixer:
    if config.layers_block_type[i] in ("full_attention", "attention"):
        return _attention(config, **_rope(config))
    return Mamba2(
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        state_dim=config.mamba_d_state,
        num_groups=config.mamba_n_groups,
        conv_size=config.mamba_d_conv,
        norm_eps=config.rms_norm_eps,
    )


def _first(spec: Spec, kind: type) -> Any:
    """The first mixer of this kind, or None. Reading back tells whether the others are as it is."""
    return next((layer.mixer for layer in spec.layers if isinstance(layer.mixer, kind)), None)


def _types(spec: Spec) -> list[str]:
    def of(mixer: Mixer) -> str:
        if mixer.recurrent:
            return "linear_attention"
        return "sliding_attention" if getattr(mixer, "window_size", None) else "full_attention"

    return [of(layer.mixer) for layer in spec.layers]


def _windows(spec: Spec) -> dict[str, Any]:
    sizes = [layer.mixer.window_size for layer in spec.layers if isinstance(layer.mixer, Softmax)]
    size = next(filter(None, sizes), None)
    return {"sliding_window": size, "use_sliding_window": size is not None, "layer_types": _types(spec)}


def _write_rope(mixer: Softmax) -> dict[str, Any]:
    scaling, found = mixer.rope_scaling, {"rope_type": "default", "rope_theta": mixer.rope_theta}
    if mixer.rope_fraction != 1:
        found["partial_rotary_factor"] = mixer.rope_fraction
    if scaling is not None:
        found |= {key: getattr(scaling, SCALING[key]) for key in SCALINGS[scaling.kind]} | {"rope_type": scaling.kind}
    return {key: value for key, value in found.items() if value is not None}


def _write_gemma3(spec: Spec) -> dict[str, Any]:
    ropes = {}
    for layer, kind in zip(spec.layers, _types(spec), strict=True):
        if isinstance(layer.mixer, Softmax) and layer.mixer.rope_theta is not None:
            ropes.setdefault(kind, _write_rope(layer.mixer))
    mixer = _first(spec, Softmax)
    scalar = mixer and (mixer.head_dim if mixer.softmax_scale is None else round(mixer.softmax_scale**-2))
    return {**_windows(spec), "rope_parameters": ropes, "query_pre_attn_scalar": scalar}


def _write_gdn(spec: Spec) -> dict[str, Any]:
    mixer = _first(spec, Gdn)
    return {"layer_types": _types(spec)} | (
        {
            "linear_num_key_heads": mixer.num_heads,
            "linear_num_value_heads": mixer.num_v_heads,
            "linear_key_head_dim": mixer.head_dim,
            "linear_value_head_dim": mixer.value_dim,
            "linear_conv_kernel_dim": mixer.conv_size,
            "linear_allow_neg_eigval": mixer.allow_neg_eigval,
        }
        if mixer
        else {}
    )


def _write_bamba(spec: Spec) -> dict[str, Any]:
    mixer = _first(spec, Mamba2)
    layers = [i for i, layer in enumerate(spec.layers) if not layer.mixer.recurrent]
    return {"attn_layer_indices": layers} | (
        {
            "mamba_n_heads": mixer.num_heads,
            "mamba_d_head": mixer.head_dim,
            "mamba_d_state": mixer.state_dim,
            "mamba_n_groups": mixer.num_groups,
            "mamba_d_conv": mixer.conv_size,
            "mamba_expand": max(1, mixer.num_heads * mixer.head_dim // spec.d_model),
        }
        if mixer
        else {}
    )


SOFTMAX = {"softmax": (*PRE, *ATTENTION, *MLP)}
FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        mixer=lambda config, i: _attention(config, **_rope(config)),
        rows=SOFTMAX,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        mixer=lambda config, i: _attention(config, window=config.sliding_window, **_rope(config)),
        settings=lambda spec: {"sliding_window": _windows(spec)["sliding_window"]},
        rows=SOFTMAX,
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        mixer=lambda config, i: _attention(config, window=_window(config, i), bias="qkv", **_rope(config)),
        settings=_windows,
        rows=SOFTMAX,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        mixer=lambda config, i: _attention(config, window=_window(config, i), qk_norm="head", **_rope(config)),
        settings=_windows,
        rows=SOFTMAX,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        mixer=lambda config, i: _attention(
            config,
            window=_window(config, i) if config.use_sliding_window else None,
            **(_rope(config) if config.no_rope_layers[i] else {}),
        ),
        settings=lambda spec: {
            **_windows(spec),
            "no_rope_layers": [int(getattr(layer.mixer, "rope_theta", None) is not None) for layer in spec.layers],
        },
        rows=SOFTMAX,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        mixer=_gemma3,
        settings=_write_gemma3,
        rows={"softmax": (*SANDWICH, *ATTENTION, *MLP)},
        layer={"norm_placement": "sandwich"},
        spec=lambda config: {"embed_multiplier": math.sqrt(config.hidden_size)},
        norm="rms1p",
        activation="hidden_activation",
        only={"attn_logit_softcapping": None, "final_logit_softcapping": None, "use_bidirectional_attention": False},
    ),
    "cohere2": Family(
        architecture="Cohere2ForCausalLM",
        mixer=_cohere2,
        settings=lambda spec: {**_windows(spec), "logit_scale": spec.logit_multiplier},
        rows={"softmax": (*PRE[:1], *ATTENTION, *MLP)},
        layer={"parallel": True},
        spec=lambda config: {"logit_multiplier": config.logit_scale},
        norm="layer_nobias",
        eps="layer_norm_eps",
    ),
    "olmo_hybrid": Family(
        architecture="OlmoHybridForCausalLM",
        mixer=_olmo_hybrid,
        settings=_write_gdn,
        rows={"softmax": (*OLMO_POST, *ATTENTION, *MLP), "gdn": (*OLMO_PRE, *OLMO_GDN, *MLP)},
        layer={"norm_placement": "post"},
        recurrent_layer={"norm_placement": "pre"},
    ),
    "qwen3_5_text": Family(
        architecture="Qwen3_5ForCausalLM",
        mixer=_qwen3_5,
        settings=_write_gdn,
        rows={"softmax": (*PRE, *GATED_ATTENTION, *MLP), "gdn": (*PRE, *QWEN_GDN, *MLP)},
        norm="rms1p",
        only={"attention_bias": False},
    ),
    "bamba": Family(
        architecture="BambaForCausalLM",
        mixer=_bamba,
        settings=_write_bamba,
        rows={"softmax": (*BAMBA_BLOCK, *ATTENTION), "mamba2": (*BAMBA_BLOCK, *BAMBA_MAMBA)},
        final_norm="final_layernorm",
        only={
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "time_step_limit": (0.0, math.inf),
        },
    ),
}


def family_of(model_type: Any) -> Family:
    if model_type not in FAMILIES:
        raise ValueError(f"model_type = {show(model_type)}; {suggest(str(model_type), list(FAMILIES))}")
    return FAMILIES[model_type]


def read(config: Any) -> Spec:
    """The Spec of a config of transformers; ValueError names a setting that plait has nothing for."""
    family = family_of(config.model_type)
    for name, value in family.only.items():
        given = getattr(config, name, value)
        if given != value:
            raise ValueError(f"{name} = {show(given)}; plait has no such model: it must be {show(value)}")
    if config.intermediate_size < 1:
        raise ValueError(f"intermediate_size = {config.intermediate_size}; it must be at least 1")
    activation = getattr(config, family.activation)
    if activation not in MLPS:
        raise ValueError(f"{family.activation} = {show(activation)}; {suggest(str(activation), list(MLPS))}")
    eps = getattr(config, family.eps)

    def layer(i: int) -> Layer:
        mixer = family.mixer(config, i)
        return Layer(
            mixer=mixer,
            d_ff=config.intermediate_size,
            mlp=MLPS[activation],
            mlp_bias=getattr(config, "mlp_bias", False),
            norm=family.norm,
            norm_eps=eps,
            **(family.recurrent_layer or family.layer if mixer.recurrent else family.layer),
        )

    return Spec(
        vocab_size=config.vocab_size,
        d_model=config.hidden_size,
        layers=tuple(layer(i) for i in range(config.num_hidden_layers)),
        tie_embeddings=config.tie_word_embeddings,
        norm=family.norm,
        norm_eps=eps,
        init_std=config.initializer_range,
        context_length=config.max_position_embeddings,
        **family.spec(config),
    )


def write(spec: Spec, model_type: str) -> Any:
    """The config of a Spec as this family; ValueError lists what the family has no setting for."""
    from transformers import CONFIG_MAPPING

    family, cls = family_of(model_type), CONFIG_MAPPING[model_type]
    layer, attention = spec.layers[0], _first(spec, Softmax)
    activations = {kind: name for name, kind in MLPS.items()}
    settings = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "intermediate_size": layer.d_ff,
        "num_hidden_layers": spec.num_layers,
        family.activation: activations.get(layer.mlp, "silu"),
        "mlp_bias": layer.mlp_bias,
        family.eps: layer.norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "initializer_range": spec.init_std,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if spec.context_length is not None:
        settings["max_position_embeddings"] = spec.context_length
    if attention is not None:
        rope = next((l.mixer for l in spec.layers if getattr(l.mixer, "rope_theta", None)), None)
        settings |= {
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            "attention_bias": attention.bias == "all",
        }
        if isinstance(rope, Softmax):
            settings["rope_parameters"] = _write_rope(rope)
    settings |= family.settings(spec)
    known = {*dir(cls), *inspect.signature(cls).parameters}
    try:
        config = cls(**{name: value for name, value in settings.items() if name in known})
        config.architectures = [family.architecture]
        back = read(config)
    except Exception as error:  # its validators raise errors of many kinds
        raise ValueError(f"{model_type} has no such model: {' '.join(str(error).split())}") from None
    if spec.context_length is None:
        back = dataclasses.replace(back, context_length=None)
    if back != spec:
        odd = list(_differences(spec.to_json(), back.to_json()))
        more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
        raise ValueError(f"{model_type} cannot express this model: {'; '.join(odd[:4])}{more}")
    return config


def _differences(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            yield from _differences(ours.get(key), theirs.get(key), f"{where}.{key}" if where else key)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(a, b, f"{where}.{i}")
    elif ours != theirs:
        yield f"{where} = {show(ours)} (it has {show(theirs)})"


@dataclass(frozen=True)
class Move:
    """Tensors of theirs and those of ours that hold the same numbers."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    form: Same
    alias: tuple[str, ...] = ()


def moves(model_type: str, spec: Spec, names: Iterable[str]) -> list[Move]:
    """Every tensor of ours, those that theirs hold together side by side; names: all of ours."""
    family, ours, found = family_of(model_type), set(names), []

    def add(row: Row, theirs: str, prefix: str, mixer: Any) -> None:
        for suffix in ("", ".weight", ".bias"):
            held = tuple(f"{prefix}{name}{suffix}" for name in row.ours.split())
            if ours.issuperset(held):
                there, alias = (
                    tuple(f"{theirs}{name}{suffix}" for name in text.split()) for text in (row.theirs, row.alias or "")
                )
                found.append(Move(there, held, row.form(mixer), alias))
                ours.difference_update(held)

    add(Row("model.embed_tokens", "embed"), "", "", None)
    for i, layer in enumerate(spec.layers):
        for row in family.rows[layer.mixer.kind]:
            add(row, f"model.layers.{i}.", f"layers.{i}.", layer.mixer)
    add(Row(f"model.{family.final_norm}", "norm"), "", "", None)
    add(Row("lm_head", "lm_head"), "", "", None)
    assert not ours, f"{model_type} has no name for {sorted(ours)}"
    return found
