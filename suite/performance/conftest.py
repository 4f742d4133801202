"""Collected only when named: a conformance run (`pytest suite/`) measures no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jagbench import work
from jagbench.suite.plugin import SETTINGS

FOLDER = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder out unless the command line names it or a file of it."""
    if not collection_path.is_relative_to(FOLDER):
        return None
    session = config.pluginmanager.get_plugin("session")
    return None if session is None or session.isinitpath(FOLDER) else True


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test its `part`: what of a call is timed, and how."""
    settings = metafunc.config.stash[SETTINGS]
    if "part" in metafunc.fixturenames and settings.workloads:
        any_workload = settings.workloads[0]
        found = work.cases(settings.implementation, any_workload, settings.main_dtype)
        parts = [(case.region, case.preparation, case.mode) for case in found]
        metafunc.parametrize("part", parts, ids="-".join)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Keep the host's name out of the JSON file."""
    machine_info.pop("node", None)
