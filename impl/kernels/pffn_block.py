"""The PFFN block: row kernels about our GDPA, with a backward of its own.

The attention runs on whichever tier it can; the norms and residuals before and behind it take one
pass over rows each way, and the sum of its gradients is formed in the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from jagbench.impl.kernels.arguments import (
    check_arguments,
    check_both_offsets,
    geometry_of,
    is_eps,
    tensor_arguments,
)
from jagbench.impl.kernels.attention_launch import (
    check_repeatable,
    flops_of_offsets,
    require_device,
)
from jagbench.impl.kernels.gdpa import activation_codes
from jagbench.impl.kernels.mask import Mask
from jagbench.impl.kernels.operators import define, differentiable
from jagbench.impl.kernels.pffn_kernels import (
    pffn_enter_kernel,
    pffn_inner_gradient_kernel,
    pffn_leave_kernel,
    pffn_query_gradient_kernel,
)
from jagbench.impl.kernels.tuning import Schedule, Tier, as_schedule, note_used, padded

NAME = "pffn_block"
_EVERY_PAIR = Mask(-1, -1, False).encode()
# Elements of a program's tile of rows, and the most features of one.
_ROW_TILE, _MOST_FEATURES = 2048, 8192


def pffn_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    activation: str | Sequence[str],
    eps: float,
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    deterministic: bool = False,
    schedule: Schedule | Tier = "auto",
) -> Tensor:
    """RMSNorm(GDPA(ln, k, v) + ln) + q with ln = LayerNorm(q), over the features of all heads.

    q `[total_q, heads, d]`; k and v `[total_k, kv_heads, d]`; shapes, dtypes, offsets, activation,
    deterministic and schedule as in `gdpa`. ln is rounded once for the attention; the residual
    takes it in fp32.

    Returns a contiguous tensor like q; rows past the last offset are 0. Raises ValueError for
    malformed arguments, NotImplementedError for what gdpa cannot do and more than 8,192 features.
    Source: facebookresearch/ads_model_kernel_library.
    """
    plan = as_schedule(NAME, schedule)
    if not is_eps(eps):
        raise ValueError(f"{NAME}: eps must be at least 0, got {eps!r}")
    q, k, v, rows, k_offsets = tensor_arguments(NAME, q, k, v, q_offsets, k_offsets)
    if rows is None:
        raise ValueError(f"{NAME}: q {tuple(q.shape)} needs q_offsets: no dense query passes")
    q_offsets = rows
    check_arguments(NAME, q, k, v, q_offsets, k_offsets)
    if q.shape[2] != v.shape[2]:
        raise ValueError(f"{NAME}: head_dim {q.shape[2]} of q must be that of v, {v.shape[2]}")
    if q.shape[1] * q.shape[2] > _MOST_FEATURES:
        raise NotImplementedError(
            f"{NAME}: at most {_MOST_FEATURES} features a row, got {q.shape[1]} x {q.shape[2]}"
        )
    if deterministic:
        check_repeatable(NAME, plan, q, k, v)
    out: Tensor = _differentiable_op(
        q, k, v, q_offsets, k_offsets, activation_codes(activation, q.shape[1]), float(pre_scale),
        float(post_scale), float(eps), -1 if max_k_len is None else int(max_k_len),
        plan.encode(repeatable=deterministic),
    )[0]  # fmt: skip
    return out


def _launch(kernel: Any, offsets: Tensor, eps: float, *tensors: Tensor) -> None:
    """A kernel over rows of contiguous tensors `[total, heads, d]`, the last of which it writes."""
    total, heads, dim = tensors[-1].shape
    features = heads * dim
    rows, block, warps = pffn_tile(features)
    if not total:
        return
    note_used(kernel.fn.__name__.removesuffix("_kernel"), f"{rows} rows of {block}")
    kernel[(triton.cdiv(total, rows),)](
        *tensors, offsets, offsets.shape[0] - 1, total, eps,
        FEATURES=features, ROWS=rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def pffn_tile(features: int) -> tuple[int, int, int]:
    """Rows, padded features and warps of a program."""
    block = padded(features)
    return max(1, _ROW_TILE // block), block, 4 if block <= 2048 else 8


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    activation: list[int],
    pre_scale: float,
    post_scale: float,
    eps: float,
    max_k_len: int,
    schedule: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Out, LayerNorm(q) and what the attention gave; the offsets' values are checked by gdpa."""
    require_device(NAME, q)
    q = q.contiguous()
    out, ln = torch.empty_like(q), torch.empty_like(q)
    with torch.cuda.device_of(q):
        # Offsets must be known to be in range before a kernel trusts the last of them.
        check_both_offsets(NAME, geometry_of(q, k, v, q_offsets, k_offsets), q_offsets, k_offsets)
        _launch(pffn_enter_kernel, q_offsets, eps, q, ln)
        attended = torch.ops.jagbench.gdpa_forward(
            ln, k, v, q_offsets, k_offsets, activation, pre_scale, post_scale, _EVERY_PAIR,
            max_k_len, schedule,
        )  # fmt: skip
        _launch(pffn_leave_kernel, q_offsets, eps, attended, q, out)
    return out, ln, attended


