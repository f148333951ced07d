"""What tests of mixers share: a module with moved weights, a batch described, an error measured."""

from __future__ import annotations

import torch
from contract.configs import disturb
from hypothesis import HealthCheck, settings
from torch import Tensor

from plait.config import Mixer
from plait.mixers import MixerModule, build_mixer
from plait.mixers.seq import Seq


@torch.no_grad()
def make_mixer(
    config: Mixer,
    d_model: int,
    *,
    seed: int = 0,
    backend: str = "torch",
    dtype: torch.dtype = torch.float64,
    gain: float = 1.2,
) -> MixerModule:
    """With weights large enough to matter; equal seeds give equal weights, rounded to `dtype`."""
    mixer = build_mixer(config, d_model, backend)
    mixer.init_weights(gain * d_model**-0.5, torch.Generator().manual_seed(seed))
    disturb(mixer, seed)
    return mixer.to(dtype)


def examples(n: int) -> settings:
    """Of a property test; more under HYPOTHESIS_PROFILE=thorough."""
    return settings(max_examples=n * settings.default.max_examples // 50, suppress_health_check=list(HealthCheck))


def dense(B: int, T: int) -> Seq:
    return Seq.build((B, T), torch.device("cpu"))


def pieces(mixer: MixerModule, x: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """The outputs of a sequence fed in pieces through the state."""
    state = mixer.new_state(len(x), x.shape[1], dtype=x.dtype, device=x.device)
    outs, ends = [], sorted({*cuts, x.shape[1]})
    for start, end in zip([0, *ends], ends, strict=False):
        past = torch.full((len(x),), start, device=x.device)
        seq = Seq.build((len(x), end - start), x.device, past=past, max_past=start)
        outs.append(mixer(x[:, start:end], state, seq)[0])
    return torch.cat(outs, 1)


def error(got: Tensor, want: Tensor) -> float:
    """Relative RMS error; infinite if anything is not finite."""
    got, want = got.detach().double(), want.detach().double()
    difference = (got - want).norm() / want.norm().clamp(min=1e-30)
    return float(difference) if torch.isfinite(difference) else float("inf")
