import pytest
from click.testing import CliRunner

from jagbench.cli import main
from jagbench.reference import OPERATORS
from jagbench.workloads import CATALOGUE, select


def call(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_operators_lists_every_operator_with_its_signature():
    done = call("operators")
    assert done.exit_code == 0
    for operator in OPERATORS.values():
        assert f"{operator.name}(q" in done.output
        assert operator.paper in done.output


def test_workloads_lists_those_selected_with_their_digests():
    done = call("workloads", "--operator", "gdpa", "--purpose", "smoke", "--tag", "adversarial")
    expected = select(operator="gdpa", purpose="smoke", tag="adversarial")
    assert done.exit_code == 0
    assert f"{len(expected)} workloads" in done.output
    for workload in expected:
        assert workload.name in done.output
        assert workload.digest in done.output
    assert "jagged_attention-" not in done.output


def test_an_unknown_tag_is_an_error_that_lists_the_tags():
    done = call("workloads", "--tag", "nonsense")
    assert done.exit_code == 1
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
    assert done.exit_code == 1
    assert name.removeprefix("replay:") in done.output
