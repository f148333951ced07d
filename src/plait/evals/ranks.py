"""Processes that share the samples of one evaluation, as torchrun starts them. No torch until they meet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

WAIT = timedelta(days=7)
"""for the slowest process"""


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world: int = 1

    @staticmethod
    def here() -> Ranks:
        return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def meet(self) -> None:
        """Wait until all are here."""
        if self.world == 1:
            return
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=WAIT)
        dist.barrier()

    def device(self, name: str) -> str:
        """A GPU of its own for each process."""
        local = os.environ.get("LOCAL_RANK")
        if name != "cuda" or local is None or self.world == 1:
            return name
        import torch

        device = f"cuda:{int(local) % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
        return device
