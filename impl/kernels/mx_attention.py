"""MXFP8 jagged attention: custom ops, autograd, public function."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from jagbench.bias import BucketedBias
from jagbench.impl.kernels.activations import SOFTMAX
from jagbench.impl.kernels.arguments import (
    check_arguments,
    check_both_offsets,
    empty_output,
    geometry_of,
    kernel_layout,
    tensor_arguments,
)
from jagbench.impl.kernels.attention_launch import (
    BackwardCall,
    Needs,
    flops_of_offsets,
    query_tiles,
    require_device,
    row_statistics,
)
from jagbench.impl.kernels.jagged_attention import bias_of_kernels, bias_tensors, check_bias
from jagbench.impl.kernels.mask import Mask, mask_of
from jagbench.impl.kernels.mx_attention_launch import (
    ForwardCall,
    launch_backward,
    launch_forward,
    seen_rows,
)
from jagbench.impl.kernels.mx_attention_operands import (
    Operand,
    Saved,
    check_head_dims,
    check_recipe,
    decode_recipe,
    encode_recipe,
    quantised_inputs,
    quantised_output_gradient,
    saved_operands,
    saved_shapes,
)
from jagbench.impl.kernels.operators import define, differentiable
from jagbench.impl.kernels.tuning import Schedule
from jagbench.mx import AttentionRecipe

NAME = "mx_attention"
LN2 = math.log(2.0)


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
    align: str = "end",
    window: tuple[int | None, int | None] | None = None,
    prefix: int = 0,
    last_full: int = 0,
    bias: Tensor | BucketedBias | None = None,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention on quantised operands; arguments and results as `jagged_attention`.

    recipe: element types, scales and roundings of Q, K, V, P, dO and dS (`AttentionRecipe`). What
    is computed is that of `jagbench.reference.mx_attention`, with float32 sums in another order:
    codes of Q, K, V and dO are its bits; those of P and dS hang on float32 sums and exp, and may
    be a neighbour's. Head dims 1 to 128. Kept for the backward: codes and scales of q, k and v.
    max_q_len, max_k_len: not needed. deterministic: gradients are bit-equal on repeats anyway.

    Raises ValueError for malformed arguments, NotImplementedError for what no kernel does yet.
    Source: the MXFP8 attention of facebookexperimental/triton (TLX); squares as in "GEM Training:
    How Meta Doubled the Efficiency of Its LLM-Scale Ads Foundation Model", 2026.
    """
    check_recipe(NAME, recipe)
    mask = mask_of(NAME, causal, align, window, prefix, last_full)
    q, k, v, q_offsets, k_offsets = tensor_arguments(NAME, q, k, v, q_offsets, k_offsets)
    geometry = check_arguments(NAME, q, k, v, q_offsets, k_offsets)
    check_head_dims(NAME, geometry)
    values, bucket_ids = bias_tensors(NAME, bias, geometry, q)
    factor = 1.0 / math.sqrt(q.shape[2]) if scale is None else float(scale)
    inputs = [t for t in (q, k, v, values) if t is not None]
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    out, lse = _differentiable_op(
        q, k, v, q_offsets, k_offsets, values, bucket_ids, factor, mask.encode(),
        encode_recipe(recipe), wanted,
    )[:2]  # fmt: skip
    if not return_lse:
        return out
    if q_offsets is None:
        return out, lse.view(geometry.heads, geometry.batch, geometry.total_q).permute(1, 2, 0)
    return out, lse.t()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor | None,
    bucket_ids: Tensor | None,
    scale: float,
    mask: list[int],
    recipe: list[int],
    differentiable: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Out, lse, and codes and scales of q, k and v for the backward, empty if there is none.

    Arguments as `mx_attention` has checked them; only the offsets' values are not yet.
    """
    require_device(NAME, q)
    geometry = geometry_of(q, k, v, q_offsets, k_offsets)
    check_both_offsets(NAME, geometry, q_offsets, k_offsets)
    kernel_bias = bias_of_kernels(bias, bucket_ids, q_offsets, k_offsets, geometry)
    check_bias(NAME, kernel_bias)
    rule = decode_recipe(recipe)
    call = ForwardCall(
        geometry, Mask.decode(mask), rule, SOFTMAX.value, score_scale=scale, bias=kernel_bias
    )
    with torch.cuda.device_of(q):
        held = quantised_inputs(q, k, v, q_offsets, k_offsets, geometry, rule)
        out, lse = launch_forward(*held, q_offsets, k_offsets, q.dtype, call)
        kept = saved_operands(*held, v, k_offsets, rule, differentiable)
    return out, lse, *kept


def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor | None,
    bucket_ids: Tensor | None,
    scale: float,
    mask: list[int],
    recipe: list[int],
    differentiable: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    out, rows = empty_output(q, v, q_offsets, k_offsets)
    kept = saved_shapes(q, k, v, q_offsets, k_offsets, decode_recipe(recipe), differentiable)
    return out, q.new_empty(q.shape[1], rows, dtype=torch.float32), *kept


def _backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q_codes: Tensor,
    q_scales: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor | None,
    bucket_ids: Tensor | None,
    scale: float,
    mask: list[int],
    recipe: list[int],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients that `needs` asks for (query, key and value, bias); others are empty tensors."""
    geometry = geometry_of(q_codes, k_codes, v_codes, q_offsets, k_offsets)
    seen, rule, dtype = Mask.decode(mask), decode_recipe(recipe), out.dtype
    rows = (geometry.out_rows, geometry.heads, geometry.v_dim)
    d_out, out = kernel_layout(d_out.reshape(rows)), out.view(rows)
    # d_lse `[heads, out_rows]`, read as rows and heads; the statistics take it in units of log 2.
    d_lse = None if d_lse is None else (d_lse * LN2).t()
    with torch.cuda.device_of(out):
        d_out = seen_rows(d_out, q_offsets, k_offsets, geometry, seen)
        statistics = row_statistics(
            out, d_out, lse, d_lse, q_offsets, k_offsets, geometry,
            query_tiles(q_offsets, k_offsets, geometry),
        )  # fmt: skip
        saved = Saved(
            Operand(q_codes, q_scales), Operand(k_codes, k_scales), Operand(v_codes, v_scales),
            quantised_output_gradient(d_out, q_offsets, k_offsets, geometry, rule),
        )  # fmt: skip
        call = BackwardCall(
            geometry=geometry,
            mask=seen,
            schedule=Schedule(),
            activation=SOFTMAX.value,
            score_scale=scale,
            grad_scale=scale,
            bias=bias_of_kernels(bias, bucket_ids, q_offsets, k_offsets, geometry),
            statistics=statistics,
            needs=Needs(*needs),
        )
        found = launch_backward(saved, q_offsets, k_offsets, (dtype,) * 3, call, rule)
    wanted = (needs[0], needs[1], needs[1], needs[2])
    dq, dk, dv, d_bias = (
        out.new_empty(0) if gradient is None or not need else gradient
        for gradient, need in zip(found, wanted, strict=True)
    )
    return dq, dk, dv, d_bias


