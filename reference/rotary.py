"""Rotary embedding of jagged values, and builders of its tables.

Sources: RoFormer, arXiv 2104.09864, equation 34; the table layout (sines first, interleaved pairs)
of the PyTorch blog "TLX Block Attention", 2026; the log-time coordinate of Kunlun, arXiv
2602.10016 (ROTE).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.reference import arguments, costs
from jagbench.rotary import TokenTable
from jagbench.spec import SHARED, Operator

#: Base of the frequencies in RoFormer.
BASE = 10_000.0


def rotary(
    x: Tensor,
    offsets: Tensor,
    table: Tensor | TokenTable,
    *,
    interleaved: bool = True,
    inverse: bool = False,
) -> Tensor:
    """Turn pair i of every head by the angle of its row in the table, written from the equation.

    x `[total, heads, head_dim]`, float64, float32, float16 or bfloat16; offsets `[batch + 1]`. The
    rotation is computed in float32 at least and rounded once.

    table: `[positions, rotary_dim]` by position from the start of each sequence, or a `TokenTable`;
        the first half of its columns are sines, the second cosines; float32 or x's dtype. An even
        rotary_dim below head_dim turns the first rotary_dim elements and leaves the others.
    interleaved: pair i is elements (2 i, 2 i + 1); otherwise (i, i + rotary_dim / 2).
    inverse: turn by the negative angle.

    Returns a tensor like x; (a, b) becomes (a cos - b sin, a sin + b cos), and rows past the last
    offset are 0. Raises ValueError for arguments that do not fit, with their numbers.
    """
    arguments.check_packed("x", x)
    lengths = arguments.packed_lengths("x", x, offsets)
    arguments.check_table("table", table, x, lengths)
    total = sum(lengths)
    turned = [x[:0]]
    for piece, angles in zip(
        torch.split(x[:total], lengths), _by_sequence(table, lengths), strict=True
    ):
        turned.append(_turn(piece, angles, interleaved, inverse))
    return torch.cat([*turned, torch.zeros_like(x[total:])])


def _by_sequence(table: Tensor | TokenTable, lengths: list[int]) -> tuple[Tensor, ...]:
    """The table's rows `[length, rotary_dim]` of every sequence."""
    if isinstance(table, TokenTable):
        return torch.split(table.rows[: sum(lengths)], lengths)
    return tuple(table[:length] for length in lengths)


def _turn(x: Tensor, table: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """One sequence `[rows, heads, head_dim]` turned by a table `[rows, rotary_dim]`."""
    rotary_dim = table.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    sin, cos = table[:, None].to(wide).chunk(2, -1)  # [rows, 1, rotary_dim / 2]
    sin = -sin if inverse else sin
    part = x[..., :rotary_dim].to(wide)
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), x[..., rotary_dim:]], -1)


def frequencies(rotary_dim: int, base: float = BASE) -> Tensor:
    """Angle of each pair at coordinate 1: base^(-2 i / rotary_dim), float64 `[rotary_dim / 2]`."""
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even and at least 2, got {rotary_dim}")
    return base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def angle_table(coordinates: Tensor, rotary_dim: int, base: float = BASE) -> Tensor:
    """Table `[rows, rotary_dim]` in float64 of coordinates `[rows]`: sines, then cosines."""
    angles = coordinates.to(torch.float64)[:, None] * frequencies(rotary_dim, base).to(
        coordinates.device
    )
    return torch.cat([angles.sin(), angles.cos()], 1)


def position_table(positions: int, rotary_dim: int, base: float = BASE) -> Tensor:
    """Table `[positions, rotary_dim]` in float64 whose coordinate is the position."""
    if positions < 0:
        raise ValueError(f"positions must be at least 0, got {positions}")
    return angle_table(torch.arange(positions), rotary_dim, base)


def log_time_table(
    ages: Tensor, rotary_dim: int, *, time_scale: float, base: float = BASE
) -> TokenTable:
    """Table by token, float64, whose coordinate is log(1 + age / time_scale) (Kunlun's ROTE).

    ages: `[total]` of the time between each event and the moment of ranking, at least 0.
    time_scale: above 0, in the unit of the ages.
    """
    if not time_scale > 0:
        raise ValueError(f"time_scale must be above 0, got {time_scale}")
    if ages.numel() and not bool((ages >= 0).all()):
        raise ValueError(f"ages must be at least 0, got {float(ages.min())}")
    return TokenTable(
        angle_table(torch.log1p(ages.to(torch.float64) / time_scale), rotary_dim, base)
    )


def table_dim(table: Tensor | TokenTable) -> int:
    """Elements of a head that a table turns."""
    return int((table.rows if isinstance(table, TokenTable) else table).shape[1])


def rotary_flops(inputs: Inputs) -> int:
    """FLOP of one pass: four products and two sums a pair, 3 rotary_dim a head and row."""
    rows, heads = costs.rows_of(inputs, "offsets"), inputs.tensors()["x"].shape[1]
    return 3 * table_dim(inputs.arguments["table"]) * heads * rows


def rotary_bytes(inputs: Inputs) -> int:
    """Least bytes of one pass: x, the offsets and the table's used rows read, the result written.

    Of a table by position the rows of the longest sequence are used.
    """
    x = inputs.tensors()["x"]
    written = costs.rows_of(inputs, "offsets") * x.shape[1] * x.shape[2] * x.element_size()
    return costs.read_once(inputs, {"table": costs.longest(inputs, "offsets")}) + written


ROTARY = Operator(
    name="rotary",
    reference=rotary,
    layout={"x": "offsets", "table": SHARED, "table.rows": "offsets"},
    output_layout={"out": "offsets"},
    differentiable=("x",),
    flops=rotary_flops,
    bytes_moved=rotary_bytes,
    backward_flops_ratio=1.0,
    model_backward_flops_ratio=1.0,
    unread_in_backward=("x",),
    bandwidth_bound=True,
    paper="arXiv 2104.09864; PyTorch blog 2026, TLX Block Attention; Kunlun, arXiv 2602.10016",
)
