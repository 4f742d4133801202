"""MX matrix products and the MX linear layer: forward, dX, dW, db."""

import math

import pytest
import torch
from mx_oracles import ELEM_DTYPES, normal, quantized, snr

from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE, LinearRecipe
from jagbench.reference.hadamard import random_signs
from jagbench.reference.mx import mx_dequantize, mx_quantize
from jagbench.reference.mx_matmul import mx_linear, mx_matmul

NEAREST = LinearRecipe(gradient_rounding="nearest")


# -- matmul ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("a_block", [ALONG_COLUMNS, SQUARE])
@pytest.mark.parametrize("b_block", [ALONG_ROWS, SQUARE])
@pytest.mark.parametrize("elem_dtype", ELEM_DTYPES)
def test_a_product_is_that_of_the_dequantised_operands(elem_dtype, a_block, b_block):
    a, b = normal(37, 70, seed=1), normal(70, 41, seed=2)
    codes = mx_quantize(a, elem_dtype=elem_dtype, block=a_block)
    others = mx_quantize(b, block=b_block)
    kind = {"a_elem_dtype": elem_dtype, "a_block": a_block, "b_block": b_block}
    found = mx_matmul(*codes, *others, **kind, dtype=torch.float64)
    wanted = quantized(a, elem_dtype, a_block) @ quantized(b, "e4m3", b_block)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        narrow = mx_matmul(*codes, *others, **kind, dtype=dtype)
        assert narrow.dtype == dtype
        torch.testing.assert_close(narrow, wanted.to(dtype))


def test_a_weight_stored_by_rows_is_passed_as_transposed_views():
    a, weight = normal(5, 70, seed=3), normal(6, 70, seed=4)
    codes, scales = mx_quantize(weight)
    found = mx_matmul(*mx_quantize(a), codes.T, scales.T, dtype=torch.float64)
    torch.testing.assert_close(
        found, quantized(a, "e4m3", (1, 32)) @ quantized(weight, "e4m3", (1, 32)).T
    )


def test_products_of_representable_numbers_are_exact():
    a = torch.randint(-8, 9, (40, 96), generator=torch.Generator().manual_seed(0)).double()
    found = mx_matmul(*mx_quantize(a), *mx_quantize(a.T, block=(32, 1)), dtype=torch.float32)
    assert torch.equal(found.double(), a @ a.T)


def test_a_matmul_of_normal_data_has_the_quality_that_was_calculated():
    a, b = normal(128, 1024, seed=5), normal(1024, 128, seed=6)
    found = mx_matmul(*mx_quantize(a), *mx_quantize(b, block=(32, 1)), dtype=torch.float64)
    assert snr(found, a @ b) == pytest.approx(28.6, abs=0.2)


