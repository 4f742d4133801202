"""Records made ready to be shown: the newest of each case, named, ordered, beside its peers."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from jagbench.published import Claim
from jagbench.result import (
    Case,
    Record,
    failures,
    hardware_name,
    ideal_seconds,
    in_both_views,
)

if TYPE_CHECKING:
    from jagbench.compare import Comparison

#: Regions in the order of a training step; any other comes after.
REGIONS = ("forward", "backward", "forward_backward", "step")
#: A workload whose name carries both: "<operator>-<family>-l<length>-fill<fill>-<rest>".
_GRID = re.compile(r"(?:^|-)l(?P<length>\d+)(?=-|$)|(?:^|-)fill(?P<fill>\d+(?:\.\d+)?)(?=-|$)")
_GENERATIONS = (
    "a100", "h100", "h200", "gh200", "b200", "gb200", "b300", "gb300", "mi250x", "mi300x", "mi325x",
    "mi350x", "mi355x",
)  # fmt: skip
_PEERS = "jagbench.peers."
#: Our own implementation is listed first, so that it keeps its colour whatever the peers are.
_OURS = ("jagbench.impl", "jagbench")


class View(NamedTuple):
    """What is held fixed where implementations are set beside each other."""

    hardware: str
    operator: str
    dtype: str
    mode: str
    preparation: str


@dataclass(frozen=True)
class Row:
    """A record with what the charts and tables need of its neighbours.

    implementation, case, hardware: names to show. ratio: seconds over those of the fastest *other*
    implementation measured on the same case; None where either is missing.
    length, fill, family: of workloads whose names carry both; None elsewhere.
    by_bandwidth: whether the operator is judged by bytes a second.
    """

    record: Record
    implementation: str
    case: str
    hardware: str
    ratio: float | None
    length: int | None
    fill: float | None
    family: str | None
    by_bandwidth: bool = False

    @property
    def unit(self) -> str:
        """Unit of `rate` and `roof`."""
        return "GB/s" if self.by_bandwidth else "TFLOP/s"

    @property
    def rate(self) -> float | None:
        """What the operator is judged by: useful work, or least traffic, a second; in `unit`."""
        record = self.record
        if self.by_bandwidth:
            return None if record.bytes_per_second is None else record.bytes_per_second * 1e-9
        return None if record.flop_per_second is None else record.flop_per_second * 1e-12

    @property
    def roof(self) -> float | None:
        """What a perfect kernel would reach of `rate` by the measured (else datasheet) ceilings."""
        if self.by_bandwidth:
            ceiling = self.record.measured_ceiling or self.record.datasheet
            moved = ceiling.bytes_per_second if ceiling else None
            return None if moved is None else moved * 1e-9
        return None if self.attainable is None else self.attainable * 1e-12

    @property
    def floor(self) -> float | None:
        """Share of the time in which the least bytes could be copied, at the measured rate."""
        speed, ceiling = self.record.bytes_per_second, self.record.measured_ceiling
        rate = ceiling.bytes_per_second if ceiling else None
        return speed / rate if speed and rate else None

    @property
    def view(self) -> View:
        """The comparison this row belongs to."""
        case = self.record.case
        return View(self.hardware, case.operator, case.dtype, case.mode, case.preparation)

    @property
    def grid(self) -> str | None:
        """Row of the heat map."""
        return None if self.family is None else f"{self.family}, fill {self.fill:g}"

    @property
    def attainable(self) -> float | None:
        """FLOP/s a perfect kernel would reach by the measured (else datasheet) ceilings."""
        ceiling = self.record.measured_ceiling or self.record.datasheet
        least = ideal_seconds(self.record.work, ceiling)
        return self.record.work.flop / least if least and self.record.work.flop else None

    @property
    def intensity(self) -> float | None:
        """FLOP per byte of the least traffic."""
        work = self.record.work
        return work.flop / work.bytes_moved if work.bytes_moved and work.flop else None


@dataclass(frozen=True)
class Contents:
    """All a report shows.

    older: records left out because a newer one of the same case is there.
    implementations: those with records (measured), then those whose claims can be drawn.
    by_bandwidth: operators judged by bytes a second.
    """

    rows: tuple[Row, ...]
    older: int
    implementations: tuple[str, ...]
    measured: tuple[str, ...]
    hardware: tuple[str, ...]
    cases: tuple[str, ...]
    regions: tuple[str, ...]
    views: tuple[View, ...]
    claims: tuple[Claim, ...]
    comparison: Comparison | None
    by_bandwidth: frozenset[str] = frozenset()

    def shown_implementation(self, claim: Claim) -> str:
        """The name measured rows carry where it differs by case and signs alone ("FA4", "fa4")."""
        alike = {hardware_name(name): name for name in self.measured}
        return alike.get(hardware_name(claim.implementation), claim.implementation)

    def shown_hardware(self, claim: Claim) -> str:
        """The device of a claim, by the name measured rows carry where there are any."""
        folders = {hardware_name(name): name for name in self.hardware}
        vendor, _, model = claim.hardware.partition("-")
        readable = f"NVIDIA {model.upper()}" if vendor == "nvidia" else claim.hardware
        return folders.get(claim.hardware, readable)

    def measured_beside(self, claim: Claim) -> str | None:
        """Times of the first implementation on the claim's workload and region, by device.

        Whole calls, cold before steady; None where there are none.
        """
        wanted = (claim.operator, claim.workload, claim.region, "included")
        found: dict[str, str] = {}
        for row in sorted(self.rows, key=lambda row: row.record.case.mode):
            case, seconds = row.record.case, row.record.seconds
            place = (case.operator, case.workload, case.region, row.view.preparation)
            if place == wanted and seconds and row.implementation == self.implementations[0]:
                found.setdefault(row.hardware, f"{seconds * 1e3:.4g} ms, {row.hardware}")
        return "; ".join(found.values()) or None

    def claimed_rate(self, claim: Claim) -> float | None:
        """A claim in the unit that rows of its operator have (`Row.unit`).

        Of a time only where its workload was measured, so that FLOP and bytes are known.
        """
        by_bandwidth = claim.operator in self.by_bandwidth
        if claim.quantity == ("TB/s" if by_bandwidth else "TFLOP/s"):
            return claim.value * (1e3 if by_bandwidth else 1)
        if claim.quantity != "ms" or claim.workload is None:
            return None
        wanted = (claim.operator, claim.workload, claim.region)
        for row in self.rows:
            case = row.record.case
            if (case.operator, case.workload, case.region) == wanted:
                work = row.record.work
                amount = work.bytes_moved * 1e-9 if by_bandwidth else work.flop * 1e-12
                return amount / claim.value * 1e3
        return None


def gather(
    records: Sequence[Record],
    claims: Sequence[Claim],
    comparison: Comparison | None,
    by_bandwidth: frozenset[str] = frozenset(),
) -> Contents:
    """Last record of each case, implementation and device, in the order they are shown in.

    by_bandwidth: operators whose rates are bytes a second.
    """
    chosen = newest(records)
    rows = _rows(_in_views(chosen), by_bandwidth)
    measured = sorted({r.implementation for r in rows}, key=_implementation_order)
    regions = sorted({r.record.case.region for r in rows}, key=_region_order)
    contents = Contents(
        rows=tuple(sorted(rows, key=_row_order)),
        older=len(records) - len(chosen),
        implementations=tuple(measured),
        measured=tuple(measured),
        hardware=tuple(sorted({r.hardware for r in rows}, key=generation)),
        cases=tuple(sorted({r.case for r in rows}, key=natural)),
        regions=tuple(regions),
        views=_views(rows),
        claims=tuple(sorted(claims, key=_claim_order)),
        comparison=comparison,
        by_bandwidth=by_bandwidth,
    )
    drawn = [claim for claim in claims if contents.claimed_rate(claim) is not None]
    claimed = {contents.shown_implementation(claim) for claim in drawn} - set(measured)
    return replace(contents, implementations=(*measured, *sorted(claimed, key=natural)))


def _rows(chosen: Sequence[Record], by_bandwidth: frozenset[str]) -> list[Row]:
    """Records with their names, ratios and places."""
    names = short_names([r.who.name for r in chosen])
    labels = _case_labels(chosen)
    devices = _device_names(chosen)
    ratios = _ratios(chosen)
    rows = []
    for record in chosen:
        label = labels[_workload_key(record)]
        length, fill, family = grid_position(record.case)
        if family is not None and " #" in label:
            family = f"{family} #{record.case.digest[:6]}"
        rows.append(
            Row(
                record=record,
                implementation=names[record.who.name],
                case=label,
                hardware=devices[record.hardware],
                ratio=ratios.get(id(record)),
                length=length,
                fill=fill,
                family=family,
                by_bandwidth=record.case.operator in by_bandwidth,
            )
        )
    return rows


def _in_views(records: Sequence[Record]) -> list[Record]:
    """What had nothing to prepare once for every view that others are shown in."""

    def place(record: Record) -> tuple[str, Case]:
        return record.hardware, record.case.model_copy(update={"preparation": "none"})

    without = {place(record) for record in records if record.case.preparation == "excluded"}
    return [
        view
        for record in records
        for view in in_both_views(record)
        if record.case.preparation != "none"
        or view.case.preparation == "included"
        or place(record) in without
    ]


def newest(records: Sequence[Record]) -> list[Record]:
    """The last record of each device, implementation and case: a clock may have been set back.

    One that was measured carries what else became of the same code as further doubts.
    """
    kept = {(r.hardware, r.who.name, r.case): r for r in records}
    failed = failures(records)
    return [
        r.model_copy(update={"flags": (*r.flags, *failed[r.key])})
        if r.outcome == "measured" and r.key in failed
        else r
        for r in kept.values()
    ]


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Peers of this project without their package, where that leaves no two alike."""
    unique = sorted(set(names))
    counts = Counter(name.removeprefix(_PEERS) for name in unique)
    return {n: n.removeprefix(_PEERS) if counts[n.removeprefix(_PEERS)] == 1 else n for n in unique}


