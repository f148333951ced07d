"""Small pieces of HTML. Arguments called `html` are markup already; everything else passes through `esc`. No torch."""

from __future__ import annotations

import html as _html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from plait.report.marks import SOLID


class Cell(NamedTuple):
    html: str
    span: int = 1
    kind: str = ""
    """a class of the style sheet"""


def esc(text: object) -> str:
    return _html.escape(str(text))


def code(text: object) -> str:
    return f"<code>{esc(text)}</code>"


def paragraph(html: str, kind: str = "") -> str:
    return f"<p{_class(kind)}>{html}</p>"


def details(summary: str, html: str, *, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{esc(summary)}</summary>{html}</details>"


def table(
    caption: str, head: Sequence[Sequence[Cell | str]], body: Iterable[Sequence[Cell | str]], *, kind: str = ""
) -> str:
    """The first cell of a row is its header. A wide table scrolls in its own box."""
    top = "".join(f"<tr>{''.join(_head(cell) for cell in row)}</tr>" for row in head)
    rows = "".join(f"<tr>{_cell(row[0], 'th')}{''.join(_cell(cell, 'td') for cell in row[1:])}</tr>" for row in body)
    return (
        f'<div class="scroll" role="region" aria-label="{esc(caption)}" tabindex="0"><table{_class(kind)}>'
        f"<caption>{esc(caption)}</caption><thead>{top}</thead><tbody>{rows}</tbody></table></div>"
    )


def _head(cell: Cell | str) -> str:
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    if not cell.html:
        return f"<td{_span(cell)}></td>"
    return f'<th scope="{"colgroup" if cell.span > 1 else "col"}"{_span(cell)}{_class(cell.kind)}>{cell.html}</th>'


def _cell(cell: Cell | str, tag: str) -> str:
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    scope = ' scope="row"' if tag == "th" else ""
    return f"<{tag}{scope}{_span(cell)}{_class(cell.kind)}>{cell.html}</{tag}>"


def _span(cell: Cell) -> str:
    return f' colspan="{cell.span}"' if cell.span > 1 else ""


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def stroke(colour: str, dash: Sequence[int] = SOLID, width: float = 2) -> str:
    """A short piece of a line, for a key."""
    dashes = "" if tuple(dash) == SOLID else f' stroke-dasharray="{" ".join(map(str, dash))}"'
    return (
        f'<svg class="stroke" viewBox="0 0 24 8" width="24" height="8" aria-hidden="true">'
        f'<line x1="0" y1="4" x2="24" y2="4" stroke="{colour}" stroke-width="{width}"{dashes}/></svg>'
    )


def swatch(colour: str) -> str:
    return f'<i class="swatch" style="background:{colour}" aria-hidden="true"></i>'
