"""What the Hopper forward decides on the host; its kernel is compiled in test_ahead_of_time.py."""

from __future__ import annotations

import pytest
import torch

from jagbench.impl.kernels.arguments import Geometry
from jagbench.impl.kernels.hopper.descriptors import jagged_descriptor
from jagbench.impl.kernels.hopper.forward_launch import (
    chosen,
    forward_tiles,
    in_hands,
    keys_stay,
)
from jagbench.impl.kernels.mask import Mask

_OPEN = Mask(-1, -1, False)


def _stays(
    q: int, k: int, *, told: int = -1, mask: Mask = _OPEN, dim: int = 128, entries: int = 1 << 16
) -> bool:
    geometry = Geometry(64, 4, 4, dim, dim, 64 * q, 64 * k, False)
    return keys_stay(forward_tiles(dim, False), geometry, mask, told, entries, 132)


def test_keys_stay_where_many_queries_meet_keys_that_fit_the_ring():
    assert _stays(1024, 256)
    assert _stays(1024, 256, told=256)
    assert _stays(1024, 512, dim=64)
    assert not _stays(1024, 257)
    assert not _stays(1024, 100, told=300)


def test_keys_of_one_query_tile_do_not_stay():
    assert not _stays(128, 64)


def test_self_attention_keeps_keys_only_where_told():
    assert not _stays(200, 200)
    assert _stays(200, 200, told=256)


@pytest.mark.parametrize("mask", [Mask(-1, 0, True), Mask(5, -1, False), Mask(0, 0, False)])
def test_keys_do_not_stay_under_a_window(mask: Mask):
    assert not _stays(1024, 256, mask=mask)


def test_a_short_list_is_dealt_entry_by_entry():
    assert not _stays(1024, 256, entries=132 * 63)


def test_a_hand_is_a_power_of_two_of_neighbours():
    tiles = in_hands(forward_tiles(128, False))
    assert tiles.resident & (tiles.resident - 1) == 0
    assert tiles.heads_apart


@pytest.mark.parametrize(
    ("q", "k", "words"),
    [
        (256, 256, "128x128 key stages 2 query stages 2 heads adjacent"),
        (1024, 1024, "128x128 key stages 2 query stages 2"),
        (1024, 256, "128x128 key stages 2 query stages 2 hands 8"),
        (512, 64, "128x64 key stages 2 query stages 3"),
    ],
)
def test_the_schedule_hangs_on_the_lengths(q: int, k: int, words: str):
    geometry = Geometry(64, 4, 4, 128, 128, 64 * q, 64 * k, False)
    assert str(chosen(geometry, _OPEN, -1, 1 << 16, 132)) == words


@pytest.mark.parametrize(
    ("mask", "entries", "folded"),
    [
        (Mask(-1, 0, True), 8 * 132, True),
        (Mask(7, -1, False), 8 * 132, True),
        (Mask(255, 0, True), 8 * 132, True),
        (Mask(-1, 0, True), 8 * 132 - 1, False),
        (Mask(-1, 0, True), 1 << 30, False),
        (_OPEN, 1 << 16, False),
    ],
)
@pytest.mark.parametrize("length", [64, 400, 2000])
def test_tiles_are_dealt_in_pairs_under_a_mask_where_pairs_go_round(mask, entries, folded, length):
    geometry = Geometry(64, 4, 4, 128, 128, 64 * length, 64 * length, False)
    tiles = chosen(geometry, mask, -1, entries, 132)
    assert tiles.folded == folded
    assert tiles.heads_apart == (length != 400)
    assert str(tiles).endswith(" folded") == folded


def test_an_empty_tensor_borrows_an_address():
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    other = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    made = jagged_descriptor(other[:0], 64, 64, other)
    assert made.base is other
    full = jagged_descriptor(torch.zeros(3, 2, 64, dtype=torch.bfloat16), 64, 64, other)
    assert full.base is not other
    assert full.shape == made.shape
    assert full.strides == made.strides == [2**34 - 128, 128, 128, 1]
