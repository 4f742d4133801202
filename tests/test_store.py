import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import recording
from hypothesis import given
from hypothesis import strategies as st

from jagbench import result, store

GOLDEN = Path(__file__).parent / "golden"
NAME = "jagbench.impl.jsonl"
TORN = b'{"schema_version": 1, "date": "2026-'


@pytest.fixture
def path(tmp_path):
    return tmp_path / "nvidia-h200" / NAME


@pytest.fixture
def filled(path):
    """A file of three records."""
    store.append_all(path, map(recording.record, range(3)))
    return path


def indices(path):
    return [int(r.case.workload.removeprefix("case-")) for r in store.read(path).records]


def litter(folder):
    """Files beside the results that should not be there."""
    return sorted(p.name for p in folder.iterdir() if p.name not in (NAME, f".{NAME}.lock"))


def line(**changes):
    return json.dumps(recording.tree(**changes)).encode()


# One record in, the same record out


def test_what_was_appended_is_read_in_order(path):
    first, *others = [recording.record(i) for i in range(4)]
    store.append(path, first)
    store.append_all(path, others)
    reading = store.read(path)
    assert reading.records == (first, *others)
    assert reading.lines == (1, 2, 3, 4)
    assert reading.damaged == ()
    assert litter(path.parent) == []


def test_nothing_to_append_makes_no_file(path):
    store.append_all(path, [])
    assert not path.exists()


@given(
    st.lists(st.floats(min_value=1e-12, max_value=1e9), min_size=1, max_size=4),
    st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=2),
    st.integers(min_value=0, max_value=2**63 - 1),
)
def test_every_number_and_text_reads_back_as_itself(samples, configuration, flop):
    made = recording.record(
        timing__samples_seconds=samples, configuration=configuration, work__flop=flop
    )
    encoded = store.encode(made)
    assert encoded.count(b"\n") == 1
    assert store.decode(encoded) == made


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0])
def test_a_record_made_without_validation_is_refused(filled, bad):
    before = filled.read_bytes()
    good = recording.record(3)
    timing = result.Timing.model_construct(
        **{**good.timing.__dict__, "samples_seconds": (bad, 1.0)}
    )
    with pytest.raises(ValueError, match="samples_seconds"):
        store.append(filled, good.model_copy(update={"timing": timing}))
    assert filled.read_bytes() == before


def test_text_that_is_no_unicode_is_refused_before_the_file_is_touched(filled):
    before = filled.read_bytes()
    with pytest.raises(ValueError, match="surrogate"):
        store.append(filled, recording.record(3, session="\ud800"))
    assert filled.read_bytes() == before


def test_permissions_and_symbolic_links_outlive_an_append(filled, tmp_path):
    filled.chmod(0o640)
    link = tmp_path / NAME
    link.symlink_to(filled)
    store.append(link, recording.record(3))
    assert link.is_symlink()
    assert filled.stat().st_mode & 0o777 == 0o640
    assert indices(filled) == [0, 1, 2, 3]


# Names


@pytest.mark.parametrize("name", ["jagbench.impl", "padded-sdpa_flash", "v2"])
def test_a_plain_name_is_the_name_of_its_file(name):
    assert store.path_for("results", "nvidia-h200", name) == Path(
        f"results/nvidia-h200/{name}.jsonl"
    )


@given(st.text(max_size=300))
def test_no_name_leaves_its_folder(name):
    made = store.path_for("results", "nvidia-h200", name)
    assert made.parent == Path("results/nvidia-h200")
    assert made.name.isascii()
    assert len(made.name) < 140
    assert not made.name.startswith(".")
    assert not set(made.name) & set('/\\:*?"<>|\n\0 ')


def test_different_names_have_different_files():
    names = ["a", "A", "../a", "a/", "a:v1", "a-v1", ".a", "a.", "", "con", "nul.x", "ä", "a" * 101]
    hashed = store.file_name("a:v1").removesuffix(".jsonl")
    files = [store.file_name(name) for name in (*names, hashed, "a" * 102)]
    assert len({name.lower() for name in files}) == len(files)


def test_a_folder_that_is_no_hardware_name_is_refused():
    with pytest.raises(ValueError, match="should be 'nvidia-h200'"):
        store.path_for("results", "NVIDIA H200", "jagbench.impl")


def test_a_file_named_after_an_implementation_takes_no_other(path, tmp_path):
    other = recording.record(1, who__name="their.kernels")
    with pytest.raises(ValueError, match=r"not of \['their.kernels'\]"):
        store.append_all(path, [other, recording.record(0)])
    store.append(path, recording.record(0))
    with pytest.raises(ValueError, match=r"is for records of 'jagbench\.impl'"):
        store.append(path, other)
    with pytest.raises(ValueError, match=r"expected 'their\.kernels'"):
        store.read(path, name="their.kernels")
    store.append_all(tmp_path / "everything.jsonl", [recording.record(0), other])


# Damage


