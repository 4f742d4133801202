"""The data table of every chart: what a reader without JavaScript, or without eyes, reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jagbench.html.datasets import compared_name
from jagbench.html.markup import LARGEST, Cell, listing, number, outcome, table
from jagbench.html.rows import Contents, Row
from jagbench.html.summary import view_name


def roofline(contents: Contents) -> str:
    """Every record: intensity, rates and shares of both ceilings."""
    head = (
        "region", "case", "implementation", "FLOP/byte", "time, ms", "TFLOP/s", "GB/s",
        "% of measured ceiling", "% of datasheet", "MFU, % of datasheet", "sequences/s",
    )  # fmt: skip

    def cells(row: Row) -> list[Cell]:
        record = row.record
        start: list[Cell] = [record.case.region, row.case, row.implementation, row.intensity]
        if record.seconds is None:
            return [*start, outcome(record.outcome)]
        return [
            *start,
            record.seconds * 1e3,
            _times(record.flop_per_second, 1e-12),
            _times(record.bytes_per_second, 1e-9),
            _times(record.share(record.measured_ceiling), 100),
            _times(record.share(record.datasheet), 100),
            None if row.by_bandwidth else _times(record.mfu(record.datasheet), 100),
            record.sequences_per_second,
        ]

    return _by_view(contents, lambda rows: (head, map(cells, rows)))


def heat_map(contents: Contents) -> str:
    """Time over the best peer's, by length and fill."""

    def cells(row: Row) -> Cell:
        return row.ratio if row.record.seconds is not None else outcome(row.record.outcome)

    rows = [row for row in contents.rows if row.family is not None]

    def pivot(rows: Sequence[Row]) -> tuple[Sequence[str], Iterable[Sequence[Cell]]]:
        names = contents.implementations
        return _pivot(rows, cells, ("region", "workload", "fill", "length"), _grid_key, names)

    return _by_view(contents, pivot, rows)


def bars(contents: Contents) -> str:
    """Rate of every implementation; of what memory binds, with its share of the floor."""

    def cells(row: Row) -> Cell:
        if row.record.seconds is None or row.rate is None:
            return outcome(row.record.outcome)
        if not row.by_bandwidth or row.floor is None:
            return row.rate
        return f"{number(row.rate)} ({row.floor:.0%})"

    def key(row: Row) -> tuple[Cell, ...]:
        return (row.record.case.region, row.case, row.unit)

    def pivot(rows: Sequence[Row]) -> tuple[Sequence[str], Iterable[Sequence[Cell]]]:
        return _pivot(rows, cells, ("region", "case", "unit"), key, contents.implementations)

    return _by_view(contents, pivot)


def generations(contents: Contents) -> str:
    """One row an implementation and case, one column a device; then the claims as published."""
    hardware = contents.hardware
    groups: dict[tuple[Cell, ...], dict[str, Cell]] = {}
    for row in contents.rows:
        case = row.record.case
        key = (
            case.operator, case.dtype, case.mode, case.preparation, case.region, row.case,
            row.implementation,
        )  # fmt: skip
        groups.setdefault(key, {})[row.hardware] = _generation_cell(row)
    head = ("operator", "dtype", "mode", "preparation", "region", "case", "implementation")
    rows = [[*key, *(cells.get(h) for h in hardware)] for key, cells in groups.items()]
    caption = "rate | time | share of measured ceiling | share of datasheet"
    return table(caption, (*head, *hardware), rows) + claims(contents)


def claims(contents: Contents) -> str:
    """Published figures, marked as such."""
    if not contents.claims:
        return ""
    head = (
        "hardware", "operator", "case", "workload", "region", "implementation", "quantity", "claim",
        "±", "measured here", "dtype", "in the chart", "source", "date", "note",
    )  # fmt: skip
    rows: list[list[Cell]] = []
    for claim in contents.claims:
        over = f" over {claim.baseline}" if claim.baseline else ""
        charted = contents.claimed_rate(claim) is not None
        rows.append([
            contents.shown_hardware(claim), claim.operator, claim.case, claim.workload,
            claim.region, contents.shown_implementation(claim), f"{claim.quantity}{over}",
            claim.value, claim.tolerance, contents.measured_beside(claim), claim.dtype,
            "yes" if charted else "no", claim.source, claim.date, claim.note,
        ])  # fmt: skip
    return table("Published claims; none of them was measured by this project", head, rows)


