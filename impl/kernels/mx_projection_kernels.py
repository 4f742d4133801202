"""Device code of a linear layer whose accumulator is quantised before it leaves the registers.

The product is that of any linear layer, bf16 or fp16 with float32 sums; its epilogue is the code of
`mx_kernels`, on the float32 accumulator. So a result of 16 bits is neither written nor read. Tiles
are multiples of 32 in both dims: a block lies in one tile. Squares of a jagged tensor begin with
each sequence, so a tile of rows is made of blocks that are found one by one (bisection of the
offsets, as there, of several blocks at a time); a tile may hold blocks of several sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagbench.impl.kernels.interpreter import dot, to_float
from jagbench.impl.kernels.mx_kernels import (
    _ABSOLUTE,
    _block_maxima,
    _codes,
    _scale_codes,
    _store_scales,
)

#: Arguments for whose values no kernel is compiled anew.
PROJECTION_COUNTS = ["rows", "end", "scale_rows", "batch", "steps", "column_tiles"]


@triton.jit
def _rows_of_blocks(offsets, block, batch, steps, end):
    """As `_rows_of_block` of `mx_kernels`, for several blocks: first row, end of data, end of rows.

    steps: halvings that single out one of batch + 1 sequences.
    """
    low = tl.zeros(block.shape, dtype=tl.int32)
    high = low + batch
    for _ in range(0, steps):
        middle = (low + high + 1) // 2
        before = tl.load(offsets + middle).to(tl.int64) // 32 + middle
        low = tl.where(before <= block, middle, low)
        high = tl.where(before <= block, high, middle - 1)
    start = tl.load(offsets + low).to(tl.int64)
    inside = low < batch
    stop = tl.load(offsets + low + 1, mask=inside, other=0).to(tl.int64)
    first = start + 32 * (block - start // 32 - low)
    return first, tl.where(inside, stop, 0), tl.where(inside, stop, end)


@triton.jit
def _each_row(of_blocks, step, ROWS: tl.constexpr):
    """A number of every block of 32 rows, plus step times the row within it, `[ROWS]`."""
    own = of_blocks[:, None] + step * tl.arange(0, 32)[None, :]
    return tl.reshape(own, [ROWS])


@triton.jit
def _rows(
    offsets, tile, batch, steps, rows, end, TALL: tl.constexpr, JAGGED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of a tile (int64 `[ROWS]`), which have data, and which are written."""
    if TALL and JAGGED:
        block = tile.to(tl.int64) * (ROWS // 32) + tl.arange(0, ROWS // 32)
        first, used, stop = _rows_of_blocks(offsets, block, batch, steps, end)
        row = _each_row(first, 1, ROWS)
        seen = row < _each_row(used, 0, ROWS)
        written = row < _each_row(stop, 0, ROWS)
    else:
        row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        last = tl.zeros([], dtype=tl.int64) + rows
        if JAGGED:
            last = tl.load(offsets + batch).to(tl.int64)
        seen = row < last
        written = row < rows
    return row, seen, written


@triton.jit(do_not_specialize=PROJECTION_COUNTS)
def mx_projection_kernel(
    x, weight, bias, codes, scales, offsets, rows, end, columns, features, scale_rows, batch, steps,
    column_tiles, x_row, weight_row, scales_row,
    BR: tl.constexpr, BC: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    WIDTH: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr, CARRY: tl.constexpr,
    TOP: tl.constexpr, CONVERT: tl.constexpr, SWIZZLED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Codes (contiguous `[rows, columns]`) and scales of x weight^T + bias, a tile a program.

    x `[rows, features]` and weight `[columns, features]` of one dtype, features side by side; bias
    `[columns]` or None. offsets: `[batch + 1]` or None; steps as `_rows_of_blocks` has them. EVEN:
    DEPTH divides features. SWIZZLED: of consecutive rows alone. Tiles of one block of rows follow
    each other, so that x comes from memory once. Format constants as in `mx_quantize_kernel`.
    """
    JAGGED: tl.constexpr = offsets is not None
    program = tl.program_id(0)
    tile = program // column_tiles
    first_column = (program - tile * column_tiles) * COLUMNS
    row, seen, written = _rows(offsets, tile, batch, steps, rows, end, BR > 1, JAGGED, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    there = column < columns
    inner = tl.arange(0, DEPTH)
    left = x + row[:, None] * x_row + inner[None, :]
    right = weight + column.to(tl.int64)[:, None] * weight_row + inner[None, :]
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for k in range(0, features, DEPTH):
        if EVEN:
            x_tile = tl.load(left, mask=seen[:, None], other=0.0)
            weight_tile = tl.load(right, mask=there[:, None], other=0.0)
        else:
            known = (k + inner < features)[None, :]
            x_tile = tl.load(left, mask=seen[:, None] & known, other=0.0)
            weight_tile = tl.load(right, mask=there[:, None] & known, other=0.0)
        acc = dot(x_tile, tl.trans(weight_tile), acc)
        left += DEPTH
        right += DEPTH
    if bias is not None:
        acc += to_float(tl.load(bias + column, mask=there, other=0.0))[None, :]
    # Neither a bias nor 0 times an infinite weight counts for the scale of a short block.
    acc = tl.where(seen[:, None] & there[None, :], acc, 0.0)
    largest = _block_maxima(acc.to(tl.int32, bitcast=True) & _ABSOLUTE, BR, BC)
    scale = _scale_codes(largest, CARRY, TOP)
    found = _codes(acc, scale, None, MANTISSA, BIAS, WIDTH, LARGEST, NAN, CONVERT)
    to = codes + row[:, None] * columns + column[None, :]
    tl.store(to, found, mask=written[:, None] & there[None, :])
    first = tile.to(tl.int64) * ROWS
    used = tl.zeros([], dtype=tl.int64) + rows
    if JAGGED and SWIZZLED:
        used = tl.load(offsets + batch).to(tl.int64)
    _store_scales(
        scales, scale, first, end, used, tile, first_column, columns, scale_rows, scales_row,
        BR, BC, ROWS, COLUMNS, SWIZZLED,
    )  # fmt: skip
