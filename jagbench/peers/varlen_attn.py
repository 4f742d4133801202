"""torch.nn.attention.varlen.varlen_attn: FlashAttention 2 on packed tensors, within torch.

Float16 and bfloat16 on a GPU. Causal masks and windows align the last query with the last key.
head_dim is padded to a multiple of 8, values to the width of the keys.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from jagbench.peers.adapter import Plan, Result, hide_blind_rows, packed_plan, packed_query, peer
from jagbench.peers.arguments import (
    HALF,
    Call,
    library,
    refuse,
    refuse_loose_end,
    refuse_unordered_sums,
)
from jagbench.peers.blocks import with_blocks

__version__ = torch.__version__

PEER = "torch's varlen_attn"


def _plan(call: Call) -> Plan:
    varlen = library("torch.nn.attention.varlen", "torch", ">= 2.11")
    refuse(call.bias is not None, f"{PEER} takes no bias")
    refuse(call.q.dtype not in HALF, f"{PEER} takes float16 and bfloat16, not {call.q.dtype}")
    refuse(max(call.q.shape[2], call.v.shape[2]) > 256, f"{PEER} has head_dim up to 256")
    refuse_loose_end(call, PEER)
    refuse_unordered_sums(call, PEER)
    extra = _keywords(varlen.varlen_attn, call)
    q_offsets, k_offsets = packed_query(call)[1].int(), call.k_offsets.int()
    longest_q, longest_k = call.q_lengths.longest, call.k_lengths.longest
    if call.bounded:
        # A window side of at least the longest key length is dropped, which only queries that
        # are no more than that many can afford.
        longest_k = max(longest_q, longest_k)

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Result:
        result = varlen.varlen_attn(
            q, k, v, q_offsets, k_offsets, longest_q, longest_k, scale=call.scale,
            return_aux=varlen.AuxRequest(lse=call.return_lse), **extra,
        )  # fmt: skip
        if not call.return_lse:
            return result  # type: ignore[no-any-return]
        out, lse = result
        # [heads, total_q], whatever its docstring says; it has no gradient there.
        return out, hide_blind_rows(lse.detach().t())

    notes = {name: str(value) for name, value in extra.items()}
    return packed_plan(call, kernel, multiple=8, one_width=True, notes=notes)


def _keywords(function: Any, call: Call) -> dict[str, Any]:
    """Mask and grouped heads, as this torch names them: its releases differ."""
    known = _parameters(function)
    keywords: dict[str, Any] = {}
    if "window_size" in known:
        sides = (call.left, call.right)
        keywords["window_size"] = tuple(-1 if side is None else side for side in sides)
    else:
        windowed = call.bounded and not call.causal_only
        refuse(windowed, f"{PEER} of torch {torch.__version__} has no window")
        keywords["is_causal"] = call.causal_only
    if "enable_gqa" in known and call.grouped:
        keywords["enable_gqa"] = True
    return keywords


@functools.cache
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


_PEER = with_blocks(peer(_plan, __version__), _plan)
jagged_attention = _PEER.jagged_attention
block_attention = _PEER.block_attention
prepare = _PEER.prepare
configuration = _PEER.configuration
