"""Jagged softmax attention: custom ops, autograd, public function."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from torch.utils.weak import WeakTensorKeyDictionary

from jagbench.bias import BucketedBias
from jagbench.impl.kernels.activations import SOFTMAX
from jagbench.impl.kernels.arguments import (
    Geometry,
    check_arguments,
    check_both_offsets,
    empty_output,
    geometry_of,
    kernel_layout,
    tensor_arguments,
    version,
)
from jagbench.impl.kernels.attention_launch import (
    BackwardCall,
    Bias,
    Needs,
    attention_gradients,
    check_repeatable,
    flops_of_offsets,
    keys_of_own_deltas,
    query_tiles,
    require_device,
    row_statistics,
)
from jagbench.impl.kernels.hopper.support import takes_hopper, tma_layout
from jagbench.impl.kernels.jagged_attention_launch import LOG2E, launch_forward
from jagbench.impl.kernels.mask import Mask, mask_of
from jagbench.impl.kernels.operators import define, differentiable
from jagbench.impl.kernels.schedule import build_tile_list
from jagbench.impl.kernels.tuning import Schedule, Tier, as_schedule, note_tier, tile_config

NAME = "jagged_attention"
LN2 = math.log(2.0)
_ID_TYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)

# Bucket ids already found within their table: (version looked at, buckets).
_checked_ids = WeakTensorKeyDictionary()


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
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
    schedule: Schedule | Tier = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention inside each sequence of a jagged batch: O = softmax(scale Q K^T + bias) V.

    q: `[total_q, heads, qk_dim]`, or `[rows, heads, qk_dim]` with `q_offsets=None`: one dense query
        shared by every sequence. k: `[total_k, kv_heads, qk_dim]`, v: `[total_k, kv_heads, v_dim]`;
        kv_heads divides heads. One dtype of float32, float16, bfloat16; head dims 1 to 256.
    q_offsets, k_offsets: `[batch + 1]`, int32 or int64, from 0, non-decreasing. Rows past the last
        offset are padding: never read into a result; 0 in outputs and gradients.
    scale: defaults to 1 / sqrt(qk_dim).
    causal, align, window, prefix, last_full: which keys a query sees, see `jagbench.pairs`.
    bias: `[sum of len_q * len_k, heads or 1]`, row-major per sequence, or a `BucketedBias`.
    max_q_len: not needed. max_k_len: a hint; at most 64 chooses the kernel that keeps a sequence's
        keys on chip. A sequence that is longer all the same is computed in full.
    deterministic: promises bit-equal gradients on repeats. Outputs always are, and so are the
        portable gradients, except those of `backward="atomic"`, which is refused here. The Hopper
        tier adds dQ in no fixed order: the portable backward is taken instead, as it is under
        `torch.use_deterministic_algorithms(True)`; with `schedule="hopper"` that is refused.
    schedule: how it is computed (`tuning.Schedule`), or the tier alone: "auto", "portable",
        "hopper".

    Returns `[total_q, heads, v_dim]` (dense query: `[batch, rows, heads, v_dim]`) in q's dtype and,
    with `return_lse`, the natural log-sum-exp, float32 `[total_q, heads]` (`[batch, rows, heads]`),
    -inf for a row that sees no key. Both are differentiable.

    Raises ValueError for malformed arguments, NotImplementedError for what no kernel does yet.
    Source: arXiv 2409.15373; the backward is that of FlashAttention-2 (arXiv 2307.08691, sec. 3.1).
    """
    mask = mask_of(NAME, causal, align, window, prefix, last_full)
    plan = as_schedule(NAME, schedule)
    q, k, v, q_offsets, k_offsets = tensor_arguments(NAME, q, k, v, q_offsets, k_offsets)
    geometry = check_arguments(NAME, q, k, v, q_offsets, k_offsets)
    values, bucket_ids = bias_tensors(NAME, bias, geometry, q)
    if deterministic:
        check_repeatable(NAME, plan, q, k, v, values)
    factor = 1.0 / math.sqrt(q.shape[2]) if scale is None else float(scale)
    out, lse = _differentiable_op(
        q, k, v, q_offsets, k_offsets, values, bucket_ids, factor, mask.encode(),
        -1 if max_k_len is None else int(max_k_len), plan.encode(repeatable=deterministic),
    )  # fmt: skip
    if not return_lse:
        return out
    lse = lse * LN2
    if q_offsets is None:
        return out, lse.view(geometry.heads, geometry.batch, geometry.total_q).permute(1, 2, 0)
    return out, lse.t()


