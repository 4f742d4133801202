"""Compare records of two implementations, commits or devices, case by case.

Nothing is dropped: what cannot be compared is listed with its reason. Verdicts are those of
`jagbench.statistics.judge`; a mean is never shown without the worst cases.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from scipy import stats

from jagbench import pairing, statistics
from jagbench.pairing import By, Pair, Refused, Sessions, paired, unfit
from jagbench.result import Case, Record, failures
from jagbench.selection import Selection, describe, resolve
from jagbench.statistics import Verdict

__all__ = [
    "Comparison", "FalseAlarms", "Refused", "Row", "Selection", "Summary", "a_a", "compare",
    "resolve",
]  # fmt: skip

How = Literal["halves", "series"]

#: How many cases stand beside every mean.
WORST = 3
#: Exit codes of a comparison; 2 is what command lines use for "not understood".
NOTHING_SLOWER, SOME_SLOWER, NOT_DECIDED = 0, 1, 3

#: Differences of place that may explain a ratio, whatever else is equal.
_PLACE = ("jagbench", "torch", "triton", "driver", "cuda", "device")


@dataclass(frozen=True)
class Row:
    """One case on both sides.

    held: what both sides share besides the case: the hardware, or by hardware the implementation.
    baseline_seconds, candidate_seconds: medians of all samples taken.
    ratio: candidate's seconds over baseline's; low, high: its interval (`statistics.Estimate`).
    p, q: of no difference, before and after adjustment for the family; p_same, q_same: of a
        difference beyond the band.
    flags: doubts noted on the records ("baseline: throttled: ..."), and failures of the same code
        on the same case in the same place ("candidate: also wrong in session 0a1b2c3d").
    """

    case: Case
    held: str
    baseline_seconds: float
    candidate_seconds: float
    ratio: float
    low: float
    high: float
    p: float
    q: float
    p_same: float
    q_same: float
    verdict: Verdict
    flags: tuple[str, ...] = ()

    @property
    def speed_up(self) -> float:
        """Baseline's seconds over candidate's."""
        return 1.0 / self.ratio


@dataclass(frozen=True)
class Summary:
    """Geometric mean of the ratios, with the worst cases it would hide, and counts of verdicts."""

    geometric_mean: float
    worst: tuple[Row, ...]
    verdicts: Mapping[Verdict, int]


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    baseline, candidate: the sides in words. rows: worst first. refused: what was not compared.
    notes: differences of versions and drivers between the sides, and of what autotuners chose in
        records of the same code, which may explain ratios; damaged lines of a file.
    strict: whether what is undecided or refused fails (`exit_code`).
    """

    baseline: str
    candidate: str
    by: By
    band: float
    alpha: float
    rows: tuple[Row, ...]
    refused: tuple[Refused, ...]
    notes: tuple[str, ...] = ()
    strict: bool = False

    def worst(self, count: int = WORST) -> tuple[Row, ...]:
        """Rows with the largest ratios, largest first."""
        return self.rows[:count]

    @property
    def summary(self) -> Summary | None:
        """None if nothing was compared."""
        if not self.rows:
            return None
        return Summary(
            statistics.geometric_mean([row.ratio for row in self.rows]),
            self.worst(),
            _counts(self.rows),
        )

    @property
    def exit_code(self) -> int:
        """1 if a case is slower; else 3 if nothing was compared, or under `strict` if any case is
        undecided or refused; else 0.
        """
        if any(row.verdict == "slower" for row in self.rows):
            return SOME_SLOWER
        undecided = any(row.verdict == "undecided" for row in self.rows)
        if not self.rows or (self.strict and (undecided or self.refused)):
            return NOT_DECIDED
        return NOTHING_SLOWER

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        summary = self.summary
        return {
            "baseline": self.baseline,
            "candidate": self.candidate,
            "by": self.by,
            "band": self.band,
            "alpha": self.alpha,
            "strict": self.strict,
            "exit_code": self.exit_code,
            "notes": list(self.notes),
            "summary": summary and {
                "geometric_mean": summary.geometric_mean,
                "worst": [_plain(row) for row in summary.worst],
                "verdicts": dict(summary.verdicts),
            },
            "rows": [_plain(row) for row in self.rows],
            "refused": [_plain(one) for one in self.refused],
        }  # fmt: skip

    def to_json(self) -> str:
        """JSON text of `as_dict`."""
        return json.dumps(self.as_dict(), allow_nan=False, indent=2)


