"""Muon for the hidden matrices, AdamW for the rest, in one optimizer. Matrices may be sharded by their rows (FSDP2).

Shapes: M x N a matrix, M its rows (outputs).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.adamw import adamw

from plait.model.lm import LM
from plait.train.optimizer import decayed

Scale = Literal["match_rms_adamw", "original"]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""of the quintic that one Newton-Schulz step applies to the singular values (Jordan et al., 2024)"""


def orthogonalize(g_MN: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """About the nearest semi-orthogonal matrix: U V^T of g = U S V^T, its singular values between 0.7 and 1.2.

    In `dtype` (None: that of g), in which it is returned.
    """
    a, b, c = COEFFICIENTS
    x = g_MN.to(dtype or g_MN.dtype)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


def update_scale(rule: Scale, M: int, N: int) -> float:
    """Factor of an orthogonalized update.

    match_rms_adamw: 0.2 sqrt(max(M, N)) makes its RMS 0.2, as AdamW's is, for AdamW's learning rates (Liu et al.,
    2025). original: sqrt(max(1, M / N)), for rates about 0.02 (Jordan et al., 2024).
    """
    return 0.2 * math.sqrt(max(M, N)) if rule == "match_rms_adamw" else math.sqrt(max(1, M / N))


def muon_groups(
    model: LM, *, lr: float = 0.02, adamw_lr: float = 1e-3, weight_decay: float = 0.1
) -> list[dict[str, Any]]:
    """Groups for Muon: weights of linear maps within blocks; the rest under AdamW, with decay and without (`decayed`).

    Under AdamW are the embedding, the head, norms, biases, convolutions, sinks, scales, decays and skips.
    `initial_lr` is each group's peak, which a schedule multiplies.
    """
    matrices = {
        f"layers.{i}.{name}.weight"
        for i, block in enumerate(model.blocks)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    }
    parameters, pulled = dict(model.named_parameters()), decayed(model)
    hidden = [p for name, p in parameters.items() if name in matrices]
    others = [p for name, p in parameters.items() if name in pulled - matrices]
    free = [p for name, p in parameters.items() if name not in pulled | matrices]
    groups = (
        {"params": hidden, "rule": "muon", "lr": lr, "weight_decay": weight_decay},
        {"params": others, "rule": "adamw", "lr": adamw_lr, "weight_decay": weight_decay},
        {"params": free, "rule": "adamw", "lr": adamw_lr, "weight_decay": 0.0},
    )
    return [{**group, "initial_lr": group["lr"]} for group in groups if group["params"]]


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) on groups whose rule is `muon`, AdamW on those whose rule is `adamw`.

    Args:
        groups: dictionaries of params, rule, lr and weight_decay, as `muon_groups` makes them; params are tensors, or
            DTensors sharded by their rows over one dimension of a mesh
        momentum: of the gradients' running mean
        nesterov: step along the gradient as the next mean would have it
        steps: of Newton-Schulz
        scale: factor of the update by the matrix's shape
        ns_dtype: what Newton-Schulz runs in; None: bf16 on a GPU, fp32 elsewhere
        betas: of AdamW
        eps: of AdamW
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        scale: Scale = "match_rms_adamw",
        ns_dtype: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum = {momentum}; it must be from 0 to below 1")
        if steps < 1:
            raise ValueError(f"steps = {steps}; it must be at least 1")
        if scale not in get_args(Scale):
            raise ValueError(f"scale = {scale!r}; it must be one of {', '.join(get_args(Scale))}")
        muon = {"momentum": momentum, "nesterov": nesterov, "steps": steps, "scale": scale, "ns_dtype": ns_dtype}
        super().__init__(groups, {**muon, "betas": betas, "eps": eps})
        for group in self.param_groups:
            if group.get("rule") not in ("muon", "adamw"):
                raise ValueError(f"rule = {group.get('rule')!r}; it must be muon or adamw")
            for parameter in group["params"] if group["rule"] == "muon" else ():
                if parameter.ndim != 2:
                    raise ValueError(f"Muon: a parameter of shape {tuple(parameter.shape)}; it takes matrices only")

    @torch.no_grad()
    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["rule"] == "muon":
                self._muon(group, parameters)
            elif parameters:
                self._adamw(group, parameters)
        return loss

    def _muon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for deal in rounds(parameters):
            directions = [self._direction(group, p) for p in deal]
            for p, update in zip(deal, orthogonalize_round(deal, directions, group["steps"]), strict=True):
                local = _local(p)
                local.mul_(1 - group["lr"] * group["weight_decay"])
                local.add_(update, alpha=-group["lr"] * update_scale(group["scale"], *p.shape))

    def _direction(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """What is to be orthogonalized, in the dtype for it: this rank's rows."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        if isinstance(parameter, DTensor):
            assert isinstance(gradient, DTensor) and gradient.placements == parameter.placements
        g, mean = _local(gradient), _local(state["momentum_buffer"])
        mean.lerp_(g, 1 - group["momentum"])
        direction = g.lerp(mean, group["momentum"]) if group["nesterov"] else mean
        return direction.to(group["ns_dtype"] or (torch.bfloat16 if g.is_cuda else torch.float32))

    def _adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        adamw(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def rounds(parameters: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Matrices orthogonalized at a time: of sharded ones as many as there are ranks, largest first; others alone."""
    found: list[Sequence[Tensor]] = [[p] for p in parameters if not isinstance(p, DTensor)]
    sharded = sorted((p for p in parameters if isinstance(p, DTensor)), key=lambda p: -p.numel())
    for ranks in dict.fromkeys(map(_ranks, sharded)):
        own = [p for p in sharded if _ranks(p) is ranks]
        size = dist.get_world_size(ranks)
        found += [own[first : first + size] for first in range(0, len(own), size)]
    return found


def _ranks(x: DTensor) -> dist.ProcessGroup:
    """The ranks that hold the rows of a matrix between them."""
    dims = [dim for dim, placement in enumerate(x.placements) if not placement.is_replicate()]
    if len(dims) != 1 or x.placements[dims[0]] != Shard(0):
        raise ValueError(f"Muon: a matrix placed as {x.placements}; it must be sharded once, by its rows")
    return x.device_mesh.get_group(dims[0])


def orthogonalize_round(matrices: Sequence[Tensor], parts: Sequence[Tensor], steps: int) -> list[Tensor]:
    """`orthogonalize` of what has a matrix's shape; of sharded ones `parts` and the updates are this rank's rows.

    Newton-Schulz on shards would be another update. Rank j is sent matrix j whole and sends everyone's rows back.
    """
    shards = [x for x in matrices if isinstance(x, DTensor)]
    if not shards:
        return [orthogonalize(part, steps) for part in parts]
    ranks = _ranks(shards[0])
    rank, size = dist.get_rank(ranks), dist.get_world_size(ranks)
    sent = [part.numel() for part in parts] + [0] * (size - len(parts))
    own = shards[rank].shape if rank < len(shards) else None
    counts = [rows * own[1] for rows in _rows(own[0], size)] if own else [0] * size
    whole = _exchange(torch.cat([part.flatten() for part in parts]), sent, counts, ranks)
    if own:
        whole = orthogonalize(whole.view(own), steps).flatten()
    back = _exchange(whole, counts, sent, ranks).split(sent)
    return [update.view(part.shape) for update, part in zip(back, parts, strict=False)]


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _rows(M: int, size: int) -> list[int]:
    """Rows that each rank holds: as torch.chunk has it, the last ranks may have fewer or none."""
    each = -(-M // size)
    ends = [min(M, each * rank) for rank in range(size + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _exchange(x: Tensor, sent: list[int], received: list[int], ranks: dist.ProcessGroup) -> Tensor:
    """The first sent[0] elements go to rank 0, and so on; what came from rank 0, 1, ..., end to end."""
    y = x.new_empty(sum(received))
    dist.all_to_all_single(y, x.contiguous(), received, sent, group=ranks)
    return y
