"""The work list of the persistent kernels: every field against a plain build."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jagbench.impl.kernels.hopper import work
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.schedule import build_tile_list

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET.value else "cpu"
needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRET.value, reason="needs a GPU or interpreter"
)
LENGTHS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=6)
SHARED = ["no side", "own side", "other side"]
WAYS = pytest.mark.parametrize(
    "way", [pytest.param("_by_comparing", marks=needs_kernels), "_by_sorting"]
)


def _starts(lengths: list[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def _plain(
    rows: list[int] | int,
    others: list[int] | int,
    total: int,
    block: int,
    statistics: str,
) -> list[tuple[int, ...]]:
    """The contract of `build_work_list`, in Python; an int is one query all sequences share."""
    batch = len(rows if isinstance(rows, list) else others)
    seen = others if isinstance(others, list) else [0] * batch
    order = sorted(range(batch), key=lambda s: -seen[s])
    items = []
    for s in [*order, batch]:
        if isinstance(rows, list):
            start = out = _starts(rows)[s]
            length = rows[s] if s < batch else total - start
        elif s < batch:
            start, length, out = 0, rows, s * rows
        else:
            continue
        other = other_out = other_length = 0
        if s < batch and isinstance(others, list):
            other = other_out = _starts(others)[s]
            other_length = others[s]
        elif s < batch:
            other_out, other_length = s * others, others
        elif not isinstance(others, list):
            other_out = s * others
        query = out if statistics == "own" else other_out
        unit = (query // 128 + 2 * s) * 2
        for row in range(0, length, block):
            items.append((start, length, row, other, other_length, out, s, unit))
    return items


def _offsets(lengths: list[int] | int, dtype: torch.dtype) -> torch.Tensor | None:
    if isinstance(lengths, int):
        return None
    return torch.tensor(_starts(lengths), dtype=dtype, device=DEVICE)


def _check(
    rows: list[int] | int,
    others: list[int] | int,
    total: int,
    block: int,
    statistics: str = "other",
    dtype: torch.dtype = torch.int32,
) -> None:
    made = work.build_work_list(
        _offsets(rows, dtype),
        _offsets(others, dtype),
        total,
        block,
        shared_rows=isinstance(rows, int),
        other_rows=others if isinstance(others, int) else None,
        statistics=statistics,
    )
    expected = _plain(rows, others, total, block, statistics)
    count = int(made.count)
    assert made.items.dtype == made.count.dtype == torch.int32
    assert count == len(expected) <= made.upper
    items = [tuple(item) for item in made.items.tolist()]
    assert items[:count] == expected
    assert items[count] == (0,) * 8


def _force(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Every list by one way, whatever the number of sequences."""
    build: Callable[..., work.WorkList] = getattr(work, way)
    monkeypatch.setattr(work, "_by_comparing", build)
    monkeypatch.setattr(work, "_by_sorting", build)


@WAYS
@settings(max_examples=60)
@given(
    lengths=LENGTHS,
    padding=st.integers(0, 200),
    block=st.sampled_from([64, 128]),
    statistics=st.sampled_from(["own", "other"]),
    shared=st.sampled_from(SHARED),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_a_work_list_is_that_of_a_plain_build(
    monkeypatch, way, lengths, padding, block, statistics, shared, dtype
) -> None:
    _force(monkeypatch, way)
    rows: list[int] | int = [m for m, _ in lengths]
    others: list[int] | int = [n for _, n in lengths]
    total = sum(m for m, _ in lengths) + padding
    if shared == "own side":
        rows = total = padding
    elif shared == "other side":
        others = padding
    _check(rows, others, total, block, statistics, dtype)


CASES = {
    "an empty batch": ([], [], 0),
    "an empty batch with padding": ([], [], 170),
    "an empty batch of a shared query": (5, [], 5),
    "a shared query without rows": (0, [3, 4], 0),
    "all empty": ([0, 0, 0], [0, 4, 0], 0),
    "empty first, middle and last": ([0, 65, 0, 130, 0], [9, 9, 1, 40, 0], 195),
    "one longer than a step of the kernel": ([2, 9000, 1, 0, 3], [1, 8, 9, 9, 9], 9010),
    "more sequences than a scan": ([3, 0, 70] * 400, [1, 5, 5] * 400, 29200),
}


@WAYS
@pytest.mark.parametrize("case", CASES)
def test_a_work_list_holds_at_its_edges(monkeypatch, way, case) -> None:
    _force(monkeypatch, way)
    rows, others, total = CASES[case]
    _check(rows, others, total, 64)


@needs_kernels
def test_a_work_list_has_the_order_of_the_tile_list() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, others = torch.randint(0, 400, (2, 50), generator=generator).tolist()
    total = sum(rows) + 77
    q, k = _offsets(rows, torch.int32), _offsets(others, torch.int32)
    made = work.build_work_list(q, k, total, 64)
    tiles = build_tile_list(q, k, total, 64)
    count = int(tiles.count)
    assert int(made.count) == count
    assert torch.equal(made.items[:count, 6], tiles.sequence[:count])
    assert torch.equal(made.items[:count, 2], tiles.block[:count] * 64)


def test_more_sequences_than_are_compared_are_sorted(monkeypatch) -> None:
    monkeypatch.setattr(work, "MAX_COMPARED", 2)
    monkeypatch.setattr(work, "_by_comparing", None)
    _check([70, 0, 130], [9, 3, 200], 210, 64)


@needs_kernels
def test_items_and_count_are_aligned_for_vector_loads() -> None:
    offsets = _offsets([70, 3, 5], torch.int32)
    made = work.build_work_list(offsets, offsets, 79, 64)
    assert made.items.data_ptr() % 16 == made.count.data_ptr() % 16 == 0


def test_a_side_needs_offsets_or_rows_that_all_share() -> None:
    offsets = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="shared_rows=False"):
        work.build_work_list(None, offsets, 5, 64)
    with pytest.raises(ValueError, match="shared_rows=True"):
        work.build_work_list(offsets, offsets, 5, 64, shared_rows=True)
    with pytest.raises(ValueError, match="other_offsets and other_rows"):
        work.build_work_list(offsets, None, 5, 64)
