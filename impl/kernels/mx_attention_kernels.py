"""MXFP8 jagged attention and GDPA, forward: operands in MX blocks, weights quantised in registers.

The codes of the attention weights P = exp(S - max of the row) hang on the row's final maximum: P of
a running maximum differs from it by a factor that is no power of two, which moves every rounding.
So the softmax walks the keys twice, for the maxima and for the output: Q K^T is computed twice,
three products where one pass has two, and the second walk has no correction to make. GDPA has no
maximum and walks once.

Scores are in natural units, and a difference of scores is taken before it is turned to powers of
two, as the truth does: so codes differ from the truth's only where S does in its last bit, or exp2.
"""

import triton
import triton.language as tl

from jagbench.impl.kernels.activations import PER_HEAD, SOFTMAX, activate, activate_dynamic
from jagbench.impl.kernels.interpreter import dot, round_to
from jagbench.impl.kernels.mx_attention_tiles import (
    NATIVE,
    block_scales,
    held,
    operand_tile,
    product_of_rows,
    used_keys,
)
from jagbench.impl.kernels.mx_kernels import _codes, _spread
from jagbench.impl.kernels.tiles import (
    COUNTS,
    PREFIX,
    first_free_row,
    other_rows,
    pair_bias,
    span_beyond_of_queries,
    store_rows,
    tile_rows,
    visible,
    visible_span,
)

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _weigh(
    accumulator, sums, weights, v_tile, v_scale,
    MANTISSA: tl.constexpr, BIAS_OF: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr,
    LARGEST: tl.constexpr, NAN: tl.constexpr, CARRY: tl.constexpr, TOP: tl.constexpr,
    SATURATES: tl.constexpr, TYPE: tl.constexpr, FIXED: tl.constexpr,
    SUM_QUANTISED: tl.constexpr, V_BR: tl.constexpr, CONVERT: tl.constexpr,
    OPERANDS: tl.constexpr,
):  # fmt: skip
    """Add P^ V^ of a tile of weights, in blocks of 32 keys, and the sum of P or P^."""
    scale = block_scales(weights, CARRY, TOP, 1, 32, FIXED)
    rounded = weights
    if SUM_QUANTISED or OPERANDS != NATIVE:
        rounded = held(weights, scale, None, LIMIT, SATURATES, MANTISSA, BIAS_OF)
    sums += tl.sum(rounded if SUM_QUANTISED else weights, 1)
    if OPERANDS == NATIVE:
        codes = _codes(weights, scale, None, MANTISSA, BIAS_OF, WIDTH, LARGEST, NAN, CONVERT)
        BLOCKS: tl.constexpr = v_tile.shape[0] // 32
        of_v = tl.trans(_spread(v_scale, BLOCKS, v_tile.shape[1])).to(tl.uint8)
        accumulator = tl.dot_scaled(
            codes, scale.to(tl.uint8), TYPE, v_tile, of_v, TYPE, acc=accumulator
        )
    else:
        accumulator = dot(round_to(rounded, v_tile.dtype), v_tile, accumulator)
    return accumulator, sums


