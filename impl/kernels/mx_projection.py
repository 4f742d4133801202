"""A linear layer that quantises its result: the public function."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from jagbench.impl.kernels.arguments import LARGEST_ROW_STRIDE
from jagbench.impl.kernels.attention_launch import require_device
from jagbench.impl.kernels.mx import ScaleLayout
from jagbench.impl.kernels.mx_launch import Format, scale_rows_of, swizzled_shape
from jagbench.impl.kernels.mx_projection_launch import launch_projection
from jagbench.impl.kernels.operators import define
from jagbench.impl.kernels.packed_arguments import check_packed_offsets, check_values_of_offsets
from jagbench.mx import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    BLOCK_SIZE,
    Block,
    ElemDtype,
    ScaleMode,
    check_block,
    check_elem_dtype,
    check_scale_mode,
)

_NAME = "mx_projection"
_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def mx_projection(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    heads: int = 1,
    elem_dtype: ElemDtype = "e4m3",
    block: Block = ALONG_COLUMNS,
    scale_mode: ScaleMode = "rceil",
    scale_layout: ScaleLayout = "plain",
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x weight^T + bias, quantised from the float32 accumulator.

    x `[rows, features]`, or `[total, features]` with offsets `[batch + 1]`; weight
    `[out_features, features]` in x's dtype: bfloat16, float16 or float32 (multiplied in full). bias
    `[out_features]` in x's dtype or float32, or None.
    heads: columns of the result are those of so many heads; codes are then
        `[total, heads, out_features / heads]` and scales `[..., heads, blocks]`. More than one need
        offsets and heads of whole blocks.
    block: (1, 32) along the columns or (32, 32) squares, which begin with each sequence.
    elem_dtype, scale_mode, scale_layout, codes and scales: as in `mx_quantize` of the result,
        rounded to nearest even.

    Not differentiable: what reads the codes has the gradient of the layer's result. Raises
    ValueError for arguments that do not fit, with their numbers; NotImplementedError for float64,
    for blocks of (32, 1), and for swizzled scales of several heads or of squares of sequences.
    """
    form = _format(elem_dtype, block, scale_mode, scale_layout)
    _check(x, weight, bias)
    _check_heads(weight.shape[0], heads, offsets)
    if offsets is not None:
        check_packed_offsets(_NAME, "x", x, offsets)
        if form.swizzled and (heads > 1 or form.block[0] > 1):
            raise NotImplementedError(
                f"{_NAME}: no swizzled scales of {heads} heads in blocks {block} of sequences"
            )
    codes, scales = _projection_op(
        _by_features(x), _by_features(weight), None if bias is None else bias.detach().contiguous(),
        None if offsets is None else offsets.contiguous(), heads, elem_dtype, list(form.block),
        scale_mode, form.swizzled,
    )  # fmt: skip
    return codes, scales


