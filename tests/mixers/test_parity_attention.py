"""Softmax attention against the attention layers of transformers, with the same weights and inputs.

Their rotary tables are float32; where the comparison is in float64 they are given ours (whose frequencies
test_positions.py compares with theirs), arranged as each family wants them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from contract.tools import dense, error, make_mixer
from torch import Tensor, nn

from plait.config import Softmax
from plait.mixers.seq import Seq
from plait.positions import rope_tables
from plait.rope import RopeScaling

T, D = 37, 24


@dataclass(frozen=True)
class Peer:
    """An attention layer of transformers. `layout`: how it takes cos and sin of the rotated pairs."""

    family: str
    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any] = field(default_factory=dict)
    layer: int = 0
    layout: str = "halves"
    sink: bool = False
    gate: bool = False
    norm_plus_one: bool = False
    rounds: bool = False
    """part of it is in float32 whatever it is given: norms, Cohere's rotation"""

    def load(self) -> tuple[Any, nn.Module]:
        module = importlib.import_module(f"transformers.models.{self.family}.modeling_{self.family}")
        if not hasattr(module, f"{self.name}Attention"):
            pytest.skip(f"transformers has no {self.name}Attention")
        config_class = getattr(importlib.import_module("transformers"), f"{self.name}Config")
        softmax = Softmax(**self.ours)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": softmax.rope_theta or 10_000.0}
        if softmax.rope_fraction != 1:
            rope["partial_rotary_factor"] = softmax.rope_fraction
        config = config_class(
            hidden_size=D,
            num_attention_heads=softmax.num_heads,
            num_key_value_heads=softmax.num_kv_heads,
            head_dim=softmax.head_dim,
            num_hidden_layers=4,
            rope_parameters=rope,
            attention_bias=False,
            attn_implementation="eager" if self.sink else "sdpa",  # the eager softmax of others is in float32
            **self.theirs,
        )
        return config, getattr(module, f"{self.name}Attention")(config, self.layer)


GQA = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "rope_theta": 10_000.0}
SQUARE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rope_theta": 10_000.0}  # heads * head_dim = d_model
SLIDING = ["sliding_attention", "full_attention"] * 2
PEERS = {
    "llama: GQA, RoPE": Peer("llama", "Llama", GQA),
    "llama: MHA": Peer("llama", "Llama", GQA | {"num_kv_heads": 6}),
    "llama: MQA": Peer("llama", "Llama", GQA | {"num_kv_heads": 1}),
    "qwen3: norm per head": Peer(
        "qwen3", "Qwen3", GQA | {"qk_norm": "head", "norm_eps": 1e-5}, {"rms_norm_eps": 1e-5}, rounds=True
    ),
    "olmo2: norm of all heads": Peer(
        "olmo2", "Olmo2", SQUARE | {"qk_norm": "full", "norm_eps": 1e-5}, {"rms_norm_eps": 1e-5}, rounds=True
    ),
    "mistral: window": Peer("mistral", "Mistral", GQA | {"window_size": 5}, {"sliding_window": 5}),
    "gpt_oss: sink, window": Peer(
        "gpt_oss",
        "GptOss",
        GQA | {"window_size": 5, "sink": True},
        {"sliding_window": 5, "layer_types": SLIDING},
        layout="once",
        sink=True,
    ),
    "gpt_oss: sink, full": Peer(
        "gpt_oss", "GptOss", GQA | {"sink": True}, {"layer_types": SLIDING}, layer=1, layout="once", sink=True
    ),
    "stablelm: partial RoPE": Peer("stablelm", "StableLm", SQUARE | {"rope_fraction": 1 / 3, "head_dim": 6}),
    "glm: partial, interleaved": Peer("glm", "Glm", GQA | {"rope_fraction": 0.5, "rope_interleaved": True}),
    "cohere: interleaved": Peer("cohere", "Cohere", SQUARE | {"rope_interleaved": True}, layout="pairs", rounds=True),
    "cohere2: NoPE": Peer(
        "cohere2", "Cohere2", GQA | {"rope_theta": None}, {"layer_types": SLIDING}, layer=1, layout="pairs"
    ),
    "cohere2: window, interleaved": Peer(
        "cohere2",
        "Cohere2",
        GQA | {"window_size": 7, "rope_interleaved": True},
        {"layer_types": SLIDING, "sliding_window": 7},
        layout="pairs",
        rounds=True,
    ),
    "smollm3: NoPE": Peer("smollm3", "SmolLM3", GQA | {"rope_theta": None}, {"no_rope_layers": [0, 1, 0, 1]}),
    "qwen3_next: output gate": Peer(
        "qwen3_next",
        "Qwen3Next",
        GQA | {"qk_norm": "head", "output_gate": True, "rope_fraction": 0.25},
        layer=3,
        gate=True,
        norm_plus_one=True,
        rounds=True,
    ),
}


