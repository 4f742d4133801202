"""Our MX products and the MX linear layer give the truth's results, on every route to them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from mx_bits import DEVICE
from mx_oracles import normal, quantized, snr
from torch import Tensor

from jagbench.impl.kernels import mx_linear as layers
from jagbench.impl.kernels import mx_matmul as products
from jagbench.impl.kernels import mx_matmul_launch as launch
from jagbench.impl.kernels.mx import mx_dequantize, mx_quantize
from jagbench.impl.kernels.mx_launch import Format, MxTiles
from jagbench.impl.kernels.mx_linear import mx_linear
from jagbench.impl.kernels.mx_matmul import mx_matmul
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, BLOCKS, SQUARE, LinearRecipe, Stream
from jagbench.reference.mx import mx_dequantize as truth_dequantize
from jagbench.reference.mx_matmul import mx_linear as true_linear
from jagbench.reference.mx_matmul import mx_matmul as true_matmul

every_route = pytest.mark.parametrize("route", ["decode", "library"])


@pytest.fixture
def _route(monkeypatch, route):
    for module in (layers, products):
        monkeypatch.setattr(module, "product_route", lambda device: route)


def codes_of(x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return mx_quantize(x.to(DEVICE), **options)


def assert_sums(found: Tensor, wanted: Tensor, size: Tensor, terms: int) -> None:
    """Equal but for the order of float32 sums: size is the sum of the terms' magnitudes."""
    slack = (terms + 2) * 2.0**-24 * size
    slack = slack + torch.finfo(found.dtype).eps * wanted.abs()
    assert ((found.double().cpu() - wanted).abs() <= slack).all()


# -- matmul ----------------------------------------------------------------------------------------


@every_route
@pytest.mark.usefixtures("_route")
@pytest.mark.parametrize(
    ("a_kind", "b_kind", "a_block", "b_block", "dtype"),
    [
        ("e4m3", "e4m3", ALONG_COLUMNS, ALONG_ROWS, torch.float32),
        ("e4m3", "e4m3", ALONG_COLUMNS, SQUARE, torch.bfloat16),
        ("e5m2", "e4m3", SQUARE, ALONG_ROWS, torch.float16),
        ("e2m1", "e5m2", SQUARE, SQUARE, torch.float32),
        ("e4m3", "e2m1", ALONG_COLUMNS, ALONG_ROWS, torch.bfloat16),
    ],
)
def test_a_product_is_that_of_the_values_to_the_order_of_its_sums(
    a_kind, b_kind, a_block, b_block, dtype
):
    a, b = normal(37, 170, seed=1, dtype=torch.float32), normal(170, 41, seed=2)
    left = codes_of(a, elem_dtype=a_kind, block=a_block)
    right = codes_of(b.float(), elem_dtype=b_kind, block=b_block)
    kinds = {"a_elem_dtype": a_kind, "b_elem_dtype": b_kind, "a_block": a_block, "b_block": b_block}
    found = mx_matmul(*left, *right, **kinds, dtype=dtype)
    assert found.dtype == dtype
    x, y = quantized(a.double(), a_kind, a_block), quantized(b, b_kind, b_block)
    assert_sums(found, x @ y, x.abs() @ y.abs(), 170)


@every_route
@pytest.mark.usefixtures("_route")
def test_a_weight_stored_by_rows_and_batches_are_views():
    a, weight = normal(2, 3, 5, 70, seed=3).float(), normal(3, 70, 6, seed=4).float()
    left = codes_of(a)
    right = codes_of(weight.mT.contiguous())
    found = mx_matmul(*left, right[0].mT, right[1].mT)
    there = [t.cpu() for t in (*left, right[0].mT, right[1].mT)]
    torch.testing.assert_close(found.cpu(), true_matmul(*there))


def test_parts_of_a_long_sum_are_added_and_rounded_once(monkeypatch):
    monkeypatch.setattr(launch, "_FEWEST_STEPS", 1)
    a, b = normal(20, 700, seed=5), normal(700, 24, seed=6)
    found = mx_matmul(*codes_of(a.float()), *codes_of(b.float(), block=ALONG_ROWS))
    tiles = launch.product_tiles(0, 20, 24)
    assert launch._runs(tiles, 1, 700, 8) > 1
    x, y = quantized(a, "e4m3", ALONG_COLUMNS), quantized(b, "e4m3", ALONG_ROWS)
    assert_sums(found, x @ y, x.abs() @ y.abs(), 700)


