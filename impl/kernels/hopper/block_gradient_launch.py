"""Launch of the Hopper backward of block attention with rotary, and which calls it takes."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jagbench.impl.kernels.arguments import Geometry
from jagbench.impl.kernels.attention_launch import Needs, multiprocessors
from jagbench.impl.kernels.hopper.descriptors import jagged_descriptor
from jagbench.impl.kernels.hopper.support import device_problem, tma_layout
from jagbench.impl.kernels.hopper.work import build_work_list
from jagbench.impl.kernels.packed_arguments import table_layout
from jagbench.impl.kernels.relaunch import relaunch, traits
from jagbench.impl.kernels.tuning import note_used

if TYPE_CHECKING:
    from jagbench.impl.kernels.block_attention_launch import BlockCall

#: The one block size and head dim there are kernels for.
BLOCK_ROWS, HEAD_DIM = 64, 128
#: 3 x 128 threads: 64512 registers, dealt anew as 240, 240 and 24 a thread.
MAX_REGISTERS = 168
_TYPES = (torch.float16, torch.bfloat16)
# Rows as `support.unsupported` has them; entries are counted in int32, some past the list's end.
_MOST_ROWS, _MOST_ENTRIES = 1 << 29, 1 << 30
_LOG2_E = 1.4426950408889634


def block_gradient_problem(
    q: Tensor, geometry: Geometry, call: BlockCall, needs: Needs
) -> str | None:
    """Why the portable kernel computes the gradients of a call, or None.

    Shapes, types and the device decide; no values. Strides and alignment do not count: what TMA
    cannot address is copied (`support.tma_layout`).
    """
    return _call_problem(q.dtype, geometry, call, needs) or device_problem(q.device)


def _call_problem(dtype: torch.dtype, g: Geometry, call: BlockCall, needs: Needs) -> str | None:
    """`block_gradient_problem`, whatever the device."""
    if call.portable:
        return "the schedule asks for the portable kernel"
    if call.qk_norm_eps is not None:
        return "no kernel of this tier normalises q and k"
    if not (needs.query and needs.key_value):
        return "all three gradients are made, but not all are wanted"
    if dtype not in _TYPES:
        return f"the tensor cores are fed 16-bit types, got {dtype}"
    if call.block_size != BLOCK_ROWS:
        return f"blocks must have {BLOCK_ROWS} rows, got {call.block_size}"
    if (g.qk_dim, g.v_dim) != (HEAD_DIM, HEAD_DIM):
        return f"head dims must be {HEAD_DIM}, got {g.qk_dim} and {g.v_dim}"
    if g.group != 1:
        return f"every query head must have its own key head, got {g.group} of them to one"
    if call.rotary_dims[0] == 0:
        return "without rotary the portable kernel is at the memory's speed"
    if call.rotary_dims[0] != HEAD_DIM:
        return f"rotary must turn whole heads of {HEAD_DIM}, got {call.rotary_dims[0]} elements"
    if g.total_q >= _MOST_ROWS:
        return f"{g.total_q} rows, the limit is {_MOST_ROWS - 1}"
    entries = g.heads * (g.total_q // BLOCK_ROWS + g.batch + 2)
    if entries > _MOST_ENTRIES:
        return f"{entries} blocks of all heads exceed the limit of {_MOST_ENTRIES}"
    return None


def launch_block_gradient(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, offsets: Tensor, call: BlockCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v `[total, heads, 128]`, contiguous; bit-equal on repeats.

    For calls that `block_gradient_problem` has nothing against.
    """
    if call.table is None:
        raise ValueError("the Hopper kernel turns what it reads, and no table is given")
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    total, heads, dim = q.shape
    if total == 0:
        return dq, dk, dv
    # The other side tells padding, which has none of its rows, from sequences.
    items = build_work_list(offsets, None, total, BLOCK_ROWS, other_rows=1)
    table = table_layout(call.table)
    programs = min(items.upper * heads, multiprocessors(q))
    constants = (dim, call.by_token, call.rotate_values)
    note_used("hopper_block_gradient", f"{BLOCK_ROWS} rows three slots two workers")
    relaunch(
        _kernel(), programs, q.device,
        (q.dtype, traits(table), constants),
        *(jagged_descriptor(tma_layout(t), BLOCK_ROWS, dim) for t in (q, k, v, d_out)),
        *(jagged_descriptor(t, BLOCK_ROWS, dim) for t in (dq, dk, dv)),
        items.items, items.count, heads, table, table.stride(0),
        float(call.scale) * _LOG2_E, float(call.scale),
        *constants, num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return dq, dk, dv


# Gluon is imported here, not above: it may be missing (`support`).
@cache
def _kernel() -> Any:
    from jagbench.impl.kernels.hopper.block_gradient import block_gradient_kernel

    return block_gradient_kernel