def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    activation: list[int],
    pre_scale: float,
    post_scale: float,
    eps: float,
    max_k_len: int,
    schedule: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    ln: Tensor,
    attended: Tensor,
    activation: list[int],
    pre_scale: float,
    post_scale: float,
    eps: float,
    schedule: list[int],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that `needs` asks for (query, key and value); others are empty tensors."""
    q, d_out = q.contiguous(), d_out.contiguous()
    d_inner = torch.empty_like(q)
    dq = torch.empty_like(q) if needs[0] else q.new_empty(0)
    with torch.cuda.device_of(q):
        _launch(pffn_inner_gradient_kernel, q_offsets, eps, d_out, attended, q, d_inner)
        d_ln, dk, dv = torch.ops.jagbench.gdpa_backward(
            d_inner, ln, k, v, q_offsets, k_offsets, activation, pre_scale, post_scale,
            _EVERY_PAIR, schedule, needs,
        )  # fmt: skip
        if needs[0]:
            _launch(pffn_query_gradient_kernel, q_offsets, eps, d_out, attended, q, d_ln, dq)
    return dq, dk, dv


def _backward_fake(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    ln: Tensor,
    attended: Tensor,
    activation: list[int],
    pre_scale: float,
    post_scale: float,
    eps: float,
    schedule: list[int],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        t.new_empty(t.shape if need else 0)
        for t, need in zip((q, k, v), (needs[0], needs[1], needs[1]), strict=True)
    )
    return dq, dk, dv


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, ln, attended = output
    ctx.save_for_backward(*inputs[:5], ln, attended)
    ctx.mark_non_differentiable(ln, attended)
    ctx.set_materialize_grads(False)
    activation, pre, post, eps, _, schedule = inputs[5:]
    ctx.constants = (activation, pre, post, eps, schedule)


def _autograd(
    ctx: Any, wanted: tuple[bool, ...], d_out: Tensor | None, *_: Tensor | None
) -> tuple[Any, ...]:
    if d_out is None:
        return (None,) * 11
    found = _backward_op(
        d_out, *ctx.saved_tensors, *ctx.constants, [wanted[0], wanted[1] or wanted[2]]
    )
    kept = (x if want else None for x, want in zip(found, wanted, strict=False))
    return (*kept, *(None,) * 8)


_forward_op = define("pffn_block_forward", _forward, _forward_fake)
_backward_op = define("pffn_block_backward", _backward, _backward_fake)
_differentiable_op = differentiable(_forward_op, _setup, _autograd)


@register_flop_formula(torch.ops.jagbench.pffn_block_forward, get_raw=True)
def _forward_flops(
    q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any, *args: Any, **kwargs: Any
) -> int:
    return flops_of_offsets(q, v, q_offsets, k_offsets, _EVERY_PAIR)


@register_flop_formula(torch.ops.jagbench.pffn_block_backward, get_raw=True)
def _backward_flops(
    d_out: Any, q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any, *args: Any, **kwargs: Any
) -> int:
    # Five matrix products against the forward's two: the scores are recomputed.
    return flops_of_offsets(q, v, q_offsets, k_offsets, _EVERY_PAIR) * 5 // 2
