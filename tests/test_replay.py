import builtins

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jagbench.workloads.replay import read_lengths, replay, workload_from_text


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "users.csv"
    path.write_text("user,history,ads\na,12,3\nb,0,1\nc,40,2\n")
    return path


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "users.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"history": [12, 0, 40], "x": [0.5, 1, 2]}), path)
    return path


def test_a_text_file_has_one_length_a_line_and_comments(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("# drawn in May\n12\n\n0  # new user\n 40\n")
    assert read_lengths(path) == [12, 0, 40]


def test_a_csv_column_is_read_by_name(csv):
    assert read_lengths(csv, "history") == [12, 0, 40]


def test_a_parquet_column_is_read_by_name(parquet):
    assert read_lengths(parquet, "history") == [12, 0, 40]


def test_an_npy_file_is_read_whole(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([12, 0, 40], dtype=np.uint16))
    assert read_lengths(tmp_path / "lengths.npy") == [12, 0, 40]


def test_the_only_column_needs_no_name(tmp_path):
    path = tmp_path / "one.csv"
    path.write_text("n\n5\n6\n")
    assert read_lengths(path) == [5, 6]


def test_a_replayed_workload_has_the_lengths_of_the_file(csv):
    workload = replay(csv, "history", k_column="ads", heads=2, qk_dim=16)
    inputs = workload.inputs()
    assert inputs.offsets("q_offsets").tolist() == [0, 12, 12, 52]
    assert inputs.offsets("k_offsets").tolist() == [0, 3, 4, 6]
    assert workload.statistics["empty_sequences"] == 1


def test_the_digest_depends_on_the_lengths_not_on_the_file(csv, parquet):
    assert replay(csv, "history").digest == replay(parquet, "history").digest
    assert replay(csv, "history").digest != replay(csv, "ads").digest


@pytest.mark.parametrize("operator", ["gdpa", "jagged_attention", "pffn_block"])
def test_a_workload_is_made_from_the_text_of_a_command_line(csv, operator):
    workload = workload_from_text(f"replay:{csv}:history", operator)
    assert workload.operator == operator
    assert workload.recipe.lengths(0)["q_offsets"] == [12, 0, 40]


@pytest.mark.parametrize("operator", ["block_attention", "rotary"])
def test_operators_with_one_offsets_argument_are_replayed_with_a_rotary_table(csv, operator):
    workload = workload_from_text(f"replay:{csv}:history", operator)
    assert workload.operator == operator
    assert workload.recipe.lengths(0) == {"offsets": [12, 0, 40]}
    assert workload.recipe.table.kind == "position"
    with pytest.raises(ValueError, match=f"{operator} takes no k_column='ads'"):
        replay(csv, "history", operator=operator, k_column="ads")


def test_mx_quantize_is_replayed_in_squares(csv):
    workload = workload_from_text(f"replay:{csv}:history", "mx_quantize")
    inputs = workload.inputs()
    assert not workload.differentiable
    assert inputs.options["block"] == (32, 32)
    assert inputs.lengths("offsets").tolist() == workload.recipe.lengths(0)["offsets"]
    assert inputs.upstream is None


def test_a_linear_layer_behind_a_norm_is_replayed_with_as_many_features_as_heads_have(csv):
    workload = workload_from_text(f"replay:{csv}:history", "norm_linear")
    assert workload.recipe.lengths(0) == {"offsets": [12, 0, 40]}
    assert (workload.recipe.features, workload.recipe.out_features) == (512, 512)


def test_a_pffn_block_is_replayed_without_a_mask(csv):
    assert replay(csv, "history", operator="pffn_block").recipe.attention.operator == "gdpa"
    with pytest.raises(ValueError, match="pffn_block takes no causal=True"):
        replay(csv, "history", operator="pffn_block", causal=True)


def test_an_operator_of_no_recipe_is_refused(csv):
    with pytest.raises(ValueError, match="got 'conv'"):
        replay(csv, "history", operator="conv")


def test_a_path_that_holds_a_colon_is_found(tmp_path):
    path = tmp_path / "a:b.txt"
    path.write_text("7\n")
    assert workload_from_text(f"replay:{path}").recipe.lengths(0)["q_offsets"] == [7]


@pytest.mark.parametrize(
    ("name", "content", "column", "words"),
    [
        ("a.txt", "3\nx1\n", None, "a.txt, line 2: 'x1' is no length"),
        ("a.txt", "3\n2.5\n", None, "a.txt, line 2: '2.5' is no length"),
        ("a.txt", "3\n1_0\n", None, "a.txt, line 2: '1_0' is no length"),
        ("a.txt", "-4\n", None, "a.txt, line 1: length -4 is negative"),
        ("a.txt", "# nothing\n", None, "holds no lengths"),
        ("a.txt", "3\n", "n", "no columns, but 'n' was asked for"),
        ("a.csv", "m,n\n1,2\n3,\n", "n", "a.csv, line 3, column 'n': '' is no length"),
        ("a.csv", "m,n\n1,2\n3\n", "n", "a.csv, line 3, column 'n': None is no length"),
        ("a.csv", "m,n\n1,2\n", "z", r"no column 'z'; its columns are \['m', 'n'\]"),
        ("a.csv", "m,n\n1,2\n", None, "no column was named"),
    ],
)
def test_an_unusable_file_is_refused_with_its_place(tmp_path, name, content, column, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        read_lengths(tmp_path / name, column)


def test_a_fraction_in_parquet_is_refused_with_its_place(parquet):
    with pytest.raises(ValueError, match=r"users.parquet, row 1, column 'x': 0.5 is no length"):
        read_lengths(parquet, "x")


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((2, 2), dtype=np.int64)])
def test_an_array_of_another_kind_is_refused(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=r"expected integers of shape \[sequences\], got"):
        read_lengths(tmp_path / "a.npy")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.txt: no such file"):
        replay(tmp_path / "gone.txt")


def test_text_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="expected replay:PATH"):
        workload_from_text("play:x")


def test_parquet_without_pyarrow_says_what_to_install(parquet, monkeypatch):
    real = builtins.__import__

    def missing(name, *arguments, **options):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"Parquet needs pyarrow.*jagbench\[parquet\]"):
        read_lengths(parquet, "history")
