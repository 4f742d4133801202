"""MX quantisation of dense and jagged tensors: codes and E8M0 scales, and back.

Sources: OCP Microscaling Formats (MX) Specification, version 1.0; scale modes and roundings in
`mx_blocks.py` and `mx_formats.py`. The place of a jagged tensor's scales is this project's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from jagbench.mx import (
    ALONG_COLUMNS,
    Block,
    ElemDtype,
    Rounding,
    ScaleMode,
    Stream,
    check_rounding,
)
from jagbench.reference import arguments
from jagbench.reference.draws import draws
from jagbench.reference.mx_blocks import Blocks, dequantize, quantize


def mx_quantize(
    x: Tensor,
    offsets: Tensor | None = None,
    *,
    elem_dtype: ElemDtype = "e4m3",
    block: Block = ALONG_COLUMNS,
    scale_mode: ScaleMode = "rceil",
    rounding: Rounding = "nearest",
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x `[..., rows, columns]`, written from the definition.

    x: float64, float32, float16 or bfloat16; every value is taken exactly. One dim is one row.
    offsets: `[batch + 1]` packs the first dim of x `[total, ..., columns]`, which then are the
        rows: no block crosses from one sequence into the next. None: the dim before the last.
    elem_dtype: "e4m3", "e5m2" or "e2m1".
    block: (1, 32) along the columns, (32, 1) along the rows, (32, 32) squares.
    scale_mode: "rceil", "floor", "ceil" or "even" (`mx_blocks.scale_codes`).
    rounding: "nearest", ties to even; "stochastic", unbiased, by the random bits that
        `draws.draws` gives a seed, a row (counted over all leading dims) and a column.
    seed: of the stochastic rounding, whole, from 0 to 2^63 - 1; None otherwise.

    Returns codes uint8 like x (one E2M1 code a byte) and scales uint8, x's shape with the blocked
    dims divided and rounded up. Elements saturate. A block of zeros has scale code 0; one with a
    NaN or an infinity has scale code 255 and codes of NaN. With offsets, blocks of 32 rows have
    their scales in `[total // 32 + batch, ..., column blocks]`: block b of sequence i in row
    offsets[i] // 32 + i + b, which no other block has. All other rows, and everything past the last
    offset, are 0. Raises ValueError for arguments that do not fit, with their numbers.
    """
    blocks = Blocks(elem_dtype, block, scale_mode)
    check_rounding(rounding, seed)
    _check_shape("x", x, block, offsets)
    if x.dtype not in arguments.DTYPES:
        raise ValueError(f"x must have one of the dtypes {arguments.DTYPES}, got {x.dtype}")
    random = None if seed is None else random_bits(x, seed, Stream.QUANTISE)
    if offsets is None:
        codes, scales = quantize(_matrix(x), blocks, None if random is None else _matrix(random))
        return codes.view(x.shape), scales[0] if x.dim() == 1 else scales
    lengths = arguments.sequence_lengths("x", offsets, x.shape[0], None, called="offsets")
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    scales = codes.new_zeros(_scales_shape(x, blocks, len(lengths)))
    for rows, scale_rows in _sequences(lengths, block):
        bits = None if random is None else random[rows].movedim(0, -2)
        own_codes, own_scales = quantize(x[rows].movedim(0, -2), blocks, bits)
        codes[rows] = own_codes.movedim(-2, 0)
        scales[scale_rows] = own_scales.movedim(-2, 0)
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
    """Values of codes and scales as `mx_quantize` returns them: 2^(scale - 127) element.

    Exact wherever dtype holds the value. A block of scale code 255 is NaN; code 0 is 2^-127. Scales
    that belong to no block are not read; rows past the last offset are 0. Raises ValueError for
    arguments that do not fit, with their numbers.
    """
    blocks = Blocks(elem_dtype, block)
    _check_shape("codes", codes, block, offsets)
    batch = 0
    lengths: Sequence[int] = []
    if offsets is not None:
        lengths = arguments.sequence_lengths("codes", offsets, codes.shape[0], None, "offsets")
        batch = len(lengths)
    wanted = _scales_shape(codes, blocks, None if offsets is None else batch)
    if tuple(scales.shape) != wanted:
        raise ValueError(
            f"scales of codes {tuple(codes.shape)} in blocks {block} must be {wanted}, "
            f"got {tuple(scales.shape)}"
        )
    if offsets is None:
        own = scales[None] if scales.dim() == 1 else scales
        return dequantize(_matrix(codes), own, blocks).view(codes.shape).to(dtype)
    out = torch.zeros(codes.shape, dtype=dtype, device=codes.device)
    for rows, scale_rows in _sequences(lengths, block):
        own_codes, own = codes[rows].movedim(0, -2), scales[scale_rows].movedim(0, -2)
        out[rows] = dequantize(own_codes, own, blocks).movedim(-2, 0).to(dtype)
    return out


