import math

import pytest
import torch
from oracles import ACTIVATION_NAMES, activation_oracle

from jagbench.reference import activations
from jagbench.reference.activations import (
    ACTIVATIONS,
    HARDWARE_TANH_ERROR,
    TAYLOR_FRACTIONS,
    activation,
    derivative,
    gelu,
    gelu_derivative,
    out_of_taylor_range,
    raw_taylor_gelu,
    raw_taylor_gelu_derivative,
    taylor_gelu,
    taylor_gelu_derivative,
)

# Points of [-20, 20], away from the kinks at 0, +-1.25 and +-3.
POINTS = torch.linspace(-20, 20, 4001, dtype=torch.float64) + 1.7e-3


def phi(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def tanh_form(factor):
    return lambda x: 0.5 * x * (1 + math.tanh(factor * (x + 0.044715 * x**3)))


def taylor(x):
    return 0.5 * x + 0.39894228 * x**2 - 0.06649038 * x**4 + 0.00997356 * x**6


SCALAR = {
    "identity": lambda x: x,
    "gelu": lambda x: x * phi(x),
    "gelu_tanh": tanh_form(math.sqrt(2 / math.pi)),
    "fast_gelu": tanh_form(math.sqrt(2 / math.pi)),
    "fast_gelu_bf16": tanh_form(0.796875),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "fast_silu": lambda x: x / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0.0),
    "leaky_relu": lambda x: x if x > 0 else 0.01 * x,
    "relu_squared": lambda x: max(x, 0.0) ** 2,
    "hardswish": lambda x: x * min(max(x + 3, 0), 6) / 6,
    "gelu_taylor6": lambda x: taylor(x) if abs(x) <= 1.25 else tanh_form(math.sqrt(2 / math.pi))(x),
    "gelu_taylor10": lambda x: (
        taylor(x) - 0.00118733 * x**8 + 0.00011718 * x**10
        if abs(x) <= 1.25
        else tanh_form(math.sqrt(2 / math.pi))(x)
    ),
}


