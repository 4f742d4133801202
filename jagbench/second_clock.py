"""The second clock: what the torch profiler saw of a sample's kernels, on every stream."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jagbench.timing import Sampler

_REGION = "jagbench region"


@dataclass(frozen=True)
class SecondOpinion:
    """What the profiler saw of the calls of one sample.

    seconds: of one call, from the first kernel's start to the last one's end.
    first_clock: of one call, by the first clock in the same sample: it is this that must agree, for
        the profiler slows the host, and with it a call that waits for the device.
    strangers: kernels that ran on another stream than the caller's and ended after its last one,
        where CUDA events cannot see them.
    kernels: names, longest first.
    """

    seconds: float
    first_clock: float
    strangers: tuple[str, ...]
    kernels: tuple[str, ...]


def second_opinion(sampler: Sampler) -> SecondOpinion | None:
    """One more sample under the torch profiler; None where the device has no kernels to show."""
    if sampler.clock.name != "cuda events":
        return None
    clock, subject = sampler.clock, sampler.subject
    members = range(1) if sampler.mode == "cold" else range(subject.members)
    for member in members:
        subject.refresh(member)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        clock.flush()

        def calls() -> None:
            with torch.profiler.record_function(_REGION):
                for member in members:
                    subject.call(member)

        # A host under a profiler is several times slower, most of all in its first call.
        first, _ = clock.time(calls, 5.0 * sampler.lead + 5e-3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return _read_trace(events, len(members), first / len(members))


def _read_trace(
    events: Sequence[Mapping[str, Any]], calls: int, first_clock: float
) -> SecondOpinion | None:
    """Find the kernels that the region launched, whatever thread or stream they went to."""
    region = next(
        (e for e in events if e.get("name") == _REGION and e.get("cat") == "user_annotation"), None
    )
    if region is None:
        return None
    start, stop = region["ts"], region["ts"] + region["dur"]
    launches = {
        e["args"]["correlation"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
        and start <= e["ts"] <= stop
        and "correlation" in e.get("args", {})
    }
    work = [
        e
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        and e["args"].get("correlation") in launches
    ]
    if not work:
        return None
    begin = min(e["ts"] for e in work)
    end = max(e["ts"] + e["dur"] for e in work)
    own = _own_stream(events, work)
    last = max((e["ts"] + e["dur"] for e in work if e["args"]["stream"] == own), default=begin)
    strangers = sorted(
        {e["name"] for e in work if e["args"]["stream"] != own and e["ts"] + e["dur"] > last}
    )
    names: dict[str, float] = {}
    for event in work:
        names[event["name"]] = names.get(event["name"], 0.0) + event["dur"]
    ordered = tuple(sorted(names, key=lambda name: -names[name]))
    return SecondOpinion((end - begin) / 1e6 / calls, first_clock, tuple(strangers), ordered)


def _own_stream(events: Sequence[Mapping[str, Any]], work: Sequence[Mapping[str, Any]]) -> Any:
    """Stream of the flush before the region: the caller's."""
    begin = min(e["ts"] for e in work)
    before = [
        e
        for e in events
        if e.get("cat") in ("kernel", "gpu_memset") and e["ts"] < begin and e not in work
    ]
    last = max(before, key=lambda e: e["ts"], default=work[0])
    return last["args"]["stream"]
