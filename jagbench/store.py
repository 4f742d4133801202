"""Results on disk: JSON lines, one record a line, append-only.

A record gets in like this: under a lock the file is copied beside itself, the line is added to the
copy, the copy is synced and renamed over the file. Readers see the old file or the new one and take
no lock. A killed writer leaves at most a copy that the next one removes, a full disk spoils only
the copy, and the kernel drops a dead writer's lock. Copying costs time in proportion to the file:
a few milliseconds for a thousand records, little beside measuring one.

Lines are data: JSON, then checked against the model. Nothing in them is executed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jagbench.result import SCHEMA_VERSION, Outcome, Record, hardware_name

#: Longest line that is parsed, in bytes. A record with 10 000 samples takes a quarter of a MiB.
LINE_LIMIT = 16 * 2**20

Tree = dict[str, Any]

#: version -> what turns a line of that version into one of the next. Never remove an entry.
UPGRADERS: Mapping[int, Callable[[Tree], Tree]] = {}


class NewerSchemaError(ValueError):
    """A line of a later jagbench: sound perhaps, but not for this one to judge."""


@dataclass(frozen=True)
class Damaged:
    """A line that is no record.

    line: its number, from 1. data: its bytes without the newline. newer: it is of a schema version
        this jagbench does not know yet, and is left where it is.
    """

    line: int
    reason: str
    data: bytes = field(repr=False)
    newer: bool = False

    @property
    def text(self) -> str:
        """Its first 200 bytes, safe to print; HTML must escape it."""
        return _printable(self.data[:200].decode("utf-8", "backslashreplace"))


@dataclass(frozen=True)
class Reading:
    """What a file holds, in its order; `lines` are the line numbers of the records."""

    records: tuple[Record, ...]
    damaged: tuple[Damaged, ...]
    lines: tuple[int, ...]


def path_for(root: Path | str, hardware: str, implementation: str) -> Path:
    """Where records of an implementation go: `<root>/<hardware>/<implementation>.jsonl`.

    A name that is no plain file name is simplified and told apart by a hash:
    "package.module:v1" -> "package.module-v1-0123456789ab.jsonl".
    Raises ValueError where `hardware` is not as `jagbench.result.hardware_name` makes it.
    """
    if hardware != hardware_name(hardware):
        raise ValueError(f"hardware {hardware!r} should be {hardware_name(hardware)!r}")
    return Path(root) / hardware / file_name(implementation)


def file_name(implementation: str) -> str:
    """Name of the file of an implementation; different names give different files.

    Two names that differ in case alone do so too, for file systems that fold it.
    """
    plain = re.sub(r"[^a-z0-9._-]+", "-", implementation.lower()).strip("._-")[:100]
    # A plain name that looks hashed, or that Windows reserves, could meet another's file.
    taken = re.search(r"-[0-9a-f]{12}$|^(con|prn|aux|nul|com\d|lpt\d)(\.|$)", plain)
    if plain and plain == implementation and not taken:
        return f"{plain}.jsonl"
    digest = hashlib.sha256(implementation.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{plain or 'unnamed'}-{digest}.jsonl"


def encode(record: Record) -> bytes:
    """The line of a record, newline included.

    Raises ValueError where it would not read back as the same record: made without validation,
    with a NaN inside, or with text that is no Unicode.
    """
    line = record.model_dump_json(warnings="error").encode()
    if decode(line) != record:
        raise ValueError(f"the record does not read back as itself: {line[:200]!r}")
    return line + b"\n"


def decode(data: bytes) -> Record:
    """The record of a line, of whatever schema version up to this one.

    Raises ValueError with the reason where it is none, NewerSchemaError where it is of a later one.
    """
    if len(data) > LINE_LIMIT:
        raise ValueError(f"too long: {len(data)} bytes, more than {LINE_LIMIT}")
    try:
        tree = json.loads(
            data.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_no_repeats
        )
        current = _upgraded(tree)
        # The line itself where nothing was changed: no second encoding between it and the model.
        given = data if current is tree else json.dumps(current)
        return Record.model_validate_json(given, strict=True)
    except NewerSchemaError:
        raise
    except ValidationError as error:
        raise ValueError(_first(error)) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("not a record: nested too deeply") from None


def read(path: Path | str, *, name: str | None = None) -> Reading:
    """All records of a file, and the lines that are none with the reason of each.

    A file cut anywhere reads up to the cut. Raises ValueError where `name` is given and a record is
    of an implementation with another name, FileNotFoundError where there is no file.
    """
    records: list[Record] = []
    lines: list[int] = []
    damaged: list[Damaged] = []
    with open(path, "rb") as handle:
        for number, data in _numbered(handle):
            found = _judged(number, data)
            if isinstance(found, Damaged):
                damaged.append(found)
                continue
            if name is not None and found.who.name != name:
                raise ValueError(f"{path}, line {number}: {found.who.name!r}, expected {name!r}")
            records.append(found)
            lines.append(number)
    return Reading(tuple(records), tuple(damaged), tuple(lines))


def finished(path: Path | str, *, again: Collection[Outcome] = ()) -> frozenset[tuple[str, ...]]:
    """Keys that a resumed run need not measure; outcomes in `again` do not count as finished.

    Empty where there is no file yet.
    """
    try:
        records = read(path).records
    except FileNotFoundError:
        return frozenset()
    return frozenset(record.key for record in records if record.outcome not in again)


def append(path: Path | str, record: Record, *, timeout: float = 60.0) -> None:
    """Add one record; `append_all` for many."""
    append_all(path, (record,), timeout=timeout)


def append_all(path: Path | str, records: Iterable[Record], *, timeout: float = 60.0) -> None:
    """Add records, all or none; when this returns they are on the disk.

    A torn last line is moved to `<file>.damaged` first.

    timeout: seconds to wait for other writers.
    Raises ValueError for a record that `encode` refuses or a file that is another implementation's;
    TimeoutError; OSError, for instance of a full disk, with the file as it was.
    """
    records = tuple(records)
    lines = b"".join(map(encode, records))
    if not records:
        return
    # Renaming over a symbolic link would leave what it points at behind.
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, timeout):
        _refuse_strangers(path, records)
        kept, between = _mended(path)
        _replace(path, kept, between + lines)


def quarantine(path: Path | str, *, timeout: float = 60.0) -> tuple[Damaged, ...]:
    """Move every damaged line to `<file>.damaged`, with its reason; what was moved.

    The other lines keep their bytes. Lines of a newer schema are no damage and stay.
    """
    path = Path(os.path.realpath(path))
    with _locked(path, timeout):
        moved = tuple(one for one in read(path).damaged if not one.newer)
        if moved:
            _set_aside(path, moved)
            gone = {one.line for one in moved}
            with path.open("rb") as handle:
                kept = [data for number, data in _numbered(handle) if number not in gone]
            _replace(path, 0, b"".join(data + b"\n" for data in kept))
    return moved


def damaged_path(path: Path | str) -> Path:
    """Where lines set aside go: JSON lines of `line`, `reason` and `text`.

    Bytes that are no UTF-8 are lone surrogates in `text` (Python's "surrogateescape").
    """
    return Path(path).with_name(Path(path).name + ".damaged")


def _numbered(handle: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank with their numbers; only a line feed ends one."""
    for number, line in enumerate(handle, start=1):
        data = line.removesuffix(b"\n")
        if data.strip():
            yield number, data


def _judged(number: int, data: bytes) -> Record | Damaged:
    try:
        return decode(data)
    except ValueError as error:
        reason = _printable(str(error))
        return Damaged(number, reason, data, newer=isinstance(error, NewerSchemaError))


def _upgraded(tree: Any) -> Tree:
    if not isinstance(tree, dict):
        raise ValueError("not a record: no JSON object")
    version = tree.get("schema_version")
    if type(version) is not int:
        raise ValueError(f"not a record: schema_version is {version!r}")
    if version > SCHEMA_VERSION:
        raise NewerSchemaError(f"schema version {version} is newer than {SCHEMA_VERSION}")
    upgraded: Tree = tree
    for old in range(version, SCHEMA_VERSION):
        if old not in UPGRADERS:
            raise ValueError(f"not a record: no schema version {old}")
        try:
            upgraded = UPGRADERS[old](upgraded)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"not of schema version {old}: {error!r}") from None
    return upgraded


