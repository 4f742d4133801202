"""The command's engine: workers that die or hang, interruption, resuming."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jagbench import store
from jagbench.run import WorkerFailure, run
from jagbench.worker import Request, find_workload

WORKLOADS = (
    "jagged_attention-self-fill1.0-smoke",
    "jagged_attention-self-fill0.5-jagged-smoke",
    "gdpa-self-fill1.0-smoke",
)
STRANGER = """
import os, time
from jagbench.reference import gdpa
from jagbench.reference import jagged_attention as right

def jagged_attention(q, k, v, q_offsets, k_offsets, **options):
    if q_offsets.numel() == {sequences}:
        {fate}
    return right(q, k, v, q_offsets, k_offsets, **options)
"""


def request(implementation="jagbench.reference", **changes):
    settings = {
        "workloads": WORKLOADS, "dtypes": ("float32",), "device": "cpu", "session": "test",
        "regions": ("forward",), "modes": ("cold",), "quick": True, "ceilings": False,
        "second_clock": False,
    }  # fmt: skip
    return Request(implementation, **(settings | changes))


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """Writes a module that meets a fate on the workload of two sequences."""

    def write(fate):
        (tmp_path / "stranger.py").write_text(STRANGER.format(fate=fate, sequences=3))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return request("stranger")

    return write


def outcomes(records):
    return {record.case.workload: record.outcome for record in records}


@pytest.mark.parametrize("fate", ["os._exit(7)", "os.kill(os.getpid(), 11)"])
def test_a_worker_that_dies_costs_one_case(stranger, tmp_path, fate):
    records = run(stranger(fate), tmp_path / "results")
    assert outcomes(records) == dict(
        zip(WORKLOADS, ("crashed", "measured", "measured"), strict=True)
    )
    (crashed,) = (record for record in records if record.outcome == "crashed")
    assert "exit status 7" in crashed.reason or "SIGSEGV" in crashed.reason


def test_a_worker_that_hangs_is_killed_and_the_rest_goes_on(stranger, tmp_path):
    records = run(stranger("time.sleep(600)"), tmp_path / "results", time_limit=20.0)
    assert outcomes(records) == dict(
        zip(WORKLOADS, ("timed out", "measured", "measured"), strict=True)
    )


def test_records_are_kept_and_not_measured_again(tmp_path):
    first = run(request(), tmp_path)
    path = store.path_for(tmp_path, first[0].hardware, "jagbench.reference")
    assert [r.key for r in store.read(path).records] == [r.key for r in first]
    finished = tuple(sorted(store.finished(path)))
    assert run(request(finished=finished), tmp_path) == []
    assert len(store.read(path).records) == 3


def test_a_module_that_is_not_there_is_named(tmp_path):
    with pytest.raises(WorkerFailure, match="no module 'nowhere'"):
        run(request("nowhere.to.be.found"), tmp_path)


def test_choices_are_pinned_or_refused(tmp_path):
    with pytest.raises(WorkerFailure, match="has no `pin`"):
        run(request(pin={"softmax/128": "64x64 warps 4 stages 2"}), tmp_path)


def test_two_implementations_take_turns_and_each_has_its_file(tmp_path):
    records = run(request(against="reference", workloads=WORKLOADS[:1]), tmp_path)
    assert [record.who.name for record in records] == ["jagbench.reference", "reference"]
    assert len(list(tmp_path.rglob("*.jsonl"))) == 2


def test_a_request_survives_the_pipe():
    asked = request(finished=(("a", "b"),), pin={"k/1": "x"})
    assert Request.from_json(asked.to_json()) == asked


def test_lengths_of_ones_own_can_be_replayed(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("3\n5\n0\n2\n")
    workload = find_workload(f"gdpa:replay:{file}")
    assert (workload.operator, workload.statistics["q_tokens"]) == ("gdpa", 10)
    with pytest.raises(ValueError, match="no workload is named 'nothing'"):
        find_workload("nothing")


def command(results, *more):
    return [
        sys.executable, "-m", "jagbench", "run", "--impl=jagbench.reference", "--device=cpu",
        f"--results={results}", "--budget=0.01", "--workload=*-self-*-smoke", *more,
    ]  # fmt: skip


def kept(results: Path):
    return [r for path in results.rglob("*.jsonl") for r in store.read(path).records]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_keeps_what_is_finished_and_goes_on_from_there(tmp_path, how):
    with subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        assert all(" ms; " in line for line in lines), lines
        os.kill(process.pid, how)
        process.wait(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -9)
    before = kept(tmp_path)
    assert len(before) >= 4
    time.sleep(0.2)
    done = subprocess.run(
        command(tmp_path, "--mode=cold", "--region=forward"),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    after = kept(tmp_path)
    assert after[: len(before)] == before
    assert len({record.key for record in after}) == len(after)
