"""Named workloads of block_attention and rotary: published shapes, options, edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from jagbench.workload import Workload
from jagbench.workloads.attention import OffsetsType
from jagbench.workloads.comparison import TAG as COMPARISON
from jagbench.workloads.features import LAWS
from jagbench.workloads.lengths import (
    ExactTotal,
    Explicit,
    LengthLaw,
    LogNormal,
    OneGiant,
    UniformFill,
)
from jagbench.workloads.packed import (
    BY_POSITION,
    DEFAULT_VALUES,
    NO_TABLE,
    BlockRecipe,
    NormedBlockRecipe,
    RotaryRecipe,
    Table,
)
from jagbench.workloads.published import BLOCK_BLOG
from jagbench.workloads.values import (
    HeavyTailed,
    QKNormalised,
    RowsOfZeros,
    StronglyNegativeScores,
    ValueLaw,
)

_SMOKE = frozenset({"smoke", "conformance", "full"})
_DEVICE = frozenset({"conformance", "full"})
_FULL = frozenset({"full"})
_TWIN = frozenset({"smoke", "conformance"})

Recipe = BlockRecipe | RotaryRecipe

BY_TIME = Table("log_time")


def blocks() -> Iterator[Workload]:
    """Every workload of the two operators."""
    yield from _published()
    yield from _features()
    yield from _adversarial()


def _workload(
    name: str, recipe: Recipe, purposes: frozenset[str], *tags: str, source: str = ""
) -> Workload:
    operator = "rotary" if isinstance(recipe, RotaryRecipe) else "block_attention"
    table, dim = recipe.table, recipe.qk_dim
    marks = {
        "gqa": recipe.num_kv_heads != recipe.heads,
        "rotary": table.kind != "none",
        "qk-norm": isinstance(recipe, NormedBlockRecipe),
        "by-token": table.kind == "log_time",
        "partial-rotary": table.dim not in (None, dim) and table.kind != "none",
        "half-split": isinstance(recipe, RotaryRecipe) and recipe.interleaved is False,
        "heavy-tailed-values": isinstance(recipe.values, HeavyTailed),
    }
    found = {tag for tag, holds in marks.items() if holds}
    return Workload(
        f"{operator}-{name}",
        operator,
        recipe,
        purposes=purposes,
        tags=frozenset({*tags, *found}),
        source=source,
    )


# -- published shapes ------------------------------------------------------------------------------


def _published() -> Iterator[Workload]:
    """The shapes of the block attention post, each with its twin for an interpreter."""
    published, ours = ("published", "block_attn"), f"{BLOCK_BLOG}; ours: uniform lengths"
    shape = BlockRecipe(1152, 4, 128, UniformFill(0.7, 2000))
    tags = (*published, COMPARISON)
    yield _workload("l2000-fill0.7", shape, _FULL, *tags, source=ours)
    twin = BlockRecipe(2, 2, 64, UniformFill(0.7, 120))
    yield _workload("fill0.7-smoke", twin, _TWIN, *tags, source=ours)

    turned = ("published", "block_attn_rotary", COMPARISON)
    source = f"{BLOCK_BLOG}; ours: fill 0.75 of 2000, adjusted to the published number of tokens"
    law = ExactTotal(UniformFill(0.75, 2000), 1_735_537, 2000)
    shape = BlockRecipe(1152, 3, 128, law, table=Table("position", positions=2000))
    yield _workload("rotary-l2000-1735537-tokens", shape, _FULL, *turned, source=source)
    law = ExactTotal(UniformFill(0.75, 80), 113, 80)
    twin = BlockRecipe(2, 3, 32, law, table=Table("position", positions=80))
    yield _workload("rotary-smoke", twin, _TWIN, *turned, source=source)
    yield from _separate_rotary()

    source = f"{BLOCK_BLOG}: 768 sequences beyond 7000 tokens; ours: log-normal lengths"
    histories = LogNormal(1500, 0.8, 16, 7168)
    for suffix, table in (("", NO_TABLE), ("-rotary", BY_POSITION)):
        long = ("published", "block_attn_long")
        shape = BlockRecipe(768, 4, 128, histories, table=table)
        yield _workload(f"l7168-b768{suffix}", shape, _FULL, *long, source=source)
        twin = BlockRecipe(4, 2, 32, LogNormal(40, 0.8, 2, 190), table=table)
        yield _workload(f"long{suffix}-smoke", twin, _TWIN, *long, source=source)


def _separate_rotary() -> Iterator[Workload]:
    """The rotation of the same tokens as an operator of its own: what fusion saves."""
    source = f"{BLOCK_BLOG}; ours: the rotation of its rotary shape alone"
    tags = ("published", "block_attn_rotary", COMPARISON)
    law = ExactTotal(UniformFill(0.75, 2000), 1_735_537, 2000)
    shape = RotaryRecipe(1152, 3, 128, law, table=Table("position", positions=2000))
    yield _workload("l2000-1735537-tokens", shape, _FULL, *tags, source=source)
    law = ExactTotal(UniformFill(0.75, 80), 113, 80)
    twin = RotaryRecipe(2, 3, 32, law, table=Table("position", positions=80))
    yield _workload("smoke", twin, _TWIN, *tags, source=source)


# -- options ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One combination of options; lengths by the name of a law in `features.LAWS`."""

    name: str
    dim: int
    law: str
    heads: int = 2
    kv_heads: int | None = None
    v_dim: int | None = None
    block_size: int | None = None
    scale: float | None = None
    table: Table = NO_TABLE
    rotate_values: bool | None = None
    values: ValueLaw = DEFAULT_VALUES
    int32: bool = False
    qk_norm_eps: float | None = None


