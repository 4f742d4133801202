"""Launch of the Hopper forward of a norm with a linear layer, and which calls it takes."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jagbench.impl.kernels.attention_launch import multiprocessors
from jagbench.impl.kernels.hopper.descriptors import jagged_descriptor
from jagbench.impl.kernels.hopper.support import device_problem, tma_layout
from jagbench.impl.kernels.relaunch import relaunch, traits
from jagbench.impl.kernels.tuning import note_used

if TYPE_CHECKING:
    from jagbench.impl.kernels.norm_linear_launch import NormCall

#: Rows of a block, columns of a program, features of a step, warpgroups that compute.
BLOCK_ROWS, COLUMNS, DEPTH, GROUPS = 64, 128, 64, 2
#: Features whose slice of the weight fits shared memory beside two rings.
MOST_FEATURES = 512
#: 3 x 128 threads: 64512 registers, dealt anew as 240, 240 and 24 a thread.
MAX_REGISTERS = 168
_TYPES = (torch.float16, torch.bfloat16)
_MOST_ROWS = 1 << 29
#: Buffers a warpgroup stores half a block from.
BUFFERS = 2
# Tiles of 8 KiB that shared memory has room for, and the most that a ring can use.
_ROOM, _MOST_STAGES = 28, 8


def norm_product_problem(x: Tensor, width: int) -> str | None:
    """Why the portable kernel computes norm(x) W^T, or None. x `[rows, features]`.

    Shapes, types and the device decide; no values, and no strides: what TMA cannot address is
    copied (`support.tma_layout`).
    """
    rows, features = x.shape
    if x.dtype not in _TYPES:
        return f"the tensor cores are fed 16-bit types, got {x.dtype}"
    if features > MOST_FEATURES:
        return f"at most {MOST_FEATURES} features stay in shared memory, got {features}"
    if features % 8 or width % 8:
        return f"TMA takes rows of a multiple of 8 elements, got {features} and {width}"
    if rows >= _MOST_ROWS:
        return f"{rows} rows, the limit is {_MOST_ROWS - 1}"
    if (problem := device_problem(x.device)) is not None:
        return problem
    if -(-width // COLUMNS) > multiprocessors(x):
        return f"{width} outputs, the limit is {COLUMNS} a multiprocessor"
    return None


def stages_of(steps: int) -> int:
    """Tiles of x in a warpgroup's ring, beside `steps` tiles of the weight twice their size."""
    return min(_MOST_STAGES, (_ROOM - 2 * steps) // GROUPS - BUFFERS)


def launch_norm_product(
    call: NormCall, bias: Tensor | None, out: Tensor, statistics: Tensor
) -> None:
    """Fill out `[total, width]`, contiguous, and under RMSNorm the rows' statistics.

    bias: fp32 `[width]` or None. statistics: as `NormCall.empty_statistics`, filled for LayerNorm.
    For calls that `norm_product_problem` has nothing against.
    """
    (total, features), width = call.x.shape, out.shape[1]
    if total == 0:
        return
    x, weight = (tma_layout(t.unsqueeze(1)) for t in (call.x, call.weight))
    columns = -(-width // COLUMNS)
    lanes = max(1, min(multiprocessors(x) // columns, -(-total // (GROUPS * BLOCK_ROWS))))
    steps = -(-features // DEPTH)
    # Stand-ins for what the constants say is not read.
    offsets = statistics if call.offsets is None else call.offsets
    shift = statistics if bias is None else bias
    constants = (
        GROUPS, steps, stages_of(steps), call.norm, bias is not None, call.offsets is not None,
        BUFFERS,
    )  # fmt: skip
    tiles = f"{BLOCK_ROWS}x{COLUMNS}x{DEPTH} weight resident, {stages_of(steps)} stages"
    note_used("hopper_norm_product", tiles)
    relaunch(
        _kernel(), lanes * columns, x.device,
        (x.dtype, traits(shift, statistics, offsets), constants),
        jagged_descriptor(x, BLOCK_ROWS, DEPTH), jagged_descriptor(weight, COLUMNS, DEPTH),
        jagged_descriptor(out.unsqueeze(1), BLOCK_ROWS, COLUMNS // 2),
        shift, statistics, offsets, call.batch, total, columns,
        width, features, call.eps, *constants, num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip


# Gluon is imported here, not above: it may be missing (`support`).
@cache
def _kernel() -> Any:
    from jagbench.impl.kernels.hopper.norm_product import norm_product_kernel

    return norm_product_kernel
