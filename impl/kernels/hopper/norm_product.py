"""norm(x) W^T + bias on Hopper: a slice of W stays in shared memory, rows of x stream past it.

A program owns 128 columns of the result and keeps W's rows for them, all features. Warpgroups take
blocks of 64 rows in turn, each a whole block alone, with a ring of x tiles and a producer warp of
its own: none waits for another, and since they start a part of a block apart, one stores while
another's products run. Programs that own the columns of one row block work on it at the same time:
x comes from memory once.

A tile of x goes to registers and is the product's operand from there. Under RMSNorm its squares are
summed on the way, and the row's factor is applied to the accumulator; under LayerNorm it is
normalised on the way, from statistics of a pass before (`norm_linear_kernels` says why). No tile is
read by a product and by a sum from shared memory, so a buffer is free when it is in registers.

Counted for 16-bit elements, a step of 64 x 128 x 64 (256 clocks at the tensor cores' rate): 8 KiB
of x arrive in shared memory and 8 KiB are read from it, and 16 KiB of W: 128 bytes a clock would be
the memory's limit, so that three quarters of the tensor cores' rate take three quarters of it. From
L2 come 32 bytes a clock and multiprocessor; tiles of 128 x 256 that keep nothing would take 48.
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

from jagbench.impl.kernels.hopper.backward_parts import barrier_ring, packed
from jagbench.impl.kernels.hopper.gluon import at_row, tma_load, tma_store

#: Rows of a block, columns of a program, features of a step.
ROWS = gl.constexpr(64)
COLUMNS = gl.constexpr(128)
DEPTH = gl.constexpr(64)


@gluon.jit
def column_of(columns):
    """First column of a program."""
    return gl.program_id(0) % columns * COLUMNS


@gluon.jit
def blocks_of(W: gl.constexpr, GROUPS: gl.constexpr, total, columns):
    """First row block of a warpgroup, the step to its next, and the end."""
    lanes = gl.num_programs(0) // columns
    return gl.program_id(0) // columns + W * lanes, GROUPS * lanes, gl.cdiv(total, ROWS)


@gluon.jit
def producer(W: gl.constexpr, descs, memory, bars, call, GROUPS: gl.constexpr, STEPS: gl.constexpr,
             NORM: gl.constexpr, HAS_BIAS: gl.constexpr):  # fmt: skip
    """W's slice once (the first producer), then every tile of a warpgroup's blocks."""
    x_desc, w_desc, _out_desc = descs
    x_s, w_s, _out_s = memory
    full, empty, w_full, _started = bars
    _bias, _statistics, count, total, columns, width, _features, _eps = call
    if W == 0:
        column = column_of(columns)
        ready = w_full.index(0)
        mbarrier.expect(ready, 2 * STEPS * COLUMNS * DEPTH)
        for tile in gl.static_range(STEPS):
            tma_load(w_desc, at_row(width, width, column, tile * DEPTH), ready, w_s.index(tile))
    STAGES: gl.constexpr = x_s.shape[0] // GROUPS
    begin, stride, end = blocks_of(W, GROUPS, total, columns)
    position = 0
    for block in range(begin, end, stride):
        for step in range(0, STEPS):
            slot = W * STAGES + position % STAGES
            mbarrier.wait(empty.index(slot), ((position // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), 2 * ROWS * DEPTH)
            # Rows past the last offset, which may hold anything, arrive as zeros.
            place = at_row(count, count, block * ROWS, step * DEPTH)
            tma_load(x_desc, place, full.index(slot), x_s.index(slot))
            position += 1


@gluon.jit
def statistics_of(statistics, rows, seen, total, NORM: gl.constexpr):
    """Mean and factor of rows under LayerNorm; else zeros.

    The mean in one number is off by 2^-24 of itself. Rows of 16-bit numbers that are not all alike
    deviate from it by 2^-12 of it or more, and rows of one repeated number have no delta.
    """
    LAYOUT: gl.constexpr = rows.type.layout
    mean = gl.zeros([ROWS], gl.float32, LAYOUT)
    factor = mean
    if NORM == "layer":
        whole = total.to(gl.int64)
        mean = gl.load(statistics + rows, mask=seen, other=0.0)
        mean += gl.load(statistics + whole + rows, mask=seen, other=0.0)
        factor = gl.load(statistics + 2 * whole + rows, mask=seen, other=0.0)
    return mean, factor


@gluon.jit
def put(desc, room, tile, bias, row, count, total, column, width, DTYPE: gl.constexpr,
        HAS_BIAS: gl.constexpr, BUFFERS: gl.constexpr):  # fmt: skip
    """Add the bias to half the columns of a block and store them through a buffer.

    Rows from `count` on are stored as zeros, those from `total` on dropped.
    """
    LAYOUT: gl.constexpr = tile.type.layout
    if HAS_BIAS:
        across = column + gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, LAYOUT))
        tile += gl.load(bias + across, mask=across < width, other=0.0)[None, :]
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    tile = gl.where((rows < count)[:, None], tile, 0.0)
    tma.store_wait(BUFFERS - 1)
    room.reshape([ROWS, COLUMNS // 2]).store(packed(tile, DTYPE))
    fence_async_shared()
    tma_store(desc, at_row(total, total, row, column), room)


@gluon.jit
def consumer(W: gl.constexpr, descs, memory, bars, call, GROUPS: gl.constexpr, STEPS: gl.constexpr,
             NORM: gl.constexpr, HAS_BIAS: gl.constexpr):  # fmt: skip
    """Warpgroup W of GROUPS: every GROUPS-th row block of the program."""
    x_desc, _w_desc, out_desc = descs
    x_s, w_s, out_s = memory
    full, empty, w_full, started = bars
    bias, statistics, count, total, columns, width, features, eps = call
    DTYPE: gl.constexpr = x_desc.dtype
    STAGES: gl.constexpr = x_s.shape[0] // GROUPS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    # As the operand lies in registers, so does an accumulator of its shape.
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DEPTH, 16])
    column = column_of(columns)
    begin, stride, end = blocks_of(W, GROUPS, total, columns)
    mbarrier.wait(w_full.index(0), 0)
    if W > 0:
        mbarrier.wait(started.index(W - 1), 0)
    turn = 0
    for block in range(begin, end, stride):
        row = block * ROWS
        own = row + gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
        mean, factor = statistics_of(statistics, own, own < count, total, NORM)
        squares = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, TILE))
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS)
        for step in gl.static_range(STEPS):
            position = turn * STEPS + step
            slot = W * STAGES + position % STAGES
            mbarrier.wait(full.index(slot), (position // STAGES) & 1)
            x = x_s.index(slot).reshape([ROWS, DEPTH]).load(TILE)
            if NORM == "rms":
                wide = x.to(gl.float32)
                squares += gl.sum(wide * wide, axis=1)
            else:
                wide = (x.to(gl.float32) - mean[:, None]) * factor[:, None]
                x = packed(wide, DTYPE)
            operand = gl.convert_layout(x, OPERAND, assert_trivial=True)
            w_tile = w_s.index(step).reshape([COLUMNS, DEPTH]).permute((1, 0))
            if step == 0:
                acc = warpgroup_mma(operand, w_tile, acc, use_acc=False, is_async=True)
            else:
                # The operand before the last is free now: its registers take the next one.
                acc = warpgroup_mma_wait(1, deps=(acc,))
                acc = warpgroup_mma(operand, w_tile, acc, is_async=True)
            # Not before the product is issued, which waits until the tile is in registers: a load
            # from shared memory is under way for a while, and the TMA unit keeps no order with it.
            mbarrier.arrive(empty.index(slot), count=1)
            if step == STEPS // GROUPS:
                if W + 1 < GROUPS:
                    mbarrier.arrive(started.index(W), count=1, pred=turn == 0)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if NORM == "rms":
            # 1 for rows that are not seen, which eps of 0 would divide by 0.
            factor = 1.0 / gl.sqrt(gl.where(own < count, squares / features + eps, 1.0))
            if column == 0:
                gl.store(statistics + own, factor, mask=own < count)
            acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, SUMS))[:, None]
        low, high = gl.split(acc.reshape([ROWS, 2, COLUMNS // 2]).permute((0, 2, 1)))
        BUFFERS: gl.constexpr = out_s.shape[0] // GROUPS
        room = out_s.index(W * BUFFERS)
        put(out_desc, room, low, bias, row, count, total, column, width, DTYPE, HAS_BIAS, BUFFERS)
        room = out_s.index(W * BUFFERS + BUFFERS - 1)
        right = column + COLUMNS // 2
        put(out_desc, room, high, bias, row, count, total, right, width, DTYPE, HAS_BIAS, BUFFERS)
        turn += 1  # noqa: SIM113 - Gluon has no enumerate
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch", "total", "columns", "width", "features"])
def norm_product_kernel(
    x_desc, w_desc, out_desc, bias, statistics, offsets, batch, total, columns, width, features,
    eps,
    GROUPS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_OFFSETS: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """descs: x and out in boxes of 64 x 64, W `[width, features]` of 128 x 64 (jagged views).

    bias: fp32 `[width]`, read with HAS_BIAS. statistics: fp32 `[3, total]`, read (LayerNorm), or
    `[total]`, written (RMSNorm). offsets: of `batch` sequences, with HAS_OFFSETS. columns: programs
    that share a row block. GROUPS: warpgroups, 2 or 3. STEPS: tiles of 64 that hold all features.
    STAGES: of a warpgroup's ring. Padding rows of out are 0.
    """
    TYPE: gl.constexpr = x_desc.dtype
    x_s = gl.allocate_shared_memory(TYPE, [GROUPS * STAGES, 1, 1, ROWS, DEPTH], x_desc.layout)
    w_s = gl.allocate_shared_memory(TYPE, [STEPS, 1, 1, COLUMNS, DEPTH], w_desc.layout)
    out_s = gl.allocate_shared_memory(
        TYPE, [GROUPS * BUFFERS, 1, 1, ROWS, COLUMNS // 2], out_desc.layout
    )
    full = barrier_ring(GROUPS * STAGES, 1)
    empty = barrier_ring(GROUPS * STAGES, 1)
    w_full = barrier_ring(1, 1)
    started = barrier_ring(GROUPS, 1)
    fence_async_shared()
    count = total
    if HAS_OFFSETS:
        count = gl.load(offsets + batch).to(gl.int32)
    descs = (x_desc, w_desc, out_desc)
    memory = (x_s, w_s, out_s)
    bars = (full, empty, w_full, started)
    call = (bias, statistics, count, total, columns, width, features, eps)
    if GROUPS == 2:
        # Registers as in `backward.backward_kernel`.
        gl.warp_specialize(
            [
                (consumer, (0, descs, memory, bars, call, GROUPS, STEPS, NORM, HAS_BIAS)),
                (consumer, (1, descs, memory, bars, call, GROUPS, STEPS, NORM, HAS_BIAS)),
                (producer, (0, descs, memory, bars, call, GROUPS, STEPS, NORM, HAS_BIAS)),
                (producer, (1, descs, memory, bars, call, GROUPS, STEPS, NORM, HAS_BIAS)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (0, descs, memory, bars, call, GROUPS, STEPS, NORM, HAS_BIAS)),
                (consumer, (1, descs, memory, bars, call, GROUPS, STEPS, NORM, HAS_BIAS)),
                (consumer, (2, descs, memory, bars, call, GROUPS, STEPS, NORM, HAS_BIAS)),
                (producer, (0, descs, memory, bars, call, GROUPS, STEPS, NORM, HAS_BIAS)),
                (producer, (1, descs, memory, bars, call, GROUPS, STEPS, NORM, HAS_BIAS)),
                (producer, (2, descs, memory, bars, call, GROUPS, STEPS, NORM, HAS_BIAS)),
            ],
            [4, 4, 1, 1, 1],
            [160, 160, 24, 24, 24],
        )
