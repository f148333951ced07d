"""Token mixers: one file each, one contract (base.py). Importing this package imports torch."""

from __future__ import annotations

from plait.config import Gdn, Gla, Heads, Kda, Lightning, Mamba2, Mix, Mixer, Softmax
from plait.mixers.base import Backend, check_backend
from plait.mixers.base import Mixer as MixerModule
from plait.mixers.compose import HeadWise, Mixed
from plait.mixers.gdn import GatedDeltaNet
from plait.mixers.gla import GatedLinearAttention
from plait.mixers.kda import KimiDeltaAttention
from plait.mixers.lightning import LightningAttention
from plait.mixers.mamba2 import Mamba2Mixer
from plait.mixers.softmax import SoftmaxAttention

LEAVES: dict[type, type[MixerModule]] = {
    Softmax: SoftmaxAttention,
    Gdn: GatedDeltaNet,
    Gla: GatedLinearAttention,
    Kda: KimiDeltaAttention,
    Mamba2: Mamba2Mixer,
    Lightning: LightningAttention,
}


def build_mixer(config: Mixer, d_model: int, backend: Backend) -> MixerModule:
    """The module of a mixer's config."""
    check_backend(backend)

    def build(leaf, d_model: int) -> MixerModule:
        return LEAVES[type(leaf)](leaf, d_model)

    if isinstance(config, Heads):
        mixer = HeadWise(config, d_model, build)
    elif isinstance(config, Mix):
        mixer = Mixed(config, d_model, build)
    else:
        mixer = build(config, d_model)
    mixer.set_backend(backend)
    return mixer
