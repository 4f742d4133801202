"""FlexAttention (torch.nn.attention.flex_attention), compiled, over the packed stream.

The stream is one sequence of all tokens; a mask says which keys a query sees: those of its own
sequence, within its causal or window bounds. The mask is kept as the first and the last key of each
query, and its blocks are built from these directly: `create_block_mask` evaluates a mask for every
pair of tokens, which for half a million tokens takes longer than attention, or all memory.

Compiled for each shape anew (`dynamic=False`). Reaching the compiler's limit of recompilations is
an error rather than a silent fall back to eager code. Softmax is built in, so there is no gdpa. On
a CPU torch has the forward only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jagbench.peers.adapter import Plan, Result, packed_plan, packed_query, peer
from jagbench.peers.arguments import Call, library, refuse
from jagbench.peers.blocks import with_blocks
from jagbench.peers.compiling import limited

__version__ = torch.__version__

PEER = "FlexAttention"
MODULE = "torch.nn.attention.flex_attention"
#: Rows and columns of a block: torch's default, which its tiles divide.
BLOCK = 128


def _plan(call: Call) -> Plan:
    refuse(call.bias is not None, f"{PEER}: no score_mod is written here that reads a packed bias")
    refuse(call.q.dtype == torch.float64, f"{PEER} does not take float64")
    on_cpu = call.q.device.type == "cpu"
    refuse(on_cpu and call.wants_gradient, f"{PEER} has no backward on a CPU")
    refuse(on_cpu and call.return_lse, f"{PEER} returns no log-sum-exp on a CPU")
    refuse(
        not on_cpu and min(call.q.shape[2], call.v.shape[2]) < 16,
        f"{PEER} has head_dim from 16 on a GPU",
    )
    mask = None if call.empty else block_mask(call)

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Result:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        result = compiled()(
            q, k, v, block_mask=mask, scale=call.scale, enable_gqa=call.grouped,
            return_lse=call.return_lse,
        )  # fmt: skip
        if not call.return_lse:
            return result[0].transpose(0, 1)  # type: ignore[no-any-return]
        out, lse = result
        return out[0].transpose(0, 1), lse[0].t()

    return packed_plan(call, kernel, notes={"block": str(BLOCK), "dynamic": "False"})


@functools.cache
def compiled() -> Callable[..., Any]:
    """flex_attention through torch.compile, once a process."""
    eager = library(MODULE, "torch", ">= 2.11").flex_attention
    return limited(eager)


def key_ranges(call: Call) -> tuple[Tensor, Tensor]:
    """First key each query sees and the key after its last, int64 `[total_q]`, in the stream.

    Both 0 for a query that sees none.
    """
    q_offsets = packed_query(call)[1]
    total = call.batch * call.rows if call.q_offsets is None else call.q_lengths.total
    counts = q_offsets.diff()
    sequence = torch.repeat_interleave(
        torch.arange(call.batch, device=counts.device), counts, output_size=total
    )
    first, last = call.k_offsets[:-1][sequence].long(), call.k_offsets[1:][sequence].long()
    place = torch.arange(total, device=counts.device) - q_offsets[:-1][sequence] + first
    if call.align == "end":
        place = place + last - first - counts[sequence]
    low = first if call.left is None else torch.maximum(first, place - call.left)
    high = last if call.right is None else torch.minimum(last, place + call.right + 1)
    seen = low < high
    return torch.where(seen, low, 0), torch.where(seen, high, 0)


def block_mask(call: Call) -> Any:
    """`BlockMask` of the stream: for a block of rows its first visible key to its last.

    Keys between two sequences' that nobody sees may be among them: the mask hides them.
    """
    low, high = key_ranges(call)
    total_q, total_k = low.numel(), call.k_lengths.total
    refuse(max(total_q, total_k) >= 2**31, f"{PEER} counts rows in 32 bits")
    num_k = -(-total_k // BLOCK)
    seen = high > low
    starts = torch.where(seen, low, total_k + BLOCK)
    first = _by_block(starts, total_k + BLOCK).amin(1) // BLOCK
    last = (_by_block(high, 0).amax(1) - 1).div(BLOCK, rounding_mode="floor")
    # Full: in the range of every row. A block with a blind row, or cut off by the end, has none.
    full_first = -(-_by_block(starts, total_k + BLOCK).amax(1) // BLOCK)
    full_stop = _by_block(high, 0).amin(1) // BLOCK
    full = (full_stop - full_first).clamp(min=0)
    touched = (last - first + 1).clamp(min=0)
    # [blocks of rows, blocks of keys] below: 32 bits, for there may be 100 million of them.
    first, full_first, full, touched = (x.int() for x in (first, full_first, full, touched))
    column = torch.arange(num_k, dtype=torch.int32, device=low.device)
    # What the mask reads for every pair: 64 bits would double its registers in the kernel.
    low, high = low.int(), high.int()
    # Partial blocks lie before and behind the run of full ones.
    before = torch.where(full > 0, full_first - first, touched)[:, None]
    partial = first[:, None] + column + torch.where(column < before, 0, full[:, None])
    full_columns = full_first[:, None] + column

    def mask_mod(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= low[query]) & (key < high[query])

    return library(MODULE, "torch", ">= 2.11").BlockMask.from_kv_blocks(
        (touched - full)[None, None],
        partial.clamp(0, num_k - 1)[None, None],
        full[None, None],
        full_columns.clamp(0, num_k - 1)[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(total_q, total_k),
    )


def _by_block(rows: Tensor, fill: int) -> Tensor:
    """Rows `[total]` as `[blocks, BLOCK]`, the last block filled up."""
    gap = -rows.numel() % BLOCK
    return torch.cat([rows, rows.new_full((gap,), fill)]).view(-1, BLOCK)


_PEER = with_blocks(peer(_plan, __version__), _plan)
jagged_attention = _PEER.jagged_attention
block_attention = _PEER.block_attention
prepare = _PEER.prepare
configuration = _PEER.configuration
