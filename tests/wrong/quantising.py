"""The steps of a right MX quantiser, by float64 arithmetic; each may be exchanged.

Matrices are `[..., rows, columns]`. Independent of the reference, which goes by bits.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

NAN = 255
#: Element type -> mantissa bits, smallest exponent, largest number, code of NaN, sign bit.
_FORMATS = {
    "e4m3": (3, -6, 448.0, 0x7F, 0x80),
    "e5m2": (2, -14, 57344.0, 0x7F, 0x80),
    "e2m1": (1, 0, 6.0, 0x07, 0x08),
}


@dataclass(frozen=True)
class Job:
    """One call, without its tensors."""

    elem_dtype: str
    block: tuple[int, int]
    scale_mode: str
    seed: int | None

    @property
    def mantissa_bits(self) -> int:
        """Bits behind the leading one."""
        return _FORMATS[self.elem_dtype][0]

    @property
    def smallest(self) -> int:
        """Exponent of the smallest normal number."""
        return _FORMATS[self.elem_dtype][1]

    @property
    def largest(self) -> float:
        """Largest finite number."""
        return _FORMATS[self.elem_dtype][2]

    @property
    def nan_code(self) -> int:
        """Code of NaN."""
        return _FORMATS[self.elem_dtype][3]

    @property
    def sign(self) -> int:
        """Bit of the sign."""
        return _FORMATS[self.elem_dtype][4]


def power(exponent: Tensor) -> Tensor:
    """2^exponent, float64, exactly."""
    return torch.from_numpy(np.ldexp(1.0, exponent.cpu().numpy())).to(exponent.device)


def check(x: Any, offsets: Tensor | None, job: Job, rounding: str) -> None:
    """Raise ValueError, with the numbers, for what does not fit."""
    if job.elem_dtype not in _FORMATS or job.scale_mode not in ("rceil", "floor", "ceil", "even"):
        raise ValueError(f"unknown element type {job.elem_dtype!r} or mode {job.scale_mode!r}")
    if job.block not in ((1, 32), (32, 1), (32, 32)):
        raise ValueError(f"block {job.block!r}")
    if rounding not in ("nearest", "stochastic") or (rounding == "nearest") != (job.seed is None):
        raise ValueError(f"rounding {rounding!r} with seed {job.seed}")
    if not x.is_floating_point() or x.dim() < (1 if offsets is None and job.block[0] == 1 else 2):
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}")
    if offsets is None:
        return
    if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"offsets: {offsets.dim()} dims, {offsets.dtype}")
    if offsets.device != x.device:
        raise ValueError(f"offsets on {offsets.device}, x on {x.device}")
    bounds = offsets.tolist()
    if not bounds or bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > x.shape[0]:
        raise ValueError(f"offsets {bounds} do not fit {x.shape[0]} rows")


def reach(job: Job, bounds: list[int], sequence: int) -> tuple[int, int]:
    """Rows whose numbers count for the scales of a sequence."""
    return bounds[sequence], bounds[sequence + 1]


def scale_row(job: Job, bounds: list[int], sequence: int) -> int:
    """Row of the first scale of a sequence."""
    tall = job.block[0]
    return bounds[sequence] if tall == 1 else bounds[sequence] // tall + sequence


def largest(job: Job, x: Tensor) -> Tensor:
    """Largest magnitude of every block; NaN prevails."""
    tall, wide = job.block
    whole = functional.pad(x.abs(), (0, -x.shape[-1] % wide, 0, -x.shape[-2] % tall))
    return whole.unflatten(-1, (-1, wide)).amax(-1).unflatten(-2, (-1, tall)).amax(-2)


def scale(job: Job, peak: Tensor) -> Tensor:
    """Scale code of a largest magnitude, int64."""
    part, exponent = torch.frexp(torch.where(peak.isfinite(), peak, 1.0))
    limit, top = math.frexp(job.largest)
    steps = 2.0 ** (job.mantissa_bits + 1)
    up = {
        "rceil": part > limit,
        "floor": torch.zeros_like(part),
        "ceil": part > 0.5,
        "even": (part * steps).round() == steps,
    }[job.scale_mode]
    code = exponent.long() - top + up.long() + 127
    code = torch.where(peak == 0, 0, code.clamp(0, 254))
    return torch.where(peak.isfinite(), code, NAN)


def draw(seed: int, rows: Tensor, columns: int) -> Tensor:
    """32 random bits for every row and column, int64: Philox-4x32-10."""
    word, mask = np.uint64, np.uint64(0xFFFFFFFF)
    row = rows.cpu().numpy().astype(word)[..., None]
    count = [
        np.arange(-(-columns // 4), dtype=word) + 0 * row,
        row & mask,
        row >> word(32),
        0 * row,
    ]
    count = list(np.broadcast_arrays(*count))
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        high, low = count[0] * word(0xD2511F53), count[2] * word(0xCD9E8D57)
        count = [
            (low >> word(32)) ^ count[1] ^ word(key[0]), low & mask,
            (high >> word(32)) ^ count[3] ^ word(key[1]), high & mask,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    words = np.stack(count, -1).astype(np.int64)
    return torch.from_numpy(words).flatten(-2)[..., :columns].to(rows.device)


def step_of(job: Job, scaled: Tensor) -> Tensor:
    """Last place of the element near every scaled number."""
    exponent = (torch.frexp(scaled)[1] - 1).clamp(min=job.smallest) - job.mantissa_bits
    return power(exponent)


def nearest(places: Tensor, bits: Tensor | None) -> Tensor:
    """Whole number of places, to nearest, ties to even; up with the part's chance under bits."""
    if bits is None:
        return places.round()
    part = ((places - places.floor()) * 2.0**32).floor().long()
    return places.floor() + ((part + bits) >> 32)


