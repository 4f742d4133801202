"""Tile lists and their assignment: host method, published imbalance, device build."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from jagbench.impl.kernels import schedule
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.pairs import Align, Window, visible_range

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET.value else "cpu"
needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRET.value, reason="needs a GPU or interpreter"
)
LENGTHS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)
SIDES = st.one_of(st.none(), st.integers(0, 12))


def _brute_force(
    m: int, n: int, block: int, other_block: int, causal: bool, align: Align, window: Window
) -> dict[int, int]:
    """Query block -> key tiles with a visible pair, of one sequence, pair by pair."""
    left, right = visible_range(causal, window)
    shift = n - m if align == "end" else 0
    seen: dict[int, set[int]] = {}
    for p in range(m):
        for k in range(n):
            at = p + shift
            if (left is None or k >= at - left) and (right is None or k <= at + right):
                seen.setdefault(p // block, set()).add(k // other_block)
    return {block: len(tiles) for block, tiles in seen.items()}


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.booleans(), st.sampled_from(["start", "end"]), SIDES, SIDES, st.booleans())
def test_every_valid_tile_is_listed_once_with_its_work(
    lengths: list[tuple[int, int]],
    causal: bool,
    align: Align,
    left: int | None,
    right: int | None,
    keys: bool,
) -> None:
    q_lengths, k_lengths = [m for m, _ in lengths], [n for _, n in lengths]
    tiles = schedule.valid_tiles(
        q_lengths,
        k_lengths,
        2,
        8,
        4,
        side="key" if keys else "query",
        causal=causal,
        align=align,
        window=(left, right),
    )
    expected = {}
    for s, (m, n) in enumerate(lengths):
        # Of keys: mirror the window, so that the same brute force counts from the other side.
        low, high = visible_range(causal, (left, right))
        size = (n, m, 4, 8) if keys else (m, n, 8, 4)
        bounds = (high, low) if keys else (low, high)
        for block, work in _brute_force(*size, False, align, bounds).items():
            expected |= {(s, head, block): work for head in range(2)}
    listed = list(
        zip(tiles.sequence.tolist(), tiles.head.tolist(), tiles.block.tolist(), strict=True)
    )
    assert listed == sorted(listed)
    assert len(set(listed)) == len(listed)
    assert dict(zip(listed, tiles.work.tolist(), strict=True)) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 1000), max_size=200), st.integers(1, 20))
def test_zigzag_deals_every_tile_once_and_no_gap_exceeds_the_largest_tile(
    work: list[int], programs: int
) -> None:
    array = np.array(work, dtype=np.int64)
    assignment = schedule.zigzag(array, programs)
    assert len(assignment) == programs
    assert sorted(np.concatenate(assignment).tolist()) == list(range(len(work)))
    loads = [int(array[tiles].sum()) for tiles in assignment]
    assert max(loads) - min(loads) <= max(work, default=0)


def test_zigzag_deals_backwards_on_odd_rounds_and_in_the_last_partial_one() -> None:
    dealt = schedule.zigzag(np.array([8, 7, 6, 5, 4]), 3)
    assert [tiles.tolist() for tiles in dealt] == [[0], [1, 4], [2, 3]]


def test_the_baselines_deal_every_valid_tile_once() -> None:
    tiles = schedule.valid_tiles([5, 0, 17], [9, 4, 3], 2, 8, 4)
    for assignment in (
        schedule.contiguous(tiles.work, 3),
        schedule.round_robin_valid(tiles.work, 3),
        schedule.round_robin_padded(tiles, (3, 2, 3), 3),
    ):
        assert sorted(np.concatenate(assignment).tolist()) == list(range(tiles.work.size))


def test_an_idle_program_makes_the_imbalance_infinite() -> None:
    assert schedule.imbalance([np.array([0]), np.array([], int)], np.array([3])) == (2.0, math.inf)
    assert schedule.imbalance([np.array([], int)], np.array([], int)) == (1.0, 1.0)


def test_negative_or_mismatched_lengths_are_rejected() -> None:
    with pytest.raises(ValueError, match=">= 0"):
        schedule.valid_tiles([-1], [1], 1, 8, 8)
    with pytest.raises(ValueError, match="2 query lengths but 1 key lengths"):
        schedule.valid_tiles([1, 2], [1], 1, 8, 8)


Draw = Callable[[np.random.Generator], np.ndarray]


def _uniform(batch: int, longest: int) -> Draw:
    """Fill 0.5: lengths uniform on 1 to the longest."""
    return lambda generator: generator.integers(1, longest + 1, batch)


def _log_normal(batch: int, median: float, sigma: float, longest: int) -> Draw:
    def draw(generator: np.random.Generator) -> np.ndarray:
        lengths = np.rint(median * np.exp(sigma * generator.standard_normal(batch)))
        return lengths.clip(1, longest).astype(np.int64)

    return draw


def _simulate(draw: Draw, programs: int) -> np.ndarray:
    """(max / mean, max / min) of contiguous, padded, valid-only and zigzag; mean of 5 seeds."""
    rows = []
    for seed in range(5):
        lengths = draw(np.random.default_rng(seed))
        tiles = schedule.valid_tiles(lengths, lengths, 4, 256, 128)
        grid = (lengths.size, 4, -(-int(lengths.max()) // 256))
        assignments = (
            schedule.contiguous(tiles.work, programs),
            schedule.round_robin_padded(tiles, grid, programs),
            schedule.round_robin_valid(tiles.work, programs),
            schedule.zigzag(tiles.work, programs),
        )
        rows.append([schedule.imbalance(assignment, tiles.work) for assignment in assignments])
    return np.mean(rows, axis=0)


def test_the_published_sixfold_imbalance_is_that_of_a_padded_round_robin() -> None:
    (_, _), (_, padded), (_, _), (_, zigzag) = _simulate(_uniform(64, 2000), 148)
    assert padded == pytest.approx(5.7, abs=0.1)
    assert zigzag == pytest.approx(1.05, abs=0.01)


@pytest.mark.parametrize(
    ("draw", "programs", "expected"),
    [
        (_uniform(1152, 2000), 148, (1.96, 2.12, 1.11, 1.004)),
        (_uniform(64, 2000), 148, (9.4, 5.7, 1.67, 1.05)),
        (_log_normal(1152, 300, 1.0, 4096), 148, (10.6, 3.5, 1.51, 1.01)),
        (_log_normal(64, 800, 1.2, 16384), 148, (38.9, 2.3, 1.76, 1.13)),
        (_uniform(64, 2000), 132, (7.8, 4.1, 1.69, 1.05)),
    ],
    ids=["uniform-1152", "uniform-64", "log-normal-1152", "log-normal-64", "uniform-64-on-132"],
)
def test_max_over_min_matches_the_simulated_table(
    draw: Draw, programs: int, expected: tuple[float, ...]
) -> None:
    assert _simulate(draw, programs)[:, 1] == pytest.approx(expected, rel=0.02)


def test_max_over_mean_matches_the_simulated_table() -> None:
    rows = _simulate(_log_normal(1152, 300, 1.0, 4096), 132)[:, 0]
    assert rows == pytest.approx((3.27, 1.55, 1.21, 1.005), rel=0.01)


def _offsets(lengths: list[int] | None, dtype: torch.dtype) -> torch.Tensor | None:
    if lengths is None:
        return None
    offsets = torch.zeros(len(lengths) + 1, dtype=dtype)
    offsets[1:] = torch.tensor(lengths, dtype=dtype).cumsum(0)
    return offsets


def _naive_list(
    rows: list[int] | None, others: list[int] | None, total: int, block: int, span: int | None
) -> list[tuple[int, int]]:
    """The contract of `build_tile_list`, in Python."""
    batch = len(rows if rows is not None else others or [])
    lengths = [*rows, total - sum(rows)] if rows is not None else [total] * batch
    keys = [min(n, n if span is None else span) for n in others] if others else [0] * batch
    order = sorted(range(batch), key=lambda s: (-keys[s], s)) + (
        [batch] if rows is not None else []
    )
    return [(s, b) for s in order for b in range(-(-lengths[s] // block))]


def _build(
    compare: bool,
    rows: list[int] | None,
    others: list[int] | None,
    total: int,
    block: int,
    span: int | None = None,
    dtype: torch.dtype = torch.int32,
) -> schedule.TileList:
    row_offsets, other_offsets = _offsets(rows, dtype), _offsets(others, dtype)
    if not compare:
        return schedule.build_tile_list(row_offsets, other_offsets, total, block, span=span)
    batch = len(rows if rows is not None else others or [])
    upper = batch * -(-total // block) if rows is None else total // block + batch + 1
    return schedule._build_by_comparing(
        None if row_offsets is None else row_offsets.to(DEVICE),
        None if other_offsets is None else other_offsets.to(DEVICE),
        batch,
        total,
        block,
        2**31 - 1 if span is None else span,
        upper,
    )


def _check(
    tiles: schedule.TileList,
    rows: list[int] | None,
    others: list[int] | None,
    total: int,
    block: int,
    span: int | None = None,
) -> None:
    expected = _naive_list(rows, others, total, block, span)
    count = len(expected)
    assert tiles.sequence.dtype == tiles.block.dtype == tiles.count.dtype == torch.int32
    assert tiles.count.tolist() == [count]
    pairs = list(zip(tiles.sequence.tolist(), tiles.block.tolist(), strict=True))
    assert pairs[:count] == expected
    assert set(pairs[count:]) <= {(-1, 0)}


@settings(max_examples=100, deadline=None)
@given(
    LENGTHS,
    st.integers(0, 20),
    st.integers(1, 9),
    SIDES,
    st.sampled_from(["both", "rows", "others"]),
)
def test_a_tile_list_has_every_block_once_longest_other_side_first(
    lengths: list[tuple[int, int]], padding: int, block: int, span: int | None, given_: str
) -> None:
    rows = [m for m, _ in lengths] if given_ != "others" else None
    others = [n for _, n in lengths] if given_ != "rows" else None
    total = sum(rows) + padding if rows is not None else padding
    _check(_build(False, rows, others, total, block, span), rows, others, total, block, span)


CASES = {
    "an empty batch": ([], [], 0),
    "an empty batch with padding": ([], [], 70),
    "one sequence": ([5], [3], 5),
    "all empty": ([0, 0, 0], [0, 4, 0], 0),
    "empty first, middle and last": ([0, 65, 0, 130, 0], [9, 9, 1, 40, 0], 195),
    "one giant": ([2, 9000, 1, 0, 3], [1, 8, 9, 9, 9], 9010),
    "padding behind the last offset": ([63, 64, 65], [7, 7, 7], 400),
    "more sequences than a scan": ([3, 0, 70] * 400, [1, 5, 5] * 400, 29200),
}


@needs_kernels
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_kernel_builds_the_same_list(case: str, dtype: torch.dtype) -> None:
    rows, others, total = CASES[case]
    _check(_build(True, rows, others, total, 64, None, dtype), rows, others, total, 64)


@needs_kernels
@pytest.mark.parametrize("span", [None, 0, 8])
def test_the_kernel_orders_by_what_a_window_lets_a_row_see(span: int | None) -> None:
    rows, others = [10, 20, 30, 40], [5, 90, 8, 70]
    _check(_build(True, rows, others, 100, 16, span), rows, others, 100, 16, span)


@needs_kernels
@pytest.mark.parametrize("total", [0, 1, 64, 65])
@pytest.mark.parametrize("others", [[], [3], [3, 0, 90, 3, 7]])
def test_the_kernel_lists_one_dense_query_for_every_sequence(others: list[int], total: int) -> None:
    _check(_build(True, None, others, total, 64), None, others, total, 64)


@needs_kernels
def test_the_kernel_keeps_the_order_of_sequences_without_other_offsets() -> None:
    rows = [3, 100, 0, 64]
    _check(_build(True, rows, None, 200, 32), rows, None, 200, 32)


def test_offsets_past_32_bits_give_the_right_blocks() -> None:
    rows, block = [2**32 + 1, 1, 2**31], 2**24
    total = sum(rows) + 3
    tiles = _build(False, rows, None, total, block, None, torch.int64)
    _check(tiles, rows, None, total, block)


@needs_kernels
def test_the_kernel_takes_offsets_past_32_bits() -> None:
    rows, block = [2**32 + 1, 1, 2**31], 2**24
    total = sum(rows) + 3
    tiles = _build(True, rows, None, total, block, None, torch.int64)
    _check(tiles, rows, None, total, block)


def test_more_sequences_than_a_grid_axis_of_65535() -> None:
    rows = [1, 0, 2] * 30_000
    _check(_build(False, rows, rows, 90_000, 16), rows, rows, 90_000, 16)


def test_the_list_of_the_device_has_the_tiles_of_the_host() -> None:
    rows, others = [5, 0, 17, 64, 3], [9, 4, 0, 3, 12]
    tiles = _build(False, rows, others, 100, 8)
    host = schedule.valid_tiles(rows, others, 1, 8, 4)
    listed = zip(tiles.sequence.tolist(), tiles.block.tolist(), strict=True)
    working = {(s, b) for s, b in listed if 0 <= s < 5 and others[s] > 0}
    assert working == set(zip(host.sequence.tolist(), host.block.tolist(), strict=True))


def test_a_tile_list_without_any_offsets_is_rejected() -> None:
    with pytest.raises(ValueError, match="cannot both be None"):
        schedule.build_tile_list(None, None, 10, 64)
    with pytest.raises(ValueError, match="block_rows 0"):
        schedule.build_tile_list(torch.zeros(1, dtype=torch.int32), None, 10, 0)


@triton.jit
def _deal(owner, items, programs, ITEMS: tl.constexpr):
    program = tl.program_id(0)
    for turn in range(ITEMS):
        item = schedule.zigzag_index(turn, program, programs)
        tl.store(owner + item, program, mask=item < items)


@needs_kernels
@pytest.mark.parametrize(("items", "programs"), [(1, 1), (5, 3), (12, 4), (13, 4), (3, 8)])
def test_persistent_programs_deal_as_the_host_does(items: int, programs: int) -> None:
    owner = torch.full((items,), -1, dtype=torch.int32, device=DEVICE)
    _deal[(programs,)](owner, items, programs, triton.cdiv(items, programs))
    work = np.arange(items, 0, -1)
    for program, dealt in enumerate(schedule.zigzag(work, programs)):
        assert (owner.cpu().numpy()[dealt] == program).all()
