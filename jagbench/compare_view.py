"""Comparisons as text: a table on a terminal, plain lines elsewhere; names are never cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jagbench.compare import Comparison, FalseAlarms, Refused, Row
from jagbench.plain import safe
from jagbench.published import Claim
from jagbench.result import Case, Record

_STYLES = {"slower": "red", "faster": "green", "same": "", "undecided": "yellow"}


@dataclass(frozen=True)
class Line:
    """One implementation on one device, for one case; None where not known.

    kind: "measured", "claim" (published by others, not measured here), or an outcome.
    heading: the case in words; lines of one heading belong together.
    rate, unit: useful work a second in TFLOP/s, or least traffic in GB/s where memory binds.
    datasheet_share, ceiling_share: ideal time by that ceiling over the time measured.
    note: value and source of a claim, or the reason of an outcome.
    """

    kind: str
    heading: str
    hardware: str
    implementation: str
    seconds: float | None = None
    rate: float | None = None
    unit: str = "TFLOP/s"
    datasheet_share: float | None = None
    ceiling_share: float | None = None
    note: str = ""


def show(comparison: Comparison, console: Console) -> None:
    """Print a comparison: a table if the console is a terminal, otherwise plain lines."""
    if not console.is_terminal:
        _print(lines(comparison), console)
        return
    _print([heading(comparison), *_notes(comparison)], console)
    if comparison.rows:
        console.print(table(comparison))
    _print([*_refusals(comparison.refused), summary(comparison)], console)


def lines(comparison: Comparison) -> list[str]:
    """A comparison, worst case first, then what was refused, then the summary."""
    found = [
        heading(comparison),
        *_notes(comparison),
        *map(_line, comparison.rows),
        *_refusals(comparison.refused),
        summary(comparison),
    ]
    return [safe(line) for line in found]


def table(comparison: Comparison) -> Table:
    """The rows of a comparison, worst first; long names are folded, not cut."""
    shown = Table(show_lines=False)
    shown.add_column("verdict", no_wrap=True)
    for name in ("ratio", "interval", "baseline", "candidate", "q"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("case", overflow="fold")
    for row in comparison.rows:
        cells = (f"{row.ratio:.3f}", _interval(row), duration(row.baseline_seconds),
                 duration(row.candidate_seconds), f"{row.q:.2g}",
                 "\n".join(map(safe, (_where(row), *row.flags))))  # fmt: skip
        verdict = Text(row.verdict, style=_STYLES[row.verdict])
        shown.add_row(verdict, *(Text(cell) for cell in cells))
    return shown


def heading(comparison: Comparison) -> str:
    """What is compared with what, and by which rule."""
    return (
        f"{comparison.candidate} over {comparison.baseline}, seconds: below 1 is faster; "
        f"same within {comparison.band:.1%}, intervals at {1 - comparison.alpha:.0%}, "
        f"false discoveries at {comparison.alpha:.0%}"
    )


def summary(comparison: Comparison) -> str:
    """Geometric mean, never without the worst cases; counts of verdicts and refusals."""
    found = comparison.summary
    refused = f"{len(comparison.refused)} refused"
    if found is None:
        return f"nothing was compared; {refused}"
    counts = ", ".join(f"{count} {verdict}" for verdict, count in found.verdicts.items() if count)
    worst = "; ".join(f"{row.ratio:.3f} {_where(row)}" for row in found.worst)
    return (
        f"{len(comparison.rows)} compared: {counts}; {refused}. "
        f"Geometric mean {found.geometric_mean:.3f}, worst {worst}"
    )


def false_alarm_lines(found: FalseAlarms) -> list[str]:
    """What the tool said of one implementation against itself."""
    total = len(found.comparison.rows)
    series = found.how.count("series")
    return [
        *lines(found.comparison),
        f"A/A: {found.alarms} of {total} called faster or slower "
        f"({found.rate:.1%}, at most {found.upper:.1%}), {found.same} the same "
        f"({found.same_rate:.1%}); {series} of two series, {total - series} of halves of one",
    ]


def show_by_hardware(
    records: Sequence[Record],
    console: Console,
    claims: Sequence[Claim] = (),
    by_bandwidth: Container[str] = (),
) -> None:
    """Print `by_hardware`: tables if the console is a terminal, otherwise plain lines."""
    if not console.is_terminal:
        _print(hardware_lines(records, claims, by_bandwidth), console)
        return
    for title, group in _by_heading(by_hardware(records, claims, by_bandwidth)):
        names = ("kind", "hardware", "implementation", "seconds", group[0].unit, "of datasheet",
                 "of measured ceiling", "note")  # fmt: skip
        shown = Table(title=Text(safe(title)), title_justify="left")
        for name in names:
            shown.add_column(name, overflow="fold")
        for line in group:
            cells = (line.kind, line.hardware, line.implementation, *_figures(line), line.note)
            shown.add_row(*(Text(safe(cell)) for cell in cells))
        console.print(shown)


def hardware_lines(
    records: Sequence[Record], claims: Sequence[Claim] = (), by_bandwidth: Container[str] = ()
) -> list[str]:
    """`by_hardware` as plain lines, a heading a case."""
    found: list[str] = []
    for title, group in _by_heading(by_hardware(records, claims, by_bandwidth)):
        found.append(title)
        for line in group:
            seconds, rate, datasheet, ceiling = _figures(line)
            parts = [line.kind, line.hardware, line.implementation]
            parts += [seconds] if seconds else []
            parts += [f"{rate} {line.unit}"] if rate else []
            parts += [f"{datasheet} of datasheet"] if datasheet else []
            parts += [f"{ceiling} of measured ceiling"] if ceiling else []
            parts += [line.note] if line.note else []
            found.append("  " + "  ".join(parts))
    return [safe(line) for line in found]


def by_hardware(
    records: Sequence[Record], claims: Sequence[Claim] = (), by_bandwidth: Container[str] = ()
) -> list[Line]:
    """Last record of each case, device and implementation; published claims after, as claims.

    by_bandwidth: operators shown by GB/s (`Operator.bandwidth_bound`).
    """
    newest: dict[tuple[Case, str, str], Record] = {}
    for record in records:
        newest[record.case, record.hardware, record.who.name] = record
    hashes: dict[str, set[str]] = defaultdict(set)
    for case, _, _ in newest:
        hashes[name_of(case)].add(case.digest)
    unlike = {name for name, digests in hashes.items() if len(digests) > 1}
    measured = sorted(
        (_measured(record, unlike, by_bandwidth) for record in newest.values()),
        key=lambda line: (line.heading, line.hardware, line.implementation),
    )
    return measured + sorted(
        map(_claimed, claims), key=lambda line: (line.heading, line.hardware, line.implementation)
    )


def duration(seconds: float) -> str:
    """Seconds with four digits in the unit that suits: "820.1 µs"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


