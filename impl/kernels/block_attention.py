"""Block attention: custom ops, autograd, public function."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from jagbench.impl.kernels.arguments import empty_output, is_eps
from jagbench.impl.kernels.attention_launch import Needs, require_device
from jagbench.impl.kernels.block_attention_launch import (
    LARGEST_BLOCK,
    BlockCall,
    block_forward,
    block_gradients,
)
from jagbench.impl.kernels.operators import define, differentiable
from jagbench.impl.kernels.packed_arguments import (
    check_values_of_offsets,
    packed_arguments,
    table_argument,
)
from jagbench.impl.kernels.tuning import Schedule, Tier, tier_alone
from jagbench.pairs import attention_flops
from jagbench.rotary import TokenTable

NAME = "block_attention"


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Tensor | TokenTable | None = None,
    rotate_values: bool = True,
    qk_norm_eps: float | None = None,
    schedule: Schedule | Tier = "auto",
) -> Tensor:
    """Softmax attention inside blocks counted from each sequence's start, bidirectional.

    q `[total, heads, d]`; k `[total, kv_heads, d]`; v `[total, kv_heads, dv]`, of any row and head
    stride (views of packed QKV are not copied); offsets `[batch + 1]`, int32 or int64. float32,
    float16 and bfloat16. Rows past the last offset are not read; output and gradients there are 0.

    block_size: rows of a block, 1 to 128, computed as the next power of two from 16 on.
    scale: factor of Q K^T; None is 1 / sqrt(d).
    rotary: table by position or `TokenTable`, sines first: q, k and (rotate_values) v are turned in
        interleaved pairs on chip, gradients turned back before their one rounding. float32 or q's
        dtype.
    schedule: a tier. The forward is portable; so are gradients, but for calls that "auto" gives to
        the Hopper kernel (`hopper.block_gradient_launch.block_gradient_problem`).
    qk_norm_eps: q and k go through RMSNorm by head with this eps first, on chip, and their
        gradients back through it before their one rounding.

    Returns out `[total, heads, dv]` in q's dtype. Outputs and gradients are bit-equal on repeats.
    Raises ValueError for malformed arguments, NotImplementedError for larger blocks, other dtypes,
    a gradient of the table, and the Hopper tier. Source: PyTorch blog "TLX Block Attention", 2026.
    """
    plan = tier_alone(NAME, schedule, ("auto", "split"))
    if plan.tier == "hopper":
        raise NotImplementedError(
            f"{NAME}: there is no Hopper kernel of the forward, only portable"
        )
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"{NAME}: block_size must be an int of at least 1, got {block_size!r}")
    if block_size > LARGEST_BLOCK:
        raise NotImplementedError(
            f"{NAME}: blocks are kept on chip whole; at most {LARGEST_BLOCK} rows, got {block_size}"
        )
    if qk_norm_eps is not None and not is_eps(qk_norm_eps):
        raise ValueError(f"{NAME}: qk_norm_eps must be at least 0 or None, got {qk_norm_eps!r}")
    q, k, v, offsets = packed_arguments(NAME, q, k, v, offsets)
    table, by_token = None, False
    if rotary is not None:
        table, by_token = table_argument(NAME, "rotary", rotary, q, *([v] if rotate_values else []))
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else float(scale)
    out: Tensor = _differentiable_op(
        q, k, v, offsets, table, by_token, block_size, scale, bool(rotate_values),
        plan.backward_tier == "portable",
        None if qk_norm_eps is None else float(qk_norm_eps),
    )  # fmt: skip
    return out


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    table: Tensor | None,
    by_token: bool,
    block_size: int,
    scale: float,
    rotate_values: bool,
    portable: bool,
    qk_norm_eps: float | None,
) -> Tensor:
    """Arguments as `block_attention` has checked them; only the offsets' values are not yet."""
    require_device(NAME, q)
    check_values_of_offsets(NAME, offsets, q.shape[0], table, by_token)
    call = BlockCall(block_size, scale, table, by_token, rotate_values, portable, qk_norm_eps)
    with torch.cuda.device_of(q):
        return block_forward(q, k, v, offsets, call)


def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    table: Tensor | None,
    by_token: bool,
    block_size: int,
    scale: float,
    rotate_values: bool,
    portable: bool,
    qk_norm_eps: float | None,
) -> Tensor:
    return empty_output(q, v, offsets, offsets)[0]


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    table: Tensor | None,
    by_token: bool,
    block_size: int,
    scale: float,
    rotate_values: bool,
    portable: bool,
    qk_norm_eps: float | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that `needs` asks for (query, key and value); others are empty tensors."""
    call = BlockCall(block_size, scale, table, by_token, rotate_values, portable, qk_norm_eps)
    with torch.cuda.device_of(q):
        return block_gradients(q, k, v, d_out, offsets, call, Needs(*needs))


def _backward_fake(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    table: Tensor | None,
    by_token: bool,
    block_size: int,
    scale: float,
    rotate_values: bool,
    portable: bool,
    qk_norm_eps: float | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        t.new_empty(t.shape if need else 0)
        for t, need in zip((q, k, v), (needs[0], needs[1], needs[1]), strict=True)
    )
    return dq, dk, dv


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.constants = inputs[5:]


def _autograd(ctx: Any, wanted: tuple[bool, ...], d_out: Tensor) -> tuple[Any, ...]:
    gradients = _backward_op(
        d_out, *ctx.saved_tensors, *ctx.constants, [wanted[0], wanted[1] or wanted[2]]
    )
    kept = (x if want else None for x, want in zip(gradients, wanted, strict=False))
    return (*kept, *(None,) * (2 + len(ctx.constants)))


_forward_op = define("block_attention_forward", _forward, _forward_fake)
_backward_op = define("block_attention_backward", _backward, _backward_fake)
_differentiable_op = differentiable(_forward_op, _setup, _autograd)


def _flops(q: Tensor, v: Tensor, offsets: Tensor, block_size: int) -> int:
    """Of a forward pass, from the offsets' values: whole blocks and tails, squared."""
    lengths = offsets.diff().to(torch.int64)
    tails = lengths % block_size
    pairs = int(((lengths - tails) * block_size + tails * tails).sum())
    return attention_flops(pairs, q.shape[1], q.shape[2], v.shape[2])


@register_flop_formula(torch.ops.jagbench.block_attention_forward, get_raw=True)
def _forward_flops(
    q: Any, k: Any, v: Any, offsets: Any, table: Any, by_token: bool, block_size: int,
    *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return _flops(q, v, offsets, block_size)


@register_flop_formula(torch.ops.jagbench.block_attention_backward, get_raw=True)
def _backward_flops(
    d_out: Any, q: Any, k: Any, v: Any, offsets: Any, table: Any, by_token: bool, block_size: int,
    *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    # Five matrix products against the forward's two: the scores are recomputed.
    return _flops(q, v, offsets, block_size) * 5 // 2
