"""Launches of the kernels of a norm that quantises, and of the norm's gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from jagbench.impl.kernels.attention_launch import multiprocessors
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.mx_launch import (
    SWIZZLE_BLOCKS,
    SWIZZLE_ROWS,
    Format,
    Matrices,
    MxTiles,
    converts,
    scale_rows_of,
    words,
)
from jagbench.impl.kernels.mx_norm_kernels import mx_norm_gradient_kernel, mx_norm_kernel
from jagbench.impl.kernels.tuning import note_used, padded
from jagbench.mx import BLOCK_SIZE, Block

#: Most features of a row that the gradient's program holds.
MOST_GRADIENT_FEATURES = 16_384
# Elements a thread holds of rows that are read once, in fp32.
_ELEMENTS, _MOST_WHOLE = 32, 16_384
# Of squares: 32 rows are read once up to this many features, else in column tiles of _CHUNK.
_MOST_WHOLE_SQUARE, _CHUNK = 512, 256
_GRADIENT_TILE = 2048
_INTERPRETED = 1 << 15


@dataclass(frozen=True)
class NormPlan:
    """What stands before the quantisation: eps under the root, LayerNorm or RMSNorm."""

    eps: float
    centred: bool


def mx_norm_tiles(
    block: Block,
    rows: int,
    features: int,
    swizzled: bool = False,
    interpreted: bool = INTERPRET.value,
) -> MxTiles:
    """Rows of a program, columns read at once and warps; whole blocks, and tiles of scales."""
    width = max(SWIZZLE_BLOCKS * BLOCK_SIZE if swizzled else BLOCK_SIZE, padded(features))
    if block[0] > 1:
        across = min(width, _INTERPRETED // BLOCK_SIZE if interpreted else _MOST_WHOLE_SQUARE)
        if across < width and not interpreted:
            across = _CHUNK
        return MxTiles(BLOCK_SIZE, across, 8 if across >= _MOST_WHOLE_SQUARE else 4)
    across = min(width, _MOST_WHOLE)
    warps = 4 if across <= 4096 else across // 1024
    elements = _INTERPRETED if interpreted else _ELEMENTS * 32 * warps
    return MxTiles(max(1, min(elements // across, padded(rows))), across, warps)


def launch_norm(
    source: Matrices,
    weight: Tensor | None,
    bias: Tensor | None,
    codes: Matrices,
    scales: Tensor,
    statistics: tuple[Tensor | None, Tensor | None],
    plan: NormPlan,
    form: Format,
    tiles: MxTiles | None = None,
) -> None:
    """Fill codes, scales (as in `launch_quantize`) and statistics (rstd, mean; fp32 or None)."""
    count, rows, features = source.sizes
    batch = None if source.offsets is None else source.batch
    scale_rows = scale_rows_of(rows, batch, form.block[0])
    end = -(-rows // SWIZZLE_ROWS) * SWIZZLE_ROWS if form.swizzled else rows
    tiles = tiles or mx_norm_tiles(form.block, rows, features, form.swizzled)
    row_tiles = triton.cdiv(end, tiles.rows)
    if form.block[0] > 1 and batch is not None:
        row_tiles = end // BLOCK_SIZE + batch + 1
    if not count * row_tiles:
        return
    note_used("mx_layer_norm" if plan.centred else "mx_rms_norm", tiles)
    mx_norm_kernel[(count * row_tiles,)](
        source.tensor, weight, bias, codes.tensor, scales, *statistics, source.offsets,
        plan.eps, rows, end, features, scale_rows, source.batch, row_tiles,
        *source.tensor.stride()[:2], *codes.tensor.stride()[:2], *scales.stride()[:2],
        *source.draw_strides, *words(form.seed), CENTRED=plan.centred, **norm_constants(form),
        CONVERT=converts(source.tensor.device, form), WHOLE=tiles.columns >= features,
        FULL=features % tiles.columns == 0,
        ROWS=tiles.rows, COLUMNS=tiles.columns, num_warps=tiles.num_warps,
    )  # fmt: skip


def norm_constants(form: Format) -> dict[str, object]:
    """The constants of a format that the norm's kernel has: it turns nothing."""
    turning = ("HADAMARD", "ROOT", "SIGNS")
    return {name: value for name, value in form.constants.items() if name not in turning}


def gradient_tiles(rows: int, features: int, interpreted: bool = INTERPRET.value) -> MxTiles:
    """Rows a step, columns that hold a row, and warps of the gradient's kernel."""
    width = padded(features)
    warps = 4 if width <= 2048 else min(width // 512, 16)
    elements = _INTERPRETED if interpreted else _GRADIENT_TILE
    return MxTiles(max(1, min(elements // width, padded(rows))), width, warps)


def launch_norm_gradient(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    mean: Tensor | None,
    offsets: Tensor | None,
    middle: int,
    tiles: MxTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and the gradients of weight and bias in fp32; operands contiguous `[rows, features]`.

    offsets count rows in units of middle. The bias's is empty for RMSNorm.
    """
    rows, features = x.shape
    dx = torch.empty_like(x)
    tiles = tiles or gradient_tiles(rows, features)
    programs = min(triton.cdiv(rows, tiles.rows), 4 * multiprocessors(x))
    shares = torch.empty(programs, features, dtype=torch.float32, device=x.device)
    bias_shares = None if mean is None else torch.empty_like(shares)
    if programs:
        note_used("mx_norm_gradient", tiles)
        mx_norm_gradient_kernel[(programs,)](
            d_out, x, weight, rstd, mean, dx, shares, bias_shares, offsets,
            rows, middle, 0 if offsets is None else offsets.shape[0] - 1, features,
            JAGGED=offsets is not None, ROWS=tiles.rows, COLUMNS=tiles.columns,
            num_warps=tiles.num_warps,
        )  # fmt: skip
    d_bias = shares.new_empty(0) if bias_shares is None else bias_shares.sum(0)
    return dx, shares.sum(0), d_bias
