"""The timer and its guards against kernels of known behaviour on a GPU."""

from __future__ import annotations

import pytest
import torch

from jagbench import measure, reference, result, workloads
from jagbench.implementation import of_functions
from jagbench.measure import Settings
from jagbench.second_clock import second_opinion
from jagbench.timing import CudaClock, Sampler, StopRule

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU: streams, events and the profiler"
    ),
    # autograd's own thread meets cuBLAS before it has a context, and says so.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]
WORKLOAD = workloads.CATALOGUE["jagged_attention-self-fill0.5-jagged-smoke"]
RULE = StopRule(warmup_seconds=0.02, warmup_limit=0.2, least=8, most=30, seconds=0.5)
CYCLES = 2_000_000
attention = reference.jagged_attention


def case(region="forward", mode="cold"):
    return result.Case(
        operator=WORKLOAD.operator, workload=WORKLOAD.name, digest=WORKLOAD.digest,
        dtype="float32", region=region, mode=mode,
    )  # fmt: skip


def record(function, **changes):
    return measure.measure(
        of_functions("stranger", jagged_attention=function), WORKLOAD, case(**changes),
        torch.device("cuda"), settings=Settings(RULE),
    )  # fmt: skip


class Sleeper:
    """Calls that keep the device busy for a known number of cycles."""

    members = 3

    def __init__(self, cycles):
        self.cycles = cycles

    def refresh(self, member):
        pass

    def call(self, member):
        torch.cuda._sleep(self.cycles)
        return {}


def median(mode, cycles):
    sampler = Sampler(Sleeper(cycles), CudaClock(torch.device("cuda")), mode, RULE)
    sampler.warm()
    while not sampler.done():
        sampler.take()
    return sampler, sorted(sampler.samples)[len(sampler.samples) // 2]


@pytest.mark.parametrize("mode", ["cold", "steady"])
def test_twice_the_cycles_take_twice_as_long_and_both_clocks_say_so(mode):
    _, once = median(mode, CYCLES)
    sampler, twice = median(mode, 2 * CYCLES)
    assert twice / once == pytest.approx(2.0, rel=0.05)
    opinion = second_opinion(sampler)
    assert opinion is not None
    assert opinion.seconds == pytest.approx(opinion.first_clock, rel=0.03)
    assert opinion.first_clock == pytest.approx(twice, rel=0.05)
    assert opinion.strangers == ()


@pytest.mark.parametrize("mode", ["cold", "steady"])
@pytest.mark.parametrize("region", ["forward", "backward"])
def test_a_right_implementation_is_measured_and_both_clocks_agree(region, mode):
    found = record(attention, region=region, mode=mode)
    assert found.outcome == "measured", found.reason
    assert found.timing.clock == "cuda events"
    first, second = found.timing.profiled_seconds, found.timing.second_clock_seconds
    # The reference waits for the device, and the first clock alone sees what comes before a kernel.
    assert second == pytest.approx(first, rel=0.3)
    assert found.timing.host_seconds > 0
    assert found.timing.peak_memory_bytes > 0
    assert found.measured_ceiling.bytes_per_second > 1e11


def test_work_on_a_stream_the_clock_does_not_see_is_refused():
    side = torch.cuda.Stream()

    def elsewhere(*arguments, **options):
        out = attention(*arguments, **options)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10 * CYCLES)
        return out

    found = record(elsewhere)
    assert found.outcome == "invalid"
    assert "another stream" in found.reason
    assert found.seconds is None


def test_a_side_stream_that_is_waited_for_is_fair():
    side = torch.cuda.Stream()

    def forked(*arguments, **options):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = attention(*arguments, **options)
        torch.cuda.current_stream().wait_stream(side)
        return out

    found = record(forked)
    assert found.outcome == "measured", found.reason


def test_an_output_that_was_kept_is_refused():
    kept = []

    def cached(*arguments, **options):
        if not kept:
            kept.append(attention(*arguments, **options))
        return kept[0]

    assert record(cached).outcome == "wrong"


def test_work_skipped_for_tensors_seen_before_is_refused():
    seen = {}

    def skipping(q, *arguments, **options):
        if q.data_ptr() not in seen:
            seen[q.data_ptr()] = attention(q, *arguments, **options)
        return seen[q.data_ptr()]

    assert record(skipping, mode="steady").outcome == "wrong"


def test_running_out_of_memory_is_an_outcome_and_the_next_case_is_measured():
    def greedy(q, *arguments, **options):
        torch.empty(1 << 45, dtype=torch.uint8, device=q.device)

    assert record(greedy).outcome == "out of memory"
    assert record(attention).outcome == "measured"
