"""The page on precision says what its record says, and the record what the code measures."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


def module(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def table():
    return module("sqnr_table")


@pytest.fixture(scope="module")
def record(table):
    return json.loads(table.RECORD.read_text())


def test_the_tables_of_the_page_are_what_the_record_says():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "sqnr_table.py", "--check"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_page_with_another_figure_is_told_apart(table, record):
    text = table.PAGE.read_text()
    changed = json.loads(json.dumps(record))
    changed["rows"][0]["values"]["sqnr_db"] = [1.0]
    assert table.page_of(text, table.Found(record)) == text
    assert table.page_of(text, table.Found(changed)) != text


def test_a_page_without_a_table_is_refused(table, record):
    with pytest.raises(ValueError, match="no block for"):
        table.page_of("<!-- sqnr: block -->\n<!-- sqnr ends -->", table.Found(record))


def test_a_row_that_is_not_there_once_is_an_error(table, record):
    with pytest.raises(ValueError, match="0 rows of block have"):
        table.Found(record).value("block", "sqnr_db", block="64x64")


def test_the_record_was_made_by_committed_files_and_lacks_nothing(record):
    assert record["environment"]["commit"]
    assert record["environment"]["dirty"] is False
    assert record["unsupported"] == {}


def test_what_the_code_measures_is_what_the_record_holds(monkeypatch, record):
    """One seed of the tables that take no time."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    sqnr = module("sqnr")
    for name in ("norm", "weight_scale"):
        held = [row for row in record["rows"] if row["table"] == name]
        made = sqnr.measure("jagbench.reference", torch.float32, "cpu", (name,), (0,))["rows"]
        assert [row["case"] for row in made] == [row["case"] for row in held]
        for mine, theirs in zip(made, held, strict=True):
            first = {n: values[0] for n, values in theirs["values"].items()}
            assert {n: v[0] for n, v in mine["values"].items()} == pytest.approx(first, abs=0.02)


def test_an_implementation_without_an_operator_is_named(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    sqnr = module("sqnr")
    found = sqnr.measure("math", torch.float32, "cpu", ("norm", "scale_mode"), (0,))
    assert found["rows"] == []
    assert found["unsupported"]["scale_mode"] == "math has no mx_quantize"
