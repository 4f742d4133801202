"""Device code of products of MX codes, and of the values that a quantisation leaves.

A product decodes tiles of codes to bf16 in registers, or hands codes and scales to the block-scaled
matrix instruction where the architecture has one (compute capabilities 10.0 and 12.0). bf16 holds
an element times its scale exactly (at most 4 significant bits) down to 2^-133, bf16's least
subnormal; beyond, it rounds. Sums are float32 either way. Sources: OCP Microscaling Formats
Specification, version 1.0, section 6.2; PTX ISA, mma with .block_scale and tcgen05.mma.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagbench.impl.kernels.interpreter import dot, round_to, to_float
from jagbench.impl.kernels.mx_kernels import (
    _ABSOLUTE,
    _block_maxima,
    _codes,
    _draws,
    _elements,
    _scale_codes,
    _scaled,
    _turn,
)

#: Arguments for whose values no kernel is compiled anew. Sizes of a product are none of them: masks
#: at multiples of 16 leave loads of 16 bytes whole.
PRODUCT_COUNTS = ["run", "row_tiles", "column_tiles", "runs"]
ROUND_COUNTS = ["used", "rows", "column_tiles", "seed_low", "seed_high", "turn_low", "turn_high"]


@triton.jit
def _values(
    codes, scale, MANTISSA: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr,
    LARGEST: tl.constexpr, HAS_INFINITY: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Values of codes (uint8 tile) under the scale codes of their blocks (int32), bf16.

    CAST: by the conversion of compute capability 8.9 and later, for the 8-bit types.
    """
    if CAST and MANTISSA == 3:
        elements = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif CAST and MANTISSA == 2:
        elements = codes.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        elements = _elements(codes, MANTISSA, BIAS, WIDTH, LARGEST, HAS_INFINITY)
    return round_to(_scaled(elements, scale, False), tl.bfloat16)


@triton.jit
def _as_e4m3(codes):
    """Codes of E2M1 as those of the same values in E4M3."""
    magnitude = codes & 7
    wide = tl.where(magnitude > 1, (magnitude << 2) + 48, magnitude * 48)
    return (wide | ((codes & 8) << 4)).to(tl.uint8)


