import datetime
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch

from jagbench.implementation import load
from jagbench.suite import expected, settings
from jagbench.suite.expected import ExpectedFailure
from jagbench.suite.ledger import canonical_id
from jagbench.suite.settings import _matching, _operators

FORWARD = "conformance/test_forward.py::test_outputs_are_within_budget"
BACKWARD = "conformance/test_backward.py::test_every_gradient_is_within_budget"
ONE = "single-token-sequences"


@pytest.fixture
def judge(tmp_path):
    """Run the suite on a module of the given source, from outside the project."""

    def run(source, *options):
        (tmp_path / "stranger.py").write_text(textwrap.dedent(source))
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"PYTHONPATH": str(tmp_path), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "jagbench.suite.plugin"]
        command += ["--pyargs", "jagbench.suite", "-p", "no:cacheprovider", "--device=cpu"]
        if not any(option.startswith("--operator") for option in options):
            command += ["--operator=jagged_attention", "--operator=gdpa"]
        return subprocess.run(
            [*command, "--impl=stranger", "--report=report.json", *options],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def _tests(tmp_path):
    return {t["id"]: t for t in json.loads((tmp_path / "report.json").read_text())["tests"]}


PARTIAL = """
    from jagbench.reference import gdpa
    __version__ = "1.2.3"
    def describe(device):
        return f"at home on {device.type}"
    def jagged_attention(*arguments, **options):
        raise NotImplementedError("no softmax here")
"""


def test_a_session_names_what_ran_and_counts_what_is_unsupported(judge, tmp_path):
    done = judge(PARTIAL, f"--workload=*-{ONE}", "-k", "within_budget")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        r"implementation: stranger 1\.2\.3, at home on cpu",
        r"device: cpu .*torch \d.*triton \d",
        r"jagbench \d+\.\d+\.\d+, commit ",
        r"purpose: smoke, dtypes: float32",
        r"triton interpreter: on",
        r"gdpa: \d passed",
        r"jagged_attention: \d unsupported",
        r"jagged_attention: no softmax here \(\d tests\)",
    ):
        assert re.search(line, done.stdout), line
    row = _tests(tmp_path)[f"{FORWARD}[gdpa-{ONE}-float32]"]
    assert row["outcome"] == "passed"
    assert (row["operator"], row["workload"]) == ("gdpa", f"gdpa-{ONE}")
    assert re.fullmatch("[0-9a-f]{16}", row["digest"])
    assert set(row["accuracies"]["out"]) == {"error", "allowed", "naive", "snr_db"}
    text = (tmp_path / "report.json").read_text()
    assert str(tmp_path) not in text
    assert os.uname().nodename not in text


def test_reports_are_whole_under_xdist(judge, tmp_path):
    done = judge(PARTIAL, f"--workload=*-{ONE}", "-k", "within_budget", "-n2")
    assert done.returncode == 0, done.stdout + done.stderr
    tests = _tests(tmp_path)
    row = tests[f"{FORWARD}[gdpa-{ONE}-float32]"]
    assert row["accuracies"]["out"]["error"] <= row["accuracies"]["out"]["allowed"]
    refused = tests[f"{BACKWARD}[jagged_attention-{ONE}-float32]"]
    assert refused["outcome"] == "unsupported"
    assert "no softmax here" in refused["reason"]


