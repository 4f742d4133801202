"""Wrong blocks and wrong rotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jagbench.rotary import TokenTable
from wrong import sandwich
from wrong.call import Call, Tile
from wrong.right import RIGHT, Steps
from wrong.steps import Bounds, bounds, weigh
from wrong.turns import Rotation, Table, angles, check_packed, cut, turn, turn_back

BLOCK = 64

# -- blocks ----------------------------------------------------------------------------------------


def _of_the_buffer(ends: Sequence[int], block_size: int) -> list[int]:
    walls = {*ends, *range(0, ends[-1], block_size)}
    return sorted(walls)


#: Blocks are counted from the start of the packed buffer, cut at the sequences.
blocks_of_the_packed_buffer = replace(RIGHT, cut=_of_the_buffer)


def _of_64(ends: Sequence[int], block_size: int) -> list[int]:
    return cut(ends, BLOCK)


#: Blocks are of 64, whatever is asked for.
ignores_block_size = replace(RIGHT, cut=_of_64)


def _whole(ends: Sequence[int], block_size: int) -> list[int]:
    return list(ends)


#: Every token sees its whole sequence.
attends_to_the_whole_sequence = replace(RIGHT, cut=_whole)


def _with_the_next_block(ends: Sequence[int], block_size: int) -> list[int]:
    return cut(ends, 2 * block_size)


#: Blocks are twice as long as asked for.
blocks_are_doubled = replace(RIGHT, cut=_with_the_next_block)


def _past_the_tail(call: Call) -> list[Bounds]:
    rows = call.k.shape[0]
    return [(q0, q1, k0, min(k0 + BLOCK, rows)) for q0, q1, k0, _ in bounds(call)]


#: A tail block is walked at its full size: it sees the first rows of the next sequence.
tail_sees_the_next_sequence = replace(RIGHT, bounds=_past_the_tail)


def _zero_keys(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    weights, lse = weigh(call, tile)
    missing = BLOCK - tile.scores.shape[-1]
    if missing <= 0 or not tile.scores.shape[-1]:
        return weights, lse
    peak = tile.scores.amax(-1, keepdim=True)
    share = torch.exp(lse[..., None] - peak)
    return weights * share / (share + missing * torch.exp(-peak)), lse


#: The rows missing from a tail block count as keys of score 0.
tail_is_filled_with_zeros = replace(RIGHT, weigh=_zero_keys)

# -- rotations -------------------------------------------------------------------------------------


def _opposite(x: Tensor, by: Rotation) -> Tensor:
    return turn(x, replace(by, sign=-by.sign))


#: Everything is turned by the negative angle.
turns_the_wrong_way = replace(RIGHT, turn=_opposite, turn_back=turn)


def _swapped(table: Table, ends: Sequence[int]) -> Tensor:
    return angles(table, ends).roll(angles(table, ends).shape[1] // 2, 1)


#: Cosines are expected first in the table.
swaps_sines_and_cosines = replace(RIGHT, angles=_swapped)


def _halves(x: Tensor, by: Rotation) -> Tensor:
    return turn(x, replace(by, interleaved=not by.interleaved))


def _halves_back(x: Tensor, by: Rotation) -> Tensor:
    return turn_back(x, replace(by, interleaved=not by.interleaved))


#: Neighbours are paired where halves are meant, and the reverse.
pairs_the_other_elements = replace(RIGHT, turn=_halves, turn_back=_halves_back)


def _in_the_buffer(table: Table, ends: Sequence[int]) -> Tensor:
    if isinstance(table, TokenTable):
        return angles(table, ends)
    return table[torch.arange(ends[-1], device=table.device) % max(1, table.shape[0])]


#: Positions are those in the packed buffer.
counts_positions_in_the_buffer = replace(RIGHT, angles=_in_the_buffer)


def _one_late(table: Table, ends: Sequence[int]) -> Tensor:
    if isinstance(table, TokenTable):
        return angles(table, ends)
    return angles(table.roll(-1, 0), ends)


#: Positions are counted from 1.
counts_positions_from_one = replace(RIGHT, angles=_one_late)


def _by_position(table: Table, ends: Sequence[int]) -> Tensor:
    return angles(table.rows if isinstance(table, TokenTable) else table, ends)


#: A table by token is read by position.
takes_tokens_for_positions = replace(RIGHT, angles=_by_position)


def _narrow(table: Table, ends: Sequence[int]) -> Tensor:
    rows = angles(table, ends)
    return rows.to(torch.bfloat16).to(rows.dtype)


#: Angles are kept in bfloat16: a turned pair has another length.
keeps_the_table_in_bfloat16 = replace(RIGHT, angles=_narrow)


def _first_part(x: Tensor, by: Rotation) -> Tensor:
    out = turn(x, by)
    out[..., by.angles.shape[1] :] = 0.0
    return out


#: Elements beyond the table are lost.
loses_what_is_not_turned = replace(RIGHT, turn=_first_part)


def _never_back(x: Tensor, by: Rotation) -> Tensor:
    return turn(x, replace(by, sign=1))


#: `inverse` is accepted and never used.
ignores_inverse = replace(RIGHT, turn=_never_back)


def _not_values(x: Tensor, by: Rotation) -> Tensor:
    return x.clone() if by.name == "v" else turn(x, by)


def _not_values_back(x: Tensor, by: Rotation) -> Tensor:
    return x.clone() if by.name == "v" else turn_back(x, by)


#: Values are never turned.
never_turns_values = replace(RIGHT, turn=_not_values, turn_back=_not_values_back)
#: Values are turned, and their gradient is not turned back.
value_gradient_is_not_turned_back = replace(RIGHT, turn_back=_not_values_back)


@dataclass(frozen=True)
class AlwaysValues(Steps):
    """`rotate_values` is accepted and never used."""

    def block_attention(self, *arguments: Any, rotate_values: bool = True, **options: Any) -> Any:
        """As RIGHT, values turned."""
        return RIGHT.block_attention(*arguments, **options)


#: Values are always turned.
always_turns_values = AlwaysValues()


def _forward_again(x: Tensor, by: Rotation) -> Tensor:
    return turn(x, by)


#: Gradients are turned like their arguments (a misspelt conjugate option).
turns_gradients_forward = replace(RIGHT, turn_back=_forward_again)


def _in_half(x: Tensor, by: Rotation) -> Tensor:
    narrow = replace(by, angles=by.angles.to(torch.float16))
    return turn_back(x.to(torch.float16), narrow).to(x.dtype)


def _rounded(x: Tensor, by: Rotation) -> Tensor:
    return turn(x, by).to(torch.float16).to(x.dtype)


#: Rotations round to half precision, and every product of the backward's does.
turns_in_half = replace(RIGHT, turn=_rounded, turn_back=_in_half)


def _any_table(x: Tensor, offsets: Tensor, table: Table | None) -> None:
    constant = table.detach() if isinstance(table, Tensor) else None
    check_packed(x, offsets, constant)


#: A table that wants a gradient gets none, without a word.
forgets_the_gradient_of_the_table = replace(RIGHT, check_packed=_any_table)


def _unchecked_table(x: Tensor, offsets: Tensor, table: Table | None) -> None:
    check_packed(x, offsets, None)


#: A table that is too short or too wide is accepted, or fails somewhere inside.
accepts_malformed_tables = replace(RIGHT, check_packed=_unchecked_table)

# -- QK-norm ---------------------------------------------------------------------------------------


def _not_at_all(name: str, x: Tensor, eps: float) -> Tensor:
    return x


#: `qk_norm_eps` is accepted and never used.
ignores_qk_norm = replace(RIGHT, norm_heads=_not_at_all)


def _over_heads(name: str, x: Tensor, eps: float) -> Tensor:
    return x if name == "v" else sandwich.unit(x, eps)


#: q and k are normalised over all heads together.
normalises_heads_together = replace(RIGHT, norm_heads=_over_heads)


def _values_too(name: str, x: Tensor, eps: float) -> Tensor:
    return sandwich.unit(x, eps, (2,))


#: Values are normalised too.
normalises_values_too = replace(RIGHT, norm_heads=_values_too)


def _queries_alone(name: str, x: Tensor, eps: float) -> Tensor:
    return sandwich.norm_heads(name, x, eps) if name == "q" else x


#: Keys are not normalised.
normalises_queries_alone = replace(RIGHT, norm_heads=_queries_alone)


def _length(name: str, x: Tensor, eps: float) -> Tensor:
    return x if name == "v" else sandwich.norm_heads(name, x, eps) / x.shape[2] ** 0.5


#: Heads are given unit length in place of unit root mean square.
gives_heads_unit_length = replace(RIGHT, norm_heads=_length)


def _constant(name: str, x: Tensor, eps: float) -> Tensor:
    if name == "v":
        return x
    return x * (x.detach().square().mean(2, keepdim=True) + eps) ** -0.5


#: The factor of a head is taken for a constant in the backward.
qk_norm_has_no_backward = replace(RIGHT, norm_heads=_constant)


def _outside(name: str, x: Tensor, eps: float) -> Tensor:
    return x if name == "v" else x / (x.square().mean(2, keepdim=True).sqrt() + eps)


#: eps is added to the root, not under it.
qk_norm_adds_eps_outside = replace(RIGHT, norm_heads=_outside)
