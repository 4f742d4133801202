"""Which records may be compared: pairs of equal cases, and why the others are not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jagbench.result import Case, Record, failures
from jagbench.statistics import MINIMUM_SAMPLES

By = Literal["implementation", "hardware"]
Sessions = Literal["newest", "all"]
Kind = Literal["unlike", "not measured", "not right", "too few samples", "missing"]

#: Things in which two lone cases may differ, likeliest reason first, in words.
_WORDS = {
    "digest": "workload hash",
    "hardware": "hardware",
    "implementation": "implementation",
    "dtype": "maths: dtype",
    "region": "region",
    "mode": "mode",
    "preparation": "preparation",
    "workload": "workload",
    "operator": "maths: operator",
}


@dataclass(frozen=True)
class Refused:
    """A case that was not compared, and why."""

    case: Case
    held: str
    kind: Kind
    reason: str


@dataclass(frozen=True)
class Pair:
    """Records of one case on both sides.

    doubts: failures of what is compared that stand beside its times ("candidate: also wrong ...").
    """

    case: Case
    held: str
    baseline: tuple[Record, ...]
    candidate: tuple[Record, ...]
    doubts: tuple[str, ...] = ()


#: What is held, and the case.
Key = tuple[str, Case]


def paired(
    baseline: Sequence[Record], candidate: Sequence[Record], by: By, sessions: Sessions
) -> tuple[list[Pair], tuple[Refused, ...]]:
    """Pairs to compare, and every other case of either side with the reason.

    Raises ValueError where a side holds two implementations (by hardware: two devices) of one case.
    """
    present = [{(_held(r, by), r.case) for r in side} for side in (baseline, candidate)]
    left = _by_key(baseline, present[1], by, "baseline")
    right = _by_key(candidate, present[0], by, "candidate")
    failed = [failures(side) for side in (baseline, candidate)]
    pairs: list[Pair] = []
    refused: list[Refused] = []
    for key in left:
        if key in right:
            first, second = _taken(left[key], right[key], sessions)
            sides = (("baseline", first), ("candidate", second))
            doubts = tuple(
                f"{name}: {text}"
                for (name, taken), found in zip(sides, failed, strict=True)
                for text in found.get(taken[-1].key, ())
            )
            pair = Pair(key[1], key[0], first, second, doubts)
            reason = unfit(pair)
            if reason is None:
                pairs.append(pair)
            else:
                refused.append(reason)
    return pairs, (*refused, *_unmatched(left, right, by))


def configurations(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """Choices in which records of one key differ: not one program was timed, but several."""
    found: dict[str, tuple[dict[str, None], list[str]]] = {}
    for pair in pairs:
        groups: dict[tuple[str, ...], list[Mapping[str, str]]] = defaultdict(list)
        for record in (*pair.baseline, *pair.candidate):
            groups[record.key].append(record.configuration)
        for group in groups.values():
            for name in sorted({name for one in group for name in one}):
                values = dict.fromkeys(one.get(name, "nothing") for one in group)
                if len(values) > 1:
                    seen, cases = found.setdefault(name, ({}, []))
                    seen.update(values)
                    cases.append(f"{pair.case.workload} {pair.case.region}")
    return tuple(
        f"configuration differs between records of the same code: {name}: {', '.join(seen)} "
        f"({cases[0]}{f' and {len(cases) - 1} more' if len(cases) > 1 else ''})"
        for name, (seen, cases) in found.items()
    )


def _held(record: Record, by: By) -> str:
    return record.hardware if by == "implementation" else record.who.name


def _by_key(
    records: Sequence[Record], other: Collection[Key], by: By, side: str
) -> dict[Key, list[Record]]:
    """What is held and the case -> the records of it, in the order they were kept in."""
    found: dict[Key, list[Record]] = defaultdict(list)
    for record in records:
        for key in _places(record, other, by):
            found[key].append(record)
    for (held, case), group in found.items():
        varied = {r.who.name if by == "implementation" else r.hardware for r in group}
        if len(varied) > 1:
            raise ValueError(
                f"{side} holds {len(varied)} of {case.operator} {case.workload} on {held}: "
                f"{', '.join(sorted(varied))}; choose one"
            )
    return dict(found)


def _places(record: Record, other: Collection[Key], by: By) -> list[Key]:
    """Where a record is set: what had nothing to prepare beside what had, with and without it.

    It is charged for all it does, so it is not flattered by the comparison.
    """
    held = _held(record, by)
    own = (held, record.case)
    if record.case.preparation != "none":
        return [own]
    views = [
        view
        for preparation in ("included", "excluded")
        if (view := (held, record.case.model_copy(update={"preparation": preparation}))) in other
    ]
    return views if views and own not in other else [own, *views]


def _taken(
    left: Sequence[Record], right: Sequence[Record], sessions: Sessions
) -> tuple[tuple[Record, ...], tuple[Record, ...]]:
    """Of each side the newest measurement: all of its session, or of all sessions.

    Only of the source, commit and versions of its last record. The newest session of one side is
    taken for both if the other has it too: only there were the two measured side by side. The order
    is that of the file: a clock that was set back must not hide what came later.
    """
    sides = [[r for r in side if r.key == side[-1].key] for side in (left, right)]
    if sessions == "all":
        return tuple(sides[0]), tuple(sides[1])
    held = [{record.session for record in side} for side in sides]
    newest = [side[-1].session for side in sides]
    shared = next((name for name in newest if name in held[0] & held[1]), None)
    first, second = (
        tuple(record for record in side if record.session == (shared or name))
        for side, name in zip(sides, newest, strict=True)
    )
    return first, second


def unfit(pair: Pair) -> Refused | None:
    """Why a pair cannot be compared: every reason, the kind of the first; None if it can."""
    problems: list[tuple[Kind, str]] = []
    for side, records in (("baseline", pair.baseline), ("candidate", pair.candidate)):
        for record in records:
            problems += [(kind, f"{side} {text}") for kind, text in _problems(record)]
    clocks = {r.timing.clock for r in (*pair.baseline, *pair.candidate) if r.timing is not None}
    if len(clocks) > 1:
        problems.append(("unlike", f"unlike clocks: {' and '.join(sorted(clocks))}"))
    if not problems:
        return None
    reasons = dict.fromkeys(reason for _, reason in problems)
    return Refused(pair.case, pair.held, problems[0][0], "; ".join(reasons))


def _problems(record: Record) -> list[tuple[Kind, str]]:
    if record.outcome != "measured" or record.timing is None:
        return [("not measured", f"is {record.outcome}: {record.reason}")]
    found: list[tuple[Kind, str]] = [
        ("not right", f"has error {a.error:.3g} of {a.name}, allowed {a.allowed:.3g}")
        for a in record.accuracies
        if a.error > a.allowed
    ]
    # Padding alone has no output to judge, and an empty batch no rows.
    judged = record.accuracies or record.case.preparation == "alone" or not record.work.sequences
    if not judged:
        found.append(("not right", "has outputs that were not checked"))
    samples = len(record.timing.samples_seconds)
    if samples < MINIMUM_SAMPLES:
        text = f"has {samples} samples, want at least {MINIMUM_SAMPLES}"
        if record.timing.clock == "wall":
            text += " (a CPU's quick run is not for comparing; use --budget)"
        found.append(("too few samples", text))
    return found


def _unmatched(
    baseline: Mapping[Key, object], candidate: Mapping[Key, object], by: By
) -> list[Refused]:
    """Cases of one side alone: beside the one of the other side that differs in one thing only."""
    left = [key for key in baseline if key not in candidate]
    right = [key for key in candidate if key not in baseline]
    refused = []
    for key in left:
        near = [(other, unlike) for other in right if len(unlike := _unlike(key, other, by)) == 1]
        near.sort(key=lambda found: list(_WORDS).index(found[1][0]))
        if not near:
            refused.append(_missing(key, "candidate"))
            continue
        other, (name,) = near[0]
        right.remove(other)
        refused.append(Refused(key[1], key[0], "unlike", _reason(key, other, name, by)))
    return refused + [_missing(key, "baseline") for key in right]


def _missing(key: Key, side: str) -> Refused:
    return Refused(key[1], key[0], "missing", f"{side} has no record of it")


def _fields(key: Key, by: By) -> dict[str, str]:
    held = "hardware" if by == "implementation" else "implementation"
    return {held: key[0], **{name: str(value) for name, value in key[1].model_dump().items()}}


def _unlike(one: Key, other: Key, by: By) -> list[str]:
    a, b = _fields(one, by), _fields(other, by)
    return [name for name in a if a[name] != b[name]]


def _reason(one: Key, other: Key, name: str, by: By) -> str:
    a, b = _fields(one, by)[name], _fields(other, by)[name]
    hint = " (compare by hardware)" if name == "hardware" else ""
    return f"unlike {_WORDS[name]}: baseline {a}, candidate {b}{hint}"
