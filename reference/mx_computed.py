"""The truth of codes of computed numbers, and what an order of sums leaves open.

An implementation computes in float32, so a number may come to the other side of a rounding boundary
than the truth's. The truth is float64 and bounds the error of every number; a code is right if a
number within that bound has it, and so is a scale. Where the bound holds a boundary, honest codes
are one step apart: at most `SHARE` of all may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.mx import NAN_SCALE_CODE, SCALE_BIAS, Stream
from jagbench.reference.draws import draws
from jagbench.reference.mx import random_bits
from jagbench.reference.mx_blocks import Blocks, block_maxima, quantize, scale_codes, spread
from jagbench.reference.mx_formats import encode, format_of, power_of_two
from jagbench.reference.mx_operator import Rows, blocks_of, rows_in_blocks
from jagbench.spec import CodePiece, Comparison

#: Of all codes, how many may lie a step beside the truth's; of scales, all where a bound is open.
SHARE = {"codes": 1e-3, "scales": 1.0}
#: Largest relative error of a number whose flipped code is counted.
_SOUND = 2.0**-12
#: Roundoffs of what is done with a sum, beside those of the sum.
ROUNDOFFS = 8.0

#: Of a call and rows of x: the numbers to quantise, `[rows, ..., columns]` in float64, and the
#: error that float32 (float64 for float64) may make in each.
Compute = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]


def relative_error(terms: int, dtype: torch.dtype) -> float:
    """Error of a sum of so many terms and of what follows, relative to that of their magnitudes.

    Roundings of a sum in one running total wander: by the root of their number.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return (ROUNDOFFS + math.sqrt(terms)) * torch.finfo(wide).eps / 2


@dataclass(frozen=True)
class _Truth:
    """Matrices `[..., rows, columns]` in float64 that are to be quantised.

    values, error: as `Compute` has them. bits: of stochastic rounding, or None.
    """

    values: Tensor
    error: Tensor
    bits: Tensor | None
    blocks: Blocks

    def codes(self) -> tuple[Tensor, Tensor]:
        """Codes and scales of the values themselves."""
        return quantize(self.values, self.blocks, self.bits)

    def compare(
        self, codes: Tensor, scales: Tensor, wanted: Tensor, wanted_scales: Tensor
    ) -> tuple[Comparison, Comparison]:
        """Verdict on codes and scales found; codes go by the scale found, if that is right."""
        bounds = (self.values.abs() - self.error).clamp(min=0), self.values.abs() + self.error
        low, high = (
            scale_codes(
                block_maxima(x, self.blocks.block), self.blocks.elem_dtype, self.blocks.scale_mode
            )
            for x in bounds
        )
        wrong = (scales < low) | (scales > high)
        flipped = ~wrong & (scales != wanted_scales)
        used = torch.where(wrong, wanted_scales, scales)
        rows, columns = self.values.shape[-2:]
        moved = spread(flipped, self.blocks.block, rows, columns)
        open_codes = self._open(codes, spread(used, self.blocks.block, rows, columns),
                                (codes != wanted) | moved)  # fmt: skip
        return open_codes, Comparison(wrong, flipped)

    def _open(self, codes: Tensor, scales: Tensor, asked: Tensor) -> Comparison:
        """Which of the codes asked for no number within the error has; the others are right."""
        value, error = self.values[asked], self.error[asked]
        factor = power_of_two(SCALE_BIAS - scales[asked].to(torch.int64))
        bits = None if self.bits is None else self.bits[asked]
        least, exact, most = (
            self._order(encode(x * factor, self.blocks.elem_dtype, bits))
            for x in (value - error, value, value + error)
        )
        # No contract speaks of the sign of a number that is 0: it hangs on how it came about.
        least = torch.where(value == 0, least.clamp(max=-1), least)
        most = torch.where(value == 0, most.clamp(min=0), most)
        found = self._order(codes[asked])
        wrong, flipped = torch.zeros_like(asked), torch.zeros_like(asked)
        wrong[asked] = (found < least) | (found > most)
        # Where most of a number has cancelled, a roundoff spans much: shares say nothing there.
        sound = error <= _SOUND * value.abs()
        flipped[asked] = (found != exact) & (most - least == 1) & sound
        return Comparison(wrong, flipped & ~wrong)

    def _order(self, codes: Tensor) -> Tensor:
        """Codes as int64 in the order of their values: -0 is -1, 0 is 0."""
        sign = 1 << (format_of(self.blocks.elem_dtype).bits - 1)
        wide = codes.to(torch.int64)
        return torch.where(wide >= sign, sign - 1 - wide, wide)


