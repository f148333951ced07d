"""Configs as plain JSON values, and back. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from plait.config import Lightning, Mixer
from plait.fields import arms_of, field_types, fit, show, suggest


def to_json(config: Any, *, defaults: bool = True) -> Any:
    """A config as plain JSON values; classes that share a field are told apart by `kind`.

    defaults = False leaves out every field that has its default value.
    """
    if dataclasses.is_dataclass(config):
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        plain = {} if defaults else {f.name: f.default for f in dataclasses.fields(config)}
        values = {
            name: to_json(value, defaults=defaults)
            for name, value in fields.items()
            if name not in plain or value != plain[name]
        }
        return {"kind": config.kind, **values} if isinstance(config, Mixer) else values
    if isinstance(config, tuple):
        return [to_json(item, defaults=defaults) for item in config]
    return config


def from_json(cls: type, data: Any, where: str) -> Any:
    """The inverse of to_json. Errors name the place (`layers[3].mixer`), the field and what is allowed."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: {show(data)}; it must be a JSON object")
    if cls is Lightning and "output_gate" not in data and data.get("gate_rank") == 0:
        # files older than output_gate: no gate
        data = {key: value for key, value in data.items() if key != "gate_rank"} | {"output_gate": None}
    hints = field_types(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            raise ValueError(f"{where}: unknown field {show(key)}; {suggest(str(key), fields)}")
    for name, f in fields.items():
        if name not in data and f.default is dataclasses.MISSING:
            raise ValueError(f"{where}: field {name!r} is missing")
    values = {key: _decode(hints[key], value, f"{where}.{key}") for key, value in data.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _decode(hint: Any, value: Any, where: str) -> Any:
    arms = arms_of(hint)
    if value is None and type(None) in arms:
        return None
    classes: list[type] = [arm for arm in arms if isinstance(arm, type) and dataclasses.is_dataclass(arm)]
    if classes:
        return _decode_kind(classes, value, where) if len(classes) > 1 else from_json(classes[0], value, where)
    item = next((get_args(arm)[0] for arm in arms if get_origin(arm) is tuple), None)
    if item is not None:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}: {show(value)}; it must be a list")
        return tuple(_decode(item, each, f"{where}[{i}]") for i, each in enumerate(value))
    if Path in arms and isinstance(value, str | Path):
        return Path(value)
    try:
        return fit(hint, value)
    except ValueError as error:
        raise ValueError(f"{where}: {show(value)}; it must be {error}") from None


def _decode_kind(classes: list[type], value: Any, where: str) -> Any:
    kinds: dict[str, type] = {cls.kind: cls for cls in classes}  # pyright: ignore[reportAttributeAccessIssue]
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{where}: kind {show(kind)}; {suggest(str(kind), kinds)}")
    return from_json(kinds[kind], {key: item for key, item in value.items() if key != "kind"}, where)
