"""Time of every region of a call, as `jagbench.measure` takes it.

pytest-benchmark times nothing here: it is handed the samples, so that its statistics and its JSON
file agree with the records. A result that is wrong, or impossibly fast, fails and has no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jagbench import work
from jagbench.measure import Settings as HowToMeasure
from jagbench.measure import measure
from jagbench.result import Record
from jagbench.suite.candidate import Candidate
from jagbench.suite.cases import Case
from jagbench.suite.settings import Settings
from jagbench.timing import QUICK, StopRule


def clock_of(samples: Sequence[float]) -> Callable[[], float]:
    """A clock that is read before and after each round, and shows each sample to have passed."""
    readings = [reading for seconds in samples for reading in (0.0, seconds)]
    following = iter(readings)

    def recorded_samples() -> float:
        return next(following)

    return recorded_samples


@pytest.fixture
def hand_over(request: pytest.FixtureRequest) -> Callable[[Record], None]:
    """Give a record's samples to pytest-benchmark, one round each."""
    if not request.config.pluginmanager.hasplugin("benchmark"):
        pytest.fail("timings need pytest-benchmark: install it", pytrace=False)
    if hasattr(request.config, "workerinput"):
        pytest.fail("timings need the machine to themselves: run without -n", pytrace=False)

    def give(record: Record) -> None:
        assert record.timing is not None
        samples = record.timing.samples_seconds
        case = record.case
        group = f"{case.workload} {case.dtype} {case.region} {case.preparation} {case.mode}"
        mark = pytest.mark.benchmark(timer=clock_of(samples), group=group)
        request.node.add_marker(mark)
        benchmark: Any = request.getfixturevalue("benchmark")
        benchmark.extra_info["samples_seconds"] = list(samples)
        benchmark.extra_info["record"] = record.model_dump(mode="json")
        benchmark.pedantic(lambda: None, rounds=len(samples), iterations=1)

    return give


@pytest.mark.cases(timed=True)
def test_speed(
    case: Case,
    part: tuple[str, str, str],
    settings: Settings,
    candidate: Candidate,
    hand_over: Callable[[Record], None],
) -> None:
    """One region of one workload, checked and timed."""
    implementation = candidate.settings.implementation
    known = work.cases(implementation, case.workload, case.dtype)
    what = next((c for c in known if (c.region, c.preparation, c.mode) == part), None)
    if what is None:
        pytest.skip(f"{case.workload.operator} has no gradients, so no {part[0]}")
    gpu = settings.device.type == "cuda"
    how = HowToMeasure(rule=StopRule() if gpu else QUICK, ceilings=gpu)
    record = measure(
        implementation, case.workload, what, settings.device, settings=how, session="pytest"
    )
    if record.outcome == "unsupported":
        raise NotImplementedError(record.reason)
    if record.outcome != "measured":
        pytest.fail(f"{record.outcome}: {record.reason}", pytrace=False)
    hand_over(record)
