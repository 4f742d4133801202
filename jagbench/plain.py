"""Text of others as one harmless line: what a record or an error holds may come from a stranger."""

from __future__ import annotations

import unicodedata

#: Controls, lone surrogates (no terminal can encode them), separators of lines and paragraphs.
_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
#: Marks that reorder what follows: embeddings, overrides and isolates.
_REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def safe(text: str) -> str:
    """The text on one line, with a space for all that moves a cursor or reorders what is shown.

    Other Unicode stays as it is.
    """
    return "".join(
        " " if c in _REORDERING or unicodedata.category(c) in _CATEGORIES else c for c in text
    )
