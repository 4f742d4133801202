"""Jagged softmax attention, forward: the generations v1 to v3 of one Triton kernel.

One program computes one tile of query rows of one sequence and head by the online softmax. Only
tiles that hold rows are launched (`schedule.build_tile_list`), longest key sequence first.

v1  -inf mask on every key tile; backward adds dQ with atomics.
v2  no mask: rows past a sequence's end are loaded as zeros, so their scores are exactly 0, and what
    they add to the denominator is subtracted at the end (subtraction masking). Where that would
    cancel, a guard leaves the tile to a second launch, which masks. Backward split in dQ and dK/dV.
v3  v2 made persistent: one program a multiprocessor, tiles dealt zigzag. Where device and layout
    have tensor descriptors (TMA), whole K and V tiles come by them, and only the last is masked.
v4  warp-specialised, for Hopper alone: `impl/kernels/hopper`.
"""

import triton
import triton.language as tl

from jagbench.impl.kernels.interpreter import dot, round_to
from jagbench.impl.kernels.schedule import zigzag_index
from jagbench.impl.kernels.tiles import (
    COUNTS,
    PREFIX,
    first_free_row,
    load_rows,
    other_rows,
    pair_bias,
    span_beyond_of_queries,
    store_rows,
    tile_rows,
    visible,
    visible_span,
)

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
#: Smallest share of the denominator that may be left after the subtraction, else the tile is
#: computed again with a mask. What is left has lost that many of fp32's 24 bits: 10 leave more than
#: a 16-bit result can hold, but an fp32 result can spare one.
GUARD_RATIO: tl.constexpr = tl.constexpr(2.0**-10)
GUARD_RATIO_FP32: tl.constexpr = tl.constexpr(0.5)


