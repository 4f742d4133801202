"""MX quantisation and back: custom ops and public functions."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from jagbench.impl.kernels.attention_launch import require_device
from jagbench.impl.kernels.mx_launch import (
    ELEMENTS,
    Format,
    Matrices,
    launch_dequantize,
    launch_quantize,
    scale_rows_of,
    swizzled_shape,
)
from jagbench.impl.kernels.operators import define
from jagbench.impl.kernels.packed_arguments import check_packed_offsets, check_values_of_offsets
from jagbench.mx import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    SQUARE,
    Block,
    ElemDtype,
    Rounding,
    ScaleMode,
    Stream,
    check_block,
    check_elem_dtype,
    check_hadamard,
    check_rounding,
    check_scale_mode,
    check_seed,
)

ScaleLayout = Literal["plain", "swizzled"]
_QUANTIZE, _DEQUANTIZE = "mx_quantize", "mx_dequantize"
_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def mx_quantize(
    x: Tensor,
    offsets: Tensor | None = None,
    *,
    elem_dtype: ElemDtype = "e4m3",
    block: Block = ALONG_COLUMNS,
    scale_mode: ScaleMode = "rceil",
    rounding: Rounding = "nearest",
    seed: int | None = None,
    stream: Stream = Stream.QUANTISE,
    hadamard: int | None = None,
    hadamard_seed: int | None = None,
    scale_layout: ScaleLayout = "plain",
) -> tuple[Tensor, Tensor]:
    """Codes and E8M0 scales of x `[..., rows, columns]`, in one pass over it.

    x: float32, float16 or bfloat16; columns side by side in memory, or x is copied first.
    offsets: `[batch + 1]`, int32 or int64, packs the first dim of x `[total, ..., columns]`, which
        then are the rows: no block crosses into the next sequence. None: the dim before the last.
    elem_dtype: "e4m3", "e5m2" or "e2m1".
    block: (1, 32) along the columns, (32, 1) along the rows, (32, 32) squares.
    scale_mode: "rceil", "floor", "ceil" or "even".
    rounding: "nearest", ties to even; "stochastic", by the random bits of a seed, a stream, a row
        (counted over all leading dims) and a column.
    hadamard: 16, 32 or 64: groups of as many numbers along the blocks are turned by the random
        Hadamard transform first, in float32, with the signs of hadamard_seed. The dim must be a
        multiple of it.
    scale_layout: "plain"; "swizzled", as block-scaled matrix instructions read the scales.

    Returns codes uint8 like x, contiguous, one a byte (`as_float8` views them) and scales uint8.
    Plain: x's shape with the blocked dims divided and rounded up; with offsets, blocks of 32 rows
    have theirs in `[total // 32 + batch, ..., column blocks]`, block b of sequence i in row
    offsets[i] // 32 + i + b. Rows past the last offset, and scales of no block, are 0. Swizzled:
    `[..., n, k]` of matrices of scales padded with 0 to multiples of 128 and 4 and stored in tiles
    of 128 x 4. Its rows are x's rows (of squares too, each scale 32 times), or x's columns under
    blocks of (32, 1).

    Not differentiable. Raises ValueError for arguments that do not fit, with their numbers;
    NotImplementedError for float64, and for a transform or swizzled scales along the rows of a
    jagged tensor.
    """
    check_elem_dtype(elem_dtype)
    check_block(block)
    check_scale_mode(scale_mode)
    check_rounding(rounding, seed)
    _check_shape(_QUANTIZE, "x", x, block, offsets)
    _check_dtype(x)
    if scale_layout not in ("plain", "swizzled"):
        raise ValueError(
            f"{_QUANTIZE}: scale_layout must be 'plain' or 'swizzled', got {scale_layout!r}"
        )
    check_hadamard(hadamard)
    if offsets is not None and block == ALONG_ROWS:
        _refuse_jagged_rows(x, hadamard, scale_layout)
    _check_hadamard(x, block, hadamard, hadamard_seed)
    codes, scales = _quantize_op(
        x.detach(), None if offsets is None else offsets.contiguous(), elem_dtype, list(block),
        scale_mode, seed, int(Stream(stream)), hadamard, hadamard_seed or 0,
        scale_layout == "swizzled",
    )  # fmt: skip
    return codes, scales


def mx_dequantize(
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    *,
    elem_dtype: ElemDtype = "e4m3",
    block: Block = ALONG_COLUMNS,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values of codes and plain scales as `mx_quantize` returns them: 2^(scale - 127) element.

    dtype: float64, float32, float16 or bfloat16; exact wherever it holds the value, else rounded to
    nearest, or infinite. A block of scale code 255 is NaN; code 0 is 2^-127. Scales that belong to
    no block are not read; rows past the last offset are 0.

    Not differentiable. Raises ValueError for arguments that do not fit, with their numbers;
    NotImplementedError for another dtype.
    """
    check_elem_dtype(elem_dtype)
    check_block(block)
    _check_shape(_DEQUANTIZE, "codes", codes, block, offsets)
    if dtype not in (*_FLOAT_TYPES, torch.float64):
        raise NotImplementedError(f"{_DEQUANTIZE}: no kernel computes {dtype}")
    if not isinstance(scales, Tensor):
        raise ValueError(f"{_DEQUANTIZE}: scales must be a tensor, got {type(scales).__name__}")
    wanted = _scales_shape(codes, block, None if offsets is None else offsets.shape[0] - 1)
    if tuple(scales.shape) != wanted:
        raise ValueError(
            f"{_DEQUANTIZE}: scales of codes {tuple(codes.shape)} in blocks {block} must be "
            f"{wanted}, got {tuple(scales.shape)}"
        )
    for name, value in (("codes", codes), ("scales", scales)):
        if value.dtype != torch.uint8:
            raise ValueError(
                f"{_DEQUANTIZE}: {name} {tuple(value.shape)} must be uint8, got {value.dtype}"
            )
    if scales.device != codes.device:
        raise ValueError(f"{_DEQUANTIZE}: scales are on {scales.device}, codes on {codes.device}")
    offsets = None if offsets is None else offsets.contiguous()
    out: Tensor = _dequantize_op(codes, scales, offsets, elem_dtype, list(block), dtype)
    return out


