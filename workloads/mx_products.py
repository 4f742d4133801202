"""Named workloads of mx_linear, mx_matmul, mx_attention and mx_gdpa."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jagbench.mx import ALONG_COLUMNS, SQUARE, LinearRecipe
from jagbench.mx import AttentionRecipe as Quantised
from jagbench.workload import Recipe, Workload
from jagbench.workloads.attention import AttentionRecipe
from jagbench.workloads.comparison import TAG as COMPARISON
from jagbench.workloads.lengths import Explicit, Fixed, LengthLaw, UniformFill
from jagbench.workloads.mx_recipes import LinearInputs, MatmulInputs, QuantisedAttention
from jagbench.workloads.values import HeavyTailed, Normal, StronglyNegativeScores

_SMOKE = frozenset({"smoke", "conformance", "full"})
_DEVICE = frozenset({"conformance", "full"})
_FULL = frozenset({"full"})
_TWIN = frozenset({"smoke", "conformance"})

#: Recipes of the linear layer by name; "default" keeps the weight gradient in bf16.
LINEAR = {
    "default": LinearRecipe(),
    "wgrad-mx": LinearRecipe(weight_gradient="mx", seed=7),
    "wgrad-mx-no-hadamard": LinearRecipe(weight_gradient="mx", hadamard=None, seed=3),
    "hadamard-64": LinearRecipe(weight_gradient="mx", hadamard=64, seed=2**40),
    "nearest": LinearRecipe(weight_gradient="mx", hadamard=16, gradient_rounding="nearest"),
    "floor": LinearRecipe(scale_mode="floor"),
    "rows": LinearRecipe(weight_block=ALONG_COLUMNS, weight_gradient="mx"),
    "e5m2-gradients": LinearRecipe(gradient_elem_dtype="e5m2", weight_gradient="mx"),
    "e2m1": LinearRecipe(elem_dtype="e2m1", weight_block=ALONG_COLUMNS),
    "even": LinearRecipe(scale_mode="even"),
    # The formats of the named recipe `mxfp8_everything`.
    "everything": LinearRecipe(
        "e5m2", "e5m2", "floor", weight_gradient="mx", hadamard=None, gradient_rounding="nearest"
    ),
}
#: Recipes of attention by name.
ATTENTION = {
    "default": Quantised(seed=5),
    "nearest": Quantised(gradient_rounding="nearest"),
    "fixed-scale": Quantised(weight_scale="fixed", seed=2**40),
    "square-values": Quantised(value_block=SQUARE),
    "quantised-sum": Quantised(row_sum="quantized", gradient_rounding="nearest"),
    "floor": Quantised(scale_mode="floor"),
    "e5m2-gradients": Quantised(gradient_elem_dtype="e5m2"),
    # Four bits show which numbers share a scale; eight, which are floats, hide it.
    "e2m1": Quantised("e2m1", "e2m1", gradient_rounding="nearest"),
    "even": Quantised(scale_mode="even", gradient_rounding="nearest"),
    "e5m2": Quantised("e5m2", "e5m2", "ceil", seed=2**40 + 1),
}
#: Recipes of attention that a smoke run judges: an interpreter takes seconds for each.
_SMOKE_RECIPES = ("default", "nearest", "floor", "e5m2-gradients", "e2m1")
_TLX = "facebookexperimental/triton (TLX), MXFP8 attention: batch 4, 32 heads of 128"


def products() -> Iterator[Workload]:
    """Every workload of the four operators."""
    yield from _linear()
    yield from _matmul()
    yield from _attention("mx_attention")
    yield from _attention("mx_gdpa")


def _workload(
    operator: str, name: str, recipe: Recipe, purposes: frozenset[str], *tags: str, source: str = ""
) -> Workload:
    return Workload(
        f"{operator}-{name}", operator, recipe, purposes=purposes, tags=frozenset(tags),
        source=source, differentiable=operator != "mx_matmul",
    )  # fmt: skip


# -- linear ----------------------------------------------------------------------------------------


def _linear() -> Iterator[Workload]:
    for rows, inside, outside in ((262_144, 512, 512), (65_536, 1024, 4096), (65_536, 4096, 1024)):
        for name in ("default", "wgrad-mx"):
            large = LinearInputs(rows, inside, outside, LINEAR[name])
            full = f"m{rows}-k{inside}-n{outside}-{name}"
            yield _workload("mx_linear", full, large, _FULL, "production", COMPARISON)
    for name in ("default", "wgrad-mx"):
        twin = LinearInputs(70, 96, 64, LINEAR[name])
        yield _workload("mx_linear", f"{name}-smoke", twin, _TWIN, COMPARISON)
    for name, recipe in LINEAR.items():
        # Rows, features and outputs that fill no last block; a bias where the name is long.
        small = LinearInputs(77, 72, 40, recipe, bias=len(name) > 5)
        yield _workload("mx_linear", f"{name}-k72-n40", small, _SMOKE, "feature")
        loud = LinearInputs(130, 160, 96, recipe, HeavyTailed())
        purposes = _SMOKE if name == "wgrad-mx" else _DEVICE
        yield _workload("mx_linear", f"{name}-outliers", loud, purposes, "feature")
        moderate = LinearInputs(1000, 520, 264, recipe, bias=True)
        yield _workload("mx_linear", f"{name}-moderate", moderate, _DEVICE, "feature")
    for rows in (1, 31, 33):
        edge = LinearInputs(rows, 33, 1, LINEAR["wgrad-mx"], bias=True)
        yield _workload("mx_linear", f"{rows}-rows", edge, _SMOKE, "adversarial")
    nothing = LinearInputs(0, 64, 32, LINEAR["wgrad-mx"], bias=True)
    yield _workload("mx_linear", "no-rows", nothing, _SMOKE, "adversarial")


# -- matmul ----------------------------------------------------------------------------------------


def _matmul() -> Iterator[Workload]:
    for squares in (False, True):
        block = "32x32" if squares else "1x32"
        for size in (4096, 8192):
            large = MatmulInputs(size, size, size, squares)
            yield _workload("mx_matmul", f"{block}-{size}", large, _FULL, COMPARISON)
        twin = MatmulInputs(64, 96, 64, squares)
        yield _workload("mx_matmul", f"{block}-smoke", twin, _TWIN, COMPARISON)
        for a, b in (("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e2m1", "e2m1"), ("e4m3", "e2m1")):
            options: dict[str, Any] = {"a_elem_dtype": a, "b_elem_dtype": b}
            small = MatmulInputs(45, 37, 70, squares, **options)
            yield _workload("mx_matmul", f"{block}-{a}-{b}", small, _SMOKE, "feature")
            moderate = MatmulInputs(520, 264, 1000, squares, values=HeavyTailed(), **options)
            yield _workload("mx_matmul", f"{block}-{a}-{b}-moderate", moderate, _DEVICE, "feature")
        loud = MatmulInputs(70, 40, 320, squares, values=HeavyTailed(outlier=64.0))
        yield _workload("mx_matmul", f"{block}-outliers", loud, _SMOKE, "feature")
        edge = MatmulInputs(1, 1, 31, squares)
        yield _workload("mx_matmul", f"{block}-k31", edge, _SMOKE, "adversarial")


# -- attention and gdpa ----------------------------------------------------------------------------


def _attention(operator: str) -> Iterator[Workload]:
    yield from _large(operator)
    twin = _of(operator, "default", UniformFill(0.5, 70), 3, heads=2, dim=32)
    yield _workload(operator, "self-fill0.5-jagged-smoke", twin, _TWIN, COMPARISON)
    for name in ATTENTION:
        if operator == "mx_gdpa" and name in ("fixed-scale", "quantised-sum"):
            continue
        small = _of(operator, name, Explicit((40, 0, 33)), 3, heads=2, dim=32)
        purposes = _SMOKE if name in _SMOKE_RECIPES else _DEVICE
        yield _workload(operator, name, small, purposes, "feature")
        moderate = _of(operator, name, UniformFill(0.5, 500), 6, heads=4, kv_heads=2, dim=64)
        yield _workload(operator, f"{name}-moderate", moderate, _DEVICE, "feature")
    yield from _masks(operator)
    yield from _further(operator)
    odd = _of(operator, "default", Fixed(1152), 1, heads=2, dim=64)
    yield _workload(operator, "l1152", odd, _DEVICE, "adversarial")
    loud = _of(operator, "default", Explicit((50, 21)), 2, heads=2, dim=64, values=HeavyTailed())
    yield _workload(operator, "outliers", loud, _SMOKE, "feature")
    large = _of(operator, "nearest", Explicit((33, 40)), 2, heads=2, dim=32, values=Normal(4.0))
    yield _workload(operator, "large-scores", large, _SMOKE, "adversarial")
    if operator == "mx_attention":
        low = StronglyNegativeScores()
        small = _of(operator, "default", Explicit((33, 0, 40)), 3, heads=2, dim=32, values=low)
        yield _workload(operator, "strongly-negative-scores", small, _SMOKE, "adversarial")
    for name, lengths in (("empty-batch", ()), ("all-sequences-empty", (0, 0)), ("tokens", (1, 1))):
        edge = _of(operator, "default", Explicit(lengths), len(lengths), heads=2, dim=32)
        yield _workload(operator, name, edge, _SMOKE, "adversarial")


def _large(operator: str) -> Iterator[Workload]:
    jagged = _of(operator, "default", UniformFill(0.5, 1024), 1152, heads=4, dim=128)
    yield _workload(operator, "self-l1024-fill0.5-jagged", jagged, _FULL, "production", COMPARISON)
    if operator == "mx_attention":
        tlx = _of(operator, "default", Fixed(4096), 4, heads=32, dim=128)
        tags = ("production", COMPARISON)
        yield _workload(operator, "tlx-l4096", tlx, _FULL, *tags, source=_TLX)


def _masks(operator: str) -> Iterator[Workload]:
    lengths, keys = Explicit((20, 45)), Explicit((37, 9))
    causal = _of(operator, "default", lengths, 2, heads=2, dim=32, causal=True)
    yield _workload(operator, "causal", causal, _SMOKE, "feature", "causal")
    cross = _of(
        operator, "nearest", lengths, 2, heads=4, kv_heads=2, dim=40, v_dim=24, k_lengths=keys,
        q_padding=3, k_padding=5,
    )  # fmt: skip
    yield _workload(operator, "gqa-cross", cross, _SMOKE, "feature")
    window = _of(operator, "default", lengths, 2, heads=2, dim=32, window=(9, 3))
    yield _workload(operator, "window", window, _SMOKE, "feature", "window")
    if operator == "mx_attention":
        bias = _of(operator, "default", lengths, 2, heads=2, dim=32, bias="dense")
        yield _workload(operator, "bias", bias, _SMOKE, "feature", "bias")


def _further(operator: str) -> Iterator[Workload]:
    """What kernels for quantised operands are tempted to leave out of the plain operators."""
    lengths, keys = Explicit((20, 45)), Explicit((37, 70))
    others: dict[str, Any] = {"activation": "gelu", "post_scale": 0.375}
    beyond = _of(
        operator, "even", lengths, 2, heads=2, dim=32, k_lengths=keys, window=(9, 3), align="start",
        prefix=5, last_full=4, **(others if operator == "mx_gdpa" else {}),
    )  # fmt: skip
    yield _workload(operator, "start-prefix-last", beyond, _SMOKE, "feature", "window")
    others = {"activation": ("relu", "gelu")}
    dense = _of(
        operator, "e5m2", None, 2, heads=2, dim=32, k_lengths=Explicit((37, 70)), dense_rows=9,
        **(others if operator == "mx_gdpa" else {}),
    )  # fmt: skip
    yield _workload(operator, "dense-query", dense, _SMOKE, "feature")
    if operator == "mx_attention":
        log_time = _of(operator, "nearest", lengths, 2, heads=2, dim=32, bias="log_time")
        yield _workload(operator, "log-time-bias", log_time, _DEVICE, "feature", "bias")


def _of(
    operator: str,
    name: str,
    lengths: LengthLaw | None,
    batch: int,
    *,
    heads: int,
    dim: int,
    **others: Any,
) -> QuantisedAttention:
    """Attention under a named recipe; gdpa by SiLU by default, scaled as softmax would be."""
    if operator == "mx_gdpa":
        others = {"activation": "silu", "pre_scale": 1 / math.sqrt(dim), **others}
        plain = AttentionRecipe("gdpa", batch, heads, dim, lengths, **others)
    else:
        plain = AttentionRecipe("jagged_attention", batch, heads, dim, lengths, **others)
    return QuantisedAttention(plain, ATTENTION[name])
