"""The work list of the persistent kernels: what each tile is, in one aligned record.

The portable kernels look a tile's sequence up in the offsets; a chain of dependent loads that other
programs of the multiprocessor hide. A persistent program has nobody to hide it, so a tile's record
holds all it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagbench.impl.kernels.attention_backward import STATISTICS_PAD, statistics_start
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.relaunch import relaunch, traits
from jagbench.impl.kernels.schedule import (
    MAX_COMPARED,
    MAX_SPAN,
    bounds,
    build_by_sorting,
    place_sequences,
    zigzag_index,
)

if TYPE_CHECKING:
    from jagbench.impl.kernels.mask import Mask

#: int32 fields of an item.
FIELDS = 8
_STATISTICS_UNIT = 64
_GROUP, _SCAN, _WIDTH = 8, 1024, 64
_ANY_SPAN = tl.constexpr(MAX_SPAN)
#: Entries a worker must get at least for the folded order (`folds`): four pairs.
_FEWEST_FOLDED = 8


@dataclass(frozen=True)
class WorkList:
    """Tiles of a persistent launch, on the device; how many there are is known there only.

    items: int32 `[upper + 1 or more, 8]`, rows 16-byte aligned:

        0  first row of the sequence on the own side; 0 for a query all sequences share
        1  rows of the sequence on the own side
        2  first row of the tile, from the start of the sequence: block * block_rows
        3  first row on the other side; 0 for a query all sequences share, and for padding
        4  rows on the other side; 0 for padding
        5  first row in the outputs: field 0, or sequence * rows for a query all sequences share
        6  sequence; `batch` for the padding behind the last offset
        7  start of the query side's row statistics, in units of 64 rows (`row_statistics`)

    count: int32 `[1]`, the number of tiles. Item `count` is all zero: an empty one, for programs
        that are dealt an index past the end (they read item `min(index, count)`). What lies behind
        it is uninitialised memory.
    upper: most tiles there can be, a bound for the number of programs.

    Items of a sequence with rows on the own side only are in the list, with field 4 zero: somebody
    must write their outputs. Sequences without rows on the own side have none.
    """

    items: Tensor
    count: Tensor
    upper: int


def folds(mask: Mask, entries: int, workers: int) -> bool:
    """Whether the tiles of a sequence are dealt in pairs (`folded_tile`).

    Where work hangs on a tile's place, and pairs go round. Under a window open to both sides tiles
    weigh the same, but at the ends. entries: of the list, at most.
    """
    causal = mask.left == 0 or mask.right == 0
    one_sided = (mask.left < 0) != (mask.right < 0)
    return (causal or one_sided) and _FEWEST_FOLDED * workers <= entries < 1 << 30


def build_work_list(
    row_offsets: Tensor | None,
    other_offsets: Tensor | None,
    total_rows: int,
    block_rows: int,
    *,
    shared_rows: bool = False,
    other_rows: int | None = None,
    statistics: Literal["own", "other"] = "other",
) -> WorkList:
    """Every block of rows, sequences with the most other rows first; one launch, no sync.

    Order and bound as `schedule.build_tile_list`: the blocks of a sequence stay together, in order;
    the padding behind the last offset comes last. A window does not count: among sequences longer
    than what a row sees, those of one length, whose tiles weigh the same, are neighbours.

    row_offsets: int `[batch + 1]`; None with `shared_rows`, for one dense query of `total_rows`
        rows that all sequences share.
    other_offsets: int `[batch + 1]`; None with `other_rows`, for such a query on the other side.
    total_rows: rows of the packed tensor, padding included.
    statistics: the side that holds the queries, for field 7. Only a backward pass reads it, and
        there tiles are of keys: "other".

    Rows and starts must fit int32; the starts of a query all share are `batch * total_rows` at most
    (`support.unsupported` sees to that). Offsets are taken as checked.
    """
    if shared_rows != (row_offsets is None):
        given = "None" if row_offsets is None else "a tensor"
        raise ValueError(f"shared_rows={shared_rows}, but row_offsets is {given}")
    if (other_offsets is None) != (other_rows is not None):
        raise ValueError("one of other_offsets and other_rows must be given, and not both")
    if max(total_rows, other_rows or 0) > MAX_SPAN:
        raise ValueError(f"{total_rows} or {other_rows} rows exceed the limit of {MAX_SPAN}")
    offsets, upper = bounds(row_offsets, other_offsets, total_rows, block_rows)
    batch = offsets.numel() - 1
    call = _Build(
        row_offsets, other_offsets, batch, total_rows, other_rows or 0, block_rows, upper,
        statistics == "own",
    )  # fmt: skip
    on_device = offsets.is_cuda or INTERPRET.value
    return (_by_comparing if on_device and batch <= MAX_COMPARED else _by_sorting)(call, offsets)


class _Build(NamedTuple):
    """Arguments of a build; other_rows counts only where other_offsets is None."""

    row_offsets: Tensor | None
    other_offsets: Tensor | None
    batch: int
    total_rows: int
    other_rows: int
    block_rows: int
    upper: int
    own_statistics: bool


def _by_comparing(call: _Build, offsets: Tensor) -> WorkList:
    """The list by one kernel launch, for which each sequence is compared with all others."""
    # One allocation, the count in a last row: 16-byte aligned, or Triton would specialise its users
    # anew.
    items = torch.empty(call.upper + 2, FIELDS, dtype=torch.int32, device=offsets.device)
    count = items.as_strided((1,), (1,), (call.upper + 1) * FIELDS)
    programs = -(-(call.batch + (call.row_offsets is not None)) // _GROUP)
    with torch.cuda.device_of(offsets):
        relaunch(
            _work_list_kernel, max(1, programs), items.device,
            (*traits(call.row_offsets, call.other_offsets), call.block_rows, call.own_statistics),
            call.row_offsets, call.other_offsets, items, count,
            call.batch, call.total_rows, call.other_rows, call.upper,
            call.block_rows, call.own_statistics, _GROUP, _SCAN, _WIDTH, num_warps=8,
        )  # fmt: skip
    return WorkList(items, count, call.upper)


@triton.jit
def _starts_and_lengths(index, offsets, batch, total, shared_rows):
    """First row and rows (int32) of sequences; those of `batch` are the rows up to `total`.

    Without offsets one dense query of shared_rows rows serves all sequences, and nobody else.
    """
    real = index < batch
    if offsets is None:
        start = tl.zeros_like(index)
        length = tl.where(real, shared_rows, 0).to(tl.int32)
    else:
        start = tl.load(offsets + index, mask=index <= batch, other=0).to(tl.int32)
        end = tl.load(offsets + index + 1, mask=real, other=0).to(tl.int32)
        length = tl.where(index <= batch, tl.where(real, end, total) - start, 0)
    return start, length


@triton.jit(do_not_specialize=["batch", "total_rows", "other_rows", "upper"])
def _work_list_kernel(
    row_offsets,
    other_offsets,
    items,
    count,
    batch,
    total_rows,
    other_rows,
    upper,
    BLOCK_ROWS: tl.constexpr,
    OWN_STATISTICS: tl.constexpr,
    GROUP: tl.constexpr,
    SCAN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Each program places GROUP sequences and writes their items; the first adds the empty one."""
    own = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    place, tiles, used = place_sequences(
        own, row_offsets, other_offsets, batch, total_rows, _ANY_SPAN, BLOCK_ROWS, GROUP, SCAN
    )
    start, length = _starts_and_lengths(own, row_offsets, batch, total_rows, total_rows)
    other_start, other_length = _starts_and_lengths(own, other_offsets, batch, 0, other_rows)
    # The padding meets nobody.
    other_start = tl.where(own < batch, other_start, 0)
    other_length = tl.where(own < batch, other_length, 0)
    target = start
    if row_offsets is None:
        target = own * total_rows
    query = target if OWN_STATISTICS else other_start
    if other_offsets is None and not OWN_STATISTICS:
        query = own * other_rows
    statistics = statistics_start(query, own) // 64

    for first in range(0, tl.max(tiles, 0), WIDTH):
        number = first + tl.arange(0, WIDTH)[None, :]
        at = place[:, None] + number
        mask = (number < tiles[:, None]) & (at < upper)
        item = items + at.to(tl.int64) * 8
        flat = tl.zeros([GROUP, WIDTH], tl.int32)
        tl.store(item, start[:, None] + flat, mask=mask)
        tl.store(item + 1, length[:, None] + flat, mask=mask)
        tl.store(item + 2, number * BLOCK_ROWS + flat, mask=mask)
        tl.store(item + 3, other_start[:, None] + flat, mask=mask)
        tl.store(item + 4, other_length[:, None] + flat, mask=mask)
        tl.store(item + 5, target[:, None] + flat, mask=mask)
        tl.store(item + 6, own[:, None] + flat, mask=mask)
        tl.store(item + 7, statistics[:, None] + flat, mask=mask)

    if tl.program_id(0) == 0:
        tl.store(count, used)
        empty = items + used.to(tl.int64) * 8
        tl.store(empty + tl.arange(0, 8), tl.zeros([8], tl.int32))


