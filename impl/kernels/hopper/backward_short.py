"""Backward on Hopper where keys are short: items of 64 keys, each walked by one warpgroup alone.

Half of a 128-key item would be empty. What is left is bound by memory: Q and dO are read once and
dQ is written once. So nothing couples the two consumer warpgroups of a program: each has its own
items, its own producer warp and buffers, and finishes a step on its own:

    S^T = K Q^T    dA^T = V dO^T    dV += A^T dO    dS -> shared memory    dQ = dS K    dK += dS^T Q

With OWN_DELTA the deltas of rows whose keys are all in one item, sums of A dA over them, are formed
here: no pass before this one reads O and dO for them. dQ of a sequence with one item is stored as
it is, through the memory that held dS. Sequences with more keys than expected are as right, but
slow: two adds to a float32 buffer a step.

See `backward_parts` for jagged views and masking.
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
    tma_load,
    tma_reduce_add,
    tma_store,
)

#: Keys of an item, queries of a step, buffers of queries a warpgroup has.
ROWS = gl.constexpr(64)
STAGES = gl.constexpr(2)


@gluon.jit
def producer(
    W: gl.constexpr, descs, memory, bars, inputs, scales,
    D: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ALIGN_END: gl.constexpr, GROUPED: gl.constexpr, FOLDED: gl.constexpr,
    HEADS_APART: gl.constexpr, OWN_DELTA: gl.constexpr,
):  # fmt: skip
    """Every load of warpgroup W. The first queries of an item come before its keys are free."""
    q_desc, d_out_desc, k_desc, v_desc, _dk, _dv, _shares, _dq = descs
    q_s, d_out_s, k_s, v_s, _room, row_s = memory
    kv_full, kv_empty, q_full, q_empty = bars
    statistics, items, count, kv_heads, group, padded, left, right = inputs
    step = 0
    loaded = 0
    # The second warpgroups are dealt to after all first ones.
    programs = gl.num_programs(0)
    for turn in range(0, rounds_of(count, kv_heads, 2 * programs, FOLDED)):
        (
            k_start, k_length, k_row, q_start, q_length, _d_start, rows_start, kv_head, _shift,
            first, tiles, _whole, _until,
        ) = work_item(
            items, count, kv_heads, turn, gl.program_id(0) + W * programs, 2 * programs, 0, left,
            right, ROWS, ROWS, HAS_LEFT, HAS_RIGHT, ALIGN_END, False, FOLDED, HEADS_APART,
        )  # fmt: skip
        k_place = at_row(k_start + k_length, k_length, k_row, kv_head * D)
        row = first
        head = kv_head * group
        steps = tiles
        if GROUPED:
            steps = tiles * group
        for i in range(0, steps):
            slot = STAGES * W + step % STAGES
            mbarrier.wait(q_empty.index(slot), ((step // STAGES) & 1) ^ 1)
            lse = statistics + head.to(gl.int64) * padded + (rows_start + row // 64) * 64
            delta = lse + (kv_heads * group).to(gl.int64) * padded
            load_step(
                q_desc, d_out_desc, q_s, d_out_s, row_s, q_full.index(slot), slot, lse, delta,
                q_start + q_length, q_start + q_length, q_length, row, head * D, 1, D, ACTIVATION,
            )  # fmt: skip
            if i == 0:
                mbarrier.wait(kv_empty.index(W), (loaded & 1) ^ 1)
                mbarrier.expect(kv_full.index(W), 4 * ROWS * D)
                tma_load(k_desc, k_place, kv_full.index(W), k_s.index(W))
                tma_load(v_desc, k_place, kv_full.index(W), v_s.index(W))
                loaded += 1
            step += 1
            row, head = next_tile(row, head, first, tiles, ROWS, GROUPED)


@gluon.jit
def put_dq(
    shares_desc, dq_desc, room, dq, rest, alone, grad_scale, end, row, column, D: gl.constexpr
):
    """Store 64 rows of dQ, or add them to the float32 buffer. rest: columns 64 on, if any."""
    if alone:
        narrow = room._reinterpret(dq_desc.dtype, [1, 1, ROWS, D], dq_desc.layout)
        tile = narrow.reshape([ROWS, D])
        tile.slice(0, 64, dim=1).store((dq * grad_scale).to(dq_desc.dtype))
        if D == 128:
            tile.slice(64, 64, dim=1).store((rest * grad_scale).to(dq_desc.dtype))
        fence_async_shared()
        tma_store(dq_desc, [FAR, end, row, column], narrow)
    else:
        _add_columns(shares_desc, room, dq, end, row, column)
        if D == 128:
            tma.store_wait(0)
            _add_columns(shares_desc, room, rest, end, row, column + 64)


@gluon.jit
def _add_columns(shares_desc, room, dq, end, row, column):
    share_view(room).store(dq)
    fence_async_shared()
    tma_reduce_add(shares_desc, [FAR, end, row, column], room)


@gluon.jit
def column_sums(x, room):
    """Sums `[64]` over the 64 keys of x, through the head of the room."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # A warp holds 16 keys: it needs no other's to add them up.
    table = room._reinterpret(gl.float32, [4, ROWS], TABLE)
    table.store(gl.sum(x.reshape([4, 16, ROWS]), axis=1))
    warps = room._reinterpret(gl.float32, [4, ROWS], LINE)
    total = warps.index(0).load(LAYOUT)
    for i in gl.static_range(1, 4):
        total += warps.index(i).load(LAYOUT)
    return total


