import json
import math
from datetime import UTC, datetime, timedelta

import numpy
import pytest
import recording
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jagbench import result

SAMPLES = st.lists(st.floats(min_value=1e-9, max_value=1e3), min_size=1, max_size=40)
CEILING = result.Ceiling(flop_per_second=1e6, bytes_per_second=4e6, source="x", date="2026-01-02")
FAILURES = ["unsupported", "wrong", "crashed", "timed out", "out of memory"]


@given(SAMPLES, st.floats(0.0, 1.0))
def test_quantiles_are_those_of_numpy(samples, share):
    expected = float(numpy.quantile(samples, share))
    assert result.quantile(samples, share) == pytest.approx(expected, rel=1e-12)


@given(SAMPLES)
def test_median_and_quantiles_do_not_depend_on_the_order_of_samples(samples):
    timing = result.Timing(samples_seconds=samples, clock="wall")
    backwards = result.Timing(samples_seconds=samples[::-1], clock="wall")
    assert timing.seconds == backwards.seconds == pytest.approx(float(numpy.median(samples)))
    assert (timing.low, timing.high) == (backwards.low, backwards.high)
    assert timing.low <= timing.seconds * (1 + 1e-12)
    assert timing.seconds <= timing.high * (1 + 1e-12)
    assert timing.spread >= -1e-12


def test_one_sample_has_no_spread():
    timing = result.Timing(samples_seconds=[0.5], clock="wall")
    assert (timing.low, timing.seconds, timing.high, timing.spread) == (0.5, 0.5, 0.5, 0.0)


def test_rates_are_work_over_the_median():
    made = recording.record()
    assert made.seconds == 0.002
    assert made.flop_per_second == 4000 / 0.002
    assert made.bytes_per_second == 2000 / 0.002
    assert made.sequences_per_second == 8 / 0.002


def test_utilisation_counts_model_flop_and_the_share_kernel_flop():
    made = recording.record()
    assert made.mfu(CEILING) == pytest.approx(3000 / 0.002 / 1e6)
    assert made.share(CEILING) == pytest.approx(4000 / 1e6 / 0.002)


def test_the_ideal_time_is_the_longer_of_arithmetic_and_memory():
    work = recording.record().work
    assert result.ideal_seconds(work, CEILING) == pytest.approx(4e-3)
    narrow = CEILING.model_copy(update={"bytes_per_second": 1e5})
    assert result.ideal_seconds(work, narrow) == pytest.approx(2e-2)
    memory = CEILING.model_copy(update={"flop_per_second": None})
    assert result.ideal_seconds(work, memory) == pytest.approx(5e-4)


def test_without_a_ceiling_there_is_no_share_and_no_guess():
    made = recording.record()
    unknown = CEILING.model_copy(update={"flop_per_second": None, "bytes_per_second": None})
    for ceiling in (None, unknown):
        assert result.ideal_seconds(made.work, ceiling) is None
        assert made.mfu(ceiling) is None
        assert made.share(ceiling) is None


@pytest.mark.parametrize("outcome", [*FAILURES, "invalid"])
def test_only_a_measured_record_has_rates(outcome):
    timing = recording.tree()["timing"] if outcome == "invalid" else None
    made = recording.record(outcome=outcome, reason="r", timing=timing)
    assert made.seconds is None
    assert made.flop_per_second is None
    assert made.bytes_per_second is None
    assert made.sequences_per_second is None
    assert made.mfu(CEILING) is None
    assert made.share(CEILING) is None


def refused(match, **changes):
    with pytest.raises(ValidationError, match=match):
        recording.record(**changes)


def test_an_outcome_agrees_with_its_time_and_its_reason():
    refused("needs its timing", timing=None)
    refused("'measured' has none", reason="but why")
    refused("has a reason", outcome="invalid")
    for outcome in FAILURES:
        refused("has no time", outcome=outcome, reason="r")
        refused("has a reason", outcome=outcome, timing=None)
    refused("Input should be 'measured'", outcome="fine")


CEILINGS = {"flop_per_second": 1.0, "bytes_per_second": 1.0, "source": "x", "date": "2026-01-02"}
NUMBERS = {
    "samples": {"timing__samples_seconds": lambda x: [1.0, x]},
    "second clock": {"timing__second_clock_seconds": lambda x: x},
    "error": {"accuracies": lambda x: [{"name": "out", "error": x, "allowed": 1, "naive": 1}]},
    "peak": {"datasheet": lambda x: CEILINGS | {"flop_per_second": x}},
    "bandwidth": {"measured_ceiling": lambda x: CEILINGS | {"bytes_per_second": x}},
    "clock": {"state": lambda x: {"sm_clock_hz": x}},
    "temperature": {"state": lambda x: {"temperature_celsius": x}},
    "work": {"work__flop": lambda x: x},
}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", NUMBERS.values(), ids=NUMBERS)
def test_no_number_is_nan_or_infinite(place, bad):
    refused("finite", **{key: make(bad) for key, make in place.items()})


