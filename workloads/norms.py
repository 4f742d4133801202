"""Named workloads of norm_linear: published shapes, options, edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jagbench.workload import Workload
from jagbench.workloads.attention import OffsetsType
from jagbench.workloads.comparison import TAG as COMPARISON
from jagbench.workloads.features import LAWS
from jagbench.workloads.lengths import ExactTotal, Explicit, Fixed, LogNormal, OneGiant, UniformFill
from jagbench.workloads.normed import DEFAULT_VALUES, NormLinearRecipe, NormName, ParameterType
from jagbench.workloads.values import (
    ConstantRows,
    HeavyTailed,
    LargeOffset,
    RowsOfZeros,
    ValueLaw,
)

_SMOKE = frozenset({"smoke", "conformance", "full"})
_DEVICE = frozenset({"conformance", "full"})
_FULL = frozenset({"full"})
_TWIN = frozenset({"smoke", "conformance"})

#: Where the shapes come from: tests and benchmarks of the public fused norms.
SOURCE = (
    "facebookresearch/ads_model_kernel_library, multi_cta_norm_fusion; PyTorch blog 2026, Towards "
    "Free Normalization; ours: the rows as 512 jagged sequences"
)


def norms() -> Iterator[Workload]:
    """Every workload of norm_linear."""
    yield from _published()
    yield from _features()
    yield from _adversarial()


def _workload(
    name: str, recipe: NormLinearRecipe, purposes: frozenset[str], *tags: str, source: str = ""
) -> Workload:
    marks = {
        "layer-norm": recipe.norm == "layer",
        "norm-weight": recipe.norm_weight != "none",
        "wide-norm-weight": recipe.norm_weight == "float32",
        "norm-bias": recipe.norm_bias != "none",
        "linear-bias": recipe.bias,
        "heavy-tailed-values": isinstance(recipe.values, HeavyTailed),
    }
    found = {tag for tag, holds in marks.items() if holds}
    return Workload(
        f"norm_linear-{name}",
        "norm_linear",
        recipe,
        purposes=purposes,
        tags=frozenset({*tags, *found}),
        source=source,
    )


# -- published shapes ------------------------------------------------------------------------------


def _rows(total: int) -> ExactTotal:
    """512 sequences of that many rows together, half full on average."""
    longest = 2 * total // 512
    return ExactTotal(UniformFill(0.5, longest), total, longest)


def _published() -> Iterator[Workload]:
    """Rows and features of the public tests, each norm with a twin for an interpreter."""
    tags = ("published", "norm_linear")
    for norm, eps in (("rms", 1e-6), ("layer", 1e-5)):
        for rows, inside, outside in (
            (262_144, 512, 512),
            (262_144, 1024, 1024),
            (131_072, 256, 256),
            (65_536, 1024, 256),
            (65_536, 256, 1024),
            (524_288, 512, 512),
        ):
            recipe = NormLinearRecipe(512, inside, outside, _rows(rows), _norm(norm), eps)
            central = (COMPARISON,) if (rows, inside) == (262_144, 512) else ()
            name = f"{norm}-m{rows}-k{inside}-n{outside}"
            yield _workload(name, recipe, _FULL, *tags, *central, source=SOURCE)
        twin = NormLinearRecipe(4, 64, 64, UniformFill(0.5, 60), _norm(norm), eps)
        yield _workload(f"{norm}-smoke", twin, _TWIN, *tags, COMPARISON, source=SOURCE)


def _norm(name: str) -> NormName:
    return "rms" if name == "rms" else "layer"


# -- options ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One combination of options; lengths by the name of a law in `features.LAWS`."""

    name: str
    features: int
    out_features: int
    law: str
    norm: NormName = "rms"
    eps: float = 1e-6
    bias: bool = False
    norm_weight: ParameterType = "none"
    norm_bias: ParameterType = "none"
    values: ValueLaw = DEFAULT_VALUES
    int32: bool = False


_ROWS = (
    Row("rms-k16-n16", 16, 16, "uniform"),
    Row("rms-k32-n64-bias", 32, 64, "log-normal", bias=True),
    Row("rms-k64-n32-affine", 64, 32, "nearly-full", norm_weight="values", int32=True),
    Row("rms-k128-n128-wide-affine-bias", 128, 128, "zipf", bias=True, norm_weight="float32"),
    Row("rms-k72-n40", 72, 40, "bimodal", eps=1e-5, norm_weight="values"),
    Row("rms-k33-n17", 33, 17, "short", bias=True, norm_weight="values"),
    Row("rms-k200-n96-heavy-tailed", 200, 96, "zero-inflated", values=HeavyTailed()),
    Row("rms-k512-n48", 512, 48, "short", norm_weight="values", int32=True),
    Row("rms-k1-n5", 1, 5, "short"),
    Row("rms-k48-n1", 48, 1, "giant", bias=True),
    Row("rms-k64-n64-large-eps", 64, 64, "gaussian", eps=0.5),
    Row("rms-k600-n130", 600, 130, "short", bias=True),
    Row("layer-k32-n32", 32, 32, "uniform", "layer", 1e-5),
    Row("layer-k64-n48-bias", 64, 48, "log-normal", "layer", 1e-5, bias=True, int32=True),
    Row("layer-k64-n128-affine", 64, 128, "zipf", "layer", 1e-5, norm_weight="values",
        norm_bias="values"),
    Row("layer-k80-n24-wide-affine-bias", 80, 24, "fixed", "layer", bias=True,
        norm_weight="float32", norm_bias="float32"),
    Row("layer-k100-n36-norm-bias-alone", 100, 36, "bimodal", "layer", norm_bias="values"),
    Row("layer-k57-n19", 57, 19, "giant", "layer", 1e-5, norm_weight="values"),
    Row("layer-k256-n64-heavy-tailed", 256, 64, "gaussian", "layer", values=HeavyTailed(),
        norm_weight="values", norm_bias="values", bias=True),
    Row("layer-k512-n32", 512, 32, "short", "layer", 1e-5, bias=True),
    Row("layer-k640-n72", 640, 72, "short", "layer", 1e-5, norm_weight="values"),
    Row("layer-k2-n3", 2, 3, "short", "layer", 1e-5),
)  # fmt: skip


