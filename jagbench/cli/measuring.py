"""Measure for `jagbench run`: one run a device at a time, progress for a person, interruption."""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from jagbench import store
from jagbench.plain import safe
from jagbench.reference import OPERATORS
from jagbench.result import Record, hardware_name
from jagbench.run import WorkerFailure, finished_keys
from jagbench.run import run as run_request
from jagbench.worker import Request

FAILURES = ("wrong", "crashed", "timed out", "out of memory", "invalid")


def measure_all(
    request: Request,
    names: Sequence[str],
    results: Path,
    time_limit: float,
    *,
    retry: bool = False,
    again: bool = False,
) -> int:
    """Measure each implementation named as the request says; the exit code.

    retry: measure again what failed before. again: measure everything again.
    """
    console = Console()
    counts: Counter[str] = Counter()
    status = 0
    try:
        with device_lock(request.device), _progress(console) as progress:
            watcher = _Watcher(console, counts, progress)
            for name in names:
                try:
                    run_request(
                        _of_implementation(request, name, results, retry, again),
                        results,
                        time_limit=time_limit,
                        on_start=watcher.start,
                        on_record=watcher.record,
                        on_skip=watcher.skip,
                    )
                except (WorkerFailure, ValueError, OSError) as error:
                    _say(f"error: {error}")
                    status = 1
            status = int(bool(status or watcher.skipped))
    finally:
        total = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        click.echo(f"{total or 'nothing new to measure'}; records under {os.fspath(results)}")
    return status or int(any(counts[name] for name in FAILURES))


class _Watcher:
    """Shows a person what happens, and counts it."""

    def __init__(self, console: Console, counts: Counter[str], progress: Progress | None) -> None:
        self.skipped = 0
        self._console = console
        self._counts = counts
        self._progress = progress
        self._task = progress.add_task("starting", total=None) if progress else TaskID(0)

    def start(self, record: Record) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=escape(title(record)))

    def record(self, record: Record, path: Path) -> None:
        self._counts[record.outcome] += 1
        shown = line(record)
        self._console.print(shown, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def skip(self, name: str, reason: str) -> None:
        self.skipped += 1
        _say(f"error: {name} is skipped: {reason}")


def _progress(console: Console) -> Any:
    """A spinner on a terminal; elsewhere nothing."""
    if not console.is_terminal:
        return nullcontext()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True)


def _say(text: str) -> None:
    click.echo(safe(text), err=True)


def _of_implementation(
    request: Request, name: str, results: Path, retry: bool, again: bool
) -> Request:
    """The request for one implementation, with the keys of what its file holds already."""
    from jagbench.environment import provenance

    hardware = provenance(request.device).hardware
    # One session a process: samples of one session were taken side by side.
    asked = dataclasses.replace(request, implementation=name, session=secrets.token_hex(4))
    if again:
        return asked
    known: list[Record] = []
    for each in sorted({name, request.against or name}):
        path = store.path_for(results, hardware, each)
        known += store.read(path).records if path.exists() else ()
    kept = [record for record in known if not (retry and record.outcome in FAILURES)]
    return dataclasses.replace(asked, finished=tuple(sorted(finished_keys(kept, asked))))


@contextmanager
def device_lock(device: str) -> Iterator[None]:
    """The only run of this user on a device: two at once would measure each other.

    A second one says so and waits. The system gives the lock back when its holder dies.
    """
    # Not on Windows, where everything else still works.
    import fcntl

    folder = Path(tempfile.gettempdir()) / f"jagbench-device-{os.getuid()}"
    try:
        folder.mkdir(exist_ok=True)
        file = (folder / hardware_name(_identity(device))).open("w")
    except OSError as error:
        raise click.UsageError(f"no lock for {device}: {error}") from error
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another run measures on {device}; waiting for its end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _identity(device: str) -> str:
    """A GPU by its own number: its index depends on what CUDA_VISIBLE_DEVICES lets be seen."""
    import torch

    if device == "cpu":
        return device
    place = torch.device(device)
    index = torch.cuda.current_device() if place.index is None else place.index
    return f"cuda {getattr(torch.cuda.get_device_properties(index), 'uuid', index)}"


@contextmanager
def interruptible() -> Iterator[None]:
    """Within: an interrupt, a hang-up or a request to end leaves by exit code 130, cleaned up."""
    before: dict[int, Any] = {}
    # Handlers belong to the main thread. What is ignored (by nohup) stays so.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(number) is not signal.SIG_IGN and number not in before:
                before[number] = signal.signal(number, _interrupt)
    try:
        yield
    except KeyboardInterrupt:
        click.echo("interrupted; what was finished is kept", err=True)
        sys.exit(130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def title(record: Record) -> str:
    """Who and which case, on one harmless line."""
    case = record.case
    preparation = f"preparation {case.preparation}" if case.preparation != "none" else ""
    return safe(
        f"{record.who.name} {case.workload} {case.dtype} {case.region} {case.mode} {preparation}"
    ).rstrip()


def _rates(record: Record) -> list[str]:
    """Rate and share of the ceiling; of what memory binds, GB/s and share of the copy's rate."""
    operator, ceiling = OPERATORS.get(record.case.operator), record.measured_ceiling
    if operator is not None and operator.bandwidth_bound:
        speed, copied = record.bytes_per_second, ceiling.bytes_per_second if ceiling else None
        share = f"{speed / copied:.2g} of the bandwidth floor" if speed and copied else ""
        return [f"{speed / 1e9:.4g} GB/s", *([share] if share else [])] if speed else []
    if not record.flop_per_second:
        return []
    found = record.share(ceiling)
    share = "" if found is None else f"{found:.2g} of the measured ceiling"
    return [f"{record.flop_per_second / 1e12:.3g} TFLOP/s", *([share] if share else [])]


def line(record: Record) -> str:
    """One record for a person, on one harmless line."""
    if record.timing is None:
        return safe(f"{title(record)}: {record.outcome}: {record.reason}")
    parts = [f"{record.timing.seconds * 1e3:.4g} ms"]
    if record.case.preparation != "alone":
        parts += _rates(record)
    parts += [f"{record.outcome}: {record.reason}"] if record.reason else []
    parts += [*record.flags, *([record.timing.unmet] if record.timing.unmet else [])]
    return safe(f"{title(record)}: {'; '.join(parts)}")
