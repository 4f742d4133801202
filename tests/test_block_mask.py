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


@pytest.mark.parametrize(
    ("offsets", "words"),
    [([0, 4, 3], "entry 1 is 4 and entry 2 is 3"), ([1, 3], "start at 0, got 1"),
     ([0, 7], "end at 7, but there are 6 rows")],
)  # fmt: skip
def test_malformed_offsets_are_refused_and_not_cut_into_others(
    offsets: list[int], words: str
) -> None:
    x = torch.zeros(6, 1, 16, device=DEVICE)
    with pytest.raises(ValueError, match=f"block_attention by mask: offsets .*{words}"):
        masked_block_attention(x, x, x, torch.tensor(offsets, device=DEVICE))


def test_what_is_no_tensor_is_refused() -> None:
    x, offsets = torch.zeros(6, 1, 16, device=DEVICE), torch.tensor([0, 6], device=DEVICE)
    for given in ((3, x, x), (x, 3, x), (x, x, 3)):
        with pytest.raises(ValueError, match="must be a tensor, got int"):
            masked_block_attention(*given, offsets)  # type: ignore[arg-type]


def test_qk_norm_is_said_to_be_unsupported() -> None:
    x, offsets = torch.zeros(6, 1, 16, device=DEVICE), torch.tensor([0, 6], device=DEVICE)
    with pytest.raises(NotImplementedError, match="QK-norm"):
        masked_block_attention(x, x, x, offsets, qk_norm_eps=1e-6)


def test_it_compiles_whole_and_has_shapes_without_values() -> None:
    x, offsets = torch.randn(150, 2, 16, device=DEVICE), torch.tensor([0, 3, 140], device=DEVICE)
    compiled = torch.compile(masked_block_attention, backend="aot_eager", fullgraph=True)
    wanted = masked_block_attention(x, x, x, offsets)
    assert torch.equal(compiled(x, x, x, offsets), wanted)
    given = (t.to("meta") for t in (x, x, x, offsets))
    assert masked_block_attention(*given).shape == wanted.shape


def test_blocks_of_no_rows_are_refused() -> None:
    x = torch.zeros(3, 1, 16, device=DEVICE)
    with pytest.raises(ValueError, match="got 0"):
        masked_block_attention(x, x, x, torch.tensor([0, 3], device=DEVICE), block_size=0)
