"""Calls of mx_quantize on the numbers at hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.mx import BLOCKS
from jagbench.reference import OPERATORS
from jagbench.suite.candidate import Candidate

OF_EVERY_BLOCK = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{b[0]}x{b[1]}")
OF_EVERY_MODE = pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
OF_EVERY_TYPE = pytest.mark.parametrize("elem_dtype", ["e4m3", "e5m2", "e2m1"])


def quantize(
    candidate: Candidate, x: Tensor, offsets: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Codes and scales that the implementation gives, as bytes."""
    outcome = candidate.run(call(candidate, x, offsets, **options))
    return outcome["codes"], outcome["scales"]


def call(candidate: Candidate, x: Tensor, offsets: Tensor | None = None, **options: Any) -> Inputs:
    """A call on the session's device."""
    device = candidate.settings.device
    moved = None if offsets is None else offsets.to(device)
    return Inputs(OPERATORS["mx_quantize"], {"x": x.to(device), "offsets": moved}, options)


def normal(candidate: Candidate, *shape: int, seed: int = 0) -> Tensor:
    """Standard normals in the session's dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(candidate.settings.main_dtype)
