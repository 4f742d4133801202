"""What the kernels of the Hopper backward share: items, loads, weights, stores.

A jagged tensor is a 4-D view whose row bound is moved to the end of a sequence
(`descriptors.jagged_descriptor`), so rows outside it are read as zeros and not written. Rows
without keys carry lse = +inf, so their weights are 0; zero keys give finite weights (they are
clamped to 1), which zero rows of K and V then drop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from jagbench.impl.kernels.activations import SOFTMAX, activate_and_derivative
from jagbench.impl.kernels.hopper.backward_launch import SHARE_BASES
from jagbench.impl.kernels.hopper.gluon import FIELDS, at_row, tma_load, tma_store
from jagbench.impl.kernels.hopper.work import dealt_entry, folded_tile
from jagbench.impl.kernels.tiles import visible_span


@gluon.jit
def rounds_of(count, kv_heads, workers, FOLDED: gl.constexpr):
    """Items a worker takes at most."""
    if FOLDED:
        rounds = gl.cdiv(gl.cdiv(gl.load(count) * kv_heads, 2), workers) * 2
    else:
        rounds = gl.cdiv(gl.load(count) * kv_heads, workers)
    return rounds


@gluon.jit
def work_item(
    items, count, kv_heads, turn, worker, workers, total_q, left, right,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, ALIGN_END: gl.constexpr, SHARED_Q: gl.constexpr,
    FOLDED: gl.constexpr, HEADS_APART: gl.constexpr,
):  # fmt: skip
    """What a worker is dealt in a turn of the list of (item, key head).

    FOLDED: the items of a sequence are dealt in pairs, those of a head side by side if HEADS_APART
    (`work.folded_tile`).

    Returns key start, key length, first key, query start, query length, start of the queries' rows
    in d_out, start of their statistics (in units of 64), key head, shift of positions, first query
    row, query tiles to walk, and first and last of the rows that see every key of the item and are
    seen by it. Past the end of the list: an item without rows.
    """
    # Behind the last item stands an empty one.
    entry = dealt_entry(turn, worker, workers, 2 if FOLDED else 1)
    item = items + gl.minimum(entry // kv_heads, gl.load(count)) * FIELDS
    k_start = gl.load(item)
    k_length = gl.load(item + 1)
    k_row = gl.load(item + 2)
    q_start = gl.load(item + 3)
    q_length = gl.load(item + 4)
    rows_start = gl.load(item + 7)
    kv_head = entry % kv_heads
    if FOLDED:
        blocks = gl.maximum(gl.cdiv(k_length, BLOCK_K), 1)
        place = (k_row // BLOCK_K) * kv_heads + kv_head
        kv_head, block = folded_tile(place, kv_heads, blocks, HEADS_APART)
        k_row = block * BLOCK_K
    d_start = q_start
    if SHARED_Q:
        d_start = gl.load(item + 6) * total_q
    shift = 0
    if ALIGN_END:
        shift = k_length - q_length
    # Seen from the keys the window is mirrored: left and right change places, shift its sign.
    first, whole, until, last = visible_span(
        k_row, gl.minimum(k_length - k_row, BLOCK_K), q_length, -shift, right, left,
        HAS_RIGHT, HAS_LEFT, BLOCK_Q,
    )  # fmt: skip
    tiles = gl.maximum((last - first + BLOCK_Q - 1) // BLOCK_Q, 0)
    return (
        k_start, k_length, k_row, q_start, q_length, d_start, rows_start, kv_head, shift,
        first, tiles, whole, until,
    )  # fmt: skip


@gluon.jit
def next_tile(row, head, first, tiles, BLOCK_Q: gl.constexpr, GROUPED: gl.constexpr):
    """First row and head of the next query tile: behind a head's last one, in the next head."""
    row += BLOCK_Q
    if GROUPED:
        wrap = row >= first + tiles * BLOCK_Q
        row = gl.where(wrap, first, row)
        head += gl.where(wrap, 1, 0)
    return row, head