@triton.jit
def _key_value_tiles(
    k, v, k_desc, v_desc, k_first, first, k_len, k_row, v_row, k_column, v_column,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """K and V tiles `[BLOCK_K, BLOCK_D]`, `[BLOCK_K, BLOCK_DV]` at key position `first`."""
    if DESCRIPTORS:
        row = (k_first + first).to(tl.int32)
        k_tile = k_desc.load([row, k_column])
        v_tile = v_desc.load([row, v_column])
    else:
        k_tile = load_rows(k, first, k_len, k_row, BLOCK_K, D, BLOCK_D)
        v_tile = load_rows(v, first, k_len, v_row, BLOCK_K, DV, BLOCK_DV)
    return k_tile, v_tile


@triton.jit
def _attend(
    accumulator, denominator, maximum, q_tile, lo, hi,
    k, v, k_desc, v_desc, k_first, k_row, v_row, k_column, v_column,
    rows, k_len, shift, left, right, prefix, free_from, scale_log2,
    bias, bucket_ids, pair_base, bias_row, bias_head, head, q_len,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BEYOND: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, DESCRIPTORS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key tiles of [lo, hi); scores and maximum in units of log 2."""
    for first in tl.range(lo, hi, BLOCK_K):
        first = tl.multiple_of(first, BLOCK_K)
        k_tile, v_tile = _key_value_tiles(
            k, v, k_desc, v_desc, k_first, first, k_len, k_row, v_row, k_column, v_column,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_K, DESCRIPTORS,
        )  # fmt: skip
        scores = dot(q_tile, tl.trans(k_tile)) * scale_log2
        columns = first + tl.arange(0, BLOCK_K)
        if MASK:
            seen = visible(
                rows[:, None], columns[None, :], k_len, shift, left, right, prefix, free_from,
                HAS_LEFT, HAS_RIGHT, BEYOND,
            )  # fmt: skip
        if BIAS != 0:
            inside = (rows < q_len)[:, None] & (columns < k_len)[None, :]
            scores += pair_bias(
                bias, bucket_ids, pair_base, rows[:, None], columns[None, :], inside, k_len,
                bias_row, bias_head, head, BIAS,
            ) * LOG2E  # fmt: skip
        if MASK:
            scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen nothing yet keeps -inf; 0 in its place keeps -inf - -inf out. A bias
        # of -inf hides pairs where no mask does.
        base = new_maximum
        if MASK or BIAS != 0:
            base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - base[:, None])
        correction = tl.exp2(maximum - base)
        denominator = denominator * correction + tl.sum(weights, 1)
        accumulator = accumulator * correction[:, None]
        accumulator = dot(round_to(weights, DTYPE), v_tile, accumulator)
        maximum = new_maximum
    return accumulator, denominator, maximum


@triton.jit
def _leave(redo, sequence, block, head):
    """Leave a tile to a later launch. redo: int32, the count, then from 4 on 4 a tile."""
    entry = redo + 4 + 4 * tl.atomic_add(redo, 1)
    tl.store(entry, sequence)
    tl.store(entry + 1, block)
    tl.store(entry + 2, head)


@triton.jit
def _left(redo, place):
    """Sequence, block and head of a tile that was left."""
    entry = redo + 4 + 4 * place
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


@triton.jit
def _forward_tile(
    q, k, v, out, lse, k_desc, v_desc, bias, bucket_ids,
    q_offsets, k_offsets, pair_offsets, redo,
    sequence, block, head, batch, total_q, total_k, out_rows, scale_log2, left, right,
    prefix, last_full,
    q_row, q_head, k_row, k_head, v_row, v_head, bias_row, bias_head,
    heads, group, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIGN_END: tl.constexpr,
    BEYOND: tl.constexpr, BIAS: tl.constexpr, MASKING: tl.constexpr, SHARED_Q: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """A query tile of one sequence and head. MASKING: 0 every tile, 1 edges, 2 subtract."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    q_first, q_len = tile_rows(q_offsets, sequence, batch, total_q, SHARED_Q)
    k_first, k_len = other_rows(k_offsets, sequence, batch, total_k, False)
    first_row = block * BLOCK_Q
    rows = first_row + tl.arange(0, BLOCK_Q)
    kv_head = head // group
    q_tile = load_rows(
        q + q_first * q_row + head.to(tl.int64) * q_head, first_row, q_len, q_row,
        BLOCK_Q, D, BLOCK_D,
    )  # fmt: skip
    k_base = k + k_first * k_row + kv_head.to(tl.int64) * k_head
    v_base = v + k_first * v_row + kv_head.to(tl.int64) * v_head
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
    if BEYOND != 0:
        early, lo, full_lo, full_hi, hi = span_beyond_of_queries(
            first_row, live_rows, k_len, shift, prefix, free_from, lo, full_lo, full_hi, hi,
            BEYOND, BLOCK_K,
        )  # fmt: skip
    accumulator = tl.zeros([BLOCK_Q, BLOCK_DV], dtype=tl.float32)
    denominator = tl.zeros([BLOCK_Q], dtype=tl.float32)
    maximum = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
    if MASKING == 0:
        full_lo = lo
        full_hi = lo
    if MASKING == 2:
        full_hi = k_len
    if HAS_LEFT and (PREFIX & BEYOND) != 0:
        accumulator, denominator, maximum = _attend(
            accumulator, denominator, maximum, q_tile, 0, early,
            k_base, v_base, k_desc, v_desc, k_first, k_row, v_row, kv_head * D, kv_head * DV,
            rows, k_len, shift, left, right, prefix, free_from, scale_log2,
            bias, bucket_ids, pair_base, bias_row, bias_head, head, q_len,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_K, HAS_LEFT, HAS_RIGHT, BEYOND, BIAS, True,
            False, DTYPE,
        )  # fmt: skip
    if HAS_LEFT:
        accumulator, denominator, maximum = _attend(
            accumulator, denominator, maximum, q_tile, lo, full_lo,
            k_base, v_base, k_desc, v_desc, k_first, k_row, v_row, kv_head * D, kv_head * DV,
            rows, k_len, shift, left, right, prefix, free_from, scale_log2,
            bias, bucket_ids, pair_base, bias_row, bias_head, head, q_len,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_K, HAS_LEFT, HAS_RIGHT, BEYOND, BIAS, True,
            False, DTYPE,
        )  # fmt: skip
    if MASKING != 0:
        accumulator, denominator, maximum = _attend(
            accumulator, denominator, maximum, q_tile, full_lo, full_hi,
            k_base, v_base, k_desc, v_desc, k_first, k_row, v_row, kv_head * D, kv_head * DV,
            rows, k_len, shift, left, right, prefix, free_from, scale_log2,
            bias, bucket_ids, pair_base, bias_row, bias_head, head, q_len,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_K, HAS_LEFT, HAS_RIGHT, BEYOND, BIAS, False,
            DESCRIPTORS, DTYPE,
        )  # fmt: skip
    if MASKING != 2:
        accumulator, denominator, maximum = _attend(
            accumulator, denominator, maximum, q_tile, full_hi, hi,
            k_base, v_base, k_desc, v_desc, k_first, k_row, v_row, kv_head * D, kv_head * DV,
            rows, k_len, shift, left, right, prefix, free_from, scale_log2,
            bias, bucket_ids, pair_base, bias_row, bias_head, head, q_len,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_K, HAS_LEFT, HAS_RIGHT, BEYOND, BIAS, True,
            False, DTYPE,
        )  # fmt: skip
    else:
        # Every padded key had score 0 and a zero value row: only the denominator counted it.
        padded = (k_len + BLOCK_K - 1) // BLOCK_K * BLOCK_K - k_len
        kept = denominator - padded * tl.exp2(-maximum)
        kept = tl.where(padded > 0, kept, denominator)
        ratio: tl.constexpr = GUARD_RATIO_FP32 if DTYPE == tl.float32 else GUARD_RATIO
        lost = (kept < denominator * ratio) & (rows < q_len)
        denominator = kept
        if tl.max(lost.to(tl.int32), 0) > 0:
            _leave(redo, sequence, block, head)
    _finish(
        accumulator, denominator, maximum, out, lse, q_first, sequence, batch, head, first_row,
        rows, q_len, total_q, out_rows, heads, DV, BLOCK_DV, BLOCK_Q, SHARED_Q,
    )  # fmt: skip


@triton.jit
def _finish(
    accumulator, denominator, maximum, out, lse, q_first, sequence, batch, head, first_row, rows,
    q_len, total_q, out_rows,
    heads, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
    SHARED_Q: tl.constexpr,
):  # fmt: skip
    """Normalise and store a tile of the output `[rows, heads, DV]` and of lse `[heads, rows]`.

    lse stays in units of log 2: the backward reads it so, and each change of units is a rounding as
    large as lse itself, which exp2 turns into relative error of the weights.
    """
    empty = denominator == 0.0
    accumulator = accumulator / tl.where(empty, 1.0, denominator)[:, None]
    logsumexp = maximum + tl.log2(tl.where(empty, 1.0, denominator))
    out_first = q_first
    if SHARED_Q:
        out_first = sequence.to(tl.int64) * total_q
    store_rows(
        out + (out_first * heads + head) * DV, first_row, q_len, heads * DV,
        round_to(accumulator, out.dtype.element_ty), BLOCK_Q, DV, BLOCK_DV,
    )  # fmt: skip
    lse_row = lse + head.to(tl.int64) * out_rows + out_first
    # A row that sees nothing has -inf; one past the last offset is padding, and 0.
    nothing = tl.where(sequence < batch, float("-inf"), 0.0)
    tl.store(lse_row + rows, tl.where(empty, nothing, logsumexp), mask=rows < q_len)


# Counts change with every batch: they must not choose the compiled form.
@triton.jit(do_not_specialize=COUNTS)
def jagged_attention_forward_kernel(
    q, k, v, out, lse, k_desc, v_desc, bias, bucket_ids,
    q_offsets, k_offsets, pair_offsets, tile_sequence, tile_block, tile_count, redo,
    batch, total_q, total_k, out_rows, scale_log2, left, right, prefix, last_full,
    q_row, q_head, k_row, k_head, v_row, v_head, bias_row, bias_head,
    heads, group, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIGN_END: tl.constexpr,
    BEYOND: tl.constexpr, BIAS: tl.constexpr, MASKING: tl.constexpr, SHARED_Q: tl.constexpr,
    DESCRIPTORS: tl.constexpr, DEAL: tl.constexpr,
):  # fmt: skip
    """Forward over a tile list: item = tile * heads + head, heads of a tile side by side.

    DEAL: how programs come by items. 0: one each. 1: persistent, zigzag. 2: persistent, the tiles
    that an earlier launch left in `redo`.
    """
    program = tl.program_id(0)
    programs = 1
    items = program + 1
    if DEAL == 1:
        programs = tl.num_programs(0)
        items = tl.load(tile_count) * heads
    if DEAL == 2:
        programs = tl.num_programs(0)
        items = tl.load(redo)
    for turn in range(0, 1 if DEAL == 0 else (items + programs - 1) // programs):
        place = program
        if DEAL == 1:
            place = zigzag_index(turn, program, programs)
        if DEAL == 2:
            place = turn * programs + program
        if place < items:
            if DEAL == 2:
                sequence, block, head = _left(redo, place)
            else:
                sequence = tl.load(tile_sequence + place // heads)
                block = tl.load(tile_block + place // heads)
                head = place % heads
            if sequence >= 0:
                _forward_tile(
                    q, k, v, out, lse, k_desc, v_desc, bias, bucket_ids,
                    q_offsets, k_offsets, pair_offsets, redo, sequence, block, head,
                    batch, total_q, total_k, out_rows, scale_log2, left, right, prefix, last_full,
                    q_row, q_head, k_row, k_head, v_row, v_head, bias_row, bias_head,
                    heads, group, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K,
                    HAS_LEFT, HAS_RIGHT, ALIGN_END, BEYOND, BIAS, MASKING, SHARED_Q, DESCRIPTORS,
                )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def jagged_attention_short_keys_kernel(
    q, k, v, out, lse, q_offsets, k_offsets, chunk_sequence, chunk_index, redo,
    batch, total_q, total_k, out_rows, scale_log2,
    q_row, q_head, k_row, k_head, v_row, v_head,
    heads, group, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, SHARED_Q: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """CHUNK query tiles of one sequence and head against one resident tile of BLOCK_K keys.

    With all keys in view the softmax needs no online correction. Unmasked, unbiased attention only.
    The tiles of a sequence with more keys are left to a later launch (`redo`).
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    head = tl.program_id(0) % heads
    chunk = tl.program_id(0) // heads
    sequence = tl.load(chunk_sequence + chunk)
    if sequence >= 0:
        q_first, q_len = tile_rows(q_offsets, sequence, batch, total_q, SHARED_Q)
        k_first, k_len = other_rows(k_offsets, sequence, batch, total_k, False)
        kv_head = (head // group).to(tl.int64)
        q_base = q + q_first * q_row + head.to(tl.int64) * q_head
        start = tl.load(chunk_index + chunk) * (CHUNK * BLOCK_Q)
        stop = tl.minimum(start + CHUNK * BLOCK_Q, q_len)
        if k_len <= BLOCK_K:
            zero = tl.zeros([], tl.int32)
            k_tile = load_rows(
                k + k_first * k_row + kv_head * k_head, zero, k_len, k_row, BLOCK_K, D, BLOCK_D
            )
            v_tile = load_rows(
                v + k_first * v_row + kv_head * v_head, zero, k_len, v_row, BLOCK_K, DV, BLOCK_DV
            )
            seen = (tl.arange(0, BLOCK_K) < k_len)[None, :]
            for first_row in tl.range(start, stop, BLOCK_Q, num_stages=NUM_STAGES):
                first_row = tl.multiple_of(first_row, BLOCK_Q)
                q_tile = load_rows(q_base, first_row, q_len, q_row, BLOCK_Q, D, BLOCK_D)
                scores = dot(q_tile, tl.trans(k_tile)) * scale_log2
                scores = tl.where(seen, scores, float("-inf"))
                maximum = tl.max(scores, 1)
                base = tl.where(maximum == float("-inf"), 0.0, maximum)
                weights = tl.exp2(scores - base[:, None])
                denominator = tl.sum(weights, 1)
                _finish(
                    dot(round_to(weights, DTYPE), v_tile), denominator, maximum, out, lse, q_first,
                    sequence, batch, head, first_row, first_row + tl.arange(0, BLOCK_Q), q_len,
                    total_q, out_rows, heads, DV, BLOCK_DV, BLOCK_Q, SHARED_Q,
                )  # fmt: skip
        else:
            for first_row in tl.range(start, stop, BLOCK_Q):
                _leave(redo, sequence, first_row // BLOCK_Q, head)
