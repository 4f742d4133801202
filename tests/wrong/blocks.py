"""Wrong blocks and wrong rotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jagbench.rotary import TokenTable
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
