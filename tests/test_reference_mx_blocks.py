"""Scales of blocks in every mode, at every exponent and beside every boundary; torchao beside."""

import itertools
import math
import warnings

import pytest
import torch
from mx_oracles import (
    ELEM_DTYPES,
    LAYOUTS,
    MODES,
    nearest_codes,
    normal,
    quantized,
    scale_code,
    table,
)

from jagbench.mx import BLOCKS
from jagbench.reference.mx import mx_dequantize, mx_quantize, mx_requantize
from jagbench.reference.mx_blocks import Blocks, dequantize, quantize, scale_codes

#: Mantissa fields of a float32 on both sides of every place where a mode changes its mind.
EDGES = sorted(
    {
        edge + step
        for edge in (0, 0x600000, 0x400000, 0x780000, 0x700000, 0x6FFFFF, 0x7FFFFF)
        for step in (-1, 0, 1)
        if 0 <= edge + step < 2**23
    }
)
every_format = pytest.mark.parametrize("elem_dtype", ELEM_DTYPES)
every_mode = pytest.mark.parametrize("mode", MODES)
every_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{b[0]}x{b[1]}")


def float32_of(exponents, mantissas):
    fields = [(e << 23) + m for e, m in itertools.product(exponents, mantissas)]
    return torch.tensor(fields, dtype=torch.int32).view(torch.float32)


# -- scales ----------------------------------------------------------------------------------------


@every_mode
@every_format
def test_every_exponent_and_edge_has_the_scale_of_the_definition(elem_dtype, mode):
    largest = float32_of(range(255), EDGES)
    wanted = [scale_code(a, elem_dtype, mode) for a in largest.tolist()]
    assert scale_codes(largest, elem_dtype, mode).tolist() == wanted


