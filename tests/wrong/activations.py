"""Activations of GDPA, written from their definitions; derivatives are taken by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _tanh_gelu(x: Tensor, slope: float = math.sqrt(2.0 / math.pi)) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(slope * (x + 0.044715 * x**3)))


def maclaurin_gelu(x: Tensor, degree: int) -> Tensor:
    """Maclaurin polynomial of x Phi(x), degree 6 or 10, with no guard on its range."""
    c2, c4, c6, c8, c10 = 0.39894228, -0.06649038, 0.00997356, -0.00118733, 0.00011718
    square = x * x
    tail = c6 + square * (c8 + square * c10) if degree == 10 else torch.full_like(x, c6)
    return 0.5 * x + square * (c2 + square * (c4 + square * tail))


def guarded_gelu(x: Tensor, degree: int) -> Tensor:
    """The polynomial inside its range |x| <= 1.25, tanh GELU beyond."""
    return torch.where(x.abs() <= 1.25, maclaurin_gelu(x.clamp(-1.25, 1.25), degree), _tanh_gelu(x))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "gelu": lambda x: 0.5 * x * torch.erfc(-x / math.sqrt(2.0)),
    "gelu_tanh": _tanh_gelu,
    "fast_gelu": _tanh_gelu,
    "fast_gelu_bf16": lambda x: _tanh_gelu(x, 0.796875),
    "silu": lambda x: x / (1.0 + torch.exp(-x)),
    "fast_silu": lambda x: 0.5 * x * (1.0 + torch.tanh(0.5 * x)),
    "relu": lambda x: x.clamp(min=0.0),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "relu_squared": lambda x: torch.where(x > 0, x * x, 0.0),
    "hardswish": lambda x: x * (x + 3.0).clamp(0.0, 6.0) / 6.0,
    "gelu_taylor6": lambda x: guarded_gelu(x, 6),
    "gelu_taylor10": lambda x: guarded_gelu(x, 10),
}


def activate(name: str, x: Tensor) -> Tensor:
    """act(x) by name, in the dtype of x."""
    return ACTIVATIONS[name](x)


def derivative(
    name: str, x: Tensor, function: Callable[[str, Tensor], Tensor] = activate
) -> Tensor:
    """act'(x) of the forward actually computed by `function`."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(function(name, leaf).sum(), leaf)
    return slope
