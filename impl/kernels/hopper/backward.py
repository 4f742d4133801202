"""Backward of jagged attention and of GDPA on Hopper: one persistent, warp-specialised kernel.

An item is a tile of KEYS keys of one sequence and key head; it walks the query tiles of all heads
of its group. Two consumer warpgroups hold 64 keys each and keep dK and dV in registers:

    S^T = K Q^T    dA^T = V dO^T    dV += A^T dO    dK += dS^T Q    dQ = dS K

dS goes through shared memory, so that each warpgroup forms one half of dQ over all keys of the
tile, which the TMA unit adds to a float32 buffer. dQ of a step is formed during the next step,
across items too: neither warpgroup waits for the other at once, and one multiplies while the other
computes weights. What couples them is that dS of a step replaces that of the step before last, so
nobody is ahead by more than the first half of a step.

Jagged edges and the edges of a window: see `backward_parts`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jagbench.impl.kernels.activations import SOFTMAX
from jagbench.impl.kernels.hopper.backward_parts import (
    barrier_ring,
    d_scores_of,
    load_step,
    next_tile,
    products,
    rounds_of,
    share_view,
    store_share,
    weights_of,
    work_item,
)
from jagbench.impl.kernels.hopper.gluon import (
    FAR,
    at_row,
    bulk_writes_wait,
    tma_load,
    tma_reduce_add,
    tma_store,
)

#: Keys of an item, two warpgroups of 64.
KEYS = gl.constexpr(128)
#: What becomes of a share of dQ, see `fate_of`.
ADDED = gl.constexpr(0)
ALONE = gl.constexpr(1)
FIRST = gl.constexpr(2)
LAST = gl.constexpr(3)


@gluon.jit
def parts_of(k_length, k_row, CHAIN: gl.constexpr):
    """Tiles of keys of an item of CHAIN of them that starts at `k_row`."""
    return gl.minimum((k_length - k_row + KEYS - 1) // KEYS, CHAIN)


@gluon.jit
def producer(
    descs, memory, bars, inputs, scales,
    HALVES: gl.constexpr, V_STAGES: gl.constexpr, D: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ALIGN_END: gl.constexpr,
    SHARED_Q: gl.constexpr, GROUPED: gl.constexpr, WIDE: gl.constexpr,
    CHAIN: gl.constexpr, FOLDED: gl.constexpr, HEADS_APART: gl.constexpr,
):  # fmt: skip
    """Issue every load, in the order in which the consumers use it.

    Nobody says that K is free: the last use of an item's K is in the first step of the next item,
    and that step is over when its queries are free. So it is with V if it has two buffers.
    """
    q_desc, d_out_desc, k_desc, v_desc, _dk, _dv, _shares, _dq = descs
    q_s, d_out_s, k_s, v_s, _ds_s, _dq_s, row_s = memory
    k_full, v_full, v_empty, q_full, q_empty, _share_full = bars
    statistics, items, count, kv_heads, group, total_q, padded, left, right = inputs
    BLOCK_Q: gl.constexpr = 64 * HALVES
    step = 0
    loaded = 0
    freeing = -1  # the step whose end frees the older buffer of K
    for turn in range(0, rounds_of(count, kv_heads, gl.num_programs(0), FOLDED)):
        (
            k_start, k_length, k_row, q_start, q_length, d_start, rows_start, kv_head, _shift,
            first, tiles, _whole, _until,
        ) = work_item(
            items, count, kv_heads, turn, gl.program_id(0), gl.num_programs(0), total_q, left,
            right, BLOCK_Q, KEYS * CHAIN, HAS_LEFT, HAS_RIGHT, ALIGN_END, SHARED_Q, FOLDED,
            HEADS_APART,
        )  # fmt: skip
        for part in range(0, gl.where(tiles > 0, parts_of(k_length, k_row, CHAIN), 0)):
            v_slot = loaded % V_STAGES
            k_place = at_row(k_start + k_length, k_length, k_row + part * KEYS, kv_head * D)
            # With three steps or more behind it, loading the last of them has waited for the first;
            # its barrier has gone on since, and a phase two behind looks like one not completed.
            if step - freeing <= 2:
                mbarrier.wait(q_empty.index(freeing & 1), (freeing >> 1) & 1)
            mbarrier.expect(k_full.index(loaded & 1), KEYS * D * 2)
            tma_load(k_desc, k_place, k_full.index(loaded & 1), k_s.index(loaded & 1))
            freeing = step
            row = first
            head = kv_head * group
            steps = tiles
            if GROUPED:
                steps = tiles * group
            for i in range(0, steps):
                slot = step & 1
                mbarrier.wait(q_empty.index(slot), ((step >> 1) & 1) ^ 1)
                lse = statistics + head.to(gl.int64) * padded + (rows_start + row // 64) * 64
                delta = lse + (kv_heads * group).to(gl.int64) * padded
                load_step(
                    q_desc, d_out_desc, q_s, d_out_s, row_s, q_full.index(slot), slot, lse, delta,
                    q_start + q_length, d_start + q_length, q_length, row, head * D,
                    HALVES, D, ACTIVATION,
                )  # fmt: skip
                if i == 0:
                    # Behind the first queries: with one buffer, V of the item before may be in use.
                    if V_STAGES == 1:
                        mbarrier.wait(v_empty.index(0), (loaded & 1) ^ 1)
                    mbarrier.expect(v_full.index(v_slot), KEYS * D * 2)
                    tma_load(v_desc, k_place, v_full.index(v_slot), v_s.index(v_slot))
                step += 1
                row, head = next_tile(row, head, first, tiles, BLOCK_Q, GROUPED)
            loaded += 1


@gluon.jit
def start_dq(ds_s, slot, k, W: gl.constexpr, HALVES: gl.constexpr, D: gl.constexpr):
    """Start a warpgroup's share `[64, 128 / HALVES * D / 128]` of dQ = dS K: rows, or columns."""
    if HALVES == 2:
        share = products(ds_s.index(2 * slot + W).permute((1, 0)), k, D)
    else:
        columns = k.slice(W * (D // 2), D // 2, dim=1)
        share = products(ds_s.index(slot).permute((1, 0)), columns, D // 2)
    return share


@gluon.jit
def put_dq(
    shares_desc, dq_desc, stage, share_full, dq, fate, phase, grad_scale, place,
    SHARED_Q: gl.constexpr, CHAIN: gl.constexpr,
):  # fmt: skip
    """Hand a warpgroup's share of dQ to the TMA unit, by its fate (`fate_of`)."""
    if CHAIN == 1:
        tma.store_wait(0)  # the staging buffer has been read
    elif fate != LAST:
        tma.store_wait(0)
    if SHARED_Q:
        _put_share(shares_desc, stage, dq, place, ADDED, 1)
    elif (fate == ALONE) | (fate == LAST):
        if CHAIN > 1:
            if fate == LAST:
                mbarrier.wait(share_full, phase)
                dq += share_view(stage).load(dq.type.layout)
        narrow = stage._reinterpret(dq_desc.dtype, [1, 1, 64, dq.shape[1]], dq_desc.layout)
        narrow.reshape([64, dq.shape[1]]).store((dq * grad_scale).to(dq_desc.dtype))
        fence_async_shared()
        tma_store(dq_desc, place, narrow)
    else:
        _put_share(shares_desc, stage, dq, place, fate, CHAIN)


@gluon.jit
def _put_share(shares_desc, stage, dq, place, fate, CHAIN: gl.constexpr):
    share_view(stage).store(dq)
    fence_async_shared()
    if CHAIN == 1:
        tma_reduce_add(shares_desc, place, stage)
    elif fate == FIRST:
        tma_store(shares_desc, place, stage)
    else:
        tma_reduce_add(shares_desc, place, stage)


@gluon.jit
def fate_of(k_length, part, CHAIN: gl.constexpr):
    """What becomes of a share of dQ: added to float32, stored as it is, or the ends of a chain.

    Where one program walks all key tiles of a sequence, one after the other, the first share is
    stored in float32, and the last one takes the sum back and makes it dQ: nothing is zeroed before
    the kernel, nor cast behind it.
    """
    fate = gl.where(k_length <= KEYS, ALONE, ADDED)
    if CHAIN > 1:
        chained = (k_length > KEYS) & (k_length <= KEYS * CHAIN)
        end = gl.where((part + 1) * KEYS >= k_length, LAST, ADDED)
        fate = gl.where(chained, gl.where(part == 0, FIRST, end), fate)
    return fate


@gluon.jit
def fetch_share(shares_desc, stage, share_full, fate, fresh, place):
    """Before the first share of a key tile all of the tile before must lie in memory."""
    if fresh:
        bulk_writes_wait()
    if fate == LAST:
        tma.store_wait(0)
        mbarrier.expect(share_full, 64 * 64 * 4)
        tma_load(shares_desc, place, share_full, stage)


@gluon.jit
def walk_step(
    W: gl.constexpr, memory, bars, shares_desc, fate, fresh, place, dk, dv, k_own, v_own, k_dq,
    step, v_phase, last, keys, queries, edge, shift, left, right, score_scale,
    HALVES: gl.constexpr, V_STAGES: gl.constexpr, v_slot, D: gl.constexpr, DTYPE: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, WIDE: gl.constexpr,
    CHAIN: gl.constexpr,
):  # fmt: skip
    """One tile of queries; returns dK (still in flight, with its operand), dV and a share of dQ.

    k_dq: K of the step before, whose dQ is formed, with that dQ's fate and place.
    """
    q_s, d_out_s, _k, _v, ds_s, dq_s, row_s = memory
    _k_full, v_full, v_empty, q_full, q_empty, share_full = bars
    BLOCK_Q: gl.constexpr = 64 * HALVES
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    slot = step & 1
    before = step - 1
    q_tile = q_s.index(slot).reshape([BLOCK_Q, D])
    d_tile = d_out_s.index(slot).reshape([BLOCK_Q, D])
    q_half = q_tile.slice(0, 64, dim=0)
    d_half = d_tile.slice(0, 64, dim=0)
    mbarrier.wait(q_full.index(slot), (step >> 1) & 1)
    s_flying = products(k_own, q_half.permute((1, 0)), 64)
    mbarrier.wait(v_full.index(v_slot), v_phase)
    da_flying = products(v_own, d_half.permute((1, 0)), 64)
    if CHAIN > 1:
        fetch_share(shares_desc, dq_s.index(W), share_full.index(W), fate, fresh, place)
    s = warpgroup_mma_wait(1, deps=(s_flying,))
    weights, slope = weights_of(
        s, row_s, 2 * slot * HALVES, score_scale, keys, queries, edge, shift, left, right,
        DTYPE, ACTIVATION, HAS_LEFT, HAS_RIGHT, WIDE,
    )  # fmt: skip
    a = gl.convert_layout(weights, OPERAND)
    if HALVES == 2:
        q_half = q_tile.slice(64, 64, dim=0)
        s_flying = products(k_own, q_half.permute((1, 0)), 64)
    dv_flying = warpgroup_mma(a, d_half, dv, is_async=True)
    da = warpgroup_mma_wait(HALVES, deps=(da_flying,))
    ds = d_scores_of(da, slope, row_s, (2 * slot + 1) * HALVES, DTYPE, ACTIVATION)
    # The other warpgroup has read what lies in this half of the ring: its step is over.
    mbarrier.wait(q_empty.index(before & 1), (before >> 1) & 1)
    ds_s.index(slot * HALVES).slice(W * 64, 64, dim=0).store(ds)
    b = gl.convert_layout(ds, OPERAND)
    if HALVES == 2:
        d_half = d_tile.slice(64, 64, dim=0)
        da_flying = products(v_own, d_half.permute((1, 0)), 64)
        dk_flying = warpgroup_mma(b, q_tile.slice(0, 64, dim=0), dk, is_async=True)
        s = warpgroup_mma_wait(3, deps=(s_flying,))
        weights, slope = weights_of(
            s, row_s, 2 * slot * HALVES + 1, score_scale, keys, queries + 64, edge, shift,
            left, right, DTYPE, ACTIVATION, HAS_LEFT, HAS_RIGHT, WIDE,
        )  # fmt: skip
        a2 = gl.convert_layout(weights, OPERAND)
        dv_flying = warpgroup_mma(a2, d_half, dv_flying, is_async=True)
        da, a = warpgroup_mma_wait(2, deps=(da_flying, a))
        a = a2
        ds = d_scores_of(da, slope, row_s, (2 * slot + 1) * HALVES + 1, DTYPE, ACTIVATION)
        ds_s.index(slot * HALVES + 1).slice(W * 64, 64, dim=0).store(ds)
    fence_async_shared()
    if V_STAGES == 1:
        if last:
            mbarrier.arrive(v_empty.index(0), count=1)
    dq_flying = start_dq(ds_s, before & 1, k_dq, W, HALVES, D)
    if HALVES == 2:
        b2 = gl.convert_layout(ds, OPERAND)
        dk_flying = warpgroup_mma(b2, q_half, dk_flying, is_async=True)
    else:
        b2 = b
        dk_flying = warpgroup_mma(b, q_half, dk, is_async=True)
    dq, dv, a, b = warpgroup_mma_wait(1, deps=(dq_flying, dv_flying, a, b))
    return dk_flying, b2, dv, dq


@gluon.jit
def consumer(
    W: gl.constexpr, descs, memory, bars, inputs, scales,
    HALVES: gl.constexpr, V_STAGES: gl.constexpr, D: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ALIGN_END: gl.constexpr,
    SHARED_Q: gl.constexpr, GROUPED: gl.constexpr, WIDE: gl.constexpr,
    CHAIN: gl.constexpr, FOLDED: gl.constexpr, HEADS_APART: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: keys [64 W, 64 W + 64) of every item, and its share of dQ."""
    q_desc, _d_out, _k, _v, dk_desc, dv_desc, shares_desc, dq_desc = descs
    _q_s, _d_out_s, k_s, v_s, ds_s, dq_s, _row_s = memory
    k_full, _v_full, _v_empty, _q_full, q_empty, share_full = bars
    _statistics, items, count, kv_heads, group, total_q, _padded, left, right = inputs
    score_scale, grad_scale, value_scale = scales
    DTYPE: gl.constexpr = q_desc.dtype
    BLOCK_Q: gl.constexpr = 64 * HALVES
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    stage = dq_s.index(W)._reinterpret(DTYPE, [1, 1, 64, D], dk_desc.layout)
    key_lanes = W * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    query_lanes = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    step = 0
    taken = 0
    # What becomes of dQ of the step before this one; at first it goes nowhere: out of bounds.
    fate = ADDED
    fresh = False
    dq_end = 0
    dq_row = 1 << 30
    dq_column = 0
    fetched = 0
    for turn in range(0, rounds_of(count, kv_heads, gl.num_programs(0), FOLDED)):
        (
            k_start, k_length, k_row, _q_start, q_length, d_start, _rows, kv_head, shift,
            first, tiles, whole, until,
        ) = work_item(
            items, count, kv_heads, turn, gl.program_id(0), gl.num_programs(0), total_q, left,
            right, BLOCK_Q, KEYS * CHAIN, HAS_LEFT, HAS_RIGHT, ALIGN_END, SHARED_Q, FOLDED,
            HEADS_APART,
        )  # fmt: skip
        steps = tiles
        if GROUPED:
            steps = tiles * group
        for part in range(0, parts_of(k_length, k_row, CHAIN)):
            row = first
            head = kv_head * group
            v_slot = taken % V_STAGES
            k_own = k_s.index(taken & 1).reshape([KEYS, D]).slice(W * 64, 64, dim=0)
            v_own = v_s.index(v_slot).reshape([KEYS, D]).slice(W * 64, 64, dim=0)
            dk = gl.zeros([64, D], gl.float32, SUMS)
            dv = gl.zeros([64, D], gl.float32, SUMS)
            if steps > 0:
                mbarrier.wait(k_full.index(taken & 1), (taken >> 1) & 1)
            for i in range(0, steps):
                k_dq = k_s.index((taken & 1) ^ gl.where(i == 0, 1, 0)).reshape([KEYS, D])
                dk_flying, b, dv, dq = walk_step(
                    W, memory, bars, shares_desc, fate, fresh, [FAR, dq_end, dq_row, dq_column],
                    dk, dv, k_own, v_own, k_dq, step, (taken // V_STAGES) & 1, i == steps - 1,
                    k_row + part * KEYS + key_lanes, row + query_lanes,
                    (row < whole) | (row + BLOCK_Q > until), shift, left, right,
                    score_scale, HALVES, V_STAGES, v_slot, D, DTYPE, ACTIVATION,
                    HAS_LEFT, HAS_RIGHT, WIDE, CHAIN,
                )  # fmt: skip
                put_dq(
                    shares_desc, dq_desc, dq_s.index(W), share_full.index(W), dq, fate, fetched & 1,
                    grad_scale, [FAR, dq_end, dq_row, dq_column], SHARED_Q, CHAIN,
                )  # fmt: skip
                fetched += gl.where(fate == LAST, 1, 0)
                dk, b = warpgroup_mma_wait(0, deps=(dk_flying, b))
                mbarrier.arrive(q_empty.index(step & 1), count=1)
                fate = fate_of(k_length, part, CHAIN)
                fresh = i == 0
                dq_end = d_start + q_length
                dq_row = FAR - q_length + row
                dq_column = head * D
                if HALVES == 2:
                    dq_row += W * 64
                else:
                    dq_column += W * (D // 2)
                step += 1
                row, head = next_tile(row, head, first, tiles, BLOCK_Q, GROUPED)
            taken += gl.where(steps > 0, 1, 0)
            place = at_row(k_start + k_length, k_length, k_row + part * KEYS + W * 64, kv_head * D)
            store_share(dv_desc, stage, (dv * value_scale).to(DTYPE), place)
            store_share(dk_desc, stage, (dk * grad_scale).to(DTYPE), place)
    # dQ of the last step.
    before = step - 1
    mbarrier.wait(q_empty.index(before & 1), (before >> 1) & 1)
    k_dq = k_s.index((taken & 1) ^ 1).reshape([KEYS, D])
    dq = warpgroup_mma_wait(0, deps=(start_dq(ds_s, before & 1, k_dq, W, HALVES, D),))
    if CHAIN > 1:
        fetch_share(
            shares_desc, dq_s.index(W), share_full.index(W), fate, fresh,
            [FAR, dq_end, dq_row, dq_column],
        )  # fmt: skip
    put_dq(
        shares_desc, dq_desc, dq_s.index(W), share_full.index(W), dq, fate, fetched & 1,
        grad_scale, [FAR, dq_end, dq_row, dq_column], SHARED_Q, CHAIN,
    )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "group", "total_q", "left", "right"])
def backward_kernel(
    q_desc, d_out_desc, k_desc, v_desc, dk_desc, dv_desc, shares_desc, dq_desc, statistics, items,
    count, kv_heads, group, total_q, statistics_rows, left, right, score_scale, grad_scale,
    value_scale, HALVES: gl.constexpr, V_STAGES: gl.constexpr, D: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ALIGN_END: gl.constexpr, SHARED_Q: gl.constexpr, GROUPED: gl.constexpr, WIDE: gl.constexpr,
    CHAIN: gl.constexpr, FOLDED: gl.constexpr, HEADS_APART: gl.constexpr,
):  # fmt: skip
    """dK, dV `[rows, kv_heads, D]`, and dQ `[out_rows, heads, D]` of sequences of one item.

    That of others is added, unscaled, to float32 shares of the same shape; of a shared query, all.

    statistics: float32 `[2, heads, statistics_rows]` (`attention_launch.row_statistics`), softmax
    only. items, count: work list of the keys. FOLDED, HEADS_APART: see `work_item`; for masks, and
    chains of one.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    BLOCK_Q: gl.constexpr = 64 * HALVES
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, 64], DTYPE)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SHARE: gl.constexpr = D if HALVES == 2 else D // 2
    # The producer's lanes copy the row statistics, and each says so.
    FILLS: gl.constexpr = 33 if ACTIVATION == SOFTMAX else 1
    q_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BLOCK_Q, D], q_desc.layout)
    d_out_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BLOCK_Q, D], d_out_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, KEYS, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [V_STAGES, 1, 1, KEYS, D], v_desc.layout)
    ds_s = gl.allocate_shared_memory(DTYPE, [2 * HALVES, KEYS, 64], DS)
    dq_s = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, SHARE], shares_desc.layout)
    row_s = gl.allocate_shared_memory(gl.float32, [4 * HALVES, 64], ROWS)
    k_full = barrier_ring(2, 1)
    v_full = barrier_ring(V_STAGES, 1)
    v_empty = barrier_ring(1, 2)
    q_full = barrier_ring(2, FILLS)
    q_empty = barrier_ring(2, 2)
    share_full = barrier_ring(2, 1)
    fence_async_shared()
    descs = (q_desc, d_out_desc, k_desc, v_desc, dk_desc, dv_desc, shares_desc, dq_desc)
    memory = (q_s, d_out_s, k_s, v_s, ds_s, dq_s, row_s)
    bars = (k_full, v_full, v_empty, q_full, q_empty, share_full)
    inputs = (
        statistics, items, count, kv_heads, group, total_q, statistics_rows, left, right,
    )  # fmt: skip
    scales = (score_scale, grad_scale, value_scale)
    # Launched with maxnreg 168: 3 x 128 threads share 64512 registers, 240, 240 and 24 a thread.
    gl.warp_specialize(
        [
            (consumer, (
                0, descs, memory, bars, inputs, scales, HALVES, V_STAGES, D, ACTIVATION,
                HAS_LEFT, HAS_RIGHT, ALIGN_END, SHARED_Q, GROUPED, WIDE, CHAIN, FOLDED,
                HEADS_APART,
            )),
            (consumer, (
                1, descs, memory, bars, inputs, scales, HALVES, V_STAGES, D, ACTIVATION,
                HAS_LEFT, HAS_RIGHT, ALIGN_END, SHARED_Q, GROUPED, WIDE, CHAIN, FOLDED,
                HEADS_APART,
            )),
            (producer, (
                descs, memory, bars, inputs, scales, HALVES, V_STAGES, D, ACTIVATION,
                HAS_LEFT, HAS_RIGHT, ALIGN_END, SHARED_Q, GROUPED, WIDE, CHAIN, FOLDED,
                HEADS_APART,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