def test_every_named_activation_is_there():
    assert tuple(ACTIVATIONS) == tuple(SCALAR)
    assert sorted(ACTIVATIONS) == sorted(ACTIVATION_NAMES)
    assert all(name == record.name for name, record in ACTIVATIONS.items())


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("score", [0.0, 1.0, -1.0, 1.25, -1.26, 20.0, -20.0])
def test_values_are_those_of_the_scalar_formula(name, score):
    found = activation(name)(torch.tensor(score, dtype=torch.float64)).item()
    assert found == pytest.approx(SCALAR[name](score), rel=1e-13, abs=1e-15)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_derivatives_are_those_of_torch(name):
    value, slope = activation_oracle(name, POINTS)
    torch.testing.assert_close(activation(name)(POINTS), value, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(derivative(name)(POINTS), slope, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_derivative_is_that_of_autograd_kinks_included(name):
    kinks = torch.tensor([0.0, -0.0, 1.25, -1.25, 3.0, -3.0], dtype=torch.float64)
    x = torch.cat([POINTS, kinks]).requires_grad_()
    (slope,) = torch.autograd.grad(activation(name)(x).sum(), x)
    torch.testing.assert_close(derivative(name)(x.detach()), slope, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_derivative_is_that_of_finite_differences(name):
    step = 1e-5
    function = activation(name)
    slope = (function(POINTS + step) - function(POINTS - step)) / (2 * step)
    torch.testing.assert_close(derivative(name)(POINTS), slope, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "slope"), [("relu", 0.0), ("relu_squared", 0.0), ("leaky_relu", 0.01), ("gelu", 0.5)]
)
def test_the_slope_at_zero_follows_torch(name, slope):
    zero = torch.zeros((), dtype=torch.float64)
    assert derivative(name)(zero).item() == pytest.approx(slope)
    assert activation_oracle(name, zero)[1].item() == pytest.approx(slope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_dtype_is_kept_and_large_scores_stay_finite(name, dtype):
    x = torch.tensor([-200.0, 0.0, 200.0], dtype=dtype, requires_grad=True)
    out = activation(name)(x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert out.dtype == derivative(name)(x).dtype == dtype
    assert out.isfinite().all()
    assert slope.isfinite().all()


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="'mish'"):
        activation("mish")
    with pytest.raises(ValueError, match="None"):
        derivative(None)


# -- approximations --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, a in ACTIVATIONS.items() if a.approximates])
def test_an_approximation_keeps_its_stated_bound_with_exact_tanh(name):
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    record = ACTIVATIONS[name]
    error = (record.forward(x) - activation(record.approximates)(x)).abs() / x.abs().clamp(min=1)
    assert error.max() <= record.error_bound


@pytest.mark.parametrize("name", ["fast_gelu", "fast_silu"])
def test_the_bound_of_the_fast_forms_is_what_the_hardware_tanh_allows(name, monkeypatch):
    x = torch.linspace(-20, 20, 40_001, dtype=torch.float64)
    exact, tanh = ACTIVATIONS[name].forward(x), torch.tanh
    monkeypatch.setattr(activations.torch, "tanh", lambda u: tanh(u) * (1 + HARDWARE_TANH_ERROR))
    error = (ACTIVATIONS[name].forward(x) - exact).abs() / x.abs().clamp(min=1)
    assert 0.9 * ACTIVATIONS[name].error_bound < error.max()
    assert error.max() <= ACTIVATIONS[name].error_bound * (1 + 1e-9)


def test_tanh_gelu_is_within_4_7e_4_of_gelu():
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    error = (activation("gelu_tanh")(x) - gelu(x)).abs().max()
    assert error == pytest.approx(4.7e-4, rel=0.01)


@pytest.mark.parametrize(
    ("degree", "bound", "forward", "gradient"),
    [
        (6, 0.5, 4.5e-6, 7.2e-5),
        (6, 1.0, 1.1e-3, 8.4e-3),
        (6, 1.25, 6.1e-3, 3.8e-2),
        (6, 1.5, 2.5e-2, 0.126),
        (6, 2.0, 0.216, 0.798),
        (6, 3.0, 3.98, 9.24),
        (10, 0.5, 3.9e-9, 8.8e-8),
        (10, 1.0, 1.1e-5, 1.2e-4),
        (10, 1.25, 1.4e-4, 1.3e-3),
        (10, 1.5, 1.2e-3, 8.9e-3),
        (10, 2.0, 3.2e-2, 0.18),
        (10, 3.0, 3.1, 11.5),
    ],
)
def test_the_unguarded_polynomial_has_the_published_errors(degree, bound, forward, gradient):
    x = torch.linspace(-bound, bound, 20_001, dtype=torch.float64)
    error = (raw_taylor_gelu(x, degree) - gelu(x)).abs().max()
    slope_error = (raw_taylor_gelu_derivative(x, degree) - gelu_derivative(x)).abs().max()
    assert error == pytest.approx(forward, rel=0.05)
    assert slope_error == pytest.approx(gradient, rel=0.05)


@pytest.mark.parametrize("degree", [6, 10])
def test_out_of_range_is_detected_and_falls_back_to_the_tanh_form(degree):
    x = torch.tensor([0.0, 1.0, 1.25, -1.25, 1.2500001, -1.3, 4.0, math.nan], dtype=torch.float64)
    outside = out_of_taylor_range(x, degree)
    assert outside.tolist() == [False, False, False, False, True, True, True, True]
    found = taylor_gelu(x, degree)
    assert torch.equal(found[~outside], raw_taylor_gelu(x, degree)[~outside])
    assert torch.equal(found[4:7], activation("gelu_tanh")(x)[4:7])
    assert found[7].isnan()


@pytest.mark.parametrize("fraction", TAYLOR_FRACTIONS)
def test_the_fraction_says_how_many_positions_the_polynomial_serves(fraction):
    x = torch.full((3, 64), 0.9, dtype=torch.float64)
    found = taylor_gelu(x, 6, fraction)
    polynomial = found == raw_taylor_gelu(x, 6)
    assert polynomial.double().mean() == fraction
    assert torch.equal(found[~polynomial], activation("gelu_tanh")(x)[~polynomial])
    slopes = taylor_gelu_derivative(x, 6, fraction)
    assert torch.equal(slopes == raw_taylor_gelu_derivative(x, 6), polynomial)


def test_the_named_taylor_forms_do_not_depend_on_position():
    x = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name in ("gelu_taylor6", "gelu_taylor10"):
        torch.testing.assert_close(activation(name)(x).flip(0), activation(name)(x.flip(0)))


def test_an_unknown_fraction_is_refused():
    with pytest.raises(ValueError, match=r"0\.5"):
        taylor_gelu(torch.zeros(4), 6, 0.5)


def test_the_bf16_constant_is_the_rounded_one():
    rounded = torch.tensor(activations.TANH_FACTOR).to(torch.bfloat16).item()
    assert rounded == activations.TANH_FACTOR_BF16
