"""Device functions every jagged kernel shares: which rows a tile holds, which rows it sees, loads.

Positions are int32 inside a sequence; every address is a 64-bit base (sequence, head, first row of
the tile) plus an offset inside the tile, so no product can wrap.
"""

import triton
import triton.language as tl

#: Kernel arguments that count rows or heads or bound windows. They change from batch to batch or
#: model to model, so no kernel is compiled anew for a value of theirs.
COUNTS = ["batch", "total_q", "total_k", "out_rows", "left", "right", "heads", "group"]
GRADIENT_COUNTS = [
    *("batch", "total_q", "total_k", "statistics_rows", "left", "right"),
    *("heads", "kv_heads", "group"),
]


@triton.jit
def sequence_rows(offsets, sequence, batch, total):
    """First row (int64) and length (int32) of a sequence.

    Sequence number `batch` stands for the padding rows past the last offset: `total - offsets[-1]`
    of them. Nothing behind `offsets[batch]` is read.
    """
    first = tl.load(offsets + sequence).to(tl.int64)
    last = tl.load(offsets + sequence + 1, mask=sequence < batch, other=total).to(tl.int64)
    return first, (last - first).to(tl.int32)


@triton.jit
def tile_rows(offsets, sequence, batch, total, SHARED: tl.constexpr):
    """As `sequence_rows`; SHARED: one dense block of `total` rows serves every sequence."""
    if SHARED:
        first = tl.zeros([], dtype=tl.int64)
        length = total.to(tl.int32)
    else:
        first, length = sequence_rows(offsets, sequence, batch, total)
    return first, length


@triton.jit
def other_rows(offsets, sequence, batch, total, SHARED: tl.constexpr):
    """Rows the other side offers to a tile's sequence; none to the padding rows."""
    if SHARED:
        first = tl.zeros([], dtype=tl.int64)
        length = tl.where(sequence < batch, total, 0).to(tl.int32)
    else:
        inside = sequence < batch
        first = tl.load(offsets + sequence, mask=inside, other=0).to(tl.int64)
        last = tl.load(offsets + sequence + 1, mask=inside, other=0).to(tl.int64)
        length = (last - first).to(tl.int32)
    return first, length


@triton.jit
def visible_span(
    first_row,
    rows,
    length,
    shift,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Span of other-side positions that rows [first_row, first_row + rows) of a tile see.

    Position c is seen by row p iff p + shift - left <= c <= p + shift + right, 0 <= c < length.
    Returns `lo, full_lo, full_hi, hi`: tiles of STEP from `lo` (a multiple of STEP) to `hi` hold
    every visible position; tiles in [full_lo, full_hi) are seen whole by every row.
    """
    lo = 0
    full_lo = 0
    hi = length
    full_hi = length
    if HAS_LEFT:
        lo = tl.minimum(tl.maximum(first_row + shift - left, 0), length) // STEP * STEP
        full_lo = tl.maximum(first_row + rows - 1 + shift - left, 0)
        full_lo = (full_lo + STEP - 1) // STEP * STEP
    if HAS_RIGHT:
        hi = tl.minimum(first_row + rows + shift + right, length)
        full_hi = tl.minimum(first_row + shift + right + 1, length)
    full_hi = tl.maximum(full_hi, 0) // STEP * STEP
    # Keep the three stretches [lo, full_lo), [full_lo, full_hi), [full_hi, hi) in order.
    full_lo = tl.maximum(tl.minimum(full_lo, (tl.maximum(hi, 0) + STEP - 1) // STEP * STEP), lo)
    full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def visible(
    rows,
    columns,
    length,
    shift,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Mask of visible (row, column) pairs; `rows` and `columns` broadcast against each other."""
    seen = (columns < length) & (rows >= 0)
    if HAS_LEFT:
        seen = seen & (columns >= rows + shift - left)
    if HAS_RIGHT:
        seen = seen & (columns <= rows + shift + right)
    return seen


@triton.jit
def load_rows(
    base,
    first,
    count,
    row_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tile `[ROWS, BLOCK]` of rows [first, first + ROWS) of one sequence and head.

    base: pointer to the sequence's first row in this head. Rows at or past `count` and columns at
    or past COLUMNS are zero, never read: what lies there belongs to somebody else.
    """
    start = base + first.to(tl.int64) * row_stride
    r = tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    inside = (first + r < count)[:, None]
    if COLUMNS != BLOCK:
        inside = inside & (c < COLUMNS)[None, :]
    # row_stride < 2^23 (checked on the host), so an offset inside the tile fits 32 bits.
    return tl.load(start + (r[:, None] * row_stride + c[None, :]), mask=inside, other=0.0)


@triton.jit
def store_rows(
    base,
    first,
    count,
    row_stride,
    tile,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the rows of a tile that lie inside the sequence; the counterpart of `load_rows`."""
    start = base + first.to(tl.int64) * row_stride
    r = tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    inside = (first + r < count)[:, None]
    if COLUMNS != BLOCK:
        inside = inside & (c < COLUMNS)[None, :]
    tl.store(start + (r[:, None] * row_stride + c[None, :]), tile, mask=inside)


@triton.jit
def pair_bias(
    bias,
    bucket_ids,
    pair_base,
    rows,
    columns,
    inside,
    other_length,
    bias_row,
    bias_head,
    head,
    BIAS: tl.constexpr,
):
    """Additive bias (fp32) of a tile of pairs; zero where not `inside`.

    BIAS 1: dense, `bias[pair, head]`. BIAS 2: bucketed, `bias[bucket_ids[pair], head]`.
    rows, columns: positions of query and key, broadcastable against each other.
    """
    pair = pair_base + rows.to(tl.int64) * other_length + columns
    if BIAS == 2:
        bucket = tl.load(bucket_ids + pair, mask=inside, other=0).to(tl.int64)
        address = bias + bucket * bias_row + head * bias_head
    else:
        address = bias + pair * bias_row + head.to(tl.int64) * bias_head
    return tl.load(address, mask=inside, other=0.0).to(tl.float32)
