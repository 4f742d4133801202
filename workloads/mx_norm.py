"""Workloads of mx_norm: each norm in each block, options, edges, values that a norm breaks on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.mx import ALONG_COLUMNS, SQUARE, ElemDtype, Rounding, ScaleMode
from jagbench.mx import Block as BlockShape
from jagbench.workload import Workload
from jagbench.workloads import counter
from jagbench.workloads.attention import OffsetsType, jagged_statistics, offsets_of
from jagbench.workloads.comparison import TAG as COMPARISON
from jagbench.workloads.features import LAWS
from jagbench.workloads.lengths import Explicit, Fixed, LengthLaw, LogNormal, OneGiant, UniformFill
from jagbench.workloads.mx_values import NotNumbers
from jagbench.workloads.normed import NormName, ParameterType
from jagbench.workloads.values import (
    AboutOne,
    ConstantRows,
    HeavyTailed,
    LargeOffset,
    Normal,
    RowsOfZeros,
    ValueLaw,
    draw_values,
)

_SMOKE = frozenset({"smoke", "conformance", "full"})
_DEVICE = frozenset({"conformance", "full"})
_FULL = frozenset({"full"})
_TWIN = frozenset({"smoke", "conformance"})
_CONFORMANCE = frozenset({"conformance"})
_NORMAL = Normal()
_BLOCKS = (ALONG_COLUMNS, SQUARE)
_NORMS: tuple[tuple[NormName, float], ...] = (("rms", 1e-6), ("layer", 1e-5))


@dataclass(frozen=True)
class MxNormRecipe:
    """Draws the inputs of mx_norm.

    batch: sequences; None for a dense call, whose rows are the one length that the law draws.
    features, heads: x is `[rows, features]`, with several heads `[rows, heads, features]`.
    sequence_lengths: law of the lengths. values: law of x (its "q").
    norm_weight, norm_bias: "none" leaves the parameter out, else its dtype: float32 in every call,
        or that of the values.
    elem_dtype, block, scale_mode, rounding: options of the call. rounding_seed: its seed, where it
        rounds stochastically.
    padding: rows past the last offset, drawn like any other.
    """

    batch: int | None
    features: int
    sequence_lengths: LengthLaw
    norm: NormName = "rms"
    eps: float = 1e-6
    norm_weight: ParameterType = "none"
    norm_bias: ParameterType = "none"
    heads: int = 1
    elem_dtype: ElemDtype = "e4m3"
    block: BlockShape = ALONG_COLUMNS
    scale_mode: ScaleMode = "rceil"
    rounding: Rounding = "nearest"
    rounding_seed: int = 0
    values: ValueLaw = _NORMAL
    padding: int = 0
    offsets_type: OffsetsType = "int64"

    def __post_init__(self) -> None:
        if self.features < 1:
            raise ValueError(f"features must be at least 1, got {self.features}")
        if self.norm == "rms" and self.norm_bias != "none":
            raise ValueError(f"RMSNorm has no norm_bias, got {self.norm_bias!r}")
        if self.batch is None and self.heads > 1:
            raise ValueError(f"a dense call has no heads, got {self.heads}")

    @property
    def qk_dim(self) -> int:
        """Columns of x."""
        return self.features

    @property
    def value_dim(self) -> int:
        """Columns of the codes."""
        return self.features

    @property
    def num_kv_heads(self) -> int:
        """Heads of x."""
        return self.heads

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options of the call."""
        found: dict[str, Any] = {
            "norm": self.norm,
            "eps": self.eps,
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

        def values(law: ValueLaw, role: str, rows: int, heads: int, kind: torch.dtype) -> Tensor:
            return draw_values(law, role, (rows, heads, self.features), seed, kind, device)

        x = values(self.values, "q", sum(drawn) + self.padding, self.heads, dtype)
        arguments: dict[str, Any] = {
            "x": x[:, 0] if self.heads == 1 else x,
            "offsets": None if self.batch is None else offsets_of(drawn, self.offsets_type, device),
        }
        laws: tuple[tuple[str, ParameterType, ValueLaw], ...] = (
            ("norm_weight", self.norm_weight, AboutOne()),
            ("norm_bias", self.norm_bias, Normal(0.25)),
        )
        for name, kind, law in laws:
            if kind != "none":
                width = torch.float32 if kind == "float32" else dtype
                arguments[name] = values(law, name, 1, 1, width)[0, 0]
        return Inputs(OPERATORS["mx_norm"], arguments, self.options)


def mx_norms() -> Iterator[Workload]:
    """Every workload of mx_norm."""
    yield from _large()
    yield from _features()
    yield from _edges()
    yield from _values()


def _name(block: BlockShape) -> str:
    return f"{block[0]}x{block[1]}"


def _workload(name: str, recipe: MxNormRecipe, purposes: frozenset[str], *tags: str) -> Workload:
    shown = {_name(recipe.block), recipe.elem_dtype, recipe.scale_mode, recipe.rounding}
    shown |= {"dense" if recipe.batch is None else "jagged", f"{recipe.norm}-norm"}
    return Workload(
        f"mx_norm-{name}",
        "mx_norm",
        recipe,
        purposes=purposes,
        tags=frozenset({*tags, *shown}),
        differentiable=False,
    )


# -- sizes for speed -------------------------------------------------------------------------------

#: Rows and features of 2^29 elements, which are 1 GiB in bf16.
_ROWS, _FEATURES = 1 << 20, 512


def _large() -> Iterator[Workload]:
    """1 GiB of bf16 under each norm and block, dense, jagged and wide; twins for a CPU."""
    for norm, eps in _NORMS:
        bias: ParameterType = "values" if norm == "layer" else "none"
        for block in _BLOCKS:
            name = f"{norm}-{_name(block)}"
            dense = MxNormRecipe(
                None, _FEATURES, Fixed(_ROWS), norm, eps, "values", bias, block=block
            )
            shape = f"m{_ROWS}-k{_FEATURES}"
            yield _workload(f"{name}-{shape}", dense, _FULL, "production", COMPARISON)
            packed = MxNormRecipe(
                1024, _FEATURES, UniformFill(0.5, 2048), norm, eps, "values", bias, block=block
            )
            yield _workload(f"{name}-jagged-history", packed, _FULL, "production", COMPARISON)
            wide = MxNormRecipe(None, 4096, Fixed(1 << 17), norm, eps, "values", bias, block=block)
            yield _workload(f"{name}-m131072-k4096", wide, _FULL, "production")
            twin = MxNormRecipe(3, 96, UniformFill(0.5, 60), norm, eps, "values", bias, block=block)
            small = _TWIN if (norm == "rms") == (block == ALONG_COLUMNS) else _CONFORMANCE
            yield _workload(f"{name}-smoke", twin, small, "production", COMPARISON)


# -- options ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One combination of options; lengths by the name of a law in `features.LAWS`, "" for dense."""

    norm: NormName
    block: BlockShape
    elem_dtype: ElemDtype
    scale_mode: ScaleMode
    features: int
    law: str
    norm_weight: ParameterType = "none"
    norm_bias: ParameterType = "none"
    eps: float = 1e-5
    heads: int = 1
    stochastic: bool = False
    int32: bool = False
    values: ValueLaw = _NORMAL


_ROWS_OF_OPTIONS = (
    Row("rms", ALONG_COLUMNS, "e4m3", "rceil", 72, "uniform", "values"),
    Row("rms", ALONG_COLUMNS, "e5m2", "floor", 64, "", "float32", stochastic=True),
    Row("rms", ALONG_COLUMNS, "e2m1", "even", 33, "log-normal", heads=2, int32=True),
    Row("rms", SQUARE, "e4m3", "ceil", 40, "zipf", "values", eps=0.5),
    Row("rms", SQUARE, "e4m3", "rceil", 160, "short", stochastic=True, values=HeavyTailed()),
    Row("rms", SQUARE, "e5m2", "rceil", 31, "bimodal", "float32", heads=2),
    Row("layer", ALONG_COLUMNS, "e4m3", "rceil", 57, "nearly-full", "values", "values"),
    Row("layer", ALONG_COLUMNS, "e4m3", "floor", 100, "", "none", "values", int32=True),
    Row("layer", ALONG_COLUMNS, "e5m2", "ceil", 64, "gaussian", "float32", "float32",
        stochastic=True),
    Row("layer", SQUARE, "e4m3", "rceil", 96, "zero-inflated", "values", values=HeavyTailed()),
    Row("layer", SQUARE, "e2m1", "rceil", 48, "giant", heads=2, stochastic=True),
    Row("layer", SQUARE, "e4m3", "even", 65, "short", "values", "values", eps=1e-6),
)  # fmt: skip


#: Rows of options that a CPU runs.
_SMALL = (0, 1, 2, 3, 5, 8, 9)


def _features() -> Iterator[Workload]:
    """Every row of options, tiny and moderate, and production-like histories."""
    for number, row in enumerate(_ROWS_OF_OPTIONS):
        parts = [row.norm, _name(row.block), row.elem_dtype, row.scale_mode, f"k{row.features}"]
        parts += ["stochastic"] if row.stochastic else []
        name = "-".join([*parts, row.law or "dense"])
        # In an interpreter half of them: each norm, block, element type and mode.
        small = _SMOKE if number in _SMALL else _DEVICE
        yield _workload(name, _drawn(row, 0), small, "feature")
        yield _workload(f"{name}-moderate", _drawn(row, 1), _DEVICE, "feature")
    law = LogNormal(800, 1.0, 16, 8192)
    for norm, eps in _NORMS:
        recipe = MxNormRecipe(
            256, 1024, law, norm, eps, "values", block=SQUARE, values=HeavyTailed()
        )
        yield _workload(f"{norm}-32x32-history", recipe, _FULL, "feature")


def _drawn(row: Row, size: int) -> MxNormRecipe:
    """The recipe of a row: tiny (0) or moderate (1)."""
    return MxNormRecipe(
        (2, 12)[size] if row.law else None,
        row.features,
        LAWS[row.law][size] if row.law else Fixed((70, 1000)[size]),
        row.norm,
        row.eps,
        row.norm_weight,
        row.norm_bias,
        row.heads,
        row.elem_dtype,
        row.block,
        row.scale_mode,
        "stochastic" if row.stochastic else "nearest",
        2**40 + row.features if row.stochastic else 0,
        row.values,
        offsets_type="int32" if row.int32 else "int64",
    )


# -- edges -----------------------------------------------------------------------------------------

#: Name, lengths, rows past the last offset, whether offsets are int32.
_LENGTHS: tuple[tuple[str, tuple[int, ...], int, bool], ...] = (
    ("empty-batch-with-padding", (), 40, False),
    ("first-and-last-sequence-empty", (0, 21, 0, 0, 40, 0), 0, True),
    ("lengths-about-blocks", (31, 32, 33, 1), 0, False),
    ("padding-past-the-last-offset", (13, 0, 67, 20), 37, False),
    ("nothing-but-padding", (0, 0), 3, True),
)


_EDGES_OF_A_CPU = ("first-and-last-sequence-empty", "padding-past-the-last-offset")


def _edges() -> Iterator[Workload]:
    """Every edge: on a CPU of squares under LayerNorm, whose bias reaches rows of zeros."""
    for name, lengths, padding, int32 in _LENGTHS:
        kind: OffsetsType = "int32" if int32 else "int64"
        for norm, block in (("layer", SQUARE), ("rms", SQUARE), ("layer", ALONG_COLUMNS)):
            first = norm == "layer" and block == SQUARE and name in _EDGES_OF_A_CPU
            recipe = MxNormRecipe(
                len(lengths), 40, Explicit(lengths), "layer" if norm == "layer" else "rms", 1e-5,
                "values", "values" if norm == "layer" else "none", block=block, padding=padding,
                offsets_type=kind,
            )  # fmt: skip
            full = f"{norm}-{_name(block)}-{name}"
            yield _workload(full, recipe, _SMOKE if first else _DEVICE, "adversarial")
    for norm, eps in _NORMS:
        giant = MxNormRecipe(500, 64, OneGiant(3000, 5), norm, eps, block=SQUARE)
        yield _workload(f"{norm}-32x32-giant-among-tiny", giant, _DEVICE, "adversarial")
        many = MxNormRecipe(65_600, 32, Fixed(2), norm, eps, block=SQUARE)
        yield _workload(f"{norm}-32x32-more-than-65535-sequences", many, _FULL, "adversarial")


def _values() -> Iterator[Workload]:
    """Zeros, constant rows, rows far from 0, infinities and NaN, small and wide.

    Rows of (nearly) one number have no weight: drawn weights lie on ties of the element types, and
    all rows of such a column would come to one side of it together.
    """
    laws: tuple[tuple[str, ValueLaw], ...] = (
        ("rows-of-zeros", RowsOfZeros()),
        ("larger-offset", LargeOffset(1000)),
        ("not-numbers", NotNumbers()),
        ("constant-rows", ConstantRows()),
        ("heavy-tailed", HeavyTailed()),
    )
    for number, (name, values) in enumerate(laws):
        for turn, (norm, eps) in enumerate(_NORMS):
            block = _BLOCKS[(number // 2 + turn) % 2]
            weight: ParameterType = "values"
            if isinstance(values, ConstantRows | LargeOffset):
                weight = "none"
            small = MxNormRecipe(
                3, 96, Explicit((30, 0, 41)), norm, eps, weight, block=block, values=values
            )
            # On a CPU one norm of each, in turn.
            purposes = _SMOKE if turn == number % 2 else _DEVICE
            yield _workload(f"{norm}-{_name(block)}-{name}", small, purposes, "adversarial")
            other = _BLOCKS[(number // 2 + turn + 1) % 2]
            wide = MxNormRecipe(
                4, 4500, UniformFill(0.5, 64), norm, eps, block=other, values=values
            )
            full = f"{norm}-{_name(other)}-{name}-wide"
            yield _workload(full, wide, _DEVICE, "adversarial")
