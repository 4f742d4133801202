"""Products of MX codes: custom op and public function."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from jagbench.impl.kernels.attention_launch import require_device
from jagbench.impl.kernels.mx import check_codes
from jagbench.impl.kernels.mx_launch import scale_rows_of
from jagbench.impl.kernels.mx_matmul_launch import (
    Codes,
    launch_product,
    launch_values,
    library_product,
    product_route,
)
from jagbench.impl.kernels.operators import define
from jagbench.mx import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    SQUARE,
    Block,
    ElemDtype,
    check_elem_dtype,
)

NAME = "mx_matmul"
_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def mx_matmul(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    *,
    a_elem_dtype: ElemDtype = "e4m3",
    b_elem_dtype: ElemDtype = "e4m3",
    a_block: Block = ALONG_COLUMNS,
    b_block: Block = ALONG_ROWS,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Product a b of codes a `[..., m, k]` and b `[..., k, n]` scaled along the contracted dim.

    a, b: uint8, of any strides; leading dims broadcast. a_scales, b_scales: plain E8M0 scales as
        `mx_quantize` returns them; a_block (1, 32) or (32, 32), b_block (32, 1) or (32, 32). b is
        stored as it is written; a weight `[n, k]` with blocks (1, 32) is passed as the transposed
        views of its codes and scales.
    dtype: of the result: float32, float16 or bfloat16. Sums are float32 and are rounded once.

    Returns `[..., m, n]`. Multiplied by the architecture's block-scaled instruction where it has
    one, else as bf16, which holds every value from 2^-133 on exactly. Not differentiable. Raises
    ValueError for arguments that do not fit, with their numbers; NotImplementedError for float64.
    """
    for name, block, along in (("a", a_block, ALONG_COLUMNS), ("b", b_block, ALONG_ROWS)):
        if block not in (along, SQUARE):
            raise ValueError(
                f"{NAME}: {name}_block must lie along the contracted dim, {along} or {SQUARE}, got "
                f"{block}"
            )
    check_elem_dtype(a_elem_dtype)
    check_elem_dtype(b_elem_dtype)
    _check_dtype(dtype)
    _check_codes_and_scales("a", a, a_scales, a_block)
    _check_codes_and_scales("b", b, b_scales, b_block)
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"{NAME}: a [..., m, k] and b [..., k, n] do not fit: {tuple(a.shape)}, "
            f"{tuple(b.shape)}"
        )
    if a.device != b.device:
        raise ValueError(f"{NAME}: a is on {a.device}, b on {b.device}")
    _leading(a, b)
    out: Tensor = _op(
        a, a_scales, b, b_scales, a_elem_dtype, b_elem_dtype, a_block[0], b_block[1], dtype
    )
    return out


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        raise NotImplementedError(f"{NAME}: no kernel computes float64")
    if dtype not in _FLOAT_TYPES:
        raise ValueError(f"{NAME}: dtype must be one of {_FLOAT_TYPES}, got {dtype}")


def _check_codes_and_scales(name: str, codes: Tensor, scales: Tensor, block: Block) -> None:
    for called, value in ((name, codes), (f"{name}_scales", scales)):
        if not isinstance(value, Tensor):
            raise ValueError(f"{NAME}: {called} must be a tensor, got {type(value).__name__}")
        if value.dtype != torch.uint8:
            raise ValueError(
                f"{NAME}: {called} {tuple(value.shape)} must be uint8, got {value.dtype}"
            )
    if codes.dim() < 2:
        raise ValueError(f"{NAME}: {name} must have at least 2 dims, got {tuple(codes.shape)}")
    rows, columns = codes.shape[-2:]
    wanted = (*codes.shape[:-2], scale_rows_of(rows, None, block[0]), -(-columns // block[1]))
    if tuple(scales.shape) != wanted:
        raise ValueError(
            f"{NAME}: {name}_scales of codes {tuple(codes.shape)} in blocks {block} must be "
            f"{wanted}, got {tuple(scales.shape)}"
        )
    if scales.device != codes.device:
        raise ValueError(f"{NAME}: {name}_scales is on {scales.device}, {name} on {codes.device}")


def _leading(a: Tensor, b: Tensor) -> torch.Size:
    """Leading dims of the product."""
    try:
        return torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"{NAME}: leading dims of a {tuple(a.shape)} and b {tuple(b.shape)} do not broadcast"
        ) from None


def _matrices(x: Tensor, leading: torch.Size) -> Tensor:
    """x `[..., rows, columns]` as `[batch, rows, columns]`, a view where strides allow."""
    return x.expand(*leading, *x.shape[-2:]).reshape(math.prod(leading), *x.shape[-2:])


def _forward(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    a_elem_dtype: str,
    b_elem_dtype: str,
    a_tall: int,
    b_wide: int,
    dtype: torch.dtype,
) -> Tensor:
    """Arguments as `mx_matmul` has checked them, but for the values of codes."""
    require_device(NAME, a)
    kinds = cast(ElemDtype, a_elem_dtype), cast(ElemDtype, b_elem_dtype)
    for codes, kind in zip((a, b), kinds, strict=True):
        check_codes(NAME, codes, kind)
    leading = _leading(a, b)
    shape = (*leading, a.shape[-2], b.shape[-1])
    if not a.numel() or not b.numel() or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=a.device)
    a, a_scales, b, b_scales = (_matrices(t, leading) for t in (a, a_scales, b, b_scales))
    with torch.cuda.device_of(a):
        route = product_route(a.device)
        if route == "library":
            left = launch_values(a, a_scales, kinds[0], (a_tall, 32))
            right = launch_values(b, b_scales, kinds[1], (32, b_wide))
            return library_product(left, right.mT, None, dtype).view(shape)
        left_codes = Codes(a, a_scales, kinds[0], (a_tall, 32))
        right_codes = Codes(b, b_scales, kinds[1], (32, b_wide)).transposed
        return launch_product(left_codes, right_codes, None, dtype, route == "native").view(shape)


def _fake(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    a_elem_dtype: str,
    b_elem_dtype: str,
    a_tall: int,
    b_wide: int,
    dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((*_leading(a, b), a.shape[-2], b.shape[-1]), dtype=dtype)


_op: Any = define(NAME, _forward, _fake)


@register_flop_formula(torch.ops.jagbench.mx_matmul, get_raw=True)
def _flops(a: Any, a_scales: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(_leading(a, b)) * a.shape[-2] * a.shape[-1] * int(b.shape[-1])
