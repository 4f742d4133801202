"""Device functions every jagged kernel shares: which rows a tile holds, which rows it sees, loads.

Positions are int32 inside a sequence; every address is a 64-bit base (sequence, head, first row of
the tile) plus an offset inside the tile, so no product can wrap.
"""

import triton
import triton.language as tl

#: Kernel arguments that count rows or heads or bound windows. They change from batch to batch or
#: model to model, so no kernel is compiled anew for a value of theirs.
COUNTS = [
    *("batch", "total_q", "total_k", "out_rows", "left", "right", "prefix", "last_full"),
    *("heads", "group"),
]
GRADIENT_COUNTS = [
    *("batch", "total_q", "total_k", "statistics_rows", "left", "right", "prefix", "last_full"),
    *("heads", "kv_heads", "group"),
]
#: Bits of a kernel's BEYOND: what shows more than the window does (`jagbench.pairs`): the first
#: `prefix` tokens; the last queries, from position `free_from` on, bound by nothing or, with the
#: third bit beside the second, by causality.
PREFIX: tl.constexpr = tl.constexpr(1)
LAST: tl.constexpr = tl.constexpr(2)
LAST_CAUSAL: tl.constexpr = tl.constexpr(4)


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
def first_free_row(q_len, last_full, BEYOND: tl.constexpr):
    """Position of the first query that no window binds; may be negative."""
    free_from = 0
    if (LAST & BEYOND) != 0:
        free_from = q_len - last_full
    return free_from


@triton.jit
def span_beyond_of_queries(
    first_row, rows, k_len, shift, prefix, free_from, lo, full_lo, full_hi, hi,
    BEYOND: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The `visible_span` of a query tile, made longer by what lies beyond its window.

    Returns `early, lo, full_lo, full_hi, hi`: the context's tiles of [0, early) come before `lo`
    and must be masked; none of them where the context meets the rest, which then begins at 0. A
    tile with a query of the context, or with one of the last, is long; most are not.
    """
    early = 0
    last_row = first_row + rows - 1
    if (LAST & BEYOND) != 0:
        end = k_len
        full_end = k_len
        if (LAST_CAUSAL & BEYOND) != 0:
            end = tl.minimum(tl.maximum(last_row + shift + 1, 0), k_len)
            full_end = tl.minimum(tl.maximum(first_row + shift + 1, 0), k_len)
        some = last_row >= free_from
        whole = first_row >= free_from
        lo = tl.where(some, 0, lo)
        hi = tl.where(some, tl.maximum(hi, end), hi)
        full_lo = tl.where(whole, 0, full_lo)
        full_hi = tl.where(whole, full_end // STEP * STEP, full_hi)
    if (PREFIX & BEYOND) != 0:
        context = tl.minimum(prefix, k_len)
        meets = lo <= (context + STEP - 1) // STEP * STEP
        some = (last_row + shift >= 0) & (first_row + shift < prefix)
        whole = (first_row + shift >= 0) & (last_row + shift < prefix)
        early = tl.where(meets | some, 0, context)
        lo = tl.where(meets | some, 0, lo)
        hi = tl.where(meets, tl.maximum(hi, context), hi)
        hi = tl.where(some, k_len, hi)
        full_lo = tl.where(whole, 0, full_lo)
        full_hi = tl.where(whole, k_len // STEP * STEP, full_hi)
    return early, lo, full_lo, full_hi, hi


@triton.jit
def span_beyond_of_keys(
    first_key, keys, q_len, shift, prefix, free_from, lo, full_lo, full_hi, hi,
    BEYOND: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The `visible_span` of a key tile, made longer by the queries that see past their window.

    Returns `early_lo, early_hi, lo, full_lo, full_hi, hi, late_lo`: queries of the context in tiles
    of [early_lo, early_hi) before `lo`, the last queries in tiles of [late_lo, q_len) behind `hi`,
    both to be masked; none where they meet the window's. All queries see a tile of the context.
    """
    early_lo = 0
    early_hi = 0
    late_lo = q_len
    if (LAST & BEYOND) != 0:
        late = tl.maximum(free_from, 0)
        if (LAST_CAUSAL & BEYOND) != 0:
            late = tl.maximum(late, first_key - shift)
        some = late < q_len
        late = late // STEP * STEP
        meets = late <= (tl.maximum(hi, 0) + STEP - 1) // STEP * STEP
        lo = tl.where(some & meets, tl.minimum(lo, late), lo)
        hi = tl.where(some & meets, q_len, hi)
        late_lo = tl.where(some & (meets == 0), late, q_len)
    if (PREFIX & BEYOND) != 0:
        context = first_key < prefix
        whole = first_key + keys - 1 < prefix
        first = tl.maximum(-shift, 0)
        end = tl.minimum(prefix - shift, q_len)
        some = (first < end) & (context == 0)
        meets = lo <= (end + STEP - 1) // STEP * STEP
        early_lo = first // STEP * STEP
        early_hi = tl.where(some & (meets == 0), end, early_lo)
        # Keys behind the context: their window ends behind its queries, so `hi` stays.
        lo = tl.where(some & meets, tl.minimum(lo, early_lo), lo)
        lo = tl.where(context, 0, lo)
        hi = tl.where(context, q_len, hi)
        late_lo = tl.where(context, q_len, late_lo)
        full_lo = tl.where(whole, 0, full_lo)
        full_hi = tl.where(whole, q_len, full_hi)
    return early_lo, early_hi, lo, full_lo, full_hi, hi, late_lo


@triton.jit
def visible(
    rows, columns, length, shift, left, right, prefix, free_from,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BEYOND: tl.constexpr,
):  # fmt: skip
    """Mask of visible (row, column) pairs; `rows` and `columns` broadcast against each other."""
    inside = (columns < length) & (rows >= 0)
    seen = inside
    if HAS_LEFT:
        seen = seen & (columns >= rows + shift - left)
    if HAS_RIGHT:
        seen = seen & (columns <= rows + shift + right)
    if (PREFIX & BEYOND) != 0:
        place = rows + shift
        seen = seen | (inside & ((columns < prefix) | ((place >= 0) & (place < prefix))))
    if (LAST & BEYOND) != 0:
        free = inside & (rows >= free_from)
        if (LAST_CAUSAL & BEYOND) != 0:
            free = free & (columns <= rows + shift)
        seen = seen | free
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
