"""mx_norm as an operator: its cost, and its truth in float64 with the error float32 may make."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.reference import costs
from jagbench.reference.mx_computed import SHARE, pieces, relative_error
from jagbench.reference.mx_norm import mx_norm
from jagbench.reference.mx_operator import mx_quantize_bytes, output_rows, output_shapes
from jagbench.spec import PLACED, SHARED, CodePiece, Codes, Operator


def normalised(inputs: Inputs, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x `[..., features]` behind the norm, and the error that float32 may make, in float64.

    RMSNorm: every factor is relative to the result. LayerNorm: the mean is off by a share of the
    mean magnitude a, which shifts x - mean, and the root by the square of that shift.
    """
    options, t = inputs.options, inputs.tensors()
    wide, part = x.to(torch.float64), relative_error(x.shape[-1], inputs.dtype)
    weight, bias = (t.get(name) for name in ("norm_weight", "norm_bias"))
    shift = torch.zeros_like(wide[..., :1])
    if options["norm"] == "layer":
        shift = part * wide.abs().mean(-1, keepdim=True)
        wide = wide - wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + options["eps"])
    factor = rstd if weight is None else rstd * weight.to(rstd)
    values = wide * factor
    error = values.abs() * (part + (shift * rstd).square()) + shift * factor.abs()
    if bias is not None:
        values = values + bias.to(values)
        error = error + part * bias.to(values).abs()
    return values, error


def truth(inputs: Inputs, elements: int) -> Iterator[CodePiece]:
    """Codes and scales of a call, about so many elements of x a piece."""
    return pieces(inputs, math.prod(inputs.tensors()["x"].shape[1:]), elements, normalised)


def mx_norm_flops(inputs: Inputs) -> int:
    """FLOP of one call: those of the norm; comparisons and roundings of bits count 0.

    Square, add, multiply an element of RMSNorm; of LayerNorm an add and a subtraction too; one for
    each parameter. O(1) a row counts 0.
    """
    t = inputs.tensors()
    each = 3 if inputs.options["norm"] == "rms" else 5
    each += sum(name in t for name in ("norm_weight", "norm_bias"))
    x = t["x"]
    if inputs.arguments["offsets"] is None:
        return x.numel() * each
    return costs.rows_of(inputs, "offsets") * math.prod(x.shape[1:]) * each


MX_NORM = Operator(
    name="mx_norm",
    bandwidth_bound=True,
    reference=mx_norm,
    layout={"x": "offsets", "norm_weight": SHARED, "norm_bias": SHARED},
    output_layout={"codes": "offsets", "scales": PLACED},
    differentiable=(),
    flops=mx_norm_flops,
    bytes_moved=mx_quantize_bytes,
    codes=Codes(output_shapes, output_rows, truth, SHARE),
    quantised=True,
    paper="arXiv 1910.07467 and 1607.06450; OCP Microscaling Formats (MX) Specification 1.0",
)
