"""MX quantisation: codes known by hand, what blocks share and do not, what rounding promises."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.execution import named_outputs
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, NAN_SCALE_CODE, SQUARE, Block, ElemDtype
from jagbench.reference.mx import mx_dequantize
from jagbench.reference.mx_formats import format_of
from jagbench.suite import shapes
from jagbench.suite.candidate import Candidate
from jagbench.suite.quantizing import (
    OF_EVERY_BLOCK,
    OF_EVERY_MODE,
    OF_EVERY_TYPE,
    call,
    normal,
    quantize,
)

pytestmark = pytest.mark.operator("mx_quantize")


def _blocks_of_rows(x: Tensor, block: Block) -> Tensor:
    """A tensor in which row i of x `[n, 32]` is a block of the shape, in order."""
    if block == ALONG_COLUMNS:
        return x
    return x.T.contiguous() if block == ALONG_ROWS else x.repeat_interleave(32, 0)


def _of_blocks(scales: Tensor) -> list[int]:
    """Scales of `_blocks_of_rows`, in order."""
    return [int(code) for code in scales.flatten()]


# -- scales and codes that were worked out by hand -------------------------------------------------

#: Element type, mode -> largest magnitude of a block, how many steps of the dtype beside it, scale.
SCALES: dict[tuple[ElemDtype, str], tuple[tuple[float, int, int], ...]] = {
    ("e4m3", "rceil"): (
        (448.0, -1, 127), (448.0, 0, 127), (448.0, 1, 128), (1.0, 0, 119), (1.75, 0, 119),
        (1.75, 1, 120), (2.0, 0, 120), (0.0, 0, 0),
    ),
    ("e4m3", "floor"): (
        (448.0, 0, 127), (448.0, 1, 127), (512.0, -1, 127), (512.0, 0, 128), (1.0, -1, 118),
        (1.0, 0, 119), (0.0, 0, 0),
    ),
    ("e4m3", "ceil"): ((256.0, 0, 127), (256.0, 1, 128), (448.0, 0, 128), (512.0, 0, 128)),
    ("e4m3", "even"): ((496.0, -1, 127), (496.0, 0, 128), (256.0, 0, 127), (256.0, -1, 127)),
    ("e5m2", "rceil"): ((57344.0, 0, 127), (57344.0, 1, 128), (1.75, 0, 112), (1.75, 1, 113)),
    ("e5m2", "floor"): ((57344.0, 1, 127), (32768.0, 0, 127), (32768.0, -1, 126)),
    ("e5m2", "ceil"): ((32768.0, 0, 127), (32768.0, 1, 128)),
    ("e5m2", "even"): ((61440.0, -1, 127), (61440.0, 0, 128)),
    ("e2m1", "rceil"): ((6.0, 0, 127), (6.0, 1, 128), (4.0, 0, 127), (3.0, 0, 126), (3.0, 1, 127)),
    ("e2m1", "floor"): ((8.0, -1, 127), (8.0, 0, 128)),
    ("e2m1", "ceil"): ((4.0, 0, 127), (4.0, 1, 128)),
    ("e2m1", "even"): ((7.0, -1, 127), (7.0, 0, 128)),
}  # fmt: skip


def _beside(value: float, steps: int, dtype: torch.dtype) -> Tensor:
    """The number so many steps of a dtype from a positive value."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return (torch.tensor(value, dtype=dtype).view(word) + steps).view(dtype)


@OF_EVERY_BLOCK
@pytest.mark.parametrize("elem_dtype", ["e4m3", "e5m2", "e2m1"])
@OF_EVERY_MODE
def test_scales_of_known_largest_magnitudes(
    candidate: Candidate, elem_dtype: ElemDtype, mode: str, block: Block
) -> None:
    """At the boundary of every mode and one step beside it; 0 has scale code 0."""
    dtype, known = candidate.settings.main_dtype, SCALES[elem_dtype, mode]
    rows = torch.zeros(len(known), 32, dtype=dtype)
    for i, (value, steps, _) in enumerate(known):
        rows[i] = value / 8
        rows[i, (7 * i + 3) % 32] = -_beside(value, steps, dtype)
    x = _blocks_of_rows(rows, block)
    _, scales = quantize(candidate, x, elem_dtype=elem_dtype, scale_mode=mode, block=block)
    assert _of_blocks(scales) == [code for _, _, code in known]


