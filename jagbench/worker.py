"""The process that measures: one implementation, one case after another, a line for each.

Started by `jagbench.run`. A kernel that hangs or kills the process takes only this one with it: the
line before each case already holds the record of a crash, for the parent to keep.

    python -m jagbench.worker FD PARENT < request.json

FD: where the lines go; PARENT: process that started this one. Lines are JSON objects:
{"start": record of a crash}, {"record": record}, {"skipped": workload, "reason": text} and, last,
{"end": true}.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import torch

    from jagbench.implementation import Implementation
    from jagbench.measure import Measurement, Settings
    from jagbench.result import Case, Record
    from jagbench.workload import Workload

Line = dict[str, Any]

#: Set before torch and triton are imported: kernels are bound when they are decorated.
INTERPRETER = "TRITON_INTERPRET"


@dataclass(frozen=True)
class Request:
    """What to measure.

    implementation: as for `--impl`. against: a second one whose samples alternate with the first's.
    workloads, dtypes, regions, modes, device: the cases. quick: the short rule, for an interpreter.
    finished: keys of records not to measure again, of two implementations both keys in one.
    pin: choices for the implementation to pin; they become part of its version.
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
    """Measure everything asked for; what happens goes out as JSON lines."""
    for line in _events(request):
        out.write(json.dumps(line) + "\n")
        out.flush()
    out.write(json.dumps({"end": True}) + "\n")


def _events(request: Request) -> Iterator[Line]:
    """Lines of all workloads. One that cannot be set up is skipped with the reason."""
    import torch

    from jagbench.implementation import load

    names = [request.implementation] + ([request.against] if request.against else [])
    implementations = [load(name) for name in names]
    if request.pin is not None:
        implementations = [_pinned(each, request.pin) for each in implementations]
    measured = False
    for name in request.workloads:
        for text in request.dtypes:
            open_cases = 0
            try:
                for line in _of_workload(request, implementations, name, getattr(torch, text)):
                    open_cases += 1 if "start" in line else -1
                    measured = True
                    yield line
            except Exception as error:
                # After a device error every later call of this process fails: only a new one helps.
                lost = measured and isinstance(error, torch.AcceleratorError)
                if open_cases or lost:
                    raise
                yield {"skipped": name, "reason": f"{type(error).__name__}: {error}"[:600]}


def _of_workload(
    request: Request, implementations: Sequence[Implementation], name: str, dtype: torch.dtype
) -> Iterator[Line]:
    """A "start" for each implementation of a case, then as many records."""
    import torch

    from jagbench import measure

    device = torch.device(request.device)
    settings = _settings(request)
    workload = find_workload(name)
    finished = frozenset(request.finished)
    source = None
    for found in _cases(request, implementations, workload, dtype):
        session = _session(request, found)
        group = [
            measure.Measurement(each, workload, case, device, settings, session)
            for each, case in zip(implementations, found, strict=True)
        ]
        if _key(group) in finished:
            continue
        if source is None:
            source = workload.inputs(device, dtype)
        begun = [each.unmeasured("crashed", "the process died", source) for each in group]
        for record in begun:
            yield {"start": record.model_dump(mode="json")}
        records: Sequence[Record]
        if len(group) == 2:
            records = measure.measure_pair(group[0], group[1], source)
        else:
            records = (measure.finish(group[0], source),)
        for record in records:
            yield {"record": record.model_dump(mode="json")}


def _session(request: Request, group: Sequence[Case]) -> str:
    """The request's session; one of its own for each view of what is paired in two.

    What has nothing to prepare is then measured twice under one key: beside either view by itself.
    """
    views = {case.preparation for case in group}
    if len(views) == 1:
        return request.session
    (view,) = views - {"none"}
    return f"{request.session}-{view}"


def _key(group: Sequence[Measurement]) -> tuple[str, ...]:
    """Key of a measurement; of two side by side both, one after the other."""
    return tuple(part for measurement in group for part in measurement.key)


def find_workload(name: str) -> Workload:
    """A workload of the catalogue, or `OPERATOR:replay:PATH[:COLUMN]`. Raises ValueError."""
    from jagbench.workloads import CATALOGUE, workload_from_text

    operator, mark, rest = name.partition(":replay:")
    if mark:
        return workload_from_text(f"replay:{rest}", operator)
    if name not in CATALOGUE:
        raise ValueError(f"no workload is named {name!r}; see `jagbench list`")
    return CATALOGUE[name]


def _cases(
    request: Request,
    implementations: Sequence[Implementation],
    workload: Workload,
    dtype: torch.dtype,
) -> Iterator[tuple[Case, ...]]:
    """A case for each implementation of the request, of the preparations asked for.

    Side by side go equal cases, and "none" (nothing to prepare) beside both "included" and
    "excluded", as records of them are compared.
    """
    from jagbench.result import stand_beside
    from jagbench.work import cases

    regions: Any = request.regions
    modes: Any = request.modes
    first, *rest = (
        [
            case
            for case in cases(each, workload, dtype, regions, modes)
            if case.preparation in (*request.preparations, "none")
        ]
        for each in implementations
    )
    for case in first:
        for others in itertools.product(*([c for c in o if stand_beside(case, c)] for o in rest)):
            yield case, *others


def _settings(request: Request) -> Settings:
    from jagbench.measure import Settings
    from jagbench.timing import QUICK, StopRule

    rule = QUICK if request.quick and request.budget is None else StopRule()
    if request.budget is not None:
        warmup = min(rule.warmup_limit, max(request.budget, rule.warmup_seconds))
        rule = dataclasses.replace(rule, seconds=request.budget, warmup_limit=warmup)
    return Settings(rule, request.second_clock, request.ceilings)


def _pinned(implementation: Implementation, choices: Mapping[str, str]) -> Implementation:
    """The implementation with its choices pinned and a version that tells them."""
    pin = getattr(implementation.namespace, "pin", None)
    if not callable(pin):
        raise ValueError(f"{implementation.name} has no `pin`: its choices cannot be pinned")
    pin(choices)
    version = f"{implementation.version}+pin.{digest_of(choices)}"
    return dataclasses.replace(implementation, version=version)


def digest_of(choices: Mapping[str, str]) -> str:
    """8 hex digits of SHA-256 that tell choices apart, in whatever order they are given."""
    text = json.dumps(dict(choices), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _die_with(parent: int) -> None:
    """Ask Linux for the end when the parent is gone: a hung kernel would keep the device."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))
    # It may have died before it could be asked for.
    if os.getppid() != parent:
        sys.exit(f"the parent, process {parent}, is gone")


def main() -> None:
    """Read a request from standard input; write lines to the file descriptor named."""
    _die_with(int(sys.argv[2]))
    request = Request.from_json(sys.stdin.read())
    if request.device.partition(":")[0] == "cpu":
        os.environ.setdefault(INTERPRETER, "1")
    os.set_inheritable(int(sys.argv[1]), False)
    with os.fdopen(int(sys.argv[1]), "w") as out:
        serve(request, out)


if __name__ == "__main__":
    main()
