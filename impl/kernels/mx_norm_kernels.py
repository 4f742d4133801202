"""Device code of a norm whose result is quantised at once, and of the norm's gradient.

A program has whole rows. Where they fit into its registers they are read once: statistics from the
registers, then the codes (`WHOLE`); wider rows are read twice, column tile by column tile, the
second time from the caches. The norm is float32 and its result is quantised without a rounding
between. Blocks, codes, scales and random bits are those of `mx_kernels`; the statistics of wide
rows are put together as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", 1979, equation 2.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagbench.impl.kernels.interpreter import round_to, to_float
from jagbench.impl.kernels.mx_kernels import (
    _ABSOLUTE,
    _block_maxima,
    _codes,
    _draws,
    _place,
    _rows_of_tile,
    _scale_codes,
    _store_scales,
)

#: Arguments for whose values no kernel is compiled anew.
NORM_COUNTS = [
    *("rows", "end", "scale_rows", "batch", "row_tiles", "scales_matrix"),
    *("draw_matrix", "draw_row", "seed_low", "seed_high"),
]
GRADIENT_COUNTS = ["rows", "middle", "batch"]


@triton.jit
def _float(count):
    """A count as fp32; one that a launch made constexpr too."""
    return (tl.zeros([], dtype=tl.int32) + count).to(tl.float32)


@triton.jit
def _load(source, row, column, used, columns, stride, FULL: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of a column tile in fp32, 0 where there is no data, and where there is.

    FULL: tiles end where rows do, so that no element needs a comparison of its own.
    """
    each = column + tl.arange(0, COLUMNS)
    seen = (row < used)[:, None]
    if not FULL:
        seen = seen & (each < columns)[None, :]
    place = source + row[:, None] * stride + each[None, :]
    return to_float(tl.load(place, mask=seen, other=0.0)), seen


@triton.jit
def _moments(x, seen, count, CENTRED: tl.constexpr):
    """Mean of rows over `count` features, and the sum of squares about it; about 0: RMSNorm's."""
    mean = tl.zeros([x.shape[0]], dtype=tl.float32)
    if CENTRED:
        mean = tl.div_rn(tl.sum(x, 1), mean + count)
        x = tl.where(seen, x - mean[:, None], 0.0)
    return mean, tl.sum(x * x, 1)


