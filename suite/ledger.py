"""What became of every test: kept in the controlling process, counted, written to the report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jagbench import environment
from jagbench.report import OUTCOMES, TestRecord, counts, write
from jagbench.suite.cases import NAMES
from jagbench.suite.settings import DTYPES, Settings
from jagbench.workloads import CATALOGUE

#: Keys of user properties.
DATA, ACCURACIES = "jagbench", "jagbench accuracies"
MAX_REASON = 2000


def canonical_id(nodeid: str) -> str:
    """A test's id from `conformance/` on: the same from a clone and from a wheel."""
    head, mark, tail = nodeid.partition("conformance/")
    test_id = mark + tail if mark else head
    # xdist appends "@group" behind the closing bracket when it deals out by group.
    bracket = test_id.rfind("]@")
    return test_id if bracket < 0 else test_id[: bracket + 1]


class Ledger:
    """Records of a session, by test id."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.settings = settings
        self.path = Path(config.option.report) if config.option.report else None
        self.timeout = getattr(config.option, "timeout", None) if config.option.isolate else None
        self.records: dict[str, TestRecord] = {}
        self.started: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.started[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        crashed = report.when not in ("setup", "call", "teardown")
        if not crashed and DATA not in properties:
            return
        quiet = report.passed and report.when != "call"
        # A test's setup and teardown count only where they go wrong.
        if not quiet:
            test_id = canonical_id(report.nodeid)
            self.records[test_id] = self._record(test_id, report, properties, crashed)

    def _record(
        self, test_id: str, report: pytest.TestReport, properties: Mapping[str, Any], crashed: bool
    ) -> TestRecord:
        data = dict(properties.get(DATA) or _from_id(test_id))
        kind = data.pop("kind", None)
        outcome = str(kind or report.outcome)
        if crashed:
            started = self.started.get(report.nodeid, time.monotonic())
            late = self.timeout is not None and time.monotonic() - started >= self.timeout
            outcome = "timed out" if late else "crashed"
            # What the terminal shows of it.
            report.longrepr = f"{test_id} {outcome}: the worker process was replaced"
        return TestRecord(
            id=test_id,
            outcome=outcome,
            accuracies=properties.get(ACCURACIES),
            reason=None if report.passed else _reason(report),
            **data,
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            return
        if session.exitstatus == pytest.ExitCode.OK and not self._passed():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.path is not None:
            found = environment.detect(self.settings.device)
            write(self.path, found, self._session(), list(self.records.values()))

    def _passed(self) -> bool:
        return any(record.outcome == "passed" for record in self.records.values())

    def _session(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "implementation": settings.implementation.name,
            "version": settings.implementation.version,
            "purpose": settings.purpose,
            "device": settings.device.type,
            "dtypes": [NAMES[d] for d in settings.dtypes] or "default",
            "operators": list(settings.operators),
            "interpreter": settings.interpreter,
        }

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write_line = terminalreporter.write_line
        terminalreporter.write_sep("=", f"jagbench: {self.settings.implementation.name}")
        table = counts(list(self.records.values()))
        for operator, row in table.items():
            parts = ", ".join(f"{row[o]} {o}" for o in OUTCOMES if o in row)
            write_line(f"{operator}: {parts}")
        for record in _reasons(self.records):
            write_line(f"  {record}")
        if self.records and not self._passed():
            write_line("nothing passed: the session fails", red=True)
        if self.path is not None:
            write_line(f"report: {self.path}")


def _reasons(records: Mapping[str, TestRecord]) -> list[str]:
    """Every reason for which something is unsupported, once for each operator, with its count."""
    found: dict[tuple[str, str], int] = {}
    for record in records.values():
        if record.outcome == "unsupported":
            key = (record.operator or "all", record.reason or "")
            found[key] = found.get(key, 0) + 1
    return [f"{operator}: {reason} ({n} tests)" for (operator, reason), n in sorted(found.items())]


def _reason(report: pytest.TestReport) -> str:
    """Why a test did not pass, without the folders of this machine."""
    text = getattr(report, "wasxfail", None)
    if text is None and isinstance(report.longrepr, tuple):
        text = report.longrepr[2]
    if text is None:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else report.longreprtext
    text = (
        str(text)
        .removeprefix("Skipped: ")
        .removeprefix("unsupported: ")
        .replace(str(Path.cwd()), ".")
    )
    return text.replace(str(Path.home()), "~")[:MAX_REASON]


def _from_id(test_id: str) -> dict[str, str | None]:
    """Operator, workload and dtype of a test of which only the id came back."""
    parameter = test_id.partition("[")[2].rstrip("]")
    name, _, dtype = parameter.rpartition("-")
    if name in CATALOGUE and dtype in DTYPES:
        workload = CATALOGUE[name]
        return {
            "operator": workload.operator,
            "workload": name,
            "digest": workload.digest,
            "dtype": dtype,
        }
    return {
        "operator": parameter if parameter in {w.operator for w in CATALOGUE.values()} else None
    }
