"""Runs the suite in one process, once for every request, and keeps how each test ended.

    python -m wrong.driver REQUESTS.json RESULTS.json

A request is the list of pytest's arguments; its result, a list of `Ending` as dictionaries. One
process serves all, because importing torch takes longer than most of the tests.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class Ending:
    """How one test ended: "passed", "failed" or "skipped"; type and text of what it raised."""

    test: str
    outcome: str
    error: str = ""
    message: str = ""


@dataclass
class Recorder:
    """A pytest plugin that keeps endings by test."""

    endings: dict[str, Ending] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of the call, and of a setup that did not pass."""
        if report.when == "call" or report.outcome != "passed":
            self.endings[report.nodeid] = Ending(report.nodeid, report.outcome)

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        """Keep what a test raised; pytest asks this after it has logged the report."""
        outcome = report.outcome if isinstance(report, pytest.TestReport) else "not collected"
        error, message = call.excinfo.typename, str(call.excinfo.value)
        self.endings[node.nodeid] = Ending(node.nodeid, outcome, error, message[:500])


def run(arguments: list[str]) -> list[Ending]:
    """One session of pytest; the Ending of every test in it."""
    recorder, said = Recorder(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main(arguments, plugins=[recorder])
    if not recorder.endings:
        return [Ending("", "no test ran", f"exit code {int(code)}", said.getvalue()[-2000:])]
    return list(recorder.endings.values())


def main() -> None:
    """Serve the requests of a file."""
    torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits
    requests, results = (Path(argument) for argument in sys.argv[1:])
    endings = [[asdict(e) for e in run(r)] for r in json.loads(requests.read_text())]
    results.write_text(json.dumps(endings))


if __name__ == "__main__":
    main()
