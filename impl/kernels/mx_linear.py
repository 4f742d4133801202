"""The linear layer of MX products: custom ops, autograd, public function."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from jagbench.impl.kernels.attention_launch import require_device
from jagbench.impl.kernels.mx_launch import Format, scale_rows_of
from jagbench.impl.kernels.mx_matmul_launch import (
    Codes,
    launch_codes,
    launch_product,
    launch_round,
    launch_round_and_sum,
    launch_values,
    library_product,
    product_route,
    whole,
)
from jagbench.impl.kernels.operators import define, differentiable
from jagbench.mx import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    BLOCK_SIZE,
    SQUARE,
    Block,
    ElemDtype,
    LinearRecipe,
    ScaleMode,
    Stream,
)

NAME = "mx_linear"
_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def mx_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: LinearRecipe
) -> Tensor:
    """Linear layer x weight^T + bias, every product of it quantised by a recipe.

    x `[..., features]`, float32, float16 or bfloat16, any strides; weight
    `[out_features, features]` and bias `[out_features]` of its dtype. Under autocast all are taken
    in its dtype. Sums are float32, rounded once.

    Gradients pass through the quantisation as if it were the identity:
    dX = Q(dY) Q(W), dW = Q(dY)^T Q(x) or dY^T x, db = the sum of dY. Blocks along the tokens run
    over x's leading dims as one, the last of them short.

    What is kept of x for the backward: with `weight_gradient="mx"` its codes along the tokens, 8.25
    bits an element; with "bf16" x itself, which the unquantised product needs; nothing where the
    weight needs no gradient. Bit-equal on repeats. Returns `[..., out_features]`. Raises ValueError
    for arguments that do not fit, NotImplementedError for float64.
    """
    x, weight, bias = _in_autocast_dtype(x, weight, bias)
    _check(x, weight, bias)
    if not isinstance(recipe, LinearRecipe):
        raise ValueError(f"{NAME}: recipe must be a LinearRecipe, got {type(recipe).__name__}")
    keep = recipe.weight_gradient == "mx" and torch.is_grad_enabled() and weight.requires_grad
    out: Tensor = _differentiable_op(
        x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weight, bias,
        recipe.elem_dtype, recipe.gradient_elem_dtype, recipe.scale_mode, list(recipe.weight_block),
        recipe.weight_gradient == "mx", recipe.hadamard, recipe.gradient_rounding == "stochastic",
        recipe.seed, keep,
    )[0]  # fmt: skip
    return out.view(*x.shape[:-1], weight.shape[0])


def _in_autocast_dtype(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All of them in the autocast dtype, where autocast is on."""
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(value, Tensor) and not (name == "bias" and value is None):
            raise ValueError(f"{NAME}: {name} must be a tensor, got {type(value).__name__}")
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    x, weight = (t.to(dtype) if t.dtype in _FLOAT_TYPES else t for t in (x, weight))
    return x, weight, None if bias is None else bias.to(dtype)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{NAME}: x must be [..., features] and weight [out_features, features], got "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{NAME}: bias must be {list(weight.shape[:1])}, got {tuple(bias.shape)}")
    if x.dtype == torch.float64:
        raise NotImplementedError(f"{NAME}: no kernel reads float64")
    if x.dtype not in _FLOAT_TYPES:
        raise ValueError(
            f"{NAME}: x {tuple(x.shape)} must have one of the dtypes {_FLOAT_TYPES}, got {x.dtype}"
        )
    for name, value in (("weight", weight), ("bias", bias)):
        if value is None:
            continue
        if value.dtype != x.dtype:
            raise ValueError(f"{NAME}: x has {x.dtype}, {name} {value.dtype}")
        if value.device != x.device:
            raise ValueError(f"{NAME}: {name} is on {value.device}, x on {x.device}")


