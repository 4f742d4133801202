"""The steps of a right implementation; each may be exchanged for a wrong one.

Shapes: m queries and n keys of one sequence, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from wrong.activations import activate, derivative
from wrong.call import Call, Tile

Bounds = tuple[int, int, int, int]


def bounds(call: Call) -> list[Bounds]:
    """(first query, end, first key, end) of every sequence; a dense query is the same for all."""
    keys = call.k_offsets.tolist()
    rows = call.q.shape[0]
    if call.q_offsets is None:
        queries = [(0, rows)] * call.batch
    else:
        ends = call.q_offsets.tolist()
        queries = list(pairwise(ends))
    return [(*q, *k) for q, k in zip(queries, pairwise(keys), strict=True)]


def read(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Rows `[start, stop)` of a packed tensor, as `[heads, rows, dim]`, float32 or wider."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    # A copy, so that the strides of the argument decide no bit of a product.
    return tensor[start:stop].to(wide).transpose(0, 1).clone(memory_format=torch.contiguous_format)


def repeat(rows: Tensor, times: int) -> Tensor:
    """Rows of every key head `[kv_heads, n, dim]` for each head of its group, `[H, n, dim]`."""
    return rows.repeat_interleave(times, dim=0)


def mask(call: Call, m: int, n: int) -> Tensor:
    """Which of n keys each of m queries sees, bool `[m, n]`."""
    left, right = call.window if call.window is not None else (None, None)
    if call.causal:
        right = 0
    device = call.q.device
    at = torch.arange(m, device=device)[:, None] + (n - m if call.align == "end" else 0)
    key = torch.arange(n, device=device)[None, :]
    seen = torch.ones(m, n, dtype=torch.bool, device=device)
    if left is not None:
        seen &= key >= at - left
    if right is not None:
        seen &= key <= at + right
    context = (key < call.prefix) | ((at >= 0) & (at < call.prefix))
    free = torch.arange(m, device=device)[:, None] >= m - call.last_full
    if call.causal:
        free = free & (key <= at)
    return seen | context | free


def stay(call: Call, where: Bounds) -> Call:
    """The call as its mask sees it in one sequence, unchanged."""
    return call


def score(call: Call, q: Tensor, k: Tensor) -> Tensor:
    """pre q k^T, `[H, m, n]`."""
    return call.pre * (q @ k.mT)


def add_bias(call: Call, scores: Tensor, first_pair: int) -> Tensor:
    """Scores plus the bias of this sequence's pairs."""
    if call.bias is None:
        return scores
    _, m, n = scores.shape
    rows = slice(first_pair, first_pair + m * n)
    values = call.bias[rows] if call.bucket_ids is None else call.bias[call.bucket_ids[rows].long()]
    return scores + values.to(scores.dtype).reshape(m, n, call.bias.shape[1]).permute(2, 0, 1)


def per_head(call: Call, function: Callable[[str, Tensor], Tensor], scores: Tensor) -> Tensor:
    """A function of (activation name, scores `[m, n]`) applied to every head."""
    if len(set(call.activations)) == 1:
        return function(call.activations[0], scores)
    pairs = zip(call.activations, scores, strict=True)
    return torch.stack([function(name, head) for name, head in pairs])


def weigh(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    """Weights of v `[H, m, n]` and log-sum-exp `[H, m]` (zeros for gdpa)."""
    if not call.softmax:
        weights = call.post * per_head(call, activate, tile.scores)
        return weights.masked_fill(~tile.mask, 0.0), weights.new_zeros(weights.shape[:2])
    hidden = tile.scores.masked_fill(~tile.mask, -math.inf)
    if hidden.shape[-1] == 0:
        return hidden, hidden.new_full(hidden.shape[:2], -math.inf)
    peak = hidden.amax(-1, keepdim=True)
    # exp(score - log-sum-exp) would round the sum's logarithm into every weight.
    raised = torch.exp(hidden - peak.masked_fill(peak == -math.inf, 0.0))
    total = raised.sum(-1, keepdim=True)
    weights = raised / total.masked_fill(total == 0.0, 1.0)
    return weights, (peak + total.log())[..., 0]


def mix(weights: Tensor, v: Tensor) -> Tensor:
    """weights v, `[H, m, dv]`."""
    return weights @ v


def slope(call: Call, tile: Tile, weights: Tensor, flow: Tensor) -> Tensor:
    """Gradient of the scores from `flow`, the gradient of the weights; both `[H, m, n]`."""
    if call.softmax:
        gradient = weights * (flow - (weights * flow).sum(-1, keepdim=True))
    else:
        gradient = call.post * per_head(call, derivative, tile.scores) * flow
    return gradient.masked_fill(~tile.mask, 0.0)


def reduce_group(gradient: Tensor, kv_heads: int) -> Tensor:
    """Gradient of k or v `[n, kv_heads, dim]` from that of its repeats `[H, n, dim]`."""
    heads, n, dim = gradient.shape
    return gradient.view(kv_heads, heads // kv_heads, n, dim).sum(1).transpose(0, 1)


def allocate(shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for an output or a gradient."""
    return torch.zeros(shape, dtype=dtype, device=like.device)


def keep(call: Call, name: str, tensor: Tensor) -> Tensor:
    """An output or a gradient ("out", "lse", "grad q", ...), unchanged."""
    return tensor


def combine(total: Tensor, rows: slice, part: Tensor) -> None:
    """Add the dq of one sequence, which for a dense query falls on the same rows each time."""
    total[rows] += part


def no_action(call: Call) -> None:
    """Nothing."""
