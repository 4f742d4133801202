"""FlashAttention 4 (package flash-attn-4, CuTe DSL): its differentiable varlen entry.

Float16 and bfloat16 on GPUs from Hopper on. Causal masks and windows align the last query with the
last key. head_dim is padded to a multiple of 8. Compiled on first use for each kind of call.
"""

from __future__ import annotations

from torch import Tensor

from jagbench.peers.adapter import Plan, Result, hide_blind_rows, packed_plan, packed_query, peer
from jagbench.peers.arguments import HALF, Call, library, refuse, refuse_loose_end, version_of
from jagbench.peers.blocks import with_blocks

PACKAGE, WANTED = "flash-attn-4", ">= 4.0.0b36"
PEER = "FlashAttention 4"

__version__ = version_of(PACKAGE)


def _plan(call: Call) -> Plan:
    cute = library("flash_attn.cute", PACKAGE, WANTED)
    refuse(call.bias is not None, f"{PEER} takes no bias")
    refuse(call.q.dtype not in HALF, f"{PEER} takes float16 and bfloat16, not {call.q.dtype}")
    refuse_loose_end(call, PEER)
    q_offsets, k_offsets = packed_query(call)[1].int(), call.k_offsets.int()

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Result:
        try:
            result = cute.flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=q_offsets, cu_seqlens_k=k_offsets,
                max_seqlen_q=call.q_lengths.longest, max_seqlen_k=call.k_lengths.longest,
                softmax_scale=call.scale, causal=call.causal_only,
                window_size=(None, None) if call.causal_only else (call.left, call.right),
                deterministic=call.deterministic, return_lse=call.return_lse,
            )  # fmt: skip
        except AssertionError as error:  # how it refuses shapes and devices
            raise NotImplementedError(f"{PEER}: {error}") from error
        out, lse = result if isinstance(result, tuple) else (result, None)
        return (out, hide_blind_rows(lse.t())) if call.return_lse else out

    notes = {"causal": str(call.causal_only), "window": str((call.left, call.right))}
    return packed_plan(call, kernel, multiple=8, notes=notes)


_PEER = with_blocks(peer(_plan, __version__), _plan)
jagged_attention = _PEER.jagged_attention
block_attention = _PEER.block_attention
prepare = _PEER.prepare
configuration = _PEER.configuration
