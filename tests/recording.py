"""Records for the tests of results; as a script, writers that race, are killed, or lack room.

The script runs in a process without torch or threads, so that it may fork. It prints JSON.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from jagbench import result, store

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WORK = {"flop": 4000, "model_flop": 3000, "bytes_moved": 2000, "sequences": 8, "tokens": 640}


def tree(index=0, **changes):
    """A measured record as JSON holds it; `who__name="x"` changes `name` in `who`."""
    made = {
        "schema_version": 1,
        "date": (datetime(2026, 1, 2, tzinfo=UTC) + timedelta(seconds=index)).isoformat(),
        "session": "0a1b2c3d",
        "hardware": "nvidia-h200",
        "who": {"name": "jagbench.impl", "version": "0.1", "source": "00112233aabbccdd"},
        "case": {
            "operator": "gdpa",
            "workload": f"case-{index}",
            "digest": "d1",
            "dtype": "bfloat16",
            "region": "forward",
            "mode": "cold",
            "preparation": "included",
        },
        "outcome": "measured",
        "work": dict(WORK),
        "timing": {"samples_seconds": [0.003, 0.001, 0.002], "clock": "cuda events"},
        "provenance": {
            "jagbench": "0.1",
            "commit": COMMIT,
            "dirty": False,
            "python": "3.11.7",
            "torch": "2.13.0",
            "triton": "3.7.1",
            "numpy": "2.4.6",
            "platform": "Linux x86_64",
            "device": "NVIDIA H200",
            "driver": "580.82.07",
            "cuda": "13.0",
        },
    }
    for place, value in changes.items():
        *folders, last = place.split("__")
        inner = made
        for folder in folders:
            inner = inner[folder]
        inner[last] = value
    return made


#: What of the store touches files; its other functions only compute.
ON_DISK = {
    function.__code__
    for function in (
        store.append_all, store.quarantine, store._locked.__wrapped__, store._mended,
        store._set_aside, store._replace, store._sync_folder,
    )
}  # fmt: skip


def record(index=0, **changes):
    return result.Record.model_validate(tree(index, **changes))


def run(*arguments):
    """This file as a script, in a process of its own; what it printed."""
    import subprocess

    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _forked(work):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def _died(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def race(path, writers, count):
    # What is tested is the lock; 1600 syncs of a slow disk would only take their time.
    os.fsync = lambda descriptor: None

    def write(first):
        for index in range(first, first + count):
            store.append(path, record(index))

    children = [_forked(lambda n=n: write(n * count)) for n in range(writers)]
    return [_died(child) for child in children]


def resume(path, total, seed):
    """Runs killed at ten random times, then one to the end; records promised by each."""
    draw = random.Random(seed)
    promised = []
    for turn in range(11):
        reader, writer = os.pipe()

        def write(writer=writer):
            done = store.finished(path)
            for index in range(total):
                if record(index).key not in done:
                    store.append(path, record(index))
                    os.write(writer, b".")

        child = _forked(write)
        os.close(writer)
        if turn < 10:
            time.sleep(draw.uniform(0.0, 0.06))
            os.kill(child, signal.SIGKILL)
        status = _died(child)
        acknowledged = 0
        while block := os.read(reader, 4096):
            acknowledged += len(block)
        os.close(reader)
        found = len(store.read(path).records) if Path(path).exists() else 0
        promised.append({"status": status, "acknowledged": acknowledged, "found": found})
    return promised


def every_line(folder, sample, what):
    """A writer killed before each line that it runs on disk; the number of folders made."""
    os.fsync = lambda descriptor: None
    for number in range(10_000):
        path = Path(folder) / str(number) / "jagbench.impl.jsonl"
        path.parent.mkdir()
        shutil.copy(sample, path)
        left = number

        def trace(frame, event, argument):
            nonlocal left
            if frame.f_code not in ON_DISK:
                return None
            if event == "line":
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
            return trace

        def work(path=path, trace=trace):
            sys.settrace(trace)
            if what == "append":
                store.append(path, record(1000))
            else:
                store.quarantine(path)

        if _died(_forked(work)) == 0:
            return number + 1
    raise AssertionError("the writer never came to its end")


def full(path):
    """Appends with room for fewer bytes than the file needs, one limit after the other."""
    # A file past this limit fails as on a full disk, halfway through a write.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size, line = Path(path).stat().st_size, len(store.encode(record(1000)))
    before, seen = Path(path).read_bytes(), []
    for limit in (0, 1, size // 2, size, *range(size + 1, size + line, 97)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            store.append(path, record(1000))
            seen.append("appended")
        except OSError as error:
            seen.append(error.errno)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert Path(path).read_bytes() == before
    store.append(path, record(1000))
    return seen


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    value = {"race": race, "resume": resume, "every_line": every_line, "full": full}[name](
        *(int(word) if word.isdigit() else word for word in rest)
    )
    assert "torch" not in sys.modules
    print(json.dumps(value))
