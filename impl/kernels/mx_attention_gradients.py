"""Backward of MXFP8 jagged attention and GDPA: scores and dS again from codes, in fixed order.

Two kernels, as in `attention_backward`: dK and dV by tiles of keys, dQ by tiles of queries. Both
compute S = Q^ K^^T and dP = dO^ V^^T, and quantise dS in squares by the same random bits, so that
both multiply the same codes; nothing is added by atomics. Tiles are multiples of 32 and begin with
their sequence, so every block lies in one tile.
"""

import triton
import triton.language as tl

from jagbench.impl.kernels.activations import (
    PER_HEAD,
    SOFTMAX,
    activate_and_derivative,
    activate_and_derivative_dynamic,
)
from jagbench.impl.kernels.attention_backward import _bias_gradient, statistics_start
from jagbench.impl.kernels.interpreter import dot, round_to
from jagbench.impl.kernels.mx_attention_tiles import (
    block_scales,
    held,
    operand_tile,
    product_of_rows,
    random_tile,
    used_keys,
    used_queries,
)
from jagbench.impl.kernels.tiles import (
    GRADIENT_COUNTS,
    LAST,
    PREFIX,
    first_free_row,
    other_rows,
    pair_bias,
    sequence_rows,
    span_beyond_of_keys,
    span_beyond_of_queries,
    store_rows,
    tile_rows,
    visible,
    visible_span,
)

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
COUNTS = [*GRADIENT_COUNTS, "out_rows", "seed_low", "seed_high"]


@triton.jit(do_not_specialize=COUNTS)
def seen_rows_kernel(
    d_out, kept, q_offsets, k_offsets, tile_sequence, tile_block,
    batch, total_q, left, right, prefix, last_full, d_row, d_head, heads,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, ALIGN_END: tl.constexpr, BEYOND: tl.constexpr, SHARED_Q: tl.constexpr,
):  # fmt: skip
    """Copy d_out to contiguous `[rows, heads, DV]`, with 0 in rows that see no key.

    What lies there may be anything, and has no part in the scales of the squares it is in.
    """
    head = tl.program_id(0) % heads
    item = tl.program_id(0) // heads
    sequence = tl.load(tile_sequence + item)
    if sequence >= 0:
        q_first, q_len = tile_rows(q_offsets, sequence, batch, total_q, SHARED_Q)
        _, k_len = other_rows(k_offsets, sequence, batch, 0, False)
        if SHARED_Q:
            q_first = sequence.to(tl.int64) * total_q
        first = tl.load(tile_block + item) * ROWS
        rows = first + tl.arange(0, ROWS)
        shift = 0
        if ALIGN_END:
            shift = k_len - q_len
        used = used_queries(
            rows, q_len, k_len, shift, left, right, prefix,
            first_free_row(q_len, last_full, BEYOND), HAS_LEFT, HAS_RIGHT, BEYOND,
        )  # fmt: skip
        r = tl.arange(0, ROWS)
        c = tl.arange(0, BLOCK_DV)
        start = d_out + (q_first + first) * d_row + head.to(tl.int64) * d_head
        # d_row < 2^23 (checked on the host), so an offset inside the tile fits 32 bits.
        tile = tl.load(
            start + (r[:, None] * d_row + c[None, :]), mask=used[:, None] & (c < DV)[None, :],
            other=0.0,
        )  # fmt: skip
        store_rows(
            kept + (q_first * heads + head) * DV, first, q_len, heads * DV, tile,
            ROWS, DV, BLOCK_DV,
        )  # fmt: skip