def as_float8(codes: Tensor, elem_dtype: ElemDtype) -> Tensor:
    """Codes of E4M3 or E5M2 as a view in torch's type; ValueError for other codes."""
    check_elem_dtype(elem_dtype)
    if elem_dtype not in _FLOAT8 or codes.dtype != torch.uint8:
        raise ValueError(
            f"codes must be uint8 of one of {tuple(_FLOAT8)}, got {codes.dtype} of {elem_dtype!r}"
        )
    return codes.view(_FLOAT8[elem_dtype])


def _check_shape(operator: str, name: str, x: Tensor, block: Block, offsets: Tensor | None) -> None:
    """Refuse what has too few dims for its blocks and offsets, and offsets that do not fit."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{operator}: {name} must be a tensor, got {type(x).__name__}")
    fewest = 1 if offsets is None and block[0] == 1 else 2
    if x.dim() < fewest:
        raise ValueError(
            f"{operator}: {name} must have at least {fewest} dims for blocks {block}"
            f"{'' if offsets is None else ' and offsets'}, got {tuple(x.shape)}"
        )
    if offsets is not None:
        check_packed_offsets(operator, name, x, offsets)


def _check_dtype(x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise NotImplementedError(f"{_QUANTIZE}: no kernel reads float64")
    if x.dtype not in _FLOAT_TYPES:
        raise ValueError(
            f"{_QUANTIZE}: x {tuple(x.shape)} must have one of the dtypes {_FLOAT_TYPES}, got "
            f"{x.dtype}"
        )


def _refuse_jagged_rows(x: Tensor, hadamard: int | None, layout: ScaleLayout) -> None:
    """What nobody has defined for blocks along the rows of sequences."""
    if hadamard is not None:
        raise NotImplementedError(
            f"{_QUANTIZE}: no hadamard {hadamard} along the rows of a jagged tensor "
            f"{tuple(x.shape)}"
        )
    if layout != "plain":
        raise NotImplementedError(
            f"{_QUANTIZE}: no scale_layout {layout!r} along the rows of a jagged tensor "
            f"{tuple(x.shape)}"
        )


def _check_hadamard(x: Tensor, block: Block, size: int | None, seed: int | None) -> None:
    """Refuse a transform that has no seed or does not fit, and a seed of none."""
    if size is None:
        if seed is not None:
            raise ValueError(
                f"{_QUANTIZE}: without hadamard no seed of signs is used, got {seed!r}"
            )
        return
    check_seed(seed)
    if block == SQUARE:
        raise ValueError(f"{_QUANTIZE}: hadamard {size} has no dim to lie along in blocks {block}")
    dim = -1 if block == ALONG_COLUMNS else -2
    if x.shape[dim] % size:
        raise ValueError(
            f"{_QUANTIZE}: dim {dim} of x {tuple(x.shape)} must be a multiple of {size}"
        )


def _scales_shape(x: Tensor, block: Block, batch: int | None) -> tuple[int, ...]:
    """Shape of the plain scales of x; batch is None for a dense tensor."""
    blocks = -(-x.shape[-1] // block[1])
    if x.dim() == 1:
        return (blocks,)
    if batch is None:
        return (*x.shape[:-2], scale_rows_of(x.shape[-2], None, block[0]), blocks)
    return (scale_rows_of(x.shape[0], batch, block[0]), *x.shape[1:-1], blocks)


def _outputs(
    x: Tensor, offsets: Tensor | None, block: Block, swizzled: bool
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x, not filled."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    if not swizzled:
        batch = None if offsets is None else offsets.shape[0] - 1
        return codes, codes.new_empty(_scales_shape(x, block, batch))
    if x.dim() == 1:
        return codes, codes.new_empty(swizzled_shape(block, 1, x.shape[0]))
    leading, rows = (x.shape[:-2], x.shape[-2]) if offsets is None else (x.shape[1:-1], x.shape[0])
    return codes, codes.new_empty(*leading, *swizzled_shape(block, rows, x.shape[-1]))


def _scale_views(scales: Tensor, offsets: Tensor | None, flat: bool, swizzled: bool) -> Tensor:
    """Scales as `[matrices, rows, blocks]`, as `Matrices.of` sees their tensor."""
    if swizzled:
        return scales.view(-1, *scales.shape[-2:])
    return Matrices.of(scales, offsets, flat).tensor


def _quantize(
    x: Tensor,
    offsets: Tensor | None,
    elem_dtype: str,
    block: list[int],
    scale_mode: str,
    seed: int | None,
    stream: int,
    hadamard: int | None,
    hadamard_seed: int,
    swizzled: bool,
) -> tuple[Tensor, Tensor]:
    """Arguments as `mx_quantize` has checked them, but for the offsets' values."""
    require_device(_QUANTIZE, x)
    if offsets is not None:
        check_values_of_offsets(_QUANTIZE, offsets, x.shape[0], None, False)
    form = Format(
        cast(ElemDtype, elem_dtype), (block[0], block[1]), cast(ScaleMode, scale_mode), seed,
        stream, hadamard, hadamard_seed, swizzled,
    )  # fmt: skip
    codes, scales = _outputs(x, offsets, form.block, swizzled)
    if not x.numel():
        return codes, scales.zero_()
    # Rows of one matrix are as good as of many where nothing spans two of them.
    flat = form.block[0] == 1 and not swizzled
    with torch.cuda.device_of(x):
        launch_quantize(
            Matrices.of(x, offsets, flat),
            Matrices.of(codes, offsets, flat),
            _scale_views(scales, offsets, flat, swizzled),
            form,
        )
    return codes, scales