@dataclass(frozen=True)
class FalseAlarms:
    """What `compare` says of one implementation against itself.

    comparison: the rows; how: "halves" or "series", by row.
    alarms: rows called faster or slower; same: rows called same.
    rate: alarms over rows; upper: 95 % upper bound of the rate (Clopper and Pearson).
    """

    comparison: Comparison
    how: tuple[How, ...]
    alarms: int
    same: int
    rate: float
    upper: float

    @property
    def same_rate(self) -> float:
        """Rows called same over rows."""
        return self.same / len(self.comparison.rows)

    def to_json(self) -> str:
        """JSON text of the counts and the comparison."""
        content = {
            "alarms": self.alarms, "same": self.same, "rate": self.rate, "upper": self.upper,
            "same_rate": self.same_rate, "how": list(self.how),
            "comparison": self.comparison.as_dict(),
        }  # fmt: skip
        return json.dumps(content, allow_nan=False, indent=2)


def compare(
    baseline: Selection | Sequence[Record],
    candidate: Selection | Sequence[Record],
    *,
    band: float = 0.02,
    alpha: float = 0.05,
    by: By = "implementation",
    sessions: Sessions = "newest",
    strict: bool = False,
) -> Comparison:
    """Compare records with equal cases; ratios are candidate's seconds over baseline's.

    band: ratios within 1 + band and its inverse are the same for any practical purpose.
    alpha: level of the intervals and of both families of tests.
    by: "implementation" (or commit): the hardware must be equal; "hardware": the implementation.
    sessions: "newest" takes all samples of the session of a case's last record; "all" those of
        every session. Either way only of the source, commit and versions of that record. Which is
        last the order of the records says, not their dates.

    Refused: unlike maths, regions, workload hashes or hardware; a side whose last record of the
    case has no time to rely on; an output that was not checked or is over its allowed error; cases
    of one side alone. Raises ValueError where a side holds two implementations of one case (two
    devices, by hardware): choose one.
    """
    pairs, refused = paired(_records(baseline), _records(candidate), by, sessions)
    return Comparison(
        baseline=_label(baseline),
        candidate=_label(candidate),
        by=by,
        band=band,
        alpha=alpha,
        rows=tuple(sorted(_rows(pairs, band, alpha), key=_worst_first)),
        refused=refused,
        notes=(*_found_beside(baseline), *_found_beside(candidate), *_notes(pairs)),
        strict=strict,
    )


def a_a(records: Sequence[Record], *, band: float = 0.02, alpha: float = 0.05) -> FalseAlarms:
    """Compare each implementation with itself: every verdict faster or slower is a false alarm.

    Where there are two records or more of one case by the same source in the same place, the first
    is compared with the second, the third with the fourth (two interleaved series, or two
    sessions). Where there is one, its samples are split in the order ABBA: that tests the noise
    within the session alone.
    Raises ValueError if nothing was measured.
    """
    pairs, refused, how = _selves(records)
    if not pairs:
        raise ValueError(
            f"{len(records)} records hold no case to compare with itself: one needs "
            f"{2 * statistics.MINIMUM_SAMPLES} samples, or two records by the same source"
        )
    rows = _rows(pairs, band, alpha)
    order = sorted(range(len(rows)), key=lambda place: _worst_first(rows[place]))
    ordered = tuple(rows[place] for place in order)
    alarms = sum(row.verdict in ("faster", "slower") for row in rows)
    return FalseAlarms(
        comparison=Comparison(
            "first", "second", "implementation", band, alpha, ordered, tuple(refused), _notes(pairs)
        ),
        how=tuple(how[place] for place in order),
        alarms=alarms,
        same=sum(row.verdict == "same" for row in rows),
        rate=alarms / len(rows),
        upper=float(stats.binomtest(alarms, len(rows), alternative="less").proportion_ci().high),
    )


def _records(side: Selection | Sequence[Record]) -> Sequence[Record]:
    return side.records if isinstance(side, Selection) else side


def _label(side: Selection | Sequence[Record]) -> str:
    return side.label if isinstance(side, Selection) else describe(side)


