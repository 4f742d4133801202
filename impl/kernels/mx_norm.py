"""RMSNorm and LayerNorm that quantise their result, and the norm's gradient: public functions."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from jagbench.impl.kernels.arguments import is_eps
from jagbench.impl.kernels.attention_launch import require_device
from jagbench.impl.kernels.mx import (
    ScaleLayout,
    _check_shape,
    _outputs,
    _scale_views,
)
from jagbench.impl.kernels.mx_launch import Format, Matrices
from jagbench.impl.kernels.mx_norm_launch import (
    MOST_GRADIENT_FEATURES,
    NormPlan,
    launch_norm,
    launch_norm_gradient,
)
from jagbench.impl.kernels.operators import define
from jagbench.impl.kernels.packed_arguments import check_packed_offsets, check_values_of_offsets
from jagbench.mx import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    Block,
    ElemDtype,
    Rounding,
    ScaleMode,
    Stream,
    check_block,
    check_elem_dtype,
    check_rounding,
    check_scale_mode,
)

_RMS, _LAYER, _GRADIENT = "mx_rms_norm", "mx_layer_norm", "mx_norm_gradient"
_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def mx_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    eps: float,
    elem_dtype: ElemDtype = "e4m3",
    block: Block = ALONG_COLUMNS,
    scale_mode: ScaleMode = "rceil",
    rounding: Rounding = "nearest",
    seed: int | None = None,
    stream: Stream = Stream.QUANTISE,
    scale_layout: ScaleLayout = "plain",
    return_statistics: bool = False,
) -> tuple[Tensor, ...]:
    """Codes and scales of x / sqrt(mean(x^2) + eps) * weight, in one pass over x.

    x `[..., rows, features]` or, with offsets, `[total, ..., features]`; float32, float16 or
    bfloat16. weight `[features]` in x's dtype or float32, or None. The norm is float32 and is not
    rounded before it is quantised. block: (1, 32) along the features or (32, 32) squares. All else
    as in `mx_quantize`, codes and scales too.

    return_statistics: appends rstd, 1 / sqrt(mean(x^2) + eps), float32, x's shape without the
    features; 0 past the last offset. `mx_norm_gradient` takes it.

    Not differentiable: what reads the codes has the gradient of the norm's result, and
    `mx_norm_gradient` takes it on. Raises ValueError for arguments that do not fit, with their
    numbers; NotImplementedError for float64 and for blocks of (32, 1).
    """
    form = _format(_RMS, elem_dtype, block, scale_mode, rounding, seed, stream, scale_layout)
    _check(_RMS, x, offsets, form.block, eps, weight=weight)
    return _norm(x, weight, None, offsets, NormPlan(float(eps), False), form, return_statistics)


def mx_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    eps: float,
    elem_dtype: ElemDtype = "e4m3",
    block: Block = ALONG_COLUMNS,
    scale_mode: ScaleMode = "rceil",
    rounding: Rounding = "nearest",
    seed: int | None = None,
    stream: Stream = Stream.QUANTISE,
    scale_layout: ScaleLayout = "plain",
    return_statistics: bool = False,
) -> tuple[Tensor, ...]:
    """Codes and scales of (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, in one pass over x.

    Arguments as in `mx_rms_norm`; bias like weight. return_statistics appends rstd, that is
    1 / sqrt(var(x) + eps), and mean. Errors as in `mx_rms_norm`.
    """
    form = _format(_LAYER, elem_dtype, block, scale_mode, rounding, seed, stream, scale_layout)
    _check(_LAYER, x, offsets, form.block, eps, weight=weight, bias=bias)
    return _norm(x, weight, bias, offsets, NormPlan(float(eps), True), form, return_statistics)


def mx_norm(
    x: Tensor,
    offsets: Tensor | None = None,
    *,
    norm: Literal["rms", "layer"],
    eps: float,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    elem_dtype: ElemDtype = "e4m3",
    block: Block = ALONG_COLUMNS,
    scale_mode: ScaleMode = "rceil",
    rounding: Rounding = "nearest",
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Either norm by its name, as the suite asks for it: `mx_rms_norm` or `mx_layer_norm`.

    norm: "rms", which takes no norm_bias, or "layer". All else, and errors, as in `mx_rms_norm`.
    """
    if norm not in ("rms", "layer"):
        raise ValueError(f"mx_norm: norm must be 'rms' or 'layer', got {norm!r}")
    if norm == "rms" and norm_bias is not None:
        found = getattr(norm_bias, "shape", type(norm_bias).__name__)
        raise ValueError(f"mx_norm: RMSNorm has no norm_bias, got one of {found}")
    if norm == "rms":
        codes, scales = mx_rms_norm(
            x, norm_weight, offsets, eps=eps, elem_dtype=elem_dtype, block=block,
            scale_mode=scale_mode, rounding=rounding, seed=seed,
        )  # fmt: skip
        return codes, scales
    codes, scales = mx_layer_norm(
        x, norm_weight, norm_bias, offsets, eps=eps, elem_dtype=elem_dtype, block=block,
        scale_mode=scale_mode, rounding=rounding, seed=seed,
    )  # fmt: skip
    return codes, scales


def mx_norm_gradient(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    rstd: Tensor,
    mean: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, weight and bias from that of the norm's result, quantised or not.

    The quantisation passes gradients as if it were the identity. d_out like x, float32, float16 or
    bfloat16; rstd and mean float32 as the norms return them, mean None for RMSNorm.

    Returns dx in x's dtype, 0 past the last offset, and of weight and bias (None for RMSNorm) sums
    over rows, float32 `[features]`, bit-equal on repeats. Raises ValueError for arguments that do
    not fit, NotImplementedError for float64 and more than 16,384 features.
    """
    if not isinstance(x, Tensor) or x.dim() < 1 + (offsets is not None) or not x.shape[-1]:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{_GRADIENT}: x must be a tensor [..., features >= 1], got {found}")
    _check_float(_GRADIENT, "x", x)
    _check_like(x, "d_out", d_out, x.shape, _FLOAT_TYPES)
    _check_like(x, "rstd", rstd, x.shape[:-1], (torch.float32,))
    if mean is not None:
        _check_like(x, "mean", mean, x.shape[:-1], (torch.float32,))
    _check_parameter(_GRADIENT, x, "weight", weight)
    if x.shape[-1] > MOST_GRADIENT_FEATURES:
        raise NotImplementedError(
            f"{_GRADIENT}: at most {MOST_GRADIENT_FEATURES} features, got {x.shape[-1]}"
        )
    if offsets is not None:
        check_packed_offsets(_GRADIENT, "x", x, offsets)
        offsets = offsets.contiguous()
    dx, d_weight, d_bias = _gradient_op(
        d_out.detach(), x.detach(), _detached(weight), rstd, mean, offsets
    )
    return dx, d_weight, None if mean is None else d_bias


def _format(
    operator: str,
    elem_dtype: ElemDtype,
    block: Block,
    scale_mode: ScaleMode,
    rounding: Rounding,
    seed: int | None,
    stream: Stream,
    scale_layout: ScaleLayout,
) -> Format:
    """The format of a call, its arguments checked."""
    check_elem_dtype(elem_dtype)
    check_block(block)
    check_scale_mode(scale_mode)
    check_rounding(rounding, seed)
    if scale_layout not in ("plain", "swizzled"):
        raise ValueError(
            f"{operator}: scale_layout must be 'plain' or 'swizzled', got {scale_layout!r}"
        )
    if block == ALONG_ROWS:
        raise NotImplementedError(
            f"{operator}: no kernel has blocks {block} behind a norm; (1, 32) and (32, 32) it has"
        )
    swizzled = scale_layout == "swizzled"
    return Format(elem_dtype, block, scale_mode, seed, int(Stream(stream)), swizzled=swizzled)


def _check(
    operator: str,
    x: Tensor,
    offsets: Tensor | None,
    block: Block,
    eps: float,
    **parameters: Tensor | None,
) -> None:
    """Refuse what does not fit together, but for the offsets' values."""
    _check_shape(operator, "x", x, block, offsets)
    _check_float(operator, "x", x)
    if not x.shape[-1]:
        raise ValueError(f"{operator}: x must have at least one feature, got {tuple(x.shape)}")
    if not is_eps(eps):
        raise ValueError(f"{operator}: eps must be at least 0, got {eps!r}")
    for name, value in parameters.items():
        _check_parameter(operator, x, name, value)


def _check_float(operator: str, name: str, x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise NotImplementedError(f"{operator}: no kernel reads float64")
    if x.dtype not in _FLOAT_TYPES:
        raise ValueError(
            f"{operator}: {name} {tuple(x.shape)} must be one of {_FLOAT_TYPES}, got {x.dtype}"
        )


def _check_parameter(operator: str, x: Tensor, name: str, value: Tensor | None) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor) or value.shape != x.shape[-1:]:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{operator}: {name} must be [{x.shape[-1]}], got {found}")
    if value.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"{operator}: {name} must be {x.dtype} or float32, got {value.dtype}")
    if value.device != x.device:
        raise ValueError(f"{operator}: {name} is on {value.device}, x on {x.device}")


def _check_like(
    x: Tensor, name: str, value: Tensor, shape: torch.Size, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Refuse an operand of the gradient that does not go with x."""
    if not isinstance(value, Tensor) or value.shape != shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{_GRADIENT}: {name} must be {tuple(shape)}, got {found}")
    if value.dtype not in dtypes:
        raise ValueError(f"{_GRADIENT}: {name} must be one of {dtypes}, got {value.dtype}")
    if value.device != x.device:
        raise ValueError(f"{_GRADIENT}: {name} is on {value.device}, x on {x.device}")


def _detached(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().contiguous()


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor | None,
    plan: NormPlan,
    form: Format,
    with_statistics: bool,
) -> tuple[Tensor, ...]:
    codes, scales, rstd, mean = _norm_op(
        x.detach(), _detached(weight), _detached(bias),
        None if offsets is None else offsets.contiguous(), plan.eps, plan.centred,
        form.elem_dtype, list(form.block), form.scale_mode, form.seed, form.stream, form.swizzled,
        with_statistics,
    )  # fmt: skip
    if not with_statistics:
        return codes, scales
    return (codes, scales, rstd, mean) if plan.centred else (codes, scales, rstd)


def _empty(
    x: Tensor, offsets: Tensor | None, block: Block, swizzled: bool, *kept: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, rstd and mean, not filled; of no elements what is not kept."""
    rows = x.shape[:-1]
    rstd, mean = (
        torch.empty(rows if keep else (0,), dtype=torch.float32, device=x.device) for keep in kept
    )
    return *_outputs(x, offsets, block, swizzled), rstd, mean


def _kernel(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor | None,
    eps: float,
    centred: bool,
    elem_dtype: str,
    block: list[int],
    scale_mode: str,
    seed: int | None,
    stream: int,
    swizzled: bool,
    with_statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments as the public functions have checked them, but for the offsets' values."""
    operator = _LAYER if centred else _RMS
    require_device(operator, x)
    if offsets is not None:
        check_values_of_offsets(operator, offsets, x.shape[0], None, False)
    form = Format(
        cast(ElemDtype, elem_dtype), (block[0], block[1]), cast(ScaleMode, scale_mode), seed,
        stream, swizzled=swizzled,
    )  # fmt: skip
    keep_mean = with_statistics and centred
    codes, scales, rstd, mean = _empty(x, offsets, form.block, swizzled, with_statistics, keep_mean)
    if not x.numel():
        return codes, scales.zero_(), rstd, mean
    flat = form.block[0] == 1 and not swizzled
    with torch.cuda.device_of(x):
        launch_norm(
            Matrices.of(x, offsets, flat), weight, bias, Matrices.of(codes, offsets, flat),
            _scale_views(scales, offsets, flat, swizzled),
            (rstd if with_statistics else None, mean if keep_mean else None),
            NormPlan(eps, centred), form,
        )  # fmt: skip
    return codes, scales, rstd, mean


def _fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor | None,
    eps: float,
    centred: bool,
    elem_dtype: str,
    block: list[int],
    scale_mode: str,
    seed: int | None,
    stream: int,
    swizzled: bool,
    with_statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = (block[0], block[1])
    return _empty(x, offsets, shape, swizzled, with_statistics, with_statistics and centred)


def _gradient(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    mean: Tensor | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments as `mx_norm_gradient` has checked them, but for the offsets' values."""
    require_device(_GRADIENT, x)
    middle = 1
    if offsets is not None:
        check_values_of_offsets(_GRADIENT, offsets, x.shape[0], None, False)
        middle = x.shape[1:-1].numel()
    flat = (x.shape[:-1].numel(), x.shape[-1])
    with torch.cuda.device_of(x):
        dx, d_weight, d_bias = launch_norm_gradient(
            d_out.contiguous().view(flat), x.contiguous().view(flat), weight, rstd.contiguous(),
            None if mean is None else mean.contiguous(), offsets, middle,
        )  # fmt: skip
    return dx.view(x.shape), d_weight, d_bias


def _gradient_fake(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    mean: Tensor | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    features = x.shape[-1]
    return (
        x.new_empty(x.shape), rstd.new_empty(features),
        rstd.new_empty(0 if mean is None else features),
    )  # fmt: skip


_norm_op: Any = define("mx_norm", _kernel, _fake)
_gradient_op: Any = define("mx_norm_gradient", _gradient, _gradient_fake)