def saturate(job: Job, magnitude: Tensor) -> Tensor:
    """Magnitudes beyond the largest number are that number."""
    return magnitude.clamp(max=job.largest)


def encode(job: Job, value: Tensor) -> Tensor:
    """Code of every number that the element type has."""
    magnitude = value.abs()
    exponent = (torch.frexp(magnitude)[1] - 1).clamp(min=job.smallest)
    normal = magnitude >= 2.0**job.smallest
    steps = (magnitude / power(exponent - job.mantissa_bits)).long() - (
        normal.long() << job.mantissa_bits
    )
    field = torch.where(normal, exponent - job.smallest + 1, 0)
    code = (field << job.mantissa_bits) + steps
    return torch.where(torch.signbit(value), code + job.sign, code)


def quantise(steps: Any, job: Job, x: Tensor, near: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of matrices x and their scales, whose numbers are those of `near`; rows: numbered."""
    scales = steps.scale_of_blocks(job, steps.largest(job, near))
    tall, wide = job.block
    scales = scales[..., : -(-x.shape[-2] // tall), :]
    each = scales.repeat_interleave(tall, -2)[..., : x.shape[-2], :]
    each = each.repeat_interleave(wide, -1)[..., : x.shape[-1]]
    finite = each != NAN
    scaled = torch.where(finite, x * power(127 - each), 0.0)
    bits = None if job.seed is None else steps.draw(job.seed, rows, x.shape[-1])
    place = step_of(job, scaled)
    magnitude = steps.saturate(job, steps.round_places(scaled.abs() / place, bits) * place)
    codes = steps.encode(job, torch.copysign(magnitude, scaled))
    return torch.where(finite, codes, job.nan_code).to(torch.uint8), scales.to(torch.uint8)


def whole(steps: Any, job: Job, x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a tensor without offsets."""
    matrices = (x[None] if x.dim() == 1 else x).double()
    rows = torch.arange(matrices.shape[:-1].numel()).view(matrices.shape[:-1])
    codes, scales = quantise(steps, job, matrices, matrices, rows)
    return codes.view(x.shape), scales[0] if x.dim() == 1 else scales


def packed(steps: Any, job: Job, x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a tensor whose first dim is packed."""
    bounds, tall = offsets.tolist(), job.block[0]
    count = x.shape[0] if tall == 1 else x.shape[0] // tall + len(bounds) - 1
    codes = steps.allocate(x.shape, x, torch.uint8)
    across = -(-x.shape[-1] // job.block[1])
    scales = steps.allocate((count, *x.shape[1:-1], across), x, torch.uint8)
    numbers = steps.number(torch.arange(x.shape[:-1].numel()).view(x.shape[:-1]), bounds)
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start == stop:
            continue
        first, last = steps.reach(job, bounds, i)
        own, near = (x[a:b].double().movedim(0, -2) for a, b in ((start, stop), (first, last)))
        found = quantise(steps, job, own, near, numbers[start:stop].movedim(0, -1))
        row = steps.scale_row(job, bounds, i)
        codes[start:stop] = found[0].movedim(-2, 0)
        scales[row : row + found[1].shape[-2]] = found[1].movedim(-2, 0)
    return codes, scales


def number(rows: Tensor, bounds: list[int]) -> Tensor:
    """Numbers of the rows, by which they draw their bits, unchanged."""
    return rows


def spread(job: Job, scales: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """Scale code of every row `[rows, ..., column blocks]`, 0 past the last offset."""
    bounds, tall = offsets.tolist(), job.block[0]
    each = scales.new_zeros(rows, *scales.shape[1:])
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        own = torch.arange(stop - start) // tall + scale_row(job, bounds, i)
        each[start:stop] = scales[own]
    return each


def dequantise(job: Job, codes: Tensor, each: Tensor) -> Tensor:
    """Numbers of codes under the scale codes of their column blocks, float64."""
    magnitude = (codes & (job.sign - 1)).long()
    field, steps = magnitude >> job.mantissa_bits, magnitude & ((1 << job.mantissa_bits) - 1)
    steps = steps + ((field > 0).long() << job.mantissa_bits)
    exponent = field.clamp(min=1) - 1 + job.smallest - job.mantissa_bits
    wide = each.long().repeat_interleave(job.block[1], -1)[..., : codes.shape[-1]]
    value = steps.double() * power(exponent + wide - 127)
    value = torch.where((codes & job.sign) > 0, -value, value)
    return torch.where(wide == NAN, math.nan, value)


class Quantiser:
    """The operator and its way back; the steps are those of the class that inherits it."""

    def mx_quantize(
        self,
        x: Tensor,
        offsets: Tensor | None = None,
        *,
        elem_dtype: str = "e4m3",
        block: tuple[int, int] = (1, 32),
        scale_mode: str = "rceil",
        rounding: str = "nearest",
        seed: int | None = None,
    ) -> Any:
        """Codes and scales of x."""
        steps: Any = self
        job = Job(elem_dtype, block, scale_mode, seed)
        steps.check_quantize(x, offsets, job, rounding)
        values = x.detach()
        if offsets is None:
            return whole(self, job, values)
        return packed(self, job, values, offsets)

    def mx_dequantize(
        self, codes: Tensor, scales: Tensor, offsets: Tensor, *, block: tuple[int, int]
    ) -> Tensor:
        """Numbers of the E4M3 codes of a packed tensor."""
        job = Job("e4m3", block, "rceil", None)
        each = spread(job, scales, offsets, codes.shape[0])
        steps: Any = self
        out: Tensor = steps.dequantise(job, codes, each).float()
        out[int(offsets[-1]) :] = 0
        return out
