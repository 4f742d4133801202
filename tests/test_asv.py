"""Records in asv's format: names, files, values."""

import json
import math
import re

import pytest
from asv_records import DIGEST, OTHER_DIGEST, SECONDS, START, read, record

from jagbench import asv_format


def dates_of(*records):
    return {r.provenance.commit: r.date for r in records}


def write(folder, *records):
    return asv_format.write(records, folder, commit_dates=dates_of(*records))


def result_file(folder):
    (path,) = (p for p in folder.glob("*/*.json") if p.name != "machine.json")
    return read(path)


def values_of(content, name):
    """Parameters -> value of a benchmark in a result file."""
    asv_values, axes, *_ = content["results"][name]
    combinations = [()]
    for axis in axes:
        combinations = [(*c, value.strip("'")) for c in combinations for value in axis]
    return dict(zip(combinations, asv_values, strict=True))


def value_of(folder, quantity, **changes):
    write(folder, record(**changes))
    (value,) = values_of(result_file(folder), SECONDS.replace("track_seconds", quantity)).values()
    return value


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [
        ("track_seconds", 2e-3),
        ("track_peak_memory", 1 << 20),
        ("track_error", 0.75),
        ("track_tflops", 500.0),
        ("track_mfu", 12.5),
        ("track_qps", 32000.0),
        ("track_bandwidth", 5e-7),
    ],
)
def test_a_record_becomes_a_number_of_each_quantity(tmp_path, quantity, expected):
    assert value_of(tmp_path, quantity, seconds=[1e-3, 2e-3, 9e-3]) == pytest.approx(expected)


def test_the_file_is_named_by_hardware_commit_and_versions_alone(tmp_path):
    paths = write(tmp_path, record())
    names = [str(p.relative_to(tmp_path)) for p in paths]
    assert names == [
        "nvidia-h200/machine.json",
        "nvidia-h200/aaaaaaaa-py3.12-torch2.11.0-triton3.6.0.json",
        "benchmarks.json",
    ]


def test_every_machine_has_the_same_parameters(tmp_path):
    write(tmp_path, record(), record(hardware="cpu-x86-64", torch="2.13.0"))
    contents = [read(p) for p in tmp_path.glob("*/*.json") if p.name != "machine.json"]
    assert len({tuple(c["params"]) for c in contents}) == 1
    assert {c["params"]["machine"] for c in contents} == {"nvidia-h200", "cpu-x86-64"}


def test_an_unsupported_case_is_skipped_and_a_failed_one_has_no_value(tmp_path):
    write(
        tmp_path,
        record(implementation="a", outcome="unsupported"),
        record(implementation="b", outcome="wrong"),
        record(1e-3, implementation="c"),
    )
    content = result_file(tmp_path)
    values = {key[0]: value for key, value in values_of(content, SECONDS).items()}
    assert math.isnan(values["a"])
    assert values["b"] is None
    assert values["c"] == 1e-3
    rates = values_of(content, SECONDS.replace("seconds", "tflops"))
    assert {key[0] for key in rates} == {"c"}


def test_a_quantity_that_a_machine_cannot_have_is_not_listed(tmp_path):
    write(tmp_path, record(peak_memory=None))
    assert not [name for name in result_file(tmp_path)["results"] if "peak_memory" in name]


def test_a_combination_that_nobody_measured_has_no_value(tmp_path):
    write(
        tmp_path,
        record(1e-3, implementation="a", mode="cold"),
        record(2e-3, implementation="b", mode="steady"),
    )
    values = values_of(result_file(tmp_path), SECONDS)
    assert len(values) == 4
    assert values["a", "bfloat16", "forward", "steady", "included"] is None


def test_later_records_join_those_that_were_written_before(tmp_path):
    write(tmp_path, record(1e-3, implementation="a"), record(5e-3, implementation="b"))
    write(tmp_path, record(2e-3, implementation="b", day=1))
    values = values_of(result_file(tmp_path), SECONDS)
    assert {key[0]: value for key, value in values.items()} == {"a": 1e-3, "b": 2e-3}


def test_of_two_records_of_one_case_the_later_stands(tmp_path):
    write(tmp_path, record(2e-3, day=1), record(1e-3, day=0))
    assert list(values_of(result_file(tmp_path), SECONDS).values()) == [2e-3]


