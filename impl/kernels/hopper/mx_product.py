"""MX matrix product on Hopper: FP8 tensor cores, scales of 32 codes applied to their partial sums.

One wgmma of E4M3 codes contracts 32 of them, which is one MX block: its result, formed without the
accumulator, is the block's partial product P, and C += 2^(sa - 127) 2^(sb - 127) P is a float32 FMA
an element. Hopper has no scale operand; DeepSeek-V3 (arXiv 2412.19437, section 3.5.2) does the same
every 128 codes, this kernel every 32.

A program walks tiles of C. A producer warpgroup brings codes by TMA and turns the scale bytes of a
stage into float32 in shared memory, once for all who read them; GROUPS consumer warpgroups own 64
rows each. While one adds up its partial product, the tensor cores form those of the others.

Where B has squares of 32 x 32, a factor holds for a row and 32 columns: 8 are formed for the 64
elements a thread has of 64 x 128, and an element takes one FMA. Where B has a scale per column, it
takes a multiplication more. docs/kernels/mx_hopper.md counts what that costs.
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
from jagbench.impl.kernels.hopper.gluon import tma_load, tma_store

#: Rows of a consumer, columns of a product, codes of a block and of a stage, blocks of a stage.
ROWS = gl.constexpr(64)
COLUMNS = gl.constexpr(128)
BLOCK = gl.constexpr(32)
DEPTH = gl.constexpr(128)
BLOCKS = gl.constexpr(4)
#: Row tiles that are walked together before the next columns: their codes stay in the L2.
BAND = gl.constexpr(8)
#: Columns that are stored at once.
STORED = gl.constexpr(64)


@gluon.jit
def place_of(tile, row_tiles, column_tiles):
    """Row tile and column tile of a program's tile: bands of row tiles, column by column."""
    band = BAND * column_tiles
    first = tile // band * BAND
    height = gl.minimum(row_tiles - first, BAND)
    within = tile % band
    return first + within % height, within // height


