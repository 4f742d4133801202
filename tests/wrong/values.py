"""Wrong values: scales, activations, bias, precision."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from wrong.activations import activate, derivative, maclaurin_gelu
from wrong.call import Call, Tile
from wrong.right import RIGHT, Steps
from wrong.steps import per_head, score, weigh


def _zeros(call: Call, name: str, tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor)


#: Output and gradients are 0.
zeros = replace(RIGHT, finish=_zeros)


def _default_scale(call: Call, q: Tensor, k: Tensor) -> Tensor:
    return score(replace(call, pre=1.0 / math.sqrt(q.shape[-1])), q, k)


#: jagged_attention takes 1 / sqrt(d), whatever `scale` says.
ignores_scale = replace(RIGHT, score=_default_scale)


def _no_pre_scale(call: Call, q: Tensor, k: Tensor) -> Tensor:
    return score(replace(call, pre=1.0), q, k)


#: gdpa accepts `pre_scale` and never uses it (the public Blackwell kernels).
ignores_pre_scale = replace(RIGHT, score=_no_pre_scale)


def _no_post_scale(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    return weigh(replace(call, post=1.0), tile)


#: gdpa accepts `post_scale` and never uses it.
ignores_post_scale = replace(RIGHT, weigh=_no_post_scale)


def _scale_outside(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    return weigh(replace(call, post=call.post * call.pre), tile)


#: gdpa applies `pre_scale` after the activation (the public Triton kernels).
scales_after_the_activation = replace(RIGHT, score=_no_pre_scale, weigh=_scale_outside)


def with_activation(forward: object) -> Steps:
    """RIGHT with another activation; the gradient is the derivative of that one."""
    assert callable(forward)

    def weights(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
        if call.softmax:
            return weigh(call, tile)
        acted = call.post * per_head(call, forward, tile.scores)
        return acted.masked_fill(~tile.mask, 0.0), acted.new_zeros(acted.shape[:2])

    def slope(call: Call, tile: Tile, weights: Tensor, flow: Tensor) -> Tensor:
        if call.softmax:
            return RIGHT.slope(call, tile, weights, flow)

        def prime(name: str, x: Tensor) -> Tensor:
            return derivative(name, x, forward)

        gradient = call.post * per_head(call, prime, tile.scores) * flow
        return gradient.masked_fill(~tile.mask, 0.0)

    return replace(RIGHT, weigh=weights, slope=slope)


#: Every activation is the identity.
ignores_activation = with_activation(lambda name, x: x)

#: Only `relu` is looked at; anything else becomes tanh GELU (a public kernel's dispatch).
turns_every_activation_into_gelu = with_activation(
    lambda name, x: activate("relu" if name == "relu" else "gelu_tanh", x)
)

#: The one-half of GELU was dropped.
twice_gelu = with_activation(
    lambda name, x: activate(name, x) * (2.0 if name.startswith(("gelu", "fast_gelu")) else 1.0)
)

#: SiLU whose argument is halved twice: act(1) = 0.311230, not 0.731059 (a public kernel).
halves_silu_twice = with_activation(
    lambda name, x: activate(name, 0.5 * x if name.endswith("silu") else x)
)

#: The degree-6 polynomial without its guard: wrong beyond |x| of about 1.25.
taylor_without_guard = with_activation(
    lambda name, x: maclaurin_gelu(x, 6) if name == "gelu_taylor6" else activate(name, x)
)


def _polynomial_columns(name: str, x: Tensor) -> Tensor:
    if "gelu" not in name:
        return activate(name, x)
    fourth = torch.arange(x.shape[-1], device=x.device) % 4 == 3
    return torch.where(fourth, maclaurin_gelu(x, 6), activate(name, x))


#: Every fourth key takes an unguarded polynomial in place of GELU (a public kernel).
approximates_every_fourth_key = with_activation(_polynomial_columns)


def _first_heads(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    return weigh(replace(call, activations=call.activations[:1] * len(call.activations)), tile)


#: One activation a head is accepted, and the first is used for all.
first_activation_for_every_head = replace(RIGHT, weigh=_first_heads)


def _softmax_weights(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    return weigh(replace(call, softmax=True), tile)


def _softmax_slope(call: Call, tile: Tile, weights: Tensor, flow: Tensor) -> Tensor:
    return RIGHT.slope(replace(call, softmax=True), tile, weights, flow)


#: gdpa is softmax attention (the CPU fall-back of a public library).
softmax_in_place_of_gdpa = replace(RIGHT, weigh=_softmax_weights, slope=_softmax_slope)


def _normalised(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    longest = int(call.k_offsets.diff().max())
    return weigh(replace(call, post=call.post / max(1, longest)), tile)


#: gdpa divides by the longest key sequence of the batch, unasked (the HSTU convention).
divides_by_the_longest_sequence = replace(RIGHT, weigh=_normalised)


def _no_bias(call: Call, scores: Tensor, first_pair: int) -> Tensor:
    return scores


#: The bias is accepted and never added.
ignores_bias = replace(RIGHT, add_bias=_no_bias)


def _scaled_bias(call: Call, scores: Tensor, first_pair: int) -> Tensor:
    return call.pre * RIGHT.add_bias(call, scores / call.pre, first_pair)


#: The bias is added before the scale, not after.
scales_the_bias_too = replace(RIGHT, add_bias=_scaled_bias)


def _reinterpreted_bias(call: Call, scores: Tensor, first_pair: int) -> Tensor:
    if call.bias is None or call.bias.dtype == call.q.dtype:
        return RIGHT.add_bias(call, scores, first_pair)
    halves = call.bias.view(call.q.dtype)[:, : call.bias.shape[1]]
    return RIGHT.add_bias(replace(call, bias=halves), scores, first_pair)


#: The bias is read through a pointer to the dtype of the queries.
reads_the_bias_as_queries = replace(RIGHT, add_bias=_reinterpreted_bias)


def _half_sum(weights: Tensor, v: Tensor) -> Tensor:
    total = weights.new_zeros(*weights.shape[:2], v.shape[2], dtype=torch.float16)
    for first in range(0, v.shape[1], 8):
        total += (weights[:, :, first : first + 8] @ v[:, first : first + 8]).half()
    return total.to(weights.dtype)


#: The output is accumulated over tiles of 8 keys in fp16.
accumulates_in_half = replace(RIGHT, mix=_half_sum)


def _other_head(rows: Tensor, times: int) -> Tensor:
    return rows.repeat(times, 1, 1)


#: Query head h reads key head h % kv_heads, not h // group.
reads_another_key_head = replace(RIGHT, repeat=_other_head)


def _as_wide_as_keys(weights: Tensor, v: Tensor) -> Tensor:
    return torch.cat([weights @ v[..., :32], torch.zeros_like((weights @ v)[..., 32:])], -1)


#: Columns of the values past the 32nd are dropped, as if they were as wide as the keys.
takes_values_for_as_wide_as_keys = replace(RIGHT, mix=_as_wide_as_keys)


def _truthy_scale(call: Call, q: Tensor, k: Tensor) -> Tensor:
    default = 1.0 / math.sqrt(q.shape[-1]) if call.softmax else 1.0
    return score(replace(call, pre=call.pre or default), q, k)


#: A scale of 0 is taken for no scale given.
takes_scale_zero_for_none = replace(RIGHT, score=_truthy_scale)


def _no_row_maximum(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    if not call.softmax:
        return weigh(call, tile)
    raised = torch.exp(tile.scores).masked_fill(~tile.mask, 0.0)
    total = raised.sum(-1, keepdim=True)
    return raised / total.masked_fill(~tile.mask.any(-1)[:, None], 1.0), total.log()[..., 0]


#: Softmax without subtracting the largest score: overflows and underflows.
softmax_without_row_maximum = replace(RIGHT, weigh=_no_row_maximum)


def _log2(call: Call, name: str, tensor: Tensor) -> Tensor:
    return tensor / math.log(2.0) if name == "lse" else tensor


#: log-sum-exp in base 2, as kernels keep it.
lse_in_log2 = replace(RIGHT, finish=_log2)


def _unscaled_lse(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    weights, _ = weigh(call, tile)
    hidden = (tile.scores / call.pre).masked_fill(~tile.mask, -math.inf)
    return weights, torch.logsumexp(hidden, dim=-1)


#: log-sum-exp of the scores before the scale.
lse_without_scale = replace(RIGHT, weigh=_unscaled_lse)


def _half_lse(call: Call, name: str, tensor: Tensor) -> Tensor:
    return tensor.to(call.q.dtype) if name == "lse" else tensor


#: log-sum-exp in the inputs' dtype (a public jagged kernel).
lse_in_the_input_dtype = replace(RIGHT, finish=_half_lse)
