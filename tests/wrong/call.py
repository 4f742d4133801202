"""One call as data, and the check of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wrong.activations import ACTIVATIONS

Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Call:
    """One call of either operator, as the steps see it.

    softmax: jagged_attention if true, gdpa if not. pre, post: scales inside and outside the
    activation. activations: one a head (gdpa). bias: dense, or a table with bucket_ids.
    """

    softmax: bool
    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor | None
    k_offsets: Tensor
    pre: float
    post: float = 1.0
    activations: tuple[str, ...] = ()
    causal: bool = False
    align: str = "end"
    window: Window | None = None
    prefix: int = 0
    last_full: int = 0
    bias: Tensor | None = None
    bucket_ids: Tensor | None = None
    max_q_len: int | None = None
    max_k_len: int | None = None
    deterministic: bool = False

    @property
    def batch(self) -> int:
        """Sequences in the batch."""
        return self.k_offsets.numel() - 1

    @cached_property
    def pair_starts(self) -> list[int]:
        """First row of each sequence in a tensor packed by query-key pairs."""
        rows = self.q.shape[0]
        q_lengths = (
            [rows] * self.batch if self.q_offsets is None else self.q_offsets.diff().tolist()
        )
        starts = [0]
        for m, n in zip(q_lengths, self.k_offsets.diff().tolist(), strict=True):
            starts.append(starts[-1] + m * n)
        return starts


@dataclass(frozen=True)
class Tile:
    """One sequence: q `[H, m, d]`, k `[H, n, d]`, v `[H, n, dv]`, scores `[H, m, n]`.

    scores are scaled and biased; mask `[m, n]` is true where the pair is visible.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    mask: Tensor


def check(call: Call) -> None:
    """Raise ValueError, with the numbers, for arguments that do not fit together."""
    q, k, v = call.q, call.k, call.v
    if not q.dim() == k.dim() == v.dim() == 3:
        raise ValueError(f"q, k, v must have 3 dims, got {q.dim()}, {k.dim()}, {v.dim()}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"dtypes do not fit: {q.dtype}, {k.dtype}, {v.dtype}")
    if len({t.device for t in (q, k, v, call.k_offsets)}) > 1:
        raise ValueError(f"devices differ: {q.device}, {k.device}, {v.device}")
    if q.shape[2] != k.shape[2] or k.shape[:2] != v.shape[:2]:
        raise ValueError(f"shapes do not fit: {q.shape}, {k.shape}, {v.shape}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads are no multiple of {k.shape[1]} kv_heads")
    if call.align not in ("start", "end"):
        raise ValueError(f"align must be 'start' or 'end', got {call.align!r}")
    if any(side is not None and (side < 0 or side != int(side)) for side in call.window or ()):
        raise ValueError(f"window sides must be whole, at least 0, or None, got {call.window}")
    for name, count in (("prefix", call.prefix), ("last_full", call.last_full)):
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"{name} must be a whole number of at least 0, got {count}")
    _check_offsets(call)
    _check_activations(call)
    _check_bias(call)


def _check_offsets(call: Call) -> None:
    groups = (
        ("q", call.q_offsets, call.q, call.max_q_len),
        ("k", call.k_offsets, call.k, call.max_k_len),
    )
    for name, offsets, values, longest in groups:
        if offsets is None:
            continue
        if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}_offsets: {offsets.dim()} dims, {offsets.dtype}")
        if offsets.numel() != call.batch + 1 or offsets.numel() == 0:
            raise ValueError(f"{name}_offsets has {offsets.numel()} entries, want {call.batch + 1}")
        if offsets.device != values.device:
            raise ValueError(f"{name}_offsets on {offsets.device}, values on {values.device}")
        bounds = offsets.tolist()
        if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > values.shape[0]:
            raise ValueError(f"{name}_offsets {bounds} do not fit {values.shape[0]} rows")
        most = max(offsets.diff().tolist(), default=0)
        if longest is not None and most > longest:
            raise ValueError(f"max_{name}_len={longest}, but the longest sequence has {most}")


def _check_activations(call: Call) -> None:
    if call.softmax:
        return
    unknown = [name for name in call.activations if name not in ACTIVATIONS]
    if unknown:
        raise ValueError(f"unknown activation {unknown}")
    if len(call.activations) != call.q.shape[1]:
        raise ValueError(f"{len(call.activations)} activations for {call.q.shape[1]} heads")


def _check_bias(call: Call) -> None:
    if call.bias is None:
        return
    pairs, heads = call.pair_starts[-1], call.q.shape[1]
    if not call.bias.is_floating_point():
        raise ValueError(f"bias of {call.bias.dtype}")
    rows = call.bias if call.bucket_ids is None else call.bucket_ids
    if rows.shape[0] != pairs or call.bias.dim() != 2 or call.bias.shape[1] not in (1, heads):
        raise ValueError(f"bias {tuple(call.bias.shape)} for {pairs} pairs and {heads} heads")
