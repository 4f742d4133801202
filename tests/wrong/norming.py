"""The steps of a right norm with a linear layer behind it; each may be exchanged.

Work is done in float32 or wider, on the rows before the last offset.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """One call: x `[rows, features]`, weight `[out, features]` and what else there is."""

    norm: str
    eps: float
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None

    def of(self, name: str, otherwise: float) -> Tensor | float:
        """A parameter of the norm, or the number that stands for one that is not there."""
        found = getattr(self, name)
        return otherwise if found is None else found


@dataclass(frozen=True)
class Statistics:
    """Of every row: mean (0 under RMSNorm) and the factor that makes its size 1, `[rows, 1]`."""

    mean: Tensor
    factor: Tensor


def check(layer: Layer, offsets: Tensor | None) -> int:
    """Rows before the last offset; ValueError, with the numbers, for what does not fit."""
    x, weight = layer.x, layer.weight
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1] or not weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    if layer.norm not in ("rms", "layer") or not layer.eps >= 0:
        raise ValueError(f"norm {layer.norm!r} with eps {layer.eps}")
    if not x.is_floating_point() or weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(f"x is {x.dtype} on {x.device}, weight {weight.dtype} on {weight.device}")
    if layer.norm == "rms" and layer.norm_bias is not None:
        raise ValueError(f"no norm_bias {tuple(layer.norm_bias.shape)} under RMSNorm")
    for value, width in (
        (layer.bias, weight.shape[0]),
        (layer.norm_weight, x.shape[1]),
        (layer.norm_bias, x.shape[1]),
    ):
        if value is not None and (value.shape != (width,) or not value.is_floating_point()):
            raise ValueError(f"a parameter {tuple(value.shape)} of {value.dtype}, want [{width}]")
    if offsets is None:
        return int(x.shape[0])
    if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"offsets: {offsets.dim()} dims, {offsets.dtype}")
    if offsets.device != x.device:
        raise ValueError(f"offsets on {offsets.device}, x on {x.device}")
    bounds = offsets.tolist()
    if not bounds or bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > x.shape[0]:
        raise ValueError(f"offsets {bounds} do not fit {x.shape[0]} rows")
    return int(bounds[-1])


def measure(layer: Layer, x: Tensor) -> Statistics:
    """Mean and factor of rows x; eps is added under the root."""
    mean = x.mean(1, keepdim=True) if layer.norm == "layer" else torch.zeros_like(x[:, :1])
    return Statistics(mean, ((x - mean) ** 2).mean(1, keepdim=True).add(layer.eps) ** -0.5)


def normalise(layer: Layer, x: Tensor, found: Statistics) -> Tensor:
    """Rows of mean 0 (LayerNorm) and size 1, before the norm's own parameters."""
    return (x - found.mean) * found.factor


def project(layer: Layer, unit: Tensor) -> Tensor:
    """The norm's parameters and the linear layer."""
    affine = unit * layer.of("norm_weight", 1.0) + layer.of("norm_bias", 0.0)
    return affine @ layer.weight.T + (0.0 if layer.bias is None else layer.bias)


def through_norm(layer: Layer, gradient: Tensor, unit: Tensor, found: Statistics) -> Tensor:
    """Gradient of x from that of the normalised rows."""
    along = (gradient * unit).mean(1, keepdim=True)
    mean = gradient.mean(1, keepdim=True) if layer.norm == "layer" else 0.0
    return found.factor * (gradient - mean - unit * along)


def parameter_gradients(
    layer: Layer, upstream: Tensor, unit: Tensor, flow: Tensor
) -> dict[str, Tensor]:
    """Gradients of every parameter; flow: that of what the linear layer was given."""
    affine = unit * layer.of("norm_weight", 1.0) + layer.of("norm_bias", 0.0)
    return {
        "weight": upstream.T @ affine,
        "bias": upstream.sum(0),
        "norm_weight": (flow * unit).sum(0),
        "norm_bias": flow.sum(0),
    }


class NormLinear(torch.autograd.Function):
    """The operator of exchangeable steps; rows past the last offset are 0."""

    @staticmethod
    def forward(ctx: Any, steps: Any, layer: Layer, total: int, *tensors: Tensor | None) -> Tensor:
        """Out `[rows, out]`."""
        layer = replace(layer, **dict(zip(_NAMES, tensors, strict=True)))
        wide = _wide(layer)
        x = wide.x[:total]
        found = steps.measure(wide, x)
        unit = steps.normalise(wide, x, found)
        ctx.steps, ctx.layer, ctx.found, ctx.unit, ctx.total = steps, layer, found, unit, total
        out = steps.allocate((layer.x.shape[0], layer.weight.shape[0]), layer.x, layer.x.dtype)
        out[:total] = steps.project(wide, unit).to(out.dtype)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of x and of every parameter that was given."""
        steps, layer, total = ctx.steps, ctx.layer, ctx.total
        wide = _wide(layer)
        upstream = gradients[0][:total].to(wide.x.dtype)
        flow = upstream @ wide.weight
        dx = torch.zeros_like(layer.x)
        inner = flow * wide.of("norm_weight", 1.0)
        dx[:total] = steps.through_norm(wide, inner, ctx.unit, ctx.found).to(dx.dtype)
        found = steps.parameter_gradients(wide, upstream, ctx.unit, flow)
        given = [(n, getattr(layer, n)) for n in _NAMES[1:]]
        return (
            None,
            None,
            None,
            dx,
            *(None if t is None else found[n].to(t.dtype) for n, t in given),
        )


_NAMES = tuple(f.name for f in fields(Layer))[2:]


def _wide(layer: Layer) -> Layer:
    kind = torch.promote_types(layer.x.dtype, torch.float32)
    given = {n: getattr(layer, n) for n in _NAMES}
    return replace(layer, **{n: None if t is None else t.to(kind) for n, t in given.items()})