@triton.jit
def _moments_of_wide_rows(
    source, row, used, columns, stride,
    CENTRED: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As `_moments`, of rows read column tile by column tile."""
    mean = tl.zeros([ROWS], dtype=tl.float32)
    squares = tl.zeros([ROWS], dtype=tl.float32)
    for column in range(0, columns, COLUMNS):
        x, seen = _load(source, row, column, used, columns, stride, FULL, COLUMNS)
        count = _float(tl.minimum(columns - column, COLUMNS))
        own_mean, own_squares = _moments(x, seen, count, CENTRED)
        squares += own_squares
        if CENTRED:
            before = _float(column)
            step = own_mean - mean
            share = count / (before + count)
            mean += step * share
            squares += step * step * (before * share)
    return mean, squares


@triton.jit
def _normalised(
    x, seen, mean, rstd, weight, bias, column, columns,
    CENTRED: tl.constexpr, FULL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of a column tile behind the norm, 0 where there is no data: there mean, rstd are 0."""
    each = column + tl.arange(0, COLUMNS)
    if CENTRED:
        x = x - mean[:, None]
    x = x * rstd[:, None]
    if weight is not None:
        factor = to_float(tl.load(weight + each, mask=each < columns, other=0.0))
        x = x * factor[None, :]
    if bias is not None:
        x = x + to_float(tl.load(bias + each, mask=each < columns, other=0.0))[None, :]
    # Without a bias nothing but 0 x infinity in columns past the row's end is not 0 by itself.
    if bias is not None or not FULL:
        x = tl.where(seen, x, 0.0)
    return x


@triton.jit
def _store_codes(
    x, row, column, columns, first, stop, used, tile, rows, scale_rows,
    codes, codes_row, scales, scales_row, number, seed_low, seed_high,
    BR: tl.constexpr, BC: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    WIDTH: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr, CARRY: tl.constexpr,
    TOP: tl.constexpr, CONVERT: tl.constexpr, STREAM: tl.constexpr, SWIZZLED: tl.constexpr,
    FULL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantise a tile and store its codes and scales; codes and scales are those of its matrix."""
    each = column + tl.arange(0, COLUMNS)
    largest = _block_maxima(x.to(tl.int32, bitcast=True) & _ABSOLUTE, BR, BC)
    scale = _scale_codes(largest, CARRY, TOP)
    random = None
    if STREAM is not None:
        random = _draws(number, column, seed_low, seed_high, STREAM, COLUMNS)
    found = _codes(x, scale, random, MANTISSA, BIAS, WIDTH, LARGEST, NAN, CONVERT)
    inside = (row < tl.minimum(stop, rows))[:, None]
    if not FULL:
        inside = inside & (each < columns)[None, :]
    tl.store(codes + row[:, None] * codes_row + each[None, :], found, mask=inside)
    _store_scales(
        scales, scale, first, stop, used, tile, column, columns, scale_rows, scales_row,
        BR, BC, ROWS, COLUMNS, SWIZZLED,
    )  # fmt: skip


@triton.jit(do_not_specialize=NORM_COUNTS)
def mx_norm_kernel(
    x, weight, bias, codes, scales, rstd_out, mean_out, offsets,
    eps, rows, end, columns, scale_rows, batch, row_tiles,
    x_matrix, x_row, codes_matrix, codes_row, scales_matrix, scales_row, draw_matrix, draw_row,
    seed_low, seed_high,
    CENTRED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr,
    CARRY: tl.constexpr, TOP: tl.constexpr, CONVERT: tl.constexpr, STREAM: tl.constexpr,
    SWIZZLED: tl.constexpr, WHOLE: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Codes and scales of ROWS normalised rows of one of many matrices `[rows, columns]`.

    x: fp32, fp16 or bf16; weight, bias: `[columns]` or None; rstd_out, mean_out: fp32, one a row,
    counted as random numbers count them (draw_matrix, draw_row), or None. CENTRED: LayerNorm, else
    RMSNorm. WHOLE: COLUMNS hold a row; FULL: divide it. All else as in `mx_quantize_kernel`.
    """
    JAGGED: tl.constexpr = offsets is not None
    tile, matrix, _ = _place(row_tiles, 1, COLUMNS)
    first, used, stop = _rows_of_tile(offsets, tile, batch, rows, end, BR > 1, JAGGED, ROWS)
    row = first + tl.arange(0, ROWS)
    source = x + matrix * x_matrix
    if WHOLE:
        kept, seen = _load(source, row, 0, used, columns, x_row, FULL, COLUMNS)
        mean, squares = _moments(kept, seen, _float(columns), CENTRED)
    else:
        mean, squares = _moments_of_wide_rows(
            source, row, used, columns, x_row, CENTRED, FULL, ROWS, COLUMNS
        )
    inner = tl.div_rn(squares, tl.zeros([ROWS], dtype=tl.float32) + _float(columns)) + eps
    rstd = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.sqrt_rn(inner))
    rstd = tl.where(row < used, rstd, 0.0)
    mean = tl.where(row < used, mean, 0.0)
    number = matrix * draw_matrix + row * draw_row
    stored = row < tl.minimum(stop, rows)
    if rstd_out is not None:
        tl.store(rstd_out + number, rstd, mask=stored)
    if mean_out is not None:
        tl.store(mean_out + number, mean, mask=stored)
    codes += matrix * codes_matrix
    scales += matrix * scales_matrix
    if WHOLE:
        out = _normalised(kept, seen, mean, rstd, weight, bias, 0, columns, CENTRED, FULL, COLUMNS)
        _store_codes(
            out, row, 0, columns, first, stop, used, tile, rows, scale_rows,
            codes, codes_row, scales, scales_row, number, seed_low, seed_high,
            BR, BC, MANTISSA, BIAS, WIDTH, LARGEST, NAN, CARRY, TOP, CONVERT, STREAM, SWIZZLED,
            FULL, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        for column in range(0, columns, COLUMNS):
            again, seen = _load(source, row, column, used, columns, x_row, FULL, COLUMNS)
            out = _normalised(
                again, seen, mean, rstd, weight, bias, column, columns, CENTRED, FULL, COLUMNS
            )
            _store_codes(
                out, row, column, columns, first, stop, used, tile, rows, scale_rows,
                codes, codes_row, scales, scales_row, number, seed_low, seed_high,
                BR, BC, MANTISSA, BIAS, WIDTH, LARGEST, NAN, CARRY, TOP, CONVERT, STREAM, SWIZZLED,
                FULL, ROWS, COLUMNS,
            )  # fmt: skip


@triton.jit(do_not_specialize=GRADIENT_COUNTS)
def mx_norm_gradient_kernel(
    d_out, x, weight, rstd, mean, dx, d_weight, d_bias, offsets,
    rows, middle, batch, columns,
    JAGGED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx of all rows, and one program's share of the gradients of weight and bias.

    d_out, x, dx contiguous `[rows, columns]`, COLUMNS hold a row; rstd and mean fp32 `[rows]`, mean
    and d_bias None for RMSNorm; d_weight, d_bias fp32 `[programs, columns]`. offsets count rows in
    units of `middle`. Program p has the tiles p, p + programs, ...: the same sums on repeats.
    """
    each = tl.arange(0, COLUMNS)
    own = each < columns
    used = rows.to(tl.int64)
    if JAGGED:
        used = tl.load(offsets + batch).to(tl.int64) * middle
    factor = tl.full([COLUMNS], 1.0, tl.float32)
    if weight is not None:
        factor = to_float(tl.load(weight + each, mask=own, other=0.0))
    of_weight = tl.zeros([COLUMNS], dtype=tl.float32)
    of_bias = tl.zeros([COLUMNS], dtype=tl.float32)
    size = _float(columns)
    program = tl.program_id(0)
    for tile in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (tl.zeros([], dtype=tl.int64) + tile) * ROWS + tl.arange(0, ROWS)
        seen = (row < used)[:, None] & own[None, :]
        place = row[:, None] * columns + each[None, :]
        upstream = to_float(tl.load(d_out + place, mask=seen, other=0.0))
        unit = to_float(tl.load(x + place, mask=seen, other=0.0))
        scale = tl.load(rstd + row, mask=row < used, other=0.0)
        if mean is not None:
            centre = tl.load(mean + row, mask=row < used, other=0.0)
            unit = tl.where(seen, unit - centre[:, None], 0.0)
            of_bias += tl.sum(upstream, 0)
        unit = tl.where(seen, unit * scale[:, None], 0.0)
        of_weight += tl.sum(upstream * unit, 0)
        inner = upstream * factor[None, :]
        through = inner - unit * (tl.sum(inner * unit, 1) / size)[:, None]
        if mean is not None:
            through -= (tl.sum(inner, 1) / size)[:, None]
        found = tl.where(seen, through * scale[:, None], 0.0)
        written = (row < rows)[:, None] & own[None, :]
        tl.store(dx + place, round_to(found, dx.dtype.element_ty), mask=written)
    share = program.to(tl.int64) * columns + each
    tl.store(d_weight + share, of_weight, mask=own)
    if mean is not None:
        tl.store(d_bias + share, of_bias, mask=own)
