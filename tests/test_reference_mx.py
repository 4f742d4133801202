"""MX quantisation of dense and jagged tensors, and the random Hadamard transform."""

import itertools
import math

import pytest
import torch
from mx_oracles import ELEM_DTYPES, normal, quantized, snr
from oracles import offsets_of

from jagbench.mx import BLOCKS, Stream
from jagbench.reference.draws import draws
from jagbench.reference.hadamard import hadamard_matrix, random_hadamard, random_signs
from jagbench.reference.mx import mx_dequantize, mx_quantize, mx_requantize
from jagbench.reference.mx_formats import decode, decode_scales, encode

every_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{b[0]}x{b[1]}")
LENGTHS = [5, 0, 32, 33, 1, 0, 64, 70]


def jagged(padding=6, heads=2, columns=40, seed=0):
    """x `[total + padding, heads, columns]` of loud and quiet sequences, NaN past the end."""
    x = normal(sum(LENGTHS) + padding, heads, columns, seed=seed, dtype=torch.float32)
    for i, (start, stop) in enumerate(bounds()):
        x[start:stop] *= 1000.0 ** (i % 2)
    x[sum(LENGTHS) :] = math.nan
    return x, offsets_of(LENGTHS)


def bounds():
    ends = offsets_of(LENGTHS).tolist()
    return list(itertools.pairwise(ends))


# -- dense -----------------------------------------------------------------------------------------


def test_the_end_of_a_row_and_the_start_of_the_next_share_no_scale():
    x = normal(2, 33, seed=1, dtype=torch.float32)
    loud = x.clone()
    loud[1] *= 1000
    for found, wanted in zip(mx_quantize(loud), mx_quantize(x), strict=True):
        assert found.shape[0] == 2
        assert torch.equal(found[0], wanted[0])
    assert mx_quantize(x)[1].shape == (2, 2)


@every_block
def test_leading_dims_are_matrices_of_their_own(block):
    x = normal(2, 2, 40, 35, seed=2, dtype=torch.float32)
    codes, scales = mx_quantize(x, block=block)
    assert codes.shape == x.shape
    assert scales.shape == (2, 2, math.ceil(40 / block[0]), math.ceil(35 / block[1]))
    for i in range(2):
        for j in range(2):
            alone = mx_quantize(x[i, j], block=block)
            assert torch.equal(alone[0], codes[i, j])
            assert torch.equal(alone[1], scales[i, j])
            back = mx_dequantize(codes, scales, block=block, dtype=torch.float64)[i, j]
            assert torch.equal(back, quantized(x[i, j], "e4m3", block))


def test_one_dim_is_one_row():
    x = normal(70, seed=3, dtype=torch.float32)
    codes, scales = mx_quantize(x)
    assert scales.shape == (3,)
    row = mx_quantize(x[None])
    assert torch.equal(codes, row[0][0])
    assert torch.equal(scales, row[1][0])
    assert torch.equal(mx_dequantize(codes, scales), mx_dequantize(*row)[0])


@every_block
@pytest.mark.parametrize("shape", [(0, 40), (40, 0), (0, 0), (3, 0, 5)])
def test_nothing_has_no_codes_and_no_scales(shape, block):
    x = torch.zeros(shape)
    codes, scales = mx_quantize(x, block=block)
    assert codes.shape == shape
    assert scales.numel() == 0
    assert mx_dequantize(codes, scales, block=block).shape == shape


def test_a_strided_view_has_the_codes_of_its_copy():
    x = normal(96, 2, 64, seed=4, dtype=torch.float32)[:, 1].T
    for found, wanted in zip(mx_quantize(x), mx_quantize(x.contiguous()), strict=True):
        assert torch.equal(found, wanted)


def test_dequantised_values_are_exact_in_bfloat16():
    codes, scales = mx_quantize(normal(64, 64, seed=5, dtype=torch.float32))
    narrow = mx_dequantize(codes, scales, dtype=torch.bfloat16)
    assert torch.equal(narrow.double(), mx_dequantize(codes, scales, dtype=torch.float64))


