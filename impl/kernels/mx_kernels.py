"""Device code of MX quantisation: scales and codes of blocks of 32, and values of codes.

Everything is decided by integer operations on the bits of float32, which holds every float32,
float16 and bfloat16 exactly; the one product of an element is by a power of two. No cast to an
8-bit type, no logarithm, no exp2. Sources: OCP Microscaling Formats Specification, version 1.0;
arXiv 2506.08027, algorithm 1 (RCEIL); PTX ISA, cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32; Philox-4x32-10
as in Salmon et al., SC 2011; the fast Walsh-Hadamard transform.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagbench.impl.kernels.interpreter import round_to, to_float

_ABSOLUTE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
#: Arguments that change from call to call; no kernel is compiled anew for a value of theirs.
DEQUANTISE_COUNTS = ["rows", "batch", "row_tiles", "column_tiles"]
QUANTISE_COUNTS = [
    *(*DEQUANTISE_COUNTS, "end", "scale_rows", "scales_matrix", "draw_matrix", "draw_row"),
    *("seed_low", "seed_high", "turn_low", "turn_high"),
]


# -- where -----------------------------------------------------------------------------------------


@triton.jit
def _place(row_tiles, column_tiles, COLUMNS: tl.constexpr):
    """Tile of rows, matrix (int64) and first column of a program; column tiles are neighbours."""
    program = tl.program_id(0)
    tile = program // column_tiles
    column = (program - tile * column_tiles) * COLUMNS
    matrix = tile // row_tiles
    return tile - matrix * row_tiles, matrix.to(tl.int64), column


@triton.jit
def _rows_of_block(offsets, block, batch, rows, end):
    """First row of a block of 32 rows, where its rows of data stop, and where all its rows do.

    Block b of sequence i is number offsets[i] // 32 + i + b, which grows with i: the sequence is
    found by bisection. Sequence number `batch` is the padding up to `end`, without data. Blocks
    that no sequence has come out behind their sequence's end, with no rows.
    """
    low = tl.zeros([], dtype=tl.int32)
    high = low + batch
    while low < high:
        middle = (low + high + 1) // 2
        before = tl.load(offsets + middle).to(tl.int64) // 32 + middle
        low = tl.where(before <= block, middle, low)
        high = tl.where(before <= block, high, middle - 1)
    start = tl.load(offsets + low).to(tl.int64)
    inside = low < batch
    stop = tl.load(offsets + low + 1, mask=inside, other=0).to(tl.int64)
    first = start + 32 * (block - start // 32 - low)
    return first, tl.where(inside, stop, 0), tl.where(inside, stop, end)


@triton.jit
def _rows_of_tile(
    offsets, tile, batch, rows, end, TALL: tl.constexpr, JAGGED: tl.constexpr, ROWS: tl.constexpr
):
    """First row of a tile; data are in rows before the second result, codes before the third.

    TALL: blocks have 32 rows; a jagged tile is then one block. `end` is `rows` or, where scales
    are padded, what it is padded to.
    """
    if TALL and JAGGED:
        first, used, stop = _rows_of_block(offsets, tile, batch, rows, end)
    else:
        first = tile.to(tl.int64) * ROWS
        stop = tl.zeros([], dtype=tl.int64) + end
        used = tl.zeros([], dtype=tl.int64) + rows
        if JAGGED:
            used = tl.load(offsets + batch).to(tl.int64)
    return first, used, stop


# -- random bits -----------------------------------------------------------------------------------


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Four words of Philox-4x32-10; uint32 blocks of one shape, k0 and k1 the key."""
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
        high1 = tl.umulhi(c2, tl.full(c2.shape, 0xCD9E8D57, tl.uint32))
        low0 = c0 * tl.full(c0.shape, 0xD2511F53, tl.uint32)
        low1 = c2 * tl.full(c2.shape, 0xCD9E8D57, tl.uint32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + tl.full([], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _word(value):
    """An int32 argument as the word it stands for."""
    return value.to(tl.int32).to(tl.uint32, bitcast=True)


@triton.jit
def _draws(row, first_column, low, high, STREAM: tl.constexpr, COLUMNS: tl.constexpr):
    """32 random bits for each of COLUMNS columns of rows (int64 `[ROWS]`), uint32.

    Column c of row r is word c % 4 of counter (c // 4, r mod 2^32, r // 2^32, stream).
    """
    ROWS: tl.constexpr = row.shape[0]
    quads = (first_column // 4 + tl.arange(0, COLUMNS // 4)).to(tl.uint32)
    zero = tl.zeros([ROWS, COLUMNS // 4], dtype=tl.uint32)
    row_low = (row & 0xFFFFFFFF).to(tl.uint32)[:, None] + zero
    row_high = (row >> 32).to(tl.uint32)[:, None] + zero
    w0, w1, w2, w3 = _philox(
        quads[None, :] + zero, row_low, row_high, zero + STREAM, _word(low), _word(high)
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(words, [ROWS, COLUMNS])


# -- Hadamard --------------------------------------------------------------------------------------


@triton.jit
def _signs(low, high, STREAM: tl.constexpr, SIZE: tl.constexpr):
    """Sign bit of every position of a group, uint32 `[SIZE]`: row 0 of a stream of the seed."""
    bits = _draws(tl.zeros([1], dtype=tl.int64), 0, low, high, STREAM, SIZE)
    return tl.reshape(bits, [SIZE]) & 0x80000000


@triton.jit
def _butterflies(x, NEAR: tl.constexpr):
    """Sums and differences of elements NEAR apart, in the places of the first and the second."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    pairs = tl.reshape(x, [ROWS, COLUMNS // (2 * NEAR), 2, NEAR])
    a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), [ROWS, COLUMNS])


@triton.jit
def _turn(x, low, high, STREAM: tl.constexpr, SIZE: tl.constexpr, ROOT: tl.constexpr):
    """Groups of SIZE along the last dim of an fp32 tile, signed, transformed, times ROOT.

    Butterflies from distance 1 up, each a float32 sum and difference: one order of sums on every
    machine. ROOT is 1 / sqrt(SIZE) in float32.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    bits = x.to(tl.uint32, bitcast=True)
    bits = tl.reshape(bits, [ROWS, COLUMNS // SIZE, SIZE])
    bits = bits ^ _signs(low, high, STREAM, SIZE)[None, None, :]
    x = tl.reshape(bits, [ROWS, COLUMNS]).to(tl.float32, bitcast=True)
    for step in tl.static_range(6):
        if (1 << step) < SIZE:
            x = _butterflies(x, 1 << step)
    return x * ROOT


# -- codes -----------------------------------------------------------------------------------------


@triton.jit
def _scale_codes(largest, CARRY: tl.constexpr, TOP: tl.constexpr):
    """E8M0 code of the bits of a largest magnitude, int32.

    CARRY: 2^23 - 1 less the largest fraction at which the mode keeps the exponent; TOP: exponent
    of the element type's largest number. Codes above 253 are not reached by finite float32.
    """
    code = tl.maximum(((largest + CARRY) >> 23) - TOP, 0)
    return tl.where(largest >= _INFINITY, 255, code)


@triton.jit
def _inverse(scale):
    """2^(127 - code), as fp32; NaN for code 255."""
    bits = tl.where(scale == 255, 0x7FC00000, (254 - scale) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _spread(scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One value a block `[row blocks, column blocks]` as one an element `[ROWS, COLUMNS]`."""
    BR: tl.constexpr = scale.shape[0]
    BC: tl.constexpr = scale.shape[1]
    if BR == ROWS:
        whole = tl.broadcast_to(scale[:, :, None], [ROWS, BC, COLUMNS // BC])
    elif BC == COLUMNS:
        whole = tl.broadcast_to(scale[:, None, :], [BR, ROWS // BR, COLUMNS])
    else:
        whole = tl.broadcast_to(scale[:, None, :, None], [BR, ROWS // BR, BC, COLUMNS // BC])
    return tl.reshape(whole, [ROWS, COLUMNS])


@triton.jit
def _block_maxima(bits, BR: tl.constexpr, BC: tl.constexpr):
    """Largest of every block of BR x BC of bits of magnitudes (int32), which order as they do."""
    ROWS: tl.constexpr = bits.shape[0]
    COLUMNS: tl.constexpr = bits.shape[1]
    if BC > 1:
        bits = tl.max(tl.reshape(bits, [ROWS, COLUMNS // BC, BC]), 2)
    if BR > 1:
        bits = tl.max(tl.reshape(bits, [ROWS // BR, BR, COLUMNS // BC]), 1)
    return bits


@triton.jit
def _nearest(scaled, sign, limit, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Codes (int32) of fp32 elements, to nearest even, at most `limit`.

    MANTISSA: its bits; BIAS: of the exponent. sign: 0 or the code's sign bit.
    """
    # Unsigned: a NaN with all bits set must not wrap into the sign.
    bits = scaled.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    CUT: tl.constexpr = 23 - MANTISSA
    normal = (bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) >> CUT
    normal -= (127 - BIAS) << MANTISSA
    # Beside this number the last place of a float32 is that of a subnormal: the sum rounds.
    MAGIC: tl.constexpr = (127 + 1 - BIAS + CUT) << 23
    magic = tl.full([], MAGIC, tl.uint32).to(tl.float32, bitcast=True)
    low = (bits.to(tl.float32, bitcast=True) + magic).to(tl.uint32, bitcast=True) - MAGIC
    code = tl.where(bits < (128 - BIAS) << 23, low, normal).to(tl.int32)
    return tl.minimum(code, limit) | sign


@triton.jit
def _stochastic(scaled, sign, limit, random, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """As `_nearest`, but up with the probability of the part cut off, by random bits (uint32)."""
    bits = scaled.to(tl.int32, bitcast=True) & _ABSOLUTE
    # Exponents above the smallest normal one, and below it.
    exponent = (bits >> 23) - (128 - BIAS)
    above = tl.maximum(exponent, 0)
    below = tl.minimum(tl.maximum(-exponent, 0), 63)
    significand = ((bits & 0x7FFFFF) | 0x800000).to(tl.uint64)
    # Whole steps in the upper word, 32 bits of the part of a step in the lower.
    steps = (significand << (32 - 23 + MANTISSA)) >> below.to(tl.uint64)
    steps = ((steps + random.to(tl.uint64)) >> 32).to(tl.int32)
    return tl.minimum((above << MANTISSA) + steps, limit) | sign


@triton.jit
def _converted(scaled, E5M2: tl.constexpr):
    """Codes (uint8) of fp32 elements by the instruction of compute capability 9.0 and later.

    cvt.rn.satfinite rounds to nearest even, saturates, and has 0x7F for NaN.
    """
    if E5M2:
        codes = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f", [scaled], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        codes = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f", [scaled], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    return codes


@triton.jit
def _codes(
    x, scale, random,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr,
    LARGEST: tl.constexpr, NAN: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Codes (uint8) of an fp32 tile under the scale codes of its blocks.

    random: uint32 like x, or None to round to nearest. CONVERT: by `_converted`.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    scaled = x * _spread(_inverse(scale), ROWS, COLUMNS)
    if CONVERT:
        codes = _converted(scaled, MANTISSA == 2)
    else:
        # A block whose scale is NaN has one code, without a sign.
        limit = _spread(tl.where(scale == 255, NAN, LARGEST), ROWS, COLUMNS)
        kept = _spread(tl.where(scale == 255, 0, 1 << (WIDTH - 1)), ROWS, COLUMNS)
        sign = (x.to(tl.int32, bitcast=True) >> (32 - WIDTH)) & kept
        if random is None:
            codes = _nearest(scaled, sign, limit, MANTISSA, BIAS)
        else:
            codes = _stochastic(scaled, sign, limit, random, MANTISSA, BIAS)
        codes = codes.to(tl.uint8)
    return codes


# -- scales ----------------------------------------------------------------------------------------


@triton.jit
def _swizzled(row, block, blocks):
    """Place of a scale in tiles of 128 rows by 4 blocks, 512 bytes each, row-major.

    Within a tile: 16 (row mod 32) + 4 (row // 32) + block mod 4.
    """
    tile = row // 128 * tl.cdiv(blocks, 4) + block // 4
    return tile.to(tl.int64) * 512 + (row % 32 * 16 + row % 128 // 32 * 4 + block % 4)


@triton.jit
def _store_scales(
    out, scale, first, stop, used, tile, column, columns, scale_rows, scales_row,
    BR: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SWIZZLED: tl.constexpr,
):  # fmt: skip
    """Store the scale codes (int32) of a tile, one a block.

    tile: its number, which counts scale rows (in tiles) where blocks are tall. Swizzled scales are
    those of rows of x in blocks along columns; of (32, 1) blocks, of columns in blocks along rows.
    """
    codes = scale.to(tl.uint8)
    row = tile * (ROWS // BR) + tl.arange(0, ROWS // BR)
    block = column // BC + tl.arange(0, COLUMNS // BC)
    blocks = tl.cdiv(columns, BC)
    if not SWIZZLED:
        inside = (row < scale_rows)[:, None] & (block < blocks)[None, :]
        tl.store(out + row.to(tl.int64)[:, None] * scales_row + block[None, :], codes, mask=inside)
    elif BC == 1:
        rows = tl.cdiv(scale_rows, 4) * 4
        inside = (row < rows)[:, None] & (block < tl.cdiv(blocks, 128) * 128)[None, :]
        place = _swizzled(block[None, :], row[:, None], scale_rows)
        tl.store(out + place, codes, mask=inside)
    else:
        each = first + tl.arange(0, ROWS)
        wide = tl.broadcast_to(codes[:, None, :], [ROWS // BR, BR, COLUMNS // BC])
        wide = tl.reshape(wide, [ROWS, COLUMNS // BC])
        wide = tl.where((each < used)[:, None], wide, 0)
        inside = (each < stop)[:, None] & (block < tl.cdiv(blocks, 4) * 4)[None, :]
        tl.store(out + _swizzled(each[:, None], block[None, :], blocks), wide, mask=inside)


# -- kernels ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=QUANTISE_COUNTS)
def mx_quantize_kernel(
    x, codes, scales, offsets, rows, end, columns, scale_rows, batch, row_tiles, column_tiles,
    x_matrix, x_row, codes_matrix, codes_row, scales_matrix, scales_row, draw_matrix, draw_row,
    seed_low, seed_high, turn_low, turn_high,
    BR: tl.constexpr, BC: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    WIDTH: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr, CARRY: tl.constexpr,
    TOP: tl.constexpr, CONVERT: tl.constexpr, STREAM: tl.constexpr, HADAMARD: tl.constexpr,
    ROOT: tl.constexpr, SIGNS: tl.constexpr, SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Codes and scales of a tile of ROWS x COLUMNS of one of many matrices `[rows, columns]`.

    x: fp32, fp16 or bf16; offsets: None, or
    `[batch + 1]` over the rows. end: rows, or what they are padded to where scales are swizzled.
    scale_rows: rows of plain scales (blocks along the rows), each scales_row bytes from the next.
    draw_matrix, draw_row: number of a row in the random stream STREAM (None: to nearest).
    HADAMARD: size of the transform along the blocks, 0 for none; SIGNS: its stream.
    """
    JAGGED: tl.constexpr = offsets is not None
    TALL: tl.constexpr = BR > 1
    tile, matrix, column = _place(row_tiles, column_tiles, COLUMNS)
    first, used, stop = _rows_of_tile(offsets, tile, batch, rows, end, TALL, JAGGED, ROWS)
    row = first + tl.arange(0, ROWS)
    each = column + tl.arange(0, COLUMNS)
    seen = (row < used)[:, None] & (each < columns)[None, :]
    source = x + matrix * x_matrix + row[:, None] * x_row + each[None, :]
    values = to_float(tl.load(source, mask=seen, other=0.0))
    if HADAMARD > 0:
        if TALL:
            values = tl.trans(_turn(tl.trans(values), turn_low, turn_high, SIGNS, HADAMARD, ROOT))
        else:
            values = _turn(values, turn_low, turn_high, SIGNS, HADAMARD, ROOT)
    largest = _block_maxima(values.to(tl.int32, bitcast=True) & _ABSOLUTE, BR, BC)
    scale = _scale_codes(largest, CARRY, TOP)
    random = None
    if STREAM is not None:
        number = matrix * draw_matrix + row * draw_row
        random = _draws(number, column, seed_low, seed_high, STREAM, COLUMNS)
    found = _codes(values, scale, random, MANTISSA, BIAS, WIDTH, LARGEST, NAN, CONVERT)
    inside = (row < tl.minimum(stop, rows))[:, None] & (each < columns)[None, :]
    target = codes + matrix * codes_matrix + row[:, None] * codes_row + each[None, :]
    tl.store(target, found, mask=inside)
    _store_scales(
        scales + matrix * scales_matrix, scale, first, stop, used, tile, column, columns,
        scale_rows, scales_row, BR, BC, ROWS, COLUMNS, SWIZZLED,
    )  # fmt: skip


@triton.jit
def _elements(
    codes, MANTISSA: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr,
    HAS_INFINITY: tl.constexpr,
):  # fmt: skip
    """Values of codes (uint8 tile) as fp32, exactly."""
    wide = codes.to(tl.int32)
    magnitude = wide & ((1 << (WIDTH - 1)) - 1)
    # The fields at their place in a float32 are 2^(BIAS - 127) of the value, subnormals too.
    small = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True)
    grow = tl.full([], (254 - BIAS) << 23, tl.int32).to(tl.float32, bitcast=True)
    bits = (small * grow).to(tl.int32, bitcast=True)
    if HAS_INFINITY:
        bits = tl.where(magnitude > LARGEST, 0x7F800000, bits)
        bits = tl.where(magnitude > LARGEST + 1, 0x7FC00000, bits)
    else:
        bits = tl.where(magnitude > LARGEST, 0x7FC00000, bits)
    sign = (wide >> (WIDTH - 1)) << 31
    return (bits | sign).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(elements, scale, WIDE: tl.constexpr):
    """Elements (fp32) times 2^(code - 127), exactly: in fp32, or in fp64 if WIDE. 255 is NaN."""
    ROWS: tl.constexpr = elements.shape[0]
    COLUMNS: tl.constexpr = elements.shape[1]
    if WIDE:
        bits = (scale.to(tl.int64) + 896) << 52
        bits = tl.where(scale == 255, 0x7FF8000000000000, bits)
        values = elements.to(tl.float64) * _spread(bits.to(tl.float64, bitcast=True), ROWS, COLUMNS)
    else:
        bits = tl.where(scale == 0, 0x00400000, scale << 23)
        bits = tl.where(scale == 255, 0x7FC00000, bits)
        values = elements * _spread(bits.to(tl.float32, bitcast=True), ROWS, COLUMNS)
    return values


@triton.jit(do_not_specialize=DEQUANTISE_COUNTS)
def mx_dequantize_kernel(
    codes, scales, out, offsets, rows, columns, batch, row_tiles, column_tiles,
    codes_matrix, codes_row, scales_matrix, scales_row, out_matrix, out_row,
    BR: tl.constexpr, BC: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    WIDTH: tl.constexpr, LARGEST: tl.constexpr, HAS_INFINITY: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Values of a tile of codes under plain scales, in out's dtype (fp64, fp32, fp16, bf16)."""
    JAGGED: tl.constexpr = offsets is not None
    TALL: tl.constexpr = BR > 1
    WIDE: tl.constexpr = out.dtype.element_ty == tl.float64
    tile, matrix, column = _place(row_tiles, column_tiles, COLUMNS)
    first, used, stop = _rows_of_tile(offsets, tile, batch, rows, rows, TALL, JAGGED, ROWS)
    row = first + tl.arange(0, ROWS)
    each = column + tl.arange(0, COLUMNS)
    seen = (row < used)[:, None] & (each < columns)[None, :]
    source = codes + matrix * codes_matrix + row[:, None] * codes_row + each[None, :]
    elements = _elements(
        tl.load(source, mask=seen, other=0), MANTISSA, BIAS, WIDTH, LARGEST, HAS_INFINITY
    )
    block = column // BC + tl.arange(0, COLUMNS // BC)
    blocks = tl.cdiv(columns, BC)
    if TALL:
        scale_row = tile.to(tl.int64) * (ROWS // BR) + tl.arange(0, ROWS // BR)
        known = first + tl.arange(0, ROWS // BR) * BR < used
    else:
        scale_row = row
        known = row < used
    place = scales + matrix * scales_matrix + scale_row[:, None] * scales_row + block[None, :]
    known = known[:, None] & (block < blocks)[None, :]
    scale = tl.load(place, mask=known, other=0).to(tl.int32)
    values = _scaled(elements, scale, WIDE)
    values = values if WIDE else round_to(values, out.dtype.element_ty)
    target = out + matrix * out_matrix + row[:, None] * out_row + each[None, :]
    tl.store(target, values, mask=(row < stop)[:, None] & (each < columns)[None, :])
