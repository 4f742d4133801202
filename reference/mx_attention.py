"""MXFP8 jagged attention: every product of forward and backward takes quantised operands.

Algorithm: the MXFP8 attention of facebookexperimental/triton (TLX), with squares as in "GEM
Training: How Meta Doubled the Efficiency of Its LLM-Scale Ads Foundation Model", 2026.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jagbench.bias import BucketedBias
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, AttentionRecipe, Stream
from jagbench.pairs import Align, Window
from jagbench.reference import arguments
from jagbench.reference.autocast import in_autocast_dtype, outside_autocast
from jagbench.reference.mx_jagged import (
    Rule,
    check_recipe,
    over_group,
    packed,
    quantized_keys,
    quantized_output_gradient,
    quantized_queries,
    quantized_values,
    quantized_weights,
    sequences,
    wide,
)


def mx_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    recipe: AttentionRecipe,
    scale: float | None = None,
    causal: bool = False,
    align: Align = "end",
    window: Window | None = None,
    prefix: int = 0,
    last_full: int = 0,
    bias: Tensor | BucketedBias | None = None,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention on quantised operands; arguments and results as `jagged_attention`.

    recipe: element types, scales and roundings. With ^ for a quantised operand, for each sequence

    forward   S = scale Q^ K^^T + bias; P = exp(S - max of the row); O = P^ V^ / sum of P;
              lse = max + log(sum of P)
    backward  P = exp(S - lse); D = sum of dO O over the head; dP = dO^ V^^T;
              dS = P (dP - D + dlse); dV = P^^T dO^; dQ = scale dS^ K^; dK = scale dS^^T Q^

    Q, K, dO and dS are in squares; P lies along the dim it is summed over, and V by `value_block`.
    The sum is over P as it was before its quantisation, unless the recipe says "quantized". The
    gradient of the bias is dS, not quantised. Everything between the products is float32 (float64
    for float64); outputs and gradients are rounded once. Under autocast
    q, k and v are taken in its dtype.

    Raises ValueError for arguments that do not fit, with their numbers.
    """
    check_recipe(recipe)
    q, k, v = in_autocast_dtype(q, k, v)
    mask = arguments.Mask(causal, align, window, prefix, last_full)
    own = sequences(q, k, v, q_offsets, k_offsets, mask, (max_q_len, max_k_len))
    pairs = [one.seen.numel() for one in own]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    biases: Sequence[Tensor | None] = [None] * len(own)
    if bias is not None:
        biases = torch.split(arguments.dense_bias(bias, q, sum(pairs)), pairs)
    outs, lses = [], []
    for one, its_bias in zip(own, biases, strict=True):
        added = None if its_bias is None else its_bias.T.reshape(its_bias.shape[1], *one.seen.shape)
        call = _Call(recipe, one.seen, one.first, scale)
        out, lse = _Attend.apply(  # type: ignore[no-untyped-call]
            one.q, one.k, one.v, added, call
        )
        outs.append(out)
        lses.append(lse)
    dense = q_offsets is None
    out = packed(outs, q, v.shape[-1], dense)
    return (out, packed(lses, wide(q), None, dense)) if return_lse else out


@dataclass(frozen=True)
class _Call(Rule):
    scale: float


class _Attend(torch.autograd.Function):
    """Out `[heads, m, dv]` and lse `[heads, m]` of one sequence; bias `[heads or 1, m, n]`."""

    @staticmethod
    @outside_autocast
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor]:
        """O = P^ V^ / sum of P, and lse = max + log(sum of P)."""
        heads = q.shape[0]
        scores = _scores(quantized_queries(q, call), quantized_keys(k, heads, call), bias, call)
        top = _row_maxima(scores)
        weights = torch.exp(scores - top)
        held = quantized_weights(weights, ALONG_COLUMNS, call.recipe)
        summed = held if call.recipe.row_sum == "quantized" else weights
        sums = summed.sum(-1, keepdim=True)
        product = held @ quantized_values(v, heads, call, backward=False)
        out = (product / torch.where(sums == 0, 1.0, sums)).to(q.dtype)
        lse = torch.where(sums == 0, -math.inf, top + torch.log(sums))[..., 0]
        ctx.call = call
        ctx.save_for_backward(q, k, v, bias, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v and bias, as if quantisation were the identity."""
        q, k, v, bias, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        heads, kv_heads = q.shape[0], k.shape[0]
        queries, keys = quantized_queries(q, call), quantized_keys(k, heads, call)
        scores = _scores(queries, keys, bias, call)
        weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        # The output of a row without keys is 0 whatever its arguments: its gradient has no part.
        grad = torch.where(call.seen.any(1)[:, None], grad, 0.0)
        held_grad = quantized_output_gradient(grad, call)
        inner = (wide(grad) * wide(out)).sum(-1, keepdim=True)
        grad_weights = held_grad @ quantized_values(v, heads, call, backward=True).mT
        grad_scores = weights * (grad_weights - inner + grad_lse[..., None])
        grad_scores = torch.where(call.seen, grad_scores, 0.0)
        held = call.gradient(grad_scores, Stream.GRADIENT_OF_SCORES)
        held_weights = quantized_weights(weights, ALONG_ROWS, call.recipe)
        grad_bias = None
        if bias is not None:
            grad_bias = grad_scores.sum_to_size(bias.shape).to(bias.dtype)
        return (
            (call.scale * (held @ keys)).to(q.dtype),
            (call.scale * over_group(held.mT @ queries, kv_heads)).to(k.dtype),
            over_group(held_weights.mT @ held_grad, kv_heads).to(v.dtype),
            grad_bias,
            None,
        )


def _scores(queries: Tensor, keys: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
    """S `[heads, m, n]`, -inf where a pair is hidden."""
    scores = call.scale * (queries @ keys.mT)
    scores = scores if bias is None else scores + bias
    return torch.where(call.seen, scores, -math.inf)


def _row_maxima(scores: Tensor) -> Tensor:
    """Largest score of every row `[heads, m, 1]`; 0 for a row without keys, or with -inf alone."""
    # One column more, so that a row of no columns has a maximum too.
    bottom = torch.full_like(scores.sum(-1, keepdim=True), -math.inf)
    top = torch.cat([scores, bottom], -1).amax(-1, keepdim=True)
    return top.masked_fill(top == -math.inf, 0.0)
