"""Launch of the Hopper forward: schedule, descriptors, work list."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from jagbench.impl.kernels.activations import SOFTMAX
from jagbench.impl.kernels.arguments import Geometry
from jagbench.impl.kernels.attention_launch import multiprocessors
from jagbench.impl.kernels.hopper.descriptors import jagged_descriptor
from jagbench.impl.kernels.hopper.work import WorkList, build_work_list, folds
from jagbench.impl.kernels.mask import Mask
from jagbench.impl.kernels.relaunch import relaunch
from jagbench.impl.kernels.tuning import note_used

#: Query rows of a consumer warpgroup, and consumers.
GROUP_ROWS, GROUPS = 64, 2
#: Registers a thread at launch: 3 warpgroups of 168 make 240 + 240 + 24 once redistributed.
MAX_REGISTERS = 168
#: Keys of a sequence up to which small key tiles and one more query stage are faster.
SHORT_KEYS = 128
#: Mean query length from which the tiles of a head lie side by side in the list.
LONG_ROWS = 1000


@dataclass(frozen=True)
class ForwardTiles:
    """Keys of a tile, stages of the rings of keys (and values) and of queries, and switches.

    heads_apart: all tiles of a (sequence, head) side by side in the list, which keeps its keys in
        L2, instead of the heads of a tile, which reads rows of q whole. `chosen` decides.
    ping_pong: the warpgroups take turns at the tensor cores.
    resident: list entries dealt together, whose keys are kept where they are the same
        (`keys_stay`); 0: none are.
    folded: tiles are dealt in pairs that weigh the same under a causal mask (`work.folds`).

    What each is worth: docs/kernels/hopper.md.
    """

    block_k: int
    key_stages: int
    query_stages: int
    heads_apart: bool = True
    ping_pong: bool = True
    resident: int = 0
    folded: bool = False

    def __str__(self) -> str:
        return (
            f"{GROUPS * GROUP_ROWS}x{self.block_k} key stages {self.key_stages} "
            f"query stages {self.query_stages}"
            + ("" if self.heads_apart else " heads adjacent")
            + ("" if self.ping_pong else " no turns")
            + (f" hands {self.resident}" if self.resident else "")
            + (" folded" if self.folded else "")
        )


# (head dim, keys are short): chosen from runs on an H200, within 227 KiB of shared memory.
_TABLE: dict[tuple[int, bool], ForwardTiles] = {
    (64, False): ForwardTiles(128, 4, 2),
    (64, True): ForwardTiles(64, 4, 3),
    (128, False): ForwardTiles(128, 2, 2),
    (128, True): ForwardTiles(64, 2, 3),
}


def forward_tiles(dim: int, short_keys: bool) -> ForwardTiles:
    """The table's tiles."""
    return _TABLE[dim, short_keys]


def keys_are_short(geometry: Geometry, max_k_len: int) -> bool:
    """Told by max_k_len, else (-1) guessed from the mean length.

    A wrong guess costs time, never rows.
    """
    return (geometry.mean_k if max_k_len < 0 else max_k_len) <= SHORT_KEYS


#: Entries of a hand with resident keys, and hands a program must get for an even deal.
HAND, HANDS = 8, 8


def keys_stay(
    tiles: ForwardTiles, geometry: Geometry, mask: Mask, max_k_len: int, entries: int, programs: int
) -> bool:
    """Whether a sequence's keys fit the ring and serve several query tiles, for an even deal.

    Without it every item of 1024 x 256 reads 128 KiB of keys and values for 17 MFLOP: 3.5 TB/s of
    the L2 at 450 TFLOP/s. entries: of the list, at most. max_k_len is a hint, as above.
    """
    longest = geometry.mean_k if max_k_len < 0 else max_k_len
    cross = max_k_len >= 0 or geometry.mean_q >= 2 * geometry.mean_k
    fits = cross and longest <= tiles.block_k * tiles.key_stages
    several = geometry.mean_q > GROUPS * GROUP_ROWS
    even = HAND * HANDS * programs <= entries < 1 << 30
    return fits and several and even and not mask.bounded