@gluon.jit
def consumer(
    W: gl.constexpr, descs, memory, bars, inputs, scales,
    D: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ALIGN_END: gl.constexpr, GROUPED: gl.constexpr, FOLDED: gl.constexpr,
    HEADS_APART: gl.constexpr, OWN_DELTA: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: its items, one after the other."""
    q_desc, _d_out, _k, _v, dk_desc, dv_desc, shares_desc, dq_desc = descs
    q_s, d_out_s, k_s, v_s, room_s, row_s = memory
    kv_full, kv_empty, q_full, q_empty = bars
    _statistics, items, count, kv_heads, group, _padded, left, right = inputs
    score_scale, grad_scale, value_scale = scales
    DTYPE: gl.constexpr = q_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, 64], DTYPE)
    # dS, then dQ of the same step; dV and dK at the end of an item.
    room = room_s.index(W)
    ds_s = room._reinterpret(DTYPE, [ROWS, 64], DS)
    stage = room._reinterpret(DTYPE, [1, 1, ROWS, D], dk_desc.layout)
    k_tile = k_s.index(W).reshape([ROWS, D])
    v_tile = v_s.index(W).reshape([ROWS, D])
    key_lanes = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    query_lanes = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    step = 0
    taken = 0
    # The second warpgroups are dealt to after all first ones.
    programs = gl.num_programs(0)
    for turn in range(0, rounds_of(count, kv_heads, 2 * programs, FOLDED)):
        (
            k_start, k_length, k_row, q_start, q_length, _d_start, _rows, kv_head, shift,
            first, tiles, whole, until,
        ) = work_item(
            items, count, kv_heads, turn, gl.program_id(0) + W * programs, 2 * programs, 0, left,
            right, ROWS, ROWS, HAS_LEFT, HAS_RIGHT, ALIGN_END, False, FOLDED, HEADS_APART,
        )  # fmt: skip
        steps = tiles
        if GROUPED:
            steps = tiles * group
        row = first
        head = kv_head * group
        dk = gl.zeros([ROWS, D], gl.float32, SUMS)
        dv = gl.zeros([ROWS, D], gl.float32, SUMS)
        if steps > 0:
            mbarrier.wait(kv_full.index(W), taken & 1)
        for _i in range(0, steps):
            slot = STAGES * W + step % STAGES
            q_tile = q_s.index(slot).reshape([ROWS, D])
            d_tile = d_out_s.index(slot).reshape([ROWS, D])
            mbarrier.wait(q_full.index(slot), (step // STAGES) & 1)
            s_flying = products(k_tile, q_tile.permute((1, 0)), 64)
            da_flying = products(v_tile, d_tile.permute((1, 0)), 64)
            s = warpgroup_mma_wait(1, deps=(s_flying,))
            weights, slope = weights_of(
                s, row_s, 2 * slot, score_scale, k_row + key_lanes, row + query_lanes,
                (row < whole) | (row + ROWS > until), shift, left, right, DTYPE, ACTIVATION,
                HAS_LEFT, HAS_RIGHT, True,
            )  # fmt: skip
            a = gl.convert_layout(weights, OPERAND)
            dv_flying = warpgroup_mma(a, d_tile, dv, is_async=True)
            da = warpgroup_mma_wait(1, deps=(da_flying,))
            if OWN_DELTA:
                tma.store_wait(0)  # dQ of the step before has left the room
                if k_length <= ROWS:
                    delta = column_sums(slope * da, room)
                else:
                    delta = row_s.index(2 * slot + 1).load(gl.SliceLayout(0, SCORES))
                ds = (slope * (da - delta[None, :])).to(DTYPE)
            else:
                ds = d_scores_of(da, slope, row_s, 2 * slot + 1, DTYPE, ACTIVATION)
            dv, a = warpgroup_mma_wait(0, deps=(dv_flying, a))
            if not OWN_DELTA:
                tma.store_wait(0)
            ds_s.store(ds)
            b = gl.convert_layout(ds, OPERAND)
            fence_async_shared()
            dq = products(ds_s.permute((1, 0)), k_tile.slice(0, 64, dim=1), 64)
            rest = dq
            if D == 128:
                rest = products(ds_s.permute((1, 0)), k_tile.slice(64, 64, dim=1), 64)
            dk_flying = warpgroup_mma(b, q_tile, dk, is_async=True)
            dq, rest = warpgroup_mma_wait(1, deps=(dq, rest))
            put_dq(
                shares_desc, dq_desc, room, dq, rest, k_length <= ROWS, grad_scale,
                q_start + q_length, FAR - q_length + row, head * D, D,
            )  # fmt: skip
            dk, b = warpgroup_mma_wait(0, deps=(dk_flying, b))
            mbarrier.arrive(q_empty.index(slot), count=1)
            step += 1
            row, head = next_tile(row, head, first, tiles, ROWS, GROUPED)
        if steps > 0:
            mbarrier.arrive(kv_empty.index(W), count=1)
            taken += 1
        place = at_row(k_start + k_length, k_length, k_row, kv_head * D)
        store_share(dv_desc, stage, (dv * value_scale).to(DTYPE), place)
        store_share(dk_desc, stage, (dk * grad_scale).to(DTYPE), place)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "group", "left", "right"])
def backward_short_kernel(
    q_desc, d_out_desc, k_desc, v_desc, dk_desc, dv_desc, shares_desc, dq_desc, statistics, items,
    count, kv_heads, group, statistics_rows, left, right, score_scale, grad_scale, value_scale,
    D: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ALIGN_END: gl.constexpr, GROUPED: gl.constexpr, FOLDED: gl.constexpr,
    HEADS_APART: gl.constexpr, OWN_DELTA: gl.constexpr,
):  # fmt: skip
    """As `backward.backward_kernel`, with a work list of 64 keys an item and no shared query."""
    DTYPE: gl.constexpr = q_desc.dtype
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # The producer's lanes copy the row statistics, and each says so.
    FILLS: gl.constexpr = 33 if ACTIVATION == SOFTMAX else 1
    q_s = gl.allocate_shared_memory(DTYPE, [2 * STAGES, 1, 1, ROWS, D], q_desc.layout)
    d_out_s = gl.allocate_shared_memory(DTYPE, [2 * STAGES, 1, 1, ROWS, D], d_out_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], v_desc.layout)
    room_s = gl.allocate_shared_memory(gl.float32, [2, 1, 1, ROWS, 64], shares_desc.layout)
    row_s = gl.allocate_shared_memory(gl.float32, [4 * STAGES, 64], FLAT)
    kv_full = barrier_ring(2, 1)
    kv_empty = barrier_ring(2, 1)
    q_full = barrier_ring(2 * STAGES, FILLS)
    q_empty = barrier_ring(2 * STAGES, 1)
    fence_async_shared()
    descs = (q_desc, d_out_desc, k_desc, v_desc, dk_desc, dv_desc, shares_desc, dq_desc)
    memory = (q_s, d_out_s, k_s, v_s, room_s, row_s)
    bars = (kv_full, kv_empty, q_full, q_empty)
    inputs = (statistics, items, count, kv_heads, group, statistics_rows, left, right)
    scales = (score_scale, grad_scale, value_scale)
    # The two producer warps share a warpgroup; registers as in `backward_kernel`.
    gl.warp_specialize(
        [
            (consumer, (
                0, descs, memory, bars, inputs, scales, D, ACTIVATION,
                HAS_LEFT, HAS_RIGHT, ALIGN_END, GROUPED, FOLDED, HEADS_APART, OWN_DELTA,
            )),
            (consumer, (
                1, descs, memory, bars, inputs, scales, D, ACTIVATION,
                HAS_LEFT, HAS_RIGHT, ALIGN_END, GROUPED, FOLDED, HEADS_APART, OWN_DELTA,
            )),
            (producer, (
                0, descs, memory, bars, inputs, scales, D, ACTIVATION,
                HAS_LEFT, HAS_RIGHT, ALIGN_END, GROUPED, FOLDED, HEADS_APART, OWN_DELTA,
            )),
            (producer, (
                1, descs, memory, bars, inputs, scales, D, ACTIVATION,
                HAS_LEFT, HAS_RIGHT, ALIGN_END, GROUPED, FOLDED, HEADS_APART, OWN_DELTA,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
