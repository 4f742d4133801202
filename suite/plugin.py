"""The pytest plugin of the suite: options, header, parameters, support count, report.

Loaded by `suite/conftest.py` from a clone, by `-p jagbench.suite.plugin` from a wheel.
"""

from __future__ import annotations

import datetime
import gc
import os
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from jagbench import environment
from jagbench.accuracy import Accuracy, judge
from jagbench.execution import Outcome
from jagbench.inputs import Inputs
from jagbench.spec import Operator
from jagbench.suite import cases, expected, explain
from jagbench.suite.candidate import Candidate, memory_full_of_nan
from jagbench.suite.cases import NAMES, Case
from jagbench.suite.ledger import ACCURACIES, DATA, Ledger, canonical_id
from jagbench.suite.settings import Settings, add_options, resolve

SETTINGS = pytest.StashKey[Settings]()
EXPECTED = pytest.StashKey[Sequence[expected.ExpectedFailure]]()

#: Seconds after which a test is taken to hang under --isolate, unless --timeout says otherwise.
ISOLATED_TIMEOUT = 300.0

MARKS = (
    "cases(every, limit, where): workloads a test runs on, all of the session or a few",
    "operators_with(*parameters): run for operators whose signature has these parameters",
    "quantised: run for operators that quantise inside, too",
    "operator(name): a property of one operator alone",
    "differentiable: run for operators that have gradients, not for those whose outputs are codes",
    "combinations(where): which of a test's parameters mean something together",
    "needs_gpu(reason): cannot be shown on a CPU",
    "xdist_group(name): tests that share a process, known here for want of pytest-xdist",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """Choose how pytest-xdist deals out the tests, before it reads its own options."""
    if not hasattr(config, "workerinput"):
        if config.option.isolate:
            _isolate(config)
        elif getattr(config.option, "numprocesses", None) and config.option.dist == "no":
            config.option.dist = "loadgroup"
    return (yield)


def _isolate(config: pytest.Config) -> None:
    """One worker, replaced as often as needed; pytest.UsageError where that cannot be had."""
    for module, option in (("xdist", "numprocesses"), ("pytest_timeout", "timeout")):
        if not hasattr(config.option, option):
            raise pytest.UsageError(f"--isolate needs {module.replace('_', '-')}: install it")
    config.option.numprocesses = config.option.numprocesses or 1
    if config.option.maxworkerrestart is None:
        config.option.maxworkerrestart = "1000000"
    # Scheduling by group would run a test that killed its worker again, and kill the next.
    config.option.dist = "load"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.option.loadgroup = worker.get("jagbench_dist") == "loadgroup"
        # One thread pool for each worker would make them wait for each other.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // worker["workercount"]))
    if config.option.isolate:
        config.option.timeout = config.option.timeout or ISOLATED_TIMEOUT
        # The other method waits for the kernel that hangs to hand control back.
        config.option.timeout_method = "thread"
    settings = resolve(config)
    config.stash[SETTINGS] = settings
    file = expected.find(config.option.expected_failures, settings.implementation)
    config.stash[EXPECTED] = expected.read(file)
    if worker is None:
        config.pluginmanager.register(Ledger(config, settings), "jagbench-ledger")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["jagbench_dist"] = node.config.option.dist


def pytest_report_header(config: pytest.Config) -> list[str]:
    settings = config.stash[SETTINGS]
    found = environment.detect(settings.device)
    commit = found.commit[:12] if found.commit else "unknown (installed package)"
    described = settings.implementation.describe(settings.device)
    dtypes = ", ".join(NAMES[d] for d in settings.dtypes) or _default_dtypes(settings)
    return [
        f"jagbench {found.jagbench}, commit {commit}{' (dirty)' if found.dirty else ''}",
        f"implementation: {settings.implementation.name} {settings.implementation.version}"
        + (f", {described}" if described else ""),
        f"device: {settings.device} ({found.device}), torch {found.torch}, triton {found.triton}",
        f"purpose: {settings.purpose}, dtypes: {dtypes}",
        f"operators: {', '.join(settings.operators)}",
        "triton interpreter: "
        + ("on (kernels run on the CPU, slowly)" if settings.interpreter else "off"),
    ]


def _default_dtypes(settings: Settings) -> str:
    if settings.device.type == "cpu":
        return "float32, and float16 or bfloat16 on some workloads"
    return "bfloat16, float16, float32"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases.parametrize(metafunc, metafunc.config.stash[SETTINGS])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    settings, worker = config.stash[SETTINGS], getattr(config, "workerinput", None)
    if worker is None or worker["workerid"] == "gw0":
        ids = [canonical_id(item.nodeid) for item in items]
        for entry in config.stash[EXPECTED]:
            if not any(entry.matches(test_id) for test_id in ids):
                warnings.warn(f"expected failure {entry.id!r} matches no test", stacklevel=1)
    wanted = [item for item in items if _is_wanted(item, settings)]
    dropped = [item for item in items if not _is_wanted(item, settings)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = wanted
    for item in items:
        mark = item.get_closest_marker("needs_gpu")
        if mark is not None and settings.device.type != "cuda":
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {mark.args[0]}"))


def _is_wanted(item: pytest.Item, settings: Settings) -> bool:
    """Tests of other operators, and with --workload tests of no workload, are left out.

    So are parameters that mean nothing together (mark `combinations`).
    """
    if not _is_ours(item):
        return True
    parameters = _parameters(item)
    if not isinstance(parameters.get("operator", None), (Operator, type(None))):
        return False  # no operator of the session has the property
    combinations = item.get_closest_marker("combinations")
    if combinations is not None and not combinations.kwargs["where"](**parameters):
        return False
    mark = item.get_closest_marker("operator")
    if mark is not None and mark.args[0] not in settings.operators:
        return False
    return not settings.chosen or "case" in parameters


def _is_ours(item: pytest.Item) -> bool:
    return "candidate" in getattr(item, "fixturenames", ())


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return dict(callspec.params) if callspec is not None else {}


@pytest.fixture(scope="session")
def settings(request: pytest.FixtureRequest) -> Settings:
    """What the session was asked to judge."""
    return request.config.stash[SETTINGS]


@pytest.fixture(scope="session")
def candidate(settings: Settings) -> Candidate:
    """The implementation under test."""
    return Candidate(settings)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[Sequence[Accuracy]], None]:
    """Keep accuracies for the report."""

    def keep(accuracies: Sequence[Accuracy]) -> None:
        rows = {
            a.name: {
                "error": a.error,
                "allowed": a.allowed,
                "naive": a.naive_error,
                "snr_db": a.snr_db,
            }
            for a in accuracies
        }
        request.node.user_properties.append((ACCURACIES, rows))

    return keep


@pytest.fixture
def check(record: Callable[[Sequence[Accuracy]], None]) -> Callable[[Inputs, Outcome], None]:
    """Judge an outcome against the truth, record its accuracy, fail if it is over budget."""

    def compare(inputs: Inputs, outcome: Outcome) -> None:
        __tracebackhide__ = True
        accuracies = judge(inputs, outcome)
        record(accuracies)
        text = explain.problems(accuracies)
        if text:
            pytest.fail(f"{text}\n  in {explain.call(inputs)}", pytrace=False)

    return compare


@pytest.fixture
def nan_memory(settings: Settings) -> Callable[[Inputs], AbstractContextManager[None]]:
    """Context in which memory that is allocated and not written holds NaN."""
    return lambda inputs: memory_full_of_nan(settings.device, inputs.tensors())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not _is_ours(item):
        return report
    kind: str | None = None
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, NotImplementedError) and report.when != "teardown":
        kind = "unsupported"
        report.outcome = "skipped"
        reason = str(error).strip() or "NotImplementedError without a reason"
        report.longrepr = (str(item.path), 0, f"unsupported: {reason}")
    elif report.failed and error is not None:
        _leave_if_device_is_lost(item.config.stash[SETTINGS])
    kind = _apply_expected(item, report) or kind
    data = _describe(item, kind)
    # A list of its own: xdist sends it, pytest shares the item's between setup, call and teardown.
    report.user_properties = [*report.user_properties, (DATA, data)]
    if report.failed:
        report.sections.append(("jagbench", _help(item)))
    if error is not None:
        _let_go(error, item.config.stash[SETTINGS])
    return report


