"""Time calls on a device: cold or steady, with stop rules, a second clock and named doubts.

*Cold*: the last-level cache is flushed by writing twice its size, then one call is timed. *Steady*:
calls are timed back to back over a ring of inputs too large for that cache. In both, the device is
given work to do before the first event, so that the host has issued the calls by the time they
start: samples are device time, and the host's own time is kept beside them. A call that waits for
the device by itself loses that head start, as it would in training.

What is timed is a `Subject`: a ring of members whose input values are new before every call.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

#: What a call returns: outputs and gradients by name.
Outputs = Mapping[str, Tensor]
#: Bytes written to flush the caches of a CPU, and of a device that does not tell its size.
DEFAULT_CACHE_BYTES = 32 << 20
#: Taken when this is imported, as `perf_counter` is: an implementation may patch torch later. Any:
#: torch leaves its constructor without types.
_EVENT: Any = torch.cuda.Event
#: Longest head start given to the host, in seconds of device time.
LONGEST_LEAD = 0.02


class Subject(Protocol):
    """Something to time."""

    @property
    def members(self) -> int:
        """Number of members of the ring, at least 1."""
        ...

    def refresh(self, member: int) -> None:
        """Give a member new values, and do what its call needs done before (untimed)."""
        ...

    def call(self, member: int) -> Outputs:
        """The region to time."""
        ...


class Clock(Protocol):
    """Measures a function on one device."""

    name: Literal["cuda events", "wall"]

    def flush(self) -> None:
        """Push everything out of the last-level cache."""
        ...

    def time(self, function: Callable[[], Any], lead: float) -> tuple[float, float]:
        """Seconds on the device, and seconds of the host, of a function.

        lead: seconds of work the device is given first, without the cache seeing any input.
        """
        ...


class WallClock:
    """A CPU: `time.perf_counter`."""

    name: Literal["cuda events", "wall"] = "wall"

    def __init__(self, cache_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self._scratch = torch.empty(2 * cache_bytes, dtype=torch.uint8)

    def flush(self) -> None:
        """Write twice the cache's size."""
        self._scratch.zero_()

    def time(self, function: Callable[[], Any], lead: float) -> tuple[float, float]:
        """Wall-clock seconds, twice: the host is the device."""
        start = perf_counter()
        function()
        seconds = perf_counter() - start
        return seconds, seconds


class CudaClock:
    """A GPU: CUDA events on the current stream."""

    name: Literal["cuda events", "wall"] = "cuda events"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cache_bytes = _cache_bytes(device)
        self._scratch = torch.empty(2 * self.cache_bytes, dtype=torch.uint8, device=device)
        self._flush_seconds = self._time_of_flush()

    def _time_of_flush(self) -> float:
        seconds = []
        for _ in range(5):
            start, stop = self._events()
            start.record()
            self.flush()
            stop.record()
            stop.synchronize()
            seconds.append(_between(start, stop))
        return max(min(seconds), 1e-6)

    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return _EVENT(enable_timing=True), _EVENT(enable_timing=True)

    def flush(self) -> None:
        """Write twice the L2 cache's size."""
        self._scratch.zero_()

    def time(self, function: Callable[[], Any], lead: float) -> tuple[float, float]:
        """Seconds between two events around the function, after `lead` seconds of flushes."""
        start, stop = self._events()
        torch.cuda.synchronize(self.device)
        for _ in range(max(1, math.ceil(min(lead, LONGEST_LEAD) / self._flush_seconds))):
            self.flush()
        start.record()
        began = perf_counter()
        function()
        host = perf_counter() - began
        stop.record()
        stop.synchronize()
        return _between(start, stop), host


def _between(start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
    """Seconds from one event to another."""
    return float(start.elapsed_time(stop)) / 1e3


def _cache_bytes(device: torch.device) -> int:
    size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    return int(size) or DEFAULT_CACHE_BYTES


def clock_for(device: torch.device) -> WallClock | CudaClock:
    """The first clock of a device. Raises NotImplementedError for one without any."""
    if device.type == "cuda":
        return CudaClock(device)
    if device.type == "cpu":
        return WallClock()
    raise NotImplementedError(f"no clock for a device of type {device.type!r}")


@dataclass(frozen=True)
class StopRule:
    """When to begin and when to end.

    warmup_seconds: least warm-up. warmup_limit: most of it, flat or not.
    flatness: change of the median between halves of the latest calls that counts as flat.
    relative_error: half width of the median's 95 % interval, over the median, that is enough.
    least, most: samples. seconds: most time for samples, checks and refreshing included.
    """

    warmup_seconds: float = 0.1
    warmup_limit: float = 1.0
    flatness: float = 0.02
    relative_error: float = 0.01
    least: int = 24
    most: int = 200
    seconds: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"need 1 <= least <= most samples, got {self.least} and {self.most}")
        if not 0 <= self.warmup_seconds <= self.warmup_limit:
            raise ValueError(
                f"need 0 <= warmup_seconds <= warmup_limit, got {self.warmup_seconds} and "
                f"{self.warmup_limit}"
            )


