"""Launch of the Hopper MX matrix product, and which calls it takes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from jagbench.impl.kernels.attention_launch import multiprocessors
from jagbench.impl.kernels.hopper.descriptors import matrix_descriptor
from jagbench.impl.kernels.hopper.support import device_problem
from jagbench.impl.kernels.relaunch import relaunch
from jagbench.impl.kernels.tuning import note_used
from jagbench.mx import ALONG_COLUMNS, BLOCK_SIZE, SQUARE, Block

_OPERATOR = "mx_product"
#: Rows of a consumer warpgroup, columns of a product, codes of a stage, columns stored at once.
ROWS, COLUMNS, DEPTH, STORED = 64, 128, 128, 64
#: Of the ring of codes and scales.
STAGES = 5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLOCKS = (ALONG_COLUMNS, SQUARE)
_MOST_ROWS = 1 << 30


#: A thread has at the launch: 65536 over two consumers and the producer, of 128 threads each.
REGISTERS = 168
#: Rows of a tile, of two consumers.
TILE = 2 * ROWS


def shared_bytes(stages: int, dtype: torch.dtype, b_square: bool) -> int:
    """Of codes, scales, staged results and barriers."""
    codes = DEPTH * (TILE + COLUMNS)
    scales = 4 * (DEPTH // BLOCK_SIZE) * (TILE + _lines(b_square))
    return stages * (codes + scales + 16) + TILE * STORED * dtype.itemsize


def _lines(b_square: bool) -> int:
    """Scales of a tile's columns and one block."""
    return COLUMNS // BLOCK_SIZE if b_square else COLUMNS


def mx_product_problem(
    rows: int,
    columns: int,
    depth: int,
    device: torch.device,
    a_block: Block = ALONG_COLUMNS,
    b_block: Block = ALONG_COLUMNS,
    dtype: torch.dtype = torch.float32,
) -> str | None:
    """Why the kernel cannot form C `[rows, columns]` over `depth` E4M3 codes, or None.

    Shapes, types and the device decide; no values, and no strides: what TMA cannot address is
    copied. b_block: of B as `[columns, depth]`.
    """
    if dtype not in DTYPES:
        return f"results are {DTYPES}, got {dtype}"
    if a_block not in _BLOCKS or b_block not in _BLOCKS:
        return f"blocks lie along the codes that are contracted, got {a_block} and {b_block}"
    per_line = 16 // dtype.itemsize
    if depth % 16 or columns % per_line:
        return (
            f"TMA takes rows of a multiple of 16 bytes, got {depth} codes and {columns} results "
            f"of {dtype.itemsize} bytes"
        )
    if max(rows, columns, depth) >= _MOST_ROWS:
        return f"{rows} x {columns} x {depth}: sizes must be below {_MOST_ROWS}"
    return device_problem(device)