@gluon.jit
def load_step(
    q_desc, d_out_desc, q_s, d_out_s, row_s, full, slot, lse, delta, q_end, d_end, length, row,
    column, HALVES: gl.constexpr, D: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Load what one step needs: a tile of Q and of dO and, for softmax, their rows' statistics."""
    mbarrier.expect(full, 4 * 64 * HALVES * D)
    tma_load(q_desc, at_row(q_end, length, row, column), full, q_s.index(slot))
    tma_load(d_out_desc, at_row(d_end, length, row, column), full, d_out_s.index(slot))
    if ACTIVATION == SOFTMAX:
        lanes = gl.arange(0, 64, gl.BlockedLayout([2], [32], [1], [0]))
        for half in gl.static_range(HALVES):
            place = row_s.index((2 * slot) * HALVES + half)
            async_copy.async_copy_global_to_shared(place, lse + half * 64 + lanes)
            place = row_s.index((2 * slot + 1) * HALVES + half)
            async_copy.async_copy_global_to_shared(place, delta + half * 64 + lanes)
        async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def products(a, b, COLUMNS: gl.constexpr):
    """Start a product `[64, COLUMNS]` of two tiles in shared memory."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    zeros = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit
def weights_of(
    s, row_s, place, score_scale, keys, queries, edge, shift, left, right, DTYPE: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """A (16 bits) and A' (A itself for softmax; float32 if WIDE) of 64 keys and 64 queries.

    edge: whether the window cuts through them. WIDE: 16 registers more a thread, 64 instructions
    fewer a step.
    """
    if ACTIVATION == SOFTMAX:
        lse = row_s.index(place).load(gl.SliceLayout(0, s.type.layout))
        # A weight is at most 1: the clamp only meets zero keys, which must give something finite.
        weights = gl.exp2(gl.minimum(s * score_scale - lse[None, :], 0.0))
        slope = weights
    else:
        weights, slope = activate_and_derivative(s * score_scale, ACTIVATION)
        if not WIDE:
            # Before the branch: both wait there, in half the registers.
            weights = packed(weights, DTYPE)
            slope = packed(slope, DTYPE)
    if HAS_LEFT or HAS_RIGHT:
        if edge:
            seen = visible_pairs(keys, queries, shift, left, right, HAS_LEFT, HAS_RIGHT)
            weights = gl.where(seen, weights, gl.zeros_like(weights))
            slope = gl.where(seen, slope, gl.zeros_like(slope))
    if ACTIVATION == SOFTMAX:
        slope = weights
        weights = packed(weights, DTYPE)
        if not WIDE:
            slope = weights
    elif WIDE:
        weights = packed(weights, DTYPE)
    return weights, slope


@gluon.jit
def packed(x, DTYPE: gl.constexpr):
    """x in 16 bits, two elements an instruction.

    Left to itself the compiler converts what is used packed and alone one by one, on the unit that
    also forms exp2: 32 more operations of a quarter of the rate a step.
    """
    if DTYPE == gl.bfloat16:
        y = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )  # fmt: skip
    else:
        y = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )  # fmt: skip
    return y


@gluon.jit
def visible_pairs(
    keys, queries, shift, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr
):
    """Mask `[keys, queries]` of the pairs inside the window."""
    seen = keys[:, None] >= 0
    if HAS_LEFT:
        seen = seen & (keys[:, None] >= (queries + (shift - left))[None, :])
    if HAS_RIGHT:
        seen = seen & (keys[:, None] <= (queries + (shift + right))[None, :])
    return seen


@gluon.jit
def d_scores_of(da, slope, row_s, place, DTYPE: gl.constexpr, ACTIVATION: gl.constexpr):
    """dS^T in 16 bits."""
    if ACTIVATION == SOFTMAX:
        delta = row_s.index(place).load(gl.SliceLayout(0, da.type.layout))
        da = da - delta[None, :]
    return (slope.to(gl.float32) * da).to(DTYPE)


@gluon.constexpr_function
def _share_layout():
    return gl.SharedLinearLayout([list(base) for base in SHARE_BASES], [], 1024)


@gluon.jit
def share_view(stage):
    """A staging buffer for 64 x 64 float32 of dQ as the TMA unit takes them, columns permuted.

    A thread then stores its sums 16 bytes at a time and without conflicts. The buffer of shares in
    global memory has its columns in the order of `share_column`.
    """
    return stage._reinterpret(gl.float32, [64, 64], _share_layout())


@gluon.jit
def store_share(desc, stage, tile, place):
    """Store a warpgroup's rows of dK or dV through its staging buffer."""
    tma.store_wait(0)
    stage.reshape([tile.shape[0], tile.shape[1]]).store(tile)
    fence_async_shared()
    tma_store(desc, place, stage)


@gluon.jit
def barrier_ring(SIZE: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that complete after ARRIVALS arrivals (and the bytes expected)."""
    ring = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SIZE):
        mbarrier.init(ring.index(i), count=ARRIVALS)
    return ring
