"""Run measurements: one worker process an implementation, results kept as they come.

A worker that hangs is killed after the time limit, one that dies is replaced; the case in flight
gets its outcome, the rest goes on. Interrupting keeps what is finished. What comes from a worker is
a stranger's word: a line that is none of the protocol's ends the worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from jagbench import store
from jagbench.plain import safe
from jagbench.result import Case, Outcome, Record, stand_beside
from jagbench.worker import Request

#: Lines of a dead worker's error output that its record keeps.
LINES_OF_ERROR = 6
#: Bytes at the end of it that are read for them.
TAIL_OF_ERROR = 1 << 16
#: Seconds until a worker must have started its first case: imports, compilers, big inputs.
START_LIMIT = 300.0
#: Seconds a worker that has nothing more to say may take to exit.
EXIT_LIMIT = 60.0
#: Seconds between looks at whether a silent worker still lives: its children may hold the pipe.
POLL = 1.0


class WorkerFailure(Exception):
    """A worker that ended without having measured anything new: its request is at fault."""


class _Stray(Exception):
    """A line in the result pipe that `jagbench.worker` did not write."""


def run(
    request: Request,
    results: Path,
    *,
    time_limit: float = 180.0,
    on_start: Callable[[Record], None] = lambda _: None,
    on_record: Callable[[Record, Path], None] = lambda _, __: None,
    on_skip: Callable[[str, str], None] = lambda _, __: None,
) -> list[Record]:
    """Measure what a request asks for and append each record to its file under `results`.

    time_limit: seconds a case may take before its worker is killed.
    on_skip: told the name and the reason of a workload that cannot be measured, once.
    Raises WorkerFailure where a worker ends before its first case, or where a case that has ended a
    worker already ends the next one too.
    """
    kept: list[Record] = []
    known: set[tuple[str, Case]] = set()
    ended: set[frozenset[tuple[str, Case]]] = set()
    on_skip = _once(on_skip)
    while True:
        finished = {*request.finished, *finished_keys(kept, request)}
        asked = dataclasses.replace(request, finished=tuple(sorted(finished)))
        worker = _Session(asked, time_limit, on_start, on_skip)
        before = len(kept)
        with contextlib.closing(worker.records()) as records:
            for record in records:
                if worker.failure:
                    _refuse_endless(worker.begun, ended)
                path = store.path_for(results, record.hardware, record.who.name)
                store.append(path, record)
                kept.append(record)
                on_record(record, path)
        new = {(record.who.name, record.case) for record in kept[before:]} - known
        if worker.failure is None:
            return kept
        if not new:
            raise WorkerFailure(f"{request.implementation}: {worker.failure[1]}")
        known |= new
        ended.add(_at_work(worker.begun))


def _once(callback: Callable[[str, str], None]) -> Callable[[str, str], None]:
    """The callback, called once for the same words: every new worker says them again."""
    said: set[tuple[str, str]] = set()

    def told(name: str, reason: str) -> None:
        if (name, reason) not in said:
            said.add((name, reason))
            callback(name, reason)

    return told


def _at_work(begun: Iterable[Record]) -> frozenset[tuple[str, Case]]:
    """Who was measured on what when a process ended."""
    return frozenset((record.who.name, record.case) for record in begun)


def _refuse_endless(begun: Sequence[Record], ended: set[frozenset[tuple[str, Case]]]) -> None:
    if begun and _at_work(begun) in ended:
        record = begun[0]
        raise WorkerFailure(
            f"{record.who.name}: {record.case.workload} has ended a second process, under another "
            f"key than before (version {record.who.version})"
        )


def finished_keys(records: Iterable[Record], request: Request) -> set[tuple[str, ...]]:
    """Keys of what the request need not measure again, as `Request.finished` has them.

    Of two implementations those that have records of one session: only these were taken side by
    side. An implementation against itself needs two of one key.
    """
    if request.against is None:
        return {record.key for record in records}
    groups: dict[tuple[str, Case], list[Record]] = defaultdict(list)
    for record in records:
        # What has nothing to prepare takes turns with what has: cases apart from that.
        alike = record.case.model_copy(update={"preparation": "none"})
        groups[record.session, alike].append(record)
    found: set[tuple[str, ...]] = set()
    for group in groups.values():
        mine = [record for record in group if record.who.name == request.implementation]
        if request.against == request.implementation:
            found.update(key * 2 for key, n in Counter(r.key for r in mine).items() if n > 1)
            continue
        others = [record for record in group if record.who.name == request.against]
        found.update(
            first.key + second.key
            for first in mine
            for second in others
            if stand_beside(first.case, second.case)
        )
    return found


class _Session:
    """What one worker says, understood.

    begun: cases started and not recorded by the worker. failure: outcome and reason of its end;
    None as long as it works, and if it ends by itself with everything said.
    """

    def __init__(
        self,
        request: Request,
        time_limit: float,
        on_start: Callable[[Record], None],
        on_skip: Callable[[str, str], None],
    ) -> None:
        self.begun: list[Record] = []
        self.failure: tuple[Outcome, str] | None = None
        self._recorded: list[Record] = []
        self._request = request
        self._time_limit = time_limit
        self._on_start = on_start
        self._on_skip = on_skip

    def records(self) -> Generator[Record]:
        """Its records; those of the cases it leaves open follow, with the failure as outcome."""
        outcome: Outcome
        with _Worker(self._request) as worker:
            limit = START_LIMIT
            try:
                while (line := worker.line(limit)) is not None:
                    if line == {"end": True} and not self.begun:
                        return
                    record = self._understood(line)
                    if record is not None:
                        yield record
                    limit = self._time_limit if self.begun else START_LIMIT
                outcome, reason = worker.end(limit)
            except _Stray as stray:
                outcome, reason = "crashed", f"wrote into the result pipe: {stray}"
                # What it wrote may have been taken for the record of the case before.
                self.begun = self.begun or self._recorded
        self.failure = outcome, reason
        for record in self.begun:
            yield record.model_copy(update={"outcome": outcome, "reason": reason})

    def _understood(self, line: dict[str, Any]) -> Record | None:
        """The record a line holds, None for another of the protocol. Raises _Stray."""
        match line:
            case {"start": tree, **rest} if not rest:
                self.begun.append(_record(tree))
                self._on_start(self.begun[-1])
                return None
            case {"record": tree, **rest} if not rest:
                record = _record(tree)
                begun = next((one for one in self.begun if one.key == record.key), None)
                if begun is not None:
                    self.begun.remove(begun)
                    self._recorded = [begun]
                    return record
            case {"skipped": str(name), "reason": str(reason), **rest} if not rest:
                self._on_skip(name, reason)
                return None
        raise _Stray(_brief(line))


def _record(tree: object) -> Record:
    try:
        return Record.model_validate(tree)
    except ValueError:
        raise _Stray(_brief(tree)) from None


def _brief(line: object) -> str:
    return safe(repr(line)[:80])


class _Worker:
    """A worker process in a group of its own, so that an interrupt reaches the parent alone."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._buffer = bytearray()
        self._lines: deque[bytes] = deque()
        self._ended = False

    def __enter__(self) -> _Worker:
        reader, writer = os.pipe()
        self._reader = reader
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        try:
            with tempfile.TemporaryFile() as asked:
                asked.write(self._request.to_json().encode())
                asked.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "jagbench.worker", str(writer), str(os.getpid())],
                    stdin=asked,
                    stdout=self._errors,
                    stderr=self._errors,
                    pass_fds=(writer,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(reader)
            self._errors.close()
            raise
        finally:
            os.close(writer)
        self._selector = selectors.DefaultSelector()
        self._selector.register(reader, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._selector.close()
        os.close(self._reader)
        self._errors.close()

    def line(self, limit: float) -> dict[str, Any] | None:
        """The next line; None if it does not come within the limit or the worker has ended.

        Raises _Stray where it is too long or no JSON object.
        """
        until = time.monotonic() + limit
        while not self._lines:
            left = until - time.monotonic()
            if self._selector.select(min(POLL, max(0.0, left))):
                if not self._take():
                    return None
            elif self._process.poll() is not None:
                # Its last words may have come in between.
                if not self._selector.select(0):
                    self._ended = True
                    return None
            elif left <= 0:
                return None
        data = self._lines.popleft()
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            raise _Stray(_brief(data[:80])) from None
        if not isinstance(found, dict):
            raise _Stray(_brief(data[:80]))
        return found

    def _take(self) -> bool:
        """Take what the pipe holds; False at its end. Raises _Stray for a line without an end."""
        data = os.read(self._reader, 1 << 16)
        self._ended = not data
        first, *more = data.split(b"\n")
        self._buffer += first
        for part in more:
            self._lines.append(bytes(self._buffer))
            self._buffer = bytearray(part)
        if max(len(self._buffer), *map(len, self._lines), 0) > store.LINE_LIMIT:
            raise _Stray(f"a line of more than {store.LINE_LIMIT} bytes")
        return bool(data)

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
        name = f"signal {_signal_name(-code)}" if code < 0 else f"exit status {code}"
        return "crashed", f"the process ended with {name}: {self._last_words()}"[:1500]

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - TAIL_OF_ERROR))
        said = self._errors.read(TAIL_OF_ERROR).decode(errors="replace").strip().splitlines()
        return " | ".join(map(safe, said[-LINES_OF_ERROR:]))

    def _kill(self) -> None:
        """End the group, whether or not its leader lives: children may hold the device."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)
