"""The steps of a right PFFN block and of QK-norm; each may be exchanged.

Autograd finds the gradients. Values are float32 or wider here, `[rows, heads, dim]`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, eps: float) -> None:
    """Raise ValueError, with the numbers, for what gdpa alone would accept."""
    if not eps >= 0 or q_offsets is None or q_offsets.dim() != 1 or not q_offsets.numel():
        raise ValueError(f"eps {eps}, q {tuple(q.shape)} with offsets {q_offsets}")
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3 or q.shape[2] != v.shape[2]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"dtypes of {q.dim()} dims do not fit: {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"devices differ: {q.device}, {k.device}, {v.device}")


def in_use(x: Tensor, offsets: Tensor) -> Tensor:
    """X with the rows past the last offset 0, whatever they hold."""
    rows = torch.arange(x.shape[0], device=x.device) < offsets[-1]
    return torch.where(rows[:, None, None], x, 0.0)


def unit(x: Tensor, eps: float, features: tuple[int, ...] = (1, 2)) -> Tensor:
    """X over its root mean square over all heads."""
    return x * (x.square().mean(features, keepdim=True) + eps) ** -0.5


def norm_heads(name: str, x: Tensor, eps: float) -> Tensor:
    """QK-norm of q, k or v: heads of the first two have unit root mean square."""
    return x if name == "v" else unit(x, eps, (2,))


def enter(q: Tensor, eps: float) -> Tensor:
    """LayerNorm over all heads together."""
    return unit(q - q.mean((1, 2), keepdim=True), eps)


def attend_to(q: Tensor, inside: Tensor) -> Tensor:
    """What the attention is given of the queries and the normalised queries."""
    return inside


def leave(attended: Tensor, inside: Tensor, q: Tensor, eps: float) -> Tensor:
    """Inner residual, RMSNorm, outer residual."""
    return unit(attended + inside, eps) + q
