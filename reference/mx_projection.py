"""A linear layer whose result is quantised to MX at once.

The product is not rounded between: float32 (float64 for float64) goes to MX. Source: the format as
in `mx.py`; quantisation behind the projection that makes an attention's operands, as the public
account of a large ads model trained in MXFP8 describes it (GEM, 2026).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, BLOCK_SIZE, Block, ElemDtype, ScaleMode
from jagbench.reference import arguments
from jagbench.reference.mx import mx_quantize


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
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x weight^T + bias, rounded to nearest even.

    x `[rows, features]`, or `[total, features]` with offsets; weight `[out_features, features]` in
    x's dtype; bias `[out_features]` in x's dtype or float32, or None.
    heads: columns of the result are those of so many heads, each a matrix of its own: codes are
        `[total, heads, out_features / heads]`. Several need offsets and heads of whole blocks.
    block: (1, 32) or (32, 32). All else, codes and scales too, as in `mx_quantize` of the result.

    Raises ValueError for arguments that do not fit, with their numbers.
    """
    _check(x, weight, bias, block)
    width = head_width(weight.shape[0], heads, offsets is None)
    kind = torch.promote_types(x.dtype, torch.float32)
    out = functional.linear(x.to(kind), weight.to(kind), None if bias is None else bias.to(kind))
    if offsets is not None:
        # What stands in padding has no part in the result, whatever it is.
        arguments.packed_lengths("x", x, offsets)
    result = out if heads == 1 else out.view(x.shape[0], heads, width)
    return mx_quantize(result, offsets, elem_dtype=elem_dtype, block=block, scale_mode=scale_mode)


def head_width(columns: int, heads: int, dense: bool) -> int:
    """Columns of one head; ValueError for heads that do not divide them, or cut a block."""
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise ValueError(f"heads must be a whole number from 1 on, got {heads!r}")
    if heads > 1 and dense:
        raise ValueError(f"{heads} heads need offsets, by which their rows are numbered")
    if heads > 1 and columns % (heads * BLOCK_SIZE):
        raise ValueError(f"{columns} columns are no {heads} heads of whole blocks of {BLOCK_SIZE}")
    return columns // heads


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, block: Block) -> None:
    if block == ALONG_ROWS:
        raise ValueError(f"block must be (1, 32) or (32, 32) behind a product, got {block}")
    for name, matrix in (("x", x), ("weight", weight)):
        if not isinstance(matrix, Tensor) or matrix.dim() != 2 or matrix.shape[1] < 1:
            shape = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
            raise ValueError(f"{name} must be a tensor [rows, features >= 1], got {shape}")
    if x.dtype not in arguments.DTYPES:
        raise ValueError(f"x must have one of the dtypes {arguments.DTYPES}, got {x.dtype}")
    if weight.shape[0] < 1 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    if weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(
            f"weight {tuple(weight.shape)} is {weight.dtype} on {weight.device}, x {x.dtype} on "
            f"{x.device}"
        )
    if bias is None:
        return
    if not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]:
        found = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"bias must be [{weight.shape[0]}], got {found}")
    if bias.dtype not in (x.dtype, torch.float32) or bias.device != x.device:
        raise ValueError(
            f"bias [{bias.shape[0]}] must be {x.dtype} or float32 on {x.device}, got {bias.dtype} "
            f"on {bias.device}"
        )
