"""The passes around the Hopper backward; the kernel itself is tested where there is such a GPU."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from jagbench.impl.kernels.activations import SOFTMAX
from jagbench.impl.kernels.arguments import Geometry
from jagbench.impl.kernels.attention_launch import BackwardCall, Mask
from jagbench.impl.kernels.hopper.backward_launch import pass_over_queries
from jagbench.impl.kernels.interpreter import INTERPRET
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
