"""The process that measures: one implementation, one case after another, a line for each.

Started by `jagbench.run`. A kernel that hangs or kills the process takes only this one with it: the
line before each case already holds the record of a crash, for the parent to keep.

    python -m jagbench.worker FD < request.json
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

#: Set before torch and triton are imported: kernels are bound when they are decorated.
INTERPRETER = "TRITON_INTERPRET"


@dataclass(frozen=True)
class Request:
    """What to measure.

    implementation: as for `--impl`. against: a second one whose samples alternate with the first's.
    workloads, dtypes, regions, modes, device: the cases. quick: the short rule, for an interpreter.
    finished: keys of records not to measure again. pin: choices for the implementation to pin.
    session: name of the run; budget: seconds of sampling a case; ceilings, second_clock: as
    `measure.Settings`.
    """

    implementation: str
    workloads: tuple[str, ...]
    dtypes: tuple[str, ...]
    device: str
    session: str
    regions: tuple[str, ...] = ("forward", "backward")
    modes: tuple[str, ...] = ("cold", "steady")
    preparations: tuple[str, ...] = ("included", "excluded", "alone")
    against: str | None = None
    quick: bool = False
    budget: float | None = None
    finished: tuple[tuple[str, ...], ...] = ()
    pin: Mapping[str, str] | None = None
    ceilings: bool = True
    second_clock: bool = True

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(vars(self))

    @staticmethod
    def from_json(text: str) -> Request:
        """Inverse of `to_json`."""
        content: dict[str, Any] = json.loads(text)
        for name, value in content.items():
            if isinstance(value, list):
                content[name] = tuple(tuple(v) if isinstance(v, list) else v for v in value)
        return Request(**content)


def serve(request: Request, out: TextIO) -> None:
    """Measure everything asked for; each case's start and record go out as a JSON line."""

    def say(**line: Any) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    for kind, text in _events(request):
        say(**{kind: json.loads(text)})
    say(end=True)


def _events(request: Request) -> Iterator[tuple[str, str]]:
    """("start", a record of the crash it would be) and ("record", the record), as JSON."""
    import torch

    from jagbench import measure, result
    from jagbench.implementation import load

    names = [request.implementation] + ([request.against] if request.against else [])
    implementations = [load(name) for name in names]
    if request.pin is not None:
        for implementation in implementations:
            _pin(implementation, request.pin)
    device = torch.device(request.device)
    settings = _settings(request)
    finished = frozenset(request.finished)
    for name in request.workloads:
        workload = find_workload(name)
        for text in request.dtypes:
            dtype: torch.dtype = getattr(torch, text)
            source = None
            for case in _cases(request, implementations, workload, dtype):
                pair = [
                    measure.Measurement(i, workload, case, device, settings, request.session)
                    for i in implementations
                ]
                if all(measurement.key in finished for measurement in pair):
                    continue
                if source is None:
                    source = workload.inputs(device, dtype)
                for measurement in pair:
                    begun = measurement.unmeasured("crashed", "the process died", source)
                    yield "start", begun.model_dump_json()
                records: tuple[result.Record, ...]
                if len(pair) == 2:
                    records = measure.measure_pair(pair[0], pair[1], source)
                else:
                    records = (measure.finish(pair[0], source),)
                for record in records:
                    yield "record", record.model_dump_json()
            del source


def find_workload(name: str) -> Any:
    """A workload of the catalogue, or `OPERATOR:replay:PATH[:COLUMN]`. Raises ValueError."""
    from jagbench.workloads import CATALOGUE, workload_from_text

    operator, mark, rest = name.partition(":replay:")
    if mark:
        return workload_from_text(f"replay:{rest}", operator)
    if name not in CATALOGUE:
        raise ValueError(f"no workload is named {name!r}; see `jagbench list`")
    return CATALOGUE[name]


def _cases(
    request: Request, implementations: list[Any], workload: Any, dtype: Any
) -> Iterator[Any]:
    """Cases that every implementation of the request has, of the preparations asked for."""
    from jagbench.work import cases

    regions: Any = request.regions
    modes: Any = request.modes
    found = [list(cases(i, workload, dtype, regions, modes)) for i in implementations]
    for case in found[0]:
        asked = case.preparation in (*request.preparations, "none")
        if asked and all(case in other for other in found[1:]):
            yield case


def _settings(request: Request) -> Any:
    import dataclasses

    from jagbench.measure import Settings
    from jagbench.timing import QUICK, StopRule

    rule = QUICK if request.quick else StopRule()
    if request.budget is not None:
        warmup = min(rule.warmup_limit, max(request.budget, rule.warmup_seconds))
        rule = dataclasses.replace(rule, seconds=request.budget, warmup_limit=warmup)
    return Settings(rule, request.second_clock, request.ceilings)


def _pin(implementation: Any, choices: Mapping[str, str]) -> None:
    pin = getattr(implementation.namespace, "pin", None)
    if not callable(pin):
        raise ValueError(f"{implementation.name} has no `pin`: its choices cannot be pinned")
    pin(choices)


def _die_with_parent() -> None:
    """Ask Linux for the end when the parent is gone: a hung kernel would keep the device."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))


def main() -> None:
    """Read a request from standard input; write lines to the file descriptor named."""
    _die_with_parent()
    request = Request.from_json(sys.stdin.read())
    if request.device == "cpu":
        os.environ.setdefault(INTERPRETER, "1")
    with os.fdopen(int(sys.argv[1]), "w") as out:
        serve(request, out)


if __name__ == "__main__":
    main()
