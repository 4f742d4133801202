"""Weights quantised shard by shard are the weight quantised whole, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import shard_ranks as ranks
import torch
from mx_oracles import normal
from shard_ranks import TRUTH
from torch import Tensor

from jagbench.impl.precision import (
    ShardFormat,
    dequantize_weight,
    join_shards,
    payload_bits,
    quantize_shard,
    recipe_named,
    rows_of_shards,
)
from jagbench.impl.precision.layers import OWN
from jagbench.impl.precision.shards import Quantized
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE
from jagbench.reference.mx import mx_dequantize

BLOCKS = pytest.mark.parametrize("block", [SQUARE, ALONG_COLUMNS], ids=["32x32", "1x32"])
MODES = pytest.mark.parametrize("scale_mode", ["rceil", "floor", "ceil", "even"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def weight(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Blocks of different sizes, with outliers that make others subnormal."""
    made = normal(rows, columns, seed=rows).float()
    ranks.spread(made)
    return made.to(dtype)


def form(block: tuple[int, int] = SQUARE, **options: str) -> ShardFormat:
    return ShardFormat(block=block, functions=TRUTH, **options)


# -- shards and the whole --------------------------------------------------------------------------


def check_order_of_gather_and_quantise(
    join: Callable[[list[Quantized]], Quantized],
    own: ShardFormat,
    sizes: list[int],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Quantising shards of these sizes, then joining, is quantising the whole weight."""
    whole = weight(sum(sizes), 72, dtype)
    found = join([quantize_shard(shard, own) for shard in whole.split(sizes)])
    for got, wanted in zip(found, quantize_shard(whole, own), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@DTYPES
@MODES
@BLOCKS
def test_quantising_before_the_gather_is_quantising_after_it(block, scale_mode, dtype):
    own = form(block, scale_mode=scale_mode)
    check_order_of_gather_and_quantise(lambda s: join_shards(s, block), own, [64, 64, 64], dtype)


@pytest.mark.parametrize("elem_dtype", ["e5m2", "e2m1"])
@BLOCKS
def test_quantising_before_the_gather_is_quantising_after_it_in_other_types(block, elem_dtype):
    own = form(block, elem_dtype=elem_dtype)
    check_order_of_gather_and_quantise(lambda s: join_shards(s, block), own, [32, 32])


@pytest.mark.parametrize(
    ("block", "sizes"),
    [(ALONG_COLUMNS, [33, 33, 31]), (ALONG_COLUMNS, [1, 1]), (SQUARE, [64, 64, 40])],
)
def test_shards_of_unequal_size_join_where_no_block_is_cut(block, sizes):
    check_order_of_gather_and_quantise(lambda s: join_shards(s, block), form(block), sizes)


def test_our_kernel_quantises_shards_as_the_whole():
    own = ShardFormat()
    check_order_of_gather_and_quantise(lambda s: join_shards(s, SQUARE), own, [32, 32])


def reversed_order(shards: list[Quantized]) -> Quantized:
    """Wrong: the last rank's rows first."""
    return join_shards(shards[::-1], SQUARE)


def neighbours_scales(shards: list[Quantized]) -> Quantized:
    """Wrong: every shard with the scales of the next."""
    turned = [scales for _, scales in shards]
    turned = [*turned[1:], turned[0]]
    return join_shards([(c, s) for (c, _), s in zip(shards, turned, strict=True)], SQUARE)


def first_scales(shards: list[Quantized]) -> Quantized:
    """Wrong: every shard with the scales of the first."""
    return join_shards([(codes, shards[0][1]) for codes, _ in shards], SQUARE)


def interleaved(shards: list[Quantized]) -> Quantized:
    """Wrong: rows of the ranks in turn, as if a rank had every second row."""
    codes = torch.stack([c for c, _ in shards], 1).flatten(0, 1)
    return codes, torch.cat([s for _, s in shards])


@pytest.mark.parametrize("join", [reversed_order, neighbours_scales, first_scales, interleaved])
def test_a_wrong_join_is_caught(join):
    with pytest.raises(AssertionError):
        check_order_of_gather_and_quantise(join, form(), [32, 32, 32])


def test_shards_that_cut_squares_would_not_join_to_the_whole():
    """Wrong: no look at the rows; 48 of each rank have two rows of squares, the whole has three."""

    def unchecked(shards: list[Quantized]) -> Quantized:
        return torch.cat([c for c, _ in shards]), torch.cat([s for _, s in shards])

    with pytest.raises(AssertionError):
        check_order_of_gather_and_quantise(unchecked, form(), [48, 48])


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "world_size", "block", "wanted"),
    [(128, 2, SQUARE, 64), (96, 3, SQUARE, 32), (31, 1, SQUARE, 31), (70, 2, ALONG_COLUMNS, 35)],
)
def test_shards_of_whole_blocks_have_equal_rows(rows, world_size, block, wanted):
    assert rows_of_shards(rows, world_size, block) == wanted


