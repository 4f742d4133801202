"""Which query-key pairs of a jagged batch see each other, and how many there are.

Positions count from the start of each sequence. Key position k is visible to query position p iff
p - left <= k <= p + right, where p is the query's own position (`align="start"`) or that position
plus len_k - len_q (`align="end"`, the rule of FlashAttention 2.1). `causal` means right = 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Align = Literal["start", "end"]
Window = tuple[int | None, int | None]


def visible_range(causal: bool, window: Window | None) -> tuple[int | None, int | None]:
    """`(left, right)` bounds of the visible keys about a query; None is unbounded."""
    left, right = window if window is not None else (None, None)
    for name, side in (("left", left), ("right", right)):
        if side is not None and side < 0:
            raise ValueError(f"window {name} must be at least 0 or None, got {side}")
    if causal:
        right = 0
    return left, right


def visible_pairs(
    q_lengths: Tensor,
    k_lengths: Tensor,
    *,
    causal: bool = False,
    align: Align = "end",
    window: Window | None = None,
) -> Tensor:
    """Visible pairs of each sequence, int64 `[batch]`, by closed form (no mask is built).

    The count is exact for windows cut by either end, for rows that see nothing and for sequences
    of unequal query and key length.
    """
    m, n = q_lengths.to(torch.int64), k_lengths.to(torch.int64)
    left, right = visible_range(causal, window)
    shift = (n - m) if align == "end" else torch.zeros_like(m)
    # Row p sees keys [max(0, p - left), min(n, p + right + 1)): sum both bounds over the rows,
    # clamped into [0, n]; rows whose range is empty then cancel exactly.
    upper = m * n if right is None else _sum_clamped(shift + right + 1, m, n)
    lower = torch.zeros_like(m) if left is None else _sum_clamped(shift - left, m, n)
    return upper - lower


def _sum_clamped(first: Tensor, count: Tensor, limit: Tensor) -> Tensor:
    """Sum of clamp(first + i, 0, limit) over i in [0, count)."""
    below = (-first).clamp(min=0).minimum(count)
    inside = (limit - first).clamp(min=0).minimum(count) - below
    start = first + below
    ramp = inside * start + inside * (inside - 1) // 2
    return ramp + (count - below - inside) * limit


def attention_flops(pairs: int, heads: int, qk_dim: int, v_dim: int) -> int:
    """FLOP of a forward pass: 2 (qk_dim + v_dim) a head and visible pair (4 d where they agree)."""
    return 2 * heads * (qk_dim + v_dim) * pairs
