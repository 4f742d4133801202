"""Block attention on chip: a block of keys and its queries, with nothing kept between blocks.

A query sees the keys of its own block and no others, so a whole row of scores is there at once: no
online correction, no log-sum-exp to store, no pass before the backward. The backward makes the
weights anew from Q and K, and the row sums of P * dP that softmax needs beside them.

A program takes a run of neighbouring entries of the tile list (one block each) for one key head.
It stays with K and V, and walks the queries of every head of the group in tiles of BLOCK_Q rows:
gradients of keys and values are summed in registers, in one order.
"""

import triton
import triton.language as tl

from jagbench.impl.kernels.interpreter import dot, round_to
from jagbench.impl.kernels.rotation import angles_of, store_turned_back, turned_rows
from jagbench.impl.kernels.tiles import load_rows, sequence_rows, store_rows

#: Arguments for whose values no kernel is compiled anew.
BLOCK_COUNTS = ["batch", "total", "run", "block_size", "kv_heads"]


@triton.jit
def _block_of(offsets, tile_sequence, tile_block, index, batch, total, block_size):
    """First row of a block's sequence (int64); then, counted from there, the block's first row, the
    end of its rows to store, and the end of those to read, which padding has none of.
    """
    sequence = tl.load(tile_sequence + index)
    begin, length = sequence_rows(offsets, sequence, batch, total)
    first = tl.load(tile_block + index) * block_size
    end = tl.minimum(first + block_size, length)
    return begin, first, end, tl.where(sequence < batch, end, first)