@pytest.mark.parametrize(
    ("rows", "world_size", "block", "says"),
    [
        (96, 2, SQUARE, "96 rows over 2 ranks has shards of 48 rows; .* 32 x 32 .* 64 or 128"),
        (31, 2, SQUARE, "31 rows over 2 ranks .* 32: 64 rows would do"),
        (160, 2, SQUARE, "shards of 80 rows; .* 128 or 192 rows"),
        (127, 4, SQUARE, "shards of 32 rows and fewer; .* 128 rows would do"),
        (63, 2, ALONG_COLUMNS, "63 rows over 2 ranks has shards of 32 rows and fewer; .* 62 or 64"),
        (64, 0, SQUARE, "no shards of 64 rows over 0 ranks"),
    ],
)  # fmt: skip
def test_shards_that_are_no_whole_blocks_are_refused(rows, world_size, block, says):
    with pytest.raises(ValueError, match=says):
        rows_of_shards(rows, world_size, block)


@pytest.mark.parametrize(("block", "bits"), [(SQUARE, 8 + 8 / 1024), (ALONG_COLUMNS, 8.25)])
def test_the_payload_counts_codes_and_scales(block, bits):
    assert payload_bits(64, 96, block) == bits
    for rows, columns in ((64, 96), (64, 72), (32, 8)):
        sent = sum(
            t.numel() * t.itemsize for t in quantize_shard(weight(rows, columns), form(block))
        )
        assert payload_bits(rows, columns, block) == 8 * sent / (rows * columns)
    with pytest.raises(ValueError, match="a shard of 0 x 96 has no elements"):
        payload_bits(0, 96, block)


def test_shards_that_do_not_fit_are_not_joined():
    codes, scales = quantize_shard(weight(48, 64), form())
    other = quantize_shard(weight(32, 32), form())
    with pytest.raises(ValueError, match="no shard"):
        join_shards([], SQUARE)
    with pytest.raises(ValueError, match="shard 0 of 2 has 48 rows: it ends inside a block"):
        join_shards([(codes, scales)] * 2, SQUARE)
    with pytest.raises(ValueError, match=r"shard 1 must be \[rows, 64\], got \(32, 32\)"):
        join_shards([(codes[:32], scales[:1]), other], SQUARE)
    with pytest.raises(ValueError, match=r"shard 0: .* must be \(2, 2\), got \(1, 2\)"):
        join_shards([(codes, scales[:1])], SQUARE)
    with pytest.raises(ValueError, match=r"a shard is \[rows, columns\], got \(64,\)"):
        quantize_shard(torch.ones(64), form())
    with pytest.raises(ValueError, match="shards are quantised in blocks"):
        ShardFormat(block=ALONG_ROWS)


# -- quantised again by the layer ------------------------------------------------------------------


@DTYPES
@MODES
@BLOCKS
def test_values_of_codes_are_exact_and_quantised_again_stay(block, scale_mode, dtype):
    """From the smallest number of the dtype on, subnormal blocks, zeros and what is no number."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    w = weight(192, 96, dtype)
    w[:32, :32] = (w[:32, :32].double() * smallest * 40).to(dtype)
    w[32:64, :32] = (w[32:64, :32].double() * smallest * 3000).to(dtype)
    w[64:96] = 0
    w[100, 5], w[130, 70] = float("nan"), float("inf")
    own = form(block, scale_mode=scale_mode)
    codes, scales = quantize_shard(w, own)
    values = dequantize_weight((codes, scales), own, dtype)
    exact = mx_dequantize(codes, scales, block=block, dtype=torch.float64)
    torch.testing.assert_close(values.double(), exact, rtol=0, atol=0, equal_nan=True)
    again = dequantize_weight(quantize_shard(values, own), own, dtype)
    torch.testing.assert_close(again, values, rtol=0, atol=0, equal_nan=True)


def test_a_number_at_the_end_of_the_range_rounds_to_infinity():
    w = torch.full((32, 32), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    values = dequantize_weight(quantize_shard(w, form()), form(), torch.bfloat16)
    assert torch.isposinf(values).all()


@pytest.mark.parametrize(
    ("recipe", "functions", "dtype"),
    [("mxfp8", TRUTH, torch.bfloat16), ("mxfp8_wgrad_mx", TRUTH, torch.bfloat16),
     ("mxfp8_floor", TRUTH, torch.bfloat16), ("mxfp8", OWN, torch.float32)],
    ids=["default", "weight-gradient", "floor", "our-kernels"],
)  # fmt: skip
def test_a_layer_on_the_values_of_codes_has_the_bits_of_the_layer(recipe, functions, dtype):
    own = recipe_named(recipe).linear.recipe
    w = weight(64, 96, dtype)
    how = ShardFormat.of(recipe_named(recipe).linear, functions)
    values = dequantize_weight(quantize_shard(w, how), how, dtype)
    assert not torch.equal(values, w)
    found = []
    for given in (w, values):
        x = normal(40, 96, seed=2).to(dtype).requires_grad_()
        given = given.requires_grad_()
        y = functions.linear(x, given, recipe=own)
        upstream = normal(40, 64, seed=4).to(dtype)
        found.append((y, *torch.autograd.grad(y, (x, given), upstream)))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
