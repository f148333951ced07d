"""Named tensors on disk: one safetensors file, or numbered shards and an index when large."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from plait.files import read_json, write_json

SHARD_BYTES = 5_000_000_000


def write_tensors(tensors: Mapping[str, Tensor], directory: Path, stem: str = "model") -> None:
    """stem.safetensors, or stem-00001-of-0000N.safetensors and stem.safetensors.index.json."""
    shards = _shards(tensors)
    if len(shards) == 1:
        save_file(shards[0], directory / f"{stem}.safetensors", metadata={"format": "pt"})
        return
    index = {}
    for i, shard in enumerate(shards, 1):
        name = f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_json(directory / f"{stem}.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": index})


def _shards(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor.detach().contiguous().cpu()
        room -= tensor.nbytes
    return shards


def read_tensors(directory: Path, stem: str = "model") -> dict[str, Tensor]:
    """All tensors of stem.safetensors or of the shards its index names, copied to memory of PyTorch's own: where a file
    has them they are not aligned, and the last bits of a product depend on that."""
    index = directory / f"{stem}.safetensors.index.json"
    names = _shard_names(index) if index.exists() else [f"{stem}.safetensors"]
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(directory / name, framework="pt") as file:
                tensors |= {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
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


def check_tensors(path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """These names and shapes, no others; ValueError names the first tensor that is not so."""
    for name in shapes.keys() - tensors.keys():
        raise ValueError(f"{path}: tensor {name} is missing")
    for name, tensor in tensors.items():
        if name not in shapes:
            raise ValueError(f"{path}: tensor {name} has no place in this model")
        if tensor.shape != shapes[name]:
            there, here = list(tensor.shape), list(shapes[name])
            raise ValueError(f"{path}: tensor {name} has shape {there}; the model's is {here}")
