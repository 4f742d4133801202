"""What a failure tells: the call, where it is wrong, by how much, and how to see it again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jagbench.accuracy import Accuracy
from jagbench.inputs import Inputs
from jagbench.suite.cases import NAMES, Case
from jagbench.suite.settings import Settings


def problems(accuracies: Iterable[Accuracy]) -> str:
    """One paragraph for every tensor over its budget; empty if none is."""
    return "\n".join(_paragraph(a) for a in accuracies if not a.ok)


def _paragraph(accuracy: Accuracy) -> str:
    index = ", ".join(str(i) for i in accuracy.worst_index)
    place = f"  {'first' if accuracy.codes else 'worst'} element {accuracy.name}[{index}]"
    if accuracy.worst_sequence is not None:
        place += f": sequence {accuracy.worst_sequence}"
    if accuracy.worst_position is not None:
        place += f", position {accuracy.worst_position}"
    if accuracy.codes:
        return f"{accuracy.name}: {accuracy.problem}" + (
            f"\n{place}" if accuracy.worst_index else ""
        )
    return (
        f"{accuracy.name}: {accuracy.problem}\n"
        f"{place}, off by {accuracy.worst_error:.4g}, budget {accuracy.worst_allowed:.4g}\n"
        f"  normwise error {accuracy.error:.4g}, budget {accuracy.allowed:.4g}, error of a naive "
        f"run in the same dtype {accuracy.naive_error:.4g}, SNR {accuracy.snr_db:.1f} dB"
    )


def call(inputs: Inputs) -> str:
    """The call in one line: operator, shapes, options."""
    shapes = {n: f"{n} {tuple(t.shape)}" for n, t in inputs.tensors().items()}
    options = [f"{name}={value!r}" for name, value in inputs.options.items()]
    return f"{inputs.operator.name}({', '.join([*shapes.values(), *options])}) in {inputs.dtype}"


def case(case: Case) -> str:
    """The workload in one line."""
    name, digest = case.workload.name, case.workload.digest
    return (
        f"operator {case.workload.operator}, workload {name} (digest {digest}), {NAMES[case.dtype]}"
    )


def snippet(case: Case, settings: Settings) -> str:
    """Python that shows the accuracy of the implementation on a workload."""
    lines: Sequence[str] = (
        'import os; os.environ["TRITON_INTERPRET"] = "1"' if settings.interpreter else "",
        "import torch",
        "from jagbench import workloads",
        "from jagbench.accuracy import judge",
        "from jagbench.execution import run",
        "from jagbench.implementation import load",
        "",
        f"workload = {_workload(case, settings)}",
        f'inputs = workload.inputs("{settings.device}", {case.dtype})',
        f'function = load("{settings.implementation.name}").get("{case.workload.operator}")',
        'print(*judge(inputs, run(function, inputs, backward=True)), sep="\\n")',
    )
    return "\n".join(lines).lstrip()


def _workload(case: Case, settings: Settings) -> str:
    name = case.workload.name
    if name in settings.replayed:
        text = settings.replayed[name]
        return f"workloads.workload_from_text({text!r}, {case.workload.operator!r})"
    return f'workloads.CATALOGUE["{name}"]'


def command(test_id: str, settings: Settings) -> str:
    """Command that runs one test again, from anywhere."""
    keyword = test_id.rpartition("::")[2].replace("[", " and ").rstrip("]")
    return (
        "python -m pytest -p jagbench.suite.plugin --pyargs jagbench.suite "
        f"--impl={settings.implementation.name} --purpose={settings.purpose} "
        f"--device={settings.device} -k '{keyword}'"
    )
