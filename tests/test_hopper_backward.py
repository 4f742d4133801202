"""The passes around the Hopper backward; the kernel itself is tested where there is such a GPU."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from jagbench.impl.kernels.activations import SOFTMAX
from jagbench.impl.kernels.arguments import Geometry
from jagbench.impl.kernels.attention_launch import BackwardCall
from jagbench.impl.kernels.hopper.backward_launch import (
    chain_of,
    keys_are_short,
    pass_over_queries,
    slope_is_wide,
)
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
    shares = torch.full((rows, HEADS, DIM), 3.0, device=DEVICE)
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
        share, value = 3.0, 5.0
        if finish:
            value = 3.0 * SCALE if many else 0.0 if none else 5.0
        elif many:
            share = 0.0
        elif left >= 0 and not none:
            value = 0.0
        assert (shares[part] == share).all()
        assert (dq[part] == value).all()


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
    assert chain_of(geometry, mask) == chain


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