def natural(text: str) -> tuple[tuple[int, float, str], ...]:
    """Sort key that counts: l512 before l1024, fill0.5 before fill1.0."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return tuple((0, float(p), "") if i % 2 else (1, 0.0, p) for i, p in enumerate(parts))


def grid_position(case: Case) -> tuple[int | None, float | None, str | None]:
    """Length, fill and the rest of a workload's name; three Nones where it lacks one of them."""
    name = case.workload.removeprefix(f"{case.operator}-")
    found = list(_GRID.finditer(name))
    lengths = [m["length"] for m in found if m["length"]]
    fills = [m["fill"] for m in found if m["fill"]]
    if len(lengths) != 1 or len(fills) != 1:
        return None, None, None
    rest = _GRID.sub("", name).strip("-") or "all"
    return int(lengths[0]), float(fills[0]), rest


def generation(hardware: str) -> tuple[int, tuple[tuple[int, float, str], ...]]:
    """Sort key of devices: by vendor and year of those we know, then by name."""
    words = hardware_name(hardware).split("-")
    known = [place for place, name in enumerate(_GENERATIONS) if name in words]
    return (known[0] if known else len(_GENERATIONS), natural(hardware))


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def _workload_key(record: Record) -> tuple[str, str, str, str]:
    case = record.case
    return (case.operator, case.workload, case.dtype, case.digest)


