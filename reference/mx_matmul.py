"""Products of MX tensors: the block-scaled matrix product, and a linear layer with its gradients.

Sources: OCP Microscaling Formats Specification, version 1.0, section 6.2 (the dot product); the
layer's three products as in arXiv 2506.08027, its transform and roundings as in arXiv 2509.25149.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from jagbench.mx import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    BLOCK_SIZE,
    SQUARE,
    Block,
    ElemDtype,
    LinearRecipe,
    Stream,
)
from jagbench.reference import arguments
from jagbench.reference.autocast import in_autocast_dtype, outside_autocast
from jagbench.reference.hadamard import random_hadamard
from jagbench.reference.mx import mx_dequantize, random_bits
from jagbench.reference.mx_blocks import Blocks, rounded


@outside_autocast
def mx_matmul(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    *,
    a_elem_dtype: ElemDtype = "e4m3",
    b_elem_dtype: ElemDtype = "e4m3",
    a_block: Block = ALONG_COLUMNS,
    b_block: Block = ALONG_ROWS,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Product a b of codes a `[..., m, k]` and b `[..., k, n]` scaled along the contracted dim.

    a_scales, b_scales: E8M0, as `mx_quantize` returns them; a_block (1, 32) or (32, 32), b_block
        (32, 1) or (32, 32). b is stored as it is written; a weight `[n, k]` with blocks (1, 32) is
        passed as the transposed views of its codes and scales.
    dtype: of the result. Sums are float64 for float64, else float32, and are rounded once.

    Returns `[..., m, n]`. Raises ValueError for arguments that do not fit, with their numbers.
    """
    for name, block, along in (("a", a_block, ALONG_COLUMNS), ("b", b_block, ALONG_ROWS)):
        if block not in (along, SQUARE):
            raise ValueError(
                f"{name}_block must lie along the contracted dim, {along} or {SQUARE}, got {block}"
            )
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"a [..., m, k] and b [..., k, n] do not fit: {tuple(a.shape)}, {tuple(b.shape)}"
        )
    if dtype not in arguments.DTYPES:
        raise ValueError(f"dtype must be one of {arguments.DTYPES}, got {dtype}")
    wide = torch.promote_types(dtype, torch.float32)
    left = mx_dequantize(a, a_scales, elem_dtype=a_elem_dtype, block=a_block, dtype=wide)
    right = mx_dequantize(b, b_scales, elem_dtype=b_elem_dtype, block=b_block, dtype=wide)
    return (left @ right).to(dtype)


def mx_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: LinearRecipe
) -> Tensor:
    """Linear layer x weight^T + bias, every product of it quantised by a recipe.

    x `[..., features]`; weight `[out_features, features]` and bias `[out_features]` in x's dtype.
    float64, float32, float16 and bfloat16; sums are float32 (float64 for float64), rounded once.
    Under autocast all are taken in its dtype.

    Gradients pass through the quantisation as if it were the identity:
    dX = Q(dY) Q(W), dW = Q(dY)^T Q(x) or dY^T x, db = the sum of dY. Blocks along the tokens run
    over x's leading dims as one, the last of them short.

    Returns `[..., out_features]`. Raises ValueError for arguments that do not fit.
    """
    x, weight, bias = in_autocast_dtype(x, weight, bias)
    _check_linear(x, weight, bias)
    if not isinstance(recipe, LinearRecipe):
        raise ValueError(f"recipe must be a LinearRecipe, got {type(recipe).__name__}")
    tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out: Tensor = _Linear.apply(tokens, weight, recipe, bias)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """x `[tokens, features]`, weight `[out_features, features]`."""

    @staticmethod
    @outside_autocast
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, recipe: LinearRecipe, bias: Tensor | None
    ) -> Tensor:
        """Q(x) Q(W)^T + bias."""
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        inputs = rounded(_wide(x), Blocks(recipe.elem_dtype, ALONG_COLUMNS, recipe.scale_mode))
        weights = rounded(
            _wide(weight), Blocks(recipe.elem_dtype, recipe.weight_block, recipe.scale_mode)
        )
        out = inputs @ weights.T
        return (out if bias is None else out + _wide(bias)).to(x.dtype)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """dX, dW, nothing for the recipe, db."""
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            input_gradient(grad, weight, ctx.recipe).to(x.dtype) if wanted[0] else None,
            weight_gradient(grad, x, ctx.recipe).to(weight.dtype) if wanted[1] else None,
            None,
            _wide(grad).sum(0).to(grad.dtype) if wanted[3] else None,
        )


def input_gradient(grad: Tensor, weight: Tensor, recipe: LinearRecipe) -> Tensor:
    """Q(dY) Q(W): dY `[tokens, out_features]` in blocks along out_features; float32 at least."""
    along = ALONG_ROWS if recipe.weight_block == ALONG_COLUMNS else recipe.weight_block
    weights = rounded(_wide(weight), Blocks(recipe.elem_dtype, along, recipe.scale_mode))
    return _gradient(grad, ALONG_COLUMNS, recipe, Stream.GRADIENT_FOR_INPUT) @ weights


def weight_gradient(grad: Tensor, x: Tensor, recipe: LinearRecipe) -> Tensor:
    """Q(dY)^T Q(x) in blocks along the tokens, or dY^T x; float32 at least.

    Tokens are filled up with zeros to a multiple of the transform's size, which adds nothing.
    """
    if recipe.weight_gradient == "bf16":
        return _wide(grad).T @ _wide(x)
    operands = []
    for operand in (grad, x):
        missing = -operand.shape[0] % (recipe.hadamard or BLOCK_SIZE)
        filled = functional.pad(_wide(operand), (0, 0, 0, missing))
        if recipe.hadamard is not None:
            filled = random_hadamard(filled, size=recipe.hadamard, seed=recipe.seed, dim=0)
        operands.append(filled)
    left = _gradient(operands[0], ALONG_ROWS, recipe, Stream.GRADIENT_FOR_WEIGHT)
    right = rounded(operands[1], Blocks(recipe.elem_dtype, ALONG_ROWS, recipe.scale_mode))
    return left.T @ right


def _gradient(grad: Tensor, block: Block, recipe: LinearRecipe, stream: Stream) -> Tensor:
    blocks = Blocks(recipe.gradient_elem_dtype, block, recipe.scale_mode)
    stochastic = recipe.gradient_rounding == "stochastic"
    random = random_bits(grad, recipe.seed, stream) if stochastic else None
    return rounded(_wide(grad), blocks, random)


def _wide(x: Tensor) -> Tensor:
    """Convert x to the dtype that sums are taken in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for name, tensor, dims in (("x", x, None), ("weight", weight, 2), ("bias", bias, 1)):
        if name == "bias" and tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.dim() < 1 or tensor.dim() != (dims or x.dim()):
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor of {dims or 'at least 1'} dims, got {shape}")
        if tensor.dtype not in arguments.DTYPES or tensor.dtype != x.dtype:
            raise ValueError(
                f"x, weight and bias must share one of the dtypes {arguments.DTYPES}: x has "
                f"{x.dtype}, {name} {tensor.dtype}"
            )
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}")
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} features and weight takes {weight.shape[1]}")
    if bias is not None and bias.shape[0] != weight.shape[0]:
        raise ValueError(f"bias has {bias.shape[0]} features and weight gives {weight.shape[0]}")
