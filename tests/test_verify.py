import json

import pytest
import recording

from jagbench import store, verify

NAME = "jagbench.impl.jsonl"
CEILING = {"flop_per_second": 1e6, "bytes_per_second": None, "source": "x", "date": "2026-01-02"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "nvidia-h200" / NAME


def found(path, *records):
    """Problems of a file of these records as (line, severity, text)."""
    store.append_all(path, records)
    return [(p.line, p.severity, p.text) for p in verify.verify([path])]


def texts(path, **changes):
    return [text for _, _, text in found(path, recording.record(**changes))]


def test_a_good_file_has_no_problem(path):
    records = [recording.record(i, timing__samples_seconds=[1.0]) for i in range(3)]
    assert found(path, *records) == []


def test_a_folder_is_searched_but_for_claims(tmp_path):
    for place in ("published.jsonl", "nvidia-h200/theirs.jsonl", "cpu-x86-64/ours.jsonl"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text("x\n")
    problems = verify.verify([tmp_path])
    assert [p.path.name for p in problems] == ["ours.jsonl", "theirs.jsonl"]
    assert str(problems[0]).endswith(
        "ours.jsonl:1: error: not JSON: Expecting value at character 0"
    )


def test_a_file_that_cannot_be_read_is_an_error(path):
    (problem,) = verify.verify([path])
    assert (problem.line, problem.severity) == (0, "error")
    assert str(problem) == f"{path}: error: cannot be read: No such file or directory"


def test_damaged_lines_are_errors_at_their_line(path):
    store.append_all(path, [recording.record(i, timing__samples_seconds=[1.0]) for i in range(2)])
    first, second = path.read_bytes().splitlines(keepends=True)
    newer = json.dumps(recording.tree(schema_version=9)).encode()
    path.write_bytes(first + b"x\n" + second + newer)
    assert [(p.line, p.severity, p.text.split(":")[0]) for p in verify.verify([path])] == [
        (2, "error", "not JSON"),
        (4, "error", "schema version 9 is newer than 1"),
    ]


def test_lines_set_aside_and_empty_files_are_noted(path):
    path.parent.mkdir()
    path.write_text("x\n")
    store.quarantine(path)
    assert [str(p).removeprefix(f"{path}: ") for p in verify.verify([path])] == [
        f"note: 1 line set aside in {NAME}.damaged",
        "note: no records",
    ]


def test_repeated_keys_and_disorder_are_notes(path):
    records = [
        recording.record(i, session=session, timing__samples_seconds=[1.0])
        for i, session in ((1, "a"), (0, "a"), (1, "b"))
    ]
    assert found(path, *records) == [
        (2, "note", "older than the record before it: 2026-01-02T00:00:00+00:00"),
        (3, "note", "same case, code and place as line 1"),
    ]


def test_two_series_of_one_session_are_no_repetition(path):
    assert found(path, *[recording.record(1, timing__samples_seconds=[1.0])] * 2) == []


def test_notes_of_one_wording_share_a_line_and_errors_do_not(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    problems = [
        verify.Problem(first, 1, "note", "x"),
        verify.Problem(first, 2, "error", "y"),
        verify.Problem(first, 3, "error", "y"),
        verify.Problem(first, 4, "note", "x"),
        verify.Problem(first, 9, "note", "x"),
        verify.Problem(second, 1, "note", "x"),
    ]
    assert verify.folded(problems) == [
        f"{first}:1: note: x (and 2 more, to line 9)",
        f"{first}:2: error: y",
        f"{first}:3: error: y",
        f"{second}:1: note: x",
    ]


@pytest.mark.parametrize("first", ["measured", "wrong"])
def test_what_is_both_measured_and_wrong_is_an_error(path, first):
    good = recording.record(0, timing__samples_seconds=[1.0])
    wrong = recording.record(0, outcome="wrong", reason="NaN", timing=None)
    records = [good, wrong] if first == "measured" else [wrong, good]
    second = records[1].outcome
    text = f"{second}, but line 1, of the same case, code and place, is {first}"
    assert found(path, *records) == [(2, "error", text)]


def test_what_a_problem_quotes_moves_no_cursor(path):
    record = recording.record(provenance__device="\x1b[2Jx", timing__samples_seconds=[1.0])
    store.append(path, record)
    assert all("\x1b" not in str(problem) for problem in verify.verify([path]))


def test_a_record_in_a_wrong_file_or_folder_is_an_error(tmp_path):
    path = tmp_path / "nvidia-b200" / "theirs.jsonl"
    assert found(path, recording.record(timing__samples_seconds=[1.0])) == [
        (1, "error", f"'jagbench.impl' belongs into {NAME}"),
        (1, "error", "hardware 'nvidia-h200' in a folder named 'nvidia-b200'"),
    ]


def test_hardware_that_does_not_name_the_device_is_an_error(path):
    made = recording.record(timing__samples_seconds=[1.0], provenance__device="NVIDIA B200")
    assert found(path, made) == [(1, "error", "hardware 'nvidia-h200' of device 'NVIDIA B200'")]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("File /home/someone/kernels.py, line 3", "a path of a machine: '/home/'"),
        ("in /root", "a path of a machine: '/root'"),
        ("/Users/someone", "a path of a machine: '/Users/'"),
        ("file:///tmp/x.py", "a path of a machine: '/tmp/'"),
        (r"C:\kernels\x.py", r"a path of a machine: 'C:\\'"),
        ("~/kernels", "a path of a machine: '~/'"),
        ("no route to 10.0.0.17:29500", "an address: '10.0.0.17'"),
        ("ip-10-0-0-17 is gone", "a host name: 'ip-10-0-0-17'"),
        ("rank 1 on gpu-7.cluster.internal", "a host name: 'cluster.internal'"),
        ("someone@gpu-7: no such file", "a user at a host: 'someone@gpu-7'"),
        ("rank 1 on crunch-12 died", "a host name: 'crunch-12'"),
    ],
)
@pytest.mark.parametrize("field", ["reason", "configuration", "flags", "session"])
def test_a_string_that_names_a_machine_is_an_error(path, field, text, what):
    made = {"reason": text, "configuration": {text: "1"}, "flags": ["", text], "session": text}
    failed = {"outcome": "crashed", "reason": "r", "timing": None}
    store.append(path, recording.record(**failed | {field: made[field]}))
    assert f"{field} holds {what}" in [
        p.text for p in verify.verify([path], host_names=["crunch-12", "localhost", ""])
    ]


@pytest.mark.parametrize(
    "text",
    [
        "error 0.4 / allowed 0.05 and/or more",
        "torch.ops.aten.mm(q @ k, v)",
        "expected [1024, 8, 128] bfloat16, got float32: https://example.org/home/x",
        "crunch-120 or 1.2.3 or 1.2.3.4.5 or 300.1.1.1",
        "localhost",
        "n/data_ptr",
    ],
)
def test_other_strings_are_left_alone(path, text):
    store.append(path, recording.record(outcome="crashed", reason=text, timing=None))
    assert verify.verify([path], host_names=["crunch-12", "localhost", ""]) == []


def test_a_version_of_four_numbers_is_no_address(path):
    assert texts(path, timing__samples_seconds=[1.0], provenance__driver="10.2.3.4") == []


@pytest.mark.parametrize(
    ("commit", "dirty", "severity", "text"),
    [
        (None, None, "error", "no commit"),
        (recording.COMMIT, True, "error", "files differed from commit 0123456789ab"),
        (
            recording.COMMIT,
            None,
            "note",
            "not known whether files differed from commit 0123456789ab",
        ),
    ],
)
def test_a_record_without_a_clean_commit_is_found(path, commit, dirty, severity, text):
    made = recording.record(
        timing__samples_seconds=[1.0], provenance__commit=commit, provenance__dirty=dirty
    )
    assert found(path, made) == [(1, severity, text)]


def test_a_time_below_the_floor_of_the_better_ceiling_is_an_error(path):
    # 4000 FLOP at 1e6 a second take 4 ms, at 2e6 a second 2 ms.
    slow = CEILING
    fast = CEILING | {"flop_per_second": 2e6, "bytes_per_second": 1e9}
    below = "0.001 s, below the physical floor of 0.002 s"
    for datasheet, measured in ((slow, fast), (fast, None), (None, fast)):
        path.unlink(missing_ok=True)
        made = {"datasheet": datasheet, "measured_ceiling": measured}
        assert texts(path, timing__samples_seconds=[0.001], **made) == [below]
        path.unlink()
        assert texts(path, timing__samples_seconds=[0.003], **made) == []


def test_bytes_have_a_floor_too_and_an_invalid_record_owned_up(path):
    ceiling = CEILING | {"flop_per_second": None, "bytes_per_second": 1e6}
    made = {"datasheet": ceiling, "timing__samples_seconds": [0.001]}
    assert texts(path, **made) == ["0.001 s, below the physical floor of 0.002 s"]
    path.unlink()
    assert texts(path, outcome="invalid", reason="impossible", **made) == []
    path.unlink()
    unknown = CEILING | {"flop_per_second": None}
    assert texts(path, datasheet=unknown, timing__samples_seconds=[0.001]) == []


def test_scattered_samples_are_noted(path):
    assert texts(path, timing__samples_seconds=[0.9, 1.0, 1.0, 1.0, 1.3]) == [
        "samples spread by 8.0% of their median"
    ]
