import json
import os
from pathlib import Path

import pytest
import recording
from click.testing import CliRunner

from jagbench import result, store
from jagbench.cli import main
from jagbench.cli.running import _workloads
from jagbench.reference import OPERATORS
from jagbench.workloads import CATALOGUE, select


def call(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_operators_lists_every_operator_with_its_signature():
    done = call("list", "operators")
    assert done.exit_code == 0
    for operator in OPERATORS.values():
        assert f"{operator.name}{operator.signature}" in done.output
        assert operator.paper in done.output


def test_workloads_lists_those_selected_with_their_digests():
    done = call("list", "--operator", "gdpa", "--purpose", "smoke", "--tag", "adversarial")
    expected = select(operator="gdpa", purpose="smoke", tag="adversarial")
    assert done.exit_code == 0
    assert f"{len(expected)} workloads" in done.output
    for workload in expected:
        assert workload.name in done.output
        assert workload.digest in done.output
    assert "jagged_attention-" not in done.output


def test_an_unknown_tag_is_an_error_that_lists_the_tags():
    done = call("list", "--tag", "nonsense")
    assert done.exit_code == 2
    assert "adversarial" in done.output


def test_describe_shows_recipe_statistics_and_source():
    done = call("describe", "gdpa-hstu-l1024")
    assert done.exit_code == 0
    for text in (CATALOGUE["gdpa-hstu-l1024"].digest, "silu", "visible_pairs", "meta-recsys"):
        assert text in done.output


def test_describe_reads_a_file_of_lengths(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("3\n5\n")
    done = call("describe", f"replay:{path}", "--operator", "gdpa")
    assert done.exit_code == 0
    assert "gdpa-replay-lengths" in done.output


@pytest.mark.parametrize("name", ["nothing", "replay:nowhere.txt"])
def test_describe_refuses_what_there_is_not(name):
    done = call("describe", name)
    assert done.exit_code == 2
    assert name.removeprefix("replay:") in done.output


def test_list_names_implementations_and_hardware():
    found = call("list", "implementations").output
    assert "jagbench.peers.varlen_attn" in found
    assert "reference" in found
    assert "NVIDIA H200" in call("list", "hardware").output


@pytest.mark.parametrize(
    "command",
    ["list", "describe", "doctor", "run", "compare", "report", "verify", "schema"],
)
def test_every_command_has_help(command):
    done = call(command, "--help")
    assert done.exit_code == 0
    assert "Usage:" in done.output


def test_schema_prints_the_schema_of_a_record():
    assert json.loads(call("schema").output) == result.schema()


def test_doctor_says_what_it_found_and_counts_it():
    done = call("doctor", "--device=cpu")
    assert done.exit_code in (0, 1)
    assert "errors, " in done.output.splitlines()[-1]


def test_the_comparison_is_what_is_measured_unless_something_else_is_asked_for():
    wanted = select(operator="gdpa", tag="comparison", purpose="full")
    assert _workloads((), "gdpa", None, "full") == tuple(w.name for w in wanted)
    assert len(wanted) == 9
    named = _workloads(("gdpa-hstu-*", "gdpa-hstu-l1024"), None, None, "full")
    assert named.count("gdpa-hstu-l1024") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workload=nothing-*",), "none of"),
        (("--tag=nothing",), "no workload has tag 'nothing'"),
        (("--device=cuda:7",), "torch sees"),
        (("--device=abacus",), "--device=abacus"),
    ],
)
def test_run_refuses_what_there_is_not_before_it_starts(arguments, words):
    done = call("run", *arguments)
    assert done.exit_code == 2
    assert words in done.output


@pytest.fixture
def kept(tmp_path) -> Path:
    """A folder of results with two implementations of one case."""
    for name, factor in (("base", 1.0), ("mine", 0.8)):
        samples = [factor * 1e-3 * (1 + 0.001 * (i % 5)) for i in range(24)]
        accuracy = {"name": "out", "error": 1e-3, "allowed": 2e-3, "naive": 1e-3}
        record = recording.record(
            who__name=name, timing__samples_seconds=samples, accuracies=[accuracy]
        )
        store.append(store.path_for(tmp_path, record.hardware, name), record)
    return tmp_path


def test_compare_shows_verdicts_and_exits_by_them(kept):
    done = call("compare", "base", "mine", f"--results={kept}")
    assert done.exit_code == 0, done.output
    assert "faster" in done.output
    assert call("compare", "mine", "base", f"--results={kept}").exit_code == 1
    content = json.loads(call("compare", "base", "mine", "--json", f"--results={kept}").output)
    assert content["rows"][0]["verdict"] == "faster"


def test_compare_names_what_there_is_where_a_side_is_unknown(kept):
    done = call("compare", "base", "nobody", f"--results={kept}")
    assert done.exit_code == 2
    assert "mine" in done.output


@pytest.mark.parametrize(
    "arguments",
    [("compare", "base", "nowhere.jsonl"), ("compare", "--by=hardware"), ("compare", "--a-a"),
     ("compare", "\x1b[2J", "base"), ("report", "r.html"), ("verify", "{results}")],
)  # fmt: skip
def test_what_is_not_there_is_no_verdict(tmp_path, arguments):
    words = [word.format(results=tmp_path) for word in arguments]
    done = call(*words, *(() if words[0] == "verify" else (f"--results={tmp_path}",)))
    assert done.exit_code == 2, done.output
    assert "\x1b" not in done.output


def test_a_report_that_cannot_be_written_is_told_in_a_line(kept, tmp_path):
    pytest.importorskip("altair")
    (tmp_path / "file").write_text("")
    done = call("report", os.fspath(tmp_path / "file" / "r.html"), f"--results={kept}")
    assert done.exit_code == 2
    assert "cannot be written" in done.output


def test_compare_by_hardware_needs_no_sides(kept):
    done = call("compare", "--by=hardware", f"--results={kept}")
    assert done.exit_code == 0
    assert "nvidia-h200" in done.output


def test_one_side_is_a_usage_error(kept):
    assert call("compare", "base", f"--results={kept}").exit_code == 2


def test_report_writes_one_file(kept, tmp_path):
    pytest.importorskip("altair")
    path = tmp_path / "out" / "report.html"
    done = call("report", os.fspath(path), f"--results={kept}")
    assert done.exit_code == 0, done.output
    assert path.stat().st_size < 2_000_000


def test_report_of_nothing_is_an_error(tmp_path):
    assert call("report", os.fspath(tmp_path / "r.html"), f"--results={tmp_path}").exit_code == 2


def test_verify_counts_errors_and_exits_by_them(kept):
    assert "0 errors" in call("verify", os.fspath(kept)).output
    (path,) = kept.rglob("mine.jsonl")
    path.write_text(path.read_text() + "{torn")
    done = call("verify", os.fspath(kept))
    assert done.exit_code == 1
    assert "mine.jsonl:2" in done.output
