"""One token after another: the decode step of a model and a cache, plain, compiled or as a CUDA graph.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from plait.fields import show, suggest
from plait.mixers.seq import Seq
from plait.model.cache import Cache
from plait.model.lm import LM

Mode = Literal["auto", "plain", "compile", "graph"]
WARM_UP = 2
"""first steps of a graph that run as they are, so that nothing is set up for the first time while it is captured"""


class Decoder:
    """Steps of one token for every row of a cache, whatever their lengths: decoder(token_B) -> logits_BV.

    mode: `plain` calls the model. `graph` runs one step of fixed shapes, captured as a CUDA graph: lengths are read and
    advanced on the device. `compile` is the same after torch.compile, and on a CPU without a graph; it takes a minute
    to begin. `auto` is graph on CUDA, else plain. What the cache does in place (reorder, crop, reset, more tokens fed
    to the model) stays possible between steps. The logits are overwritten by the next step.
    """

    def __init__(self, model: LM, cache: Cache, *, mode: Mode = "auto"):
        device = cache.lengths_S.device
        if mode not in get_args(Mode):
            raise ValueError(f"mode = {show(mode)}; {suggest(str(mode), get_args(Mode))}")
        if mode == "graph" and device.type != "cuda":
            raise ValueError(f"mode = 'graph': the model is on {device}; CUDA graphs need a GPU: use plain or compile")
        model.check_cache(cache)
        self.model, self.cache = model, cache
        self.mode: Mode = ("graph" if device.type == "cuda" else "plain") if mode == "auto" else mode
        self.token_B1 = torch.zeros(cache.batch, 1, dtype=torch.long, device=device)
        self._run: Callable[[], Tensor] = self._step
        if self.mode == "compile":
            self._run = torch.compile(self._step, dynamic=False)
        self._warm = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits_BV: Tensor | None = None

    @torch.no_grad()
    def __call__(self, token_B: Tensor) -> Tensor:
        """Logits after one more token of every row; ValueError where a row has no room."""
        if self.mode == "plain":
            return self.model(token_B[:, None], cache=self.cache)[:, 0]
        one = (1,) * self.cache.batch
        self.cache.check_room(one)
        self.model.resolve_backend(token_B.device)
        self.token_B1.copy_(token_B[:, None])
        logits_BV = self._static()
        self.cache.count(one)
        return logits_BV

    def _static(self) -> Tensor:
        if not self.token_B1.is_cuda or self._warm < WARM_UP:
            self._warm += 1
            return self._run()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):  # records, runs nothing
                self._logits_BV = self._run()
        self._graph.replay()
        assert self._logits_BV is not None
        return self._logits_BV

    def _step(self) -> Tensor:
        """Nothing in it depends on a number of the host that another step changes."""
        cache = self.cache
        shape = (cache.batch, 1)
        past_S = cache.lengths_S.clone()
        seq = Seq.build(shape, past_S.device, past=past_S, max_past=cache.max_length - 1)
        logits_BV = self.model.logits(self.model.run(self.token_B1, seq, cache.states)[:, 0])
        cache.lengths_S += 1
        return logits_BV
