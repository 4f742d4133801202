"""MXFP8 attention on the device: tiles of codes and their values, quantisation in registers.

A tile of codes and E8M0 scales becomes the bf16 numbers that they stand for. A code has at most
four significant bits, so this is exact, and a product of such tiles is the block-scaled product
but for the order of its float32 sums; only what lies below bf16's smallest subnormal, 2^-133, is
lost, which takes a scale of 2^-124 or less. Where a tensor core multiplies codes under their scales
itself (`tl.dot_scaled` on compute capability 10 and 12), the codes stay what they are.

What is quantised in registers (P and dS) is never a code unless such a product wants one: it is
rounded to the values that its codes have. Sources: `mx_kernels.py`.
"""

import triton
import triton.language as tl

from jagbench.impl.kernels.interpreter import INTERPRET, dot, round_to
from jagbench.impl.kernels.mx_kernels import (
    _block_maxima,
    _inverse,
    _philox,
    _scale_codes,
    _spread,
    _word,
)
from jagbench.impl.kernels.tiles import LAST, LAST_CAUSAL, PREFIX

#: What the values of codes are kept in: bf16 but in the interpreter, which cannot compute in it.
VALUE = tl.constexpr(tl.float32 if INTERPRET.value else tl.bfloat16)
#: How the operands of a kernel come (its OPERANDS): as values, dequantised before; as codes that
#: the kernel decodes; as codes that the matrix unit multiplies under their scales.
VALUES = tl.constexpr(0)
CODES = tl.constexpr(1)
NATIVE = tl.constexpr(2)
#: E8M0 code of the fixed scale of attention weights, 2^-8.
FIXED_SCALE = tl.constexpr(119)

_ABSOLUTE = tl.constexpr(0x7FFFFFFF)
_EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def _power(scale):
    """2^(code - 127) as fp32; code 0 is the subnormal 2^-127, 255 is NaN."""
    bits = tl.where(scale == 0, 0x00400000, scale << 23)
    return tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _values_of(codes, scale, MANTISSA: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr):
    """Values (fp32) of a tile of codes under the scale codes of its blocks.

    Codes are those of a quantiser: none is a NaN's, unless its block's scale is NaN's too.
    """
    wide = codes.to(tl.int32)
    magnitude = (wide & ((1 << (WIDTH - 1)) - 1)) << (23 - MANTISSA)
    sign = (wide >> (WIDTH - 1)) << 31
    # The fields at their place in a float32 are 2^(BIAS - 127) of the value, subnormals too.
    grow = tl.full([], (254 - BIAS) << 23, tl.int32).to(tl.float32, bitcast=True)
    element = (magnitude | sign).to(tl.float32, bitcast=True) * grow
    return element * _spread(_power(scale), codes.shape[0], codes.shape[1])


@triton.jit
def _scale_tile(
    scales, sequence_row, scale_row, first, count, head, heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Scale codes (int32) of a tile of rows from position `first` on, one a block."""
    blocks = tl.arange(0, ROWS // BR)
    inside = first + blocks * BR < count
    row = (scale_row + first // 32 if BR > 1 else sequence_row + first) + blocks
    across: tl.constexpr = (D + BC - 1) // BC
    column = tl.arange(0, BLOCK_D // BC)
    place = (row.to(tl.int64)[:, None] * heads + head) * across + column[None, :]
    inside = inside[:, None] & (column < across)[None, :]
    return tl.load(scales + place, mask=inside, other=0).to(tl.int32)


@triton.jit
def operand_tile(
    values, scales, sequence_row, scale_row, first, count, head, heads, kept,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr, OPERANDS: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Rows [first, first + ROWS) of a sequence in one head, `[ROWS, BLOCK_D]`, and their scales.

    values, scales: contiguous `[rows, heads, D]` and `[scale rows, heads, blocks]`; values are
    codes, or bf16 without scales. sequence_row: the sequence's first row; scale_row: that of its
    first block of 32 rows. count: its rows. kept: which rows of the tile are used, if MASK:
    others are 0. The second result is uint8 `[blocks]` for NATIVE, else nothing.
    """
    r = tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK_D)
    start = values + ((sequence_row + first) * heads + head) * D
    inside = (first + r < count)[:, None]
    if MASK:
        inside = inside & kept[:, None]
    if D != BLOCK_D:
        inside = inside & (c < D)[None, :]
    # heads * D < 2^23 (checked on the host), so an offset inside the tile fits 32 bits.
    tile = tl.load(start + (r[:, None] * (heads * D) + c[None, :]), mask=inside, other=0)
    scale = 0
    if OPERANDS != VALUES:
        scale = _scale_tile(
            scales, sequence_row, scale_row, first, count, head, heads, D, BLOCK_D, ROWS, BR, BC
        )
        if OPERANDS == CODES:
            numbers = _values_of(tile, scale, MANTISSA, BIAS, WIDTH)
            if MASK:
                # A NaN scale makes NaN of zeros too.
                numbers = tl.where(kept[:, None], numbers, 0.0)
            tile = round_to(numbers, VALUE)
    return tile, scale