def test_a_changed_workload_starts_a_new_series(tmp_path):
    write(tmp_path, record(1e-3, digest=DIGEST))
    write(tmp_path, record(1e-3, digest=OTHER_DIGEST, day=1, commit="b" * 40))
    assert read(tmp_path / "benchmarks.json")[SECONDS]["version"] == OTHER_DIGEST
    # An old record written again changes nothing about that.
    write(tmp_path, record(1e-3, digest=DIGEST))
    assert read(tmp_path / "benchmarks.json")[SECONDS]["version"] == OTHER_DIGEST


def test_the_list_of_benchmarks_has_the_parameters_of_all_machines(tmp_path):
    write(tmp_path, record(implementation="jagbench.impl"))
    write(tmp_path, record(implementation="theirs", hardware="nvidia-a100"))
    listed = read(tmp_path / "benchmarks.json")[SECONDS]
    assert listed["param_names"] == list(asv_format.PARAMETERS)
    assert listed["params"][0] == ["'jagbench.impl'", "'theirs'"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"commit": None}, "no commit is known"),
        ({"commit": "b" * 40}, "the commit is not in the repository"),
        ({"dirty": True}, "the tree differed from its commit"),
    ],
)
def test_a_record_of_no_commit_is_left_out_and_counted(tmp_path, change, reason):
    kept, left_out = asv_format.usable([record(**change), record()], {"a" * 40: START})
    assert len(kept) == 1
    assert left_out == {reason: 1}
    assert not asv_format.write([record(**change)], tmp_path, commit_dates={"a" * 40: START})
    assert not list(tmp_path.iterdir())


def test_a_name_has_no_dot_or_hyphen_that_asv_would_read_as_its_own():
    name = asv_format.benchmark_name("gdpa", "gdpa-self-l512-fill0.5", "track_seconds")
    assert name == "gdpa.self_l512_fill0_5.track_seconds"
    assert name.count(".") == 2
    assert "-" not in name


def test_no_text_of_a_record_can_become_markup_or_leave_the_folder(tmp_path):
    paths = write(
        tmp_path,
        record(
            implementation="<script>alert(1)</script>'\"",
            workload="<img src=x onerror=alert(1)>",
            hardware="../../elsewhere",
        ),
    )
    assert all(tmp_path in path.resolve().parents for path in paths)
    text = "".join(path.read_text() for path in paths)
    assert not re.search("[<>&]", text)


def test_what_asv_measured_itself_is_taken_over_without_its_paths(tmp_path):
    theirs = tmp_path / "theirs" / "some-host"
    theirs.mkdir(parents=True)
    (theirs / "machine.json").write_text('{"machine": "some-host", "version": 1}')
    listed = {SECONDS: {"name": SECONDS, "pretty_name": "gdpa: seconds"}, "version": 2}
    (theirs.parent / "benchmarks.json").write_text(json.dumps(listed))
    row = [[1.0, float("nan")], [["'a'"], ["'b'"], ["'c'"], ["'d'"], ["'e'", "'f'"]], DIGEST, 5]
    content = {
        "env_name": "existing-py_home_someone_bin_python",
        "params": {"machine": "some-host", "python": "/home/someone/bin/python"},
        "result_columns": ["result", "params", "version", "started_at"],
        "results": {SECONDS: row},
    }
    (theirs / "aaaaaaaa-existing-py_home_someone_bin_python.json").write_text(json.dumps(content))
    ours = tmp_path / "ours"
    paths = asv_format.adopt(
        theirs.parent,
        ours,
        hardware="cpu-x86-64",
        commit="a" * 40,
        date=START,
        provenance=record().provenance,
    )
    text = "".join(f"{path}\n{path.read_text()}" for path in paths).replace(str(tmp_path), "")
    assert "some" not in text
    assert read(ours / "benchmarks.json")[SECONDS]["pretty_name"] == "gdpa: seconds"
    assert next(iter(values_of(result_file(ours), SECONDS).values())) == 1.0


def test_a_result_file_with_missing_values_is_refused_with_the_numbers(tmp_path):
    write(tmp_path, record())
    (path,) = tmp_path.glob("*/aaaaaaaa-*.json")
    content = read(path)
    content["results"][SECONDS][0] = [1.0, 2.0]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="2 results for 1 combinations"):
        write(tmp_path, record())