def name_of(case: Case) -> str:
    """A case in words; the hash of its workload is left out."""
    parts = [case.operator, case.workload, case.dtype, case.region, case.mode]
    if case.preparation not in ("none", "included"):
        parts.append(f"preparation {case.preparation}")
    return " ".join(parts)


def _measured(record: Record, unlike: Container[str], by_bandwidth: Container[str]) -> Line:
    name = name_of(record.case)
    moved = record.case.operator in by_bandwidth
    rate, unit = record.flop_per_second, 1e12
    if moved:
        rate, unit = record.bytes_per_second, 1e9
    return Line(
        kind=record.outcome,
        heading=f"{name} (workload hash {record.case.digest})" if name in unlike else name,
        hardware=record.hardware,
        implementation=record.who.name,
        seconds=record.seconds,
        # A case without arithmetic has a time and no rate.
        rate=rate / unit if rate else None,
        unit="GB/s" if moved else "TFLOP/s",
        datasheet_share=record.share(record.datasheet),
        ceiling_share=record.share(record.measured_ceiling),
        note="; ".join((*((record.reason,) if record.reason else ()), *record.flags)),
    )


def _claimed(claim: Claim) -> Line:
    over = f" over {claim.baseline}" if claim.baseline else ""
    within = f" ± {claim.tolerance:g}" if claim.tolerance else ""
    value = f"{claim.value:g}{within} {claim.quantity}{over}"
    words = (claim.operator, claim.workload or claim.case, claim.dtype or "", claim.region)
    return Line(
        kind="claim",
        heading=f"published, not measured here: {' '.join(filter(None, words))}",
        hardware=claim.hardware,
        implementation=claim.implementation,
        note=f"{value} ({claim.source}, {claim.date})",
    )


def _by_heading(found: Iterable[Line]) -> list[tuple[str, list[Line]]]:
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in found:
        groups[line.heading].append(line)
    return list(groups.items())


def _figures(line: Line) -> tuple[str, str, str, str]:
    return (
        "" if line.seconds is None else duration(line.seconds),
        "" if line.rate is None else f"{line.rate:.4g}",
        "" if line.datasheet_share is None else f"{line.datasheet_share:.1%}",
        "" if line.ceiling_share is None else f"{line.ceiling_share:.1%}",
    )


def _line(row: Row) -> str:
    seconds = f"{duration(row.baseline_seconds):>9} -> {duration(row.candidate_seconds):>9}"
    flags = f"  [{'; '.join(row.flags)}]" if row.flags else ""
    return f"{row.verdict:9}  {row.ratio:.3f} {_interval(row)}  {seconds}  {_where(row)}{flags}"


def _interval(row: Row) -> str:
    return f"[{row.low:.3f}, {row.high:.3f}]"


def _where(row: Row | Refused) -> str:
    return f"{row.held}: {name_of(row.case)}"


def _refusals(refused: Iterable[Refused]) -> list[str]:
    """A line a refusal; cases that one side has no record of share a line an operator."""
    missing: dict[tuple[str, str], list[Refused]] = defaultdict(list)
    found = []
    for one in refused:
        if one.kind == "missing":
            missing[one.case.operator, one.reason].append(one)
        else:
            found.append(_refused(one))
    for (operator, _), group in missing.items():
        more = f", nor of {len(group) - 1} more of {operator}" if len(group) > 1 else ""
        found.append(f"{_refused(group[0])}{more}")
    return found


def _refused(one: Refused) -> str:
    return f"{'refused':9}  {_where(one)}: {one.kind}: {one.reason}"


def _notes(comparison: Comparison) -> list[str]:
    return [f"note: {note}" for note in comparison.notes]


def _print(found: Iterable[str], console: Console) -> None:
    """Lines as they are: no markup in names, no wrapping of long ones."""
    for line in found:
        console.print(safe(line), markup=False, highlight=False, soft_wrap=True, emoji=False)
