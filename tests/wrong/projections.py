"""Wrong ways to fuse a linear layer with the quantisation of its result."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from wrong import projecting
from wrong.right import RIGHT


def _through_bfloat16(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return projecting.product(x, weight, bias).to(torch.bfloat16).to(x.dtype)


#: The result is rounded to bfloat16 and quantised then, as two kernels would.
rounds_the_result_before_it_quantises = replace(RIGHT, project_rows=_through_bfloat16)


def _rounded_before_the_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = projecting.product(x, weight, None).to(torch.bfloat16).to(x.dtype)
    return out if bias is None else out + bias


#: The product is rounded to bfloat16 before the bias is added in float32.
rounds_the_product_before_the_bias = replace(RIGHT, project_rows=_rounded_before_the_bias)


def _without_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return projecting.product(x, weight, None)


#: The bias is accepted and never used.
forgets_the_bias = replace(RIGHT, project_rows=_without_bias)


def _half_sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float16, device=x.device)
    for part in torch.arange(x.shape[1], device=x.device).split(16):
        total += (x[:, part] @ weight[:, part].T).to(total.dtype)
    return total.to(x.dtype) + (0.0 if bias is None else bias)


#: Partial sums are kept in half precision.
adds_in_half_precision = replace(RIGHT, project_rows=_half_sums)


def _few_bits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return projecting.product(*(t.to(torch.bfloat16).to(x.dtype) for t in (x, weight)), bias)


#: float32 operands are multiplied as bfloat16.
multiplies_in_bfloat16 = replace(RIGHT, project_rows=_few_bits)


def _last_features_left_out(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    whole = max(16, x.shape[1] // 16 * 16)
    return projecting.product(x[:, :whole], weight[:, :whole], bias)


#: Features behind the last whole tile are not multiplied.
drops_the_last_features = replace(RIGHT, project_rows=_last_features_left_out)


def _interleaved(out: Tensor, heads: int) -> Tensor:
    return out if heads == 1 else out.view(out.shape[0], -1, heads).mT.contiguous()


#: Every heads-th column belongs to a head.
interleaves_heads = replace(RIGHT, view_heads=_interleaved)
