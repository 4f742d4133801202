"""The command's engine: workers that die or hang, interruption, resuming."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_worker
import pytest
import recording

from jagbench import run as engine
from jagbench import store
from jagbench.run import WorkerFailure, finished_keys, run
from jagbench.worker import Request, digest_of, find_workload

WORKLOADS = (
    "jagged_attention-self-fill1.0-smoke",
    "jagged_attention-self-fill0.5-jagged-smoke",
    "gdpa-self-fill1.0-smoke",
)
STRANGER = """
import os, sys, time
from jagbench.reference import gdpa
from jagbench.reference import jagged_attention as right

def jagged_attention(q, k, v, q_offsets, k_offsets, **options):
    if q_offsets.numel() == {sequences}:
        {fate}
    return right(q, k, v, q_offsets, k_offsets, **options)

def pin(choices):
    pass
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


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Puts a fake in the worker's place; a function that runs a request with it."""

    def play(code, **options):
        fake_worker.install(tmp_path, monkeypatch, code)
        return run(request("jagbench.impl"), tmp_path / "results", **options)

    return play


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
    asked = request(against="reference", workloads=WORKLOADS[:1])
    asked = dataclasses.replace(asked, finished=tuple(finished_keys(records, asked)))
    assert run(asked, tmp_path) == []


@pytest.mark.parametrize("swapped", [False, True])
def test_what_has_nothing_to_prepare_takes_turns_with_what_has(tmp_path, swapped):
    names = ["jagbench.reference", "jagbench.peers.padded_sdpa:math"]
    first, second = reversed(names) if swapped else names
    asked = request(first, against=second, workloads=WORKLOADS[:1])
    records = run(asked, tmp_path)
    assert [(r.who.name, r.case.preparation, r.outcome) for r in records] == [
        (name, "none" if name == names[0] else preparation, "measured")
        for preparation in ("included", "excluded")
        for name in (first, second)
    ]
    # Each view has a session of its own, so that no record of ours finishes both.
    assert [record.session for record in records] == [
        f"test-{view}" for view in ("included", "excluded") for _ in names
    ]
    cut = [record for record in records[:3] if record.who.name in names]
    assert len(finished_keys(cut, asked)) == 1
    asked = dataclasses.replace(asked, finished=tuple(finished_keys(records, asked)))
    assert run(asked, tmp_path) == []
    (one, other) = run(request(first, against=second, workloads=WORKLOADS[:1],
                               preparations=("excluded",)), tmp_path / "again")  # fmt: skip
    assert {one.case.preparation, other.case.preparation} == {"none", "excluded"}


def test_a_workload_that_cannot_be_set_up_is_told_and_the_rest_is_measured(stranger, tmp_path):
    choices = {"tile": "64x64"}
    asked = dataclasses.replace(
        stranger("pass"),
        workloads=("nothing", "gdpa:replay:nowhere.txt", WORKLOADS[2]),
        pin=choices,
    )
    told = []
    (record,) = run(asked, tmp_path, on_skip=lambda *words: told.append(words))
    assert [name for name, _ in told] == ["nothing", "gdpa:replay:nowhere.txt"]
    assert "no workload is named 'nothing'" in told[0][1]
    assert "nowhere.txt" in told[1][1]
    assert record.who.version == f"unknown+pin.{digest_of(choices)}"


def test_the_end_is_the_workers_to_say_not_the_implementations(stranger, tmp_path):
    records = run(
        stranger("""os.write(int(sys.argv[1]), b'{{"end": true}}\\n')"""), tmp_path / "results"
    )
    assert [r.outcome for r in records if r.case.workload == WORKLOADS[0]] == ["crashed"]
    assert set(WORKLOADS) == set(outcomes(records))


GOES_ON = """
if request["finished"]:
    say({"end": True})
    sys.exit()
"""
STRAY = {
    "a number": "b'1'",
    "an unknown object": "{'what': 1}",
    "no JSON": "b'\\xff garbage'",
    "a blank line": "b''",
    "nested without end": "b'[' * 100_000",
    "a long line": "b'x' * (17 << 20)",
    "an end with a case open": "{'end': True}",
    "more than a start": "{'start': case(1), 'record': 1}",
    "no record": "{'record': {'case': 1}}",
    "the record of no case begun": "{'record': case(1)}",
}


