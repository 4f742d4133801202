"""Launches of the kernels that jagged attention and GDPA share: the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from jagbench.impl.kernels.activations import SOFTMAX
from jagbench.impl.kernels.arguments import Geometry, kernel_layout
from jagbench.impl.kernels.attention_backward import (
    STATISTICS_PAD,
    key_value_gradient_kernel,
    query_gradient_kernel,
    row_statistics_kernel,
)
from jagbench.impl.kernels.hopper.support import (
    SHORT_KEYS,
    keys_are_short,
    takes_hopper,
    tma_layout,
)
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.mask import Mask
from jagbench.impl.kernels.relaunch import relaunch, traits
from jagbench.impl.kernels.schedule import TileList, build_tile_list
from jagbench.impl.kernels.tuning import (
    Kernel,
    Schedule,
    TileConfig,
    note_tier,
    padded,
    tile_config,
)
from jagbench.pairs import attention_flops

_PAD = STATISTICS_PAD.value
# Mean lengths from which, and up to which, other tiles are faster (tuning._TABLE).
_LONG_KEYS, _FEW_QUERIES = 768, 64


@dataclass(frozen=True)
class Bias:
    """Bias in kernel form.

    kind: 0 none, 1 dense `[pairs, heads or 1]`, 2 bucketed (table `[buckets, heads or 1]`).
    pair_offsets: pairs before each sequence, int64 `[batch + 1]`.
    """

    kind: int = 0
    values: Tensor | None = None
    bucket_ids: Tensor | None = None
    pair_offsets: Tensor | None = None

    @property
    def strides(self) -> tuple[int, int]:
        """Row and head stride; a single head serves all (stride 0)."""
        if self.values is None:
            return 0, 0
        return self.values.stride(0), self.values.stride(1) if self.values.shape[1] > 1 else 0


@dataclass(frozen=True)
class Needs:
    """Which gradients are wanted."""

    query: bool = True
    key_value: bool = True
    bias: bool = False


@dataclass(frozen=True)
class BackwardCall:
    """What the backward kernels are told beyond q, k, v and the upstream gradient.

    activation: id of an activation, `SOFTMAX`, or `PER_HEAD` with `activation_ids` (int32
        `[heads]`) and `activation_set` (bit set of the ids that occur).
    score_scale: factor of Q K^T before exp2 or the activation; grad_scale: of dQ and dK;
    value_scale: of dV. statistics: from `row_statistics`, softmax only, made without the deltas of
        sequences of up to `own_keys` keys (`keys_of_own_deltas`). query_tiles: the list it was made
        with, if there is one.
    """

    geometry: Geometry
    mask: Mask
    schedule: Schedule
    activation: int
    score_scale: float
    grad_scale: float
    value_scale: float = 1.0
    activation_ids: Tensor | None = None
    activation_set: int = 0
    bias: Bias = Bias()
    statistics: Tensor | None = None
    own_keys: int = 0
    query_tiles: TileList | None = None
    needs: Needs = Needs()


def require_device(operator: str, tensor: Tensor) -> None:
    """Triton runs on GPUs, and on CPU tensors in its interpreter only."""
    if not tensor.is_cuda and not INTERPRET.value:
        raise NotImplementedError(
            f"{operator}: tensors on {tensor.device} need Triton's interpreter; set "
            "TRITON_INTERPRET=1 before jagbench.impl is imported"
        )


def multiprocessors(tensor: Tensor) -> int:
    """Programs of a persistent launch: one a multiprocessor; a few in the interpreter."""
    if not tensor.is_cuda:
        return 4
    return _multiprocessors(tensor.device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def flops_of_offsets(
    q: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    mask: list[int],
) -> int:
    """Useful FLOP of a forward pass, from the offsets' values (for torch's FLOP counter)."""
    k_lengths = k_offsets.diff()
    rows = torch.full_like(k_lengths, q.shape[0]) if q_offsets is None else q_offsets.diff()
    pairs = Mask.decode(mask).pairs(rows, k_lengths)
    return attention_flops(pairs, q.shape[1], q.shape[2], v.shape[2])


def query_tiles(q_offsets: Tensor | None, k_offsets: Tensor, geometry: Geometry) -> TileList:
    """Tiles of 128 query rows, for the passes over rows that a backward begins and ends with."""
    return build_tile_list(q_offsets, k_offsets, geometry.total_q, _PAD)


def row_statistics(
    out: Tensor,
    d_out: Tensor,
    lse: Tensor,
    d_lse: Tensor | None,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    geometry: Geometry,
    items: TileList,
    own_keys: int = 0,
) -> Tensor:
    """lse and delta of every row for the softmax backward, float32 `[2, heads, statistics_rows]`.

    out, d_out: `[out_rows, heads, v_dim]`; lse: `[heads, out_rows]` in units of log 2; d_lse, its
    gradient: `[out_rows, heads]`. items: `query_tiles`. own_keys: `keys_of_own_deltas`.
    """
    g = geometry
    rows = (g.out_rows // _PAD + 2 * (g.batch + 1) + 1) * _PAD
    statistics = torch.empty(2, g.heads, rows, dtype=torch.float32, device=out.device)
    grid = items.upper * g.heads
    if grid:
        d_strides = d_out.stride(0), d_out.stride(1)
        lse_strides = (0, 0) if d_lse is None else d_lse.stride()
        # In the order of the kernel's parameters.
        constants = g.v_dim, padded(g.v_dim), g.shared_q, d_lse is not None, own_keys
        relaunch(
            row_statistics_kernel, grid, out.device,
            (
                traits(out, d_out, lse, d_lse, q_offsets, k_offsets), d_strides, lse_strides,
                constants,
            ),
            out, d_out, lse, d_lse, statistics, q_offsets, k_offsets, items.sequence, items.block,
            g.batch, g.total_q, g.out_rows, rows, *d_strides, *lse_strides, g.heads,
            *constants, num_warps=4,
        )  # fmt: skip
    return statistics


def keys_of_own_deltas(operator: str, q: Tensor, k: Tensor, v: Tensor, call: BackwardCall) -> int:
    """Most keys of a sequence whose deltas the backward kernel forms by itself; 0: of none.

    delta = sum of A dA over the keys of a row: one item must hold them all.
    """
    # The cheap question first: `attention_gradients` asks for the tier again.
    own = keys_are_short(call.geometry) and _on_hopper(operator, q, k, v, call)
    return SHORT_KEYS if own else 0


def _on_hopper(operator: str, q: Tensor, k: Tensor, v: Tensor, call: BackwardCall) -> bool:
    return takes_hopper(
        operator, call.schedule.backward_tier, q, k, v, call.geometry, call.mask, call.bias.kind,
        (call.activation,), deterministic=order_is_demanded(),
    )  # fmt: skip


def check_repeatable(operator: str, schedule: Schedule, *inputs: Tensor | None) -> None:
    """Whether gradients with the same bits on repeats can be had of a schedule.

    Raises ValueError where it names another way, NotImplementedError where its tier has none and a
    gradient is wanted.
    """
    if schedule.backward == "atomic":
        raise ValueError(f"{operator}: deterministic=True cannot be kept with backward='atomic'")
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    if wanted and schedule.backward_tier == "hopper":
        raise NotImplementedError(
            f"{operator}: schedule 'hopper': its backward adds dQ in no fixed order; "
            "deterministic=True needs 'auto' or 'portable'"
        )


def order_is_demanded() -> bool:
    """Whether torch is told to refuse what differs between repeats (and not merely to warn)."""
    strict = not torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and strict


def attention_gradients(
    operator: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    call: BackwardCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the bias, from the tier that the schedule leaves to the call.

    An empty tensor stands for a gradient that is not needed, whether a kernel made it or not: a
    custom op returns tensors only, and its shapes must not hang on how it is computed.
    """
    needs = call.needs
    if _on_hopper(operator, q, k, v, call):
        # Imported here: Gluon is asked for by a launch alone.
        from jagbench.impl.kernels.hopper import backward_launch

        q, k, v, d_out = tma_layout(q), tma_layout(k), tma_layout(v), tma_layout(d_out)
        made = backward_launch.launch_backward(q, k, v, d_out, q_offsets, k_offsets, call)
        found: tuple[Tensor | None, ...] = (*made, None)
        note_tier("hopper_backward")
    else:
        found = attention_backward(q, k, v, d_out, q_offsets, k_offsets, call)
    wanted = (needs.query, needs.key_value, needs.key_value, needs.bias)
    dq, dk, dv, d_bias = (
        q.new_empty(0) if gradient is None or not need else gradient
        for gradient, need in zip(found, wanted, strict=True)
    )
    return dq, dk, dv, d_bias


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    call: BackwardCall,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v and of the bias; None where not needed.

    d_out: `[out_rows, heads, v_dim]`, any strides.
    """
    q, k, v, d_out = (kernel_layout(t) for t in (q, k, v, d_out))
    atomic = call.schedule.backward == "atomic"
    dq = dk = dv = d_bias = None
    if call.needs.key_value or (atomic and call.needs.query):
        dq, dk, dv = _key_value_gradients(q, k, v, d_out, q_offsets, k_offsets, call, atomic)
    if (call.needs.query and not atomic) or call.needs.bias:
        split_dq, d_bias = _query_gradient(q, k, v, d_out, q_offsets, k_offsets, call)
        dq = split_dq if dq is None else dq
    return dq, dk, dv, d_bias


def _statistics_rows(call: BackwardCall) -> int:
    return 0 if call.statistics is None else call.statistics.shape[2]


def _backward_tiles(
    kernel: Literal["query_gradient", "key_value_gradient"], call: BackwardCall, like: Tensor
) -> TileConfig:
    """Tiles of a backward kernel: the schedule's, or the row of the table for its weights."""
    g = call.geometry
    pinned = getattr(call.schedule, kernel)
    row: Kernel = kernel
    if call.activation != SOFTMAX.value:
        row = "gdpa_query_gradient" if kernel == "query_gradient" else "gdpa_key_value_gradient"
    elif kernel == "key_value_gradient" and g.mean_k >= _LONG_KEYS:
        row = "key_value_gradient_long"
    if kernel == "query_gradient" and g.mean_q <= _FEW_QUERIES:
        row = "query_gradient_few"
    tiles = tile_config(row, like, g.qk_dim, g.v_dim, pinned)
    if tiles.block_q > _PAD:
        raise ValueError(f"{kernel}: block_q is at most {_PAD}, got {tiles.block_q}")
    return tiles


