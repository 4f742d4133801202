"""Run measurements: one worker process an implementation, results kept as they come.

A worker that hangs is killed after the time limit, one that dies is replaced; the case in flight
gets its outcome, the rest goes on. Interrupting keeps what is finished.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from jagbench import store
from jagbench.result import Outcome, Record
from jagbench.worker import Request

#: Lines of a dead worker's error output that its record keeps.
LINES_OF_ERROR = 6
#: Seconds until a worker must have started its first case: imports, compilers, big inputs.
START_LIMIT = 300.0
#: Seconds a worker that has nothing more to say may take to exit.
EXIT_LIMIT = 60.0


@dataclasses.dataclass(frozen=True)
class WorkerFailure(Exception):
    """A worker that ended without having measured anything: its request is at fault."""

    text: str

    def __str__(self) -> str:
        return self.text


def run(
    request: Request,
    results: Path,
    *,
    time_limit: float = 180.0,
    on_start: Callable[[Record], None] = lambda _: None,
    on_record: Callable[[Record, Path], None] = lambda _, __: None,
) -> list[Record]:
    """Measure what a request asks for and append each record to its file under `results`.

    time_limit: seconds a case may take before its worker is killed.
    Raises WorkerFailure where a worker ends before its first case.
    """
    kept: list[Record] = []
    finished = set(request.finished)
    while True:
        asked = dataclasses.replace(request, finished=tuple(sorted(finished)))
        whole = True
        for record in _lines(asked, time_limit, on_start):
            path = store.path_for(results, record.hardware, record.who.name)
            store.append(path, record)
            kept.append(record)
            finished.add(record.key)
            on_record(record, path)
            whole = whole and record.outcome not in ("timed out",) and not _died(record)
        if whole:
            return kept


def _died(record: Record) -> bool:
    return record.outcome == "crashed" and (record.reason or "").startswith("the process")


def _lines(
    request: Request, time_limit: float, on_start: Callable[[Record], None]
) -> Iterator[Record]:
    """Records of one worker, the last one of its death if it did not end by itself."""
    begun: list[Record] = []
    with _Worker(request) as worker:
        limit = START_LIMIT
        while True:
            line = worker.line(limit)
            if line is None:
                break
            if "start" in line:
                begun.append(Record.model_validate(line["start"]))
                on_start(begun[-1])
                limit = time_limit
            elif "record" in line:
                record = Record.model_validate(line["record"])
                begun = [b for b in begun if b.key != record.key]
                yield record
                limit = START_LIMIT
            else:
                return
        outcome, reason = worker.end(limit)
    if not begun:
        raise WorkerFailure(f"{request.implementation}: {reason}")
    for record in begun:
        yield record.model_copy(update={"outcome": outcome, "reason": reason})


class _Worker:
    """A worker process in a group of its own, so that an interrupt reaches the parent alone."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._buffer = b""
        self._lines: list[bytes] = []
        self._ended = False

    def __enter__(self) -> _Worker:
        reader, writer = os.pipe()
        self._reader = reader
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jagbench.worker", str(writer)],
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self._request.to_json().encode())
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once: `line` finds the end, `end` says why
        self._selector = selectors.DefaultSelector()
        self._selector.register(reader, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._selector.close()
        os.close(self._reader)
        self._errors.close()

    def line(self, limit: float) -> dict[str, Any] | None:
        """The next line; None if it does not come within the limit or the worker has ended."""
        until = time.monotonic() + limit
        while not self._lines:
            if not self._selector.select(max(0.0, until - time.monotonic())):
                return None
            data = os.read(self._reader, 1 << 16)
            if not data:
                self._ended = True
                return None
            *self._lines, self._buffer = (self._buffer + data).split(b"\n")
        found: dict[str, Any] = json.loads(self._lines.pop(0))
        return found

    def end(self, limit: float) -> tuple[Outcome, str]:
        """Outcome and reason of a worker that sends no more lines."""
        if not self._ended:
            self._kill()
            return "timed out", f"no answer for {limit:.0f} s; the process was killed"
        # It closed the pipe and is on its way out, which on a busy machine takes seconds.
        try:
            code = self._process.wait(timeout=EXIT_LIMIT)
        except subprocess.TimeoutExpired:
            self._kill()
            code = -signal.SIGKILL
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        text = " | ".join(said[-LINES_OF_ERROR:])
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return "crashed", f"the process ended with {name}: {text}"[:1500]

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
