"""What tells a model from another, so that its answers are not taken for the other's."""

from __future__ import annotations

import json

import numpy as np

from plait.evals.models import weights_digest


def test_models_are_told_apart_by_all_that_makes_them(tmp_path):
    files = {name: tmp_path / name for name in ("model.safetensors", "spec.json", "tokenizer.json")}
    weights = np.random.default_rng(0).bytes(2**23)
    files["model.safetensors"].write_bytes(weights)
    files["spec.json"].write_text('{"window_size": 64}')
    files["tokenizer.json"].write_text("{}")
    seen = [weights_digest(tmp_path)]

    middle = 2**22
    files["model.safetensors"].write_bytes(weights[:middle] + bytes(2**20) + weights[middle + 2**20 :])
    seen.append(weights_digest(tmp_path))
    files["spec.json"].write_text('{"window_size": 32}')  # as plait extend changes it, weights alike
    seen.append(weights_digest(tmp_path))
    files["tokenizer.json"].write_text("[]")
    seen.append(weights_digest(tmp_path))
    assert len(set(seen)) == 4

    (tmp_path / "trainer.json").write_text(json.dumps({"seconds": 1.5}))
    assert weights_digest(tmp_path) == seen[-1]
