"""The arithmetic a judgement is made in, whatever an implementation has set for the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def exact_maths() -> Iterator[None]:
    """Within: float32 products in float32, torch's own defaults; what was set before comes back.

    An implementation that allows TF32, bf16 products or fp16 accumulation for the whole process
    would otherwise coarsen the naive run that its own budget is measured from.
    """
    cuda: Any = torch.backends.cuda.matmul
    before = _precision()
    half = cuda.allow_fp16_accumulation
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    cuda.allow_fp16_accumulation = False
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn)
        cuda.allow_fp16_accumulation = half


def _precision() -> str | None:
    """What float32 products are made of; None where torch's two switches for it disagree."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