DAMAGES = {
    "torn": (TORN, "not JSON: "),
    "no JSON": (b"measured 3 ms", "not JSON: Expecting value at character 0"),
    "two records on a line": (line() + line(), "not JSON: Extra data"),
    "no object": (b"[1]", "no JSON object"),
    "no version": (b"{}", "schema_version is None"),
    "truth for a version": (line(schema_version=True), "schema_version is True"),
    "a fraction for a version": (line(schema_version=1.0), "schema_version is 1.0"),
    "an unknown old version": (line(schema_version=0), "no schema version 0"),
    "a newer version": (line(schema_version=2, more=1), "schema version 2 is newer than 1"),
    "an unknown field": (line(more=1), "more: Extra inputs"),
    "a missing field": (b'{"schema_version": 1}', "date: Field required (and 7 more)"),
    "NaN": (line(timing__samples_seconds=[math.nan]), "not JSON: NaN"),
    "infinity": (line(timing__samples_seconds=[-math.inf]), "not JSON: -Infinity"),
    "a number past the largest": (line().replace(b"0.003", b"1e999"), "finite number"),
    "a number with too many digits": (line().replace(b"4000", b"9" * 5000), "4300 digits"),
    "a number as text": (line(work__flop="4000"), "work.flop: Input should be a valid integer"),
    "a negative time": (line(timing__samples_seconds=[-1.0]), "greater than or equal to 0"),
    "a repeated key": (line()[:-1] + b', "session": "x"}', "repeated: 'session'"),
    "no UTF-8": (line().replace(b"gdpa", b"gdp\xe4"), "not UTF-8: invalid continuation byte"),
    "UTF-16": (line().decode().encode("utf-16-be"), "not JSON: "),
    "a byte order mark": (b"\xef\xbb\xbf" + line(), "not JSON: Unexpected UTF-8 BOM"),
    "half a character": (line().replace(b"gdpa", rb"\ud800"), "unexpected end of hex escape"),
    "a hole": (b"\0" * 4096, "not JSON: "),
    "too deep": (b"[" * 100_000, "nested too deeply"),
    "inconsistent": (line(outcome="crashed", reason="x"), "has no time"),
}


@pytest.mark.parametrize(("data", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_line_is_named_and_the_rest_read(filled, data, reason):
    first, *others = filled.read_bytes().splitlines(keepends=True)
    filled.write_bytes(first + data + b"\n" + b"".join(others))
    reading = store.read(filled)
    assert len(reading.records) == 3
    assert reading.lines == (1, 3, 4)
    (damaged,) = reading.damaged
    assert (damaged.line, damaged.data) == (2, data)
    assert reason in damaged.reason
    assert damaged.text.isprintable()
    assert damaged.reason.isprintable()


def test_a_huge_line_is_damage(filled, monkeypatch):
    monkeypatch.setattr(store, "LINE_LIMIT", 1 << 20)
    with filled.open("ab") as handle:
        handle.write(line(session="x" * 2**20) + b"\n")
    reading = store.read(filled)
    assert len(reading.records) == 3
    assert reading.damaged[0].reason.startswith("too long: ")
    assert len(reading.damaged[0].text) <= 300


def test_blank_lines_and_carriage_returns_are_no_damage(filled):
    filled.write_bytes(filled.read_bytes().replace(b"\n", b"\r\n\r\n"))
    assert indices(filled) == [0, 1, 2]
    assert store.read(filled).damaged == ()


def test_text_that_would_move_the_cursor_is_shown_harmless(filled):
    filled.write_bytes(b'{"schema_version": 1, "\x1b[2J\\u001b]0;x\\u0007": "\xff\xfe\r"}\n')
    (damaged,) = store.read(filled).damaged
    assert damaged.text.isprintable()
    assert damaged.reason.isprintable()


@given(st.data())
def test_no_change_of_bytes_stops_a_reader(data):
    changed = bytearray(line())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(changed)))
        stop = start + data.draw(st.integers(0, 8))
        changed[start:stop] = data.draw(st.binary(max_size=8))
    decode_or_refuse(bytes(changed))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.data())
def test_no_value_in_any_field_stops_a_reader(data):
    made = recording.tree()
    where = made
    while True:
        key = data.draw(st.sampled_from(sorted(where)))
        if not isinstance(where[key], dict) or data.draw(st.booleans()):
            break
        where = where[key]
    where[key] = data.draw(JSON)
    decode_or_refuse(json.dumps(made).encode())


def decode_or_refuse(data):
    try:
        found = store.decode(data)
    except ValueError:
        return
    # Whatever is accepted can be kept and read again.
    assert store.decode(store.encode(found)) == found


def test_a_file_cut_at_any_byte_reads_up_to_the_cut(filled):
    whole = filled.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole), -1, -1):
        os.truncate(filled, length)
        reading = store.read(filled)
        assert len(reading.records) == sum(end <= length for end in ends)
        assert len(reading.damaged) == (length not in (0, *ends, *(end + 1 for end in ends)))


def test_every_line_of_the_golden_file_cut_anywhere_is_refused():
    for data in (GOLDEN / "records.v1.jsonl").read_bytes().splitlines():
        for length in range(len(data)):
            with pytest.raises(ValueError, match="not "):
                store.decode(data[:length])


def test_nothing_in_a_line_is_executed(filled, tmp_path):
    spell = f"__import__('os').system('touch {tmp_path}/ran')"
    made = recording.record(3, session=spell, configuration={spell: "!!python/object/apply:x"})
    store.append(filled, made)
    assert store.read(filled).records[-1].session == spell
    assert not (tmp_path / "ran").exists()
    source = Path(store.__file__).read_text()
    assert not any(word in source for word in ("eval(", "exec(", "pickle", "yaml", "marshal"))


# Resuming


def test_a_finished_case_is_known_by_its_key(filled):
    failed = recording.record(3, outcome="timed out", reason="no end", timing=None)
    store.append(filled, failed)
    keys = store.finished(filled)
    assert keys == {recording.record(i).key for i in range(4)}
    assert failed.key not in store.finished(filled, again=("timed out", "crashed"))
    assert recording.record(0, who__source="ffff").key not in keys


def test_where_there_is_no_file_nothing_is_finished(path):
    assert store.finished(path) == frozenset()
    with pytest.raises(FileNotFoundError):
        store.read(path)


def test_reading_results_needs_no_torch():
    code = "import sys, jagbench.store, jagbench.verify; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
