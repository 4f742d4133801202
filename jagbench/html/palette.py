"""One colour for one implementation, everywhere in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: Okabe and Ito's colours without black and yellow (unseen on dark and on white paper), then Tol's
#: muted ones: told apart with the common colour-vision deficiencies, on light and on dark.
COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9",
    "#8c7ae6", "#999933", "#aa4466", "#44aa99", "#7f7f7f", "#b07d3c",
)  # fmt: skip


def colours(implementations: Sequence[str]) -> Mapping[str, str]:
    """Name -> colour in the order given; they repeat after the twelfth."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(implementations)}
