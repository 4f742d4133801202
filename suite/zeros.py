"""Rows that take part in nothing: padding, queries that see no key, keys that no query sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from jagbench.execution import Outcome
from jagbench.inputs import Inputs
from jagbench.pairs import visible_range
from jagbench.spec import PAIRS, PLACED, SHARED
from jagbench.suite import changes, shapes


def takes_part(inputs: Inputs) -> dict[str, Tensor]:
    """Offsets argument -> bool `[rows]`: whether a row is in any visible pair.

    A dense argument has no entry. Under one offsets argument every row sees itself. No mask is
    built: a query sees a range of keys, and a key is seen by a range of queries.
    """
    if not shapes.has_keys(inputs.operator):
        names = inputs.operator.offsets_arguments
        given = [name for name in names if inputs.offsets(name) is not None]
        return {name: ~_is_padding(inputs, name) for name in given}
    t, options = inputs.tensors(), inputs.options
    left, right = visible_range(bool(options.get("causal")), options.get("window"))
    k_lengths = t["k_offsets"].diff().long()
    dense = "q_offsets" not in t
    q_lengths = (
        torch.full_like(k_lengths, t["q"].shape[0]) if dense else t["q_offsets"].diff().long()
    )
    shift = torch.zeros_like(k_lengths)
    if options.get("align", "end") == "end":
        shift = k_lengths - q_lengths
    beyond = _Beyond(q_lengths, k_lengths, shift, options)
    keys = _reached(t["k_offsets"], t["k"].shape[0], q_lengths, -shift, right, left)
    seen = {"k_offsets": keys | _where(t["k_offsets"], t["k"].shape[0], beyond.keys)}
    if not dense:
        rows = t["q"].shape[0]
        queries = _reached(t["q_offsets"], rows, k_lengths, shift, left, right)
        seen["q_offsets"] = queries | _where(t["q_offsets"], rows, beyond.queries)
    if inputs.operator.residual:
        seen["q_offsets"] = ~_is_padding(inputs, "q_offsets")
    return seen


class _Beyond:
    """Which rows meet another by a call's prefix or by its last queries."""

    def __init__(
        self, q_lengths: Tensor, k_lengths: Tensor, shift: Tensor, options: Mapping[str, Any]
    ) -> None:
        self.m, self.n, self.shift = q_lengths, k_lengths, shift
        self.causal = bool(options.get("causal"))
        self.prefix: int = options.get("prefix", 0)
        self.last_full: int = options.get("last_full", 0)

    def queries(self, row: Tensor, s: Tensor) -> Tensor:
        """Of queries at a position of sequence s: all that have a context, and last ones."""
        last = row >= self.m[s] - self.last_full
        if self.causal:
            last = last & (row + self.shift[s] >= 0)
        return (self.n[s] > 0) & (last | (self.prefix > 0))

    def keys(self, key: Tensor, s: Tensor) -> Tensor:
        """Of keys: the context, all if a query belongs to it, and those of the last query."""
        m, shift = self.m[s], self.shift[s]
        some = (-shift).clamp(min=0) < (self.prefix - shift).minimum(m)
        last = torch.full_like(some, self.last_full > 0)
        if self.causal:
            last = last & (key < m + shift)
        return (m > 0) & ((key < self.prefix) | some | last)


def _where(offsets: Tensor, rows: int, holds: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Bool `[rows]`: what holds of (position, sequence) of each row; false for padding."""
    sequence, position = _places(offsets)
    found = torch.zeros(rows, dtype=torch.bool, device=offsets.device)
    found[: len(sequence)] = holds(position, sequence)
    return found


def _places(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence of every row, and its position there."""
    lengths = offsets.diff().long()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)
    rows = torch.arange(len(sequence), device=offsets.device)
    return sequence, rows - offsets[:-1].long()[sequence]


def _is_padding(inputs: Inputs, layout: str) -> Tensor:
    """Whether a row lies past the last offset, `[rows]`."""
    offsets = inputs.offsets(layout)
    assert offsets is not None
    names = inputs.operator.layout
    rows = next(t.shape[0] for n, t in inputs.tensors().items() if names.get(n) == layout)
    return torch.arange(rows, device=offsets.device) >= int(offsets[-1])


def _reached(
    offsets: Tensor, rows: int, others: Tensor, shift: Tensor, below: int | None, above: int | None
) -> Tensor:
    """Whether row i meets any j in [i + shift - below, i + shift + above], 0 <= j < others."""
    sequence, position = _places(offsets)
    middle, limit = position + shift[sequence], others[sequence]
    low = torch.zeros_like(middle) if below is None else (middle - below).clamp(min=0)
    high = limit if above is None else (middle + above + 1).minimum(limit)
    reached = torch.zeros(rows, dtype=torch.bool, device=offsets.device)
    reached[: len(sequence)] = low < high
    return reached


def strays(inputs: Inputs, outcome: Outcome) -> list[str]:
    """What of an outcome should be exactly 0 (or -inf, in a log-sum-exp) and is not, in words."""
    found, seen = [], takes_part(inputs)
    for name, tensor in outcome.items():
        layout = changes.layout_of(inputs, name.removeprefix("grad "))
        if layout in (PAIRS, SHARED) or layout not in seen:
            continue
        idle = ~seen[layout]
        codes = inputs.operator.codes is not None
        if name == "out" or codes or name.startswith("grad "):
            found += nonzero(name, tensor, idle)
        else:
            found += _not_minus_infinity(name, tensor, idle, inputs, layout)
    return found


def nonzero(name: str, tensor: Tensor, rows: Tensor) -> list[str]:
    """The first element of some rows that is not 0, in words; none if all are."""
    if tensor.shape[0] != rows.shape[0]:
        return [f"{name} has {tensor.shape[0]} rows, want {rows.shape[0]}"]
    wrong = rows.nonzero()[:, 0]
    wrong = wrong[(tensor[wrong] != 0).flatten(1).any(1)]
    if not len(wrong):
        return []
    row = int(wrong[0])
    value = float(tensor[row].flatten()[(tensor[row] != 0).flatten().nonzero()[0, 0]])
    return [f"{name} holds {value} in row {row}, which takes part in nothing and must be exactly 0"]


def _not_minus_infinity(
    name: str, tensor: Tensor, idle: Tensor, inputs: Inputs, layout: str
) -> list[str]:
    offsets = inputs.offsets(layout)
    assert offsets is not None
    end = int(offsets[-1])
    wrong = (idle[:end, None] & (tensor[:end] != -math.inf)).nonzero()
    found = (
        []
        if not len(wrong)
        else [f"{name} of row {int(wrong[0, 0])}, which sees nothing, is not -inf"]
    )
    padding = torch.arange(tensor.shape[0], device=tensor.device) >= end
    return found + nonzero(name, tensor, padding)


def of_padding(inputs: Inputs, outcome: Mapping[str, Tensor]) -> list[str]:
    """What of an outcome is not 0 past the last offset, in words."""
    found = []
    for name, tensor in outcome.items():
        layout = changes.layout_of(inputs, name.removeprefix("grad "))
        # Rows that an operator places are the judge's to look at.
        if layout not in (PAIRS, PLACED, SHARED):
            offsets = inputs.offsets(layout)
            assert offsets is not None
            rows = torch.arange(tensor.shape[0], device=tensor.device) >= int(offsets[-1])
            found += nonzero(f"{name} past the last offset", tensor, rows)
    return found
