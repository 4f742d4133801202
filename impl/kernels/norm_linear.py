"""A norm with a linear layer behind it: custom ops, autograd, public function."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from jagbench.impl.kernels.arguments import LARGEST_ROW_STRIDE, is_eps
from jagbench.impl.kernels.attention_launch import require_device
from jagbench.impl.kernels.hopper import norm_gradient_launch
from jagbench.impl.kernels.hopper.norm_product_launch import norm_product_problem
from jagbench.impl.kernels.norm_linear_launch import (
    NormCall,
    launch_forward,
    launch_input_gradient,
    launch_weight_gradient,
)
from jagbench.impl.kernels.operators import define, differentiable
from jagbench.impl.kernels.packed_arguments import check_packed_offsets, check_values_of_offsets
from jagbench.impl.kernels.tuning import Schedule, Tier, tier_alone

NAME = "norm_linear"
_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
# Rows of more features than one program's tile can hold in the backward.
_MOST_FEATURES = 16_384


def norm_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    *,
    norm: Literal["rms", "layer"],
    eps: float,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    schedule: Schedule | Tier = "auto",
) -> Tensor:
    """norm(x) weight^T + bias for every row before the last offset; other rows are 0.

    x `[total, features]`, float32, float16 or bfloat16, any row stride; weight
    `[out_features, features]` and bias `[out_features]` of its dtype; offsets `[batch + 1]`, int32
    or int64, or None for a batch without padding.

    norm: "rms" or "layer"; eps is added under the root. norm_weight, norm_bias: `[features]`, of
    x's dtype or float32; folded into the linear layer, the weight rounded once to x's dtype.
    schedule: a tier. "hopper" has a forward, for what `hopper.norm_product_launch` lets through,
    and with it or "auto" the gradients of parameters are formed there where
    `hopper.norm_gradient_launch` can; the gradient of x is portable. "auto" takes what there is.

    Returns out `[total, out_features]` in x's dtype. Outputs and gradients are bit-equal on
    repeats. Raises ValueError for malformed arguments, NotImplementedError for other dtypes, more
    than 16,384 features, and a call that the Hopper tier is asked for and does not take.
    """
    tier = tier_alone(NAME, schedule).tier
    if norm not in ("rms", "layer"):
        raise ValueError(f"{NAME}: norm must be 'rms' or 'layer', got {norm!r}")
    if not is_eps(eps):
        raise ValueError(f"{NAME}: eps must be at least 0, got {eps!r}")
    x, weight, bias = _in_autocast_dtype(x, weight, bias)
    _check(x, weight, offsets, norm, bias, norm_weight, norm_bias)
    problem = norm_product_problem(x, weight.shape[0]) if tier == "hopper" else None
    if problem is not None:
        raise NotImplementedError(f"{NAME}: schedule 'hopper': {problem}")
    offsets = None if offsets is None else offsets.contiguous()
    out: Tensor = _differentiable_op(
        x, weight, offsets, bias, norm_weight, norm_bias, norm == "layer", float(eps),
        tier == "portable",
    )[0]  # fmt: skip
    return out


def _in_autocast_dtype(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the product takes, in the autocast dtype where autocast is on."""
    for name, value in (("x", x), ("weight", weight)):
        if not isinstance(value, Tensor):
            raise ValueError(f"{NAME}: {name} must be a tensor, got {type(value).__name__}")
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    x, weight = (t.to(dtype) if t.dtype in _FLOAT_TYPES else t for t in (x, weight))
    return x, weight, None if bias is None else bias.to(dtype)


