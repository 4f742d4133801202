"""What the references accept, and which keys a query of one sequence may see.

Every function here raises `ValueError` with the offending numbers in it, and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from jagbench.bias import BucketedBias
from jagbench.pairs import Align, Window, check_beyond_the_window, visible_range
from jagbench.rotary import TokenTable

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OFFSETS_DTYPES = (torch.int32, torch.int64)
BUCKET_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


def check_values(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse q `[rows, heads, d]`, k `[rows, kv_heads, d]`, v `[rows, kv_heads, dv]` that clash."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_packed(name, x)
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


def check_packed(name: str, x: Tensor) -> None:
    """Refuse what is no float tensor `[rows, heads, head_dim]`."""
    if not isinstance(x, Tensor) or x.dim() != 3:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a tensor [rows, heads, head_dim], got {shape}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must have one of the dtypes {DTYPES}, got {x.dtype}")
    if x.shape[1] < 1 or x.shape[2] < 1:
        raise ValueError(f"{name} must have heads and head_dim >= 1, got {tuple(x.shape)}")


def sequence_lengths(
    name: str, offsets: Tensor, rows: int, longest: int | None, called: str | None = None
) -> list[int]:
    """Length of every sequence, from offsets `[batch + 1]` (int32 or int64) over `rows` rows.

    longest: the caller's `max_len`, which no sequence may exceed; None sets no limit.
    called: what the caller names the offsets; None is `<name>_offsets`.
    """
    called = f"{name}_offsets" if called is None else called
    if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.numel() == 0:
        shape = tuple(offsets.shape) if isinstance(offsets, Tensor) else type(offsets).__name__
        raise ValueError(f"{called} must be a tensor [batch + 1], got {shape}")
    if offsets.dtype not in OFFSETS_DTYPES:
        raise ValueError(f"{called} must be int32 or int64, got {offsets.dtype}")
    bounds = offsets.tolist()
    if bounds[0] != 0:
        raise ValueError(f"{called} must start at 0, got {bounds[0]}")
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    for i, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"{called} decrease at index {i + 1}: {bounds[i]} to {bounds[i + 1]}")
    if bounds[-1] > rows:
        raise ValueError(f"{called} end at {bounds[-1]}, past the {rows} rows of {name}")
    check_longest(name, max(lengths, default=0), longest)
    return lengths


def packed_lengths(name: str, x: Tensor, offsets: Tensor) -> list[int]:
    """Length of every sequence of x `[rows, heads, head_dim]` under the one offsets of a call."""
    if isinstance(offsets, Tensor) and offsets.device != x.device:
        raise ValueError(f"offsets are on {offsets.device}, the values on {x.device}")
    return sequence_lengths(name, offsets, x.shape[0], None, called="offsets")


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


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, as `jagbench.pairs` defines it.

    Raises ValueError for an unknown alignment, for a window that is not two sides, each None or at
    least 0, and for a prefix or a number of last queries that is no whole number of at least 0.
    """

    causal: bool
    align: Align
    window: Window | None
    prefix: int
    last_full: int

    def __post_init__(self) -> None:
        _check_mask(self.align, self.window)
        visible_range(self.causal, self.window)
        check_beyond_the_window(self.prefix, self.last_full)


def _check_mask(align: str, window: Window | None) -> None:
    if align not in get_args(Align):
        raise ValueError(f"align must be one of {get_args(Align)}, got {align!r}")
    if window is not None and (not isinstance(window, (tuple, list)) or len(window) != 2):
        raise ValueError(f"window must be (left, right), got {window!r}")


def check_eps(eps: float) -> None:
    """Refuse what is no number of at least 0; what a norm adds under its root."""
    try:
        fits = bool(eps >= 0)
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"eps must be at least 0, got {eps!r}")


def check_block_size(block_size: int) -> None:
    """Refuse a block size that is not a whole number of at least 1."""
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size must be a whole number of at least 1, got {block_size!r}")


def check_table(name: str, table: Tensor | TokenTable, x: Tensor, lengths: Sequence[int]) -> None:
    """Refuse a rotary table that does not fit x `[rows, heads, head_dim]` of these lengths."""
    rows = table.rows if isinstance(table, TokenTable) else table
    if not isinstance(rows, Tensor) or rows.dim() != 2:
        shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"{name} must be a tensor [positions, rotary_dim], got {shape}")
    if rows.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"{name} must be {x.dtype} or float32, got {rows.dtype}")
    if rows.device != x.device:
        raise ValueError(f"{name} is on {rows.device}, the values on {x.device}")
    if rows.shape[1] < 2 or rows.shape[1] % 2 or rows.shape[1] > x.shape[2]:
        raise ValueError(
            f"{name} must have an even number of columns from 2 to the head_dim {x.shape[2]}, "
            f"got {rows.shape[1]}"
        )
    if isinstance(table, TokenTable):
        if rows.shape[0] != x.shape[0]:
            raise ValueError(f"{name} has {rows.shape[0]} rows for {x.shape[0]} tokens")
    elif rows.shape[0] < max(lengths, default=0):
        raise ValueError(
            f"{name} has {rows.shape[0]} positions, and the longest sequence has {max(lengths)}"
        )


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


def visible(q_length: int, k_length: int, mask: Mask, device: torch.device) -> Tensor:
    """Which keys each query sees, bool `[q_length, k_length]`: the rules of `jagbench.pairs`."""
    left, right = visible_range(mask.causal, mask.window)
    row = torch.arange(q_length, device=device)[:, None]
    query = row + (k_length - q_length if mask.align == "end" else 0)
    key = torch.arange(k_length, device=device)[None, :]
    seen = torch.ones(q_length, k_length, dtype=torch.bool, device=device)
    if left is not None:
        seen = seen & (key >= query - left)
    if right is not None:
        seen = seen & (key <= query + right)
    context = (key < mask.prefix) | ((query >= 0) & (query < mask.prefix))
    last = row >= q_length - mask.last_full
    if mask.causal:
        last = last & (key <= query)
    return seen | context | last


def drop(x: Tensor, used: Tensor) -> Tensor:
    """Rows `[rows, heads, dim]` with those that take part in no visible pair set to 0.

    A NaN there would otherwise spread, because 0 times NaN is NaN.
    """
    return torch.where(used[:, None, None], x, 0.0)


def no_rows(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, dense: bool = False
) -> Tensor:
    """Output of no sequence, `[0, heads, dv]` or, of a dense query, `[0, rows, heads, dv]`.

    It is tied to every argument in the graph: an empty batch has gradients too.
    """
    out = q[:, :, :1].expand(-1, -1, v.shape[-1])
    out = out[None, :][:0] if dense else out[:0]
    for x in (k, v, bias):
        out = out if x is None else out + x[:0].sum().to(out.dtype)
    return out
