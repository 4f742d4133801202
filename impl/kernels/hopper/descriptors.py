"""TMA descriptors whose row bound can be moved to the end of any sequence."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

# Bound of the row axis, as in the kernels, and of the axes that are never bounded.
_FAR, _UNBOUNDED = 1 << 30, 0x7FFF0000


def jagged_descriptor(x: Tensor, rows: int, columns: int, stand_in: Tensor | None = None) -> Any:
    """4-D TMA view of packed `x [total, heads, d]`, in boxes of `[1, 1, rows, columns]`.

    Coordinates (2^30, start + length, 2^30 - length + row, column) are at 2^30 (2^34 - stride) +
    (start + length) stride + (2^30 - length + row) stride + column elements. With elements of 2 or
    4 bytes the multiples of 2^64 vanish, and row start + row remains; row >= length is out of
    bounds. The idea is that of triton/tools/ragged_tma.py. A tensor without rows is never read, but
    has no address: `stand_in` lends its own.
    """
    total, heads, dim = x.shape
    stride = x.stride(0) if total > 1 else heads * dim
    view = _view(stride, heads * dim, rows, columns, x.dtype)
    # What copy.copy does, in a third of its time; every call makes 4 to 12 of these.
    made = object.__new__(type(view))
    made.__dict__.update(view.__dict__)
    made.base = x if total or stand_in is None else stand_in
    return made


# Gluon is imported here, not above: it may be missing (`support`).
@cache
def _view(stride: int, width: int, rows: int, columns: int, dtype: torch.dtype) -> Any:
    """A descriptor to copy: Triton checks every new one, which takes longer than all else here."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {
        torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32
    }[dtype]  # fmt: skip
    box = [1, 1, rows, columns]
    return TensorDescriptor(
        torch.empty(8, dtype=dtype, device="cpu"),
        [_UNBOUNDED, _UNBOUNDED, _FAR, width],
        [2**34 - stride, stride, stride, 1],
        box,
        gl.NVMMASharedLayout.get_default_for(box, element),
    )


def matrix_descriptor(x: Tensor, rows: int, columns: int) -> Any:
    """TMA view of a matrix `[m, n]`, n side by side, in boxes of `[rows, columns]`.

    x: not empty, from a 16-byte boundary, and so is each of its rows.
    """
    stride = x.stride(0) if x.shape[0] > 1 else x.shape[1]
    view = _matrix_view(x.shape[0], x.shape[1], stride, rows, columns, x.dtype)
    made = object.__new__(type(view))
    made.__dict__.update(view.__dict__)
    made.base = x
    return made


# Bounded: batches of jagged data have as many numbers of rows as there are batches.
@lru_cache(maxsize=512)
def _matrix_view(
    height: int, width: int, stride: int, rows: int, columns: int, dtype: torch.dtype
) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {
        torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32,
        torch.float8_e4m3fn: gl.float8e4nv,
    }[dtype]  # fmt: skip
    return TensorDescriptor(
        torch.empty(16, dtype=dtype, device="cpu"),
        [height, width],
        [stride, 1],
        [rows, columns],
        gl.NVMMASharedLayout.get_default_for([rows, columns], element),
    )
