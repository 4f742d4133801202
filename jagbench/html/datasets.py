"""The numbers behind the charts, as compact tables the page turns into objects."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jagbench.html.markup import LARGEST
from jagbench.html.rows import Contents, Row, View
from jagbench.published import Claim
from jagbench.result import Accuracy, Ceiling, Record, Timing

if TYPE_CHECKING:
    from jagbench.compare import Comparison, Refused
    from jagbench.compare import Row as Compared

#: One value of a table.
Value = str | float | int | None
#: Outputs and gradients in the order of a step; others after these.
_TENSORS = ("out", "lse", "grad q", "grad k", "grad v")
#: Cases whose intensities are nearer than this factor share a label.
_NEAR = 1.22
#: Error over allowed is drawn between these; the tip and the table have the exact figure.
ERROR_FLOOR, ERROR_TOP = 1e-3, 1e2
#: A view's fields, by which the page filters every table that has them.
VIEW = ("hardware", "operator", "dtype", "mode", "preparation")


def datasets(contents: Contents) -> dict[str, dict[str, Any]]:
    """Name -> {"fields": names, "rows": lists of values}."""
    labels = _labels(contents)
    return {
        "rows": _table(_row(row, labels.get(place)) for place, row in enumerate(contents.rows)),
        "errors": _table(_errors(contents)),
        "ceilings": _table(_ceilings(contents)),
        "generations": _table(_generations(contents)),
        "comparison": _table(_comparison(contents)),
    }


def embedded(value: object) -> str:
    """JSON that may stand in a script element: no `<`, `>` or `&`, ASCII alone."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), sort_keys=True)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def claimed_case(claim: Claim) -> str:
    """The case of a claim, by the name measured rows carry where it names their workload."""
    return claim.workload.removeprefix(f"{claim.operator}-") if claim.workload else claim.case


def scaled(value: float | None, factor: float) -> float | None:
    """Times a factor, to four digits; None where there is none or it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value * factor:.4g}")


def _table(entries: Iterable[Mapping[str, Value]]) -> dict[str, Any]:
    listed = list(entries)
    fields = list(listed[0]) if listed else []
    return {"fields": fields, "rows": [[entry[field] for field in fields] for entry in listed]}


def _row(row: Row, label: str | None) -> dict[str, Value]:
    record = row.record
    measured = record.outcome == "measured"
    note = record.outcome if not measured else "; ".join(record.flags)
    entry: dict[str, Value] = {
        **row.view._asdict(),
        "region": record.case.region,
        "case": row.case,
        "implementation": row.implementation,
        "outcome": record.outcome,
        "note": f"{record.outcome}: {record.reason}" if not measured else note,
        "milliseconds": scaled(record.seconds, 1e3),
        "rate": scaled(row.rate, 1),
        "roof": scaled(row.roof, 1),
        "unit": row.unit,
        "teraflops": scaled(record.flop_per_second, 1e-12),
        "gigabytes": scaled(record.bytes_per_second, 1e-9),
        "intensity": scaled(row.intensity, 1),
        "attainable": scaled(row.attainable, 1e-12),
        "share": scaled(record.share(record.measured_ceiling), 100),
        "ratio": scaled(row.ratio, 1),
        "label": label,
        "length": row.length,
        "grid": row.grid,
    }
    return entry | _spread(record.timing if measured else None)


def _spread(timing: Timing | None) -> dict[str, Value]:
    """Samples as percent off the median."""
    if timing is None:
        return {"least": None, "low": None, "high": None, "most": None, "samples": None}
    samples, median = timing.samples_seconds, timing.seconds
    places = {
        "least": min(samples), "low": timing.low, "high": timing.high, "most": max(samples),
    }  # fmt: skip
    entry: dict[str, Value] = {k: scaled(v / median - 1, 100) for k, v in places.items()}
    return entry | {"samples": len(samples)}


def _errors(contents: Contents) -> Iterable[dict[str, Value]]:
    """One entry an output or gradient; of a record without any, one for each its peers have."""
    names = _tensors(contents)
    known = sorted({name for found in names.values() for name in found}, key=_tensor_order)
    for row in contents.rows:
        record = row.record
        start: dict[str, Value] = {
            **row.view._asdict(),
            "region": record.case.region,
            "case": row.case,
            "implementation": row.implementation,
            "outcome": record.outcome if record.outcome != "measured" else "not checked",
            "note": f"{record.outcome}: {record.reason}" if record.reason else record.outcome,
        }
        found = {a.name: a for a in record.accuracies}
        for name in found or names[row.view.operator, record.case.region]:
            entry: dict[str, Value] = {**start, "tensor": name, "order": known.index(name)}
            yield entry | _over_budget(found.get(name))


def _over_budget(accuracy: Accuracy | None) -> dict[str, Value]:
    """Error over allowed, and where it is drawn."""
    if accuracy is None:
        return {"ratio": None, "drawn": None, "error": None, "allowed": None}
    ratio = min(accuracy.error / accuracy.allowed, LARGEST) if accuracy.allowed else None
    shown = ratio
    if shown is None:
        shown = ERROR_TOP if accuracy.error else ERROR_FLOOR
    return {
        "ratio": scaled(ratio, 1),
        "drawn": scaled(min(max(shown, ERROR_FLOOR), ERROR_TOP), 1),
        "error": scaled(accuracy.error, 1),
        "allowed": scaled(accuracy.allowed, 1),
    }


def _tensors(contents: Contents) -> dict[tuple[str, str], list[str]]:
    """Operator and region -> names of all outputs and gradients somebody was judged by."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in contents.rows:
        known = names.setdefault((row.view.operator, row.record.case.region), [])
        known += [a.name for a in row.record.accuracies if a.name not in known]
    return names


