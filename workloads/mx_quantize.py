"""Workloads of mx_quantize: every block, mode, element type, rounding; edges; sizes for speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from jagbench.inputs import Inputs
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, BLOCKS, SQUARE, ElemDtype, Rounding, ScaleMode
from jagbench.mx import Block as BlockShape
from jagbench.workload import Workload
from jagbench.workloads import counter
from jagbench.workloads.attention import OffsetsType, jagged_statistics, offsets_of
from jagbench.workloads.comparison import TAG as COMPARISON
from jagbench.workloads.features import LAWS
from jagbench.workloads.lengths import Explicit, Fixed, LengthLaw, LogNormal, OneGiant, UniformFill
from jagbench.workloads.mx_values import BoundaryMaxima, EndScales, NotNumbers
from jagbench.workloads.values import HeavyTailed, Normal, ValueLaw, draw_values

_SMOKE = frozenset({"smoke", "conformance", "full"})
_DEVICE = frozenset({"conformance", "full"})
_FULL = frozenset({"full"})
_TWIN = frozenset({"smoke", "conformance"})
_NORMAL = Normal()


@dataclass(frozen=True)
class QuantizeRecipe:
    """Draws the inputs of mx_quantize.

    batch: sequences; None for a dense call, whose rows are the one length that the law draws.
    columns, heads: x is `[rows, columns]`; with several heads `[rows, heads, columns]`, and in a
        dense call `[heads, rows, columns]`.
    sequence_lengths: law of the lengths. values: law of x (its "q").
    elem_dtype, block, scale_mode, rounding: options of the call. rounding_seed: its seed, where it
        rounds stochastically.
    padding: rows past the last offset, drawn like any other.
    """

    batch: int | None
    columns: int
    sequence_lengths: LengthLaw
    heads: int = 1
    elem_dtype: ElemDtype = "e4m3"
    block: BlockShape = ALONG_COLUMNS
    scale_mode: ScaleMode = "rceil"
    rounding: Rounding = "nearest"
    rounding_seed: int = 0
    values: ValueLaw = _NORMAL
    padding: int = 0
    offsets_type: OffsetsType = "int64"

    @property
    def qk_dim(self) -> int:
        """Columns of x."""
        return self.columns

    @property
    def value_dim(self) -> int:
        """Columns of the codes."""
        return self.columns

    @property
    def num_kv_heads(self) -> int:
        """Heads of x."""
        return self.heads

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options of the call."""
        found: dict[str, Any] = {
            "elem_dtype": self.elem_dtype,
            "block": self.block,
            "scale_mode": self.scale_mode,
        }
        if self.rounding == "stochastic":
            found |= {"rounding": self.rounding, "seed": self.rounding_seed}
        return found

    def lengths(self, seed: int) -> dict[str, list[int]]:
        """Drawn lengths by offsets argument; those of a dense call are its rows."""
        key = counter.stream(seed, "q_lengths")
        batch = 1 if self.batch is None else self.batch
        return {"offsets": self.sequence_lengths.draw(batch, key)}

    def statistics(self, seed: int) -> dict[str, float]:
        """Realised statistics, named as those of `AttentionRecipe`; no row sees another."""
        drawn = self.lengths(seed)["offsets"]
        return jagged_statistics(drawn, drawn, sum(drawn))

    def draw(self, seed: int, dtype: torch.dtype, device: torch.device, upstream: bool) -> Inputs:
        """Inputs of a seed on a device; the same bytes on every machine. There is no upstream."""
        from jagbench.reference import OPERATORS

        drawn = self.lengths(seed)["offsets"]
        shape = (sum(drawn) + self.padding, self.heads, self.columns)
        x = draw_values(self.values, "q", shape, seed, dtype, device)
        offsets = None if self.batch is None else offsets_of(drawn, self.offsets_type, device)
        if self.heads == 1:
            x = x[:, 0]
        elif offsets is None:
            x = x.transpose(0, 1).contiguous()
        arguments = {"x": x, "offsets": offsets}
        return Inputs(OPERATORS["mx_quantize"], arguments, self.options)


def quantisations() -> Iterator[Workload]:
    """Every workload of mx_quantize."""
    yield from _large()
    yield from _features()
    yield from _values()
    yield from _edges()


def _name(block: BlockShape) -> str:
    return f"{block[0]}x{block[1]}"


