"""Presets of published shapes, at their published size and as smoke twins for an interpreter.

Each preset is tagged with its identifier in the sources. Where a source leaves a field out, the
value chosen here is named in `source` after "ours:". "-jagged" is self-attention whose keys are as
jagged as its queries; "-repro" repeats the public GDPA benchmark, which keeps keys and values at
full length; "-repro-values" also draws its values, which are no good for judging numerics.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from jagbench.workload import Workload
from jagbench.workloads.attention import DEFAULT_VALUES, OPERATOR_NAMES, AttentionRecipe
from jagbench.workloads.lengths import (
    ExactTotal,
    Explicit,
    Fixed,
    LengthLaw,
    StochasticCut,
    UniformFill,
)
from jagbench.workloads.values import Normal, Small, UniformUnit, ValueLaw

AMKL = "facebookresearch/ads_model_kernel_library, 2026-06"
TRITONBENCH = "meta-pytorch/tritonbench, 2025-08"
TLX = "facebookexperimental/triton, TLX tutorials, 2026-08"
JFA_BLOG = "PyTorch blog, Optimizing Jagged Flash Attention with TLX, 2026-10 (third-party summary)"
BLOCK_BLOG = "PyTorch blog, TLX Block Attention, 2026-05"
HSTU = "meta-recsys/generative-recommenders, 2026-07"
KUNLUN = "arXiv 2602.10016 (third-party summary)"
INTERFORMER = "arXiv 2411.09852v4"

BOTH = OPERATOR_NAMES


@dataclass(frozen=True)
class Shape:
    """Geometry of a preset. q: law of the query lengths or rows of a dense query."""

    batch: int
    q: LengthLaw | int
    k: LengthLaw | None = None
    heads: int = 4
    dim: int = 128


@dataclass(frozen=True)
class Preset:
    """A published preset: `full` shapes by name suffix and operators, at most one `smoke` shape.

    scale: pre_scale of gdpa ("root": 1/sqrt(dim), "tau": 1/longest query, "dim": 1/dim, "one": 1).
    hstu: causal, SiLU outside scaled by 1/longest length.
    """

    preset: str
    name: str
    source: str
    full: tuple[tuple[str, Shape, tuple[str, ...]], ...]
    smoke: Shape | None
    scale: str = "root"
    activation: str = "fast_gelu"
    hstu: bool = False
    values: ValueLaw = DEFAULT_VALUES
    smoke_suffix: str = ""


def published() -> Iterator[Workload]:
    """Every published preset for every operator it suits."""
    for preset in _presets():
        yield from full_size(preset)
        if preset.smoke is None:
            continue
        for operator in dict.fromkeys(o for _, _, operators in preset.full for o in operators):
            name = f"{operator}-{preset.name}{preset.smoke_suffix}-smoke"
            purposes = frozenset({"smoke", "conformance"})
            yield _workload(preset, preset.smoke, operator, name, purposes)


def full_size(preset: Preset) -> Iterator[Workload]:
    """A preset's workloads at full size."""
    for suffix, shape, operators in preset.full:
        for operator in operators:
            name = f"{operator}-{preset.name}{suffix}"
            yield _workload(preset, shape, operator, name, frozenset({"full"}))


def _workload(
    preset: Preset, shape: Shape, operator: str, name: str, purposes: frozenset[str]
) -> Workload:
    recipe = _recipe(preset, shape, operator)
    tags = {"published", preset.preset}
    tags |= {"causal"} if recipe.causal else set()
    tags |= {"dense-query"} if recipe.dense_rows is not None else set()
    return Workload(
        name, operator, recipe, purposes=purposes, tags=frozenset(tags), source=preset.source
    )


def _recipe(preset: Preset, shape: Shape, operator: str) -> AttentionRecipe:
    recipe = AttentionRecipe(
        operator="jagged_attention",
        batch=shape.batch,
        heads=shape.heads,
        qk_dim=shape.dim,
        q_lengths=None if isinstance(shape.q, int) else shape.q,
        dense_rows=shape.q if isinstance(shape.q, int) else None,
        k_lengths=shape.k,
        values=preset.values,
        causal=preset.hstu,
    )
    if operator != "gdpa":
        return recipe
    longest = shape.q if isinstance(shape.q, int) else _longest(shape.q)
    pre_scale = {
        "root": 1 / math.sqrt(shape.dim),
        "dim": 1 / shape.dim,
        "tau": 1 / longest,
        "one": None,
    }[preset.scale]
    return dataclasses.replace(
        recipe,
        operator=operator,
        activation=preset.activation,
        pre_scale=pre_scale,
        post_scale=1 / longest if preset.hstu else None,
    )