@pytest.mark.parametrize("elem_dtype", ELEM_DTYPES)
def test_requantising_for_the_other_dim_rounds_twice_and_squares_do_not(elem_dtype):
    # Powers of two beside each other: E4M3 and E5M2 hold a neighbour's scale with their exponents,
    # so what is lost on plain data shows in E2M1 alone; over a wide range it shows in all.
    wide = {"e4m3": 8, "e5m2": 12, "e2m1": 2}[elem_dtype]
    x = normal(256, 256, seed=6, dtype=torch.float32)
    x = x * torch.exp2(torch.round(wide * normal(256, 256, seed=7)))
    kind = {"elem_dtype": elem_dtype}
    once = mx_dequantize(*mx_quantize(x, **kind, block=(32, 1)), **kind, block=(32, 1))
    codes = mx_requantize(
        *mx_quantize(x, **kind), **kind, to_elem_dtype=elem_dtype, to_block=(32, 1)
    )
    twice = mx_dequantize(*codes, **kind, block=(32, 1))
    assert not torch.equal(once, twice)
    error = {name: ((y - x) / x).abs().mean() for name, y in ((1, once), (2, twice))}
    assert error[2] > 1.01 * error[1]
    square = mx_quantize(x, **kind, block=(32, 32))
    again = mx_requantize(
        *square, **kind, block=(32, 32), to_elem_dtype=elem_dtype, to_block=(32, 1)
    )
    assert torch.equal(
        mx_dequantize(*again, **kind, block=(32, 1)),
        mx_dequantize(*square, **kind, block=(32, 32)),
    )


# -- jagged ----------------------------------------------------------------------------------------


@every_block
def test_every_sequence_has_the_codes_and_scales_it_has_alone(block):
    x, offsets = jagged()
    codes, scales = mx_quantize(x, offsets, block=block)
    for i, (start, stop) in enumerate(bounds()):
        first = start if block[0] == 1 else start // 32 + i
        for head in range(2):
            alone = mx_quantize(x[start:stop, head], block=block)
            assert torch.equal(alone[0], codes[start:stop, head])
            assert torch.equal(alone[1], scales[first : first + len(alone[1]), head])
            back = mx_dequantize(codes, scales, offsets, block=block)[start:stop, head]
            assert torch.equal(back, mx_dequantize(*alone, block=block))


@every_block
def test_rows_past_the_last_offset_are_zero_and_unused_scales_are_never_read(block):
    x, offsets = jagged()
    codes, scales = mx_quantize(x, offsets, block=block)
    total = sum(LENGTHS)
    assert (codes[total:] == 0).all()
    back = mx_dequantize(codes, scales, offsets, block=block)
    assert back.isfinite().all()
    assert (back[total:] == 0).all()
    used = torch.zeros(scales.shape[0], dtype=torch.bool)
    for i, (start, stop) in enumerate(bounds()):
        first = start if block[0] == 1 else start // 32 + i
        blocks = slice(first, first + math.ceil((stop - start) / block[0]))
        assert not used[blocks].any()
        used[blocks] = True
    assert used.sum() == sum(math.ceil(n / block[0]) for n in LENGTHS)
    assert (scales[~used] == 0).all()
    scales[~used] = 255
    codes[total:] = 0x7F
    assert torch.equal(mx_dequantize(codes, scales, offsets, block=block), back)


