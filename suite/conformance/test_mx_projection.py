"""A linear layer that quantises its result: sums, rounding, heads, sequences."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.mx import ALONG_COLUMNS, SQUARE, Block
from jagbench.reference import OPERATORS
from jagbench.reference.mx import mx_quantize
from jagbench.suite import shapes
from jagbench.suite.candidate import Candidate
from jagbench.suite.quantizing import normal

pytestmark = pytest.mark.operator("mx_projection")

OF_EITHER_BLOCK = pytest.mark.parametrize(
    "block", [ALONG_COLUMNS, SQUARE], ids=lambda b: f"{b[0]}x{b[1]}"
)


def codes_of(
    candidate: Candidate,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Codes and scales that the implementation gives, as bytes on the CPU."""
    device = candidate.settings.device
    arguments: dict[str, Any] = {"x": x.to(device), "weight": weight.to(device), "offsets": offsets}
    if offsets is not None:
        arguments["offsets"] = offsets.to(device)
    if bias is not None:
        arguments["bias"] = bias.to(device)
    outcome = candidate.run(Inputs(OPERATORS["mx_projection"], arguments, options))
    return outcome["codes"].cpu(), outcome["scales"].cpu()


def whole_numbers(candidate: Candidate, *shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers: sums of their products are exact in float32, in every order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(candidate.settings.main_dtype)


@OF_EITHER_BLOCK
def test_behind_the_identity_are_the_codes_of_x(candidate: Candidate, block: Block) -> None:
    """A product with 1 and 0 is exact."""
    x = normal(candidate, 70, 96)
    found = codes_of(candidate, x, torch.eye(96, dtype=x.dtype), block=block)
    for ours, wanted in zip(found, mx_quantize(x, block=block), strict=True):
        assert torch.equal(ours, wanted)


@OF_EITHER_BLOCK
def test_exact_sums_have_exact_codes(candidate: Candidate, block: Block) -> None:
    """Whole numbers and a bias: the codes of the quantiser, bit for bit."""
    x, weight = whole_numbers(candidate, 70, 64), whole_numbers(candidate, 96, 64, seed=1)
    bias = 32 * whole_numbers(candidate, 96, seed=2)
    exact = x.double() @ weight.double().T + bias.double()
    found = codes_of(candidate, x, weight, bias=bias, block=block)
    for ours, wanted in zip(found, mx_quantize(exact, block=block), strict=True):
        assert torch.equal(ours, wanted)


@OF_EITHER_BLOCK
def test_sums_are_not_rounded_before_they_are_quantised(candidate: Candidate, block: Block) -> None:
    """At most a code in a thousand is a step beside; more than one in a hundred behind bfloat16."""
    x, weight = normal(candidate, 64, 256), normal(candidate, 64, 256, seed=1)
    exact = x.double() @ weight.double().T
    wanted, wanted_scales = mx_quantize(exact, block=block)
    codes, scales = codes_of(candidate, x, weight, block=block)
    assert torch.equal(scales, wanted_scales)
    steps = (codes.int() - wanted.int()).abs()
    assert int(steps.max()) <= 1
    assert float((steps > 0).double().mean()) <= 1e-3
    between, _ = mx_quantize(exact.bfloat16(), block=block)
    assert float((between != wanted).double().mean()) > 1e-2


@OF_EITHER_BLOCK
def test_heads_are_columns_of_the_result_side_by_side(candidate: Candidate, block: Block) -> None:
    """Codes and scales of 3 heads of 32 are a view of those of 96 columns."""
    x, weight = normal(candidate, 70, 40), normal(candidate, 96, 40, seed=1)
    offsets = shapes.offsets([33, 0, 30])
    whole = codes_of(candidate, x, weight, offsets, block=block)
    heads = codes_of(candidate, x, weight, offsets, block=block, heads=3)
    for one, several in zip(whole, heads, strict=True):
        assert torch.equal(several, one.view(several.shape))


@OF_EITHER_BLOCK
def test_every_sequence_is_projected_and_quantised_as_if_alone(
    candidate: Candidate, block: Block
) -> None:
    """Squares start with each sequence, and neither a bias nor a neighbour fills the short ones."""
    lengths = [33, 0, 1, 40]
    offsets = shapes.offsets(lengths)
    x, weight = whole_numbers(candidate, sum(lengths) + 5, 32), whole_numbers(candidate, 40, 32)
    bias = 64 + whole_numbers(candidate, 40, seed=2)
    # What a row has cancels the bias, so that no number of a sequence is as large as that.
    x[:, 0], weight[:, 0] = -1, bias
    x[:, 4:] = 0
    codes, scales = codes_of(candidate, x, weight, offsets, bias=bias, block=block)
    for i, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        if start == stop:
            continue
        exact = x[start:stop].double() @ weight.double().T + bias.double()
        wanted = mx_quantize(exact, block=block)
        first = start if block[0] == 1 else start // block[0] + i
        own = scales[first : first + len(wanted[1])]
        assert torch.equal(codes[start:stop], wanted[0]), f"codes of sequence {i}"
        assert torch.equal(own, wanted[1]), f"scales of sequence {i}"
    assert not codes[offsets[-1] :].any(), "codes past the last offset"
