"""Launch of the Hopper weight gradient of a norm with a linear layer, and which calls it takes."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from jagbench.impl.kernels.attention_launch import multiprocessors
from jagbench.impl.kernels.hopper.descriptors import jagged_descriptor
from jagbench.impl.kernels.hopper.support import device_problem
from jagbench.impl.kernels.relaunch import relaunch, traits
from jagbench.impl.kernels.tuning import note_used

if TYPE_CHECKING:
    from jagbench.impl.kernels.norm_linear_launch import NormCall

#: Rows a step and features of a program, as in the kernel.
ROWS, INPUTS = 64, 128
#: 3 x 128 threads: 64512 registers, dealt anew as 224, 224 and 56 a thread.
MAX_REGISTERS = 168
_TYPES = (torch.float16, torch.bfloat16)
# As `support.unsupported` has it, for the same views.
_MOST_ROWS = 1 << 29
# Steps that a program's start, its stores and the sum over its partial product take the time of
# (computed: 128 KiB stored and read by every multiprocessor).
_OVERHEAD_STEPS = 16
_MOST_WAVES = 4
# Elements of all partial products.
_MOST_PARTIAL = 1 << 26


def why_not(call: NormCall, d_out: Tensor) -> str | None:
    """Why the portable kernel forms the product of a call, or None.

    d_out `[total, width]`. Shapes, types, strides, alignment and the device decide; no values.
    """
    return _call_problem(call.x, call.weight, d_out) or device_problem(call.x.device)


def _call_problem(x: Tensor, weight: Tensor, d_out: Tensor) -> str | None:
    """`why_not`, whatever the device."""
    width, features = weight.shape
    if x.dtype not in _TYPES or d_out.dtype != x.dtype:
        return f"the tensor cores are fed one 16-bit type, got {x.dtype} and {d_out.dtype}"
    if features % INPUTS or width % INPUTS:
        return f"features and outputs must be multiples of {INPUTS}, got {features} and {width}"
    if x.shape[0] >= _MOST_ROWS:
        return f"{x.shape[0]} rows, the limit is {_MOST_ROWS - 1}"
    for name, tensor in (("x", x), ("d_out", d_out)):
        if (problem := _layout_problem(tensor)) is not None:
            return f"TMA cannot address {name}: {problem}"
    return None


def _layout_problem(tensor: Tensor) -> str | None:
    if tensor.data_ptr() % 16:
        return f"it starts {tensor.data_ptr() % 16} bytes past a 16-byte boundary"
    # Of one row the strides mean nothing.
    between = tensor.stride(0) * tensor.element_size()
    fits = tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1] and between % 16 == 0
    if tensor.shape[0] > 1 and not fits:
        return f"strides {tuple(tensor.stride())}, rows must be whole and 16-byte aligned"
    return None


def output_tile(width: int) -> tuple[int, int]:
    """Outputs of a program, and stages of its ring: 192 KiB and the rows' statistics."""
    return (256, 4) if width % 256 == 0 else (128, 6)


def splits_of(steps: int, tiles: int, programs: int) -> int:
    """Runs into which rows are dealt, so that waves of `programs` programs end soonest.

    steps: of 64 rows, in all; tiles: of the product, a program each for every run.
    """
    candidates = [max(1, wave * programs // tiles) for wave in range(1, _MOST_WAVES + 1)]

    def duration(splits: int) -> int:
        waves = triton.cdiv(tiles * splits, programs)
        return waves * (triton.cdiv(steps, splits) + _OVERHEAD_STEPS)

    return min((min(splits, max(1, steps)) for splits in candidates), key=duration)


def launch_weight_gradient(
    call: NormCall, d_out: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor]:
    """d_out^T normalised(x) `[width, features]`, and the sum of d_out's rows `[width]`, fp32.

    For calls that `why_not` has nothing against. Every program sums its own rows; the sums are
    added in one order, so bits repeat.
    """
    x, (width, features) = call.x, call.weight.shape
    total, across = x.shape[0], features // INPUTS
    outputs, stages = output_tile(width)
    tiles = across * (width // outputs)
    splits = splits_of(triton.cdiv(total, ROWS), tiles, multiprocessors(x)) if total else 0
    splits = min(splits, max(1, _MOST_PARTIAL // (width * features)))
    partial = torch.empty((splits, width, features), dtype=torch.float32, device=x.device)
    sums = torch.empty((splits * across, width), dtype=torch.float32, device=x.device)
    if splits:
        note_used("hopper_norm_gradient", f"{INPUTS}x{outputs} {splits} splits {stages} stages")
        constants = (features, width, call.layer, outputs, stages)
        relaunch(
            _kernel(), splits * tiles, x.device,
            (x.dtype, traits(statistics, call.offsets), constants),
            jagged_descriptor(x.unsqueeze(1), ROWS, INPUTS),
            jagged_descriptor(d_out.unsqueeze(1), ROWS, outputs),
            partial, sums, statistics, call.offsets, call.batch, total, splits,
            *constants, num_warps=4, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
    return partial.sum(0), sums.sum(0)


# Gluon is imported here, not above: it may be missing (`support`).
@cache
def _kernel() -> Any:
    from jagbench.impl.kernels.hopper.norm_gradient import norm_gradient_kernel

    return norm_gradient_kernel
