"""The activations of GDPA by name: the function, its true derivative, what it stands in for.

Everything is a plain formula of torch's elementwise functions, in the dtype it is given; float64 is
the truth. Kinks follow torch: the derivative of ReLU and squared ReLU at 0 is 0, that of leaky ReLU
is its slope, hard-swish has 0 at -3 and 1 at 3. No derivative is approximated: each is that of the
forward beside it, so autograd through the forward gives the same.

Sources: Meta's ads_model_kernel_library (the list and its constants); GELU and its tanh form, arXiv
1606.08415; squared ReLU, arXiv 2109.08668; hard-swish, arXiv 1905.02244.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]

#: Factor inside the tanh form of GELU, and the same rounded to bfloat16.
TANH_FACTOR = math.sqrt(2 / math.pi)
TANH_FACTOR_BF16 = 0.796875
#: Weight of the cube inside the tanh form.
TANH_CUBE = 0.044715
LEAKY_SLOPE = 0.01
#: Largest relative error of the hardware's tanh (tanh.approx.f32; CUDA C++ Programming Guide).
HARDWARE_TANH_ERROR = 2.0**-10.987
#: Activations that are meant to be computed with it.
HARDWARE_TANH = frozenset({"fast_gelu", "fast_gelu_bf16", "fast_silu"})
#: Degree -> coefficients of x^2, x^4, ... of x Phi(x) about 0, as published; that of x is 0.5.
TAYLOR_COEFFICIENTS: Mapping[int, tuple[float, ...]] = {
    6: (0.39894228, -0.06649038, 0.00997356),
    10: (0.39894228, -0.06649038, 0.00997356, -0.00118733, 0.00011718),
}
#: Degree -> largest |x| (included) at which the polynomial is used.
TAYLOR_BOUND: Mapping[int, float] = {6: 1.25, 10: 1.25}
#: Shares of the elements that `taylor_gelu` can give to the polynomial.
TAYLOR_FRACTIONS = (0.0, 0.1875, 1.0)


@dataclass(frozen=True)
class Activation:
    """An elementwise function.

    name: as operators take it.
    forward, derivative: tensor -> tensor of the same shape and dtype.
    approximates: name of the activation it stands in for; "" for one that is itself.
    error_bound: largest |approximation - approximated| / max(1, |x|) over all x, in exact
        arithmetic, and with the hardware's tanh where the activation is meant to use that.
    source: where it was published.
    """

    name: str
    forward: Function
    derivative: Function
    approximates: str = ""
    error_bound: float = 0.0
    source: str = "ads_model_kernel_library"


def identity(x: Tensor) -> Tensor:
    """The scores themselves."""
    return x


def identity_derivative(x: Tensor) -> Tensor:
    """1."""
    return torch.ones_like(x)


def gelu(x: Tensor) -> Tensor:
    """GELU, x Phi(x), with the error function."""
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def gelu_derivative(x: Tensor) -> Tensor:
    """Phi(x) + x phi(x), the normal distribution and density."""
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * density


def gelu_tanh(x: Tensor, factor: float = TANH_FACTOR) -> Tensor:
    """0.5 x (1 + tanh(factor (x + 0.044715 x^3)))."""
    return 0.5 * x * (1 + torch.tanh(factor * (x + TANH_CUBE * x * x * x)))


def gelu_tanh_derivative(x: Tensor, factor: float = TANH_FACTOR) -> Tensor:
    """0.5 (1 + t) + 0.5 x (1 - t^2) u', with t = tanh(u) and u' = factor (1 + 3 0.044715 x^2)."""
    t = torch.tanh(factor * (x + TANH_CUBE * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * factor * (1 + 3 * TANH_CUBE * x * x)


def silu(x: Tensor) -> Tensor:
    """SiLU, x / (1 + exp(-x))."""
    return x * torch.sigmoid(x)


def silu_derivative(x: Tensor) -> Tensor:
    """Derivative of SiLU, s + x s (1 - s), with s = sigmoid(x)."""
    s = torch.sigmoid(x)
    return s + x * s * (1 - s)


def fast_silu(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(x / 2)): SiLU, written for the hardware's tanh."""
    return 0.5 * x * (1 + torch.tanh(0.5 * x))


def fast_silu_derivative(x: Tensor) -> Tensor:
    """0.5 (1 + t) + 0.25 x (1 - t^2), with t = tanh(x / 2)."""
    t = torch.tanh(0.5 * x)
    return 0.5 * (1 + t) + 0.25 * x * (1 - t * t)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return torch.relu(x)


def relu_derivative(x: Tensor) -> Tensor:
    """1 above 0, else 0."""
    return (x > 0).to(x.dtype)


def leaky_relu(x: Tensor) -> Tensor:
    """Leaky ReLU: x above 0, else 0.01 x."""
    return torch.where(x > 0, x, LEAKY_SLOPE * x)


