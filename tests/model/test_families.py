"""Checkpoints of transformers: tiny random models of every family become ours and theirs again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from contract.configs import disturb
from safetensors.torch import load_file, save_file
from torch import nn

from plait import Spec, load, parse_layout, save
from plait.layout import format_layout
from plait.model.families import FAMILIES
from plait.model.foreign import export_model
from plait.model.lm import LM

BASE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
ODD: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 30, "intermediate_size": 33, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "max_position_embeddings": 200, "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7}
GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 9,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
MAMBA = {"mamba_d_head": 8, "mamba_d_state": 5, "attn_layer_indices": [1], "mamba_d_conv": 3}
WIDE = {"hidden_size": 48, "mamba_n_heads": 12}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", BASE),
    "llama: odd shapes, tied": ("llama", ODD),
    "llama: biases, head_dim, eps": (
        "llama",
        {**BASE, "attention_bias": True, "mlp_bias": True, "head_dim": 10, "rms_norm_eps": 1e-5, "hidden_act": "gelu"},
    ),
    "llama: llama3": ("llama", {**BASE, "rope_parameters": LLAMA3}),
    "llama: linear": ("llama", {**BASE, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama: yarn": ("llama", {**BASE, "rope_parameters": YARN}),
    "mistral": ("mistral", {**BASE, "sliding_window": 7}),
    "mistral: no window, odd shapes": ("mistral", {**ODD, "sliding_window": None, "head_dim": 12}),
    "qwen2": ("qwen2", BASE),
    "qwen2: windows, tied": ("qwen2", {**ODD, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**BASE, "head_dim": 10}),
    "qwen3: biases, tied": ("qwen3", {**ODD, "head_dim": 8, "attention_bias": True}),
    "smollm3": ("smollm3", {**BASE, "num_hidden_layers": 4}),
    "smollm3: its own order": ("smollm3", {**ODD, "no_rope_layers": [0, 1, 0], "mlp_bias": True}),
    "gemma3_text": ("gemma3_text", {**BASE, **SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma3_text: its own scale, biases, tied": (
        "gemma3_text",
        {**ODD, **SLIDING, "head_dim": 12, "query_pre_attn_scalar": 40, "attention_bias": True},
    ),
    "cohere2": ("cohere2", {**BASE, **SLIDING}),
    "cohere2: biases, tied": ("cohere2", {**ODD, **SLIDING, "attention_bias": True, "logit_scale": 0.3}),
    "olmo_hybrid": ("olmo_hybrid", {**BASE, **LINEAR, **GDN}),
    "olmo_hybrid: no positions, tied": (
        "olmo_hybrid",
        {**ODD, **LINEAR, **GDN, "linear_num_value_heads": 2, "linear_allow_neg_eigval": False, "attention_bias": True},
    ),
    "qwen3_5_text": ("qwen3_5_text", {**BASE, **LINEAR, **GDN, "head_dim": 16}),
    "qwen3_5_text: tied": ("qwen3_5_text", {**ODD, **LINEAR, **GDN, "head_dim": 8, "linear_num_value_heads": 2}),
    "bamba": ("bamba", {**BASE, **MAMBA, **WIDE}),
    "bamba: biases, tied": (
        "bamba",
        {
            **ODD,
            "hidden_size": 36,
            "num_attention_heads": 3,
            **MAMBA,
            "mamba_n_heads": 9,
            "mlp_bias": True,
            "attention_bias": True,
        },
    ),
}


def make(family: str, settings: dict[str, Any]) -> nn.Module:
    """A random model of transformers, its norms and biases moved away from where they start."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**settings)
    model = getattr(transformers, FAMILIES[family].architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    disturb(model, 0)
    return model


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, nn.Module, Path]:
    family, settings = CASES[request.param]
    model, path = make(family, settings), tmp_path_factory.mktemp("theirs") / "model"
    model.save_pretrained(path)
    return family, model, path


