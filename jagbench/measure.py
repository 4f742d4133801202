"""Measure one case of one implementation: time it, check what it computed, and make the record.

Every timed call has input values that its tensors did not hold before, and the outputs of a timed
call chosen at random, and of the last, are judged on random sequences against the truth. What is
wrong, unsupported or impossible gets its outcome and no time to rely on.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch

from jagbench import environment, hardware, result
from jagbench.checking import brief, check, outcome_of, unwritten
from jagbench.implementation import Implementation
from jagbench.inputs import Inputs
from jagbench.monitor import Monitor
from jagbench.physics import clocks_apart, physical_floor
from jagbench.ring import Ring
from jagbench.second_clock import second_opinion
from jagbench.timing import (
    Clock,
    Outputs,
    Sampler,
    StopRule,
    clock_for,
    peak_memory,
)
from jagbench.work import work
from jagbench.workload import Workload

#: A ring's inputs together hold this many times the last-level cache.
RING_OF_CACHES = 3
#: Most members of a ring: below, small inputs stay in the cache and the record says so.
MOST_MEMBERS = 64
#: Spread of the quantiles over the median that a record is flagged for.
WIDE_SPREAD = 0.05
#: Choices an implementation may describe, and the characters of each, that a record keeps.
MOST_CHOICES, MOST_TEXT = 64, 500


@dataclass(frozen=True)
class Settings:
    """How to measure.

    rule: warm-up and stop. second_clock: whether the profiler cross-checks.
    ceilings: whether the device's own ceilings are measured (once a process) and stored.
    """

    rule: StopRule = field(default_factory=StopRule)
    second_clock: bool = True
    ceilings: bool = True


@dataclass
class Measurement:
    """One case of one implementation, from set-up to record; steps may alternate with another's.

    `start`, then `step` until it returns True, then `record`.
    """

    implementation: Implementation
    workload: Workload
    case: result.Case
    device: torch.device
    settings: Settings = field(default_factory=Settings)
    session: str = "unnamed"
    _failure: tuple[result.Outcome, str] | None = None
    _accuracies: dict[str, result.Accuracy] = field(default_factory=dict)
    _flags: list[str] = field(default_factory=list)
    _strangers: tuple[str, ...] = ()
    _counted: result.Work | None = None

    def start(self, source: Inputs | None = None) -> None:
        """Draw inputs (or take the source given), make the ring, warm up, check a call."""
        self._monitor = Monitor(self.device)
        self._source = source or self.workload.inputs(self.device, self.dtype)
        self._work = self._work_of(self._source)
        self._sampler: Sampler | None = None
        self._peak: int | None = None
        self._configuration: dict[str, str] = {}
        with self._guarded():
            clock = clock_for(self.device)
            members = self._members(clock)
            ring = Ring(self.implementation, self._source, self.case, members)
            self._ring = ring
            self._describe()  # forget the launches of earlier cases
            ring.refresh(0)
            self._verify(0, ring.call(0))
            self._peak = peak_memory(ring, self.device)
            rule = self.settings.rule
            sampler = Sampler(ring, clock, self.case.mode, rule)
            sampler.warm(self._steady)
            self._witness = random.Random(secrets.randbits(64)).randrange(max(1, rule.least - 1))
            self._configuration = self._describe()
            self._sampler = sampler

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the case."""
        return getattr(torch, self.case.dtype)  # type: ignore[no-any-return]

    def step(self) -> bool:
        """One sample; True once there are enough, or something failed."""
        if self._sampler is None or self._failure:
            return True
        done = True
        with self._guarded():
            sample = self._sampler.take()
            if len(self._sampler.samples) % 8 == 1:
                self._monitor.sample()
            enough = self._sampler.done()
            if enough or len(self._sampler.samples) == self._witness + 1:
                self._verify(sample.member, sample.outputs)
            done = enough
        return done

    def record(self) -> result.Record:
        """The record, with the second clock's opinion and the physical floor."""
        timing: result.Timing | None = None
        outcome: result.Outcome = "measured"
        reason: str | None = None
        ceilings = self._ceilings()
        if self._failure is None:
            with self._guarded():
                timing = self._timing()
                reason = self._impossible(timing, ceilings)
                outcome = "invalid" if reason else "measured"
        if self._failure is not None:
            timing, (outcome, reason) = None, self._failure
        self._release()
        return result.Record(
            date=result.now(),
            session=self.session,
            hardware=self.place.hardware,
            who=self.who,
            case=self.case,
            outcome=outcome,
            reason=reason,
            flags=tuple(self._flags) if timing else (),
            work=self._work,
            timing=timing,
            accuracies=tuple(self._accuracies.values()),
            datasheet=ceilings[0],
            measured_ceiling=ceilings[1],
            state=self._monitor.state(),
            configuration=self._configuration,
            provenance=self.place,
        )

    def unmeasured(self, outcome: result.Outcome, reason: str, source: Inputs) -> result.Record:
        """A record of this case without a time."""
        return result.Record(
            date=result.now(),
            session=self.session,
            hardware=self.place.hardware,
            who=self.who,
            case=self.case,
            outcome=outcome,
            reason=reason,
            work=self._work_of(source),
            provenance=self.place,
        )

    def _work_of(self, source: Inputs) -> result.Work:
        """Counted once: the record of a crash, made before the call, needs it too."""
        if self._counted is None:
            self._counted = work(source, self.case.region)
        return self._counted

    @cached_property
    def place(self) -> result.Provenance:
        """Where this is measured."""
        return environment.provenance(self.device)

    @cached_property
    def who(self) -> result.Who:
        """Who is measured."""
        return result.Who(
            name=self.implementation.name,
            version=self.implementation.version,
            source=environment.source_hash(self.implementation.source),
        )

    @property
    def key(self) -> tuple[str, ...]:
        """Key of the record this will be."""
        return result.key_of(self.who, self.case, self.place)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turns what an implementation raises into a typed outcome."""
        try:
            yield
        except Exception as error:
            self._failure = outcome_of(error)

    def _steady(self) -> bool:
        self._monitor.sample()
        return self._monitor.steady()

    def _members(self, clock: Clock) -> int:
        """Members enough for `RING_OF_CACHES` caches; two on a CPU, whose cache is not modelled."""
        size = sum(t.nbytes for t in self._source.tensors().values())
        cache = getattr(clock, "cache_bytes", 0)
        if self.case.mode == "cold" or not cache:
            return 2
        wanted = max(2, math.ceil(RING_OF_CACHES * cache / max(1, size)))
        if wanted > MOST_MEMBERS:
            share = MOST_MEMBERS * size / cache
            self._flags.append(f"ring holds {share:.2f} caches: some inputs stay in the cache")
        return min(wanted, MOST_MEMBERS)

    def _verify(self, member: int, outputs: Outputs) -> None:
        """Judge a call's outputs on random sequences; raises Wrong with the numbers."""
        packed = self._ring.packed(member, outputs)
        given = self._ring.given(member)
        unwritten(self._ring.inputs(member), given)
        for found in check(given, packed):
            self._accuracies[found.name] = found

    def _describe(self) -> dict[str, str]:
        describe = getattr(self.implementation.namespace, "configuration", None)
        if not callable(describe):
            return {}
        try:
            found = dict(describe(self.case.operator, self._ring.inputs(0)))
        except Exception as error:  # a description is no reason to do without the time
            self._flags.append(f"configuration raised {type(error).__name__}: {brief(error, 200)}")
            return {}
        return {
            brief(name, 100): brief(value, MOST_TEXT)
            for name, value in list(found.items())[:MOST_CHOICES]
        }

    def _timing(self) -> result.Timing:
        sampler = self._sampler
        assert sampler is not None
        opinion = second_opinion(sampler) if self.settings.second_clock else None
        gpu = sampler.clock.name == "cuda events"
        timing = result.Timing(
            samples_seconds=tuple(sampler.samples),
            calls_per_sample=sampler.calls_per_sample,
            clock=sampler.clock.name,
            unmet=sampler.unmet,
            second_clock_seconds=opinion.seconds if opinion else None,
            profiled_seconds=opinion.first_clock if opinion else None,
            host_seconds=sorted(sampler.host)[len(sampler.host) // 2] if gpu else None,
            peak_memory_bytes=self._peak,
        )
        if opinion is not None:
            self._strangers = opinion.strangers
            self._configuration["launched"] = ", ".join(name[:100] for name in opinion.kernels[:6])
            if apart := clocks_apart(opinion.first_clock, opinion.seconds):
                self._flags.append(apart)
        host = timing.host_seconds
        if host is not None and host > timing.seconds:
            self._flags.append(f"the host takes {host:.3e} s to issue a call, more than the device")
        if timing.spread > WIDE_SPREAD:
            self._flags.append(f"spread {timing.spread:.1%} between the 20 and 80 % quantiles")
        if throttled := self._monitor.state().throttled:
            self._flags.append(f"throttled: {', '.join(throttled)}")
        return timing

    def _ceilings(self) -> tuple[result.Ceiling | None, result.Ceiling | None]:
        measured = None
        if self.settings.ceilings:
            measured = hardware.measured_ceiling(self.device, self.dtype)
        return hardware.datasheet(self.place.device, self.case.dtype), measured

    def _impossible(
        self,
        timing: result.Timing,
        ceilings: tuple[result.Ceiling | None, result.Ceiling | None],
    ) -> str | None:
        """Why a time cannot be: work on a stream the clock does not see, or below the floor."""
        strangers = self._strangers
        first, second = timing.profiled_seconds or 0.0, timing.second_clock_seconds or 0.0
        if strangers and second > first and clocks_apart(first, second):
            return (
                f"kernels on another stream ran on after the clock stopped: the profiler saw "
                f"{second:.3e} s a call, the events {first:.3e} s ({', '.join(strangers)})"
            )
        if self.case.preparation == "alone":
            return None
        floor = physical_floor(self._work, *self._limits(*ceilings))
        if floor is not None and timing.seconds < floor:
            return (
                f"{timing.seconds:.3e} s a call is below the physical floor of {floor:.3e} s "
                f"({self._work.model_flop} FLOP, {self._work.bytes_moved} bytes)"
            )
        return None

    def _limits(
        self, datasheet: result.Ceiling | None, measured: result.Ceiling | None
    ) -> tuple[result.Ceiling | None, result.Ceiling | None]:
        """The ceilings that bound what is possible at all.

        A CPU's caches beat its measured copy. Float32 may be made of 16-bit products, which set
        the floor where the device's documents give no figure.
        """
        if self.device.type == "cpu":
            return datasheet, None
        if self.dtype == torch.float32 and getattr(datasheet, "flop_per_second", None) is None:
            datasheet = hardware.datasheet(self.place.device, "bfloat16")
            if measured is not None:
                measured = hardware.measured_ceiling(self.device, torch.bfloat16)
        return datasheet, measured

    def _release(self) -> None:
        """Let go of the tensors, or a list of measurements would fill the device."""
        self._sampler = None
        for name in ("_ring", "_source"):
            if hasattr(self, name):
                delattr(self, name)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Within: calls and events go to this GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def finish(measurement: Measurement, source: Inputs | None = None) -> result.Record:
    """Take a measurement from set-up to record."""
    with _current(measurement.device):
        measurement.start(source)
        while not measurement.step():
            pass
        return measurement.record()


def measure(
    implementation: Implementation,
    workload: Workload,
    case: result.Case,
    device: torch.device,
    *,
    settings: Settings | None = None,
    session: str = "unnamed",
    source: Inputs | None = None,
) -> result.Record:
    """Measure one case. An implementation's failure is the record's outcome, not an exception.

    source: the workload's inputs where the caller has drawn them already.
    """
    return finish(
        Measurement(implementation, workload, case, device, settings or Settings(), session), source
    )


def measure_pair(
    first: Measurement, second: Measurement, source: Inputs | None = None
) -> tuple[result.Record, result.Record]:
    """Two measurements whose samples alternate (A B B A ...), so that drift falls on both."""
    with _current(first.device):
        first.start(source)
        second.start(source)
        done = [False, False]
        turn = 0
        while not all(done):
            order = (first, second) if turn % 2 == 0 else (second, first)
            done = [False, False]
            for which in order:
                done[0 if which is first else 1] = which.step()
            turn += 1
        return first.record(), second.record()
