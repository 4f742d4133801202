"""Windows with a prefix and last queries: which tiles kernels visit, and what they compute."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from oracles import offsets_of

from jagbench.accuracy import judge
from jagbench.execution import run
from jagbench.impl import gdpa, jagged_attention
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.mask import CLIP, Mask, mask_of
from jagbench.impl.kernels.tiles import (
    LAST,
    PREFIX,
    first_free_row,
    span_beyond_of_keys,
    span_beyond_of_queries,
    visible,
    visible_span,
)
from jagbench.impl.kernels.tuning import Schedule, TileConfig
from jagbench.inputs import Inputs
from jagbench.reference import OPERATORS
from jagbench.reference.arguments import Mask as Truth
from jagbench.reference.arguments import visible as visible_truth

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET.value else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRET.value, reason="needs a GPU or the interpreter"
)
BLOCK_Q, BLOCK_K = 4, 2


@triton.jit
def _visit(
    counts, hidden, lo, hi, first, length, own, shift, left, right, prefix, free_from, k_len,
    columns, KEYS: tl.constexpr, MASK: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, BEYOND: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Count the tiles of [lo, hi) and, without a mask, the hidden pairs that they let through."""
    OTHER: tl.constexpr = BLOCK_Q if KEYS else BLOCK_K
    for other in range(lo, hi, OTHER):
        at = (other // OTHER) * columns + own if KEYS else own * columns + other // OTHER
        tl.store(counts + at, tl.load(counts + at) + 1)
        if not MASK:
            rows = (other if KEYS else first) + tl.arange(0, BLOCK_Q)[:, None]
            keys = (first if KEYS else other) + tl.arange(0, BLOCK_K)[None, :]
            seen = visible(
                rows, keys, k_len, shift, left, right, prefix, free_from, HAS_LEFT, HAS_RIGHT,
                BEYOND,
            )  # fmt: skip
            real = (keys < k_len) & (rows < length)
            wrong = tl.sum(tl.sum((real & (seen == 0)).to(tl.int32), 1), 0)
            tl.store(hidden, tl.load(hidden) + wrong)


@triton.jit
def _walk_kernel(
    counts, hidden, q_len, k_len, left, right, prefix, last_full, columns,
    KEYS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIGN_END: tl.constexpr,
    BEYOND: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The loops of a kernel over query tiles (forward, dQ) or over key tiles (dK, dV)."""
    own = tl.program_id(0)
    shift = 0
    if ALIGN_END:
        shift = k_len - q_len
    free_from = first_free_row(q_len, last_full, BEYOND)
    if KEYS:
        first = own * BLOCK_K
        size = tl.minimum(k_len - first, BLOCK_K)
        lo, full_lo, full_hi, hi = visible_span(
            first, size, q_len, -shift, right, left, HAS_RIGHT, HAS_LEFT, BLOCK_Q
        )
        if BEYOND != 0:
            early_lo, early_hi, lo, full_lo, full_hi, hi, late = span_beyond_of_keys(
                first, size, q_len, shift, prefix, free_from, lo, full_lo, full_hi, hi,
                BEYOND, BLOCK_Q,
            )  # fmt: skip
        HEAD: tl.constexpr = HAS_RIGHT
        TAIL: tl.constexpr = HAS_LEFT
    else:
        first = own * BLOCK_Q
        size = tl.minimum(q_len - first, BLOCK_Q)
        lo, full_lo, full_hi, hi = visible_span(
            first, size, k_len, shift, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_K
        )
        early_lo = 0
        late = 0
        if BEYOND != 0:
            early_hi, lo, full_lo, full_hi, hi = span_beyond_of_queries(
                first, size, k_len, shift, prefix, free_from, lo, full_lo, full_hi, hi,
                BEYOND, BLOCK_K,
            )  # fmt: skip
        HEAD: tl.constexpr = HAS_LEFT
        TAIL: tl.constexpr = HAS_RIGHT
    if HEAD and (PREFIX & BEYOND) != 0:
        _visit(
            counts, hidden, early_lo, early_hi, first, q_len, own, shift, left, right, prefix,
            free_from, k_len, columns, KEYS, True, HAS_LEFT, HAS_RIGHT, BEYOND, BLOCK_Q, BLOCK_K,
        )  # fmt: skip
    if HEAD:
        _visit(
            counts, hidden, lo, full_lo, first, q_len, own, shift, left, right, prefix,
            free_from, k_len, columns, KEYS, True, HAS_LEFT, HAS_RIGHT, BEYOND, BLOCK_Q, BLOCK_K,
        )  # fmt: skip
    _visit(
        counts, hidden, full_lo, full_hi if TAIL else hi, first, q_len, own, shift, left, right,
        prefix, free_from, k_len, columns, KEYS, False, HAS_LEFT, HAS_RIGHT, BEYOND,
        BLOCK_Q, BLOCK_K,
    )  # fmt: skip
    if TAIL:
        _visit(
            counts, hidden, full_hi, hi, first, q_len, own, shift, left, right, prefix,
            free_from, k_len, columns, KEYS, True, HAS_LEFT, HAS_RIGHT, BEYOND, BLOCK_Q, BLOCK_K,
        )  # fmt: skip
    if KEYS and TAIL and (LAST & BEYOND) != 0:
        _visit(
            counts, hidden, late, q_len, first, q_len, own, shift, left, right, prefix,
            free_from, k_len, columns, KEYS, True, HAS_LEFT, HAS_RIGHT, BEYOND, BLOCK_Q, BLOCK_K,
        )  # fmt: skip


def visits(m: int, n: int, mask: Mask, keys: bool) -> tuple[torch.Tensor, int]:
    """How often each tile is visited, `[query tiles, key tiles]`; pairs that nobody hid."""
    tiles = -(-m // BLOCK_Q), -(-n // BLOCK_K)
    counts = torch.zeros(tiles, dtype=torch.int32, device=DEVICE)
    hidden = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    _walk_kernel[(tiles[keys],)](
        counts, hidden, m, n, *mask.numbers, tiles[1],
        KEYS=keys, **mask.portable, BLOCK_Q=BLOCK_Q, BLOCK_K=BLOCK_K,
    )  # fmt: skip
    return counts.cpu(), int(hidden)


def needed(m: int, n: int, truth: Truth) -> torch.Tensor:
    """1 for every tile with a visible pair."""
    seen = visible_truth(m, n, truth, torch.device("cpu"))
    grown = torch.zeros(-(-m // BLOCK_Q) * BLOCK_Q, -(-n // BLOCK_K) * BLOCK_K, dtype=torch.bool)
    grown[:m, :n] = seen
    return grown.view(-(-m // BLOCK_Q), BLOCK_Q, -1, BLOCK_K).any(3).any(1).int()


SIZES = [(1, 1), (16, 16), (13, 5), (5, 14), (21, 10)]
WINDOWS = [(1, 1), (2, 0), (None, 1), (3, None), None]


@pytest.mark.parametrize("keys", [False, True], ids=["query-tiles", "key-tiles"])
@pytest.mark.parametrize("align", ["start", "end"])
@pytest.mark.parametrize("causal", [False, True])
def test_every_tile_with_a_visible_pair_is_visited_once(
    causal: bool, align: str, keys: bool
) -> None:
    counts = itertools.product(SIZES, WINDOWS, (0, 3, 8, 99), (0, 1, 5, 99))
    # Every eleventh: 11 shares no factor with the numbers of choices, so that all pairs occur.
    for (m, n), window, prefix, last_full in itertools.islice(counts, 0, None, 11):
        mask = mask_of("here", causal, align, window, prefix, last_full)
        if not mask.beyond:
            continue
        found, let_through = visits(m, n, mask, keys)
        truth = Truth(causal, align, window, prefix, last_full)  # type: ignore[arg-type]
        told = (m, n, window, prefix, last_full)
        need, plain = needed(m, n, truth), visits(m, n, replace(mask, prefix=0, last_full=0), keys)
        assert bool((found >= need).all()), told
        # Where a window has left the sequence its span may still hold a tile: no more than that.
        assert bool((found <= torch.maximum(need, plain[0])).all()), told
        assert let_through == 0, told


@pytest.mark.parametrize("keys", [False, True], ids=["query-tiles", "key-tiles"])
def test_tiles_visited_grow_with_the_length_and_not_with_its_square(keys: bool) -> None:
    mask = mask_of("here", True, "end", (8, None), 4, 4)
    one, two, four = (int(visits(n, n, mask, keys)[0].sum()) for n in (64, 128, 256))
    # A line: as many more tiles for every 64 rows, the long rows of both ends included.
    assert four - two == 2 * (two - one)
    assert four < 0.1 * (256 // BLOCK_Q) * (256 // BLOCK_K)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ((False, "end", None, 5, 5), Mask(-1, -1, True)),
        ((True, "end", None, 5, 5), Mask(-1, 0, True, 5)),
        ((True, "end", (3, None), 0, 5), Mask(3, 0, True, 0, 5, True)),
        ((False, "end", (3, 0), 0, 5), Mask(3, 0, True, 0, 5, False)),
        ((False, "start", (None, 1), 2**40, 2**40), Mask(-1, 1, False, CLIP, CLIP, False)),
    ],
)
def test_what_adds_nothing_to_the_window_is_dropped(
    call: tuple[bool, str, object, int, int], wanted: Mask
) -> None:
    assert mask_of("here", *call) == wanted
    assert Mask.decode(wanted.encode()) == wanted


FUNCTIONS = {"jagged_attention": jagged_attention, "gdpa": gdpa}
MASKS = {
    "prefix": {"window": (5, 5), "prefix": 7},
    "last": {"window": (9, 2), "last_full": 5},
    "both-causal": {"causal": True, "window": (6, None), "prefix": 3, "last_full": 4},
    "both-start": {"window": (4, 3), "prefix": 20, "last_full": 21, "align": "start"},
    "causal-prefix": {"causal": True, "prefix": 9},
    "left-only": {"window": (4, None), "prefix": 2, "last_full": 3},
    "all-and-more": {"causal": True, "window": (1, None), "prefix": 1000, "last_full": 1000},
}
SMALL = TileConfig(16, 16, 4, 1)
SCHEDULES = {
    "auto": Schedule("auto", "auto", SMALL, SMALL, SMALL),
    "v1-atomic": Schedule("v1", "atomic", SMALL, SMALL, SMALL),
    "v3-split": Schedule("v3", "split", SMALL, SMALL, SMALL),
}


def example(operator: str, **options: object) -> Inputs:
    torch.manual_seed(3)
    q_lengths, k_lengths = [40, 0, 5, 70, 1], [35, 9, 0, 80, 64]
    q, g = (torch.randn(sum(q_lengths) + 3, 2, 16, device=DEVICE) for _ in range(2))
    k, v = (torch.randn(sum(k_lengths) + 2, 1, 16, device=DEVICE) for _ in range(2))
    arguments = {
        "q": q, "k": k, "v": v, "q_offsets": offsets_of(q_lengths).to(DEVICE),
        "k_offsets": offsets_of(k_lengths).to(DEVICE),
    }  # fmt: skip
    if operator == "gdpa":
        options = {"activation": "gelu", "pre_scale": 0.3, **options}
    return Inputs(OPERATORS[operator], arguments, options, g)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("operator", FUNCTIONS)
def test_outputs_and_gradients_are_within_budget(operator: str, mask: str, schedule: str) -> None:
    inputs, plan = example(operator, **MASKS[mask]), SCHEDULES[schedule]
    outcome = run(
        lambda *a, **o: FUNCTIONS[operator](*a, **o, schedule=plan), inputs, backward=True
    )
    assert [f"{a.name}: {a.problem}" for a in judge(inputs, outcome) if not a.ok] == []


@pytest.mark.parametrize("longest", [64, 128])
def test_short_keys_that_stay_on_chip_are_masked_alike(longest: int) -> None:
    inputs = example("gdpa", **MASKS["both-causal"])
    outcome = run(lambda *a, **o: gdpa(*a, **o, max_k_len=longest), inputs, backward=True)
    assert [f"{a.name}: {a.problem}" for a in judge(inputs, outcome) if not a.ok] == []


@pytest.mark.parametrize("operator", FUNCTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_torch_counts_the_pairs_beyond_the_window(operator: str, mask: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    inputs = example(operator, **MASKS[mask])
    with FlopCounterMode(display=False) as counter:
        inputs.call(FUNCTIONS[operator])
    assert counter.get_total_flops() == OPERATORS[operator].flops(inputs)


@pytest.mark.parametrize("operator", FUNCTIONS)
@pytest.mark.parametrize("option", ["prefix", "last_full"])
def test_what_is_no_number_of_tokens_is_refused(operator: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"{operator}: {option} must be .* got -4"):
        example(operator, **{option: -4}).call(FUNCTIONS[operator])


@pytest.mark.parametrize("operator", FUNCTIONS)
@pytest.mark.parametrize("side", [1.5, True, "1", float("inf")])
def test_a_window_side_that_is_no_number_of_tokens_is_refused(operator: str, side: object) -> None:
    with pytest.raises(ValueError, match=f"{operator}: window right must be .* got {side!r}"):
        example(operator, window=(2, side)).call(FUNCTIONS[operator])