def tokens(model: nn.Module, rows: int = 2, length: int = 70) -> torch.Tensor:
    return torch.randint(1, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((got - want).abs().max() <= 1e-4 * want.abs().max())


each = pytest.mark.parametrize("theirs", CASES, indirect=True)


@each
@torch.no_grad()
def test_logits(theirs: tuple[str, nn.Module, Path]):
    _, model, path = theirs
    ours, ids = load(path), tokens(model)
    assert close(ours(ids), model(input_ids=ids).logits)


@each
@torch.no_grad()
def test_decode_with_a_cache(theirs: tuple[str, nn.Module, Path]):
    """Ours through its cache, token by token after a prompt, against all at once; with left padding too."""
    _, model, path = theirs
    ours, ids = load(path), tokens(model)
    want, cache = model(input_ids=ids).logits, ours.new_cache(2, 70)
    got = [ours(ids[:, :40], cache=cache)] + [ours(ids[:, t : t + 1], cache=cache) for t in range(40, 70)]
    assert close(torch.cat(got, 1), want)
    mask = torch.arange(70)[None] >= torch.tensor([[0], [13]])
    assert close(ours(ids, mask=mask)[1, 13:], model(input_ids=ids[1:, 13:]).logits[0])


@each
@torch.no_grad()
def test_round_trip(theirs: tuple[str, nn.Module, Path], tmp_path: Path):
    """Through plait's own directory and back: the same tensors, bit for bit, and the same model for transformers."""
    family, model, path = theirs
    save(load(path), tmp_path / "ours")
    ours = load(tmp_path / "ours")
    assert ours.spec == load(path).spec
    export_model(ours, tmp_path / "back", family)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(again) is type(model)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ids = tokens(model)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


@each
def test_layouts_are_recovered(theirs: tuple[str, nn.Module, Path]):
    spec: Spec = load(theirs[2]).spec
    layout, defaults = format_layout(spec.layers, spec.d_model)
    assert parse_layout(layout, defaults) == spec.layers


# What cannot be read or written is one line that says what.


def saved(path: Path, family: str = "llama", **changes: Any) -> Path:
    model = make(family, {**BASE, **changes})
    model.save_pretrained(path, max_shard_size="8KB")
    return path


def edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def drop_shard(path: Path) -> None:
    sorted(path.glob("model-*.safetensors"))[1].unlink()


def rewrite(path: Path, name: str, value: torch.Tensor | None) -> None:
    """Another value of a tensor, or none at all, in whatever shard has it."""
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_file(path / index[name])
    tensors.pop(name)
    save_file(tensors if value is None else {**tensors, name: value}, path / index[name])


def pickled(path: Path) -> None:
    for file in path.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, path / "pytorch_model.bin")


Q = "model.layers.1.self_attn.q_proj.weight"
BAD = {
    "a shard is missing": (drop_shard, r"model-00002-of-\d+\.safetensors: no such file"),
    "a tensor is missing": (lambda p: rewrite(p, Q, None), rf"tensor {Q} is missing"),
    "a wrong shape": (
        lambda p: rewrite(p, Q, torch.zeros(3, 5)),
        rf"{Q} has shape \[3, 5\]; the model's is \[24, 24\]",
    ),
    "a tensor too many": (
        lambda p: rewrite(p, Q, torch.zeros(24, 24)) or edit(p, num_hidden_layers=2),
        "no place in this",
    ),
    "an unknown architecture": (lambda p: edit(p, model_type="lama"), r"model_type = 'lama'.*nearest: llama"),
    "no architecture": (lambda p: edit(p, model_type=None), "model_type = None"),
    "code of its own": (
        lambda p: edit(p, model_type="mine", auto_map={"AutoModelForCausalLM": "modeling.Mine"}),
        r"model_type = 'mine' \(it has code of its own, which is never run\)",
    ),
    "an activation": (lambda p: edit(p, hidden_act="relu"), "hidden_act = 'relu'; nearest: gelu"),
    "a RoPE scaling": (
        lambda p: edit(p, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "rope_type = 'dynamic'; plait has default, linear, yarn, llama3",
    ),
    "a setting of a RoPE scaling": (
        lambda p: edit(p, rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}),
        "rope_parameters.mscale = 0.7; plait's yarn scaling has no such setting",
    ),
    "a wrong value": (lambda p: edit(p, num_attention_heads=5), "config.json"),
    "pickled weights": (pickled, r"pickled \(pytorch_model.bin\), which plait never loads"),
    "no weights": (lambda p: [f.unlink() for f in p.glob("*.safetensors*")], "model.safetensors: no such file"),
    "not JSON": (lambda p: (p / "config.json").write_text("{"), "config.json: not valid JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoints(name: str, tmp_path: Path):
    change, message = BAD[name]
    path = saved(tmp_path / "model")
    change(path)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "gemma3_text",
            {"final_logit_softcapping": 30.0, **SLIDING},
            "final_logit_softcapping = 30.0",
        ),
        ("gemma3_text", {"attn_logit_softcapping": 50.0, **SLIDING}, "attn_logit_softcapping = 50.0"),
        ("qwen3_5_text", {"attention_bias": True, "head_dim": 16, **LINEAR, **GDN}, "attention_bias = True"),
        (
            "bamba",
            {"mamba_conv_bias": False, **MAMBA, **WIDE},
            "mamba_conv_bias = False",
        ),
    ],
)
def test_settings_that_plait_has_nothing_for(family: str, changes: dict[str, Any], message: str, tmp_path: Path):
    path = saved(tmp_path / "model", family, **changes)
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        load(path)


