"""Launches of the MX kernels: formats as constants, matrices and tiles of a call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from jagbench.impl.kernels.arguments import LARGEST_ROW_STRIDE
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.mx_kernels import mx_dequantize_kernel, mx_quantize_kernel
from jagbench.impl.kernels.tuning import note_used, padded
from jagbench.mx import BLOCK_SIZE, Block, ElemDtype, ScaleMode, Stream

#: Rows and blocks of a tile of swizzled scales.
SWIZZLE_ROWS, SWIZZLE_BLOCKS = 128, 4
_WORD = 1 << 32


@dataclass(frozen=True)
class Element:
    """An element type as the kernels take it.

    mantissa, width: bits of the mantissa and of a code; bias: of the exponent; largest: code of the
    largest finite magnitude; nan: code of a NaN; top: exponent of the largest number.
    """

    mantissa: int
    bias: int
    width: int
    largest: int
    nan: int
    top: int

    @property
    def constants(self) -> dict[str, int]:
        """What both kernels are compiled for."""
        return {
            "MANTISSA": self.mantissa, "BIAS": self.bias, "WIDTH": self.width,
            "LARGEST": self.largest,
        }  # fmt: skip

    def carry(self, mode: ScaleMode) -> int:
        """What is added to a magnitude's 23 bits to carry where a mode rounds its scale up."""
        if mode == "floor":
            return 0
        if mode == "ceil":
            return (1 << 23) - 1
        if mode == "even":
            return 1 << (22 - self.mantissa)
        kept = self.largest & ((1 << self.mantissa) - 1)
        return (1 << 23) - 1 - (kept << (23 - self.mantissa))


ELEMENTS: Mapping[ElemDtype, Element] = {
    "e4m3": Element(3, 7, 8, 0x7E, 0x7F, 8),
    "e5m2": Element(2, 15, 8, 0x7B, 0x7F, 15),
    "e2m1": Element(1, 1, 4, 0x7, 0x7, 2),
}


