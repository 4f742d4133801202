"""Gradients against float64, on every workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from jagbench.accuracy import Accuracy
from jagbench.execution import Outcome, gradient_name
from jagbench.inputs import Inputs
from jagbench.suite import explain
from jagbench.suite.candidate import Candidate
from jagbench.suite.cases import Case

pytestmark = pytest.mark.differentiable


@pytest.mark.cases(every=True)
def test_every_gradient_is_within_budget(
    candidate: Candidate, case: Case, record: Callable[[Sequence[Accuracy]], None]
) -> None:
    """The gradient of every floating tensor argument, named in the message where it is wrong."""
    verdict = candidate.verdict(case)
    if verdict.backward_error is not None:
        raise verdict.backward_error
    gradients = [a for a in verdict.accuracies if a.name.startswith("grad ")]
    assert gradients, "no gradient came back"
    record(gradients)
    problems = explain.problems(gradients)
    if problems:
        pytest.fail(problems, pytrace=False)


@pytest.mark.cases(limit=2)
def test_a_gradient_does_not_depend_on_which_others_are_wanted(
    candidate: Candidate, case: Case, check: Callable[[Inputs, Outcome], None]
) -> None:
    """Each argument alone requires a gradient: it is as right as among all others."""
    inputs = case.inputs(candidate.settings.device)
    function = candidate.settings.implementation.get(case.operator.name)
    for wanted in (n for n in case.operator.differentiable if n in inputs.tensors()):
        live = inputs.clone()
        leaf = live.tensors()[wanted].requires_grad_()
        result = live.call(function)
        out = result[0] if isinstance(result, tuple) else result
        (gradient,) = torch.autograd.grad(out, leaf, live.upstream)
        check(inputs, {"out": out.detach(), gradient_name(wanted): gradient})
