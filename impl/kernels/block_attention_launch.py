"""Launches of the block attention kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jagbench.impl.kernels.arguments import Geometry, geometry_of, kernel_layout
from jagbench.impl.kernels.attention_launch import Needs, multiprocessors
from jagbench.impl.kernels.block_attention_kernels import (
    block_forward_kernel,
    block_gradient_kernel,
)
from jagbench.impl.kernels.hopper.block_gradient_launch import (
    block_gradient_problem,
    launch_block_gradient,
)
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.packed_arguments import table_layout
from jagbench.impl.kernels.schedule import TileList, build_tile_list
from jagbench.impl.kernels.tuning import (
    Kernel,
    TileConfig,
    note_used,
    padded,
    shared_memory,
    tile_config,
)

#: Largest block whose keys and values one program keeps on chip.
LARGEST_BLOCK = 128
_LOG2_E = 1.4426950408889634
# Programs a multiprocessor is given before they are given longer runs instead, and the longest run:
# a program waits for its first block, and fetches every other while it computes the one before.
_WAVES, _LONGEST_RUN = 8, 128


@dataclass(frozen=True)
class BlockCall:
    """What the kernels are told beyond q, k, v and the upstream gradient.

    qk_norm_eps: of the RMSNorm of every head of q and k; None for none.
    table: rotary rows, by position or (`by_token`) by token; None turns nothing.
    portable: whether the Hopper tier is ruled out.
    """

    block_size: int
    scale: float
    table: Tensor | None
    by_token: bool
    rotate_values: bool
    portable: bool = False
    qk_norm_eps: float | None = None

    @property
    def rotary_dims(self) -> tuple[int, int]:
        """Elements turned of a head of q and k, and of v."""
        if self.table is None:
            return 0, 0
        width = self.table.shape[1]
        return width, width if self.rotate_values else 0


def block_tiles(
    gradient: bool, like: Tensor, qk_dim: int, v_dim: int, call: BlockCall
) -> TileConfig:
    """The table's tiles with a whole block of keys, and as many query rows as fit beside them.

    Raises NotImplementedError where not even 16 do.
    """
    kernel = kernel_name(gradient, call.table is not None)
    tiles = tile_config(kernel, like, qk_dim, v_dim, None)
    limit = None if INTERPRET.value else shared_memory(like.device.index or 0)
    size, turned = like.element_size(), call.rotary_dims[0]
    found = fitting_tiles(
        kernel, tiles, size, qk_dim, v_dim, call.block_size, limit, turned,
        call.qk_norm_eps is not None,
    )  # fmt: skip
    note_used(kernel, str(found))
    return found


def kernel_name(gradient: bool, turned: bool) -> Kernel:
    """The row of the table."""
    if turned:
        return "block_rotary_gradient" if gradient else "block_rotary"
    return "block_gradient" if gradient else "block"


def fitting_tiles(
    kernel: Kernel,
    tiles: TileConfig,
    element_size: int,
    qk_dim: int,
    v_dim: int,
    block_size: int,
    limit: int | None,
    rotary_dim: int = 0,
    qk_norm: bool = False,
) -> TileConfig:
    """`block_tiles` from the table's tiles, for `limit` bytes of shared memory (None: any)."""
    gradient, block_k = "gradient" in kernel, padded(block_size)
    if gradient and qk_norm:
        # With four warps the way back through the norm spills.
        tiles = replace(
            tiles, num_warps=max(tiles.num_warps, 8), num_stages=min(tiles.num_stages, 2)
        )
    tiles = replace(tiles, block_q=min(tiles.block_q, block_k), block_k=block_k)
    if element_size == 4:
        # Products on the plain ALUs fill registers. With 4 or 8 warps triton 3.7 makes a product of
        # turned rows a tf32 one on sm_100, or fails; with 16 never.
        tiles = replace(tiles, block_q=16, num_warps=16, num_stages=1)
    if gradient and max(block_k, padded(qk_dim) // 2, padded(v_dim) // 2) > 64:
        # Registers would spill, and triton 3.7 makes an empty kernel for sm_100 of more.
        warps = max(tiles.num_warps, 8)
        tiles = replace(tiles, block_q=min(tiles.block_q, 32), num_warps=warps, num_stages=1)
    width = element_size * (padded(qk_dim) + padded(v_dim))
    if limit is not None and tiles.num_stages > 1:
        needed = _pipelined_bytes(gradient, tiles, element_size, qk_dim, v_dim, rotary_dim)
        if needed > limit:
            tiles = replace(tiles, num_stages=1)
    # Gradients' operands lie in shared memory in two orders, but for some.
    share = 7 / 4 if gradient else 1
    while limit is not None and share * width * (tiles.block_q + block_k) > limit:
        if tiles.block_q == 16:
            raise NotImplementedError(
                f"{kernel}: blocks of {block_size} rows with head dims {qk_dim} and {v_dim} do not "
                f"fit {limit} bytes of shared memory"
            )
        tiles = replace(tiles, block_q=tiles.block_q // 2, num_stages=1)
    return tiles


def _pipelined_bytes(
    gradient: bool, tiles: TileConfig, element_size: int, qk_dim: int, v_dim: int, rotary_dim: int
) -> int:
    """Shared memory of a kernel that fetches ahead: what it loads, once a stage, and a result.

    Angles are fp32, whatever the table holds. Compiled kernels use this or less
    (tests/test_ahead_of_time.py holds them to the limit).
    """
    d, dv = padded(qk_dim), padded(v_dim)
    rows = tiles.block_q * (d + (dv if gradient else 0)) + tiles.block_k * (d + dv)
    angles = 4 * max(tiles.block_q, tiles.block_k) * d if rotary_dim else 0
    return tiles.num_stages * (element_size * rows + angles) + (
        element_size * tiles.block_q * max(d, dv)
    )


def _run_length(items: TileList, kv_heads: int, like: Tensor) -> int:
    """Blocks a program: one while there are few, so that no multiprocessor idles."""
    enough = _WAVES * multiprocessors(like)
    return max(1, min(_LONGEST_RUN, items.upper * kv_heads // enough))


def _sizes(g: Geometry, tiles: TileConfig, call: BlockCall) -> dict[str, int | bool]:
    """The compile-time parameters of both kernels."""
    turned, turned_values = call.rotary_dims
    return {
        "GROUP": g.group, "D": g.qk_dim, "DV": g.v_dim,
        "BLOCK_D": padded(g.qk_dim), "BLOCK_DV": padded(g.v_dim),
        "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k,
        "ROTARY_DIM": turned, "VALUE_ROTARY_DIM": turned_values, "BY_TOKEN": call.by_token,
        "QK_NORM": call.qk_norm_eps is not None,
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
    }  # fmt: skip


def block_forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, call: BlockCall) -> Tensor:
    """Out `[total, heads, v_dim]`."""
    g = geometry_of(q, k, v, offsets, offsets)
    q, k, v = (kernel_layout(t) for t in (q, k, v))
    out = torch.empty(g.out_shape, dtype=q.dtype, device=q.device)
    items = build_tile_list(offsets, None, g.total_q, call.block_size)
    tiles = block_tiles(False, q, g.qk_dim, g.v_dim, call)
    run = _run_length(items, g.kv_heads, q)
    grid = -(-items.upper // run) * g.kv_heads
    if not grid:
        return out
    table = None if call.table is None else table_layout(call.table)
    block_forward_kernel[(grid,)](
        q, k, v, out, table, offsets, items.sequence, items.block, items.count,
        g.batch, g.total_q, run, call.block_size, g.kv_heads, call.scale * _LOG2_E,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], 0 if table is None else table.stride(0),
        call.qk_norm_eps or 0.0,
        **_sizes(g, tiles, call),
    )  # fmt: skip
    return out


def block_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, offsets: Tensor, call: BlockCall, needs: Needs
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; an empty tensor stands for one that is not needed."""
    g = geometry_of(q, k, v, offsets, offsets)
    if block_gradient_problem(q, g, call, needs) is None:
        return launch_block_gradient(q, k, v, d_out, offsets, call)
    dq, dk, dv = (
        torch.empty(t.shape if need else 0, dtype=t.dtype, device=t.device)
        for t, need in ((q, needs.query), (k, needs.key_value), (v, needs.key_value))
    )
    q, k, v, d_out = (kernel_layout(t) for t in (q, k, v, d_out))
    items = build_tile_list(offsets, None, g.total_q, call.block_size)
    tiles = block_tiles(True, q, g.qk_dim, g.v_dim, call)
    run = _run_length(items, g.kv_heads, q)
    grid = -(-items.upper // run) * g.kv_heads
    if not grid:
        return dq, dk, dv
    table = None if call.table is None else table_layout(call.table)
    strides = [s for t in (q, k, v, d_out) for s in t.stride()[:2]]
    block_gradient_kernel[(grid,)](
        q, k, v, d_out, dq, dk, dv, table, offsets, items.sequence, items.block, items.count,
        g.batch, g.total_q, run, call.block_size, g.kv_heads, call.scale * _LOG2_E, call.scale,
        *strides, 0 if table is None else table.stride(0),
        call.qk_norm_eps or 0.0,
        **_sizes(g, tiles, call), QUERY=needs.query, KEY_VALUE=needs.key_value,
    )  # fmt: skip
    return dq, dk, dv
