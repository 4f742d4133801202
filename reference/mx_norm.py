"""RMSNorm and LayerNorm whose result is quantised to MX at once, and the gradient of the pair.

The result of the norm is not rounded between: float32 (float64 for float64) goes to MX. Gradients
pass the quantisation as if it were the identity, so they are those of the norm. Sources: the norms
as in `norm.py`, the formats as in `mx.py`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, Block, ElemDtype, Rounding, ScaleMode
from jagbench.reference import arguments
from jagbench.reference.mx import mx_quantize
from jagbench.reference.norm import layer_norm, rms_norm

Norm = Literal["rms", "layer"]


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
    return_statistics: bool = False,
) -> tuple[Tensor, ...]:
    """Codes and scales of x / sqrt(mean(x^2) + eps) * weight, over the last dim of x.

    x `[..., rows, features]` or, with offsets, `[total, ..., features]`; weight `[features]` in x's
    dtype or float32, or None. block: (1, 32) or (32, 32). All else as in `mx_quantize`, codes and
    scales too; rows past the last offset have none.

    return_statistics: appends rstd, 1 / sqrt(mean(x^2) + eps) of every row, in the dtype that the
    norm is computed in, x's shape without the features; 0 past the last offset.

    Raises ValueError for arguments that do not fit, with their numbers.
    """
    _check_block(block)
    wide = _wide(x)
    found = mx_quantize(
        rms_norm(wide, _parameter(x, "weight", weight), eps=eps), offsets, elem_dtype=elem_dtype,
        block=block, scale_mode=scale_mode, rounding=rounding, seed=seed,
    )  # fmt: skip
    if not return_statistics:
        return found
    return *found, _used(torch.rsqrt(wide.square().mean(-1) + eps), offsets)


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
    return_statistics: bool = False,
) -> tuple[Tensor, ...]:
    """Codes and scales of (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dim.

    Arguments as in `mx_rms_norm`; bias like weight. return_statistics appends rstd, that is
    1 / sqrt(var(x) + eps), and mean. Raises ValueError for arguments that do not fit.
    """
    _check_block(block)
    wide = _wide(x)
    out = layer_norm(wide, _parameter(x, "weight", weight), _parameter(x, "bias", bias), eps=eps)
    found = mx_quantize(
        out, offsets, elem_dtype=elem_dtype, block=block, scale_mode=scale_mode,
        rounding=rounding, seed=seed,
    )  # fmt: skip
    if not return_statistics:
        return found
    mean = wide.mean(-1)
    variance = (wide - mean[..., None]).square().mean(-1)
    return *found, _used(torch.rsqrt(variance + eps), offsets), _used(mean, offsets)


def mx_norm(
    x: Tensor,
    offsets: Tensor | None = None,
    *,
    norm: Norm,
    eps: float,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    elem_dtype: ElemDtype = "e4m3",
    block: Block = ALONG_COLUMNS,
    scale_mode: ScaleMode = "rceil",
    rounding: Rounding = "nearest",
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Either norm by its name: codes and scales of `mx_rms_norm` or `mx_layer_norm`.

    norm: "rms", which takes no norm_bias, or "layer". norm_weight, norm_bias: `[features]` in x's
    dtype or float32, or None. All else as in `mx_rms_norm`. Raises ValueError for arguments that do
    not fit, with their numbers.
    """
    if norm not in get_args(Norm):
        raise ValueError(f"norm must be one of {get_args(Norm)}, got {norm!r}")
    if norm == "rms" and norm_bias is not None:
        found = getattr(norm_bias, "shape", type(norm_bias).__name__)
        raise ValueError(f"RMSNorm has no norm_bias, got one of {found}")
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

    d_out like x, any float dtype; rstd and mean as the norms return them, mean None for RMSNorm,
    which has no bias and None for its gradient. With n = (x - mean) rstd and g = d_out weight,

    dx = rstd (g - n mean(g n) - mean(g)), the last term for LayerNorm alone,

    in x's dtype, 0 past the last offset; of the weight, the sum over rows of d_out n, and of the
    bias, of d_out: `[features]`, in the dtype of rstd. Derived from the norms' definitions. Raises
    ValueError for arguments that do not fit.
    """
    _check_gradient(d_out, x, rstd, mean)
    wide, upstream = (_used(t.to(rstd.dtype), offsets) for t in (_wide(x), d_out))
    unit = (wide if mean is None else wide - mean[..., None]) * rstd[..., None]
    unit = _used(unit, offsets)
    scale = _parameter(x, "weight", weight)
    inner = upstream if scale is None else upstream * scale.to(rstd.dtype)
    through = inner - unit * (inner * unit).mean(-1, keepdim=True)
    if mean is not None:
        through = through - inner.mean(-1, keepdim=True)
    rows = tuple(range(x.dim() - 1))
    d_weight = (upstream * unit).sum(rows) if rows else upstream * unit
    d_bias = None if mean is None else upstream.sum(rows) if rows else upstream.clone()
    return (through * rstd[..., None]).to(x.dtype), d_weight, d_bias


def _check_block(block: Block) -> None:
    if block == ALONG_ROWS:
        raise ValueError(f"block must be (1, 32) or (32, 32) behind a norm, got {block}")


def _wide(x: Tensor) -> Tensor:
    """The dtype that the norm is computed in."""
    if not isinstance(x, Tensor) or x.dtype not in arguments.DTYPES:
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a tensor of one of the dtypes {arguments.DTYPES}, got {found}")
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _parameter(x: Tensor, name: str, value: Tensor | None) -> Tensor | None:
    """A weight or bias in the dtype of the norm; its own dtype is checked here, as x's is gone."""
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.dtype not in (x.dtype, torch.float32):
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be {x.dtype} or float32, got {found}")
    return value.to(torch.promote_types(x.dtype, torch.float32))


def _used(rows: Tensor, offsets: Tensor | None) -> Tensor:
    """Rows `[total, ...]` with 0 in those past the last offset, whatever they held."""
    if offsets is None:
        return rows
    kept = torch.zeros_like(rows)
    kept[: int(offsets[-1])] = rows[: int(offsets[-1])]
    return kept


def _check_gradient(d_out: Tensor, x: Tensor, rstd: Tensor, mean: Tensor | None) -> None:
    if d_out.shape != x.shape:
        raise ValueError(f"d_out must be {tuple(x.shape)} as x, got {tuple(d_out.shape)}")
    for name, value in (("rstd", rstd), ("mean", mean)):
        if value is not None and value.shape != x.shape[:-1]:
            raise ValueError(f"{name} must be {tuple(x.shape[:-1])}, got {tuple(value.shape)}")
