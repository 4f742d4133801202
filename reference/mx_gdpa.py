"""MXFP8 generalised dot-product attention: every product takes quantised operands.

Sources: `gdpa.py`; the quantisation is that of `mx_attention.py`, as facebookresearch's
ads_model_kernel_library has an FP8 GDPA, with squares for Q, K, dO and dS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, AttentionRecipe, Stream
from jagbench.pairs import Align, Window
from jagbench.reference import activations, arguments
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
)


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
    align: Align = "end",
    window: Window | None = None,
    prefix: int = 0,
    last_full: int = 0,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    deterministic: bool = False,
) -> Tensor:
    """GDPA on quantised operands; arguments and results as `gdpa`.

    recipe: element types, scales and roundings. With ^ for a quantised operand, for each sequence

    forward   X = pre_scale Q^ K^^T; P = act(X); O = post_scale P^ V^
    backward  dS = act'(X) (dO^ V^^T); dV = post_scale P^^T dO^; dQ = pre_scale post_scale dS^ K^;
              dK = pre_scale post_scale dS^^T Q^

    Masked pairs have P = dS = 0; a query without keys has dO = 0. Q, K, dO and dS are in squares;
    P, with a scale a block, lies along the dim it is summed over, and V by `value_block`.
    Everything between the products is float32 (float64 for float64); outputs and gradients are
    rounded once. Under autocast q, k and v are taken in its dtype.

    Raises ValueError for arguments that do not fit, and for a recipe with a fixed scale
    of P or a row sum of quantised weights, which GDPA does not form.
    """
    check_recipe(recipe)
    if recipe.weight_scale != "block":
        raise ValueError(
            f"weight_scale must be 'block': the weights of GDPA have no bound, "
            f"got {recipe.weight_scale!r}"
        )
    if recipe.row_sum != "unquantized":
        raise ValueError(f"GDPA has no row sum to take otherwise, got row_sum {recipe.row_sum!r}")
    q, k, v = in_autocast_dtype(q, k, v)
    mask = arguments.Mask(causal, align, window, prefix, last_full)
    own = sequences(q, k, v, q_offsets, k_offsets, mask, (max_q_len, max_k_len))
    names = activations.by_head(activation, q.shape[1])
    outs = []
    for one in own:
        call = _Call(recipe, one.seen, one.first, tuple(names), pre_scale, post_scale)
        out = _Attend.apply(one.q, one.k, one.v, call)  # type: ignore[no-untyped-call]
        outs.append(out)
    return packed(outs, q, v.shape[-1], q_offsets is None)


@dataclass(frozen=True)
class _Call(Rule):
    names: Sequence[str]
    pre_scale: float
    post_scale: float

    def arguments(self, queries: Tensor, keys: Tensor) -> Tensor:
        """X `[heads, m, n]`, 0 where a pair is hidden."""
        return torch.where(self.seen, self.pre_scale * (queries @ keys.mT), 0.0)

    def weights(self, x: Tensor) -> Tensor:
        """act(X), 0 where a pair is hidden: act(0) need not be 0."""
        values = [activations.activation(n)(row) for n, row in zip(self.names, x, strict=True)]
        return torch.where(self.seen, torch.stack(values), 0.0)

    def slopes(self, x: Tensor) -> Tensor:
        """act'(X), 0 where a pair is hidden."""
        values = [activations.derivative(n)(row) for n, row in zip(self.names, x, strict=True)]
        return torch.where(self.seen, torch.stack(values), 0.0)


class _Attend(torch.autograd.Function):
    """Out `[heads, m, dv]` of one sequence."""

    @staticmethod
    @outside_autocast
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        """O = post_scale P^ V^."""
        heads = q.shape[0]
        x = call.arguments(quantized_queries(q, call), quantized_keys(k, heads, call))
        held = quantized_weights(call.weights(x), ALONG_COLUMNS, call.recipe)
        ctx.call = call
        ctx.save_for_backward(q, k, v)
        product = held @ quantized_values(v, heads, call, backward=False)
        return (call.post_scale * product).to(q.dtype)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v, as if quantisation were the identity."""
        q, k, v = ctx.saved_tensors
        call: _Call = ctx.call
        heads, kv_heads = q.shape[0], k.shape[0]
        queries, keys = quantized_queries(q, call), quantized_keys(k, heads, call)
        x = call.arguments(queries, keys)
        # The output of a row without keys is 0 whatever its arguments: its gradient has no part.
        grad = torch.where(call.seen.any(1)[:, None], grad, 0.0)
        held_grad = quantized_output_gradient(grad, call)
        grad_weights = held_grad @ quantized_values(v, heads, call, backward=True).mT
        grad_x = torch.where(call.seen, call.slopes(x) * grad_weights, 0.0)
        held = call.gradient(grad_x, Stream.GRADIENT_OF_SCORES)
        held_weights = quantized_weights(call.weights(x), ALONG_ROWS, call.recipe)
        both = call.pre_scale * call.post_scale
        return (
            (both * (held @ keys)).to(q.dtype),
            (both * over_group(held.mT @ queries, kv_heads)).to(k.dtype),
            (call.post_scale * over_group(held_weights.mT @ held_grad, kv_heads)).to(v.dtype),
            None,
        )
