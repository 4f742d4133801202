"""Records as a GPU machine would write them, for tests of asv's format and site."""

import json
from datetime import UTC, datetime, timedelta

from jagbench.result import Accuracy, Case, Ceiling, Provenance, Record, Timing, Who, Work

START = datetime(2026, 1, 1, tzinfo=UTC)
DIGEST, OTHER_DIGEST = "0123456789abcdef", "fedcba9876543210"
SECONDS = "gdpa.self_fill0_5_jagged.track_seconds"


def record(
    seconds=1e-3,
    *,
    commit="a" * 40,
    day=0,
    workload="gdpa-self-fill0.5-jagged",
    digest=DIGEST,
    mode="cold",
    implementation="jagbench.impl",
    hardware="nvidia-h200",
    outcome="measured",
    dirty=False,
    torch="2.11.0+cu130",
    peak_memory=1 << 20,
    errors=((2.0, 4.0), (3.0, 4.0)),
):
    """A record as a GPU machine would write it; no seconds unless it is measured."""
    measured = outcome == "measured"
    samples = [seconds] if isinstance(seconds, float) else seconds
    return Record(
        date=START + timedelta(days=day, hours=1),
        session="s",
        hardware=hardware,
        who=Who(name=implementation, version="1"),
        case=Case(
            operator="gdpa",
            workload=workload,
            digest=digest,
            dtype="bfloat16",
            region="forward",
            mode=mode,
        ),
        outcome=outcome,
        reason=None if measured else "a reason",
        work=Work(flop=10**12, model_flop=10**12, bytes_moved=1, sequences=64, tokens=1),
        timing=Timing(samples_seconds=samples, clock="cuda events", peak_memory_bytes=peak_memory)
        if measured
        else None,
        accuracies=[
            Accuracy(name=f"out{n}", error=error, allowed=allowed, naive=1.0)
            for n, (error, allowed) in enumerate(errors)
        ],
        datasheet=Ceiling(
            flop_per_second=4e15, bytes_per_second=1e12, source="sheet", date="2026-01-01"
        ),
        provenance=Provenance(
            jagbench="0",
            commit=commit,
            dirty=dirty,
            python="3.12.4",
            torch=torch,
            triton="3.6.0",
            numpy="2.5.2",
            platform="Linux x86_64",
            device="NVIDIA H200",
            driver="1",
            cuda="13.0",
        ),
    )


def read(path):
    return json.loads(path.read_text())