@every_route
@pytest.mark.usefixtures("_route")
def test_scales_at_both_ends_and_nan_reach_the_result():
    """Row by row: scale 1, NaN in one block, the least normal, a subnormal, and 64 times 2^127."""
    codes = torch.full((5, 64), 0x38, dtype=torch.uint8, device=DEVICE)  # 1.0
    scales = torch.full((5, 2), 127, dtype=torch.uint8, device=DEVICE)
    scales[1, 1], scales[2], scales[3], scales[4] = 255, 1, 0, 254
    found = mx_matmul(codes, scales, codes.T[:, :4], scales.T[:, :1].expand(-1, 4)).cpu()
    wanted = torch.tensor([64.0, math.nan, 2.0**-120, 2.0**-121, math.inf])
    torch.testing.assert_close(found[:, 0], wanted, rtol=0, atol=0, equal_nan=True)


def test_one_in_e2m1_is_one_in_e4m3_and_so_are_all_codes():
    codes = torch.arange(16, dtype=torch.uint8)
    magnitude = codes & 7
    wide = torch.where(magnitude > 1, (magnitude << 2) + 48, magnitude * 48) | ((codes & 8) << 4)
    one = torch.full((1,), 127, dtype=torch.uint8)
    assert torch.equal(
        truth_dequantize(codes, one, elem_dtype="e2m1"),
        truth_dequantize(wide.to(torch.uint8), one, elem_dtype="e4m3"),
    )


@every_route
@pytest.mark.usefixtures("_route")
@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_a_product_of_nothing_is_zero(shape):
    m, k, n = shape
    left = codes_of(torch.zeros(m, k))
    found = mx_matmul(*left, *codes_of(torch.zeros(k, n), block=ALONG_ROWS))
    assert found.shape == (m, n)
    assert not found.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a_block": (32, 1)}, r"a_block .*contracted.* got \(32, 1\)"),
        ({"b_block": (1, 32)}, r"b_block .*contracted.* got \(1, 32\)"),
        ({"b": torch.zeros(63, 4, dtype=torch.uint8)}, r"\(3, 64\), \(63, 4\)"),
        ({"a_scales": torch.zeros(3, 4, dtype=torch.uint8)}, r"\(3, 2\), got \(3, 4\)"),
        ({"b_scales": torch.zeros(2, 4)}, r"b_scales \(2, 4\) must be uint8, got torch.float32"),
        ({"a": torch.zeros(64, dtype=torch.uint8)}, r"at least 2 dims, got \(64,\)"),
        ({"dtype": torch.int32}, "int32"),
        ({"a_elem_dtype": "fp8"}, "'fp8'"),
        ({"a_scales": torch.zeros(3, 2, dtype=torch.uint8, device="meta")}, "meta"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, message):
    a, a_scales = codes_of(torch.zeros(3, 64))
    b, b_scales = codes_of(torch.zeros(64, 4), block=ALONG_ROWS)
    good = {"a": a, "a_scales": a_scales, "b": b, "b_scales": b_scales}
    changes = {
        k: v.to(DEVICE) if isinstance(v, Tensor) and v.device.type == "cpu" else v
        for k, v in changes.items()
    }
    with pytest.raises(ValueError, match=message):
        mx_matmul(**{**good, **changes})


def test_codes_of_too_many_bits_and_float64_are_refused():
    codes, scales = codes_of(torch.zeros(3, 32))
    with pytest.raises(ValueError, match="mx_matmul: codes of e2m1 must be below 16, got 56"):
        mx_matmul(codes + 56, scales, codes.T, scales.T, a_elem_dtype="e2m1")
    with pytest.raises(NotImplementedError, match="float64"):
        mx_matmul(codes, scales, codes.T, scales.T, dtype=torch.float64)