@dataclass(frozen=True)
class Turn:
    """The same for rotary."""

    name: str
    dim: int
    law: str
    heads: int = 2
    table: Table = BY_POSITION
    interleaved: bool | None = None
    inverse: bool | None = None
    values: ValueLaw = DEFAULT_VALUES
    int32: bool = False


_ROWS = (
    Row("d16", 16, "uniform"),
    Row("d32-gqa-rotary", 32, "log-normal", heads=4, kv_heads=2, table=BY_POSITION),
    Row("d64-mqa", 64, "nearly-full", heads=4, kv_heads=1, int32=True),
    Row("d64-rotary", 64, "uniform", table=BY_POSITION, values=QKNormalised()),
    Row("d72-partial-rotary", 72, "zipf", table=Table("position", 24)),
    Row("d80-block16", 80, "nearly-full", block_size=16),
    Row("d96-heavy-tailed-rotary", 96, "zero-inflated", table=BY_POSITION, values=HeavyTailed()),
    Row("d104-block32-rotary", 104, "uniform", block_size=32, table=BY_POSITION),
    Row("d128-rotary-keys-only", 128, "giant", table=BY_POSITION, rotate_values=False),
    Row("d192-v128-gqa", 192, "gaussian", heads=4, kv_heads=2, v_dim=128, int32=True),
    Row("d256-rotary", 256, "short", heads=1, table=BY_POSITION),
    Row("d32-v64-partial-rotary", 32, "short", v_dim=64, table=Table("position", 16)),
    Row("d64-v32-rotary-keys-only", 64, "short", v_dim=32, table=BY_POSITION, rotate_values=False),
    Row("d64-scaled", 64, "fixed", scale=0.3),
    Row("d32-block128", 32, "giant", block_size=128, table=BY_POSITION),
    Row("d32-block1", 32, "short", block_size=1),
    Row("d64-log-time-rotary", 64, "uniform", table=BY_TIME),
    Row("d32-log-time-partial-gqa", 32, "bimodal", heads=4, kv_heads=2, table=Table("log_time", 8)),
    Row("d64-table-like-values", 64, "gaussian", table=Table("position", dtype="values")),
    Row("d32-longer-table", 32, "zipf", table=Table("position", positions=4000), int32=True),
    Row("d64-qk-norm", 64, "uniform", qk_norm_eps=1e-6),
    Row(
        "d32-qk-norm-gqa-rotary",
        32,
        "log-normal",
        heads=4,
        kv_heads=2,
        table=BY_POSITION,
        qk_norm_eps=1e-5,
        int32=True,
    ),
    Row("d128-qk-norm-log-time", 128, "giant", table=BY_TIME, qk_norm_eps=1e-6),
    Row("d72-qk-norm-partial-rotary", 72, "zipf", table=Table("position", 24), qk_norm_eps=1e-6),
    Row("d96-qk-norm-heavy-tailed", 96, "zero-inflated", values=HeavyTailed(), qk_norm_eps=1e-6),
    Row("d32-qk-norm-large-eps-scaled", 32, "bimodal", scale=0.7, qk_norm_eps=0.5),
    Row("d16-qk-norm-block16", 16, "nearly-full", block_size=16, qk_norm_eps=1e-6),
)
_TURNS = (
    Turn("d16", 16, "uniform"),
    Turn("d64-half-split", 64, "log-normal", interleaved=False),
    Turn("d64-inverse", 64, "zipf", inverse=True, int32=True),
    Turn("d80-half-split-inverse", 80, "bimodal", interleaved=False, inverse=True),
    Turn("d72-partial", 72, "uniform", table=Table("position", 24)),
    Turn("d96-partial-half-split", 96, "gaussian", table=Table("position", 64), interleaved=False),
    Turn("d104-heavy-tailed", 104, "zero-inflated", values=HeavyTailed()),
    Turn("d128-log-time", 128, "giant", table=BY_TIME),
    Turn("d32-log-time-half-split", 32, "short", heads=4, table=BY_TIME, interleaved=False),
    Turn("d192-partial-log-time", 192, "short", table=Table("log_time", 32), int32=True),
    Turn("d256-one-head", 256, "fixed", heads=1),
    Turn("d64-table-like-values", 64, "nearly-full", table=Table("position", dtype="values")),
    Turn("d32-longer-table", 32, "uniform", table=Table("position", positions=4000)),
)


