"""The report of a session: one JSON file with the outcome and accuracy of every test."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jagbench.environment import Environment

#: Raise when a field changes its meaning; readers refuse what they do not know.
SCHEMA_VERSION = 1

#: Every outcome a test can have.
OUTCOMES = (
    "passed",
    "failed",
    "unsupported",
    "crashed",
    "timed out",
    "expected failure",
    "skipped",
)


@dataclass(frozen=True)
class TestRecord:
    """What became of one test.

    id: test id, without folders that depend on the machine.
    outcome: one of `OUTCOMES`.
    operator, workload, digest, dtype: what it ran on; None where a test has no such thing.
    accuracies: tensor name -> {"error", "allowed", "naive", "snr_db"}; errors are absolute 2-norms.
    reason: why it did not pass; None if it did.
    """

    __test__ = False  # not a test class, whatever its name looks like to pytest

    id: str
    outcome: str
    operator: str | None = None
    workload: str | None = None
    digest: str | None = None
    dtype: str | None = None
    accuracies: Mapping[str, Mapping[str, float]] | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"{self.id}: outcome {self.outcome!r} is none of {OUTCOMES}")


def counts(records: Sequence[TestRecord]) -> dict[str, dict[str, int]]:
    """Operator -> outcome -> number of tests; "all" holds the tests of no single operator."""
    table: dict[str, Counter[str]] = {}
    for record in records:
        table.setdefault(record.operator or "all", Counter())[record.outcome] += 1
    return {
        operator: {o: table[operator][o] for o in OUTCOMES if table[operator][o]}
        for operator in sorted(table)
    }


def write(
    path: Path,
    environment: Environment,
    session: Mapping[str, Any],
    records: Sequence[TestRecord],
) -> None:
    """Write the report, one line a test.

    session: what was asked for (implementation, its version, purpose, device, dtypes).
    """
    head = {
        "schema": SCHEMA_VERSION,
        "environment": asdict(environment),
        "session": dict(session),
        "counts": counts(records),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    rows = ",\n".join(json.dumps(_row(r), allow_nan=False) for r in sorted(records, key=_by_id))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + "\n".join(lines) + f'\n"tests": [\n{rows}\n]\n}}\n')


def read(path: Path) -> tuple[dict[str, Any], list[TestRecord]]:
    """Head and records of a report. Raises ValueError for a schema this version does not know."""
    content = json.loads(path.read_text())
    if content.get("schema") != SCHEMA_VERSION:
        raise ValueError(f"{path.name} has schema {content.get('schema')}, want {SCHEMA_VERSION}")
    records = []
    for row in content.pop("tests"):
        if "accuracies" in row:
            row["accuracies"] = {n: _floats(a) for n, a in row["accuracies"].items()}
        records.append(TestRecord(**row))
    return content, records


def _by_id(record: TestRecord) -> str:
    return record.id


def _row(record: TestRecord) -> dict[str, Any]:
    row = {key: value for key, value in asdict(record).items() if value is not None}
    if record.accuracies is not None:
        row["accuracies"] = {
            name: {key: _short(value) for key, value in accuracy.items()}
            for name, accuracy in record.accuracies.items()
        }
    return row


def _short(value: float) -> float | str:
    """Four significant digits; JSON has no word for infinity."""
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def _floats(accuracy: Mapping[str, float | str]) -> dict[str, float]:
    return {key: float(value) for key, value in accuracy.items()}