# -- values of a quantisation ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elem_dtype", "dtype"),
    [("e4m3", torch.bfloat16), ("e5m2", torch.float32), ("e2m1", torch.bfloat16)],
)
@pytest.mark.parametrize("block", BLOCKS)
def test_rounded_values_are_those_of_the_codes_of_mx_quantize(block, elem_dtype, dtype):
    x = (normal(75, 83, seed=7) * torch.exp2(normal(75, 83, seed=8) * 4)).to(dtype).to(DEVICE)
    x[3, 4], x[70, 80] = math.nan, -math.inf
    for mode, seed in (("rceil", None), ("floor", 2**40 + 3)):
        rounding = "nearest" if seed is None else "stochastic"
        stream = Stream.GRADIENT_FOR_INPUT
        form = Format(elem_dtype, block, mode, seed, int(stream))
        codes = mx_quantize(x, elem_dtype=elem_dtype, block=block, scale_mode=mode, seed=seed,
                            rounding=rounding, stream=stream)  # fmt: skip
        wanted = mx_dequantize(*codes, elem_dtype=elem_dtype, block=block)
        found = launch.launch_round(x, form)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.float().isnan(), wanted.isnan())
        assert torch.equal(found.float().nan_to_num(), wanted.nan_to_num())


def test_the_sum_of_the_rows_comes_with_the_rounded_values(monkeypatch):
    monkeypatch.setattr(launch, "_SUMMED", 2)
    monkeypatch.setattr(launch, "mx_tiles", lambda *_: MxTiles(16, 32, 4))
    x = normal(75, 45, seed=10).float().to(DEVICE)
    form = Format("e4m3", ALONG_COLUMNS, seed=3)
    found, sums = launch.launch_round_and_sum(x, form)
    assert torch.equal(found, launch.launch_round(x, form))
    assert_sums(sums, x.double().cpu().sum(0), x.double().cpu().abs().sum(0), 75)


