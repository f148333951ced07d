"""Layer retrieval score: what each layer does for retrieving a digit (003, 3.2 and its appendix).

Two prompts A and B differ only in the source digit to be retrieved, a in A and b in B, and end just before the answer.
m(z) = z[a] - z[b]. Replace layer l's mixer output at the last position of A with that of B: z becomes z~, and
s_l(A <- B) = m(z) - m(z~). s_l is the mean of both directions over all pairs, signed.

Nothing before the last position changes, so one prefill of all but the last token serves every layer: an intervention
is one decode step from a copy of the cache.

Shapes: B pairs, T tokens, D = d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from plait.config import family
from plait.data.spaced_retrieval import SpacedRetrieval, rows
from plait.model.lm import LM
from plait.probes.points import capture, patch
from plait.records import Record
from plait.terminal import progress_bar


@torch.no_grad()
def layer_retrieval_scores(
    model: LM,
    task: SpacedRetrieval,
    gap: int,
    *,
    pairs: int | None = None,
    pairs_at_a_time: int = 64,
    progress: bool = False,
) -> Tensor:
    """Score of every layer, [num_layers], in logits, over the first `pairs` held-out pairs (None: all)."""
    if gap < 0:
        raise ValueError(f"gap = {gap}; it must be 0 or above")
    if model.spec.vocab_size < task.vocab_size:
        raise ValueError(f"vocab_size = {model.spec.vocab_size}; Spaced Retrieval needs {task.vocab_size}")
    every = task.pairs
    total = min(pairs or len(every.place), len(every.place))
    sums = torch.zeros(model.spec.num_layers, dtype=torch.float64)
    with progress_bar(total, show=progress, label=f"gap {gap}") as show:
        for start in range(0, total, pairs_at_a_time):
            part = slice(start, min(start + pairs_at_a_time, total))
            key_a, key_b, place, lead = every.key_a[part], every.key_b[part], every.place[part], every.lead[part]
            sums += _both_ways(model, key_a, key_b, place, lead, gap).sum(1).double().cpu()
            show(part.stop)
    return sums / total


def _both_ways(model: LM, key_a, key_b, place, lead, gap: int) -> Tensor:
    """Mean of s_l(A <- B) and s_l(B <- A) for every layer and pair, [num_layers, B]."""
    device = model.embed.weight.device
    tokens_a, ask = rows(key_a, key_a, lead, gap)
    tokens_b, _ = rows(key_b, key_a, lead, gap)  # earlier answer digits are the same in both
    n = np.arange(len(place))
    last = torch.from_numpy(ask + place).to(device)
    digit_a = torch.from_numpy(key_a[n, place]).to(device)
    digit_b = torch.from_numpy(key_b[n, place]).to(device)
    sides = [_Side(model, torch.from_numpy(tokens).to(device), last) for tokens in (tokens_a, tokens_b)]
    a, b = sides
    forth = a.effects(b, digit_a, digit_b)
    back = b.effects(a, digit_b, digit_a)
    return (forth + back) / 2


class _Side:
    """One prompt of each pair: prefilled to its last token, which is run cleanly and then under interventions."""

    def __init__(self, model: LM, tokens_BT: Tensor, last_B: Tensor):
        self.model = model
        mask = torch.arange(tokens_BT.shape[1], device=last_B.device) < last_B[:, None]
        self.cache = model.new_cache(len(tokens_BT), tokens_BT.shape[1] + 1)
        model.hidden(tokens_BT, mask=mask, cache=self.cache)
        self.token_B1 = tokens_BT.gather(1, last_B[:, None])
        with capture(model, "layers.*.mixer.out") as outs:
            self.logits_BV = self._step()
        self.outs_B1D = [outs[f"layers.{i}.mixer.out"] for i in range(model.spec.num_layers)]

    def _step(self) -> Tensor:
        logits_BV = self.model(self.token_B1, cache=self.cache.clone())[:, 0]
        return logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))

    def effects(self, other: _Side, mine_B: Tensor, theirs_B: Tensor) -> Tensor:
        """Drop of the margin of my digit over theirs when a layer's output is theirs, [num_layers, B]."""

        def margin(logits_BV: Tensor) -> Tensor:
            return (logits_BV.gather(1, mine_B[:, None]) - logits_BV.gather(1, theirs_B[:, None]))[:, 0]

        clean = margin(self.logits_BV)
        drops = []
        for i, out_B1D in enumerate(other.outs_B1D):
            with patch(self.model, {f"layers.{i}.mixer.out": out_B1D}):
                drops.append(clean - margin(self._step()))
        return torch.stack(drops)


def retrieval_records(
    model: LM, task: SpacedRetrieval, gaps: Iterable[int], *, pairs: int | None = None, progress: bool = False
) -> list[Record]:
    """Scores as records: one a layer and gap, and the mean of each family's layers (003's family curve)."""
    families = [family(layer.mixer) for layer in model.spec.layers]
    found = []
    for gap in gaps:
        scores = layer_retrieval_scores(model, task, gap, pairs=pairs, progress=progress).tolist()
        common = {"gap": gap, "task": "spaced-retrieval"}
        for i, score in enumerate(scores):
            axes = {"layer": i, "family": families[i], **common}
            found.append(Record(kind="probe", name="retrieval_score", values={"score": score}, axes=axes))
        for name in dict.fromkeys(families):
            own = [score for score, other in zip(scores, families, strict=True) if other == name]
            axes = {"family": name, "reduce": "mean", **common}
            values = {"score": sum(own) / len(own)}
            found.append(Record(kind="probe", name="retrieval_score", values=values, axes=axes))
    return found
