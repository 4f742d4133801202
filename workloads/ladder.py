"""The ladder: one layer of self-attention over long histories, made cheaper rung by rung.

Full attention, a sliding window, blocks of 64, blocks with rotary embedding fused in, on the same
sequences; and the rotation of one of q, k and v by itself, for a window with a separate rotation.
Records of it are told by the names (`jagbench.html.ladder`).
"""

from __future__ import annotations

from collections.abc import Iterator

from jagbench.workload import Recipe, Workload
from jagbench.workloads.attention import AttentionRecipe
from jagbench.workloads.lengths import UniformFill
from jagbench.workloads.packed import BlockRecipe, RotaryRecipe, Table

TAG = "ladder"
LENGTHS = (2048, 4096, 8192)
WINDOW = 128
SOURCE = (
    "GEM 2026 and PyTorch blog 2026, TLX Block Attention: full, window, block, fused rotary; ours: "
    "the shape"
)
_FULL = frozenset({"full"})
_TWIN = frozenset({"smoke", "conformance"})


def ladder() -> Iterator[Workload]:
    """Every rung at every length, and at one that an interpreter can do."""
    for length in LENGTHS:
        yield from _rungs(256, 4, 128, length, WINDOW, _FULL)
    yield from _rungs(2, 2, 32, 150, 20, _TWIN)


def _rungs(
    batch: int, heads: int, dim: int, length: int, window: int, purposes: frozenset[str]
) -> Iterator[Workload]:
    law = UniformFill(0.5, length)
    table = Table("position", positions=length)
    full = AttentionRecipe("jagged_attention", batch, heads, dim, law)
    narrow = AttentionRecipe("jagged_attention", batch, heads, dim, law, window=(window, window))
    rungs: dict[tuple[str, str], Recipe] = {
        ("jagged_attention", "full"): full,
        ("jagged_attention", f"swa{window}"): narrow,
        ("block_attention", "block"): BlockRecipe(batch, heads, dim, law),
        ("block_attention", "rotary"): BlockRecipe(batch, heads, dim, law, table=table),
        ("rotary", "turn"): RotaryRecipe(batch, heads, dim, law, table=table),
    }
    tail = "" if purposes == _FULL else "-smoke"
    for (operator, rung), recipe in rungs.items():
        name = f"{operator}-ladder-{rung}-l{length}-fill0.5{tail}"
        yield Workload(
            name, operator, recipe, purposes=purposes, tags=frozenset({TAG}), source=SOURCE
        )