def _longest(law: LengthLaw) -> int:
    """The greatest length a law allows."""
    match law:
        case Fixed():
            return law.length
        case UniformFill() | StochasticCut() | ExactTotal():
            return law.maximum
        case Explicit():
            return max(law.values, default=1)
    raise ValueError(f"no greatest length is known of {law}")


def _presets() -> Iterator[Preset]:
    yield from _gdpa_self()
    yield from _asymmetric()
    yield from _pooling()
    yield from _pffn()
    yield from _self_attention()


_SELF_LENGTHS = (256, 512, 1024, 2048)
_GDPA: tuple[str, ...] = ("gdpa",)
_ATTENTION: tuple[str, ...] = ("jagged_attention",)


def _gdpa_self() -> Iterator[Preset]:
    full = tuple((f"-l{n}-fill1.0", Shape(1152, Fixed(n)), BOTH) for n in _SELF_LENGTHS)
    smoke = Shape(2, Fixed(65), heads=1)
    yield Preset("gdpa_self", "self", AMKL, full, smoke, smoke_suffix="-fill1.0")
    jagged = tuple(
        (f"-l{n}-fill0.5-jagged", Shape(1152, UniformFill(0.5, n)), BOTH) for n in _SELF_LENGTHS
    )
    smoke = Shape(4, UniformFill(0.5, 100), heads=2, dim=64)
    yield Preset("gdpa_self", "self", AMKL, jagged, smoke, smoke_suffix="-fill0.5-jagged")
    repro = tuple(
        (
            f"-l{n}-fill0.5-repro",
            Shape(1152, UniformFill(0.5, n), Fixed(n)),
            BOTH if n == 1024 else _GDPA,
        )
        for n in _SELF_LENGTHS
    )
    smoke = Shape(3, UniformFill(0.5, 80), Fixed(80), heads=2, dim=64)
    yield Preset("gdpa_self", "self", AMKL, repro, smoke, smoke_suffix="-fill0.5-repro")
    shape = Shape(1152, UniformFill(0.5, 1024), Fixed(1024))
    suffix = "-l1024-fill0.5-repro-values"
    yield Preset(
        "gdpa_self", "self", AMKL, ((suffix, shape, _GDPA),), None, scale="one",
        values=UniformUnit(),
    )  # fmt: skip


def _asymmetric() -> Iterator[Preset]:
    full = tuple(
        (f"-l{n}", Shape(1152, Fixed(n), Fixed(256)), BOTH if n in (1024, 2048) else _GDPA)
        for n in _SELF_LENGTHS
    )
    smoke = Shape(2, Fixed(128), Fixed(64), heads=2)
    yield Preset("gdpa_cross_kv256", "cross-kv256", AMKL, full, smoke)
    asymmetric = Shape(1152, UniformFill(0.5, 1000), UniformFill(0.5, 512))
    smoke = Shape(3, UniformFill(0.5, 100), UniformFill(0.5, 52), heads=2)
    source = f"{AMKL}; ours: fill 0.5 of queries and keys"
    yield Preset("gdpa_cute_asym", "cute-asym", source, (("", asymmetric, BOTH),), smoke)
    pairs = ((32, 1024), (128, 2048), (160, 4096), (256, 6144))
    full = tuple(
        (
            f"-q{q}-kv{k}",
            Shape(256, Fixed(q), UniformFill(0.5, k)),
            BOTH if q in (128, 256) else _ATTENTION,
        )
        for q, k in pairs
    )
    smoke = Shape(3, Fixed(16), UniformFill(0.5, 192), heads=2, dim=64)
    source = f"{TLX}; ours: batch 256, 4 heads of 128, keys at fill 0.5, which q meets which kv"
    yield Preset("tlx_cross", "tlx-cross", source, full, smoke)
    kunlun = Shape(1024, UniformFill(0.5, 2000), UniformFill(0.75, 256))
    smoke = Shape(3, UniformFill(0.5, 120), UniformFill(0.75, 24), heads=2, dim=64)
    source = f"{KUNLUN}: queries of O(1000), keys of O(100); ours: every number"
    yield Preset(
        "kunlun_real", "kunlun-real", source, (("", kunlun, _GDPA),), smoke, scale="tau",
        activation="silu", values=Normal(),
    )  # fmt: skip


def _pooling() -> Iterator[Preset]:
    pma = Shape(1024, 192, UniformFill(0.5, 1000), heads=3)
    smoke = Shape(4, 40, UniformFill(0.5, 100), heads=3, dim=32)
    yield Preset("tb_pma", "tb-pma", TRITONBENCH, (("", pma, BOTH),), smoke)
    full = tuple(
        (
            f"-fill{fill}",
            Shape(768, 128, UniformFill(fill, 2000)),
            BOTH if fill == 0.5 else _ATTENTION,
        )
        for fill in (0.1, 0.5, 0.95)
    )
    smoke = Shape(4, 17, UniformFill(0.5, 120), heads=2)
    source = f"{JFA_BLOG}; ours: 128 query rows, keys up to 2000, 0.95 for its high fill"
    yield Preset("jfa_broadcast_q", "broadcast-q", source, full, smoke)


