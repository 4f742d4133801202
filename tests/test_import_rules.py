"""Imports use full names and point one way (`tox -e lint` checks the whole graph)."""

import subprocess
import sys

import pytest
from repository import PACKAGE_OF_FOLDER, PROJECT, ROOT, imported_modules, python_files

FILES = python_files(*PACKAGE_OF_FOLDER, "tests", "benchmarks")
MAPPED = [folder for folder in PACKAGE_OF_FOLDER if folder != "jagbench"]


def test_no_file_imports_a_folder_by_its_bare_name():
    bare = {
        (str(path.relative_to(ROOT)), name)
        for path in FILES
        for name in imported_modules(path)
        if name.split(".")[0] in MAPPED
    }
    assert not bare


def test_no_file_uses_a_relative_import():
    relative = [
        path for path in FILES if any(name.startswith(".") for name in imported_modules(path))
    ]
    assert not relative


def test_the_suite_never_imports_the_implementation():
    names = {name for path in python_files("suite") for name in imported_modules(path)}
    assert not {
        name for name in names if name.startswith("jagbench.impl.") or name == "jagbench.impl"
    }


def loaded_by(module):
    """Modules in memory after importing one in a fresh interpreter."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["jagbench.accuracy", "jagbench.reference", "jagbench.workloads"]
)
def test_the_truth_and_the_workloads_load_neither_kernels_nor_suite(module):
    loaded = loaded_by(module)
    assert not loaded & {"jagbench.impl", "jagbench.suite"}


def test_the_suite_plugin_loads_no_triton_so_that_it_can_still_turn_the_interpreter_on():
    loaded = loaded_by("jagbench.suite.plugin")
    assert not loaded & {"jagbench.impl", "triton.language"}


#: They show and measure the catalogue: above the harness, and imported by nothing in it.
TOP = {"__main__", "cli", "run", "worker"}


def harness():
    """Module or sub-package of the harness -> its files."""
    found = {}
    for path in python_files("jagbench"):
        parts = path.relative_to(ROOT / "jagbench").with_suffix("").parts
        if parts[0] not in TOP | {"__init__"}:
            found.setdefault(parts[0], []).append(path)
    return found


def test_the_harness_knows_no_operator():
    ours = {"impl", "reference", "suite", "workloads"}
    found = {
        (path.name, name)
        for paths in harness().values()
        for path in paths
        for name in imported_modules(path)
        if name.split(".")[0] == "jagbench" and set(name.split(".")[1:2]) & (ours | TOP)
    }
    assert not found


def test_every_module_of_the_harness_is_under_its_import_contract():
    contract = PROJECT["tool"]["importlinter"]["contracts"][0]
    assert set(contract["source_modules"]) == {f"jagbench.{name}" for name in harness()}
