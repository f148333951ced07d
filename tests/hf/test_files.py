"""Directories that both plait and transformers read and write, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from contract.configs import build, specs
from contract.tools import examples
from hf.tools import hf, model_of, tokens
from hypothesis import given
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import plait
from plait.config import Gdn, Layer, Softmax
from plait.hf import PlaitConfig, PlaitForCausalLM
from plait.model.lm import LM

FULL = Layer(mixer=Softmax(num_heads=2, num_kv_heads=1, head_dim=4, rope_theta=1e4, sink=True), d_ff=12)
GDN = Layer(mixer=Gdn(num_heads=2, num_kv_heads=2, num_v_heads=2, head_dim=4))


def assert_same(a: LM, b: LM) -> None:
    assert a.spec == b.spec
    assert a.state_dict().keys() == b.state_dict().keys()
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert x.dtype == y.dtype, name
        assert torch.equal(x, y), name


@examples(12)
@given(specs(2))
def test_round_trip(tmp_path_factory, drawn):
    path, lm = tmp_path_factory.mktemp("models"), build(drawn[0], 1, torch.float32, "torch")
    plait.save(lm, path / "plait")
    model = AutoModelForCausalLM.from_pretrained(path / "plait")
    assert type(model) is PlaitForCausalLM
    assert not model.training
    assert all(p.requires_grad for p in model.parameters())
    assert_same(model.lm, lm)
    model.save_pretrained(path / "hf")
    assert_same(plait.load(path / "hf"), lm)
    assert load_file(path / "hf/model.safetensors").keys() == lm.state_dict().keys()
    assert_same(AutoModelForCausalLM.from_pretrained(path / "hf").lm, lm)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_shards_and_dtypes(tmp_path: Path, tied: bool, dtype: torch.dtype):
    lm = model_of(FULL, GDN, tied=tied).to(dtype)
    model = hf(lm)
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size=500)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert_same(plait.load(tmp_path), lm)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == dtype
    assert_same(again.lm, lm)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).lm, lm.float())
    again.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "spec.json")
    }
    assert plait.load(tmp_path).embed.weight.dtype == dtype


def test_config(tmp_path: Path):
    lm = model_of(FULL, GDN, context_length=64)
    plait.save(lm, tmp_path / "model")
    data = json.loads((tmp_path / "model/config.json").read_text())
    assert data == {"model_type": "plait", "architectures": ["PlaitForCausalLM"], "spec": lm.spec.to_json()}
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert isinstance(config, PlaitConfig)
    sizes = (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.max_position_embeddings)
    assert sizes == (11, 8, 2, 64)
    assert config.to_spec() == lm.spec
    assert not config.tie_word_embeddings
    assert not hasattr(hf(model_of(FULL)).config, "max_position_embeddings")  # not known: tools take their default
    with pytest.raises(AttributeError, match="vocab_size"):
        AutoConfig.from_pretrained(tmp_path / "model", vocab_size=12)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", backend="naive")
    assert {block.mixer.backend for block in model.lm.blocks} == {model.lm.backend} == {"naive"}
    model.save_pretrained(tmp_path / "again")
    assert "backend" not in (tmp_path / "again/config.json").read_text()


def test_a_config_without_a_spec_is_refused():
    with pytest.raises(ValueError, match="config: spec is missing"):
        PlaitConfig()
    data = model_of(FULL).spec.to_json()
    with pytest.raises(ValueError, match="config: spec: "):
        PlaitConfig(spec=data | {"d_modl": 8})


def test_tokens_set_by_a_trainer_do_not_stop_generation():
    model = hf(model_of(FULL))
    model.config.pad_token_id, model.config.eos_token_id, model.config.use_cache = 0, None, False
    assert model.generate(tokens(1, 3), max_new_tokens=2, do_sample=False).shape == (1, 5)


def test_from_config():
    """Weights as LM has them, from torch's generator, in the dtype that is asked for."""
    lm = model_of(FULL, GDN)

    def draw(**arguments) -> PlaitForCausalLM:
        return AutoModelForCausalLM.from_config(PlaitConfig(spec=lm.spec.to_json()), **arguments)

    torch.manual_seed(0)
    first, second = draw(), draw(dtype=torch.bfloat16)
    torch.manual_seed(0)
    same = draw()
    assert_same(first.lm, same.lm)
    assert (first.dtype, second.dtype) == (torch.float32, torch.bfloat16)
    assert not torch.equal(first.embed.weight, second.embed.weight.float())
    torch.manual_seed(0)
    assert_same(first.lm, LM(lm.spec, seed=int(torch.randint(1 << 31, ()))))


def test_missing_and_misshapen_tensors(tmp_path: Path, caplog):
    lm = model_of(FULL, GDN)
    plait.save(lm, tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    name = "layers.1.mixer.A_log"
    save_file({key: value for key, value in tensors.items() if key != name}, file, metadata={"format": "pt"})
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert report["missing_keys"] == {name}
    fresh = LM(lm.spec).state_dict()[name]
    assert model.state_dict()[name].shape == fresh.shape
    assert torch.isfinite(model.state_dict()[name]).all()
    assert all(torch.equal(value, tensors[key]) for key, value in model.state_dict().items() if key != name)
    save_file(tensors | {"norm.weight": torch.ones(9)}, file, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert name in caplog.text
    assert "norm.weight" in caplog.text
    save_file(tensors | {"other": torch.ones(9)}, file, metadata={"format": "pt"})
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert report["unexpected_keys"] == {"other"}


def test_loading_makes_no_second_model(tmp_path: Path, monkeypatch):
    """It is built without values, and nothing is drawn."""
    plait.save(model_of(FULL, GDN), tmp_path / "model")
    monkeypatch.setattr(LM, "init_weights", lambda *_: pytest.fail("weights were drawn"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").device.type == "cpu"


def test_plait_does_not_import_transformers():
    code = """
import sys, plait
plait.LM, plait.load, plait.generate, plait.capture
assert "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_of_a_run(tmp_path: Path):
    from plait.train.checkpoint import save_checkpoint

    lm = model_of(FULL, GDN)
    path = save_checkpoint(tmp_path, lm, torch.optim.AdamW(lm.parameters()), 3, 100, 1.0)
    assert_same(AutoModelForCausalLM.from_pretrained(path).lm, lm)
