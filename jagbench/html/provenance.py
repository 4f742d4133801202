"""Where the numbers come from: versions, commits, clocks, power, ceilings, kernel choices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from jagbench.html.datasets import ceiling_of
from jagbench.html.markup import Cell, details, listing, number, table
from jagbench.html.rows import Contents, Row
from jagbench.result import Ceiling, DeviceState, Provenance

_PLACE = (
    "device", "driver", "cuda", "torch", "triton", "numpy", "python", "platform", "cpu", "jagbench",
)  # fmt: skip
#: DeviceState field -> what to call it, and what to divide it by.
_STATE = (
    ("sm_clock_hz", "SM clock, MHz", 1e6),
    ("memory_clock_hz", "memory clock, MHz", 1e6),
    ("power_watts", "power, W", 1.0),
    ("power_limit_watts", "power cap, W", 1.0),
    ("temperature_celsius", "temperature, °C", 1.0),
)


def provenance(contents: Contents) -> str:
    """The section's HTML."""
    if not contents.rows:
        return "<p>No records, so no provenance.</p>\n"
    parts = [_places(contents), _ceilings(contents), _implementations(contents)]
    parts.append(_configurations(contents))
    if contents.older:
        older = f"{contents.older} older records of the same cases were given and are not shown."
        parts.append(listing([older]))
    return "".join(parts)


def _places(contents: Contents) -> str:
    """One column for each set of versions on a device, one row for each fact."""
    groups: defaultdict[tuple[str, Provenance], list[Row]] = defaultdict(list)
    for row in contents.rows:
        groups[row.hardware, row.record.provenance].append(row)
    columns = [
        (place, rows)
        for (_, place), rows in sorted(
            groups.items(), key=lambda g: (g[0][0], max(r.record.date for r in g[1]), str(g[0][1]))
        )
    ]
    lines: list[list[Cell]] = [
        [name, *(getattr(place, name) for place, _ in columns)] for name in _PLACE
    ]
    lines.append(["commit", *(_commit(place) for place, _ in columns)])
    facts: list[tuple[str, Callable[[Sequence[Row]], Cell]]] = [
        ("records", len),
        ("sessions", lambda rows: ", ".join(sorted({r.record.session for r in rows}))),
        ("dates", _dates),
        *((label, _reading(name, unit)) for name, label, unit in _STATE),
        ("throttled", _throttled),
    ]
    lines += [[label, *(fact(rows) for _, rows in columns)] for label, fact in facts]
    head = ("", *(f"{place.device} ({n})" for n, (place, _) in enumerate(columns, start=1)))
    return table("Machines and versions", head, lines)


def _ceilings(contents: Contents) -> str:
    groups: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in contents.rows:
        groups[row.hardware, row.record.case.dtype].append(row)
    lines: list[list[Cell]] = []
    for (hardware, dtype), rows in sorted(groups.items()):
        for kind in ("measured", "datasheet"):
            ceiling = ceiling_of(rows, kind)
            if ceiling is not None:
                lines.append([hardware, dtype, kind, *_ceiling(ceiling)])
    if not lines:
        return "<p>No ceiling was recorded.</p>\n"
    head = ("hardware", "dtype", "ceiling", "TFLOP/s", "GB/s", "source", "date")
    return table("Ceilings (of the newest record that has them)", head, lines)


def _implementations(contents: Contents) -> str:
    groups: defaultdict[tuple[str, ...], int] = defaultdict(int)
    for row in contents.rows:
        who = row.record.who
        groups[row.implementation, who.name, who.version, who.source or "–", row.hardware] += 1
    head = ("implementation", "module", "version", "source hash", "hardware", "records")
    return table("Implementations", head, [[*key, n] for key, n in sorted(groups.items())])


def _configurations(contents: Contents) -> str:
    """Tiles and other choices, each distinct set once."""
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for row in contents.rows:
        if row.record.configuration:
            chosen = sorted(row.record.configuration.items())
            text = "; ".join(f"{kernel}: {choice}" for kernel, choice in chosen)
            cases = groups[row.implementation, text]
            if row.case not in cases:
                cases.append(row.case)
    if not groups:
        return ""
    rows = [[*key, ", ".join(cases)] for key, cases in sorted(groups.items())]
    head = ("implementation", "configuration", "cases")
    return details("Kernel configurations (autotune winners, tiles)", table("", head, rows))


def _ceiling(ceiling: Ceiling) -> list[Cell]:
    flop, moved = ceiling.flop_per_second, ceiling.bytes_per_second
    return [
        None if flop is None else flop / 1e12,
        None if moved is None else moved / 1e9,
        ceiling.source,
        ceiling.date,
    ]


def _commit(place: Provenance) -> Cell:
    if place.commit is None:
        return None
    return place.commit[:12] + (" with changes" if place.dirty else "")


def _dates(rows: Sequence[Row]) -> Cell:
    dates = sorted(row.record.date for row in rows)
    first, last = f"{dates[0]:%Y-%m-%d}", f"{dates[-1]:%Y-%m-%d}"
    return first if first == last else f"{first} to {last}"


def _reading(name: str, unit: float) -> Callable[[Sequence[Row]], Cell]:
    def fact(rows: Sequence[Row]) -> Cell:
        values = [getattr(row.record.state, name) for row in rows]
        return _range(value / unit for value in values if value is not None)

    return fact


def _range(values: Iterable[float]) -> Cell:
    ordered = sorted(values)
    if not ordered:
        return None
    low, high = number(ordered[0]), number(ordered[-1])
    return low if low == high else f"{low} to {high}"


def _throttled(rows: Sequence[Row]) -> Cell:
    states: list[DeviceState] = [row.record.state for row in rows]
    counts: defaultdict[str, int] = defaultdict(int)
    for state in states:
        for reason in state.throttled or ():
            counts[reason] += 1
    if counts:
        return ", ".join(f"{reason} ({n} records)" for reason, n in sorted(counts.items()))
    return None if all(state.throttled is None for state in states) else "never"
