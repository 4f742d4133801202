"""The shapes on which implementations are compared beside each other, tag "comparison".

Nine shapes that published comparisons of kernels for jagged attention use between them: central
jagged self-attention at three lengths, full lengths, short keys, few queries, half the head dim,
and one dense shape of language models. Five of them are published presets and keep their names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from jagbench.workload import Workload
from jagbench.workloads.attention import OPERATOR_NAMES
from jagbench.workloads.lengths import Fixed, UniformFill
from jagbench.workloads.published import Preset, Shape, full_size

TAG = "comparison"

#: Published presets that belong to the comparison, without the operator's name.
PRESETS = (
    "self-l512-fill0.5-jagged",
    "self-l1024-fill0.5-jagged",
    "self-l2048-fill0.5-jagged",
    "self-l1024-fill1.0",
    "cross-kv256-l1024",
    # Twins for a CPU.
    "self-fill0.5-jagged-smoke",
    "self-fill1.0-smoke",
    "cross-kv256-smoke",
    "tb-pma-smoke",
)

_OURS = Preset(
    "comparison",
    "compare",
    "ours: shapes of comparisons between kernels that no preset covers",
    (
        (
            "-cross-q1024-fill0.5-kv64",
            Shape(1152, UniformFill(0.5, 1024), Fixed(64)),
            OPERATOR_NAMES,
        ),
        (
            "-pma-q32-kv2048-fill0.5",
            Shape(1152, Fixed(32), UniformFill(0.5, 2048)),
            OPERATOR_NAMES,
        ),
        (
            "-self-l1024-fill0.5-d64",
            Shape(1152, UniformFill(0.5, 1024), heads=8, dim=64),
            OPERATOR_NAMES,
        ),
        ("-dense-l8192", Shape(8, Fixed(8192), heads=16), OPERATOR_NAMES),
    ),
    None,
)


def comparison() -> Iterator[Workload]:
    """The shapes that are no published preset, for both operators."""
    for workload in full_size(_OURS):
        yield dataclasses.replace(workload, tags=frozenset({TAG}))


def tagged(workloads: Iterable[Workload]) -> Iterator[Workload]:
    """The same workloads, those of the comparison with its tag."""
    for workload in workloads:
        if workload.name.removeprefix(f"{workload.operator}-") in PRESETS:
            workload = dataclasses.replace(workload, tags=workload.tags | {TAG})
        yield workload
