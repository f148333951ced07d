"""Triton kernels for GPUs, where the time of updates and of chunked recurrences goes into reading and writing tensors.

Each replaces a formula of PyTorch, which stands beside its call and is taken everywhere else: on CPUs, in float64,
without Triton, on GPUs other than NVIDIA's from Ampere on, and where torch.compile makes kernels of its own (scans are
operators that it does not look into, and keep theirs). The modules import Triton: ask `usable` first.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

TRITON = find_spec("triton") is not None


def usable(x: Tensor) -> bool:
    wanted = x.is_cuda and TRITON and x.dtype != torch.float64 and not torch.compiler.is_compiling()
    return wanted and _multiplies_in_tf32(x.device)


@cache
def _multiplies_in_tf32(device: torch.device) -> bool:
    """As NVIDIA's GPUs do from Ampere on; the kernels have not been run on others."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