def errors(contents: Contents) -> str:
    """Error over what is allowed, by output and gradient."""
    rows = [row for row in contents.rows if row.record.accuracies]

    def content(rows: Sequence[Row]) -> tuple[Sequence[str], Iterable[Sequence[Cell]]]:
        names = list(dict.fromkeys(a.name for row in rows for a in row.record.accuracies))
        lines: list[list[Cell]] = []
        for row in rows:
            ratios: dict[str, Cell] = {
                a.name: min(a.error / a.allowed, LARGEST)
                if a.allowed
                else ("over 0" if a.error else 0.0)
                for a in row.record.accuracies
            }
            start: list[Cell] = [row.record.case.region, row.case, row.implementation]
            lines.append([*start, row.record.outcome, *(ratios.get(name) for name in names)])
        return ("region", "case", "implementation", "outcome", *names), lines

    return _by_view(contents, content, rows)


def samples(contents: Contents) -> str:
    """Quantiles of the samples."""
    head = (
        "region", "case", "implementation", "samples", "calls a sample", "least, ms",
        "20 %, ms", "median, ms", "80 %, ms", "most, ms", "spread, %", "second clock, ms",
        "peak memory, MiB",
    )  # fmt: skip

    def cells(row: Row) -> list[Cell]:
        start: list[Cell] = [row.record.case.region, row.case, row.implementation]
        timing = row.record.timing
        if timing is None or row.record.seconds is None:
            return [*start, outcome(row.record.outcome)]
        taken = timing.samples_seconds
        places = (min(taken), timing.low, timing.seconds, timing.high, max(taken))
        return [
            *start, len(taken), timing.calls_per_sample, *(place * 1e3 for place in places),
            timing.spread * 100, _times(timing.second_clock_seconds, 1e3),
            _times(timing.peak_memory_bytes, 2**-20),
        ]  # fmt: skip

    return _by_view(contents, lambda rows: (head, map(cells, rows)))


def comparison(contents: Contents) -> str:
    """Ratios with their intervals and verdicts; what was refused and why; notes."""
    found = contents.comparison
    if found is None:
        return ""
    caption = (
        f"Seconds of {found.candidate} (candidate) over those of {found.baseline} (baseline); "
        f"same: within {found.band:.1%}"
    )
    head = (
        "case", "baseline, ms", "candidate, ms", "ratio", "low", "high", "q of no difference",
        "verdict", "doubts",
    )  # fmt: skip
    lines: list[list[Cell]] = [
        [
            compared_name(found, row), row.baseline_seconds * 1e3, row.candidate_seconds * 1e3,
            row.ratio, row.low, row.high, row.q, row.verdict, "; ".join(row.flags),
        ]
        for row in found.rows
    ]  # fmt: skip
    text = table(caption, head, lines)
    if found.refused:
        refused = [(compared_name(found, one), one.kind, one.reason) for one in found.refused]
        text += table("Not compared", ("case", "why", "reason"), refused)
    return text + (listing(found.notes) if found.notes else "")


def _by_view(
    contents: Contents,
    content: Callable[[Sequence[Row]], tuple[Sequence[str], Iterable[Sequence[Cell]]]],
    rows: Sequence[Row] | None = None,
) -> str:
    """One table a view, so that no column repeats what is the same in all of it."""
    parts = []
    for view in contents.views:
        chosen = [row for row in (contents.rows if rows is None else rows) if row.view == view]
        if chosen:
            head, lines = content(chosen)
            parts.append(table(view_name(view), head, lines))
    return "".join(parts) or "<p>No record has what this table shows.</p>\n"


def _pivot(
    rows: Sequence[Row],
    cells: Callable[[Row], Cell],
    head: Sequence[str],
    key: Callable[[Row], tuple[Cell, ...]],
    implementations: Sequence[str],
) -> tuple[Sequence[str], Iterable[Sequence[Cell]]]:
    """One column an implementation, one line a key."""
    present = {row.implementation for row in rows}
    names = [name for name in implementations if name in present]
    lines: dict[tuple[Cell, ...], dict[str, Cell]] = {}
    for row in rows:
        lines.setdefault(key(row), {})[row.implementation] = cells(row)
    body = [[*k, *(found.get(name) for name in names)] for k, found in lines.items()]
    return (*head, *names), body


def _grid_key(row: Row) -> tuple[Cell, ...]:
    # As text, so that no thousands separator splits a length.
    fill = "" if row.fill is None else f"{row.fill:g}"
    return (row.record.case.region, row.family, fill, str(row.length))


def _generation_cell(row: Row) -> Cell:
    record = row.record
    if record.seconds is None:
        return outcome(record.outcome)
    shares = (record.share(record.measured_ceiling), record.share(record.datasheet))
    percents = " | ".join("–" if share is None else f"{share:.0%}" for share in shares)
    return f"{number(row.rate or 0.0)} {row.unit} | {number(record.seconds * 1e3)} ms | {percents}"


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
