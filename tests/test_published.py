import json
import math

import pytest
from pydantic import ValidationError
from repository import ROOT

from jagbench.published import Claim, read
from jagbench.result import Record, hardware_name
from jagbench.workloads import CATALOGUE

PATH = ROOT / "results" / "published.jsonl"
CLAIMS = read(PATH)

CLAIM = {
    "source": "Their post",
    "date": "2026-06",
    "citation": "https://example.org/post",
    "hardware": "nvidia-b200",
    "implementation": "theirs",
    "operator": "gdpa",
    "case": "B 2, L 64",
    "region": "forward",
    "quantity": "TFLOP/s",
    "value": 1000.0,
}
MEASUREMENT = {
    "schema_version": 1,
    "date": "2026-11-30T12:00:00Z",
    "session": "s",
    "hardware": "nvidia-h200",
    "who": {"name": "theirs", "version": "1"},
    "case": {
        "operator": "gdpa",
        "workload": "w",
        "digest": "d",
        "dtype": "bfloat16",
        "region": "forward",
        "mode": "cold",
    },
    "outcome": "unsupported",
    "reason": "no",
    "work": {"flop": 1, "model_flop": 1, "bytes_moved": 1, "sequences": 1, "tokens": 1},
    "provenance": {
        "jagbench": "0",
        "commit": None,
        "dirty": None,
        "python": "3",
        "torch": "2",
        "triton": None,
        "numpy": None,
        "platform": "p",
        "device": "d",
        "driver": None,
        "cuda": None,
    },
}


def select(**wanted):
    return [c for c in CLAIMS if all(getattr(c, name) == value for name, value in wanted.items())]


def only(**wanted):
    [claim] = select(**wanted)
    return claim


def test_the_record_and_the_claim_of_these_tests_are_valid():
    assert Record.model_validate(MEASUREMENT).outcome == "unsupported"
    assert Claim.model_validate(CLAIM).value == 1000.0


def test_a_measurement_is_refused_among_claims(tmp_path):
    path = tmp_path / "published.jsonl"
    path.write_text(f"{json.dumps(CLAIM)}\n\n{json.dumps(MEASUREMENT)}\n")
    with pytest.raises(ValueError, match="line 3: this is a measurement, not a claim"):
        read(path)


def test_a_claim_is_refused_as_a_measurement():
    for line in PATH.read_text().splitlines():
        with pytest.raises(ValidationError):
            Record.model_validate_json(line)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value": 0.0}, "value"),
        ({"value": -1.0}, "value"),
        ({"tolerance": -5.0}, "tolerance"),
        ({"quantity": "GFLOP/s"}, "quantity"),
        ({"region": "sideways"}, "region"),
        ({"date": "June 2026"}, "date"),
        ({"date": "2026-13"}, "date"),
        ({"citation": ""}, "citation"),
        ({"seconds": 1.0}, "seconds"),
        ({"claim_version": 2}, "claim_version"),
        ({"quantity": "ratio"}, "baseline"),
        ({"baseline": "FA4"}, "baseline"),
        ({"quantity": "share", "value": 57.0}, "at most 1, got 57"),
    ],
)
def test_what_is_no_claim_is_refused_with_its_line(tmp_path, changes, words):
    path = tmp_path / "published.jsonl"
    path.write_text(f"{json.dumps(CLAIM)}\n{json.dumps(CLAIM | changes)}\n")
    with pytest.raises(ValueError, match=rf"published.jsonl, line 2: .*{words}"):
        read(path)


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_a_claim_is_a_finite_number(tmp_path, value):
    path = tmp_path / "published.jsonl"
    path.write_text(json.dumps(CLAIM).replace("1000.0", value))
    with pytest.raises(ValueError, match="line 1"):
        read(path)


def test_a_torn_line_is_refused(tmp_path):
    path = tmp_path / "published.jsonl"
    path.write_text(json.dumps(CLAIM)[:40])
    with pytest.raises(ValueError, match="line 1: not JSON"):
        read(path)


def test_a_claim_cannot_be_changed():
    with pytest.raises(ValidationError):
        CLAIMS[0].value = 1.0


def test_a_claim_comes_back_from_its_line_as_it_was():
    assert [Claim.model_validate_json(c.model_dump_json()) for c in CLAIMS] == CLAIMS


def test_no_claim_stands_twice():
    keys = [
        (c.source, c.hardware, c.implementation, c.operator, c.case, c.region, c.quantity)
        for c in CLAIMS
    ]
    assert len(keys) == len(set(keys))


def test_every_claim_names_its_source_and_blackwell_hardware():
    assert {claim.hardware for claim in CLAIMS} == {"nvidia-b200", "nvidia-gb200"}
    assert all(hardware_name(claim.hardware) == claim.hardware for claim in CLAIMS)
    assert len({(claim.source, claim.date, claim.citation) for claim in CLAIMS}) == len(
        {claim.source for claim in CLAIMS}
    )


def test_every_workload_of_a_claim_is_in_the_catalogue_and_of_its_operator():
    named = [claim for claim in CLAIMS if claim.workload is not None]
    assert len(named) >= 60
    for claim in named:
        assert CATALOGUE[claim.workload].operator == claim.operator


def test_the_chart_of_the_kernel_library_is_whole_and_says_how_it_was_read():
    chart = select(source="AMKL")
    assert len(chart) == 6 * 4 * 4
    assert {claim.tolerance for claim in chart} == {5.0}
    assert all("digitised from a chart" in claim.note for claim in chart)
    assert {claim.quantity for claim in chart} == {"TFLOP/s"}


@pytest.mark.parametrize(
    ("implementation", "case", "region", "value"),
    [
        ("CuTe GDPA", "B 1152, H 4, d 128, self 2048, fill 1.0", "forward", 1144.0),
        ("CuTe GDPA", "B 1152, H 4, d 128, self 2048, fill 1.0", "backward", 702.0),
        ("FA4", "B 1152, H 4, d 128, self 256, fill 1.0", "forward", 171.0),
        (
            "CUTLASS FMHA",
            "B 1152, H 4, d 128, self 1024, fill 0.5, keys dense at full length",
            "backward",
            342.0,
        ),
        ("Triton GDPA", "B 1152, H 4, d 128, cross 512 x 256, fill 1.0", "forward", 358.0),
    ],
)
def test_points_of_the_chart_stand_where_they_were_drawn(implementation, case, region, value):
    assert only(source="AMKL", implementation=implementation, case=case, region=region).value == (
        value
    )


def test_the_headline_is_the_best_point_of_the_chart_within_its_tolerance():
    headline = only(source="GDPA blog", quantity="TFLOP/s")
    best = max(select(source="AMKL"), key=lambda claim: claim.value)
    assert headline.workload == best.workload
    assert abs(headline.value - best.value) <= best.tolerance


def test_published_ratios_agree_with_the_published_times():
    checked = 0
    for ratio in select(
        source="Block attention blog", operator="block_attention", quantity="ratio"
    ):
        where = {"case": ratio.case, "region": ratio.region, "quantity": "ms"}
        slow = only(implementation=ratio.baseline, **where)
        fast = only(implementation=ratio.implementation, **where)
        assert math.isclose(slow.value / fast.value, ratio.value, rel_tol=5e-3)
        checked += 1
    assert checked == 4


def test_what_was_assumed_of_a_claim_is_in_its_note():
    for claim in select(source="GEM 2026"):
        assert "assumed" in claim.note
