"""Stochastic rounding of mx_quantize: unbiased, between neighbours, by its seed alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor

from jagbench.mx import Block, ElemDtype
from jagbench.reference.mx import mx_dequantize
from jagbench.reference.mx_formats import decode, format_of
from jagbench.suite import shapes
from jagbench.suite.candidate import Candidate
from jagbench.suite.quantizing import OF_EVERY_BLOCK, OF_EVERY_TYPE, normal, quantize

pytestmark = pytest.mark.operator("mx_quantize")

#: Chance that a right implementation fails, were its seed not fixed.
UNLIKELY = 1e-6
#: Parts of a step that a number lies above the one below; all exact in bfloat16.
PARTS = (1 / 16, 1 / 4, 5 / 16, 1 / 2, 3 / 4, 15 / 16)


def _between(candidate: Candidate, elem_dtype: ElemDtype, dtype: torch.dtype) -> Tensor:
    """Rows of numbers between 1 and the next, by parts of the step; every scale is 1."""
    form = format_of(elem_dtype)
    parts = torch.tensor(PARTS).repeat(16)
    x: Tensor = (1 + parts / 2**form.mantissa_bits).to(dtype)[:, None].repeat(1, 128)
    places = torch.arange(len(x))[:, None] + torch.arange(128)
    x[places % 32 == 0] = form.largest
    return x


def _assert_unbiased(ups: int, count: int, part: float) -> None:
    found = binomtest(ups, count, part).pvalue
    assert found > UNLIKELY, (
        f"{ups} of {count} numbers a part {part} of a step above the lower one were rounded up: "
        f"p = {found:.1e}"
    )


@OF_EVERY_BLOCK
@OF_EVERY_TYPE
def test_stochastic_rounding_is_unbiased(
    candidate: Candidate, elem_dtype: ElemDtype, block: Block
) -> None:
    """A number a part p of a step above its lower neighbour goes up with probability p."""
    x = _between(candidate, elem_dtype, candidate.settings.main_dtype)
    between = x < 2
    options: dict[str, Any] = {"rounding": "stochastic", "elem_dtype": elem_dtype, "block": block}
    form = format_of(elem_dtype)
    one = (1 - form.smallest_exponent) << form.mantissa_bits
    codes, _ = quantize(candidate, x, seed=11, **options)
    codes = codes.cpu()
    for i, part in enumerate(PARTS):
        own = codes[i :: len(PARTS)][between[i :: len(PARTS)]].int()
        _assert_unbiased(int((own == one + 1).sum()), own.numel(), part)


def test_stochastic_rounding_sees_a_thousandth_of_a_step(candidate: Candidate) -> None:
    """A few random bits would round a small part to nothing; float32 holds it."""
    x = torch.full((256, 256), 1 + 2.0**-10 / 8)
    x[:, ::32] = 448.0
    codes, _ = quantize(candidate, x, rounding="stochastic", seed=12)
    own = codes.cpu()[x < 2].int()
    assert set(own.tolist()) <= {0x38, 0x39}
    _assert_unbiased(int((own == 0x39).sum()), own.numel(), 2.0**-10)


@OF_EVERY_BLOCK
@OF_EVERY_TYPE
def test_stochastic_rounding_stays_between_the_neighbours(
    candidate: Candidate, elem_dtype: ElemDtype, block: Block
) -> None:
    """A number becomes its upper or its lower neighbour, in every binade and among subnormals."""
    x = normal(candidate, 64, 96) * torch.logspace(-12, 0, 96, base=2.0).to(
        candidate.settings.main_dtype
    )
    options: dict[str, Any] = {"elem_dtype": elem_dtype, "block": block}
    codes, scales = quantize(candidate, x, rounding="stochastic", seed=13, **options)
    all_codes = torch.arange(1 << format_of(elem_dtype).bits, dtype=torch.uint8)
    finite = decode(all_codes, elem_dtype)
    finite = torch.tensor(sorted(set(finite[finite.isfinite()].tolist())), dtype=finite.dtype)
    shifted = mx_dequantize(codes, torch.full_like(scales, 127), **options, dtype=torch.float64)
    exact = _scaled(x.to(codes.device), scales, block).cpu()
    lower = finite[(torch.searchsorted(finite, exact, right=True) - 1).clamp(min=0)]
    upper = finite[torch.searchsorted(finite, exact).clamp(max=len(finite) - 1)]
    outside = (shifted.cpu() < lower) | (shifted.cpu() > upper)
    assert not outside.any(), f"{int(outside.sum())} numbers beyond their neighbours"


def _scaled(x: Tensor, scales: Tensor, block: Block) -> Tensor:
    """X over the scale of its block, float64."""
    wide = scales.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return x.double() * torch.exp2(127 - wide[: x.shape[0], : x.shape[1]])


@OF_EVERY_BLOCK
def test_stochastic_rounding_keeps_what_is_representable(
    candidate: Candidate, block: Block
) -> None:
    """Numbers that were quantised before come back whatever the bits."""
    x = normal(candidate, 64, 96)
    once = mx_dequantize(*quantize(candidate, x, block=block), block=block, dtype=x.dtype)
    for seed in (0, 14, 2**63 - 1):
        again = quantize(candidate, once, rounding="stochastic", seed=seed, block=block)
        assert torch.equal(mx_dequantize(*again, block=block, dtype=x.dtype), once)


@OF_EVERY_BLOCK
def test_a_seed_decides_every_bit(candidate: Candidate, block: Block) -> None:
    """The same seed gives the same codes; another, in its low or its high half, others."""
    x = normal(candidate, 64, 96)
    options: dict[str, Any] = {"rounding": "stochastic", "block": block}
    first, scales = quantize(candidate, x, seed=15, **options)
    assert torch.equal(quantize(candidate, x, seed=15, **options)[0], first)
    torch.manual_seed(99)
    assert torch.equal(quantize(candidate, x, seed=15, **options)[0], first)
    for other in (16, 15 + 2**32):
        codes, same = quantize(candidate, x, seed=other, **options)
        assert torch.equal(same, scales), "the scale is not random"
        share = float((codes != first).float().mean())
        assert 0.1 < share < 0.9, f"seed {other} changes {share:.0%} of the codes"


def test_every_element_draws_bits_of_its_own(candidate: Candidate) -> None:
    """No row repeats another, no column another, no sequence another, no head another."""
    x = torch.full((64, 2, 96), 1.0625, dtype=candidate.settings.main_dtype)
    x[..., ::32] = 448.0
    offsets = shapes.offsets([32, 32])
    codes, _ = quantize(candidate, x, offsets, rounding="stochastic", seed=17)
    ups = (codes == 0x39).cpu().int()
    for name, other in {
        "row": ups.roll(1, 0), "head": ups.roll(1, 1), "sequence": ups.roll(32, 0),
        "column of four": ups.roll(4, 2), "block": ups.roll(32, 2),
    }.items():  # fmt: skip
        share = float((ups == other).float()[..., 1:32].mean())
        assert 0.4 < share < 0.6, f"{share:.0%} of the bits are those of another {name}"
