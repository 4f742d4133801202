"""Launches of the linear layer that quantises its result."""

from __future__ import annotations

import triton
from torch import Tensor

from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.mx_launch import (
    SWIZZLE_BLOCKS,
    SWIZZLE_ROWS,
    Format,
    converts,
    scale_rows_of,
)
from jagbench.impl.kernels.mx_matmul_launch import ProductTiles
from jagbench.impl.kernels.mx_projection_kernels import mx_projection_kernel
from jagbench.impl.kernels.tuning import note_used, padded
from jagbench.mx import BLOCK_SIZE

# By the bytes of an element; not swept yet. Three stages fit the 99 KiB of the smallest GPUs.
_TABLE = {2: ProductTiles(128, 128, 64, 8, 3), 4: ProductTiles(64, 64, 32, 4, 3)}
_INTERPRETED = ProductTiles(256, 256, 512, 4, 1)


def projection_tiles(
    form: Format,
    itemsize: int,
    rows: int,
    columns: int,
    features: int,
    interpreted: bool = INTERPRET.value,
) -> ProductTiles:
    """Tiles of a product: whole blocks, and tiles of scales, no wider than it needs."""
    found = _INTERPRETED if interpreted else _TABLE[itemsize]
    least = SWIZZLE_BLOCKS * BLOCK_SIZE if form.swizzled else BLOCK_SIZE
    return ProductTiles(
        min(found.rows, max(BLOCK_SIZE, padded(rows))),
        max(least, min(found.columns, padded(columns))),
        min(found.depth, max(16, padded(features))),
        found.num_warps,
        found.num_stages,
    )


def launch_projection(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    form: Format,
    tiles: ProductTiles | None = None,
) -> None:
    """Fill codes `[rows, columns]` and scales, plain `[scale rows, blocks]` or swizzled.

    x and weight have their features side by side.
    """
    rows, features = x.shape
    columns = weight.shape[0]
    batch = None if offsets is None else offsets.shape[0] - 1
    tiles = tiles or projection_tiles(form, x.element_size(), rows, columns, features)
    end = -(-rows // SWIZZLE_ROWS) * SWIZZLE_ROWS if form.swizzled else rows
    row_tiles = triton.cdiv(end, tiles.rows)
    if form.block[0] > 1 and batch is not None:
        row_tiles = triton.cdiv(end // BLOCK_SIZE + batch + 1, tiles.rows // BLOCK_SIZE)
    column_tiles = triton.cdiv(columns, tiles.columns)
    if not row_tiles * column_tiles:
        return
    note_used("mx_projection", tiles)
    mx_projection_kernel[(row_tiles * column_tiles,)](
        x, weight, bias, codes, scales, offsets, rows, end, columns, features,
        scale_rows_of(rows, batch, form.block[0]), batch or 0, (batch or 0).bit_length(),
        column_tiles, x.stride(0), weight.stride(0), scales.stride(-2),
        **projection_constants(form), CONVERT=converts(x.device, form),
        EVEN=features % tiles.depth == 0, ROWS=tiles.rows, COLUMNS=tiles.columns,
        DEPTH=tiles.depth, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def projection_constants(form: Format) -> dict[str, object]:
    """The constants of a format that the kernel has: it turns nothing and draws nothing."""
    others = ("HADAMARD", "ROOT", "SIGNS", "STREAM")
    return {name: value for name, value in form.constants.items() if name not in others}