def _let_go(error: BaseException, settings: Settings) -> None:
    """Drop the tensors that a failure's frames hold: pytest keeps the last traceback alive."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    if settings.device.type != "cpu":
        gc.collect()
        torch.cuda.empty_cache()


def _leave_if_device_is_lost(settings: Settings) -> None:
    """Die, to be replaced, where a kernel has broken the GPU context for all later tests."""
    if not settings.isolate or settings.device.type != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        traceback.print_exc()
        os._exit(70)


def _apply_expected(item: pytest.Item, report: pytest.TestReport) -> str | None:
    """Turn a foreseen failure into an expected one; an expired entry or a pass into a failure."""
    test_id = canonical_id(item.nodeid)
    entry = next((e for e in item.config.stash[EXPECTED] if e.matches(test_id)), None)
    if entry is None or report.skipped or report.when == "teardown":
        return None
    if entry.expired(datetime.date.today()):
        if report.failed:
            text = f"the expected failure {entry.id!r} expired on {entry.expires} ({entry.reason})"
            report.longrepr = f"{text}\n{report.longreprtext}"
        elif report.when == "call":
            report.outcome = "failed"
            report.longrepr = (
                f"the expected failure {entry.id!r} expired on {entry.expires}, and the test "
                "passes: remove the entry"
            )
        return None
    if report.failed:
        report.outcome = "skipped"
        report.wasxfail = entry.reason
        return "expected failure"
    if report.when == "call":
        report.outcome = "failed"
        report.longrepr = (
            f"unexpected pass: {entry.id!r} was expected to fail ({entry.reason}): remove the entry"
        )
    return None


def _describe(item: pytest.Item, kind: str | None) -> dict[str, str | None]:
    """What the report says of a test, in plain strings that xdist can send."""
    parameters = _parameters(item)
    case, operator = parameters.get("case"), parameters.get("operator")
    mark = item.get_closest_marker("operator")
    data: dict[str, str | None] = {"kind": kind}
    if isinstance(case, Case):
        data["operator"] = case.workload.operator
        data["workload"] = case.workload.name
        data["digest"] = case.workload.digest
        data["dtype"] = NAMES[case.dtype]
    elif isinstance(operator, Operator):
        data["operator"] = operator.name
    elif mark is not None:
        data["operator"] = mark.args[0]
    return data


def _help(item: pytest.Item) -> str:
    settings, case = item.config.stash[SETTINGS], _parameters(item).get("case")
    lines = []
    if isinstance(case, Case):
        lines += [explain.case(case), "to see the accuracy on this workload:", ""]
        lines += [f"    {line}" for line in explain.snippet(case, settings).splitlines()] + [""]
    lines += ["to run this test again:", ""]
    lines += [f"    {explain.command(canonical_id(item.nodeid), settings)}"]
    return "\n".join(lines)