@pytest.mark.parametrize("size", [16, 64])
def test_rounded_values_behind_a_transform_are_those_of_its_codes(size):
    x = normal(70, 40, seed=9).to(torch.bfloat16).to(DEVICE)
    form = Format("e4m3", ALONG_ROWS, "rceil", 5, int(Stream.GRADIENT_FOR_WEIGHT), size, 6)
    rows = -(-70 // size) * size
    filled = torch.nn.functional.pad(x, (0, 0, 0, rows - 70))
    codes = mx_quantize(filled, block=ALONG_ROWS, rounding="stochastic", seed=5, hadamard=size,
                        hadamard_seed=6, stream=Stream.GRADIENT_FOR_WEIGHT)  # fmt: skip
    wanted = mx_dequantize(*codes, block=ALONG_ROWS)
    assert torch.equal(launch.launch_round(x, form, rows).float(), wanted)


# -- linear layer ----------------------------------------------------------------------------------


def layer(tokens=70, features=45, out_features=37, dtype=torch.float32):
    """x, weight, bias and dY."""
    shapes = ((tokens, features), (out_features, features), (out_features,), (tokens, out_features))
    return [normal(*shape, seed=i, dtype=torch.float64).to(dtype).to(DEVICE)
            for i, shape in enumerate(shapes)]  # fmt: skip


def results(function, x, weight, bias, grad, recipe):
    """Out, dX, dW, db."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    out = function(*leaves, recipe=recipe)
    return [t.detach().cpu() for t in (out, *torch.autograd.grad(out, leaves, grad))]


def assert_like_the_truth(tensors, recipe, quality=100.0):
    """The truth on the same numbers in float64; rounding to the dtype costs what it costs."""
    found = results(mx_linear, *tensors, recipe)
    wide = [t.double().cpu() for t in tensors]
    wanted = results(true_linear, *wide, recipe)
    limit = {torch.bfloat16: 52.0, torch.float16: 70.0}.get(tensors[0].dtype, quality)
    for name, own, true in zip(("out", "dx", "dw", "db"), found, wanted, strict=True):
        assert own.dtype == tensors[0].dtype
        assert snr(own, true) > min(limit, quality), name


RECIPES = {
    "default": LinearRecipe(),
    "nearest, along the columns": LinearRecipe(
        gradient_rounding="nearest", weight_block=ALONG_COLUMNS, gradient_elem_dtype="e5m2"
    ),
    "mx": LinearRecipe(weight_gradient="mx", hadamard=None, seed=2**40 + 1, scale_mode="floor"),
    "mx, along the columns": LinearRecipe(
        weight_gradient="mx", hadamard=None, weight_block=ALONG_COLUMNS, scale_mode="even"
    ),
    "e2m1": LinearRecipe(
        "e2m1", "e4m3", "ceil", weight_gradient="mx", hadamard=None, gradient_rounding="nearest"
    ),
}


@every_route
@pytest.mark.usefixtures("_route")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_layer_has_the_results_of_the_truth(recipe, dtype):
    assert_like_the_truth(layer(dtype=dtype), recipe)


@pytest.mark.parametrize(("route", "size"), [("decode", 16), ("library", 64)])
@pytest.mark.usefixtures("_route")
def test_sums_without_rounding_pass_a_transform_as_the_truths_do(size):
    """Whole numbers, and a factor that is a power of two."""
    whole = [torch.randint(-8, 9, t.shape, generator=torch.Generator().manual_seed(i)).float()
             for i, t in enumerate(layer())]  # fmt: skip
    recipe = LinearRecipe(weight_gradient="mx", hadamard=size, seed=9)
    assert_like_the_truth([t.to(DEVICE) for t in whole], recipe)


@every_route
@pytest.mark.usefixtures("_route")
def test_a_layer_behind_a_transform_has_the_results_of_the_truth():
    """But for codes on either side of a float32 rounding of the transform."""
    assert_like_the_truth(layer(), LinearRecipe(weight_gradient="mx", seed=9), quality=40.0)


@every_route
@pytest.mark.usefixtures("_route")
def test_strided_inputs_and_leading_dims_are_tokens():
    x, weight, bias, grad = layer(24)
    recipe = LinearRecipe(weight_gradient="mx", hadamard=None)
    flat = results(mx_linear, x, weight, bias, grad, recipe)
    wide = torch.stack([x, x], -1).view(2, 3, 4, -1, 2)[..., 0]
    strided = weight.T.contiguous().T
    folded = results(mx_linear, wide, strided, bias, grad.view(2, 3, 4, -1), recipe)
    for own, wanted in zip(folded, flat, strict=True):
        assert torch.equal(own.reshape(wanted.shape), wanted)


@every_route
@pytest.mark.usefixtures("_route")
@pytest.mark.parametrize("recipe", [LinearRecipe(), LinearRecipe(weight_gradient="mx")])
@pytest.mark.parametrize("sizes", [(0, 45, 37), (5, 0, 37), (5, 45, 0)])
def test_empty_sizes_give_what_the_truth_gives(sizes, recipe):
    tensors = layer(*sizes)
    wanted = results(true_linear, *(t.cpu() for t in tensors), recipe)
    for own, true in zip(results(mx_linear, *tensors, recipe), wanted, strict=True):
        assert own.shape == true.shape
        torch.testing.assert_close(own, true)


@every_route
@pytest.mark.usefixtures("_route")
def test_only_the_gradients_that_are_wanted_are_formed():
    x, weight, bias, grad = layer(40)
    recipe = LinearRecipe(weight_gradient="mx", hadamard=None)
    wanted = results(mx_linear, x, weight, bias, grad, recipe)[1:]
    for i in range(3):
        leaves = [t.clone().requires_grad_(i == j) for j, t in enumerate((x, weight, bias))]
        (found,) = torch.autograd.grad(mx_linear(*leaves, recipe=recipe), leaves[i], grad)
        # The sum for the bias may come with another pass, in another order.
        torch.testing.assert_close(found.cpu(), wanted[i], rtol=1e-6, atol=1e-5 * (i == 2))
    plain = mx_linear(x, weight, recipe=recipe)
    assert not plain.requires_grad


def kept_bytes(recipe, x, weight):
    """Bytes of the tensors that the graph keeps beyond the weight, storages counted once."""
    found = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() != weight.untyped_storage().data_ptr():
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = mx_linear(x, weight, recipe=recipe)
    assert out.requires_grad
    return sum(found.values())


def test_a_quantised_weight_gradient_keeps_codes_of_x_and_no_x():
    x = normal(128, 64).to(torch.bfloat16).to(DEVICE).requires_grad_()
    weight = normal(48, 64).to(torch.bfloat16).to(DEVICE).requires_grad_()
    assert kept_bytes(LinearRecipe(weight_gradient="mx"), x, weight) == 128 * 64 * 33 // 32
    assert kept_bytes(LinearRecipe(), x, weight) == 128 * 64 * 2
    assert kept_bytes(LinearRecipe(), x, weight.detach()) == 0


def test_a_seed_decides_the_gradients_and_nothing_else():
    tensors = layer(40)
    found = [results(mx_linear, *tensors, LinearRecipe(seed=seed)) for seed in (3, 3, 4)]
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert torch.equal(found[0][0], found[2][0])
    assert not torch.equal(found[0][1], found[2][1])


def test_the_ops_have_fakes_and_count_their_products():
    from torch.utils.flop_counter import FlopCounterMode

    x, weight, bias, grad = (t.requires_grad_() for t in layer(40, 64, 32))
    for recipe in (LinearRecipe(), LinearRecipe(weight_gradient="mx", hadamard=64)):
        constants = ("e4m3", "e4m3", "rceil", [32, 32], recipe.weight_gradient == "mx",
                     recipe.hadamard, True, 0, recipe.weight_gradient == "mx")  # fmt: skip
        torch.library.opcheck(
            layers._forward_op, (x, weight, bias, *constants),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )  # fmt: skip
        with FlopCounterMode(display=False) as counter:
            mx_linear(x, weight, bias, recipe=recipe).backward(grad)
        assert counter.get_total_flops() == 3 * 2 * 40 * 64 * 32
    left, right = codes_of(x.detach()), codes_of(weight.detach())
    arguments = (*left, right[0].T, right[1].T, "e4m3", "e4m3", 1, 1, torch.float32)
    torch.library.opcheck(products._op, arguments, test_utils=("test_schema", "test_faketensor"))
    with FlopCounterMode(display=False) as counter:
        mx_matmul(*left, right[0].T, right[1].T)
    assert counter.get_total_flops() == 2 * 40 * 64 * 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(6, 9)}, r"\(6, 9\) and \(4, 8\)"),
        ({"x": torch.zeros(())}, r"got \(\)"),
        ({"weight": torch.zeros(8)}, r"\(8,\)"),
        ({"weight": torch.zeros(4, 8).half()}, "x has torch.float32, weight torch.float16"),
        ({"bias": torch.zeros(5)}, r"bias must be \[4\], got \(5,\)"),
        ({"bias": torch.zeros(4, device="meta")}, "bias is on meta"),
        ({"x": torch.zeros(6, 8, dtype=torch.int32)}, "int32"),
        ({"weight": None}, "NoneType"),
        ({"recipe": "mxfp8"}, "LinearRecipe, got str"),
    ],
)
def test_layers_that_do_not_fit_are_refused(changes, message):
    good = {"x": torch.zeros(6, 8), "weight": torch.zeros(4, 8), "bias": torch.zeros(4),
            "recipe": LinearRecipe()}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        mx_linear(**{**good, **changes})


@every_route
@pytest.mark.usefixtures("_route")
def test_a_layer_of_float16_has_the_results_of_the_truth():
    assert_like_the_truth(layer(dtype=torch.float16), RECIPES["mx"])


def test_a_layer_of_float64_is_unsupported_and_says_so():
    with pytest.raises(NotImplementedError, match="float64"):
        mx_linear(torch.zeros(2, 8).double(), torch.zeros(4, 8).double(), recipe=LinearRecipe())


def test_a_second_derivative_is_refused_and_not_silently_wrong():
    x, weight, _, _ = layer(8)
    x.requires_grad_()
    out = mx_linear(x, weight, recipe=LinearRecipe()).square().sum()
    (dx,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_autocast_decides_the_dtype():
    x, weight, bias, _ = layer(8)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = mx_linear(x, weight, bias, recipe=LinearRecipe())
    wanted = mx_linear(*(t.bfloat16() for t in (x, weight, bias)), recipe=LinearRecipe())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wanted)