def pieces(inputs: Inputs, columns: int, elements: int, compute: Compute) -> Iterator[CodePiece]:
    """Codes and scales of a call, about so many elements a piece; columns: of a row of codes."""
    x, blocks, offsets = inputs.tensors()["x"], blocks_of(inputs), inputs.offsets("offsets")
    if offsets is None and x.dim() != 2:
        yield _whole(inputs, blocks, compute)
        return
    if offsets is None:
        offsets = torch.tensor([0, x.shape[0]], device=x.device)
    rows, tall = rows_in_blocks(offsets, blocks.block[0]), blocks.block[0]
    step = max(1, elements // max(1, columns) // tall) * tall
    for first in range(0, len(rows.row), step):
        yield _piece(inputs, blocks, rows.cut(first, first + step, tall), compute)


def _piece(inputs: Inputs, blocks: Blocks, rows: Rows, compute: Compute) -> CodePiece:
    x, options = inputs.tensors()["x"], inputs.options
    found = compute(inputs, x[rows.row])
    shape = found[0].shape
    filling = rows.real.view(-1, *[1] * (len(shape) - 1))
    values, error = (torch.where(filling, t, 0).movedim(0, -2) for t in found)
    bits = None
    if options.get("rounding", "nearest") == "stochastic":
        heads = math.prod(shape[1:-1])
        counted = rows.row[:, None] * heads + torch.arange(heads, device=x.device)
        drawn = draws(options["seed"], counted, shape[-1], Stream.QUANTISE)
        bits = drawn.view(shape).movedim(0, -2)
    return _piece_of(
        _Truth(values, error, bits, blocks),
        {"codes": rows.row[rows.real], "scales": rows.scale_row},
        rows.real,
    )


def _piece_of(matrices: _Truth, places: Mapping[str, Tensor], real: Tensor) -> CodePiece:
    """A piece whose rows are the last dim but one of the matrices, the first of outputs."""
    codes, scales = matrices.codes()
    free = spread(scales == NAN_SCALE_CODE, matrices.blocks.block, *codes.shape[-2:])

    def compare(found: Mapping[str, Tensor]) -> Mapping[str, Comparison]:
        rows = codes.movedim(-2, 0).clone()
        rows[real] = found["codes"]
        verdicts = matrices.compare(
            rows.movedim(0, -2), found["scales"].movedim(0, -2), codes, scales
        )
        of_codes, of_scales = (
            Comparison(v.wrong.movedim(-2, 0), v.flipped.movedim(-2, 0)) for v in verdicts
        )
        return {
            "codes": Comparison(of_codes.wrong[real], of_codes.flipped[real]),
            "scales": of_scales,
        }

    wanted = {"codes": codes.movedim(-2, 0)[real], "scales": scales.movedim(-2, 0)}
    return CodePiece(places, wanted, {"codes": free.movedim(-2, 0)[real]}, compare)


def _whole(inputs: Inputs, blocks: Blocks, compute: Compute) -> CodePiece:
    """The truth of a call without offsets on one row, or on several matrices."""
    x = inputs.tensors()["x"]
    options = inputs.options
    matrix = x[None] if x.dim() == 1 else x
    bits = None
    if options.get("rounding", "nearest") == "stochastic":
        bits = random_bits(x, options["seed"], Stream.QUANTISE).view(matrix.shape)
    matrices = _Truth(*compute(inputs, matrix), bits, blocks)
    codes, scales = matrices.codes()
    free = spread(scales == NAN_SCALE_CODE, blocks.block, *matrix.shape[-2:])
    wanted = {n: t[0] if x.dim() == 1 else t for n, t in (("codes", codes), ("scales", scales))}

    def compare(found: Mapping[str, Tensor]) -> Mapping[str, Comparison]:
        verdicts = matrices.compare(
            found["codes"].view(codes.shape), found["scales"].view(scales.shape), codes, scales
        )
        return {
            n: Comparison(v.wrong.view(wanted[n].shape), v.flipped.view(wanted[n].shape))
            for n, v in zip(("codes", "scales"), verdicts, strict=True)
        }

    places = {n: torch.arange(t.shape[0], device=t.device) for n, t in wanted.items()}
    return CodePiece(places, wanted, {"codes": free.view(x.shape)}, compare)