def test_no_time_is_zero_and_no_amount_negative():
    refused("greater than or equal to 0.000000000001", timing__samples_seconds=[0.0])
    refused("greater than or equal to 0.000000000001", timing__second_clock_seconds=0.0)
    refused("at least 1 item", timing__samples_seconds=[])
    refused("greater than or equal to 0", work__bytes_moved=-1)
    refused("greater than or equal to 0.001", datasheet=CEILINGS | {"flop_per_second": 0.0})
    refused("greater than or equal to 0", state={"power_watts": -1.0})


LARGE = {
    "samples": (1.7e308, 5e-324),
    "second clock": (1e10, 1e-13),
    "error": (1e31,),
    "peak": (1e25, 1e-300),
    "bandwidth": (1e25, 1e-4),
    "clock": (1e31,),
    "temperature": (1e7, -300.0),
    "work": (10**400, 2**63),
}


@pytest.mark.parametrize(
    ("place", "bad"), [(place, bad) for place, values in LARGE.items() for bad in values]
)
def test_no_number_is_beyond_any_device(place, bad):
    refused("than or equal", **{key: make(bad) for key, make in NUMBERS[place].items()})


def test_the_largest_and_least_numbers_have_finite_rates():
    most = dict.fromkeys(recording.WORK, 2**63 - 1)
    made = recording.record(work=most, timing__samples_seconds=[1e-12])
    low = CEILING.model_copy(update={"flop_per_second": 1e-3, "bytes_per_second": 1e-3})
    for value in (made.flop_per_second, made.mfu(low), made.share(low)):
        assert math.isfinite(value)


def test_unknown_fields_and_other_versions_are_refused():
    refused("Extra inputs", seconds=1.0)
    refused("Extra inputs", who__path="x")
    refused("Input should be 1", schema_version=2)


def test_a_date_tells_its_time_zone():
    refused("timezone", date="2026-01-02T00:00:00")
    offset = result.now().utcoffset()
    assert offset == timedelta(0)
    assert result.now().microsecond == 0
    assert abs(result.now() - datetime.now(UTC)) < timedelta(minutes=1)


def test_a_record_cannot_be_changed():
    made = recording.record()
    with pytest.raises(ValidationError, match="frozen"):
        made.outcome = "wrong"


KEYED = {
    "provenance__device": "NVIDIA B200",
    "who__name": "x",
    "who__version": "x",
    "who__source": "x",
    "case__operator": "x",
    "case__workload": "x",
    "case__digest": "x",
    "case__dtype": "x",
    "case__region": "step",
    "case__mode": "steady",
    "case__preparation": "alone",
    "provenance__commit": "x",
    "provenance__dirty": True,
    "provenance__torch": "x",
    "provenance__triton": "x",
    "provenance__driver": "x",
}


def test_the_key_tells_apart_what_must_be_measured_again():
    keys = [recording.record(**{place: value}).key for place, value in KEYED.items()]
    assert len({recording.record().key, *keys}) == len(KEYED) + 1


def test_the_key_is_the_same_for_a_second_measurement():
    again = recording.record(
        date="2026-02-02T00:00:00Z", session="x", timing__samples_seconds=[9.0], flags=["f"]
    )
    assert again.key == recording.record().key


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("AMD Instinct MI300X", "amd-instinct-mi300x"),
        ("cpu (x86_64)", "cpu-x86-64"),
        ("../..", "unknown"),
        ("", "unknown"),
    ],
)
def test_hardware_names_are_lower_case_with_hyphens(device, name):
    assert result.hardware_name(device) == name


@given(st.text(max_size=40))
def test_a_hardware_name_is_a_plain_folder_name_and_stays_itself(device):
    name = result.hardware_name(device)
    assert name
    assert not set(name) & set("/\\. :\0")
    assert result.hardware_name(name) == name


def test_the_schema_refuses_what_the_model_refuses():
    schema = result.schema()
    assert schema["additionalProperties"] is False
    assert all(inner["additionalProperties"] is False for inner in schema["$defs"].values())
    assert schema["properties"]["schema_version"]["const"] == result.SCHEMA_VERSION
    assert "Infinity" not in json.dumps(schema)
