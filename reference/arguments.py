"""What the references accept, and which keys a query of one sequence may see.

Every function here raises `ValueError` with the offending numbers in it, and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from jagbench.bias import BucketedBias
from jagbench.pairs import Align, Window, visible_range

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OFFSETS_DTYPES = (torch.int32, torch.int64)
BUCKET_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


def check_values(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse q `[rows, heads, d]`, k `[rows, kv_heads, d]`, v `[rows, kv_heads, dv]` that clash."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 3:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor [rows, heads, head_dim], got {shape}")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must have one of the dtypes {DTYPES}, got {x.dtype}")
        if x.shape[1] < 1 or x.shape[2] < 1:
            raise ValueError(f"{name} must have heads and head_dim >= 1, got {tuple(x.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on different devices: {q.device}, {k.device}, {v.device}")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"k and v differ in rows or heads: {tuple(k.shape[:2])} and {tuple(v.shape[:2])}"
        )
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has head_dim {q.shape[2]} and k has {k.shape[2]}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{k.shape[1]} kv_heads do not divide {q.shape[1]} heads")


def sequence_lengths(name: str, offsets: Tensor, rows: int, longest: int | None) -> list[int]:
    """Length of every sequence, from offsets `[batch + 1]` (int32 or int64) over `rows` rows.

    longest: the caller's `max_len`, which no sequence may exceed; None sets no limit.
    """
    if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.numel() == 0:
        shape = tuple(offsets.shape) if isinstance(offsets, Tensor) else type(offsets).__name__
        raise ValueError(f"{name}_offsets must be a tensor [batch + 1], got {shape}")
    if offsets.dtype not in OFFSETS_DTYPES:
        raise ValueError(f"{name}_offsets must be int32 or int64, got {offsets.dtype}")
    bounds = offsets.tolist()
    if bounds[0] != 0:
        raise ValueError(f"{name}_offsets must start at 0, got {bounds[0]}")
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    for i, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"{name}_offsets decrease at index {i + 1}: {bounds[i]} to {bounds[i + 1]}"
            )
    if bounds[-1] > rows:
        raise ValueError(f"{name}_offsets end at {bounds[-1]}, past the {rows} rows of {name}")
    check_longest(name, max(lengths, default=0), longest)
    return lengths


def check_longest(name: str, found: int, longest: int | None) -> None:
    """Refuse a stated longest length that is smaller than the longest there is."""
    if longest is not None and longest < found:
        raise ValueError(
            f"max_{name}_len is {longest}, and the longest {name} sequence has {found}"
        )


def both_lengths(
    q: Tensor,
    k: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q_len: int | None,
    max_k_len: int | None,
) -> tuple[list[int], list[int]]:
    """Query and key lengths of every sequence; a dense query has its rows in every sequence."""
    for name, offsets in (("q", q_offsets), ("k", k_offsets)):
        if isinstance(offsets, Tensor) and offsets.device != q.device:
            raise ValueError(f"{name}_offsets are on {offsets.device}, the values on {q.device}")
    k_lengths = sequence_lengths("k", k_offsets, k.shape[0], max_k_len)
    if q_offsets is None:
        check_longest("q", q.shape[0], max_q_len)
        return [q.shape[0]] * len(k_lengths), k_lengths
    q_lengths = sequence_lengths("q", q_offsets, q.shape[0], max_q_len)
    if len(q_lengths) != len(k_lengths):
        raise ValueError(
            f"q_offsets hold {len(q_lengths)} sequences and k_offsets {len(k_lengths)}"
        )
    return q_lengths, k_lengths


def check_mask(causal: bool, align: str, window: Window | None) -> None:
    """Refuse an unknown alignment and a window that is not two sides, each None or at least 0."""
    if align not in get_args(Align):
        raise ValueError(f"align must be one of {get_args(Align)}, got {align!r}")
    if window is not None and (not isinstance(window, Sequence) or len(window) != 2):
        raise ValueError(f"window must be (left, right), got {window!r}")
    visible_range(causal, window)


def dense_bias(bias: Tensor | BucketedBias, q: Tensor, pairs: int) -> Tensor:
    """Bias of every pair, `[pairs, heads or 1]`, once its shape, dtype and device are checked."""
    if not isinstance(bias, BucketedBias):
        _check_bias("bias", bias, q, (q.dtype, torch.float32))
        if bias.shape[0] != pairs:
            raise ValueError(f"bias has {bias.shape[0]} rows for {pairs} query-key pairs")
        return bias
    table, ids = bias.table, bias.bucket_ids
    _check_bias("bias table", table, q, DTYPES)
    if ids.dim() != 1 or ids.shape[0] != pairs or ids.dtype not in BUCKET_DTYPES:
        raise ValueError(
            f"bucket_ids must be integers [{pairs}] (one for each query-key pair), "
            f"got {ids.dtype} {tuple(ids.shape)}"
        )
    if ids.device != q.device:
        raise ValueError(f"bucket_ids are on {ids.device}, the values on {q.device}")
    if pairs and (int(ids.min()) < 0 or int(ids.max()) >= table.shape[0]):
        raise ValueError(
            f"bucket_ids lie in [{int(ids.min())}, {int(ids.max())}], "
            f"and the table has {table.shape[0]} buckets"
        )
    return table[ids.long()]


def _check_bias(name: str, x: Tensor, q: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] not in (1, q.shape[1]):
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be [rows, {q.shape[1]} heads or 1], got {shape}")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} must have one of the dtypes {tuple(dtypes)}, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, the values on {q.device}")


def visible(
    q_length: int,
    k_length: int,
    causal: bool,
    align: str,
    window: Window | None,
    device: torch.device,
) -> Tensor:
    """Which keys each query sees, bool `[q_length, k_length]`."""
    left, right = visible_range(causal, window)
    shift = k_length - q_length if align == "end" else 0
    query = torch.arange(q_length, device=device)[:, None] + shift
    key = torch.arange(k_length, device=device)[None, :]
    seen = torch.ones(q_length, k_length, dtype=torch.bool, device=device)
    if left is not None:
        seen = seen & (key >= query - left)
    if right is not None:
        seen = seen & (key <= query + right)
    return seen


def drop(x: Tensor, used: Tensor) -> Tensor:
    """Rows `[rows, heads, dim]` with those that take part in no visible pair set to 0.

    A NaN there would otherwise spread, because 0 times NaN is NaN.
    """
    return torch.where(used[:, None, None], x, 0.0)
