"""RMSNorm, LayerNorm and per-head QK-norm over the last dim of their argument.

Sources: LayerNorm, arXiv 1607.06450, equation 3; RMSNorm, arXiv 1910.07467, equation 4; QK-norm,
arXiv 2010.04245, with RMSNorm in place of the L2 norm. Statistics are computed in float32 at least,
and the result is rounded once. `eps` has no default: public code has 1e-5 and 1e-6.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.reference import arguments
from jagbench.spec import SHARED, Operator


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float) -> Tensor:
    """RMSNorm, x / sqrt(mean(x^2) + eps) * weight, of every row of x `[..., features]`.

    weight `[features]` in x's dtype or float32; None multiplies by nothing. Returns a tensor like
    x. Raises ValueError for arguments that do not fit, with their numbers.
    """
    _check(x, {"weight": weight}, eps)
    wide = x.to(_wide(x))
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (out if weight is None else out * weight.to(out.dtype)).to(x.dtype)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
) -> Tensor:
    """LayerNorm, (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, of every row of x.

    x `[..., features]`; the variance is the mean square of x - mean(x). weight and bias
    `[features]` in x's dtype or float32, or None. Returns a tensor like x. Raises ValueError for
    arguments that do not fit, with their numbers.
    """
    _check(x, {"weight": weight, "bias": bias}, eps)
    wide = x.to(_wide(x))
    centred = wide - wide.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    out = out if weight is None else out * weight.to(out.dtype)
    return (out if bias is None else out + bias.to(out.dtype)).to(x.dtype)


def qk_norm(q: Tensor, k: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Every head of q and of k `[rows, heads, head_dim]` under `rms_norm`, without a weight.

    |q . k| of the results is at most head_dim. Raises ValueError for arguments that do not fit.
    """
    for name, x in (("q", q), ("k", k)):
        arguments.check_packed(name, x)
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head_dim {q.shape[-1]} and k has {k.shape[-1]}")
    return rms_norm(q, eps=eps), rms_norm(k, eps=eps)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _check(x: Tensor, parameters: Mapping[str, Tensor | None], eps: float) -> None:
    if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[-1] < 1:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a tensor [..., features >= 1], got {shape}")
    if x.dtype not in arguments.DTYPES:
        raise ValueError(f"x must have one of the dtypes {arguments.DTYPES}, got {x.dtype}")
    arguments.check_eps(eps)
    for name, value in parameters.items():
        if value is None:
            continue
        if value.shape != x.shape[-1:]:
            raise ValueError(f"{name} must be [{x.shape[-1]}], got {tuple(value.shape)}")
        if value.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"{name} must be {x.dtype} or float32, got {value.dtype}")
        if value.device != x.device:
            raise ValueError(f"{name} is on {value.device}, x on {x.device}")


def rms_norm_flops(inputs: Inputs) -> int:
    """FLOP of one pass: square, add, multiply (and the weight) an element; O(1) a row counts 0."""
    return inputs.tensors()["x"].numel() * (3 + ("weight" in inputs.tensors()))


def layer_norm_flops(inputs: Inputs) -> int:
    """FLOP of one pass: add, subtract, square, add, multiply (and the parameters) an element."""
    given = sum(name in inputs.tensors() for name in ("weight", "bias"))
    return inputs.tensors()["x"].numel() * (5 + given)


def norm_bytes(inputs: Inputs) -> int:
    """Least bytes of one pass: x and the parameters read once, the result written once."""
    return sum(t.nbytes for t in inputs.tensors().values()) + inputs.tensors()["x"].nbytes


RMS_NORM = Operator(
    name="rms_norm",
    reference=rms_norm,
    layout={"x": SHARED, "weight": SHARED},
    output_layout={"out": SHARED},
    differentiable=("x", "weight"),
    flops=rms_norm_flops,
    bytes_moved=norm_bytes,
    paper="arXiv 1910.07467",
)
LAYER_NORM = Operator(
    name="layer_norm",
    reference=layer_norm,
    layout={"x": SHARED, "weight": SHARED, "bias": SHARED},
    output_layout={"out": SHARED},
    differentiable=("x", "weight", "bias"),
    flops=layer_norm_flops,
    bytes_moved=norm_bytes,
    paper="arXiv 1607.06450",
)
