"""Launches of the kernels of a norm with a linear layer, and their tiles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from jagbench.impl.kernels.attention_launch import multiprocessors
from jagbench.impl.kernels.hopper.norm_product_launch import (
    launch_norm_product,
    norm_product_problem,
)
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.norm_linear_kernels import (
    norm_input_gradient_kernel,
    norm_product_kernel,
    norm_rows_gradient_kernel,
    norm_statistics_kernel,
    norm_weight_gradient_kernel,
)
from jagbench.impl.kernels.relaunch import relaunch, traits
from jagbench.impl.kernels.tuning import note_used, padded, shared_memory

NormKernel = Literal[
    "norm_linear_rms", "norm_linear_layer", "norm_product", "norm_input_gradient",
    "norm_weight_gradient",
]  # fmt: skip


@dataclass(frozen=True)
class NormTiles:
    """Tile of a product, warps a program, stages of its pipeline.

    rows, columns: of the result; of the weight's gradient, features and outputs. depth: of the
    contraction a step. persistent: one program a multiprocessor walks the tiles. descriptors: whole
    tiles come by TMA, where that can be had.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    persistent: bool = False
    descriptors: bool = False

    def __str__(self) -> str:
        text = f"{self.rows}x{self.columns}x{self.depth} warps {self.num_warps} "
        text += f"stages {self.num_stages}"
        return text + " persistent" * self.persistent + " descriptors" * self.descriptors

    @staticmethod
    def parse(text: str) -> NormTiles:
        """Inverse of `str`. Raises ValueError for anything else."""
        found = re.fullmatch(
            r"(\d+)x(\d+)x(\d+) warps (\d+) stages (\d+)( persistent)?( descriptors)?", text.strip()
        )
        if found is None:
            raise ValueError(f"tiles are written '128x256x64 warps 8 stages 3', got {text!r}")
        rows, columns, depth, warps, stages = map(int, found.groups()[:5])
        persistent, descriptors = map(bool, found.groups()[5:])
        return NormTiles(rows, columns, depth, warps, stages, persistent, descriptors)

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "depth"):
            size = getattr(self, name)
            if size not in (16, 32, 64, 128, 256, 512):
                raise ValueError(f"{name} must be a power of two from 16 to 512, got {size}")
        if self.num_warps not in (1, 2, 4, 8, 16) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"warps {self.num_warps}, stages {self.num_stages}: not possible")


# 16-bit types. Columns of norm_input_gradient are the most features whose rows one program holds;
# wider rows take the product and then a pass over rows. The gradients' come of a sweep on an H200
# (262144 rows of 512 features); the others are not swept yet.
_TABLE: dict[NormKernel, NormTiles] = {
    "norm_linear_rms": NormTiles(128, 256, 64, 8, 3),
    "norm_linear_layer": NormTiles(128, 128, 64, 8, 3),
    "norm_product": NormTiles(128, 256, 64, 8, 3),
    "norm_input_gradient": NormTiles(64, 512, 32, 8, 4),
    "norm_weight_gradient": NormTiles(128, 128, 64, 4, 3),
}
#: IEEE products run on the plain ALUs, unrolled: small tiles, or registers spill.
_WIDE = NormTiles(64, 64, 16, 8, 2)
_INTERPRETED = NormTiles(64, 64, 64, 4, 1)
_pinned: dict[NormKernel, NormTiles] = {}
# Shared memory of devices whose matrix units read their operands from there (Hopper, Blackwell).
_ROOM_FOR_256 = 200 << 10
# Features whose rows a program of the input's gradient holds on other devices than Hopper.
_WHOLE_ELSEWHERE = 256
# Elements of a row-wise program's tile; of the partial sums of a weight's gradient.
_ROW_TILE, _MOST_PARTIAL = 4096, 1 << 26
# Programs a multiprocessor that share the rows of the weight's gradient, and steps at least each.
_WAVES, _FEWEST_STEPS = 2, 8


