"""A measurement as a record: what ran, where, how long, how right.

Seconds, bytes and FLOP are stored; rates and shares are derived. The published JSON Schema is made
from these models (`jagbench schema`).
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

#: Raise when a field changes its meaning; `jagbench.store` keeps reading every older version.
SCHEMA_VERSION: Final = 1

Outcome = Literal[
    "measured", "unsupported", "wrong", "crashed", "timed out", "out of memory", "invalid"
]
Region = Literal["forward", "backward", "forward_backward", "step"]
Mode = Literal["cold", "steady"]
Preparation = Literal["none", "included", "excluded", "alone"]

#: Bounds keep every rate, share and ratio of two of them finite and other than zero.
Seconds = Annotated[float, Field(ge=1e-12, le=1e9, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1e-3, le=1e24, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=1e-12, le=1e24, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]


class Model(BaseModel):
    """Frozen; refuses fields it does not know, infinities, NaN and numbers beyond any device."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Who(Model):
    """An implementation.

    name: as `--impl` named it. version: its own. source: hash of the source files of the module
        (16 hex digits of SHA-256), None where they cannot be read.
    """

    name: str
    version: str
    source: str | None = None


class Case(Model):
    """One thing to measure. Records are comparable where all of it but nothing else is equal.

    digest: hash of what decides the bytes of the inputs.
    mode: "cold" (L2 flushed, one call a sample) or "steady" (back to back, over a ring of inputs).
    preparation: whether padding, masks, plans and quantisation that a caller could do beforehand
        are timed with the call ("included"), left out ("excluded"), or timed alone; "none" where
        the implementation has nothing to prepare: it then stands beside both of the first two.
    """

    operator: str
    workload: str
    digest: str
    dtype: str
    region: Region
    mode: Mode
    preparation: Preparation = "included"


def stand_beside(one: Case, other: Case) -> bool:
    """Whether two cases are alike, or apart only in that one of them has nothing to prepare."""
    preparations = {one.preparation, other.preparation}
    apart = len(preparations) == 2 and ("none" not in preparations or "alone" in preparations)
    return not apart and one.model_copy(update={"preparation": other.preparation}) == other


class Work(Model):
    """What the case asks for; visible pairs only, no padding.

    flop: kernel FLOP (backward 2.5 x forward for attention); model_flop: those MFU counts (2 x).
    bytes_moved: least bytes: inputs read once, outputs written once.
    """

    flop: Count
    model_flop: Count
    bytes_moved: Count
    sequences: Count
    tokens: Count


class Timing(Model):
    """Samples of the first clock, and what the second said.

    samples_seconds: seconds of one call, by sample; each sample spans `calls_per_sample` calls.
    unmet: the stop condition that was not reached, with its numbers; None if all were.
    second_clock_seconds: one call by the profiler, in one more sample; profiled_seconds: by the
        first clock in that same sample, which the profiler may slow down; None where there is none.
    host_seconds: what the host takes to issue one call. With CUDA events the host is given a head
        start, so that samples are the device's time alone; a caller whose device would otherwise
        be idle waits for the greater of the two. None on a CPU, where they are the same.
    peak_memory_bytes: allocated in the region beyond what was before; None on a CPU.
    """

    samples_seconds: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    calls_per_sample: Annotated[int, Field(ge=1, le=2**63 - 1)] = 1
    clock: Literal["cuda events", "wall"]
    unmet: str | None = None
    second_clock_seconds: Seconds | None = None
    profiled_seconds: Seconds | None = None
    host_seconds: Annotated[float, Field(ge=0, le=1e9)] | None = None
    peak_memory_bytes: Count | None = None

    @property
    def seconds(self) -> float:
        """Median."""
        return statistics.median(self.samples_seconds)

    @property
    def low(self) -> float:
        """20 % quantile."""
        return quantile(self.samples_seconds, 0.2)

    @property
    def high(self) -> float:
        """80 % quantile."""
        return quantile(self.samples_seconds, 0.8)

    @property
    def spread(self) -> float:
        """Distance of the 20 and 80 % quantiles over the median."""
        return (self.high - self.low) / self.seconds


class Accuracy(Model):
    """Error of one output or gradient of a timed call, against float64; absolute 2-norms."""

    name: str
    error: NotNegative
    allowed: NotNegative
    naive: NotNegative


class Ceiling(Model):
    """What one device can do at best.

    flop_per_second: dense matrix product in the record's dtype; None where not known.
    bytes_per_second: read plus write of a copy (measured), or of the memory (datasheet).
    source: "measured", or the document; date: when it was measured or read (ISO).
    """

    flop_per_second: Rate | None
    bytes_per_second: Rate | None
    source: str
    date: str


class DeviceState(Model):
    """The device while it was measured; None where the driver does not tell.

    throttled: reasons active in any reading ("power cap", "thermal", ...), none if empty.
    """

    sm_clock_hz: NotNegative | None = None
    memory_clock_hz: NotNegative | None = None
    power_watts: NotNegative | None = None
    power_limit_watts: NotNegative | None = None
    temperature_celsius: Annotated[float, Field(ge=-274, le=1e6)] | None = None
    throttled: tuple[str, ...] | None = None


class Provenance(Model):
    """Where the record was made; no host name, no path. Fields as `jagbench.environment`."""

    jagbench: str
    commit: str | None
    dirty: bool | None
    python: str
    torch: str
    triton: str | None
    numpy: str | None
    platform: str
    device: str
    driver: str | None
    cuda: str | None
    cpu: str | None = None

    @property
    def hardware(self) -> str:
        """Folder name of the device."""
        return hardware_name(self.device)


