"""Forward launches of jagged softmax attention: which kernel, which tiles, which programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jagbench.impl.kernels.arguments import Geometry, kernel_layout
from jagbench.impl.kernels.attention_launch import Bias, multiprocessors
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.jagged_attention_forward import (
    jagged_attention_forward_kernel,
    jagged_attention_short_keys_kernel,
)
from jagbench.impl.kernels.mask import Mask
from jagbench.impl.kernels.schedule import TileList, build_tile_list
from jagbench.impl.kernels.tuning import Schedule, TileConfig, padded, tile_config

LOG2E = math.log2(math.e)
# Masking of the forward kernel (its MASKING parameter).
_MASK_EVERY_TILE, _MASK_EDGES, _SUBTRACT = 0, 1, 2
# How its programs come by tiles (its DEAL parameter).
_ONE_EACH, _ZIGZAG, _LEFT_OVER = 0, 1, 2
#: Mean length from which "auto" takes v3: there TMA gains more than dealing tiles beforehand costs.
LONG_ROWS = 768
#: Keys of a sequence that the short-key kernel keeps on chip.
SHORT_KEYS = 64
#: Query tiles one program of the short-key kernel walks at most.
CHUNK = 8


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor,
    geometry: Geometry, mask: Mask, bias: Bias, scale: float, schedule: Schedule,
    max_k_len: int = -1,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Output, lse and, where subtraction is guarded, the redo list.

    lse: `[heads, out_rows]`, in units of log 2. redo: int32; its first entry counts the tiles that
    a second launch computed with a mask.
    """
    g = geometry
    q, k, v = (kernel_layout(t) for t in (q, k, v))
    call = _ForwardCall(q, k, v, q_offsets, k_offsets, g, mask, bias, scale * LOG2E)
    out, lse = _empty_outputs(q, g)
    plain = not mask.bounded and bias.kind == 0
    if schedule.variant in ("auto", "v2") and plain and _keys_are_short(g, max_k_len):
        return out, lse, _launch_short_keys(call, out, lse, schedule)
    tiles, descriptors, persistent = _choose_variant(call, schedule)
    items = build_tile_list(q_offsets, k_offsets, g.total_q, tiles.block_q, span=mask.span)
    grid = items.upper * g.heads
    if not grid:
        return out, lse, None
    # A descriptor ends with the tensor, not with the sequence: the last tile must be masked then.
    subtract = plain and schedule.variant != "v1" and descriptors is None
    # In fp32 the guard would refuse half of the tiles: "auto" masks their edges at once.
    subtract = subtract and not (schedule.variant == "auto" and q.dtype == torch.float32)
    redo = _redo_list(q, grid) if subtract else None
    masking = _SUBTRACT if subtract else _MASK_EDGES
    if schedule.variant == "v1":
        masking = _MASK_EVERY_TILE
    deal, programs = (_ZIGZAG, min(grid, multiprocessors(q))) if persistent else (_ONE_EACH, grid)
    _launch(call, out, lse, tiles, items, redo, masking, deal, programs, descriptors)
    if redo is not None:
        _launch_redo(call, out, lse, tiles, items, redo)
    return out, lse, redo


def _choose_variant(
    call: _ForwardCall, schedule: Schedule
) -> tuple[TileConfig, tuple[Any, Any] | None, bool]:
    """Tiles, descriptors (v3 where they can be had) and whether the launch is persistent."""
    g, q = call.geometry, call.q
    long = min(g.mean_q, g.mean_k) >= LONG_ROWS and padded(g.qk_dim) == 128
    if schedule.variant == "v3" or (schedule.variant == "auto" and long):
        tiles = tile_config("softmax_tma", q, g.qk_dim, g.v_dim, schedule.forward)
        descriptors = _descriptors(call.k, call.v, tiles)
        if schedule.variant == "v3" or descriptors is not None:
            return tiles, descriptors, True
    return tile_config("softmax", q, g.qk_dim, g.v_dim, schedule.forward), None, False


