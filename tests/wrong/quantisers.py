"""Wrong MX quantisers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wrong import quantising
from wrong.quantising import NAN, Job
from wrong.right import RIGHT, Steps

# -- scales ----------------------------------------------------------------------------------------


def _by_mode(called: str, used: str) -> Callable[[Job, Tensor], Tensor]:
    def scale(job: Job, peak: Tensor) -> Tensor:
        mode = used if job.scale_mode == called else job.scale_mode
        return quantising.scale(replace(job, scale_mode=mode), peak)

    return scale


#: The rule of the OCP text, under which the largest numbers saturate, passed as RCEIL.
takes_floor_for_rceil = replace(RIGHT, scale_of_blocks=_by_mode("rceil", "floor"))
#: RCEIL whatever was asked for.
takes_rceil_for_floor = replace(RIGHT, scale_of_blocks=_by_mode("floor", "rceil"))
#: EVEN does not round before it takes the exponent.
takes_floor_for_even = replace(RIGHT, scale_of_blocks=_by_mode("even", "floor"))


def _one_more(job: Job, peak: Tensor) -> Tensor:
    code = quantising.scale(job, peak)
    return torch.where((code > 0) & (code < 254), code + 1, code)


#: Every scale is twice as large: codes lose a bit.
scale_off_by_one = replace(RIGHT, scale_of_blocks=_one_more)


def _logarithm(job: Job, peak: Tensor) -> Tensor:
    if job.scale_mode != "rceil":
        return quantising.scale(job, peak)
    exponent = torch.log2(peak.float() / job.largest).ceil() + 127
    code = exponent.nan_to_num(0, 0, 0).clamp(0, 254).long()
    return torch.where(peak.isfinite(), code, NAN)


#: RCEIL by a float32 logarithm, which rounds to a whole number beside a boundary.
takes_a_logarithm = replace(RIGHT, scale_of_blocks=_logarithm)


def _cast(job: Job, peak: Tensor) -> Tensor:
    if job.scale_mode != "rceil":
        return quantising.scale(job, peak)
    code = (peak.float() / job.largest).to(torch.float8_e8m0fnu).view(torch.uint8).long()
    return torch.where(peak.isfinite(), code, NAN)


#: RCEIL by torch's cast to E8M0, which rounds to the nearest power of two.
casts_scales_with_torch = replace(RIGHT, scale_of_blocks=_cast)


def _one_for_zeros(job: Job, peak: Tensor) -> Tensor:
    return torch.where(peak == 0, 127, quantising.scale(job, peak))


#: A block of zeros has the scale 1.
gives_zeros_the_scale_one = replace(RIGHT, scale_of_blocks=_one_for_zeros)


def _tensorwise(job: Job, x: Tensor) -> Tensor:
    peaks = quantising.largest(job, x)
    return peaks.amax((-2, -1), keepdim=True).expand(peaks.shape) if peaks.numel() else peaks


#: One scale for the whole matrix, as tensor-wise FP8 has it.
one_scale_for_all = replace(RIGHT, largest=_tensorwise)


def _swallowing(job: Job, x: Tensor) -> Tensor:
    return quantising.largest(job, x.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))


#: A maximum that ignores NaN.
swallows_nan = replace(RIGHT, largest=_swallowing)


def _capped(job: Job, peak: Tensor) -> Tensor:
    return quantising.scale(job, peak.nan_to_num(nan=math.nan, posinf=3.4e38))


#: An infinity counts as the largest number.
takes_infinity_for_a_number = replace(RIGHT, scale_of_blocks=_capped)

# -- blocks ----------------------------------------------------------------------------------------


def _into_the_next_row(job: Job, x: Tensor) -> Tensor:
    missing = -x.shape[-1] % job.block[1]
    if job.block[0] > 1 or not missing:
        return quantising.largest(job, x)
    return quantising.largest(job, torch.cat([x, x.roll(-1, -2)[..., :missing]], -1))


#: The short last block of a row takes the first numbers of the next row for its own.
straddles_rows = replace(RIGHT, largest=_into_the_next_row)


def _into_the_next_sequence(job: Job, bounds: list[int], sequence: int) -> tuple[int, int]:
    start, stop = bounds[sequence : sequence + 2]
    return start, min(bounds[-1], start - (start - stop) // job.block[0] * job.block[0])


#: The short last block of a sequence takes the first rows of the next for its own.
straddles_sequences = replace(RIGHT, reach=_into_the_next_sequence)


def _side_by_side(job: Job, bounds: list[int], sequence: int) -> int:
    if job.block[0] == 1:
        return bounds[sequence]
    before = itertools.pairwise(bounds[: sequence + 1])
    return sum(-((start - stop) // job.block[0]) for start, stop in before)


#: Scales of sequences lie side by side, not where the offsets say.
packs_scales_side_by_side = replace(RIGHT, scale_row=_side_by_side)


def _garbage(shape: Any, like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full(tuple(shape), 0x5A, dtype=dtype, device=like.device)


#: What lies past the last offset, and scales of no block, are never written.
leaves_padding_unwritten = replace(RIGHT, allocate=_garbage)


def _first_along_rows(job: Job, x: Tensor) -> Tensor:
    if job.block != (32, 32):
        return x
    rows = replace(job, block=(1, 32), seed=None)
    codes, scales = quantising.quantise(RIGHT, rows, x, x, torch.zeros(x.shape[:-1]))
    return quantising.dequantise(rows, codes, scales)


class _Twice(Steps):
    """Squares are made of what was quantised along the rows before."""

    def mx_quantize(self, x: Tensor, offsets: Tensor | None = None, **options: Any) -> Any:
        """Codes and scales of x."""
        if options.get("block") == (32, 32) and x.dim() == 2 and x.isfinite().all():
            job = Job(options.get("elem_dtype", "e4m3"), (32, 32), "rceil", None)
            x = _first_along_rows(job, x.double())
        return super().mx_quantize(x, offsets, **options)


#: The transpose is quantised again, in place of turning codes and scales.
requantises_for_squares = _Twice()

# -- rounding --------------------------------------------------------------------------------------


def _to_nearest_by(rule: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor | None], Tensor]:
    return lambda places, bits: rule(places) if bits is None else quantising.nearest(places, bits)


#: Bits are cut off in place of rounded.
truncates = replace(RIGHT, round_places=_to_nearest_by(torch.floor))
#: Ties go away from 0.
rounds_ties_away = replace(RIGHT, round_places=_to_nearest_by(lambda x: (x + 0.5).floor()))

_Rule = Callable[[Tensor, Tensor], Tensor]


def _by_chance(rule: _Rule) -> Callable[[Tensor, Tensor | None], Tensor]:
    return lambda places, bits: places.round() if bits is None else rule(places, bits)


#: Stochastic rounding that never goes up.
stochastic_goes_down = replace(RIGHT, round_places=_by_chance(lambda x, _: x.floor()))
#: Stochastic rounding that never goes down.
stochastic_goes_up = replace(RIGHT, round_places=_by_chance(lambda x, _: x.ceil()))
#: Stochastic rounding that rounds to nearest.
stochastic_is_nearest = replace(RIGHT, round_places=_by_chance(lambda x, _: x.round()))
#: Up or down with equal chance, wherever the number lies.
tosses_a_coin = replace(
    RIGHT,
    round_places=_by_chance(lambda x, bits: torch.where(bits % 2 == 0, x.floor(), x.ceil())),
)
#: Eight random bits: what is less than 1/256 of a step never goes up.
draws_eight_bits = replace(
    RIGHT,
    round_places=_by_chance(lambda x, bits: (x + (bits >> 24) / 256).floor()),
)
#: Noise of two steps: unbiased, but beyond the neighbours.
dithers_over_two_steps = replace(
    RIGHT,
    round_places=_by_chance(lambda x, bits: (x + 2 * (bits / 2.0**32) - 0.5).floor().clamp(min=0)),
)


def _of_seed(change: Callable[[int], int]) -> Callable[[int, Tensor, int], Tensor]:
    return lambda seed, rows, columns: quantising.draw(change(seed), rows, columns)


#: The same bits whatever the seed.
ignores_the_seed = replace(RIGHT, draw=_of_seed(lambda seed: 0))
#: Only the low half of the seed is used.
halves_the_seed = replace(RIGHT, draw=_of_seed(lambda seed: seed % 2**32))


def _global(seed: int, rows: Tensor, columns: int) -> Tensor:
    return torch.randint(0, 2**32, (*rows.shape, columns))


#: Bits of torch's own generator, which nobody has seeded.
draws_from_the_global_generator = replace(RIGHT, draw=_global)


def _same_rows(seed: int, rows: Tensor, columns: int) -> Tensor:
    return quantising.draw(seed, torch.zeros_like(rows), columns)


#: Every row has the same bits.
repeats_the_bits_of_a_row = replace(RIGHT, draw=_same_rows)


def _from_each_start(rows: Tensor, bounds: list[int]) -> Tensor:
    numbers = rows.clone()
    for start, stop in itertools.pairwise(bounds):
        numbers[start:stop] -= rows[start : start + 1].flatten()[0] if start < stop else 0
    return numbers


#: Rows are counted from the start of their sequence: all sequences have the same bits.
counts_rows_from_each_sequence = replace(RIGHT, number=_from_each_start)

# -- elements --------------------------------------------------------------------------------------

#: What is too large becomes NaN or infinity.
saturates_to_nan = replace(RIGHT, saturate=lambda job, x: x)


def _without_subnormals(job: Job, value: Tensor) -> Tensor:
    return quantising.encode(job, torch.where(value.abs() < 2.0**job.smallest, 0 * value, value))


#: Subnormal elements are 0.
flushes_subnormals = replace(RIGHT, encode=_without_subnormals)
#: Minus 0 is plus 0.
loses_the_sign_of_zero = replace(
    RIGHT, encode=lambda job, value: quantising.encode(job, value + 0.0)
)

# -- the way back and the contract -----------------------------------------------------------------


class _ReadsStrays(Steps):
    """A way back that looks at every byte of the scales."""

    def mx_dequantize(
        self, codes: Tensor, scales: Tensor, offsets: Tensor, *, block: tuple[int, int]
    ) -> Tensor:
        """Numbers of the codes, NaN where any scale byte is NaN."""
        found: Tensor = super().mx_dequantize(codes, scales, offsets, block=block)
        return found + (math.nan if bool((scales == NAN).any()) else 0.0)


#: A scale byte that belongs to no block makes everything NaN.
reads_scales_of_no_block = _ReadsStrays()


def _no_check(x: Any, offsets: Tensor | None, job: Job, rounding: str) -> None:
    """Nothing is refused."""


#: Nothing is refused.
accepts_any_quantisation = replace(RIGHT, check_quantize=_no_check)


class _InPlace(Steps):
    """A quantiser that scales its argument in place."""

    def mx_quantize(self, x: Tensor, offsets: Tensor | None = None, **options: Any) -> Any:
        """Codes and scales of x, which is halved afterwards."""
        found = super().mx_quantize(x, offsets, **options)
        x.detach().mul_(0.5)
        return found


#: X is another after the call.
scales_x_in_place = _InPlace()