def key_of(who: Who, case: Case, place: Provenance) -> tuple[str, ...]:
    """Key of a measurement: the case, the implementation and its source, the place, the commit."""
    return (
        place.hardware, who.name, who.version, who.source or "",
        *(str(value) for value in case.model_dump().values()),
        place.commit or "", str(place.dirty), place.torch, place.triton or "", place.driver or "",
    )  # fmt: skip


class Record(Model):
    """One measurement, or why there is none.

    outcome: "measured" alone has a time to rely on. "invalid" keeps its timing for inspection: the
        reason says what is impossible about it.
    flags: doubts that do not make it invalid ("clocks disagree: ...", "throttled: ...").
    hardware: folder name of the device ("nvidia-h200").
    session: one per run of the command, and per view of a pair of which one side has nothing to
        prepare; samples of one session were taken side by side.
    configuration: kernel -> tile and other choices that an autotuner or a table made.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    date: AwareDatetime
    session: str
    hardware: str
    who: Who
    case: Case
    outcome: Outcome
    reason: str | None = None
    flags: tuple[str, ...] = ()
    work: Work
    timing: Timing | None = None
    accuracies: tuple[Accuracy, ...] = ()
    datasheet: Ceiling | None = None
    measured_ceiling: Ceiling | None = None
    state: DeviceState = DeviceState()
    configuration: dict[str, str] = Field(default_factory=dict)
    provenance: Provenance

    @model_validator(mode="after")
    def _consistent(self) -> Record:
        if self.outcome == "measured" and self.timing is None:
            raise ValueError("a measured record needs its timing")
        if self.outcome not in ("measured", "invalid") and self.timing is not None:
            raise ValueError(f"a record with outcome {self.outcome!r} has no time")
        if (self.outcome == "measured") == (self.reason is not None):
            raise ValueError("every outcome but 'measured' has a reason, and 'measured' has none")
        return self

    @property
    def key(self) -> tuple[str, ...]:
        """What a run does not measure twice (`key_of`)."""
        return key_of(self.who, self.case, self.provenance)

    @property
    def seconds(self) -> float | None:
        """Median seconds of a call; None unless measured."""
        return self.timing.seconds if self.outcome == "measured" and self.timing else None

    @property
    def flop_per_second(self) -> float | None:
        """Kernel FLOP over median seconds."""
        return self._per_second(self.work.flop)

    @property
    def bytes_per_second(self) -> float | None:
        """Least bytes over median seconds."""
        return self._per_second(self.work.bytes_moved)

    @property
    def sequences_per_second(self) -> float | None:
        """Sequences (samples) over median seconds: QPS of this operator alone."""
        return self._per_second(self.work.sequences)

    def mfu(self, ceiling: Ceiling | None) -> float | None:
        """Model FLOP utilisation against a ceiling; None where either is not known."""
        rate = self._per_second(self.work.model_flop)
        peak = ceiling.flop_per_second if ceiling else None
        return rate / peak if rate is not None and peak is not None else None

    def share(self, ceiling: Ceiling | None) -> float | None:
        """Ideal time by a ceiling's roofline over the measured time; None where not known."""
        ideal = ideal_seconds(self.work, ceiling)
        return ideal / self.seconds if ideal is not None and self.seconds else None

    def _per_second(self, amount: int) -> float | None:
        return amount / self.seconds if self.seconds else None


def failures(records: Sequence[Record]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Key of a measurement -> what else became of it, with the sessions and how often."""
    counts: dict[tuple[str, ...], Counter[tuple[str, str]]] = defaultdict(Counter)
    for record in records:
        if record.outcome != "measured":
            counts[record.key][record.outcome, record.session] += 1
    return {
        key: tuple(
            f"also {outcome} in session {session}" + (f" ({count} times)" if count > 1 else "")
            for (outcome, session), count in found.items()
        )
        for key, found in counts.items()
    }


def in_both_views(record: Record) -> tuple[Record, ...]:
    """A record with nothing to prepare as one with and one without; any other as it is."""
    if record.case.preparation != "none":
        return (record,)
    return tuple(
        record.model_copy(update={"case": record.case.model_copy(update={"preparation": view})})
        for view in ("included", "excluded")
    )


def ideal_seconds(work: Work, ceiling: Ceiling | None) -> float | None:
    """Least seconds a ceiling allows: the longer of FLOP over its rate and bytes over its own."""
    if ceiling is None:
        return None
    parts = [
        amount / rate
        for amount, rate in (
            (work.flop, ceiling.flop_per_second),
            (work.bytes_moved, ceiling.bytes_per_second),
        )
        if rate is not None
    ]
    return max(parts) if parts else None


def quantile(samples: Sequence[float], share: float) -> float:
    """Quantile by linear interpolation between order statistics."""
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def hardware_name(device_name: str) -> str:
    """Folder name of a device: "NVIDIA H200" -> "nvidia-h200"."""
    kept = "".join(c if c.isalnum() else " " for c in device_name.lower())
    return "-".join(kept.split()) or "unknown"


def now() -> datetime:
    """The time of a record: UTC, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


def schema() -> dict[str, Any]:
    """JSON Schema of a record (draft 2020-12)."""
    return Record.model_json_schema()
