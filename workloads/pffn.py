"""Workloads of pffn_block: the published shape, options, edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from jagbench.inputs import Inputs
from jagbench.workload import Workload
from jagbench.workloads.attention import AttentionRecipe, OffsetsType
from jagbench.workloads.comparison import TAG as COMPARISON
from jagbench.workloads.features import LAWS
from jagbench.workloads.lengths import Explicit, Fixed, LogNormal, UniformFill
from jagbench.workloads.published import AMKL
from jagbench.workloads.values import HeavyTailed, Normal, ValueLaw

NORMAL = Normal()

_SMOKE = frozenset({"smoke", "conformance", "full"})
_DEVICE = frozenset({"conformance", "full"})
_FULL = frozenset({"full"})
_TWIN = frozenset({"smoke", "conformance"})


@dataclass(frozen=True)
class PffnRecipe:
    """Draws the inputs of pffn_block: those of a gdpa without masks, and eps."""

    attention: AttentionRecipe
    eps: float = 1e-5

    def __post_init__(self) -> None:
        a = self.attention
        if a.operator != "gdpa" or a.causal or a.window is not None or a.dense_rows is not None:
            raise ValueError(f"a block has the inputs of gdpa, no mask and no dense query, got {a}")
        if a.value_dim != a.qk_dim:
            raise ValueError(f"head_dim {a.qk_dim} of q must be that of v, {a.value_dim}")

    @property
    def heads(self) -> int:
        """Heads of q."""
        return self.attention.heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of k and v."""
        return self.attention.num_kv_heads

    @property
    def qk_dim(self) -> int:
        """head_dim of q and k."""
        return self.attention.qk_dim

    @property
    def value_dim(self) -> int:
        """head_dim of v and of the output."""
        return self.attention.qk_dim

    @property
    def values(self) -> ValueLaw:
        """Law of q, k, v and the upstream gradient."""
        return self.attention.values

    @property
    def offsets_type(self) -> OffsetsType:
        """Type of both offsets."""
        return self.attention.offsets_type

    @property
    def padding(self) -> int:
        """Key rows past the last offset."""
        return self.attention.k_padding

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.attention.batch

    def lengths(self, seed: int) -> dict[str, list[int]]:
        """Drawn lengths by offsets argument."""
        return self.attention.lengths(seed)

    def statistics(self, seed: int) -> dict[str, float]:
        """Realised statistics of the attention."""
        return self.attention.statistics(seed)

    def draw(self, seed: int, dtype: torch.dtype, device: torch.device, upstream: bool) -> Inputs:
        """Inputs of a seed on a device; the same bytes on every machine."""
        from jagbench.reference import OPERATORS

        found = self.attention.draw(seed, dtype, device, upstream)
        options: dict[str, Any] = {**found.options, "eps": self.eps}
        return Inputs(OPERATORS["pffn_block"], found.arguments, options, found.upstream)


def pffn() -> Iterator[Workload]:
    """Every workload of pffn_block."""
    longest, tags = 2000, ("published", "pffn_norm_block", COMPARISON)
    full = AttentionRecipe(
        "gdpa", 768, 4, 128, UniformFill(0.5, longest), Fixed(128), values=NORMAL,
        activation="fast_gelu", pre_scale=1 / longest,
    )  # fmt: skip
    source = f"{AMKL}; ours: pre_scale 1 / longest query, eps 1e-5"
    yield _workload("l2000-fill0.5-kv128", full, _FULL, *tags, source=source)
    twin = AttentionRecipe(
        "gdpa", 3, 2, 32, UniformFill(0.5, 100), Fixed(32), values=NORMAL,
        activation="fast_gelu", pre_scale=1 / 100,
    )  # fmt: skip
    yield _workload("smoke", twin, _TWIN, *tags, source=source)
    yield from _features()
    yield from _edges()


