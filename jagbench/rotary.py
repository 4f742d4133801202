"""Rotary tables: the sines and cosines by which an operator turns the pairs of a head.

A table holds `rotary_dim` columns: the first half sines, the second half cosines, column i of each
for pair i. A tensor `[positions, rotary_dim]` is a table by position, counted from the start of
each sequence; a `TokenTable` has a row for every token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenTable:
    """A rotary table by token: where the angle hangs on an event's time and not on its position.

    rows: `[total, rotary_dim]`, packed as the values it turns, padding rows included; float32 or
        the values' dtype.
    """

    rows: Tensor
