"""Which tiles a kernel visits, and in what order.

A tile is a block of rows of one sequence (query rows forward, key rows in a dK/dV backward) that
meets the visible tiles of the other side. Lengths differ, so tiles do: dealing them out blindly
leaves some multiprocessors idle. The published remedy (zigzag, of Meta's GEM) lists only tiles
that hold rows, sorts them by work, longest first, and deals them to the persistent programs in
turn, backwards on every second round.

Host part (numpy): that method with the baselines it is measured against; lengths are known.
Device part: `build_tile_list`, the same order from offsets that stay on the device, no host sync.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from jagbench.impl.kernels.relaunch import relaunch, traits
from jagbench.pairs import Align, Window, visible_range

IntArray = npt.NDArray[np.int64]
Lengths = npt.ArrayLike
Side = Literal["query", "key"]


@dataclass(frozen=True)
class TileWork:
    """Tiles that have work: arrays `[tiles]`, ordered by sequence, then head, then block.

    work: tiles of the other side that the tile visits, at least 1.
    """

    sequence: IntArray
    head: IntArray
    block: IntArray
    work: IntArray


def valid_tiles(
    q_lengths: Lengths,
    k_lengths: Lengths,
    heads: int,
    block_q: int,
    block_k: int,
    *,
    side: Side = "query",
    causal: bool = False,
    align: Align = "end",
    window: Window | None = None,
) -> TileWork:
    """Every (sequence, head, block) tile with visible pairs, and how many tiles it visits.

    side "query" (forward): tiles of block_q query rows over tiles of block_k keys; "key" (backward
    of keys and values): the roles are swapped, tiles of block_k keys over tiles of block_q queries.
    """
    rows, others = _lengths(q_lengths), _lengths(k_lengths)
    if rows.shape != others.shape:
        raise ValueError(f"{rows.size} query lengths but {others.size} key lengths")
    left, right = visible_range(causal, window)
    block, other_block = block_q, block_k
    if side == "key":
        # Key k sees query p iff query p sees key k: the bounds and the shift change sign.
        rows, others, block, other_block = others, rows, block_k, block_q
        left, right = right, left
    shift = others - rows if align == "end" else np.zeros_like(rows)

    sequence, blocks = _blocks(rows, block)
    first = blocks * block + shift[sequence]
    last = np.minimum(blocks * block + block, rows[sequence]) - 1 + shift[sequence]
    limit = others[sequence]
    begin = np.zeros_like(first) if left is None else np.maximum(first - left, 0)
    end = limit if right is None else np.minimum(last + right + 1, limit)
    work = np.where(begin < end, -(-end // other_block) - begin // other_block, 0)

    keep = work > 0
    return _over_heads(sequence[keep], blocks[keep], work[keep], heads)


def _lengths(lengths: Lengths) -> IntArray:
    array = np.asarray(lengths, dtype=np.int64)
    if array.ndim != 1 or (array < 0).any():
        raise ValueError(f"lengths must be a vector of numbers >= 0, got {array!r}")
    return array


def _blocks(lengths: IntArray, block: int) -> tuple[IntArray, IntArray]:
    """Sequence and block number of every block of `block` rows, in order."""
    counts = -(-lengths // block)
    sequence = np.repeat(np.arange(lengths.size), counts)
    starts = np.cumsum(counts) - counts
    return sequence, np.arange(sequence.size) - starts[sequence]


def _over_heads(sequence: IntArray, block: IntArray, work: IntArray, heads: int) -> TileWork:
    tiled = [np.tile(array, heads) for array in (sequence, block, work)]
    head = np.repeat(np.arange(heads), sequence.size)
    order = np.lexsort((tiled[1], head, tiled[0]))
    return TileWork(tiled[0][order], head[order], tiled[1][order], tiled[2][order])


def zigzag(work: IntArray, programs: int) -> list[IntArray]:
    """Tiles of each program, in order: most work first, dealt backwards on odd rounds.

    No two programs differ by more than the largest tile: round r opens a gap between two programs
    of the difference of two of its tiles, these differences lie in disjoint parts of the sorted
    range, so together they span at most the largest work.
    """
    order = np.argsort(-work, kind="stable")
    turn, place = np.divmod(np.arange(order.size), programs)
    program = np.where(turn % 2 == 0, place, programs - 1 - place)
    return [order[program == number] for number in range(programs)]


def round_robin_valid(work: IntArray, programs: int) -> list[IntArray]:
    """Tiles of each program: the valid tiles in order, dealt in turn."""
    return [np.arange(first, work.size, programs) for first in range(programs)]


def round_robin_padded(
    tiles: TileWork, grid: tuple[int, int, int], programs: int
) -> list[IntArray]:
    """Tiles of each program where a padded grid is dealt in turn; its empty tiles cost a turn.

    grid: (sequences, heads, blocks of the longest sequence), last index fastest.
    """
    turn = np.ravel_multi_index((tiles.sequence, tiles.head, tiles.block), grid) % programs
    return [np.flatnonzero(turn == number) for number in range(programs)]


def contiguous(work: IntArray, programs: int) -> list[IntArray]:
    """Tiles of each program: equally many neighbours each (counts differ by at most one)."""
    return np.array_split(np.arange(work.size), programs)


def imbalance(assignment: list[IntArray], work: IntArray) -> tuple[float, float]:
    """(max / mean, max / min) of the programs' work; 1.0 is perfect, inf if a program idles."""
    loads = np.array([work[tiles].sum() for tiles in assignment], dtype=np.float64)
    if not loads.any():
        return 1.0, 1.0
    least = loads.min()
    return float(loads.max() / loads.mean()), float(loads.max() / least) if least else np.inf


