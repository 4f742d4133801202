"""Workloads that cover the operators' options, and production-like heavy tails at full size.

The option rows are chosen so that every head_dim, head grouping, mask, length law, value law, bias
and activation occurs, and most pairs of them; each row is drawn tiny (smoke) and moderate
(conformance, full).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from jagbench.pairs import Align, Window
from jagbench.workload import Workload
from jagbench.workloads.attention import (
    DEFAULT_VALUES,
    AttentionRecipe,
    BiasHeads,
    BiasKind,
    OffsetsType,
)
from jagbench.workloads.lengths import (
    HEAVY_TAILS,
    Bimodal,
    Fixed,
    Gaussian,
    LengthLaw,
    LogNormal,
    OneGiant,
    UniformFill,
    ZeroInflated,
    Zipf,
)
from jagbench.workloads.values import HeavyTailed, Normal, ValueLaw

_SMOKE = frozenset({"smoke", "conformance", "full"})
_DEVICE = frozenset({"conformance", "full"})
_FULL = frozenset({"full"})


@dataclass(frozen=True)
class Row:
    """One combination of options; lengths are given by the name of a law in `LAWS`."""

    name: str
    dim: int
    q: str
    k: str | None = None
    heads: int = 2
    kv_heads: int | None = None
    v_dim: int | None = None
    causal: bool = False
    align: Align = "end"
    window: Window | None = None
    prefix: int = 0
    last_full: int = 0
    values: ValueLaw = DEFAULT_VALUES
    activation: str | tuple[str, ...] = "gelu"
    pre_scale: float | None = None
    post_scale: float | None = None
    scale: float | None = None
    bias: BiasKind = "none"
    bias_heads: BiasHeads = "heads"
    offsets_type: OffsetsType = "int64"
    operators: tuple[str, ...] = ("gdpa", "jagged_attention")


#: Law by name at the two sizes: tiny (batch 4) and moderate (batch 12).
LAWS: dict[str, tuple[LengthLaw, LengthLaw]] = {
    "uniform": (UniformFill(0.5, 70), UniformFill(0.5, 600)),
    "nearly-full": (UniformFill(0.9, 66), UniformFill(0.9, 520)),
    "short": (UniformFill(0.5, 24), UniformFill(0.5, 96)),
    "fixed": (Fixed(48), Fixed(320)),
    "log-normal": (LogNormal(24, 1.0, 1, 120), LogNormal(150, 1.0, 4, 1500)),
    "zipf": (Zipf(1.2, 90), Zipf(1.1, 1000)),
    "bimodal": (
        Bimodal(UniformFill(0.5, 16), UniformFill(0.9, 96), 0.3),
        Bimodal(UniformFill(0.5, 64), UniformFill(0.9, 900), 0.3),
    ),
    "zero-inflated": (
        ZeroInflated(UniformFill(0.6, 60), 0.4),
        ZeroInflated(UniformFill(0.6, 500), 0.4),
    ),
    "giant": (OneGiant(110, 12), OneGiant(1300, 40)),
    "gaussian": (Gaussian(40), Gaussian(280)),
}

_ONLY_GDPA: tuple[str, ...] = ("gdpa",)
_ONLY_ATTENTION: tuple[str, ...] = ("jagged_attention",)

_ROWS = (
    Row("d16-causal", 16, "uniform", causal=True, activation="relu", values=Normal()),
    Row("d32-gqa-window", 32, "log-normal", heads=4, kv_heads=2, window=(9, 9), activation="silu"),
    Row(
        "d64-mqa-cross", 64, "nearly-full", "short", heads=4, kv_heads=1, activation="hardswish",
        values=Normal(), offsets_type="int32",
    ),
    Row(
        "d72-causal-start-cross", 72, "zipf", "uniform", causal=True, align="start",
        activation="fast_silu",
    ),
    Row("d80-left-window", 80, "bimodal", window=(12, None), activation="leaky_relu"),
    Row("d96-heavy-tailed", 96, "zero-inflated", values=HeavyTailed(), activation="gelu_tanh"),
    Row(
        "d104-causal-end-cross", 104, "uniform", "log-normal", causal=True,
        activation="relu_squared", values=Normal(0.5),
    ),
    Row("d128-asymmetric-window", 128, "giant", window=(20, 5), activation="fast_gelu"),
    Row(
        "d192-v128-gqa", 192, "gaussian", heads=4, kv_heads=2, v_dim=128, activation="identity",
        offsets_type="int32",
    ),
    Row(
        "d256-causal-window", 256, "short", causal=True, window=(7, None),
        activation="fast_gelu_bf16",
    ),
    Row("d32-v64-right-window-cross", 32, "short", "uniform", v_dim=64, window=(None, 4)),
    Row(
        "d64-window-start-gqa-cross", 64, "uniform", "zero-inflated", heads=4, kv_heads=2,
        align="start", window=(15, 6), activation="silu", values=HeavyTailed(),
    ),
    Row("d32-window-prefix", 32, "uniform", window=(9, 9), prefix=5, activation="silu"),
    # Prefix and last queries are longer than some sequences.
    Row(
        "d64-window-prefix-longer-than-sequences", 64, "short", window=(3, 3), prefix=14,
        activation="gelu", offsets_type="int32",
    ),
    Row("d16-causal-prefix-cross", 16, "short", "uniform", causal=True, prefix=11),
    Row(
        "d64-causal-window-last", 64, "log-normal", causal=True, window=(12, None), last_full=6,
        activation="gelu_tanh",
    ),
    Row("d32-window-last-longer-than-sequences", 32, "short", window=(2, 4), last_full=13),
    Row(
        "d64-causal-window-prefix-last-gqa", 64, "uniform", heads=4, kv_heads=2, causal=True,
        window=(10, None), prefix=4, last_full=7, activation="fast_silu",
    ),
    Row(
        "d32-window-prefix-last-cross", 32, "uniform", "log-normal", window=(8, 3), prefix=6,
        last_full=5, values=Normal(),
    ),
    Row(
        "d128-window-prefix-last-start-cross", 128, "zero-inflated", "uniform", align="start",
        window=(5, 8), prefix=9, last_full=4, activation="fast_gelu",
    ),
    Row(
        "dense-bias-causal-window-prefix-last", 32, "uniform", bias="dense", causal=True,
        window=(7, None), prefix=3, last_full=4, operators=_ONLY_ATTENTION,
    ),
    Row(
        "d64-scaled", 64, "fixed", scale=0.3, pre_scale=0.3, post_scale=0.25, values=Normal(0.5),
        activation="gelu_tanh",
    ),
    Row(
        "activation-per-head", 32, "uniform", heads=4, causal=True, operators=_ONLY_GDPA,
        activation=("gelu", "relu", "silu", "identity"), values=Normal(),
    ),
    Row(
        "activation-per-head-mqa-window", 64, "bimodal", heads=4, kv_heads=1, operators=_ONLY_GDPA,
        activation=("fast_gelu", "relu_squared", "hardswish", "fast_silu"), window=(10, 3),
    ),
    Row(
        "taylor6-d64", 64, "log-normal", pre_scale=1 / 64, activation="gelu_taylor6",
        operators=_ONLY_GDPA,
    ),
    Row(
        "taylor10-d32-causal-gqa", 32, "uniform", "nearly-full", heads=4, kv_heads=2,
        pre_scale=1 / 32, causal=True, activation="gelu_taylor10", operators=_ONLY_GDPA,
    ),
    Row("dense-bias", 32, "uniform", bias="dense", operators=_ONLY_ATTENTION),
    Row(
        "dense-bias-one-head-gqa-cross", 64, "short", "log-normal", heads=4, kv_heads=2,
        bias="dense", bias_heads="one", causal=True, values=Normal(), operators=_ONLY_ATTENTION,
    ),
    Row(
        "log-time-bias-causal", 64, "zero-inflated", bias="log_time", causal=True,
        operators=_ONLY_ATTENTION,
    ),
    Row(
        "log-time-bias-one-head-window-cross", 32, "bimodal", "short", bias="log_time",
        bias_heads="one", window=(30, 30), align="start", offsets_type="int32",
        operators=_ONLY_ATTENTION,
    ),
)  # fmt: skip


def features(operator: str) -> Iterator[Workload]:
    """Option rows, dense queries with options, and heavy tails, for one operator."""
    for row in _ROWS:
        if operator in row.operators:
            tiny = _recipe(row, operator, 4 if row.heads < 4 else 3, 0)
            yield _workload(row.name, operator, tiny, _SMOKE, "feature")
            moderate = _recipe(row, operator, 12, 1)
            yield _workload(f"{row.name}-moderate", operator, moderate, _DEVICE, "feature")
    yield from _dense_queries(operator)
    yield from _heavy_tails(operator)


def _recipe(row: Row, operator: str, batch: int, size: int) -> AttentionRecipe:
    recipe = AttentionRecipe(
        operator="jagged_attention",
        batch=batch,
        heads=row.heads,
        qk_dim=row.dim,
        q_lengths=LAWS[row.q][size],
        k_lengths=None if row.k is None else LAWS[row.k][size],
        kv_heads=row.kv_heads,
        v_dim=row.v_dim,
        values=row.values,
        causal=row.causal,
        align=row.align,
        window=row.window,
        prefix=row.prefix,
        last_full=row.last_full,
        scale=row.scale,
        bias=row.bias,
        bias_heads=row.bias_heads,
        offsets_type=row.offsets_type,
    )
    if operator != "gdpa":
        return recipe
    return _as_gdpa(recipe, row.activation, row.pre_scale, row.post_scale)


def _as_gdpa(
    recipe: AttentionRecipe,
    activation: str | tuple[str, ...],
    pre_scale: float | None = None,
    post_scale: float | None = None,
) -> AttentionRecipe:
    """The recipe for gdpa: no softmax scale, no bias; pre_scale 1/sqrt(dim) unless given."""
    return dataclasses.replace(
        recipe,
        operator="gdpa",
        scale=None,
        bias="none",
        activation=activation,
        pre_scale=1 / math.sqrt(recipe.qk_dim) if pre_scale is None else pre_scale,
        post_scale=post_scale,
    )


def _workload(
    name: str, operator: str, recipe: AttentionRecipe, purposes: frozenset[str], *tags: str
) -> Workload:
    marks = {
        "causal": recipe.causal,
        "window": recipe.window is not None,
        "prefix": recipe.prefix > 0,
        "last-full": recipe.last_full > 0,
        "bias": recipe.bias != "none",
        "gqa": recipe.num_kv_heads != recipe.heads,
        "cross": recipe.k_lengths is not None,
        "dense-query": recipe.dense_rows is not None,
        "heavy-tailed-values": isinstance(recipe.values, HeavyTailed),
    }
    found = {tag for tag, holds in marks.items() if holds}
    return Workload(
        f"{operator}-{name}", operator, recipe, purposes=purposes, tags=frozenset({*tags, *found})
    )


def _dense_queries(operator: str) -> Iterator[Workload]:
    base = AttentionRecipe(
        "jagged_attention", 4, 4, 32, dense_rows=9, k_lengths=UniformFill(0.5, 60), kv_heads=2
    )
    large = dataclasses.replace(base, batch=20, dense_rows=64, k_lengths=UniformFill(0.5, 400))
    for suffix, recipe, purposes in (("", base, _SMOKE), ("-moderate", large, _DEVICE)):
        causal = dataclasses.replace(recipe, causal=True, window=(11, None), align="start")
        if operator == "gdpa":
            recipe, causal = _as_gdpa(recipe, "relu"), _as_gdpa(causal, "silu")
        else:
            recipe = dataclasses.replace(recipe, bias="dense")
        yield _workload(f"dense-query-gqa{suffix}", operator, recipe, purposes, "feature")
        name = f"dense-query-causal-window{suffix}"
        yield _workload(name, operator, causal, purposes, "feature")


def _heavy_tails(operator: str) -> Iterator[Workload]:
    """Production-like histories at full size; batches keep a call within one 80 GB device."""
    batches = {"median300": 1024, "median800": 256, "median800-wide": 64, "median1500": 128}
    cases: list[tuple[str, int, LengthLaw]] = [
        (f"history-{name}", batches[name], law) for name, law in HEAVY_TAILS.items()
    ]
    cases += [
        ("history-l7168", 768, LogNormal(1500, 0.8, 16, 7168)),
        ("history-new-users", 1024, ZeroInflated(UniformFill(0.5, 1000), 0.3)),
        ("history-dlrm-v3", 512, Gaussian(1000)),
    ]
    for name, batch, law in cases:
        recipe = AttentionRecipe("jagged_attention", batch, 4, 128, law, causal=True)
        if operator == "gdpa":
            recipe = dataclasses.replace(_as_gdpa(recipe, "fast_gelu"), causal=False)
        yield _workload(name, operator, recipe, _FULL, "production")
    if operator != "gdpa":
        law = UniformFill(0.5, 1000)
        recipe = AttentionRecipe("jagged_attention", 128, 4, 128, law, bias="log_time", causal=True)
        yield _workload("history-log-time-bias", operator, recipe, _FULL, "production")
    # HSTU's semi-local attention: context first, the newest events see the whole history.
    semi_local = AttentionRecipe(
        "jagged_attention", 512, 4, 128, UniformFill(0.95, 2048), causal=True, window=(255, None),
        prefix=8, last_full=64,
    )  # fmt: skip
    if operator == "gdpa":
        semi_local = _as_gdpa(semi_local, "silu", post_scale=1 / 2048)
    yield _workload("history-semi-local", operator, semi_local, _FULL, "production")
    grouped = AttentionRecipe("jagged_attention", 512, 8, 128, UniformFill(0.5, 1024), kv_heads=2)
    grouped = dataclasses.replace(grouped, window=(255, 0))
    if operator == "gdpa":
        grouped = _as_gdpa(grouped, "gelu_tanh")
    yield _workload("history-gqa-window", operator, grouped, _FULL, "production")
