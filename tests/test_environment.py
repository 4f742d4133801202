import json
import os
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch

from jagbench import environment, result
from jagbench.environment import source_hash
from jagbench.version import __version__


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    monkeypatch.delenv("JAGBENCH_COMMIT", raising=False)
    environment.provenance.cache_clear()
    environment._hash.cache_clear()


def test_versions_are_those_that_run():
    found = environment.detect("cpu")
    assert (found.jagbench, found.torch) == (__version__, torch.__version__)
    assert found.numpy == numpy.__version__
    assert found.device.startswith("cpu")
    assert found.driver is None


def test_no_host_name_and_no_path_is_recorded():
    text = json.dumps(asdict(environment.detect("cpu")))
    assert os.uname().nodename not in text
    assert str(Path.home()) not in text
    assert os.sep not in text.replace("\\/", "")


@pytest.fixture
def checkout(tmp_path):
    """A repository with one commit."""

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", *identity, *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    (tmp_path / "pyproject.toml").write_text("")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return tmp_path, git("rev-parse", "HEAD")


def test_a_checkout_gives_its_commit_and_whether_it_differs(checkout):
    root, commit = checkout
    assert environment._commit(root) == (commit, False)
    (root / "new.txt").write_text("untracked files are not code that ran")
    assert environment._commit(root) == (commit, False)
    (root / "pyproject.toml").write_text("[project]")
    assert environment._commit(root) == (commit, True)


def test_an_installed_package_inside_anothers_checkout_has_no_commit(checkout):
    root, _ = checkout
    inside = root / "site-packages"
    inside.mkdir()
    assert environment._commit(inside) == (None, None)


def test_what_jagbench_commit_says_goes_before_the_history_of_a_copy(checkout, monkeypatch):
    root, _ = checkout
    (root / "pyproject.toml").write_text("[project]")
    monkeypatch.setenv("JAGBENCH_COMMIT", "abc123")
    assert environment._commit(root) == ("abc123", None)
    assert environment._commit(root / "elsewhere") == ("abc123", None)
    assert environment.detect("cpu").commit == "abc123"


def test_an_empty_jagbench_commit_says_nothing(checkout, monkeypatch):
    root, commit = checkout
    monkeypatch.setenv("JAGBENCH_COMMIT", " ")
    assert environment._commit(root) == (commit, False)


