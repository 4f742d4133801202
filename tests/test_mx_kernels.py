"""Our MX kernels give the bits of the truth: every mode, type, block, rounding, and edge."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from mx_bits import (
    DEVICE,
    LENGTHS,
    assert_bits,
    assert_same_values,
    every_block,
    every_dtype,
    every_elem_dtype,
    wide_range,
)
from mx_oracles import MODES, normal
from oracles import offsets_of
from torch import Tensor

from jagbench.impl.kernels import mx_launch
from jagbench.impl.kernels.mx import mx_dequantize, mx_quantize
from jagbench.impl.kernels.mx_launch import MxTiles
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE, Stream
from jagbench.reference import mx as truth
from jagbench.reference.hadamard import random_hadamard, random_signs
from jagbench.reference.mx_blocks import Blocks, quantize
from jagbench.reference.mx_formats import FORMATS, decode


def assert_like_the_truth(x: Tensor, offsets: Tensor | None = None, **options: Any) -> None:
    there = None if offsets is None else offsets.to(DEVICE)
    found = mx_quantize(x.to(DEVICE), there, **options)
    assert_bits(found, truth.mx_quantize(x, offsets, **options))


def edges(elem_dtype: str, dtype: torch.dtype) -> Tensor:
    """Rows of 32: every midpoint and code of a binade, its neighbours, and what is special."""
    form = FORMATS[elem_dtype]
    finite = decode(torch.arange(form.largest_code + 1, dtype=torch.uint8), elem_dtype)
    points = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, torch.tensor([form.largest * 1.5])])
    points = points.to(dtype).float()
    near = torch.cat([points, points.nextafter(points + 1), points.nextafter(-points - 1)])
    rows = near.to(dtype).float()
    rows = torch.nn.functional.pad(rows, (0, -len(rows) % 31)).view(-1, 31)
    # The first of a row fixes its scale at 1, twice or half that.
    first = torch.tensor([1.0, 2.0, 0.5])[torch.arange(len(rows)) % 3, None] * form.largest
    rows = torch.cat([first, rows * torch.tensor([1.0, -1.0])[torch.arange(31) % 2]], 1)
    least, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    special = torch.zeros(12, 32)
    special[1] = -0.0
    special[2, 5], special[3, 5], special[4, 5] = math.nan, math.inf, -math.inf
    special[5, 3:9] = torch.tensor([math.nan, -1.0, math.inf, 3.0, -math.nan, 0.0])
    special[6], special[7] = least / 4, -least
    special[8], special[9, 7] = most, -most
    special[10] = torch.linspace(-1, 1, 32) * least
    special[11] = torch.exp2(torch.linspace(-20, 5, 32).round()) * least
    return torch.cat([rows, special]).to(dtype)


# -- bits ------------------------------------------------------------------------------------------


@every_dtype
@every_elem_dtype
@pytest.mark.parametrize("mode", MODES)
def test_midpoints_their_neighbours_and_what_is_special_have_the_bits_of_the_truth(
    dtype, elem_dtype, mode
):
    x = edges(elem_dtype, dtype)
    assert_like_the_truth(x, elem_dtype=elem_dtype, scale_mode=mode)
    assert_like_the_truth(
        x, elem_dtype=elem_dtype, scale_mode=mode, rounding="stochastic", seed=2**62 + 12345
    )


@every_elem_dtype
@pytest.mark.parametrize("mode", MODES)
def test_every_exponent_of_a_largest_magnitude_has_the_scale_of_the_truth(elem_dtype, mode):
    """All of float32's, with fractions about every mode's turning point, subnormals too."""
    form = FORMATS[elem_dtype]
    turns = (form.largest_fraction, 1 - 0.5 ** (form.mantissa_bits + 1), 0.0)
    fractions = [int(turn * 2**23) + step for turn in turns for step in (-1, 0, 1)]
    fractions = sorted({f for f in fractions if 0 <= f < 2**23} | {2**23 - 1})
    bits = torch.arange(255)[:, None] * 2**23 + torch.tensor(fractions)
    x = bits.to(torch.int32).view(torch.float32).T.contiguous()
    assert_like_the_truth(x[:, :, None].expand(-1, -1, 2).flatten(0, 1), elem_dtype=elem_dtype,
                          scale_mode=mode)  # fmt: skip


@every_elem_dtype
@every_dtype
@every_block
def test_uneven_matrices_have_the_bits_of_the_truth(block, dtype, elem_dtype):
    x = wide_range(2, 71, 83, spread=4).to(dtype)
    assert_like_the_truth(x, block=block, elem_dtype=elem_dtype)
    options = {"rounding": "stochastic", "seed": 2**40 + 7, "stream": Stream.GRADIENT_FOR_INPUT}
    found = mx_quantize(x.to(DEVICE), block=block, elem_dtype=elem_dtype, **options)
    random = truth.random_bits(x, 2**40 + 7, Stream.GRADIENT_FOR_INPUT)
    assert_bits(found, quantize(x, Blocks(elem_dtype, block), random))


@every_block
@pytest.mark.parametrize("shape", [(1, 1), (33, 1), (1, 33), (32, 64), (65, 40), (3, 130)])
def test_every_shape_has_the_bits_of_the_truth(block, shape):
    assert_like_the_truth(wide_range(*shape), block=block, scale_mode="floor")


@every_block
@pytest.mark.parametrize("shape", [(0, 40), (40, 0), (0, 0), (3, 0, 5)])
def test_nothing_has_no_codes_and_no_scales(block, shape):
    assert_like_the_truth(torch.zeros(shape), block=block)


def test_one_dim_is_one_row():
    assert_like_the_truth(normal(70, dtype=torch.float32))


@every_block
def test_a_strided_view_has_the_codes_of_its_copy(block):
    x = normal(9, 3, 64, dtype=torch.float32).to(DEVICE)
    for view in (x[:, 1], x[:, 1].T, x[::2].transpose(0, 1), x[..., ::2], x[5:, :, 3:50]):
        wanted = truth.mx_quantize(view.cpu().contiguous(), block=block)
        assert_bits(mx_quantize(view, block=block), wanted)


@every_block
@pytest.mark.parametrize(
    ("rounding", "padding", "offsets_dtype"),
    [("nearest", 0, torch.int64), ("nearest", 70, torch.int32), ("stochastic", 6, torch.int64)],
)
def test_sequences_have_the_bits_of_the_truth_and_padding_is_zero(
    block, rounding, padding, offsets_dtype
):
    seed = None if rounding == "nearest" else 11
    x = wide_range(sum(LENGTHS) + padding, 2, 40)
    x[sum(LENGTHS) :] = math.nan
    offsets = offsets_of(LENGTHS).to(offsets_dtype)
    assert_like_the_truth(x, offsets, block=block, rounding=rounding, seed=seed)
    found = truth.mx_quantize(x, offsets, block=block)
    there = (t.to(DEVICE) for t in (*found, offsets))
    back = mx_dequantize(*there, block=block)
    assert_same_values(back, truth.mx_dequantize(*found, offsets, block=block))


@every_block
def test_a_batch_without_sequences_or_without_rows_is_legal(block):
    for rows, lengths in ((0, []), (3, []), (0, [0, 0]), (3, [0]), (40, [0, 0, 0])):
        x = torch.full((rows, 2, 40), math.nan)
        assert_like_the_truth(x, offsets_of(lengths), block=block)


def test_random_lengths_have_the_scales_of_the_truth_where_they_belong():
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 2, 5, 9):
        lengths = torch.randint(0, 70, (batch,), generator=generator).tolist()
        x = normal(sum(lengths) + 5, 8, seed=batch, dtype=torch.float32)
        assert_like_the_truth(x, offsets_of(lengths), block=SQUARE)


@every_block
def test_tiles_change_no_bit(block, monkeypatch):
    x, offsets = wide_range(170, 330, spread=4), offsets_of([70, 0, 91])
    wanted = [truth.mx_quantize(x, o, block=block, rounding="stochastic", seed=3)
              for o in (None, offsets)]  # fmt: skip
    rows = (32, 64) if block[0] == 1 else (32,)
    for tiles in [MxTiles(r, c, 4) for r in rows for c in (128, 512)]:
        monkeypatch.setattr(mx_launch, "mx_tiles", lambda *_, tiles=tiles: tiles)
        for o, bits in zip((None, offsets), wanted, strict=True):
            there = None if o is None else o.to(DEVICE)
            found = mx_quantize(x.to(DEVICE), there, block=block, rounding="stochastic", seed=3)
            assert_bits(found, bits)


# -- stochastic rounding ---------------------------------------------------------------------------


def test_seeds_and_streams_have_numbers_of_their_own():
    x = normal(4, 64, dtype=torch.float32).to(DEVICE)
    kind = {"rounding": "stochastic"}
    found = [mx_quantize(x, **kind, seed=s)[0] for s in (0, 1, 2**32, 2**31, 2**63 - 1)]
    found += [mx_quantize(x, **kind, seed=0, stream=s)[0] for s in list(Stream)[1:]]
    assert len({tuple(codes.flatten().tolist()) for codes in found}) == len(found)
    assert_bits((mx_quantize(x, **kind, seed=2**63 - 1)[0],), (found[4],))


def test_rows_beyond_two_to_the_32_have_the_upper_word_of_their_number():
    """A view of one row, many times: the row's number alone differs."""
    x = normal(1, 32, dtype=torch.float32)
    source, codes = (t.expand(3, 1, 32) for t in (x, torch.zeros(1, 32, dtype=torch.uint8)))
    target = codes.contiguous().to(DEVICE)
    scales = torch.zeros(3, 1, 1, dtype=torch.uint8, device=DEVICE)

    class Far(mx_launch.Matrices):
        draw_strides = (2**32 + 5, 1)

    form = mx_launch.Format("e4m3", ALONG_COLUMNS, seed=9)
    mx_launch.launch_quantize(Far(source.to(DEVICE), None), Far(target, None), scales, form)
    rows = torch.arange(3)[:, None] * (2**32 + 5)
    random = truth.draws(9, rows, 32, Stream.QUANTISE)
    assert_bits((target, scales), quantize(source, Blocks("e4m3", ALONG_COLUMNS), random))


