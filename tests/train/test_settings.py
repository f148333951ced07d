"""What a training run is asked for: budgets in tokens, changes to the Spec, options that are newer than a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.config import Softmax
from plait.train.checkpoint import check_settings
from plait.train.settings import DataOptions, ExtendOptions, ModelOptions, RunSettings, defaults

TEXT = {"layout": "full", "data": "x", "length": 100, "batch_size": 10}
TASK = {"layout": "full", "task": "spaced-retrieval"}


def test_budgets_in_tokens_become_updates():
    budgets = {"tokens": 1e6, "warmup_tokens": 10_001, "decay_tokens": 2e5}
    found = RunSettings.from_json({**TEXT, "schedule": "wsd", "steps": 7, **budgets})
    assert (found.train.steps, found.train.warmup, found.train.decay) == (1000, 11, 200)
    assert RunSettings.from_json(found.to_json()) == found  # in updates, with nothing in tokens left
    assert RunSettings.from_json({**TEXT, "tokens": None}).train.steps == 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**TASK, "tokens": 1e6}, "tokens = 1e[+]06; rows of spaced-retrieval differ in length: give steps"),
        ({**TEXT, "warmup_tokens": 0.0}, "warmup_tokens = 0; it must be above 0"),
        ({**TEXT, "extend_theta": ["ful=5e5"]}, "extend_theta: 'ful=5e5'; nearest: full"),
        ({**TEXT, "extend_theta": ["full:5e5"]}, "extend_theta: 'full:5e5'; write a base, or FAMILY=BASE"),
        ({**TEXT, "compile": True, "document_masks": True}, "compile, document_masks: both are true"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RunSettings.from_json(options)


def bases(layout: str, **options) -> list[float | None]:
    spec = ExtendOptions(**options).apply(ModelOptions(layout=layout, num_layers=2).spec(10))
    return [layer.mixer.rope_theta for layer in spec.layers if isinstance(layer.mixer, Softmax)]


def test_changes_to_the_spec():
    layout = "swa[window=128] full"
    assert bases(layout) == [1e4, 1e4]
    assert bases(layout, extend_theta=("5e5",)) == [5e5, 5e5]
    assert bases(layout, extend_theta=("full=5e5", "swa=2e4")) == [2e4, 5e5]
    assert bases(layout, extend_theta=("gdn=5e5",)) == [1e4, 1e4]
    assert bases(layout, extend_window=2048, extend_theta=("full=5e5",)) == [5e7, 5e5]  # 001, A.3
    assert bases(layout, drop_rope=True) == [1e4, None]
    with pytest.raises(ValueError, match="no layer has RoPE"):
        bases("nope", extend_theta=("5e5",))


def test_a_run_older_than_an_option_goes_on_with_its_default(tmp_path):
    now = RunSettings.from_json(TASK).to_json()
    old = {name: value for name, value in now.items() if name not in ("compile", "extend_theta", "head_grad_norms")}
    (tmp_path / "config.json").write_text(json.dumps(old))
    check_settings(tmp_path, now)
    with pytest.raises(ValueError, match="compile: False there, True now"):
        check_settings(tmp_path, {**now, "compile": True})
    (tmp_path / "config.json").write_text(json.dumps({**old, "gone": 1}))
    with pytest.raises(ValueError, match="gone: 1 there, None now"):
        check_settings(tmp_path, now)


def test_defaults_are_those_of_every_option():
    assert defaults().keys() | {"branch", "init"} == RunSettings.from_json(TASK).to_json().keys()
    assert json.loads(json.dumps(defaults())) == defaults()
    assert DataOptions(data=Path("x")).length == defaults()["length"]
