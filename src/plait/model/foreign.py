"""Checkpoints of transformers, read and written: config.json and safetensors, or GGUF. No code of a checkpoint is ever
run, and nothing pickled is ever loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.fields import show, suggest
from plait.files import new_directory, read_json
from plait.mixers import Backend
from plait.model import families
from plait.model.lm import LM
from plait.model.tensors import check_tensors, read_tensors, write_tensors
from plait.spec import Spec

ASSETS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""what goes from a checkpoint to its copies as it is: the tokenizer, the chat template, when to stop"""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""settings of a config that belong to the tokenizer"""
FILES = ("config.json", "spec.json", *ASSETS)
WRAPPERS = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}
"""checkpoints of several towers whose text model is one of ours; the others are left out"""
PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
"""how tensors of the text model are called inside such a checkpoint"""


def read_config(path: Path) -> Any:
    """The config of a checkpoint directory, of its text model where it has others; the defaults are transformers'."""
    from transformers import CONFIG_MAPPING

    file = path / "config.json"
    data = read_json(file)
    model_type = data.get("model_type") if isinstance(data, dict) else None
    if model_type == "plait":
        raise ValueError(f"{path / 'spec.json'}: no such file")
    whole = model_type in WRAPPERS
    if whole:
        tied = {"tie_word_embeddings": data["tie_word_embeddings"]} if "tie_word_embeddings" in data else {}
        data, model_type = {**data.get("text_config", {}), **tied}, WRAPPERS[model_type]
    if model_type not in families.FAMILIES:
        more = " (it has code of its own, which is never run)" if isinstance(data, dict) and "auto_map" in data else ""
        known = suggest(str(model_type), sorted(families.FAMILIES))
        raise ValueError(f"{file}: model_type = {show(model_type)}{more}; plait reads other architectures: {known}")
    cls = CONFIG_MAPPING[model_type]
    try:
        return cls.from_dict(data) if whole else cls.from_json_file(file)
    except Exception as error:  # its validators raise errors of many kinds
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from None


def read_spec(path: Path) -> Spec:
    """The Spec of a checkpoint directory, from its config alone."""
    config = _gguf_config(path) if gguf_file(path) else read_config(path)
    try:
        return families.read(config)
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from None


def import_model(path: Path, *, backend: Backend, device: torch.device | str, dtype: torch.dtype | None) -> LM:
    """One LM of a checkpoint directory; dtype None keeps that of the file."""
    gguf = gguf_file(path)
    if gguf is not None:
        config, tensors = _read_gguf(path, gguf)
    else:
        config, tensors = read_config(path), _text_tensors(path)
    try:
        spec = families.read(config)
        model = LM(spec, backend=backend, device="meta")
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from None
    ours = model.state_dict()
    moves = families.moves(config.model_type, spec, ours)
    for move in moves:
        for name, alias in zip(move.theirs, move.alias, strict=False):
            if name not in tensors and alias in tensors:
                tensors[name] = tensors.pop(alias)
    expected = {name: tensor.shape for name, tensor in _store(moves, ours).items()}
    for name in {name for move in moves if len(move.theirs) > 1 for name in move.theirs} & tensors.keys():
        expected[name] = tensors[name].shape  # transformers cuts them in equal parts, whatever they are parts of
    check_tensors(path, {n: t for n, t in tensors.items() if n in expected or not _needless(n, spec)}, expected)
    loaded: dict[str, Tensor] = {}
    for move in moves:
        parts = move.form.load([tensors.pop(name) for name in move.theirs], [len(ours[name]) for name in move.ours])
        loaded |= zip(move.ours, (part.contiguous() for part in parts), strict=True)
    check_tensors(path, loaded, {name: tensor.shape for name, tensor in ours.items()})
    model.assign(loaded)
    return model.to(device=device, dtype=dtype)


def _store(moves: list[families.Move], ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors by their names and in their form."""
    return {
        name: tensor
        for move in moves
        for name, tensor in zip(move.theirs, move.form.store([ours[n] for n in move.ours]), strict=True)
    }


def _needless(name: str, spec: Spec) -> bool:
    """Tensors that checkpoints carry and no forward pass of text reads."""
    tied = name == "lm_head.weight" and spec.tie_embeddings
    return tied or name.endswith("rotary_emb.inv_freq") or name.startswith("mtp.")


def _text_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of the text model, by the names it has where it is alone."""
    pickled = next((file.name for end in ("bin", "pt", "pth") for file in sorted(path.glob(f"*.{end}"))), None)
    if pickled and not any(path.glob("*.safetensors*")):
        raise ValueError(f"{path}: its weights are pickled ({pickled}), which plait never loads; it reads safetensors")
    tensors = read_tensors(path)
    if not any(name.startswith(tuple(PREFIXES)) for name in tensors):
        return tensors
    text = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is not None:
            text[PREFIXES[prefix] + name.removeprefix(prefix)] = tensor
        elif name == "lm_head.weight":
            text[name] = tensor
    return text


def gguf_file(path: Path) -> str | None:
    """Its GGUF file, if a directory has one and no safetensors."""
    found = sorted(path.glob("*.gguf"))
    if not found or any(path.glob("*.safetensors")):
        return None
    if len(found) > 1:
        raise ValueError(f"{path}: it has {len(found)} GGUF files ({found[0].name}, {found[1].name}, ...); keep one")
    return found[0].name


def _gguf_config(path: Path) -> Any:
    from transformers import AutoConfig

    file = gguf_file(path)
    try:
        return AutoConfig.from_pretrained(path, gguf_file=file)
    except Exception as error:
        raise ValueError(f"{path / str(file)}: {' '.join(str(error).split())}") from None


def _read_gguf(path: Path, file: str) -> tuple[Any, dict[str, Tensor]]:
    """transformers' own reading of a GGUF file, dequantized."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path, gguf_file=file)
    except Exception as error:
        raise ValueError(f"{path / file}: {' '.join(str(error).split())}") from None
    families.family_of(model.config.model_type)
    return model.config, dict(model.state_dict())


def _token_settings(path: Path) -> dict[str, Any]:
    if gguf_file(path):
        found = _gguf_config(path).to_dict()
    else:
        found = read_json(path / "config.json") if (path / "config.json").exists() else {}
    return {key: found[key] for key in TOKENS if key in found}


def copy_assets(source: Path, directory: Path) -> None:
    """Tokenizer files and the like of a checkpoint into a directory that exists."""
    gguf = gguf_file(source)
    if gguf is not None:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(directory)
    for name in ASSETS:
        if (source / name).is_file():
            (directory / name).write_bytes((source / name).read_bytes())


def export_model(model: LM, path: str | Path, to: str, *, assets: str | Path | None = None) -> None:
    """Write a checkpoint that transformers alone loads as one of its own architectures: complete or absent.

    to: a model_type (llama, qwen3, smollm3, ...). assets: a directory whose tokenizer files go along.
    Raises ValueError where that architecture has no setting for something in the model, naming it.
    """
    config = families.write(model.spec, to)
    ours = model.state_dict()
    config.dtype = ours["embed.weight"].dtype
    if assets is not None:
        config.update(_token_settings(Path(assets)))
    tensors = _store(families.moves(to, model.spec, ours), ours)
    with new_directory(Path(path)) as directory:
        config.save_pretrained(directory)
        write_tensors(tensors, directory)
        if assets is not None:
            copy_assets(Path(assets), directory)
