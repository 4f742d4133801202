"""mx_projection as an operator: its cost, and its truth with the error that float32 may make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from jagbench.inputs import Inputs
from jagbench.reference import costs
from jagbench.reference.mx_computed import SHARE, pieces, relative_error
from jagbench.reference.mx_operator import blocks_of, output_rows
from jagbench.reference.mx_projection import mx_projection
from jagbench.spec import PLACED, SHARED, CodePiece, Codes, Operator


def _shape(inputs: Inputs) -> tuple[int, ...]:
    """Shape of a row of the codes."""
    columns, heads = inputs.tensors()["weight"].shape[0], inputs.options.get("heads", 1)
    return (columns,) if heads == 1 else (heads, columns // heads)


def output_shapes(inputs: Inputs) -> Mapping[str, tuple[int, ...]]:
    """Shapes of codes and scales."""
    rows, shape, blocks = inputs.tensors()["x"].shape[0], _shape(inputs), blocks_of(inputs)
    tall, across = blocks.block[0], blocks.count(1, shape[-1])[1]
    down = rows if tall == 1 else rows // tall + inputs.num_sequences
    if inputs.arguments["offsets"] is None:
        down = -(-rows // tall)
    return {"codes": (rows, *shape), "scales": (down, *shape[:-1], across)}


def projected(inputs: Inputs, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x `[rows, features]` behind the layer, and the error of their sums, in float64.

    A sum errs by a share of the sum of magnitudes: where its terms cancel, by much of itself.
    """
    t = inputs.tensors()
    wide, weight = x.to(torch.float64), t["weight"].to(torch.float64)
    part = relative_error(x.shape[-1], inputs.dtype)
    values, sizes = functional.linear(wide, weight), functional.linear(wide.abs(), weight.abs())
    if "bias" in t:
        bias = t["bias"].to(values)
        values, sizes = values + bias, sizes + bias.abs()
    shape = (len(x), *_shape(inputs))
    return values.view(shape), (part * sizes).view(shape)


def truth(inputs: Inputs, elements: int) -> Iterator[CodePiece]:
    """Codes and scales of a call, about so many elements of the result a piece."""
    return pieces(inputs, math.prod(_shape(inputs)), elements, projected)


def _rows(inputs: Inputs) -> int:
    """Rows up to the last offset; all of a dense call."""
    dense = inputs.arguments["offsets"] is None
    return inputs.tensors()["x"].shape[0] if dense else costs.rows_of(inputs, "offsets")


def mx_projection_flops(inputs: Inputs) -> int:
    """FLOP of one call: the product, 2 features out_features a row."""
    return 2 * _rows(inputs) * inputs.tensors()["weight"].numel()


def mx_projection_bytes(inputs: Inputs) -> int:
    """Least bytes of one call: every argument read once, codes and scales written once."""
    tall, offsets = blocks_of(inputs).block[0], inputs.offsets("offsets")
    down = -(-_rows(inputs) // tall)
    if offsets is not None:
        down = int(((offsets.diff().long() + tall - 1) // tall).sum())
    scales = math.prod(output_shapes(inputs)["scales"][1:])
    return costs.read_once(inputs) + _rows(inputs) * math.prod(_shape(inputs)) + down * scales


MX_PROJECTION = Operator(
    name="mx_projection",
    reference=mx_projection,
    layout={"x": "offsets", "weight": SHARED, "bias": SHARED},
    output_layout={"codes": "offsets", "scales": PLACED},
    differentiable=(),
    flops=mx_projection_flops,
    bytes_moved=mx_projection_bytes,
    codes=Codes(output_shapes, output_rows, truth, SHARE),
    quantised=True,
    paper="OCP Microscaling Formats (MX) Specification 1.0; arXiv 2506.08027 (scales rounded up)",
)