@dataclass(frozen=True)
class Format:
    """What a call quantises to, and how.

    seed: of the stochastic rounding, in the random numbers of `stream`; None rounds to nearest.
    hadamard: size of the transform along the blocks, None for none; its signs are of hadamard_seed.
    swizzled: whether scales are stored as tensor cores read them.
    """

    elem_dtype: ElemDtype
    block: Block
    scale_mode: ScaleMode = "rceil"
    seed: int | None = None
    stream: int = int(Stream.QUANTISE)
    hadamard: int | None = None
    hadamard_seed: int = 0
    swizzled: bool = False

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled for, but for tiles and the device."""
        element, size = ELEMENTS[self.elem_dtype], self.hadamard or 0
        return {
            "BR": self.block[0], "BC": self.block[1], **element.constants, "NAN": element.nan,
            "CARRY": element.carry(self.scale_mode), "TOP": element.top,
            "STREAM": None if self.seed is None else int(self.stream), "HADAMARD": size,
            "ROOT": root(size), "SIGNS": int(Stream.SIGNS), "SWIZZLED": self.swizzled,
        }  # fmt: skip


def root(size: int) -> float:
    """1 / sqrt(size), the float32 nearest to it; 1 for no transform."""
    return float(torch.tensor(1 / math.sqrt(size or 1), dtype=torch.float32))


@dataclass(frozen=True)
class MxTiles:
    """Tile of one program, rows by columns, and its warps."""

    rows: int
    columns: int
    num_warps: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} warps {self.num_warps}"


# Measured on an H200, bf16 (results/nvidia-h200/variants/mx-tiles-2026-12-01.txt). A block whose
# rows are in one warp needs no shared memory for its maximum; random bits want long rows.
_ALONG_COLUMNS = (8192, 1024, 8)
_ALONG_COLUMNS_RANDOM = (4096, 4096, 2)
_MOST_COLUMNS_TALL = {BLOCK_SIZE: (128, 2), 1: (64, 1)}
_INTERPRETED = 1 << 16


def mx_tiles(
    block: Block,
    rows: int,
    columns: int,
    hadamard: int | None = None,
    random: bool = False,
    interpreted: bool = INTERPRET.value,
) -> MxTiles:
    """Tiles of a matrix: whole blocks and groups, no wider than the matrix needs.

    random: whether elements are rounded by random bits.
    """
    wide = max(BLOCK_SIZE, hadamard or 0)
    across = max(BLOCK_SIZE if block[0] > 1 else wide, padded(columns))
    if block[0] > 1:
        tall = wide if block[1] == 1 else BLOCK_SIZE
        most, warps = _MOST_COLUMNS_TALL[block[1]]
        most = _INTERPRETED // tall if interpreted else most
        # The transform and random bits keep more in registers than one warp has.
        warps *= (2 if hadamard else 1) * tall // BLOCK_SIZE
        return MxTiles(tall, min(across, most), warps)
    elements, most, warps = _ALONG_COLUMNS_RANDOM if random else _ALONG_COLUMNS
    if interpreted:
        elements, most = _INTERPRETED, _INTERPRETED // 16
    across = min(across, most)
    return MxTiles(min(elements // across, padded(rows)), across, warps)


@dataclass(frozen=True)
class Matrices:
    """A tensor as matrices `[matrices, rows, columns]` with a view of each operand.

    offsets pack the rows; then the matrices are the dims between the first and the last.
    """

    tensor: Tensor
    offsets: Tensor | None

    @staticmethod
    def of(x: Tensor, offsets: Tensor | None, flat: bool = False) -> Matrices:
        """Views of x, or of a copy where its columns are apart. flat: all rows are one matrix."""
        if x.dim() == 1 or (flat and offsets is None):
            view = x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])
        elif offsets is None:
            view = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
        else:
            view = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1]).transpose(0, 1)
        fits = view.stride(2) == 1 or view.shape[2] == 1
        if not fits or view.stride(1) >= LARGEST_ROW_STRIDE:
            # Of x, not of the view: the copy is laid out as the result will be.
            return Matrices.of(x.contiguous(), offsets, flat)
        return Matrices(view, offsets)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Matrices, rows, columns."""
        count, rows, columns = self.tensor.shape
        return count, rows, columns

    @property
    def batch(self) -> int:
        """Sequences; 0 without offsets."""
        return 0 if self.offsets is None else self.offsets.shape[0] - 1

    @property
    def draw_strides(self) -> tuple[int, int]:
        """How the number of a row grows by matrix and by row: it counts over all leading dims."""
        count, rows, _ = self.sizes
        return (rows, 1) if self.offsets is None else (1, count)


