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


def _ones(candidate: Candidate, code: int, a_scale: int, b_scale: int, **options: Any) -> Inputs:
    """All codes of a are `code`, all of b are 1 in E4M3 (0x38), k = 32."""
    arguments: dict[str, Any] = {
        "a": torch.full((40, 32), code, dtype=torch.uint8),
        "a_scales": torch.full((40, 1), a_scale, dtype=torch.uint8),
        "b": torch.full((32, 33), 0x38, dtype=torch.uint8),
        "b_scales": torch.full((1, 33), b_scale, dtype=torch.uint8),
    }
    options = {"dtype": candidate.settings.main_dtype, **options}
    return Inputs(OPERATORS["mx_matmul"], arguments, options).to(device=candidate.settings.device)


def test_scale_code_0_is_the_lowest_power_of_two_and_not_zero(candidate: Candidate) -> None:
    """448 2^-127 times 2^127, 32 of them: 14336."""
    out = candidate.run(_ones(candidate, 0x7E, 0, 254))["out"]
    assert torch.equal(out, torch.full_like(out, 14336))


@pytest.mark.parametrize(
    ("elem_dtype", "code"), [("e4m3", 0x7F), ("e4m3", 0xFF), ("e5m2", 0x7E), ("e5m2", 0x7C)],
    ids=["e4m3-nan", "e4m3-minus-nan", "e5m2-nan", "e5m2-infinity"],
)  # fmt: skip
def test_a_code_that_is_no_number_is_none_in_its_row_alone(
    candidate: Candidate, elem_dtype: str, code: int
) -> None:
    """NaN and infinity of the element types, which are codes beside the largest numbers."""
    one = {"e4m3": 0x38, "e5m2": 0x3C}[elem_dtype]
    inputs = _ones(candidate, one, 127, 127, a_elem_dtype=elem_dtype).clone()
    inputs.tensors()["a"][7, 3] = code
    out = candidate.run(inputs)["out"].cpu()
    wanted = torch.full_like(out, 32)
    wanted[7] = float("inf") if code == 0x7C else float("nan")
    assert torch.equal(out.nan_to_num(-1, -2, -3), wanted.nan_to_num(-1, -2, -3))


def test_every_matrix_of_a_batch_is_multiplied(candidate: Candidate) -> None:
    """Whole numbers under scales near 1, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(4)
    arguments: dict[str, Any] = {}
    for name, shape, scales in (("a", (3, 40, 64), (3, 40, 2)), ("b", (3, 64, 33), (3, 2, 33))):
        numbers = torch.randint(-2, 3, shape, generator=generator).float()
        arguments[name] = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
        arguments[f"{name}_scales"] = torch.randint(
            126, 129, scales, generator=generator, dtype=torch.uint8
        )
    options = {"dtype": candidate.settings.main_dtype}
    inputs = Inputs(OPERATORS["mx_matmul"], arguments, options)
    out = candidate.run(inputs.to(device=candidate.settings.device))["out"].cpu()
    assert torch.equal(out, OPERATORS["mx_matmul"].reference(**arguments, **options))


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
