"""What the harness may ask of our kernels beyond the operators: their tiles, and to pin others."""

from __future__ import annotations

from collections.abc import Mapping

from jagbench.impl.kernels.tuning import pin_tiles, take_used
from jagbench.inputs import Inputs


def configuration(operator: str, inputs: Inputs) -> Mapping[str, str]:
    """Tiles of every kernel launched since this was last asked, for a record."""
    return take_used()


def pin(choices: Mapping[str, str]) -> None:
    """Pin tiles in place of the table's; see `pin_tiles`."""
    pin_tiles(choices)