def scale_rows_of(rows: int, batch: int | None, tall: int) -> int:
    """Rows of plain scales of a matrix, in blocks of `tall` rows; batch None: without offsets."""
    if tall == 1:
        return rows
    return -(-rows // tall) if batch is None else rows // tall + batch


def swizzled_shape(block: Block, rows: int, columns: int) -> tuple[int, int]:
    """Shape of the swizzled scales of a dense matrix, padded to whole tiles of 128 x 4."""
    blocks = -(-columns // block[1])
    across, along = (columns, -(-rows // block[0])) if block[1] == 1 else (rows, blocks)
    return (
        -(-across // SWIZZLE_ROWS) * SWIZZLE_ROWS, -(-along // SWIZZLE_BLOCKS) * SWIZZLE_BLOCKS,
    )  # fmt: skip


def _tile_counts(
    source: Matrices, form: Format, tiles: MxTiles, end: int, scale_rows: int
) -> tuple[int, int]:
    """Tiles of rows and of columns that cover data, scales and, if swizzled, their padding."""
    columns = source.sizes[2]
    if form.block[0] > 1 and source.offsets is not None:
        row_tiles = end // BLOCK_SIZE + source.batch + 1
    elif form.swizzled and form.block[1] == 1:
        row_tiles = triton.cdiv(-(-scale_rows // SWIZZLE_BLOCKS) * SWIZZLE_BLOCKS * BLOCK_SIZE,
                                tiles.rows)  # fmt: skip
    else:
        row_tiles = triton.cdiv(end, tiles.rows)
    unit = 1
    if form.swizzled:
        unit = SWIZZLE_ROWS if form.block[1] == 1 else SWIZZLE_BLOCKS * BLOCK_SIZE
    return row_tiles, triton.cdiv(-(-columns // unit) * unit, tiles.columns)


def words(seed: int | None) -> tuple[int, int]:
    """A seed as two int32 with the bits of its words."""
    words = (seed or 0) % _WORD, (seed or 0) // _WORD
    low, high = (word - _WORD if word >= _WORD // 2 else word for word in words)
    return low, high


def converts(device: torch.device, form: Format) -> bool:
    """Whether elements are rounded by the instruction that compute capability 9.0 has (8.9 too)."""
    if INTERPRET.value or form.seed is not None or form.elem_dtype == "e2m1":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_quantize(
    source: Matrices, codes: Matrices, scales: Tensor, form: Format, tiles: MxTiles | None = None
) -> None:
    """Fill codes and scales; scales plain `[matrices, scale rows, blocks]` or swizzled, a view."""
    count, rows, columns = source.sizes
    batch = None if source.offsets is None else source.batch
    scale_rows = scale_rows_of(rows, batch, form.block[0])
    padded_rows = form.swizzled and form.block[1] > 1
    end = -(-rows // SWIZZLE_ROWS) * SWIZZLE_ROWS if padded_rows else rows
    tiles = tiles or mx_tiles(form.block, rows, columns, form.hadamard, form.seed is not None)
    row_tiles, column_tiles = _tile_counts(source, form, tiles, end, scale_rows)
    programs = count * row_tiles * column_tiles
    if not programs:
        return
    note_used("mx_quantize", tiles)
    mx_quantize_kernel[(programs,)](
        source.tensor, codes.tensor, scales, source.offsets,
        rows, end, columns, scale_rows, source.batch, row_tiles, column_tiles,
        *source.tensor.stride()[:2], *codes.tensor.stride()[:2], *scales.stride()[:2],
        *source.draw_strides, *words(form.seed), *words(form.hadamard_seed), **form.constants,
        CONVERT=converts(source.tensor.device, form), ROWS=tiles.rows, COLUMNS=tiles.columns,
        num_warps=tiles.num_warps,
    )  # fmt: skip


def launch_dequantize(
    source: Matrices,
    scales: Tensor,
    out: Matrices,
    elem_dtype: ElemDtype,
    block: Block,
    tiles: MxTiles | None = None,
) -> None:
    """Fill out, a view; scales plain `[matrices, scale rows, blocks]`, a view."""
    count, rows, columns = source.sizes
    tiles = tiles or mx_tiles(block, rows, columns)
    form = Format(elem_dtype, block)
    row_tiles, column_tiles = _tile_counts(source, form, tiles, rows, 0)
    programs = count * row_tiles * column_tiles
    if not programs:
        return
    note_used("mx_dequantize", tiles)
    mx_dequantize_kernel[(programs,)](
        source.tensor, scales, out.tensor, source.offsets,
        rows, columns, source.batch, row_tiles, column_tiles,
        *source.tensor.stride()[:2], *scales.stride()[:2], *out.tensor.stride()[:2],
        BR=block[0], BC=block[1], **ELEMENTS[elem_dtype].constants,
        HAS_INFINITY=elem_dtype == "e5m2", ROWS=tiles.rows, COLUMNS=tiles.columns,
        num_warps=tiles.num_warps,
    )  # fmt: skip
