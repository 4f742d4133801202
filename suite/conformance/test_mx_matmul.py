"""Products of codes and scales: what may lie beside the scales, and what a product is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from jagbench.inputs import Inputs
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE, Block
from jagbench.reference import OPERATORS, mx_quantize
from jagbench.suite.candidate import Candidate, differing

pytestmark = pytest.mark.operator("mx_matmul")

BLOCKS = pytest.mark.parametrize(
    ("a_block", "b_block"), [(ALONG_COLUMNS, ALONG_ROWS), (SQUARE, SQUARE)], ids=["1x32", "32x32"]
)


def _call(candidate: Candidate, a_block: Block, b_block: Block, k: int = 90) -> Inputs:
    generator = torch.Generator().manual_seed(2)
    arguments: dict[str, Any] = {}
    for name, block, shape in (("a", a_block, (40, k)), ("b", b_block, (k, 33))):
        codes = mx_quantize(torch.randn(*shape, generator=generator), block=block)
        arguments[name], arguments[f"{name}_scales"] = codes
    settings = candidate.settings
    options = {"a_block": a_block, "b_block": b_block, "dtype": settings.main_dtype}
    return Inputs(OPERATORS["mx_matmul"], arguments, options).to(device=settings.device)


@BLOCKS
def test_bytes_beside_the_scales_never_matter(
    candidate: Candidate, a_block: Block, b_block: Block
) -> None:
    """Padding full of 255 (NaN) behind every row and column of scales (TransformerEngine 3070)."""
    inputs = _call(candidate, a_block, b_block)

    def inside(name: str, x: torch.Tensor) -> torch.Tensor:
        wide = x.new_full((x.shape[0] + 4, x.shape[1] + 4), 255)
        wide[: x.shape[0], : x.shape[1]] = x
        return wide[: x.shape[0], : x.shape[1]]

    odd = candidate.run_in_place(inputs.map(inside))
    assert not differing(candidate.run(inputs), odd)
    assert torch.isfinite(odd["out"]).all()


@BLOCKS
def test_the_product_has_the_dtype_and_shape_asked_for(
    candidate: Candidate, a_block: Block, b_block: Block
) -> None:
    """`[40, 33]` in the dtype of the option, which is float32 where none is given."""
    inputs = _call(candidate, a_block, b_block)
    out = candidate.run(inputs)["out"]
    assert (tuple(out.shape), out.dtype) == ((40, 33), candidate.settings.main_dtype)


@BLOCKS
def test_a_scale_one_higher_doubles_what_it_scales(
    candidate: Candidate, a_block: Block, b_block: Block
) -> None:
    """Scales are powers of two: of all of a, they pass through every product exactly."""
    inputs = _call(candidate, a_block, b_block)
    higher = inputs.replace(a_scales=inputs.tensors()["a_scales"] + 1)
    outcome = {"out": 2 * candidate.run(inputs)["out"]}
    assert not differing(outcome, candidate.run(higher))


def test_a_scale_of_nan_makes_its_rows_nan_and_no_others(candidate: Candidate) -> None:
    """Scale code 255 of one row of a: that row of the product, and it alone."""
    inputs = _call(candidate, ALONG_COLUMNS, ALONG_ROWS).clone()
    inputs.tensors()["a_scales"][7, 1] = 255
    nan = torch.isnan(candidate.run(inputs)["out"])
    assert nan[7].all()
    assert int(nan.sum()) == nan.shape[1]


MALFORMED: dict[str, dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "k-that-differs": {"b": lambda x: x[:-1]},
    "scales-of-other-rows": {"a_scales": lambda x: x[:-1]},
    "codes-of-floats": {"a": lambda x: x.float()},
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_arguments_raise_value_error(candidate: Candidate, fault: str) -> None:
    """Refused, never cut or filled to fit."""
    inputs = _call(candidate, ALONG_COLUMNS, ALONG_ROWS)
    changed = {n: change(inputs.tensors()[n]) for n, change in MALFORMED[fault].items()}
    with pytest.raises(ValueError):
        candidate.run(inputs.replace(**changed))
