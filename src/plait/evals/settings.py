"""How LongPPL is measured, and the published settings by name. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a key token is, and what of a text is read."""

    K: int = 4096
    d: int = 1024
    gain: float = 2.0
    most: float = 2.0
    max_tokens: int | None = None
    """of a document; the reference counts its own, the evaluated model its own"""
    special: bool = True
    """texts begin with what the tokenizer begins them with"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A published way to measure. headline: the average to quote, the first of two where the paper leaves it open."""

    source: str
    max_tokens: int | None = None
    min_keys: int = 1
    special: bool = True
    headline: str = "pooled"
    unstated: str = ""


SETTINGS: Mapping[str, Setting] = {
    "000": Setting(
        source="000, appendix A: GovReport, reference Llama-3.1-8B",
        max_tokens=16_384,
        min_keys=10,
        headline="per_document",
        unstated="whether documents are averaged or pooled (both are given)",
    ),
    "001": Setting(
        source="001, figures 1 and 3: books as PG19",
        unstated="the reference, the length of books, and how they are averaged (both are given)",
    ),
    "003": Setting(
        source="003, table 13: 50 documents of GovReport, reference Qwen3-8B; pooled, raw text",
        max_tokens=32_768,
        special=False,
    ),
}
