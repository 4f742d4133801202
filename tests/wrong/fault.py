"""What is said of a planted fault."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A wrong implementation and the test that must catch it.

    target: as in `--impl`, without its package: "masks:off_by_one".
    operator: judged in this run.
    caught_by: file and name of a test in suite/conformance.
    workload: the one workload of a test that runs on workloads; "" for the suite's own choice.
    parameter: the one parameter set of a test that has others; "" for all of them.
    dtype: as in `--dtype`.
    error: type of the exception that the test fails with.
    needs_gpu: why the fault shows on a GPU alone; "" if it shows on a CPU.
    """

    target: str
    operator: str
    caught_by: str
    workload: str = ""
    parameter: str = ""
    dtype: str = "float32"
    error: str = "AssertionError"
    needs_gpu: str = ""

    @property
    def id(self) -> str:
        """Reads as a phrase in test ids: "off_by_one-gdpa-d16-causal-outputs_are_within_budget"."""
        return f"{self.target.partition(':')[2]}-{self.selection}"

    @property
    def selection(self) -> str:
        """What is run, as a phrase: "gdpa-d16-causal-outputs_are_within_budget"."""
        test = self.caught_by.partition("::")[2].removeprefix("test_")
        return f"{self.workload or self.parameter or self.operator}-{test}"

    @property
    def node(self) -> str:
        """The test as pytest's command line takes it."""
        parameter = f"[{self.parameter}]" if self.parameter else ""
        return f"suite/conformance/{self.caught_by}{parameter}"


def on_workloads(
    target: str, caught_by: str, *workloads: str, dtype: str = "float32"
) -> tuple[Fault, ...]:
    """The fault on workloads, whose names begin with their operator."""
    return tuple(
        Fault(target, name.partition("-")[0], caught_by, name, dtype=dtype) for name in workloads
    )