def _quantize_fake(
    x: Tensor,
    offsets: Tensor | None,
    elem_dtype: str,
    block: list[int],
    scale_mode: str,
    seed: int | None,
    stream: int,
    hadamard: int | None,
    hadamard_seed: int,
    swizzled: bool,
) -> tuple[Tensor, Tensor]:
    return _outputs(x, offsets, (block[0], block[1]), swizzled)


def _dequantize(
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    elem_dtype: str,
    block: list[int],
    dtype: torch.dtype,
) -> Tensor:
    """Arguments as `mx_dequantize` has checked them, but for values of offsets and codes."""
    require_device(_DEQUANTIZE, codes)
    if offsets is not None:
        check_values_of_offsets(_DEQUANTIZE, offsets, codes.shape[0], None, False)
    name, shape = cast(ElemDtype, elem_dtype), (block[0], block[1])
    check_codes(_DEQUANTIZE, codes, name)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if not codes.numel():
        return out
    flat = shape[0] == 1
    with torch.cuda.device_of(codes):
        launch_dequantize(
            Matrices.of(codes, offsets, flat),
            _scale_views(scales.contiguous(), offsets, flat, False),
            Matrices.of(out, offsets, flat),
            name,
            shape,
        )
    return out


def check_codes(operator: str, codes: Tensor, elem_dtype: ElemDtype) -> None:
    """Refuse codes of too many bits; not while a CUDA graph is captured, whose warm-up did."""
    width = ELEMENTS[elem_dtype].width
    if width == 8 or not codes.numel():
        return
    if codes.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    most = int(codes.max())
    if most >> width:
        raise ValueError(
            f"{operator}: codes of {elem_dtype} must be below {1 << width}, got {most}"
        )


def _dequantize_fake(
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    elem_dtype: str,
    block: list[int],
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


_quantize_op: Any = define("mx_quantize", _quantize, _quantize_fake)
_dequantize_op: Any = define("mx_dequantize", _dequantize, _dequantize_fake)