def _workload(name: str, recipe: QuantizeRecipe, purposes: frozenset[str], *tags: str) -> Workload:
    shown = {_name(recipe.block), recipe.elem_dtype, recipe.scale_mode, recipe.rounding}
    shown.add("dense" if recipe.batch is None else "jagged")
    return Workload(
        f"mx_quantize-{name}",
        "mx_quantize",
        recipe,
        purposes=purposes,
        tags=frozenset({*tags, *shown}),
        differentiable=False,
    )


# -- sizes for speed -------------------------------------------------------------------------------

#: Rows and columns of 2^29 elements, which are 1 GiB in bf16.
_ROWS, _COLUMNS = 1 << 20, 512


def _large() -> Iterator[Workload]:
    """1 GiB of bf16 in every block, stochastic, wide and jagged; each with a twin for a CPU."""
    jagged = UniformFill(0.5, 2048)
    for block in BLOCKS:
        dense = QuantizeRecipe(None, _COLUMNS, Fixed(_ROWS), block=block)
        name = f"{_name(block)}-m{_ROWS}-k{_COLUMNS}"
        yield _workload(name, dense, _FULL, "production", COMPARISON)
        packed = QuantizeRecipe(1024, _COLUMNS, jagged, block=block)
        yield _workload(f"{_name(block)}-jagged-history", packed, _FULL, "production", COMPARISON)
        twin = QuantizeRecipe(3, 96, UniformFill(0.5, 60), block=block)
        yield _workload(f"{_name(block)}-smoke", twin, _TWIN, "production", COMPARISON)
    for block in (ALONG_COLUMNS, SQUARE):
        drawn = QuantizeRecipe(
            None, _COLUMNS, Fixed(_ROWS), block=block, rounding="stochastic", rounding_seed=7
        )
        name = f"{_name(block)}-stochastic-m{_ROWS}-k{_COLUMNS}"
        yield _workload(name, drawn, _FULL, "production", COMPARISON)
        wide = QuantizeRecipe(None, 8192, Fixed(1 << 16), block=block)
        yield _workload(f"{_name(block)}-m65536-k8192", wide, _FULL, "production")


# -- options ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One combination of options; lengths by the name of a law in `features.LAWS`, "" for dense."""

    block: BlockShape
    elem_dtype: ElemDtype
    scale_mode: ScaleMode
    columns: int
    law: str
    heads: int = 1
    stochastic: bool = False
    int32: bool = False
    values: ValueLaw = _NORMAL


_ROWS_OF_OPTIONS = (
    Row(ALONG_COLUMNS, "e4m3", "rceil", 96, "uniform"),
    Row(ALONG_COLUMNS, "e5m2", "floor", 72, ""),
    Row(ALONG_COLUMNS, "e2m1", "even", 33, "log-normal", heads=2),
    Row(ALONG_COLUMNS, "e4m3", "ceil", 31, "zipf", stochastic=True, int32=True),
    Row(ALONG_COLUMNS, "e5m2", "rceil", 64, "short", heads=3, stochastic=True),
    Row(ALONG_ROWS, "e4m3", "floor", 40, "nearly-full", int32=True),
    Row(ALONG_ROWS, "e5m2", "even", 64, "", stochastic=True),
    Row(ALONG_ROWS, "e2m1", "rceil", 24, "bimodal", heads=2, stochastic=True),
    Row(ALONG_ROWS, "e4m3", "ceil", 65, "uniform", values=HeavyTailed()),
    Row(SQUARE, "e4m3", "rceil", 96, "zero-inflated", values=HeavyTailed()),
    Row(SQUARE, "e5m2", "ceil", 48, "", heads=3),
    Row(SQUARE, "e4m3", "even", 72, "log-normal", stochastic=True),
    Row(SQUARE, "e2m1", "floor", 40, "giant", heads=2, int32=True),
    Row(SQUARE, "e4m3", "floor", 64, "gaussian", stochastic=True),
)


def _features() -> Iterator[Workload]:
    """Every row of options, tiny and moderate, and production-like histories."""
    for row in _ROWS_OF_OPTIONS:
        parts = [_name(row.block), row.elem_dtype, row.scale_mode, f"k{row.columns}"]
        parts += ["stochastic"] if row.stochastic else []
        parts += [row.law or "dense"]
        name = "-".join(parts)
        yield _workload(name, _drawn(row, 0), _SMOKE, "feature")
        yield _workload(f"{name}-moderate", _drawn(row, 1), _DEVICE, "feature")
    law = LogNormal(800, 1.0, 16, 8192)
    for heads, dim in ((1, 512), (8, 128)):
        recipe = QuantizeRecipe(256, dim, law, heads, block=SQUARE, values=HeavyTailed())
        name = "history" if heads == 1 else f"history-h{heads}-d{dim}"
        yield _workload(f"32x32-{name}", recipe, _FULL, "feature")


