"""GDPA, forward: O = post_scale act(pre_scale Q K^T) V, with nothing of softmax in it.

No row maximum, no denominator, no correction: a tile of scores becomes weights by itself. Rows past
a sequence's end are loaded as zeros, and a zero value row drops whatever act(0) is, so lengths need
no mask; only window and causal edges do.

Two kernels. `gdpa_forward_kernel` walks the keys of one query tile. `gdpa_short_keys_kernel` keeps
K and V of a short sequence (PFFN, cross attention) on chip and walks its query tiles instead, so
that the loads of the next tile hide behind the products of this one; a sequence whose keys do not
fit takes the first kernel's loop inside the second.
"""

import triton
import triton.language as tl

from jagbench.impl.kernels.activations import PER_HEAD, activate, activate_dynamic
from jagbench.impl.kernels.interpreter import dot, round_to
from jagbench.impl.kernels.schedule import zigzag_index
from jagbench.impl.kernels.tiles import (
    COUNTS,
    PREFIX,
    first_free_row,
    load_rows,
    other_rows,
    span_beyond_of_queries,
    store_rows,
    tile_rows,
    visible,
    visible_span,
)


@triton.jit
def _weights(
    scores, rows, columns, k_len, shift, left, right, prefix, free_from, activation_id,
    ACTIVATION: tl.constexpr, ACTIVATION_SET: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BEYOND: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """act of a tile of scores; masked pairs are set to 0 afterwards, as act(0) may not be 0."""
    if ACTIVATION == PER_HEAD:
        weights = activate_dynamic(scores, activation_id, ACTIVATION_SET)
    else:
        weights = activate(scores, ACTIVATION)
    if MASK:
        seen = visible(
            rows[:, None], columns[None, :], k_len, shift, left, right, prefix, free_from,
            HAS_LEFT, HAS_RIGHT, BEYOND,
        )  # fmt: skip
        weights = tl.where(seen, weights, 0.0)
    return weights


@triton.jit
def _accumulate(
    accumulator, q_tile, lo, hi, k, v, k_row, v_row, rows, k_len, shift, left, right, prefix,
    free_from, pre_scale, activation_id,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BEYOND: tl.constexpr,
    ACTIVATION: tl.constexpr, ACTIVATION_SET: tl.constexpr, MASK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the key tiles of [lo, hi) to a tile of the output."""
    for first in tl.range(lo, hi, BLOCK_K):
        first = tl.multiple_of(first, BLOCK_K)
        k_tile = load_rows(k, first, k_len, k_row, BLOCK_K, D, BLOCK_D)
        v_tile = load_rows(v, first, k_len, v_row, BLOCK_K, DV, BLOCK_DV)
        scores = dot(q_tile, tl.trans(k_tile)) * pre_scale
        weights = _weights(
            scores, rows, first + tl.arange(0, BLOCK_K), k_len, shift, left, right, prefix,
            free_from, activation_id, ACTIVATION, ACTIVATION_SET, HAS_LEFT, HAS_RIGHT, BEYOND, MASK,
        )  # fmt: skip
        accumulator = dot(round_to(weights, DTYPE), v_tile, accumulator)
    return accumulator


@triton.jit
def _walk_keys(
    q_tile, first_row, q_len, k_len, k, v, k_row, v_row, shift, left, right, prefix, last_full,
    pre_scale, activation_id,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BEYOND: tl.constexpr, ACTIVATION: tl.constexpr, ACTIVATION_SET: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Output tile `[BLOCK_Q, BLOCK_DV]` of one query tile over every visible key tile."""
    rows = first_row + tl.arange(0, BLOCK_Q)
    lo, full_lo, full_hi, hi = visible_span(
        first_row, tl.minimum(q_len - first_row, BLOCK_Q), k_len, shift, left, right,
        HAS_LEFT, HAS_RIGHT, BLOCK_K,
    )  # fmt: skip
    free_from = first_free_row(q_len, last_full, BEYOND)
    accumulator = tl.zeros([BLOCK_Q, BLOCK_DV], dtype=tl.float32)
    if BEYOND != 0:
        early, lo, full_lo, full_hi, hi = span_beyond_of_queries(
            first_row, tl.minimum(q_len - first_row, BLOCK_Q), k_len, shift, prefix, free_from,
            lo, full_lo, full_hi, hi, BEYOND, BLOCK_K,
        )  # fmt: skip
    if HAS_LEFT and (PREFIX & BEYOND) != 0:
        accumulator = _accumulate(
            accumulator, q_tile, 0, early, k, v, k_row, v_row, rows, k_len, shift, left, right,
            prefix, free_from, pre_scale, activation_id, D, DV, BLOCK_D, BLOCK_DV, BLOCK_K,
            HAS_LEFT, HAS_RIGHT, BEYOND, ACTIVATION, ACTIVATION_SET, True, DTYPE,
        )  # fmt: skip
    if HAS_LEFT:
        accumulator = _accumulate(
            accumulator, q_tile, lo, full_lo, k, v, k_row, v_row, rows, k_len, shift, left, right,
            prefix, free_from, pre_scale, activation_id, D, DV, BLOCK_D, BLOCK_DV, BLOCK_K,
            HAS_LEFT, HAS_RIGHT, BEYOND, ACTIVATION, ACTIVATION_SET, True, DTYPE,
        )  # fmt: skip
    accumulator = _accumulate(
        accumulator, q_tile, full_lo, full_hi if HAS_RIGHT else hi, k, v, k_row, v_row, rows,
        k_len, shift, left, right, prefix, free_from, pre_scale, activation_id,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_K, HAS_LEFT, HAS_RIGHT, BEYOND, ACTIVATION, ACTIVATION_SET,
        False, DTYPE,
    )  # fmt: skip
    if HAS_RIGHT:
        accumulator = _accumulate(
            accumulator, q_tile, full_hi, hi, k, v, k_row, v_row, rows, k_len, shift, left, right,
            prefix, free_from, pre_scale, activation_id, D, DV, BLOCK_D, BLOCK_DV, BLOCK_K,
            HAS_LEFT, HAS_RIGHT, BEYOND, ACTIVATION, ACTIVATION_SET, True, DTYPE,
        )  # fmt: skip
    return accumulator


@triton.jit
def _forward_tile(
    q, k, v, out, activation_ids, q_offsets, k_offsets, sequence, block, head,
    batch, total_q, total_k, left, right, prefix, last_full, pre_scale, post_scale,
    q_row, q_head, k_row, k_head, v_row, v_head,
    heads, group, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIGN_END: tl.constexpr, BEYOND: tl.constexpr,
    ACTIVATION: tl.constexpr, ACTIVATION_SET: tl.constexpr, SHARED_Q: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one sequence and head."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    q_first, q_len = tile_rows(q_offsets, sequence, batch, total_q, SHARED_Q)
    k_first, k_len = other_rows(k_offsets, sequence, batch, total_k, False)
    first_row = block * BLOCK_Q
    kv_head = (head // group).to(tl.int64)
    q_tile = load_rows(
        q + q_first * q_row + head.to(tl.int64) * q_head, first_row, q_len, q_row,
        BLOCK_Q, D, BLOCK_D,
    )  # fmt: skip
    activation_id = 0
    if ACTIVATION == PER_HEAD:
        activation_id = tl.load(activation_ids + head)
    shift = 0
    if ALIGN_END:
        shift = k_len - q_len
    accumulator = _walk_keys(
        q_tile, first_row, q_len, k_len, k + k_first * k_row + kv_head * k_head,
        v + k_first * v_row + kv_head * v_head, k_row, v_row, shift, left, right, prefix, last_full,
        pre_scale, activation_id, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT,
        BEYOND, ACTIVATION, ACTIVATION_SET, DTYPE,
    )  # fmt: skip
    out_first = q_first
    if SHARED_Q:
        out_first = sequence.to(tl.int64) * total_q
    store_rows(
        out + (out_first * heads + head) * DV, first_row, q_len, heads * DV,
        round_to(accumulator * post_scale, DTYPE), BLOCK_Q, DV, BLOCK_DV,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def gdpa_forward_kernel(
    q, k, v, out, activation_ids, q_offsets, k_offsets, tile_sequence, tile_block, tile_count,
    batch, total_q, total_k, left, right, prefix, last_full, pre_scale, post_scale,
    q_row, q_head, k_row, k_head, v_row, v_head,
    heads, group, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIGN_END: tl.constexpr, BEYOND: tl.constexpr,
    ACTIVATION: tl.constexpr, ACTIVATION_SET: tl.constexpr, SHARED_Q: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Forward over a tile list: item = (tile, head), heads of a tile side by side."""
    if PERSISTENT:
        program = tl.program_id(0)
        programs = tl.num_programs(0)
        items = tl.load(tile_count) * heads
        for turn in range(0, (items + programs - 1) // programs):
            item = zigzag_index(turn, program, programs)
            if item < items:
                _forward_tile(
                    q, k, v, out, activation_ids, q_offsets, k_offsets,
                    tl.load(tile_sequence + item // heads), tl.load(tile_block + item // heads),
                    item % heads, batch, total_q, total_k, left, right, prefix, last_full,
                    pre_scale, post_scale,
                    q_row, q_head, k_row, k_head, v_row, v_head,
                    heads, group, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K,
                    HAS_LEFT, HAS_RIGHT, ALIGN_END, BEYOND, ACTIVATION, ACTIVATION_SET, SHARED_Q,
                )  # fmt: skip
    else:
        item = tl.program_id(0)
        sequence = tl.load(tile_sequence + item // heads)
        if sequence >= 0:
            _forward_tile(
                q, k, v, out, activation_ids, q_offsets, k_offsets,
                sequence, tl.load(tile_block + item // heads), item % heads,
                batch, total_q, total_k, left, right, prefix, last_full, pre_scale, post_scale,
                q_row, q_head, k_row, k_head, v_row, v_head,
                heads, group, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K,
                HAS_LEFT, HAS_RIGHT, ALIGN_END, BEYOND, ACTIVATION, ACTIVATION_SET, SHARED_Q,
            )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def gdpa_short_keys_kernel(
    q, k, v, out, activation_ids, q_offsets, k_offsets, chunk_sequence, chunk_index,
    batch, total_q, total_k, left, right, prefix, last_full, pre_scale, post_scale,
    q_row, q_head, k_row, k_head, v_row, v_head,
    heads, group, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    KEY_TILES: tl.constexpr, CHUNK: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIGN_END: tl.constexpr, BEYOND: tl.constexpr,
    ACTIVATION: tl.constexpr, ACTIVATION_SET: tl.constexpr, SHARED_Q: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """CHUNK query tiles of one sequence and head against keys that stay on chip.

    KEY_TILES (1 or 2) tiles of BLOCK_K keys are resident.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    MASK: tl.constexpr = HAS_LEFT or HAS_RIGHT
    item = tl.program_id(0)
    head = item % heads
    sequence = tl.load(chunk_sequence + item // heads)
    if sequence >= 0:
        q_first, q_len = tile_rows(q_offsets, sequence, batch, total_q, SHARED_Q)
        k_first, k_len = other_rows(k_offsets, sequence, batch, total_k, False)
        kv_head = (head // group).to(tl.int64)
        q_base = q + q_first * q_row + head.to(tl.int64) * q_head
        k_base = k + k_first * k_row + kv_head * k_head
        v_base = v + k_first * v_row + kv_head * v_head
        out_first = q_first
        if SHARED_Q:
            out_first = sequence.to(tl.int64) * total_q
        out_base = out + (out_first * heads + head) * DV
        activation_id = 0
        if ACTIVATION == PER_HEAD:
            activation_id = tl.load(activation_ids + head)
        shift = 0
        if ALIGN_END:
            shift = k_len - q_len
        start = tl.load(chunk_index + item // heads) * (CHUNK * BLOCK_Q)
        stop = tl.minimum(start + CHUNK * BLOCK_Q, q_len)
        if k_len <= KEY_TILES * BLOCK_K:
            k_0 = load_rows(k_base, tl.zeros([], tl.int32), k_len, k_row, BLOCK_K, D, BLOCK_D)
            v_0 = load_rows(v_base, tl.zeros([], tl.int32), k_len, v_row, BLOCK_K, DV, BLOCK_DV)
            columns = tl.arange(0, BLOCK_K)
            free_from = first_free_row(q_len, last_full, BEYOND)
            if KEY_TILES == 2:
                second = tl.full([], BLOCK_K, tl.int32)
                k_1 = load_rows(k_base, second, k_len, k_row, BLOCK_K, D, BLOCK_D)
                v_1 = load_rows(v_base, second, k_len, v_row, BLOCK_K, DV, BLOCK_DV)
            for first_row in tl.range(start, stop, BLOCK_Q, num_stages=NUM_STAGES):
                first_row = tl.multiple_of(first_row, BLOCK_Q)
                q_tile = load_rows(q_base, first_row, q_len, q_row, BLOCK_Q, D, BLOCK_D)
                rows = first_row + tl.arange(0, BLOCK_Q)
                weights = _weights(
                    dot(q_tile, tl.trans(k_0)) * pre_scale, rows, columns, k_len, shift,
                    left, right, prefix, free_from, activation_id, ACTIVATION, ACTIVATION_SET,
                    HAS_LEFT, HAS_RIGHT, BEYOND, MASK,
                )  # fmt: skip
                accumulator = dot(round_to(weights, DTYPE), v_0)
                if KEY_TILES == 2:
                    weights = _weights(
                        dot(q_tile, tl.trans(k_1)) * pre_scale, rows, BLOCK_K + columns, k_len,
                        shift, left, right, prefix, free_from, activation_id, ACTIVATION,
                        ACTIVATION_SET, HAS_LEFT, HAS_RIGHT, BEYOND, MASK,
                    )  # fmt: skip
                    accumulator = dot(round_to(weights, DTYPE), v_1, accumulator)
                store_rows(
                    out_base, first_row, q_len, heads * DV,
                    round_to(accumulator * post_scale, DTYPE), BLOCK_Q, DV, BLOCK_DV,
                )  # fmt: skip
        else:
            for first_row in tl.range(start, stop, BLOCK_Q):
                first_row = tl.multiple_of(first_row, BLOCK_Q)
                q_tile = load_rows(q_base, first_row, q_len, q_row, BLOCK_Q, D, BLOCK_D)
                accumulator = _walk_keys(
                    q_tile, first_row, q_len, k_len, k_base, v_base, k_row, v_row, shift,
                    left, right, prefix, last_full, pre_scale, activation_id, D, DV, BLOCK_D,
                    BLOCK_DV, BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT, BEYOND, ACTIVATION,
                    ACTIVATION_SET, DTYPE,
                )  # fmt: skip
                store_rows(
                    out_base, first_row, q_len, heads * DV,
                    round_to(accumulator * post_scale, DTYPE), BLOCK_Q, DV, BLOCK_DV,
                )  # fmt: skip
