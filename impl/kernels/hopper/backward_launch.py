"""Launch of the Hopper backward: descriptors, buffers, and the passes around the kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagbench.impl.kernels.attention_launch import BackwardCall, multiprocessors
from jagbench.impl.kernels.hopper.work import build_work_list

#: Keys of an item.
KEYS = 128
# 3 x 128 threads: 64512 registers, dealt anew as 240, 240 and 24 a thread.
_REGISTERS = 168
#: Whether A' waits for dA in float32: right and fast either way, see `backward.weights_of`.
WIDE_SLOPE = True
_FAR, _ANY_ROWS = 1 << 30, 0x7FFF0000
_CAST_BLOCK = 4096


def jagged_view(tensor: Tensor, rows: int, columns: int) -> Any:
    """TMA descriptor of `[total, heads, dim]` whose row bound can be moved to any sequence's end.

    Boxes `[1, 1, rows, columns]` of a 4-D view. Coordinates (2^30, end, 2^30 - length + row,
    column) lie 2^30 (2^34 - stride) + end * stride + (2^30 - length + row) * stride elements behind
    the start; with elements of 2^n bytes the multiples of 2^64 vanish, and row (end - length + row)
    remains. Row `length` is out of bounds. Idea: triton/tools/ragged_tma.py.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    names = {torch.float32: gl.float32, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
    box = [1, 1, rows, columns]
    stride = tensor.stride(0)
    return TensorDescriptor(
        tensor,
        [_ANY_ROWS, _ANY_ROWS, _FAR, tensor.shape[1] * tensor.shape[2]],
        [2**34 - stride, stride, stride, 1],
        box,
        gl.NVMMASharedLayout.get_default_for(box, names[tensor.dtype]),
    )


def launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    call: BackwardCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. All are made, whatever `call.needs`.

    q, k, v, d_out `[out_rows, heads, dim]`: laid out for TMA (`support.tma_layout`). What `call`
    asks for must pass `support.unsupported`. The order in which dQ is added up is not fixed; dK and
    dV are bit-equal on repeats.
    """
    g = call.geometry
    dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
    if g.total_k == 0 or g.out_rows == 0:
        return torch.zeros_like(q), dk.zero_(), dv.zero_()
    # A shared query has one share of dQ a sequence, summed afterwards.
    shares = torch.zeros(g.out_rows, g.heads, g.qk_dim, dtype=torch.float32, device=q.device)
    items = build_work_list(
        k_offsets, q_offsets, g.total_k, KEYS, span=call.mask.span,
        other_rows=g.total_q if g.shared_q else None,
    )  # fmt: skip
    _launch(q, k, v, d_out, dk, dv, shares, items.items, items.count, items.upper, call)
    if g.shared_q:
        dq = (shares.view(g.batch, *q.shape).sum(0) * call.grad_scale).to(q.dtype)
        return dq, dk, dv
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _cast_kernel[(triton.cdiv(dq.numel(), _CAST_BLOCK),)](
        shares, dq, call.grad_scale, dq.numel(), BLOCK=_CAST_BLOCK, num_warps=8
    )
    return dq, dk, dv


def _launch(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, dk: Tensor, dv: Tensor, shares: Tensor,
    items: Tensor, count: Tensor, upper: int, call: BackwardCall,
) -> None:  # fmt: skip
    """One launch of the kernel; `shares` is added to."""
    from jagbench.impl.kernels.hopper.backward import backward_kernel

    g, dim = call.geometry, call.geometry.qk_dim
    halves = 2 if dim == 64 else 1
    statistics = shares if call.statistics is None else call.statistics
    backward_kernel[(min(upper * g.kv_heads, multiprocessors(q)),)](
        jagged_view(q, 64 * halves, dim), jagged_view(d_out, 64 * halves, dim),
        jagged_view(k, KEYS, dim), jagged_view(v, KEYS, dim),
        jagged_view(dk, KEYS // 2, dim), jagged_view(dv, KEYS // 2, dim),
        jagged_view(shares, 64, dim * halves // 2),
        statistics, items, count, g.kv_heads, g.group, g.total_q,
        0 if call.statistics is None else statistics.shape[2], call.mask.left, call.mask.right,
        call.score_scale, call.grad_scale, call.value_scale,
        HALVES=halves, V_STAGES=halves, D=dim, ACTIVATION=call.activation, **call.mask.constants,
        SHARED_Q=g.shared_q, GROUPED=g.group > 1, WIDE=WIDE_SLOPE, num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["size"])
def _cast_kernel(source, target, scale, size, BLOCK: tl.constexpr):
    """`target = source * scale`, rounded to the target's type."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < size, other=0.0) * scale
    tl.store(target + at, value.to(target.dtype.element_ty), mask=at < size)
