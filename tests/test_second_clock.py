"""What is read out of a profiler's trace."""

from __future__ import annotations

import pytest

from jagbench.physics import clocks_apart
from jagbench.second_clock import _REGION, _read_trace


def region(start=100.0, duration=50.0):
    return {"name": _REGION, "cat": "user_annotation", "ts": start, "dur": duration}


def launch(correlation, ts):
    args = {"correlation": correlation}
    return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": ts, "dur": 1, "args": args}


def kernel(correlation, ts, duration, stream=7, name="k"):
    args = {"correlation": correlation, "stream": stream}
    return {"cat": "kernel", "name": name, "ts": ts, "dur": duration, "args": args}


FLUSH = (launch(1, 90.0), kernel(1, 95.0, 100.0, name="fill"))


def test_the_span_runs_from_the_first_kernel_of_the_region_to_the_last_of_them():
    events = [*FLUSH, region(), launch(2, 110.0), launch(3, 120.0)]
    events += [kernel(2, 200.0, 10.0, name="a"), kernel(3, 215.0, 25.0, name="b")]
    opinion = _read_trace(events, 1, 1e-3)
    assert opinion.seconds == pytest.approx(40e-6)
    assert opinion.kernels == ("b", "a")
    assert opinion.strangers == ()


def test_calls_of_a_steady_sample_share_the_span():
    events = [*FLUSH, region(), launch(2, 110.0), launch(3, 120.0)]
    events += [kernel(2, 200.0, 10.0), kernel(3, 210.0, 10.0)]
    assert _read_trace(events, 2, 1e-3).seconds == pytest.approx(10e-6)


def test_a_kernel_on_another_stream_that_runs_on_is_a_stranger():
    events = [*FLUSH, region(), launch(2, 110.0), launch(3, 120.0)]
    events += [kernel(2, 200.0, 10.0), kernel(3, 201.0, 90.0, stream=20, name="hidden")]
    opinion = _read_trace(events, 1, 1e-3)
    assert opinion.strangers == ("hidden",)
    assert opinion.seconds == pytest.approx(91e-6)


def test_work_that_is_all_on_another_stream_is_found():
    events = [*FLUSH, region(), launch(2, 110.0), kernel(2, 200.0, 10.0, stream=20, name="hidden")]
    assert _read_trace(events, 1, 1e-3).strangers == ("hidden",)


def test_a_side_stream_that_is_waited_for_is_no_stranger():
    events = [*FLUSH, region(), launch(2, 110.0), launch(3, 120.0)]
    events += [kernel(2, 200.0, 5.0, stream=20), kernel(3, 206.0, 9.0)]
    assert _read_trace(events, 1, 1e-3).strangers == ()


@pytest.mark.parametrize("events", [[], [region()], [*FLUSH, region()]])
def test_without_kernels_there_is_no_opinion(events):
    assert _read_trace(events, 1, 1e-3) is None


def test_clocks_may_differ_by_three_per_cent_or_two_microseconds():
    assert clocks_apart(1e-3, 1.029e-3) is None
    assert clocks_apart(1e-5, 1.19e-5) is None
    assert "1.000e-03" in clocks_apart(1e-3, 1.04e-3)
