"""Records in the file format of asv (airspeed velocity, format 2), written without asv.

One benchmark per operator, workload and quantity, so that its `version` can be the workload's
digest: asv joins only points of one version, and a changed workload starts a new series. What else
tells two records apart (implementation, dtype, region, mode, preparation) are its parameters.

asv takes every rise for a regression, so only `track_seconds` may be searched for them
(`regressions_first_commits` in asv.conf.json); rates are shown as graphs.

Files: `<hardware>/machine.json`, `<hardware>/<hash8>-<environment>.json`, `benchmarks.json`. No
host name, path or interpreter is in any of them, and no character with a meaning in HTML: asv's
site does not escape what it shows.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jagbench.result import Provenance, Record, hardware_name

#: Names of the parameters of every benchmark, in asv's order.
PARAMETERS = ("implementation", "dtype", "region", "mode", "preparation")

#: What asv writes for a case that was skipped; a failed one is None.
SKIPPED = math.nan

#: Format numbers that asv checks.
MACHINE_VERSION, RESULTS_VERSION, BENCHMARKS_VERSION = 1, 2, 2

_COLUMNS = ("result", "params", "version", "started_at", "duration")


@dataclass(frozen=True)
class Quantity:
    """A number asv follows over the commits.

    name: of asv's tracking function. label: in the site's lists. unit: on the graph's axis.
    better: "lower" or "higher".
    value: reads it from a measured record; None where the record has none.
    """

    name: str
    label: str
    unit: str
    better: str
    value: Callable[[Record], float | None]


def _peak_memory(record: Record) -> float | None:
    return record.timing.peak_memory_bytes if record.timing else None


def _error(record: Record) -> float | None:
    shares = [a.error / a.allowed if a.allowed else 0.0 for a in record.accuracies]
    return max(shares, default=None)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


QUANTITIES = {
    q.name: q
    for q in (
        Quantity("track_seconds", "seconds", "seconds", "lower", lambda r: r.seconds),
        Quantity("track_peak_memory", "peak memory", "bytes", "lower", _peak_memory),
        Quantity("track_error", "error", "error over allowed error", "lower", _error),
        Quantity(
            "track_tflops", "TFLOP/s", "TFLOP/s", "higher",
            lambda r: _scaled(r.flop_per_second, 1e-12),
        ),
        Quantity(
            "track_mfu", "MFU", "% of the datasheet's peak", "higher",
            lambda r: _scaled(r.mfu(r.datasheet), 100.0),
        ),
        Quantity(
            "track_bandwidth", "GB/s", "GB/s of the least traffic", "higher",
            lambda r: _scaled(r.bytes_per_second, 1e-9),
        ),
        Quantity("track_qps", "QPS", "sequences/s", "higher", lambda r: r.sequences_per_second),
    )
}  # fmt: skip

#: Values of `PARAMETERS` -> the number, None (failed) or NaN (skipped).
Values = dict[tuple[str, ...], float | None]


@dataclass
class Series:
    """One benchmark in one result file. started_at: milliseconds since 1970."""

    version: str
    started_at: int
    values: Values = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """One result file: what was measured where. The same keys on every machine."""

    hardware: str
    commit: str
    python: str
    torch: str
    triton: str

    @classmethod
    def of(cls, hardware: str, commit: str, provenance: Provenance) -> Place:
        """Place of results made on `hardware` at `commit`."""
        triton = _release(provenance.triton) if provenance.triton else "none"
        python = ".".join(provenance.python.split(".")[:2])
        return cls(hardware_name(hardware), commit, python, _release(provenance.torch), triton)

    @property
    def environment(self) -> str:
        """Name of the environment: `py3.12-torch2.11.0-triton3.6.0`."""
        return f"py{self.python}-torch{self.torch}-triton{self.triton}"

    @property
    def path(self) -> Path:
        """Result file, relative to the results folder."""
        return Path(self.hardware, f"{self.commit[:8]}-{self.environment}.json")


def benchmark_name(operator: str, workload: str, quantity: str) -> str:
    """Name of a benchmark: `gdpa.self_fill0_5_jagged.track_seconds`.

    asv splits a name at dots and takes a hyphen for the start of a parameter's index.
    """
    short = workload.removeprefix(f"{operator}-")
    return ".".join(re.sub(r"\W", "_", part) for part in (operator, short, quantity))


def pretty_name(workload: str, quantity: str) -> str:
    """Name of a benchmark on the site."""
    return _plain(f"{workload}: {QUANTITIES[quantity].label}")


def parameters_of(record: Record) -> tuple[str, ...]:
    """Values of `PARAMETERS` of a record, as asv stores them."""
    case = record.case
    values = (record.who.name, case.dtype, case.region, case.mode, case.preparation)
    return tuple(repr(_plain(value)) for value in values)


def usable(
    records: Iterable[Record], commit_dates: Mapping[str, datetime]
) -> tuple[list[Record], Counter[str]]:
    """Records that belong to a commit of the repository, and how many do not, by reason."""
    kept: list[Record] = []
    left_out: Counter[str] = Counter()
    for record in records:
        commit = record.provenance.commit
        if commit is None:
            left_out["no commit is known"] += 1
        elif commit not in commit_dates:
            left_out["the commit is not in the repository"] += 1
        elif record.provenance.dirty:
            left_out["the tree differed from its commit"] += 1
        else:
            kept.append(record)
    return kept, left_out


def write(
    records: Iterable[Record],
    results_dir: Path,
    *,
    commit_dates: Mapping[str, datetime],
) -> list[Path]:
    """Write records as result files of asv, beside those that are there; the files written.

    A record with an unusable commit (see `usable`) is left out. Of two records of one case the
    later stands, whatever its outcome: asv holds one value.
    commit_dates: full commit hash -> its date, of the repository whose history is shown.
    """
    kept, _ = usable(records, commit_dates)
    results: dict[Place, dict[str, Series]] = {}
    pretty: dict[str, str] = {}
    machines: dict[str, Record] = {}
    for record in sorted(kept, key=lambda r: r.date):
        place = Place.of(record.hardware, str(record.provenance.commit), record.provenance)
        machines[place.hardware] = record
        _add(record, results.setdefault(place, {}), pretty)
    written = [
        _write_machine(results_dir, hardware, record.provenance)
        for hardware, record in machines.items()
    ]
    for place, found in results.items():
        written.append(_merge(results_dir, place, found, commit_dates[place.commit]))
    return [*written, _index(results_dir, pretty)] if written else []


def adopt(
    asv_results: Path,
    results_dir: Path,
    *,
    hardware: str,
    commit: str,
    date: datetime,
    provenance: Provenance,
) -> list[Path]:
    """Take over what asv itself measured at `commit`, without its host name and interpreter path.

    asv_results: the folder asv wrote into, read whole: nothing else may be in it.
    """
    place = Place.of(hardware, commit, provenance)
    found: dict[str, Series] = {}
    for path in sorted(asv_results.glob("*/*.json")):
        if path.name != "machine.json":
            found.update(_read(path))
    if not found:
        return []
    listed = _load(asv_results / "benchmarks.json")
    pretty = {
        name: _plain(entry["pretty_name"])
        for name, entry in listed.items()
        if isinstance(entry, dict) and entry.get("pretty_name")
    }
    machine = _write_machine(results_dir, place.hardware, provenance)
    return [machine, _merge(results_dir, place, found, date), _index(results_dir, pretty)]


def _add(record: Record, found: dict[str, Series], pretty: dict[str, str]) -> None:
    case, started_at = record.case, _milliseconds(record.date)
    for quantity in QUANTITIES.values():
        value = _value(record, quantity)
        # Only the time says that a case failed or is unsupported: once is enough.
        if quantity.name != "track_seconds" and (value is None or math.isnan(value)):
            continue
        name = benchmark_name(case.operator, case.workload, quantity.name)
        pretty[name] = pretty_name(case.workload, quantity.name)
        series = found.setdefault(name, Series(case.digest, started_at))
        if series.version != case.digest:
            series = found[name] = Series(case.digest, started_at)
        series.started_at = started_at
        series.values[parameters_of(record)] = value


def _value(record: Record, quantity: Quantity) -> float | None:
    if record.outcome == "measured":
        return quantity.value(record)
    return SKIPPED if record.outcome == "unsupported" else None


def _write_machine(results_dir: Path, hardware: str, provenance: Provenance) -> Path:
    content = {
        "machine": hardware,
        "device": _plain(provenance.device),
        "cpu": _plain(provenance.cpu or ""),
        "version": MACHINE_VERSION,
    }
    return _save(results_dir / hardware / "machine.json", content)


def _merge(results_dir: Path, place: Place, found: Mapping[str, Series], date: datetime) -> Path:
    """Write a result file; what it holds already stays unless it is measured anew."""
    path = results_dir / place.path
    merged = _read(path)
    for name, series in found.items():
        old = merged.get(name)
        if old is not None and old.version == series.version:
            series = Series(series.version, series.started_at, old.values | series.values)
        merged[name] = series
    content = {
        "commit_hash": place.commit,
        "env_name": place.environment,
        "date": _milliseconds(date),
        "params": {
            "machine": place.hardware,
            "python": place.python,
            "torch": place.torch,
            "triton": place.triton,
        },
        "python": place.python,
        "requirements": {},
        "env_vars": {},
        "result_columns": list(_COLUMNS),
        "results": {name: _row(series) for name, series in sorted(merged.items())},
        "durations": {},
        "version": RESULTS_VERSION,
    }
    return _save(path, content)


def _row(series: Series) -> list[Any]:
    """A benchmark's columns; combinations nobody measured are None, as asv means "no result"."""
    params = _axes(series.values)
    values = [series.values.get(combination) for combination in itertools.product(*params)]
    return [values, params, series.version, series.started_at, None]


