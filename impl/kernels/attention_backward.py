"""Backward of jagged attention and of GDPA: one skeleton, two pairs of weights.

With S = Q K^T both operators are O = A V, and

    dV = A^T dO      dA = dO V^T      dS = A' * dA      dQ = dS K      dK = dS^T Q

Softmax:  A = exp(S - lse),   dS = A * (dA - delta),   delta = rowsum(dO * O) - dlse
GDPA:     A = act(S),         dS = act'(S) * dA

`softmax` picks the pair at compile time; nothing of the other remains. Split form: one kernel per
key tile for dK and dV, one per query tile for dQ; every sum has a fixed order, so repeats are
bit-equal. Atomic form: the first kernel also adds its share of dQ with atomics in fp32, which saves
recomputing S and dA at the price of a fixed order.
"""

import triton
import triton.language as tl

from jagbench.impl.kernels.activations import (
    PER_HEAD,
    SOFTMAX,
    activate_and_derivative,
    activate_and_derivative_dynamic,
)
from jagbench.impl.kernels.interpreter import dot, round_to, to_float
from jagbench.impl.kernels.tiles import (
    GRADIENT_COUNTS,
    LAST,
    PREFIX,
    first_free_row,
    load_rows,
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
#: Rows to whose multiples a sequence's row statistics are padded: the longest tile of query rows.
STATISTICS_PAD: tl.constexpr = tl.constexpr(128)


@triton.jit
def statistics_start(first_row, sequence):
    """Where a sequence's row statistics begin: a multiple of STATISTICS_PAD, room to spare behind.

    Each sequence starts a tile of its own, so that a tile of rows is loaded whole, aligned and
    without a mask. Two pads a sequence keep neighbours apart wherever `first_row` falls in its own.
    """
    return (first_row // STATISTICS_PAD + 2 * sequence) * STATISTICS_PAD


@triton.jit(do_not_specialize=[*GRADIENT_COUNTS, "out_rows"])
def row_statistics_kernel(
    out, d_out, lse, d_lse, statistics, q_offsets, k_offsets, tile_sequence, tile_block,
    batch, total_q, out_rows, statistics_rows, d_row, d_head, d_lse_row, d_lse_head,
    heads, DV: tl.constexpr, BLOCK_DV: tl.constexpr, SHARED_Q: tl.constexpr,
    HAS_D_LSE: tl.constexpr, OWN_KEYS: tl.constexpr,
):  # fmt: skip
    """What the backward needs of each row, `[2, heads, statistics_rows]` in padded layout.

    First lse in units of log 2, +inf for a row that sees nothing or is none; then
    delta = rowsum(d_out * out) - d_lse, 0 for a row that is none or has OWN_KEYS keys and less.
    """
    head = tl.program_id(0) % heads
    item = tl.program_id(0) // heads
    sequence = tl.load(tile_sequence + item)
    if sequence >= 0:
        q_first, q_len = tile_rows(q_offsets, sequence, batch, total_q, SHARED_Q)
        if SHARED_Q:
            q_first = sequence.to(tl.int64) * total_q
        first = tl.load(tile_block + item) * STATISTICS_PAD
        rows = first + tl.arange(0, STATISTICS_PAD)
        inside = rows < q_len
        read = q_len
        if OWN_KEYS > 0:
            _, keys = other_rows(k_offsets, sequence, batch, 0, False)
            read = tl.where(keys > OWN_KEYS, q_len, 0)
        o = load_rows(
            out + (q_first * heads + head) * DV, first, read, heads * DV,
            STATISTICS_PAD, DV, BLOCK_DV,
        )  # fmt: skip
        g = load_rows(
            d_out + q_first * d_row + head.to(tl.int64) * d_head, first, read, d_row,
            STATISTICS_PAD, DV, BLOCK_DV,
        )  # fmt: skip
        delta = tl.sum(to_float(o) * to_float(g), 1)
        if HAS_D_LSE:
            # The gradient of lse in units of log 2 is that of lse itself times ln 2.
            slope = tl.load(
                d_lse + (q_first + rows) * d_lse_row + head.to(tl.int64) * d_lse_head,
                mask=inside,
                other=0.0,
            )
            delta -= slope * LOG2E
        value = tl.load(
            lse + head.to(tl.int64) * out_rows + q_first + rows, mask=inside, other=float("-inf")
        )
        value = tl.where(value == float("-inf"), float("inf"), value)
        target = statistics_start(q_first, sequence) + rows
        tl.store(statistics + head.to(tl.int64) * statistics_rows + target, value)
        # A row without visible keys may carry anything upstream: its delta must not be NaN.
        delta = tl.where(value == float("inf"), 0.0, delta)
        tl.store(statistics + (heads + head).to(tl.int64) * statistics_rows + target, delta)


@triton.jit
def _weights(
    scores, d_weights, lse, delta, seen, activation_id,
    ACTIVATION: tl.constexpr, ACTIVATION_SET: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """A and dS of a tile of scores. Softmax scores come in units of log 2, others as they are.

    lse, delta broadcast against the scores; rows that see nothing carry lse = +inf, so A = 0.
    """
    if ACTIVATION == SOFTMAX:
        # A weight is at most 1: the clamp only meets padded keys, whose zero K and V rows drop
        # whatever they get here, so long as it is finite.
        weights = tl.exp2(tl.minimum(scores - lse, 0.0))
        if MASK:
            weights = tl.where(seen, weights, 0.0)
        d_scores = weights * (d_weights - delta)
    else:
        if ACTIVATION == PER_HEAD:
            weights, slope = activate_and_derivative_dynamic(scores, activation_id, ACTIVATION_SET)
        else:
            weights, slope = activate_and_derivative(scores, ACTIVATION)
        d_scores = slope * d_weights
        if MASK:
            weights = tl.where(seen, weights, 0.0)
            d_scores = tl.where(seen, d_scores, 0.0)
    return weights, d_scores


@triton.jit
def _row_statistics(lse, delta, first, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """lse (log 2 units) and delta of BLOCK query rows from a position of their sequence on."""
    rows = tl.arange(0, BLOCK)
    if ACTIVATION == SOFTMAX:
        base = tl.load(lse + first + rows)
        shift = tl.load(delta + first + rows)
    else:
        base = rows.to(tl.float32)
        shift = base
    return base, shift


@triton.jit
def _key_value_loop(
    dk, dv, k_tile, v_tile, lo, hi, q, d_out, lse, delta, dq, columns,
    q_row, d_row, dq_row, q_len, k_len, shift, left, right, prefix, free_from,
    score_scale, grad_scale, bias, bucket_ids, pair_base, bias_row, bias_head, head, activation_id,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BEYOND: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, ACTIVATION_SET: tl.constexpr, MASK: tl.constexpr,
    ATOMIC_DQ: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile from the query tiles of [lo, hi); tiles are `[keys, queries]`."""
    for first in tl.range(lo, hi, BLOCK_Q):
        first = tl.multiple_of(first, BLOCK_Q)
        q_tile = load_rows(q, first, q_len, q_row, BLOCK_Q, D, BLOCK_D)
        d_tile = load_rows(d_out, first, q_len, d_row, BLOCK_Q, DV, BLOCK_DV)
        rows = first + tl.arange(0, BLOCK_Q)
        lse_tile, delta_tile = _row_statistics(lse, delta, first, BLOCK_Q, ACTIVATION)
        scores = dot(k_tile, tl.trans(q_tile)) * score_scale
        inside = (rows < q_len)[None, :] & (columns < k_len)[:, None]
        seen = inside
        if MASK:
            seen = inside & visible(
                rows[None, :], columns[:, None], k_len, shift, left, right, prefix, free_from,
                HAS_LEFT, HAS_RIGHT, BEYOND,
            )  # fmt: skip
        if BIAS != 0:
            scores += pair_bias(
                bias, bucket_ids, pair_base, rows[None, :], columns[:, None], inside, k_len,
                bias_row, bias_head, head, BIAS,
            ) * LOG2E  # fmt: skip
        d_weights = dot(v_tile, tl.trans(d_tile))
        weights, d_scores = _weights(
            scores, d_weights, lse_tile[None, :], delta_tile[None, :], seen, activation_id,
            ACTIVATION, ACTIVATION_SET, MASK,
        )  # fmt: skip
        dv = dot(round_to(weights, d_out.dtype.element_ty), d_tile, dv)
        d_scores = round_to(d_scores, q.dtype.element_ty)
        dk = dot(d_scores, q_tile, dk)
        if ATOMIC_DQ:
            share = dot(tl.trans(d_scores), k_tile) * grad_scale
            r = tl.arange(0, BLOCK_Q)
            c = tl.arange(0, BLOCK_D)
            address = dq + first.to(tl.int64) * dq_row + (r[:, None] * dq_row + c[None, :])
            kept = (rows < q_len)[:, None] & (c < D)[None, :]
            tl.atomic_add(address, share, mask=kept, sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=GRADIENT_COUNTS)
def key_value_gradient_kernel(
    q, k, v, d_out, statistics, dq, dk, dv, bias, bucket_ids, activation_ids,
    q_offsets, k_offsets, pair_offsets, tile_sequence, tile_block,
    batch, total_q, total_k, statistics_rows, left, right, prefix, last_full,
    score_scale, grad_scale, value_scale,
    q_row, q_head, k_row, k_head, v_row, v_head, d_row, d_head, bias_row, bias_head,
    kv_heads, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIGN_END: tl.constexpr,
    BEYOND: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    ACTIVATION_SET: tl.constexpr, SHARED_Q: tl.constexpr, ATOMIC_DQ: tl.constexpr,
):  # fmt: skip
    """dK, dV `[rows, kv_heads, ...]`: one program a key tile and key head, over its query heads."""
    kv_head = tl.program_id(0) % kv_heads
    item = tl.program_id(0) // kv_heads
    sequence = tl.load(tile_sequence + item)
    if sequence >= 0:
        block = tl.load(tile_block + item)
        k_first, k_len = sequence_rows(k_offsets, sequence, batch, total_k)
        q_first, q_len = other_rows(q_offsets, sequence, batch, total_q, SHARED_Q)
        d_first = q_first
        if SHARED_Q:
            d_first = sequence.to(tl.int64) * total_q
        first = block * BLOCK_K
        columns = first + tl.arange(0, BLOCK_K)
        k_tile = load_rows(
            k + k_first * k_row + kv_head.to(tl.int64) * k_head, first, k_len, k_row,
            BLOCK_K, D, BLOCK_D,
        )  # fmt: skip
        v_tile = load_rows(
            v + k_first * v_row + kv_head.to(tl.int64) * v_head, first, k_len, v_row,
            BLOCK_K, DV, BLOCK_DV,
        )  # fmt: skip
        shift = 0
        if ALIGN_END:
            shift = k_len - q_len
        pair_base = tl.zeros([], dtype=tl.int64)
        if BIAS != 0:
            pair_base = tl.load(pair_offsets + sequence, mask=sequence < batch, other=0)
        # Seen from the keys the window is mirrored: left and right change places, shift its sign.
        lo, full_lo, full_hi, hi = visible_span(
            first, tl.minimum(k_len - first, BLOCK_K), q_len, -shift, right, left,
            HAS_RIGHT, HAS_LEFT, BLOCK_Q,
        )  # fmt: skip
        free_from = first_free_row(q_len, last_full, BEYOND)
        if BEYOND != 0:
            early_lo, early_hi, lo, full_lo, full_hi, hi, late_lo = span_beyond_of_keys(
                first, tl.minimum(k_len - first, BLOCK_K), q_len, shift, prefix, free_from,
                lo, full_lo, full_hi, hi, BEYOND, BLOCK_Q,
            )  # fmt: skip
        dk_sum = tl.zeros([BLOCK_K, BLOCK_D], dtype=tl.float32)
        dv_sum = tl.zeros([BLOCK_K, BLOCK_DV], dtype=tl.float32)
        for member in range(0, GROUP):
            head = kv_head * GROUP + member
            q_base = q + q_first * q_row + head.to(tl.int64) * q_head
            d_base = d_out + d_first * d_row + head.to(tl.int64) * d_head
            start = statistics_start(d_first, sequence)
            lse_base = statistics + head.to(tl.int64) * statistics_rows + start
            delta_base = lse_base + (kv_heads * GROUP).to(tl.int64) * statistics_rows
            dq_base = dq + (q_first * (kv_heads * GROUP) + head) * D
            activation_id = 0
            if ACTIVATION == PER_HEAD:
                activation_id = tl.load(activation_ids + head)
            if HAS_RIGHT and (PREFIX & BEYOND) != 0:
                dk_sum, dv_sum = _key_value_loop(
                    dk_sum, dv_sum, k_tile, v_tile, early_lo, early_hi, q_base, d_base,
                    lse_base, delta_base, dq_base, columns,
                    q_row, d_row, kv_heads * GROUP * D, q_len, k_len, shift, left, right, prefix,
                    free_from, score_scale, grad_scale, bias, bucket_ids, pair_base, bias_row,
                    bias_head, head, activation_id, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q,
                    HAS_LEFT, HAS_RIGHT, BEYOND, BIAS, ACTIVATION, ACTIVATION_SET, True, ATOMIC_DQ,
                )  # fmt: skip
            if HAS_RIGHT:
                dk_sum, dv_sum = _key_value_loop(
                    dk_sum, dv_sum, k_tile, v_tile, lo, full_lo, q_base, d_base,
                    lse_base, delta_base, dq_base, columns,
                    q_row, d_row, kv_heads * GROUP * D, q_len, k_len, shift, left, right, prefix,
                    free_from, score_scale, grad_scale, bias, bucket_ids, pair_base, bias_row,
                    bias_head, head, activation_id, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q,
                    HAS_LEFT, HAS_RIGHT, BEYOND, BIAS, ACTIVATION, ACTIVATION_SET, True, ATOMIC_DQ,
                )  # fmt: skip
            # Rows past the sequence's end are zeros and carry lse = +inf: no mask is needed there.
            dk_sum, dv_sum = _key_value_loop(
                dk_sum, dv_sum, k_tile, v_tile, full_lo, full_hi if HAS_LEFT else hi,
                q_base, d_base, lse_base, delta_base, dq_base, columns,
                q_row, d_row, kv_heads * GROUP * D, q_len, k_len, shift, left, right, prefix,
                free_from, score_scale, grad_scale, bias, bucket_ids, pair_base, bias_row,
                bias_head, head, activation_id, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q,
                HAS_LEFT, HAS_RIGHT, BEYOND, BIAS, ACTIVATION, ACTIVATION_SET, False, ATOMIC_DQ,
            )  # fmt: skip
            if HAS_LEFT:
                dk_sum, dv_sum = _key_value_loop(
                    dk_sum, dv_sum, k_tile, v_tile, full_hi, hi, q_base, d_base,
                    lse_base, delta_base, dq_base, columns,
                    q_row, d_row, kv_heads * GROUP * D, q_len, k_len, shift, left, right, prefix,
                    free_from, score_scale, grad_scale, bias, bucket_ids, pair_base, bias_row,
                    bias_head, head, activation_id, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q,
                    HAS_LEFT, HAS_RIGHT, BEYOND, BIAS, ACTIVATION, ACTIVATION_SET, True, ATOMIC_DQ,
                )  # fmt: skip
            if HAS_LEFT and (LAST & BEYOND) != 0:
                dk_sum, dv_sum = _key_value_loop(
                    dk_sum, dv_sum, k_tile, v_tile, late_lo, q_len, q_base, d_base,
                    lse_base, delta_base, dq_base, columns,
                    q_row, d_row, kv_heads * GROUP * D, q_len, k_len, shift, left, right, prefix,
                    free_from, score_scale, grad_scale, bias, bucket_ids, pair_base, bias_row,
                    bias_head, head, activation_id, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q,
                    HAS_LEFT, HAS_RIGHT, BEYOND, BIAS, ACTIVATION, ACTIVATION_SET, True, ATOMIC_DQ,
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
def _bias_gradient(
    bucket_sums, d_bias, d_scores, bucket_ids, pair_base, rows, columns, inside, k_len, head,
    heads, BIAS: tl.constexpr, BUCKETS: tl.constexpr, BUCKET_BLOCK: tl.constexpr,
):  # fmt: skip
    """Dense: dS is stored, `[pairs, heads]`. Bucketed: dS is added up by bucket, in fixed order."""
    pair = pair_base + rows[:, None].to(tl.int64) * k_len + columns[None, :]
    if BIAS == 1:
        tl.store(d_bias + pair * heads + head, d_scores, mask=inside)
    else:
        bucket = tl.load(bucket_ids + pair, mask=inside, other=0).to(tl.int32)
        kept = tl.where(inside, d_scores, 0.0)
        slots = tl.arange(0, BUCKET_BLOCK)
        for b in range(0, BUCKETS):
            share = tl.sum(tl.sum(tl.where(bucket == b, kept, 0.0), 1), 0)
            bucket_sums += tl.where(slots == b, share, 0.0)
    return bucket_sums


@triton.jit
def _query_loop(
    dq, bucket_sums, q_tile, d_tile, lse_tile, delta_tile, lo, hi, k, v, rows, k_row, v_row,
    q_len, k_len, shift, left, right, prefix, free_from, score_scale,
    bias, bucket_ids, pair_base, bias_row, bias_head, d_bias, head, activation_id,
    heads, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_K: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, BEYOND: tl.constexpr, BIAS: tl.constexpr, BUCKETS: tl.constexpr,
    BUCKET_BLOCK: tl.constexpr, BIAS_GRADIENT: tl.constexpr, ACTIVATION: tl.constexpr,
    ACTIVATION_SET: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """dQ of one query tile (and the gradient of its bias) from the key tiles of [lo, hi)."""
    for first in tl.range(lo, hi, BLOCK_K):
        first = tl.multiple_of(first, BLOCK_K)
        k_tile = load_rows(k, first, k_len, k_row, BLOCK_K, D, BLOCK_D)
        v_tile = load_rows(v, first, k_len, v_row, BLOCK_K, DV, BLOCK_DV)
        columns = first + tl.arange(0, BLOCK_K)
        scores = dot(q_tile, tl.trans(k_tile)) * score_scale
        inside = (rows < q_len)[:, None] & (columns < k_len)[None, :]
        seen = inside
        if MASK:
            seen = inside & visible(
                rows[:, None], columns[None, :], k_len, shift, left, right, prefix, free_from,
                HAS_LEFT, HAS_RIGHT, BEYOND,
            )  # fmt: skip
        if BIAS != 0:
            scores += pair_bias(
                bias, bucket_ids, pair_base, rows[:, None], columns[None, :], inside, k_len,
                bias_row, bias_head, head, BIAS,
            ) * LOG2E  # fmt: skip
        d_weights = dot(d_tile, tl.trans(v_tile))
        _, d_scores = _weights(
            scores, d_weights, lse_tile[:, None], delta_tile[:, None], seen, activation_id,
            ACTIVATION, ACTIVATION_SET, MASK,
        )  # fmt: skip
        if BIAS_GRADIENT:
            bucket_sums = _bias_gradient(
                bucket_sums, d_bias, d_scores, bucket_ids, pair_base, rows, columns, inside,
                k_len, head, heads, BIAS, BUCKETS, BUCKET_BLOCK,
            )  # fmt: skip
        dq = dot(round_to(d_scores, k.dtype.element_ty), k_tile, dq)
    return dq, bucket_sums


@triton.jit(do_not_specialize=GRADIENT_COUNTS)
def query_gradient_kernel(
    q, k, v, d_out, statistics, dq, d_bias, bias, bucket_ids, activation_ids,
    q_offsets, k_offsets, pair_offsets, tile_sequence, tile_block,
    batch, total_q, total_k, statistics_rows, left, right, prefix, last_full,
    score_scale, grad_scale,
    q_row, q_head, k_row, k_head, v_row, v_head, d_row, d_head, bias_row, bias_head,
    heads, group, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIGN_END: tl.constexpr,
    BEYOND: tl.constexpr, BIAS: tl.constexpr, BUCKETS: tl.constexpr, BUCKET_BLOCK: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr, ACTIVATION: tl.constexpr, ACTIVATION_SET: tl.constexpr,
    SHARED_Q: tl.constexpr,
):  # fmt: skip
    """dQ: one program a query tile and head. A shared query gets a dQ a sequence, summed later."""
    item = tl.program_id(0)
    head = item % heads
    sequence = tl.load(tile_sequence + item // heads)
    if sequence >= 0:
        block = tl.load(tile_block + item // heads)
        q_first, q_len = tile_rows(q_offsets, sequence, batch, total_q, SHARED_Q)
        k_first, k_len = other_rows(k_offsets, sequence, batch, total_k, False)
        d_first = q_first
        if SHARED_Q:
            d_first = sequence.to(tl.int64) * total_q
        kv_head = head // group
        first_row = block * BLOCK_Q
        rows = first_row + tl.arange(0, BLOCK_Q)
        q_tile = load_rows(
            q + q_first * q_row + head.to(tl.int64) * q_head, first_row, q_len, q_row,
            BLOCK_Q, D, BLOCK_D,
        )  # fmt: skip
        d_tile = load_rows(
            d_out + d_first * d_row + head.to(tl.int64) * d_head, first_row, q_len, d_row,
            BLOCK_Q, DV, BLOCK_DV,
        )  # fmt: skip
        start = statistics_start(d_first, sequence)
        lse_base = statistics + head.to(tl.int64) * statistics_rows + start
        lse_tile, delta_tile = _row_statistics(
            lse_base,
            lse_base + heads.to(tl.int64) * statistics_rows,
            first_row,
            BLOCK_Q,
            ACTIVATION,
        )
        k_base = k + k_first * k_row + kv_head.to(tl.int64) * k_head
        v_base = v + k_first * v_row + kv_head.to(tl.int64) * v_head
        activation_id = 0
        if ACTIVATION == PER_HEAD:
            activation_id = tl.load(activation_ids + head)
        pair_base = tl.zeros([], dtype=tl.int64)
        if BIAS != 0:
            pair_base = tl.load(pair_offsets + sequence, mask=sequence < batch, other=0)
        shift = 0
        if ALIGN_END:
            shift = k_len - q_len
        lo, full_lo, full_hi, hi = visible_span(
            first_row, tl.minimum(q_len - first_row, BLOCK_Q), k_len, shift, left, right,
            HAS_LEFT, HAS_RIGHT, BLOCK_K,
        )  # fmt: skip
        free_from = first_free_row(q_len, last_full, BEYOND)
        if BEYOND != 0:
            early, lo, full_lo, full_hi, hi = span_beyond_of_queries(
                first_row, tl.minimum(q_len - first_row, BLOCK_Q), k_len, shift, prefix, free_from,
                lo, full_lo, full_hi, hi, BEYOND, BLOCK_K,
            )  # fmt: skip
        dq_sum = tl.zeros([BLOCK_Q, BLOCK_D], dtype=tl.float32)
        bucket_sums = tl.zeros([BUCKET_BLOCK], dtype=tl.float32)
        # A bias on padded keys breaks "score 0", so with a bias the last tile is masked too.
        TAIL: tl.constexpr = HAS_RIGHT or BIAS != 0
        if HAS_LEFT and (PREFIX & BEYOND) != 0:
            dq_sum, bucket_sums = _query_loop(
                dq_sum, bucket_sums, q_tile, d_tile, lse_tile, delta_tile, 0, early,
                k_base, v_base, rows, k_row, v_row, q_len, k_len, shift, left, right,
                prefix, free_from, score_scale, bias, bucket_ids, pair_base, bias_row, bias_head,
                d_bias, head, activation_id, heads, D, DV, BLOCK_D, BLOCK_DV, BLOCK_K, HAS_LEFT,
                HAS_RIGHT, BEYOND, BIAS, BUCKETS, BUCKET_BLOCK, BIAS_GRADIENT, ACTIVATION,
                ACTIVATION_SET, True,
            )  # fmt: skip
        if HAS_LEFT:
            dq_sum, bucket_sums = _query_loop(
                dq_sum, bucket_sums, q_tile, d_tile, lse_tile, delta_tile, lo, full_lo,
                k_base, v_base, rows, k_row, v_row, q_len, k_len, shift, left, right,
                prefix, free_from, score_scale, bias, bucket_ids, pair_base, bias_row, bias_head,
                d_bias, head, activation_id, heads, D, DV, BLOCK_D, BLOCK_DV, BLOCK_K, HAS_LEFT,
                HAS_RIGHT, BEYOND, BIAS, BUCKETS, BUCKET_BLOCK, BIAS_GRADIENT, ACTIVATION,
                ACTIVATION_SET, True,
            )  # fmt: skip
        dq_sum, bucket_sums = _query_loop(
            dq_sum, bucket_sums, q_tile, d_tile, lse_tile, delta_tile, full_lo,
            full_hi if TAIL else hi,
            k_base, v_base, rows, k_row, v_row, q_len, k_len, shift, left, right,
            prefix, free_from, score_scale, bias, bucket_ids, pair_base, bias_row, bias_head,
            d_bias, head, activation_id, heads, D, DV, BLOCK_D, BLOCK_DV, BLOCK_K, HAS_LEFT,
            HAS_RIGHT, BEYOND, BIAS, BUCKETS, BUCKET_BLOCK, BIAS_GRADIENT, ACTIVATION,
            ACTIVATION_SET, False,
        )  # fmt: skip
        if TAIL:
            dq_sum, bucket_sums = _query_loop(
                dq_sum, bucket_sums, q_tile, d_tile, lse_tile, delta_tile, full_hi, hi,
                k_base, v_base, rows, k_row, v_row, q_len, k_len, shift, left, right,
                prefix, free_from, score_scale, bias, bucket_ids, pair_base, bias_row, bias_head,
                d_bias, head, activation_id, heads, D, DV, BLOCK_D, BLOCK_DV, BLOCK_K, HAS_LEFT,
                HAS_RIGHT, BEYOND, BIAS, BUCKETS, BUCKET_BLOCK, BIAS_GRADIENT, ACTIVATION,
                ACTIVATION_SET, True,
            )  # fmt: skip
        store_rows(
            dq + (d_first * heads + head) * D, first_row, q_len, heads * D,
            round_to(dq_sum * grad_scale, dq.dtype.element_ty), BLOCK_Q, D, BLOCK_D,
        )  # fmt: skip
        if BIAS_GRADIENT and BIAS == 2:
            slots = tl.arange(0, BUCKET_BLOCK)
            tl.store(
                d_bias + item.to(tl.int64) * BUCKETS + slots, bucket_sums, mask=slots < BUCKETS
            )
