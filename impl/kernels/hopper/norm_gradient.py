"""Weight gradient of a norm with a linear layer on Hopper: d_out^T normalised(x), persistent.

A program owns 128 features and 128 or 256 outputs, and a run of rows. A producer warp brings 64
rows of x and of d_out by TMA to a ring of stages, and their statistics beside them. Each of two
warpgroups takes 64 features: it loads its part of x transposed into registers, where the tensor
cores take a left operand from, normalises it there, rounds once, and multiplies it with d_out as it
lies in shared memory:

    unit = ((x - shift) - delta) * factor    product^T += unit^T d_out

The operand of a step is made while the product of the step before runs. A warp of its own sums
d_out's rows; programs of the same rows and outputs take turns at that, so all are equally fast. A
stage is free again when both products and that sum are done with it.

Partial products and sums are stored, not added: bits repeat. Rows at or past the last offset lie
outside the jagged TMA views (`descriptors`), so they are zeros in both operands, and have a factor
of 0; what is in memory there is never read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jagbench.impl.kernels.hopper.backward_parts import barrier_ring, packed
from jagbench.impl.kernels.hopper.gluon import arrive_behind, at_row, tma_load

#: Rows a step, features of a program.
ROWS = gl.constexpr(64)
INPUTS = gl.constexpr(128)
#: Rows of d_out that the summing warp has in registers at a time: a period of the swizzle.
CHUNK = gl.constexpr(8)


@gluon.jit
def run_of(offsets, batch, total, splits, ACROSS: gl.constexpr, DOWN: gl.constexpr):
    """Rows in use, and a program's split, tile, first row and steps (at least one).

    Rows in use are dealt to the splits in equal runs of whole steps. A step behind them is one of
    zeros. Programs of one split follow each other, so that rows come from memory once.
    """
    count = total
    if offsets is not None:
        count = gl.load(offsets + batch).to(gl.int32)
    split = gl.program_id(0) // (ACROSS * DOWN)
    tile = gl.program_id(0) % (ACROSS * DOWN)
    whole = gl.cdiv(count, ROWS)
    each = gl.cdiv(whole, splits)
    steps = gl.maximum(gl.minimum(each, whole - split * each), 1)
    return count, split, tile, split * each * ROWS, steps


@gluon.jit
def producer(descs, memory, bars, inputs, sizes, FEATURES: gl.constexpr, WIDTH: gl.constexpr,
             LAYER: gl.constexpr, OUTPUTS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Every load of a program."""
    x_desc, d_desc = descs
    x_s, d_s, row_s = memory
    full, empty = bars
    _partial, _sums, statistics, offsets = inputs
    batch, total, splits = sizes
    ACROSS: gl.constexpr = FEATURES // INPUTS
    KINDS: gl.constexpr = 3 if LAYER else 1
    count, _split, tile, first, steps = run_of(
        offsets, batch, total, splits, ACROSS, WIDTH // OUTPUTS
    )
    feature = tile % ACROSS * INPUTS
    output = tile // ACROSS * OUTPUTS
    lanes = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    for step in range(0, steps):
        slot = step % STAGES
        row = first + step * ROWS
        ready = full.index(slot)
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(ready, 2 * ROWS * (INPUTS + OUTPUTS))
        tma_load(x_desc, at_row(count, count, row, feature), ready, x_s.index(slot))
        tma_load(d_desc, at_row(count, count, row, output), ready, d_s.index(slot))
        for kind in gl.static_range(KINDS):
            at = statistics + (kind * total.to(gl.int64) + row) + lanes
            # What is masked becomes 0.
            async_copy.async_copy_global_to_shared(
                row_s.index(slot * KINDS + kind), at, mask=row + lanes < count
            )
        async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def summer(descs, memory, bars, inputs, sizes, FEATURES: gl.constexpr, WIDTH: gl.constexpr,
           LAYER: gl.constexpr, OUTPUTS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Sums over d_out's rows, fp32, every ACROSS-th chunk; nothing moves between lanes."""
    _x_s, d_s, _row_s = memory
    full, empty = bars
    _partial, sums, _statistics, offsets = inputs
    batch, total, splits = sizes
    ACROSS: gl.constexpr = FEATURES // INPUTS
    EACH: gl.constexpr = OUTPUTS // 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([CHUNK, EACH], [1, 32], [1, 1], [1, 0])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    _count, split, tile, _first, steps = run_of(
        offsets, batch, total, splits, ACROSS, WIDTH // OUTPUTS
    )
    acc = gl.zeros([OUTPUTS], gl.float32, COLUMNS)
    for step in range(0, steps):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        d_tile = d_s.index(slot).reshape([ROWS, OUTPUTS])
        for chunk in gl.static_range(ROWS // CHUNK):
            if (step * (ROWS // CHUNK) + chunk) % ACROSS == tile % ACROSS:
                d = d_tile.slice(chunk * CHUNK, CHUNK, dim=0).load(LAYOUT)
                acc += gl.sum(d.to(gl.float32), axis=0)
        arrive_behind(empty.index(slot), acc)
    outputs = gl.arange(0, OUTPUTS, COLUMNS)
    to = sums + (split * ACROSS + tile % ACROSS) * WIDTH + tile // ACROSS * OUTPUTS
    gl.store(to + outputs, acc)


@gluon.jit
def unit_tile(W: gl.constexpr, x_s, row_s, slot, LAYER: gl.constexpr, LAYOUT: gl.constexpr):
    """A warpgroup's features of a step, normalised `[64 features, 64 rows]`, in 16 bits."""
    ALONG: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    KINDS: gl.constexpr = 3 if LAYER else 1
    half = x_s.index(slot).reshape([ROWS, INPUTS]).slice(W * (INPUTS // 2), INPUTS // 2, dim=1)
    x = half.permute((1, 0)).load(LAYOUT).to(gl.float32)
    if LAYER:
        x = x - row_s.index(slot * KINDS).load(ALONG)[None, :]
        x = x - row_s.index(slot * KINDS + 1).load(ALONG)[None, :]
    factor = row_s.index(slot * KINDS + KINDS - 1).load(ALONG)
    return packed(x * factor[None, :], x_s.dtype)


@gluon.jit
def consumer(W: gl.constexpr, descs, memory, bars, inputs, sizes, FEATURES: gl.constexpr,
             WIDTH: gl.constexpr, LAYER: gl.constexpr, OUTPUTS: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    """Warpgroup W: 64 of a program's features."""
    x_s, d_s, row_s = memory
    full, empty = bars
    partial, _sums, _statistics, offsets = inputs
    batch, total, splits = sizes
    ACROSS: gl.constexpr = FEATURES // INPUTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    _count, split, tile, _first, steps = run_of(
        offsets, batch, total, splits, ACROSS, WIDTH // OUTPUTS
    )
    acc = gl.zeros([INPUTS // 2, OUTPUTS], gl.float32, LAYOUT)
    mbarrier.wait(full.index(0), 0)
    unit = unit_tile(W, x_s, row_s, 0, LAYER, LEFT)
    for step in range(1, steps):
        slot = step % STAGES
        before = (step - 1) % STAGES
        d_tile = d_s.index(before).reshape([ROWS, OUTPUTS])
        flying = warpgroup_mma(unit, d_tile, acc, is_async=True)
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        following = unit_tile(W, x_s, row_s, slot, LAYER, LEFT)
        acc, unit = warpgroup_mma_wait(0, deps=(flying, unit))
        mbarrier.arrive(empty.index(before), count=1)
        unit = following
    d_tile = d_s.index((steps - 1) % STAGES).reshape([ROWS, OUTPUTS])
    flying = warpgroup_mma(unit, d_tile, acc, is_async=True)
    acc, unit = warpgroup_mma_wait(0, deps=(flying, unit))
    features = gl.arange(0, INPUTS // 2, gl.SliceLayout(1, LAYOUT))
    outputs = gl.arange(0, OUTPUTS, gl.SliceLayout(0, LAYOUT))
    to = partial + (split * WIDTH + tile // ACROSS * OUTPUTS).to(gl.int64) * FEATURES
    to += tile % ACROSS * INPUTS + W * (INPUTS // 2)
    gl.store((to + features)[:, None] + (outputs * FEATURES)[None, :], acc)


@gluon.jit(do_not_specialize=["batch", "total", "splits"])
def norm_gradient_kernel(
    x_desc, d_desc, partial, sums, statistics, offsets, batch, total, splits,
    FEATURES: gl.constexpr, WIDTH: gl.constexpr, LAYER: gl.constexpr, OUTPUTS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Program (split, tile of outputs, tile of features), the last of them fastest.

    x_desc, d_desc: jagged views of x `[total, 1, FEATURES]` and d_out `[total, 1, WIDTH]`, in boxes
    of 64 rows and 128 features, OUTPUTS outputs. partial `[splits, WIDTH, FEATURES]` and sums
    `[splits, FEATURES / 128, WIDTH]`, fp32, contiguous. statistics: fp32 `[3, total]` with LAYER,
    else `[1, total]`. offsets: None if all rows are in use.
    """
    DTYPE: gl.constexpr = x_desc.dtype
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    KINDS: gl.constexpr = 3 if LAYER else 1
    x_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, ROWS, INPUTS], x_desc.layout)
    d_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, ROWS, OUTPUTS], d_desc.layout)
    row_s = gl.allocate_shared_memory(gl.float32, [STAGES * KINDS, ROWS], FLAT)
    # The producer's lanes copy the statistics, and each says so. Three read a stage.
    full = barrier_ring(STAGES, 33)
    empty = barrier_ring(STAGES, 3)
    fence_async_shared()
    descs = (x_desc, d_desc)
    memory = (x_s, d_s, row_s)
    bars = (full, empty)
    inputs = (partial, sums, statistics, offsets)
    sizes = (batch, total, splits)
    # Launched with maxnreg 168: 3 x 128 threads share 64512 registers. The two lone warps are of
    # one warpgroup, and the default one keeps what the others leave.
    gl.warp_specialize(
        [
            (consumer, (
                0, descs, memory, bars, inputs, sizes, FEATURES, WIDTH, LAYER, OUTPUTS, STAGES,
            )),
            (consumer, (
                1, descs, memory, bars, inputs, sizes, FEATURES, WIDTH, LAYER, OUTPUTS, STAGES,
            )),
            (summer, (
                descs, memory, bars, inputs, sizes, FEATURES, WIDTH, LAYER, OUTPUTS, STAGES,
            )),
            (producer, (
                descs, memory, bars, inputs, sizes, FEATURES, WIDTH, LAYER, OUTPUTS, STAGES,
            )),
        ],
        [4, 1, 1],
        [224, 56, 56],
    )  # fmt: skip
