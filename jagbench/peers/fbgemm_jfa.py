"""FBGEMM's jagged flash attention in Triton (fbgemm_gpu.sll.triton).

Its own maths: no scale, and probabilities divided by the maximum length. The scale is therefore put
on q, and the output multiplied by a maximum length that is a power of two (which rounds nothing).
Self attention between equal offsets, without masks, windows, bias or grouped heads. Its layout is
`[heads, total, head_dim]`; it stores the log-sum-exp in the dtype of the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jagbench.peers.adapter import Plan, peer
from jagbench.peers.arguments import Call, library, refuse, version_of

PACKAGE, WANTED = "fbgemm-gpu", ">= 1.6 (built for this torch)"
PEER = "FBGEMM's jagged flash attention"

__version__ = next(
    (v for v in map(version_of, (PACKAGE, f"{PACKAGE}-cpu")) if v != "absent"), "absent"
)


def _plan(call: Call) -> Plan:
    sll = library("fbgemm_gpu.sll.triton", PACKAGE, WANTED)
    refuse(call.return_lse, f"{PEER} returns no log-sum-exp")
    refuse(call.bias is not None, f"{PEER} takes no bias")
    refuse(call.grouped, f"{PEER} has no grouped heads")
    refuse(call.bounded, f"{PEER} has no causal mask and no window")
    refuse(
        call.q_offsets is None or not call.same_lengths,
        f"{PEER} has one offsets tensor: as many keys as queries in every sequence",
    )
    refuse(call.q.shape[2] != call.v.shape[2], f"{PEER} has one head_dim for q, k and v")
    refuse(call.q.dtype == torch.float64, f"{PEER} does not take float64")
    longest = 1 << max(call.q_lengths.longest - 1, 0).bit_length()

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = sll.multi_head_jagged_flash_attention(
            q * call.scale, k, v, call.k_offsets, longest, allow_tf32=False
        )
        return out * longest  # type: ignore[no-any-return]

    def pack(name: str, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous()

    def unpack(name: str, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    return Plan(kernel, pack, unpack, {"maximum length": str(longest)})


_PEER = peer(_plan, __version__)
jagged_attention = _PEER.jagged_attention
prepare = _PEER.prepare
configuration = _PEER.configuration
