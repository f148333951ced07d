"""Training by several processes, each with its rows of every batch: torchrun's environment, gradients, sharding.

Whatever rows it has, a process takes part in every exchange of the others, in the same order. Masters, gathered
parameters and reduced gradients are fp32; the loop's autocast makes bf16 of them where it does on one device, so that
A_log and dt_bias stay fp32.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from plait.data import IGNORE, Group, Task
from plait.model.lm import LM

T = TypeVar("T")
LARGE = 10**9
"""parameters from which `auto` shards: with AdamW 16 GB of fp32 state"""
BUCKET = 2**25
"""numbers of gradients that are added up at a time"""
PATIENCE = timedelta(hours=2)
"""how long a process waits for the others, which rank 0 keeps waiting while it measures"""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """The processes of a run; by default one alone."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """of this process"""
    sharded: bool = False
    """parameters, gradients and the optimizer's state are in parts (FSDP2); else each process has all (DDP)"""

    @property
    def leads(self) -> bool:
        """Is this the process that writes?"""
        return self.rank == 0

    def first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank. Where that fails the others exit without a word: rank 0 says why."""
        if self.size == 1:
            return make()
        found, error = None, None
        if self.leads:
            try:
                found = make()
            except Exception as caught:
                error = caught
        box = [(found, error is not None)]
        dist.broadcast_object_list(box, src=0, device=self.device)
        if error is not None:
            raise error
        found, failed = box[0]
        if failed:
            raise SystemExit(2)
        return found  # pyright: ignore[reportReturnType]

    def total(self, values: Sequence[float]) -> list[float]:
        """Each number added up over all ranks."""
        return self._reduce(values, dist.ReduceOp.SUM) if self.size > 1 else list(values)

    def any(self, flag: bool) -> bool:
        return self.total([flag])[0] > 0

    def level(self, counts: Sequence[int]) -> list[int]:
        """How many passes through the model a rank must make where it has `counts` of its own: under FSDP as many as
        any rank, since each gathers parameters from all."""
        return [int(n) for n in self._reduce(counts, dist.ReduceOp.MAX)] if self.sharded else list(counts)

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums, op)
        return sums.tolist()

    def batch(self, task: Task, step: int) -> list[Group]:
        """This rank's rows of a batch: the same groups on every rank, of which some may be empty."""
        if self.size == 1:
            return task.batch(step)
        if rows := getattr(task, "rows", None):
            return rows(step, self.rank, self.size)
        groups, before = task.batch(step), 0
        if (total := sum(len(group.tokens_BT) for group in groups)) < self.size:
            raise ValueError(f"batch_size = {total}; {self.size} processes train, and each needs a row of every batch")
        found = []
        for group in groups:  # row n of the batch is for rank n % size
            assert group.cu_seqlens is None
            own = slice((self.rank - before) % self.size, None, self.size)
            found.append(Group(group.tokens_BT[own], group.targets_BT[own], group.axes))
            before += len(group.tokens_BT)
        return found

    def pieces(self, groups: Sequence[Group], rows: int) -> list[list[Group]]:
        """Each group, at most `rows` rows at a time (0: all); as many pieces on every rank as FSDP needs. Those added
        are one token without a target, whose gradients are 0."""
        found = [list(group.split(rows)) if len(group.tokens_BT) else [] for group in groups]
        for pieces, count in zip(found, self.level([len(pieces) for pieces in found]), strict=True):
            token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            pieces += [Group(token, torch.full_like(token, IGNORE))] * (count - len(pieces))
        return found

    def shard(self, model: LM) -> None:
        """FSDP2: one unit a block, and one of embedding, last norm and head, which stay gathered from `hidden` on."""
        if not self.sharded:
            return
        mesh = init_device_mesh(self.device.type, (self.size,))
        for module in (*model.blocks, model):
            unit = fully_shard(module, mesh=mesh, reshard_after_forward=module is not model)
            unit.set_force_sum_reduction_for_comms(True)  # the loss is divided by the targets of all ranks
            unit.set_gradient_divide_factor(1.0)
        register_fsdp_forward_method(model, "hidden")

    def hold_gradients(self, model: Any, held: bool) -> None:
        """Are the gradients of the next backward pass only added up here, for a later one to exchange?"""
        if self.sharded:
            model.set_requires_gradient_sync(not held)

    def reduce_gradients(self, model: LM) -> None:
        """Add up what each rank has; under FSDP the last backward pass has done so."""
        if self.size == 1 or self.sharded:
            return
        for bucket in _buckets([p.grad for p in model.parameters() if p.grad is not None]):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat)
            sums = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [x.view_as(gradient) for x, gradient in zip(sums, bucket, strict=True)])

    def settle(self, model: Any) -> None:
        """Give up what a pass without a backward pass has left gathered."""
        if self.sharded:
            model.reshard()


ALONE = World()


def join(parallel: str, num_params: int, device: torch.device | str) -> World:
    """The processes that torchrun has started with this one, which stay joined while it lives.

    Raises ValueError where `parallel` asks for several and there is one, and where a process has no GPU of its own.
    """
    device = torch.device(device)
    launched = all(name in os.environ for name in TORCHRUN)
    if not launched and not dist.is_initialized():
        if parallel != "auto":
            raise ValueError(
                f"parallel = {parallel}; a single process runs: start several with torchrun --nproc-per-node N"
            )
        return World(device=device)
    if device.type == "cuda" and "LOCAL_RANK" in os.environ:
        device = _own_gpu(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        own = device if device.type == "cuda" else None
        dist.init_process_group("nccl" if own else "gloo", timeout=PATIENCE, device_id=own)
        atexit.register(_leave)
    size = dist.get_world_size()
    return World(dist.get_rank(), size, device, shards(parallel, size, num_params))


def shards(parallel: str, size: int, num_params: int) -> bool:
    """Does each of `size` processes hold a part of the model?"""
    return size > 1 and (parallel == "fsdp" or (parallel == "auto" and num_params >= LARGE))


def _own_gpu(local: int) -> torch.device:
    if local >= (count := torch.cuda.device_count()):
        raise ValueError(f"device = cuda; {count} GPUs for process {local + 1} of this machine; each needs its own")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def abandon(kind: type[BaseException] | None, *_: object) -> None:
    """Where a block ends in an error, exit at once: a farewell would wait for others, who wait for this process."""
    if kind is not None:
        atexit.unregister(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket, size = [], 0
    for gradient in gradients:
        if bucket and size + gradient.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel()
    if bucket:
        yield bucket


def whole(x: Tensor) -> Tensor:
    """All of a tensor of which every rank has a part; every rank must ask."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Whole tensors on the CPU, gathered one at a time. keep False: take part, and keep none."""
    found = {}
    for name, value in tensors.items():
        x = whole(value.detach())
        if keep:
            found[name] = x.cpu().contiguous()
    return found


def placed_like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, on the device of a parameter of its shape and sharded as it is."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