@dataclass(frozen=True)
class _Formats:
    """Formats of a recipe's operands."""

    elem_dtype: ElemDtype
    gradient_elem_dtype: ElemDtype
    scale_mode: ScaleMode
    weight_block: Block
    hadamard: int | None
    seed: int
    stochastic: bool

    @staticmethod
    def of(
        elem_dtype: str, gradient_elem_dtype: str, scale_mode: str, weight_block: list[int],
        hadamard: int | None, stochastic: bool, seed: int,
    ) -> _Formats:  # fmt: skip
        return _Formats(
            cast(ElemDtype, elem_dtype), cast(ElemDtype, gradient_elem_dtype),
            cast(ScaleMode, scale_mode), (weight_block[0], weight_block[1]), hadamard, seed,
            stochastic,
        )  # fmt: skip

    def values(self, block: Block) -> Format:
        """Of x or the weight."""
        return Format(self.elem_dtype, block, self.scale_mode)

    def gradient(self, stream: Stream) -> Format:
        """Of dY, by the product it is for."""
        seed = self.seed if self.stochastic else None
        if stream == Stream.GRADIENT_FOR_INPUT:
            return Format(
                self.gradient_elem_dtype, ALONG_COLUMNS, self.scale_mode, seed, int(stream)
            )
        return Format(
            self.gradient_elem_dtype, ALONG_ROWS, self.scale_mode, seed, int(stream),
            self.hadamard, self.seed,
        )  # fmt: skip

    @property
    def tokens(self) -> Format:
        """Of x in blocks along the tokens."""
        return Format(
            self.elem_dtype, ALONG_ROWS, self.scale_mode, None, 0, self.hadamard, self.seed
        )


def _product(
    a: Tensor, a_form: Format, b: Tensor, b_form: Format, across: bool, bias: Tensor | None
) -> Tensor:
    """Q(a) Q(b)^T + bias of a `[rows, depth]` and b `[columns, depth]`, in a's dtype.

    across: b is stored as `[depth, columns]`, with blocks of that.
    """
    route = product_route(a.device)
    if route == "library":
        right = launch_round(b, b_form)
        right = right.mT if across else right
        return library_product(launch_round(a, a_form), right, bias, a.dtype)
    left, codes = launch_codes(a, a_form), launch_codes(b, b_form)
    codes = codes.transposed if across else codes
    return launch_product(left, codes, bias, a.dtype, route == "native")[0]


def _input_gradient(
    d_out: Tensor, weight: Tensor, formats: _Formats, summed: bool
) -> tuple[Tensor, Tensor | None]:
    """Q(dY) Q(W); W in squares has the codes of the forward.

    summed: whether the sum of dY's rows, float32, is wanted; it comes where a pass over dY has it.
    """
    form = formats.gradient(Stream.GRADIENT_FOR_INPUT)
    of_weight = formats.values(SQUARE if formats.weight_block == SQUARE else ALONG_ROWS)
    if summed and product_route(d_out.device) == "library":
        left, sums = launch_round_and_sum(d_out, form)
        right = launch_round(weight, of_weight).mT
        return library_product(left, right, None, d_out.dtype), sums
    return _product(d_out, form, weight, of_weight, True, None), None


def _weight_gradient(d_out: Tensor, codes: Tensor, scales: Tensor, formats: _Formats) -> Tensor:
    """Q(dY)^T Q(x) of x's codes along the tokens, as `_kept` has them."""
    form, rows = formats.gradient(Stream.GRADIENT_FOR_WEIGHT), codes.shape[0]
    route = product_route(d_out.device)
    if route == "library":
        left = launch_round(d_out, form, rows)
        right = launch_values(codes[None], scales[None], formats.elem_dtype, ALONG_ROWS)[0]
        return library_product(left.mT, right.mT, None, d_out.dtype)
    left_codes = launch_codes(_filled(d_out, rows), form).transposed
    right_codes = Codes(codes[None], scales[None], formats.elem_dtype, ALONG_ROWS).transposed
    return launch_product(left_codes, right_codes, None, d_out.dtype, route == "native")[0]


def _filled(x: Tensor, rows: int) -> Tensor:
    """x with rows of zeros up to `rows`."""
    return x if x.shape[0] == rows else torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))


def _kept_shapes(x: Tensor, hadamard: int | None, keep: bool) -> tuple[tuple[int, int], ...]:
    """Shapes of x's codes along the tokens and of their scales; nothing is kept as 0 rows."""
    rows = whole(x.shape[0], hadamard) if keep else 0
    return (rows, x.shape[1]), (scale_rows_of(rows, None, BLOCK_SIZE), x.shape[1])


