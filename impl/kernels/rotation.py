"""Rotary embedding: device functions that turn a tile on chip, and the operator's own kernel.

A pair of neighbours is taken apart and put together again in registers (reshape, split, join): a
thread holds several neighbours of a row, so nothing moves between threads.
"""

import triton
import triton.language as tl

from jagbench.impl.kernels.interpreter import round_to, to_float
from jagbench.impl.kernels.tiles import load_rows, sequence_rows, store_rows


@triton.jit
def load_angles(
    table,
    first,
    count,
    row_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
):
    """Sines and cosines, fp32 `[ROWS, BLOCK / 2]`, of rows [first, first + ROWS).

    table: pointer to the row of the sequence's first token. Rows at or past `count` and pairs past
    the table's have the angle 0, and are never read.
    """
    start = table + first.to(tl.int64) * row_stride
    r = tl.arange(0, ROWS)
    pair = tl.arange(0, BLOCK // 2)
    inside = (first + r < count)[:, None] & (pair < ROTARY_DIM // 2)[None, :]
    at = start + (r[:, None] * row_stride + pair[None, :])
    sin = to_float(tl.load(at, mask=inside, other=0.0))
    cos = to_float(tl.load(at + ROTARY_DIM // 2, mask=inside, other=0.0))
    return sin, tl.where(inside, cos, 1.0)


@triton.jit
def turn(x, sin, cos, ROWS: tl.constexpr, BLOCK: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """Neighbours (a, b) of an fp32 tile become (a cos - b sin, a sin + b cos)."""
    a, b = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
    turned = tl.join(a * cos - b * sin, a * sin + b * cos)
    turned = tl.reshape(turned, [ROWS, BLOCK])
    if ROTARY_DIM < BLOCK:
        # Elements that are not turned keep their bits, whatever their neighbours hold.
        turned = tl.where((tl.arange(0, BLOCK) < ROTARY_DIM)[None, :], turned, x)
    return turned


@triton.jit
def table_of(table, begin, table_row, BY_TOKEN: tl.constexpr):
    """Pointer to the angle of a sequence's first token: its own row, or that of position 0."""
    if BY_TOKEN:
        table = table + begin * table_row
    return table


@triton.jit
def angles_of(
    table,
    begin,
    first,
    count,
    row_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    """As `load_angles`, of a sequence that begins at row `begin`.

    Where nothing is turned (ROTARY_DIM 0; the table may be None): two numbers that nobody reads.
    """
    if ROTARY_DIM > 0:
        angles = table_of(table, begin, row_stride, BY_TOKEN)
        sin, cos = load_angles(angles, first, count, row_stride, ROWS, BLOCK, ROTARY_DIM)
    else:
        sin = 0.0
        cos = 1.0
    return sin, cos


@triton.jit
def turned_rows(
    base,
    first,
    count,
    row_stride,
    sin,
    cos,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    eps,
    NORM: tl.constexpr,
):
    """As `load_rows`; normalised (NORM) and turned in fp32, and rounded once to its dtype.

    ROTARY_DIM 0 turns nothing. sin, cos: of these rows (`angles_of`).
    """
    x = load_rows(base, first, count, row_stride, ROWS, COLUMNS, BLOCK)
    wide = to_float(x)
    if NORM:
        wide = wide * head_factor(wide, eps, COLUMNS)[:, None]
    if ROTARY_DIM > 0:
        wide = turn(wide, sin, cos, ROWS, BLOCK, ROTARY_DIM)
    if NORM or ROTARY_DIM > 0:
        x = round_to(wide, base.dtype.element_ty)
    return x


@triton.jit
def head_factor(x, eps, COLUMNS: tl.constexpr):
    """1 / root mean square of fp32 heads, eps under the root; 1 where that would be 1 / 0."""
    square = tl.sum(x * x, 1) / COLUMNS + eps
    return 1.0 / tl.sqrt(tl.where(square == 0.0, 1.0, square))


@triton.jit
def through_head_norm(gradient, x, eps, COLUMNS: tl.constexpr):
    """The gradient of fp32 heads x from that of their normalised form."""
    factor = head_factor(x, eps, COLUMNS)[:, None]
    unit = x * factor
    along = tl.sum(gradient * unit, 1) / COLUMNS
    return (gradient - unit * along[:, None]) * factor


@triton.jit
def store_turned_back(
    base,
    first,
    end,
    row_stride,
    x,
    sin,
    cos,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    count,
    raw,
    raw_row,
    eps,
    NORM: tl.constexpr,
):
    """Turn an fp32 gradient by the negative angle, round it once and store it as `store_rows` does.

    sin, cos: of these rows; end: rows to store. NORM: the `count` rows at `raw` were normalised
    before they were turned, and the gradient goes back through that norm too.
    """
    if ROTARY_DIM > 0:
        x = turn(x, -sin, cos, ROWS, BLOCK, ROTARY_DIM)
    if NORM:
        given = load_rows(raw, first, count, raw_row, ROWS, COLUMNS, BLOCK)
        x = through_head_norm(x, to_float(given), eps, COLUMNS)
    x = round_to(x, base.dtype.element_ty)
    store_rows(base, first, end, row_stride, x, ROWS, COLUMNS, BLOCK)


@triton.jit
def _turn_halves(
    x, out, first, count, end, x_row, out_row, sin, cos,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROTARY_DIM: tl.constexpr,
):  # fmt: skip
    """Rows whose pairs lie ROTARY_DIM / 2 apart: the halves are loaded and stored apart."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    DTYPE: tl.constexpr = out.dtype.element_ty
    a = to_float(load_rows(x, first, count, x_row, ROWS, HALF, BLOCK // 2))
    b = to_float(load_rows(x + HALF, first, count, x_row, ROWS, HALF, BLOCK // 2))
    low, high = round_to(a * cos - b * sin, DTYPE), round_to(a * sin + b * cos, DTYPE)
    store_rows(out, first, end, out_row, low, ROWS, HALF, BLOCK // 2)
    store_rows(out + HALF, first, end, out_row, high, ROWS, HALF, BLOCK // 2)
    if ROTARY_DIM < D:
        rest = load_rows(x + ROTARY_DIM, first, count, x_row, ROWS, D - ROTARY_DIM, BLOCK)
        store_rows(out + ROTARY_DIM, first, end, out_row, rest, ROWS, D - ROTARY_DIM, BLOCK)


@triton.jit(do_not_specialize=["batch", "total", "heads", "sign"])
def rotary_kernel(
    x, out, table, offsets, tile_sequence, tile_block, tile_count, batch, total, heads, sign,
    x_row, x_head, table_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Turn ROWS rows of one sequence, all heads, so that their angles are loaded once.

    x: any row and head stride; out: contiguous `[total, heads, D]`, padding rows 0. sign: 1.0, or
    -1.0 for the inverse.
    """
    index = tl.program_id(0)
    if index >= tl.load(tile_count):
        return
    sequence, block = tl.load(tile_sequence + index), tl.load(tile_block + index)
    begin, length = sequence_rows(offsets, sequence, batch, total)
    first = block * ROWS
    count = tl.where(sequence < batch, length, 0)
    out_row = heads * D
    angles = table_of(table, begin, table_row, BY_TOKEN)
    sin, cos = load_angles(angles, first, count, table_row, ROWS, BLOCK_D, ROTARY_DIM)
    sin = sin * sign
    own = x + begin * x_row
    to = out + begin * out_row
    for _ in range(heads):
        if INTERLEAVED:
            tile = load_rows(own, first, count, x_row, ROWS, D, BLOCK_D)
            turned = turn(to_float(tile), sin, cos, ROWS, BLOCK_D, ROTARY_DIM)
            turned = round_to(turned, out.dtype.element_ty)
            store_rows(to, first, length, out_row, turned, ROWS, D, BLOCK_D)
        else:
            _turn_halves(
                own, to, first, count, length, x_row, out_row, sin, cos,
                ROWS, D, BLOCK_D, ROTARY_DIM,
            )  # fmt: skip
        own += x_head
        to += D
