"""A linear layer behind a norm: RMSNorm or LayerNorm over the features of every row, then x W^T.

Sources: the norms of `norm.py`; the fusion that implementations compete in, PyTorch blog "Towards
Free Normalization", 2026 (Lazy Pre-Norm), and the fused norms of
facebookresearch/ads_model_kernel_library.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from jagbench.inputs import Inputs
from jagbench.reference import arguments, costs
from jagbench.reference.norm import layer_norm, rms_norm
from jagbench.spec import SHARED, Operator

Norm = Literal["rms", "layer"]


def norm_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    *,
    norm: Norm,
    eps: float,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> Tensor:
    """norm(x) weight^T + bias for every row of a jagged batch, written from the definition.

    x `[total, features]`; weight `[out_features, features]` and bias `[out_features]` in x's dtype;
    offsets `[batch + 1]`, or None for a dense batch without padding. float64, float32, float16 and
    bfloat16; in the last two the normalised row is rounded to that dtype before the product.

    norm: "rms", x / sqrt(mean(x^2) + eps) * norm_weight, or "layer",
        (x - mean(x)) / sqrt(var(x) + eps) * norm_weight + norm_bias.
    eps: at least 0; no default, because public code has 1e-5 and 1e-6.
    norm_weight, norm_bias: `[features]` in x's dtype or float32, or None. "rms" takes no norm_bias.

    Returns out `[total, out_features]`; rows past the last offset are 0. Raises ValueError for
    arguments that do not fit, with their numbers.
    """
    total = _check(x, weight, offsets, norm, eps, bias, norm_weight, norm_bias)
    rows = x[:total]
    if norm == "rms":
        normed = rms_norm(rows, norm_weight, eps=eps)
    else:
        normed = layer_norm(rows, norm_weight, norm_bias, eps=eps)
    return _product(normed, x, weight, bias)


def uncancelled(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    *,
    norm: Norm,
    eps: float,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> Tensor:
    """The same output; gradients as if mean and scale were constants: the terms that cancel.

    A gradient of x stands at right angles to its row (RMSNorm) and sums to 0 over it (LayerNorm).
    """
    total = _check(x, weight, offsets, norm, eps, bias, norm_weight, norm_bias)
    rows = x[:total].to(torch.promote_types(x.dtype, torch.float32))
    if norm == "layer":
        rows = rows - rows.detach().mean(-1, keepdim=True)
    normed = rows * torch.rsqrt(rows.detach().square().mean(-1, keepdim=True) + eps)
    normed = normed if norm_weight is None else normed * norm_weight
    normed = normed if norm_bias is None else normed + norm_bias
    return _product(normed.to(x.dtype), x, weight, bias)


def _product(normed: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer, and the padding rows of x."""
    padding = x.new_zeros(x.shape[0] - normed.shape[0], weight.shape[0])
    return torch.cat([functional.linear(normed, weight, bias), padding])


def _check(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    norm: str,
    eps: float,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
) -> int:
    """Rows that are no padding; ValueError for arguments that do not fit."""
    if norm not in get_args(Norm):
        raise ValueError(f"norm must be one of {get_args(Norm)}, got {norm!r}")
    arguments.check_eps(eps)
    for name, matrix in (("x", x), ("weight", weight)):
        if not isinstance(matrix, Tensor) or matrix.dim() != 2 or matrix.shape[1] < 1:
            shape = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
            raise ValueError(f"{name} must be a tensor [rows, features >= 1], got {shape}")
    if x.dtype not in arguments.DTYPES:
        raise ValueError(f"x must have one of the dtypes {arguments.DTYPES}, got {x.dtype}")
    if weight.shape[0] < 1 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    if norm == "rms" and norm_bias is not None:
        found = (
            tuple(norm_bias.shape) if isinstance(norm_bias, Tensor) else type(norm_bias).__name__
        )
        raise ValueError(f"RMSNorm has no norm_bias, got one of {found}")
    wide = (x.dtype, torch.float32)
    _check_like(x, "weight", weight, weight.shape, (x.dtype,))
    _check_like(x, "bias", bias, weight.shape[:1], (x.dtype,))
    _check_like(x, "norm_weight", norm_weight, x.shape[1:], wide)
    _check_like(x, "norm_bias", norm_bias, x.shape[1:], wide)
    return x.shape[0] if offsets is None else sum(arguments.packed_lengths("x", x, offsets))


def _check_like(
    x: Tensor,
    name: str,
    value: Tensor | None,
    shape: torch.Size,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Refuse a parameter of another shape, dtype or device than x asks for."""
    if value is None:
        return
    if not isinstance(value, Tensor) or value.shape != shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be {list(shape)}, got {found}")
    if value.dtype not in dtypes:
        raise ValueError(f"{name} must be of {dtypes} beside x of {x.dtype}, got {value.dtype}")
    if value.device != x.device:
        raise ValueError(f"{name} is on {value.device}, x on {x.device}")


def norm_linear_flops(inputs: Inputs) -> int:
    """FLOP of one forward pass: the product, 2 features out_features a row; the norm counts 0."""
    t = inputs.tensors()
    return 2 * _rows(inputs) * t["weight"].numel()


def norm_linear_bytes(inputs: Inputs) -> int:
    """Least bytes of one forward pass: every argument read once, the output written once."""
    t = inputs.tensors()
    width = t["weight"].shape[0] * t["x"].element_size()
    return costs.read_once(inputs) + _rows(inputs) * width


def _rows(inputs: Inputs) -> int:
    """Rows up to the last offset; all of a dense batch."""
    dense = inputs.arguments["offsets"] is None
    return inputs.tensors()["x"].shape[0] if dense else costs.rows_of(inputs, "offsets")


NORM_LINEAR = Operator(
    name="norm_linear",
    bandwidth_bound=True,
    reference=norm_linear,
    layout={
        "x": "offsets",
        "weight": SHARED,
        "bias": SHARED,
        "norm_weight": SHARED,
        "norm_bias": SHARED,
    },
    output_layout={"out": "offsets"},
    differentiable=("x", "weight", "bias", "norm_weight", "norm_bias"),
    flops=norm_linear_flops,
    bytes_moved=norm_linear_bytes,
    uncancelled=uncancelled,
    # Two products (of the rows and of the weight) against one; nothing is recomputed.
    backward_flops_ratio=2.0,
    unread_in_backward=("bias",),
    paper="arXiv 1910.07467 and 1607.06450; PyTorch blog 2026, Towards Free Normalization",
)
