"""Rotary embedding as an operator of its own: custom op, autograd, public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from jagbench.impl.kernels.arguments import kernel_layout
from jagbench.impl.kernels.attention_launch import require_device
from jagbench.impl.kernels.operators import define, differentiable
from jagbench.impl.kernels.packed_arguments import (
    check_packed_offsets,
    check_values_of_offsets,
    table_argument,
    table_layout,
)
from jagbench.impl.kernels.rotation import rotary_kernel
from jagbench.impl.kernels.schedule import build_tile_list
from jagbench.impl.kernels.tuning import padded
from jagbench.rotary import TokenTable

NAME = "rotary"
_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
# Elements of a tile, of which a program turns one a head, and warps of a program. Not swept yet.
_TILE, _MOST_ROWS, _WARPS = 4096, 64, 4


def rotary(
    x: Tensor,
    offsets: Tensor,
    table: Tensor | TokenTable,
    *,
    interleaved: bool = True,
    inverse: bool = False,
) -> Tensor:
    """Turn pair i of every head by the angle of its row in the table; fp32 inside, rounded once.

    x `[total, heads, head_dim]`, float32, float16 or bfloat16, any row and head stride; offsets
    `[batch + 1]`, int32 or int64.

    table: `[positions, rotary_dim]` by position from the start of each sequence, or a `TokenTable`;
        sines in the first half of its columns, cosines in the second; float32 or x's dtype.
    interleaved: pair i is elements (2 i, 2 i + 1); otherwise (i, i + rotary_dim / 2).
    inverse: turn by the negative angle.

    Returns a contiguous tensor like x; rows past the last offset are not read, and 0. Raises
    ValueError for malformed arguments, NotImplementedError for other dtypes, heads wider than 256
    and a gradient of the table. Source: RoFormer, arXiv 2104.09864, equation 34.
    """
    check_packed_offsets(NAME, "x", x, offsets)
    if x.dim() != 3 or 0 in x.shape[1:]:
        raise ValueError(f"{NAME}: x must be [rows, heads, head_dim], got shape {tuple(x.shape)}")
    if x.dtype == torch.float64:
        raise NotImplementedError(f"{NAME}: no kernel computes float64")
    if x.dtype not in _FLOAT_TYPES:
        raise ValueError(f"{NAME}: x {tuple(x.shape)} must be of float dtype, got {x.dtype}")
    if x.shape[2] > 256:
        raise NotImplementedError(f"{NAME}: head dims 1 to 256 are supported, got {x.shape[2]}")
    rows, by_token = table_argument(NAME, "table", table, x)
    out: Tensor = _differentiable_op(
        x, offsets.contiguous(), rows, by_token, bool(interleaved), bool(inverse)
    )
    return out


def _turn(
    x: Tensor, offsets: Tensor, table: Tensor, by_token: bool, interleaved: bool, inverse: bool
) -> Tensor:
    """Arguments as `rotary` has checked them; only the offsets' values are not yet."""
    require_device(NAME, x)
    check_values_of_offsets(NAME, offsets, x.shape[0], table, by_token)
    x, table = kernel_layout(x), table_layout(table)
    total, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = tile_rows(dim)
    with torch.cuda.device_of(x):
        items = build_tile_list(offsets, None, total, rows)
        if items.upper:
            rotary_kernel[(items.upper,)](
                x, out, table, offsets, items.sequence, items.block, items.count,
                offsets.shape[0] - 1, total, heads, -1.0 if inverse else 1.0,
                *x.stride()[:2], table.stride(0),
                D=dim, BLOCK_D=padded(dim), ROWS=rows, ROTARY_DIM=table.shape[1],
                INTERLEAVED=interleaved, BY_TOKEN=by_token, num_warps=_WARPS,
            )  # fmt: skip
    return out


def tile_rows(dim: int) -> int:
    """Rows a program turns, a power of two."""
    return min(_MOST_ROWS, _TILE // padded(dim))


def _fake(
    x: Tensor, offsets: Tensor, table: Tensor, by_token: bool, interleaved: bool, inverse: bool
) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, offsets, table, *options = inputs
    ctx.save_for_backward(offsets, table)
    ctx.options = options


def _autograd(ctx: Any, wanted: tuple[bool, ...], d_out: Tensor) -> tuple[Any, ...]:
    by_token, interleaved, inverse = ctx.options
    dx = _op(d_out, *ctx.saved_tensors, by_token, interleaved, not inverse) if wanted[0] else None
    return (dx, *(None,) * 5)


_op = define("rotary", _turn, _fake)
_differentiable_op = differentiable(_op, _setup, _autograd)


@register_flop_formula(torch.ops.jagbench.rotary, get_raw=True)
def _flops(x: Any, offsets: Any, table: Any, *args: Any, **kwargs: Any) -> int:
    return int(3 * table.shape[1] * x.shape[1] * int(offsets[-1]))