@every_mode
def test_every_16_bit_number_has_the_scale_of_the_definition(mode):
    every = torch.arange(2**15, dtype=torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        largest = every.view(dtype)
        wanted = [scale_code(a, "e4m3", mode) for a in largest.tolist()]
        assert scale_codes(largest, "e4m3", mode).tolist() == wanted


@pytest.mark.parametrize(
    ("elem_dtype", "largest", "floor", "ceil", "rceil", "even"),
    [
        ("e4m3", 150.0, 126, 127, 126, 126),
        ("e4m3", 448.0, 127, 128, 127, 127),
        ("e4m3", 449.0, 127, 128, 128, 127),
        ("e4m3", 495.0, 127, 128, 128, 127),
        ("e4m3", 496.0, 127, 128, 128, 128),
        ("e4m3", 256.0, 127, 127, 127, 127),
        ("e5m2", 57344.0, 127, 128, 127, 127),
        ("e5m2", 57345.0, 127, 128, 128, 127),
        ("e2m1", 6.0, 127, 128, 127, 127),
        ("e2m1", 6.5, 127, 128, 128, 127),
        ("e2m1", 7.0, 127, 128, 128, 128),
    ],
)
def test_the_modes_differ_where_the_definitions_say(elem_dtype, largest, floor, ceil, rceil, even):
    wanted = {"floor": floor, "ceil": ceil, "rceil": rceil, "even": even}
    for mode, code in wanted.items():
        assert scale_codes(torch.tensor([largest]), elem_dtype, mode).item() == code


@every_format
def test_rceil_is_what_float32_division_and_its_bits_give(elem_dtype):
    # The bit trick of public kernels: exponent field of the quotient, + 1 if its mantissa is not 0.
    largest = float32_of(range(40, 255), EDGES)
    bits = (largest / LAYOUTS[elem_dtype][3]).view(torch.int32)
    trick = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    assert torch.equal(scale_codes(largest, elem_dtype, "rceil").int(), trick)


@every_mode
@every_format
def test_zero_and_subnormal_maxima_have_scale_code_0(elem_dtype, mode):
    tiny = torch.tensor([0.0, 1e-45, 9e-40, 1.1754942e-38])
    assert (scale_codes(tiny, elem_dtype, mode) == 0).all()


@every_mode
@every_format
def test_what_is_not_finite_has_scale_code_255_and_float64_beyond_the_range_254(elem_dtype, mode):
    for bad in (math.inf, math.nan):
        assert scale_codes(torch.tensor([bad]), elem_dtype, mode).item() == 255
    huge = torch.tensor([2.0**200], dtype=torch.float64)
    assert scale_codes(huge, elem_dtype, mode).item() == 254


def test_no_finite_float32_has_an_end_code_but_0():
    largest = float32_of(range(255), EDGES)
    for elem_dtype, mode in itertools.product(ELEM_DTYPES, MODES):
        codes = scale_codes(largest, elem_dtype, mode)
        assert codes.min() == 0
        assert codes.max() < 254


# -- elements --------------------------------------------------------------------------------------


@every_block
@every_mode
@every_format
def test_codes_and_scales_are_those_of_the_oracle(elem_dtype, mode, block):
    x = normal(70, 45, seed=1) * torch.exp2(torch.round(6 * normal(70, 1, seed=2)))
    blocks = Blocks(elem_dtype, block, mode)
    assert torch.equal(
        dequantize(*quantize(x, blocks), blocks), quantized(x, elem_dtype, block, mode)
    )


@every_format
def test_rceil_saturates_nothing_and_every_error_is_at_most_half_a_step(elem_dtype):
    x = normal(64, 320, seed=3, dtype=torch.float32)
    blocks = Blocks(elem_dtype, (1, 32))
    codes, scales = quantize(x, blocks)
    step = 2.0 ** (scales.double() - 127).repeat_interleave(32, 1)
    values = table(elem_dtype)
    positive = values[: len(values) // 2]
    positive = positive[positive.isfinite()]
    scaled = (x.double() / step).abs()
    assert scaled.max() <= LAYOUTS[elem_dtype][3]
    above = torch.searchsorted(positive, scaled.flatten()).view(scaled.shape)
    gap = positive[above] - positive[(above - 1).clamp(min=0)]
    error = (scaled - values[codes.long()].abs()).abs()
    assert (error <= gap / 2).all()


def test_floor_saturates_some_of_normal_data_and_costs_its_quality():
    x = normal(256, 1024, seed=4, dtype=torch.float32)
    ratio = {}
    for mode in ("floor", "rceil"):
        codes, scales = mx_quantize(x, scale_mode=mode)
        step = 2.0 ** (scales.double() - 127).repeat_interleave(32, 1)
        ratio[mode] = ((x / step).abs() > 448).double().mean().item()
        noise = (mx_dequantize(codes, scales).double() - x).square().sum()
        ratio[f"{mode} dB"] = 10 * torch.log10(x.double().square().sum() / noise).item()
    assert ratio["rceil"] == 0
    assert ratio["floor"] == pytest.approx(0.0086, rel=0.15)
    assert ratio["rceil dB"] == pytest.approx(31.5, abs=0.2)
    assert ratio["floor dB"] == pytest.approx(30.6, abs=0.2)


# -- edges of the range ----------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [5.7e-35, 9e-40, 1e-45, 2.0**-126, 2.0**-118])
@every_mode
@every_format
def test_blocks_of_very_small_values_come_back_near_and_finite(elem_dtype, mode, largest):
    x = torch.tensor([[largest, -largest, largest / 2, 0.0] * 8])
    codes, scales = mx_quantize(x, elem_dtype=elem_dtype, scale_mode=mode)
    back = mx_dequantize(codes, scales, elem_dtype=elem_dtype)
    # A step of the format at scale 2^-127 is the best there is.
    least = float(table(elem_dtype)[1]) * 2.0**-127
    assert (back - x).abs().max() <= max(0.26 * largest, least)


@every_mode
@every_block
def test_a_block_of_zeros_is_zeros_beside_others(mode, block):
    x = normal(64, 64, seed=5, dtype=torch.float32)
    x[:32, 32:] = 0
    codes, scales = mx_quantize(x, block=block, scale_mode=mode)
    assert (codes[:32, 32:] == 0).all()
    rows, columns = 32 // block[0], 32 // block[1]
    assert (scales[:rows, columns:] == 0).all()
    assert (mx_dequantize(codes, scales, block=block)[:32, 32:] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_mode
@every_block
@every_format
def test_one_bad_value_makes_its_block_nan_and_no_other(elem_dtype, block, mode, bad):
    x = normal(64, 96, seed=6, dtype=torch.float32)
    clean = quantize(x, Blocks(elem_dtype, block, mode))
    x[40, 50] = bad
    codes, scales = mx_quantize(x, elem_dtype=elem_dtype, block=block, scale_mode=mode)
    back = mx_dequantize(codes, scales, elem_dtype=elem_dtype, block=block)
    hurt = torch.zeros(64, 96, dtype=torch.bool)
    rows = slice(40, 41) if block[0] == 1 else slice(32, 64)
    columns = slice(50, 51) if block[1] == 1 else slice(32, 64)
    hurt[rows, columns] = True
    assert torch.equal(back.isnan(), hurt)
    assert torch.equal(codes[~hurt], clean[0][~hurt])
    assert (scales == 255).sum() == 1
    assert torch.equal(scales[scales != 255], clean[1][scales != 255])


def test_scale_byte_0_is_the_smallest_power_and_255_nan_for_any_element():
    one = torch.full((1, 32), 0x38, dtype=torch.uint8)
    assert (mx_dequantize(one, torch.tensor([[0]], dtype=torch.uint8)) == 2.0**-127).all()
    every = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scales = torch.full((8, 1), 255, dtype=torch.uint8)
    for elem_dtype in ("e4m3", "e5m2"):
        assert mx_dequantize(every, scales, elem_dtype=elem_dtype).isnan().all()


@every_format
def test_every_scale_code_dequantises_to_its_power(elem_dtype):
    codes = nearest_codes(torch.ones(255, 32), elem_dtype)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    back = mx_dequantize(codes, scales, elem_dtype=elem_dtype, dtype=torch.float64)
    assert torch.equal(back, torch.exp2(scales.double() - 127).expand(-1, 32))


# -- invariances -----------------------------------------------------------------------------------


@every_mode
@every_block
@every_format
def test_a_power_of_two_moves_the_scale_and_no_code(elem_dtype, block, mode):
    x = normal(40, 70, seed=7, dtype=torch.float32)
    codes, scales = mx_quantize(x, elem_dtype=elem_dtype, block=block, scale_mode=mode)
    for k in (-60, -1, 1, 90):
        moved = mx_quantize(x * 2.0**k, elem_dtype=elem_dtype, block=block, scale_mode=mode)
        assert torch.equal(moved[0], codes)
        assert torch.equal(moved[1].int(), scales.int() + k)


@every_mode
@every_block
@every_format
def test_values_survive_a_second_quantisation(elem_dtype, block, mode):
    x = normal(64, 640, seed=8, dtype=torch.float32)
    kind = {"elem_dtype": elem_dtype, "block": block}
    once = mx_quantize(x, **kind, scale_mode=mode)
    twice = mx_requantize(*once, **kind, to_elem_dtype=elem_dtype, to_block=block, scale_mode=mode)
    assert torch.equal(mx_dequantize(*once, **kind), mx_dequantize(*twice, **kind))


@every_block
@every_format
def test_under_floor_codes_survive_a_second_quantisation_too(elem_dtype, block):
    x = normal(64, 640, seed=9, dtype=torch.float32)
    once = mx_quantize(x, elem_dtype=elem_dtype, block=block, scale_mode="floor")
    twice = mx_requantize(
        *once,
        elem_dtype=elem_dtype,
        block=block,
        to_elem_dtype=elem_dtype,
        to_block=block,
        scale_mode="floor",
    )
    for first, second in zip(once, twice, strict=True):
        assert torch.equal(first, second)


def test_under_rceil_a_scale_drops_by_one_where_the_largest_element_is_at_most_224():
    x = normal(2000, 32, seed=10, dtype=torch.float32)
    codes, scales = mx_quantize(x)
    again = mx_requantize(codes, scales)
    largest = table("e4m3")[codes.long()].abs().amax(1, keepdim=True)
    dropped = scales.int() - again[1].int()
    assert torch.equal(dropped == 1, largest <= 224)
    assert ((dropped == 0) | (dropped == 1)).all()
    assert 0 < (dropped == 1).double().mean() < 0.1
    assert torch.equal(again[0][(dropped == 0)[:, 0]], codes[(dropped == 0)[:, 0]])


@every_mode
@every_format
def test_the_transpose_of_squares_is_the_squares_of_the_transpose(elem_dtype, mode):
    for shape in ((64, 96), (70, 45), (1, 33), (31, 32)):
        x = normal(*shape, seed=11, dtype=torch.float32)
        kind = {"elem_dtype": elem_dtype, "block": (32, 32), "scale_mode": mode}
        codes, scales = mx_quantize(x, **kind)
        turned = mx_quantize(x.T, **kind)
        assert torch.equal(turned[0], codes.T)
        assert torch.equal(turned[1], scales.T)


@every_mode
def test_blocks_along_rows_are_blocks_along_columns_of_the_transpose(mode):
    x = normal(70, 45, seed=12, dtype=torch.float32)
    codes, scales = mx_quantize(x, block=(32, 1), scale_mode=mode)
    turned = mx_quantize(x.T, scale_mode=mode)
    assert torch.equal(turned[0], codes.T)
    assert torch.equal(turned[1], scales.T)


def test_a_square_is_32_rows_of_one_scale_each():
    x = normal(64, 96, seed=13, dtype=torch.float32)
    codes, scales = mx_quantize(x, block=(32, 32))
    rows = mx_dequantize(codes, scales.repeat_interleave(32, 0))
    assert torch.equal(rows, mx_dequantize(codes, scales, block=(32, 32)))
    columns = mx_dequantize(codes, scales.repeat_interleave(32, 1), block=(32, 1))
    assert torch.equal(columns, rows)


def test_every_dtype_is_taken_exactly():
    x = normal(33, 70, seed=14, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.float64):
        for found, wanted in zip(mx_quantize(x.to(dtype)), mx_quantize(x), strict=True):
            assert torch.equal(found, wanted)


# -- torchao ---------------------------------------------------------------------------------------

_AO = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": "float4_e2m1fn_x2"}


@pytest.fixture(scope="module")
def to_mx():
    """The cast of torchao's MX formats, and its scale modes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(
            "torchao", reason="needs torchao: pip install --no-deps torchao==0.18.0"
        )
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx

    def cast(x, elem_dtype, mode):
        own = _AO[elem_dtype]
        own = getattr(torch, own) if isinstance(own, str) else own
        scales, codes = to_mx(x, own, 32, ScaleCalculationMode[mode.upper()])
        codes = codes.view(torch.uint8)
        if elem_dtype == "e2m1":
            codes = torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2)
        return codes, scales.view(torch.uint8)

    return cast


@every_mode
@every_format
def test_torchao_gives_the_same_codes_and_scales(to_mx, elem_dtype, mode):
    x = normal(512, 128, seed=15, dtype=torch.float32)
    # Exponents within +-60 keep clear of scale code 0, whose two ends torchao takes differently.
    x = (x * torch.exp2(torch.round(20 * normal(512, 1, seed=16)))).to(torch.bfloat16)
    found = mx_quantize(x, elem_dtype=elem_dtype, scale_mode=mode)
    for own, theirs in zip(found, to_mx(x, elem_dtype, mode), strict=True):
        assert torch.equal(own, theirs)
