"""What became of every implementation: counts, wins, mean against the best peer, worst cases."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jagbench.html.markup import Cell, Markup, details, escaped, listing, number, swatch, table
from jagbench.html.rows import Contents, Row, View, geometric_mean, natural
from jagbench.result import Outcome

#: How many of the worst cases stand beside a mean.
WORST = 3
_FAILURES: tuple[Outcome, ...] = (
    "unsupported", "wrong", "crashed", "timed out", "out of memory", "invalid",
)  # fmt: skip


@dataclass(frozen=True)
class Standing:
    """One implementation in one region of one view.

    compared: cases that somebody else was measured on too; fastest: those nobody beat.
    mean: geometric mean of the seconds over the best other implementation's; None of none.
    worst: case and ratio, the largest first.
    """

    implementation: str
    region: str
    outcomes: Mapping[str, int]
    compared: int
    fastest: int
    mean: float | None
    worst: tuple[tuple[str, float], ...]


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Standings of the rows of one view: by region, then by geometric mean, the best first."""
    groups: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.record.case.region, row.implementation].append(row)
    regions: list[str] = list(dict.fromkeys(row.record.case.region for row in rows))
    found = []
    for (region, implementation), group in groups.items():
        ratios = [(row.case, row.ratio) for row in group if row.ratio is not None]
        ratios.sort(key=lambda entry: (-entry[1], natural(entry[0])))
        found.append(
            Standing(
                implementation=implementation,
                region=region,
                outcomes=Counter(row.record.outcome for row in group),
                compared=len(ratios),
                fastest=sum(ratio <= 1 for _, ratio in ratios),
                mean=geometric_mean([ratio for _, ratio in ratios]),
                worst=tuple(ratios[:WORST]),
            )
        )
    return sorted(found, key=lambda s: (regions.index(s.region), s.mean or 1e9, s.implementation))


def summary(contents: Contents, colours: dict[str, str]) -> str:
    """The section's HTML: cards, one table a view, what has no time and why, doubts."""
    if not contents.rows:
        return "<p>No records were given: there is nothing measured to show.</p>\n"
    tables = [_view_table(contents, view, colours) for view in contents.views]
    rest = details(f"{len(tables) - 1} more views", "".join(tables[1:])) if tables[1:] else ""
    first = _verdicts(contents) + tables[0]
    return _cards(contents) + first + rest + _unmeasured(contents) + _doubts(contents)


def view_name(view: View) -> str:
    """A view in words."""
    whole = {
        "included": "with preparation",
        "excluded": "without preparation",
        "alone": "preparation alone",
    }
    preparation = whole.get(view.preparation, view.preparation)
    return " · ".join((view.hardware, view.operator, view.dtype, view.mode, preparation))


def _verdicts(contents: Contents) -> str:
    """One sentence a region for the view the page opens with: who leads, where our own stands."""
    view = contents.views[0]
    found = standings([row for row in contents.rows if row.view == view])
    items = []
    for region in dict.fromkeys(standing.region for standing in found):
        ranked = [s for s in found if s.region == region and s.mean is not None]
        if not ranked:
            continue
        items.append(f"{region}: {_sentence(ranked[0], 'leads')}")
        items += [
            f"{region}: {_sentence(s, f'is number {place} of {len(ranked)}')}"
            for place, s in enumerate(ranked, start=1)
            if place > 1 and s.implementation == contents.implementations[0]
        ]
    return listing(items) if items else ""


def _sentence(standing: Standing, place: str) -> str:
    case, ratio = standing.worst[0]
    return (
        f"{standing.implementation} {place}: {_times(standing.mean or 1)} the time of the best "
        f"peer in geometric mean, fastest in {standing.fastest} of {standing.compared}, "
        f"at worst {_times(ratio)} ({case})"
    )


def _view_table(contents: Contents, view: View, colours: dict[str, str]) -> str:
    found = standings([row for row in contents.rows if row.view == view])
    failures = [f for f in _FAILURES if any(s.outcomes.get(f) for s in found)]
    head = [
        "region", "implementation", "measured", *failures, "fastest in",
        "time / best peer", "worst three",
    ]  # fmt: skip
    rows: list[list[Cell]] = []
    for standing in found:
        rows.append(
            [
                standing.region,
                swatch(standing.implementation, colours),
                standing.outcomes.get("measured", 0),
                *(standing.outcomes.get(f, 0) for f in failures),
                f"{standing.fastest} of {standing.compared}" if standing.compared else None,
                Markup(_mean(standing)),
                Markup("<br>".join(f"{escaped(c)}: {_times(r)}" for c, r in standing.worst) or "–"),
            ]
        )
    return table(view_name(view), head, rows)


def _mean(standing: Standing) -> str:
    if standing.mean is None:
        return "– <small>(no peer measured)</small>"
    state, word = ("good", "ahead") if standing.mean <= 1 else ("behind", "behind")
    return f'<b class="{state}">{_times(standing.mean)}</b> {word}'


def _times(ratio: float) -> str:
    return f"{ratio:.2f} ×"


def _cards(contents: Contents) -> str:
    rows = contents.rows
    measured = sum(row.record.outcome == "measured" for row in rows)
    flagged = sum(bool(row.record.flags) for row in rows)
    date = max(row.record.date for row in rows)
    parts = [
        (number(len(rows)), "records" if len(rows) > 1 else "record"),
        (number(measured), "measured"),
        (number(len(rows) - measured), "without a time (reasons below)"),
        (number(flagged), "measured or invalid, with doubts"),
        (number(len({row.implementation for row in rows})), "implementations"),
        (", ".join(contents.hardware), "hardware"),
        (f"{date:%Y-%m-%d}", "newest record"),
    ]
    cards = "".join(f"<div><b>{escaped(n)}</b>{escaped(what)}</div>" for n, what in parts)
    return f"<div class=cards>{cards}</div>\n"


def _unmeasured(contents: Contents) -> str:
    """Every case without a time, grouped by implementation, outcome and reason."""
    groups: defaultdict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
    for row in contents.rows:
        record = row.record
        if record.outcome != "measured":
            key = (row.hardware, row.implementation, record.outcome, record.reason or "")
            groups[key].append(row)
    if not groups:
        return "<p>Every case has a time.</p>\n"
    rows: list[list[Cell]] = [
        [*key, len(found), _which(found)] for key, found in sorted(groups.items())
    ]
    head = ("hardware", "implementation", "outcome", "reason", "cases", "which")
    return details(
        f"{sum(map(len, groups.values()))} cases without a time, with reasons",
        table("", head, rows),
        opened=True,
    )


def _doubts(contents: Contents) -> str:
    groups: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in contents.rows:
        unmet = row.record.timing.unmet if row.record.timing else None
        for flag in (*row.record.flags, *((unmet,) if unmet else ())):
            groups[row.implementation, flag].append(row)
    if not groups:
        return ""
    rows: list[list[Cell]] = [
        [*key, len(found), _which(found)] for key, found in sorted(groups.items())
    ]
    head = ("implementation", "doubt", "records", "which")
    return details(f"{len(groups)} doubts about measured cases", table("", head, rows))


def _which(rows: Sequence[Row]) -> str:
    """Cases, each with its regions, modes and preparations in brackets."""
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.case].append(row)
    parts = []
    for case in sorted(groups, key=natural):
        cases = [row.record.case for row in groups[case]]
        fields = zip(*((c.region, c.mode, c.preparation) for c in cases), strict=True)
        words = (" and ".join(dict.fromkeys(field)) for field in fields)
        parts.append(f"{case} ({', '.join(words)})")
    return "; ".join(parts)
