"""Block attention: softmax attention inside blocks counted from the start of each sequence.

Source: PyTorch blog "TLX Block Attention", 2026, and facebookresearch/ads_model_kernel_library:
blocks of 64, bidirectional, optional rotary embedding of queries, keys and values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.pairs import attention_flops
from jagbench.reference import arguments, costs
from jagbench.reference.norm import qk_norm
from jagbench.reference.rotary import rotary as rotated
from jagbench.rotary import TokenTable
from jagbench.spec import SHARED, Operator


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Tensor | TokenTable | None = None,
    rotate_values: bool = True,
    qk_norm_eps: float | None = None,
) -> Tensor:
    """Softmax attention of every block of a jagged batch, written from the definition.

    q `[total, heads, d]`; k `[total, kv_heads, d]`; v `[total, kv_heads, dv]`; offsets
    `[batch + 1]`. Query head h reads key head h // (heads / kv_heads). A query sees exactly the
    keys whose position from the start of its sequence, divided by block_size and rounded down, is
    its own; the last block of a sequence may be short. float64, float32, float16 and bfloat16; in
    the last two every step rounds to that dtype, which is the naive run that sets the error budget.

    block_size: rows of a block, at least 1.
    scale: factor of Q K^T; None is 1 / sqrt(d).
    rotary: table by which q and k are turned first, in interleaved pairs (`rotary`); its angles are
        constants, of which no gradient is promised.
    rotate_values: v is turned too; the output is not turned back.
    qk_norm_eps: every head of q and of k goes through RMSNorm with this eps, without a weight,
        before it is turned; None leaves them as they are.

    Returns out `[total, heads, dv]`; rows past the last offset are 0. Raises ValueError for
    arguments that do not fit, with their numbers.
    """
    return _over_sequences(
        q, k, v, offsets, block_size, scale, rotary, rotate_values, qk_norm_eps, False
    )


def uncancelled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Tensor | TokenTable | None = None,
    rotate_values: bool = True,
    qk_norm_eps: float | None = None,
) -> Tensor:
    """The same output; gradients as if the normaliser were a constant: the terms that cancel."""
    return _over_sequences(
        q, k, v, offsets, block_size, scale, rotary, rotate_values, qk_norm_eps, True
    )


def _over_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    block_size: int,
    scale: float | None,
    table: Tensor | TokenTable | None,
    rotate_values: bool,
    qk_norm_eps: float | None,
    constant_normaliser: bool,
) -> Tensor:
    """The loop over sequences; arguments as `block_attention`."""
    arguments.check_values(q, k, v)
    arguments.check_block_size(block_size)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has {q.shape[0]} rows and k has {k.shape[0]}: they share the offsets")
    lengths = arguments.packed_lengths("q", q, offsets)
    total = sum(lengths)
    if qk_norm_eps is not None:
        normed = _normalised(q[:total], k[:total], qk_norm_eps, constant_normaliser)
        q, k = (
            torch.cat([rows, torch.zeros_like(x[total:])])
            for rows, x in zip(normed, (q, k), strict=True)
        )
    if table is not None:
        q, k = (rotated(x, offsets, table) for x in (q, k))
        v = rotated(v, offsets, table) if rotate_values else v
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    outs = [arguments.no_rows(q, k, v)]
    for sequence in zip(*(torch.split(x[:total], lengths) for x in (q, k, v)), strict=True):
        for queries, keys, values in zip(*(x.split(block_size) for x in sequence), strict=True):
            outs.append(_attend(queries, keys, values, scale, constant_normaliser))
    return torch.cat([*outs, q.new_zeros(q.shape[0] - total, q.shape[1], v.shape[-1])])


def _normalised(q: Tensor, k: Tensor, eps: float, constant: bool) -> tuple[Tensor, Tensor]:
    """Heads of q and k under `qk_norm`; constant: with scales that have no gradient."""
    if not constant:
        return qk_norm(q, k, eps=eps)
    first, second = (
        x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + eps) for x in (q, k)
    )
    return first, second


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, constant_normaliser: bool) -> Tensor:
    """Out `[n, heads, dv]` of one block, all of whose n queries see all of its n keys."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2)) * scale  # [heads, n, n]
    weights = torch.softmax(scores, -1)
    if constant_normaliser:
        weights = weights.detach() * torch.exp(scores - scores.detach())
    return (weights @ v).transpose(0, 1)


def visible_pairs(lengths: Tensor, block_size: int) -> Tensor:
    """Visible pairs of each sequence, int64 `[batch]`: its whole blocks, and its tail, squared."""
    lengths = lengths.to(torch.int64)
    tail = lengths % block_size
    return (lengths - tail) * block_size + tail * tail


def block_attention_flops(inputs: Inputs) -> int:
    """FLOP of one forward pass over visible pairs: 2 heads (d + dv) a pair; a rotation counts 0."""
    lengths = inputs.lengths("offsets")
    assert lengths is not None
    pairs = int(visible_pairs(lengths, inputs.options.get("block_size", 64)).sum())
    t = inputs.tensors()
    return attention_flops(pairs, t["q"].shape[1], t["q"].shape[2], t["v"].shape[2])


def block_attention_bytes(inputs: Inputs) -> int:
    """Least bytes of one forward pass: every input read once, every output written once.

    Of a rotary table by position the rows of the longest sequence are read.
    """
    t = inputs.tensors()
    width = t["q"].shape[1] * t["v"].shape[2] * t["q"].element_size()
    read = costs.read_once(inputs, {"rotary": costs.longest(inputs, "offsets")})
    return read + costs.rows_of(inputs, "offsets") * width


BLOCK_ATTENTION = Operator(
    name="block_attention",
    reference=block_attention,
    layout={
        "q": "offsets",
        "k": "offsets",
        "v": "offsets",
        "rotary": SHARED,
        "rotary.rows": "offsets",
    },
    output_layout={"out": "offsets"},
    differentiable=("q", "k", "v"),
    flops=block_attention_flops,
    bytes_moved=block_attention_bytes,
    uncancelled=uncancelled,
    bandwidth_bound=True,
    paper="PyTorch blog 2026, TLX Block Attention",
)
