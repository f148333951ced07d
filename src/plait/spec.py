"""Spec: the frozen description of a whole model, and its JSON file. No torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from plait.config import NORMS, Layer, NormKind
from plait.config_json import from_json, to_json
from plait.fields import FieldError
from plait.files import read_json, write_json
from plait.layout import Defaults, format_layout, parse_layout

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A language model: embedding, layers, final norm, head."""

    vocab_size: int
    d_model: int
    layers: tuple[Layer, ...]
    tie_embeddings: bool = True
    norm: NormKind = "rms"
    """the final norm"""
    norm_eps: float = 1e-6
    embed_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    init_std: float = 0.02
    context_length: int | None = None
    """tokens a row it was trained on; None: not trained yet or not known"""
    version: int = VERSION

    def __post_init__(self):
        if self.version > VERSION:
            raise ValueError(f"spec: version {self.version}; this plait reads up to version {VERSION}: upgrade plait")

        def check(name: str, ok: bool, allowed: str) -> None:
            if not ok:
                raise FieldError("spec", name, getattr(self, name), allowed)

        for name in ("vocab_size", "d_model", "norm_eps", "init_std", "version"):
            check(name, 0 < getattr(self, name) < math.inf, "above 0")
        for name in ("embed_multiplier", "logit_multiplier"):
            check(name, math.isfinite(getattr(self, name)), "finite")
        check("norm", self.norm in NORMS, f"one of {', '.join(NORMS)}")
        check("context_length", self.context_length is None or self.context_length > 0, "above 0, or none")
        if not self.layers:
            raise ValueError("spec: layers is empty; a model has at least one layer")

    @staticmethod
    def from_layout(
        layout: str,
        *,
        vocab_size: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        tie_embeddings: bool = True,
        context_length: int | None = None,
        **defaults: Any,
    ) -> Spec:
        """The Spec of a layout string; `defaults` are fields of layout.Defaults (num_kv_heads, head_dim, d_ff, ...)."""
        inherit = Defaults(d_model=d_model, num_layers=num_layers, num_heads=num_heads, **defaults)
        return Spec(
            vocab_size=vocab_size,
            d_model=d_model,
            layers=parse_layout(layout, inherit),
            tie_embeddings=tie_embeddings,
            norm=inherit.norm,
            norm_eps=inherit.norm_eps,
            context_length=context_length,
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layout(self) -> str:
        """The layout string that gives these layers (with the defaults of layout.format_layout)."""
        return format_layout(self.layers, self.d_model)[0]

    @cached_property
    def hash(self) -> str:
        """Twelve hex digits that name this Spec in records.

        Of its JSON without the fields that have their defaults, so that a new field, whose default is what models did
        before it, leaves old names as they are. Hence a default never changes, and a field that has none gets none.
        `version` is left out: it belongs to the file, not to the model.
        """
        same = Spec.from_json(self.to_json())  # 2 and 2.0, equal as fields, are then one text too
        data = to_json(dataclasses.replace(same, version=VERSION), defaults=False)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        return to_json(self)

    @staticmethod
    def from_json(data: Any, where: str = "spec") -> Spec:
        """The inverse of to_json; ValueError names an unknown field, a wrong value or a newer version."""
        version = data.get("version", VERSION) if isinstance(data, dict) else VERSION
        if isinstance(version, int) and version > VERSION:  # before its fields: a newer file may have new ones
            raise ValueError(f"{where}: version {version}; this plait reads up to version {VERSION}: upgrade plait")
        return from_json(Spec, data, where)

    def save(self, path: str | Path) -> None:
        write_json(Path(path), self.to_json())

    @staticmethod
    def load(path: str | Path) -> Spec:
        return Spec.from_json(read_json(Path(path)), str(path))
