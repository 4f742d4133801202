"""A projection that quantises gives the codes of the product and then the quantisation."""

from __future__ import annotations

import pytest
import torch
from mx_bits import DEVICE, LENGTHS, assert_bits
from mx_oracles import MODES, normal
from oracles import offsets_of

from jagbench.impl.kernels import mx_projection_launch
from jagbench.impl.kernels.mx import mx_quantize
from jagbench.impl.kernels.mx_matmul_launch import ProductTiles
from jagbench.impl.kernels.mx_projection import mx_projection
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE
from jagbench.reference.mx import mx_quantize as quantize
from jagbench.reference.mx_projection import mx_projection as reference

SHAPES = pytest.mark.parametrize("block", [ALONG_COLUMNS, SQUARE], ids=["1x32", "32x32"])
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d)[6:])


def whole_numbers(*shape, seed=0, most=4):
    """Small whole numbers, whose sums are exact in float32 in every order."""
    return normal(*shape, seed=seed).mul(1.5).round().clamp(-most, most).float()


def operands(rows, inside, outside, dtype=torch.bfloat16):
    x, weight = whole_numbers(rows, inside), whole_numbers(outside, inside, seed=1)
    # Rows and columns of very different sizes, so that blocks have scales of their own.
    x = x * torch.exp2(torch.arange(rows) % 7.0 - 3)[:, None]
    weight = weight * torch.exp2(torch.arange(outside) // 8 % 5.0)[:, None]
    return x.to(dtype), weight.to(dtype), whole_numbers(outside, seed=2).to(dtype)


def ours(x, weight, offsets=None, bias=None, **options):
    there = [None if t is None else t.to(DEVICE) for t in (x, weight, offsets, bias)]
    return mx_projection(*there[:3], bias=there[3], **options)


@SHAPES
@every_dtype
def test_exact_sums_have_the_codes_of_the_truth_bit_for_bit(dtype, block):
    x, weight, bias = operands(70, 48, 72, dtype)
    wanted = reference(x, weight, bias=bias, block=block)
    assert_bits(ours(x, weight, bias=bias, block=block), wanted)


@SHAPES
@pytest.mark.parametrize("heads", [1, 2])
def test_sequences_are_quantised_each_by_itself(heads, block):
    x, weight, bias = operands(sum(LENGTHS) + 9, 40, 64)
    x[sum(LENGTHS) :] = torch.nan
    options = {"block": block, "heads": heads}
    wanted = reference(x, weight, offsets_of(LENGTHS), bias=bias.float(), **options)
    found = ours(x, weight, offsets_of(LENGTHS), bias.float(), **options)
    assert_bits(found, wanted)
    assert not found[0][sum(LENGTHS) :].any()


@pytest.mark.parametrize("elem_dtype", ["e4m3", "e5m2", "e2m1"])
@pytest.mark.parametrize("mode", MODES)
def test_every_type_and_mode_has_the_codes_of_the_truth(elem_dtype, mode):
    x, weight, _ = operands(33, 64, 64)
    options = {"elem_dtype": elem_dtype, "scale_mode": mode}
    assert_bits(ours(x, weight, **options), reference(x, weight, **options))


@SHAPES
@pytest.mark.parametrize("lengths", [[], [0, 0], [1] * 9, [31, 1, 0, 33, 100]], ids=str)
def test_tiles_of_several_blocks_find_their_sequences(lengths, block, monkeypatch):
    tiles = ProductTiles(128, 32, 16, 4, 1)
    monkeypatch.setattr(mx_projection_launch, "_INTERPRETED", tiles)
    x, weight, bias = operands(sum(lengths) + 5, 24, 40)
    offsets = offsets_of(lengths)
    wanted = reference(x, weight, offsets, bias=bias, block=block)
    assert_bits(ours(x, weight, offsets, bias, block=block), wanted)


@SHAPES
@pytest.mark.parametrize(
    "tiles", [ProductTiles(32, 64, 32, 4, 1), ProductTiles(64, 32, 16, 4, 1)], ids=str
)
def test_any_tiles_give_the_same_codes(tiles, block, monkeypatch):
    x, weight, bias = operands(70, 72, 100)
    wanted = ours(x, weight, bias=bias, block=block)
    monkeypatch.setattr(mx_projection_launch, "_INTERPRETED", tiles)
    monkeypatch.setattr(mx_projection_launch, "_TABLE", {2: tiles})
    assert_bits(ours(x, weight, bias=bias, block=block), wanted)


@SHAPES
def test_sums_that_round_are_within_their_order_of_the_truth(block):
    x, weight = normal(96, 256).bfloat16(), normal(64, 256, seed=1).bfloat16()
    found, wanted = ours(x, weight, block=block), reference(x, weight, block=block)
    apart = (found[0].cpu().int() - wanted[0].int()).abs()
    assert torch.equal(found[1].cpu(), wanted[1])
    assert int(apart.max()) <= 1
    assert float((apart > 0).double().mean()) <= 1e-3
    # Of a result that was rounded to bf16 between, more than one in a hundred differ.
    between = mx_quantize((x.float() @ weight.float().T).bfloat16().to(DEVICE), block=block)[0]
    assert float((between.cpu() != wanted[0]).double().mean()) > 1e-2


@pytest.mark.parametrize("jagged", [False, True], ids=["dense", "jagged"])
def test_swizzled_scales_are_those_of_the_quantiser(jagged):
    x, weight, bias = operands(150, 32, 200)
    offsets = offsets_of([70, 0, 33]).to(DEVICE) if jagged else None
    exact = (x.float() @ weight.float().T + bias.float()).to(DEVICE)
    options = {"scale_layout": "swizzled"}
    wanted = mx_quantize(exact, offsets, **options)
    assert_bits(ours(x, weight, offsets, bias, **options), tuple(t.cpu() for t in wanted))


@SHAPES
def test_squares_of_a_dense_product_have_swizzled_scales_too(block):
    x, weight, _ = operands(150, 32, 96)
    exact = (x.float() @ weight.float().T).to(DEVICE)
    wanted = mx_quantize(exact, block=block, scale_layout="swizzled")
    found = ours(x, weight, block=block, scale_layout="swizzled")
    assert_bits(found, tuple(t.cpu() for t in wanted))


@SHAPES
def test_what_is_no_number_stays_in_its_row_and_its_blocks(block):
    x, weight, _ = operands(64, 32, 96)
    clean = ours(x, weight, block=block)
    x[40, 3] = torch.nan
    codes, scales = ours(x, weight, block=block)
    own = slice(40, 41) if block == ALONG_COLUMNS else slice(1, 2)
    assert (scales[own] == 255).all()
    rows = slice(0, 40) if block == ALONG_COLUMNS else slice(0, 32)
    assert torch.equal(codes[rows], clean[0][rows])


def test_infinite_weights_reach_no_block_without_rows():
    x, weight, _ = operands(20, 32, 64)
    weight[3, 5] = torch.inf
    offsets = offsets_of([7, 0, 4])
    assert_bits(ours(x, weight, offsets, block=SQUARE), reference(x, weight, offsets, block=SQUARE))


def test_strided_operands_mean_what_their_copies_mean():
    x, weight, bias = operands(40, 64, 64)
    wanted = ours(x, weight, bias=bias)
    assert_bits(ours(x.T.contiguous().T, weight.T.contiguous().T, bias=bias), wanted)
    wide = torch.cat([x, x], 1)
    assert_bits(ours(wide[:, :64], weight, bias=bias), wanted)


def test_gradients_are_not_asked_for_and_meta_tensors_have_the_shapes():
    x, weight, _ = operands(40, 32, 64)
    found = ours(x.requires_grad_(), weight, offsets_of([40]), heads=2, block=SQUARE)
    assert not found[0].requires_grad
    fake = mx_projection(
        x.detach().to("meta"), weight.to("meta"), offsets_of([40]).to("meta"), heads=2, block=SQUARE
    )
    assert [t.shape for t in fake] == [t.shape for t in found]


GOOD = {"x": torch.ones(8, 32), "weight": torch.ones(64, 32)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.ones(8)}, r"x must be (a tensor )?\[rows, features >= 1\], got \(8,\)"),
        ({"weight": torch.ones(64, 31)}, r"weight \(64, 31\) does not fit x \(8, 32\)"),
        ({"weight": torch.ones(0, 32)}, r"weight \(0, 32\)"),
        ({"weight": torch.ones(64, 32).half()}, r"weight \(64, 32\) is torch.float16"),
        ({"x": torch.ones(8, 32).int(), "weight": torch.ones(64, 32).int()}, "got torch.int32"),
        ({"bias": torch.ones(63)}, r"bias must be \[64\], got \(63,\)"),
        ({"bias": torch.ones(64).half()}, r"bias \[64\] must be torch.float32"),
        ({"heads": 2}, "2 heads need offsets"),
        ({"heads": 4, "offsets": offsets_of([8])}, "64 columns are no 4 heads"),
        ({"heads": 0}, "heads must be a whole number from 1 on, got 0"),
        ({"offsets": offsets_of([9])}, "9"),
        ({"elem_dtype": "e3m4"}, "e3m4"),
        ({"block": (16, 16)}, "16"),
        ({"scale_mode": "round"}, "round"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_with_its_numbers(changes, words):
    for function in (reference, mx_projection):
        with pytest.raises(ValueError, match=words):
            function(**{**GOOD, **changes})


def test_what_has_no_kernel_says_so():
    wide = {name: tensor.double() for name, tensor in GOOD.items()}
    for changes in (wide, {**GOOD, "block": ALONG_ROWS},
                    {**GOOD, "block": SQUARE, "offsets": offsets_of([8]),
                     "scale_layout": "swizzled"}):  # fmt: skip
        with pytest.raises(NotImplementedError, match="mx_projection: no "):
            mx_projection(**changes)
    with pytest.raises(ValueError, match=r"got \(32, 1\)"):
        reference(**GOOD, block=ALONG_ROWS)


def test_the_truth_is_the_product_and_then_the_quantisation():
    x, weight, bias = normal(33, 40), normal(64, 40, seed=1), normal(64, seed=2)
    exact = torch.einsum("rf,of->ro", x, weight) + bias
    assert_bits(reference(x, weight, bias=bias, block=SQUARE), quantize(exact, block=SQUARE))
