"""Write README's tables of rates from the records under results/.

    python benchmarks/readme_table.py            rewrite the block between the markers
    python benchmarks/readme_table.py --check    fail if it is not what the records say

A cell is forward / backward of the newest record (forward alone where there are no gradients),
bf16, cold, without what a caller can prepare beforehand (padding, masks, longest lengths); ours
prepares nothing and is charged for all it does.
TFLOP/s; of operators that memory binds, GB/s of the least traffic and its share of a copy's rate.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jagbench import store
from jagbench.reference import OPERATORS
from jagbench.result import Record
from jagbench.workloads import select
from jagbench.workloads.comparison import TAG

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- comparison: made by benchmarks/readme_table.py -->", "<!-- comparison ends -->"
HARDWARE = "nvidia-h200"
PEERS = "jagbench.peers."


def records() -> list[Record]:
    """Records that may stand in the table, oldest first."""
    found = [
        record
        for path in sorted((ROOT / "results" / HARDWARE).glob("*.jsonl"))
        for record in store.read(path).records
        if record.case.mode == "cold"
        and record.case.dtype == "bfloat16"
        and record.case.preparation in ("none", "excluded")
    ]
    return sorted(found, key=lambda record: record.date)


def cell(found: Sequence[Record], who: str, workload: str, regions: Sequence[str]) -> str:
    """Rates of an implementation on a workload, a region after the other."""
    parts = []
    for region in regions:
        mine = [
            record
            for record in found
            if record.who.name == who
            and record.case.workload == workload
            and record.case.region == region
        ]
        parts.append(rate(mine[-1]) if mine else "–")
    return " / ".join(parts)


def regions_of(operator: str) -> tuple[str, ...]:
    """Regions that an operator has."""
    return ("forward", "backward") if OPERATORS[operator].differentiable else ("forward",)


def rate(record: Record) -> str:
    """A record's rate in the unit of its operator, or why there is none."""
    by_bandwidth = OPERATORS[record.case.operator].bandwidth_bound
    found = record.bytes_per_second if by_bandwidth else record.flop_per_second
    if not found:
        return record.outcome
    if not by_bandwidth:
        return f"{found / 1e12:.0f}"
    ceiling = record.measured_ceiling.bytes_per_second if record.measured_ceiling else None
    return f"{found / 1e9:.0f}" + (f" ({found / ceiling:.0%})" if ceiling else "")


def table() -> str:
    """The block between the markers, an operator after the other."""
    lines: list[str] = []
    everything = records()
    for operator in OPERATORS:
        found = [record for record in everything if record.case.operator == operator]
        names = sorted(
            {r.who.name for r in found}, key=lambda name: (name != "jagbench.impl", name)
        )
        if not found:
            continue
        head = [name.removeprefix(PEERS) for name in names]
        unit = "GB/s (share of a copy's)" if OPERATORS[operator].bandwidth_bound else "TFLOP/s"
        regions = regions_of(operator)
        lines += [f"| `{operator}`, {unit} {' / '.join(regions)} | {' | '.join(head)} |"]
        lines += [f"| --- |{' --- |' * len(names)}"]
        for workload in select(operator=operator, purpose="full", tag=TAG):
            cells = [cell(found, name, workload.name, regions) for name in names]
            lines.append(f"| {workload.name.removeprefix(operator + '-')} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join([BEGIN, "", *lines, END])


def main() -> None:
    """Rewrite or check the block in README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    path = ROOT / "README.md"
    text = path.read_text()
    start, stop = text.index(BEGIN), text.index(END) + len(END)
    wanted = text[:start] + table() + text[stop:]
    if options.check and wanted != text:
        sys.exit("README.md: the table is not what the records say; run benchmarks/readme_table.py")
    if not options.check:
        path.write_text(wanted)


if __name__ == "__main__":
    main()