def _format(
    elem_dtype: ElemDtype, block: Block, scale_mode: ScaleMode, scale_layout: ScaleLayout
) -> Format:
    check_elem_dtype(elem_dtype)
    check_block(block)
    check_scale_mode(scale_mode)
    if scale_layout not in ("plain", "swizzled"):
        raise ValueError(
            f"{_NAME}: scale_layout must be 'plain' or 'swizzled', got {scale_layout!r}"
        )
    if block == ALONG_ROWS:
        raise NotImplementedError(
            f"{_NAME}: no kernel has blocks {block} behind a product; (1, 32) and (32, 32) it has"
        )
    return Format(elem_dtype, block, scale_mode, swizzled=scale_layout == "swizzled")


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuse operands that do not fit together."""
    for name, matrix in (("x", x), ("weight", weight)):
        if not isinstance(matrix, Tensor) or matrix.dim() != 2 or matrix.shape[1] < 1:
            found = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
            raise ValueError(f"{_NAME}: {name} must be [rows, features >= 1], got {found}")
    if weight.shape[0] < 1 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"{_NAME}: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    if weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(
            f"{_NAME}: weight {tuple(weight.shape)} is {weight.dtype} on {weight.device}, x "
            f"{x.dtype} on {x.device}"
        )
    if x.dtype == torch.float64:
        raise NotImplementedError(f"{_NAME}: no kernel reads float64")
    if x.dtype not in _FLOAT_TYPES:
        raise ValueError(
            f"{_NAME}: x {tuple(x.shape)} must be one of {_FLOAT_TYPES}, got {x.dtype}"
        )
    if bias is None:
        return
    if not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]:
        found = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"{_NAME}: bias must be [{weight.shape[0]}], got {found}")
    if bias.dtype not in (x.dtype, torch.float32) or bias.device != x.device:
        raise ValueError(
            f"{_NAME}: bias [{bias.shape[0]}] must be {x.dtype} or float32 on {x.device}, got "
            f"{bias.dtype} on {bias.device}"
        )


def _check_heads(columns: int, heads: int, offsets: Tensor | None) -> None:
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise ValueError(f"{_NAME}: heads must be a whole number from 1 on, got {heads!r}")
    if heads > 1 and offsets is None:
        raise ValueError(f"{_NAME}: {heads} heads need offsets, by which their rows are numbered")
    if heads > 1 and columns % (heads * BLOCK_SIZE):
        raise ValueError(
            f"{_NAME}: {columns} columns are no {heads} heads of whole blocks of {BLOCK_SIZE}"
        )


def _by_features(x: Tensor) -> Tensor:
    """x, or a copy where its features are apart or its rows too far."""
    x = x.detach()
    near = x.stride(0) < LARGEST_ROW_STRIDE and x.stride(1) == 1
    return x if near else x.contiguous()


def _outputs(
    x: Tensor, weight: Tensor, offsets: Tensor | None, heads: int, block: Block, swizzled: bool
) -> tuple[Tensor, Tensor]:
    """Codes and scales, not filled."""
    rows, columns = x.shape[0], weight.shape[0]
    shape = (rows, columns) if heads == 1 else (rows, heads, columns // heads)
    codes = torch.empty(shape, dtype=torch.uint8, device=x.device)
    if swizzled:
        return codes, codes.new_empty(swizzled_shape(block, rows, columns))
    batch = None if offsets is None else offsets.shape[0] - 1
    blocks = -(-columns // block[1])
    across = (blocks,) if heads == 1 else (heads, blocks // heads)
    return codes, codes.new_empty((scale_rows_of(rows, batch, block[0]), *across))


def _kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    heads: int,
    elem_dtype: str,
    block: list[int],
    scale_mode: str,
    swizzled: bool,
) -> tuple[Tensor, Tensor]:
    """Arguments as `mx_projection` has checked them, but for the offsets' values."""
    require_device(_NAME, x)
    if offsets is not None:
        check_values_of_offsets(_NAME, offsets, x.shape[0], None, False)
    form = Format(
        cast(ElemDtype, elem_dtype), (block[0], block[1]), cast(ScaleMode, scale_mode),
        swizzled=swizzled,
    )  # fmt: skip
    codes, scales = _outputs(x, weight, offsets, heads, form.block, swizzled)
    if not x.shape[0]:
        return codes, scales.zero_()
    # Scales of several heads lie side by side, as the blocks of their columns do.
    flat = scales if scales.dim() == 2 else scales.view(scales.shape[0], -1)
    with torch.cuda.device_of(x):
        launch_projection(x, weight, bias, offsets, codes, flat, form)
    return codes, scales


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    heads: int,
    elem_dtype: str,
    block: list[int],
    scale_mode: str,
    swizzled: bool,
) -> tuple[Tensor, Tensor]:
    return _outputs(x, weight, offsets, heads, (block[0], block[1]), swizzled)


_projection_op: Any = define("mx_projection", _kernel, _fake)