#: Element type -> numbers under scale 1, and their codes: ties, subnormals, signs, the largest.
CODES: dict[ElemDtype, tuple[tuple[float, int], ...]] = {
    "e4m3": (
        (1.0, 0x38), (-1.0, 0xB8), (1.0625, 0x38), (1.1875, 0x3A), (1.078125, 0x39),
        (432.0, 0x7E), (424.0, 0x7D), (2**-9, 0x01), (2**-10, 0x00), (1.5 * 2**-9, 0x02),
        (1.25 * 2**-9, 0x01), (0.0, 0x00), (-0.0, 0x80), (448.0, 0x7E), (-448.0, 0xFE),
    ),
    "e5m2": (
        (1.0, 0x3C), (1.125, 0x3C), (1.375, 0x3E), (-1.1875, 0xBD), (2**-16, 0x01),
        (2**-17, 0x00), (1.5 * 2**-16, 0x02), (0.0, 0x00), (-0.0, 0x80), (57344.0, 0x7B),
    ),
    "e2m1": (
        (0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (5.25, 7),
        (-0.5, 9), (-0.0, 8), (6.0, 7), (-6.0, 15),
    ),
}  # fmt: skip


@OF_EVERY_BLOCK
@OF_EVERY_TYPE
def test_codes_of_known_numbers(candidate: Candidate, elem_dtype: ElemDtype, block: Block) -> None:
    """To nearest, ties to even, subnormals kept, the sign of zero too."""
    known = CODES[elem_dtype]
    rows = torch.full((1, 32), format_of(elem_dtype).largest, dtype=candidate.settings.main_dtype)
    rows[0, : len(known)] = torch.tensor([value for value, _ in known])
    x = _blocks_of_rows(rows, block)
    codes, scales = quantize(candidate, x, elem_dtype=elem_dtype, block=block)
    found = codes.T if block == ALONG_ROWS else codes
    assert _of_blocks(scales) == [127]
    assert [hex(c) for c in found[0, : len(known)].tolist()] == [hex(c) for _, c in known]


@OF_EVERY_BLOCK
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@OF_EVERY_TYPE
def test_what_floor_cannot_hold_saturates(
    candidate: Candidate, elem_dtype: ElemDtype, stochastic: bool, block: Block
) -> None:
    """Never NaN, never infinity: the largest finite code, of either sign."""
    form, dtype = format_of(elem_dtype), candidate.settings.main_dtype
    over = _beside(2.0 ** (form.largest_exponent + 1), -1, dtype)
    rows = over.expand(1, 32).clone()
    rows[0, ::2] *= -1
    options: dict[str, Any] = {"rounding": "stochastic", "seed": 3} if stochastic else {}
    x = _blocks_of_rows(rows, block)
    codes, scales = quantize(
        candidate, x, elem_dtype=elem_dtype, scale_mode="floor", block=block, **options
    )
    assert _of_blocks(scales) == [127]
    magnitudes = {code & ((1 << (form.bits - 1)) - 1) for code in codes.flatten().tolist()}
    assert magnitudes == {form.largest_code}


@OF_EVERY_BLOCK
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_a_block_with_what_is_no_number_has_the_scale_nan(
    candidate: Candidate, value: str, block: Block
) -> None:
    """Scale code 255 there; every other block is as it was."""
    x = normal(candidate, 64, 96)
    clean_codes, clean_scales = quantize(candidate, x, block=block)
    x[40, 37] = float(value)
    codes, scales = quantize(candidate, x, block=block)
    place = (40 // block[0], 37 // block[1])
    assert int(scales[place]) == NAN_SCALE_CODE
    scales[place] = clean_scales[place]
    assert torch.equal(scales, clean_scales)
    rows, columns = (slice(p * size, (p + 1) * size) for p, size in zip(place, block, strict=True))
    codes[rows, columns] = clean_codes[rows, columns]
    assert torch.equal(codes, clean_codes)


# -- what a change of the values does --------------------------------------------------------------


@OF_EVERY_BLOCK
@OF_EVERY_MODE
def test_a_power_of_two_moves_the_scale_and_no_code(
    candidate: Candidate, mode: str, block: Block
) -> None:
    """q(2^k x) has the codes of q(x) and scale codes k higher."""
    # Far from the subnormals of half precision, so that the products are exact.
    x = normal(candidate, 64, 96)
    x = torch.where(x.abs() < 2**-6, 1.0, x)
    codes, scales = quantize(candidate, x, block=block, scale_mode=mode)
    for power in (-5, 9) if x.dtype == torch.float16 else (-60, 70):
        louder = quantize(candidate, x * 2.0**power, block=block, scale_mode=mode)
        assert torch.equal(louder[0], codes)
        assert torch.equal(louder[1].int(), scales.int() + power)


@OF_EVERY_BLOCK
@pytest.mark.parametrize(
    ("mode", "elem_dtype"),
    [("rceil", "e4m3"), ("floor", "e4m3"), ("ceil", "e5m2"), ("even", "e2m1"), ("floor", "e2m1")],
)
def test_values_that_were_quantised_come_back(
    candidate: Candidate, elem_dtype: ElemDtype, mode: str, block: Block
) -> None:
    """Quantised again, every value is the same; in FLOOR every code too."""
    x = normal(candidate, 64, 96)
    options: dict[str, Any] = {"elem_dtype": elem_dtype, "block": block}
    codes, scales = quantize(candidate, x, scale_mode=mode, **options)
    once = mx_dequantize(codes, scales, dtype=x.dtype, **options)
    again = quantize(candidate, once, scale_mode=mode, **options)
    assert torch.equal(mx_dequantize(*again, dtype=x.dtype, **options), once)
    if mode == "floor":
        assert torch.equal(again[0], codes)
        assert torch.equal(again[1], scales)


@OF_EVERY_BLOCK
@OF_EVERY_TYPE
def test_under_rceil_every_element_is_within_half_a_step(
    candidate: Candidate, elem_dtype: ElemDtype, block: Block
) -> None:
    """Nothing saturates: the error is half of the element's last place at most."""
    form = format_of(elem_dtype)
    x = normal(candidate, 64, 96)
    codes, scales = quantize(candidate, x, elem_dtype=elem_dtype, block=block)
    values = mx_dequantize(codes, scales, elem_dtype=elem_dtype, block=block, dtype=torch.float64)
    unit = mx_dequantize(  # 2^(scale - 127), from codes of 1
        torch.full_like(codes, 1 << form.mantissa_bits), scales, elem_dtype=elem_dtype,
        block=block, dtype=torch.float64,
    ) / 2.0**form.smallest_exponent  # fmt: skip
    exact = x.to(values)
    binade = torch.exp2(torch.floor(torch.log2(exact.abs())))
    step = torch.maximum(binade, unit * 2.0**form.smallest_exponent) / 2**form.mantissa_bits
    worst = float(((values - exact).abs() / step).max())
    assert worst <= 0.5, f"off by {worst:.3g} of the last place"


# -- transposes ------------------------------------------------------------------------------------


def test_squares_of_the_transpose_are_the_transpose_of_the_squares(candidate: Candidate) -> None:
    """One quantisation serves both products: codes and scales are only turned."""
    # Rows of very different sizes: many elements are subnormal under the scale of their square.
    x = normal(candidate, 64, 96) * 2.0 ** -(torch.arange(64)[:, None] % 12)
    codes, scales = quantize(candidate, x, block=SQUARE)
    turned = quantize(candidate, x.T.contiguous(), block=SQUARE)
    assert torch.equal(turned[0], codes.T)
    assert torch.equal(turned[1], scales.T)


def test_blocks_along_the_rows_are_those_along_the_columns_of_the_transpose(
    candidate: Candidate,
) -> None:
    """(32, 1) of x is (1, 32) of its transpose, a view of it too."""
    x = normal(candidate, 64, 96)
    codes, scales = quantize(candidate, x, block=ALONG_ROWS)
    for turned in (x.T.contiguous(), x.T):
        found = quantize(candidate, turned, block=ALONG_COLUMNS)
        assert torch.equal(found[0], codes.T)
        assert torch.equal(found[1], scales.T)


# -- what belongs to a block -----------------------------------------------------------------------


@OF_EVERY_BLOCK
def test_a_block_shares_its_scale_with_no_other(candidate: Candidate, block: Block) -> None:
    """A number far larger than all others changes the codes of its own block alone."""
    x = normal(candidate, 70, 72)
    codes, scales = quantize(candidate, x, block=block)
    x[33, 4] = 2.0**12
    own = (33 // block[0], 4 // block[1])
    changed_codes, changed_scales = quantize(candidate, x, block=block)
    different = (changed_scales != scales).nonzero().tolist()
    assert different == [list(own)]
    rows, columns = (slice(p * size, (p + 1) * size) for p, size in zip(own, block, strict=True))
    changed_codes[rows, columns] = codes[rows, columns]
    assert torch.equal(changed_codes, codes)


@OF_EVERY_BLOCK
def test_every_sequence_is_quantised_as_if_alone(candidate: Candidate, block: Block) -> None:
    """Blocks of rows start with each sequence; their scales lie in rows offsets[i] // 32 + i on."""
    lengths = [33, 0, 1, 31, 65, 32]
    offsets = shapes.offsets(lengths)
    x = normal(candidate, sum(lengths) + 5, 2, 40)
    codes, scales = quantize(candidate, x, offsets, block=block)
    ends = offsets.tolist()
    for i, (start, stop) in enumerate(itertools.pairwise(ends)):
        if start == stop:
            continue
        # Heads are matrices of a dense call.
        alone = quantize(candidate, x[start:stop].movedim(1, 0).contiguous(), block=block)
        first = start if block[0] == 1 else start // block[0] + i
        own = scales[first : first + -(-(stop - start) // block[0])]
        assert torch.equal(alone[0].movedim(0, 1), codes[start:stop]), f"codes of sequence {i}"
        assert torch.equal(alone[1].movedim(0, 1), own), f"scales of sequence {i}"


def test_one_row_is_a_matrix_of_one_row(candidate: Candidate) -> None:
    """X of one dim has codes and scales of one dim."""
    x = normal(candidate, 70)
    codes, scales = quantize(candidate, x)
    matrix = quantize(candidate, x[None])
    assert torch.equal(codes, matrix[0][0])
    assert torch.equal(scales, matrix[1][0])


@OF_EVERY_BLOCK
def test_scales_that_belong_to_no_block_are_never_read(candidate: Candidate, block: Block) -> None:
    """The implementation's own way back: right, whatever lies between the scales in use."""
    back = candidate.settings.implementation.get("mx_dequantize")
    offsets = shapes.offsets([33, 0, 20, 0]).to(candidate.settings.device)
    x = normal(candidate, 70, 40)
    codes, scales = quantize(candidate, x, offsets, block=block)
    expected = mx_dequantize(codes, scales, offsets, block=block)
    used = torch.zeros(len(scales), dtype=torch.bool)
    for i, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        first = start if block[0] == 1 else start // block[0] + i
        used[first : first + -(-(stop - start) // block[0])] = True
    for stray in (0x00, 0x11, NAN_SCALE_CODE):
        scales[~used.to(scales.device)] = stray
        codes[53:] = 0x7F
        assert torch.equal(back(codes, scales, offsets, block=block), expected), hex(stray)


# -- around the call -------------------------------------------------------------------------------


def test_autocast_and_gradients_leave_the_codes_alone(candidate: Candidate) -> None:
    """X is taken as it is, under autocast too, and whether or not it requires a gradient."""
    inputs = call(candidate, normal(candidate, 32, 64))
    expected = candidate.run(inputs)
    with torch.autocast(candidate.settings.device.type, dtype=torch.bfloat16):
        cast = candidate.run(inputs)
    live = inputs.map(lambda _, t: t.clone().requires_grad_())
    function = candidate.settings.implementation.get("mx_quantize")
    found = named_outputs(live, live.call(function))
    for name, value in expected.items():
        assert torch.equal(cast[name], value), name
        assert torch.equal(found[name], value), name