#: For the interpreter on a CPU, where a call takes a thousand times longer and means little.
QUICK = StopRule(
    warmup_seconds=0.0, warmup_limit=0.0, relative_error=0.1, least=2, most=3, seconds=0.5
)


@dataclass(frozen=True)
class Sample:
    """One sample: seconds of one call on the device and on the host, and one call's outputs."""

    seconds: float
    host_seconds: float
    member: int
    outputs: Outputs


class Sampler:
    """Takes samples of a subject in one mode; alternate two of them for an A/B comparison."""

    def __init__(
        self, subject: Subject, clock: Clock, mode: Literal["cold", "steady"], rule: StopRule
    ) -> None:
        self.subject, self.clock, self.mode, self.rule = subject, clock, mode, rule
        self.samples: list[float] = []
        self.host: list[float] = []
        self._restless: str | None = None
        self._uncertain: str | None = None
        self.lead = 0.0
        self._turn = 0
        self._began: float | None = None

    @property
    def calls_per_sample(self) -> int:
        """Calls one sample spans."""
        return 1 if self.mode == "cold" else self.subject.members

    @property
    def unmet(self) -> str | None:
        """The conditions that were not reached, with their numbers; None if all were."""
        return "; ".join(filter(None, (self._restless, self._uncertain))) or None

    def warm(self, steady: Callable[[], bool] = lambda: True) -> None:
        """Call until time, clock and power are flat; `steady` says whether the last two are."""
        rule, seconds = self.rule, list[float]()
        if rule.warmup_limit == 0 and self.clock.name == "wall":
            return  # nothing to get flat, and no head start to measure
        began = perf_counter()
        while True:
            sample = self._take()
            # Twice what the host needs: it is never as quick as in its best call.
            self.lead = 2.0 * sample.host_seconds * self.calls_per_sample
            seconds.append(sample.seconds)
            del sample
            spent = perf_counter() - began
            flat = _flat(seconds, rule.flatness) and steady()
            if spent >= rule.warmup_seconds and (flat or rule.warmup_limit == 0):
                break
            if spent >= rule.warmup_limit:
                self._restless = (
                    f"not flat within {rule.flatness:.0%} after {spent:.2f} s of warm-up"
                )
                break
        self._began = None

    def take(self) -> Sample:
        """One sample that counts."""
        if self._began is None:
            self._began = perf_counter()
        sample = self._take()
        self.samples.append(sample.seconds)
        self.host.append(sample.host_seconds)
        return sample

    def done(self) -> bool:
        """Whether to stop: enough, or out of budget (then `unmet` says what was not reached)."""
        count, rule = len(self.samples), self.rule
        self._uncertain = None
        if count < rule.least:
            return False
        error = median_error(self.samples)
        if error <= rule.relative_error:
            return True
        spent = perf_counter() - (self._began or 0.0)
        if count < rule.most and spent < rule.seconds:
            return False
        limit = f"{count} samples" if count >= rule.most else f"{spent:.2f} s"
        self._uncertain = (
            f"the median is known to {error:.1%}, not to {rule.relative_error:.1%}, after {limit}"
        )
        return True

    def _take(self) -> Sample:
        return self._cold() if self.mode == "cold" else self._steady()

    def _cold(self) -> Sample:
        member = self._turn % self.subject.members
        self._turn += 1
        self.subject.refresh(member)
        kept: list[Outputs] = []
        self.clock.flush()
        seconds, host = self.clock.time(lambda: kept.append(self.subject.call(member)), self.lead)
        return Sample(seconds, host, member, kept[0])

    def _steady(self) -> Sample:
        count = self.subject.members
        witness = self._turn % count
        self._turn += 1
        for member in range(count):
            self.subject.refresh(member)
        kept: list[Outputs] = []

        def calls() -> None:
            for member in range(count):
                outputs = self.subject.call(member)
                if member == witness:
                    kept.append(outputs)

        seconds, host = self.clock.time(calls, self.lead)
        return Sample(seconds / count, host / count, witness, kept[0])


def _flat(seconds: Sequence[float], flatness: float) -> bool:
    """Whether the medians of the last calls' two halves agree."""
    if len(seconds) < 6:
        return False
    last = seconds[-min(len(seconds), 20) :]
    half = len(last) // 2
    first, second = statistics.median(last[:half]), statistics.median(last[half:])
    return abs(first - second) <= flatness * max(first, second)


def median_error(samples: Sequence[float]) -> float:
    """Half width of the median's 95 % interval over the median, from order statistics."""
    ordered = sorted(samples)
    count = len(ordered)
    reach = 0.98 * math.sqrt(count)
    low = max(0, math.floor((count - 1) / 2 - reach))
    high = min(count - 1, math.ceil((count - 1) / 2 + reach))
    return (ordered[high] - ordered[low]) / 2 / statistics.median(ordered)


def peak_memory(subject: Subject, device: torch.device) -> int | None:
    """Bytes allocated during one call beyond those before it; None on a CPU."""
    if device.type != "cuda":
        return None
    subject.refresh(0)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    outputs = subject.call(0)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del outputs
    return max(0, peak)
