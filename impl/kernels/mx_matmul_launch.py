"""Launches of products of MX operands: who multiplies, with which tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from jagbench.impl.kernels.arguments import LARGEST_ROW_STRIDE
from jagbench.impl.kernels.attention_launch import multiprocessors
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.mx_launch import (
    ELEMENTS,
    Format,
    Matrices,
    converts,
    launch_dequantize,
    launch_quantize,
    mx_tiles,
    scale_rows_of,
    words,
)
from jagbench.impl.kernels.mx_matmul_kernels import mx_product_kernel, mx_round_kernel
from jagbench.impl.kernels.tuning import note_used, padded
from jagbench.mx import Block, ElemDtype

#: Who multiplies: the architecture's block-scaled instruction; a kernel that decodes tiles to bf16
#: in registers; or the library, on operands that were written as bf16.
Route = Literal["native", "decode", "library"]

# Programs that share the depth of one tile have this many steps at least.
_FEWEST_STEPS = 8
# Results of fewer elements leave the library as float32: it may add parts of a sum in the result's
# dtype, and only does so where a result has too few tiles to fill a device.
_LARGE = 1 << 22
# Tiles, one below the other, whose rows a program adds up: partial sums are few beside the data.
_SUMMED = 1 if INTERPRET.value else 16


@dataclass(frozen=True)
class ProductTiles:
    """Tile of one program of the product, and how far its loads run ahead."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        text = f"{self.rows}x{self.columns}x{self.depth} warps {self.num_warps} "
        return text + f"stages {self.num_stages}"


#: By major compute capability for the block-scaled instruction; 0: decoding. Not swept yet.
TABLE = {
    0: ProductTiles(128, 128, 64, 8, 3),
    10: ProductTiles(128, 128, 128, 4, 3),
    12: ProductTiles(128, 64, 128, 8, 2),
}
_INTERPRETED = ProductTiles(128, 128, 128, 4, 1)


@dataclass(frozen=True)
class Codes:
    """Codes of an operand `[batch, rows, depth]`, the contracted dim last, and their scales.

    scales `[batch, rows or blocks of rows, blocks of the depth]`; block: (1, 32), or (32, 32).
    Views of any strides.
    """

    codes: Tensor
    scales: Tensor
    elem_dtype: ElemDtype
    block: Block

    @property
    def transposed(self) -> Codes:
        """Rows and columns exchanged, and blocks with them."""
        return Codes(self.codes.mT, self.scales.mT, self.elem_dtype, (self.block[1], self.block[0]))

    def constants(self, side: str) -> dict[str, Any]:
        """What the kernel is compiled for, of side "A" or "B"."""
        element = ELEMENTS[self.elem_dtype].constants
        names = {**element, "INFINITY": self.elem_dtype == "e5m2", "TALL": self.block[0]}
        return {f"{side}_{name}": value for name, value in names.items()}


def product_route(device: torch.device) -> Route:
    """Who multiplies MX operands on a device."""
    if INTERPRET.value:
        return "decode"
    return "native" if torch.cuda.get_device_capability(device)[0] in TABLE else "library"


def product_tiles(major: int, rows: int, columns: int) -> ProductTiles:
    """Tiles by `TABLE`'s key, no wider than the product needs."""
    found = _INTERPRETED if INTERPRET.value else TABLE[major]
    # The block-scaled instruction of 10.0 takes 128 rows.
    least = 16 if major == 0 else 128
    return ProductTiles(
        min(found.rows, max(least, padded(rows))), min(found.columns, max(32, padded(columns))),
        found.depth, found.num_warps, found.num_stages,
    )  # fmt: skip