def bias_tensors(
    operator: str, bias: Tensor | BucketedBias | None, geometry: Geometry, q: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Values and bucket ids of a bias, checked as far as shapes tell."""
    if bias is None:
        return None, None
    values = bias.table if isinstance(bias, BucketedBias) else bias
    bucket_ids = bias.bucket_ids if isinstance(bias, BucketedBias) else None
    what = "bias.table" if isinstance(bias, BucketedBias) else "bias"
    heads = geometry.heads
    if not isinstance(values, Tensor) or values.dim() != 2 or values.shape[1] not in (1, heads):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{operator}: {what} must be [rows, {heads} or 1], got {shape}")
    if not values.is_floating_point():
        raise ValueError(f"{operator}: {what} must be floating, got {values.dtype}")
    for tensor in (values, bucket_ids):
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{operator}: {what} is on {tensor.device}, q on {q.device}")
    if bucket_ids is not None:
        if bucket_ids.dim() != 1 or bucket_ids.dtype not in _ID_TYPES:
            raise ValueError(
                f"{operator}: bias.bucket_ids must be uint8, int16, int32 or int64 [pairs], got "
                f"{bucket_ids.dtype} {tuple(bucket_ids.shape)}"
            )
        bucket_ids = bucket_ids.contiguous()
    return values, bucket_ids


def bias_of_kernels(
    values: Tensor | None,
    bucket_ids: Tensor | None,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    geometry: Geometry,
) -> Bias:
    """Bias in kernel form."""
    if values is None:
        return Bias()
    k_lengths = k_offsets.diff().long()
    q_lengths = geometry.total_q if q_offsets is None else q_offsets.diff().long()
    pairs = torch.cat([k_lengths.new_zeros(1), (q_lengths * k_lengths).cumsum(0)])
    return Bias(1 if bucket_ids is None else 2, values, bucket_ids, pairs)


def check_bias(operator: str, bias: Bias) -> None:
    """Pairs and bucket ids of a bias; ValueError with the numbers.

    Reads device memory, so the stream is waited for: in every forward pass for the number of pairs,
    once per tensor and version for the ids. Not while a CUDA graph is captured.
    """
    if bias.values is None or bias.pair_offsets is None:
        return
    if bias.values.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    ids = bias.bucket_ids
    rows, total = bias.values if ids is None else ids, int(bias.pair_offsets[-1])
    if rows.shape[0] != total:
        what = "bias" if ids is None else "bias.bucket_ids"
        raise ValueError(f"{operator}: {what} has {rows.shape[0]} rows, the batch {total} pairs")
    if ids is None or not total:
        return
    state = version(ids), bias.values.shape[0]
    if state[0] is not None and _checked_ids.get(ids) == state:
        return
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= bias.values.shape[0]:
        raise ValueError(
            f"{operator}: bias.bucket_ids run from {low} to {high}, the table has "
            f"{bias.values.shape[0]} buckets"
        )
    _checked_ids[ids] = state


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
    max_k_len: int,
    schedule: list[int],
) -> tuple[Tensor, Tensor]:
    """Arguments as `jagged_attention` has checked them; only the offsets' values are not yet."""
    require_device(NAME, q)
    geometry = geometry_of(q, k, v, q_offsets, k_offsets)
    check_both_offsets(NAME, geometry, q_offsets, k_offsets)
    kernel_bias = bias_of_kernels(bias, bucket_ids, q_offsets, k_offsets, geometry)
    check_bias(NAME, kernel_bias)
    plan, seen = Schedule.decode(schedule), Mask.decode(mask)
    softmax = (SOFTMAX.value,)
    with torch.cuda.device_of(q):
        if takes_hopper(
            NAME, plan.forward_tier, q, k, v, geometry, seen, kernel_bias.kind, softmax
        ):  # fmt: skip
            return _forward_on_hopper(
                q, k, v, q_offsets, k_offsets, geometry, seen, scale, max_k_len
            )
        out, lse, _ = launch_forward(
            q, k, v, q_offsets, k_offsets, geometry, seen, kernel_bias, scale, plan, max_k_len
        )
    return out, lse


def _forward_on_hopper(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor,
    geometry: Geometry, mask: Mask, scale: float, max_k_len: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Imported here: Gluon is asked for by a launch alone."""
    from jagbench.impl.kernels.hopper import forward_launch

    q, k, v = tma_layout(q), tma_layout(k), tma_layout(v)
    out, lse = forward_launch.launch_forward(
        q, k, v, q_offsets, k_offsets, geometry, mask,
        scale=scale * LOG2E, out_scale=1.0, activation=SOFTMAX.value, max_k_len=max_k_len,
    )  # fmt: skip
    assert lse is not None
    note_tier("hopper_forward")
    return out, lse


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
    max_k_len: int,
    schedule: list[int],
) -> tuple[Tensor, Tensor]:
    out, rows = empty_output(q, v, q_offsets, k_offsets)
    return out, q.new_empty(q.shape[1], rows, dtype=torch.float32)


def _backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor | None,
    bucket_ids: Tensor | None,
    scale: float,
    mask: list[int],
    schedule: list[int],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients that `needs` asks for (query, key and value, bias); others are empty tensors."""
    geometry = geometry_of(q, k, v, q_offsets, k_offsets)
    if geometry.shared_q:
        rows = (geometry.out_rows, geometry.heads, geometry.v_dim)
        d_out, out = d_out.reshape(rows), out.view(rows)
    d_out = kernel_layout(d_out)
    # d_lse `[heads, out_rows]`, read through its strides as rows and heads.
    d_lse = None if d_lse is None else d_lse.t()
    with torch.cuda.device_of(q):
        tiles = query_tiles(q_offsets, k_offsets, geometry)
        call = BackwardCall(
            geometry=geometry,
            mask=Mask.decode(mask),
            schedule=Schedule.decode(schedule),
            activation=SOFTMAX.value,
            score_scale=scale * LOG2E,
            grad_scale=scale,
            bias=bias_of_kernels(bias, bucket_ids, q_offsets, k_offsets, geometry),
            query_tiles=tiles,
            needs=Needs(*needs),
        )
        # A gradient of lse belongs in the deltas too.
        own_keys = 0 if d_lse is not None else keys_of_own_deltas(NAME, q, k, v, call)
        statistics = row_statistics(
            out, d_out, lse, d_lse, q_offsets, k_offsets, geometry, tiles, own_keys
        )
        call = replace(call, statistics=statistics, own_keys=own_keys)
        found = attention_gradients(NAME, q, k, v, d_out, q_offsets, k_offsets, call)
    dq, dk, dv, d_bias = found
    return dq, dk, dv, d_bias


def _backward_fake(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor | None,
    bucket_ids: Tensor | None,
    scale: float,
    mask: list[int],
    schedule: list[int],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wanted = (needs[0], needs[1], needs[1], needs[2])
    dq, dk, dv, d_bias = (
        q.new_empty(0) if t is None or not need else t.new_empty(t.shape)
        for t, need in zip((q, k, v, bias), wanted, strict=True)
    )
    return dq, dk, dv, d_bias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_offsets, k_offsets, bias, bucket_ids, *constants = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, q_offsets, k_offsets, bias, bucket_ids)
    scale, mask, _, schedule = constants
    ctx.constants = (scale, mask, schedule)


def _autograd(
    ctx: Any, wanted: tuple[bool, ...], d_out: Tensor | None, d_lse: Tensor | None
) -> tuple[Any, ...]:
    q, k, v, out, lse, q_offsets, k_offsets, bias, bucket_ids = ctx.saved_tensors
    needs = [wanted[0], wanted[1] or wanted[2], wanted[5]]
    if d_out is None and d_lse is None:
        return (None,) * 11
    d_out = torch.zeros_like(out) if d_out is None else d_out
    dq, dk, dv, d_bias = _backward_op(
        d_out, d_lse, q, k, v, out, lse, q_offsets, k_offsets, bias, bucket_ids,
        *ctx.constants, needs,
    )  # fmt: skip
    return (
        dq if wanted[0] else None,
        dk if wanted[1] else None,
        dv if wanted[2] else None,
        None,
        None,
        d_bias if wanted[5] else None,
        *(None,) * 5,
    )


_forward_op = define("jagged_attention_forward", _forward, _forward_fake)
_backward_op = define("jagged_attention_backward", _backward, _backward_fake)
_differentiable_op = differentiable(_forward_op, _setup, _autograd)


@register_flop_formula(torch.ops.jagbench.jagged_attention_forward, get_raw=True)
def _forward_flops(
    q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any, bias: Any, bucket_ids: Any,
    scale: float, mask: list[int], *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return flops_of_offsets(q, v, q_offsets, k_offsets, mask)


@register_flop_formula(torch.ops.jagbench.jagged_attention_backward, get_raw=True)
def _backward_flops(
    d_out: Any, d_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, q_offsets: Any,
    k_offsets: Any, bias: Any, bucket_ids: Any, scale: float, mask: list[int],
    *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    # Five matrix products against the forward's two: the scores are recomputed.
    return flops_of_offsets(q, v, q_offsets, k_offsets, mask) * 5 // 2


def subtraction_guard_rate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    scale: float | None = None,
) -> float:
    """Share of (query tile, head) items whose subtraction the guard of v2 refused, in [0, 1].

    Such a tile was computed twice. Arguments as `jagged_attention`, without mask or bias (with
    either, v2 masks the edge tiles and has nothing to guard).
    """
    q, k, v, q_offsets, k_offsets = tensor_arguments(NAME, q, k, v, q_offsets, k_offsets)
    geometry = check_arguments(NAME, q, k, v, q_offsets, k_offsets)
    require_device(NAME, q)
    factor = 1.0 / math.sqrt(q.shape[2]) if scale is None else scale
    mask = Mask(-1, -1, False)
    _, _, redo = launch_forward(
        q, k, v, q_offsets, k_offsets, geometry, mask, Bias(), factor, Schedule("v2"),
        max_k_len=1 << 30,
    )  # fmt: skip
    tiles = tile_config("softmax", q, geometry.qk_dim, geometry.v_dim, None)
    items = build_tile_list(q_offsets, k_offsets, geometry.total_q, tiles.block_q)
    padding = 0 if q_offsets is None else geometry.total_q - int(q_offsets[-1])
    used = (int(items.count) - -(-padding // tiles.block_q)) * geometry.heads
    return int(redo[0]) / used if used and redo is not None else 0.0
