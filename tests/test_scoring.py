"""Token scores against plain cross-entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from plait import scoring
from plait.data import IGNORE
from plait.model.lm import LM
from plait.scoring import score_tokens
from plait.spec import Spec


def test_losses_and_exact_rows(monkeypatch):
    spec = Spec.from_layout("nope", vocab_size=9, d_model=16, num_layers=1, num_heads=2)
    model = LM(spec)
    tokens = torch.randint(0, 9, (4, 7), generator=torch.Generator().manual_seed(0))
    targets = model(tokens).argmax(-1)
    targets[1, 3] = (targets[1, 3] + 1) % 9
    targets[2] = IGNORE
    targets[:, :2] = IGNORE
    expected = F.cross_entropy(model(tokens).transpose(1, 2), targets, ignore_index=IGNORE, reduction="none")
    monkeypatch.setattr(scoring, "CHUNK", 3)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            scores = score_tokens(model, tokens, targets)
        torch.testing.assert_close(scores.loss_N, expected[targets != IGNORE])
        assert scores.exact_rows(4).tolist() == [True, False, True, True]
        assert scores.correct_N.sum() == 14
