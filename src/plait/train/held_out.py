"""Loss and accuracy on data that training never sees."""

from __future__ import annotations

import torch

from plait.data import Task
from plait.model.lm import LM
from plait.records import Record
from plait.scoring import score_tokens


@torch.no_grad()
def held_out(model: LM, task: Task, *, rows: int, rows_at_a_time: int = 64) -> list[Record]:
    """One record for the first `rows` of each group of the task's held-out data; where groups have axes (gaps),
    accuracies too.

    accuracy: share of answer tokens that are the argmax; exact: share of rows with all of them right.
    """
    device = model.embed.weight.device
    found = []
    for group in task.held_out():
        losses, correct, exact = [], [], []
        for piece in next(group.split(rows)).to(device).split(rows_at_a_time):
            scores = score_tokens(model, piece.tokens_BT, piece.targets_BT, cu_seqlens=piece.cu_seqlens)
            losses.append(scores.loss_N)
            correct.append(scores.correct_N)
            exact.append(scores.exact_rows(len(piece.tokens_BT)))
        values = {"loss": torch.cat(losses).mean().item()}
        if group.axes:
            values["accuracy"] = torch.cat(correct).float().mean().item()
            values["exact"] = torch.cat(exact).float().mean().item()
        found.append(Record(kind="eval", name="accuracy" if group.axes else "loss", values=values, axes=group.axes))
    return found