def _no_constant(literal: str) -> float:
    raise ValueError(f"not JSON: {literal}")


def _no_repeats(pairs: Sequence[tuple[str, Any]]) -> Tree:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"repeated: {next(n for n in names if names.count(n) > 1)!r}")
    return tree


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(map(str, found["loc"])) or "record"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{place}: {found['msg']}{more}"


def _printable(text: str) -> str:
    """At most 300 characters, none of which moves a cursor or breaks a line."""
    shown = text if len(text) <= 300 else text[:299] + "…"
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown
    )


@contextlib.contextmanager
def _locked(path: Path, timeout: float) -> Iterator[None]:
    """The only writer of a file. The lock file stays: removing it would let two in."""
    # Not on Windows, where reading still works.
    import fcntl

    lock = path.with_name(f".{path.name}.lock")
    deadline = time.monotonic() + timeout
    with lock.open("ab") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    waited = f"{path.name} was locked by another writer for {timeout} s"
                    raise TimeoutError(errno.ETIMEDOUT, waited, str(lock)) from None
                time.sleep(0.001)
        # Closing the handle unlocks, and so does dying.
        yield


def _refuse_strangers(path: Path, records: Sequence[Record]) -> None:
    """A file that bears the name of an implementation is for that one alone."""
    names = {record.who.name for record in records}
    first = _first_name(path)
    owner = next((n for n in (first, *sorted(names)) if n and file_name(n) == path.name), None)
    if owner is not None and names != {owner}:
        strangers = sorted(names - {owner})
        raise ValueError(f"{path.name} is for records of {owner!r}, not of {strangers}")


