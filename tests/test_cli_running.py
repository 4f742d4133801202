"""`jagbench run` as a command: what it refuses, says, survives, and waits for."""

from __future__ import annotations

import json
import os
import signal
import threading

import fake_worker
import pytest
import recording
from click.testing import CliRunner

from jagbench import store
from jagbench.cli import main, measuring
from jagbench.cli.measuring import device_lock, line, title
from jagbench.cli.selecting import device_named
from jagbench.plain import safe

WORKLOAD = "--workload=gdpa-self-fill1.0-smoke"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring.tempfile, "gettempdir", lambda: str(tmp_path))


def call(*arguments):
    return CliRunner().invoke(main, ["run", "--device=cpu", WORKLOAD, *arguments])


@pytest.mark.parametrize("device", ["meta", "mps", "xpu:1"])
def test_a_device_that_is_not_measured_on_is_a_usage_error(device):
    done = call(f"--device={device}")
    assert done.exit_code == 2
    assert f"--device={device}" in done.output


def test_every_cpu_is_the_cpu():
    assert device_named("cpu:0") == "cpu"


@pytest.mark.parametrize("option", ["--time-limit", "--budget"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_seconds_are_finite(option, value):
    done = call(f"{option}={value}")
    assert done.exit_code == 2
    assert "not finite" in done.output


@pytest.mark.parametrize("content", [b"{", b"[1]", b'{"a": 1}', b"\xff", b"[" * 100_000])
def test_choices_to_pin_are_an_object_of_strings(tmp_path, content):
    path = tmp_path / "choices.json"
    path.write_bytes(content)
    done = call(f"--pin={path}")
    assert done.exit_code == 2
    assert "--pin" in done.output


def test_a_folder_that_cannot_be_is_a_usage_error(tmp_path):
    (tmp_path / "file").touch()
    done = call(f"--results={tmp_path / 'file' / 'results'}")
    assert done.exit_code == 2
    assert "Not a directory" in done.output


def test_a_workload_that_is_skipped_is_told_and_makes_the_exit_code_one(tmp_path, monkeypatch):
    lines = {"skipped": "this", "reason": "\x1b[31mno file"}, {"end": True}
    fake_worker.install(tmp_path, monkeypatch, "".join(f"say({one!r})\n" for one in lines))
    done = call(f"--results={tmp_path / 'results'}")
    assert done.exit_code == 1
    assert "error: this is skipped:  [31mno file" in done.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_end_is_an_interrupt_that_ends_the_worker_too(tmp_path, monkeypatch, number):
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are handled in the main thread")
    told = tmp_path / "pid"
    code = f"""
open({os.fspath(told)!r}, "w").write(str(os.getpid()))
say({{"start": case(0)}})
say({{"record": case(0)}})
import pathlib
while not list(pathlib.Path({os.fspath(tmp_path)!r}).rglob("*.jsonl")):
    time.sleep(0.01)
os.kill(parent, {int(number)})
time.sleep(600)
"""
    fake_worker.install(tmp_path, monkeypatch, code)
    outside = signal.getsignal(number)
    if outside is signal.SIG_IGN:  # under nohup, or in the background of a shell
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    try:
        done = call(f"--results={tmp_path / 'results'}")
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, outside)
    assert done.exit_code == 130
    assert "what was finished is kept" in done.output
    assert len([r for p in tmp_path.rglob("*.jsonl") for r in store.read(p).records]) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


def test_an_interrupt_before_the_first_worker_is_no_traceback(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jagbench.cli.running.writable", interrupted)
    assert call().exit_code == 130


def test_what_is_finished_is_counted_by_pairs_of_one_session(tmp_path, monkeypatch):
    seen = tmp_path / "finished"
    fake_worker.install(
        tmp_path, monkeypatch,
        f"json.dump(request['finished'], open({os.fspath(seen)!r}, 'w'))\nsay({{'end': True}})",
    )  # fmt: skip
    from jagbench.environment import provenance

    place = provenance("cpu")
    records = [
        recording.record(
            index, who__name=name, session=session, hardware=place.hardware,
            provenance=place.model_dump(),
        )
        for index, name, session in (
            (0, "mine", "1"), (0, "base", "1"), (1, "mine", "1"), (1, "base", "2")
        )
    ]  # fmt: skip
    for record in records:
        store.append(store.path_for(tmp_path, record.hardware, record.who.name), record)
    arguments = f"--results={tmp_path}", "--impl=mine", "--against=base"
    assert call(*arguments).exit_code == 0
    assert json.loads(seen.read_text()) == [list(records[0].key + records[1].key)]
    assert call(*arguments, "--again").exit_code == 0
    assert json.loads(seen.read_text()) == []


def test_a_second_run_on_a_device_says_so_and_waits(capsys):
    entered = threading.Event()

    def second() -> None:
        with device_lock("cpu"):
            entered.set()

    with device_lock("cpu"):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(5)
    thread.join()
    assert capsys.readouterr().err.count("another run measures on cpu; waiting") == 1


def test_a_name_or_a_reason_moves_no_cursor():
    record = recording.record(
        who__name="a\x1b]0;b\x07\nc", case__workload="d\u202ee", outcome="crashed",
        reason="\x1b[2J\r\x9bé", timing=None,
    )  # fmt: skip
    assert title(record).startswith("a ]0;b  c d e ")
    assert line(record).endswith("crashed:  [2J  é")
    measured = recording.record(case__workload="d\u2066e", flags=["\x1b[1m"])
    assert line(measured).isprintable()


def test_ordinary_unicode_stays():
    text = "µs é 漢字 👩\u200d🔬 \u00a0 עברית"
    assert safe(text) == text
    assert safe("\ud800\u2028\t\x7f") == "    "
