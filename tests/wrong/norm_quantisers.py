"""Wrong ways to fuse a norm with the quantisation of its result.

Faults of either alone are in `norms` and `quantisers`; many of them are judged here too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wrong import norm_quantising, quantising
from wrong.norming import Layer
from wrong.quantising import Job
from wrong.right import RIGHT, Steps


def _through_bfloat16(layer: Layer, unit: Tensor) -> Tensor:
    return norm_quantising.affine(layer, unit).to(torch.bfloat16).to(unit.dtype)


#: The result of the norm is rounded to bfloat16 and quantised then.
rounds_before_it_quantises = replace(RIGHT, hand_over=_through_bfloat16)


def _coarse_weight(layer: Layer, unit: Tensor) -> Tensor:
    weight = layer.norm_weight
    rounded = None if weight is None else weight.to(torch.bfloat16).to(unit.dtype)
    return norm_quantising.affine(replace(layer, norm_weight=rounded), unit)


#: A float32 weight is rounded to bfloat16, whatever x is.
rounds_the_weight = replace(RIGHT, hand_over=_coarse_weight)


def _weighed_values(layer: Layer, unit: Tensor) -> Tensor:
    if layer.norm_weight is None or not unit.numel():
        return norm_quantising.affine(layer, unit)
    job = Job("e4m3", (1, 32), "rceil", None)
    codes, scales = quantising.quantise(RIGHT, job, unit, unit, torch.zeros(unit.shape[:-1]))
    return norm_quantising.affine(layer, quantising.dequantise(job, codes, scales))


#: Rows are quantised before they are weighed.
weighs_after_it_has_quantised = replace(RIGHT, hand_over=_weighed_values)


def _without_parameters(layer: Layer, unit: Tensor) -> Tensor:
    return norm_quantising.affine(replace(layer, norm_weight=None, norm_bias=None), unit)


#: Weight and bias are accepted and never used.
quantises_unit_rows = replace(RIGHT, hand_over=_without_parameters)


def _noisy(layer: Layer, unit: Tensor) -> Tensor:
    generator = torch.Generator(unit.device).manual_seed(1)
    noise = torch.randn(unit.shape, generator=generator, dtype=unit.dtype, device=unit.device)
    return norm_quantising.affine(layer, unit * (1 + 2.0**-12 * noise))


#: Rows are right to 12 bits: codes are a step off here and there, all within a boundary's reach.
approximates_the_root = replace(RIGHT, hand_over=_noisy)


class _RawScales(Steps):
    """Scales of the rows before the norm."""

    def mx_norm(self, x: Tensor, offsets: Tensor | None = None, **options: Any) -> Any:
        """Codes of the normed rows, scales of x."""
        codes, _ = super().mx_norm(x, offsets, **options)
        norm = ("norm", "eps", "norm_weight", "norm_bias")
        others = {name: value for name, value in options.items() if name not in norm}
        return codes, super().mx_quantize(x, offsets, **others)[1]


#: The scale is that of the raw row, which was at hand when the row was read.
takes_scales_of_the_raw_row = _RawScales()


def _filled(job: Job, x: Tensor) -> Tensor:
    tall, wide = job.block
    missing = (0, -x.shape[-1] % wide, 0, -x.shape[-2] % tall)
    return quantising.largest(job, functional.pad(x.abs(), missing, value=64.0))


#: Rows and columns that fill short blocks hold the bias, and count for the scale.
fills_short_blocks_with_the_bias = replace(RIGHT, largest=_filled)
