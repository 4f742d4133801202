"""Additive attention bias that is looked up in a small table, as ranking models use it for time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BucketedBias:
    """A bias `table[bucket_ids[pair], head]` for every query-key pair.

    table: `[buckets, heads or 1]`, any float dtype; the differentiable part.
    bucket_ids: `[sum of len_q * len_k]`, uint8, int16, int32 or int64, row-major per sequence in
        the packing of a dense jagged bias, every value in `[0, buckets)`.
    """

    table: Tensor
    bucket_ids: Tensor


def log_time_bucket(seconds: Tensor, buckets: int) -> Tensor:
    """Bucket of a time difference: `floor(log2(1 + |seconds|))`, clipped to `buckets - 1`; int64.

    Integer seconds are bucketed exactly (no logarithm is taken: its rounding would move powers of
    two to the wrong side on some machines).
    """
    if buckets < 1:
        raise ValueError(f"buckets must be at least 1, got {buckets}")
    magnitude = seconds.abs().to(torch.float64).floor() + 1.0
    # frexp returns a mantissa in [0.5, 1), so its exponent minus one is floor(log2), unrounded.
    return (torch.frexp(magnitude).exponent.long() - 1).clamp(max=buckets - 1)


def log_time_bias(
    table: Tensor, q_times: Tensor, k_times: Tensor, q_offsets: Tensor, k_offsets: Tensor
) -> BucketedBias:
    """`BucketedBias` of the time between query and key, from event times packed by the offsets.

    table `[buckets, heads or 1]`; q_times `[total_q]` and k_times `[total_k]` in seconds.
    """
    buckets = table.shape[0]
    q_bounds, k_bounds = q_offsets.tolist(), k_offsets.tolist()
    ids = [
        log_time_bucket(q_times[q0:q1, None] - k_times[None, k0:k1], buckets).flatten()
        for q0, q1, k0, k1 in zip(
            q_bounds[:-1], q_bounds[1:], k_bounds[:-1], k_bounds[1:], strict=True
        )
    ]
    empty = torch.zeros(0, dtype=torch.int64, device=table.device)
    return BucketedBias(table, torch.cat([empty, *ids]).to(torch.int32))
