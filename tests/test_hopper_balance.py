"""How evenly the persistent kernels deal their tiles: the folded order, counted on real lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from jagbench.impl.kernels.hopper.backward_launch import pairs_apart
from jagbench.impl.kernels.hopper.forward_launch import LONG_ROWS
from jagbench.impl.kernels.hopper.work import dealt_entry, folded_tile, folds
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.mask import Mask
from jagbench.impl.kernels.schedule import valid_tiles
from jagbench.pairs import visible_range
from jagbench.workloads import CATALOGUE

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET.value else "cpu"
needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRET.value, reason="needs a GPU or interpreter"
)
PROGRAMS = 132
Tile = tuple[int, int]


def _folded(heads: int, tiles: int, apart: bool) -> Iterator[Tile]:
    """(head, block) of a sequence in folded order, as `folded_tile` says it."""
    pairs = [(tiles - 1 - step, step) for step in range(tiles // 2)]
    if apart:
        order = [(head, pair) for head in range(heads) for pair in pairs]
    else:
        order = [(head, pair) for pair in pairs for head in range(heads)]
    for head, pair in order:
        for block in pair:
            yield head, block
    if tiles % 2:
        for head in range(heads):
            yield head, tiles // 2


# As in the real kernels, no number is compiled in.
@triton.jit(do_not_specialize=["heads", "tiles"])
def _order_kernel(out, heads, tiles, APART: tl.constexpr):
    for place in range(0, heads * tiles):
        head, block = folded_tile(place + tl.program_id(0), heads, tiles, APART)
        tl.store(out + 2 * place, head)
        tl.store(out + 2 * place + 1, block)


@triton.jit
def _deal_kernel(out, turns, HAND: tl.constexpr):
    for turn in range(0, turns):
        entry = dealt_entry(turn, tl.program_id(0), tl.num_programs(0), HAND)
        tl.store(out + tl.program_id(0) * turns + turn, entry)


@needs_kernels
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 7, 16])
def test_the_kernels_walk_the_folded_order(tiles: int, heads: int, apart: bool) -> None:
    out = torch.zeros(heads * tiles, 2, dtype=torch.int32, device=DEVICE)
    _order_kernel[(1,)](out, heads, tiles, apart)
    assert [tuple(pair) for pair in out.tolist()] == list(_folded(heads, tiles, apart))


@needs_kernels
@pytest.mark.parametrize("hand", [1, 2, 8])
def test_hands_are_dealt_zigzag_and_every_entry_once(hand: int) -> None:
    turns = 4 * hand
    out = torch.zeros(3, turns, dtype=torch.int32, device=DEVICE)
    _deal_kernel[(3,)](out, turns, hand)
    assert out[1, : 2 * hand].tolist() == [*range(hand, 2 * hand), *range(4 * hand, 5 * hand)]
    assert sorted(out.flatten().tolist()) == list(range(3 * turns))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 7, 16])
def test_the_folded_order_has_every_tile_of_every_head_once(
    tiles: int, heads: int, apart: bool
) -> None:
    found = Counter(_folded(heads, tiles, apart))
    assert found == Counter((head, block) for head in range(heads) for block in range(tiles))


@pytest.mark.parametrize("heads", [2, 4])
def test_pairs_of_a_causal_sequence_weigh_the_same(heads: int) -> None:
    for tiles in range(1, 20):
        blocks = [block + 1 for _, block in _folded(heads, tiles, False)]
        assert {sum(pair) for pair in zip(blocks[::2], blocks[1::2], strict=True)} == {tiles + 1}


def _fullest(work: np.ndarray, hand: int) -> float:
    """Work of the fullest program where hands are dealt zigzag in the order given."""
    work = np.append(work, np.zeros(-work.size % hand)).reshape(-1, hand).sum(1)
    turn, place = np.divmod(np.arange(work.size), PROGRAMS)
    program = np.where(turn % 2 == 0, place, PROGRAMS - 1 - place)
    return float(np.bincount(program, weights=work, minlength=PROGRAMS).max())


def _steps(
    recipe: Any, rows: list[int], others: list[int], side: str, steps: tuple[int, int]
) -> list[np.ndarray]:
    """Steps of every block of every sequence, one for the item itself added."""
    q, k = (rows, others) if side == "query" else (others, rows)
    found = [np.ones(-(-length // 128)) for length in rows]
    tiles = valid_tiles(
        q, k, 1, *steps, side=side, causal=recipe.causal, align=recipe.align, window=recipe.window
    )
    for sequence, block, work in zip(tiles.sequence, tiles.block, tiles.work, strict=True):
        found[sequence][block] += work
    return found


def _masked() -> Iterator[tuple[str, Any]]:
    for name, workload in CATALOGUE.items():
        if workload.operator not in ("jagged_attention", "gdpa"):
            continue
        recipe = workload.recipe
        # What lies beyond a window is not the tier's to take.
        beyond = recipe.prefix or recipe.last_full
        masked = recipe.causal or recipe.window is not None
        if "full" in workload.purposes and masked and not beyond:
            yield name, workload


def _counted(workload: Any, side: str) -> tuple[float, float, float] | None:
    """Fullest over mean: in order, as dealt, all tiles sorted by work; None if entries are few."""
    recipe = workload.recipe
    lengths = recipe.lengths(workload.seed)
    if lengths.get("q_offsets") is None:
        return None
    q, k = (list(lengths[name]) for name in ("q_offsets", "k_offsets"))
    rows, others = (q, k) if side == "query" else (k, q)
    kv_heads = recipe.kv_heads or recipe.heads
    heads = recipe.heads if side == "query" else kv_heads
    left, right = visible_range(recipe.causal, recipe.window)
    mask = Mask(-1 if left is None else left, -1 if right is None else right, True)
    upper = sum(rows) // 128 + len(rows) + 1
    if upper * heads < 8 * PROGRAMS:
        return None
    apart = pairs_apart(mask) if side == "key" else sum(q) >= LONG_ROWS * len(q)
    steps = (128, 128) if side == "query" else (64, 128)
    work = _steps(recipe, rows, others, side, steps)
    if side == "key":
        work = [1 + (steps - 1) * (recipe.heads // kv_heads) for steps in work]
    order = sorted(range(len(rows)), key=lambda s: -others[s])
    plain = np.concatenate([np.repeat(work[s], heads) for s in order])
    folded = np.concatenate(
        [
            [work[s][block] for _, block in _folded(heads, len(work[s]), apart)]
            for s in order
            if len(work[s])
        ]
    )
    best = np.sort(plain)[::-1]
    mean = plain.sum() / PROGRAMS
    in_order = _fullest(plain, 1) / mean
    paired = folds(mask, upper * heads, PROGRAMS)
    dealt = _fullest(folded, 2) / mean if paired else in_order
    return in_order, dealt, _fullest(best, 1) / mean


@pytest.mark.parametrize("side", ["query", "key"])
def test_masked_workloads_are_balanced_to_three_percent_of_the_zigzag_bound(side: str) -> None:
    found = {name: counted for name, w in _masked() if (counted := _counted(w, side)) is not None}
    assert len(found) >= 9
    for name, (_, folded, best) in found.items():
        # A window's pairs do not weigh the same, and a key tile's work is that of a group of heads.
        allowed = 1.035 if side == "key" and name.endswith("gqa-window") else 1.03
        assert folded <= allowed * best, name