def _case_labels(records: Sequence[Record]) -> dict[tuple[str, str, str, str], str]:
    """Workload names without their operator; with the digest where one name means two inputs."""
    digests: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for record in records:
        digests[_workload_key(record)[:3]].add(record.case.digest)
    labels = {}
    for record in records:
        key = _workload_key(record)
        label = key[1].removeprefix(f"{key[0]}-")
        labels[key] = f"{label} #{key[3][:6]}" if len(digests[key[:3]]) > 1 else label
    return labels


def _device_names(records: Sequence[Record]) -> dict[str, str]:
    """Folder name -> what the driver calls the device; the folder where two would be alike."""
    names = {r.hardware: r.provenance.device for r in sorted(records, key=lambda r: r.date)}
    counts = Counter(names.values())
    return {folder: name if counts[name] == 1 else folder for folder, name in names.items()}


def _ratios(records: Sequence[Record]) -> dict[int, float]:
    """Object id of a record -> its seconds over the least of the other implementations."""
    groups: defaultdict[tuple[str, Case], list[Record]] = defaultdict(list)
    for record in records:
        if record.seconds is not None:
            groups[record.hardware, record.case].append(record)
    ratios = {}
    for group in groups.values():
        for record in group:
            others = [r.seconds for r in group if r is not record and r.seconds is not None]
            if others and record.seconds is not None:
                ratios[id(record)] = record.seconds / min(others)
    return ratios


def _views(rows: Sequence[Row]) -> tuple[View, ...]:
    """Every view, the one to open with first: most implementations, whole calls, cold."""
    timed = [row for row in rows if row.record.seconds is not None]
    measured = Counter(row.view for row in timed)
    who: defaultdict[View, set[str]] = defaultdict(set)
    for row in timed:
        who[row.view].add(row.implementation)

    def order(view: View) -> tuple[int, bool, bool, int, View]:
        whole, cold = view.preparation == "included", view.mode == "cold"
        return (-len(who[view]), not whole, not cold, -measured[view], view)

    return tuple(sorted({r.view for r in rows}, key=order))


def _implementation_order(name: str) -> Any:
    return (name not in _OURS, natural(name))


def _region_order(region: str) -> int:
    return REGIONS.index(region) if region in REGIONS else len(REGIONS)


def _row_order(row: Row) -> Any:
    region = _region_order(row.record.case.region)
    return (row.view, region, natural(row.case), row.implementation)


def _claim_order(claim: Claim) -> Any:
    return (claim.hardware, claim.operator, natural(claim.case), _region_order(claim.region),
            claim.model_dump_json())  # fmt: skip
