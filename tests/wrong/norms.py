"""Wrong norms, and wrong ways to fuse them with a linear layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from wrong import norming
from wrong.norming import Layer, Statistics
from wrong.right import RIGHT

# -- statistics ------------------------------------------------------------------------------------


def _outside(layer: Layer, x: Tensor) -> Statistics:
    exact = norming.measure(replace(layer, eps=0.0), x)
    return Statistics(exact.mean, 1 / (1 / exact.factor + layer.eps))


#: eps is added to the root, not under it.
adds_eps_outside_the_root = replace(RIGHT, measure=_outside)


def _without(layer: Layer, x: Tensor) -> Statistics:
    return norming.measure(replace(layer, eps=0.0), x)


#: eps is accepted and never used.
ignores_eps = replace(RIGHT, measure=_without)


def _of_squares(layer: Layer, x: Tensor) -> Statistics:
    found = norming.measure(layer, x)
    variance = (x * x).mean(1, keepdim=True) - found.mean**2
    return Statistics(found.mean, (variance.clamp(min=0) + layer.eps) ** -0.5)


#: The variance is mean(x^2) - mean(x)^2, which cancels far from 0.
takes_the_variance_of_squares = replace(RIGHT, measure=_of_squares)


def _about_zero(layer: Layer, x: Tensor) -> Statistics:
    size = norming.measure(replace(layer, norm="rms"), x)
    return Statistics(norming.measure(layer, x).mean, size.factor)


#: LayerNorm divides by the root mean square of rows that are not centred.
takes_the_variance_about_zero = replace(RIGHT, measure=_about_zero)


def _unbiased(layer: Layer, x: Tensor) -> Statistics:
    found, count = norming.measure(layer, x), x.shape[1]
    variance = (found.factor**-2 - layer.eps) * count / max(1, count - 1)
    return Statistics(found.mean, (variance + layer.eps) ** -0.5)


#: Squares are divided by one less than their number.
divides_by_one_feature_less = replace(RIGHT, measure=_unbiased)


def _of_the_tile(layer: Layer, x: Tensor) -> Statistics:
    width = x.shape[1]
    padded = 1 << (width - 1).bit_length()
    found = norming.measure(layer, x)
    square = (found.factor**-2 - layer.eps) * width / padded
    return Statistics(found.mean, (square + layer.eps) ** -0.5)


#: The mean square is taken over the padded tile of features.
divides_by_the_padded_features = replace(RIGHT, measure=_of_the_tile)


def _rms_for_both(layer: Layer, x: Tensor) -> Statistics:
    return norming.measure(replace(layer, norm="rms"), x)


#: LayerNorm is RMSNorm: no mean is taken off.
never_centres = replace(RIGHT, measure=_rms_for_both)


def _of_half(layer: Layer, x: Tensor) -> Statistics:
    found = norming.measure(layer, x)
    return Statistics(found.mean.half().to(x.dtype), found.factor.half().to(x.dtype))


#: Statistics are kept in half precision between the passes.
keeps_statistics_in_half = replace(RIGHT, measure=_of_half)

# -- the product -----------------------------------------------------------------------------------


def _lazily(layer: Layer, x: Tensor, found: Statistics) -> Tensor:
    return (x - found.mean.half().to(x.dtype)) * found.factor


#: A mean of half precision is taken off the rows.
centres_with_a_rounded_mean = replace(RIGHT, normalise=_lazily)


def _raw(layer: Layer, x: Tensor, found: Statistics) -> Tensor:
    return x - found.mean


#: The row's factor is forgotten in the epilogue.
forgets_the_row_scale = replace(RIGHT, normalise=_raw)


def _scaled_bias(layer: Layer, unit: Tensor) -> Tensor:
    out = norming.project(replace(layer, bias=None), unit)
    factor = norming.measure(layer, layer.x[: unit.shape[0]]).factor
    return out if layer.bias is None else out + factor * layer.bias


#: The row's factor is applied after the bias of the layer was added.
scales_the_bias_too = replace(RIGHT, project=_scaled_bias)


def _plain(layer: Layer, unit: Tensor) -> Tensor:
    return norming.project(replace(layer, norm_weight=None), unit)


#: The weight of the norm is accepted and never used in the forward.
ignores_the_norm_weight = replace(RIGHT, project=_plain)


def _no_shift(layer: Layer, unit: Tensor) -> Tensor:
    return norming.project(replace(layer, norm_bias=None), unit)


#: The bias of the norm is lost when its weight is folded into the layer's.
ignores_the_norm_bias = replace(RIGHT, project=_no_shift)


def _by_output(layer: Layer, unit: Tensor) -> Tensor:
    plain = norming.project(replace(layer, norm_weight=None), unit)
    if layer.norm_weight is None or layer.norm_weight.shape[0] < plain.shape[1]:
        return norming.project(layer, unit)
    return plain * layer.norm_weight[: plain.shape[1]]


#: The weight of the norm scales outputs, not features.
weighs_outputs_for_features = replace(RIGHT, project=_by_output)


def _rounded(layer: Layer, unit: Tensor) -> Tensor:
    return norming.project(layer, unit.to(torch.bfloat16).to(unit.dtype))


#: Normalised rows are rounded to bfloat16 whatever the dtype of the call.
rounds_rows_to_bfloat16 = replace(RIGHT, project=_rounded)

# -- gradients -------------------------------------------------------------------------------------


def _no_along(layer: Layer, gradient: Tensor, unit: Tensor, found: Statistics) -> Tensor:
    mean = gradient.mean(1, keepdim=True) if layer.norm == "layer" else 0.0
    return found.factor * (gradient - mean)


#: The factor of a row is taken for a constant in the backward.
drops_the_term_along_the_row = replace(RIGHT, through_norm=_no_along)


def _no_mean(layer: Layer, gradient: Tensor, unit: Tensor, found: Statistics) -> Tensor:
    return norming.through_norm(replace(layer, norm="rms"), gradient, unit, found)


#: The mean of a row is taken for a constant in the backward.
drops_the_mean_of_the_gradient = replace(RIGHT, through_norm=_no_mean)


def _unscaled(layer: Layer, gradient: Tensor, unit: Tensor, found: Statistics) -> Tensor:
    return norming.through_norm(layer, gradient, unit, found) / found.factor


#: The gradient of x is not multiplied by the row's factor.
forgets_the_row_scale_in_dx = replace(RIGHT, through_norm=_unscaled)


def _with_weight(layer: Layer, gradient: Tensor, unit: Tensor, found: Statistics) -> Tensor:
    weight = layer.of("norm_weight", 1.0)
    return norming.through_norm(layer, gradient, unit * weight, found)


#: The row that is projected out is the one after the norm's weight.
projects_out_the_weighted_row = replace(RIGHT, through_norm=_with_weight)


def _of_raw_rows(layer: Layer, upstream: Tensor, unit: Tensor, flow: Tensor) -> dict[str, Tensor]:
    found = norming.parameter_gradients(layer, upstream, unit, flow)
    return {**found, "weight": upstream.T @ layer.x[: unit.shape[0]]}


#: The gradient of the weight is taken of the rows before the norm.
weight_gradient_without_the_row_scale = replace(RIGHT, parameter_gradients=_of_raw_rows)


def _of_unit_rows(layer: Layer, upstream: Tensor, unit: Tensor, flow: Tensor) -> dict[str, Tensor]:
    found = norming.parameter_gradients(layer, upstream, unit, flow)
    return {**found, "weight": upstream.T @ unit}


#: The gradient of the weight is taken of the rows before the norm's own parameters.
weight_gradient_without_the_norm_weight = replace(RIGHT, parameter_gradients=_of_unit_rows)


def _of_raw_features(
    layer: Layer, upstream: Tensor, unit: Tensor, flow: Tensor
) -> dict[str, Tensor]:
    found = norming.parameter_gradients(layer, upstream, unit, flow)
    return {**found, "norm_weight": (flow * layer.x[: unit.shape[0]]).sum(0)}


#: The gradient of the norm's weight is taken of the rows before the norm.
norm_weight_gradient_of_raw_rows = replace(RIGHT, parameter_gradients=_of_raw_features)


def _no_bias_gradient(
    layer: Layer, upstream: Tensor, unit: Tensor, flow: Tensor
) -> dict[str, Tensor]:
    found = norming.parameter_gradients(layer, upstream, unit, flow)
    return {**found, "norm_bias": torch.zeros_like(found["norm_bias"])}


#: The gradient of the norm's bias is 0.
norm_bias_has_no_gradient = replace(RIGHT, parameter_gradients=_no_bias_gradient)


def _in_half(layer: Layer, upstream: Tensor, unit: Tensor, flow: Tensor) -> dict[str, Tensor]:
    found = norming.parameter_gradients(layer, upstream, unit, flow)
    total = torch.zeros_like(found["weight"], dtype=torch.bfloat16)
    for rows in torch.arange(unit.shape[0], device=unit.device).split(4):
        total += (upstream[rows].T @ unit[rows]).to(total.dtype)
    return {**found, "weight": total.to(unit.dtype)}


#: Partial sums of the weight's gradient are kept in bfloat16.
adds_weight_gradients_in_half = replace(RIGHT, parameter_gradients=_in_half)


def _every_row(layer: Layer, offsets: Tensor | None) -> int:
    norming.check(layer, offsets)
    return int(layer.x.shape[0])


#: Padding rows are normalised, projected and added to the weight's gradient.
counts_padding_rows = replace(RIGHT, check_norm=_every_row)


def _unchecked(layer: Layer, offsets: Tensor | None) -> int:
    return int(layer.x.shape[0]) if offsets is None else int(offsets.flatten()[-1])


#: Nothing is checked: what does not fit fails somewhere inside, or broadcasts.
accepts_anything = replace(RIGHT, check_norm=_unchecked)