def _check(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    norm: str,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
) -> None:
    """Refuse what does not fit together, but for the offsets' values."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or 0 in weight.shape:
        raise ValueError(
            f"{NAME}: x must be [rows, features] and weight [out_features, features], got "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype == weight.dtype == torch.float64:
        raise NotImplementedError(f"{NAME}: no kernel computes float64")
    if x.dtype not in _FLOAT_TYPES:
        raise ValueError(f"{NAME}: x {tuple(x.shape)} must be of float dtype, got {x.dtype}")
    if norm == "rms" and norm_bias is not None:
        found = (
            tuple(norm_bias.shape) if isinstance(norm_bias, Tensor) else type(norm_bias).__name__
        )
        raise ValueError(f"{NAME}: RMSNorm has no norm_bias, got one of {found}")
    wide = (x.dtype, torch.float32)
    _check_parameter(x, "weight", weight, weight.shape, (x.dtype,))
    _check_parameter(x, "bias", bias, weight.shape[:1], (x.dtype,))
    _check_parameter(x, "norm_weight", norm_weight, x.shape[1:], wide)
    _check_parameter(x, "norm_bias", norm_bias, x.shape[1:], wide)
    if x.shape[1] > _MOST_FEATURES or weight.numel() >= 1 << 31:
        raise NotImplementedError(
            f"{NAME}: at most {_MOST_FEATURES} features and 2^31 weights, got {tuple(weight.shape)}"
        )
    if offsets is not None:
        check_packed_offsets(NAME, "x", x, offsets)


def _check_parameter(
    x: Tensor, name: str, value: Tensor | None, shape: torch.Size, dtypes: tuple[torch.dtype, ...]
) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor) or value.shape != shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{NAME}: {name} must be {list(shape)}, got {found}")
    if value.dtype not in dtypes:
        raise ValueError(
            f"{NAME}: {name} {list(shape)} must be of {dtypes} beside x of {x.dtype}, got "
            f"{value.dtype}"
        )
    if value.device != x.device:
        raise ValueError(f"{NAME}: {name} is on {value.device}, x on {x.device}")


def row_layout(x: Tensor) -> Tensor:
    """The matrix itself if kernels can address it, else a contiguous copy."""
    fits = x.stride(1) == 1 or x.shape[1] == 1
    return x if fits and x.stride(0) < LARGEST_ROW_STRIDE else x.contiguous()


def _folded(weight: Tensor, norm_weight: Tensor | None) -> Tensor:
    """The layer's weight, which is contiguous, with the norm's, rounded once."""
    if norm_weight is None:
        return weight
    return (weight.float() * norm_weight.float()).to(weight.dtype)


def _shift(weight: Tensor, bias: Tensor | None, norm_bias: Tensor | None) -> Tensor | None:
    """What is added to every row, float32: the layer's bias and the norm's through the layer."""
    total = None if bias is None else bias.float()
    if norm_bias is None:
        return total
    through = (weight.float() * norm_bias.float()).sum(1)
    return through if total is None else total + through


def _forward(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    layer: bool,
    eps: float,
    portable: bool,
) -> tuple[Tensor, Tensor]:
    """Out and the rows' statistics; arguments as `norm_linear` has checked them."""
    require_device(NAME, x)
    if offsets is not None:
        check_values_of_offsets(NAME, offsets, x.shape[0], None, False)
    with torch.cuda.device_of(x):
        weight = weight.contiguous()
        folded = _folded(weight, norm_weight)
        call = NormCall(row_layout(x), folded, offsets, layer, eps, portable)
        return launch_forward(call, _shift(weight, bias, norm_bias))


def _forward_fake(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    layer: bool,
    eps: float,
    portable: bool,
) -> tuple[Tensor, Tensor]:
    statistics = x.new_empty(3 if layer else 1, x.shape[0], dtype=torch.float32)
    return x.new_empty(x.shape[0], weight.shape[0]), statistics