@dataclass(frozen=True)
class _ForwardCall:
    """Arguments of the forward kernels; scale_log2 is the scale in units of log 2."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor | None
    k_offsets: Tensor
    geometry: Geometry
    mask: Mask
    bias: Bias
    scale_log2: float


def _redo_list(q: Tensor, grid: int) -> Tensor:
    """Room for every tile of a launch, with a count of 0."""
    redo = torch.empty(4 + 4 * grid, dtype=torch.int32, device=q.device)
    redo[:1].zero_()
    return redo


def _launch_redo(
    call: _ForwardCall, out: Tensor, lse: Tensor, tiles: TileConfig, items: TileList, redo: Tensor
) -> None:
    """Compute with a mask what an earlier launch left: mostly nothing, at the price of a launch."""
    programs = min(redo.numel() // 4, 2 * multiprocessors(call.q))
    _launch(call, out, lse, tiles, items, redo, _MASK_EDGES, _LEFT_OVER, programs)


def _launch(
    call: _ForwardCall, out: Tensor, lse: Tensor, tiles: TileConfig, items: TileList,
    redo: Tensor | None, masking: int, deal: int, programs: int,
    descriptors: tuple[Any, Any] | None = None,
) -> None:  # fmt: skip
    """One launch of the forward kernel."""
    g, mask, bias, q, k, v = call.geometry, call.mask, call.bias, call.q, call.k, call.v
    jagged_attention_forward_kernel[(programs,)](
        q, k, v, out, lse, *(descriptors or (None, None)), bias.values, bias.bucket_ids,
        call.q_offsets, call.k_offsets, bias.pair_offsets,
        items.sequence, items.block, items.count, redo,
        g.batch, g.total_q, g.total_k, g.out_rows, call.scale_log2, *mask.numbers,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *bias.strides,
        heads=g.heads, group=g.group, D=g.qk_dim, DV=g.v_dim,
        BLOCK_D=padded(g.qk_dim), BLOCK_DV=padded(g.v_dim),
        BLOCK_Q=tiles.block_q, BLOCK_K=tiles.block_k, **mask.portable,
        BIAS=bias.kind, MASKING=masking, SHARED_Q=g.shared_q,
        DESCRIPTORS=descriptors is not None, DEAL=deal,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _keys_are_short(g: Geometry, max_k_len: int) -> bool:
    """Whether a sequence's keys are expected to fit one tile, with queries on the longer side.

    Told by max_k_len, else by the mean length: a wrong guess costs time, never rows.
    """
    if g.batch == 0 or max(padded(g.qk_dim), padded(g.v_dim)) > 128:
        return False
    longest = g.mean_k if max_k_len < 0 else max_k_len
    return longest <= SHORT_KEYS and g.mean_q >= 2 * g.mean_k


def _launch_short_keys(
    call: _ForwardCall, out: Tensor, lse: Tensor, schedule: Schedule
) -> Tensor | None:
    """Forward with keys resident on chip; sequences with more keys go to the redo launch."""
    g, q, k, v = call.geometry, call.q, call.k, call.v
    tiles = tile_config("softmax_short", q, g.qk_dim, g.v_dim, schedule.forward)
    chunks = build_tile_list(call.q_offsets, call.k_offsets, g.total_q, CHUNK * tiles.block_q)
    grid = chunks.upper * g.heads
    if not grid:
        return None
    redo = _redo_list(q, grid * CHUNK)
    jagged_attention_short_keys_kernel[(grid,)](
        q, k, v, out, lse, call.q_offsets, call.k_offsets, chunks.sequence, chunks.block, redo,
        g.batch, g.total_q, g.total_k, g.out_rows, call.scale_log2,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        heads=g.heads, group=g.group, D=g.qk_dim, DV=g.v_dim,
        BLOCK_D=padded(g.qk_dim), BLOCK_DV=padded(g.v_dim),
        BLOCK_Q=tiles.block_q, BLOCK_K=tiles.block_k, CHUNK=CHUNK, SHARED_Q=g.shared_q,
        NUM_STAGES=tiles.num_stages, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    _launch_redo(call, out, lse, tiles, chunks, redo)
    return redo


def _empty_outputs(q: Tensor, g: Geometry) -> tuple[Tensor, Tensor]:
    rows = (g.batch, g.total_q) if g.shared_q else (g.total_q,)
    out = torch.empty(*rows, g.heads, g.v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(g.heads, g.out_rows, dtype=torch.float32, device=q.device)
    return out, lse


def _descriptors(k: Tensor, v: Tensor, tiles: TileConfig) -> tuple[Any, Any] | None:
    """TMA descriptors of K and V as `[rows, heads * head_dim]`; None where there can be none.

    Needed: compute capability 9, heads side by side, a head dim that is its own block width, and
    16-byte alignment. The interpreter cannot load 16-bit types through descriptors.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    if INTERPRET.value and k.dtype != torch.float32:
        return None
    if k.is_cuda and torch.cuda.get_device_capability(k.device)[0] < 9:
        return None
    found = []
    for tensor in (k, v):
        dim, row = tensor.shape[2], tensor.stride(0)
        aligned = tensor.data_ptr() % 16 == 0 and row * tensor.element_size() % 16 == 0
        if tensor.stride(1) != dim or padded(dim) != dim or not aligned or tensor.numel() == 0:
            return None
        view = tensor.as_strided((tensor.shape[0], tensor.shape[1] * dim), (row, 1))
        found.append(TensorDescriptor.from_tensor(view, [tiles.block_k, dim]))
    return found[0], found[1]