def _backward_fake(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q_codes: Tensor,
    q_scales: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor | None,
    bucket_ids: Tensor | None,
    scale: float,
    mask: list[int],
    recipe: list[int],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        out.new_empty(t.shape if need else 0)
        for t, need in zip((q_codes, k_codes, v_codes), (needs[0], needs[1], needs[1]), strict=True)
    )
    d_bias = out.new_empty(0) if bias is None or not needs[2] else bias.new_empty(bias.shape)
    return dq, dk, dv, d_bias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, q_offsets, k_offsets, bias, bucket_ids, *constants = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*output, q_offsets, k_offsets, bias, bucket_ids)
    ctx.constants = constants[:3]


def _autograd(
    ctx: Any, wanted: tuple[bool, ...], d_out: Tensor | None, d_lse: Tensor | None, *_: None
) -> tuple[Any, ...]:
    if d_out is None and d_lse is None:
        return (None,) * 11
    saved = ctx.saved_tensors
    d_out = torch.zeros_like(saved[0]) if d_out is None else d_out
    needs = [wanted[0], wanted[1] or wanted[2], wanted[5]]
    found = _backward_op(d_out, d_lse, *saved, *ctx.constants, needs)
    dq, dk, dv, d_bias = (
        gradient if wanted[place] else None
        for gradient, place in zip(found, (0, 1, 2, 5), strict=True)
    )
    return dq, dk, dv, None, None, d_bias, *(None,) * 5


_forward_op = define("mx_attention_forward", _forward, _forward_fake)
_backward_op = define("mx_attention_backward", _backward, _backward_fake)
_differentiable_op = differentiable(_forward_op, _setup, _autograd)


@register_flop_formula(torch.ops.jagbench.mx_attention_forward, get_raw=True)
def _forward_flops(
    q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any, bias: Any, bucket_ids: Any,
    scale: float, mask: list[int], *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    # Useful work: the scores that are computed a second time do not count.
    return flops_of_offsets(q, v, q_offsets, k_offsets, mask)


@register_flop_formula(torch.ops.jagbench.mx_attention_backward, get_raw=True)
def _backward_flops(
    d_out: Any, d_lse: Any, out: Any, lse: Any, q_codes: Any, q_scales: Any, k_codes: Any,
    k_scales: Any, v_codes: Any, v_scales: Any, q_offsets: Any, k_offsets: Any, bias: Any,
    bucket_ids: Any, scale: float, mask: list[int], *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    # Five matrix products against the forward's two: the scores are recomputed.
    return flops_of_offsets(q_codes, v_codes, q_offsets, k_offsets, mask) * 5 // 2
