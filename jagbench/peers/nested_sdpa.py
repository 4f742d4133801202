"""scaled_dot_product_attention on jagged nested tensors (torch.nested, jagged layout).

torch chooses the back end: FlashAttention or the memory-efficient kernel on a GPU, else a loop over
sequences. Without grouped heads, masks or windows; causal where every sequence has as many queries
as keys, which torch does on a GPU only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jagbench.peers.adapter import Plan, packed_plan, packed_query, peer
from jagbench.peers.arguments import Call, Lengths, refuse, refuse_unordered_sums

__version__ = torch.__version__

PEER = "nested SDPA"


def _plan(call: Call) -> Plan:
    refuse(call.return_lse, "scaled_dot_product_attention returns no log-sum-exp")
    refuse(call.bias is not None, f"{PEER} takes no mask, so no bias")
    refuse(call.grouped, f"{PEER} has no grouped heads")
    refuse(call.bounded and not call.causal_only, f"{PEER} takes no mask, so no window")
    refuse(call.bounded and not call.same_lengths, f"{PEER} is causal between equal lengths only")
    gpu = call.q.device.type != "cpu"
    refuse(gpu and call.q.dtype == torch.float64, f"{PEER} does not take float64 on a GPU")
    if gpu:
        refuse_unordered_sums(call, PEER)
    q_offsets = packed_query(call)[1]
    # Equal offsets must be one tensor: by that torch knows that ragged sizes agree.
    k_offsets = q_offsets if call.same_lengths else call.k_offsets

    def nest(x: Tensor, offsets: Tensor, lengths: Lengths) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(
            x, offsets, min_seqlen=lengths.shortest, max_seqlen=lengths.longest
        ).transpose(1, 2)

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        try:
            out = F.scaled_dot_product_attention(
                nest(q, q_offsets, call.q_lengths),
                nest(k, k_offsets, call.k_lengths),
                nest(v, k_offsets, call.k_lengths),
                is_causal=call.causal_only,
                scale=call.scale,
            )
        except RuntimeError as error:
            if "No viable backend" in str(error) or "No available kernel" in str(error):
                raise NotImplementedError(
                    f"{PEER} has no kernel for {q.dtype}, head_dim {q.shape[-1]} on "
                    f"{q.device.type}, causal {call.causal_only}"
                ) from error
            raise
        return out.transpose(1, 2).values()

    return packed_plan(call, kernel, notes={"backend": "chosen by torch"})


_PEER = peer(_plan, __version__)
jagged_attention = _PEER.jagged_attention
prepare = _PEER.prepare
configuration = _PEER.configuration
