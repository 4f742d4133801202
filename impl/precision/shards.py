"""MX codes of a weight in shards: quantised shard by shard, joined as if quantised whole.

A shard is some rows of a weight `[rows, columns]`, as FSDP2 hands them out: dim 0 in equal parts,
in the order of the ranks. Blocks of 32 x 32 that begin at a shard's first row are blocks of the
whole weight only if every shard is a whole number of blocks long; blocks of 1 x 32 lie in one row.
`gathers.py` puts this into FSDP2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jagbench.impl.precision.layers import OWN, Functions
from jagbench.impl.precision.recipe import LinearPrecision
from jagbench.mx import (
    ALONG_COLUMNS,
    SQUARE,
    Block,
    ElemDtype,
    ScaleMode,
    check_elem_dtype,
    check_scale_mode,
)

#: Codes uint8 `[rows, columns]`, one a byte, and their scales uint8 `[row blocks, column blocks]`.
Quantized = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ShardFormat:
    """How a shard is quantised, to nearest.

    elem_dtype, scale_mode: as of `mx_quantize`. block: `SQUARE`, or `ALONG_COLUMNS`.
    functions: whose `quantize` and `dequantize` are called.

    Raises ValueError for another block, type or mode.
    """

    elem_dtype: ElemDtype = "e4m3"
    block: Block = SQUARE
    scale_mode: ScaleMode = "rceil"
    functions: Functions = field(default=OWN, repr=False)

    def __post_init__(self) -> None:
        check_elem_dtype(self.elem_dtype)
        check_scale_mode(self.scale_mode)
        if self.block not in (SQUARE, ALONG_COLUMNS):
            raise ValueError(
                f"shards are quantised in blocks {SQUARE} or {ALONG_COLUMNS}, got {self.block!r}"
            )

    @staticmethod
    def of(precision: LinearPrecision, functions: Functions) -> ShardFormat:
        """The format in which a linear layer of this precision reads its weight in the forward."""
        own = precision.recipe
        return ShardFormat(own.elem_dtype, own.weight_block, own.scale_mode, functions)


def rows_of_shards(rows: int, world_size: int, block: Block) -> int:
    """Rows of each rank's shard of a weight with so many rows.

    Raises ValueError, the same on every rank, unless all shards have equally many rows and these
    are whole blocks. FSDP2 pads the last shards of an uneven weight and asks for gathered tensors
    of the padded shape, which scales do not have: so uneven shards are refused for 1 x 32 too. One
    rank has the whole weight, of any size.
    """
    if rows < 0 or world_size < 1:
        raise ValueError(f"no shards of {rows} rows over {world_size} ranks")
    step = world_size * block[0]
    if world_size == 1 or rows % step == 0:
        return rows // world_size
    # torch.chunk: the first ranks have the quotient rounded up.
    most = -(-rows // world_size)
    near = [str(size) for size in (rows // step * step, (rows // step + 1) * step) if size]
    raise ValueError(
        f"a weight of {rows} rows over {world_size} ranks has shards of {most} rows"
        f"{'' if rows % world_size == 0 else ' and fewer'}; blocks of {block[0]} x {block[1]} need "
        f"equal shards of a multiple of {block[0]}: {' or '.join(near)} rows would do"
    )


def quantize_shard(shard: Tensor, form: ShardFormat) -> Quantized:
    """Codes and scales of a shard `[shard rows, columns]`, by itself."""
    if shard.dim() != 2:
        raise ValueError(f"a shard is [rows, columns], got {tuple(shard.shape)}")
    codes, scales = form.functions.quantize(
        shard, elem_dtype=form.elem_dtype, block=form.block, scale_mode=form.scale_mode
    )
    return codes.contiguous().view(torch.uint8), scales.contiguous().view(torch.uint8)


def join_shards(shards: Sequence[Quantized], block: Block) -> Quantized:
    """Codes and scales of the whole weight from those of its shards, in the order of the ranks.

    Bit for bit what quantising the whole weight gives. Raises ValueError, which names the shard,
    for scales that are not of their codes, unequal columns, and a shard before the last that ends
    inside a block.
    """
    if not shards:
        raise ValueError("there is no shard to join")
    columns = shards[0][0].shape[-1]
    for i, (codes, scales) in enumerate(shards):
        if codes.dim() != 2 or codes.shape[1] != columns:
            raise ValueError(f"shard {i} must be [rows, {columns}], got {tuple(codes.shape)}")
        wanted = scales_shape(codes.shape[0], columns, block)
        if tuple(scales.shape) != wanted:
            raise ValueError(
                f"shard {i}: scales of codes {tuple(codes.shape)} in blocks {block} must be "
                f"{wanted}, got {tuple(scales.shape)}"
            )
        if i + 1 < len(shards) and codes.shape[0] % block[0]:
            raise ValueError(
                f"shard {i} of {len(shards)} has {codes.shape[0]} rows: it ends inside a block of "
                f"{block[0]} x {block[1]}"
            )
    return torch.cat([codes for codes, _ in shards]), torch.cat([scales for _, scales in shards])


def dequantize_weight(quantized: Quantized, form: ShardFormat, dtype: torch.dtype) -> Tensor:
    """Values of codes and scales, `[rows, columns]` of dtype.

    Exact for codes of numbers that were of this dtype: rounded to nearest, a multiple of the
    dtype's smallest step stays one and has at most 4 significant bits. The one exception is a
    number within 1/16 of the dtype's range, which may round to beyond it: infinite, as wherever
    MX values are held in that dtype.
    """
    values: Tensor = form.functions.dequantize(
        *quantized, elem_dtype=form.elem_dtype, block=form.block, dtype=dtype
    )
    return values


def scales_shape(rows: int, columns: int, block: Block) -> tuple[int, int]:
    """Shape of the scales of so many rows and columns."""
    return -(-rows // block[0]), -(-columns // block[1])


def payload_bits(rows: int, columns: int, block: Block) -> float:
    """Bits an element that a shard gives to the all-gather: 8 of its code, and its scale's part.

    8 + 8/32 in blocks of 1 x 32 and 8 + 8/1024 in squares where both dims are whole blocks; more
    where the last block is short. E2M1 too has one code a byte. Raises ValueError without elements.
    """
    if rows < 1 or columns < 1:
        raise ValueError(f"a shard of {rows} x {columns} has no elements")
    scale_rows, scale_columns = scales_shape(rows, columns, block)
    return 8 + 8 * scale_rows * scale_columns / (rows * columns)
