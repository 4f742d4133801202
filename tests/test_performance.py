"""`pytest suite/performance`: pytest-benchmark shows the samples that jagbench measured."""

import json
import os
import socket
import subprocess
import sys

import pytest
from repository import ROOT

from jagbench.result import Record

pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark")

#: Keeps xdist's workers from starting the same session several times.
pytestmark = pytest.mark.xdist_group("performance")

RIGHT = """
from jagbench.reference.gdpa import gdpa
"""
WRONG = """
from jagbench.reference.gdpa import gdpa as truth

def gdpa(*arguments, **options):
    return 2 * truth(*arguments, **options)
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Run a session on an implementation; its output and what it wrote as JSON."""

    def run(source, *options):
        folder = tmp_path_factory.mktemp("performance")
        (folder / "theirs.py").write_text(source)
        out = folder / "out.json"
        command = [
            *(sys.executable, "-m", "pytest", *options, "--impl=theirs", "--operator=gdpa"),
            *("--workload=gdpa-cute-asym-smoke", f"--benchmark-json={out}", "--device=cpu"),
            *("-p", "no:cacheprovider"),
        ]
        # pytest-benchmark writes nothing where it finds itself in a worker of pytest-xdist.
        outside = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**outside, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done, json.loads(out.read_text()) if out.exists() else None

    return run


@pytest.fixture(scope="module")
def timed(session):
    done, written = session(RIGHT, "suite/performance", "-k", "forward")
    assert done.returncode == 0, done.stdout + done.stderr
    return written


def test_every_mode_of_the_region_is_timed_once(timed):
    names = [benchmark["param"] for benchmark in timed["benchmarks"]]
    assert sorted(names) == [
        f"gdpa-cute-asym-smoke-float32-forward-none-{mode}" for mode in ("cold", "steady")
    ]


def test_its_statistics_are_those_of_the_record(timed):
    for benchmark in timed["benchmarks"]:
        record = Record.model_validate(benchmark["extra_info"]["record"])
        samples = list(record.timing.samples_seconds)
        assert benchmark["extra_info"]["samples_seconds"] == samples
        assert benchmark["stats"]["data"] == samples
        assert benchmark["stats"]["median"] == record.seconds
        assert benchmark["stats"]["rounds"] == len(samples)
        assert benchmark["stats"]["iterations"] == 1


def test_its_json_names_neither_host_nor_folder(timed):
    assert "node" not in timed["machine_info"]
    text = json.dumps({k: v for k, v in timed.items() if k != "commit_info"})
    assert str(ROOT) not in text
    assert f'"{socket.gethostname()}"' not in text


def test_a_wrong_result_fails_and_has_no_time(session):
    done, written = session(WRONG, "suite/performance", "-k", "forward and cold")
    assert done.returncode == 1
    assert "wrong: out: " in done.stdout
    assert written is None


def test_a_conformance_run_collects_no_timing(session):
    done, _ = session(RIGHT, "suite/", "--collect-only", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conformance/" in done.stdout
    assert "performance/" not in done.stdout