def _first_name(path: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as handle:
        for number, data in _numbered(handle):
            found = _judged(number, data)
            if isinstance(found, Record):
                return found.who.name
    return None


def _mended(path: Path) -> tuple[int, bytes]:
    """Bytes of the file to keep, and what goes between them and the next line."""
    if not path.exists() or path.stat().st_size == 0:
        return 0, b""
    with path.open("rb") as handle:
        size = handle.seek(-1, os.SEEK_END) + 1
        if handle.read() == b"\n":
            return size, b""
        handle.seek(0)
        whole = handle.read()
    start = whole.rfind(b"\n") + 1
    found = _judged(whole.count(b"\n") + 1, whole[start:])
    if isinstance(found, Record) or found.newer:
        return size, b"\n"
    _set_aside(path, (replace(found, reason=f"no newline; {found.reason}"),))
    return start, b""


def _set_aside(path: Path, damaged: Sequence[Damaged]) -> None:
    """Keep damaged lines beside the file; done twice, after a kill in between, it adds nothing."""
    aside = damaged_path(path)
    there = aside.read_bytes() if aside.exists() else b""
    known = set(there.splitlines())
    more = b""
    for one in damaged:
        text = one.data.decode("utf-8", "surrogateescape")
        line = json.dumps({"line": one.line, "reason": one.reason, "text": text}).encode()
        more += b"" if line in known else line + b"\n"
    _replace(aside, len(there), more)


def _replace(path: Path, kept: int, more: bytes) -> None:
    """Put the first `kept` bytes of a file and `more` in its place, in one step.

    The caller holds the lock, so a temporary file that is there already is a dead writer's.
    """
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        if kept:
            shutil.copyfile(path, temporary)
        with temporary.open("r+b" if kept else "xb") as handle:
            handle.truncate(kept)
            handle.seek(kept)
            handle.write(more)
            handle.flush()
            os.fsync(handle.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    # The rename is done; some file systems cannot sync a folder, and need not.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
