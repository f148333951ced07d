"""The mixer contract: what every token mixer takes, gives and keeps.

Shapes: B rows, T tokens, D = d_model, H output heads, V value size of a head, S sequences.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Self

import torch
from torch import Tensor, nn

from plait.fields import show, suggest
from plait.mixers.seq import Seq

Backend = Literal["naive", "torch", "fla", "auto"]
BACKENDS: tuple[Backend, ...] = ("naive", "torch", "fla", "auto")


class Tap(nn.Module):
    """A named point of the computation: an identity that probes hook to read or to write.

    A hook gets the tensor in the form mixers see, and the Seq that tells where its tokens belong.
    """

    def forward(self, x: Tensor, seq: Seq) -> Tensor:
        return x


def taps(*names: str) -> nn.ModuleDict:
    """The named points of one module; parameter-free, so checkpoints do not see them."""
    return nn.ModuleDict({name: Tap() for name in names})


@dataclass
class State:
    """What a mixer keeps of each sequence: a dataclass of buffers [S, ...] owned by the cache, mutated in place."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                yield f.name, value

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """A state of the same kind with fn of every buffer."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        for name, value in self.tensors():
            setattr(new, name, fn(value))
        return new

    def row(self, s: int) -> Self:
        """Views of one sequence; writing to them writes here."""
        return self.map(lambda buffer: buffer[s : s + 1])

    def reset(self) -> None:
        for _, buffer in self.tensors():
            buffer.zero_()

    def resized(self, max_length: int) -> Self:
        """A copy with room for sequences of max_length tokens, no fewer than there are."""
        return self.map(torch.Tensor.clone)

    def why_not_crop(self, length: int, longest: int) -> str | None:
        """Why rows of up to `longest` tokens cannot go back to `length`; None if they can."""
        raise NotImplementedError


class RecurrentState(State):
    """A state that has no way back."""

    def why_not_crop(self, length: int, longest: int) -> str | None:
        return None if length >= longest else "a recurrent state cannot be rolled back"


class Mixer(nn.Module):
    """y_BTD = project(heads(x_BTD)); compositions call the two halves of their parts themselves.

    A subclass builds itself from (config, d_model), fills `taps` with the points it has and defines heads, project,
    init_weights and new_state. Feeding a sequence in pieces through `state` equals feeding it whole.
    """

    POINTS: tuple[str, ...] = ("heads", "out")
    o: nn.Linear | None
    """the output projection; None in a composition, which has one for all"""

    def __init__(self):
        super().__init__()
        self.backend: Backend = "torch"
        self.taps = taps(*self.POINTS)

    def forward(self, x_BTD: Tensor, state: State | None, seq: Seq) -> tuple[Tensor, State | None]:
        o_BTHV, state = self.heads(x_BTD, state, seq)
        y_BTD = self.project(self.taps["heads"](o_BTHV, seq))
        return self.taps["out"](y_BTD, seq), state

    def heads(self, x_BTD: Tensor, state: State | None, seq: Seq) -> tuple[Tensor, State | None]:
        """Output of every head, [B, T, H, V], and the state after these tokens (the same object, mutated)."""
        raise NotImplementedError

    def project(self, o_BTHV: Tensor) -> Tensor:
        """Head outputs to the residual stream, [B, T, D]."""
        assert self.o is not None
        return self.o(o_BTHV.flatten(-2))

    def set_backend(self, backend: Backend, *, fall_back: bool = False) -> None:
        """naive, torch or fla (`auto` is what a model resolves), of a composition's parts too.

        Raises ValueError where fla cannot take this mixer, or with fall_back leaves it to torch.
        """
        why = self.why_not_fla() if backend == "fla" else None
        if why is not None and not fall_back:
            raise ValueError(f"{why}; use backend torch, or auto")
        self.backend = backend if why is None else "torch"

    def why_not_fla(self) -> str | None:
        """Why the fla backend cannot take this mixer; None if it can."""
        return None

    def tapped(self, seq: Seq, **tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors through the named points of their names."""
        return tuple(self.taps[name](tensor, seq) for name, tensor in tensors.items())

    def points(self) -> dict[str, Tap]:
        """The named points, those of a composition's parts included."""
        return dict(self.taps.items())  # pyright: ignore[reportReturnType]

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        """Initialize every parameter in place, drawing from `generator` in a fixed order."""
        raise NotImplementedError

    def new_state(self, batch: int, max_length: int, *, dtype: torch.dtype, device: torch.device) -> State:
        """Buffers for `batch` sequences of up to `max_length` tokens; `dtype` is for keys, values and activations."""
        raise NotImplementedError


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend = {show(backend)}; {suggest(str(backend), BACKENDS)}")


def wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def resolve(backend: Backend, device: torch.device, dtype: torch.dtype) -> Backend:
    """What a backend means for tensors of a device and dtype. `auto` is fla where that is there, right and faster, and
    says once what it took.

    Raises ValueError where fla is asked for and cannot serve.
    """
    if backend not in ("fla", "auto"):
        return backend
    from plait.mixers.fla import why_not

    why = why_not(device)
    if why is None and dtype == torch.float64:
        why = "its kernels do not compute in float64"
    if backend == "auto":
        if why is None and dtype == torch.float32:
            why = "for float32, which its kernels multiply in TF32"
        _announce(f"backend auto: torch ({why})" if why else "backend auto: fla")
        return "torch" if why else "fla"
    if why is not None:
        raise ValueError(f"backend = 'fla': {why}; use torch, or auto")
    return "fla"


@functools.cache
def _announce(line: str) -> None:
    print(line, file=sys.stderr)


_CONSTANTS: dict[tuple, Tensor] = {}


def constant(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor made once: making it anew would wait for the host in each step, and break the capture of one."""
    if torch.compiler.is_compiling():
        return torch.tensor(values, dtype=dtype, device=device)
    key = (tuple(values), dtype, device)
    if key not in _CONSTANTS:
        with torch.inference_mode(False):
            _CONSTANTS[key] = torch.tensor(values, dtype=dtype, device=device)
    return _CONSTANTS[key]


def linear(d_in: int, d_out: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(d_in, d_out, bias=bias)


def init_linear(module: nn.Linear, std: float, generator: torch.Generator) -> None:
    module.weight.normal_(0, std, generator=generator)
    if module.bias is not None:
        module.bias.zero_()
