"""Block attention through the general attention kernels: what a kernel of its own is measured by.

The block-diagonal mask is offsets cut at the blocks, so every pair of tiles that the mask hides is
skipped; the general kernels do the rest, log-sum-exp, separate passes of the backward and all.
Rotary is a step of its own before it.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from jagbench.impl.kernels.arguments import version
from jagbench.impl.kernels.jagged_attention import jagged_attention
from jagbench.impl.kernels.operators import define
from jagbench.impl.kernels.packed_arguments import (
    check_packed_offsets,
    check_values_of_offsets,
)
from jagbench.impl.kernels.rotary import rotary as turned
from jagbench.impl.kernels.tuning import Schedule, Tier
from jagbench.rotary import TokenTable

NAME = "block_attention by mask"

# Cut offsets of offsets seen before: (version, rows, block size), then the cut ones. Other code
# looks at offsets once a tensor, and these are tensors of ours.
_cut: MutableMapping[Tensor, tuple[tuple[int | None, int, int], Tensor]] = WeakTensorKeyDictionary()


def masked_block_attention(
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
    schedule: Schedule | Tier = "portable",
) -> Tensor:
    """As `block_attention`, made of `rotary` and `jagged_attention`; schedule is the latter's.

    Raises ValueError for malformed arguments, NotImplementedError for what either cannot do.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"{NAME}: block_size must be an int of at least 1, got {block_size!r}")
    if qk_norm_eps is not None:
        raise NotImplementedError(f"{NAME}: no general kernel has a QK-norm, got {qk_norm_eps}")
    check_packed_offsets(NAME, "q", q, offsets)
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{NAME}: {name} must be a tensor, got {type(x).__name__}")
    if q.dim() == k.dim() == 3 and q.shape[0] != k.shape[0]:
        raise ValueError(
            f"{NAME}: q has {q.shape[0]} rows and k has {k.shape[0]}: they share the offsets"
        )
    if rotary is not None:
        q, k = turned(q, offsets, rotary), turned(k, offsets, rotary)
        v = turned(v, offsets, rotary) if rotate_values else v
    blocks = block_offsets(offsets, q.shape[0], block_size)
    out = jagged_attention(
        q, k, v, blocks, blocks, scale=scale, max_q_len=block_size, max_k_len=block_size,
        schedule=schedule,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def block_offsets(offsets: Tensor, rows: int, block_size: int) -> Tensor:
    """Offsets of every block, counted from each sequence's start, and empty ones behind.

    How many blocks there are is known on the device alone; the bound is that of `build_tile_list`.
    Made once a tensor of offsets, version and block size.
    """
    cut: Tensor
    if torch.compiler.is_compiling():
        cut = _cut_op(offsets, rows, block_size)
        return cut
    state, found = (version(offsets), rows, block_size), _cut.get(offsets)
    if found is not None and found[0] == state and state[0] is not None:
        return found[1]
    cut = _cut_op(offsets, rows, block_size)
    _cut[offsets] = state, cut
    return cut


def _blocks_of(offsets: Tensor, rows: int, block_size: int) -> Tensor:
    """`block_offsets` of offsets whose values are looked at first: a fall would vanish in a cut."""
    check_values_of_offsets(NAME, offsets, rows, None, False)
    counts = (offsets.diff() + block_size - 1) // block_size
    ends = counts.cumsum(0)
    place = torch.arange(
        rows // block_size + counts.numel() + 1, device=offsets.device, dtype=ends.dtype
    )
    if counts.numel():
        sequence = torch.searchsorted(ends, place, right=True).clamp(max=counts.numel() - 1)
        starts = offsets[:-1][sequence] + (place - (ends - counts)[sequence]) * block_size
        cut = torch.where(place < ends[-1], starts, offsets[-1]).to(offsets.dtype)
    else:
        cut = offsets[:1].clone()
    return cut


def _blocks_of_fake(offsets: Tensor, rows: int, block_size: int) -> Tensor:
    batch = offsets.shape[0] - 1
    return offsets.new_empty(rows // block_size + batch + 1 if batch else 1)


_cut_op = define("block_offsets", _blocks_of, _blocks_of_fake)
