"""flash-linear-attention's softmax attention in Triton (package fla-core, fla.ops.attn).

Causal self attention between equal offsets, grouped heads, an optional window to the left. Float16
and bfloat16: it multiplies float32 in TF32. Empty sequences are taken out of the offsets, because
its list of tiles counts sequences by their first tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jagbench.peers.adapter import Plan, peer
from jagbench.peers.arguments import HALF, Call, library, refuse, version_of

PACKAGE, WANTED = "fla-core", ">= 0.4"
PEER = "flash-linear-attention"

__version__ = version_of(PACKAGE)


def _plan(call: Call) -> Plan:
    attention = library("fla.ops.attn", PACKAGE, WANTED)
    refuse(call.return_lse, f"{PEER} returns no log-sum-exp")
    refuse(call.bias is not None, f"{PEER} takes no bias")
    refuse(call.right != 0, f"{PEER} is causal only")
    refuse(
        call.q_offsets is None or not call.same_lengths,
        f"{PEER} has one offsets tensor: as many keys as queries in every sequence",
    )
    refuse(call.q.dtype not in HALF, f"{PEER} multiplies {call.q.dtype} in TF32 or not at all")
    refuse(max(call.q.shape[2], call.v.shape[2]) > 256, f"{PEER} has head_dim up to 256")
    offsets = call.k_offsets.long()
    if call.k_lengths.shortest == 0 and not call.empty:
        offsets = torch.unique_consecutive(offsets)
    window = None if call.left is None else call.left + 1

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.parallel_attn(  # type: ignore[no-any-return]
            q, k, v, scale=call.scale, window_size=window, cu_seqlens=offsets
        )

    def pack(name: str, x: Tensor) -> Tensor:
        return x[None].contiguous()

    def unpack(name: str, x: Tensor) -> Tensor:
        return x[0]

    return Plan(kernel, pack, unpack, {"window": str(window)})


_PEER = peer(_plan, __version__)
jagged_attention = _PEER.jagged_attention
prepare = _PEER.prepare
configuration = _PEER.configuration
