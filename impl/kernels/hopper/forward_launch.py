"""Launch of the Hopper forward: schedule, descriptors, work list."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from jagbench.impl.kernels.activations import SOFTMAX
from jagbench.impl.kernels.arguments import Geometry
from jagbench.impl.kernels.attention_launch import Mask
from jagbench.impl.kernels.hopper.work import WorkList, build_work_list
from jagbench.impl.kernels.relaunch import relaunch

#: Query rows of a consumer warpgroup, and consumers.
GROUP_ROWS, GROUPS = 64, 2
#: Registers a thread at launch: 3 warpgroups of 168 make 240 + 240 + 24 once redistributed.
MAX_REGISTERS = 168
#: Keys of a sequence up to which small key tiles and one more query stage are faster.
SHORT_KEYS = 128
# Bound of the row axis of a descriptor, as in the kernel, and of the axes that are never bounded.
_FAR, _UNBOUNDED = 1 << 30, 0x7FFF0000


@dataclass(frozen=True)
class ForwardTiles:
    """Keys of a tile, stages of the rings of keys (and values) and of queries, and switches.

    heads_apart: all tiles of a (sequence, head) side by side in the list, which keeps its keys in
        L2, instead of the heads of a tile. On an H200, softmax with turns, TFLOP/s apart against
        adjacent: 1024 full 578 to 561, 1024 x 64 217 to 201, U[1,1024] 462 to 472, U[1,2048] even;
        U[1,512] 351 to 399 while the consumers divided by what they had just loaded, which they
        no longer wait for.
    ping_pong: the warpgroups take turns at the tensor cores. GELU 566 to 540 (1024 full), softmax
        399 to 387 (U[1,512]), 472 to 459 (U[1,1024]), 536 to 517 (U[1,2048]), 561 even (1024 full).
    resident: list entries dealt together, whose keys are kept where they are the same
        (`keys_stay`); 0: none are.
    """

    block_k: int
    key_stages: int
    query_stages: int
    heads_apart: bool = True
    ping_pong: bool = True
    resident: int = 0

    def __str__(self) -> str:
        return (
            f"{GROUPS * GROUP_ROWS}x{self.block_k} key stages {self.key_stages} "
            f"query stages {self.query_stages}"
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
    return fits and several and even and mask.left < 0 and mask.right < 0


@cache
def in_hands(tiles: ForwardTiles) -> ForwardTiles:
    """The tiles, dealt in hands."""
    return replace(tiles, resident=HAND)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor,
    geometry: Geometry, mask: Mask, *, scale: float, out_scale: float = 1.0,
    activation: int = SOFTMAX.value, max_k_len: int = -1, tiles: ForwardTiles | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Output and, for softmax, lse `[heads, out_rows]` in units of log 2.

    Takes what `support.unsupported` lets pass, offsets checked, q, k and v laid out for TMA
    (`support.tma_layout`). scale: factor of Q K^T before exp2 (softmax) or the activation;
    out_scale: of the output, which softmax has none of.
    """
    g = geometry
    softmax = activation == SOFTMAX.value
    rows = (g.batch, g.total_q) if g.shared_q else (g.total_q,)
    out = torch.empty(*rows, g.heads, g.v_dim, dtype=q.dtype, device=q.device)
    lse = None
    if softmax:
        lse = torch.empty(g.heads, g.out_rows, dtype=torch.float32, device=q.device)
    if not g.out_rows:
        return out, lse
    work = build_work_list(
        q_offsets, k_offsets, g.total_q, GROUPS * GROUP_ROWS, shared_rows=g.shared_q, span=mask.span
    )
    programs = min(_multiprocessors(q.device.index or 0), work.upper * g.heads)
    if tiles is None:
        tiles = forward_tiles(g.qk_dim, keys_are_short(g, max_k_len))
        if keys_stay(tiles, g, mask, max_k_len, work.upper * g.heads, programs):
            tiles = in_hands(tiles)
    _launch(q, k, v, out, lse, g, mask, work, tiles, programs, activation, scale, out_scale)
    return out, lse


def _launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, g: Geometry, mask: Mask,
    work: WorkList, tiles: ForwardTiles, programs: int, activation: int, scale: float,
    out_scale: float,
) -> None:  # fmt: skip
    scale_first = lse is not None and not scale > 0.0
    relaunch(
        # What the form hangs on beyond this is the same in every call: pointers are allocations.
        _kernel(), programs, q.device,
        (q.dtype, g.qk_dim, tiles, activation, *mask.constants.values(), scale_first),
        jagged_descriptor(q, GROUP_ROWS, out), jagged_descriptor(k, tiles.block_k, out),
        jagged_descriptor(v, tiles.block_k, out),
        jagged_descriptor(out.view(g.out_rows, g.heads, g.v_dim), GROUP_ROWS, out),
        # Without softmax there is no lse: any pointer stands in.
        work.items if lse is None else lse, work.items, work.count,
        g.heads, g.group, g.batch, g.out_rows, mask.left, mask.right,
        float(scale), float(out_scale),
        GROUPS, tiles.key_stages, tiles.query_stages, activation, *mask.constants.values(),
        scale_first, tiles.heads_apart, tiles.ping_pong, tiles.resident,
        num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip


def jagged_descriptor(x: Tensor, rows: int, stand_in: Tensor) -> Any:
    """4-D TMA view of packed `x [total, heads, d]` whose row bound moves to any sequence's end.

    Address = 2^30 (2^34 - stride) + (start + length) stride + (2^30 - length + row) stride elements
    of 2 bytes, which is (start + row) stride modulo 2^64 bytes; row >= length is out of bounds.
    The idea is that of triton/tools/ragged_tma.py. A tensor without rows is never read, but has no
    address: `stand_in` lends its own.
    """
    total, heads, dim = x.shape
    stride = x.stride(0) if total > 1 else heads * dim
    made = copy(_view(stride, heads * dim, rows, dim, x.dtype))
    made.base = x if total else stand_in
    return made


# Gluon is imported here, not above: it may be missing (`support`).
@cache
def _view(stride: int, width: int, rows: int, dim: int, dtype: torch.dtype) -> Any:
    """A descriptor to copy: Triton checks every new one, which takes longer than all else here."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(
        torch.empty(8, dtype=dtype, device="cpu"),
        [_UNBOUNDED, _UNBOUNDED, _FAR, width],
        [2**34 - stride, stride, stride, 1],
        [1, 1, rows, dim],
        _shared_layout(rows, dim, dtype),
    )


@cache
def _shared_layout(rows: int, dim: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, dim], element)


@cache
def _kernel() -> Any:
    from jagbench.impl.kernels.hopper.forward import attention_forward_kernel

    return attention_forward_kernel


@cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
