"""Token mixers: one file each, one contract (base.py). Importing this package imports torch."""

from __future__ import annotations

from plait.config import Gdn, Mixer, Softmax, family
from plait.mixers.base import BACKENDS, Backend
from plait.mixers.base import Mixer as MixerModule
from plait.mixers.gdn import GatedDeltaNet
from plait.mixers.softmax import SoftmaxAttention

BUILT: dict[type, type[MixerModule]] = {Softmax: SoftmaxAttention, Gdn: GatedDeltaNet}


def build_mixer(config: Mixer, d_model: int, backend: Backend) -> MixerModule:
    """The module of a mixer's config."""
    if type(config) not in BUILT:
        built = ", ".join(cls.kind for cls in BUILT)
        raise ValueError(f"mixer {family(config)}: not built yet (described and costed only); built: {built}")
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}; it must be one of {', '.join(BACKENDS)}")
    mixer = BUILT[type(config)](config, d_model)
    mixer.backend = backend
    return mixer