@torch.no_grad()
def copy_weights(peer: Peer, ours: nn.Module, theirs: nn.Module) -> None:
    H, E = ours.config.num_heads, ours.config.head_dim
    q = ours.q.weight
    if peer.gate:  # one projection, a head's queries and then its gate
        q = torch.cat((q.view(H, E, D), ours.gate.weight.view(H, E, D)), 1).flatten(0, 1)
    theirs.q_proj.weight.copy_(q)
    for name in "kvo":
        getattr(theirs, f"{name}_proj").weight.copy_(getattr(ours, name).weight)
    if ours.q_norm is not None:
        shift = 1 if peer.norm_plus_one else 0
        theirs.q_norm.weight.copy_(ours.q_norm.weight - shift)
        theirs.k_norm.weight.copy_(ours.k_norm.weight - shift)
    if peer.sink:
        theirs.sinks.copy_(ours.sink)


def tables(peer: Peer, config: Softmax, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if config.rope_theta is None:
        config = Softmax(**peer.ours | {"rope_theta": 10_000.0})
    arrange = {
        "halves": lambda x: torch.cat((x, x), -1),
        "pairs": lambda x: x.repeat_interleave(2, -1),
        "once": lambda x: x,
    }[peer.layout]
    cos, sin = rope_tables(config, torch.arange(T)[None], dtype)
    return arrange(cos[:, :, 0]).to(dtype), arrange(sin[:, :, 0]).to(dtype)


def causal_mask(window: int | None, dtype: torch.dtype) -> Tensor:
    """Made by transformers' own rule of what a query sees."""
    masking = importlib.import_module("transformers.masking_utils")
    rule = masking.causal_mask_function if window is None else masking.sliding_window_causal_mask_function(window)
    visible = rule(0, 0, torch.arange(T)[:, None], torch.arange(T)[None])
    return torch.zeros(1, 1, T, T, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", PEERS)
@torch.no_grad()
def test_parity(name: str, dtype: torch.dtype, tolerance: float):
    peer = PEERS[name]
    if peer.rounds and dtype == torch.float64:
        tolerance = 1e-6
    ours = make_mixer(Softmax(**peer.ours), D, dtype=dtype)
    theirs = peer.load()[1].to(dtype).eval()
    copy_weights(peer, ours, theirs)
    x = torch.randn(2, T, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = theirs(
        hidden_states=x,
        position_embeddings=tables(peer, ours.config, dtype),
        attention_mask=causal_mask(ours.config.window_size, dtype),
    )[0]
    for backend in ("torch", "naive"):
        ours.backend = backend
        got, _ = ours(x, None, dense(2, T))
        assert error(got, want) <= tolerance
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    ours.backend = "torch"
    state = ours.new_state(2, T, dtype=dtype, device=x.device)
    pieces = []
    for start, end in ((0, 1), (1, 2), (2, 12), (12, 13), (13, T)):
        seq = Seq.build((2, end - start), x.device, past=torch.full((2,), start), max_past=start)
        pieces.append(ours(x[:, start:end], state, seq)[0])
    assert error(torch.cat(pieces, 1), want) <= tolerance


SCALINGS = {
    "linear": {"kind": "linear", "factor": 4.0},
    "yarn": {"kind": "yarn", "factor": 8.0, "original_length": 64},
    "llama3": {"kind": "llama3", "factor": 8.0, "original_length": 64},
}


@pytest.mark.parametrize("kind", [None, *SCALINGS])
@torch.no_grad()
def test_llama_with_its_own_rotary_embedding(kind: str | None):
    """End to end in float32: their module makes the tables, scalings included."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    rope: dict[str, Any] = {"rope_type": kind or "default", "rope_theta": 10_000.0}
    if kind is not None:
        scaling = dict(SCALINGS[kind])
        rope["factor"] = scaling["factor"]
        if "original_length" in scaling:
            rope["original_max_position_embeddings"] = scaling["original_length"]
        if kind == "llama3":
            rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        hidden_size=D, num_attention_heads=6, num_key_value_heads=2, head_dim=8, rope_parameters=rope,
        max_position_embeddings=512, attn_implementation="sdpa",
    )  # fmt: skip
    scaling = None if kind is None else RopeScaling(**SCALINGS[kind])
    ours = make_mixer(Softmax(**GQA, rope_scaling=scaling), D, dtype=torch.float32)
    theirs = LlamaAttention(config, 0)
    copy_weights(PEERS["llama: GQA, RoPE"], ours, theirs)
    x = torch.randn(2, T, D, generator=torch.Generator().manual_seed(1))
    places = LlamaRotaryEmbedding(config)(x, torch.arange(T)[None])
    want = theirs(hidden_states=x, position_embeddings=places, attention_mask=causal_mask(None, x.dtype))[0]
    assert error(ours(x, None, dense(2, T))[0], want) <= 1e-5
