"""MX matrix product on Hopper: FP8 tensor cores, scales of 32 codes applied to their partial sums.

One wgmma of E4M3 codes contracts 32 of them, which is one MX block: its result, formed without the
accumulator, is the block's partial product P, and C += 2^(sa - 127) 2^(sb - 127) P is a float32 FMA
an element. Hopper has no scale operand; DeepSeek-V3 (arXiv 2412.19437, section 3.5.2) does the same
every 128 codes, this kernel every 32.

A program walks tiles of C. One warpgroup brings codes by TMA and scales, widened to float32
beforehand (`widen_kernel`) in the order that stages want them, by cp.async; two consumer
warpgroups own 64 rows each. While one adds a partial product up, the tensor cores form the other's.

Where B has squares of 32 x 32, a factor holds for a row and 32 columns: 8 are formed for the 64
elements a thread has of 64 x 128, and an element takes one FMA. Where B has a scale per column, it
takes a multiplication more. docs/kernels/mx_hopper.md counts what that costs.
"""

import triton
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jagbench.impl.kernels.hopper.backward_parts import barrier_ring, packed
from jagbench.impl.kernels.hopper.gluon import tma_load, tma_store

#: Consumers, rows of one, columns of a tile, codes of a block and of a stage, blocks of a stage.
GROUPS = gl.constexpr(2)
ROWS = gl.constexpr(64)
COLUMNS = gl.constexpr(128)
BLOCK = gl.constexpr(32)
DEPTH = gl.constexpr(128)
BLOCKS = gl.constexpr(4)
#: Row tiles that are walked together before the next columns: their codes stay in the L2.
BAND = gl.constexpr(8)
#: Columns that are stored at once.
STORED = gl.constexpr(64)
#: Threads of the producer, each of which tells of its copies.
THREADS = gl.constexpr(128)


@triton.jit(do_not_specialize=["lines", "blocks", "steps"])
def widen_kernel(scales, wide, lines, blocks, steps, TILE: tl.constexpr, SHARED_BY: tl.constexpr):
    """Scale bytes `[ceil(lines / SHARED_BY), blocks]` to 2^(byte - 127), a stage's side by side.

    wide: float32 `[ceil(lines / TILE), steps, 4, TILE]`, of TILE lines and four blocks each; 0
    where there is no line or block. 255 is NaN, 0 the subnormal 2^-127.
    """
    tile = tl.program_id(0)
    step = tl.program_id(1)
    at = tl.arange(0, 4 * TILE)
    line = tile * TILE + at % TILE
    block = step * 4 + at // TILE
    inside = (line < lines) & (block < blocks)
    own = (line // SHARED_BY).to(tl.int64) * blocks + block
    byte = tl.load(scales + own, mask=inside, other=0).to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    bits = tl.where(byte == 255, 0x7FC00000, bits)
    bits = tl.where(inside, bits, 0)
    place = (tile.to(tl.int64) * steps + step) * (4 * TILE) + at
    tl.store(wide + place, bits.to(tl.float32, bitcast=True))


@gluon.jit
def place_of(tile, row_tiles, column_tiles):
    """Row tile and column tile of a program's tile: bands of row tiles, column by column."""
    band = BAND * column_tiles
    first = tile // band * BAND
    height = gl.minimum(row_tiles - first, BAND)
    within = tile % band
    return first + within % height, within // height


@gluon.jit
def copy_scales(place, scales, SIZE: gl.constexpr):
    """Start copying SIZE floats from a pointer to shared memory, 16 bytes a thread where it can."""
    WIDTH: gl.constexpr = 4 if SIZE >= 512 else 1
    LAYOUT: gl.constexpr = gl.BlockedLayout([WIDTH], [32], [4], [0])
    at = gl.arange(0, SIZE, LAYOUT)
    async_copy.async_copy_global_to_shared(place, scales + at)


@gluon.jit
def producer(descs, memory, bars, scales, sizes):
    """Codes and scales of every stage of every tile, in order; four warps."""
    a_desc, b_desc, _out_desc = descs
    a_s, b_s, rows_s, columns_s, _out_s = memory
    full, empty = bars
    a_scales, b_scales = scales
    steps, row_tiles, column_tiles = sizes
    STAGES: gl.constexpr = full.shape[0]
    A_SIZE: gl.constexpr = rows_s.shape[1]
    B_SIZE: gl.constexpr = columns_s.shape[1]
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of(tile, row_tiles, column_tiles)
        row = row_tile * (GROUPS * ROWS)
        column = column_tile * COLUMNS
        a_from = a_scales + row_tile.to(gl.int64) * steps * A_SIZE
        b_from = b_scales + column_tile.to(gl.int64) * steps * B_SIZE
        for step in range(0, steps):
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(ready, DEPTH * (GROUPS * ROWS + COLUMNS))
            for w in gl.static_range(GROUPS):
                place = a_s.index(slot * GROUPS + w)
                tma_load(a_desc, [row + w * ROWS, step * DEPTH], ready, place)
            tma_load(b_desc, [column, step * DEPTH], ready, b_s.index(slot))
            copy_scales(rows_s.index(slot), a_from + step * A_SIZE, A_SIZE)
            copy_scales(columns_s.index(slot), b_from + step * B_SIZE, B_SIZE)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.constexpr_function
def _sums_layout():
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])


@gluon.jit
def issue(a, b, I: gl.constexpr):
    """Start the partial product `[64, 128]` of block I of a stage."""
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, _sums_layout())
    left = a.slice(I * BLOCK, BLOCK, dim=1)
    right = b.slice(I * BLOCK, BLOCK, dim=1).permute((1, 0))
    return warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)


