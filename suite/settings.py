"""What a session was asked to judge: options of the command line, resolved once."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch

from jagbench import workloads
from jagbench.implementation import Implementation, load
from jagbench.reference import OPERATORS
from jagbench.workload import PURPOSES, Workload

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
REPLAY = "replay:"


@dataclass(frozen=True)
class Settings:
    """One session.

    implementation: what is judged.
    device: where it runs.
    purpose: which workloads of the catalogue it runs on.
    dtypes: dtypes asked for; empty means the default of the device (`cases.dtypes_of`).
    operators: names of the operators judged, in the order of `OPERATORS`.
    workloads: what tests of every workload run on.
    chosen: whether the workloads were named on the command line.
    replayed: name of a workload of the user's own lengths -> how the command line named it.
    isolate: whether a dead or hanging worker process is replaced.
    """

    implementation: Implementation
    device: torch.device
    purpose: str
    dtypes: tuple[torch.dtype, ...]
    operators: tuple[str, ...]
    workloads: tuple[Workload, ...]
    chosen: bool
    isolate: bool
    replayed: Mapping[str, str]

    @property
    def interpreter(self) -> bool:
        """Whether Triton kernels run in its interpreter."""
        return os.environ.get("TRITON_INTERPRET") == "1"

    @property
    def main_dtype(self) -> torch.dtype:
        """Dtype of tests that need only one."""
        if self.dtypes:
            return self.dtypes[0]
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16


def add_options(parser: pytest.Parser) -> None:
    """Declare the options of the suite."""
    group = parser.getgroup("jagbench", "jagbench conformance suite")
    add = group.addoption
    add("--impl", default="jagbench.impl", help="module, module:object or entry point to judge")
    add("--operator", action="append", default=[], help="judge only this operator (repeatable)")
    add(
        "--workload",
        action="append",
        default=[],
        help="only workloads of this name or pattern, or replay:PATH[:COLUMN] with your own "
        "lengths (repeatable)",
    )
    add("--purpose", choices=PURPOSES, help="smoke (default on a CPU), conformance (GPU) or full")
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    add("--dtype", action="append", default=[], choices=list(DTYPES), help="repeatable")
    add("--report", metavar="FILE.json", help="write outcome and accuracy of every test")
    add("--isolate", action="store_true", help="run in a worker that is replaced when it dies")
    add(
        "--expected-failures",
        metavar="FILE.toml",
        help="known gaps of the implementation (default: the file of its own, if it has one)",
    )


def resolve(config: pytest.Config) -> Settings:
    """Settings of a session. Raises pytest.UsageError for options that name nothing."""
    option = config.option
    device = _device(option.device)
    use_interpreter(device)
    purpose = option.purpose or ("smoke" if device.type == "cpu" else "conformance")
    operators = _operators(option.operator)
    try:
        implementation = load(option.impl)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    found, replayed = _workloads(option.workload, purpose, operators)
    return Settings(
        implementation=implementation,
        device=device,
        purpose=purpose,
        dtypes=tuple(DTYPES[name] for name in option.dtype),
        operators=operators,
        workloads=found,
        chosen=bool(option.workload),
        isolate=bool(option.isolate),
        replayed=replayed,
    )


def _device(name: str | None) -> torch.device:
    """The device asked for, or the one there is. Raises pytest.UsageError for one that is not."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise pytest.UsageError(f"--device={name}: {error}") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise pytest.UsageError(f"--device={name}: torch sees {count or 'no'} GPU here")
    return device


def use_interpreter(device: torch.device) -> None:
    """Turn Triton's interpreter on where there is no GPU to compile for.

    A kernel is bound to the interpreter or the compiler when it is decorated, so this must come
    before any is. Raises pytest.UsageError if it comes too late.
    """
    if device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        return
    standard = sys.modules.get("triton.language.standard")
    # Triton's own library is decorated when triton is imported; `tl.sum` then fails in any kernel.
    if standard is not None and type(getattr(standard, "sum", None)).__name__ == "JITFunction":
        raise pytest.UsageError(
            "triton was imported before the suite could turn its interpreter on, so its kernels "
            "cannot run on this device: set TRITON_INTERPRET=1 in the environment, or do not "
            "import triton (nor a module with Triton kernels) before the suite starts"
        )
    os.environ["TRITON_INTERPRET"] = "1"


def _operators(names: Sequence[str]) -> tuple[str, ...]:
    unknown = set(names) - set(OPERATORS)
    if unknown:
        raise pytest.UsageError(
            f"--operator={', '.join(sorted(unknown))}: known are {', '.join(OPERATORS)}"
        )
    return tuple(name for name in OPERATORS if not names or name in names)


def _workloads(
    patterns: Sequence[str], purpose: str, operators: Sequence[str]
) -> tuple[tuple[Workload, ...], dict[str, str]]:
    """Workloads asked for, and by name the specification of those that are replayed."""
    if not patterns:
        known = workloads.select(purpose=purpose)
        return tuple(w for w in known if w.operator in operators), {}
    found: dict[str, Workload] = {}
    replayed: dict[str, str] = {}
    for pattern in patterns:
        matched = _matching(pattern, operators)
        if not matched:
            raise pytest.UsageError(
                f"--workload={pattern} matches no workload of {', '.join(operators)}"
            )
        found.update({w.name: w for w in matched})
        if pattern.startswith(REPLAY):
            replayed.update({w.name: pattern for w in matched})
    return tuple(found.values()), replayed


def _matching(pattern: str, operators: Sequence[str]) -> Sequence[Workload]:
    if not pattern.startswith(REPLAY):
        return [w for w in workloads.select(name=pattern) if w.operator in operators]
    try:
        return [workloads.workload_from_text(pattern, operator) for operator in operators]
    except (ImportError, OSError, ValueError) as error:
        raise pytest.UsageError(f"--workload={pattern}: {error}") from error
