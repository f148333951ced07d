"""plait: design, train, convert and look inside hybrid-attention language models.

The names below are the public API. Each is imported on first use, so that `import plait` is instant and what needs no
torch does not load it; everything else is imported from its own module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait import cost, extend, records
    from plait.layout import parse_layout
    from plait.model.generate import generate
    from plait.model.io import load, save
    from plait.model.lm import LM
    from plait.presets import preset
    from plait.probes import capture, patch
    from plait.spec import Spec

    __version__: str

_HOMES = {
    "LM": "plait.model.lm",
    "Spec": "plait.spec",
    "capture": "plait.probes",
    "generate": "plait.model.generate",
    "load": "plait.model.io",
    "parse_layout": "plait.layout",
    "patch": "plait.probes",
    "preset": "plait.presets",
    "save": "plait.model.io",
}
_MODULES = ("cost", "extend", "records")

__all__ = [
    "LM",
    "Spec",
    "capture",
    "cost",
    "extend",
    "generate",
    "load",
    "parse_layout",
    "patch",
    "preset",
    "records",
    "save",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value = version("plait")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"plait.{name}")
    else:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
