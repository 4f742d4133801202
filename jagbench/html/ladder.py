"""The ladder: one attention layer made cheaper rung by rung, at several lengths.

A record belongs to it by the name of its workload, `<operator>-ladder-<rung>-l<length>-...`: "full"
attention, "swaN" (window N), "block", "rotary" (block attention with the rotation fused in), and
"turn", the rotation of one tensor as an operator of its own. All rungs of a length have the same
sequences.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jagbench.html.markup import Cell, number, table
from jagbench.html.rows import Contents, Row, View, natural

_NAME = re.compile(r"^ladder-(?P<rung>[a-z]+\d*)-l(?P<length>\d+)(?=-|$)")
#: Rungs in order; the window's width and names we do not know come between and after.
_ORDER = ("full", "swa", "block", "rotary", "turn")
#: Tensors that a separate rotation turns: q, k and v.
TURNED = 3


@dataclass(frozen=True)
class Step:
    """One rung at one length.

    floor: share of the time in which the least bytes could be copied, None without a measured
        ceiling; speed_up: over full attention of the same implementation, else of the first.
    """

    length: int
    region: str
    rung: str
    implementation: str
    seconds: float
    bytes_per_second: float | None
    floor: float | None
    speed_up: float | None


def steps(contents: Contents) -> dict[tuple[str, ...], list[Step]]:
    """(hardware, dtype, mode) -> rungs by region, length and order; whole calls alone."""
    groups: dict[tuple[str, ...], dict[tuple[str, int, str, str], Row]] = {}
    for row in contents.rows:
        found = _NAME.match(row.case)
        if found is None or row.record.seconds is None or row.view.preparation != "included":
            continue
        place = (row.record.case.region, int(found["length"]), found["rung"], row.implementation)
        groups.setdefault(_group(row.view), {})[place] = row
    return {group: _steps(rows, contents.implementations) for group, rows in sorted(groups.items())}


def _group(view: View) -> tuple[str, ...]:
    return view.hardware, view.dtype, view.mode


def _steps(
    rows: dict[tuple[str, int, str, str], Row], implementations: Sequence[str]
) -> list[Step]:
    found = []
    for (region, length, rung, who), row in rows.items():
        full = _full(rows, region, length, who, implementations)
        seconds = row.record.seconds
        assert seconds is not None
        found.append(Step(
            length, region, rung, who, seconds, row.record.bytes_per_second, row.floor,
            full / seconds if full and rung != "turn" else None,
        ))  # fmt: skip
        turn = rows.get((region, length, "turn", who))
        if rung.startswith("swa") and turn is not None and turn.record.seconds is not None:
            both = seconds + TURNED * turn.record.seconds
            name = f"{rung} + {TURNED} turn (sum of records)"
            found.append(
                Step(length, region, name, who, both, None, None, full / both if full else None)
            )
    return sorted(found, key=lambda s: (s.region, s.length, _order(s.rung), s.implementation))


def _full(
    rows: dict[tuple[str, int, str, str], Row], region: str, length: int, who: str,
    implementations: Sequence[str],
) -> float | None:  # fmt: skip
    """Seconds of full attention."""
    for name in (who, *implementations):
        row = rows.get((region, length, "full", name))
        if row is not None:
            return row.record.seconds
    return None


def _order(rung: str) -> tuple[int, object]:
    known = [place for place, name in enumerate(_ORDER) if rung.startswith(name)]
    return (known[0] if known else len(_ORDER), natural(rung))


_HEAD = (
    "region", "length", "rung", "implementation", "time, ms", "GB/s", "% of bandwidth floor",
    "speed-up over full",
)  # fmt: skip


def ladder(contents: Contents) -> str:
    """The section's tables; "" where no record belongs to it."""
    parts = []
    for group, found in steps(contents).items():
        lines: list[list[Cell]] = [
            [
                step.region, str(step.length), step.rung, step.implementation, step.seconds * 1e3,
                None if step.bytes_per_second is None else step.bytes_per_second * 1e-9,
                None if step.floor is None else step.floor * 100, step.speed_up,
            ]
            for step in found
        ]  # fmt: skip
        parts.append(table(" · ".join(group), _HEAD, lines))
    return "".join(parts)


def ladder_text(contents: Contents) -> list[str]:
    """The same as lines for a terminal."""
    lines = []
    for group, found in steps(contents).items():
        lines.append("ladder: " + " · ".join(group))
        for step in found:
            speed = step.bytes_per_second
            parts = [
                f"{step.region:17} L {step.length:<6}{step.rung:32} {step.implementation:32}",
                f"{step.seconds * 1e3:9.3f} ms",
                "" if speed is None else f"{number(speed * 1e-9):>6} GB/s",
                "" if step.floor is None else f"{step.floor:6.1%} of floor",
                "" if step.speed_up is None else f"{step.speed_up:7.2f} x full",
            ]
            lines.append("  " + " ".join(parts).rstrip())
    return lines
