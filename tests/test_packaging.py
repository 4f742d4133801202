"""One distribution: every folder is mapped and listed, and the wheel works away from the clone."""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from repository import PACKAGE_OF_FOLDER, PROJECT, ROOT, SETUPTOOLS

from jagbench.reference import OPERATORS
from jagbench.version import __version__
from jagbench.workloads import select

STRANGER = """
def jagged_attention(q, k, v, q_offsets, k_offsets, **options):
    raise NotImplementedError("a stranger that supports nothing")
"""


def packages_in_the_tree():
    for folder, package in PACKAGE_OF_FOLDER.items():
        for path in (ROOT / folder).rglob("__init__.py"):
            yield ".".join([package, *path.parent.relative_to(ROOT / folder).parts])


def test_every_package_of_the_tree_is_listed_for_the_wheel():
    assert sorted(packages_in_the_tree()) == sorted(SETUPTOOLS["packages"])


def test_every_mapped_folder_is_imported_from_the_clone():
    for folder, package in PACKAGE_OF_FOLDER.items():
        origin = importlib.import_module(package).__file__
        assert origin == str(ROOT / folder / "__init__.py")


def test_entry_points_name_modules_that_exist():
    group = PROJECT["project"]["entry-points"]["jagbench.implementations"]
    scripts = PROJECT["project"].get("scripts", {})
    for target in [*group.values(), *scripts.values()]:
        assert importlib.util.find_spec(target.partition(":")[0]), target


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the tree (a stale build folder would add deleted modules)."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in [*PACKAGE_OF_FOLDER, "pyproject.toml", "README.md", "LICENSE"]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(out)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_away_from_the_clone(unpacked, folder, *arguments):
    """Run Python in a folder of its own, with the unpacked wheel and that folder on the path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(unpacked), str(folder)])}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_wheel_holds_every_module_the_licence_and_the_type_marker(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in PACKAGE_OF_FOLDER.items():
        for path in (ROOT / folder).rglob("*.py"):
            inside = "/".join([*package.split("."), *path.relative_to(ROOT / folder).parts])
            assert inside in names
    assert "jagbench/py.typed" in names
    assert f"jagbench-{__version__}.dist-info/licenses/LICENSE" in names
    assert not {n for n in names if not n.startswith(("jagbench/", "jagbench-"))}


def test_the_wheel_imports_without_the_clone(unpacked, tmp_path):
    code = "import jagbench.reference as r; print(r.__file__); print(*r.OPERATORS)"
    done = run_away_from_the_clone(unpacked, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(unpacked / "jagbench" / "reference" / "__init__.py"),
        *OPERATORS,
    ]


def test_a_stranger_is_judged_from_the_wheel_alone(unpacked, tmp_path):
    (tmp_path / "stranger.py").write_text(STRANGER)
    suite = ("-m", "pytest", "-p", "jagbench.suite.plugin", "--pyargs", "jagbench.suite")
    name = select(operator="jagged_attention", purpose="smoke")[0].name
    options = ("--impl=stranger", f"--workload={name}", "-q", "-p", "no:cacheprovider")
    done = run_away_from_the_clone(unpacked, tmp_path, *suite, *options)
    # It supports nothing, so nothing passed: that is a failed session, not a green one.
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a stranger that supports nothing" in done.stdout


@pytest.mark.parametrize("command", ["tox", "tox -e suite"])
def test_ci_runs_the_commands_that_the_readme_gives(command):
    line = f"python3 -m pip install tox && {command}"
    assert re.search(rf"^ *{line}$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert f'run "{line}"' in (ROOT / ".ci" / "run").read_text()


def check_torch():
    spec = importlib.util.spec_from_file_location("check_torch", ROOT / ".ci" / "check_torch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("cuda", "has_device", "refused"),
    [(None, False, False), (None, True, False), ("13.0", True, False), ("13.0", False, True)],
)
def test_a_cuda_torch_is_refused_only_where_there_is_no_device(cuda, has_device, refused):
    found = check_torch().problem("2.13.0", cuda, has_device)
    assert (found is not None) == refused
    assert not refused or "built for CUDA 13.0" in found


def test_a_device_node_tells_an_nvidia_device(tmp_path):
    assert not check_torch().has_nvidia_device(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not check_torch().has_nvidia_device(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert check_torch().has_nvidia_device(tmp_path)


def test_the_table_in_the_readme_is_what_the_records_say():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "readme_table.py", "--check"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
