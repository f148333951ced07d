"""The language model: embedding, blocks, final norm, head.

Shapes: B rows, T tokens, D = d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.mixers import Backend
from plait.mixers.base import State, check_backend, linear, resolve
from plait.mixers.norm import Norm
from plait.mixers.seq import Seq
from plait.model.block import Block
from plait.model.cache import Cache
from plait.spec import Spec


class LM(nn.Module):
    """A hybrid language model of a Spec. `seed` fixes its weights; on the meta device they stay without values."""

    def __init__(
        self,
        spec: Spec,
        *,
        seed: int = 0,
        backend: Backend = "torch",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        check_backend(backend)
        self.spec = spec
        self.backend, self._resolved = backend, None
        self.recompute: Callable[..., Tensor] | None = None
        """how to run a block whose activations are made anew in the backward pass: torch.utils.checkpoint.checkpoint
        with its options; None: they are kept"""
        self.recompute_every = 1
        device = torch.device(device or "cpu")
        with torch.device("meta"):
            self.embed = nn.Embedding(spec.vocab_size, spec.d_model)
            self.layers = nn.ModuleList(self._block(i, backend) for i in range(spec.num_layers))
            self.norm = Norm(spec.norm, spec.d_model, spec.norm_eps)
            self.lm_head = None if spec.tie_embeddings else linear(spec.d_model, spec.vocab_size)
        if device.type != "meta":
            self.to_empty(device="cpu")
            self.init_weights(seed)
            self.to(device=device, dtype=dtype)
        else:
            self.to(dtype=dtype)

    def _block(self, index: int, backend: Backend) -> Block:
        try:
            return Block(self.spec.layers[index], self.spec.d_model, backend)
        except ValueError as error:
            raise ValueError(f"layers.{index}: {error}") from None

    def assign(self, tensors: dict[str, Tensor]) -> None:
        """Take these tensors as its parameters, without a copy: what makes a model of one on the meta device."""
        self.load_state_dict(tensors, assign=True)
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fresh weights: matrices normal(0, init_std), every mixer's own parameters as published."""
        generator = torch.Generator().manual_seed(seed)
        std = self.spec.init_std
        self.embed.weight.normal_(0, std, generator=generator)
        for block in self.blocks:
            block.init_weights(std, generator)
        self.norm.init_weights()
        if self.lm_head is not None:
            self.lm_head.weight.normal_(0, std, generator=generator)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Logits [B, T, V]. Arguments as for `hidden`."""
        return self.logits(self.hidden(tokens_BT, mask=mask, cu_seqlens=cu_seqlens, cache=cache))

    def hidden(
        self,
        tokens_BT: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The residual stream after the final norm, [B, T, D], zero where padded.

        mask: bool or integer [B, T], true on real tokens, padding anywhere. cu_seqlens: [S + 1] offsets of packed
        documents in a single row. cache: sequences these tokens continue; it is advanced in place.
        """
        if tokens_BT.ndim != 2 or 0 in tokens_BT.shape:
            raise ValueError(f"tokens: shape {tuple(tokens_BT.shape)}; it must be [rows, tokens], neither empty")
        self.resolve_backend(tokens_BT.device)
        seq = self._sequences(tokens_BT, mask, cu_seqlens, cache)
        x = self.run(tokens_BT, seq, None if cache is None else cache.states)
        if cache is not None:
            cache.advance(seq)
        return x

    def run(self, tokens_BT: Tensor, seq: Seq, states: Sequence[State] | None) -> Tensor:
        """`hidden` of sequences that are described already; the states have room for them."""
        x = self.embed(seq.strip(tokens_BT))
        if self.spec.embed_multiplier != 1:
            x = x * self.spec.embed_multiplier
        for i, block in enumerate(self.layers if any(seq.lengths) else ()):  # a piece may hold nothing but padding
            if self.recompute and states is None and torch.is_grad_enabled() and i % self.recompute_every == 0:
                x = self.recompute(block, x, None, seq)  # never with states, which would be advanced twice
            else:
                x = block(x, None if states is None else states[i], seq)
        return seq.pad(self.norm(x))

    def resolve_backend(self, device: torch.device) -> None:
        """What fla and auto mean depends on where and in what a model runs."""
        if self.backend not in ("fla", "auto"):
            return
        cast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if cast else self.embed.weight.dtype
        if self._resolved != (device.type, dtype):
            backend = resolve(self.backend, device, dtype)
            for block in self.blocks:
                block.mixer.set_backend(backend, fall_back=self.backend == "auto")
            self._resolved = (device.type, dtype)

    def _sequences(self, tokens_BT, mask, cu_seqlens, cache: Cache | None) -> Seq:
        if cache is None:
            return Seq.build(tokens_BT.shape, tokens_BT.device, mask=mask, cu_seqlens=cu_seqlens)
        self.check_cache(cache)
        captured = tokens_BT.shape[1] == 1 and _captured(tokens_BT.device)
        seq = Seq.build(
            tokens_BT.shape,
            tokens_BT.device,
            mask=mask,
            cu_seqlens=cu_seqlens,
            past=cache.lengths_S.clone(),
            max_past=cache.max_length - 1 if captured else max(cache.lengths),
            level=not captured and len(set(cache.lengths)) == 1,
        )
        cache.check_room(seq.lengths)
        return seq

    def check_cache(self, cache: Cache) -> None:
        """Raises ValueError where the cache was made for another model."""
        if cache.owner != self.spec.hash:
            raise ValueError(f"cache: it belongs to a model of spec {cache.owner}; this one's is {self.spec.hash}")

    def logits(self, x: Tensor) -> Tensor:
        """Logits of hidden states [..., D] -> [..., V]; take the positions you need first."""
        logits = F.linear(x, self.embed.weight) if self.lm_head is None else self.lm_head(x)
        return logits if self.spec.logit_multiplier == 1 else logits * self.spec.logit_multiplier

    def head(self) -> tuple[Tensor, float] | None:
        """The matrix [V, D] and the factor of `logits`; None where another module stands in for the head's."""
        module = self.embed if self.lm_head is None else self.lm_head
        return (module.weight, self.spec.logit_multiplier) if type(module) in (nn.Embedding, nn.Linear) else None

    def new_cache(self, batch: int, max_length: int, *, dtype: torch.dtype | None = None) -> Cache:
        """An empty cache for `batch` sequences of up to max_length tokens; recurrent states are at least fp32."""
        if batch < 1 or max_length < 1:
            raise ValueError(f"cache: batch = {batch}, max_length = {max_length}; both must be at least 1")
        weight = self.embed.weight
        dtype = dtype or weight.dtype
        states = [b.mixer.new_state(batch, max_length, dtype=dtype, device=weight.device) for b in self.blocks]
        return Cache(states, batch, max_length, weight.device, self.spec.hash)

    @property
    def blocks(self) -> list[Block]:
        """The layers, by their type."""
        return list(self.layers)  # pyright: ignore[reportReturnType]

    @property
    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())


def _captured(device: torch.device) -> bool:
    """Is this pass recorded, to be replayed when its sequences are longer?"""
    return torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
