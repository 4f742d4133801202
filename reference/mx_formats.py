"""E4M3, E5M2 and E2M1 bit by bit: decoding, and encoding from the bits of a float64.

float64 holds every value of float32, float16 and bfloat16, their subnormals as normal numbers, so
one rule serves all. No cast of torch is used: its casts to these types saturate in one version and
give NaN in another. Sources: OCP 8-bit Floating Point Specification, version 1.0; OCP Microscaling
Formats Specification, version 1.0, section 5.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from jagbench.mx import SCALE_BIAS, ElemDtype, check_elem_dtype

_FRACTION_BITS = 52  # of a float64
_FRACTION = (1 << _FRACTION_BITS) - 1
_BIAS = 1023
_RANDOM_BITS = 32


@dataclass(frozen=True)
class Format:
    """A float of sign, exponent and mantissa bits, with subnormals.

    largest_code: code of the largest finite magnitude. Codes of magnitudes above it are not finite.
    nan_code: code a NaN is given; E2M1 has none and gives its largest value, as PTX's cvt does.
    infinity_code: code of infinity, None where there is none.
    """

    exponent_bits: int
    mantissa_bits: int
    largest_code: int
    nan_code: int
    infinity_code: int | None = None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def smallest_exponent(self) -> int:
        """Exponent of the smallest normal number, and of every subnormal."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def largest_exponent(self) -> int:
        """Exponent of the largest finite number."""
        return (self.largest_code >> self.mantissa_bits) - 1 + self.smallest_exponent

    @property
    def largest_fraction(self) -> float:
        """What the significand of the largest finite number has beyond 1."""
        return (self.largest_code % (1 << self.mantissa_bits)) / (1 << self.mantissa_bits)

    @property
    def largest(self) -> float:
        """Largest finite number."""
        return float((1 + self.largest_fraction) * 2**self.largest_exponent)


FORMATS: Mapping[ElemDtype, Format] = {
    "e4m3": Format(4, 3, largest_code=0x7E, nan_code=0x7F),
    "e5m2": Format(5, 2, largest_code=0x7B, nan_code=0x7F, infinity_code=0x7C),
    "e2m1": Format(2, 1, largest_code=0x7, nan_code=0x7),
}


def format_of(elem_dtype: ElemDtype) -> Format:
    """The format of a name; ValueError for an unknown one."""
    check_elem_dtype(elem_dtype)
    return FORMATS[elem_dtype]


def decode(codes: Tensor, elem_dtype: ElemDtype) -> Tensor:
    """Value of every code, float64; uint8 codes of E2M1 are 0 to 15, one a byte.

    Raises ValueError for codes that are no uint8, or above 15 in E2M1.
    """
    form = format_of(elem_dtype)
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8, got {codes.dtype}")
    if form.bits < 8 and codes.numel() and int(codes.max()) >> form.bits:
        raise ValueError(f"codes of {elem_dtype} must be below {1 << form.bits}, got {codes.max()}")
    wide = codes.to(torch.int64)
    magnitude = wide & ((1 << (form.bits - 1)) - 1)
    field = magnitude >> form.mantissa_bits
    implicit = (field > 0).to(torch.int64) << form.mantissa_bits
    significand = (magnitude & ((1 << form.mantissa_bits) - 1)) + implicit
    exponent = field.clamp(min=1) - 1 + form.smallest_exponent - form.mantissa_bits
    value = significand.to(torch.float64) * power_of_two(exponent)
    value = value.masked_fill(magnitude > form.largest_code, torch.nan)
    if form.infinity_code is not None:
        value = value.masked_fill(magnitude == form.infinity_code, torch.inf)
    return torch.where(wide >> (form.bits - 1) == 1, -value, value)


def encode(x: Tensor, elem_dtype: ElemDtype, random: Tensor | None = None) -> Tensor:
    """Code of every x (any float dtype), uint8; magnitudes above the largest saturate to it.

    random: None rounds to nearest, ties to even. Else 32 random bits for every x, int64, that are
        added below the last place kept, and the sum is truncated: x goes up with a probability of
        the part cut off, rounded down to a multiple of 2^-32; what is representable stays.
    Infinity saturates too; NaN has `nan_code` with its sign.
    """
    form = format_of(elem_dtype)
    bits = x.to(torch.float64).view(torch.int64)
    field = (bits >> _FRACTION_BITS) & 0x7FF
    significand = (bits & _FRACTION) + ((field > 0).to(torch.int64) << _FRACTION_BITS)
    exponent = field.clamp(min=1) - _BIAS
    # Steps of the result's last place: 2^(max(exponent, smallest) - mantissa bits) each.
    above = (exponent - form.smallest_exponent).clamp(min=0)
    below = (form.smallest_exponent - exponent).clamp(min=0)
    steps = _round(significand, _FRACTION_BITS - form.mantissa_bits + below, random)
    # A carry into the next exponent is right by itself: the fields of a code are one number.
    magnitude = ((above << form.mantissa_bits) + steps).clamp(max=form.largest_code)
    magnitude = torch.where(x.isnan(), form.nan_code, magnitude)
    sign = (bits < 0).to(torch.int64) << (form.bits - 1)
    return (sign + magnitude).to(torch.uint8)


def _round(significand: Tensor, shift: Tensor, random: Tensor | None) -> Tensor:
    """Whole number near significand / 2^shift, for a significand below 2^53 and a shift from 49."""
    # A shift of 64 or more is undefined; from 62 on it leaves 0 and a remainder below half.
    near = shift.clamp(max=62)
    kept = significand >> near
    rest = significand - (kept << near)
    if random is not None:
        fraction = rest >> (shift - _RANDOM_BITS).clamp(max=62)
        return kept + ((fraction + random) >> _RANDOM_BITS)
    half = torch.ones_like(near) << (near - 1)
    up = (rest > half) | ((rest == half) & (kept % 2 == 1))
    return kept + up.to(torch.int64)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, float64, from its bits; int64 exponents from -1022 to 1023."""
    return ((exponent + _BIAS) << _FRACTION_BITS).view(torch.float64)


def decode_scales(scales: Tensor) -> Tensor:
    """Value of every E8M0 code, float64: 2^(code - 127), code 0 2^-127 and code 255 NaN.

    Raises ValueError for scales that are no uint8.
    """
    if scales.dtype != torch.uint8:
        raise ValueError(f"scales must be uint8, got {scales.dtype}")
    wide = scales.to(torch.int64)
    return power_of_two(wide - SCALE_BIAS).masked_fill(wide == 255, torch.nan)


def pack_e2m1(codes: Tensor) -> Tensor:
    """E2M1 codes two a byte, `[..., columns / 2]`: the even column in the low four bits.

    Raises ValueError for an odd number of columns.
    """
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise ValueError(f"codes must be uint8 in pairs, got {codes.dtype} {tuple(codes.shape)}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """E2M1 codes one a byte, `[..., 2 columns]`, from two a byte; ValueError for no uint8."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed codes must be uint8, got {packed.dtype}")
    return torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)
