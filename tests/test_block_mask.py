"""Block attention as a mask of the general kernels: the ladder's rung below the fused kernel."""

from __future__ import annotations

import pytest
import torch

from jagbench import workloads
from jagbench.accuracy import judge
from jagbench.execution import run
from jagbench.impl.kernels.block_mask import block_offsets, masked_block_attention
from jagbench.implementation import load

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = (
    "block_attention-rotary-smoke",
    "block_attention-d64-v32-rotary-keys-only",
    "block_attention-d32-gqa-rotary",
    "block_attention-d80-block16",
    "block_attention-lengths-about-blocks-of-64",
    "block_attention-padding-past-the-last-offset-rotary",
    "block_attention-nothing-but-padding",
    "block_attention-empty-batch-with-padding",
    "block_attention-all-sequences-empty",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_general_kernels_over_cut_offsets_are_block_attention(name: str) -> None:
    inputs = workloads.select(name=name)[0].inputs(DEVICE, torch.float32)
    function = load("jagbench.impl.variants:block_mask").get("block_attention")
    found = [f"{a.name}: {a.problem}" for a in judge(inputs, run(function, inputs, backward=True))
             if not a.ok]  # fmt: skip
    assert not found, "; ".join(found)


@pytest.mark.parametrize("lengths", [[70, 0, 5, 131], [], [0, 0], [64, 1]], ids=str)
@pytest.mark.parametrize("padding", [0, 200])
def test_offsets_are_cut_at_the_blocks_of_each_sequence(lengths: list[int], padding: int) -> None:
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    cut = block_offsets(offsets, sum(lengths) + padding, 64).tolist()
    starts = [at + i for at, n in zip(offsets.tolist(), lengths, strict=False)
              for i in range(0, n, 64)]  # fmt: skip
    assert cut[: len(starts)] == starts
    assert set(cut[len(starts) :]) == {sum(lengths)}


def test_offsets_changed_in_place_are_cut_again() -> None:
    offsets = torch.tensor([0, 3, 70], device=DEVICE)
    assert block_offsets(offsets, 70, 64) is block_offsets(offsets, 70, 64)
    offsets[1] = 4
    assert block_offsets(offsets, 70, 64).tolist()[:3] == [0, 4, 68]


def test_blocks_of_no_rows_are_refused() -> None:
    x = torch.zeros(3, 1, 16, device=DEVICE)
    with pytest.raises(ValueError, match="got 0"):
        masked_block_attention(x, x, x, torch.tensor([0, 3], device=DEVICE), block_size=0)