def test_one_row_of_scales_holds_for_any_lengths():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(0, 100, (9,), generator=generator).tolist()
        x = torch.ones(sum(lengths), 4)
        scales = mx_quantize(x, offsets_of(lengths), block=(32, 32))[1]
        assert scales.shape == (sum(lengths) // 32 + 9, 1)
        # 1 is 256 2^-8: as many blocks have code 119 as there are, so none overwrote another.
        assert (scales == 119).sum() == sum(math.ceil(n / 32) for n in lengths)


@every_block
def test_a_batch_without_sequences_or_without_rows_is_legal(block):
    for rows, lengths in ((0, []), (3, []), (0, [0, 0]), (3, [0])):
        x = torch.full((rows, 2, 40), math.nan)
        codes, scales = mx_quantize(x, offsets_of(lengths), block=block)
        assert (codes == 0).all()
        assert (scales == 0).all()
        assert (mx_dequantize(codes, scales, offsets_of(lengths), block=block) == 0).all()


# -- stochastic rounding ---------------------------------------------------------------------------


@every_block
@pytest.mark.parametrize("elem_dtype", ELEM_DTYPES)
def test_a_seed_gives_the_bits_of_its_draws(elem_dtype, block):
    x = normal(3, 40, 37, seed=7, dtype=torch.float32)
    kind = {"elem_dtype": elem_dtype, "block": block, "rounding": "stochastic"}
    codes, scales = mx_quantize(x, **kind, seed=2**35 + 1)
    assert torch.equal(scales, mx_quantize(x, elem_dtype=elem_dtype, block=block)[1])
    random = draws(2**35 + 1, torch.arange(120).view(3, 40), 37, Stream.QUANTISE)
    wide = decode_scales(scales).repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
    assert torch.equal(codes, encode(x / wide[:, :40, :37], elem_dtype, random))
    assert torch.equal(mx_quantize(x, **kind, seed=2**35 + 1)[0], codes)
    assert not torch.equal(mx_quantize(x, **kind, seed=1)[0], codes)


@every_block
def test_jagged_and_dense_rows_have_the_same_draws(block):
    x = normal(64, 2, 40, seed=8, dtype=torch.float32)
    kind = {"block": block, "rounding": "stochastic", "seed": 3}
    whole = mx_quantize(x, offsets_of([64]), **kind)[0]
    split = mx_quantize(x, offsets_of([32, 32]), **kind)[0]
    assert torch.equal(whole, split)
    if block[0] == 1:
        assert torch.equal(whole, mx_quantize(x, **kind)[0])


def test_stochastic_rounding_never_passes_the_neighbouring_values():
    x = normal(200, 64, seed=9, dtype=torch.float32)
    near, scales = mx_quantize(x)
    found, _ = mx_quantize(x, rounding="stochastic", seed=5)
    scaled = x.double() / decode_scales(scales).repeat_interleave(32, 1)
    low = encode(scaled, "e4m3", torch.zeros(x.shape, dtype=torch.int64))
    assert ((found == low) | (found == low + 1)).all()
    assert 0.1 < (found != near).double().mean() < 0.5
    # What was quantised once is representable, and stays.
    once = mx_dequantize(near, scales)
    again = mx_quantize(once, rounding="stochastic", seed=6)
    assert torch.equal(mx_dequantize(*again), once)


def test_the_mean_over_seeds_is_the_input():
    x = normal(4, 32, seed=10, dtype=torch.float32)
    codes = [mx_quantize(x, rounding="stochastic", seed=seed) for seed in range(1000)]
    values = torch.stack([decode(c, "e4m3") * decode_scales(s) for c, s in codes])
    error = (values.mean(0) - x).abs()
    # 4 ulp / (2 sqrt(N)), the bound of a coin at its most uncertain.
    step = values.amax(0) - values.amin(0)
    assert (error <= 4 * step / (2 * math.sqrt(1000))).all()
    nearest = mx_dequantize(*mx_quantize(x)).double()
    assert ((nearest - x).abs() > 4 * step / (2 * math.sqrt(1000))).double().mean() > 0.5


# -- Hadamard --------------------------------------------------------------------------------------

every_size = pytest.mark.parametrize("size", [16, 32, 64])


@every_size
def test_the_matrix_is_sylvesters_and_orthogonal(size):
    matrix = hadamard_matrix(size)
    wanted = torch.ones(1, 1, dtype=torch.float64)
    while len(wanted) < size:
        wanted = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), wanted)
    torch.testing.assert_close(matrix * math.sqrt(size), wanted, rtol=1e-15, atol=0)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size).double(), rtol=0, atol=1e-15)


@every_size
def test_the_transform_cancels_between_two_operands_of_one_seed(size):
    x, y = normal(5, 192, seed=11), normal(192, 7, seed=12)
    left = random_hadamard(x, size=size, seed=9)
    right = random_hadamard(y, size=size, seed=9, dim=0)
    torch.testing.assert_close(left @ right, x @ y, rtol=1e-12, atol=1e-12)
    # On one operand alone, or under another seed, it does not.
    for wrong in (y, random_hadamard(y, size=size, seed=10, dim=0)):
        assert snr(left @ wrong, x @ y) < 3


