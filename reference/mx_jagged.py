"""What MXFP8 attention and GDPA share: one sequence at a time, its operands quantised.

Blocks start at the start of each sequence, of the queries as of the keys, and know no mask: a token
that takes part in no pair still has a share in the scales of its square. Algorithm: the MXFP8
attention of facebookexperimental/triton (TLX), with squares as in "GEM Training: How Meta Doubled
the Efficiency of Its LLM-Scale Ads Foundation Model", 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jagbench.mx import ALONG_COLUMNS, SQUARE, AttentionRecipe, Block, Stream
from jagbench.reference import arguments
from jagbench.reference.draws import draws
from jagbench.reference.mx_blocks import (
    Blocks,
    block_maxima,
    dequantize,
    elements,
    rounded,
    scale_codes,
)

#: Code of the fixed scale of attention weights, 2^-8: a weight of 1 becomes 256.
FIXED_WEIGHT_SCALE_CODE = 119


@dataclass(frozen=True)
class Own:
    """One sequence of a call.

    q `[heads, m, d]`, k `[kv_heads, n, d]`, v `[kv_heads, n, dv]`; seen bool `[m, n]`;
    first: row of its first query, counted over the sequences of a dense query too.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor
    first: int


@dataclass(frozen=True)
class Rule:
    """What of a call is no float tensor: its recipe, and what a sequence may see."""

    recipe: AttentionRecipe
    seen: Tensor
    first: int

    @property
    def squares(self) -> Blocks:
        """Blocks of Q and K."""
        return Blocks(self.recipe.elem_dtype, SQUARE, self.recipe.scale_mode)

    def gradient(self, x: Tensor, stream: Stream) -> Tensor:
        """DO or dS `[heads, m, columns]` of this sequence, quantised in squares and dequantised."""
        recipe = self.recipe
        blocks = Blocks(recipe.gradient_elem_dtype, SQUARE, recipe.scale_mode)
        if recipe.gradient_rounding == "nearest":
            return rounded(x, blocks)
        heads, m, columns = x.shape
        token = self.first + torch.arange(m, device=x.device)
        rows = token * heads + torch.arange(heads, device=x.device)[:, None]
        return rounded(x, blocks, draws(recipe.seed, rows, columns, stream))


def check_recipe(recipe: AttentionRecipe) -> None:
    """Refuse what is no recipe of attention."""
    if not isinstance(recipe, AttentionRecipe):
        raise ValueError(f"recipe must be an AttentionRecipe, got {type(recipe).__name__}")


def sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    mask: arguments.Mask,
    longest: tuple[int | None, int | None],
) -> list[Own]:
    """Every sequence of a call; ValueError for arguments that do not fit."""
    arguments.check_values(q, k, v)
    q_lengths, k_lengths = arguments.both_lengths(q, k, q_offsets, k_offsets, *longest)
    total_q, total_k = sum(q_lengths), sum(k_lengths)
    dense = q_offsets is None
    queries = [q] * len(k_lengths) if dense else torch.split(q[:total_q], q_lengths)
    keys, values = torch.split(k[:total_k], k_lengths), torch.split(v[:total_k], k_lengths)
    own, first = [], 0
    for i, (m, n) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        seen = arguments.visible(m, n, mask, q.device)
        its_q, its_k, its_v = (x.transpose(0, 1) for x in (queries[i], keys[i], values[i]))
        own.append(Own(its_q, its_k, its_v, seen, first))
        first += m
    return own


def packed(parts: Sequence[Tensor], q: Tensor, columns: int | None, dense: bool) -> Tensor:
    """Results `[heads, m, columns]` (or `[heads, m]`: columns None) of all sequences, packed.

    `[total_q, heads, columns]`, 0 past the last offset; `[batch, rows, heads, columns]` where the
    query is dense.
    """
    rows = [part.transpose(0, 1) for part in parts]
    # Nothing, but tied to q in the graph: an empty batch has gradients too.
    nothing = q[:, :, 0] if columns is None else q[:, :, :1].expand(-1, -1, columns)
    if dense:
        return torch.stack(rows) if rows else nothing[None, :][:0]
    padding = torch.zeros_like(nothing[sum(len(row) for row in rows) :])
    return torch.cat([nothing[:0], *rows, padding])


def wide(x: Tensor) -> Tensor:
    """Convert x to the dtype that everything is computed in: float32, or float64 for float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def quantized_queries(q: Tensor, rule: Rule) -> Tensor:
    """Q in squares `[heads, m, d]`; queries that see nothing are 0."""
    return _drop(rounded(wide(q), rule.squares), rule.seen.any(1))


def quantized_keys(k: Tensor, heads: int, rule: Rule) -> Tensor:
    """K in squares, one for every query head `[heads, n, d]`; keys seen by none are 0."""
    kept = _drop(rounded(wide(k), rule.squares), rule.seen.any(0))
    return kept.repeat_interleave(heads // k.shape[0], 0)


def quantized_values(v: Tensor, heads: int, rule: Rule, backward: bool) -> Tensor:
    """V for P V, or for dO V^T (backward), one for every query head `[heads, n, dv]`."""
    recipe = rule.recipe
    block = ALONG_COLUMNS if backward and recipe.value_block != SQUARE else recipe.value_block
    blocks = Blocks(recipe.elem_dtype, block, recipe.scale_mode)
    kept = _drop(rounded(wide(v), blocks), rule.seen.any(0))
    return kept.repeat_interleave(heads // v.shape[0], 0)


def quantized_weights(weights: Tensor, block: Block, recipe: AttentionRecipe) -> Tensor:
    """P `[heads, m, n]` in blocks along the contracted dim, under its own or the fixed scale."""
    blocks = Blocks(recipe.elem_dtype, block, recipe.scale_mode)
    scales = scale_codes(block_maxima(weights, block), recipe.elem_dtype, recipe.scale_mode)
    if recipe.weight_scale == "fixed":
        scales = torch.full_like(scales, FIXED_WEIGHT_SCALE_CODE)
    return dequantize(elements(weights, scales, blocks), scales, blocks).to(weights.dtype)


def quantized_output_gradient(grad: Tensor, rule: Rule) -> Tensor:
    """DO in squares `[heads, m, dv]`; queries that see nothing are 0."""
    return _drop(rule.gradient(wide(grad), Stream.GRADIENT_OF_OUTPUT), rule.seen.any(1))


def over_group(x: Tensor, kv_heads: int) -> Tensor:
    """Sum over the query heads of each key head: `[heads, n, d]` to `[kv_heads, n, d]`."""
    return x.reshape(kv_heads, x.shape[0] // kv_heads, *x.shape[1:]).sum(1)


def _drop(x: Tensor, used: Tensor) -> Tensor:
    """Set tokens of x `[heads, tokens, d]` that take part in no pair to 0: 0 times NaN is NaN."""
    return torch.where(used[:, None], x, 0.0)
