"""A linear layer in FP8 with one scale a tensor: a peer's recipe, in torch's own operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from jagbench.impl.precision.recipe import Float8, TensorwisePrecision

_TYPES: dict[Float8, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
#: Dims of a scaled product must be multiples of this.
MULTIPLE = 16


def cast(x: Tensor, elem_dtype: Float8) -> tuple[Tensor, Tensor]:
    """X in FP8 and the float32 scale that gives it back: max|x| / largest, 1 for zeros."""
    dtype = _TYPES[elem_dtype]
    largest = torch.finfo(dtype).max
    scale = x.detach().abs().amax().float() / largest if x.numel() else x.new_ones(()).float()
    scale = torch.where(scale == 0, 1.0, scale)
    # Clamped first: some versions of torch cast what is beyond the largest to NaN.
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def tensorwise_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, precision: TensorwisePrecision
) -> Tensor:
    """X weight^T + bias with all three products in FP8; x `[..., features]`.

    Products are `torch._scaled_mm`, whose sums are float32, rounded once to x's dtype. Raises
    ValueError where a dim of weight is no multiple of 16, which that product cannot take.
    """
    if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
        raise ValueError(
            f"dims of an FP8 product must be multiples of {MULTIPLE}, got weight "
            f"{tuple(weight.shape)}"
        )
    tokens = x.reshape(-1, x.shape[-1])
    out: Tensor = _Tensorwise.apply(tokens, weight, precision)  # type: ignore[no-untyped-call]
    out = out if bias is None else out + bias
    return out.view(*x.shape[:-1], weight.shape[0])


class _Tensorwise(torch.autograd.Function):
    """x `[tokens, features]`, weight `[out_features, features]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, precision: TensorwisePrecision) -> Tensor:
        """Saves x and weight in FP8."""
        filled = functional.pad(x, (0, 0, 0, -x.shape[0] % MULTIPLE))
        codes, scale = cast(filled, precision.elem_dtype)
        weights, weight_scale = cast(weight, precision.elem_dtype)
        ctx.save_for_backward(codes, scale, weights, weight_scale)
        ctx.precision, ctx.dtypes = precision, (x.dtype, weight.dtype)
        return _product(codes, weights.T, scale, weight_scale, x.dtype)[: x.shape[0]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """DX and dW from dY in FP8; rows that fill up are 0."""
        codes, scale, weights, weight_scale = ctx.saved_tensors
        filled = functional.pad(grad, (0, 0, 0, codes.shape[0] - grad.shape[0]))
        upstream, grad_scale = cast(filled, ctx.precision.gradient_elem_dtype)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            by_column = weights.T.contiguous().T
            dx = _product(upstream, by_column, grad_scale, weight_scale, ctx.dtypes[0])
            dx = dx[: grad.shape[0]]
        if ctx.needs_input_grad[1]:
            left, right = upstream.T.contiguous(), codes.T.contiguous().T
            dw = _product(left, right, grad_scale, scale, ctx.dtypes[1])
        return dx, dw, None


def _product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A `[m, k]` row-major times b `[k, n]` column-major, times both scales."""
    if not a.shape[0] or not a.shape[1]:
        return torch.zeros(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype)