def mx_requantize(
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    *,
    elem_dtype: ElemDtype = "e4m3",
    block: Block = ALONG_COLUMNS,
    to_elem_dtype: ElemDtype = "e4m3",
    to_block: Block = ALONG_COLUMNS,
    scale_mode: ScaleMode = "rceil",
) -> tuple[Tensor, Tensor]:
    """Codes and scales of the values of others, rounded to nearest; arguments as `mx_quantize`.

    In the same format the values come back bit for bit. So do the codes in mode "floor"; in "rceil"
    a block whose largest element is half of M or less has its scale one lower and elements twice as
    large (M is the largest number of the element type).
    """
    values = mx_dequantize(
        codes, scales, offsets, elem_dtype=elem_dtype, block=block, dtype=torch.float64
    )
    return mx_quantize(
        values, offsets, elem_dtype=to_elem_dtype, block=to_block, scale_mode=scale_mode
    )


def random_bits(x: Tensor, seed: int, stream: Stream) -> Tensor:
    """32 random bits for every element of x `[..., columns]`; rows count over all leading dims."""
    rows = torch.arange(x.shape[:-1].numel(), device=x.device).view(x.shape[:-1])
    return draws(seed, rows, x.shape[-1], stream)


def _matrix(x: Tensor) -> Tensor:
    return x[None] if x.dim() == 1 else x


def _check_shape(name: str, x: Tensor, block: Block, offsets: Tensor | None) -> None:
    """Refuse what has too few dims for its blocks and offsets, or offsets elsewhere."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    fewest = 1 if offsets is None and block[0] == 1 else 2
    if x.dim() < fewest:
        raise ValueError(
            f"{name} must have at least {fewest} dims for blocks {block}"
            f"{'' if offsets is None else ' and offsets'}, got {tuple(x.shape)}"
        )
    if isinstance(offsets, Tensor) and offsets.device != x.device:
        raise ValueError(f"offsets are on {offsets.device}, {name} on {x.device}")


def _scales_shape(x: Tensor, blocks: Blocks, batch: int | None) -> tuple[int, ...]:
    """Shape of the scales of x; batch is None for a dense tensor."""
    if x.dim() == 1:
        return (blocks.count(1, x.shape[0])[1],)
    if batch is None:
        return (*x.shape[:-2], *blocks.count(x.shape[-2], x.shape[-1]))
    tall = blocks.block[0]
    rows = x.shape[0] if tall == 1 else x.shape[0] // tall + batch
    return (rows, *x.shape[1:-1], blocks.count(1, x.shape[-1])[1])


def _sequences(lengths: Sequence[int], block: Block) -> Iterator[tuple[slice, slice]]:
    """Rows of every sequence, and the rows of its scales."""
    start = 0
    for i, length in enumerate(lengths):
        first = start if block[0] == 1 else start // block[0] + i
        yield slice(start, start + length), slice(first, first + -(-length // block[0]))
        start += length