def leaky_relu_derivative(x: Tensor) -> Tensor:
    """1 above 0, else 0.01."""
    return torch.where(x > 0, torch.ones_like(x), torch.full_like(x, LEAKY_SLOPE))


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)^2."""
    return torch.relu(x) * torch.relu(x)


def relu_squared_derivative(x: Tensor) -> Tensor:
    """2 max(x, 0)."""
    return 2 * torch.relu(x)


def hardswish(x: Tensor) -> Tensor:
    """0 up to -3, x from 3, and x (x + 3) / 6 between."""
    inside = torch.where(x < 3, x * (x + 3) / 6, x)
    return torch.where(x > -3, inside, torch.zeros_like(x))


def hardswish_derivative(x: Tensor) -> Tensor:
    """0 up to -3, 1 from 3, and (2 x + 3) / 6 between."""
    inside = torch.where(x < 3, (2 * x + 3) / 6, torch.ones_like(x))
    return torch.where(x > -3, inside, torch.zeros_like(x))


def raw_taylor_gelu(x: Tensor, degree: int) -> Tensor:
    """The Maclaurin polynomial of GELU, unguarded: 0.5 x + c2 x^2 + c4 x^4 + ..."""
    square = x * x
    total = torch.zeros_like(x)
    for coefficient in reversed(TAYLOR_COEFFICIENTS[degree]):
        total = (total + coefficient) * square
    return 0.5 * x + total


def raw_taylor_gelu_derivative(x: Tensor, degree: int) -> Tensor:
    """0.5 + 2 c2 x + 4 c4 x^3 + ..., unguarded."""
    coefficients = TAYLOR_COEFFICIENTS[degree]
    total = torch.zeros_like(x)
    for power, coefficient in reversed(list(enumerate(coefficients, start=1))):
        total = total * x * x + 2 * power * coefficient
    return 0.5 + total * x


def out_of_taylor_range(x: Tensor, degree: int) -> Tensor:
    """Where the polynomial is not used, bool: |x| over `TAYLOR_BOUND[degree]`, or NaN."""
    return ~(x.abs() <= TAYLOR_BOUND[degree])


def taylor_positions(size: int, fraction: float) -> Tensor:
    """Which positions of a dim of some size the polynomial serves, bool `[size]`.

    Of each 16 positions in a row, the first 0, 3 or 16: a fixed rule, so results repeat.
    """
    if fraction not in TAYLOR_FRACTIONS:
        raise ValueError(f"fraction must be one of {TAYLOR_FRACTIONS}, got {fraction}")
    return torch.arange(size) % 16 < round(16 * fraction)


def taylor_gelu(x: Tensor, degree: int, fraction: float = 1.0) -> Tensor:
    """GELU by polynomial on a share of the positions of the last dim, by the tanh form elsewhere.

    A chosen position whose |x| exceeds `TAYLOR_BOUND[degree]` falls back to the tanh form too.
    fraction: one of `TAYLOR_FRACTIONS`. Below 1 the result depends on position, which serves to
    study the trade between polynomial and tanh units; the named activations are fraction 1.
    """
    return _guarded(raw_taylor_gelu, gelu_tanh, x, degree, fraction)


def taylor_gelu_derivative(x: Tensor, degree: int, fraction: float = 1.0) -> Tensor:
    """Derivative of `taylor_gelu`: it changes branch at the same places."""
    return _guarded(raw_taylor_gelu_derivative, gelu_tanh_derivative, x, degree, fraction)


def _guarded(
    polynomial: Callable[[Tensor, int], Tensor],
    fallback: Function,
    x: Tensor,
    degree: int,
    fraction: float,
) -> Tensor:
    used = ~out_of_taylor_range(x, degree)
    if fraction != 1.0:
        used = used & taylor_positions(x.shape[-1], fraction).to(x.device)
    # The polynomial never sees x out of range: its overflow times a gradient of 0 would be NaN.
    return torch.where(used, polynomial(torch.where(used, x, 0.0), degree), fallback(x))


def _taylor(degree: int, error_bound: float) -> Activation:
    return Activation(
        f"gelu_taylor{degree}",
        partial(taylor_gelu, degree=degree),
        partial(taylor_gelu_derivative, degree=degree),
        approximates="gelu",
        error_bound=error_bound,
    )


#: Every activation by name.
ACTIVATIONS: Mapping[str, Activation] = {
    a.name: a
    for a in (
        Activation("identity", identity, identity_derivative),
        Activation("gelu", gelu, gelu_derivative, source="arXiv 1606.08415"),
        Activation(
            "gelu_tanh", gelu_tanh, gelu_tanh_derivative, "gelu", 4.8e-4, "arXiv 1606.08415"
        ),
        Activation(
            "fast_gelu", gelu_tanh, gelu_tanh_derivative, "gelu_tanh", HARDWARE_TANH_ERROR / 2
        ),
        Activation(
            "fast_gelu_bf16",
            partial(gelu_tanh, factor=TANH_FACTOR_BF16),
            partial(gelu_tanh_derivative, factor=TANH_FACTOR_BF16),
            "gelu_tanh",
            3.2e-4 + HARDWARE_TANH_ERROR / 2,
        ),
        Activation("silu", silu, silu_derivative, source="arXiv 1606.08415"),
        Activation("fast_silu", fast_silu, fast_silu_derivative, "silu", HARDWARE_TANH_ERROR / 2),
        Activation("relu", relu, relu_derivative),
        Activation("leaky_relu", leaky_relu, leaky_relu_derivative),
        Activation(
            "relu_squared", relu_squared, relu_squared_derivative, source="arXiv 2109.08668"
        ),
        Activation("hardswish", hardswish, hardswish_derivative, source="arXiv 1905.02244"),
        _taylor(6, 6.2e-3),
        _taylor(10, 4.8e-4),
    )
}


def activation(name: str) -> Function:
    """The function of a name; ValueError for an unknown one."""
    return _find(name).forward


def derivative(name: str) -> Function:
    """The derivative of the function of a name; ValueError for an unknown one."""
    return _find(name).derivative


def by_head(names: str | Sequence[str], heads: int) -> Sequence[str]:
    """One known name a head, from one for all or from as many; ValueError for any other."""
    each = [names] * heads if isinstance(names, str) else list(names)
    if len(each) != heads:
        raise ValueError(f"{len(each)} activations are named for {heads} heads")
    for name in each:
        _find(name)
    return each


def _find(name: str) -> Activation:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]
