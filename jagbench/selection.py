"""Choose the records of one side of a comparison by a few words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jagbench import store
from jagbench.result import Record, hardware_name

#: Digits of a commit that are shown.
_DIGITS = 8


@dataclass(frozen=True)
class Selection:
    """Records of one side.

    label: what they are, in words. notes: what was found beside them (damaged lines of a file).
    """

    label: str
    records: tuple[Record, ...]
    notes: tuple[str, ...] = ()


def resolve(text: str, records: Sequence[Record]) -> Selection:
    """Records that a text names, among `records` unless it names a file.

    "path/to/file.jsonl": all records of a file. "hardware:NAME": all of one device. "NAME": all of
    one implementation; "HARDWARE/NAME": those of one device. A commit narrows the last two:
    "NAME@4a5f1cf" takes the records of the one commit that begins so.

    Raises ValueError where nothing or more than one commit answers, with what there is.
    """
    path = Path(text)
    if path.suffix == ".jsonl" or path.is_file():
        return _of_file(path)
    if text.startswith("hardware:"):
        return _of_hardware(text.removeprefix("hardware:"), records)
    name, _, commit = text.partition("@")
    chosen = _of_implementation(name, records)
    if commit or text.endswith("@"):
        chosen = _of_commit(name, commit, chosen)
    return Selection(text, tuple(chosen))


def describe(records: Sequence[Record]) -> str:
    """Records in words: "jagbench.impl on nvidia-h200 at 4a5f1cf2"."""
    if not records:
        return "no records"
    names = _listed(record.who.name for record in records)
    hardware = _listed(record.hardware for record in records)
    commits = {_commit(record) for record in records}
    at = f"at {commits.pop()}" if len(commits) == 1 else f"at {len(commits)} commits"
    return f"{names} on {hardware} {at}"


def _of_file(path: Path) -> Selection:
    try:
        reading = store.read(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    if not reading.records:
        raise ValueError(f"{path} holds 0 records and {len(reading.damaged)} damaged lines")
    notes = [f"{path.name}, line {d.line}: damaged: {d.reason}" for d in reading.damaged]
    return Selection(f"{describe(reading.records)} ({path.name})", reading.records, tuple(notes))


def _of_hardware(name: str, records: Sequence[Record]) -> Selection:
    wanted = hardware_name(name)
    chosen = tuple(record for record in records if record.hardware == wanted)
    if not chosen:
        there = _counted(record.hardware for record in records)
        raise ValueError(f"no records of hardware {name!r}; there are: {there}")
    return Selection(f"hardware:{wanted}", chosen)


def _of_implementation(name: str, records: Sequence[Record]) -> list[Record]:
    """By the plain name first: a name may hold a slash."""
    chosen = [record for record in records if record.who.name == name]
    hardware, slash, rest = name.partition("/")
    if not chosen and slash:
        chosen = [
            r for r in records if r.hardware == hardware_name(hardware) and r.who.name == rest
        ]
    if not chosen:
        there = _counted(f"{record.hardware}/{record.who.name}" for record in records)
        raise ValueError(f"no records of implementation {name!r}; there are: {there}")
    return chosen


def _of_commit(name: str, commit: str, records: Sequence[Record]) -> list[Record]:
    wanted = commit.lower()
    known = {r.provenance.commit for r in records if r.provenance.commit}
    found = [one for one in known if wanted and one.startswith(wanted)]
    if len(found) != 1:
        there = _counted(_commit(record) for record in records)
        raise ValueError(
            f"{len(found)} commits of {name} begin with {commit!r}, want 1; there are: {there}"
        )
    return [record for record in records if record.provenance.commit == found[0]]


def _commit(record: Record) -> str:
    commit = record.provenance.commit
    return commit[:_DIGITS] if commit else "no known commit"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


def _counted(names: Iterable[str]) -> str:
    counts = Counter(names)
    return ", ".join(f"{name} ({counts[name]} records)" for name in sorted(counts)) or "none"
