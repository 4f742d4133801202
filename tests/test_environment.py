import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy
import pytest
import torch

from jagbench import environment
from jagbench.version import __version__


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
