"""mx_quantize as an operator: its cost, and its truth in pieces of any call however large.

The pieces hold what `mx.mx_quantize` gives, without its loop over sequences: rows of several
sequences stand in one matrix, each sequence filled up with zeros to whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.mx import ALONG_COLUMNS, NAN_SCALE_CODE, Stream
from jagbench.reference import costs
from jagbench.reference.draws import draws
from jagbench.reference.mx import mx_quantize
from jagbench.reference.mx_blocks import Blocks, quantize, spread
from jagbench.spec import PLACED, CodePiece, Codes, Operator


def blocks_of(inputs: Inputs) -> Blocks:
    """The block format that a call asks for."""
    options = inputs.options
    return Blocks(
        options.get("elem_dtype", "e4m3"),
        options.get("block", ALONG_COLUMNS),
        options.get("scale_mode", "rceil"),
    )


def output_shapes(inputs: Inputs) -> Mapping[str, tuple[int, ...]]:
    """Shapes of codes and scales."""
    x, blocks = inputs.tensors()["x"], blocks_of(inputs)
    tall, columns = blocks.block[0], blocks.count(1, x.shape[-1])[1]
    if inputs.arguments["offsets"] is None:
        rows = () if x.dim() == 1 else (*x.shape[:-2], -(-x.shape[-2] // tall))
        return {"codes": tuple(x.shape), "scales": (*rows, columns)}
    first = x.shape[0] if tall == 1 else x.shape[0] // tall + inputs.num_sequences
    return {"codes": tuple(x.shape), "scales": (first, *x.shape[1:-1], columns)}


def output_rows(inputs: Inputs, name: str, sequence: int) -> tuple[int, int]:
    """First row, and the one behind the last, that a sequence has in the codes or scales."""
    offsets = inputs.offsets("offsets")
    assert offsets is not None
    start, stop = (int(x) for x in offsets[sequence : sequence + 2])
    tall = blocks_of(inputs).block[0]
    if name == "codes" or tall == 1:
        return start, stop
    first = start // tall + sequence
    return first, first - (start - stop) // tall


def truth(inputs: Inputs, elements: int) -> Iterator[CodePiece]:
    """Codes and scales of a call, about so many elements of x a piece."""
    x, blocks, offsets = inputs.tensors()["x"], blocks_of(inputs), inputs.offsets("offsets")
    if offsets is None and x.dim() != 2:
        yield _whole(inputs, blocks)
        return
    if offsets is None:
        offsets = torch.tensor([0, x.shape[0]], device=x.device)
    rows = rows_in_blocks(offsets, blocks.block[0])
    width = max(1, math.prod(x.shape[1:]))
    step = max(1, elements // width // blocks.block[0]) * blocks.block[0]
    for first in range(0, len(rows.row), step):
        yield _piece(inputs, blocks, rows.cut(first, first + step, blocks.block[0]))


@dataclass(frozen=True)
class Rows:
    """Rows of sequences that are filled up to whole blocks.

    row: int64 `[n]`, row of x. real: bool `[n]`, whether it is one of the sequence.
    scale_row: int64 `[n / rows of a block]`, row of the scales.
    """

    row: Tensor
    real: Tensor
    scale_row: Tensor

    def cut(self, start: int, stop: int, tall: int) -> Rows:
        """Some of the rows, whole blocks."""
        blocks = slice(start // tall, -(-stop // tall))
        return Rows(self.row[start:stop], self.real[start:stop], self.scale_row[blocks])


def rows_in_blocks(offsets: Tensor, tall: int) -> Rows:
    """Rows of every sequence, filled up to whole blocks of `tall` rows."""
    starts, lengths = offsets.long()[:-1], offsets.diff().long()
    which = torch.arange(len(lengths), device=offsets.device)
    filled = (lengths + tall - 1) // tall * tall
    owner = torch.repeat_interleave(which, filled)
    position = torch.arange(len(owner), device=offsets.device) - (filled.cumsum(0) - filled)[owner]
    real = position < lengths[owner]
    row = torch.where(real, starts[owner] + position, 0)
    first = starts if tall == 1 else starts // tall + which
    return Rows(row, real, (first[owner] + position // tall)[::tall])


def _piece(inputs: Inputs, blocks: Blocks, rows: Rows) -> CodePiece:
    x, options = inputs.tensors()["x"], inputs.options
    filling = rows.real.view(-1, *[1] * (x.dim() - 1))
    values = torch.where(filling, x[rows.row], 0).movedim(0, -2)
    bits = None
    if options.get("rounding", "nearest") == "stochastic":
        heads = math.prod(x.shape[1:-1])
        counted = rows.row[:, None] * heads + torch.arange(heads, device=x.device)
        found = draws(options["seed"], counted, x.shape[-1], Stream.QUANTISE)
        bits = found.view(-1, *x.shape[1:]).movedim(0, -2)
    codes, scales = quantize(values, blocks, bits)
    free = spread(scales == NAN_SCALE_CODE, blocks.block, values.shape[-2], values.shape[-1])
    codes, scales, free = (t.movedim(-2, 0) for t in (codes, scales, free))
    return CodePiece(
        rows={"codes": rows.row[rows.real], "scales": rows.scale_row},
        wanted={"codes": codes[rows.real], "scales": scales},
        free={"codes": free[rows.real]},
    )


def _whole(inputs: Inputs, blocks: Blocks) -> CodePiece:
    """The truth of a call without offsets."""
    codes, scales = inputs.call(mx_quantize)
    matrix, own = (codes[None], scales[None]) if codes.dim() == 1 else (codes, scales)
    free = spread(own == NAN_SCALE_CODE, blocks.block, matrix.shape[-2], matrix.shape[-1])
    wanted = {"codes": codes, "scales": scales}
    places = {n: torch.arange(t.shape[0], device=t.device) for n, t in wanted.items()}
    return CodePiece(places, wanted, {"codes": free.view(codes.shape)})


def mx_quantize_flops(inputs: Inputs) -> int:
    """FLOP of one call: comparisons, shifts and roundings of bits count 0."""
    return 0


def mx_quantize_bytes(inputs: Inputs) -> int:
    """Least bytes of one call: x and offsets read once, codes and scales written once."""
    x, offsets = inputs.tensors()["x"], inputs.offsets("offsets")
    scales = output_shapes(inputs)["scales"]
    if offsets is None:
        return costs.read_once(inputs) + x.numel() + math.prod(scales)
    tall = blocks_of(inputs).block[0]
    rows = int(((offsets.diff().long() + tall - 1) // tall).sum())
    codes = costs.rows_of(inputs, "offsets") * math.prod(x.shape[1:])
    return costs.read_once(inputs) + codes + rows * math.prod(scales[1:])


MX_QUANTIZE = Operator(
    name="mx_quantize",
    bandwidth_bound=True,
    reference=mx_quantize,
    layout={"x": "offsets"},
    output_layout={"codes": "offsets", "scales": PLACED},
    differentiable=(),
    flops=mx_quantize_flops,
    bytes_moved=mx_quantize_bytes,
    codes=Codes(output_shapes, output_rows, truth),
    paper="OCP Microscaling Formats (MX) Specification 1.0; arXiv 2506.08027 (scales rounded up)",
)
