"""MXFP8 GDPA: custom ops, autograd, public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

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
    require_device,
)
from jagbench.impl.kernels.gdpa import activation_arguments, activation_codes
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

NAME = "mx_gdpa"


def mx_gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    activation: str | Sequence[str],
    recipe: AttentionRecipe,
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    causal: bool = False,
    align: str = "end",
    window: tuple[int | None, int | None] | None = None,
    prefix: int = 0,
    last_full: int = 0,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    deterministic: bool = False,
) -> Tensor:
    """GDPA on quantised operands; arguments and results as `gdpa`.

    recipe: element types, scales and roundings of Q, K, V, P, dO and dS (`AttentionRecipe`), with a
    scale a block of P = act(pre_scale Q K^T), which has no bound. What is computed is that of
    `jagbench.reference.mx_gdpa`, with float32 sums in another order: codes of Q, K, V and dO are
    its bits. Head dims 1 to 128. Kept for the backward: codes and scales of q, k and v.
    max_q_len, max_k_len: not needed. deterministic: gradients are bit-equal on repeats anyway.

    Raises ValueError for malformed arguments and a recipe with a fixed scale of P or a row sum,
    NotImplementedError for what no kernel does yet. Sources: `gdpa` and `mx_attention`.
    """
    check_recipe(NAME, recipe)
    if recipe.weight_scale != "block":
        raise ValueError(
            f"{NAME}: weight_scale must be 'block': the weights of GDPA have no bound, got "
            f"{recipe.weight_scale!r}"
        )
    if recipe.row_sum != "unquantized":
        raise ValueError(
            f"{NAME}: GDPA has no row sum to take otherwise, got row_sum {recipe.row_sum!r}"
        )
    mask = mask_of(NAME, causal, align, window, prefix, last_full)
    q, k, v, q_offsets, k_offsets = tensor_arguments(NAME, q, k, v, q_offsets, k_offsets)
    check_head_dims(NAME, check_arguments(NAME, q, k, v, q_offsets, k_offsets))
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    out: Tensor = _differentiable_op(
        q, k, v, q_offsets, k_offsets, activation_codes(activation, q.shape[1], NAME),
        float(pre_scale), float(post_scale), mask.encode(), encode_recipe(recipe), wanted,
    )[0]  # fmt: skip
    return out


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    activation: list[int],
    pre_scale: float,
    post_scale: float,
    mask: list[int],
    recipe: list[int],
    differentiable: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Out, and codes and scales of q, k and v for the backward, empty if there is none.

    Arguments as `mx_gdpa` has checked them; only the offsets' values are not yet.
    """
    require_device(NAME, q)
    geometry = geometry_of(q, k, v, q_offsets, k_offsets)
    check_both_offsets(NAME, geometry, q_offsets, k_offsets)
    rule = decode_recipe(recipe)
    code, chosen, ids = activation_arguments(activation, q.device)
    call = ForwardCall(geometry, Mask.decode(mask), rule, code, pre_scale, post_scale, ids, chosen)
    with torch.cuda.device_of(q):
        held = quantised_inputs(q, k, v, q_offsets, k_offsets, geometry, rule)
        out, _ = launch_forward(*held, q_offsets, k_offsets, q.dtype, call)
        kept = saved_operands(*held, v, k_offsets, rule, differentiable)
    return out, *kept


def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    activation: list[int],
    pre_scale: float,
    post_scale: float,
    mask: list[int],
    recipe: list[int],
    differentiable: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    out, _ = empty_output(q, v, q_offsets, k_offsets)
    kept = saved_shapes(q, k, v, q_offsets, k_offsets, decode_recipe(recipe), differentiable)
    return out, *kept


def _backward(
    d_out: Tensor,
    q_codes: Tensor,
    q_scales: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    activation: list[int],
    pre_scale: float,
    post_scale: float,
    mask: list[int],
    recipe: list[int],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that `needs` asks for (query, key and value); others are empty tensors."""
    geometry = geometry_of(q_codes, k_codes, v_codes, q_offsets, k_offsets)
    seen, rule = Mask.decode(mask), decode_recipe(recipe)
    code, chosen, ids = activation_arguments(activation, d_out.device)
    d_out = kernel_layout(d_out.reshape(geometry.out_rows, geometry.heads, geometry.v_dim))
    with torch.cuda.device_of(d_out):
        d_out = seen_rows(d_out, q_offsets, k_offsets, geometry, seen)
        saved = Saved(
            Operand(q_codes, q_scales), Operand(k_codes, k_scales), Operand(v_codes, v_scales),
            quantised_output_gradient(d_out, q_offsets, k_offsets, geometry, rule),
        )  # fmt: skip
        call = BackwardCall(
            geometry=geometry,
            mask=seen,
            schedule=Schedule(),
            activation=code,
            activation_set=chosen,
            activation_ids=ids,
            score_scale=pre_scale,
            grad_scale=pre_scale * post_scale,
            value_scale=post_scale,
            needs=Needs(*needs),
        )
        found = launch_backward(saved, q_offsets, k_offsets, (d_out.dtype,) * 3, call, rule)
    dq, dk, dv = (d_out.new_empty(0) if t is None else t for t in found[:3])
    return dq, dk, dv


def _backward_fake(
    d_out: Tensor,
    q_codes: Tensor,
    q_scales: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    activation: list[int],
    pre_scale: float,
    post_scale: float,
    mask: list[int],
    recipe: list[int],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        d_out.new_empty(t.shape if need else 0)
        for t, need in zip((q_codes, k_codes, v_codes), (needs[0], needs[1], needs[1]), strict=True)
    )
    return dq, dk, dv


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, q_offsets, k_offsets, *constants = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], q_offsets, k_offsets)
    ctx.constants = constants[:5]


def _autograd(
    ctx: Any, wanted: tuple[bool, ...], d_out: Tensor | None, *_: None
) -> tuple[Any, ...]:
    if d_out is None:
        return (None,) * 11
    needs = [wanted[0], wanted[1] or wanted[2]]
    found = _backward_op(d_out, *ctx.saved_tensors, *ctx.constants, needs)
    gradients = (t if want else None for t, want in zip(found, wanted[:3], strict=True))
    return (*gradients, *(None,) * 8)


_forward_op = define("mx_gdpa_forward", _forward, _forward_fake)
_backward_op = define("mx_gdpa_backward", _backward, _backward_fake)
_differentiable_op = differentiable(_forward_op, _setup, _autograd)


@register_flop_formula(torch.ops.jagbench.mx_gdpa_forward, get_raw=True)
def _forward_flops(
    q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any, activation: Any, pre_scale: float,
    post_scale: float, mask: list[int], *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return flops_of_offsets(q, v, q_offsets, k_offsets, mask)


@register_flop_formula(torch.ops.jagbench.mx_gdpa_backward, get_raw=True)
def _backward_flops(
    d_out: Any, q_codes: Any, q_scales: Any, k_codes: Any, k_scales: Any, v_codes: Any,
    v_scales: Any, q_offsets: Any, k_offsets: Any, activation: Any, pre_scale: float,
    post_scale: float, mask: list[int], *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    # Five matrix products against the forward's two: the scores are recomputed.
    return flops_of_offsets(q_codes, v_codes, q_offsets, k_offsets, mask) * 5 // 2
