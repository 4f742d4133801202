"""Self-attention of the same histories by four means, tag "ladder": full, window, block, rotary.

2^20 tokens at every length, uniform at fill 0.5, four heads of 128, so that forward and backward
fit one 80 GB device; the lengths drawn are the same for both operators. Work falls from L pairs a
token to the width of a window or a block, so with the tokens held the full attention's time rises
with L, and the others' does not: tag "swa-scaling" has full and window alone.

Source: the steps are those of Meta's GEM (full attention, sliding window, block attention, block
attention with fused rotary); its window is not public, and every number here is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jagbench.workload import Workload
from jagbench.workloads.attention import AttentionRecipe
from jagbench.workloads.lengths import ExactTotal, LengthLaw, UniformFill
from jagbench.workloads.packed import BlockRecipe, Table

TAG, SCALING = "ladder", "swa-scaling"
LENGTHS = (2048, 4096, 8192)
TOKENS = 1 << 20
#: Keys on either side of a query; the prefix and the last queries of the semi-local variant.
WINDOW, PREFIX, LAST = 128, 16, 64

_FULL = frozenset({"full"})
_TWIN = frozenset({"smoke", "conformance", "full"})
_SOURCE = "ours: steps of Meta's GEM (2026-08) at equal tokens"


def ladder() -> Iterator[Workload]:
    """Every step at three lengths, and a twin of each for an interpreter."""
    for longest in LENGTHS:
        law = ExactTotal(UniformFill(0.5, longest), TOKENS, longest)
        sizes = 2 * TOKENS // longest, 4, 128
        numbers = WINDOW, PREFIX, LAST
        yield from _steps(f"-l{longest}", sizes, law, longest, numbers, _FULL)
    twin: LengthLaw = ExactTotal(UniformFill(0.5, 96), 192, 96)
    yield from _steps("-smoke", (4, 2, 32), twin, 96, (12, 3, 5), _TWIN)


def _steps(
    suffix: str,
    sizes: tuple[int, int, int],
    law: LengthLaw,
    longest: int,
    numbers: tuple[int, int, int],
    purposes: frozenset[str],
) -> Iterator[Workload]:
    """sizes: batch, heads, head_dim. numbers: window, prefix, last queries."""
    window, prefix, last = numbers

    def workload(name: str, recipe: AttentionRecipe | BlockRecipe, *tags: str) -> Workload:
        operator = "block_attention" if isinstance(recipe, BlockRecipe) else recipe.operator
        return Workload(
            f"{operator}-{name}", operator, recipe,
            purposes=purposes, tags=frozenset(tags), source=_SOURCE,
        )  # fmt: skip

    full = AttentionRecipe("jagged_attention", *sizes, law)
    local = replace(full, window=(window, window))
    semi = replace(full, window=(window, None), causal=True, prefix=prefix, last_full=last)
    yield workload(f"ladder-full{suffix}", full, TAG, SCALING)
    yield workload(f"ladder-window{window}{suffix}", local, TAG, SCALING, "window")
    tags = SCALING, "window", "causal", "prefix", "last-full"
    yield workload(f"ladder-semi-local{suffix}", semi, *tags)
    block = BlockRecipe(*sizes, law)
    turned = replace(block, table=Table("position", positions=longest))
    yield workload(f"ladder{suffix}", block, TAG)
    yield workload(f"ladder-rotary{suffix}", turned, TAG, "rotary")