def _runs(tiles: ProductTiles, count: int, depth: int, enough: int) -> int:
    """Parts of the depth, where there are fewer tiles than programs that fill a device."""
    return max(1, min(enough // max(count, 1), depth // (_FEWEST_STEPS * tiles.depth)))


def launch_product(
    a: Codes,
    b: Codes,
    bias: Tensor | None,
    dtype: torch.dtype,
    native: bool,
    tiles: ProductTiles | None = None,
) -> Tensor:
    """a b^T + bias `[batch, rows, columns]`; sums float32, rounded once to dtype.

    a and b share their batch and depth, none of which is empty.
    """
    batch, rows, depth = a.codes.shape
    columns, device = b.codes.shape[1], a.codes.device
    major = torch.cuda.get_device_capability(device)[0] if native else 0
    tiles = tiles or product_tiles(major, rows, columns)
    row_tiles, column_tiles = triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)
    count = batch * row_tiles * column_tiles
    runs = _runs(tiles, count, depth, 2 * multiprocessors(a.codes))
    run = triton.cdiv(triton.cdiv(depth, runs), tiles.depth) * tiles.depth
    runs = triton.cdiv(depth, run)
    kind = dtype if runs == 1 else torch.float32
    out = torch.empty((runs, batch, rows, columns), dtype=kind, device=device)
    note_used("mx_product", f"{tiles}{' block_scale' if native else ''}")
    mx_product_kernel[(count * runs,)](
        a.codes, a.scales, b.codes, b.scales, out, bias if runs == 1 else None,
        rows, columns, depth, run, row_tiles, column_tiles, runs,
        *a.codes.stride(), *a.scales.stride(), *b.codes.stride(), *b.scales.stride(),
        rows * columns, batch * rows * columns, **a.constants("A"), **b.constants("B"),
        NATIVE=native, CAST=casts(device), EVEN=depth % tiles.depth == 0,
        FAR=max(*a.codes.stride()[1:], *b.codes.stride()[1:], columns) >= LARGEST_ROW_STRIDE,
        ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if runs == 1:
        return out[0]
    total = out.sum(0)
    return (total if bias is None else total + bias.float()).to(dtype)


def casts(device: torch.device) -> bool:
    """Whether 8-bit types become float16 by an instruction."""
    return not INTERPRET.value and torch.cuda.get_device_capability(device) >= (9, 0)


def library_product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a b^T + bias of `[..., rows, depth]` and `[..., columns, depth]` of one dtype, by torch.

    Sums are float32, rounded once to dtype.
    """
    if not a.is_cuda or a.dtype == torch.float32:
        wide = a.float() @ b.float().mT
    elif a.dtype == dtype and a.shape[-2] * b.shape[-2] >= _LARGE:
        if bias is not None and a.dim() == 2:
            return torch.addmm(bias, a, b.mT)
        wide = a @ b.mT if bias is None else _wide_product(a, b)
    else:
        wide = _wide_product(a, b)
    return (wide if bias is None else wide + bias.float()).to(dtype)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    multiply: Any = torch.mm if a.dim() == 2 else torch.bmm
    found: Tensor = multiply(a, b.mT, out_dtype=torch.float32)
    return found


def launch_codes(x: Tensor, form: Format) -> Codes:
    """x `[rows, columns]` quantised, a batch of one; its rows are multiples of a transform."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    tall, wide = form.block
    shape = (1, scale_rows_of(x.shape[0], None, tall), -(-x.shape[1] // wide))
    scales = codes.new_empty(shape)
    launch_quantize(Matrices.of(x, None), Matrices.of(codes, None), scales, form)
    return Codes(codes[None], scales, form.elem_dtype, form.block)


def launch_values(codes: Tensor, scales: Tensor, elem_dtype: ElemDtype, block: Block) -> Tensor:
    """Values of codes `[matrices, rows, columns]` and plain scales, bf16."""
    if codes.stride(2) != 1 and codes.stride(1) == 1:
        return launch_values(codes.mT, scales.mT, elem_dtype, (block[1], block[0])).mT
    out = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    source, to = Matrices.of(codes, None), Matrices.of(out, None)
    launch_dequantize(source, scales.contiguous(), to, elem_dtype, block)
    return out


def launch_round(x: Tensor, form: Format, rows: int | None = None) -> Tensor:
    """x `[used, columns]` as its codes have it, bf16 `[rows, columns]`; further rows are 0 in x."""
    return _round(x, form, x.shape[0] if rows is None else rows, None)


def launch_round_and_sum(x: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """`launch_round`, and the sum of x's rows, float32 `[columns]`, from the same pass."""
    tiles = mx_tiles(form.block, x.shape[0], x.shape[1], form.hadamard, form.seed is not None)
    parts = triton.cdiv(x.shape[0], tiles.rows * _SUMMED)
    sums = torch.empty((parts, x.shape[1]), dtype=torch.float32, device=x.device)
    return _round(x, form, x.shape[0], sums), sums.sum(0)


def _round(x: Tensor, form: Format, rows: int, sums: Tensor | None) -> Tensor:
    source = Matrices.of(x, None).tensor[0]
    used, columns = source.shape
    out = torch.empty((rows, columns), dtype=torch.bfloat16, device=x.device)
    tiles = mx_tiles(form.block, rows, columns, form.hadamard, form.seed is not None)
    steps = 1 if sums is None else _SUMMED
    down, column_tiles = triton.cdiv(rows, tiles.rows * steps), triton.cdiv(columns, tiles.columns)
    if not down * column_tiles:
        return out
    constants = {key: value for key, value in form.constants.items() if key != "SWIZZLED"}
    note_used("mx_round", tiles)
    mx_round_kernel[(down * column_tiles,)](
        source, out, sums, used, rows, columns, column_tiles, source.stride(0),
        *words(form.seed), *words(form.hadamard_seed), **constants,
        CONVERT=converts(x.device, form), CAST=casts(x.device),
        HAS_INFINITY=form.elem_dtype == "e5m2", STEPS=steps, ROWS=tiles.rows,
        COLUMNS=tiles.columns, num_warps=tiles.num_warps,
    )  # fmt: skip
    return out


def whole(rows: int, size: int | None) -> int:
    """Rows filled up to a multiple of a transform's size."""
    return -(-rows // (size or 1)) * (size or 1)