def _kept(x: Tensor, formats: _Formats, keep: bool) -> tuple[Tensor, Tensor]:
    """Codes of x along the tokens, behind the transform, and their scales."""
    shape, scales = _kept_shapes(x, formats.hadamard, keep)
    if not shape[0] or not shape[1]:
        codes = torch.empty(shape, dtype=torch.uint8, device=x.device)
        return codes, codes.new_empty(scales)
    found = launch_codes(_filled(x, shape[0]), formats.tokens)
    return found.codes[0], found.scales[0]


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    elem_dtype: str,
    gradient_elem_dtype: str,
    scale_mode: str,
    weight_block: list[int],
    mx: bool,
    hadamard: int | None,
    stochastic: bool,
    seed: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Out, and what is kept of x; arguments as `mx_linear` has checked them."""
    require_device(NAME, x)
    formats = _Formats.of(
        elem_dtype, gradient_elem_dtype, scale_mode, weight_block, hadamard, stochastic, seed
    )
    with torch.cuda.device_of(x):
        if x.numel() and weight.numel():
            out = _product(
                x, formats.values(ALONG_COLUMNS), weight, formats.values(formats.weight_block),
                False, bias,
            )  # fmt: skip
        else:
            out = x.new_zeros(x.shape[0], weight.shape[0])
            out = out if bias is None else out + bias
        return (out, *_kept(x, formats, keep))


def _forward_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    elem_dtype: str,
    gradient_elem_dtype: str,
    scale_mode: str,
    weight_block: list[int],
    mx: bool,
    hadamard: int | None,
    stochastic: bool,
    seed: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales = (x.new_empty(s, dtype=torch.uint8) for s in _kept_shapes(x, hadamard, keep))
    return x.new_empty(x.shape[0], weight.shape[0]), codes, scales


def _backward(
    d_out: Tensor,
    x: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    weight: Tensor | None,
    elem_dtype: str,
    gradient_elem_dtype: str,
    scale_mode: str,
    weight_block: list[int],
    features: int,
    hadamard: int | None,
    stochastic: bool,
    seed: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that `needs` asks for, of x, weight and bias; others are empty.

    x: for an unquantised weight gradient, else None; weight: for the input's, else None.
    """
    formats = _Formats.of(
        elem_dtype, gradient_elem_dtype, scale_mode, weight_block, hadamard, stochastic, seed
    )
    dtype, none = d_out.dtype, d_out.new_empty(0)
    dx, dw, db, sums = none, none, none, None
    with torch.cuda.device_of(d_out):
        some = bool(d_out.numel() and features)
        if needs[0] and not some:
            dx = d_out.new_zeros(d_out.shape[0], features)
        elif needs[0] and weight is not None:
            dx, sums = _input_gradient(d_out, weight, formats, needs[2])
        if needs[1] and not some:
            dw = d_out.new_zeros(d_out.shape[1], features)
        elif needs[1] and x is not None:
            dw = library_product(d_out.mT, x.mT, None, dtype)
        elif needs[1]:
            dw = _weight_gradient(d_out, codes, scales, formats)
        if needs[2]:
            db = (d_out.sum(0, dtype=torch.float32) if sums is None else sums).to(dtype)
    return dx, dw, db


def _backward_fake(
    d_out: Tensor,
    x: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    weight: Tensor | None,
    elem_dtype: str,
    gradient_elem_dtype: str,
    scale_mode: str,
    weight_block: list[int],
    features: int,
    hadamard: int | None,
    stochastic: bool,
    seed: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = d_out.shape
    shapes = ((rows, features), (width, features), (width,))
    found = [d_out.new_empty(s if n else 0) for s, n in zip(shapes, needs, strict=True)]
    return found[0], found[1], found[2]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, mx = *inputs[:2], inputs[7]
    # The keyset comes before the inputs.
    of_x, of_weight = ctx.needs_input_grad[1:3]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(
        x if of_weight and not mx else None, *output[1:], weight if of_x else None
    )
    ctx.constants = (*inputs[3:7], x.shape[1], *inputs[8:11])


def _autograd(
    ctx: Any, wanted: tuple[bool, ...], d_out: Tensor | None, *others: Any
) -> tuple[Any, ...]:
    if d_out is None:
        return (None,) * 12
    needs = list(wanted[:3])
    found = _backward_op(d_out, *ctx.saved_tensors, *ctx.constants, needs)
    kept = [t if need else None for t, need in zip(found, needs, strict=True)]
    return (*kept, *(None,) * 9)


_forward_op = define("mx_linear_forward", _forward, _forward_fake)
_backward_op = define("mx_linear_backward", _backward, _backward_fake)
_differentiable_op = differentiable(_forward_op, _setup, _autograd)


@register_flop_formula(torch.ops.jagbench.mx_linear_forward, get_raw=True)
def _forward_flops(x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * int(x.shape[0]) * int(weight.numel())


@register_flop_formula(torch.ops.jagbench.mx_linear_backward, get_raw=True)
def _backward_flops(
    d_out: Any, x: Any, codes: Any, scales: Any, weight: Any, elem_dtype: str,
    gradient_elem_dtype: str, scale_mode: str, weight_block: Any, features: int, hadamard: Any,
    stochastic: bool, seed: int, needs: Any, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * int(d_out.numel()) * features * (bool(needs[0]) + bool(needs[1]))