@dataclass(frozen=True)
class TileList:
    """Tiles of a launch, on the device; which of the entries are used is known there only.

    sequence, block: int32 `[upper]`; rows block * block_rows onwards of the sequence. Sequence
        `batch` is the padding behind the last offset. Unused entries come last: -1, block 0.
    count: int32 `[1]`, the number of used entries.
    """

    sequence: Tensor
    block: Tensor
    count: Tensor

    @property
    def upper(self) -> int:
        """Number of entries, used or not: what a launch of one program an entry needs."""
        return self.sequence.numel()


#: Largest length that counts for the order, so that keys fit 32 bits in both builds.
MAX_SPAN = 2**31 - 1
#: Beyond this many sequences comparing all with all loses against a sort.
MAX_COMPARED = 16384
_GROUP, _SCAN, _WIDTH = 16, 1024, 128


def build_tile_list(
    row_offsets: Tensor | None,
    other_offsets: Tensor | None,
    total_rows: int,
    block_rows: int,
    *,
    span: int | None = None,
) -> TileList:
    """Every block of rows, sequences with the most visible other rows first; no host sync.

    row_offsets: int `[batch + 1]`, or None for one dense query of `total_rows` rows that all
        sequences share (then there is no padding entry, and other_offsets gives the batch).
    other_offsets: int `[batch + 1]`, or None if the other side is equally long for all sequences.
    total_rows: rows of the packed tensor, padding behind the last offset included.
    span: other rows that one row sees at most (a window), None if unbounded.

    Sequences are ordered by min(other length, span), descending, ties by number; the padding is
    last. The blocks of a sequence stay together, in order.

    The bound: with lengths l_i of batch + 1 parts that sum to total_rows,
    sum ceil(l_i / b) <= sum floor(l_i / b) + batch + 1 <= floor(total_rows / b) + batch + 1.
    """
    offsets, upper = bounds(row_offsets, other_offsets, total_rows, block_rows)
    batch = offsets.numel() - 1
    span = MAX_SPAN if span is None else min(span, MAX_SPAN)
    build = _build_by_comparing if offsets.is_cuda and batch <= MAX_COMPARED else build_by_sorting
    return build(row_offsets, other_offsets, batch, total_rows, block_rows, span, upper)