def _drawn(row: Row, size: int) -> QuantizeRecipe:
    """The recipe of a row: tiny (0) or moderate (1)."""
    return QuantizeRecipe(
        (2, 12)[size] if row.law else None,
        row.columns,
        LAWS[row.law][size] if row.law else Fixed((70, 1000)[size]),
        row.heads,
        row.elem_dtype,
        row.block,
        row.scale_mode,
        "stochastic" if row.stochastic else "nearest",
        2**40 + row.columns if row.stochastic else 0,
        row.values,
        offsets_type="int32" if row.int32 else "int64",
    )


# -- values at the edges ---------------------------------------------------------------------------

_MODES: tuple[ScaleMode, ...] = ("rceil", "floor", "ceil", "even")
_ELEMENTS: tuple[ElemDtype, ...] = ("e4m3", "e5m2", "e2m1")


def _values() -> Iterator[Workload]:
    """Largest magnitudes at every boundary and both ends, infinities, NaN and blocks of zeros."""
    for block in BLOCKS:
        laws: tuple[tuple[str, ValueLaw], ...] = (
            ("boundary-maxima", BoundaryMaxima(*block)),
            ("end-scales", EndScales(*block)),
            ("not-numbers", NotNumbers(*block)),
        )
        for number, (name, values) in enumerate(laws):
            for mode in _MODES:
                for elem_dtype in _ELEMENTS:
                    # On a CPU every mode with one element type.
                    turn = (_MODES.index(mode) + _ELEMENTS.index(elem_dtype) + number) % 4
                    small = (mode, elem_dtype) == ("rceil", "e4m3")
                    small |= turn == 1 and name != "not-numbers"
                    # As many blocks in squares as suffice for every kind of largest magnitude.
                    columns = 224 if block == SQUARE else 96
                    recipe = QuantizeRecipe(
                        2, columns, Explicit((37, 27)), 1, elem_dtype, block, mode, values=values
                    )
                    full = f"{_name(block)}-{name}-{elem_dtype}-{mode}"
                    yield _workload(full, recipe, _SMOKE if small else _DEVICE, "adversarial")


# -- lengths at the edges --------------------------------------------------------------------------

#: Name, lengths, rows past the last offset, whether offsets are int32.
_LENGTHS: tuple[tuple[str, tuple[int, ...], int, bool], ...] = (
    ("empty-batch", (), 0, False),
    ("all-sequences-empty", (0, 0, 0), 0, False),
    ("first-and-last-sequence-empty", (0, 21, 0, 0, 40, 0), 0, True),
    ("single-rows", (1, 1, 2, 1), 0, False),
    ("lengths-about-blocks", (31, 32, 33, 1), 0, False),
    ("lengths-about-two-blocks", (63, 64, 65), 0, True),
    ("padding-past-the-last-offset", (13, 0, 67, 20), 37, False),
    ("more-padding-than-rows", (3, 5), 150, True),
    ("nothing-but-padding", (0, 0), 3, True),
    ("empty-batch-with-padding", (), 40, False),
)


def _edges() -> Iterator[Workload]:
    """Every edge in blocks that span rows, some in those that do not; very many sequences."""
    for name, lengths, padding, int32 in _LENGTHS:
        kind: OffsetsType = "int32" if int32 else "int64"
        for block in BLOCKS:
            few = block == ALONG_COLUMNS and "padding" not in name
            # Magnitudes differ from row to row, so that a block of other rows has another scale.
            recipe = QuantizeRecipe(
                len(lengths), 40, Explicit(lengths), block=block, values=BoundaryMaxima(),
                padding=padding, offsets_type=kind,
            )  # fmt: skip
            purposes = _DEVICE if few or block == ALONG_ROWS else _SMOKE
            yield _workload(f"{_name(block)}-{name}", recipe, purposes, "adversarial")
    for block in BLOCKS:
        giant = QuantizeRecipe(500, 64, OneGiant(3000, 5), block=block)
        yield _workload(f"{_name(block)}-giant-among-tiny", giant, _DEVICE, "adversarial")
        many = QuantizeRecipe(65_600, 32, Fixed(2), block=block)
        yield _workload(f"{_name(block)}-more-than-65535-sequences", many, _FULL, "adversarial")
    nothing = QuantizeRecipe(2, 0, Explicit((3, 40)), block=SQUARE)
    yield _workload("32x32-without-columns", nothing, _SMOKE, "adversarial")
