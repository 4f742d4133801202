"""Writers that meet, are killed, find damage, or run out of room."""

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import recording

from jagbench import store

NAME = "jagbench.impl.jsonl"
TORN = b'{"schema_version": 1, "date": "2026-'


@pytest.fixture
def memory():
    """A folder in memory where the system has one: thousands of small files cost a disk seconds."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as made:
        yield Path(made)


@pytest.fixture
def path(memory):
    return memory / "nvidia-h200" / NAME


@pytest.fixture
def filled(path):
    """A file of three records."""
    store.append_all(path, map(recording.record, range(3)))
    return path


def indices(path):
    return [int(r.case.workload.removeprefix("case-")) for r in store.read(path).records]


def litter(folder):
    """Files beside the results that should not be there."""
    return sorted(p.name for p in folder.iterdir() if p.name not in (NAME, f".{NAME}.lock"))


def line(**changes):
    return json.dumps(recording.tree(**changes)).encode()


# Setting aside


def aside(path):
    return [json.loads(line) for line in store.damaged_path(path).read_bytes().splitlines()]


@pytest.mark.parametrize("torn", [TORN, b"\xff\xfe", b"\0" * 100, b" "])
def test_an_append_moves_a_torn_last_line_aside(filled, torn):
    with filled.open("ab") as handle:
        handle.write(torn)
    store.append(filled, recording.record(3))
    assert indices(filled) == [0, 1, 2, 3]
    assert store.read(filled).damaged == ()
    (entry,) = aside(filled)
    assert entry["line"] == 4
    assert entry["reason"].startswith("no newline; not ")
    assert entry["text"].encode("utf-8", "surrogateescape") == torn


@pytest.mark.parametrize("version", [1, 2])
def test_a_whole_last_line_without_its_newline_stays(filled, version):
    with filled.open("ab") as handle:
        handle.write(line(index=7, schema_version=version))
    store.append(filled, recording.record(3))
    assert indices(filled) == ([0, 1, 2, 7, 3] if version == 1 else [0, 1, 2, 3])
    assert len(filled.read_bytes().splitlines()) == 5
    assert not store.damaged_path(filled).exists()


def test_an_append_to_a_file_cut_anywhere_loses_no_byte(filled, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    whole = filled.read_bytes()
    for length in range(0, len(whole), 23):
        filled.write_bytes(whole[:length])
        store.damaged_path(filled).unlink(missing_ok=True)
        store.append(filled, recording.record(3))
        kept = filled.read_bytes().removesuffix(store.encode(recording.record(3)))
        if store.damaged_path(filled).exists():
            kept += aside(filled)[0]["text"].encode()
        assert kept.rstrip(b"\n") == whole[:length].rstrip(b"\n")


def test_quarantine_moves_damage_and_keeps_the_bytes_of_the_rest(filled):
    first, *others = filled.read_bytes().splitlines(keepends=True)
    newer = line(schema_version=2)
    filled.write_bytes(first + b"x\n\xff\n" + newer + b"\n" + b"".join(others) + TORN)
    moved = store.quarantine(filled)
    assert [one.line for one in moved] == [2, 3, 7]
    assert filled.read_bytes() == first + newer + b"\n" + b"".join(others)
    assert [entry["line"] for entry in aside(filled)] == [2, 3, 7]
    assert store.quarantine(filled) == ()
    assert len(aside(filled)) == 3


def test_quarantine_of_a_sound_file_leaves_it_alone(filled):
    before = filled.stat()
    assert store.quarantine(filled) == ()
    assert filled.stat().st_ino == before.st_ino
    assert litter(filled.parent) == []


# Writers together, killed, and without room


def test_eight_writers_lose_tear_and_double_nothing(path):
    assert recording.run("race", path, 8, 200) == [0] * 8
    assert sorted(indices(path)) == list(range(1600))
    assert store.read(path).damaged == ()
    assert litter(path.parent) == []
    for writer in range(8):
        own = [i for i in indices(path) if i // 200 == writer]
        assert own == sorted(own)


@pytest.mark.parametrize("seed", [1])
def test_ten_kills_lose_nothing_finished(path, seed):
    turns = recording.run("resume", path, 150, seed)
    assert [turn["status"] for turn in turns[-1:]] == [0]
    assert any(turn["status"] == -9 for turn in turns)
    before = 0
    for turn in turns:
        # What was in flight may have reached the file before the writer could say so.
        assert turn["found"] - before - turn["acknowledged"] in (0, 1)
        before = turn["found"]
    assert indices(path) == list(range(150))
    assert litter(path.parent) == []


@pytest.mark.parametrize(
    ("what", "end"), [("append", b""), ("append", TORN), ("quarantine", b"x\n\xff\n")]
)
def test_a_kill_before_any_line_of_a_writer_loses_nothing(filled, memory, monkeypatch, what, end):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    sound = filled.read_bytes()
    filled.write_bytes(sound + end)
    folder = memory / "killed"
    folder.mkdir()
    count = recording.run("every_line", folder, filled, what)
    assert count > 20
    for number in range(count):
        path = folder / str(number) / NAME
        assert path.read_bytes().startswith(sound)
        store.append(path, recording.record(2000))
        store.quarantine(path)
        assert indices(path) in ([0, 1, 2, 2000], [0, 1, 2, 1000, 2000])
        kept = [entry["text"] for entry in aside(path)] if end else []
        assert "\n".join(kept).encode("utf-8", "surrogateescape") == end.rstrip(b"\n")
        assert set(litter(path.parent)) <= {f"{NAME}.damaged"}


def test_a_full_disk_leaves_the_file_as_it_was(filled):
    seen = recording.run("full", filled)
    assert set(seen) == {errno.EFBIG}
    assert indices(filled) == [0, 1, 2, 1000]
    assert litter(filled.parent) == []


@pytest.mark.parametrize("where", [(os, "fsync"), (os, "replace"), (shutil, "copyfile")])
@pytest.mark.parametrize("end", [b"", TORN])
def test_a_failure_at_any_step_leaves_no_trace(filled, monkeypatch, where, end):
    with filled.open("ab") as handle:
        handle.write(end)
    before = filled.read_bytes()

    def no_room(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*where, no_room)
        with pytest.raises(OSError, match="No space left"):
            store.append(filled, recording.record(3))
    assert filled.read_bytes() == before
    assert set(litter(filled.parent)) <= {f"{NAME}.damaged"}
    store.append(filled, recording.record(3))
    assert indices(filled) == [0, 1, 2, 3]


def test_what_a_dead_writer_left_is_ignored_and_removed(filled, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("not to be written over")
    (filled.parent / f".{NAME}.new").symlink_to(secret)
    assert indices(filled) == [0, 1, 2]
    store.append(filled, recording.record(3))
    assert indices(filled) == [0, 1, 2, 3]
    assert secret.read_text() == "not to be written over"
    assert litter(filled.parent) == []


def test_a_writer_that_waits_too_long_says_for_what(filled):
    with (
        store._locked(filled, 1.0),
        pytest.raises(TimeoutError, match=f"{NAME} was locked by another writer for 0.01 s"),
    ):
        store.append(filled, recording.record(3), timeout=0.01)
    store.append(filled, recording.record(3), timeout=0.01)
