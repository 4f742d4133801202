"""Second oracles of the MX formats: tables, rationals and searches. No code of `reference/`."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

#: Element type -> exponent bits, mantissa bits, bias, largest finite value.
LAYOUTS = {"e4m3": (4, 3, 7, 448), "e5m2": (5, 2, 15, 57344), "e2m1": (2, 1, 1, 6)}
ELEM_DTYPES = tuple(LAYOUTS)
MODES = ("rceil", "floor", "ceil", "even")


def value_of(code: int, elem_dtype: str) -> Fraction | float:
    """Value of a code by the standards' text: NaN, infinities and signed zeros are floats."""
    exponent_bits, mantissa_bits, bias, _ = LAYOUTS[elem_dtype]
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    exponent = (code >> mantissa_bits) % 2**exponent_bits
    mantissa = code % 2**mantissa_bits
    last = exponent == 2**exponent_bits - 1
    if elem_dtype == "e4m3" and last and mantissa == 7:
        return math.nan
    if elem_dtype == "e5m2" and last:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        small = Fraction(mantissa, 2**mantissa_bits) * Fraction(2) ** (1 - bias)
        return sign * small if mantissa else sign * 0.0
    return sign * (1 + Fraction(mantissa, 2**mantissa_bits)) * Fraction(2) ** (exponent - bias)


def table(elem_dtype: str) -> Tensor:
    """Value of every code, float64."""
    exponent_bits, mantissa_bits, _, _ = LAYOUTS[elem_dtype]
    codes = range(2 ** (1 + exponent_bits + mantissa_bits))
    return torch.tensor([float(value_of(code, elem_dtype)) for code in codes], dtype=torch.float64)


def nearest_codes(x: Tensor, elem_dtype: str) -> Tensor:
    """Code of the finite value nearest to each finite x, the even code of two: by search."""
    values = table(elem_dtype)
    half = len(values) // 2
    finite = values[:half][values[:half].isfinite()]
    flat = x.to(torch.float64).flatten()
    # Beyond twice the largest value every distance would round to x itself.
    distance = (flat.abs().clamp(max=2 * finite.max())[:, None] - finite).abs()
    best = distance.min(1, keepdim=True).values
    # Of the codes at the least distance (at most two, neighbours), the even one.
    codes = torch.arange(len(finite))
    found = torch.where(distance == best, codes + 1000 * (codes % 2), 10**6).min(1).values % 1000
    return (found + half * torch.signbit(flat)).view(x.shape).to(torch.uint8)


def floor_log2(a: Fraction) -> int:
    """Largest e with 2^e <= a, for a > 0."""
    e = a.numerator.bit_length() - a.denominator.bit_length()
    return e if Fraction(2) ** e <= a else e - 1


def ceil_log2(a: Fraction) -> int:
    """Smallest e with 2^e >= a, for a > 0."""
    e = floor_log2(a)
    return e if Fraction(2) ** e == a else e + 1


def scale_code(largest: float, elem_dtype: str, mode: str) -> int:
    """E8M0 code of a block's largest magnitude, in rationals."""
    if not math.isfinite(largest):
        return 255
    if largest == 0:
        return 0
    _, mantissa_bits, _, largest_element = LAYOUTS[elem_dtype]
    a = Fraction(largest)
    top = floor_log2(Fraction(largest_element))
    if mode == "rceil":
        e = ceil_log2(a / largest_element)
    elif mode == "floor":
        e = floor_log2(a) - top
    elif mode == "ceil":
        e = ceil_log2(a) - top
    else:
        step = Fraction(2) ** (floor_log2(a) - mantissa_bits)
        e = floor_log2(round(a / step) * step) - top  # round() of a rational: ties to even
    return min(max(e + 127, 0), 254)


def quantized(x: Tensor, elem_dtype: str, block: tuple[int, int], mode: str = "rceil") -> Tensor:
    """What x `[rows, columns]` (finite) becomes, float64; one scale after the other."""
    scales = torch.zeros(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], block[0]):
        for j in range(0, x.shape[1], block[1]):
            own = (slice(i, i + block[0]), slice(j, j + block[1]))
            scales[own] = 2.0 ** (scale_code(x[own].abs().max().item(), elem_dtype, mode) - 127)
    return table(elem_dtype)[nearest_codes(x.double() / scales, elem_dtype).long()] * scales


def snr(found: Tensor, wanted: Tensor) -> float:
    """Signal-to-noise ratio in dB."""
    noise = (found.detach().double() - wanted.detach().double()).square().sum()
    return float(10 * torch.log10(wanted.detach().double().square().sum() / noise))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers of a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
