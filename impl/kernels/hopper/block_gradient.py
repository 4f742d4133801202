"""Backward of block attention on Hopper, rotary fused in: a block of one head is an item.

All keys of a query lie in its block, so a whole row of weights is there at once: no log-sum-exp, no
output and no delta is read. A producer warp brings Q, K, V and dO of an item to one of three slots
by TMA; two warpgroups take items in turn, and each does all of one alone:

    turn K, Q, V in place    S = Q K^T    dA = dO V^T    P = softmax(S)    dS = P (dA - sum(P dA))
    dV = P^T dO    dK = dS^T Q    dQ = dS K    each turned back, rounded once, stored from the slot

Neighbouring columns of a row of an accumulator lie in one thread, and so do both elements that
rotary mixes: sines and cosines are loaded once an item, straight into the layout of the products,
and nothing moves between threads to turn or to turn back. dV goes where V lay, dK where dO lay, dQ
where Q lay; the TMA unit drops rows outside the sequence.

Rows past a sequence's end are read as zeros; their weights are finite, and zero rows of dO drop
them. Padding behind the last offset is read as a sequence without rows, so its gradients are zero.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from jagbench.impl.kernels.hopper.backward_parts import barrier_ring, packed, products
from jagbench.impl.kernels.hopper.gluon import FIELDS, at_row, tma_load, tma_store

#: Rows of a block; items a program has in shared memory.
ROWS = gl.constexpr(64)
SLOTS = gl.constexpr(3)


@gluon.jit
def work_item(items, blocks, heads, turn):
    """A program's item of a turn: start and length of its sequence, rows of that to read (none of
    padding), first row of the block, head. Past the end of the list: an item without rows.

    Turns go to both warpgroups alternately.
    """
    entry = turn * gl.num_programs(0) + gl.program_id(0)
    block = entry // heads
    head = entry % heads
    # Behind the last item stands an empty one.
    item = items + gl.minimum(block, blocks) * FIELDS
    length = gl.load(item + 1)
    readable = gl.where(gl.load(item + 4) > 0, length, 0)
    return gl.load(item), length, readable, gl.load(item + 2), head


@gluon.jit
def turns_of(blocks, heads):
    """Items a program is dealt; all weigh the same, but for empty ones past the end of the list."""
    return gl.cdiv(blocks * heads, gl.num_programs(0))


@gluon.jit
def producer(descs, memory, bars, inputs, scales, D: gl.constexpr, BY_TOKEN: gl.constexpr,
             TURN_VALUES: gl.constexpr):  # fmt: skip
    """Every load of a program, in the order of its items."""
    q_desc, k_desc, v_desc, d_out_desc, _dq, _dk, _dv = descs
    q_s, k_s, v_s, d_out_s, _weights, _d_scores = memory
    full, empty = bars
    items, count, heads, _table, _table_row = inputs
    blocks = gl.load(count)
    for turn in range(0, turns_of(blocks, heads)):
        start, _length, readable, row, head = work_item(items, blocks, heads, turn)
        slot = turn % SLOTS
        place = at_row(start + readable, readable, row, head * D)
        ready = full.index(turn % (2 * SLOTS))
        mbarrier.wait(empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
        mbarrier.expect(ready, 8 * ROWS * D)
        tma_load(k_desc, place, ready, k_s.index(slot))
        tma_load(q_desc, place, ready, q_s.index(slot))
        tma_load(v_desc, place, ready, v_s.index(slot))
        tma_load(d_out_desc, place, ready, d_out_s.index(slot))


@gluon.jit
def pairs_of(x):
    """First and second elements of the pairs of an accumulator's columns; nothing moves."""
    return gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))


@gluon.jit
def turned(x, sin, cos):
    """Neighbours (a, b) of an fp32 tile become (a cos - b sin, a sin + b cos)."""
    a, b = pairs_of(x)
    y = gl.join(a * cos - b * sin, a * sin + b * cos).reshape([x.shape[0], x.shape[1]])
    return gl.convert_layout(y, x.type.layout, assert_trivial=True)