@cache
def in_hands(tiles: ForwardTiles) -> ForwardTiles:
    """The tiles, dealt in hands."""
    return replace(tiles, resident=HAND)


@cache
def adjacent(tiles: ForwardTiles) -> ForwardTiles:
    """The tiles, the heads of each side by side in the list."""
    return replace(tiles, heads_apart=False)


@cache
def folded(tiles: ForwardTiles) -> ForwardTiles:
    """The tiles, dealt in pairs."""
    return replace(tiles, folded=True)


def chosen(g: Geometry, mask: Mask, max_k_len: int, entries: int, programs: int) -> ForwardTiles:
    """The table's row and the switches for a call; arguments as `keys_stay`."""
    short = keys_are_short(g, max_k_len)
    tiles = forward_tiles(g.qk_dim, short)
    # The smallest keys gain nothing by staying: what they cost is little of what an item moves.
    if not short and keys_stay(tiles, g, mask, max_k_len, entries, programs):
        return in_hands(tiles)
    tiles = tiles if short or g.mean_q >= LONG_ROWS else adjacent(tiles)
    return folded(tiles) if folds(mask, entries, programs) else tiles


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor,
    geometry: Geometry, mask: Mask, *, scale: float, out_scale: float = 1.0,
    activation: int = SOFTMAX.value, max_k_len: int = -1, tiles: ForwardTiles | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Output `geometry.out_shape` and, for softmax, lse `[heads, out_rows]` in units of log 2.

    Takes what `support.unsupported` lets pass, offsets checked, q, k and v laid out for TMA
    (`support.tma_layout`). scale: factor of Q K^T before exp2 (softmax) or the activation;
    out_scale: of the output, which softmax has none of.
    """
    g = geometry
    softmax = activation == SOFTMAX.value
    out = torch.empty(g.out_shape, dtype=q.dtype, device=q.device)
    lse = None
    if softmax:
        lse = torch.empty(g.heads, g.out_rows, dtype=torch.float32, device=q.device)
    if not g.out_rows:
        return out, lse
    work = build_work_list(
        q_offsets, k_offsets, g.total_q, GROUPS * GROUP_ROWS, shared_rows=g.shared_q
    )
    programs = min(multiprocessors(q), work.upper * g.heads)
    if tiles is None:
        tiles = chosen(g, mask, max_k_len, work.upper * g.heads, programs)
    note_used("hopper_forward", tiles)
    _launch(q, k, v, out, lse, g, mask, work, tiles, programs, activation, scale, out_scale)
    return out, lse


def _launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, g: Geometry, mask: Mask,
    work: WorkList, tiles: ForwardTiles, programs: int, activation: int, scale: float,
    out_scale: float,
) -> None:  # fmt: skip
    scale_first = lse is not None and not scale > 0.0
    bounds = mask.constants.values()
    rows = out.view(g.out_rows, g.heads, g.v_dim) if g.shared_q else out
    relaunch(
        # What the form hangs on beyond this is the same in every call: pointers are allocations.
        _kernel(), programs, q.device,
        (q.dtype, g.qk_dim, tiles, activation, *bounds, scale_first),
        jagged_descriptor(q, GROUP_ROWS, g.qk_dim, out),
        jagged_descriptor(k, tiles.block_k, g.qk_dim, out),
        jagged_descriptor(v, tiles.block_k, g.v_dim, out),
        jagged_descriptor(rows, GROUP_ROWS, g.v_dim, out),
        # Without softmax there is no lse: any pointer stands in.
        work.items if lse is None else lse, work.items, work.count,
        g.heads, g.group, g.batch, g.out_rows, mask.left, mask.right,
        float(scale), float(out_scale),
        GROUPS, tiles.key_stages, tiles.query_stages, activation, *bounds,
        scale_first, tiles.heads_apart, tiles.ping_pong, tiles.resident, tiles.folded,
        num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip


# Gluon is imported here, not above: it may be missing (`support`).
@cache
def _kernel() -> Any:
    from jagbench.impl.kernels.hopper.forward import attention_forward_kernel

    return attention_forward_kernel
