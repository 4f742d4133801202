"""Measure what every decision of the MX recipes costs, as SQNR against float64.

    python benchmarks/sqnr.py                                   the reference, on the CPU
    python benchmarks/sqnr.py --impl=jagbench.impl --device=cuda --dtype=bfloat16

writes results/sqnr/<implementation>.json. SQNR is 10 log10(sum truth^2 / sum (found - truth)^2) in
dB; the truth is the plain operation of the same arguments in float64. Values are drawn by counter:
the same on every machine but for the last bits of an exponential. An implementation that has not
an operator has its rows named in "unsupported". `sqnr_table.py` makes docs/precision.md of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sqnr_attention import ATTENTION_MEASURES
from sqnr_bench import Bench, Row
from sqnr_linear import LINEAR_MEASURES
from sqnr_values import VALUE_MEASURES

from jagbench import environment
from jagbench.implementation import load

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = 1
SEEDS = (0, 1, 2)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Every measurement by the name of its table.
MEASURES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    **VALUE_MEASURES,
    **LINEAR_MEASURES,
    **ATTENTION_MEASURES,
}


def measure(
    name: str, dtype: torch.dtype, device: str, tables: tuple[str, ...], seeds: tuple[int, ...]
) -> dict[str, object]:
    """Rows of some tables: what was varied, and one value a seed of everything measured."""
    implementation = load(name)
    merged: dict[str, dict[str, object]] = {}
    unsupported: dict[str, str] = {}
    for table in tables:
        for seed in seeds:
            bench = Bench(implementation, dtype, torch.device(device), seed)
            try:
                for row in MEASURES[table](bench):
                    _merge(merged, table, row)
            except NotImplementedError as error:
                unsupported[table] = str(error)
                break
    kept = [row for row in merged.values() if row["table"] not in unsupported]
    return {"rows": kept, "unsupported": unsupported}


def _merge(merged: dict[str, dict[str, object]], table: str, row: Row) -> None:
    key = json.dumps([table, row.case], sort_keys=True)
    held = merged.setdefault(key, {"table": table, "case": row.case, "values": {}})
    values = held["values"]
    assert isinstance(values, dict)
    for name, value in row.values.items():
        values.setdefault(name, []).append(float(f"{value:.6g}"))


def text_of(record: dict[str, object]) -> str:
    """A record as JSON, a row a line."""
    rows = record["rows"]
    assert isinstance(rows, list)
    head = json.dumps({n: v for n, v in record.items() if n != "rows"}, indent=1)
    lines = ",\n".join(json.dumps(row) for row in rows)
    return f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n'


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impl", default="jagbench.reference")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    where, start = environment.detect(options.device), time.monotonic()
    found = measure(options.impl, DTYPES[options.dtype], options.device, tuple(MEASURES), SEEDS)
    command = f"python benchmarks/sqnr.py --impl={options.impl} --device={options.device}"
    record: dict[str, object] = {
        "schema": SCHEMA,
        "command": f"{command} --dtype={options.dtype}",
        "implementation": options.impl,
        "dtype": options.dtype,
        "seeds": list(SEEDS),
        "seconds": round(time.monotonic() - start),
        "environment": dataclasses.asdict(where),
        **found,
    }
    name = options.impl if options.dtype == "float32" else f"{options.impl}.{options.dtype}"
    path = options.out or ROOT / "results" / "sqnr" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(record))
    print(f"{path}: {len(found['rows'])} rows, {record['seconds']} s")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
