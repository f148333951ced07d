"""Models on disk: plait's own directory (spec.json, model.safetensors) and checkpoints of transformers."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from plait.files import new_directory, write_json
from plait.mixers import Backend
from plait.model import foreign
from plait.model.lm import LM
from plait.model.tensors import check_tensors, read_tensors, write_tensors
from plait.spec import Spec


def save(model: LM, path: str | Path, *, assets: str | Path | None = None) -> None:
    """Write a model's directory: complete or absent. assets: a directory whose tokenizer files go along."""
    with new_directory(Path(path)) as directory:
        write_model(model, directory)
        if assets is not None:
            foreign.copy_assets(Path(assets), directory)


def write_model(model: LM, directory: Path) -> None:
    """The model's files, into a directory that exists."""
    model.spec.save(directory / "spec.json")
    config = {"model_type": "plait", "architectures": ["PlaitForCausalLM"], "spec": model.spec.to_json()}
    write_json(directory / "config.json", config)  # for transformers, once plait.hf is imported
    write_tensors(model.state_dict(), directory)


def load(
    path: str | Path,
    *,
    backend: Backend = "torch",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LM:
    """The model of a directory; dtype None keeps that of the file.

    path: what `save` or a training run wrote; a checkpoint of transformers (config.json and safetensors, or one GGUF
    file); or the name of one on the Hugging Face hub, OWNER/NAME, which is downloaded.
    Raises ValueError in one line for an architecture or a setting that plait does not have, for a missing or truncated
    file, and for a tensor that is missing, unknown or of another shape.
    """
    path = find_model(path)
    if not (path / "spec.json").exists():
        return foreign.import_model(path, backend=backend, device=device, dtype=dtype)
    model = LM(Spec.load(path / "spec.json"), backend=backend, device="meta")
    tensors = read_tensors(path)
    check_tensors(path, tensors, {name: value.shape for name, value in model.state_dict().items()})
    model.assign(tensors)
    return model.to(device=device, dtype=dtype)


def load_spec(path: str | Path) -> Spec:
    """The Spec of a directory that `load` takes, without its weights."""
    path = find_model(path)
    return Spec.load(path / "spec.json") if (path / "spec.json").exists() else foreign.read_spec(path)


def find_model(path: str | Path) -> Path:
    """The directory of a model: itself, or where the hub's cache has it."""
    found = Path(path)
    if found.is_dir():
        if not any((found / name).exists() for name in ("spec.json", "config.json")) and not any(found.glob("*.gguf")):
            raise ValueError(f"{found}: no model; one has spec.json (plait's) or config.json (transformers')")
        return found
    if found.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        raise ValueError(f"{found}: no such directory; give that of a model, or OWNER/NAME of one on the hub")
    return _download(str(path))


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[*foreign.FILES, "*.safetensors*"]))
    except Exception as error:  # of the hub, the network, the disk
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{name}: no such directory, and not to be had from the Hugging Face hub ({first})") from None