@triton.jit
def _walk(
    accumulator, sums, maximum, q_tile, q_scale, lo, hi, k, k_scales, v, v_scales,
    k_first, k_blocks, kv_head, kv_heads, rows, q_len, k_len, shift, left, right, prefix,
    free_from, score_scale, bias, bucket_ids, pair_base, bias_row, bias_head, head, activation_id,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BEYOND: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ACTIVATION_SET: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS_OF: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr,
    LARGEST: tl.constexpr, NAN: tl.constexpr, CARRY: tl.constexpr, TOP: tl.constexpr,
    SATURATES: tl.constexpr, TYPE: tl.constexpr, FIXED: tl.constexpr,
    SUM_QUANTISED: tl.constexpr, V_BR: tl.constexpr, V_BC: tl.constexpr, CONVERT: tl.constexpr,
    OPERANDS: tl.constexpr, MAXIMA: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The key tiles of [lo, hi): with MAXIMA only the rows' maxima, else output and sums."""
    for first in tl.range(lo, hi, BLOCK_K):
        first = tl.multiple_of(first, BLOCK_K)
        columns = first + tl.arange(0, BLOCK_K)
        k_tile, k_scale = operand_tile(
            k, k_scales, k_first, k_blocks, first, k_len, kv_head, kv_heads, None,
            D, BLOCK_D, BLOCK_K, 32, 32, MANTISSA, BIAS_OF, WIDTH, OPERANDS, False,
        )  # fmt: skip
        # Rounded before the maximum is subtracted: were the two contracted, the weight of a row's
        # maximum would not be 1, and in mode "floor" its block's scale one code lower.
        scores = tl.fma(
            product_of_rows(
                q_tile, q_scale, k_tile, k_scale, tl.minimum(first, 0).to(tl.float32), TYPE,
                OPERANDS,
            ),
            score_scale,
            0.0,
        )  # fmt: skip
        if BIAS != 0:
            inside = (rows < q_len)[:, None] & (columns < k_len)[None, :]
            scores += pair_bias(
                bias, bucket_ids, pair_base, rows[:, None], columns[None, :], inside, k_len,
                bias_row, bias_head, head, BIAS,
            )  # fmt: skip
        used = columns < k_len
        seen = used[None, :]
        if MASK:
            used = used_keys(
                columns, q_len, k_len, shift, left, right, prefix, free_from,
                HAS_LEFT, HAS_RIGHT, BEYOND,
            )  # fmt: skip
            seen = visible(
                rows[:, None], columns[None, :], k_len, shift, left, right, prefix, free_from,
                HAS_LEFT, HAS_RIGHT, BEYOND,
            )  # fmt: skip
        if MAXIMA:
            if MASK:
                scores = tl.where(seen, scores, float("-inf"))
            maximum = tl.maximum(maximum, tl.max(scores, 1))
        else:
            if ACTIVATION == SOFTMAX:
                weights = tl.exp2((scores - maximum[:, None]) * LOG2E)
            elif ACTIVATION == PER_HEAD:
                weights = activate_dynamic(scores, activation_id, ACTIVATION_SET)
            else:
                weights = activate(scores, ACTIVATION)
            if MASK:
                weights = tl.where(seen, weights, 0.0)
            v_tile, v_scale = operand_tile(
                v, v_scales, k_first, k_blocks, first, k_len, kv_head, kv_heads, used,
                DV, BLOCK_DV, BLOCK_K, V_BR, V_BC, MANTISSA, BIAS_OF, WIDTH, OPERANDS, MASK,
            )  # fmt: skip
            accumulator, sums = _weigh(
                accumulator, sums, weights, v_tile, v_scale, MANTISSA, BIAS_OF, WIDTH, LIMIT,
                LARGEST, NAN, CARRY, TOP, SATURATES, TYPE, FIXED, SUM_QUANTISED, V_BR, CONVERT,
                OPERANDS,
            )  # fmt: skip
    return accumulator, sums, maximum


@triton.jit
def _finish(
    accumulator, sums, maximum, out, lse, out_first, head, heads, sequence, batch, first_row, rows,
    q_len, out_rows, out_scale, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Store a tile of the output `[rows, heads, DV]` and of lse `[heads, rows]`, natural log."""
    if ACTIVATION == SOFTMAX:
        empty = sums == 0.0
        accumulator = accumulator / tl.where(empty, 1.0, sums)[:, None]
        found = maximum + tl.log(tl.where(empty, 1.0, sums))
        # A row that sees nothing has -inf; one past the last offset is padding, and 0.
        nothing = tl.where(sequence < batch, float("-inf"), 0.0)
        tl.store(
            lse + head.to(tl.int64) * out_rows + out_first + rows,
            tl.where(empty, nothing, found), mask=rows < q_len,
        )  # fmt: skip
    else:
        accumulator = accumulator * out_scale
    store_rows(
        out + (out_first * heads + head) * DV, first_row, q_len, heads * DV,
        round_to(accumulator, out.dtype.element_ty), BLOCK_Q, DV, BLOCK_DV,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def mx_attention_forward_kernel(
    q, k, v, q_scales, k_scales, v_scales, out, lse, bias, bucket_ids, activation_ids,
    q_offsets, k_offsets, pair_offsets, tile_sequence, tile_block,
    batch, total_q, total_k, out_rows, left, right, prefix, last_full, score_scale, out_scale,
    bias_row, bias_head, heads, group, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIGN_END: tl.constexpr, BEYOND: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ACTIVATION_SET: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS_OF: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr,
    LARGEST: tl.constexpr, NAN: tl.constexpr, CARRY: tl.constexpr, TOP: tl.constexpr,
    SATURATES: tl.constexpr, TYPE: tl.constexpr, FIXED: tl.constexpr,
    SUM_QUANTISED: tl.constexpr, V_BR: tl.constexpr, V_BC: tl.constexpr, CONVERT: tl.constexpr,
    OPERANDS: tl.constexpr, SHARED_Q: tl.constexpr,
):  # fmt: skip
    """One program a query tile and head: out, and lse if ACTIVATION is SOFTMAX.

    q, k, v: contiguous `[rows, heads, dim]`, with scales as `operand_tile` takes them.
    MANTISSA to TYPE: of the element type of q, k, v and the weights.
    """
    item = tl.program_id(0)
    head = item % heads
    sequence = tl.load(tile_sequence + item // heads)
    if sequence >= 0:
        q_first, q_len = tile_rows(q_offsets, sequence, batch, total_q, SHARED_Q)
        k_first, k_len = other_rows(k_offsets, sequence, batch, total_k, False)
        first_row = tl.multiple_of(tl.load(tile_block + item // heads) * BLOCK_Q, BLOCK_Q)
        rows = first_row + tl.arange(0, BLOCK_Q)
        q_blocks = tl.zeros([], dtype=tl.int64) if SHARED_Q else q_first // 32 + sequence
        # Padding rows meet no key, and have no scales.
        live = tl.where(sequence < batch, q_len, 0)
        q_tile, q_scale = operand_tile(
            q, q_scales, q_first, q_blocks, first_row, live, head, heads, None,
            D, BLOCK_D, BLOCK_Q, 32, 32, MANTISSA, BIAS_OF, WIDTH, OPERANDS, False,
        )  # fmt: skip
        k_blocks = k_first // 32 + sequence
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
        accumulator = tl.zeros([BLOCK_Q, BLOCK_DV], dtype=tl.float32)
        sums = tl.zeros([BLOCK_Q], dtype=tl.float32)
        maximum = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
        # Turn 0 finds the maxima, which GDPA has none of; turn 1 weighs. Stretch 0 lies before the
        # window, 1 and 3 are its edges, and all of 2 is seen by every row.
        for turn in tl.static_range(0 if ACTIVATION == SOFTMAX else 1, 2):
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
                    accumulator, sums, maximum = _walk(
                        accumulator, sums, maximum, q_tile, q_scale, begin, end,
                        k, k_scales, v, v_scales, k_first, k_blocks, head // group, heads // group,
                        rows, q_len, k_len, shift, left, right, prefix, free_from, score_scale,
                        bias, bucket_ids, pair_base, bias_row, bias_head, head, activation_id,
                        D, DV, BLOCK_D, BLOCK_DV, BLOCK_K, HAS_LEFT, HAS_RIGHT, BEYOND, BIAS,
                        ACTIVATION, ACTIVATION_SET, MANTISSA, BIAS_OF, WIDTH, LIMIT, LARGEST, NAN,
                        CARRY, TOP, SATURATES, TYPE, FIXED, SUM_QUANTISED, V_BR, V_BC, CONVERT,
                        OPERANDS, turn == 0, stretch != 2,
                    )  # fmt: skip
            if turn == 0:
                # A row that sees nothing, or -inf alone, has base 0.
                maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
        out_first = q_first
        if SHARED_Q:
            out_first = sequence.to(tl.int64) * total_q
        _finish(
            accumulator, sums, maximum, out, lse, out_first, head, heads, sequence, batch,
            first_row, rows, q_len, out_rows, out_scale, DV, BLOCK_DV, BLOCK_Q, ACTIVATION,
        )  # fmt: skip
