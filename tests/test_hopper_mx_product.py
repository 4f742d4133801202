"""The Hopper MX product: which calls it takes, why not others, and on such a GPU its values.

That it compiles to FP8 tensor-core instructions is for the compile cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.impl.kernels.hopper import mx_product_launch as launch
from jagbench.impl.kernels.hopper.mx_product_launch import (
    REGISTERS,
    STAGES,
    mx_product,
    mx_product_problem,
    shared_bytes,
)
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE, Block
from jagbench.reference.mx import mx_dequantize, mx_quantize

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "device_problem", lambda device: None)


def reason(**change: Any) -> str | None:
    call = {"rows": 90, "columns": 512, "depth": 512, "device": torch.device("cpu"), **change}
    return mx_product_problem(**call)


@pytest.mark.parametrize("a_block", [ALONG_COLUMNS, SQUARE])
@pytest.mark.parametrize("b_block", [ALONG_COLUMNS, SQUARE])
@pytest.mark.parametrize("dtype", launch.DTYPES)
def test_codes_scaled_along_the_contracted_dim_are_taken(as_on_hopper, a_block, b_block, dtype):
    assert reason(a_block=a_block, b_block=b_block, dtype=dtype) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"depth": 40}, "got 40 codes and 512 results"),
        ({"columns": 12, "dtype": torch.bfloat16}, "12 results of 2 bytes"),
        ({"columns": 6}, "6 results of 4 bytes"),
        ({"rows": 2**30}, "1073741824 x 512 x 512"),
        ({"b_block": ALONG_ROWS}, r"\(32, 1\)"),
        ({"dtype": torch.float64}, "torch.float64"),
    ],
)
def test_why_a_call_is_not_taken_is_said(as_on_hopper, change: dict[str, Any], words: str):
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(reason(**change))


def test_a_device_that_is_no_hopper_is_named():
    assert "interpreter" in str(reason()) or "NVIDIA GPU" in str(reason())


@pytest.mark.parametrize("b_square", [True, False])
@pytest.mark.parametrize("dtype", launch.DTYPES)
def test_the_ring_fits_shared_memory_and_threads_the_registers(dtype, b_square):
    assert shared_bytes(STAGES, dtype, b_square) + 1024 <= 227 << 10
    assert REGISTERS * 128 * 3 <= 1 << 16


def operands(
    m: int, n: int, k: int, a_block: Block, b_block: Block
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whole numbers up to 2 and powers of two near 1: every sum is exact in any order."""
    generator = torch.Generator().manual_seed(m + n + k)
    found: list[Tensor] = []
    for rows, block in ((m, a_block), (n, b_block)):
        numbers = torch.randint(-2, 3, (rows, k), generator=generator).float()
        shape = (-(-rows // block[0]), -(-k // 32))
        scales = torch.randint(125, 129, shape, generator=generator, dtype=torch.uint8)
        found += [numbers.to(torch.float8_e4m3fn).view(torch.uint8), scales]
    return found[0], found[1], found[2], found[3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": torch.zeros(4, 64)}, "a must be a uint8 matrix, got .*float32"),
        ({"b": torch.zeros(64, dtype=torch.uint8)}, r"b must be a uint8 matrix, got \(64,\)"),
        ({"a_scales": None}, "a_scales must be a uint8 matrix, got NoneType"),
        ({"a_scales": torch.zeros(4, 3, dtype=torch.uint8)}, r"must be \(4, 2\) .*got \(4, 3\)"),
        ({"b_block": SQUARE}, r"scales of b \(16, 64\) in blocks \(32, 32\) must be \(1, 2\)"),
        ({"a_block": ALONG_ROWS}, r"a_block must be one of .*got \(32, 1\)"),
        ({"b": torch.zeros(16, 32, dtype=torch.uint8),
          "b_scales": torch.zeros(16, 1, dtype=torch.uint8)}, r"\(4, 64\) on .*, \(16, 32\)"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused_with_their_numbers(change, words):
    names = ("a", "a_scales", "b", "b_scales")
    good = dict(zip(names, operands(4, 16, 64, ALONG_COLUMNS, ALONG_COLUMNS), strict=True))
    with pytest.raises(ValueError, match=words):
        mx_product(**{**good, **change})


@pytest.mark.skipif(HOPPER, reason="asks about other machines")
def test_a_call_that_cannot_run_says_why():
    with pytest.raises(NotImplementedError, match=r"interpreter|NVIDIA GPU|capability"):
        mx_product(*operands(4, 16, 64, ALONG_COLUMNS, ALONG_COLUMNS))


@on_hopper
@pytest.mark.parametrize("a_block", [ALONG_COLUMNS, SQUARE])
@pytest.mark.parametrize("b_block", [ALONG_COLUMNS, SQUARE])
@pytest.mark.parametrize("dtype", launch.DTYPES)
def test_exact_sums_are_exact_at_every_edge(a_block, b_block, dtype):
    for m, n, k in ((1, 8, 16), (64, 64, 32), (200, 264, 528), (333, 128, 1008), (500, 520, 1024)):
        a, a_scales, b, b_scales = operands(m, n, k, a_block, b_block)
        wanted = mx_dequantize(a, a_scales, block=a_block, dtype=torch.float64) @ (
            mx_dequantize(b, b_scales, block=b_block, dtype=torch.float64).T
        )
        found = mx_product(
            a.cuda(), a_scales.cuda(), b.cuda(), b_scales.cuda(),
            a_block=a_block, b_block=b_block, dtype=dtype,
        )  # fmt: skip
        assert torch.equal(found.cpu(), wanted.to(dtype)), (m, n, k)


@on_hopper
def test_nan_codes_and_nan_scales_reach_what_they_touch_and_no_more():
    a, a_scales, b, b_scales = operands(96, 64, 256, ALONG_COLUMNS, SQUARE)
    a[5, 40], a_scales[9, 3], b_scales[1, 2] = 0x7F, 255, 255
    found = mx_product(*(t.cuda() for t in (a, a_scales, b, b_scales)), b_block=SQUARE)
    wanted = torch.zeros(96, 64, dtype=torch.bool)
    wanted[5], wanted[9], wanted[:, 32:] = True, True, True
    assert torch.equal(found.isnan().cpu(), wanted)


@on_hopper
def test_strided_and_misaligned_codes_are_copied():
    a, a_scales, b, b_scales = operands(70, 64, 96, ALONG_COLUMNS, ALONG_COLUMNS)
    wanted = mx_product(*(t.cuda() for t in (a, a_scales, b, b_scales)))
    wide = torch.zeros(70, 200, dtype=torch.uint8, device="cuda")
    wide[:, 3:99] = a.cuda()
    tall = b.T.contiguous().cuda().T
    scales = a_scales.T.contiguous().cuda().T
    assert torch.equal(mx_product(wide[:, 3:99], scales, tall, b_scales.cuda()), wanted)


@on_hopper
@pytest.mark.parametrize("b_block", [ALONG_COLUMNS, SQUARE])
def test_a_large_product_is_right_and_has_the_same_bits_on_every_repeat(b_block):
    generator = torch.Generator("cuda").manual_seed(1)
    x, w = (torch.randn(4096, 4096, generator=generator, device="cuda") for _ in range(2))
    a, a_scales = mx_quantize(x)
    b, b_scales = mx_quantize(w, block=b_block)
    found = mx_product(a, a_scales, b, b_scales, b_block=b_block)
    wanted = mx_dequantize(a, a_scales, dtype=torch.float64) @ (
        mx_dequantize(b, b_scales, block=b_block, dtype=torch.float64).T
    )
    # A partial sum keeps 2^-13 of its largest summand or better (docs/kernels/mx_hopper.md).
    assert float((found - wanted).norm() / wanted.norm()) < 2**-11
    for _ in range(20):
        assert torch.equal(mx_product(a, a_scales, b, b_scales, b_block=b_block), found)
