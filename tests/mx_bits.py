"""What tests of the MX kernels share: comparison bit by bit, and numbers of a wide range."""

from __future__ import annotations

import pytest
import torch
from mx_oracles import ELEM_DTYPES, normal
from torch import Tensor

from jagbench.mx import BLOCKS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = [5, 0, 32, 33, 1, 0, 64]
every_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{b[0]}x{b[1]}")
every_elem_dtype = pytest.mark.parametrize("elem_dtype", ELEM_DTYPES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


def assert_bits(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Equal shapes, dtypes and bits of integers."""
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        wrong = (ours.cpu() != theirs.cpu()).nonzero()
        assert not len(wrong), f"{len(wrong)} of {ours.numel()} differ, first {wrong[0].tolist()}"


def assert_same_values(found: Tensor, wanted: Tensor) -> None:
    """Bit for bit, signed zeros too; every NaN is as good as another."""
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.cpu().signbit() | wanted.isnan(), wanted.signbit() | wanted.isnan())


def wide_range(*shape: int, seed: int = 0, spread: int = 14) -> Tensor:
    """Normal numbers times powers of two that change from number to number."""
    powers = torch.round(spread * normal(*shape, seed=seed + 1))
    return (normal(*shape, seed=seed) * torch.exp2(powers)).float()