@gluon.jit
def factors_of(rows_s, columns_s, W: gl.constexpr, I: gl.constexpr, B_SQUARE: gl.constexpr):
    """Factors of block I's partial product, from a stage's scales: the rows' and the columns', or
    both at once `[64, 4]` where B has squares, and the same beside them.
    """
    SUMS: gl.constexpr = _sums_layout()
    LINES: gl.constexpr = columns_s.shape[0] // BLOCKS
    rows = rows_s.slice((I * GROUPS + W) * ROWS, ROWS)
    columns = columns_s.slice(I * LINES, LINES)
    if B_SQUARE:
        whole = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS)
        SPLIT: gl.constexpr = whole.reshape([ROWS, LINES, BLOCK]).type.layout
        PAIR: gl.constexpr = gl.SliceLayout(2, SPLIT)
        row = rows.load(gl.SliceLayout(1, PAIR))
        left = row[:, None] * columns.load(gl.SliceLayout(0, PAIR))[None, :]
        right = left
    else:
        left = rows.load(gl.SliceLayout(1, SUMS))
        right = columns.load(gl.SliceLayout(0, SUMS))
    return left, right


@gluon.jit
def add_scaled(acc, part, left, right, B_SQUARE: gl.constexpr):
    """acc + the factors times a partial product, once that is there."""
    # The factors too: they are formed, and so loaded, before the wait and any arrival behind it.
    part, left, right = warpgroup_mma_wait(0, deps=(part, left, right))
    if B_SQUARE:
        split = part.reshape([ROWS, COLUMNS // BLOCK, BLOCK])
        whole, _part = gl.broadcast(gl.expand_dims(left, 2), split)
        factor = gl.convert_layout(
            whole.reshape([ROWS, COLUMNS]), acc.type.layout, assert_trivial=True
        )
        acc = gl.fma(part, factor, acc)
    else:
        rows, _part = gl.broadcast(left[:, None], part)
        acc = gl.fma(part * right[None, :], rows, acc)
    return acc


@gluon.jit
def put(desc, room, tile, row, column):
    """Store 64 columns of a consumer's rows through its buffer."""
    tma.store_wait(0)
    if desc.dtype == gl.float32:
        room.store(tile)
    else:
        room.store(packed(tile, desc.dtype))
    fence_async_shared()
    tma_store(desc, [row, column], room)


@gluon.jit
def consumer(W: gl.constexpr, descs, memory, bars, sizes, B_SQUARE: gl.constexpr):
    """Warpgroup W: its 64 rows of every tile."""
    _a_desc, _b_desc, out_desc = descs
    a_s, b_s, rows_s, columns_s, out_s = memory
    full, empty = bars
    steps, row_tiles, column_tiles = sizes
    STAGES: gl.constexpr = full.shape[0]
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, _sums_layout())
        for _step in range(0, steps):
            mbarrier.wait(full.index(slot), phase)
            a = a_s.index(slot * GROUPS + W)
            b = b_s.index(slot)
            for i in gl.static_range(BLOCKS):
                part = issue(a, b, i)
                left, right = factors_of(rows_s.index(slot), columns_s.index(slot), W, i, B_SQUARE)
                acc = add_scaled(acc, part, left, right, B_SQUARE)
            mbarrier.arrive(empty.index(slot), count=1)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        row_tile, column_tile = place_of(tile, row_tiles, column_tiles)
        row = (row_tile * GROUPS + W) * ROWS
        column = column_tile * COLUMNS
        low, high = gl.split(acc.reshape([ROWS, 2, STORED]).permute((0, 2, 1)))
        put(out_desc, out_s.index(W), low, row, column)
        put(out_desc, out_s.index(W), high, row, column + STORED)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["steps", "row_tiles", "column_tiles"])
def mx_product_kernel(
    a_desc, b_desc, out_desc, a_scales, b_scales, steps, row_tiles, column_tiles,
    STAGES: gl.constexpr, B_SQUARE: gl.constexpr,
):  # fmt: skip
    """C `[rows, columns]` = A B^T, codes `[rows, depth]` and `[columns, depth]` in E4M3.

    descs: A in boxes of 64 x 128, B of 128 x 128, C of 64 x 64. Scales: float32, as `widen_kernel`
    writes them, of tiles of 128 rows of A, and of 128 columns of C or 4 squares of theirs.
    steps: stages of 128 codes. row_tiles, column_tiles: of 128 x 128.
    """
    B_LINES: gl.constexpr = COLUMNS // BLOCK if B_SQUARE else COLUMNS
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_s = gl.allocate_shared_memory(a_desc.dtype, [GROUPS * STAGES, ROWS, DEPTH], a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [STAGES, COLUMNS, DEPTH], b_desc.layout)
    rows_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCKS * GROUPS * ROWS], PLAIN)
    columns_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCKS * B_LINES], PLAIN)
    out_s = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, ROWS, STORED], out_desc.layout)
    # The bytes of the codes, and every thread that copies scales.
    full = barrier_ring(STAGES, 1 + THREADS)
    empty = barrier_ring(STAGES, GROUPS)
    fence_async_shared()
    descs = (a_desc, b_desc, out_desc)
    memory = (a_s, b_s, rows_s, columns_s, out_s)
    bars = (full, empty)
    sizes = (steps, row_tiles, column_tiles)
    scales = (a_scales, b_scales)
    gl.warp_specialize(
        [
            (consumer, (0, descs, memory, bars, sizes, B_SQUARE)),
            (consumer, (1, descs, memory, bars, sizes, B_SQUARE)),
            (producer, (descs, memory, bars, scales, sizes)),
        ],
        [4, 4],
        [240, 24],
    )