def _features() -> Iterator[Workload]:
    """Every row of options, tiny and moderate, and production-like histories with log-time."""
    for row in (*_ROWS, *_TURNS):
        yield _workload(row.name, _drawn(row, 0), _SMOKE, "feature")
        yield _workload(f"{row.name}-moderate", _drawn(row, 1), _DEVICE, "feature")
    law = LogNormal(800, 1.0, 16, 8192)
    shape = BlockRecipe(256, 4, 128, law, table=BY_TIME)
    yield _workload("history-log-time", shape, _FULL, "production")
    grouped = BlockRecipe(512, 8, 128, UniformFill(0.5, 1024), kv_heads=2, table=BY_POSITION)
    yield _workload("history-gqa-rotary", grouped, _FULL, "production")
    turned = RotaryRecipe(256, 4, 128, law, table=BY_TIME)
    yield _workload("history-log-time", turned, _FULL, "production")


def _drawn(row: Row | Turn, size: int) -> Recipe:
    """The recipe of a row: tiny (0) or moderate (1)."""
    # Half the sequences of the pair operators' tiny rows: statistics count queries and keys.
    batch, law = (2, 12)[size], LAWS[row.law][size]
    kind: OffsetsType = "int32" if row.int32 else "int64"
    if isinstance(row, Turn):
        return RotaryRecipe(
            batch, row.heads, row.dim, law, row.values, row.table, row.interleaved, row.inverse,
            offsets_type=kind,
        )  # fmt: skip
    plain = BlockRecipe(
        batch, row.heads, row.dim, law, row.kv_heads, row.v_dim, row.values, row.block_size,
        row.scale, row.table, row.rotate_values, offsets_type=kind,
    )  # fmt: skip
    return plain if row.qk_norm_eps is None else _normed(plain, row.qk_norm_eps)


def _normed(recipe: BlockRecipe, eps: float) -> NormedBlockRecipe:
    """The recipe with QK-norm."""
    given = {f.name: getattr(recipe, f.name) for f in fields(recipe)}
    return NormedBlockRecipe(**given, qk_norm_eps=eps)


# -- edges -----------------------------------------------------------------------------------------

