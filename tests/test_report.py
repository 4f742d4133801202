import json
import math

import pytest

from jagbench import environment
from jagbench.report import SCHEMA_VERSION, TestRecord, counts, read, write

ACCURACY = {"error": 1.23456789e-5, "allowed": 2e-5, "naive": 9.87654321e-6, "snr_db": 98.7654}
RECORDS = [
    TestRecord(
        "b[gdpa-x-float32]", "passed", "gdpa", "gdpa-x", "00ff", "float32", {"out": ACCURACY}
    ),
    TestRecord("a", "failed", "gdpa", reason="out: over its budget"),
    TestRecord("c", "unsupported", "jagged_attention", reason="no softmax"),
    TestRecord("d", "passed"),
]


def test_counts_are_by_operator_and_outcome():
    assert counts(RECORDS) == {
        "all": {"passed": 1},
        "gdpa": {"passed": 1, "failed": 1},
        "jagged_attention": {"unsupported": 1},
    }


def test_a_report_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "folder" / "report.json"
    write(path, environment.detect("cpu"), {"implementation": "mine"}, RECORDS)
    head, records = read(path)
    assert head["schema"] == SCHEMA_VERSION
    assert head["session"] == {"implementation": "mine"}
    assert head["counts"] == counts(RECORDS)
    assert [r.id for r in records] == ["a", "b[gdpa-x-float32]", "c", "d"]
    assert records[0].reason == "out: over its budget"
    rounded = {"error": 1.235e-5, "allowed": 2e-5, "naive": 9.877e-6, "snr_db": 98.77}
    assert records[1].accuracies == {"out": rounded}


def test_a_test_takes_one_line(tmp_path):
    path = tmp_path / "report.json"
    write(path, environment.detect("cpu"), {}, RECORDS)
    lines = path.read_text().splitlines()
    assert sum(line.startswith('{"id"') for line in lines) == len(RECORDS)
    row = json.loads(next(line for line in lines if '"a"' in line).rstrip(","))
    assert row == {
        "id": "a", "outcome": "failed", "operator": "gdpa", "reason": "out: over its budget",
    }  # fmt: skip


def test_infinities_survive_strict_json(tmp_path):
    path = tmp_path / "report.json"
    exact = {**ACCURACY, "error": 0.0, "snr_db": math.inf}
    wrong = {**ACCURACY, "error": math.inf, "snr_db": -math.inf}
    record = TestRecord("a", "failed", accuracies={"out": exact, "grad q": wrong})
    write(path, environment.detect("cpu"), {}, [record])

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (back,) = read(path)[1]
    assert back.accuracies["out"]["snr_db"] == math.inf
    assert back.accuracies["grad q"]["error"] == math.inf


def test_another_schema_is_refused(tmp_path):
    path = tmp_path / "report.json"
    path.write_text('{"schema": 999, "tests": []}')
    with pytest.raises(ValueError, match="schema 999"):
        read(path)


def test_an_outcome_that_is_none_is_refused():
    with pytest.raises(ValueError, match="'green'"):
        TestRecord("a", "green")
