"""mx_norm as an operator: its cost, and its truth in float64 with what an order of sums leaves open.

A norm is computed in float32 by an implementation, so a number may come to the other side of a
rounding boundary than the truth's. The truth bounds the error of every normalised number; a code is
right if a number within that bound has it, and so is a scale. Where the bound holds a boundary,
honest codes are one step apart: at most `SHARE` of all may be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.mx import NAN_SCALE_CODE, SCALE_BIAS, Stream
from jagbench.reference import costs
from jagbench.reference.draws import draws
from jagbench.reference.mx import random_bits
from jagbench.reference.mx_blocks import Blocks, block_maxima, quantize, scale_codes, spread
from jagbench.reference.mx_formats import encode, format_of, power_of_two
from jagbench.reference.mx_norm import mx_norm
from jagbench.reference.mx_operator import (
    Rows,
    blocks_of,
    mx_quantize_bytes,
    output_rows,
    output_shapes,
    rows_in_blocks,
)
from jagbench.spec import PLACED, SHARED, CodePiece, Codes, Comparison, Operator

#: Of all codes, how many may lie a step beside the truth's; of scales, all where a bound is open.
SHARE = {"codes": 1e-3, "scales": 1.0}
#: Largest relative error of a number whose flipped code is counted.
_SOUND = 2.0**-16
#: Roundoffs of a norm beside those of its sums: quotient, root, products, the last sum.
ROUNDOFFS = 8.0


def relative_error(features: int, dtype: torch.dtype) -> float:
    """Error of a sum of so many squares and of what follows, relative to the result.

    Roundings of a sum in one running total wander: by the root of their number.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return (ROUNDOFFS + math.sqrt(features)) * torch.finfo(wide).eps / 2


def normalised(inputs: Inputs, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x `[..., features]` behind the norm, and the error that float32 may make, in float64.

    RMSNorm: every factor is relative to the result. LayerNorm: the mean is off by a share of the
    mean magnitude a, which shifts x - mean, and the root by the square of that shift.
    """
    options, t = inputs.options, inputs.tensors()
    wide, part = x.to(torch.float64), relative_error(x.shape[-1], inputs.dtype)
    weight, bias = (t.get(name) for name in ("norm_weight", "norm_bias"))
    shift = torch.zeros_like(wide[..., :1])
    if options["norm"] == "layer":
        shift = part * wide.abs().mean(-1, keepdim=True)
        wide = wide - wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + options["eps"])
    factor = rstd if weight is None else rstd * weight.to(rstd)
    values = wide * factor
    error = values.abs() * (part + (shift * rstd).square()) + shift * factor.abs()
    if bias is not None:
        values = values + bias.to(values)
        error = error + part * bias.to(values).abs()
    return values, error


@dataclass(frozen=True)
class _Truth:
    """Matrices `[..., rows, columns]` in float64 that are to be quantised.

    values, error: as `normalised` has them. bits: of stochastic rounding, or None.
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
        """Verdict on codes and scales found; codes are those of the scale found if it is right."""
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


def truth(inputs: Inputs, elements: int) -> Iterator[CodePiece]:
    """Codes and scales of a call, about so many elements of x a piece."""
    x, blocks, offsets = inputs.tensors()["x"], blocks_of(inputs), inputs.offsets("offsets")
    if offsets is None and x.dim() != 2:
        yield _whole(inputs, blocks)
        return
    if offsets is None:
        offsets = torch.tensor([0, x.shape[0]], device=x.device)
    rows, tall = rows_in_blocks(offsets, blocks.block[0]), blocks.block[0]
    step = max(1, elements // max(1, math.prod(x.shape[1:])) // tall) * tall
    for first in range(0, len(rows.row), step):
        yield _piece(inputs, blocks, rows.cut(first, first + step, tall))


def _piece(inputs: Inputs, blocks: Blocks, rows: Rows) -> CodePiece:
    x, options = inputs.tensors()["x"], inputs.options
    filling = rows.real.view(-1, *[1] * (x.dim() - 1))
    values, error = (
        torch.where(filling, t, 0).movedim(0, -2) for t in normalised(inputs, x[rows.row])
    )
    bits = None
    if options.get("rounding", "nearest") == "stochastic":
        heads = math.prod(x.shape[1:-1])
        counted = rows.row[:, None] * heads + torch.arange(heads, device=x.device)
        drawn = draws(options["seed"], counted, x.shape[-1], Stream.QUANTISE)
        bits = drawn.view(-1, *x.shape[1:]).movedim(0, -2)
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


def _whole(inputs: Inputs, blocks: Blocks) -> CodePiece:
    """The truth of a call without offsets on one row, or on several matrices."""
    x = inputs.tensors()["x"]
    options = inputs.options
    matrix = x[None] if x.dim() == 1 else x
    bits = None
    if options.get("rounding", "nearest") == "stochastic":
        bits = random_bits(x, options["seed"], Stream.QUANTISE).view(matrix.shape)
    matrices = _Truth(*normalised(inputs, matrix), bits, blocks)
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


def mx_norm_flops(inputs: Inputs) -> int:
    """FLOP of one call: those of the norm; comparisons and roundings of bits count 0.

    Square, add, multiply an element of RMSNorm; of LayerNorm an add and a subtraction too; one for
    each parameter. O(1) a row counts 0.
    """
    t = inputs.tensors()
    each = 3 if inputs.options["norm"] == "rms" else 5
    each += sum(name in t for name in ("norm_weight", "norm_bias"))
    x = t["x"]
    if inputs.arguments["offsets"] is None:
        return x.numel() * each
    return costs.rows_of(inputs, "offsets") * math.prod(x.shape[1:]) * each


MX_NORM = Operator(
    name="mx_norm",
    bandwidth_bound=True,
    reference=mx_norm,
    layout={"x": "offsets", "norm_weight": SHARED, "norm_bias": SHARED},
    output_layout={"codes": "offsets", "scales": PLACED},
    differentiable=(),
    flops=mx_norm_flops,
    bytes_moved=mx_quantize_bytes,
    codes=Codes(output_shapes, output_rows, truth, SHARE),
    paper="arXiv 1910.07467 and 1607.06450; OCP Microscaling Formats (MX) Specification 1.0",
)
