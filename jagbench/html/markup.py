"""Text to HTML: everything that comes from a record passes through here and is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Markup:
    """HTML made by this package. Any other text is escaped where it is put into a page."""

    text: str


#: Shown where a quotient is beyond it: JSON and charts have no infinity.
LARGEST = 1e99

#: What a table cell may be: text is escaped, a number is right-aligned, None is a dash.
Cell = Markup | str | float | int | None


def escaped(value: object) -> str:
    """Text for an element or a quoted attribute."""
    return html.escape(str(value), quote=True)


def number(value: float) -> str:
    """An integer in full, else three digits or more; an exponent only far from 1."""
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    if not 1 <= abs(value) < 1e7:
        return f"{value:.3g}"
    digits = max(0, 3 - len(str(int(abs(value)))))
    return f"{value:,.{digits}f}"


def outcome(name: str) -> Markup:
    """Why there is no number."""
    return Markup(f"<em>{escaped(name)}</em>")


def swatch(name: str, colours: dict[str, str]) -> Markup:
    """An implementation's name beside its colour."""
    colour = colours.get(name)
    mark = f'<i style="background:{colour}"></i>' if colour else ""
    return Markup(f"{mark}{escaped(name)}")


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table that scrolls by itself; closing tags that HTML lets one omit are omitted."""
    heads = "".join(f"<th scope=col>{escaped(name)}" for name in head)
    body = "\n".join("<tr>" + "".join(map(_cell, row)) for row in rows)
    title = f"<caption>{escaped(caption)}</caption>" if caption else ""
    return f"<div class=scroll><table>{title}<thead><tr>{heads}<tbody>\n{body}\n</table></div>\n"


def details(summary: str, content: str, *, opened: bool = False) -> str:
    """A part that unfolds. content is HTML."""
    state = " open" if opened else ""
    return f"<details{state}><summary>{escaped(summary)}</summary>\n{content}</details>\n"


def listing(items: Iterable[str]) -> str:
    """Bullets of plain text."""
    return "<ul>" + "".join(f"<li>{escaped(item)}" for item in items) + "</ul>\n"


def _cell(value: Cell) -> str:
    if value is None:
        return "<td class=n>–"
    if isinstance(value, Markup):
        return f"<td>{value.text}"
    if isinstance(value, str):
        return f"<td>{escaped(value)}"
    return f"<td class=n>{number(value)}"
