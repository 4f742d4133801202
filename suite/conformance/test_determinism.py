"""Bit-equal repeats, where they are promised."""

from __future__ import annotations

import pytest

from jagbench.suite.candidate import Candidate, differing, repeatable
from jagbench.suite.cases import Case


def _repeats(candidate: Candidate) -> int:
    # A race shows only sometimes, and only where there is something to race.
    return 3 if candidate.settings.device.type == "cpu" else 20


@pytest.mark.quantised
@pytest.mark.cases(limit=2)
def test_outputs_are_bit_equal_over_repeats(candidate: Candidate, case: Case) -> None:
    """The forward gives the same bits every time, `deterministic` or not."""
    inputs = candidate.every_output(case.inputs(candidate.settings.device))
    first = candidate.run(inputs)
    for repeat in range(1, _repeats(candidate)):
        found = differing(first, candidate.run(inputs))
        assert not found, f"repeat {repeat} gives another {'; '.join(found)}"


@pytest.mark.differentiable
@pytest.mark.quantised
@pytest.mark.cases(limit=2)
def test_deterministic_gradients_are_bit_equal_over_repeats(
    candidate: Candidate, case: Case
) -> None:
    """deterministic=True promises bit-equal outputs and gradients."""
    inputs = repeatable(candidate.every_output(case.inputs(candidate.settings.device)))
    first = candidate.run(inputs, backward=True)
    for repeat in range(1, _repeats(candidate)):
        found = differing(first, candidate.run(inputs, backward=True))
        assert not found, f"repeat {repeat} gives another {'; '.join(found)}"
