"""E4M3, E5M2, E2M1 and E8M0 against tables made from their definitions, and every rounding."""

import math

import pytest
import torch
from mx_oracles import ELEM_DTYPES, LAYOUTS, nearest_codes, table
from scipy import stats

from jagbench.reference.draws import draws, philox
from jagbench.reference.mx_formats import (
    FORMATS,
    decode,
    decode_scales,
    encode,
    pack_e2m1,
    unpack_e2m1,
)

TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
EVERY_16_BITS = torch.arange(-(2**15), 2**15, dtype=torch.int16)


def all_codes(elem_dtype):
    return torch.arange(1 << FORMATS[elem_dtype].bits, dtype=torch.uint8)


def same(found, wanted):
    """Equal values, signs of zeros too, NaN where NaN."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    number = ~wanted.isnan()
    assert torch.equal(torch.signbit(found)[number], torch.signbit(wanted)[number])


# -- every code ------------------------------------------------------------------------------------


@pytest.mark.parametrize("elem_dtype", ELEM_DTYPES)
def test_every_code_has_the_value_of_the_definition(elem_dtype):
    same(decode(all_codes(elem_dtype), elem_dtype), table(elem_dtype))


@pytest.mark.parametrize("elem_dtype", TORCH)
def test_every_code_has_the_value_torch_gives_it(elem_dtype):
    codes = all_codes(elem_dtype)
    wanted = codes.view(TORCH[elem_dtype]).to(torch.float64)
    torch.testing.assert_close(decode(codes, elem_dtype), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("elem_dtype", ELEM_DTYPES)
def test_every_finite_code_survives_decoding_and_encoding(elem_dtype):
    codes = all_codes(elem_dtype)
    values = decode(codes, elem_dtype)
    finite = values.isfinite()
    assert finite.sum() == {"e4m3": 254, "e5m2": 248, "e2m1": 16}[elem_dtype]
    assert torch.equal(encode(values, elem_dtype)[finite], codes[finite])
    # Nor does stochastic rounding move what is representable, whatever the random bits.
    for bits in (0, 1, 2**31, 2**32 - 1):
        random = torch.full(values.shape, bits)
        assert torch.equal(encode(values, elem_dtype, random)[finite], codes[finite])


@pytest.mark.parametrize("elem_dtype", ELEM_DTYPES)
def test_a_format_knows_its_own_limits(elem_dtype):
    form, (_, mantissa_bits, bias, largest) = FORMATS[elem_dtype], LAYOUTS[elem_dtype]
    assert form.largest == largest == table(elem_dtype)[form.largest_code]
    assert form.smallest_exponent == 1 - bias
    assert form.largest_exponent == math.floor(math.log2(largest))
    assert form.mantissa_bits == mantissa_bits


def test_every_scale_code_is_a_power_of_two_and_the_last_is_nan():
    values = decode_scales(torch.arange(256, dtype=torch.uint8))
    wanted = torch.tensor([2.0 ** (code - 127) for code in range(255)], dtype=torch.float64)
    assert torch.equal(values[:255], wanted)
    assert values[0] == 2.0**-127
    assert values[255].isnan()


def test_two_e2m1_codes_share_a_byte_low_half_first():
    codes = torch.tensor([[1, 15, 7, 8]], dtype=torch.uint8)
    assert pack_e2m1(codes).tolist() == [[0xF1, 0x87]]
    assert torch.equal(unpack_e2m1(pack_e2m1(codes)), codes)


# -- rounding to nearest ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("elem_dtype", ELEM_DTYPES)
def test_every_16_bit_number_goes_to_the_nearest_value(elem_dtype, dtype):
    x = EVERY_16_BITS.view(dtype)
    x = x[x.isfinite()]
    assert torch.equal(encode(x, elem_dtype), nearest_codes(x, elem_dtype))


@pytest.mark.parametrize("elem_dtype", ELEM_DTYPES)
def test_midpoints_go_to_even_codes_and_their_neighbours_to_the_nearer(elem_dtype):
    values = table(elem_dtype)[: FORMATS[elem_dtype].largest_code + 1]
    middle = ((values[1:] + values[:-1]) / 2).to(torch.float32)
    up = torch.nextafter(middle, torch.tensor(math.inf))
    down = torch.nextafter(middle, torch.tensor(0.0))
    low = torch.arange(len(middle))
    assert torch.equal(encode(middle, elem_dtype).long(), low + low % 2)
    assert torch.equal(encode(down, elem_dtype).long(), low)
    assert torch.equal(encode(up, elem_dtype).long(), low + 1)
    sign = len(table(elem_dtype)) // 2
    assert torch.equal(encode(-up, elem_dtype), encode(up, elem_dtype) | sign)


@pytest.mark.parametrize("elem_dtype", TORCH)
def test_torch_rounds_alike_inside_the_range(elem_dtype):
    x = EVERY_16_BITS.view(torch.bfloat16).to(torch.float32)
    x = x[x.abs() <= FORMATS[elem_dtype].largest]
    assert torch.equal(encode(x, elem_dtype), x.to(TORCH[elem_dtype]).view(torch.uint8))


@pytest.mark.parametrize(
    ("value", "wanted"), [(2**-10, 0.0), (1.5 * 2**-10, 2**-9), (0.0015, 2**-9), (2**-9, 2**-9)]
)
def test_small_numbers_go_to_the_right_subnormal(value, wanted):
    x = torch.tensor([value, -value])
    assert decode(encode(x, "e4m3"), "e4m3").tolist() == [wanted, -wanted]


@pytest.mark.parametrize("elem_dtype", ELEM_DTYPES)
def test_what_is_too_large_saturates(elem_dtype):
    largest = FORMATS[elem_dtype].largest
    x = torch.tensor([largest, 1.01 * largest, 2 * largest, 1e30, math.inf], dtype=torch.float64)
    for random in (None, torch.full(x.shape, 2**32 - 1)):
        assert (decode(encode(x, elem_dtype, random), elem_dtype) == largest).all()
        assert (decode(encode(-x, elem_dtype, random), elem_dtype) == -largest).all()


def test_nan_has_a_code_of_its_own_where_there_is_one():
    nan = torch.tensor([math.nan])
    assert decode(encode(nan, "e4m3"), "e4m3").isnan()
    assert decode(encode(nan, "e5m2"), "e5m2").isnan()
    assert decode(encode(nan, "e2m1"), "e2m1").item() == 6.0


@pytest.mark.parametrize("elem_dtype", ELEM_DTYPES)
def test_numbers_far_below_the_smallest_become_zero_with_their_sign(elem_dtype):
    x = torch.tensor([5e-324, 1e-310, 1e-200, 1e-30, 0.0], dtype=torch.float64)
    assert (encode(x, elem_dtype) == 0).all()
    assert (encode(-x, elem_dtype) == len(table(elem_dtype)) // 2).all()


# -- stochastic rounding ---------------------------------------------------------------------------


@pytest.mark.parametrize("elem_dtype", ELEM_DTYPES)
def test_of_all_random_numbers_the_exact_share_rounds_up(elem_dtype):
    values = table(elem_dtype)[: FORMATS[elem_dtype].largest_code + 1]
    low = torch.arange(len(values) - 1)
    every = torch.arange(256) << 24
    for part in (0, 1, 100, 128, 255):
        x = values[:-1] + (values[1:] - values[:-1]) * part / 256
        codes = encode(x[:, None].expand(-1, 256), elem_dtype, every.expand(len(x), -1)).long()
        up = codes - low[:, None]
        assert ((up == 0) | (up == 1)).all()
        assert (up.sum(1) == part).all()
        # A low 24 bits of ones add less than one part in 256.
        most = encode(
            x[:, None].expand(-1, 256), elem_dtype, (every + 2**24 - 1).expand(len(x), -1)
        )
        assert ((most.long() - low[:, None]).sum(1) == part).all()


def p_value(x, codes, elem_dtype):
    """Of a chi-squared test that codes round x up as often as is due; none may be representable.

    x `[values]`, codes `[..., draws, values]`; a p-value for each of `[...]`.
    """
    values = table(elem_dtype)
    low = encode(x, elem_dtype, torch.zeros(x.shape, dtype=torch.int64)).long()
    step = values[low + 1] - values[low]
    share = (x - values[low]) / step
    count = codes.shape[-2]
    up = (codes.long() - low).sum(-2).double()
    statistic = (up - count * share).square() / (count * share * (1 - share))
    return torch.as_tensor(stats.chi2.sf(statistic.sum(-1).numpy(), len(x)))


@pytest.mark.parametrize("elem_dtype", ELEM_DTYPES)
def test_stochastic_rounding_is_unbiased_for_999_of_1000_seeds_and_nearest_for_none(elem_dtype):
    x = torch.linspace(0.013, 5.9, 16, dtype=torch.float64) + 0.001
    count = 400
    rows = torch.arange(count)
    random = torch.stack([draws(seed, rows, len(x), 0) for seed in range(1000)])
    codes = encode(x.expand(random.shape), elem_dtype, random)
    assert (p_value(x, codes, elem_dtype) > 1e-4).sum() >= 999
    assert p_value(x, encode(x.expand(count, -1), elem_dtype), elem_dtype) < 1e-100
    always_down = encode(x.expand(count, -1), elem_dtype, torch.zeros(count, len(x)).long())
    assert p_value(x, always_down, elem_dtype) < 1e-100
    # A bias of a twentieth of a step is seen too.
    low = encode(x, elem_dtype, torch.zeros(x.shape, dtype=torch.int64)).long()
    step = table(elem_dtype)[low + 1] - table(elem_dtype)[low]
    biased = encode((x + 0.05 * step).expand(random.shape), elem_dtype, random)
    assert (p_value(x, biased, elem_dtype) < 1e-4).double().mean() > 0.9


def test_a_mean_far_below_the_smallest_step_is_kept():
    x = torch.full((200_000, 4), 2**-9 / 1000)
    up = encode(x, "e4m3", draws(7, torch.arange(len(x)), 4, 0)).long().sum().item()
    assert abs(up - 800) < 4 * math.sqrt(800)


# -- random numbers --------------------------------------------------------------------------------

# Known answers of the authors' library (Random123, kat_vectors).
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), ANSWERS)
def test_philox_gives_its_known_answers(counter, key, wanted):
    words = philox(tuple(torch.tensor(word) for word in counter), key)
    assert tuple(word.item() for word in words) == wanted


def test_a_draw_depends_on_seed_stream_row_and_column_alone():
    rows = torch.tensor([[0, 1], [2**32 + 1, 5]])
    found = draws(2**40 + 3, rows, 7, 4)
    for at in ((0, 1), (1, 0)):
        row = rows[at].item()
        for column in range(7):
            counter = (column // 4, row % 2**32, row // 2**32, 4)
            words = philox(tuple(torch.tensor(word) for word in counter), (3, 2**8))
            assert found[at][column] == words[column % 4]
    assert found.unique().numel() == found.numel()
    assert not torch.equal(found, draws(2**40 + 4, rows, 7, 4))
    assert not torch.equal(found, draws(2**40 + 3, rows, 7, 5))


# -- refusals --------------------------------------------------------------------------------------


def test_codes_that_are_none_are_refused():
    with pytest.raises(ValueError, match="int32"):
        decode(torch.zeros(2, dtype=torch.int32), "e4m3")
    with pytest.raises(ValueError, match="below 16, got 16"):
        decode(torch.tensor([3, 16], dtype=torch.uint8), "e2m1")
    with pytest.raises(ValueError, match="float32"):
        decode_scales(torch.zeros(2))
    with pytest.raises(ValueError, match="'e3m4'"):
        encode(torch.zeros(2), "e3m4")
    with pytest.raises(ValueError, match=r"\(3,\)"):
        pack_e2m1(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="int64"):
        unpack_e2m1(torch.zeros(3, dtype=torch.int64))