def _axes(values: Iterable[tuple[str, ...]]) -> list[list[str]]:
    """Values of each parameter that occur, sorted."""
    return [sorted(set(axis)) for axis in zip(*values, strict=True)]


def _read(path: Path) -> dict[str, Series]:
    """Series of a result file; none if there is no file."""
    if not path.exists():
        return {}
    content = _load(path)
    found = {}
    for name, row in content["results"].items():
        columns = dict(zip(content["result_columns"], row, strict=False))
        combinations = list(itertools.product(*columns["params"]))
        results = columns.get("result") or [None] * len(combinations)
        if len(combinations) != len(results):
            raise ValueError(
                f"{path.name}: {name} has {len(results)} results for {len(combinations)} "
                "combinations of parameters"
            )
        values = dict(zip(combinations, results, strict=True))
        found[name] = Series(columns["version"], columns.get("started_at") or 0, values)
    return found


def _index(results_dir: Path, pretty: Mapping[str, str]) -> Path:
    """Write `benchmarks.json`: every benchmark in any result file, in its newest version."""
    path = results_dir / "benchmarks.json"
    known = _load(path) if path.exists() else {}
    every: dict[str, list[Series]] = {}
    for file in sorted(results_dir.glob("*/*.json")):
        if file.name != "machine.json":
            for name, series in _read(file).items():
                every.setdefault(name, []).append(series)
    content: dict[str, Any] = {}
    for name, found in sorted(every.items()):
        shown = pretty.get(name) or known.get(name, {}).get("pretty_name") or name
        content[name] = _description(name, shown, found)
    return _save(path, content | {"version": BENCHMARKS_VERSION})