@triton.jit
def dealt_entry(turn, worker, workers, HAND: tl.constexpr):
    """List entry of a worker's turn: hands of HAND neighbours are dealt zigzag."""
    if HAND == 1:
        entry = zigzag_index(turn, worker, workers)
    else:
        entry = zigzag_index(turn // HAND, worker, workers) * HAND + turn % HAND
    return entry


@triton.jit
def folded_tile(place, heads, tiles, HEADS_APART: tl.constexpr):
    """Head and block at a place among the heads * tiles entries of a sequence, in folded order.

    Under a causal mask the work of a tile grows (of a tile of keys: falls) with its block. So
    blocks come in pairs: last and first, last but one and second, and so on, which weigh the same.
    The middle ones of odd numbers of blocks come last, those of two heads a pair. A worker that is
    dealt hands of two gets pairs wherever a sequence's entries begin at an even one; elsewhere its
    hands are the end of one pair and the start of the next, which weigh a block's worth less.

    place, heads, tiles: int32 >= 0, tiles >= 1. HEADS_APART: the pairs of a head side by side, else
    the heads of a pair.
    """
    pairs = tiles >> 1
    pair = (place >> 1).to(tl.uint32)  # without signs a division is half as long
    if HEADS_APART:
        head = (pair // tl.maximum(pairs, 1).to(tl.uint32)).to(tl.int32)
        step = (place >> 1) - head * pairs
    else:
        step = (pair // heads.to(tl.uint32)).to(tl.int32)
        head = (place >> 1) - step * heads
    middle = place - 2 * pairs * heads
    block = tl.where((place & 1) == 1, step, tiles - 1 - step)
    return tl.where(middle >= 0, middle, head), tl.where(middle >= 0, pairs, block)


def _by_sorting(call: _Build, offsets: Tensor) -> WorkList:
    """The list by torch operations of known sizes, on any device."""
    tiles = build_by_sorting(
        call.row_offsets, call.other_offsets, call.batch, call.total_rows, call.block_rows,
        MAX_SPAN, call.upper,
    )  # fmt: skip
    sequence = tiles.sequence.clamp(min=0).long()
    real = sequence < call.batch

    def side(given: Tensor | None, total: int, shared: int) -> tuple[Tensor, Tensor]:
        if given is None:
            return torch.zeros_like(sequence), torch.full_like(sequence, shared)
        ends = torch.cat([given[1:], given.new_full((1,), total)])
        return given[sequence].long(), (ends - given)[sequence].long()

    start, length = side(call.row_offsets, call.total_rows, call.total_rows)
    other_start, other_length = (t * real for t in side(call.other_offsets, 0, call.other_rows))
    target = sequence * call.total_rows if call.row_offsets is None else start
    query = target if call.own_statistics else other_start
    if call.other_offsets is None and not call.own_statistics:
        query = sequence * call.other_rows
    pad = STATISTICS_PAD.value
    statistics = (query // pad + 2 * sequence) * (pad // _STATISTICS_UNIT)
    fields = (
        start, length, tiles.block.long() * call.block_rows, other_start, other_length, target,
        sequence, statistics,
    )  # fmt: skip
    items = torch.stack(fields, 1) * (tiles.sequence >= 0)[:, None]
    empty = items.new_zeros(1, FIELDS)
    return WorkList(torch.cat([items, empty]).to(torch.int32), tiles.count, call.upper)
