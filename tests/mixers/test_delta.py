"""The gated delta rule alone. What it shares with every recurrence in chunks is in test_chunked.py."""

from __future__ import annotations

import pytest
import torch
from mixers.rules import DELTA, G_INDEX, KDA, Rule, dense, gradients, relative_rms, to

from plait.mixers.delta import delta_chunk


@pytest.mark.parametrize("rule", [DELTA, KDA], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    ("dtype", "beta"), [(torch.float64, b) for b in (0.0, 1.0, 1.9, 2.0)] + [(torch.float32, b) for b in (0.0, 1.0)]
)
def test_repeated_keys(rule: Rule, dtype, beta) -> None:
    # Near beta 2 every token reflects the state at its key and nothing is forgotten: rounding only adds up there.
    inputs = rule.make_inputs(1, 200, 1, 1, 16, 8, decay=1e-3)
    inputs[1] = inputs[1][:, :1].expand_as(inputs[1])
    inputs[G_INDEX + 1].fill_(beta)
    inputs = to(inputs, dtype)
    ours = gradients(rule.chunk(dense(1, 200), 64), inputs)
    rule.assert_same(ours, gradients(rule.naive, to(inputs, torch.float64)), dtype)


@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid"])
def test_transformers(family) -> None:
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    *inputs, state = to(DELTA.make_inputs(2, 150, 2, 1, 16, 24), torch.float32)
    o, last = delta_chunk(*inputs, state, dense(2, 150))
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        rule = getattr(module, name)
        theirs = rule(*inputs[:3], g=inputs[3], beta=inputs[4], initial_state=state, output_final_state=True)
        assert relative_rms(o, theirs[0]) < 1e-5
        assert relative_rms(last, theirs[1]) < 1e-5
