"""The passes around the Hopper backward; the kernel itself is tested where there is such a GPU."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from jagbench.impl.kernels.activations import SOFTMAX
from jagbench.impl.kernels.arguments import Geometry
from jagbench.impl.kernels.attention_launch import BackwardCall, query_tiles, row_statistics
from jagbench.impl.kernels.hopper.backward_launch import (
    SHARE_BASES,
    chain_of,
    pairs_apart,
    pass_over_queries,
    share_column,
    slope_is_wide,
)
from jagbench.impl.kernels.hopper.support import keys_are_short
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.mask import Mask
from jagbench.impl.kernels.schedule import build_tile_list
from jagbench.impl.kernels.tuning import Schedule

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET.value else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRET.value, reason="needs a GPU or interpreter"
)
Q_LENGTHS, K_LENGTHS, TAIL = (3, 130, 0, 129, 5), (64, 65, 128, 129, 0), 7
HEADS, DIM, SCALE = 2, 64, 0.5


def _offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("left", [-1, 10])
@pytest.mark.parametrize("finish", [False, True])
def test_each_row_of_dq_gets_what_the_keys_of_its_sequence_ask_for(
    keys: int, left: int, finish: bool
) -> None:
    rows = sum(Q_LENGTHS) + TAIL
    sums = torch.randint(1, 128, (rows, HEADS, DIM), device=DEVICE).float()
    shares = torch.empty_like(sums).scatter_(2, _places(HEADS), sums)
    before = shares.clone()
    dq = torch.full((rows, HEADS, DIM), 5.0, dtype=torch.bfloat16, device=DEVICE)
    q_offsets, k_offsets = _offsets(Q_LENGTHS), _offsets(K_LENGTHS)
    geometry = Geometry(len(Q_LENGTHS), HEADS, HEADS, DIM, DIM, rows, sum(K_LENGTHS), False)
    call = BackwardCall(geometry, Mask(left, -1, True), Schedule(), SOFTMAX.value, 1.0, SCALE)
    tiles = build_tile_list(q_offsets, k_offsets, rows, 128)
    pass_over_queries(shares, dq, q_offsets, k_offsets, tiles, call, finish=finish, keys=keys)
    start = 0
    for q_length, k_length in zip((*Q_LENGTHS, TAIL), (*K_LENGTHS, 0), strict=True):
        part = slice(start, start + q_length)
        start += q_length
        many, none = k_length > keys, k_length == 0
        value = 5.0
        if finish:
            value = sums[part] * SCALE if many else 0.0 if none else 5.0
        elif left >= 0 and not none and not many:
            value = 0.0
        zeroed = many and not finish
        assert (shares[part] == (0.0 if zeroed else before[part])).all()
        assert (dq[part] == value).all()


def _places(heads: int) -> torch.Tensor:
    """`share_column` of every row of the sequences, `[rows, heads, dim]`."""
    row = torch.cat([torch.arange(n) for n in (*Q_LENGTHS, TAIL)])[:, None]
    places = share_column.fn(row, torch.arange(DIM)).to(DEVICE)
    return places[:, None].expand(-1, heads, -1).contiguous()


def _staged() -> dict[int, tuple[int, int]]:
    """Offset in floats in the staging buffer -> row and column of dQ."""
    found = {}
    for offset in range(64 * 64):
        row = column = 0
        for bit, (of_row, of_column) in enumerate(SHARE_BASES):
            row ^= of_row * (offset >> bit & 1)
            column ^= of_column * (offset >> bit & 1)
        found[offset] = row, column
    return found


def test_columns_of_a_share_lie_where_the_staging_buffer_puts_them() -> None:
    # Two halves of 32 columns, 64 rows each, of 8 pieces of 16 bytes swizzled by the row.
    for offset, (row, column) in _staged().items():
        half, line, piece = offset >> 11, offset >> 5 & 63, offset >> 2 & 7
        assert row == line
        assert share_column.fn(row, column) == half * 32 + (piece ^ line & 7) * 4 + offset % 4


def test_threads_that_store_together_meet_in_no_bank() -> None:
    # Eight lanes store 16 bytes each at once: two rows, four lanes a row (the sums of wgmma).
    places = {element: offset for offset, element in _staged().items()}
    for first in range(0, 64, 2):
        for column in (0, 16, 32, 48):
            lanes = [(first + i // 4, column + 2 * (i % 4)) for i in range(8)]
            assert len({places[lane] >> 2 & 7 for lane in lanes}) == 8
            assert all(places[lane] % 4 == 0 for lane in lanes)


@pytest.mark.parametrize("dim", [64, 128])
def test_no_two_columns_of_a_row_share_a_place(dim: int) -> None:
    for row in range(16):
        assert sorted(share_column.fn(row, column) for column in range(dim)) == list(range(dim))


def _geometry(keys: int, batch: int = 512, shared_q: bool = False) -> Geometry:
    return Geometry(batch, 4, 4, 128, 128, batch * 512, batch * keys, shared_q)


@pytest.mark.parametrize(
    ("geometry", "mask", "chain"),
    [
        (_geometry(256), Mask(-1, -1, False), 4),
        (_geometry(320), Mask(-1, -1, False), 4),
        (_geometry(321), Mask(-1, -1, False), 1),
        (_geometry(256, batch=255), Mask(-1, -1, False), 1),
        (_geometry(256), Mask(-1, 0, True), 1),
        (_geometry(256, shared_q=True), Mask(-1, -1, False), 1),
    ],
)
def test_key_tiles_are_chained_where_sequences_are_short_and_many(geometry, mask, chain):
    assert chain_of(geometry, mask, SOFTMAX.value) == chain


def test_an_activation_is_chained_where_registers_allow():
    assert chain_of(_geometry(256), Mask(-1, -1, False), 3) == 1
    narrow = Geometry(512, 4, 4, 64, 64, 512 * 512, 512 * 256, False)
    assert chain_of(narrow, Mask(-1, -1, False), 3) == 4


@pytest.mark.parametrize(("left", "right", "apart"), [(-1, 0, False), (9, -1, False), (9, 0, True)])
def test_the_pairs_of_a_head_are_neighbours_where_they_differ_in_weight(left, right, apart):
    assert pairs_apart(Mask(left, right, True)) == apart


def test_short_keys_are_told_by_their_mean():
    assert keys_are_short(_geometry(64))
    assert not keys_are_short(_geometry(65))
    assert not keys_are_short(_geometry(64, shared_q=True))


@pytest.mark.parametrize(
    ("activation", "dim", "wide"),
    [(SOFTMAX.value, 128, True), (3, 128, False), (3, 64, True)],
)
def test_a_derivative_waits_in_float32_where_registers_allow(activation, dim, wide):
    geometry = Geometry(2, 4, 4, dim, dim, 9, 9, False)
    call = BackwardCall(geometry, Mask(-1, -1, False), Schedule(), activation, 1.0, 1.0)
    assert slope_is_wide(call) == wide


def test_deltas_are_left_to_the_kernel_where_an_item_holds_all_keys() -> None:
    rows = sum(Q_LENGTHS)
    generator = torch.Generator().manual_seed(0)
    out, d_out = (torch.randn(rows, HEADS, DIM, generator=generator).to(DEVICE) for _ in range(2))
    lse = torch.randn(HEADS, rows, generator=generator).to(DEVICE)
    q_offsets, k_offsets = _offsets(Q_LENGTHS), _offsets(K_LENGTHS)
    geometry = Geometry(len(Q_LENGTHS), HEADS, HEADS, DIM, DIM, rows, sum(K_LENGTHS), False)
    tiles = query_tiles(q_offsets, k_offsets, geometry)
    every, some = (
        row_statistics(out, d_out, lse, None, q_offsets, k_offsets, geometry, tiles, own_keys)
        for own_keys in (0, 64)
    )
    start = 0
    for sequence, (length, keys) in enumerate(zip(Q_LENGTHS, K_LENGTHS, strict=True)):
        first = (start // 128 + 2 * sequence) * 128
        part = slice(first, first + length)
        assert (every[0, :, part] == some[0, :, part]).all()
        want = (out * d_out).sum(-1).t()[:, start : start + length]
        torch.testing.assert_close(every[1, :, part], want, rtol=1e-5, atol=1e-5)
        assert (some[1, :, part] == (every[1, :, part] if keys > 64 else 0.0)).all()
        start += length
