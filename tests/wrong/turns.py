"""The steps of a right block attention and rotary embedding; each may be exchanged.

Values are float32 or wider here, `[rows, heads, dim]`; a table is resolved to angles by row,
`[rows, rotary_dim]`: sines, then cosines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from jagbench.rotary import TokenTable

Table = Tensor | TokenTable


@dataclass(frozen=True)
class Rotation:
    """One rotation: angles by row, the form of the pairs, and rows that are turned at all.

    sign: -1 for the inverse. name: of the argument that is turned.
    """

    angles: Tensor
    interleaved: bool
    sign: int
    total: int
    name: str


def cut(bounds: Sequence[int], block_size: int) -> list[int]:
    """Bounds of the blocks of every sequence, in the packed buffer."""
    ends = [0]
    for start, stop in pairwise(bounds):
        ends += [min(at + block_size, stop) for at in range(start, stop, block_size)]
    return ends


def angles(table: Table, bounds: Sequence[int]) -> Tensor:
    """The table's row of every packed row."""
    if isinstance(table, TokenTable):
        return table.rows[: bounds[-1]]
    counts = [stop - start for start, stop in pairwise(bounds)]
    return torch.cat([table[:0], *(table[:count] for count in counts)])


def turn(x: Tensor, by: Rotation) -> Tensor:
    """Rows `[total, heads, dim]`, every pair turned."""
    sine, cosine = (a[:, None].to(x.dtype) for a in by.angles.tensor_split(2, 1))
    half = sine.shape[-1]
    index = torch.arange(2 * half, device=x.device)
    index = index.view(half, 2).T if by.interleaved else index.view(2, half)
    a, b = x[..., index[0]], x[..., index[1]]
    out = x.clone()
    out[..., index[0]] = cosine * a - by.sign * sine * b
    out[..., index[1]] = cosine * b + by.sign * sine * a
    return out


def turn_back(gradient: Tensor, by: Rotation) -> Tensor:
    """The gradient of `turn` from that of its result."""
    return turn(gradient, Rotation(by.angles, by.interleaved, -by.sign, by.total, by.name))


def check_packed(x: Tensor, offsets: Tensor, table: Table | None) -> None:
    """Raise ValueError, with the numbers, for arguments that do not fit together."""
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(f"want floats of 3 dims, got {x.dtype} of {x.dim()}")
    if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"offsets: {offsets.dim()} dims, {offsets.dtype}")
    if offsets.device != x.device:
        raise ValueError(f"offsets on {offsets.device}, values on {x.device}")
    bounds = offsets.tolist()
    if not bounds or bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > x.shape[0]:
        raise ValueError(f"offsets {bounds} do not fit {x.shape[0]} rows")
    if table is None:
        return
    rows = table.rows if isinstance(table, TokenTable) else table
    least = x.shape[0] if isinstance(table, TokenTable) else max(offsets.diff().tolist(), default=0)
    if rows.dim() != 2 or not rows.is_floating_point() or rows.shape[0] < least:
        raise ValueError(f"a table {tuple(rows.shape)} of {rows.dtype}, want {least} rows")
    if rows.shape[1] not in range(2, x.shape[2] + 1, 2):
        raise ValueError(f"{rows.shape[1]} columns for heads of {x.shape[2]}")
    if rows.requires_grad:
        raise NotImplementedError("a table has no gradient here")


class Turned(torch.autograd.Function):
    """A rotation by two exchangeable steps; rows past the last offset are 0."""

    @staticmethod
    def forward(
        ctx: Any, turn: Callable[..., Tensor], back: Callable[..., Tensor], by: Rotation, x: Tensor
    ) -> Tensor:
        """X turned."""
        ctx.back, ctx.by = back, by
        return _padded(turn(x[: by.total], by), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient turned back."""
        (gradient,) = gradients
        back = _padded(ctx.back(gradient[: ctx.by.total], ctx.by), gradient)
        return None, None, None, back


def _padded(part: Tensor, like: Tensor) -> Tensor:
    out = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    out[: part.shape[0]] = part
    return out
