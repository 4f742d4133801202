"""What is wrong with files of results, before they are published."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from jagbench.plain import safe
from jagbench.result import Ceiling, Record, ideal_seconds
from jagbench.store import Reading, damaged_path, file_name, read

#: Largest distance of the 20 and 80 % quantiles over the median that passes without a note.
SPREAD = 0.05

#: Claims read in public documents, which are no records (`jagbench.published`).
CLAIMS = "published.jsonl"

#: What no published string may hold, and what it is.
PRIVATE = (
    (
        "a path of a machine",
        re.compile(
            r"(?<![\w.])/(?:home|root|Users|tmp|var|opt|mnt|srv|data|scratch|workspace)(?:/|\b)"
            r"|(?<![A-Za-z])[A-Za-z]:\\|~/"
        ),
    ),
    (
        "an address",
        re.compile(r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\d.])"),
    ),
    ("a user at a host", re.compile(r"[A-Za-z_][\w.+-]+@[A-Za-z][\w-]+")),
    (
        "a host name",
        re.compile(r"\bip-\d+-\d+-\d+-\d+\b|\b[A-Za-z][\w-]*\.(?:internal|lan|corp|localdomain)\b"),
    ),
)  # fmt: skip

#: Fields that hold a version, which may have four numbers as an address has.
VERSIONS = re.compile(
    r"(who\.version|provenance\.(jagbench|python|torch|triton|numpy|driver|cuda))"
)


@dataclass(frozen=True)
class Problem:
    """One finding; line: 0 where it is about the file. A "note" leaves the file fit to publish."""

    path: Path
    line: int
    severity: Literal["error", "note"]
    text: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else f"{self.path}"
        return safe(f"{place}: {self.severity}: {self.text}")


Finding = tuple[Literal["error", "note"], str]


def verify(paths: Iterable[Path | str], *, host_names: Collection[str] = ()) -> list[Problem]:
    """Problems of files of records, by file and line; of a folder, every `.jsonl` but the claims.

    host_names: further words that no string may hold, such as this machine's name.
    """
    problems: list[Problem] = []
    for path in _files(paths):
        try:
            reading = read(path)
        except OSError as error:
            problems.append(Problem(path, 0, "error", f"cannot be read: {error.strerror}"))
            continue
        found = [(0, finding) for finding in _of_file(path)]
        found += [(one.line, ("error", one.reason)) for one in reading.damaged]
        found += _of_order(reading)
        for line, record in zip(reading.lines, reading.records, strict=True):
            found += [(line, finding) for finding in _of_record(path, record, host_names)]
        found.sort(key=lambda one: one[0])
        problems += [Problem(path, line, *finding) for line, finding in found]
    return problems


def _files(paths: Iterable[Path | str]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from (p for p in sorted(path.rglob("*.jsonl")) if p.name != CLAIMS)
        else:
            yield path


def _of_file(path: Path) -> Iterator[Finding]:
    aside = damaged_path(path)
    if aside.exists():
        count = aside.read_bytes().count(b"\n")
        lines = "line" if count == 1 else "lines"
        yield "note", f"{count} {lines} set aside in {aside.name}"
    if path.stat().st_size == 0:
        yield "note", "no records"


def folded(problems: Iterable[Problem]) -> list[str]:
    """Problems as lines of text; notes of one wording in one file share a line, errors never."""
    lines: dict[tuple[object, ...], list[Problem]] = {}
    for number, problem in enumerate(problems):
        apart = number if problem.severity == "error" else None
        lines.setdefault((problem.path, problem.text, apart), []).append(problem)
    return [
        str(first) if not more else f"{first} (and {len(more)} more, to line {more[-1].line})"
        for first, *more in lines.values()
    ]


def _of_order(reading: Reading) -> Iterator[tuple[int, Finding]]:
    seen: dict[tuple[str, ...], dict[str, int]] = {}
    sessions: dict[int, str] = {}
    for line, record in zip(reading.lines, reading.records, strict=True):
        sessions[line] = record.session
        lines = seen.setdefault(record.key, {})
        opposite = {"measured": "wrong", "wrong": "measured"}.get(record.outcome, "")
        if opposite in lines:
            yield line, ("error", f"{record.outcome}, but line {lines[opposite]}, of the same "
                         f"case, code and place, is {opposite}")  # fmt: skip
        # Two of one session are the two series of `--against` itself.
        elif lines and record.session not in {sessions[other] for other in lines.values()}:
            yield line, ("note", f"same case, code and place as line {min(lines.values())}")
        lines.setdefault(record.outcome, line)
    for (_, before), (line, after) in pairwise(zip(reading.lines, reading.records, strict=True)):
        if after.date < before.date:
            yield line, ("note", f"older than the record before it: {after.date.isoformat()}")


def _of_record(path: Path, record: Record, host_names: Collection[str]) -> Iterator[Finding]:
    yield from _of_names(path, record)
    yield from _of_strings(record, host_names)
    place = record.provenance
    if place.commit is None:
        yield "error", "no commit"
    elif place.dirty:
        yield "error", f"files differed from commit {place.commit[:12]}"
    elif place.dirty is None:
        yield "note", f"not known whether files differed from commit {place.commit[:12]}"
    if record.outcome == "measured":
        yield from _of_times(record)


def _of_names(path: Path, record: Record) -> Iterator[Finding]:
    path = path.resolve()
    if path.name != file_name(record.who.name):
        yield "error", f"{record.who.name!r} belongs into {file_name(record.who.name)}"
    if path.parent.name != record.hardware:
        yield "error", f"hardware {record.hardware!r} in a folder named {path.parent.name!r}"
    if record.provenance.hardware != record.hardware:
        yield "error", f"hardware {record.hardware!r} of device {record.provenance.device!r}"


def _of_strings(record: Record, host_names: Collection[str]) -> Iterator[Finding]:
    words = tuple(name for name in host_names if name not in ("", "localhost"))
    for field, text in _strings("", record.model_dump(mode="json")):
        for what, pattern in PRIVATE:
            found = pattern.search(text)
            if found and not (what == "an address" and VERSIONS.fullmatch(field)):
                yield "error", f"{field} holds {what}: {found.group()!r}"
        for word in words:
            if re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text):
                yield "error", f"{field} holds a host name: {word!r}"


def _strings(field: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every string under a value with the dotted name of its field; keys count as strings."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            # Keys of the model are ours; those of a mapping inside it came from an implementation.
            if field == "configuration":
                yield field, key
            yield from _strings(f"{field}.{key}".lstrip("."), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(field, inner)


def _of_times(record: Record) -> Iterator[Finding]:
    timing = record.timing
    if timing is None:
        return
    floor = ideal_seconds(record.work, _best(record))
    if floor is not None and timing.seconds < floor:
        yield "error", f"{timing.seconds:.4g} s, below the physical floor of {floor:.4g} s"
    if timing.spread > SPREAD:
        yield "note", f"samples spread by {timing.spread:.1%} of their median"


def _best(record: Record) -> Ceiling | None:
    """The higher rate of each kind that the record's ceilings give; None without a ceiling."""
    ceilings = [c for c in (record.datasheet, record.measured_ceiling) if c is not None]
    if not ceilings:
        return None
    return Ceiling(
        flop_per_second=max(c.flop_per_second or 0 for c in ceilings) or None,
        bytes_per_second=max(c.bytes_per_second or 0 for c in ceilings) or None,
        source="best of both",
        date=ceilings[0].date,
    )