def _backward(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    statistics: Tensor,
    layer: bool,
    eps: float,
    portable: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients that `needs` asks for (x, weight, bias and the norm's); others are empty."""
    with torch.cuda.device_of(x):
        weight = weight.contiguous()
        folded = _folded(weight, norm_weight)
        call = NormCall(row_layout(x), folded, offsets, layer, eps, portable)
        d_out = row_layout(d_out)
        dx = launch_input_gradient(call, d_out, statistics) if needs[0] else x.new_empty(0)
        if not any(needs[1:]):
            none = [weight.new_empty(0) for _ in range(4)]
            return dx, none[0], none[1], none[2], none[3]
        product, sums = _weight_gradient(call, d_out, statistics)
    return (dx, *_parameter_gradients(product, sums, weight, bias, norm_weight, norm_bias, needs))


def _weight_gradient(call: NormCall, d_out: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """d_out^T normalised(x), and the sum of d_out's rows, on the tier that takes the call."""
    if not call.portable and norm_gradient_launch.why_not(call, d_out) is None:
        return norm_gradient_launch.launch_weight_gradient(call, d_out, statistics)
    return launch_weight_gradient(call, d_out, statistics)


def _parameter_gradients(
    product: Tensor,
    sums: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of weight, bias and the norm's parameters, from d_out^T normalised(x) and d_out's row sum.

    That of norm_weight is the sum over outputs of weight times the first, element by element: no
    second pass over rows, and the same bits on repeats. norm_bias likewise from the second.
    """
    none, wide = weight.new_empty(0), weight.float()
    of_norm_weight, of_norm_bias = none, none
    if norm_weight is not None and needs[3]:
        of_norm_weight = (wide * product).sum(0).to(norm_weight.dtype)
    if norm_bias is not None and needs[4]:
        of_norm_bias = (wide * sums[:, None]).sum(0).to(norm_bias.dtype)
    if needs[1] and norm_weight is not None:
        product = product * norm_weight.float()
    if needs[1] and norm_bias is not None:
        product = product + sums[:, None] * norm_bias.float()
    of_weight = product.to(weight.dtype) if needs[1] else none
    of_bias = none if bias is None or not needs[2] else sums.to(bias.dtype)
    return of_weight, of_bias, of_norm_weight, of_norm_bias


def _backward_fake(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    statistics: Tensor,
    layer: bool,
    eps: float,
    portable: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    found = [x.new_empty(x.shape if needs[0] else 0)]
    parameters = (weight, bias, norm_weight, norm_bias)
    for parameter, need in zip(parameters, needs[1:], strict=True):
        like = weight if parameter is None else parameter
        found.append(like.new_empty(like.shape if need and parameter is not None else 0))
    return found[0], found[1], found[2], found[3], found[4]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.constants = inputs[6:]


def _autograd(
    ctx: Any, wanted: tuple[bool, ...], d_out: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    if d_out is None:
        return (None,) * 9
    needs = [wanted[0], wanted[1], *wanted[3:6]]
    found = _backward_op(d_out, *ctx.saved_tensors, *ctx.constants, needs)
    kept = [x if need else None for x, need in zip(found, needs, strict=True)]
    return (*kept[:2], None, *kept[2:], None, None, None)


_forward_op = define("norm_linear_forward", _forward, _forward_fake)
_backward_op = define("norm_linear_backward", _backward, _backward_fake)
_differentiable_op = differentiable(_forward_op, _setup, _autograd)


def _flops(x: Tensor, weight: Tensor, offsets: Tensor | None) -> int:
    """Of a product: the rows in use, features and outputs."""
    rows = x.shape[0] if offsets is None else int(offsets[-1])
    return 2 * rows * weight.numel()


@register_flop_formula(torch.ops.jagbench.norm_linear_forward, get_raw=True)
def _forward_flops(x: Any, weight: Any, offsets: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(x, weight, offsets)


@register_flop_formula(torch.ops.jagbench.norm_linear_backward, get_raw=True)
def _backward_flops(
    d_out: Any, x: Any, weight: Any, offsets: Any, bias: Any, norm_weight: Any, norm_bias: Any,
    statistics: Any, layer: bool, eps: float, portable: bool, needs: Any, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    # A product for x, and one for all parameters together.
    return _flops(x, weight, offsets) * (bool(needs[0]) + any(needs[1:]))
