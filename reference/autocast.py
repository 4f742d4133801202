"""What autocast means for operators that quantise: the dtype of their arguments, and no more.

Inside autocast torch takes every matrix product in half precision, and one of quantised operands
with it, whose sums then are not float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def in_autocast_dtype(*values: Any) -> tuple[Any, ...]:
    """Float tensors in the autocast dtype where autocast is on, all else as it is.

    float64 is left alone, as torch does.
    """
    device = _device(values)
    if device is None or not torch.is_autocast_enabled(device):
        return values
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in values
    )


def outside_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """The function with autocast off, so that its products are in the dtypes that it says."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        device = _device((*arguments, *options.values()))
        if device is None:
            return function(*arguments, **options)
        with torch.autocast(device, enabled=False):
            return function(*arguments, **options)

    return call


def _device(values: tuple[Any, ...]) -> str | None:
    """Type of the device of the first tensor; None without one, and of meta, which has none."""
    device = next((x.device.type for x in values if isinstance(x, Tensor)), None)
    return None if device == "meta" else device