@triton.jit
def _weights(q_tile, k_tile, keys, scale_log2, BLOCK_K: tl.constexpr):
    """exp of the scores less their row's maximum, fp32, and the row sums.

    keys: how many of the columns are keys. A padding block has none, and is given its first column
    (zeros) instead: its rows must divide by something.
    """
    scores = dot(q_tile, tl.trans(k_tile)) * scale_log2
    seen = tl.arange(0, BLOCK_K)[None, :] < tl.maximum(keys, 1)
    scores = tl.where(seen, scores, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights, tl.sum(weights, 1)


@triton.jit(do_not_specialize=BLOCK_COUNTS)
def block_forward_kernel(
    q, k, v, out, table, offsets, tile_sequence, tile_block, tile_count,
    batch, total, run, block_size, kv_heads, scale_log2,
    q_row, q_head, k_row, k_head, v_row, v_head, table_row, eps,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ROTARY_DIM: tl.constexpr, VALUE_ROTARY_DIM: tl.constexpr, BY_TOKEN: tl.constexpr,
    QK_NORM: tl.constexpr,
):  # fmt: skip
    """out: contiguous `[total, kv_heads * GROUP, DV]`."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    SUB_TILES: tl.constexpr = BLOCK_K // BLOCK_Q
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    from_index = tl.program_id(0) // kv_heads * run
    out_row = kv_heads * GROUP * DV
    for index in range(from_index, tl.minimum(from_index + run, tl.load(tile_count))):
        begin, first, end, seen = _block_of(
            offsets, tile_sequence, tile_block, index, batch, total, block_size
        )
        sin, cos = angles_of(
            table, begin, first, seen, table_row, BLOCK_K, BLOCK_D, ROTARY_DIM, BY_TOKEN
        )
        v_sin, v_cos = sin, cos
        if BLOCK_DV != BLOCK_D:
            v_sin, v_cos = angles_of(
                table, begin, first, seen, table_row, BLOCK_K, BLOCK_DV, VALUE_ROTARY_DIM, BY_TOKEN
            )
        k_tile = turned_rows(
            k + begin * k_row + kv_head * k_head, first, seen, k_row, sin, cos,
            BLOCK_K, D, BLOCK_D, ROTARY_DIM, eps, QK_NORM,
        )  # fmt: skip
        v_tile = turned_rows(
            v + begin * v_row + kv_head * v_head, first, seen, v_row, v_sin, v_cos,
            BLOCK_K, DV, BLOCK_DV, VALUE_ROTARY_DIM, 0.0, False,
        )  # fmt: skip
        for step in range(GROUP * SUB_TILES):
            head = kv_head * GROUP + step // SUB_TILES
            row = first + step % SUB_TILES * BLOCK_Q
            q_sin, q_cos = sin, cos
            if SUB_TILES > 1:
                q_sin, q_cos = angles_of(
                    table, begin, row, seen, table_row, BLOCK_Q, BLOCK_D, ROTARY_DIM, BY_TOKEN
                )
            q_tile = turned_rows(
                q + begin * q_row + head * q_head, row, seen, q_row, q_sin, q_cos,
                BLOCK_Q, D, BLOCK_D, ROTARY_DIM, eps, QK_NORM,
            )  # fmt: skip
            weights, sums = _weights(q_tile, k_tile, seen - first, scale_log2, BLOCK_K)
            tile = dot(round_to(weights, DTYPE), v_tile) * (1.0 / sums)[:, None]
            store_rows(
                out + begin * out_row + head * DV, row, end, out_row, round_to(tile, DTYPE),
                BLOCK_Q, DV, BLOCK_DV,
            )  # fmt: skip


@triton.jit(do_not_specialize=BLOCK_COUNTS)
def block_gradient_kernel(
    q, k, v, d_out, dq, dk, dv, table, offsets, tile_sequence, tile_block, tile_count,
    batch, total, run, block_size, kv_heads, scale_log2, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, d_row, d_head, table_row, eps,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ROTARY_DIM: tl.constexpr, VALUE_ROTARY_DIM: tl.constexpr, BY_TOKEN: tl.constexpr,
    QK_NORM: tl.constexpr,
    QUERY: tl.constexpr, KEY_VALUE: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv: contiguous, like q, k, v. QUERY, KEY_VALUE: which gradients are wanted.

    Gradients stay fp32 until they have been turned back, and are rounded once.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    SUB_TILES: tl.constexpr = BLOCK_K // BLOCK_Q
    ALONE: tl.constexpr = GROUP * SUB_TILES == 1
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    from_index = tl.program_id(0) // kv_heads * run
    dq_row, dk_row, dv_row = kv_heads * GROUP * D, kv_heads * D, kv_heads * DV
    for index in range(from_index, tl.minimum(from_index + run, tl.load(tile_count))):
        begin, first, end, seen = _block_of(
            offsets, tile_sequence, tile_block, index, batch, total, block_size
        )
        sin, cos = angles_of(
            table, begin, first, seen, table_row, BLOCK_K, BLOCK_D, ROTARY_DIM, BY_TOKEN
        )
        v_sin, v_cos = sin, cos
        if BLOCK_DV != BLOCK_D:
            v_sin, v_cos = angles_of(
                table, begin, first, seen, table_row, BLOCK_K, BLOCK_DV, VALUE_ROTARY_DIM, BY_TOKEN
            )
        k_tile = turned_rows(
            k + begin * k_row + kv_head * k_head, first, seen, k_row, sin, cos,
            BLOCK_K, D, BLOCK_D, ROTARY_DIM, eps, QK_NORM,
        )  # fmt: skip
        v_tile = turned_rows(
            v + begin * v_row + kv_head * v_head, first, seen, v_row, v_sin, v_cos,
            BLOCK_K, DV, BLOCK_DV, VALUE_ROTARY_DIM, 0.0, False,
        )  # fmt: skip
        dk_tile = tl.zeros([BLOCK_K, BLOCK_D], dtype=tl.float32)
        dv_tile = tl.zeros([BLOCK_K, BLOCK_DV], dtype=tl.float32)
        for step in range(GROUP * SUB_TILES):
            head = kv_head * GROUP + step // SUB_TILES
            row = first + step % SUB_TILES * BLOCK_Q
            q_sin, q_cos = sin, cos
            if SUB_TILES > 1:
                q_sin, q_cos = angles_of(
                    table, begin, row, seen, table_row, BLOCK_Q, BLOCK_D, ROTARY_DIM, BY_TOKEN
                )
            q_tile = turned_rows(
                q + begin * q_row + head * q_head, row, seen, q_row, q_sin, q_cos,
                BLOCK_Q, D, BLOCK_D, ROTARY_DIM, eps, QK_NORM,
            )  # fmt: skip
            d_tile = load_rows(
                d_out + begin * d_row + head * d_head, row, seen, d_row, BLOCK_Q, DV, BLOCK_DV
            )
            weights, sums = _weights(q_tile, k_tile, seen - first, scale_log2, BLOCK_K)
            weights = weights * (1.0 / sums)[:, None]
            if KEY_VALUE:
                dv_tile = dot(tl.trans(round_to(weights, DTYPE)), d_tile, dv_tile)
            if KEY_VALUE and ALONE:
                # Stored before the others are made, or registers spill.
                store_turned_back(
                    dv + begin * dv_row + kv_head * DV, first, end, dv_row, dv_tile,
                    v_sin, v_cos, BLOCK_K, DV, BLOCK_DV, VALUE_ROTARY_DIM, seen, v, 0, 0.0, False,
                )  # fmt: skip
            d_weights = dot(d_tile, tl.trans(v_tile))
            delta = tl.sum(weights * d_weights, 1)
            d_scores = round_to(weights * (d_weights - delta[:, None]), DTYPE)
            if QUERY:
                store_turned_back(
                    dq + begin * dq_row + head * D, row, end, dq_row,
                    dot(d_scores, k_tile) * scale, q_sin, q_cos,
                    BLOCK_Q, D, BLOCK_D, ROTARY_DIM,
                    seen, q + begin * q_row + head * q_head, q_row, eps, QK_NORM,
                )  # fmt: skip
            if KEY_VALUE:
                dk_tile = dot(tl.trans(d_scores), q_tile, dk_tile)
        if KEY_VALUE:
            store_turned_back(
                dk + begin * dk_row + kv_head * D, first, end, dk_row, dk_tile * scale,
                sin, cos, BLOCK_K, D, BLOCK_D, ROTARY_DIM,
                seen, k + begin * k_row + kv_head * k_head, k_row, eps, QK_NORM,
            )  # fmt: skip
        if KEY_VALUE and not ALONE:
            store_turned_back(
                dv + begin * dv_row + kv_head * DV, first, end, dv_row, dv_tile,
                v_sin, v_cos, BLOCK_K, DV, BLOCK_DV, VALUE_ROTARY_DIM, seen, v, 0, 0.0, False,
            )  # fmt: skip
