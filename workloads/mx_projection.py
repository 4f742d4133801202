"""Workloads of mx_projection: shapes of attention's projections, options, edges, values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.mx import ALONG_COLUMNS, SQUARE, ElemDtype, ScaleMode
from jagbench.mx import Block as BlockShape
from jagbench.workload import Workload
from jagbench.workloads import counter
from jagbench.workloads.attention import OffsetsType, jagged_statistics, offsets_of
from jagbench.workloads.comparison import TAG as COMPARISON
from jagbench.workloads.lengths import Explicit, Fixed, LengthLaw, UniformFill
from jagbench.workloads.mx_values import NotNumbers
from jagbench.workloads.normed import ParameterType
from jagbench.workloads.values import HeavyTailed, Normal, RowsOfZeros, ValueLaw, draw_values

_SMOKE = frozenset({"smoke", "conformance", "full"})
_FULL = frozenset({"full"})
_TWIN = frozenset({"smoke", "conformance"})
_NORMAL = Normal()
_BLOCKS = (ALONG_COLUMNS, SQUARE)


@dataclass(frozen=True)
class MxProjectionRecipe:
    """Draws the inputs of mx_projection.

    batch: sequences; None for a dense call, whose rows are the one length that the law draws.
    features, out_features: columns of x and of the result. heads: those of the result.
    sequence_lengths: law of the lengths. values: law of x (its "q").
    bias: "none" leaves it out, else its dtype: float32 in every call, or that of the values.
    elem_dtype, block, scale_mode: options of the call.
    padding: rows past the last offset, drawn like any other.
    """

    batch: int | None
    features: int
    out_features: int
    sequence_lengths: LengthLaw
    bias: ParameterType = "none"
    result_heads: int = 1
    elem_dtype: ElemDtype = "e4m3"
    block: BlockShape = ALONG_COLUMNS
    scale_mode: ScaleMode = "rceil"
    values: ValueLaw = _NORMAL
    padding: int = 0
    offsets_type: OffsetsType = "int64"

    @property
    def heads(self) -> int:
        """Rows of x have no heads."""
        return 1

    @property
    def num_kv_heads(self) -> int:
        """Rows of x have no heads."""
        return 1

    @property
    def qk_dim(self) -> int:
        """Columns of the wider of x and the codes."""
        return max(self.features, self.out_features)

    @property
    def value_dim(self) -> int:
        """Columns of the codes."""
        return self.out_features

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options of the call."""
        return {
            "heads": self.result_heads,
            "elem_dtype": self.elem_dtype,
            "block": self.block,
            "scale_mode": self.scale_mode,
        }

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
        inside, outside = self.features, self.out_features

        def values(law: ValueLaw, role: str, height: int, width: int, kind: torch.dtype) -> Tensor:
            return draw_values(law, role, (height, 1, width), seed, kind, device)[:, 0]

        arguments: dict[str, Any] = {
            "x": values(self.values, "q", sum(drawn) + self.padding, inside, dtype),
            "weight": values(Normal(1 / math.sqrt(inside)), "weight", outside, inside, dtype),
            "offsets": None if self.batch is None else offsets_of(drawn, self.offsets_type, device),
        }
        if self.bias != "none":
            width = torch.float32 if self.bias == "float32" else dtype
            arguments["bias"] = values(Normal(0.5), "bias", 1, outside, width)[0]
        return Inputs(OPERATORS["mx_projection"], arguments, self.options)


def mx_projections() -> Iterator[Workload]:
    """Every workload of mx_projection."""
    yield from _large()
    yield from _features()
    yield from _edges()


def _name(block: BlockShape) -> str:
    return f"{block[0]}x{block[1]}"


def _workload(
    name: str, recipe: MxProjectionRecipe, purposes: frozenset[str], *tags: str
) -> Workload:
    shown = {_name(recipe.block), recipe.elem_dtype, recipe.scale_mode}
    shown.add("dense" if recipe.batch is None else "jagged")
    return Workload(
        f"mx_projection-{name}",
        "mx_projection",
        recipe,
        purposes=purposes,
        tags=frozenset({*tags, *shown}),
        differentiable=False,
    )


