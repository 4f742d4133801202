"""Every record ever written is read for ever, and the published schema is that of the model."""

import json
from pathlib import Path

import pytest
import recording

from jagbench import result, store

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).parent / "golden"


def test_the_published_schema_is_that_of_the_model():
    published = ROOT / "results" / "schema" / f"record.v{result.SCHEMA_VERSION}.json"
    assert json.loads(published.read_text()) == result.schema(), (
        "the fields of a record changed: raise SCHEMA_VERSION with an upgrader and a golden file, "
        "or, for a new optional field, write the schema anew and show it in the golden file"
    )


@pytest.mark.parametrize("version", range(1, result.SCHEMA_VERSION + 1))
def test_every_version_ever_written_is_read(version):
    reading = store.read(GOLDEN / f"records.v{version}.jsonl")
    assert reading.damaged == ()
    assert len(reading.records) >= 6
    assert version == result.SCHEMA_VERSION or version in store.UPGRADERS


def test_the_first_golden_file_still_means_what_it_meant():
    records = store.read(GOLDEN / "records.v1.jsonl").records
    first, second, third, *_, last = records
    assert [record.outcome for record in records] == [
        "measured", "measured", "unsupported", "wrong", "crashed", "timed out", "out of memory",
        "invalid", "measured",
    ]  # fmt: skip
    assert first.seconds == 0.002
    assert first.flop_per_second == 549755813888000000
    assert first.mfu(first.datasheet) == pytest.approx(444.7, abs=0.1)
    assert first.state.throttled == ("power cap",)
    assert second.case.preparation == "excluded"
    assert second.date.isoformat() == "2026-11-30T20:00:01+01:00"
    assert third.reason == 'no kernel for float32 <b>&amp;</b> \u2028 \U0001f600 \0 "\\'
    assert third.case.preparation == "included"
    assert last.case.preparation == "none"
    assert last.seconds == 0.375
    assert last.who.name == "../x:v1"


def test_the_golden_file_shows_every_field_and_every_choice():
    text = (GOLDEN / f"records.v{result.SCHEMA_VERSION}.jsonl").read_text()
    lines = [json.loads(line) for line in text.split("\n") if line]
    schema = result.schema()
    models = {"Record": schema, **schema["$defs"]}
    places = {
        "Record": lines,
        "Who": [one["who"] for one in lines],
        "Case": [one["case"] for one in lines],
        "Work": [one["work"] for one in lines],
        "Timing": [one["timing"] for one in lines if "timing" in one],
        "Accuracy": [inner for one in lines for inner in one.get("accuracies", ())],
        "Ceiling": [one["datasheet"] for one in lines if "datasheet" in one],
        "DeviceState": [one["state"] for one in lines if "state" in one],
        "Provenance": [one["provenance"] for one in lines],
    }
    assert set(models) == set(places)
    for name, model in models.items():
        for field, about in model["properties"].items():
            values = [place[field] for place in places[name] if field in place]
            assert any(value not in (None, [], {}) for value in values), (name, field)
            assert set(about.get("enum", ())) <= {v for v in values if isinstance(v, str)}, field
            needed = field in model.get("required", ()) or field == "schema_version"
            assert needed or len(values) < len(places[name]), (name, field)


def test_golden_lines_agree_with_the_published_schema():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "results" / "schema" / "record.v1.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for data in (GOLDEN / "records.v1.jsonl").read_text().split("\n"):
        if data:
            assert list(validator.iter_errors(json.loads(data))) == []
    assert list(validator.iter_errors(recording.tree(more=1))) != []


def test_an_older_line_is_brought_up_step_by_step(tmp_path, monkeypatch):
    def from_minus_one(tree):
        return {**tree, "schema_version": 0, "session": tree["run"]}

    def from_zero(tree):
        return {k: v for k, v in tree.items() if k != "run"} | {"schema_version": 1}

    monkeypatch.setattr(store, "UPGRADERS", {-1: from_minus_one, 0: from_zero})
    old = recording.tree(3, schema_version=-1, run="r")
    del old["session"]
    spoiled = {k: v for k, v in old.items() if k != "run"}
    path = tmp_path / "old.jsonl"
    path.write_text(f"{json.dumps(old)}\n{json.dumps(spoiled)}\n")
    reading = store.read(path)
    assert reading.records == (recording.record(3, session="r"),)
    assert [one.reason for one in reading.damaged] == ["not of schema version -1: KeyError('run')"]