#: Name, lengths, rows past the last offset, whether offsets are int32, purposes.
_EDGES: tuple[tuple[str, tuple[int, ...], int, bool, frozenset[str]], ...] = (
    ("empty-batch", (), 0, False, _SMOKE),
    ("all-sequences-empty", (0, 0, 0), 0, False, _SMOKE),
    ("first-sequence-empty", (0, 21, 70), 0, False, _SMOKE),
    ("middle-sequences-empty", (33, 0, 0, 78), 0, False, _SMOKE),
    ("last-sequence-empty", (21, 70, 0), 0, False, _SMOKE),
    ("single-token-sequences", (1, 1, 2, 1), 0, False, _SMOKE),
    ("lengths-about-blocks-of-64", (63, 64, 65, 1), 0, False, _SMOKE),
    ("lengths-about-two-blocks", (127, 128), 0, False, _SMOKE),
    ("tails-about-tiles-of-16", (15, 16, 17, 79, 80, 81), 0, False, _SMOKE),
    ("tails-about-tiles-of-32", (31, 32, 33, 95, 97), 0, False, _SMOKE),
    ("starts-off-the-blocks-of-the-buffer", (3, 64, 64, 70), 0, False, _SMOKE),
    ("every-tail", tuple(64 + tail for tail in range(64)), 0, False, _DEVICE),
    ("every-short-sequence", tuple(range(65)), 0, False, _DEVICE),
    ("int32-offsets", (13, 0, 67, 20), 0, True, _SMOKE),
    ("padding-past-the-last-offset", (13, 0, 67, 20), 5, False, _SMOKE),
    ("nothing-but-padding", (0, 0), 3, True, _SMOKE),
    ("empty-batch-with-padding", (), 3, False, _SMOKE),
)
#: Sequences past the 65,535 that a y or z grid axis can hold.
MANY_SEQUENCES = 65_600


def _adversarial() -> Iterator[Workload]:
    """Every edge plain and with a rotary table fused in, and for rotary by itself."""
    for name, lengths, padding, int32, purposes in _EDGES:
        law, batch = Explicit(lengths), len(lengths)
        kind: OffsetsType = "int32" if int32 else "int64"
        for suffix, table in (("", NO_TABLE), ("-rotary", BY_POSITION)):
            recipe = BlockRecipe(batch, 2, 32, law, table=table, padding=padding, offsets_type=kind)
            yield _workload(f"{name}{suffix}", recipe, purposes, "adversarial")
        normed = BlockRecipe(
            batch, 2, 32, law, table=BY_POSITION, padding=padding, offsets_type=kind
        )
        yield _workload(f"{name}-qk-norm", _normed(normed, 1e-6), purposes, "adversarial")
        turned = RotaryRecipe(batch, 2, 32, law, padding=padding, offsets_type=kind)
        yield _workload(name, turned, purposes, "adversarial")
        by_time = RotaryRecipe(batch, 2, 32, law, table=BY_TIME, padding=padding, offsets_type=kind)
        yield _workload(f"{name}-log-time", by_time, purposes, "adversarial")
    yield from _scale()


def _scale() -> Iterator[Workload]:
    cases: tuple[tuple[str, int, LengthLaw, frozenset[str]], ...] = (
        ("small-giant-among-tiny", 12, OneGiant(150, 4), _SMOKE),
        ("giant-among-tiny", 500, OneGiant(3000, 5), _DEVICE),
        ("more-than-65535-sequences", MANY_SEQUENCES, UniformFill(0.625, 4), _FULL),
    )
    for name, batch, law, purposes in cases:
        yield _workload(name, BlockRecipe(batch, 2, 32, law), purposes, "adversarial")
        yield _workload(name, RotaryRecipe(batch, 2, 32, law), purposes, "adversarial")
    zeros = BlockRecipe(4, 2, 32, Explicit((1, 33, 65, 97)), values=RowsOfZeros())
    yield _workload("qk-norm-heads-of-zeros", _normed(zeros, 1e-6), _SMOKE, "adversarial")
    negative = StronglyNegativeScores()
    recipe = BlockRecipe(4, 2, 32, Explicit((1, 33, 65, 97)), values=negative)
    yield _workload("strongly-negative-scores", recipe, _SMOKE, "adversarial")
    large = BlockRecipe(16, 4, 128, UniformFill(0.5, 300), values=negative)
    yield _workload("strongly-negative-scores-at-length", large, _DEVICE, "adversarial")
