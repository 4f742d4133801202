"""Outputs against float64, on every workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from jagbench.accuracy import Accuracy
from jagbench.execution import Outcome
from jagbench.inputs import Inputs
from jagbench.suite import explain
from jagbench.suite.candidate import Candidate
from jagbench.suite.cases import Case


@pytest.mark.cases(every=True)
def test_outputs_are_within_budget(
    candidate: Candidate, case: Case, record: Callable[[Sequence[Accuracy]], None]
) -> None:
    """Every output, normwise, by worst element and in every sequence; inputs are left alone."""
    verdict = candidate.verdict(case)
    outputs = [a for a in verdict.accuracies if not a.name.startswith("grad ")]
    record(outputs)
    problems = explain.problems(outputs)
    if problems:
        pytest.fail(problems, pytrace=False)
    if verdict.written:
        pytest.fail(f"the implementation wrote to {', '.join(verdict.written)}", pytrace=False)


@pytest.mark.cases(limit=2)
def test_outputs_do_not_depend_on_whether_gradients_are_wanted(
    candidate: Candidate, case: Case, check: Callable[[Inputs, Outcome], None]
) -> None:
    """Without gradients, alone or with further outputs, the output is as right as in training."""
    inputs = case.inputs(candidate.settings.device)
    with torch.no_grad():
        check(inputs, candidate.run(inputs))
    check(inputs, candidate.run(candidate.every_output(inputs)))
    outcome = candidate.run(inputs, backward=True)
    check(inputs, outcome)