def _pffn() -> Iterator[Preset]:
    example = Shape(1152, UniformFill(0.7, 1000), Fixed(256))
    smoke = Shape(3, UniformFill(0.7, 80), Fixed(64), heads=2, dim=64)
    yield Preset(
        "pffn_example", "pffn-kv256", AMKL, (("", example, _GDPA),), smoke, scale="tau",
        values=Normal(),
    )  # fmt: skip
    norm_block = Shape(768, UniformFill(0.5, 2000), Fixed(128))
    smoke = Shape(3, UniformFill(0.5, 100), Fixed(32), heads=2)
    yield Preset(
        "pffn_norm_block", "pffn-kv128", AMKL, (("", norm_block, _GDPA),), smoke, scale="tau",
        values=Normal(),
    )  # fmt: skip
    tuning = Shape(2048, UniformFill(0.5, 800), Fixed(256), dim=64)
    smoke = Shape(3, UniformFill(0.5, 80), Fixed(64), heads=2, dim=64)
    yield Preset("gdpa_tuning", "tuning", AMKL, (("", tuning, _GDPA),), smoke, activation="gelu")


def _self_attention() -> Iterator[Preset]:
    three = Shape(1024, UniformFill(0.5, 1000), heads=3)
    smoke = Shape(3, UniformFill(0.5, 90), heads=3, dim=32)
    yield Preset("tb_gdpa_default", "tb-default", TRITONBENCH, (("", three, BOTH),), smoke)
    smoke = Shape(1, Fixed(100), heads=2, dim=64)
    tlx = Shape(1152, Fixed(1000))
    yield Preset("tlx_gdpa", "tlx-self", TLX, (("", tlx, _GDPA),), smoke)
    fp8 = Shape(256, Fixed(3072))
    smoke = Shape(1, Fixed(130), heads=1, dim=64)
    source = f"{AMKL}; ours: fill 1, QK-normalised values"
    yield Preset("gdpa_fp8", "fp8-shape", source, (("", fp8, _GDPA),), smoke)
    block = Shape(1152, UniformFill(0.7, 2000))
    smoke = Shape(2, UniformFill(0.7, 100), heads=1, dim=64)
    source = f"{BLOCK_BLOG}; here as attention over the whole sequence"
    yield Preset("block_attn", "block-shape", source, (("", block, _ATTENTION),), smoke)
    rotary = Shape(1152, ExactTotal(UniformFill(0.75, 2000), 1_735_537, 2000), heads=3)
    smoke = Shape(2, ExactTotal(UniformFill(0.75, 80), 113, 80), heads=3, dim=32)
    source = f"{source}; ours: fill 0.75 of 2000, adjusted to the published number of tokens"
    yield Preset(
        "block_attn_rotary", "block-rotary-shape", source, (("", rotary, _ATTENTION),), smoke
    )
    yield from _hstu()
    interformer = Shape(2048, UniformFill(0.6, 1000), dim=64)
    smoke = Shape(3, UniformFill(0.6, 64), dim=32)
    source = f"{INTERFORMER}: 10 sequences of 200-1000; ours: one of them, 4 heads of 64"
    yield Preset("interformer_internal", "interformer", source, (("", interformer, BOTH),), smoke)


def _hstu() -> Iterator[Preset]:
    def law(longest: int) -> LengthLaw:
        return StochasticCut(UniformFill(0.95, longest, allow_empty=True), longest, 2.0)

    full = tuple(
        (f"-l{n}", Shape(512, law(n)), BOTH if n in (256, 1024, 4096) else _GDPA)
        for n in (256, 512, 1024, 2048, 4096)
    )
    smoke = Shape(2, law(120), heads=2)
    yield Preset("hstu_bench", "hstu", HSTU, full, smoke, scale="dim", activation="silu", hstu=True)
    ragged = Shape(128, UniformFill(0.95, 1024))
    smoke = Shape(2, UniformFill(0.95, 64), heads=2, dim=64)
    source = f"{TRITONBENCH}; ours: lengths up to 1024 at fill 0.95"
    yield Preset(
        "hstu_ragged_tb", "hstu-ragged", source, (("", ragged, BOTH),), smoke, activation="silu",
        hstu=True,
    )  # fmt: skip
    suffix = "-l1024-repro-values"
    yield Preset(
        "hstu_bench", "hstu", HSTU, ((suffix, Shape(512, law(1024)), _GDPA),),
        None, scale="dim", activation="silu", hstu=True,
        values=Small(),
    )  # fmt: skip