def _description(name: str, shown: str, found: Sequence[Series]) -> dict[str, Any]:
    quantity = QUANTITIES[name.rpartition(".")[2]]
    newest = max(found, key=lambda s: s.started_at).version
    return {
        "name": name,
        "pretty_name": shown,
        "code": f"{shown} ({quantity.unit}); {quantity.better} is better",
        "type": "track",
        "unit": quantity.unit,
        "param_names": list(PARAMETERS),
        "params": _axes(key for s in found if s.version == newest for key in s.values),
        "version": newest,
    }


def _release(version: str) -> str:
    """A version without its local part ("2.11.0+cu130" -> "2.11.0"): the machine tells that."""
    return re.sub(r"[^\w.]", "_", version.partition("+")[0])


def _plain(text: str) -> str:
    """Text without characters that mean something in HTML, in a path or in a Python string."""
    return re.sub(r"[^\w.,:;+=@/() %-]", "_", text)


def _milliseconds(date: datetime) -> int:
    return int(date.timestamp() * 1000)


def _load(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds a {type(content).__name__}, not an object")
    return content


def _save(path: Path, content: Mapping[str, Any]) -> Path:
    """Write to a temporary file, then rename: asv never reads half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, allow_nan=True)
    # Lists of numbers and names on one line each: a diff then shows the cases that changed.
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", _one_line, text)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _one_line(match: re.Match[str]) -> str:
    return "[" + re.sub(r"\n\s+", " ", match.group(1)) + "]"