def _large() -> Iterator[Workload]:
    """Projections of dense rows and of histories to heads; each block with a twin for a CPU."""
    for block in _BLOCKS:
        for rows, inside, outside in ((262_144, 512, 512), (65_536, 1024, 1024)):
            dense = MxProjectionRecipe(None, inside, outside, Fixed(rows), "values", block=block)
            name = f"{_name(block)}-m{rows}-k{inside}-n{outside}"
            yield _workload(name, dense, _FULL, "production", COMPARISON)
        packed = MxProjectionRecipe(
            256, 512, 512, UniformFill(0.5, 2048), result_heads=8, block=block
        )
        yield _workload(f"{_name(block)}-history-h8-d64", packed, _FULL, "production", COMPARISON)
        twin = MxProjectionRecipe(3, 64, 64, UniformFill(0.5, 60), "values", 2, block=block)
        yield _workload(f"{_name(block)}-smoke", twin, _TWIN, "production", COMPARISON)


@dataclass(frozen=True)
class Row:
    """One combination of options; lengths of 0 sequences are one dense call of 70 rows."""

    block: BlockShape
    elem_dtype: ElemDtype
    scale_mode: ScaleMode
    features: int
    out_features: int
    lengths: tuple[int, ...] = ()
    bias: ParameterType = "none"
    heads: int = 1
    values: ValueLaw = _NORMAL


_ROWS = (
    Row(ALONG_COLUMNS, "e4m3", "rceil", 33, 72, (5, 0, 41), "values"),
    Row(ALONG_COLUMNS, "e5m2", "floor", 64, 40, (), "float32"),
    Row(ALONG_COLUMNS, "e2m1", "even", 48, 96, (7, 30), "none", 3),
    Row(SQUARE, "e4m3", "ceil", 40, 64, (33, 1), "float32", 2),
    Row(SQUARE, "e5m2", "rceil", 1, 33, (20, 40)),
    Row(SQUARE, "e4m3", "rceil", 96, 50, (), "values", values=HeavyTailed()),
)


def _features() -> Iterator[Workload]:
    """Every row of options."""
    for row in _ROWS:
        recipe = MxProjectionRecipe(
            len(row.lengths) or None, row.features, row.out_features,
            Explicit(row.lengths) if row.lengths else Fixed(70), row.bias, row.heads,
            row.elem_dtype, row.block, row.scale_mode, row.values,
        )  # fmt: skip
        parts = (_name(row.block), row.elem_dtype, row.scale_mode)
        name = "-".join([*parts, f"k{row.features}", f"n{row.out_features}"])
        yield _workload(name, recipe, _SMOKE, "feature")


def _edges() -> Iterator[Workload]:
    """Lengths about blocks, padding, empty calls; zeros, infinities and NaN."""
    edges: tuple[tuple[str, tuple[int, ...], int, ValueLaw], ...] = (
        ("empty-batch-with-padding", (), 40, _NORMAL),
        ("lengths-about-blocks", (31, 32, 33, 1), 0, _NORMAL),
        ("padding-past-the-last-offset", (13, 0, 67, 20), 37, _NORMAL),
        ("rows-of-zeros", (30, 0, 41), 0, RowsOfZeros()),
        ("not-numbers", (30, 0, 41), 0, NotNumbers()),
        ("heavy-tailed", (30, 0, 41), 0, HeavyTailed()),
    )
    for number, (name, lengths, padding, values) in enumerate(edges):
        block = _BLOCKS[(number + 1) % 2]
        recipe = MxProjectionRecipe(
            len(lengths), 64, 64, Explicit(lengths), "values", 2, block=block, values=values,
            padding=padding,
        )  # fmt: skip
        yield _workload(f"{_name(block)}-{name}", recipe, _SMOKE, "adversarial")
    giant = MxProjectionRecipe(65_600, 32, 32, Fixed(2), block=SQUARE)
    yield _workload("32x32-more-than-65535-sequences", giant, _FULL, "adversarial")
