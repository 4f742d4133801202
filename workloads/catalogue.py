"""The catalogue: every named workload, and how to choose among them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from jagbench.workload import Workload
from jagbench.workloads.adversarial import adversarial
from jagbench.workloads.attention import OPERATOR_NAMES
from jagbench.workloads.blocks import blocks
from jagbench.workloads.comparison import comparison, tagged
from jagbench.workloads.features import features
from jagbench.workloads.ladder import ladder
from jagbench.workloads.mx_norm import mx_norms
from jagbench.workloads.mx_products import products
from jagbench.workloads.mx_projection import mx_projections
from jagbench.workloads.mx_quantize import quantisations
from jagbench.workloads.norms import norms
from jagbench.workloads.pffn import pffn
from jagbench.workloads.published import published


def _all() -> Iterator[Workload]:
    yield from tagged(published())
    yield from comparison()
    for operator in OPERATOR_NAMES:
        yield from features(operator)
        yield from adversarial(operator)
    yield from blocks()
    yield from ladder()
    yield from norms()
    yield from pffn()
    yield from quantisations()
    yield from mx_norms()
    yield from mx_projections()
    yield from products()


def _catalogue() -> Mapping[str, Workload]:
    found: dict[str, Workload] = {}
    for workload in _all():
        if workload.name in found:
            raise ValueError(f"two workloads are named {workload.name}")
        found[workload.name] = workload
    return MappingProxyType(found)


#: Every workload by name.
CATALOGUE: Mapping[str, Workload] = _catalogue()


def select(
    operator: str | None = None,
    purpose: str | None = None,
    tag: str | None = None,
    name: str | None = None,
) -> tuple[Workload, ...]:
    """Workloads that meet every condition given, in the catalogue's order.

    operator: name of the operator. purpose: "smoke", "conformance" or "full". tag: one tag.
    name: pattern of `fnmatch` ("gdpa-self-*").
    """
    return tuple(
        w
        for w in CATALOGUE.values()
        if (operator is None or w.operator == operator)
        and (purpose is None or purpose in w.purposes)
        and (tag is None or tag in w.tags)
        and (name is None or fnmatch.fnmatchcase(w.name, name))
    )
