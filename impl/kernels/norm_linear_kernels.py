"""A norm fused into the linear layer behind it, and the norm's backward into the layer's.

RMSNorm is lazy: the product runs on raw rows, the sum of squares is taken of the same tiles, and
the row's factor is applied to the accumulator. No precision is lost by that: x and W are exact in
the product, and a factor of a whole row changes no relative error.

LayerNorm is not: x W - mean(x) sum(W) cancels where a row lies far from 0. Measured against
float64: on ordinary rows of 16-bit types the lazy form has 0.7 times the error of a naive run
(nothing is rounded before the product), but in float32 3 to 10 times, 10 deviations from 0 or
more; and on rows of one repeated value it leaves noise, enlarged by 1 / sqrt(eps), where the right
answer is exactly 0, in every type (tests/test_norm_kernels.py). So rows are normalised on their
way into the product, from statistics of a pass before it that reads x from cache.

That pass takes the variance about an element of the row itself, the first: its distance from the
mean is at most sqrt(features) deviations, so what cancels is at most features times the variance,
and costs 512 x 2^-24 = 2^-15 of it for 512 features. That is hidden by 16-bit types; float32 takes
the mean first (EXACT).

Statistics of a row are kept as (shift, delta, factor), float32: normalised x is
((x - shift) - delta) * factor, the same bits in the forward and the backward.
"""

import triton
import triton.language as tl

from jagbench.impl.kernels.interpreter import dot, round_to, to_float

#: Arguments for whose values no kernel is compiled anew.
NORM_COUNTS = ["batch", "total", "tiles"]
#: Features of float32 summed apart in a product, and rows in a weight's gradient: one sum of n
#: products has sqrt(n / 2) times the error of one rounding, sums of sqrt(n) have n^(1/4) times.
FEATURES_APART = tl.constexpr(128)
ROWS_APART = tl.constexpr(256)


@triton.jit
def _rows_in_use(offsets, batch, total):
    """Rows before the last offset, int32; all where there are no offsets."""
    count = total
    if offsets is not None:
        count = tl.load(offsets + batch)
    return count.to(tl.int32)


@triton.jit
def _load(
    base, rows, columns, row_stride, column_stride, seen, WIDTH: tl.constexpr, EVEN: tl.constexpr
):
    """A tile of a matrix of WIDTH columns, rows not seen 0; EVEN: no column passes WIDTH."""
    at = base + (rows[:, None] * row_stride + columns[None, :] * column_stride)
    inside = seen[:, None]
    if not EVEN:
        inside = inside & (columns < WIDTH)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _inverse_root(square, eps, seen):
    """1 / sqrt(square + eps); 1 for rows that are not seen, which eps of 0 would divide by 0."""
    return 1.0 / tl.sqrt(tl.where(seen, square + eps, 1.0))