def bounds(
    row_offsets: Tensor | None, other_offsets: Tensor | None, total_rows: int, block_rows: int
) -> tuple[Tensor, int]:
    """Offsets that give batch and device, and the most tiles there can be (`build_tile_list`)."""
    offsets = row_offsets if row_offsets is not None else other_offsets
    if offsets is None:
        raise ValueError("row_offsets and other_offsets cannot both be None")
    if block_rows < 1 or total_rows < 0:
        raise ValueError(
            f"block_rows {block_rows} and total_rows {total_rows} must be >= 1 and >= 0"
        )
    batch = offsets.numel() - 1
    if row_offsets is None:
        upper = batch * -(-total_rows // block_rows)
    else:
        upper = total_rows // block_rows + batch + 1
    if upper > MAX_SPAN:
        raise ValueError(f"{upper} tiles of {block_rows} rows exceed the limit of {MAX_SPAN}")
    return offsets, upper


def build_by_sorting(
    row_offsets: Tensor | None,
    other_offsets: Tensor | None,
    batch: int,
    total_rows: int,
    block_rows: int,
    span: int,
    upper: int,
) -> TileList:
    """The list by torch operations of known sizes, on any device."""
    offsets = row_offsets if row_offsets is not None else other_offsets
    assert offsets is not None
    device = offsets.device
    if upper == 0:
        none = torch.zeros(0, dtype=torch.int32, device=device)
        return TileList(none, none, torch.zeros(1, dtype=torch.int32, device=device))
    keys = torch.zeros(batch, dtype=torch.int64, device=device)
    if other_offsets is not None:
        keys = other_offsets.to(torch.int64).diff().clamp(max=span)
    if row_offsets is not None:
        begins = row_offsets.to(torch.int64)
        lengths = torch.cat([begins[1:], begins.new_full((1,), total_rows)]) - begins
        keys = torch.cat([keys, keys.new_full((1,), -1)])
    else:
        lengths = torch.full((batch,), total_rows, dtype=torch.int64, device=device)
    order = keys.sort(descending=True, stable=True).indices
    tiles = ((lengths[order] + block_rows - 1) // block_rows).clamp(min=0)
    ends = tiles.cumsum(0)

    index = torch.arange(upper, device=device)
    place = torch.searchsorted(ends, index, right=True).clamp(max=order.numel() - 1)
    used = index < ends[-1]
    sequence = torch.where(used, order[place], -1).to(torch.int32)
    block = torch.where(used, index - (ends - tiles)[place], 0).to(torch.int32)
    return TileList(sequence, block, ends[-1:].to(torch.int32))


def _build_by_comparing(
    row_offsets: Tensor | None,
    other_offsets: Tensor | None,
    batch: int,
    total_rows: int,
    block_rows: int,
    span: int,
    upper: int,
) -> TileList:
    """The list by one kernel launch, for which each sequence is compared with all others."""
    offsets: Any = row_offsets if row_offsets is not None else other_offsets
    entries = batch if row_offsets is None else batch + 1
    # One allocation; its parts stay 16-byte aligned, or Triton would specialise their users anew.
    stride = -(-upper // 4) * 4
    memory = torch.empty(2 * stride + 4, dtype=torch.int32, device=offsets.device)
    tiles = TileList(
        memory[:upper], memory[stride : stride + upper], memory[2 * stride : 2 * stride + 1]
    )
    if upper == 0:
        tiles.count.zero_()
        return tiles
    with torch.cuda.device_of(offsets):
        relaunch(
            _tile_list_kernel, -(-entries // _GROUP), memory.device,
            (*traits(row_offsets, other_offsets), block_rows, total_rows > MAX_SPAN),
            row_offsets, other_offsets, tiles.sequence, tiles.block, tiles.count,
            batch, total_rows, upper, span, block_rows, _GROUP, _SCAN, _WIDTH, num_warps=8,
        )  # fmt: skip
    return tiles


@triton.jit
def _tiles_and_keys(
    index, row_offsets, other_offsets, batch, total_rows, span, BLOCK_ROWS: tl.constexpr
):
    """Tiles (int32, 0 out of range) and sort key (int32, -1 for the padding) of sequences."""
    real = index < batch
    if row_offsets is None:
        length = tl.where(real, total_rows, 0).to(tl.int64)
    else:
        begin = tl.load(row_offsets + index, mask=index <= batch, other=0).to(tl.int64)
        end = tl.load(row_offsets + index + 1, mask=real, other=0).to(tl.int64)
        end = tl.where(real, end, total_rows)
        length = tl.where(index <= batch, end - begin, 0)
    tiles = tl.maximum((length + BLOCK_ROWS - 1) // BLOCK_ROWS, 0).to(tl.int32)
    key = tl.where(real, 0, -1)
    if other_offsets is not None:
        begin = tl.load(other_offsets + index, mask=real, other=0).to(tl.int64)
        end = tl.load(other_offsets + index + 1, mask=real, other=0).to(tl.int64)
        key = tl.where(real, tl.minimum(end - begin, span), -1).to(tl.int32)
    return tiles, key


@triton.jit
def place_sequences(
    own,
    row_offsets,
    other_offsets,
    batch,
    total_rows,
    span,
    BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Where the tiles of GROUP sequences begin in the list; how many they, and those of all, are.

    Every sequence of `own` (int32 `[GROUP]`) is compared with all others, SCAN at a time.
    """
    own_tiles, own_key = _tiles_and_keys(
        own, row_offsets, other_offsets, batch, total_rows, span, BLOCK_ROWS
    )
    start = tl.zeros([GROUP], tl.int32)
    total = tl.zeros([SCAN], tl.int32)
    for first in range(0, batch + 1, SCAN):
        index = first + tl.arange(0, SCAN)
        tiles, key = _tiles_and_keys(
            index, row_offsets, other_offsets, batch, total_rows, span, BLOCK_ROWS
        )
        same = (key[None, :] == own_key[:, None]) & (index[None, :] < own[:, None])
        before = (key[None, :] > own_key[:, None]) | same
        start += tl.sum(tl.where(before, tiles[None, :], 0), 1)
        total += tiles
    return start, own_tiles, tl.sum(total, 0)


@triton.jit(do_not_specialize=["batch", "total_rows", "upper", "span"])
def _tile_list_kernel(
    row_offsets,
    other_offsets,
    sequence,
    block,
    count,
    batch,
    total_rows,
    upper,
    span,
    BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SCAN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Each program places GROUP sequences and writes their tiles and its share of the unused."""
    program = tl.program_id(0)
    own = program * GROUP + tl.arange(0, GROUP)
    start, own_tiles, used = place_sequences(
        own, row_offsets, other_offsets, batch, total_rows, span, BLOCK_ROWS, GROUP, SCAN
    )

    for first in range(0, tl.max(own_tiles, 0), WIDTH):
        number = first + tl.arange(0, WIDTH)
        at = start[:, None] + number[None, :]
        mask = (number[None, :] < own_tiles[:, None]) & (at < upper)
        tl.store(sequence + at, own[:, None] + tl.zeros([GROUP, WIDTH], tl.int32), mask=mask)
        tl.store(block + at, number[None, :] + tl.zeros([GROUP, WIDTH], tl.int32), mask=mask)

    programs = tl.num_programs(0)
    for first in range(used + program * SCAN, upper, programs * SCAN):
        at = first + tl.arange(0, SCAN)
        tl.store(sequence + at, tl.full([SCAN], -1, tl.int32), mask=at < upper)
        tl.store(block + at, tl.zeros([SCAN], tl.int32), mask=at < upper)
    if program == 0:
        tl.store(count, used)


@triton.jit
def zigzag_index(round_index, program, programs):
    """List entry of a persistent program's round: forward on even rounds, backward on odd ones."""
    odd = round_index & 1
    return round_index * programs + program + odd * (programs - 1 - 2 * program)