@gluon.jit
def scale_words(scales, line, inside, block, blocks, row_blocks, WORDS: gl.constexpr):
    """Four scale bytes of each line in a word, from block `block` on. line: int32, its number.

    blocks: a line has; bytes past them are 0 and so is what is not inside. WORDS: a line is a whole
    number of aligned words.
    """
    own = line.to(gl.int64) * row_blocks + block
    if WORDS:
        word = gl.load((scales.to(gl.pointer_type(gl.int32))) + own // 4, mask=inside & (block < blocks), other=0)
    else:
        word = line * 0
        for i in gl.static_range(BLOCKS):
            seen = inside & (block + i < blocks)
            byte = gl.load(scales + own + i, mask=seen, other=0).to(gl.int32)
            word |= byte << (8 * i)
    return word


@gluon.jit
def powers(word, I: gl.constexpr):
    """2^(byte - 127) of byte I of words, fp32: 255 is NaN, 0 the subnormal 2^-127."""
    byte = (word >> (8 * I)) & 255
    bits = gl.where(byte == 0, 0x00400000, byte << 23)
    return gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def corner_of(tile, row_tiles, column_tiles, GROUPS: gl.constexpr, HALVES: gl.constexpr):
    """First row and column of a program's tile."""
    row_tile, column_tile = place_of(tile, row_tiles, column_tiles)
    return row_tile * (GROUPS * ROWS), column_tile * (HALVES * COLUMNS)


@gluon.jit
def row_words(scales, row, rows, first, blocks, LINES: gl.constexpr, SQUARE: gl.constexpr,
              WORDS: gl.constexpr):  # fmt: skip
    """Scales of LINES rows of A from `row` on, blocks `first` and the three behind it."""
    line = row + gl.arange(0, LINES, gl.BlockedLayout([1], [32], [4], [0]))
    inside = line < rows
    if SQUARE:
        line = line // BLOCK
    return scale_words(scales, line, inside, first, blocks, blocks, WORDS)


@gluon.jit
def column_words(scales, column, columns, first, blocks, LINES: gl.constexpr,
                 SQUARE: gl.constexpr, WORDS: gl.constexpr):  # fmt: skip
    """Scales of columns of C from `column` on, LINES of them or of their squares."""
    line = gl.arange(0, LINES, gl.BlockedLayout([1], [32], [4], [0]))
    if SQUARE:
        line += column // BLOCK
        inside = line * BLOCK < columns
    else:
        line += column
        inside = line < columns
    return scale_words(scales, line, inside, first, blocks, blocks, WORDS)


@gluon.jit
def producer(descs, memory, bars, scales, sizes, GROUPS: gl.constexpr, HALVES: gl.constexpr,
             A_SQUARE: gl.constexpr, B_SQUARE: gl.constexpr, WORDS: gl.constexpr):  # fmt: skip
    """Codes and scales of every stage of every tile, in order; four warps."""
    a_desc, b_desc, _out_desc = descs
    a_s, b_s, rows_s, columns_s, _out_s = memory
    full, empty = bars
    a_scales, b_scales = scales
    rows, columns, depth, row_tiles, column_tiles = sizes
    STAGES: gl.constexpr = full.shape[0]
    A_LINES: gl.constexpr = rows_s.shape[1]
    B_LINES: gl.constexpr = columns_s.shape[1]
    blocks = gl.cdiv(depth, BLOCK)
    steps = gl.cdiv(depth, DEPTH)
    slot = 0
    phase = 1
    row, column = corner_of(gl.program_id(0), row_tiles, column_tiles, GROUPS, HALVES)
    a_next = row_words(a_scales, row, rows, 0, blocks, A_LINES, A_SQUARE, WORDS)
    b_next = column_words(b_scales, column, columns, 0, blocks, B_LINES, B_SQUARE, WORDS)
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        # Of the tile behind this one; past the last it is outside, and nothing is read.
        behind = tile + gl.num_programs(0)
        next_row, next_column = corner_of(behind, row_tiles, column_tiles, GROUPS, HALVES)
        for step in range(0, steps):
            a_word = a_next
            b_word = b_next
            # The next stage's scales are under way while this one waits for room: a load that is
            # used at once keeps the consumers waiting for as long as it takes.
            last = (step + 1 == steps).to(gl.int32)
            a_row = row + last * (next_row - row)
            b_row = column + last * (next_column - column)
            first = (step + 1) * (1 - last) * BLOCKS
            a_next = row_words(a_scales, a_row, rows, first, blocks, A_LINES, A_SQUARE, WORDS)
            b_next = column_words(
                b_scales, b_row, columns, first, blocks, B_LINES, B_SQUARE, WORDS
            )
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(ready, DEPTH * (GROUPS * ROWS + HALVES * COLUMNS))
            for w in gl.static_range(GROUPS):
                place = a_s.index(slot * GROUPS + w)
                tma_load(a_desc, [row + w * ROWS, step * DEPTH], ready, place)
            for h in gl.static_range(HALVES):
                place = b_s.index(slot * HALVES + h)
                tma_load(b_desc, [column + h * COLUMNS, step * DEPTH], ready, place)
            for i in gl.static_range(BLOCKS):
                rows_s.index(slot * BLOCKS + i).store(powers(a_word, i))
                columns_s.index(slot * BLOCKS + i).store(powers(b_word, i))
            mbarrier.arrive(ready, count=1)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        row = next_row
        column = next_column


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
def factors_of(rows_s, columns_s, W: gl.constexpr, H: gl.constexpr, B_SQUARE: gl.constexpr):
    """Factors of a partial product, from a block's scales: the rows' and the columns', or both at
    once `[64, 4]` where B has squares, and zeros beside them.
    """
    SUMS: gl.constexpr = _sums_layout()
    rows = rows_s.slice(W * ROWS, ROWS)
    if B_SQUARE:
        whole = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS)
        SPLIT: gl.constexpr = whole.reshape([ROWS, COLUMNS // BLOCK, BLOCK]).type.layout
        PAIR: gl.constexpr = gl.SliceLayout(2, SPLIT)
        row = rows.load(gl.SliceLayout(1, PAIR))
        column = columns_s.slice(H * (COLUMNS // BLOCK), COLUMNS // BLOCK)
        column = column.load(gl.SliceLayout(0, PAIR))
        left = row[:, None] * column[None, :]
        right = left
    else:
        left = rows.load(gl.SliceLayout(1, SUMS))
        right = columns_s.slice(H * COLUMNS, COLUMNS).load(gl.SliceLayout(0, SUMS))
    return left, right


@gluon.jit
def add_scaled(acc, part, left, right, PENDING: gl.constexpr, B_SQUARE: gl.constexpr):
    """acc + the factors times a partial product, once no more than PENDING are under way."""
    # The factors too: they are formed, and so loaded, before the wait and any arrival behind it.
    part, left, right = warpgroup_mma_wait(PENDING, deps=(part, left, right))
    if B_SQUARE:
        whole, _part = gl.broadcast(
            gl.expand_dims(left, 2), part.reshape([ROWS, COLUMNS // BLOCK, BLOCK])
        )
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
def put_both(desc, room, tile, row, column):
    """Store 128 columns, one half after the other."""
    low, high = gl.split(tile.reshape([ROWS, 2, STORED]).permute((0, 2, 1)))
    put(desc, room, low, row, column)
    put(desc, room, high, row, column + STORED)


@gluon.jit
def consumer(W: gl.constexpr, descs, memory, bars, sizes, GROUPS: gl.constexpr,
             HALVES: gl.constexpr, B_SQUARE: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Warpgroup W of GROUPS: its 64 rows of every tile."""
    _a_desc, _b_desc, out_desc = descs
    a_s, b_s, rows_s, columns_s, out_s = memory
    full, empty = bars
    _rows, _columns, depth, row_tiles, column_tiles = sizes
    STAGES: gl.constexpr = full.shape[0]
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, _sums_layout())
        other = acc
        for _step in range(0, gl.cdiv(depth, DEPTH)):
            mbarrier.wait(full.index(slot), phase)
            a = a_s.index(slot * GROUPS + W)
            b = b_s.index(slot * HALVES)
            if OVERLAP:
                part = issue(a, b, 0)
            for i in gl.static_range(BLOCKS):
                row = rows_s.index(slot * BLOCKS + i)
                column = columns_s.index(slot * BLOCKS + i)
                if OVERLAP:
                    left, right = factors_of(row, column, W, 0, B_SQUARE)
                    if i + 1 < BLOCKS:
                        following = issue(a, b, i + 1)
                        acc = add_scaled(acc, part, left, right, 1, B_SQUARE)
                        part = following
                    else:
                        acc = add_scaled(acc, part, left, right, 0, B_SQUARE)
                else:
                    part = issue(a, b, i)
                    left, right = factors_of(row, column, W, 0, B_SQUARE)
                    acc = add_scaled(acc, part, left, right, 0, B_SQUARE)
                    if HALVES == 2:
                        part = issue(a, b_s.index(slot * HALVES + 1), i)
                        left, right = factors_of(row, column, W, 1, B_SQUARE)
                        other = add_scaled(other, part, left, right, 0, B_SQUARE)
            mbarrier.arrive(empty.index(slot), count=1)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        row_tile, column_tile = place_of(tile, row_tiles, column_tiles)
        first = (row_tile * GROUPS + W) * ROWS
        column_first = column_tile * (HALVES * COLUMNS)
        put_both(out_desc, out_s.index(W), acc, first, column_first)
        if HALVES == 2:
            put_both(out_desc, out_s.index(W), other, first, column_first + COLUMNS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "columns", "depth", "row_tiles", "column_tiles"])
def mx_product_kernel(
    a_desc, b_desc, out_desc, a_scales, b_scales, rows, columns, depth, row_tiles, column_tiles,
    GROUPS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    A_SQUARE: gl.constexpr, B_SQUARE: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """C `[rows, columns]` = A B^T, codes `[rows, depth]` and `[columns, depth]` in E4M3.

    descs: A in boxes of 64 x 128, B of 128 x 128, C of 64 x 64. Scales: uint8, contiguous,
    `[rows, ceil(depth / 32)]` and `[columns, ceil(depth / 32)]`, of squares a row for 32 of those.
    row_tiles, column_tiles: of 64 GROUPS x 128 HALVES. GROUPS: consumers, 2 or 3. HALVES: 1 or 2
    (with 2 GROUPS). OVERLAP: a consumer has two partial products in turns (with one half and 2
    GROUPS). WORDS: whether depth is a multiple of 128 and the scales begin at a multiple of 4.
    """
    A_LINES: gl.constexpr = 128 if GROUPS == 2 else 256
    B_LINES: gl.constexpr = HALVES * COLUMNS // BLOCK if B_SQUARE else HALVES * COLUMNS
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_s = gl.allocate_shared_memory(a_desc.dtype, [GROUPS * STAGES, ROWS, DEPTH], a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [HALVES * STAGES, COLUMNS, DEPTH], b_desc.layout)
    rows_s = gl.allocate_shared_memory(gl.float32, [BLOCKS * STAGES, A_LINES], PLAIN)
    columns_s = gl.allocate_shared_memory(gl.float32, [BLOCKS * STAGES, B_LINES], PLAIN)
    out_s = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, ROWS, STORED], out_desc.layout)
    # The bytes of the codes, and the warps that write the scales.
    full = barrier_ring(STAGES, 2)
    empty = barrier_ring(STAGES, GROUPS)
    fence_async_shared()
    descs = (a_desc, b_desc, out_desc)
    memory = (a_s, b_s, rows_s, columns_s, out_s)
    bars = (full, empty)
    sizes = (rows, columns, depth, row_tiles, column_tiles)
    scales = (a_scales, b_scales)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (0, descs, memory, bars, sizes, GROUPS, HALVES, B_SQUARE, OVERLAP)),
                (consumer, (1, descs, memory, bars, sizes, GROUPS, HALVES, B_SQUARE, OVERLAP)),
                (
                    producer,
                    (descs, memory, bars, scales, sizes, GROUPS, HALVES, A_SQUARE, B_SQUARE, WORDS),
                ),
            ],
            [4, 4],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (0, descs, memory, bars, sizes, GROUPS, HALVES, B_SQUARE, OVERLAP)),
                (consumer, (1, descs, memory, bars, sizes, GROUPS, HALVES, B_SQUARE, OVERLAP)),
                (consumer, (2, descs, memory, bars, sizes, GROUPS, HALVES, B_SQUARE, OVERLAP)),
                (
                    producer,
                    (descs, memory, bars, scales, sizes, GROUPS, HALVES, A_SQUARE, B_SQUARE, WORDS),
                ),
            ],
            [4, 4, 4],
            [160, 160, 32],
        )
