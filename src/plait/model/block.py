"""One block: a token mixer and an MLP on the residual stream. What varies between models are fields of its Layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.config import GATED, Layer, MlpKind
from plait.kernels import usable
from plait.mixers import Backend, build_mixer
from plait.mixers.base import State, init_linear, linear, taps
from plait.mixers.norm import Norm
from plait.mixers.seq import Seq

ACTIVATIONS: dict[MlpKind, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
}


class Mlp(nn.Module):
    def __init__(self, kind: MlpKind, d_model: int, d_ff: int, bias: bool):
        super().__init__()
        self.act = ACTIVATIONS[kind]
        self.gate = linear(d_model, d_ff, bias=bias) if kind in GATED else None
        self.up = linear(d_model, d_ff, bias=bias)
        self.down = linear(d_ff, d_model, bias=bias)

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        for module in (self.gate, self.up, self.down):
            if module is not None:
                init_linear(module, std, generator)

    def forward(self, x_BTD: Tensor) -> Tensor:
        up = self.up(x_BTD)
        if self.gate is None:
            return self.down(self.act(up))
        gate = self.gate(x_BTD)
        if torch.is_grad_enabled() and self.act is F.silu and usable(gate):
            from plait.kernels.swiglu import Swiglu

            return self.down(Swiglu.apply(gate, up))
        gate = self.act(gate)
        return self.down(gate * up if torch.is_grad_enabled() else gate.mul_(up))  # fresh memory costs a CPU more


class Block(nn.Module):
    def __init__(self, layer: Layer, d_model: int, backend: Backend):
        super().__init__()
        self.layer = layer
        self.mixer = build_mixer(layer.mixer, d_model, backend)
        self.mlp = Mlp(layer.mlp, d_model, layer.d_ff, layer.mlp_bias) if layer.d_ff else None
        two = self.mlp is not None and not layer.parallel
        sandwich = layer.norm_placement == "sandwich"

        def norm(wanted: bool) -> nn.Module:
            return Norm(layer.norm, d_model, layer.norm_eps) if wanted else nn.Identity()

        self.norm1, self.norm2 = norm(True), norm(two)
        self.post_norm1, self.post_norm2 = norm(sandwich), norm(sandwich and two)
        self.taps = taps("in", "mlp_out", "out")

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        self.mixer.init_weights(std, generator)
        if self.mlp is not None:
            self.mlp.init_weights(std, generator)
        for norm in (self.norm1, self.norm2, self.post_norm1, self.post_norm2):
            if isinstance(norm, Norm):
                norm.init_weights()

    def forward(self, x_BTD: Tensor, state: State | None, seq: Seq) -> Tensor:
        layer = self.layer
        x = self.taps["in"](x_BTD, seq)
        if layer.parallel and self.mlp is not None:
            n = self.norm1(x, _dtype_of_products(x))
            y, _ = self.mixer(n, state, seq)
            z = self.taps["mlp_out"](self.mlp(n), seq)
            return self.taps["out"](x + layer.mixer_multiplier * y + layer.mlp_multiplier * z, seq)
        y, _ = self.mixer(self._before(self.norm1, x), state, seq)
        x = torch.add(x, self._after(self.norm1, self.post_norm1, y), alpha=layer.mixer_multiplier)
        if self.mlp is not None:
            z = self.taps["mlp_out"](self.mlp(self._before(self.norm2, x)), seq)
            x = torch.add(x, self._after(self.norm2, self.post_norm2, z), alpha=layer.mlp_multiplier)
        return self.taps["out"](x, seq)

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        dtype = _dtype_of_products(x)
        return x.to(dtype) if self.layer.norm_placement == "post" else norm(x, dtype)

    def _after(self, norm: nn.Module, post_norm: nn.Module, y: Tensor) -> Tensor:
        return norm(y) if self.layer.norm_placement == "post" else post_norm(y)


def _dtype_of_products(x: Tensor) -> torch.dtype:
    """Under autocast that of matrix products, which would each round x for themselves; otherwise x's."""
    device = x.device.type
    narrows = x.dtype == torch.float32 and not x.is_meta and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if narrows else x.dtype