def _features() -> Iterator[Workload]:
    """Every row of options, tiny and moderate, and production-like histories."""
    for row in _ROWS:
        yield _workload(row.name, _drawn(row, 0), _SMOKE, "feature")
        yield _workload(f"{row.name}-moderate", _drawn(row, 1), _DEVICE, "feature")
    law = LogNormal(800, 1.0, 16, 8192)
    for norm in ("rms", "layer"):
        shape = NormLinearRecipe(
            256, 512, 512, law, _norm(norm), 1e-5, bias=True, norm_weight="values"
        )
        yield _workload(f"{norm}-history", shape, _FULL, "production")
        narrow = NormLinearRecipe(1024, 512, 64, UniformFill(0.5, 512), _norm(norm), 1e-5)
        yield _workload(f"{norm}-history-n64", narrow, _FULL, "production")


def _drawn(row: Row, size: int) -> NormLinearRecipe:
    """The recipe of a row: tiny (0) or moderate (1)."""
    kind: OffsetsType = "int32" if row.int32 else "int64"
    return NormLinearRecipe(
        (2, 12)[size], row.features, row.out_features, LAWS[row.law][size], row.norm, row.eps,
        row.values, row.bias, row.norm_weight, row.norm_bias, offsets_type=kind,
    )  # fmt: skip


# -- edges -----------------------------------------------------------------------------------------

#: Name, lengths, rows past the last offset, whether offsets are int32.
_EDGES: tuple[tuple[str, tuple[int, ...], int, bool], ...] = (
    ("empty-batch", (), 0, False),
    ("all-sequences-empty", (0, 0, 0), 0, False),
    ("first-sequence-empty", (0, 21, 70), 0, False),
    ("middle-sequences-empty", (33, 0, 0, 78), 0, False),
    ("last-sequence-empty", (21, 70, 0), 0, False),
    ("single-row", (1,), 0, False),
    ("rows-about-a-tile-of-64", (63, 1, 1), 0, False),
    ("rows-about-two-tiles-of-64", (64, 63, 2), 0, True),
    ("padding-past-the-last-offset", (13, 0, 67, 20), 5, False),
    ("more-padding-than-rows", (3, 5), 150, True),
    ("nothing-but-padding", (0, 0), 3, True),
    ("empty-batch-with-padding", (), 3, False),
)


def _adversarial() -> Iterator[Workload]:
    """Every edge under each norm, and the values on which a norm breaks."""
    for norm in ("rms", "layer"):
        for name, lengths, padding, int32 in _EDGES:
            kind: OffsetsType = "int32" if int32 else "int64"
            recipe = NormLinearRecipe(
                len(lengths), 40, 24, Explicit(lengths), _norm(norm), 1e-5, bias=True,
                norm_weight="values", padding=padding, offsets_type=kind,
            )  # fmt: skip
            yield _workload(f"{norm}-{name}", recipe, _SMOKE, "adversarial")
        laws: tuple[tuple[str, ValueLaw], ...] = (
            ("rows-of-zeros", RowsOfZeros()),
            ("large-offset", LargeOffset(64)),
            ("larger-offset", LargeOffset(1000)),
            ("constant-rows", ConstantRows()),
        )
        for name, values in laws:
            small = NormLinearRecipe(
                3, 96, 40, Explicit((30, 0, 41)), _norm(norm), 1e-5, values, norm_weight="values"
            )
            yield _workload(f"{norm}-{name}", small, _SMOKE, "adversarial")
            wide = NormLinearRecipe(
                8, 512, 128, UniformFill(0.5, 400), _norm(norm), 1e-5, values, bias=True
            )
            yield _workload(f"{norm}-{name}-wide", wide, _DEVICE, "adversarial")
        giant = NormLinearRecipe(500, 64, 64, OneGiant(3000, 5), _norm(norm), 1e-5)
        yield _workload(f"{norm}-giant-among-tiny", giant, _DEVICE, "adversarial")
        many = NormLinearRecipe(65_600, 32, 32, Fixed(2), _norm(norm), 1e-5)
        yield _workload(f"{norm}-more-than-65535-sequences", many, _FULL, "adversarial")
