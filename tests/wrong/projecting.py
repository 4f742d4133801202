"""A right linear layer that quantises its result, in float64; its steps may be exchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wrong.quantising import Job


def check(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int, dense: bool) -> None:
    """Raise ValueError, with the numbers, for what does not fit."""
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1] or not weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    if weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(f"x is {x.dtype} on {x.device}, weight {weight.dtype} on {weight.device}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)}, want {tuple(weight.shape[:1])}")
    if heads < 1 or (heads > 1 and (dense or weight.shape[0] % (32 * heads))):
        raise ValueError(f"{heads} heads of {weight.shape[0]} columns")


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer of float64 operands."""
    return x @ weight.T + (0.0 if bias is None else bias)


def by_heads(out: Tensor, heads: int) -> Tensor:
    """Columns of a result as those of so many heads."""
    return out if heads == 1 else out.view(out.shape[0], heads, -1)


class Projector:
    """The operator; the steps are those of the class that inherits it."""

    def mx_projection(
        self,
        x: Tensor,
        weight: Tensor,
        offsets: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        heads: int = 1,
        elem_dtype: str = "e4m3",
        block: tuple[int, int] = (1, 32),
        scale_mode: str = "rceil",
    ) -> Any:
        """Codes and scales of x weight^T + bias."""
        steps: Any = self
        steps.check_quantize(x, offsets, Job(elem_dtype, block, scale_mode, None), "nearest")
        check(x, weight, bias, heads, offsets is None)
        wide = [None if t is None else t.detach().to(torch.float64) for t in (x, weight, bias)]
        out = steps.view_heads(steps.project_rows(*wide), heads)
        return steps.mx_quantize(
            out, offsets, elem_dtype=elem_dtype, block=block, scale_mode=scale_mode
        )