@every_size
def test_the_transform_keeps_lengths_and_its_inverse_undoes_it(size):
    x = normal(3, 192, 4, seed=13)
    turned = random_hadamard(x, size=size, seed=2, dim=1)
    groups = (3, 192 // size, size, 4)
    torch.testing.assert_close(turned.view(groups).norm(dim=2), x.view(groups).norm(dim=2))
    back = random_hadamard(turned, size=size, seed=2, dim=1, inverse=True)
    torch.testing.assert_close(back, x)
    assert (turned - x).norm() > 0.5 * x.norm()


def test_an_outlier_is_spread_over_its_group_alone():
    x = torch.zeros(96, dtype=torch.float64)
    x[40] = 8.0
    turned = random_hadamard(x, seed=1)
    torch.testing.assert_close(turned[32:64].abs(), torch.full((32,), math.sqrt(2)).double())
    assert (turned[:32] == 0).all()
    assert (turned[64:] == 0).all()


def test_signs_are_seeded_and_balanced():
    signs = torch.stack([random_signs(64, seed) for seed in range(500)])
    assert (signs.abs() == 1).all()
    assert torch.equal(random_signs(64, 3), signs[3])
    assert len(signs.unique(dim=0)) == 500
    # 32000 fair coins: four standard deviations.
    assert signs.sum().abs() < 4 * math.sqrt(signs.numel())
    assert (signs.sum(0).abs() < 4.5 * math.sqrt(500)).all()


# -- refusals --------------------------------------------------------------------------------------

X = torch.zeros(4, 8)
BAD = {
    "elem_dtype": ({"elem_dtype": "e4m3fn"}, "'e4m3fn'"),
    "block": ({"block": (1, 16)}, r"got \(1, 16\)"),
    "block type": ({"block": 32}, "got 32"),
    "scale_mode": ({"scale_mode": "round"}, "'round'"),
    "rounding": ({"rounding": "up"}, "'up'"),
    "no seed": ({"rounding": "stochastic"}, "got None"),
    "idle seed": ({"seed": 3}, "no seed, got 3"),
    "negative seed": ({"rounding": "stochastic", "seed": -1}, "got -1"),
    "large seed": ({"rounding": "stochastic", "seed": 2**63}, str(2**63)),
    "bool seed": ({"rounding": "stochastic", "seed": True}, "got True"),
    "dtype": ({"x": torch.zeros(4, 8, dtype=torch.int32)}, "int32"),
    "no tensor": ({"x": [1.0]}, "list"),
    "scalar": ({"x": torch.zeros(())}, r"at least 1 dims.*\(\)"),
    "one dim of rows": ({"x": torch.zeros(8), "block": (32, 1)}, r"at least 2 dims.*\(8,\)"),
    "one dim of offsets": ({"x": torch.zeros(8), "offsets": offsets_of([8])}, "at least 2 dims"),
    "past the end": ({"offsets": offsets_of([2, 3])}, "end at 5, past the 4 rows"),
    "decreasing": ({"offsets": torch.tensor([0, 3, 2])}, "index 2: 3 to 2"),
    "offsets device": ({"offsets": offsets_of([4]).to("meta")}, "meta"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_do_not_fit_are_refused(name):
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        mx_quantize(**{"x": X, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": torch.zeros(4, 2, dtype=torch.uint8)}, r"must be \(4, 1\), got \(4, 2\)"),
        ({"scales": torch.zeros(4, 1)}, "float32"),
        ({"block": (32, 32)}, r"must be \(1, 1\), got \(4, 1\)"),
        ({"offsets": offsets_of([2, 2]), "block": (32, 1)}, r"must be \(2, 8\), got \(4, 1\)"),
        ({"codes": torch.zeros(4, 8)}, "float32"),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_refused(changes, message):
    codes, scales = mx_quantize(X)
    with pytest.raises(ValueError, match=message):
        mx_dequantize(**{"codes": codes, "scales": scales, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 8}, "got 8"),
        ({"size": None}, "got None"),
        ({"size": 64}, r"\(4, 32\) must be a multiple of 64"),
        ({"dim": 0}, r"dim 0 of x \(4, 32\)"),
        ({"seed": -3}, "got -3"),
        ({"x": torch.zeros(4, 32, dtype=torch.int64)}, "int64"),
    ],
)
def test_a_transform_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        random_hadamard(**{"x": torch.zeros(4, 32), "seed": 0, **changes})