@triton.jit(do_not_specialize=PRODUCT_COUNTS)
def mx_product_kernel(
    a, a_scales, b, b_scales, out, bias, rows, columns, depth, run, row_tiles, column_tiles, runs,
    a_batch, a_row, a_depth, as_batch, as_row, as_depth,
    b_batch, b_column, b_depth, bs_batch, bs_column, bs_depth, out_batch, out_run,
    A_TALL: tl.constexpr, B_TALL: tl.constexpr,
    A_MANTISSA: tl.constexpr, A_BIAS: tl.constexpr, A_WIDTH: tl.constexpr, A_LARGEST: tl.constexpr,
    A_INFINITY: tl.constexpr, B_MANTISSA: tl.constexpr, B_BIAS: tl.constexpr,
    B_WIDTH: tl.constexpr, B_LARGEST: tl.constexpr, B_INFINITY: tl.constexpr,
    NATIVE: tl.constexpr, CAST: tl.constexpr, EVEN: tl.constexpr, FAR: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out = a b^T + bias of codes a `[rows, depth]`, b `[columns, depth]`, over a run of the depth.

    Scales: a code for every 32 of the depth and every A_TALL rows (B_TALL columns). out: contiguous
    `[rows, columns]` at a batch's and a run's place; bias `[columns]` or None. run: a multiple of
    DEPTH. EVEN: depth is one too. FAR: places within a tile need 64 bits. Tiles of one block of
    rows follow each other.
    """
    program = tl.program_id(0)
    tile = program // column_tiles
    first_column = (program - tile * column_tiles) * COLUMNS
    part = tile // row_tiles
    first_row = (tile - part * row_tiles) * ROWS
    batch = (part // runs).to(tl.int64)
    part = part % runs
    # Loads of 16 bytes need to know it.
    begin = tl.multiple_of(part * run, DEPTH)
    PLACE: tl.constexpr = tl.int64 if FAR else tl.int32
    row = tl.arange(0, ROWS).to(PLACE)
    column = tl.arange(0, COLUMNS).to(PLACE)
    inner = tl.arange(0, DEPTH).to(PLACE)
    block = tl.arange(0, DEPTH // 32).to(PLACE)
    step = tl.full([], DEPTH, PLACE)
    row_seen = (first_row + row < rows)[:, None]
    column_seen = (first_column + column < columns)[:, None]
    a += batch * a_batch + first_row.to(tl.int64) * a_row + begin.to(tl.int64) * a_depth
    b += batch * b_batch + first_column.to(tl.int64) * b_column + begin.to(tl.int64) * b_depth
    first_row_block = (first_row // A_TALL).to(tl.int64)
    first_column_block = (first_column // B_TALL).to(tl.int64)
    first_block = (begin // 32).to(tl.int64)
    a_scales += batch * as_batch + first_row_block * as_row + first_block * as_depth
    b_scales += batch * bs_batch + first_column_block * bs_column + first_block * bs_depth
    a_place = row[:, None] * a_row + inner[None, :] * a_depth
    b_place = column[:, None] * b_column + inner[None, :] * b_depth
    as_place = (row // A_TALL)[:, None] * as_row + block[None, :] * as_depth
    bs_place = (column // B_TALL)[:, None] * bs_column + block[None, :] * bs_depth
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for k in range(begin, tl.minimum(begin + run, depth), DEPTH):
        if EVEN:
            a_codes = tl.load(a + a_place, mask=row_seen, other=0)
            b_codes = tl.load(b + b_place, mask=column_seen, other=0)
            a_scale = tl.load(a_scales + as_place, mask=row_seen, other=127)
            b_scale = tl.load(b_scales + bs_place, mask=column_seen, other=127)
        else:
            there = (k + inner < depth)[None, :]
            known = (k + block * 32 < depth)[None, :]
            a_codes = tl.load(a + a_place, mask=row_seen & there, other=0)
            b_codes = tl.load(b + b_place, mask=column_seen & there, other=0)
            # 0 times NaN is no 0: blocks that are not there have scale 1.
            a_scale = tl.load(a_scales + as_place, mask=row_seen & known, other=127)
            b_scale = tl.load(b_scales + bs_place, mask=column_seen & known, other=127)
        if NATIVE:
            a_codes = _as_e4m3(a_codes) if A_WIDTH == 4 else a_codes
            b_codes = _as_e4m3(b_codes) if B_WIDTH == 4 else b_codes
            acc = tl.dot_scaled(
                a_codes, a_scale, "e5m2" if A_MANTISSA == 2 else "e4m3",
                tl.trans(b_codes), b_scale, "e5m2" if B_MANTISSA == 2 else "e4m3", acc,
            )  # fmt: skip
        else:
            left = _values(a_codes, a_scale.to(tl.int32), A_MANTISSA, A_BIAS, A_WIDTH, A_LARGEST,
                           A_INFINITY, CAST)  # fmt: skip
            right = _values(b_codes, b_scale.to(tl.int32), B_MANTISSA, B_BIAS, B_WIDTH, B_LARGEST,
                            B_INFINITY, CAST)  # fmt: skip
            acc = dot(left, tl.trans(right), acc)
        a += step * a_depth
        b += step * b_depth
        a_scales += step // 32 * as_depth
        b_scales += step // 32 * bs_depth
    seen = (first_column + column < columns)[None, :]
    if bias is not None:
        at = bias + first_column + column
        acc += to_float(tl.load(at, mask=first_column + column < columns, other=0.0))[None, :]
    out += batch * out_batch + part.to(tl.int64) * out_run
    out += first_row.to(tl.int64) * columns + first_column
    to = out + (row[:, None] * columns + column[None, :])
    tl.store(to, round_to(acc, out.dtype.element_ty), mask=row_seen & seen)


@triton.jit(do_not_specialize=ROUND_COUNTS)
def mx_round_kernel(
    x, out, sums, used, rows, columns, column_tiles, x_row,
    seed_low, seed_high, turn_low, turn_high,
    BR: tl.constexpr, BC: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    WIDTH: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr, CARRY: tl.constexpr,
    TOP: tl.constexpr, CONVERT: tl.constexpr, CAST: tl.constexpr, STREAM: tl.constexpr,
    HADAMARD: tl.constexpr, ROOT: tl.constexpr, SIGNS: tl.constexpr, HAS_INFINITY: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out bf16, contiguous `[rows, columns]`: x quantised and dequantised, in one pass over it.

    The codes are those of `mx_quantize_kernel`, and go nowhere. x `[used, columns]`; rows from
    `used` on are 0 before the transform. A program takes STEPS tiles, one below the other; sums:
    fp32 `[programs down, columns]`, what they add up to before they are quantised, or None. Other
    constants as there.
    """
    program = tl.program_id(0)
    tile = program // column_tiles
    column = (program - tile * column_tiles) * COLUMNS
    each = column + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for step in range(0, STEPS):
        row = (tile * STEPS + step).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        seen = (row < used)[:, None] & (each < columns)[None, :]
        values = to_float(tl.load(x + row[:, None] * x_row + each[None, :], mask=seen, other=0.0))
        if sums is not None:
            total += tl.sum(values, 0)
        if HADAMARD > 0:
            if BR > 1:
                values = tl.trans(values)
            values = _turn(values, turn_low, turn_high, SIGNS, HADAMARD, ROOT)
            if BR > 1:
                values = tl.trans(values)
        largest = _block_maxima(values.to(tl.int32, bitcast=True) & _ABSOLUTE, BR, BC)
        scale = _scale_codes(largest, CARRY, TOP)
        random = None
        if STREAM is not None:
            random = _draws(row, column, seed_low, seed_high, STREAM, COLUMNS)
        codes = _codes(values, scale, random, MANTISSA, BIAS, WIDTH, LARGEST, NAN, CONVERT)
        found = _values(codes, scale, MANTISSA, BIAS, WIDTH, LARGEST, HAS_INFINITY, CAST)
        inside = (row < rows)[:, None] & (each < columns)[None, :]
        tl.store(out + row[:, None] * columns + each[None, :], found, mask=inside)
    if sums is not None:
        tl.store(sums + tile.to(tl.int64) * columns + each, total, mask=each < columns)