def test_the_processor_is_named_by_its_model(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: Some(R) CPU  @ 2.0GHz\nserial\t: 17\n")
    assert environment._cpu_from(path) == "Some(R) CPU  @ 2.0GHz"
    path.write_text("processor\t: 0\nBogoMIPS\t: 50.0\n")
    assert environment._cpu_from(path) is None
    assert environment._cpu_from(tmp_path / "absent") is None


def test_a_slash_in_the_name_of_a_processor_is_no_path(monkeypatch):
    monkeypatch.setattr(environment, "_cpu_from", lambda path: "Core  2 w/ turbo")
    assert environment._cpu() == "Core 2 w turbo"
    monkeypatch.setattr(environment, "_cpu_from", lambda path: None)
    monkeypatch.setattr(environment.platform, "processor", lambda: "")
    monkeypatch.setattr(environment.platform, "system", lambda: "Linux")
    assert environment._cpu() is None


def test_provenance_is_the_environment_looked_up_once(monkeypatch):
    made = []
    detect = environment.detect
    monkeypatch.setattr(environment, "detect", lambda device: made.append(1) or detect(device))
    found = [environment.provenance("cpu") for _ in range(2)]
    assert found[0].model_dump() == asdict(detect("cpu"))
    assert found[0] is found[1]
    assert len(made) == 1


def test_provenance_has_a_place_for_every_field_of_the_environment():
    names = {field.name for field in fields(environment.Environment)}
    assert names == set(result.Provenance.model_fields)


def package(folder, **files):
    """A module object for a package whose files are given by name."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)
    module = ModuleType("theirs")
    module.__path__ = [str(folder)]
    return module


def test_the_source_of_a_package_is_hashed_wherever_it_lies(tmp_path):
    files = {"kernels": "x = 1", "deep__tiles": "y = 2"}
    one = source_hash(package(tmp_path / "one", **files))
    assert one == source_hash(package(tmp_path / "two", **files))
    assert len(one) == 16
    assert int(one, 16) >= 0


@pytest.mark.parametrize(
    "files",
    [
        {"kernels": "x = 2", "deep__tiles": "y = 2"},
        {"kernels": "x = 1", "deep__tile": "y = 2"},
        {"kernels": "x = 1"},
        {"kernels": "x = 1", "deep__tiles": "y = 2", "more": ""},
        {"kernels": "y = 2", "deep__tiles": "x = 1"},
    ],
)
def test_another_name_or_content_gives_another_hash(tmp_path, files):
    base = {"kernels": "x = 1", "deep__tiles": "y = 2"}
    one = source_hash(package(tmp_path / "one", **base))
    assert source_hash(package(tmp_path / "two", **files)) != one


def test_files_that_are_no_source_do_not_count(tmp_path):
    module = package(tmp_path, kernels="x = 1")
    one = source_hash(module)
    (tmp_path / "notes.txt").write_text("changed")
    environment._hash.cache_clear()
    assert source_hash(module) == one


def test_of_a_module_its_file_is_hashed(tmp_path):
    first, second = ModuleType("kernels"), ModuleType("kernels")
    for module, folder in ((first, "a"), (second, "b")):
        path = tmp_path / folder / "kernels.py"
        path.parent.mkdir()
        path.write_text("x = 1")
        (path.parent / "other.py").write_text(folder)
        module.__file__ = str(path)
    assert source_hash(first) == source_hash(second) is not None


@pytest.mark.parametrize("name", ["k.cu", "k.cuh", "k.so", "deep/k.hsaco", "k.ptx"])
def test_kernels_of_a_package_in_other_languages_count(tmp_path, name):
    hashes = []
    for content in ("1", "2"):
        path = tmp_path / content / name
        path.parent.mkdir(parents=True)
        path.write_text(content)
        hashes.append(source_hash(package(tmp_path / content, kernels="x = 1")))
    assert len({*hashes, source_hash(package(tmp_path / "3", kernels="x = 1"))}) == 3


HELPED = {
    "theirs.py": "import helper\ndef gdpa():\n    from deep import tiles\n",
    "helper.py": "import second, missing, json\n",
    "second.py": "x = 1",
    "deep/__init__.py": "from . import tiles",
    "deep/tiles.py": "y = 1",
    "beside.py": "z = 1",
    "kernel.cu": "1",
}


def hash_of_files(folder, name="theirs", main="theirs.py", **changed):
    for path, text in {**HELPED, **changed}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    module = ModuleType(name)
    module.__file__ = str(folder / main)
    return source_hash(module)


@pytest.mark.parametrize("name", HELPED)
def test_the_helpers_a_module_imports_count_and_no_other_file(tmp_path, name):
    one, two = hash_of_files(tmp_path / "a"), hash_of_files(tmp_path / "b", **{name: "w = 2"})
    assert (one == two) == (name == "beside.py")


def test_the_helpers_of_a_module_in_a_package_count_by_either_name(tmp_path):
    texts = {"theirs.py": "from .helper import x\nfrom pack.beside import z\n"}
    one = hash_of_files(tmp_path / "a", "pack.theirs", **texts)
    for name in ("helper.py", "beside.py"):
        folder = tmp_path / name
        assert hash_of_files(folder, "pack.theirs", **texts, **{name: "w = 2"}) != one


def test_beside_an_installed_module_lies_what_is_not_its_own(tmp_path):
    folders = [tmp_path / name / "site-packages" for name in "ab"]
    assert hash_of_files(folders[0]) == hash_of_files(folders[1], **{"helper.py": "w = 2"})


def test_of_a_class_or_an_object_the_module_of_the_class_is_hashed():
    class Kernels:
        pass

    here = source_hash(sys.modules[__name__])
    assert here is not None
    assert source_hash(Kernels) == source_hash(Kernels()) == here


def test_what_has_no_source_has_no_hash(tmp_path):
    loose = SimpleNamespace(gdpa=lambda: None)
    typed_in = ModuleType("typed_in")
    compiled, gone = ModuleType("compiled"), ModuleType("gone")
    compiled.__file__ = str(tmp_path / "compiled.so")
    gone.__file__ = str(tmp_path / "gone.py")
    assert [source_hash(x) for x in (loose, typed_in, compiled, gone, 7)] == [None] * 5


def test_our_own_implementations_have_hashes_that_differ():
    import jagbench.reference
    import jagbench.workloads

    hashes = [source_hash(module) for module in (jagbench.reference, jagbench.workloads)]
    assert None not in hashes
    assert len(set(hashes)) == 2
