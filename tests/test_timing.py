"""The timer: what it calls, when it stops, what it says of itself."""

from __future__ import annotations

import time

import pytest
import torch

from jagbench.timing import Sampler, StopRule, WallClock, median_error

NOW = StopRule(warmup_seconds=0.0, warmup_limit=0.0, least=3, most=3)


class Calls:
    """A subject that notes what is done to it."""

    def __init__(self, members=3, work=lambda: None):
        self.members = members
        self.log = []
        self.work = work

    def refresh(self, member):
        self.log.append(("refresh", member))

    def call(self, member):
        self.log.append(("call", member))
        self.work()
        return {"out": torch.tensor(member)}


class Scripted:
    """A clock that says what it is told to."""

    name = "cuda events"

    def __init__(self, seconds, host=0.0):
        self.seconds, self.host = iter(seconds), host
        self.leads, self.flushes = [], 0

    def flush(self):
        self.flushes += 1

    def time(self, function, lead):
        function()
        self.leads.append(lead)
        return next(self.seconds), self.host


def scripted(seconds, mode="cold", rule=NOW, members=2, host=0.0):
    return Sampler(Calls(members), Scripted(seconds, host), mode, rule)


@pytest.mark.parametrize("mode", ["cold", "steady"])
def test_a_call_of_known_duration_takes_that_long(mode):
    sampler = Sampler(Calls(2, lambda: time.sleep(0.01)), WallClock(1 << 10), mode, NOW)
    sampler.warm()
    while not sampler.done():
        sampler.take()
    assert all(0.01 <= seconds < 0.1 for seconds in sampler.samples)


def test_cold_flushes_and_refreshes_before_every_single_call():
    sampler = scripted([1.0] * 4)
    for _ in range(4):
        sampler.take()
    assert sampler.clock.flushes == 4
    log = sampler.subject.log
    assert log == [(what, turn % 2) for turn in range(4) for what in ("refresh", "call")]


def test_steady_refreshes_all_and_then_calls_all_back_to_back():
    sampler = scripted([9.0], mode="steady", members=3)
    sample = sampler.take()
    assert sampler.subject.log == [("refresh", m) for m in range(3)] + [
        ("call", m) for m in range(3)
    ]
    assert sample.seconds == 3.0
    assert sampler.calls_per_sample == 3
    assert int(sample.outputs["out"]) == sample.member


def test_every_member_is_a_witness_in_turn():
    sampler = scripted([1.0] * 6, mode="steady", members=3)
    assert [sampler.take().member for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_device_is_kept_busy_while_the_host_issues_the_calls():
    rule = StopRule(warmup_seconds=0.0, warmup_limit=0.0, least=3, most=3)
    sampler = scripted([1.0, 1.0], mode="steady", rule=rule, members=4, host=0.4)
    sampler.warm()
    sampler.take()
    assert sampler.clock.leads == [0.0, pytest.approx(0.8)]


def test_it_stops_once_the_median_is_known():
    rule = StopRule(0.0, 0.0, relative_error=0.01, least=5, most=100)
    sampler = scripted([1.0] * 100, rule=rule)
    while not sampler.done():
        sampler.take()
    assert len(sampler.samples) == 5
    assert sampler.unmet is None


def test_the_stop_condition_that_was_not_reached_is_named_with_its_numbers():
    rule = StopRule(0.0, 0.0, relative_error=0.01, least=4, most=8)
    sampler = scripted([1.0, 2.0] * 4, rule=rule)
    while not sampler.done():
        sampler.take()
    assert len(sampler.samples) == 8
    assert "not to 1.0%, after 8 samples" in sampler.unmet
    sampler.done()
    assert sampler.unmet.count("samples") == 1


def test_a_time_budget_ends_it_too():
    rule = StopRule(0.0, 0.0, relative_error=0.0, least=2, most=10**6, seconds=0.05)
    sampler = Sampler(Calls(2, lambda: time.sleep(0.002)), WallClock(1 << 10), "cold", rule)
    while not sampler.done():
        sampler.take()
    assert " s" in sampler.unmet.rsplit("after", 1)[1]
    assert len(sampler.samples) < 60


def test_warm_up_lasts_until_times_are_flat_and_its_samples_do_not_count():
    rule = StopRule(warmup_seconds=0.0, warmup_limit=60.0)
    sampler = scripted([10.0, 8.0, 6.0, 4.0, 2.0] + [1.0] * 50, rule=rule)
    sampler.warm()
    assert len(sampler.subject.log) // 2 > 10
    assert sampler.samples == []
    assert sampler.unmet is None


def test_warm_up_that_never_gets_flat_says_so():
    rule = StopRule(warmup_seconds=0.0, warmup_limit=0.01)
    sampler = Sampler(Calls(2, lambda: time.sleep(0.002)), WallClock(1 << 10), "cold", rule)
    sampler.warm(lambda: False)
    assert "not flat within 2%" in sampler.unmet


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"least": 0}, "got 0"), ({"least": 9, "most": 4}, "9 and 4"), ({"warmup_limit": 0.0}, "0.1")],
)
def test_a_rule_that_cannot_be_met_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        StopRule(**changes)


def test_the_error_of_a_median_shrinks_with_the_samples():
    few, many = [1.0, 1.1, 0.9] * 3, [1.0, 1.1, 0.9] * 300
    assert median_error(many) < median_error(few)
    assert median_error([2.0]) == 0.0