@triton.jit
def _pair_gradients(
    scores, d_weights, base, delta, seen, activation_id,
    ACTIVATION: tl.constexpr, ACTIVATION_SET: tl.constexpr,
):  # fmt: skip
    """P and dS of a tile of scores, fp32, 0 where not `seen`.

    base: lse of a row, natural, +inf where it sees nothing; it and delta broadcast to the scores.
    """
    if ACTIVATION == SOFTMAX:
        weights = tl.where(seen, tl.exp2((scores - base) * LOG2E), 0.0)
        d_scores = weights * (d_weights - delta)
    else:
        if ACTIVATION == PER_HEAD:
            weights, slope = activate_and_derivative_dynamic(scores, activation_id, ACTIVATION_SET)
        else:
            weights, slope = activate_and_derivative(scores, ACTIVATION)
        weights = tl.where(seen, weights, 0.0)
        d_scores = slope * d_weights
    return weights, tl.where(seen, d_scores, 0.0)


@triton.jit
def _held_scores(
    d_scores, rows, first_key, seed_low, seed_high, G_LIMIT: tl.constexpr, G_CARRY: tl.constexpr,
    G_TOP: tl.constexpr, G_SATURATES: tl.constexpr, G_MANTISSA: tl.constexpr,
    G_BIAS: tl.constexpr, STREAM: tl.constexpr, COLUMNS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """dS of a tile `[queries, keys]`, or `[keys, queries]` if ACROSS, as its squares hold it.

    rows: number of each query in the random stream; STREAM: None rounds to nearest.
    """
    random = None
    if STREAM is not None:
        random = random_tile(rows, first_key, seed_low, seed_high, STREAM, COLUMNS, ACROSS)
    scale = block_scales(d_scores, G_CARRY, G_TOP, 32, 32, False)
    return held(d_scores, scale, random, G_LIMIT, G_SATURATES, G_MANTISSA, G_BIAS)


@triton.jit
def _key_value_loop(
    dk, dv, k_tile, k_scale, v_tile, v_scale, lo, hi, q, q_scales, d_out, d_scales, lse, delta,
    columns, first_key, q_first, q_blocks, d_first, d_blocks,
    q_len, k_len, shift, left, right, prefix, free_from, score_scale, bias, bucket_ids, pair_base,
    bias_row, bias_head, head, heads, activation_id, seed_low, seed_high,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BEYOND: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    ACTIVATION_SET: tl.constexpr, MANTISSA: tl.constexpr, BIAS_OF: tl.constexpr,
    WIDTH: tl.constexpr, LIMIT: tl.constexpr, CARRY: tl.constexpr, TOP: tl.constexpr,
    SATURATES: tl.constexpr, FIXED: tl.constexpr, G_MANTISSA: tl.constexpr, G_BIAS: tl.constexpr,
    G_WIDTH: tl.constexpr, G_LIMIT: tl.constexpr, G_CARRY: tl.constexpr, G_TOP: tl.constexpr,
    G_SATURATES: tl.constexpr, STREAM: tl.constexpr, OPERANDS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile from the query tiles of [lo, hi); tiles are `[keys, queries]`."""
    for first in tl.range(lo, hi, BLOCK_Q):
        first = tl.multiple_of(first, BLOCK_Q)
        rows = first + tl.arange(0, BLOCK_Q)
        used = rows < q_len
        seen = used[None, :] & (columns < k_len)[:, None]
        inside = seen
        if MASK:
            used = used_queries(
                rows, q_len, k_len, shift, left, right, prefix, free_from,
                HAS_LEFT, HAS_RIGHT, BEYOND,
            )  # fmt: skip
            seen = inside & visible(
                rows[None, :], columns[:, None], k_len, shift, left, right, prefix, free_from,
                HAS_LEFT, HAS_RIGHT, BEYOND,
            )  # fmt: skip
        q_tile, q_scale = operand_tile(
            q, q_scales, q_first, q_blocks, first, q_len, head, heads, used,
            D, BLOCK_D, BLOCK_Q, 32, 32, MANTISSA, BIAS_OF, WIDTH, OPERANDS, MASK,
        )  # fmt: skip
        d_tile, d_scale = operand_tile(
            d_out, d_scales, d_first, d_blocks, first, q_len, head, heads, used,
            DV, BLOCK_DV, BLOCK_Q, 32, 32, G_MANTISSA, G_BIAS, G_WIDTH, OPERANDS, MASK,
        )  # fmt: skip
        scores = score_scale * product_of_rows(
            k_tile, k_scale, q_tile, q_scale, 0.0, None, OPERANDS
        )
        if BIAS != 0:
            scores += pair_bias(
                bias, bucket_ids, pair_base, rows[None, :], columns[:, None], inside, k_len,
                bias_row, bias_head, head, BIAS,
            )  # fmt: skip
        d_weights = product_of_rows(v_tile, v_scale, d_tile, d_scale, 0.0, None, OPERANDS)
        base = 0.0
        shifts = 0.0
        if ACTIVATION == SOFTMAX:
            base = tl.load(lse + rows)[None, :]
            shifts = tl.load(delta + rows)[None, :]
        weights, d_scores = _pair_gradients(
            scores, d_weights, base, shifts, seen, activation_id, ACTIVATION, ACTIVATION_SET
        )
        # P lies along the queries here, the dim that dV sums over.
        scale = block_scales(weights, CARRY, TOP, 1, 32, FIXED)
        weights = held(weights, scale, None, LIMIT, SATURATES, MANTISSA, BIAS_OF)
        dv = dot(round_to(weights, d_tile.dtype), d_tile, dv)
        d_scores = _held_scores(
            d_scores, (d_first + rows) * heads + head, first_key, seed_low, seed_high, G_LIMIT,
            G_CARRY, G_TOP, G_SATURATES, G_MANTISSA, G_BIAS, STREAM, BLOCK_K, True,
        )  # fmt: skip
        dk = dot(round_to(d_scores, q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit(do_not_specialize=COUNTS)
def mx_key_value_gradient_kernel(
    q, k, v, d_out, q_scales, k_scales, v_scales, d_scales, statistics, dk, dv,
    bias, bucket_ids, activation_ids, q_offsets, k_offsets, pair_offsets, tile_sequence, tile_block,
    batch, total_q, total_k, statistics_rows, left, right, prefix, last_full,
    score_scale, grad_scale, value_scale, bias_row, bias_head, seed_low, seed_high,
    kv_heads, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIGN_END: tl.constexpr,
    BEYOND: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    ACTIVATION_SET: tl.constexpr, MANTISSA: tl.constexpr, BIAS_OF: tl.constexpr,
    WIDTH: tl.constexpr, LIMIT: tl.constexpr, CARRY: tl.constexpr, TOP: tl.constexpr,
    SATURATES: tl.constexpr, FIXED: tl.constexpr, G_MANTISSA: tl.constexpr, G_BIAS: tl.constexpr,
    G_WIDTH: tl.constexpr, G_LIMIT: tl.constexpr, G_CARRY: tl.constexpr, G_TOP: tl.constexpr,
    G_SATURATES: tl.constexpr, STREAM: tl.constexpr, V_BR: tl.constexpr, V_BC: tl.constexpr,
    OPERANDS: tl.constexpr, SHARED_Q: tl.constexpr,
):  # fmt: skip
    """dK, dV `[rows, kv_heads, ...]`: one program a key tile and key head, over its query heads.

    Operands as the forward kernel takes them; G_: of the element type of d_out and dS.
    """
    kv_head = tl.program_id(0) % kv_heads
    item = tl.program_id(0) // kv_heads
    sequence = tl.load(tile_sequence + item)
    if sequence >= 0:
        k_first, k_len = sequence_rows(k_offsets, sequence, batch, total_k)
        q_first, q_len = other_rows(q_offsets, sequence, batch, total_q, SHARED_Q)
        q_blocks = q_first // 32 + sequence
        d_first = q_first
        if SHARED_Q:
            d_first = sequence.to(tl.int64) * total_q
            q_blocks = tl.zeros([], dtype=tl.int64)
        first = tl.multiple_of(tl.load(tile_block + item) * BLOCK_K, BLOCK_K)
        columns = first + tl.arange(0, BLOCK_K)
        # Padding rows meet no query, and have no scales.
        live = tl.where(sequence < batch, k_len, 0)
        k_tile, k_scale = operand_tile(
            k, k_scales, k_first, k_first // 32 + sequence, first, live, kv_head, kv_heads, None,
            D, BLOCK_D, BLOCK_K, 32, 32, MANTISSA, BIAS_OF, WIDTH, OPERANDS, False,
        )  # fmt: skip
        v_tile, v_scale = operand_tile(
            v, v_scales, k_first, k_first // 32 + sequence, first, live, kv_head, kv_heads, None,
            DV, BLOCK_DV, BLOCK_K, V_BR, V_BC, MANTISSA, BIAS_OF, WIDTH, OPERANDS, False,
        )  # fmt: skip
        shift = 0
        if ALIGN_END:
            shift = k_len - q_len
        pair_base = tl.zeros([], dtype=tl.int64)
        if BIAS != 0:
            pair_base = tl.load(pair_offsets + sequence, mask=sequence < batch, other=0)
        live_keys = tl.minimum(k_len - first, BLOCK_K)
        # Seen from the keys the window is mirrored: left and right change places, shift its sign.
        lo, full_lo, full_hi, hi = visible_span(
            first, live_keys, q_len, -shift, right, left, HAS_RIGHT, HAS_LEFT, BLOCK_Q
        )
        free_from = first_free_row(q_len, last_full, BEYOND)
        early_lo = 0
        early_hi = 0
        late_lo = q_len
        if BEYOND != 0:
            early_lo, early_hi, lo, full_lo, full_hi, hi, late_lo = span_beyond_of_keys(
                first, live_keys, q_len, shift, prefix, free_from, lo, full_lo, full_hi, hi,
                BEYOND, BLOCK_Q,
            )  # fmt: skip
        dk_sum = tl.zeros([BLOCK_K, BLOCK_D], dtype=tl.float32)
        dv_sum = tl.zeros([BLOCK_K, BLOCK_DV], dtype=tl.float32)
        for member in range(0, GROUP):
            head = kv_head * GROUP + member
            lse = statistics + head.to(tl.int64) * statistics_rows
            lse += statistics_start(d_first, sequence)
            activation_id = 0
            if ACTIVATION == PER_HEAD:
                activation_id = tl.load(activation_ids + head)
            # Stretches 0 and 4 lie before and behind the window, 1 and 3 are its edges, and all of
            # 2 sees every key.
            for stretch in tl.static_range(0, 5):
                if (
                    stretch == 2
                    or (stretch == 0 and HAS_RIGHT and (PREFIX & BEYOND) != 0)
                    or (stretch == 1 and HAS_RIGHT)
                    or (stretch == 3 and HAS_LEFT)
                    or (stretch == 4 and HAS_LEFT and (LAST & BEYOND) != 0)
                ):
                    begin = early_lo if stretch == 0 else (lo if stretch == 1 else (
                        full_lo if stretch == 2 else (full_hi if stretch == 3 else late_lo)
                    ))  # fmt: skip
                    end = early_hi if stretch == 0 else (full_lo if stretch == 1 else (
                        (full_hi if HAS_LEFT else hi) if stretch == 2 else (
                            hi if stretch == 3 else q_len
                        )
                    ))  # fmt: skip
                    dk_sum, dv_sum = _key_value_loop(
                        dk_sum, dv_sum, k_tile, k_scale, v_tile, v_scale, begin, end,
                        q, q_scales, d_out, d_scales, lse,
                        lse + (kv_heads * GROUP).to(tl.int64) * statistics_rows, columns, first,
                        q_first, q_blocks, d_first, d_first // 32 + sequence,
                        q_len, k_len, shift, left, right, prefix, free_from, score_scale,
                        bias, bucket_ids, pair_base, bias_row, bias_head, head, kv_heads * GROUP,
                        activation_id, seed_low, seed_high, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q,
                        BLOCK_K, HAS_LEFT, HAS_RIGHT, BEYOND, BIAS, ACTIVATION, ACTIVATION_SET,
                        MANTISSA, BIAS_OF, WIDTH, LIMIT, CARRY, TOP, SATURATES, FIXED, G_MANTISSA,
                        G_BIAS, G_WIDTH, G_LIMIT, G_CARRY, G_TOP, G_SATURATES, STREAM, OPERANDS,
                        stretch != 2,
                    )  # fmt: skip
        store_rows(
            dk + (k_first * kv_heads + kv_head) * D, first, k_len, kv_heads * D,
            round_to(dk_sum * grad_scale, dk.dtype.element_ty), BLOCK_K, D, BLOCK_D,
        )  # fmt: skip
        store_rows(
            dv + (k_first * kv_heads + kv_head) * DV, first, k_len, kv_heads * DV,
            round_to(dv_sum * value_scale, dv.dtype.element_ty), BLOCK_K, DV, BLOCK_DV,
        )  # fmt: skip


@triton.jit
def _query_loop(
    dq, bucket_sums, q_tile, q_scale, d_tile, d_scale, base, shifts, lo, hi,
    k, k_scales, v, v_scales, k_first, k_blocks, kv_head, kv_heads, rows, numbers,
    q_len, k_len, shift, left, right, prefix, free_from, score_scale,
    bias, bucket_ids, pair_base, bias_row, bias_head, d_bias, head, heads, activation_id,
    seed_low, seed_high, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_K: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BEYOND: tl.constexpr, BIAS: tl.constexpr, BUCKETS: tl.constexpr, BUCKET_BLOCK: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr, ACTIVATION: tl.constexpr, ACTIVATION_SET: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS_OF: tl.constexpr, WIDTH: tl.constexpr, G_MANTISSA: tl.constexpr,
    G_BIAS: tl.constexpr, G_LIMIT: tl.constexpr, G_CARRY: tl.constexpr, G_TOP: tl.constexpr,
    G_SATURATES: tl.constexpr, STREAM: tl.constexpr, V_BR: tl.constexpr, V_BC: tl.constexpr,
    OPERANDS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """dQ of one query tile (and the gradient of its bias) from the key tiles of [lo, hi)."""
    for first in tl.range(lo, hi, BLOCK_K):
        first = tl.multiple_of(first, BLOCK_K)
        columns = first + tl.arange(0, BLOCK_K)
        used = columns < k_len
        seen = (rows < q_len)[:, None] & used[None, :]
        inside = seen
        if MASK:
            used = used_keys(
                columns, q_len, k_len, shift, left, right, prefix, free_from,
                HAS_LEFT, HAS_RIGHT, BEYOND,
            )  # fmt: skip
            seen = inside & visible(
                rows[:, None], columns[None, :], k_len, shift, left, right, prefix, free_from,
                HAS_LEFT, HAS_RIGHT, BEYOND,
            )  # fmt: skip
        k_tile, k_scale = operand_tile(
            k, k_scales, k_first, k_blocks, first, k_len, kv_head, kv_heads, used,
            D, BLOCK_D, BLOCK_K, 32, 32, MANTISSA, BIAS_OF, WIDTH, OPERANDS, MASK,
        )  # fmt: skip
        v_tile, v_scale = operand_tile(
            v, v_scales, k_first, k_blocks, first, k_len, kv_head, kv_heads, used,
            DV, BLOCK_DV, BLOCK_K, V_BR, V_BC, MANTISSA, BIAS_OF, WIDTH, OPERANDS, MASK,
        )  # fmt: skip
        scores = score_scale * product_of_rows(
            q_tile, q_scale, k_tile, k_scale, 0.0, None, OPERANDS
        )
        if BIAS != 0:
            scores += pair_bias(
                bias, bucket_ids, pair_base, rows[:, None], columns[None, :], inside, k_len,
                bias_row, bias_head, head, BIAS,
            )  # fmt: skip
        d_weights = product_of_rows(d_tile, d_scale, v_tile, v_scale, 0.0, None, OPERANDS)
        _, d_scores = _pair_gradients(
            scores, d_weights, base, shifts, seen, activation_id, ACTIVATION, ACTIVATION_SET
        )
        if BIAS_GRADIENT:
            bucket_sums = _bias_gradient(
                bucket_sums, d_bias, d_scores, bucket_ids, pair_base, rows, columns, inside,
                k_len, head, heads, BIAS, BUCKETS, BUCKET_BLOCK,
            )  # fmt: skip
        d_scores = _held_scores(
            d_scores, numbers, first, seed_low, seed_high, G_LIMIT, G_CARRY, G_TOP, G_SATURATES,
            G_MANTISSA, G_BIAS, STREAM, BLOCK_K, False,
        )  # fmt: skip
        dq = dot(round_to(d_scores, k_tile.dtype), k_tile, dq)
    return dq, bucket_sums


@triton.jit(do_not_specialize=COUNTS)
def mx_query_gradient_kernel(
    q, k, v, d_out, q_scales, k_scales, v_scales, d_scales, statistics, dq, d_bias,
    bias, bucket_ids, activation_ids, q_offsets, k_offsets, pair_offsets, tile_sequence, tile_block,
    batch, total_q, total_k, statistics_rows, left, right, prefix, last_full,
    score_scale, grad_scale, bias_row, bias_head, seed_low, seed_high,
    heads, group, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIGN_END: tl.constexpr,
    BEYOND: tl.constexpr, BIAS: tl.constexpr, BUCKETS: tl.constexpr, BUCKET_BLOCK: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr, ACTIVATION: tl.constexpr, ACTIVATION_SET: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS_OF: tl.constexpr, WIDTH: tl.constexpr, G_MANTISSA: tl.constexpr,
    G_BIAS: tl.constexpr, G_WIDTH: tl.constexpr, G_LIMIT: tl.constexpr, G_CARRY: tl.constexpr,
    G_TOP: tl.constexpr, G_SATURATES: tl.constexpr, STREAM: tl.constexpr, V_BR: tl.constexpr,
    V_BC: tl.constexpr, OPERANDS: tl.constexpr, SHARED_Q: tl.constexpr,
):  # fmt: skip
    """dQ: one program a query tile and head. A shared query gets a dQ a sequence, summed later."""
    item = tl.program_id(0)
    head = item % heads
    sequence = tl.load(tile_sequence + item // heads)
    if sequence >= 0:
        q_first, q_len = tile_rows(q_offsets, sequence, batch, total_q, SHARED_Q)
        k_first, k_len = other_rows(k_offsets, sequence, batch, total_k, False)
        q_blocks = q_first // 32 + sequence
        d_first = q_first
        if SHARED_Q:
            d_first = sequence.to(tl.int64) * total_q
            q_blocks = tl.zeros([], dtype=tl.int64)
        first_row = tl.multiple_of(tl.load(tile_block + item // heads) * BLOCK_Q, BLOCK_Q)
        rows = first_row + tl.arange(0, BLOCK_Q)
        # Padding rows meet no key, and have no scales.
        live = tl.where(sequence < batch, q_len, 0)
        q_tile, q_scale = operand_tile(
            q, q_scales, q_first, q_blocks, first_row, live, head, heads, None,
            D, BLOCK_D, BLOCK_Q, 32, 32, MANTISSA, BIAS_OF, WIDTH, OPERANDS, False,
        )  # fmt: skip
        d_tile, d_scale = operand_tile(
            d_out, d_scales, d_first, d_first // 32 + sequence, first_row, live, head, heads, None,
            DV, BLOCK_DV, BLOCK_Q, 32, 32, G_MANTISSA, G_BIAS, G_WIDTH, OPERANDS, False,
        )  # fmt: skip
        base = 0.0
        shifts = 0.0
        if ACTIVATION == SOFTMAX:
            lse = statistics + head.to(tl.int64) * statistics_rows
            lse += statistics_start(d_first, sequence)
            base = tl.load(lse + rows)[:, None]
            shifts = tl.load(lse + heads.to(tl.int64) * statistics_rows + rows)[:, None]
        activation_id = 0
        if ACTIVATION == PER_HEAD:
            activation_id = tl.load(activation_ids + head)
        pair_base = tl.zeros([], dtype=tl.int64)
        if BIAS != 0:
            pair_base = tl.load(pair_offsets + sequence, mask=sequence < batch, other=0)
        shift = 0
        if ALIGN_END:
            shift = k_len - q_len
        live_rows = tl.minimum(q_len - first_row, BLOCK_Q)
        lo, full_lo, full_hi, hi = visible_span(
            first_row, live_rows, k_len, shift, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_K
        )
        free_from = first_free_row(q_len, last_full, BEYOND)
        early = 0
        if BEYOND != 0:
            early, lo, full_lo, full_hi, hi = span_beyond_of_queries(
                first_row, live_rows, k_len, shift, prefix, free_from, lo, full_lo, full_hi, hi,
                BEYOND, BLOCK_K,
            )  # fmt: skip
        dq_sum = tl.zeros([BLOCK_Q, BLOCK_D], dtype=tl.float32)
        bucket_sums = tl.zeros([BUCKET_BLOCK], dtype=tl.float32)
        # Stretches as in the forward kernel.
        for stretch in tl.static_range(0 if (PREFIX & BEYOND) != 0 else 1, 4):
            if HAS_LEFT or stretch >= 2:
                begin = (
                    0
                    if stretch == 0
                    else (lo if stretch == 1 else (full_lo if stretch == 2 else full_hi))
                )
                end = (
                    early
                    if stretch == 0
                    else (full_lo if stretch == 1 else (full_hi if stretch == 2 else hi))
                )
                dq_sum, bucket_sums = _query_loop(
                    dq_sum, bucket_sums, q_tile, q_scale, d_tile, d_scale, base, shifts, begin, end,
                    k, k_scales, v, v_scales, k_first, k_first // 32 + sequence, head // group,
                    heads // group, rows, (d_first + rows) * heads + head,
                    q_len, k_len, shift, left, right, prefix, free_from, score_scale,
                    bias, bucket_ids, pair_base, bias_row, bias_head, d_bias, head, heads,
                    activation_id, seed_low, seed_high, D, DV, BLOCK_D, BLOCK_DV, BLOCK_K,
                    HAS_LEFT, HAS_RIGHT, BEYOND, BIAS, BUCKETS, BUCKET_BLOCK, BIAS_GRADIENT,
                    ACTIVATION, ACTIVATION_SET, MANTISSA, BIAS_OF, WIDTH, G_MANTISSA, G_BIAS,
                    G_LIMIT, G_CARRY, G_TOP, G_SATURATES, STREAM, V_BR, V_BC, OPERANDS,
                    stretch != 2,
                )  # fmt: skip
        store_rows(
            dq + (d_first * heads + head) * D, first_row, q_len, heads * D,
            round_to(dq_sum * grad_scale, dq.dtype.element_ty), BLOCK_Q, D, BLOCK_D,
        )  # fmt: skip
        if BIAS_GRADIENT and BIAS == 2:
            slots = tl.arange(0, BUCKET_BLOCK)
            place = d_bias + item.to(tl.int64) * BUCKETS + slots
            tl.store(place, bucket_sums, mask=slots < BUCKETS)