def _tensor_order(name: str) -> tuple[int, str]:
    return (_TENSORS.index(name) if name in _TENSORS else len(_TENSORS), name)


def _ceilings(contents: Contents) -> Iterable[dict[str, Value]]:
    """Corners of every roofline, over the intensities that were measured."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in contents.rows:
        groups.setdefault((row.hardware, row.record.case.dtype), []).append(row)
    for (hardware, dtype), rows in groups.items():
        found = [row.intensity for row in rows if row.intensity]
        if not found:
            continue
        for kind in ("measured", "datasheet"):
            ceiling = ceiling_of(rows, kind)
            if ceiling is None:
                continue
            for intensity, rate in roof(ceiling, min(found) / 2, max(found) * 2):
                yield {
                    "hardware": hardware, "dtype": dtype, "ceiling": f"{kind} ceiling",
                    "intensity": scaled(intensity, 1), "teraflops": scaled(rate, 1e-12),
                }  # fmt: skip


def ceiling_of(rows: Iterable[Row], kind: str) -> Ceiling | None:
    """The ceiling of the newest record that has one. kind: "measured" or "datasheet"."""
    found = [
        (row.record.date, ceiling.model_dump_json(), ceiling)
        for row in rows
        if (ceiling := _ceiling(row.record, kind)) is not None
    ]
    return max(found, key=lambda entry: entry[:2])[2] if found else None


def _ceiling(record: Record, kind: str) -> Ceiling | None:
    return record.measured_ceiling if kind == "measured" else record.datasheet


def _labels(contents: Contents) -> dict[int, str]:
    """Place of a row -> names over a roofline, those of like intensity in one label."""
    groups: dict[tuple[View, str], list[tuple[float, int]]] = {}
    for place, row in enumerate(contents.rows):
        if row.intensity is not None:
            key = (row.view, row.record.case.region)
            groups.setdefault(key, []).append((row.intensity, place))
    labels = {}
    for entries in groups.values():
        clusters: list[list[tuple[float, int]]] = []
        for entry in sorted(entries):
            if clusters and entry[0] < clusters[-1][0][0] * _NEAR:
                clusters[-1].append(entry)
            else:
                clusters.append([entry])
        for cluster in clusters:
            names = list(dict.fromkeys(contents.rows[place].case for _, place in cluster))
            more = [f"+ {len(names) - 1} more"] if len(names) > 2 else names[1:]
            labels[cluster[0][1]] = "\n".join([names[0], *more])
    return labels


def roof(ceiling: Ceiling, low: float, high: float) -> list[tuple[float, float]]:
    """Corners (FLOP per byte, FLOP/s) of a roofline between two intensities."""
    flop, moved = ceiling.flop_per_second, ceiling.bytes_per_second
    if moved is None:
        return [] if flop is None else [(low, flop), (high, flop)]
    if flop is None:
        return [(low, low * moved), (high, high * moved)]
    ridge = flop / moved
    inside = [ridge] if low < ridge < high else []
    return [(x, min(x * moved, flop)) for x in (low, *inside, high)]


def _generations(contents: Contents) -> Iterable[dict[str, Value]]:
    """Measurements and claims as rates; what a claim leaves open is None and passes filters."""
    for row in contents.rows:
        record = row.record
        yield {
            **row.view._asdict(),
            "region": record.case.region,
            "panel": _panel(row.case, record.case.region, row.by_bandwidth),
            "order": contents.cases.index(row.case),
            "implementation": row.implementation,
            "kind": "measured",
            "rate": scaled(row.rate, 1),
            "milliseconds": scaled(record.seconds, 1e3),
            "note": "" if record.seconds else f"{record.outcome}: {record.reason}",
        }
    for claim in contents.claims:
        rate = contents.claimed_rate(claim)
        if rate is None:
            continue
        case = claimed_case(claim)
        yield {
            "hardware": contents.shown_hardware(claim),
            "operator": claim.operator,
            "dtype": claim.dtype,
            "mode": None,
            "preparation": None,
            "region": claim.region,
            "panel": _panel(case, claim.region, claim.operator in contents.by_bandwidth),
            "order": contents.cases.index(case) if case in contents.cases else len(contents.cases),
            "implementation": contents.shown_implementation(claim),
            "kind": "claim",
            "rate": scaled(rate, 1),
            "milliseconds": None,
            "note": f"claim: {claim.source}, {claim.date}",
        }


def _panel(case: str, region: str, by_bandwidth: bool) -> str:
    """Name of a panel; its unit where that is not TFLOP/s."""
    return " · ".join([case, region, *(["GB/s"] if by_bandwidth else [])])


def _comparison(contents: Contents) -> Iterable[dict[str, Value]]:
    comparison = contents.comparison
    if comparison is None:
        return
    for row in comparison.rows:
        yield {
            "case": compared_name(comparison, row),
            "ratio": scaled(row.ratio, 1),
            "low": scaled(row.low, 1),
            "high": scaled(row.high, 1),
            "verdict": row.verdict,
        }


def compared_name(comparison: Comparison, row: Compared | Refused) -> str:
    """A compared case in words; with what both sides share where that is not one for all."""
    case = row.case
    parts = [case.workload, case.dtype, case.region, case.mode]
    if case.preparation not in ("none", "included"):
        parts.append(case.preparation)
    held = {one.held for one in comparison.rows} | {one.held for one in comparison.refused}
    if len(held) > 1:
        parts.append(f"({row.held})")
    return " ".join(parts)
