"""Wrong gradients of a right forward."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from wrong.activations import derivative
from wrong.call import Call, Tile
from wrong.right import RIGHT
from wrong.steps import per_head


def _another_slope(call: Call, tile: Tile, weights: Tensor, flow: Tensor) -> Tensor:
    if call.softmax:
        return RIGHT.slope(call, tile, weights, flow)
    other = replace(call, activations=tuple("silu" if "gelu" in n else n for n in call.activations))
    return RIGHT.slope(other, tile, weights, flow)


#: GELU forward, the derivative of SiLU backward.
gradient_of_another_activation = replace(RIGHT, slope=_another_slope)


def _clipped_slope(call: Call, tile: Tile, weights: Tensor, flow: Tensor) -> Tensor:
    if call.softmax:
        return RIGHT.slope(call, tile, weights, flow)

    def clipped(name: str, x: Tensor) -> Tensor:
        return derivative(name, x).clamp(0.0, 1.0)

    gradient = call.post * per_head(call, clipped, tile.scores) * flow
    return gradient.masked_fill(~tile.mask, 0.0)


#: The derivative of the activation is held within [0, 1], as if it were monotone.
clips_the_derivative = replace(RIGHT, slope=_clipped_slope)


def _ones(call: Call, name: str, tensor: Tensor) -> Tensor:
    return torch.ones_like(tensor)


#: The backward takes an upstream gradient of all ones, whatever it is given.
ignores_the_upstream_gradient = replace(RIGHT, upstream=_ones)


def _last_only(total: Tensor, rows: slice, part: Tensor) -> None:
    total[rows] = part


#: The gradient of a dense query is that of the last sequence, not the sum over the batch.
dense_query_gradient_not_summed = replace(RIGHT, combine=_last_only)


def _first_of_group(gradient: Tensor, kv_heads: int) -> Tensor:
    heads, n, dim = gradient.shape
    return gradient.view(kv_heads, heads // kv_heads, n, dim)[:, 0].transpose(0, 1)


#: Gradients of k and v come from the first query head of each group alone.
group_gradient_not_summed = replace(RIGHT, reduce_group=_first_of_group)


def _interleaved_group(gradient: Tensor, kv_heads: int) -> Tensor:
    heads, n, dim = gradient.shape
    return gradient.view(heads // kv_heads, kv_heads, n, dim).sum(0).transpose(0, 1)


#: Gradients of k and v are summed over head % kv_heads, not head // group.
group_gradient_of_other_heads = replace(RIGHT, reduce_group=_interleaved_group)


def _no_row_term(call: Call, tile: Tile, weights: Tensor, flow: Tensor) -> Tensor:
    if not call.softmax:
        return RIGHT.slope(call, tile, weights, flow)
    return weights * flow


#: The softmax gradient lacks its row term, rowsum(dO * O).
softmax_gradient_without_row_term = replace(RIGHT, slope=_no_row_term)


def _nan_slope(call: Call, tile: Tile, weights: Tensor, flow: Tensor) -> Tensor:
    gradient = RIGHT.slope(call, tile, weights, flow)
    return gradient.masked_fill(~tile.mask.any(-1)[:, None], math.nan)


#: Rows that see no key give NaN gradients.
nan_gradient_where_nothing_is_visible = replace(RIGHT, slope=_nan_slope)


def _nan_on_empty_queries(call: Call, name: str, tensor: Tensor) -> Tensor:
    if name not in ("grad k", "grad v") or call.q_offsets is None:
        return tensor
    for q0, q1, k0, k1 in RIGHT.bounds(call):
        if q0 == q1:
            tensor[k0:k1] = math.nan
    return tensor


#: Keys of a sequence without queries get NaN gradients.
nan_gradient_of_keys_without_queries = replace(RIGHT, finish=_nan_on_empty_queries)


def _dk_needs_dq(call: Call, name: str, tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if name == "grad k" and not call.q.requires_grad else tensor


#: k gets a gradient only if q needs one too.
key_gradient_needs_the_query = replace(RIGHT, finish=_dk_needs_dq)


def _no_tail(call: Call, name: str, tensor: Tensor) -> Tensor:
    if name == "grad q" and tensor.shape[-1] % 16:
        tensor[..., tensor.shape[-1] // 16 * 16 :] = 0.0
    if name == "grad q" and tensor.shape[-1] % 32 == 8:
        tensor[..., -8:] = 0.0
    return tensor


#: dq lacks the columns past the last multiple of 16 (head dims 72 and 104).
dq_lacks_its_last_columns = replace(RIGHT, finish=_no_tail)


def _no_bias_gradient(call: Call, name: str, tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if name == "grad bias" else tensor


#: The bias gets no gradient.
bias_gradient_is_zero = replace(RIGHT, finish=_no_bias_gradient)


def _bias_needs_the_others(call: Call, name: str, tensor: Tensor) -> Tensor:
    others = any(t.requires_grad for t in (call.q, call.k, call.v))
    return tensor if name != "grad bias" or others else torch.zeros_like(tensor)


#: The bias gets a gradient only if q, k or v needs one too.
bias_gradient_needs_the_others = replace(RIGHT, finish=_bias_needs_the_others)


def _doubled(call: Call, name: str, tensor: Tensor) -> Tensor:
    return tensor.detach() * 2.0 if name == "grad v" else tensor


#: dv is twice what it should be.
dv_is_doubled = replace(RIGHT, finish=_doubled)
