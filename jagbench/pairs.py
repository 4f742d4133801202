"""Which query-key pairs of a jagged batch see each other, and how many there are.

Positions count from the start of each sequence. A query's place p among the keys is its own
position (`align="start"`) or that position plus len_k - len_q (`align="end"`, the rule of
FlashAttention 2.1). A query sees key position k if any of these holds:

window     p - left <= k <= p + right. `causal` means right = 0.
prefix     k < prefix, or 0 <= p < prefix. The first `prefix` tokens of a sequence (its context:
           what is known of the user besides the history) are seen by every query and see every key,
           causal or not.
last_full  the query is among the last `last_full` of its sequence (targets, the newest events), and
           not (causal and k > p): the window binds it on neither side, causality does.

The last two are counted in every sequence by itself, so one that is shorter than the number is
whole. Without causality or a window they have nothing to add.

Source: HSTU (arXiv 2402.17152) as meta-recsys/generative-recommenders has it, where they are
`contextual_seq_len` and `min_full_attn_seq_len`. There the context sees everything and the window
binds the last queries on its left, as here; but late queries see the context only within their
window, counted from its last token, and targets are hidden from one another. Here the context is
always visible, and there are no targets.
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
    check_window_sides(left, right)
    if causal:
        right = 0
    return left, right


def check_window_sides(left: object, right: object) -> None:
    """Refuse a side that is neither None nor a number of tokens."""
    for name, side in (("left", left), ("right", right)):
        if side is not None and not _is_count(side):
            raise ValueError(
                f"window {name} must be a whole number of at least 0 or None, got {side!r}"
            )


def check_beyond_the_window(prefix: int, last_full: int) -> None:
    """Refuse what is no number of tokens."""
    for name, count in (("prefix", prefix), ("last_full", last_full)):
        if not _is_count(count):
            raise ValueError(f"{name} must be a whole number of at least 0, got {count!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def visible_pairs(
    q_lengths: Tensor,
    k_lengths: Tensor,
    *,
    causal: bool = False,
    align: Align = "end",
    window: Window | None = None,
    prefix: int = 0,
    last_full: int = 0,
) -> Tensor:
    """Visible pairs of each sequence, int64 `[batch]`, by closed form (no mask is built).

    The count is exact for windows cut by either end, for rows that see nothing, for sequences of
    unequal query and key length, and where prefix, window and last queries overlap.
    """
    m, n = q_lengths.to(torch.int64), k_lengths.to(torch.int64)
    left, right = visible_range(causal, window)
    check_beyond_the_window(prefix, last_full)
    shift = (n - m) if align == "end" else torch.zeros_like(m)
    context = n.clamp(max=prefix)
    last_right = 0 if causal else None

    def between(first: Tensor, stop: Tensor, left: int | None, right: int | None) -> Tensor:
        # Row p sees the context and keys [p - left, p + right] behind it: sum both bounds over the
        # rows, clamped into what lies behind; rows whose range is empty then cancel exactly.
        rows, behind, start = (stop - first).clamp(min=0), n - context, shift + first - context
        upper = behind * rows if right is None else _sum_clamped(start + right + 1, rows, behind)
        lower = torch.zeros_like(m) if left is None else _sum_clamped(start - left, rows, behind)
        return context * rows + upper - lower

    # Rows of the context see all keys; the rest lie before them or behind, up to the last rows.
    low = (-shift).clamp(min=0).minimum(m)
    high = (prefix - shift).minimum(m).maximum(low)
    last = (m - last_full).clamp(min=0)
    pairs = (high - low) * n
    for first, stop in ((torch.zeros_like(m), low), (high, m)):
        pairs = pairs + between(first, stop.minimum(last), left, right)
        pairs = pairs + between(first.maximum(last), stop, None, last_right)
    return pairs


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