@gluon.jit
def angles(table, first, table_row, count, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Sines and cosines `[64, D / 2]`, fp32, of the pairs of a tile in LAYOUT, from row `first`.

    Rows at or past `count` are not read, and have both 0: what they turn is zero.
    """
    a, _b = pairs_of(gl.zeros([ROWS, D], gl.float32, LAYOUT))
    HALF: gl.constexpr = a.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, HALF))
    pair = gl.arange(0, D // 2, gl.SliceLayout(0, HALF))
    own = (table + first.to(gl.int64) * table_row) + row * table_row
    at = own[:, None] + pair[None, :]
    inside = (row < count)[:, None] & (pair >= 0)[None, :]
    sin = gl.load(at, mask=inside, other=0.0).to(gl.float32)
    cos = gl.load(at + D // 2, mask=inside, other=0.0).to(gl.float32)
    return sin, cos


@gluon.jit
def turn_in_place(tile, sin, cos, LAYOUT: gl.constexpr):
    """Turn a tile in shared memory in fp32, rounded once."""
    x = tile.load(LAYOUT).to(gl.float32)
    tile.store(packed(turned(x, sin, cos), tile.dtype))


@gluon.jit
def softmax(s, score_scale, count):
    """Weights of whole rows, fp32. count: how many of the columns are keys, at least 1."""
    column = gl.arange(0, ROWS, gl.SliceLayout(0, s.type.layout))
    s = gl.where((column < count)[None, :], s * score_scale, float("-inf"))
    weights = gl.exp2(s - gl.max(s, axis=1)[:, None])
    return weights * (1.0 / gl.sum(weights, axis=1))[:, None]


@gluon.jit
def put(desc, room, gradient, sin, cos, place, TURN: gl.constexpr):
    """Turn a gradient back, round it once and store it through a buffer nobody reads any more."""
    if TURN:
        gradient = turned(gradient, -sin, cos)
    room.reshape([gradient.shape[0], gradient.shape[1]]).store(packed(gradient, desc.dtype))
    fence_async_shared()
    tma_store(desc, place, room)


@gluon.jit
def consumer(W: gl.constexpr, descs, memory, bars, inputs, scales, D: gl.constexpr,
             BY_TOKEN: gl.constexpr, TURN_VALUES: gl.constexpr):  # fmt: skip
    """Warpgroup W: every second item."""
    q_desc, _k, _v, _d_out, dq_desc, dk_desc, dv_desc = descs
    q_s, k_s, v_s, d_out_s, weights_s, d_scores_s = memory
    full, empty = bars
    items, count, heads, table, table_row = inputs
    score_scale, grad_scale = scales
    DTYPE: gl.constexpr = q_desc.dtype
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_s = weights_s.index(W)
    ds_s = d_scores_s.index(W)
    blocks = gl.load(count)
    start, length, readable, row, head = work_item(items, blocks, heads, W)
    for turn in range(W, turns_of(blocks, heads), 2):
        slot = turn % SLOTS
        first = row
        if BY_TOKEN:
            first += start
        sin, cos = angles(table, first, table_row, readable - row, D, WIDE)
        # The gradients of the item before have left their slot by now, or will soon. A branch, or
        # the angles would be asked for after the wait.
        if turn > W:
            tma.store_wait(0)
            mbarrier.arrive(empty.index((turn + 1) % SLOTS), count=1)
        place = at_row(start + length, length, row, head * D)
        keys = gl.maximum(readable - row, 1)
        start, length, readable, row, head = work_item(items, blocks, heads, turn + 2)
        q_tile = q_s.index(slot).reshape([ROWS, D])
        k_tile = k_s.index(slot).reshape([ROWS, D])
        v_tile = v_s.index(slot).reshape([ROWS, D])
        d_tile = d_out_s.index(slot).reshape([ROWS, D])
        mbarrier.wait(full.index(turn % (2 * SLOTS)), (turn // (2 * SLOTS)) & 1)
        turn_in_place(k_tile, sin, cos, WIDE)
        turn_in_place(q_tile, sin, cos, WIDE)
        fence_async_shared()
        s_flying = products(q_tile, k_tile.permute((1, 0)), ROWS)
        if TURN_VALUES:
            turn_in_place(v_tile, sin, cos, WIDE)
            fence_async_shared()
        da_flying = products(d_tile, v_tile.permute((1, 0)), ROWS)
        s = warpgroup_mma_wait(1, deps=(s_flying,))
        weights = softmax(s, score_scale, keys)
        p_s.store(packed(weights, DTYPE))
        fence_async_shared()
        dv_flying = products(p_s.permute((1, 0)), d_tile, D)
        da = warpgroup_mma_wait(1, deps=(da_flying,))
        delta = gl.sum(weights * da, axis=1)
        ds_s.store(packed(weights * (da - delta[:, None]), DTYPE))
        fence_async_shared()
        dk_flying = products(ds_s.permute((1, 0)), q_tile, D)
        dv = warpgroup_mma_wait(1, deps=(dv_flying,))
        put(dv_desc, v_s.index(slot), dv, sin, cos, place, TURN_VALUES)
        dq_flying = products(ds_s, k_tile, D)
        dk = warpgroup_mma_wait(1, deps=(dk_flying,))
        put(dk_desc, d_out_s.index(slot), dk * grad_scale, sin, cos, place, True)
        dq = warpgroup_mma_wait(0, deps=(dq_flying,))
        put(dq_desc, q_s.index(slot), dq * grad_scale, sin, cos, place, True)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "table_row"])
def block_gradient_kernel(
    q_desc, k_desc, v_desc, d_out_desc, dq_desc, dk_desc, dv_desc, items, count, heads, table,
    table_row, score_scale, grad_scale,
    D: gl.constexpr, BY_TOKEN: gl.constexpr, TURN_VALUES: gl.constexpr,
):  # fmt: skip
    """descs: jagged views of the packed tensors, in boxes of 64 rows of a head.

    items, count: `work.WorkList` of blocks of 64 rows whose other side is empty for padding only.
    table `[rows, D]`, sines first; with BY_TOKEN by packed row, else by row of the sequence.
    score_scale: of Q K^T, in units of log 2; grad_scale: of dQ and dK.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], DTYPE)
    q_s = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, 1, ROWS, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, 1, ROWS, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, 1, ROWS, D], v_desc.layout)
    d_out_s = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, 1, ROWS, D], d_out_desc.layout)
    weights_s = gl.allocate_shared_memory(DTYPE, [2, ROWS, ROWS], SQUARE)
    d_scores_s = gl.allocate_shared_memory(DTYPE, [2, ROWS, ROWS], SQUARE)
    # A slot's items go to both warpgroups by turns. Each has its own barrier, for none may wait for
    # a phase before the one before it is over.
    full = barrier_ring(2 * SLOTS, 1)
    empty = barrier_ring(SLOTS, 1)
    fence_async_shared()
    descs = (q_desc, k_desc, v_desc, d_out_desc, dq_desc, dk_desc, dv_desc)
    memory = (q_s, k_s, v_s, d_out_s, weights_s, d_scores_s)
    bars = (full, empty)
    inputs = (items, count, heads, table, table_row)
    scales = (score_scale, grad_scale)
    # Registers as in `backward.backward_kernel`.
    gl.warp_specialize(
        [
            (consumer, (
                0, descs, memory, bars, inputs, scales, D, BY_TOKEN, TURN_VALUES,
            )),
            (consumer, (
                1, descs, memory, bars, inputs, scales, D, BY_TOKEN, TURN_VALUES,
            )),
            (producer, (
                descs, memory, bars, inputs, scales, D, BY_TOKEN, TURN_VALUES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