def test_batches_are_products_of_their_own():
    a, b = normal(2, 5, 40, seed=7), normal(2, 40, 6, seed=8)
    left, right = mx_quantize(a), mx_quantize(b, block=(32, 1))
    found = mx_matmul(*left, *right)
    for i in range(2):
        alone = mx_matmul(left[0][i], left[1][i], right[0][i], right[1][i])
        torch.testing.assert_close(found[i], alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a_block": (32, 1)}, r"a_block .*contracted.* got \(32, 1\)"),
        ({"b_block": (1, 32)}, r"b_block .*contracted.* got \(1, 32\)"),
        ({"b": torch.zeros(63, 4, dtype=torch.uint8)}, r"\(3, 64\), \(63, 4\)"),
        ({"a_scales": torch.zeros(3, 4, dtype=torch.uint8)}, r"\(3, 2\), got \(3, 4\)"),
        ({"dtype": torch.int32}, "int32"),
        ({"a_elem_dtype": "fp8"}, "'fp8'"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, message):
    a, a_scales = mx_quantize(torch.zeros(3, 64))
    b, b_scales = mx_quantize(torch.zeros(64, 4), block=(32, 1))
    good = {"a": a, "a_scales": a_scales, "b": b, "b_scales": b_scales}
    with pytest.raises(ValueError, match=message):
        mx_matmul(**{**good, **changes})


# -- linear layer ----------------------------------------------------------------------------------


def layer(tokens=70, features=45, out_features=37, dtype=torch.float64):
    """x, weight, bias and dY."""
    shapes = ((tokens, features), (out_features, features), (out_features,), (tokens, out_features))
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def results(x, weight, bias, grad, recipe):
    """Out, dX, dW, db."""
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    out = mx_linear(*leaves, recipe=recipe)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def turn(rows, size, seed):
    """The random Hadamard transform of rows, as one matrix."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    own = (random_signs(size, seed)[:, None] * matrix).T / math.sqrt(size)
    return torch.block_diag(*[own] * (rows // size))


@pytest.mark.parametrize("hadamard", [None, 16, 32, 64])
@pytest.mark.parametrize("weight_block", [SQUARE, ALONG_COLUMNS])
@pytest.mark.parametrize("weight_gradient", ["bf16", "mx"])
def test_every_product_takes_the_operands_its_recipe_names(weight_gradient, weight_block, hadamard):
    recipe = LinearRecipe(
        gradient_elem_dtype="e5m2",
        scale_mode="even",
        weight_block=weight_block,
        weight_gradient=weight_gradient,
        hadamard=hadamard,
        gradient_rounding="nearest",
        seed=4,
    )
    x, weight, bias, grad = layer()
    found = results(x, weight, bias, grad, recipe)

    along = ALONG_ROWS if weight_block == ALONG_COLUMNS else SQUARE
    out = quantized(x, "e4m3", (1, 32), "even") @ quantized(weight, "e4m3", weight_block, "even").T
    dx = quantized(grad, "e5m2", (1, 32), "even") @ quantized(weight, "e4m3", along, "even")
    dw = grad.T @ x
    if weight_gradient == "mx":
        missing = -len(x) % (hadamard or 1)
        left, right = (torch.cat([t, t.new_zeros(missing, t.shape[1])]) for t in (grad, x))
        if hadamard:
            left, right = (turn(len(t), hadamard, 4) @ t for t in (left, right))
        dw = quantized(left, "e5m2", (32, 1), "even").T @ quantized(right, "e4m3", (32, 1), "even")
    for own, wanted in zip(found, (out + bias, dx, dw, grad.sum(0)), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-11, atol=1e-11)


def test_the_input_gradient_reads_the_codes_of_the_forward_where_the_weight_is_in_squares():
    _, weight, _, _ = layer()
    codes, scales = mx_quantize(weight, block=SQUARE)
    held = mx_dequantize(codes, scales, block=SQUARE, dtype=torch.float64)
    one = torch.eye(weight.shape[1], dtype=torch.float64)
    forward = mx_linear(one, weight, recipe=NEAREST)
    x = normal(len(weight), weight.shape[1]).requires_grad_()
    upstream = torch.eye(len(weight), dtype=torch.float64)
    (backward,) = torch.autograd.grad(mx_linear(x, weight, recipe=NEAREST), x, upstream)
    assert torch.equal(forward.T, held)
    assert torch.equal(backward, held)


#: Gates of torchao's own tests, in dB.
GATES = {"out": 26, "dx": 25, "dw": 24, "db": 40}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_gradient", ["bf16", "mx"])
@pytest.mark.parametrize("gradient_rounding", ["nearest", "stochastic"])
def test_quality_is_above_the_published_gates(gradient_rounding, weight_gradient, dtype):
    tensors = layer(512, 256, 192, dtype)
    recipe = LinearRecipe(weight_gradient=weight_gradient, gradient_rounding=gradient_rounding)
    found = results(*tensors, recipe)
    x, weight, bias, grad = (t.double() for t in tensors)
    wanted = (x @ weight.T + bias, grad @ weight, grad.T @ x, grad.sum(0))
    gates = {**GATES, "dw": 34 if weight_gradient == "bf16" else 24}
    for gate, own, true in zip(gates.values(), found, wanted, strict=True):
        assert own.dtype == dtype
        assert snr(own, true) >= gate
    plain = mx_linear(*tensors[:2], recipe=recipe)
    assert snr(plain, x @ weight.T) >= 27


def test_e5m2_and_floor_cost_what_they_cost():
    x, weight, bias, grad = layer(512, 256, 192)
    quality = {}
    for name, recipe in {
        "rceil": NEAREST,
        "floor": LinearRecipe(scale_mode="floor", gradient_rounding="nearest"),
        "e5m2": LinearRecipe(gradient_elem_dtype="e5m2", gradient_rounding="nearest"),
        "stochastic": LinearRecipe(),
    }.items():
        quality[name] = snr(results(x, weight, bias, grad, recipe)[1], grad @ weight)
    assert quality["rceil"] - quality["floor"] > 0.3
    assert quality["rceil"] - quality["stochastic"] > 1
    assert quality["rceil"] - quality["e5m2"] > 3


def test_stochastic_gradients_are_unbiased_and_seeded():
    x, weight, bias, grad = layer(40, 33, 35)
    seeds = range(128)
    many = [
        results(x, weight, bias, grad, LinearRecipe(weight_gradient="mx", seed=seed))
        for seed in seeds
    ]
    again = results(x, weight, bias, grad, LinearRecipe(weight_gradient="mx", seed=5))
    assert all(torch.equal(a, b) for a, b in zip(again, many[5], strict=True))
    assert torch.equal(many[0][0], many[1][0])
    held = quantized(weight, "e4m3", SQUARE)
    mean = torch.stack([one[1] for one in many]).mean(0)
    # The noise of a mean falls by 10 log10(128) = 21 dB.
    assert snr(mean, grad @ held) - snr(many[0][1], grad @ held) > 18
    nearest = results(x, weight, bias, grad, NEAREST)[1]
    assert snr(mean, grad @ held) - snr(nearest, grad @ held) > 15


def test_leading_dims_are_tokens():
    x, weight, bias, grad = layer(24)
    flat = results(x, weight, bias, grad, LinearRecipe())
    folded = results(x.view(2, 3, 4, -1), weight, bias, grad.view(2, 3, 4, -1), LinearRecipe())
    for own, wanted in zip(folded, flat, strict=True):
        assert torch.equal(own.reshape(wanted.shape), wanted)


def test_no_tokens_give_an_empty_result_and_zero_gradients():
    x, weight, bias, grad = layer(0)
    for recipe in (LinearRecipe(), LinearRecipe(weight_gradient="mx")):
        out, dx, dw, db = results(x, weight, bias, grad, recipe)
        assert out.shape == (0, 37)
        assert dx.shape == (0, 45)
        assert (dw == 0).all()
        assert (db == 0).all()


def test_a_zero_token_and_a_nan_token_leave_the_others_alone():
    x, weight, bias, grad = layer(64)
    x[3], grad[3] = 0, 0
    clean = results(x, weight, bias, grad, NEAREST)
    assert torch.equal(clean[0][3], bias)
    assert (clean[1][3] == 0).all()
    x[3], grad[3] = math.nan, math.nan
    hurt = results(x, weight, bias, grad, NEAREST)
    rest = torch.arange(64) != 3
    for i in (0, 1):
        assert torch.equal(hurt[i][rest], clean[i][rest])
        assert hurt[i][3].isnan().all()


def test_a_second_derivative_is_refused_and_not_silently_wrong():
    x, weight, _, _ = layer(8)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(
        mx_linear(x, weight, recipe=NEAREST).square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# -- where the transform helps ---------------------------------------------------------------------


def weight_gradient_quality(x, grad, hadamard, elem_dtype, gradient_elem_dtype=None, mode="rceil"):
    weight = torch.zeros(grad.shape[1], x.shape[1], dtype=torch.float64, requires_grad=True)
    recipe = LinearRecipe(
        elem_dtype=elem_dtype,
        gradient_elem_dtype=gradient_elem_dtype or elem_dtype,
        scale_mode=mode,
        weight_gradient="mx",
        hadamard=hadamard,
        gradient_rounding="nearest",
    )
    (found,) = torch.autograd.grad(mx_linear(x, weight, recipe=recipe), weight, grad)
    return snr(found, grad.T @ x)


def loud_tokens(first):
    """One token of 32 is 30 times louder."""
    return torch.where(torch.arange(1024) % 32 == first, 30.0, 1.0).double()[:, None]


@pytest.mark.parametrize("elem_dtype", ["e4m3", "e2m1"])
def test_on_normal_data_the_transform_changes_little(elem_dtype):
    x, grad = normal(1024, 64, seed=1), normal(1024, 48, seed=2)
    without = weight_gradient_quality(x, grad, None, elem_dtype)
    for size in (16, 32, 64):
        assert abs(weight_gradient_quality(x, grad, size, elem_dtype) - without) < 0.5


def test_with_loud_tokens_the_transform_helps_where_an_outlier_costs_the_rest_of_its_block():
    x, grad = normal(1024, 64, seed=1) * loud_tokens(5), normal(1024, 48, seed=2)
    gains = {}
    for name, kind in {
        "e2m1": ("e2m1", "e4m3", "rceil"),
        "saturating e4m3": ("e4m3", "e4m3", "floor"),
        "e4m3": ("e4m3", "e4m3", "rceil"),
    }.items():
        with_it, without = (weight_gradient_quality(x, grad, h, *kind) for h in (32, None))
        gains[name] = with_it - without
    assert gains["e2m1"] > 3
    assert gains["saturating e4m3"] > 1
    # 15 binades of E4M3 hold outlier and rest side by side: there is nothing to gain.
    assert abs(gains["e4m3"]) < 0.5


def test_loud_tokens_of_both_operands_that_do_not_meet_are_where_the_transform_hurts():
    x, grad = (normal(1024, n, seed=n) * loud_tokens(at) for n, at in ((64, 5), (48, 9)))
    with_it, without = (weight_gradient_quality(x, grad, h, "e4m3") for h in (32, None))
    assert without - with_it > 5


# -- refusals --------------------------------------------------------------------------------------

GOOD = {"x": torch.zeros(3, 8), "weight": torch.zeros(5, 8), "recipe": NEAREST}
BAD = {
    "features": ({"weight": torch.zeros(5, 9)}, "x has 8 features and weight takes 9"),
    "bias": ({"bias": torch.zeros(4)}, "bias has 4 features and weight gives 5"),
    "bias dims": ({"bias": torch.zeros(5, 1)}, r"1 dims, got \(5, 1\)"),
    "weight dims": ({"weight": torch.zeros(8)}, r"2 dims, got \(8,\)"),
    "scalar": ({"x": torch.zeros(())}, r"at least 1 dims, got \(\)"),
    "dtype": ({"weight": torch.zeros(5, 8).half()}, "float32, weight torch.float16"),
    "integer": ({"x": torch.zeros(3, 8).int()}, "int32"),
    "device": ({"weight": torch.zeros(5, 8, device="meta")}, "meta"),
    "no tensor": ({"x": None}, "NoneType"),
    "recipe": ({"recipe": "mxfp8"}, "LinearRecipe, got str"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_do_not_fit_are_refused(name):
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        mx_linear(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"elem_dtype": "fp8"}, "'fp8'"),
        ({"gradient_elem_dtype": "e8m0"}, "'e8m0'"),
        ({"scale_mode": "up"}, "'up'"),
        ({"weight_block": (32, 1)}, r"got \(32, 1\)"),
        ({"weight_gradient": "fp32"}, "'fp32'"),
        ({"hadamard": 8}, "got 8"),
        ({"hadamard": True}, "got True"),
        ({"hadamard": 16.0}, r"got 16\.0"),
        ({"weight_block": (32.0, 32.0)}, r"got \(32\.0, 32\.0\)"),
        ({"gradient_rounding": "down"}, "'down'"),
        ({"seed": 1.5}, "got 1.5"),
    ],
)
def test_recipes_that_are_none_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LinearRecipe(**changes)