def mx_product(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    *,
    a_block: Block = ALONG_COLUMNS,
    b_block: Block = ALONG_COLUMNS,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """C = A B^T of MX tensors in E4M3, `[m, n]`: products by FP8 tensor cores, sums in float32.

    a `[m, k]`, b `[n, k]`: codes, uint8, as `mx_quantize` returns them; both along k, as a weight
        is stored. a_scales, b_scales: plain E8M0 scales of blocks (1, 32) or (32, 32) of theirs.
    dtype: of C, rounded once.

    A block's partial product has the accuracy of the tensor cores, not of float32
    (docs/kernels/mx_hopper.md); what the scales multiply and add is float32. The product of the
    scales of two blocks must be below 2^128, or it is infinite; below 2^-149 it is 0.

    Raises ValueError for arguments that do not fit, with their numbers; NotImplementedError for
    calls that `mx_product_problem` has something against, with the reason.
    """
    for name, codes, scales, block in (("a", a, a_scales, a_block), ("b", b, b_scales, b_block)):
        _check(name, codes, scales, block)
    (rows, depth), columns = a.shape, b.shape[0]
    if b.shape[1] != depth or b.device != a.device:
        raise ValueError(
            f"{_OPERATOR}: a [m, k] and b [n, k] do not fit: {tuple(a.shape)} on {a.device}, "
            f"{tuple(b.shape)} on {b.device}"
        )
    problem = mx_product_problem(rows, columns, depth, a.device, a_block, b_block, dtype)
    if problem is not None:
        raise NotImplementedError(f"{_OPERATOR}: {problem}")
    out = torch.empty(rows, columns, dtype=dtype, device=a.device)
    if not out.numel():
        return out
    if not depth:
        return out.zero_()
    with torch.cuda.device_of(a):
        _launch(
            _codes(a), a_scales.contiguous(), _codes(b), b_scales.contiguous(), out,
            (a_block == SQUARE, b_block == SQUARE),
        )  # fmt: skip
    return out


def _launch(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    out: Tensor,
    squares: tuple[bool, bool],
) -> None:
    (rows, depth), columns = a.shape, b.shape[0]
    a_square, b_square = squares
    row_tiles, column_tiles = -(-rows // TILE), -(-columns // COLUMNS)
    steps = -(-depth // DEPTH)
    squares_of_b = -(-columns // BLOCK_SIZE)
    a_wide = _widened(a_scales, rows, steps, TILE, BLOCK_SIZE if a_square else 1)
    b_wide = _widened(b_scales, squares_of_b if b_square else columns, steps, _lines(b_square), 1)
    constants = (STAGES, b_square)
    note_used("hopper_mx_product", f"{TILE}x{COLUMNS}x{DEPTH}, {STAGES} stages")
    relaunch(
        _kernels()[0], min(row_tiles * column_tiles, multiprocessors(a)), a.device,
        (out.dtype, constants),
        matrix_descriptor(a, ROWS, DEPTH), matrix_descriptor(b, COLUMNS, DEPTH),
        matrix_descriptor(out, ROWS, STORED), a_wide, b_wide,
        steps, row_tiles, column_tiles, *constants,
        num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip


def _widened(scales: Tensor, lines: int, steps: int, tile: int, shared_by: int) -> Tensor:
    """Scales of `lines` as `widen_kernel` writes them; shared_by: lines that share one."""
    tiles = -(-lines // tile)
    wide = torch.empty(tiles, steps, 4, tile, dtype=torch.float32, device=scales.device)
    _kernels()[1][(tiles, steps)](
        scales, wide, lines, scales.shape[1], steps,
        TILE=tile, SHARED_BY=shared_by, num_warps=4,
    )  # fmt: skip
    return wide


def _check(name: str, codes: Tensor, scales: Tensor, block: Block) -> None:
    """Refuse codes and scales that are no matrix in such blocks."""
    if block not in _BLOCKS:
        raise ValueError(f"{_OPERATOR}: {name}_block must be one of {_BLOCKS}, got {block}")
    for what, tensor in ((name, codes), (f"{name}_scales", scales)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 2 or tensor.dtype != torch.uint8:
            got = (
                f"{tuple(tensor.shape)} of {tensor.dtype}"
                if isinstance(tensor, Tensor)
                else type(tensor).__name__
            )
            raise ValueError(f"{_OPERATOR}: {what} must be a uint8 matrix, got {got}")
    wanted = tuple(-(-size // length) for size, length in zip(codes.shape, block, strict=True))
    if tuple(scales.shape) != wanted or scales.device != codes.device:
        raise ValueError(
            f"{_OPERATOR}: scales of {name} {tuple(codes.shape)} in blocks {block} must be "
            f"{wanted} on {codes.device}, got {tuple(scales.shape)} on {scales.device}"
        )


def _codes(codes: Tensor) -> Tensor:
    """Codes as TMA can address them, in torch's type: themselves, or a copy."""
    rows, depth = codes.shape
    row, element = codes.stride()
    side_by_side = element == 1 and (rows == 1 or row >= depth)
    if not side_by_side or row % 16 or codes.data_ptr() % 16:
        codes = torch.empty(rows, depth, dtype=codes.dtype, device=codes.device).copy_(codes)
    return codes.view(torch.float8_e4m3fn)


# Gluon is imported here, not above: it may be missing (`support`).
@cache
def _kernels() -> tuple[Any, Any]:
    from jagbench.impl.kernels.hopper.mx_product import mx_product_kernel, widen_kernel

    return mx_product_kernel, widen_kernel