def pin_norm_tiles(choices: Mapping[str, str]) -> None:
    """Use other tiles than the table's from now on, in this process; an empty mapping undoes it.

    choices: kernel -> tiles, as "norm_linear_rms": "128x256x64 warps 8 stages 3 persistent". Raises
        ValueError for a kernel not in the table, and changes nothing then.
    """
    found: dict[NormKernel, NormTiles] = {}
    for name, text in choices.items():
        kernel = next((k for k in _TABLE if k == name), None)
        if kernel is None:
            raise ValueError(f"no tiles are called {name!r}; there are {', '.join(_TABLE)}")
        found[kernel] = NormTiles.parse(text)
    _pinned.clear()
    _pinned.update(found)


def norm_tiles(kernel: NormKernel, like: Tensor) -> NormTiles:
    """The pinned tiles, else the interpreter's, those of float32, or the table's."""
    if kernel in _pinned:
        return _pinned[kernel]
    return _INTERPRETED if INTERPRET.value else table_tiles(kernel, like.dtype)


def table_tiles(kernel: NormKernel, dtype: torch.dtype) -> NormTiles:
    """The table's tiles, or those of float32."""
    return _WIDE if dtype == torch.float32 else _TABLE[kernel]


def fitting(
    tiles: NormTiles,
    rows: int,
    columns: int,
    depth: int,
    size: int,
    limit: int | None,
    enough: int,
    whole: bool = False,
) -> NormTiles:
    """Tiles for a product of these sizes: no wider than it, in `limit` bytes of shared memory.

    size: bytes of an element. limit: None for the interpreter, which has no limits. enough:
        programs that fill the device; rows are halved while there are fewer. whole: a tile has
        every column.
    """
    widest = min(tiles.columns, padded(columns))
    if whole:
        widest = padded(columns)
    elif columns % widest or (limit is not None and limit < _ROOM_FOR_256):
        # Masks take registers, and so do operands where the matrix unit reads no shared memory.
        widest = min(widest, 128)
    tiles = replace(tiles, columns=widest, depth=min(tiles.depth, padded(depth)))
    while (
        tiles.rows > 64
        and triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns) < enough
    ):
        tiles = replace(tiles, rows=tiles.rows // 2)
    while limit is not None and tiles.num_stages > 1:
        used = tiles.num_stages * (tiles.rows + tiles.columns) * tiles.depth * size
        if used <= limit:
            break
        tiles = replace(tiles, num_stages=tiles.num_stages - 1)
    return tiles


def gradient_tiles(
    tiles: NormTiles,
    total: int,
    features: int,
    width: int,
    size: int,
    limit: int | None,
    enough: int,
) -> NormTiles:
    """`fitting` tiles for a weight's gradient, whose programs share the rows of a tile."""
    runs = _most_runs(tiles.depth, total, features, width)
    if limit is not None and limit < _ROOM_FOR_256:
        # Four warps have no registers for operands beside the accumulator.
        tiles = replace(tiles, num_warps=max(tiles.num_warps, 8))
    return fitting(tiles, features, width, total, size, limit, triton.cdiv(enough, runs))


def _most_runs(depth: int, total: int, features: int, width: int) -> int:
    """Runs into which rows may be dealt: none of too few steps, partial sums not too large."""
    runs = min(triton.cdiv(total, _FEWEST_STEPS * depth), _MOST_PARTIAL // (width * features))
    return max(1, runs)


def _fitted(kernel: NormKernel, like: Tensor, rows: int, columns: int, depth: int) -> NormTiles:
    limit = None if INTERPRET.value else shared_memory(like.device.index or 0)
    tiles = norm_tiles(kernel, like)
    enough = 1 if INTERPRET.value or kernel in _pinned else multiprocessors(like)
    size = like.element_size()
    if kernel == "norm_weight_gradient":
        found = gradient_tiles(tiles, depth, rows, columns, size, limit, enough)
    else:
        whole = kernel == "norm_input_gradient"
        found = fitting(tiles, rows, columns, depth, size, limit, enough, whole)
    note_used(kernel, str(found))
    return found


@dataclass(frozen=True)
class NormCall:
    """What every kernel is told: the rows, which of them are in use, and the norm.

    x `[total, features]` of unit column stride; weight `[width, features]`, contiguous, with the
    norm's weight folded in; offsets None for a dense batch. portable: whether the Hopper tier is
    ruled out.
    """

    x: Tensor
    weight: Tensor
    offsets: Tensor | None
    layer: bool
    eps: float
    portable: bool = False

    @property
    def norm(self) -> str:
        """Its name in the kernels."""
        return "layer" if self.layer else "rms"

    @property
    def batch(self) -> int:
        """Sequences; 0 without offsets."""
        return 0 if self.offsets is None else self.offsets.shape[0] - 1

    @property
    def sizes(self) -> dict[str, Any]:
        """Compile-time parameters of every kernel."""
        width, features = self.weight.shape
        return {"FEATURES": features, "WIDTH": width, "NORM": self.norm}

    def empty_statistics(self) -> Tensor:
        """Not filled: `[3, total]` under LayerNorm, `[1, total]` under RMSNorm, float32."""
        shape = (3 if self.layer else 1, self.x.shape[0])
        return torch.empty(shape, dtype=torch.float32, device=self.x.device)


def launch_forward(call: NormCall, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Out `[total, width]` and the rows' statistics; bias: fp32 `[width]` or None."""
    x, w = call.x, call.weight
    out = torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)
    statistics = call.empty_statistics()
    if not call.portable and norm_product_problem(x, w.shape[0]) is None:
        if call.layer:
            _launch_statistics(call, statistics)
        launch_norm_product(call, bias, out, statistics)
        return out, statistics
    kernel: NormKernel = "norm_linear_layer" if call.layer else "norm_linear_rms"
    tiles = _fitted(kernel, x, x.shape[0], w.shape[0], w.shape[1])
    _launch_product(call, x, out, bias, statistics, tiles, (w.stride(0), 1), call.norm)
    return out, statistics


def _launch_statistics(call: NormCall, statistics: Tensor) -> None:
    """Statistics of every row under LayerNorm, in a pass of its own."""
    total, features = call.x.shape
    rows, block, warps = row_tile(features)
    constants = (features, call.x.dtype == torch.float32, rows, block)
    relaunch(
        norm_statistics_kernel, triton.cdiv(total, rows), call.x.device,
        (traits(call.x, call.offsets), call.x.stride(0), constants),
        call.x, statistics, call.offsets, call.batch, total, call.eps, call.x.stride(0),
        *constants, num_warps=warps,
    )  # fmt: skip


def _launch_product(
    call: NormCall,
    x: Tensor,
    out: Tensor,
    bias: Tensor | None,
    statistics: Tensor | None,
    tiles: NormTiles,
    w_strides: tuple[int, int],
    norm: str,
) -> None:
    """out = norm(x) W^T + bias; w_strides: between W's outputs, and between their features."""
    (total, features), width = x.shape, out.shape[1]
    count = triton.cdiv(total, tiles.rows) * triton.cdiv(width, tiles.columns)
    if not count:
        return
    found = _descriptors(x, call.weight, tiles) if tiles.descriptors and w_strides[1] == 1 else None
    programs = min(count, multiprocessors(x)) if tiles.persistent else count
    norm_product_kernel[(programs,)](
        x, call.weight, out, bias, statistics, call.offsets, *(found or (None, None)),
        call.batch, total, count, call.eps, x.stride(0), *w_strides,
        FEATURES=features, WIDTH=width, NORM=norm, EXACT=x.dtype == torch.float32,
        ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth,
        DESCRIPTORS=found is not None, FLATTEN=tiles.persistent,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _descriptors(x: Tensor, w: Tensor, tiles: NormTiles) -> tuple[Any, Any] | None:
    """TMA descriptors of x and W; None below compute capability 9 and without 16-byte alignment."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if INTERPRET.value or torch.cuda.get_device_capability(x.device)[0] < 9:
        return None
    for tensor in (x, w):
        if tensor.data_ptr() % 16 or tensor.stride(0) * tensor.element_size() % 16:
            return None
    return (
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth]),
        TensorDescriptor.from_tensor(w, [tiles.columns, tiles.depth]),
    )


def launch_input_gradient(call: NormCall, d_out: Tensor, statistics: Tensor) -> Tensor:
    """dx, contiguous: in one kernel if it can hold whole rows, else in two."""
    x, (width, features) = call.x, call.weight.shape
    total = x.shape[0]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not total:
        return dx
    block = padded(features)
    if block > _whole_rows(norm_tiles("norm_input_gradient", x), x):
        tiles = _fitted("norm_product", x, total, features, width)
        _launch_product(call, d_out, dx, None, None, tiles, (1, call.weight.stride(0)), "none")
        _launch_rows(call, dx, dx, statistics)
        return dx
    tiles = _fitted("norm_input_gradient", x, total, features, width)
    strides = (x.stride(0), call.weight.stride(0), d_out.stride(0))
    constants = (features, width, call.norm, tiles.rows, block, tiles.depth)
    relaunch(
        norm_input_gradient_kernel, triton.cdiv(total, tiles.rows), x.device,
        (traits(x, call.weight, d_out, call.offsets), strides, constants, tiles),
        x, call.weight, d_out, dx, statistics, call.offsets, call.batch, total, 0, *strides,
        *constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return dx


def _whole_rows(tiles: NormTiles, like: Tensor) -> int:
    """Most features whose rows a program holds: accumulators of 512 fit Hopper's registers only."""
    hopper = like.is_cuda and torch.cuda.get_device_capability(like.device)[0] == 9
    return tiles.columns if hopper else min(tiles.columns, _WHOLE_ELSEWHERE)


def _launch_rows(call: NormCall, gradient: Tensor, dx: Tensor, statistics: Tensor) -> None:
    """dx from the gradient of the normalised rows, row by row."""
    total, features = call.x.shape
    rows, block, warps = row_tile(features)
    norm_rows_gradient_kernel[(triton.cdiv(total, rows),)](
        call.x, gradient, dx, statistics, call.offsets, call.batch, total, call.x.stride(0),
        FEATURES=features, NORM=call.norm, ROWS=rows, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip


def row_tile(features: int) -> tuple[int, int, int]:
    """Rows, padded features and warps of a program that takes whole rows."""
    block = padded(features)
    return max(1, _ROW_TILE // block), block, 4 if block <= 2048 else 8


def launch_weight_gradient(
    call: NormCall, d_out: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor]:
    """d_out^T normalised(x) `[width, features]`, and the sum of d_out's rows `[width]`, fp32.

    Every program sums its own rows; the sums are added in one order.
    """
    x, (width, features) = call.x, call.weight.shape
    total = x.shape[0]
    tiles = _fitted("norm_weight_gradient", x, features, width, total)
    across = triton.cdiv(width, tiles.columns) * triton.cdiv(features, tiles.rows)
    splits = max(1, _WAVES * multiprocessors(x) // across)
    splits = min(splits, _most_runs(tiles.depth, total, features, width))
    run = triton.cdiv(triton.cdiv(total, splits), tiles.depth) * tiles.depth
    splits = triton.cdiv(total, run) if run else 0
    partial = torch.empty((splits, width, features), dtype=torch.float32, device=x.device)
    sums = torch.empty((splits, width), dtype=torch.float32, device=x.device)
    if splits:
        norm_weight_gradient_kernel[(splits * across,)](
            x, d_out, partial, sums, statistics, call.offsets, call.batch, total, run,
            x.stride(0), d_out.stride(0), **call.sizes, EXACT=x.dtype == torch.float32,
            INPUTS=tiles.rows, OUTPUTS=tiles.columns, DEPTH=tiles.depth,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return partial.sum(0), sums.sum(0)
