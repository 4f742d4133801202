"""Launches of MXFP8 attention and GDPA: operands in MX blocks, forward, backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from jagbench.impl.kernels.activations import SOFTMAX
from jagbench.impl.kernels.arguments import Geometry
from jagbench.impl.kernels.attention_launch import (
    BackwardCall,
    Bias,
    empty_bias_gradient,
    query_tiles,
    reduce_bias_gradient,
)
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.mask import Mask
from jagbench.impl.kernels.mx_attention_gradients import (
    mx_key_value_gradient_kernel,
    mx_query_gradient_kernel,
    seen_rows_kernel,
)
from jagbench.impl.kernels.mx_attention_kernels import mx_attention_forward_kernel
from jagbench.impl.kernels.mx_attention_operands import (
    Operand,
    Saved,
    dequantised,
    offsets_of_queries,
    value_block_of_backward,
)
from jagbench.impl.kernels.mx_attention_tiles import CODES, NATIVE, VALUES
from jagbench.impl.kernels.mx_launch import ELEMENTS, words
from jagbench.impl.kernels.schedule import build_tile_list
from jagbench.impl.kernels.tuning import TileConfig, note_used, padded
from jagbench.mx import BLOCK_SIZE, SQUARE, AttentionRecipe, ElemDtype, ScaleMode, Stream

_STATISTICS_ROWS = 128
Operands = Literal["values", "codes", "native"]
_OPERANDS: dict[Operands, int] = {
    "values": VALUES.value, "codes": CODES.value, "native": NATIVE.value,
}  # fmt: skip
Pass = Literal["forward", "query_gradient", "key_value_gradient"]
# By pass and padded head dim. Not tuned on a GPU: what compiles without a spill for every
# architecture; native block-scaled products of compute capability 10 want 128 rows.
_TILES: dict[tuple[Pass, int], TileConfig] = {
    ("forward", 64): TileConfig(128, 64, 8, 2),
    ("forward", 128): TileConfig(128, 64, 8, 2),
    ("query_gradient", 64): TileConfig(64, 64, 4, 2),
    ("query_gradient", 128): TileConfig(128, 32, 8, 2),
    ("key_value_gradient", 64): TileConfig(32, 64, 4, 2),
    ("key_value_gradient", 128): TileConfig(32, 64, 8, 2),
}
# Where eight warps share a product of 64 rows, both fours compute all of it in registers.
_OF_128_KEYS = TileConfig(32, 128, 8, 2)
_ACCUMULATES_APART = (9, 10)


NO_BIAS = Bias()


@dataclass(frozen=True)
class ForwardCall:
    """What the forward kernel is told beyond q, k and v; activation as in `BackwardCall`.

    score_scale: factor of Q K^T; out_scale: of the output (GDPA).
    """

    geometry: Geometry
    mask: Mask
    recipe: AttentionRecipe
    activation: int
    score_scale: float
    out_scale: float = 1.0
    activation_ids: Tensor | None = None
    activation_set: int = 0
    bias: Bias = NO_BIAS


def choose_operands(device: torch.device, elem_dtype: ElemDtype) -> Operands:
    """How the forward kernel takes its operands on a device."""
    if INTERPRET.value:
        return "codes"
    major = torch.cuda.get_device_capability(device)[0]
    return "native" if major in (10, 12) and elem_dtype != "e2m1" else "values"


def table_tiles(which: Pass, qk_dim: int, v_dim: int, major: int) -> TileConfig:
    """Tiles of a pass on a GPU of a compute capability, whose first number is `major`."""
    width = 128 if max(qk_dim, v_dim) > 64 else 64
    if which == "key_value_gradient" and width == 128 and major in _ACCUMULATES_APART:
        return _OF_128_KEYS
    return _TILES[which, width]


def _tiles(which: Pass, g: Geometry, tiles: TileConfig | None, device: torch.device) -> TileConfig:
    if tiles is None and INTERPRET.value:
        tiles = TileConfig(64, 64, 4, 1)
    if tiles is None:
        major = torch.cuda.get_device_capability(device)[0]
        tiles = table_tiles(which, g.qk_dim, g.v_dim, major)
    if min(tiles.block_q, tiles.block_k) < BLOCK_SIZE or tiles.block_q > _STATISTICS_ROWS:
        raise ValueError(
            f"tiles of {which} must be of {BLOCK_SIZE} rows or more, and of "
            f"{_STATISTICS_ROWS} queries or less, got {tiles.block_q} x {tiles.block_k}"
        )
    note_used(f"mx_{which}", tiles)
    return tiles


def head_block(dim: int) -> int:
    """Width of the block that holds a head: whole MX blocks."""
    return max(BLOCK_SIZE, padded(dim))


# -- constants -------------------------------------------------------------------------------------


def element_constants(elem_dtype: ElemDtype, scale_mode: ScaleMode) -> dict[str, Any]:
    """What the kernels are told of an element type."""
    element = ELEMENTS[elem_dtype]
    fraction = element.largest & ((1 << element.mantissa) - 1)
    return {
        "MANTISSA": element.mantissa, "BIAS_OF": element.bias, "WIDTH": element.width,
        "LIMIT": (1 + fraction / (1 << element.mantissa)) * 2.0**element.top,
        "CARRY": element.carry(scale_mode), "TOP": element.top,
        "SATURATES": scale_mode in ("floor", "even"),
    }  # fmt: skip


def forward_constants(recipe: AttentionRecipe, operands: Operands) -> dict[str, Any]:
    """What the forward kernel is compiled for, of a recipe."""
    element = ELEMENTS[recipe.elem_dtype]
    return {
        **element_constants(recipe.elem_dtype, recipe.scale_mode),
        "LARGEST": element.largest, "NAN": element.nan,
        "TYPE": recipe.elem_dtype, "FIXED": recipe.weight_scale == "fixed",
        "SUM_QUANTISED": recipe.row_sum == "quantized",
        "V_BR": recipe.value_block[0], "V_BC": recipe.value_block[1],
        "CONVERT": operands == "native", "OPERANDS": _OPERANDS[operands],
    }  # fmt: skip


def gradient_constants(
    recipe: AttentionRecipe, operands: Operands, key_value: bool
) -> dict[str, Any]:
    """What a gradient kernel is compiled for, of a recipe."""
    of_values = element_constants(recipe.elem_dtype, recipe.scale_mode)
    of_gradients = element_constants(recipe.gradient_elem_dtype, recipe.scale_mode)
    named = {f"G_{name.removesuffix('_OF')}": value for name, value in of_gradients.items()}
    names = ["MANTISSA", "BIAS_OF", "WIDTH"]
    if key_value:
        names += ["LIMIT", "CARRY", "TOP", "SATURATES"]
    block = value_block_of_backward(recipe)
    found = {name: of_values[name] for name in names} | named
    if key_value:
        found["FIXED"] = recipe.weight_scale == "fixed"
    stochastic = recipe.gradient_rounding == "stochastic"
    return found | {
        "STREAM": int(Stream.GRADIENT_OF_SCORES) if stochastic else None,
        "V_BR": block[0], "V_BC": block[1], "OPERANDS": _OPERANDS[operands],
    }  # fmt: skip


# -- forward ---------------------------------------------------------------------------------------


def launch_forward(
    q: Operand, k: Operand, v: Operand, q_offsets: Tensor | None, k_offsets: Tensor,
    dtype: torch.dtype, call: ForwardCall, tiles: TileConfig | None = None,
    operands: Operands | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output in a dtype, and lse `[heads, out_rows]`, natural log (of no use with GDPA)."""
    g, mask, bias, recipe = call.geometry, call.mask, call.bias, call.recipe
    device = q.codes.device
    out = torch.empty(g.out_shape, dtype=dtype, device=device)
    lse = torch.empty(g.heads, g.out_rows if call.activation == SOFTMAX.value else 0, device=device)
    operands = operands or choose_operands(device, recipe.elem_dtype)
    if operands == "values":
        queries = offsets_of_queries(q_offsets, k_offsets, g)
        q = dequantised(q, queries, recipe.elem_dtype, SQUARE)
        k = dequantised(k, k_offsets, recipe.elem_dtype, SQUARE)
        v = dequantised(v, k_offsets, recipe.elem_dtype, recipe.value_block)
    tiles = _tiles("forward", g, tiles, device)
    items = build_tile_list(q_offsets, k_offsets, g.total_q, tiles.block_q, span=mask.span)
    grid = items.upper * g.heads
    if grid:
        mx_attention_forward_kernel[(grid,)](
            q.codes, k.codes, v.codes, q.scales, k.scales, v.scales, out, lse,
            bias.values, bias.bucket_ids, call.activation_ids,
            q_offsets, k_offsets, bias.pair_offsets, items.sequence, items.block,
            g.batch, g.total_q, g.total_k, g.out_rows, *mask.numbers,
            call.score_scale, call.out_scale, *bias.strides, heads=g.heads, group=g.group,
            D=g.qk_dim, DV=g.v_dim, BLOCK_D=head_block(g.qk_dim), BLOCK_DV=head_block(g.v_dim),
            BLOCK_Q=tiles.block_q, BLOCK_K=tiles.block_k, **mask.portable,
            BIAS=bias.kind, ACTIVATION=call.activation, ACTIVATION_SET=call.activation_set,
            **forward_constants(recipe, operands), SHARED_Q=g.shared_q,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return out, lse


# -- backward --------------------------------------------------------------------------------------


def seen_rows(
    d_out: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, g: Geometry, mask: Mask
) -> Tensor:
    """D_out `[out_rows, heads, v_dim]` with 0 in rows that see no key, contiguous."""
    kept = torch.empty(d_out.shape, dtype=d_out.dtype, device=d_out.device)
    items = query_tiles(q_offsets, k_offsets, g)
    grid = items.upper * g.heads
    if grid:
        seen_rows_kernel[(grid,)](
            d_out, kept, q_offsets, k_offsets, items.sequence, items.block, g.batch, g.total_q,
            *mask.numbers, *d_out.stride()[:2], heads=g.heads, DV=g.v_dim,
            BLOCK_DV=padded(g.v_dim), ROWS=_STATISTICS_ROWS, **mask.portable, SHARED_Q=g.shared_q,
            num_warps=8,
        )  # fmt: skip
    return kept


def launch_backward(
    saved: Saved, q_offsets: Tensor | None, k_offsets: Tensor, dtypes: tuple[torch.dtype, ...],
    call: BackwardCall, recipe: AttentionRecipe,
    tiles: tuple[TileConfig | None, TileConfig | None] = (None, None),
    operands: Operands | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of q, k, v in their dtypes, and of the bias; None where not needed.

    tiles: of the kernels of dQ and of dK and dV. operands: "values" or "codes".
    """
    if operands is None:
        operands = "codes" if INTERPRET.value else "values"
    if operands == "native":
        raise NotImplementedError("the gradients have no form with native block-scaled products")
    if operands == "values":
        saved = saved.decoded(q_offsets, k_offsets, call.geometry, recipe)
    dq = dk = dv = d_bias = None
    if call.needs.key_value:
        dk, dv = _key_value_gradients(
            saved, q_offsets, k_offsets, dtypes[1:], call, recipe, tiles[1], operands
        )
    if call.needs.query or call.needs.bias:
        dq, d_bias = _query_gradient(
            saved, q_offsets, k_offsets, dtypes[0], call, recipe, tiles[0], operands
        )
    return dq, dk, dv, d_bias


def _numbers(call: BackwardCall) -> tuple[Any, ...]:
    g, rows = call.geometry, 0 if call.statistics is None else call.statistics.shape[2]
    return (g.batch, g.total_q, g.total_k, rows, *call.mask.numbers)


def _constants(call: BackwardCall, tiles: TileConfig) -> dict[str, Any]:
    """What both gradient kernels are compiled for, but for the recipe."""
    g = call.geometry
    return {
        "D": g.qk_dim, "DV": g.v_dim, "BLOCK_D": head_block(g.qk_dim),
        "BLOCK_DV": head_block(g.v_dim), "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k,
        **call.mask.portable, "BIAS": call.bias.kind, "ACTIVATION": call.activation,
        "ACTIVATION_SET": call.activation_set, "SHARED_Q": g.shared_q,
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
    }  # fmt: skip


def _key_value_gradients(
    saved: Saved, q_offsets: Tensor | None, k_offsets: Tensor, dtypes: tuple[torch.dtype, ...],
    call: BackwardCall, recipe: AttentionRecipe, tiles: TileConfig | None, operands: Operands,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    g, bias, device = call.geometry, call.bias, k_offsets.device
    dk = torch.empty(saved.k.codes.shape, dtype=dtypes[0], device=device)
    dv = torch.empty(saved.v.codes.shape, dtype=dtypes[1], device=device)
    tiles = _tiles("key_value_gradient", g, tiles, device)
    items = build_tile_list(k_offsets, q_offsets, g.total_k, tiles.block_k, span=call.mask.span)
    grid = items.upper * g.kv_heads
    if grid:
        mx_key_value_gradient_kernel[(grid,)](
            *saved.pointers, dk if call.statistics is None else call.statistics, dk, dv,
            bias.values, bias.bucket_ids, call.activation_ids,
            q_offsets, k_offsets, bias.pair_offsets, items.sequence, items.block, *_numbers(call),
            call.score_scale, call.grad_scale, call.value_scale, *bias.strides,
            *words(recipe.seed), kv_heads=g.kv_heads, GROUP=g.group,
            **gradient_constants(recipe, operands, True), **_constants(call, tiles),
        )  # fmt: skip
    return dk, dv


def _query_gradient(
    saved: Saved, q_offsets: Tensor | None, k_offsets: Tensor, dtype: torch.dtype,
    call: BackwardCall, recipe: AttentionRecipe, tiles: TileConfig | None, operands: Operands,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """dQ, and the gradient of the bias if it is needed."""
    g, bias, device = call.geometry, call.bias, k_offsets.device
    # A shared query has one share of dQ a sequence, kept in fp32 until they are summed.
    shape = (g.batch, *saved.q.codes.shape) if g.shared_q else saved.q.codes.shape
    dq = torch.empty(shape, dtype=torch.float32 if g.shared_q else dtype, device=device)
    tiles = _tiles("query_gradient", g, tiles, device)
    items = build_tile_list(q_offsets, k_offsets, g.total_q, tiles.block_q, span=call.mask.span)
    grid = items.upper * g.heads
    d_bias = empty_bias_gradient(call, grid) if call.needs.bias else None
    buckets = bias.values.shape[0] if bias.kind == 2 and bias.values is not None else 1
    if grid:
        mx_query_gradient_kernel[(grid,)](
            *saved.pointers, dq if call.statistics is None else call.statistics, dq, d_bias,
            bias.values, bias.bucket_ids, call.activation_ids,
            q_offsets, k_offsets, bias.pair_offsets, items.sequence, items.block, *_numbers(call),
            call.score_scale, call.grad_scale, *bias.strides, *words(recipe.seed),
            heads=g.heads, group=g.group, BUCKETS=buckets, BUCKET_BLOCK=padded(buckets),
            BIAS_GRADIENT=d_bias is not None,
            **gradient_constants(recipe, operands, False), **_constants(call, tiles),
        )  # fmt: skip
    if g.shared_q:
        dq = dq.sum(0).to(dtype)
    return dq, None if d_bias is None else reduce_bias_gradient(d_bias, call)
