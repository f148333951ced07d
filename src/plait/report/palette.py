"""Colours of the report: warm for softmax mixers, cool for recurrent ones, in light and in dark. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

FAMILIES = {
    "full": "softmax attention with RoPE",
    "nope": "softmax attention without positions",
    "swa": "softmax attention in a window, with RoPE",
    "gdn": "Gated DeltaNet",
    "gla": "gated linear attention",
    "kda": "Kimi Delta Attention",
    "mamba2": "Mamba-2",
    "lightning": "Lightning attention",
    "heads": "heads divided among mixers",
    "mix": "several mixers on all heads",
}
"""what each family is, in a few words"""


@dataclass(frozen=True, kw_only=True)
class Palette:
    """`on_family` is the colour of text on a block of any family."""

    surface: str
    raised: str
    ink: str
    muted: str
    rule: str
    grid: str
    context: str
    shade: str
    accent: str
    on_family: str
    families: Mapping[str, str]

    def family(self, name: str) -> str:
        """Of a family as plait.config.family names it; heads(...) and mix(...) have one colour each."""
        return self.families.get(name.split("(")[0], self.muted)


LIGHT = Palette(
    surface="#fcfbf9",
    raised="#f4f2ee",
    ink="#1f2429",
    muted="#5c6670",
    rule="#8a929a",
    grid="#e6e3dd",
    context="#b9bdc1",
    shade="#cbd7e6",
    accent="#2f4b7c",
    on_family="#ffffff",
    families={
        "full": "#b4233f",
        "nope": "#c04f0a",
        "swa": "#8f6400",
        "gdn": "#0b7a75",
        "gla": "#3f7d20",
        "kda": "#2457c5",
        "mamba2": "#0a74a6",
        "lightning": "#6a45c2",
        "heads": "#9c2f92",
        "mix": "#5a6472",
    },
)

DARK = Palette(
    surface="#15181b",
    raised="#1e2226",
    ink="#e6e7e8",
    muted="#a3abb3",
    rule="#6f7880",
    grid="#2b3035",
    context="#596168",
    shade="#2f3f52",
    accent="#9db8e8",
    on_family="#14171a",
    families={
        "full": "#ff8299",
        "nope": "#f79a54",
        "swa": "#e2bb55",
        "gdn": "#45c9bd",
        "gla": "#93cf6c",
        "kda": "#86aaff",
        "mamba2": "#5fbfee",
        "lightning": "#b9a0ff",
        "heads": "#ec90e0",
        "mix": "#aab4c0",
    },
)


def _variables(palette: Palette) -> dict[str, str]:
    plain = {f.name.replace("_", "-"): getattr(palette, f.name) for f in fields(palette) if f.name != "families"}
    return plain | {f"family-{name}": colour for name, colour in palette.families.items()}


def css(palette: Palette) -> str:
    """The palette as custom properties, to stand inside a rule."""
    return " ".join(f"--{name}: {value};" for name, value in _variables(palette).items())


PAGE = Palette(
    **{f.name: f"var(--{f.name.replace('_', '-')})" for f in fields(Palette) if f.name != "families"},
    families={name: f"var(--family-{name})" for name in LIGHT.families},
)
"""References to those properties: a chart drawn with it as SVG follows the theme without being drawn again."""