# -- Hadamard --------------------------------------------------------------------------------------


def butterflied(x: Tensor, size: int, seed: int) -> Tensor:
    """Float32 butterflies along the last dim from distance 1 up, then the factor: our order."""
    groups = x.float().reshape(-1, size) * random_signs(size, seed).float()
    near = 1
    while near < size:
        pairs = groups.view(-1, size // (2 * near), 2, near)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        groups = torch.stack([a + b, a - b], 2).view(-1, size)
        near *= 2
    return (groups * torch.tensor(1 / math.sqrt(size), dtype=torch.float32)).view(x.shape)


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("block", [ALONG_COLUMNS, ALONG_ROWS])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_transform_comes_first_and_has_the_bits_of_its_butterflies(size, block, rounding):
    x = normal(192, 128, seed=1).to(torch.bfloat16)
    along = block == ALONG_COLUMNS
    options = {"rounding": rounding, "seed": None if rounding == "nearest" else 4}
    found = mx_quantize(x.to(DEVICE), block=block, hadamard=size, hadamard_seed=77, **options)
    turned = butterflied(x, size, 77) if along else butterflied(x.T.contiguous(), size, 77).T
    assert_bits(found, truth.mx_quantize(turned, block=block, **options))
    # The order of the truth's sums is its own: the same numbers but for their last bits.
    exact = random_hadamard(x.double(), size=size, seed=77, dim=-1 if along else 0)
    torch.testing.assert_close(turned.double(), exact, rtol=1e-5, atol=2e-6)
    theirs = truth.mx_quantize(exact, block=block, **options)
    assert (found[0].cpu() != theirs[0]).double().mean() < 1e-3
    torch.testing.assert_close(found[1].cpu(), theirs[1], rtol=0, atol=1)


@pytest.mark.parametrize("block", [ALONG_COLUMNS, ALONG_ROWS])
def test_sums_without_rounding_give_the_bits_of_the_truths_transform(block):
    """Whole numbers, and a factor that is a power of two."""
    x = torch.randint(-8, 9, (64, 64), generator=torch.Generator().manual_seed(2)).float()
    found = mx_quantize(x.to(DEVICE), block=block, hadamard=16, hadamard_seed=5)
    dim = -1 if block == ALONG_COLUMNS else 0
    turned = random_hadamard(x, size=16, seed=5, dim=dim)
    assert_bits(found, truth.mx_quantize(turned, block=block))
