"""asv classes made from the catalogue: one per workload and quantity, `version` its digest.

A case is measured by `jagbench.measure` once in a run of asv, whatever number of quantities is read
from it, and its output is checked in the same run: a wrong result fails the benchmark and gives no
number. Unsupported cases are asv's n/a. Nothing here asks CUDA for anything when it is imported:
asv may fork a process for every benchmark, and CUDA does not survive a fork.

On a CPU: a few small workloads, our kernels in Triton's interpreter (those times say that something
changed, not how fast a GPU would be) and the reference. On a GPU: the shapes of the comparison.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from jagbench.asv_format import PARAMETERS, QUANTITIES, Quantity, benchmark_name, pretty_name
from jagbench.reference import OPERATORS
from jagbench.result import Case, Record
from jagbench.workload import Workload
from jagbench.workloads import select

#: Whether there is a GPU: counted through NVML, which starts no CUDA context.
GPU = torch.cuda.device_count() > 0
if not GPU:
    # Triton reads this where a kernel is decorated: before any implementation is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

IMPLEMENTATIONS = ("jagbench.impl",) if GPU else ("jagbench.impl", "jagbench.reference")
DTYPE = "bfloat16" if GPU else "float32"
REGIONS = ("forward", "backward")
# A CPU is measured to see that something changed: the second mode would say it again.
MODES = ("cold", "steady") if GPU else ("steady",)
#: Workloads of each operator on a CPU, the smallest: the interpreter takes a second a call.
FEW = 1


def workloads() -> Iterator[Workload]:
    """Workloads worth a history on this machine."""
    for operator in OPERATORS:
        if GPU:
            yield from select(operator, tag="comparison")
        else:
            yield from sorted(select(operator, purpose="smoke", tag="published"), key=_rows)[:FEW]


def _rows(workload: Workload) -> float:
    statistics = workload.statistics
    return statistics["q_tokens"] + statistics["k_tokens"]


def quantities() -> Iterator[Quantity]:
    """Quantities a record of this machine has: a CPU has no datasheet and no memory counter."""
    for quantity in QUANTITIES.values():
        if GPU or quantity.name not in ("track_peak_memory", "track_mfu"):
            yield quantity


class Benchmark:
    """A quantity of a workload; asv makes an instance for each combination of parameters."""

    workload: Workload
    quantity: Quantity
    param_names = PARAMETERS
    params = (IMPLEMENTATIONS, (DTYPE,), REGIONS, MODES, ("none",))
    timeout = 900.0

    def setup_cache(self) -> str:
        """Folder of the records measured in this run of asv."""
        return os.getcwd()

    def setup(self, folder: str, implementation: str, *case: str) -> None:
        """Measure the case, or read what another quantity measured."""
        record = _record(Path(folder), self.workload, implementation, case)
        if record.outcome == "unsupported":
            raise NotImplementedError(record.reason)
        if record.outcome != "measured":
            raise RuntimeError(f"{record.outcome}: {record.reason}")
        value = self.quantity.value(record)
        if value is None:
            raise NotImplementedError(f"no {self.quantity.label} of this case")
        self.value = value


def _record(
    folder: Path, workload: Workload, implementation: str, parameters: tuple[str, ...]
) -> Record:
    key = "\n".join((workload.name, implementation, *parameters))
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    if not path.exists():
        path.write_text(_measure(workload, implementation, parameters).model_dump_json())
    return Record.model_validate_json(path.read_text())


def _measure(workload: Workload, implementation: str, parameters: tuple[str, ...]) -> Record:
    # Imported here: asv imports this module to list the benchmarks, too.
    from jagbench.implementation import load
    from jagbench.measure import Settings, measure
    from jagbench.timing import QUICK, StopRule

    dtype, region, mode, preparation = parameters
    case = Case.model_validate(
        {
            "operator": workload.operator,
            "workload": workload.name,
            "digest": workload.digest,
            "dtype": dtype,
            "region": region,
            "mode": mode,
            "preparation": preparation,
        }
    )
    settings = Settings(rule=StopRule() if GPU else QUICK, second_clock=GPU, ceilings=GPU)
    device = torch.device("cuda" if GPU else "cpu")
    return measure(load(implementation), workload, case, device, settings=settings, session="asv")


def _tracker(workload: Workload, quantity: Quantity) -> Callable[..., float]:
    def track(self: Any, folder: str, *parameters: str) -> float:
        return float(self.value)

    properties = {
        "benchmark_name": benchmark_name(workload.operator, workload.name, quantity.name),
        "pretty_name": pretty_name(workload.name, quantity.name),
        "pretty_source": f"{workload.name}: {quantity.label} ({quantity.unit})",
        "unit": quantity.unit,
    }
    for name, value in properties.items():
        setattr(track, name, value)
    return track


def _benchmark(workload: Workload, quantity: Quantity) -> type[Benchmark]:
    name = re.sub(r"\W", "_", f"{workload.name}_{quantity.name}")
    members = {
        "workload": workload,
        "quantity": quantity,
        "version": workload.digest,
        quantity.name: _tracker(workload, quantity),
    }
    return type(name, (Benchmark,), members)


for _workload in workloads():
    for _quantity in quantities():
        _class = _benchmark(_workload, _quantity)
        globals()[_class.__name__] = _class
# asv would list a class by every name it has here.
del _workload, _quantity, _class
