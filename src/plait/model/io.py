"""A model on disk: a directory of spec.json and model.safetensors (in numbered shards when large)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from plait.files import new_directory, read_json, write_json
from plait.mixers import Backend
from plait.model.lm import LM
from plait.spec import Spec

SHARD_BYTES = 5_000_000_000


def save(model: LM, path: str | Path) -> None:
    """Write a model's directory: complete or absent."""
    with new_directory(Path(path)) as directory:
        write_model(model, directory)


def write_model(model: LM, directory: Path) -> None:
    """The model's files, into a directory that exists."""
    model.spec.save(directory / "spec.json")
    shards = _shards(model.state_dict())
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata={"format": "pt"})
        return
    index = {}
    for i, tensors in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, directory / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    write_json(directory / "model.safetensors.index.json", {"weight_map": index})


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor.detach().contiguous().cpu()
        room -= tensor.nbytes
    return shards


def load(
    path: str | Path,
    *,
    backend: Backend = "torch",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LM:
    """The model of a directory that `save` or a training run wrote; dtype None keeps that of the file.

    Raises ValueError in one line for a missing or truncated file, and for a tensor that is missing, unknown or of
    another shape.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path}: no such directory; give one with spec.json and model.safetensors")
    spec = Spec.load(path / "spec.json")
    model = LM(spec, backend=backend, device="meta")
    tensors = read_tensors(path, "model")
    check_tensors(path, tensors, {name: value.shape for name, value in model.state_dict().items()})
    model.load_state_dict(tensors, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.to(device=device, dtype=dtype)


def read_tensors(directory: Path, stem: str) -> dict[str, Tensor]:
    """All tensors of stem.safetensors or of the shards its index names."""
    index = directory / f"{stem}.safetensors.index.json"
    names = _shard_names(index) if index.exists() else [f"{stem}.safetensors"]
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(directory / name, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise ValueError(f"{directory / name}: no such file") from None
        except (SafetensorError, OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{directory / name}: not a whole safetensors file ({error})") from None
    return tensors


def _shard_names(index: Path) -> list[str]:
    data = read_json(index)
    files = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{index}: it has no weight_map from tensors to files")
    return sorted(set(files.values()))


def check_tensors(path: Path, tensors: dict[str, Tensor], shapes: dict[str, torch.Size]) -> None:
    for name in shapes.keys() - tensors.keys():
        raise ValueError(f"{path}: tensor {name} is missing")
    for name, tensor in tensors.items():
        if name not in shapes:
            raise ValueError(f"{path}: tensor {name} has no place in this model")
        if tensor.shape != shapes[name]:
            there, here = list(tensor.shape), list(shapes[name])
            raise ValueError(f"{path}: tensor {name} has shape {there}; the model's is {here}")
