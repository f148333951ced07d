"""Models on disk: every bit comes back, and a bad directory is one readable line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from contract.configs import disturb, specs
from contract.tools import examples
from hypothesis import given
from safetensors.torch import load_file, save_file

from plait.config import Gdn, Layer, Softmax
from plait.model import tensors as on_disk
from plait.model.io import load, save
from plait.model.lm import LM
from plait.spec import Spec

LAYERS = (
    Layer(mixer=Softmax(num_heads=2, num_kv_heads=1, head_dim=4, rope_theta=1e4, sink=True, qk_norm="head"), d_ff=12),
    Layer(mixer=Gdn(num_heads=2, num_kv_heads=2, num_v_heads=2, head_dim=4), d_ff=12, norm="layer"),
)
SPEC = Spec(vocab_size=11, d_model=8, layers=LAYERS)
TOKENS = torch.arange(11)[None]


def model_of(spec: Spec = SPEC, dtype: torch.dtype = torch.float32) -> LM:
    model = LM(spec, seed=3)
    disturb(model, 3)
    return model.to(dtype)


def test_odd_sizes_compute_the_same_bits(tmp_path):
    """Products of matrices that lie as in the file differ in the last bit."""
    mixer = Gdn(num_heads=1, num_kv_heads=1, num_v_heads=1, head_dim=1, expand_v=2, conv_size=0, output_gate=False)
    model = model_of(Spec(vocab_size=11, d_model=10, layers=(Layer(mixer=mixer, d_ff=0),)))
    save(model, tmp_path / "m")
    assert_same(model, load(tmp_path / "m"))


def assert_same(a: LM, b: LM) -> None:
    assert a.spec == b.spec
    assert a.state_dict().keys() == b.state_dict().keys()
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert x.dtype == y.dtype, name
        assert torch.equal(x, y), name
    assert all(p.requires_grad for p in b.parameters())
    assert torch.equal(a(TOKENS), b(TOKENS))


@pytest.mark.parametrize("shard_bytes", [1, 100, 700, 5_000_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip(tmp_path: Path, monkeypatch, tied: bool, dtype: torch.dtype, shard_bytes: int):
    monkeypatch.setattr(on_disk, "SHARD_BYTES", shard_bytes)
    model = model_of(dataclasses.replace(SPEC, tie_embeddings=tied), dtype)
    save(model, tmp_path / "model")
    files = {path.name for path in (tmp_path / "model").iterdir()}
    if shard_bytes > 10_000:
        assert files == {"spec.json", "config.json", "model.safetensors"}
    else:
        index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == model.state_dict().keys()
        assert files == {"spec.json", "config.json", "model.safetensors.index.json", *index.values()}
        for name in set(index.values()):
            tensors = load_file(tmp_path / "model" / name)
            assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= shard_bytes
    assert_same(model, load(tmp_path / "model"))
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


@examples(20)
@given(drawn=specs())
def test_round_trip_of_any_spec(tmp_path_factory, drawn):
    path = tmp_path_factory.mktemp("any") / "model"
    model = model_of(drawn[0])
    save(model, path)
    assert_same(model, load(path))


def test_names_of_parameters():
    """Those of DESIGN.md: checkpoints depend on them."""
    names = set(LM(dataclasses.replace(SPEC, tie_embeddings=False), device="meta").state_dict())
    assert {"embed.weight", "norm.weight", "lm_head.weight"} <= names
    for name in ("norm1", "norm2", "mlp.gate", "mlp.up", "mlp.down", "mixer.q", "mixer.k", "mixer.v", "mixer.o"):
        assert {f"layers.0.{name}.weight", f"layers.1.{name}.weight"} <= names
    assert not any("tap" in name for name in names)


def test_load_to_a_dtype_and_backend(tmp_path: Path):
    save(model_of(), tmp_path / "model")
    model = load(tmp_path / "model", backend="naive", dtype=torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert {block.mixer.backend for block in model.layers} == {"naive"}
    torch.testing.assert_close(model(TOKENS).float(), model_of()(TOKENS))
    with pytest.raises(ValueError, match=r"backend = 'cuda'; allowed: naive, torch, fla, auto"):
        load(tmp_path / "model", backend="cuda")


def test_a_tied_head_is_stored_once_and_stays_tied(tmp_path: Path):
    save(model_of(), tmp_path / "model")
    assert "lm_head.weight" not in load_file(tmp_path / "model/model.safetensors")
    model = load(tmp_path / "model")
    before = model(TOKENS)
    with torch.no_grad():
        model.embed.weight.mul_(2)
    assert not torch.equal(model(TOKENS), before)


def test_saving_again_replaces(tmp_path: Path):
    save(model_of(), tmp_path / "model")
    other = LM(SPEC, seed=9)
    save(other, tmp_path / "model")
    assert_same(other, load(tmp_path / "model"))
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch):
    model = model_of()
    save(model, tmp_path / "model")

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(on_disk, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save(LM(SPEC, seed=9), tmp_path / "model")
    with pytest.raises(OSError, match="disk full"):
        save(LM(SPEC, seed=9), tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
    assert_same(model, load(tmp_path / "model"))


# Bad directories.


def break_tensors(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def truncate(path: Path, keep: float) -> None:
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])


def write_index(path: Path, text: str) -> None:
    (path / "model.safetensors.index.json").write_text(text)


BREAKS = {
    "missing tensor": (
        lambda p: break_tensors(p, lambda t: t.pop("layers.1.mixer.A_log")),
        r"tensor layers\.1\.mixer\.A_log is missing",
    ),
    "unknown tensor": (
        lambda p: break_tensors(p, lambda t: t.update({"layers.7.mixer.q.weight": torch.zeros(1)})),
        r"tensor layers\.7\.mixer\.q\.weight has no place in this model",
    ),
    "wrong shape": (
        lambda p: break_tensors(p, lambda t: t.update({"norm.weight": torch.zeros(9)})),
        r"tensor norm\.weight has shape \[9\]; the model's is \[8\]",
    ),
    "truncated tensors": (lambda p: truncate(p, 0.9), r"model\.safetensors: not a whole safetensors file"),
    "truncated header": (lambda p: truncate(p, 0.01), r"model\.safetensors: not a whole safetensors file"),
    "empty file": (lambda p: truncate(p, 0), r"model\.safetensors: not a whole safetensors file"),
    "not safetensors": (lambda p: (p / "model.safetensors").write_text("weights" * 99), "not a whole safetensors file"),
    "a directory": (
        lambda p: ((p / "model.safetensors").unlink(), (p / "model.safetensors").mkdir()),
        r"model\.safetensors",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), r"model\.safetensors: no such file"),
    "no spec": (lambda p: (p / "spec.json").unlink(), r"spec\.json: no such file"),
    "spec is not JSON": (lambda p: (p / "spec.json").write_text("{"), r"spec\.json: not valid JSON"),
    "spec of another model": (
        lambda p: dataclasses.replace(SPEC, layers=LAYERS[:1]).save(p / "spec.json"),
        "has no place in this model",
    ),
    "index without a map": (lambda p: write_index(p, "{}"), r"index\.json"),
    "index of a missing shard": (
        lambda p: write_index(p, '{"weight_map": {"norm.weight": "other.safetensors"}}'),
        r"other\.safetensors: no such file",
    ),
    "index is not JSON": (lambda p: write_index(p, "{"), r"index\.json: not valid JSON"),
    "index is a list": (lambda p: write_index(p, "[]"), r"index\.json"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_bad_directory_is_one_line(tmp_path: Path, name: str):
    change, message = BREAKS[name]
    save(model_of(), tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path / "model")
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_no_directory(tmp_path: Path):
    with pytest.raises(ValueError, match=r"nothing: no such directory; give that of a model"):
        load(tmp_path / "nothing")