@pytest.mark.parametrize("options", [(), ("-n2",)], ids=["one-process", "xdist"])
def test_a_session_in_which_nothing_passed_fails(judge, options):
    done = judge("", f"--workload=*-{ONE}", "-k", "within_budget", *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "nothing passed" in done.stdout
    assert "stranger has no gdpa" in done.stdout


DOUBLE = """
    from jagbench import reference
    from jagbench.reference import jagged_attention
    def gdpa(*arguments, **options):
        return 2 * reference.gdpa(*arguments, **options)
"""


def test_expected_failures_excuse_until_their_date_and_never_a_pass(judge, tmp_path):
    tomorrow = datetime.date.today() + datetime.timedelta(days=1)
    yesterday = datetime.date.today() - datetime.timedelta(days=1)
    entries = {
        f"{FORWARD}[gdpa-{ONE}-float32]": tomorrow,
        f"{BACKWARD}[gdpa-*": yesterday,
        f"test_outputs_are_within_budget[jagged_attention-{ONE}-*]": tomorrow,
        "test_of_no_such_name": tomorrow,
    }
    (tmp_path / expected.FILE_NAME).write_text(
        "".join(
            f'[[expected]]\nid = "{name}"\nreason = "doubled"\nexpires = {date}\n'
            for name, date in entries.items()
        )
    )
    done = judge(DOUBLE, f"--workload=*-{ONE}", "-k", "within_budget", "--dtype=float32")
    assert done.returncode == 1, done.stdout + done.stderr
    outcomes = {name: t["outcome"] for name, t in _tests(tmp_path).items()}
    assert outcomes == {
        f"{FORWARD}[gdpa-{ONE}-float32]": "expected failure",
        f"{BACKWARD}[gdpa-{ONE}-float32]": "failed",
        f"{FORWARD}[jagged_attention-{ONE}-float32]": "failed",
        f"{BACKWARD}[jagged_attention-{ONE}-float32]": "passed",
    }
    assert f"expired on {yesterday}" in done.stdout
    assert "unexpected pass" in done.stdout
    assert "'test_of_no_such_name' matches no test" in done.stdout


def test_a_failure_says_where_by_how_much_and_how_to_see_it_again(judge, tmp_path):
    done = judge(
        DOUBLE, "--workload=gdpa-lengths-about-tiles-of-64", "-k", "outputs", "--dtype=float32"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(
        r"operator gdpa, workload gdpa-lengths-.* \(digest \w{16}\), float32", done.stdout
    )
    assert re.search(r"worst element out\[\d+, \d, \d+\]: sequence \d, position \d+", done.stdout)
    assert re.search(r"normwise error [\d.e+-]+, budget [\d.e+-]+", done.stdout)
    code = re.search(r"accuracy on this workload:\n\n(.*?)\n\s*\nto run", done.stdout, re.DOTALL)
    again = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code.group(1))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "is over its budget" in again.stdout


BRUTAL = """
    import os, time, torch
    from jagbench import reference
    def gdpa(q, *arguments, **options):
        if q.dtype == torch.float16:
            os.abort()
        return reference.gdpa(q, *arguments, **options)
    def jagged_attention(q, *arguments, **options):
        if q.dtype == torch.float16:
            time.sleep(1000)
        return reference.jagged_attention(q, *arguments, **options)
"""


def test_a_kernel_that_kills_or_hangs_is_reported_and_the_rest_goes_on(judge, tmp_path):
    pytest.importorskip("xdist")
    pytest.importorskip("pytest_timeout")
    done = judge(
        BRUTAL, "--isolate", "--timeout=5", "--dtype=float16", "--dtype=float32",
        f"--workload=*-{ONE}", "-k", "outputs_are_within_budget",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    outcomes = {name: t["outcome"] for name, t in _tests(tmp_path).items()}
    assert outcomes == {
        f"{FORWARD}[gdpa-{ONE}-float16]": "crashed",
        f"{FORWARD}[gdpa-{ONE}-float32]": "passed",
        f"{FORWARD}[jagged_attention-{ONE}-float16]": "timed out",
        f"{FORWARD}[jagged_attention-{ONE}-float32]": "passed",
    }, done.stdout
    crashed = _tests(tmp_path)[f"{FORWARD}[gdpa-{ONE}-float16]"]
    assert (crashed["operator"], crashed["dtype"]) == ("gdpa", "float16")


def test_the_users_own_lengths_are_replayed(judge, tmp_path):
    (tmp_path / "mine.txt").write_text("3\n0\n5\n")
    done = judge(
        PARTIAL, "--workload=replay:mine.txt", "-k", "outputs_are_within_budget", "--operator=gdpa"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (t for t in _tests(tmp_path).values() if t["dtype"] == "float32")
    assert row["workload"] == "gdpa-replay-mine"


def test_triton_imported_too_early_is_refused(judge, tmp_path):
    (tmp_path / "early.py").write_text("import triton.language\n")
    done = judge("", "-p", "early")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "set TRITON_INTERPRET=1" in done.stderr


def test_an_unknown_implementation_is_refused(judge):
    done = judge("", "--impl=no_such_module")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "--impl=no_such_module" in done.stderr


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("bogus", "--device=bogus: .*bogus"),
        pytest.param(
            "cuda",
            "--device=cuda: .*no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        ("cuda:99", "--device=cuda:99: "),
    ],
)
def test_a_device_that_is_not_there_is_refused(name, problem):
    with pytest.raises(pytest.UsageError, match=problem):
        settings._device(name)


def test_unknown_operators_and_workloads_are_refused_by_name():
    with pytest.raises(pytest.UsageError, match=r"nope.*known are .*gdpa"):
        _operators(["nope"])
    with pytest.raises(pytest.UsageError, match="matches no workload"):
        settings._workloads(["no-such-*"], "smoke", ["gdpa"])
    with pytest.raises(pytest.UsageError, match="replay:absent"):
        _matching("replay:absent.txt", ["gdpa"])


@pytest.mark.parametrize(
    "nodeid",
    [
        f"suite/{FORWARD}[gdpa-x-float32]",
        f"../lib/python3.11/site-packages/jagbench/suite/{FORWARD}[gdpa-x-float32]",
        f"suite/{FORWARD}[gdpa-x-float32]@gdpa-x-float32",
    ],
)
def test_a_tests_id_is_the_same_from_clone_wheel_and_xdist(nodeid):
    assert canonical_id(nodeid) == f"{FORWARD}[gdpa-x-float32]"


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (f"{FORWARD}[gdpa-x-float32]", True),
        ("test_outputs_are_within_budget[gdpa-x-float32]", True),
        ("test_outputs_are_within_budget", True),
        (FORWARD, True),
        ("*[gdpa-*-float32]", True),
        ("*[gdpa-*-float16]", False),
        ("test_outputs_are_within", False),
        ("[g]dpa", False),
    ],
)
def test_brackets_of_an_expected_failure_are_no_wildcards(pattern, matches):
    entry = ExpectedFailure(pattern, "why", datetime.date(2030, 1, 1))
    assert entry.matches(f"{FORWARD}[gdpa-x-float32]") == matches


def test_an_expected_failure_holds_on_its_last_day():
    entry = ExpectedFailure("x", "why", datetime.date(2030, 1, 1))
    assert not entry.expired(datetime.date(2030, 1, 1))
    assert entry.expired(datetime.date(2030, 1, 2))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[[expected]]\nid = "x"\nexpires = 2030-01-01', "needs an id and a reason"),
        ('[[expected]]\nid = "x"\nreason = " "\nexpires = 2030-01-01', "needs an id and a reason"),
        ('[[expected]]\nid = "x"\nreason = "y"', "needs expires"),
        ('[[expected]]\nid = "x"\nreason = "y"\nexpires = "soon"', "needs expires"),
        ("[[expected]", "jagbench"),
    ],
)
def test_an_incomplete_expected_failure_is_refused(tmp_path, text, problem):
    path = tmp_path / expected.FILE_NAME
    path.write_text(text)
    with pytest.raises(pytest.UsageError, match=problem):
        expected.read(path)
    with pytest.raises(pytest.UsageError, match="no such file"):
        expected.find(str(tmp_path / "absent.toml"), load("jagbench.reference"))
    assert expected.find(None, load("jagbench.reference")) is None
