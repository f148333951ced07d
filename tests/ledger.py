"""Parameter counts that published hybrids have, as numbers with their source. Presets are held to these, by what
plait.cost counts and by what is built.

000: Rethinking the Role of Efficient Attention in Hybrid Architectures. 003: Competing Learning in Hybrid
Architectures. Layers of 000 are counted without their two norms and their sinks, as its tables do.
"""

from __future__ import annotations

# 000, tables 1 and 4 to 6.

LAYERS_000 = {
    "S1": {"Full": 1_499_136, "Lightning": 1_502_208, "GDN": 1_496_114, "Mamba-2": 1_575_570},
    "S2": {"Full": 2_621_440, "Lightning": 2_625_536, "GDN": 2_627_634, "Mamba-2": 2_789_912},
    "S3": {"Full": 4_055_040, "Lightning": 4_060_160, "GDN": 4_075_570, "Mamba-2": 4_348_830},
    "S4": {"Full": 5_799_936, "Lightning": 5_806_080, "GDN": 5_839_922, "Mamba-2": 6_252_324},
}
"""one layer of each kind"""
MAMBA2_PAPER = {"S1": 1_576_098, "S2": 2_789_912, "S3": 4_349_470, "S4": 6_253_092}
"""table 6 as printed: the formula behind LAYERS_000 equals it at S2 and is 528, 640 and 768 below it elsewhere"""

# Whole models, in millions: all parameters, and all but embedding and head.

MILLIONS = {
    # 000, table 1
    "000/S1/Full": (71, 15),
    "000/S2/Full": (107, 31),
    "000/S3/Full": (159, 65),
    "000/S4/Full": (217, 104),
    "000/S5/Full": (665, 477),
    # 003, table 7
    "003/180M": (181, 63),
    "003/250M": (254, 136),
    "003/390M": (391, 234),
    "003/510M": (508, 351),
    "003/750M": (755, 520),
    "003/1B": (1015, 780),
    # 003, table 22
    "003/transfer/GDN": (400, 244),
    "003/transfer/GLA": (401, 244),
}

# 003, tables 3 and 24: the Spaced Retrieval model.

RETRIEVAL_TOTAL = 3_555_588
RETRIEVAL_KDA_MIXERS = 1_453_060
"""both of them"""
RETRIEVAL_ATTENTION_MIXER = 262_144
"""each"""