def _found_beside(side: Selection | Sequence[Record]) -> tuple[str, ...]:
    return side.notes if isinstance(side, Selection) else ()


def _samples(records: Sequence[Record]) -> dict[str, list[float]]:
    """Session -> samples, of all records of the session in the order they were kept in."""
    samples: dict[str, list[float]] = defaultdict(list)
    for record in records:
        samples[record.session] += record.timing.samples_seconds if record.timing else ()
    return dict(samples)


def _rows(pairs: Sequence[Pair], band: float, alpha: float) -> list[Row]:
    sides = [(_samples(pair.baseline), _samples(pair.candidate)) for pair in pairs]
    estimates = [statistics.estimate(a, b, band=band, alpha=alpha) for a, b in sides]
    judgements = statistics.judge(estimates, band=band, alpha=alpha)
    return [
        Row(
            case=pair.case,
            held=pair.held,
            baseline_seconds=statistics.seconds_of(a),
            candidate_seconds=statistics.seconds_of(b),
            ratio=e.ratio,
            low=e.low,
            high=e.high,
            p=e.p,
            q=j.q,
            p_same=e.p_same,
            q_same=j.q_same,
            verdict=j.verdict,
            flags=_flags(pair),
        )
        for pair, (a, b), e, j in zip(pairs, sides, estimates, judgements, strict=True)
    ]


def _flags(pair: Pair) -> tuple[str, ...]:
    sides = (("baseline", pair.baseline), ("candidate", pair.candidate))
    found = [f"{side}: {flag}" for side, records in sides for r in records for flag in r.flags]
    return tuple(dict.fromkeys((*found, *pair.doubts)))


def _notes(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """Versions in which the two sides of any pair differ, and choices within one key."""
    found: dict[str, None] = {}
    for pair in pairs:
        a, b = pair.baseline[-1].provenance, pair.candidate[-1].provenance
        for name in _PLACE:
            if getattr(a, name) != getattr(b, name):
                found[f"{name}: baseline {getattr(a, name)}, candidate {getattr(b, name)}"] = None
    return (*found, *pairing.configurations(pairs))


def _selves(records: Sequence[Record]) -> tuple[list[Pair], list[Refused], list[How]]:
    """Pairs of the same implementation, those that are unfit, and how each pair was made."""
    same: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        if record.outcome == "measured":
            same[record.key].append(record)
    pairs: list[Pair] = []
    refused: list[Refused] = []
    how: list[How] = []
    failed = failures(records)
    for key, group in same.items():
        for first, second, kind in _twice(group):
            held = f"{first.hardware}, {first.who.name}"
            pair = Pair(first.case, held, (first,), (second,), failed.get(key, ()))
            reason = unfit(pair)
            if reason is not None:
                refused.append(reason)
                continue
            pairs.append(pair)
            how.append(kind)
    return pairs, refused, how


def _twice(
    group: Sequence[Record],
) -> list[tuple[Record, Record, How]]:
    """Records of one thing, in pairs; a single one is split in the order ABBA."""
    if len(group) > 1:
        pairs = zip(group[::2], group[1::2], strict=False)
        return [(first, second, "series") for first, second in pairs]
    (record,) = group
    assert record.timing is not None
    samples = record.timing.samples_seconds
    whole = samples[: len(samples) // 2 * 2]
    a = [whole[i] for i in range(len(whole)) if i % 4 in (0, 3)]
    b = [whole[i] for i in range(len(whole)) if i % 4 in (1, 2)]
    return [(_with(record, a), _with(record, b), "halves")] if a and b else []


def _with(record: Record, samples: Sequence[float]) -> Record:
    assert record.timing is not None
    timing = record.timing.model_copy(update={"samples_seconds": tuple(samples)})
    return record.model_copy(update={"timing": timing})


def _counts(rows: Sequence[Row]) -> dict[Verdict, int]:
    order: tuple[Verdict, ...] = ("slower", "faster", "same", "undecided")
    return {verdict: sum(row.verdict == verdict for row in rows) for verdict in order}


def _worst_first(row: Row) -> tuple[float, str, str]:
    return (-math.log(row.ratio), row.held, str(row.case))


def _plain(one: Row | Refused) -> dict[str, Any]:
    return {**asdict(one), "case": one.case.model_dump()}