def model_of(layout: str, **fields: Any) -> LM:
    defaults = {"vocab_size": 31, "d_model": 24, "num_layers": 2, "num_heads": 4, "d_ff": 40} | fields
    return LM(Spec.from_layout(layout, **defaults))


@pytest.mark.parametrize(
    ("layout", "to", "message"),
    [
        ("gdn nope", "llama", r"llama cannot express this model: layers\.0\.mixer"),
        ("full[sink=true]", "llama", r"layers\.0\.mixer\.sink = True \(it has False\)"),
        ("full[window=4] full", "mistral", r"layers\.1\.mixer\.window_size = None \(it has 4\)"),
        ("full[logn=loga, logn_base=500]", "qwen3", r"layers\.0\.mixer\.qk_norm = None \(it has 'head'\); "),
        ("full[d_ff=0]", "llama", "llama has no such model: intermediate_size = 0"),
        ("full[head_dim=16]", "qwen3_5_text", r"qwen3_5_text cannot express this model: .* and 7 more"),
        ("mix(full + gdn)", "olmo_hybrid", "olmo_hybrid has no such model: .* at least one attention layer"),
    ],
)
def test_models_that_an_architecture_cannot_express(layout: str, to: str, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message) as error:
        export_model(model_of(layout), tmp_path / "out", to)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("layout", "to", "fields"),
    [
        ("full", "llama", {"num_kv_heads": 2, "head_dim": 10}),
        ("full", "llama", {"mlp": "geglu", "tie_embeddings": False, "context_length": 99}),
        ("full[bias=qkv]", "qwen2", {}),
        ("full[qk_norm=head] swa[window=8, qk_norm=head]", "qwen3", {}),
        ("full[rope_scaling=yarn:4:32]", "llama", {}),
        ("full nope", "smollm3", {"num_layers": 4}),
        ("swa[window=8] nope", "smollm3", {}),
    ],
)
@torch.no_grad()
def test_models_of_our_own_for_transformers_alone(layout: str, to: str, fields: dict[str, Any], tmp_path: Path):
    ours = model_of(layout, **fields)
    disturb(ours, 0)
    export_model(ours, tmp_path / "out", to)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(1, 31, (2, 50), generator=torch.Generator().manual_seed(0))
    assert close(ours(ids), theirs(input_ids=ids).logits)


@torch.no_grad()
def test_the_text_model_of_a_larger_checkpoint(tmp_path: Path):
    """Published Qwen3.5 and Gemma 3 checkpoints hold a vision tower too, and name the text model otherwise."""
    model = make("qwen3_5_text", {**BASE, **LINEAR, **GDN, "head_dim": 16, "tie_word_embeddings": True})
    model.save_pretrained(tmp_path / "text")
    text = json.loads((tmp_path / "text/config.json").read_text())
    path = tmp_path / "whole"
    path.mkdir()
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(whole))
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in model.state_dict().items()}
    tensors = {name: t.clone() for name, t in tensors.items() if not name.startswith("lm_head")}
    extra = {"model.visual.patch_embed.weight": torch.zeros(3), "mtp.fc.weight": torch.zeros(2)}
    save_file({**tensors, **extra}, path / "model.safetensors")
    ids = tokens(model)
    assert close(load(path)(ids), model(input_ids=ids).logits)


@torch.no_grad()
def test_dtypes(tmp_path: Path):
    """The file's, unless another is asked for; what is stored in fp32 beside bf16 stays so."""
    model = make("bamba", {**BASE, **MAMBA, **WIDE}).bfloat16()
    model.save_pretrained(tmp_path / "model")
    assert {p.dtype for p in load(tmp_path / "model").parameters()} == {torch.bfloat16}
    ours, ids = load(tmp_path / "model", dtype=torch.float32), tokens(model)
    assert close(ours(ids), model.float()(input_ids=ids).logits)
    export_model(load(tmp_path / "model"), tmp_path / "back", "bamba")
    assert {t.dtype for t in load_file(tmp_path / "back/model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "bfloat16"


def test_tokenizer_files_go_along(tmp_path: Path):
    path = saved(tmp_path / "model", eos_token_id=7)
    (path / "tokenizer.json").write_text("{}")
    (path / "generation_config.json").write_text('{"eos_token_id": 7}')
    model = load(path)
    save(model, tmp_path / "ours", assets=path)
    export_model(model, tmp_path / "back", "llama", assets=path)
    for copy in (tmp_path / "ours", tmp_path / "back"):
        assert {"tokenizer.json", "generation_config.json"} <= {file.name for file in copy.iterdir()}
    assert json.loads((tmp_path / "back/config.json").read_text())["eos_token_id"] == 7
