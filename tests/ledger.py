"""Parameter counts that published hybrids have, as numbers with their source. Everything that builds or counts them
must give these.

000: Rethinking the Role of Efficient Attention in Hybrid Architectures. 003: Competing Learning in Hybrid
Architectures. Layers of 000 are counted without their two norms, as its tables do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.spec import Spec

# 000, tables 1 and 4 to 6: one layer of each kind at each scale; all attention has 2 KV heads of 64.

VOCAB_000 = 73_448
LAYOUTS_000 = {
    "full": "full",
    "lightning": "lightning",
    "gdn": "gdn[head_dim=46, num_kv_heads=2, conv_size=0]",
    "mamba2": "mamba2[expand=1, state_dim=16, num_groups=2, conv_size=0]",
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    d_model: int
    d_ff: int
    num_heads: int
    num_layers: int
    non_embedding_M: int
    total_M: int
    layer: dict[str, int]
    """parameters of a layer of each kind, without norms; empty where the paper gives none"""
    lightning_d_ff: int = 0
    """40 less than the others': the low-rank output gate is paid for there"""


SCALES_000 = {
    "S1": Scale(
        d_model=384,
        d_ff=960,
        num_heads=6,
        num_layers=10,
        non_embedding_M=15,
        total_M=71,
        lightning_d_ff=920,
        layer={"full": 1_499_136, "lightning": 1_502_208, "gdn": 1_496_114, "mamba2": 1_575_570},
    ),
    "S2": Scale(
        d_model=512,
        d_ff=1280,
        num_heads=8,
        num_layers=12,
        non_embedding_M=31,
        total_M=107,
        lightning_d_ff=1240,
        layer={"full": 2_621_440, "lightning": 2_625_536, "gdn": 2_627_634, "mamba2": 2_789_912},
    ),
    "S3": Scale(
        d_model=640,
        d_ff=1600,
        num_heads=10,
        num_layers=16,
        non_embedding_M=65,
        total_M=159,
        lightning_d_ff=1560,
        layer={"full": 4_055_040, "lightning": 4_060_160, "gdn": 4_075_570, "mamba2": 4_348_830},
    ),
    "S4": Scale(
        d_model=768,
        d_ff=1920,
        num_heads=12,
        num_layers=18,
        non_embedding_M=104,
        total_M=217,
        lightning_d_ff=1880,
        layer={"full": 5_799_936, "lightning": 5_806_080, "gdn": 5_839_922, "mamba2": 6_252_324},
    ),
    "S5": Scale(d_model=1280, d_ff=3200, num_heads=20, num_layers=30, non_embedding_M=477, total_M=665, layer={}),
}
MAMBA2_PAPER = {"S1": 1_576_098, "S2": 2_789_912, "S3": 4_349_470, "S4": 6_253_092}
"""table 6 as printed: the formula behind `layer` equals it at S2 and is 528, 640 and 768 below it elsewhere"""


def layer_000(scale: Scale, kind: str) -> Spec:
    """One layer of 000."""
    d_ff = scale.lightning_d_ff if kind == "lightning" else scale.d_ff
    return model_000(scale, LAYOUTS_000[kind], num_layers=1, d_ff=d_ff)


def model_000(scale: Scale, layout: str = "full", **changes: Any) -> Spec:
    shape = {"d_model": scale.d_model, "num_layers": scale.num_layers, "num_heads": scale.num_heads}
    shape |= {"num_kv_heads": 2, "head_dim": 64, "d_ff": scale.d_ff} | changes
    return Spec.from_layout(layout, vocab_size=VOCAB_000, tie_embeddings=False, **shape)


# 003, tables 3 and 24: the Spaced Retrieval model; KDA before attention, twice.

RETRIEVAL_TOTAL = 3_555_588
RETRIEVAL_KDA_MIXERS = 1_453_060
"""both of them"""
RETRIEVAL_ATTENTION_MIXER = 262_144
"""each"""


def retrieval_003() -> Spec:
    return Spec.from_layout(
        "kda[expand_v=2] nope", vocab_size=12, d_model=256, num_layers=4, num_heads=2, head_dim=128, d_ff=512
    )


# 003, table 7: the ladder, `nope 3*kda`, in millions. KDA heads of 128 with expand_v 2.


@dataclass(frozen=True, kw_only=True)
class Rung:
    num_layers: int
    d_model: int
    d_ff: int
    kda_heads: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    total_M: int
    non_embedding_M: int


def _rung(layers: int, d_model: int, d_ff: int, kda: int, heads: int, kv: int, dim: int, total: int, rest: int) -> Rung:
    return Rung(
        num_layers=layers,
        d_model=d_model,
        d_ff=d_ff,
        kda_heads=kda,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=dim,
        total_M=total,
        non_embedding_M=rest,
    )


VOCAB_003 = 153_000
LADDER_003 = {
    "180M": _rung(8, 768, 1792, 6, 12, 3, 64, 181, 63),
    "250M": _rung(16, 768, 2048, 6, 6, 2, 128, 254, 136),
    "390M": _rung(16, 1024, 2688, 8, 8, 2, 128, 391, 234),
    "510M": _rung(24, 1024, 2688, 8, 8, 2, 128, 508, 351),
    "750M": _rung(16, 1536, 4096, 12, 12, 3, 128, 755, 520),
    "1B": _rung(24, 1536, 4096, 12, 12, 3, 128, 1015, 780),
}


def ladder_003(rung: Rung) -> Spec:
    return Spec.from_layout(
        f"nope 3*kda[num_heads={rung.kda_heads}, head_dim=128, expand_v=2]",
        vocab_size=VOCAB_003,
        d_model=rung.d_model,
        num_layers=rung.num_layers,
        num_heads=rung.num_heads,
        num_kv_heads=rung.num_kv_heads,
        head_dim=rung.head_dim,
        d_ff=rung.d_ff,
    )


# 003, table 22: the transfer models, `nope 3*gdn` and `nope 3*gla`, in millions.

TRANSFER_TOTAL_M = {"gdn": 400, "gla": 401}
TRANSFER_NON_EMBEDDING_M = 244


def transfer_003(kind: str) -> Spec:
    options = {"gdn": "expand_v=2", "gla": "expand_k=1, expand_v=2, conv_size=4"}[kind]
    return Spec.from_layout(
        f"nope 3*{kind}[{options}]",
        vocab_size=VOCAB_003,
        d_model=1024,
        num_layers=16,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        d_ff=2688,
    )
