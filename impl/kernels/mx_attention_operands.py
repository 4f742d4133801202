"""Operands of MXFP8 attention and GDPA as the host sees them: a recipe, quantised tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from jagbench.impl.kernels.arguments import LARGEST_ROW_STRIDE, Geometry, kernel_layout
from jagbench.impl.kernels.mx_launch import (
    Format,
    Matrices,
    launch_dequantize,
    launch_quantize,
    scale_rows_of,
)
from jagbench.mx import (
    ALONG_COLUMNS,
    SQUARE,
    AttentionRecipe,
    Block,
    ElemDtype,
    Rounding,
    RowSum,
    ScaleMode,
    Stream,
    WeightScale,
)

#: Codes and scales of q, k and v.
Kept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
#: Widest head that the kernels hold.
LARGEST_HEAD_DIM = 128


def check_recipe(operator: str, recipe: object) -> None:
    """Refuse what is no recipe of attention."""
    if not isinstance(recipe, AttentionRecipe):
        raise ValueError(
            f"{operator}: recipe must be an AttentionRecipe, got {type(recipe).__name__}"
        )


def check_head_dims(operator: str, g: Geometry) -> None:
    """Refuse heads that the kernels do not hold: NotImplementedError with the numbers."""
    if max(g.qk_dim, g.v_dim) > LARGEST_HEAD_DIM:
        raise NotImplementedError(
            f"{operator}: head dims up to {LARGEST_HEAD_DIM} are supported, got {g.qk_dim} and "
            f"{g.v_dim}"
        )
    _check_rows(operator, g)


def _check_rows(operator: str, g: Geometry) -> None:
    """Offsets inside a tile must fit 32 bits."""
    widest = g.heads * max(g.qk_dim, g.v_dim)
    if widest >= LARGEST_ROW_STRIDE:
        raise NotImplementedError(
            f"{operator}: a row of {widest} numbers over all heads is at or above "
            f"{LARGEST_ROW_STRIDE}"
        )


def encode_recipe(recipe: AttentionRecipe) -> list[int]:
    """A recipe as a custom op takes it."""
    return [
        get_args(ElemDtype).index(recipe.elem_dtype),
        get_args(ElemDtype).index(recipe.gradient_elem_dtype),
        get_args(ScaleMode).index(recipe.scale_mode),
        *recipe.value_block,
        get_args(WeightScale).index(recipe.weight_scale),
        get_args(RowSum).index(recipe.row_sum),
        get_args(Rounding).index(recipe.gradient_rounding),
        recipe.seed,
    ]


def decode_recipe(code: list[int]) -> AttentionRecipe:
    """Inverse of `encode_recipe`."""
    elem, gradient, mode, rows, columns, weight_scale, row_sum, rounding, seed = code
    return AttentionRecipe(
        get_args(ElemDtype)[elem], get_args(ElemDtype)[gradient], get_args(ScaleMode)[mode],
        (rows, columns), get_args(WeightScale)[weight_scale], get_args(RowSum)[row_sum],
        get_args(Rounding)[rounding], seed,
    )  # fmt: skip


def value_block_of_backward(recipe: AttentionRecipe) -> Block:
    """Blocks of V in dO V^T, along its head_dim."""
    return SQUARE if recipe.value_block == SQUARE else ALONG_COLUMNS


@dataclass(frozen=True)
class Operand:
    """A tensor `[rows, heads, dim]` in MX blocks: codes and plain jagged scales, contiguous."""

    codes: Tensor
    scales: Tensor


def quantised(
    x: Tensor,
    offsets: Tensor,
    elem_dtype: ElemDtype,
    block: Block,
    scale_mode: ScaleMode,
    seed: int | None = None,
    stream: Stream = Stream.QUANTISE,
) -> Operand:
    """X `[rows, heads, dim]` in blocks that begin with each sequence; seed: rounds by chance."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    rows = scale_rows_of(x.shape[0], offsets.shape[0] - 1, block[0])
    scales = codes.new_empty(rows, x.shape[1], -(-x.shape[2] // block[1]))
    if not x.numel():
        return Operand(codes, scales.zero_())
    form = Format(elem_dtype, block, scale_mode, seed, int(stream))
    flat = block[0] == 1
    launch_quantize(
        Matrices.of(x, offsets, flat),
        Matrices.of(codes, offsets, flat),
        Matrices.of(scales, offsets, flat).tensor,
        form,
    )
    return Operand(codes, scales)


def dequantised(operand: Operand, offsets: Tensor, elem_dtype: ElemDtype, block: Block) -> Operand:
    """The values of an operand in bf16, without scales."""
    out = torch.empty(operand.codes.shape, dtype=torch.bfloat16, device=operand.codes.device)
    if out.numel():
        flat = block[0] == 1
        launch_dequantize(
            Matrices.of(operand.codes, offsets, flat),
            Matrices.of(operand.scales, offsets, flat).tensor,
            Matrices.of(out, offsets, flat),
            elem_dtype,
            block,
        )
    return Operand(out, out)


def offsets_of_queries(q_offsets: Tensor | None, k_offsets: Tensor, g: Geometry) -> Tensor:
    """Offsets of the rows of q: a shared query is one sequence."""
    return _steps(k_offsets, 1, g.total_q) if q_offsets is None else q_offsets


def offsets_of_outputs(q_offsets: Tensor | None, k_offsets: Tensor, g: Geometry) -> Tensor:
    """Offsets of the rows of the output: a shared query has as many a sequence."""
    return _steps(k_offsets, g.batch, g.total_q) if q_offsets is None else q_offsets


def _steps(like: Tensor, count: int, length: int) -> Tensor:
    return torch.arange(count + 1, dtype=torch.int64, device=like.device) * length


def quantised_inputs(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, g: Geometry,
    recipe: AttentionRecipe,
) -> tuple[Operand, Operand, Operand]:  # fmt: skip
    """Q, K in squares and V for P V."""
    rule = (recipe.elem_dtype, SQUARE, recipe.scale_mode)
    return (
        quantised(q, offsets_of_queries(q_offsets, k_offsets, g), *rule),
        quantised(k, k_offsets, *rule),
        quantised(v, k_offsets, recipe.elem_dtype, recipe.value_block, recipe.scale_mode),
    )


def quantised_output_gradient(
    d_out: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, g: Geometry, recipe: AttentionRecipe
) -> Operand:
    """DO `[out_rows, heads, v_dim]` in squares."""
    seed = recipe.seed if recipe.gradient_rounding == "stochastic" else None
    return quantised(
        kernel_layout(d_out), offsets_of_outputs(q_offsets, k_offsets, g),
        recipe.gradient_elem_dtype, SQUARE, recipe.scale_mode, seed, Stream.GRADIENT_OF_OUTPUT,
    )  # fmt: skip


def saved_operands(
    q: Operand, k: Operand, held: Operand, v: Tensor, k_offsets: Tensor, recipe: AttentionRecipe,
    differentiable: bool,
) -> Kept:  # fmt: skip
    """Codes and scales of q, k and v for the backward; empty ones if there is none.

    held: V in the blocks of the forward, which are those of the backward if they are squares.
    """
    if not differentiable:
        none = [q.codes.new_empty(0) for _ in range(6)]
        return none[0], none[1], none[2], none[3], none[4], none[5]
    block = value_block_of_backward(recipe)
    if block != recipe.value_block:
        held = quantised(v, k_offsets, recipe.elem_dtype, block, recipe.scale_mode)
    return q.codes, q.scales, k.codes, k.scales, held.codes, held.scales


def saved_shapes(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor,
    recipe: AttentionRecipe, differentiable: bool,
) -> Kept:  # fmt: skip
    """What `saved_operands` returns, not filled: for fake tensors, whose sizes may be symbols."""
    batch = k_offsets.shape[0] - 1

    def empty(x: Tensor, count: int, block: Block) -> tuple[Tensor, Tensor]:
        if not differentiable:
            none = x.new_empty(0, dtype=torch.uint8)
            return none, none.new_empty(0)
        rows = scale_rows_of(x.shape[0], count, block[0])
        codes = x.new_empty(x.shape, dtype=torch.uint8)
        return codes, codes.new_empty(rows, x.shape[1], -(-x.shape[2] // block[1]))

    return (
        *empty(q, 1 if q_offsets is None else batch, SQUARE),
        *empty(k, batch, SQUARE),
        *empty(v, batch, value_block_of_backward(recipe)),
    )


@dataclass(frozen=True)
class Saved:
    """Operands of the backward: V in the blocks of dO V^T, dO in squares."""

    q: Operand
    k: Operand
    v: Operand
    d_out: Operand

    def decoded(
        self, q_offsets: Tensor | None, k_offsets: Tensor, g: Geometry, recipe: AttentionRecipe
    ) -> Saved:
        """The same in bf16."""
        elem, of_gradient = recipe.elem_dtype, recipe.gradient_elem_dtype
        queries = offsets_of_queries(q_offsets, k_offsets, g)
        outputs = offsets_of_outputs(q_offsets, k_offsets, g)
        return Saved(
            dequantised(self.q, queries, elem, SQUARE),
            dequantised(self.k, k_offsets, elem, SQUARE),
            dequantised(self.v, k_offsets, elem, value_block_of_backward(recipe)),
            dequantised(self.d_out, outputs, of_gradient, SQUARE),
        )

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        """In the order of the kernels' parameters."""
        own = (self.q, self.k, self.v, self.d_out)
        return (*(x.codes for x in own), *(x.scales for x in own))
