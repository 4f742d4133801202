"""Blocks of 32 with one E8M0 scale: the scale of each mode, elements under it, and back.

All of it on tensors `[..., rows, columns]` cut from their first row and column; the last block of
either dim may be short, and what it lacks has no part in its scale. Sources: OCP Microscaling
Formats Specification, version 1.0, section 6.3 (FLOOR); arXiv 2506.08027, algorithm 1 (RCEIL);
torchao's MX formats (the names, CEIL and EVEN).

torchao 0.18 differs at three edges: an infinity saturates there under scale code 254 (RCEIL, as
hardware's conversion has it) or 247, and has 255 here; under scale code 0 its elements belong to
another scale than 2^-127; its RCEIL rounds a logarithm, so that the float32 above 448 2^100
saturates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from jagbench.mx import (
    LARGEST_SCALE_CODE,
    NAN_SCALE_CODE,
    SCALE_BIAS,
    Block,
    ElemDtype,
    ScaleMode,
    check_block,
    check_elem_dtype,
    check_scale_mode,
)
from jagbench.reference.mx_formats import (
    Format,
    decode,
    decode_scales,
    encode,
    format_of,
    power_of_two,
)

_FRACTION_BITS = 52  # of a float64


@dataclass(frozen=True)
class Blocks:
    """A block format: element type, shape of a block, rule of its scale.

    Raises ValueError for an unknown one of them.
    """

    elem_dtype: ElemDtype
    block: Block
    scale_mode: ScaleMode = "rceil"

    def __post_init__(self) -> None:
        check_elem_dtype(self.elem_dtype)
        check_block(self.block)
        check_scale_mode(self.scale_mode)

    def count(self, rows: int, columns: int) -> tuple[int, int]:
        """Blocks in each dim of a matrix, short ones too."""
        return -(-rows // self.block[0]), -(-columns // self.block[1])


def scale_codes(largest: Tensor, elem_dtype: ElemDtype, scale_mode: ScaleMode) -> Tensor:
    """E8M0 code of every block's largest magnitude (any float dtype), uint8.

    With a = largest, emax the exponent of the element type's largest number M, exponents of

    floor  floor(log2 a) - emax (elements up to 2^(emax + 1) saturate at M)
    ceil   ceil(log2 a) - emax
    rceil  ceil(log2(a / M)), the least scale under which nothing saturates
    even   floor(log2 of a rounded to the element's mantissa bits) - emax

    clamped to [-127, 127]; all from the bits of a, so that no logarithm or quotient rounds. 0 and
    the subnormals of float32 come to code 0; infinity and NaN to 255. Raises ValueError for an
    unknown element type or mode.
    """
    check_scale_mode(scale_mode)
    form = format_of(elem_dtype)
    bits = largest.to(torch.float64).view(torch.int64)
    fraction = bits & ((1 << _FRACTION_BITS) - 1)
    exponent = ((bits >> _FRACTION_BITS) & 0x7FF) - 1023
    code = exponent - form.largest_exponent + SCALE_BIAS
    code = code + (fraction > _keeps_exponent(form, scale_mode)).to(torch.int64)
    code = code.clamp(0, LARGEST_SCALE_CODE)
    return torch.where(largest.isfinite(), code, NAN_SCALE_CODE).to(torch.uint8)


def _keeps_exponent(form: Format, scale_mode: ScaleMode) -> int:
    """Largest fraction field of a float64 at which a mode does not add 1 to the exponent."""
    one = 1 << _FRACTION_BITS
    if scale_mode == "rceil":
        return int(form.largest_fraction * one)
    if scale_mode == "ceil":
        return 0
    # From half a step below the next power of two on, rounding carries into the exponent.
    return one - 1 - (one >> (form.mantissa_bits + 1) if scale_mode == "even" else 0)


def block_maxima(x: Tensor, block: Block) -> Tensor:
    """Largest magnitude of every block of x `[..., rows, columns]`; NaN in a block prevails."""
    rows, columns = block
    missing = (-x.shape[-2] % rows, -x.shape[-1] % columns)
    whole = functional.pad(x.abs(), (0, missing[1], 0, missing[0]))
    count = (whole.shape[-2] // rows, whole.shape[-1] // columns)
    return whole.reshape(*x.shape[:-2], count[0], rows, count[1], columns).amax((-3, -1))


def spread(scales: Tensor, block: Block, rows: int, columns: int) -> Tensor:
    """The scale of every element, `[..., rows, columns]`, from one a block."""
    tall = scales.repeat_interleave(block[0], -2)[..., :rows, :]
    return tall.repeat_interleave(block[1], -1)[..., :columns]


def elements(x: Tensor, scales: Tensor, blocks: Blocks, random: Tensor | None = None) -> Tensor:
    """Codes of x under given scales `[..., row blocks, column blocks]`; `encode` has `random`.

    Every element of a block whose scale is NaN has the code of NaN.
    """
    wide = spread(scales.to(torch.int64), blocks.block, x.shape[-2], x.shape[-1])
    scaled = x.to(torch.float64) * power_of_two(SCALE_BIAS - wide)
    scaled = scaled.masked_fill(wide == NAN_SCALE_CODE, torch.nan)
    return encode(scaled, blocks.elem_dtype, random)


def quantize(x: Tensor, blocks: Blocks, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes like x `[..., rows, columns]` and scales `[..., row blocks, column blocks]`, uint8."""
    scales = scale_codes(block_maxima(x, blocks.block), blocks.elem_dtype, blocks.scale_mode)
    return elements(x, scales, blocks, random), scales


def dequantize(codes: Tensor, scales: Tensor, blocks: Blocks) -> Tensor:
    """Value of every code under its scale, float64."""
    wide = spread(decode_scales(scales), blocks.block, codes.shape[-2], codes.shape[-1])
    return decode(codes, blocks.elem_dtype) * wide


def rounded(x: Tensor, blocks: Blocks, random: Tensor | None = None) -> Tensor:
    """What x `[..., rows, columns]` becomes, quantised and dequantised, in its own dtype."""
    return dequantize(*quantize(x, blocks, random), blocks).to(x.dtype)