@pytest.mark.parametrize("stray", STRAY.values(), ids=STRAY)
def test_what_is_not_of_the_protocol_ends_the_worker_and_its_case(worker, stray):
    records = worker(f"{GOES_ON}\nsay({{'start': case(0)}})\nsay({stray})\ntime.sleep(600)")
    assert [record.outcome for record in records] == ["crashed"]
    assert records[0].reason.startswith("wrote into the result pipe: ")


def test_a_record_said_twice_makes_its_case_crashed(worker):
    lines = "{'start': case(0)}", "{'record': case(0)}", "{'record': case(0)}"
    records = worker(GOES_ON + "\n".join(f"say({line})" for line in lines))
    assert "wrote into the result pipe" in records[-1].reason


def test_a_stray_line_before_the_first_case_is_a_failure(worker):
    with pytest.raises(WorkerFailure, match="wrote into the result pipe: b'7'"):
        worker("say(b'7')\ntime.sleep(600)")


def test_a_version_that_changes_does_not_keep_a_run_dying_for_ever(worker, tmp_path):
    with pytest.raises(WorkerFailure, match="has ended a second process"):
        worker("say({'start': case(0, version=str(os.getpid()))})\nos._exit(3)")
    assert len(kept(tmp_path)) == 1


def test_a_worker_that_dies_between_cases_is_replaced_while_it_makes_headway(worker):
    dies = "done = len(request['finished'])\nsay({'start': case(done)})"
    dies += "\nif done < 2:\n    say({'record': case(done)})\nos._exit(3)"
    with pytest.raises(WorkerFailure, match="has ended a second process"):
        worker(dies.replace("case(done)", "case(min(done, 2), version=str(os.getpid()))"))
    with pytest.raises(WorkerFailure, match="exit status 4"):
        worker("if request['finished']:\n    os._exit(4)\nsay({'start': case(0)})\nos._exit(3)")


def test_children_neither_hide_the_death_of_a_worker_nor_outlive_it(worker, tmp_path):
    path = tmp_path / "held"
    begin = time.monotonic()
    (record,) = worker(f"""{GOES_ON}
import fcntl
held = open({os.fspath(path)!r}, "w")
fcntl.flock(held, fcntl.LOCK_EX)
if os.fork() == 0:
    time.sleep(600)
say({{"start": case(0)}})
os._exit(3)
""")
    assert (record.outcome, "exit status 3" in record.reason) == ("crashed", True)
    assert time.monotonic() - begin < 60
    with path.open() as file:
        for _ in range(200):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.05)
    pytest.fail("a child holds its lock still")


def test_only_the_end_of_what_a_worker_printed_is_read(worker, monkeypatch):
    monkeypatch.setattr(engine, "TAIL_OF_ERROR", 24)
    with pytest.raises(WorkerFailure) as caught:
        worker("print('first words ' * 1000, '\\nthe \\x1b[2Jlast words')\nsys.exit(3)")
    assert "exit status 3" in str(caught.value)
    assert str(caught.value).endswith("the  [2Jlast words")
    assert "first words first" not in str(caught.value)


def test_a_worker_whose_parent_is_gone_does_not_begin():
    done = subprocess.run(
        [sys.executable, "-m", "jagbench.worker", "1", str(os.getpid() + 1)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "is gone" in done.stderr


def test_a_pair_is_finished_where_one_session_holds_both():
    mine, base = ({"who__name": name} for name in ("mine", "base"))
    records = [
        recording.record(0, session="1", **mine), recording.record(0, session="1", **base),
        recording.record(1, session="1", **mine), recording.record(1, session="2", **base),
        recording.record(2, session="2", **mine), recording.record(3, session="2", **mine),
        recording.record(3, session="2", **mine),
    ]  # fmt: skip
    pair = request("mine", against="base")
    assert finished_keys(records, pair) == {records[0].key + records[1].key}
    itself = request("mine", against="mine")
    assert finished_keys(records, itself) == {records[5].key * 2}
    assert len(finished_keys(records, request("mine"))) == 6


def test_choices_are_told_apart_in_whatever_order_they_are_given():
    assert digest_of({"a": "1", "b": "2"}) == digest_of({"b": "2", "a": "1"})
    assert digest_of({"a": "1"}) != digest_of({"a": "2"})


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


def heeding():
    """Heed interrupts again in a process whose shell ignores them: a job in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def kept(results: Path):
    return [r for path in results.rglob("*.jsonl") for r in store.read(path).records]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_keeps_what_is_finished_and_goes_on_from_there(tmp_path, how):
    with subprocess.Popen(
        command(tmp_path), stdout=subprocess.PIPE, text=True, preexec_fn=heeding
    ) as process:
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