def _workload(
    name: str,
    attention: AttentionRecipe,
    purposes: frozenset[str],
    *tags: str,
    source: str = "",
    eps: float = 1e-5,
) -> Workload:
    marks = {
        "gqa": attention.num_kv_heads != attention.heads,
        "heavy-tailed-values": isinstance(attention.values, HeavyTailed),
        "per-head-activation": isinstance(attention.activation, tuple),
    }
    found = {tag for tag, holds in marks.items() if holds}
    recipe = PffnRecipe(attention, eps)
    return Workload(
        f"pffn_block-{name}", "pffn_block", recipe, purposes=purposes,
        tags=frozenset({*tags, *found}), source=source,
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One combination of options; lengths by the names of laws in `features.LAWS`."""

    name: str
    heads: int
    dim: int
    q: str
    k: str
    activation: str | tuple[str, ...]
    kv_heads: int | None = None
    pre_scale: float | None = None
    post_scale: float | None = None
    eps: float = 1e-5
    values: ValueLaw = NORMAL
    int32: bool = False


_ROWS = (
    Row("d16-gelu", 2, 16, "uniform", "short", "gelu", pre_scale=0.25),
    Row("d32-silu-gqa", 4, 32, "log-normal", "fixed", "silu", 2, 0.1, 0.5),
    Row("d64-relu-squared", 2, 64, "nearly-full", "short", "relu_squared", pre_scale=0.05,
        int32=True),
    Row("d72-identity", 2, 72, "zipf", "short", "identity", pre_scale=0.02),
    Row("d80-gelu-tanh-mqa", 3, 80, "bimodal", "short", "gelu_tanh", 1, 0.05),
    Row("d96-one-head", 1, 96, "short", "uniform", "hardswish", pre_scale=0.05),
    Row("d128-fast-silu", 2, 128, "giant", "short", "fast_silu", pre_scale=0.05, eps=1e-6),
    Row("d32-heavy-tailed", 2, 32, "zero-inflated", "short", "gelu", pre_scale=0.1,
        values=HeavyTailed()),
    Row("d32-large-eps", 2, 32, "gaussian", "short", "silu", pre_scale=0.2, eps=0.5),
    Row("d32-activation-per-head", 2, 32, "uniform", "zero-inflated", ("gelu", "silu"),
        pre_scale=0.2),
    Row("d104-three-heads", 3, 104, "short", "short", "gelu", pre_scale=0.03),
    Row("d256", 1, 256, "short", "short", "silu", pre_scale=0.03, int32=True),
)  # fmt: skip


def _features() -> Iterator[Workload]:
    """Every row of options, tiny and moderate, and a production-like history."""
    for row in _ROWS:
        for size, purposes in ((0, _SMOKE), (1, _DEVICE)):
            name = row.name + ("-moderate" if size else "")
            yield _workload(name, _drawn(row, size), purposes, "feature", eps=row.eps)
    history = AttentionRecipe(
        "gdpa", 256, 4, 128, LogNormal(800, 1.0, 16, 8192), Fixed(128), values=NORMAL,
        activation="silu", pre_scale=1 / 8192,
    )  # fmt: skip
    yield _workload("history-kv128", history, _FULL, "production")


def _drawn(row: Row, size: int) -> AttentionRecipe:
    """The attention of a row: tiny (0) or moderate (1)."""
    return AttentionRecipe(
        "gdpa", (2, 12)[size], row.heads, row.dim, LAWS[row.q][size], LAWS[row.k][size],
        kv_heads=row.kv_heads, values=row.values, activation=row.activation,
        pre_scale=row.pre_scale, post_scale=row.post_scale,
        offsets_type="int32" if row.int32 else "int64",
    )  # fmt: skip


#: Name, query lengths, key lengths, padding rows of each.
_EDGES: tuple[tuple[str, tuple[int, ...], tuple[int, ...], int], ...] = (
    ("empty-batch", (), (), 0),
    ("all-sequences-empty", (0, 0), (0, 0), 0),
    ("keys-all-empty", (13, 5), (0, 0), 0),
    ("queries-all-empty", (0, 0), (13, 5), 0),
    ("some-keys-and-some-queries-empty", (9, 0, 20), (0, 7, 12), 0),
    ("first-sequence-empty", (0, 21, 40), (0, 9, 12), 0),
    ("last-sequence-empty", (21, 40, 0), (9, 12, 0), 0),
    ("single-tokens", (1, 1, 2), (1, 3, 1), 0),
    ("single-query-and-key", (1,), (1,), 0),
    ("lengths-about-tiles-of-64", (63, 64, 65), (33, 1, 31), 0),
    ("lengths-about-tiles-of-32", (31, 32, 33), (63, 64, 65), 0),
    ("more-keys-than-queries", (3, 5), (90, 70), 0),
    ("padding-past-the-last-offset", (13, 0, 40), (9, 4, 20), 5),
    ("nothing-but-padding", (0, 0), (0, 0), 3),
    ("empty-batch-with-padding", (), (), 3),
)


def _edges() -> Iterator[Workload]:
    """Every edge under an activation that is 0 at 0 and one that is not linear there."""
    for activation in ("silu", "relu"):
        for name, q, k, padding in _EDGES:
            recipe = AttentionRecipe(
                "gdpa", len(q), 2, 32, Explicit(q), Explicit(k), values=NORMAL,
                activation=activation, pre_scale=0.1, q_padding=padding, k_padding=padding,
            )  # fmt: skip
            yield _workload(f"{name}-{activation}", recipe, _SMOKE, "adversarial")