@triton.jit
def _layer_statistics(
    base, rows, row_stride, seen, eps,
    FEATURES: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Shift, delta and factor of rows under LayerNorm, `[ROWS]` each."""
    EVEN: tl.constexpr = FEATURES % DEPTH == 0
    shift = to_float(tl.load(base + rows * row_stride, mask=seen, other=0.0))
    if EXACT:
        sums = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
        for k in range(0, FEATURES, DEPTH):
            columns = k + tl.arange(0, DEPTH)
            sums += to_float(_load(base, rows, columns, row_stride, 1, seen, FEATURES, EVEN))
        shift = tl.sum(sums, 1) / FEATURES
    sums = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
    squares = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
    for k in range(0, FEATURES, DEPTH):
        columns = k + tl.arange(0, DEPTH)
        x = to_float(_load(base, rows, columns, row_stride, 1, seen, FEATURES, EVEN))
        centred = x - shift[:, None]
        if not EVEN:
            centred = tl.where((columns < FEATURES)[None, :], centred, 0.0)
        sums += centred
        squares += centred * centred
    delta = tl.sum(sums, 1) / FEATURES
    variance = tl.maximum(tl.sum(squares, 1) / FEATURES - delta * delta, 0.0)
    return shift, delta, _inverse_root(variance, eps, seen)


@triton.jit
def _product_of_features(
    x, w, base, column, rows, seen, shift, delta, factor, x_row, w_out, w_in, first, begin, end,
    squares, FEATURES: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """x W^T of a tile over features [begin, end), fp32; squares of x added (RMSNorm)."""
    EVEN: tl.constexpr = FEATURES % DEPTH == 0
    out_columns = column + tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for k in range(begin, end, DEPTH):
        columns = k + tl.arange(0, DEPTH)
        if DESCRIPTORS:
            x_tile = x.load([first, k])
            w_tile = w.load([column, k])
        else:
            x_tile = _load(base, rows, columns, x_row, 1, seen, FEATURES, EVEN)
            w_tile = _load(
                w, out_columns, columns, w_out, w_in, out_columns < WIDTH, FEATURES, EVEN
            )
        if NORM == "rms":
            # Through registers: a tile that a product reads from shared memory and a sum from
            # registers gets a buffer too few (jagbench/pipelines.py).
            x_tile = tl.where(seen[:, None], x_tile, 0.0)
            wide = to_float(x_tile)
            squares += wide * wide
        if NORM == "layer":
            unit = ((to_float(x_tile) - shift[:, None]) - delta[:, None]) * factor[:, None]
            if not EVEN:
                unit = tl.where((columns < FEATURES)[None, :], unit, 0.0)
            x_tile = round_to(unit, x_tile.dtype)
        acc = dot(x_tile, tl.trans(w_tile), acc)
    return acc, squares


@triton.jit
def _product_of_rows(
    x, w, base, column, rows, seen, shift, delta, factor, x_row, w_out, w_in,
    first, FEATURES: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """x W^T of a tile, fp32, and the row sums of squares of x (RMSNorm, else 0).

    EXACT: in float32 the error is that of the sum, so FEATURES_APART features are summed by
    themselves.
    """
    squares = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
    if EXACT:
        acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for begin in range(0, FEATURES, FEATURES_APART):
            part, squares = _product_of_features(
                x, w, base, column, rows, seen, shift, delta, factor, x_row, w_out, w_in, first,
                begin, tl.minimum(begin + FEATURES_APART, FEATURES), squares,
                FEATURES, WIDTH, NORM, ROWS, COLUMNS, DEPTH, DESCRIPTORS,
            )  # fmt: skip
            acc += part
    else:
        acc, squares = _product_of_features(
            x, w, base, column, rows, seen, shift, delta, factor, x_row, w_out, w_in, first,
            0, FEATURES, squares, FEATURES, WIDTH, NORM, ROWS, COLUMNS, DEPTH, DESCRIPTORS,
        )  # fmt: skip
    return acc, tl.sum(squares, 1)


@triton.jit(do_not_specialize=NORM_COUNTS)
def norm_product_kernel(
    x, w, out, bias, statistics, offsets, x_tiles, w_tiles, batch, total, tiles, eps,
    x_row, w_out, w_in,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """out = norm(x) W^T + bias, contiguous `[total, WIDTH]`; padding rows 0.

    w: element (output, feature) at w_out and w_in; x_tiles, w_tiles: their descriptors, or None.
    bias: fp32 `[WIDTH]` or None. statistics: fp32 `[3, total]` (LayerNorm), `[total]` (RMSNorm) or
    None. NORM: "rms", "layer", or "none" for the product alone. Tiles of one block of rows follow
    each other, so that x comes from memory once.
    """
    ACROSS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    count = _rows_in_use(offsets, batch, total)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        first = tile // ACROSS * ROWS
        column = tile % ACROSS * COLUMNS
        rows = tl.arange(0, ROWS)
        seen = first + rows < count
        base = x + first.to(tl.int64) * x_row
        shift = tl.zeros([ROWS], dtype=tl.float32)
        delta = shift
        factor = shift
        if NORM == "layer":
            shift, delta, factor = _layer_statistics(
                base, rows, x_row, seen, eps, FEATURES, DEPTH, ROWS, EXACT
            )
        acc, squares = _product_of_rows(
            x_tiles if DESCRIPTORS else x, w_tiles if DESCRIPTORS else w, base, column, rows, seen,
            shift, delta, factor, x_row, w_out, w_in, first,
            FEATURES, WIDTH, NORM, EXACT, ROWS, COLUMNS, DEPTH, DESCRIPTORS,
        )  # fmt: skip
        if NORM == "rms":
            factor = _inverse_root(squares / FEATURES, eps, seen)
            acc = acc * factor[:, None]
        out_columns = column + tl.arange(0, COLUMNS)
        if bias is not None:
            acc += tl.load(bias + out_columns, mask=out_columns < WIDTH, other=0.0)[None, :]
        # Rows that are not seen may have come by a descriptor.
        acc = tl.where(seen[:, None], acc, 0.0)
        to = out + first.to(tl.int64) * WIDTH
        at = to + (rows[:, None] * WIDTH + out_columns[None, :])
        inside = (first + rows < total)[:, None]
        if WIDTH % COLUMNS != 0:
            inside = inside & (out_columns < WIDTH)[None, :]
        tl.store(at, round_to(acc, out.dtype.element_ty), mask=inside)
        if statistics is not None:
            _store_statistics(statistics, first + rows, seen & (column == 0), total, shift, delta,
                              factor, NORM)  # fmt: skip


@triton.jit
def _store_statistics(statistics, rows, wanted, total, shift, delta, factor, NORM: tl.constexpr):
    if NORM == "layer":
        whole = total.to(tl.int64)
        tl.store(statistics + rows, shift, mask=wanted)
        tl.store(statistics + whole + rows, delta, mask=wanted)
        tl.store(statistics + 2 * whole + rows, factor, mask=wanted)
    else:
        tl.store(statistics + rows, factor, mask=wanted)


@triton.jit(do_not_specialize=NORM_COUNTS)
def norm_statistics_kernel(
    x, statistics, offsets, batch, total, eps, x_row,
    FEATURES: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics fp32 `[3, total]` of rows under LayerNorm, for a product that takes them ready."""
    count = _rows_in_use(offsets, batch, total)
    first = tl.program_id(0) * ROWS
    rows = tl.arange(0, ROWS)
    seen = first + rows < count
    base = x + first.to(tl.int64) * x_row
    shift, delta, factor = _layer_statistics(
        base, rows, x_row, seen, eps, FEATURES, BLOCK, ROWS, EXACT
    )
    _store_statistics(statistics, first + rows, seen, total, shift, delta, factor, "layer")


@triton.jit
def _load_statistics(statistics, rows, seen, total, NORM: tl.constexpr):
    """Shift, delta and factor of rows; 0 where they are not seen."""
    shift = tl.zeros([rows.shape[0]], dtype=tl.float32)
    delta = shift
    if NORM == "layer":
        whole = total.to(tl.int64)
        shift = tl.load(statistics + rows, mask=seen, other=0.0)
        delta = tl.load(statistics + whole + rows, mask=seen, other=0.0)
        factor = tl.load(statistics + 2 * whole + rows, mask=seen, other=0.0)
    else:
        factor = tl.load(statistics + rows, mask=seen, other=0.0)
    return shift, delta, factor


@triton.jit
def _unit(x, shift, delta, factor, NORM: tl.constexpr):
    """Normalised rows, fp32."""
    if NORM == "layer":
        x = (x - shift[:, None]) - delta[:, None]
    return x * factor[:, None]


@triton.jit
def _through_norm(
    gradient, x_base, rows, seen, shift, delta, factor, x_row,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The gradient of x from that of its normalised rows, whole rows of both, fp32."""
    columns = tl.arange(0, BLOCK)
    x = _load(x_base, rows, columns, x_row, 1, seen, FEATURES, FEATURES == BLOCK)
    unit = _unit(to_float(x), shift, delta, factor, NORM)
    if FEATURES != BLOCK:
        unit = tl.where((columns < FEATURES)[None, :], unit, 0.0)
    along = tl.sum(gradient * unit, 1) / FEATURES
    inner = gradient - unit * along[:, None]
    if NORM == "layer":
        inner -= (tl.sum(gradient, 1) / FEATURES)[:, None]
    return inner * factor[:, None]


@triton.jit
def _store_rows(base, rows, inside, tile, FEATURES: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    at = base + (rows[:, None] * FEATURES + columns[None, :])
    mask = inside[:, None] & (columns < FEATURES)[None, :]
    tl.store(at, round_to(tile, base.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=NORM_COUNTS)
def norm_input_gradient_kernel(
    x, w, d_out, dx, statistics, offsets, batch, total, tiles, x_row, w_row, d_row,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """dx of whole rows: the product with W and, in its epilogue, the norm's backward.

    w `[WIDTH, FEATURES]` with the norm's weight folded in, unit column stride; dx contiguous.
    """
    EVEN: tl.constexpr = WIDTH % DEPTH == 0
    count = _rows_in_use(offsets, batch, total)
    first = tl.program_id(0) * ROWS
    rows = tl.arange(0, ROWS)
    seen = first + rows < count
    columns = tl.arange(0, BLOCK)
    d_base = d_out + first.to(tl.int64) * d_row
    acc = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for k in range(0, WIDTH, DEPTH):
        inner = k + tl.arange(0, DEPTH)
        d_tile = _load(d_base, rows, inner, d_row, 1, seen, WIDTH, EVEN)
        w_tile = _load(w, inner, columns, w_row, 1, inner < WIDTH, FEATURES, FEATURES == BLOCK)
        acc = dot(d_tile, w_tile, acc)
    shift, delta, factor = _load_statistics(statistics, first + rows, seen, total, NORM)
    acc = _through_norm(
        acc, x + first.to(tl.int64) * x_row, rows, seen, shift, delta, factor, x_row,
        FEATURES, BLOCK, NORM,
    )  # fmt: skip
    to = dx + first.to(tl.int64) * FEATURES
    _store_rows(to, rows, first + rows < total, acc, FEATURES, BLOCK)


@triton.jit(do_not_specialize=NORM_COUNTS)
def norm_rows_gradient_kernel(
    x, gradient, dx, statistics, offsets, batch, total, x_row,
    FEATURES: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx from the gradient of the normalised rows; both contiguous, and may be one tensor."""
    count = _rows_in_use(offsets, batch, total)
    first = tl.program_id(0) * ROWS
    rows = tl.arange(0, ROWS)
    seen = first + rows < count
    base = gradient + first.to(tl.int64) * FEATURES
    columns = tl.arange(0, BLOCK)
    tile = _load(base, rows, columns, FEATURES, 1, seen, FEATURES, FEATURES == BLOCK)
    shift, delta, factor = _load_statistics(statistics, first + rows, seen, total, NORM)
    inner = _through_norm(
        to_float(tile), x + first.to(tl.int64) * x_row, rows, seen, shift, delta, factor, x_row,
        FEATURES, BLOCK, NORM,
    )  # fmt: skip
    to = dx + first.to(tl.int64) * FEATURES
    _store_rows(to, rows, first + rows < total, inner, FEATURES, BLOCK)


@triton.jit
def _gradient_of_rows(
    x, d_out, statistics, features, outputs, begin, end, acc, total_d, count, total, x_row, d_row,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """d_out^T normalised(x) over rows [begin, end) and the sums of d_out's rows, added to both."""
    rows = tl.arange(0, DEPTH)
    for at in range(begin, end, DEPTH):
        seen = at + rows < count
        long = tl.zeros([], dtype=tl.int64) + at
        d_tile = _load(
            d_out + long * d_row, rows, outputs, d_row, 1, seen, WIDTH, WIDTH % OUTPUTS == 0
        )
        x_tile = _load(
            x + long * x_row, rows, features, x_row, 1, seen, FEATURES, FEATURES % INPUTS == 0
        )
        shift, delta, factor = _load_statistics(statistics, at + rows, seen, total, NORM)
        unit = round_to(_unit(to_float(x_tile), shift, delta, factor, NORM), x_tile.dtype)
        # As in `_product_of_features`: it is summed below.
        d_tile = tl.where(seen[:, None], d_tile, 0.0)
        acc = dot(tl.trans(d_tile), unit, acc)
        total_d += tl.sum(to_float(d_tile), 0)
    return acc, total_d


@triton.jit(do_not_specialize=[*NORM_COUNTS, "run"])
def norm_weight_gradient_kernel(
    x, d_out, partial, sums, statistics, offsets, batch, total, run, x_row, d_row,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """d_out^T normalised(x) over a run of rows, fp32; the sums over d_out's rows beside it.

    Program (split, tile): `run` rows from split * run on; OUTPUTS outputs and INPUTS features.
    partial `[splits, WIDTH, FEATURES]`, sums `[splits, WIDTH]`: nothing is added by atomics.
    DEPTH: rows of x a step; run is a multiple of it.
    """
    ACROSS: tl.constexpr = (FEATURES + INPUTS - 1) // INPUTS
    DOWN: tl.constexpr = (WIDTH + OUTPUTS - 1) // OUTPUTS
    split = tl.program_id(0) // (ACROSS * DOWN)
    tile = tl.program_id(0) % (ACROSS * DOWN)
    outputs = tile // ACROSS * OUTPUTS + tl.arange(0, OUTPUTS)
    features = tile % ACROSS * INPUTS + tl.arange(0, INPUTS)
    count = _rows_in_use(offsets, batch, total)
    start = split * run
    acc = tl.zeros([OUTPUTS, INPUTS], dtype=tl.float32)
    total_d = tl.zeros([OUTPUTS], dtype=tl.float32)
    end = tl.minimum(start + run, count)
    if EXACT:
        for begin in range(start, end, ROWS_APART):
            part, part_d = _gradient_of_rows(
                x, d_out, statistics, features, outputs, begin,
                tl.minimum(begin + ROWS_APART, end), acc * 0.0, total_d * 0.0, count, total,
                x_row, d_row, FEATURES, WIDTH, NORM, INPUTS, OUTPUTS, DEPTH,
            )  # fmt: skip
            acc += part
            total_d += part_d
    else:
        acc, total_d = _gradient_of_rows(
            x, d_out, statistics, features, outputs, start, end, acc, total_d, count, total,
            x_row, d_row, FEATURES, WIDTH, NORM, INPUTS, OUTPUTS, DEPTH,
        )  # fmt: skip
    to = partial + split.to(tl.int64) * WIDTH * FEATURES
    inside = (outputs < WIDTH)[:, None] & (features < FEATURES)[None, :]
    tl.store(to + outputs[:, None] * FEATURES + features[None, :], acc, mask=inside)
    wanted = (outputs < WIDTH) & (tile % ACROSS == 0)
    tl.store(sums + split * WIDTH + outputs, total_d, mask=wanted)
