"""Jagged softmax attention: O = softmax(scale Q K^T + bias) V within each sequence.

Source: "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with Jagged
Flash Attention", arXiv 2409.15373.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from jagbench.bias import BucketedBias
from jagbench.inputs import Inputs
from jagbench.pairs import Align, Window
from jagbench.reference import arguments, costs
from jagbench.spec import PAIRS, SHARED, Operator


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    align: Align = "end",
    window: Window | None = None,
    prefix: int = 0,
    last_full: int = 0,
    bias: Tensor | BucketedBias | None = None,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of every sequence of a jagged batch, written from the equation.

    q `[total_q, heads, d]`; k `[total_k, kv_heads, d]`; v `[total_k, kv_heads, dv]`; offsets
    `[batch + 1]`. Query head h reads key head h // (heads / kv_heads). With `q_offsets=None`, q
    `[rows, heads, d]` is one dense query shared by every sequence. float64, float32, float16 and
    bfloat16; in the last two every step rounds to that dtype, which is the naive run that sets the
    error budget.

    scale: factor of Q K^T; None is 1 / sqrt(d).
    causal, align, window, prefix, last_full: which keys a query sees (`jagbench.pairs`). The first
        `prefix` tokens of a sequence are seen by every query and see every key; the last
        `last_full` queries are bound by causality alone, by no window.
    bias: added to the scaled scores, `[sum of len_q * len_k, heads or 1]` in q's dtype or float32,
        or a `BucketedBias`; -inf hides a pair.
    max_q_len, max_k_len: not needed; a value below the longest sequence is refused.
    deterministic: always kept.
    return_lse: also return the natural log of the sum of exponentials, float32 (float64 for float64
        inputs), `[total_q, heads]`.

    Returns out `[total_q, heads, dv]` (`[batch, rows, heads, dv]` for a dense query). Rows past the
    last offset are 0, in lse too; a row that sees no key has out 0, lse -inf and gradient 0.
    Raises ValueError for arguments that do not fit, with their numbers.
    """
    return _over_sequences(
        q, k, v, q_offsets, k_offsets,
        arguments.Mask(causal, align, window, prefix, last_full), scale, bias,
        (max_q_len, max_k_len), return_lse, constant_normaliser=False,
    )  # fmt: skip


def uncancelled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    align: Align = "end",
    window: Window | None = None,
    prefix: int = 0,
    last_full: int = 0,
    bias: Tensor | BucketedBias | None = None,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same outputs; gradients as if the normaliser were a constant.

    They hold P dP where the true ones hold P (dP - D): the size of the two terms whose difference
    every kernel takes, each rounded. With one visible key that difference is exactly 0.
    """
    return _over_sequences(
        q, k, v, q_offsets, k_offsets,
        arguments.Mask(causal, align, window, prefix, last_full), scale, bias,
        (max_q_len, max_k_len), return_lse, constant_normaliser=True,
    )  # fmt: skip


def _over_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    mask: arguments.Mask,
    scale: float | None,
    bias: Tensor | BucketedBias | None,
    longest: tuple[int | None, int | None],
    return_lse: bool,
    constant_normaliser: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """The loop over sequences; arguments as `jagged_attention`."""
    arguments.check_values(q, k, v)
    q_lengths, k_lengths = arguments.both_lengths(q, k, q_offsets, k_offsets, *longest)
    pairs = [m * n for m, n in zip(q_lengths, k_lengths, strict=True)]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    total_q, total_k = sum(q_lengths), sum(k_lengths)
    dense = q_offsets is None
    queries = [q] * len(k_lengths) if dense else torch.split(q[:total_q], q_lengths)
    keys, values = torch.split(k[:total_k], k_lengths), torch.split(v[:total_k], k_lengths)
    rows = None if bias is None else arguments.dense_bias(bias, q, sum(pairs))
    biases: Sequence[Tensor | None] = [None] * len(pairs)
    if rows is not None:
        biases = torch.split(rows, pairs)

    outs = [arguments.no_rows(q, k, v, rows, dense=dense)]
    lses = [outs[0][..., 0].to(_wide(q.dtype))]
    for i, (m, n) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        seen = arguments.visible(m, n, mask, q.device)
        out, lse = _attend(
            queries[i], keys[i], values[i], seen, scale, biases[i], constant_normaliser
        )
        outs.append(out[None] if dense else out)
        lses.append(lse[None] if dense else lse)
    if not dense:
        padding = q.new_zeros(q.shape[0] - total_q, q.shape[1], v.shape[-1])
        outs.append(padding)
        lses.append(padding[..., 0].to(lses[0].dtype))
    return (torch.cat(outs), torch.cat(lses)) if return_lse else torch.cat(outs)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    bias: Tensor | None,
    constant_normaliser: bool,
) -> tuple[Tensor, Tensor]:
    """Out `[m, heads, dv]` and lse `[m, heads]` of one sequence; seen bool `[m, n]`."""
    group = q.shape[1] // k.shape[1]
    q = arguments.drop(q, seen.any(1)).transpose(0, 1)
    k = arguments.drop(k, seen.any(0)).transpose(0, 1).repeat_interleave(group, 0)
    v = arguments.drop(v, seen.any(0)).transpose(0, 1).repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2)) * scale  # [heads, m, n]
    if bias is not None:
        scores = scores + bias.T.reshape(bias.shape[1], *seen.shape)
    scores = torch.where(seen, scores, -math.inf)
    # A row of -inf alone has no softmax: let it be any finite row, then take it out.
    some = (scores != -math.inf).any(-1, keepdim=True)
    scores = torch.where(some, scores, 0.0)
    weights = torch.where(some, torch.softmax(scores, -1), 0.0)
    lse = torch.logsumexp(scores.to(_wide(scores.dtype)), -1).masked_fill(~some[..., 0], -math.inf)
    if constant_normaliser:
        weights = torch.where(seen, weights.detach() * torch.exp(scores - scores.detach()), 0.0)
    return (weights.to(v.dtype) @ v).transpose(0, 1), lse.to(_wide(q.dtype)).T


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the log-sum-exp."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def jagged_attention_flops(inputs: Inputs) -> int:
    """FLOP of one forward pass over visible pairs: 2 heads (d + dv) a pair."""
    return costs.forward_flops(inputs)


def jagged_attention_bytes(inputs: Inputs) -> int:
    """Least bytes of one forward pass: every input read once, every output written once."""
    return costs.forward_bytes(inputs)


JAGGED_ATTENTION = Operator(
    name="jagged_attention",
    reference=jagged_attention,
    layout={
        "q": "q_offsets",
        "k": "k_offsets",
        "v": "k_offsets",
        "bias": PAIRS,
        "bias.table": SHARED,
        "bias.bucket_ids": PAIRS,
    },
    output_layout={"out": "q_offsets", "lse": "q_offsets"},
    differentiable=("q", "k", "v", "bias", "bias.table"),
    flops=jagged_attention_flops,
    bytes_moved=jagged_attention_bytes,
    uncancelled=uncancelled,
    paper="arXiv 2409.15373",
)