def _common_strides(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, bias: Bias) -> tuple[int, ...]:
    strides = [s for t in (q, k, v, d_out) for s in t.stride()[:2]]
    return (*strides, *bias.strides)


def _key_value_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    call: BackwardCall,
    atomic: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """dK and dV; with `atomic` dQ too."""
    g, mask, bias = call.geometry, call.mask, call.bias
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device) if atomic else None
    tiles = _backward_tiles("key_value_gradient", call, q)
    items = build_tile_list(k_offsets, q_offsets, g.total_k, tiles.block_k, span=mask.span)
    grid = items.upper * g.kv_heads
    if grid:
        key_value_gradient_kernel[(grid,)](
            q, k, v, d_out, _or(call.statistics, q), _or(dq, q), dk, dv,
            bias.values, bias.bucket_ids, call.activation_ids,
            q_offsets, k_offsets, bias.pair_offsets, items.sequence, items.block,
            g.batch, g.total_q, g.total_k, _statistics_rows(call), *mask.numbers,
            call.score_scale, call.grad_scale, call.value_scale,
            *_common_strides(q, k, v, d_out, bias),
            kv_heads=g.kv_heads, GROUP=g.group, D=g.qk_dim, DV=g.v_dim,
            BLOCK_D=padded(g.qk_dim), BLOCK_DV=padded(g.v_dim),
            BLOCK_Q=tiles.block_q, BLOCK_K=tiles.block_k, **mask.portable,
            BIAS=bias.kind, ACTIVATION=call.activation,
            ACTIVATION_SET=call.activation_set, SHARED_Q=g.shared_q, ATOMIC_DQ=atomic,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return None if dq is None else dq.to(q.dtype), dk, dv


def _query_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    call: BackwardCall,
) -> tuple[Tensor, Tensor | None]:
    """dQ, and the gradient of the bias if it is needed."""
    g, mask, bias = call.geometry, call.mask, call.bias
    # A shared query has one share of dQ a sequence, kept in fp32 until they are summed.
    shape = (g.batch, *q.shape) if g.shared_q else q.shape
    dq = torch.empty(shape, dtype=torch.float32 if g.shared_q else q.dtype, device=q.device)
    tiles = _backward_tiles("query_gradient", call, q)
    items = build_tile_list(q_offsets, k_offsets, g.total_q, tiles.block_q, span=mask.span)
    grid = items.upper * g.heads
    d_bias = empty_bias_gradient(call, grid) if call.needs.bias else None
    buckets = bias.values.shape[0] if bias.kind == 2 and bias.values is not None else 1
    if grid:
        query_gradient_kernel[(grid,)](
            q, k, v, d_out, _or(call.statistics, q), dq, d_bias,
            bias.values, bias.bucket_ids, call.activation_ids,
            q_offsets, k_offsets, bias.pair_offsets, items.sequence, items.block,
            g.batch, g.total_q, g.total_k, _statistics_rows(call), *mask.numbers,
            call.score_scale, call.grad_scale, *_common_strides(q, k, v, d_out, bias),
            heads=g.heads, group=g.group, D=g.qk_dim, DV=g.v_dim,
            BLOCK_D=padded(g.qk_dim), BLOCK_DV=padded(g.v_dim),
            BLOCK_Q=tiles.block_q, BLOCK_K=tiles.block_k, **mask.portable,
            BIAS=bias.kind, BUCKETS=buckets, BUCKET_BLOCK=padded(buckets),
            BIAS_GRADIENT=d_bias is not None, ACTIVATION=call.activation,
            ACTIVATION_SET=call.activation_set, SHARED_Q=g.shared_q,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    if g.shared_q:
        dq = dq.sum(0).to(q.dtype)
    return dq, None if d_bias is None else reduce_bias_gradient(d_bias, call)


def empty_bias_gradient(call: BackwardCall, grid: int) -> Tensor:
    """Zeros: tiles outside the window are never visited."""
    bias = call.bias
    assert bias.values is not None
    if bias.kind == 1:
        shape = (bias.values.shape[0], call.geometry.heads)
    else:
        shape = (grid, bias.values.shape[0])
    return torch.zeros(shape, dtype=torch.float32, device=bias.values.device)


def reduce_bias_gradient(d_bias: Tensor, call: BackwardCall) -> Tensor:
    """From the kernel's form to the bias' own shape and dtype: sums over programs and heads."""
    values = call.bias.values
    assert values is not None
    if call.bias.kind == 2:
        # Programs are numbered tile * heads + head.
        d_bias = d_bias.view(-1, call.geometry.heads, values.shape[0]).sum(0).t()
    if values.shape[1] == 1:
        d_bias = d_bias.sum(1, keepdim=True)
    return d_bias.to(values.dtype).contiguous()


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """The tensor, or another pointer where the kernel's compiled form reads none."""
    return stand_in if tensor is None else tensor