@triton.jit
def product_of_rows(a, a_scale, b, b_scale, zero, TYPE: tl.constexpr, OPERANDS: tl.constexpr):
    """`a @ b^T`, fp32, of two tiles as `operand_tile` gives them, blocks along the columns.

    zero: a number that is 0.0, unknown to the compiler: where it knows what `tl.dot_scaled` begins
    with, triton 3.6 and 3.7 fail for compute capability 10 ("uninitialized alloc").
    """
    if OPERANDS == NATIVE:
        BLOCKS: tl.constexpr = a.shape[1] // 32
        a_rows = _spread(a_scale, a.shape[0], BLOCKS).to(tl.uint8)
        b_rows = _spread(b_scale, b.shape[0], BLOCKS).to(tl.uint8)
        begin = tl.zeros([a.shape[0], b.shape[0]], dtype=tl.float32) + zero
        found = tl.dot_scaled(a, a_rows, TYPE, tl.trans(b), b_rows, TYPE, acc=begin)
    else:
        found = dot(a, tl.trans(b))
    return found


# -- quantisation in registers ---------------------------------------------------------------------


@triton.jit
def _nearest_element(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """fp32 rounded to MANTISSA bits, or to the element type's subnormals, ties to even."""
    bits = x.to(tl.int32, bitcast=True) & _EXPONENT
    power = tl.maximum(bits, (128 - BIAS) << 23).to(tl.float32, bitcast=True)
    # Beside this number the last place of a float32 is that of the element: the sum rounds.
    magic = power * (1.5 * (1 << (23 - MANTISSA)))
    return (x + magic) - magic


@triton.jit
def _stochastic_element(x, random, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """As `_nearest_element`, but up with the probability of the part cut off, by random bits."""
    bits = x.to(tl.int32, bitcast=True)
    power = tl.maximum(bits & _EXPONENT, (128 - BIAS) << 23)
    shrink = ((254 << 23) - power + (MANTISSA << 23)).to(tl.float32, bitcast=True)
    steps = tl.abs(x) * shrink
    whole = tl.floor(steps)
    rest = (steps - whole) * 4294967296.0
    if INTERPRET:
        rest = tl.where(rest == rest, rest, 0.0)
    part = rest.to(tl.uint32)
    whole += ((part + random) < part).to(tl.float32)
    found = whole * (power.to(tl.float32, bitcast=True) * (1.0 / (1 << MANTISSA)))
    sign = bits & tl.full([], -(1 << 31), tl.int32)
    return (found.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def block_scales(
    x, CARRY: tl.constexpr, TOP: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    FIXED: tl.constexpr,
):  # fmt: skip
    """Scale codes (int32) of the blocks of an fp32 tile; FIXED: 2^-8 for all."""
    bits = x.to(tl.int32, bitcast=True) & _ABSOLUTE
    scale = _scale_codes(_block_maxima(bits, BR, BC), CARRY, TOP)
    if FIXED:
        scale = tl.full(scale.shape, FIXED_SCALE, tl.int32)
    return scale


@triton.jit
def held(
    x, scale, random, LIMIT: tl.constexpr, SATURATES: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """What an fp32 tile becomes, quantised under its blocks' scale codes and dequantised; fp32.

    random: uint32 like x, or None to round to nearest. LIMIT: the element type's largest number;
    SATURATES: whether the scale mode lets elements pass it.
    """
    scaled = x * _spread(_inverse(scale), x.shape[0], x.shape[1])
    if random is None:
        element = _nearest_element(scaled, MANTISSA, BIAS)
    else:
        element = _stochastic_element(scaled, random, MANTISSA, BIAS)
    if SATURATES:
        element = tl.clamp(element, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return element * _spread(_power(scale), x.shape[0], x.shape[1])


@triton.jit
def random_tile(
    rows, first_column, low, high, STREAM: tl.constexpr, COLUMNS: tl.constexpr,
    ACROSS: tl.constexpr,
):  # fmt: skip
    """32 random bits, uint32, for COLUMNS columns of rows (int64 numbers of the stream).

    `[rows, COLUMNS]`, or `[COLUMNS, rows]` if ACROSS. Column c of row r is word c % 4 of counter
    (c // 4, r mod 2^32, r // 2^32, stream), as in `mx_kernels`.
    """
    ROWS: tl.constexpr = rows.shape[0]
    quads = (first_column // 4 + tl.arange(0, COLUMNS // 4)).to(tl.uint32)
    row_low = (rows & 0xFFFFFFFF).to(tl.uint32)
    row_high = (rows >> 32).to(tl.uint32)
    if ACROSS:
        zero = tl.zeros([COLUMNS // 4, ROWS], dtype=tl.uint32)
        w0, w1, w2, w3 = _philox(
            quads[:, None] + zero, row_low[None, :] + zero, row_high[None, :] + zero,
            zero + STREAM, _word(low), _word(high),
        )  # fmt: skip
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        words = tl.reshape(tl.permute(words, (0, 2, 3, 1)), [COLUMNS, ROWS])
    else:
        zero = tl.zeros([ROWS, COLUMNS // 4], dtype=tl.uint32)
        w0, w1, w2, w3 = _philox(
            quads[None, :] + zero, row_low[:, None] + zero, row_high[:, None] + zero,
            zero + STREAM, _word(low), _word(high),
        )  # fmt: skip
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        words = tl.reshape(words, [ROWS, COLUMNS])
    return words


# -- which tokens take part in a pair --------------------------------------------------------------


@triton.jit
def used_keys(
    columns, q_len, k_len, shift, left, right, prefix, free_from,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BEYOND: tl.constexpr,
):  # fmt: skip
    """Which keys some query sees: the value of any other may be NaN, and must not be multiplied."""
    low = columns * 0
    high = low + q_len - 1
    if HAS_LEFT:
        high = tl.minimum(high, columns - shift + left)
    if HAS_RIGHT:
        low = tl.maximum(low, columns - shift - right)
    used = low <= high
    if (PREFIX & BEYOND) != 0:
        context = tl.maximum(-shift, 0) < tl.minimum(q_len, prefix - shift)
        used = used | context | ((columns < prefix) & (q_len > 0))
    if (LAST & BEYOND) != 0:
        late = tl.maximum(free_from, 0) < q_len
        if (LAST_CAUSAL & BEYOND) != 0:
            used = used | (late & (columns <= q_len - 1 + shift))
        else:
            used = used | late
    return used & (columns < k_len)


@triton.jit
def used_queries(
    rows, q_len, k_len, shift, left, right, prefix, free_from,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BEYOND: tl.constexpr,
):  # fmt: skip
    """Which queries see some key."""
    low = rows * 0
    high = low + k_len - 1
    if HAS_LEFT:
        low = tl.maximum(low, rows + shift - left)
    if HAS_RIGHT:
        high = tl.minimum(high, rows + shift + right)
    used = low <= high
    if (PREFIX & BEYOND) != 0:
        used = used | (k_len > 0)
    if (LAST & BEYOND) != 0:
        free = (rows >= free_from) & (k_len > 0)
        if (LAST_CAUSAL & BEYOND) != 0:
            free = free & (rows + shift >= 0)
        used = used | free
    return used & (rows < q_len)
