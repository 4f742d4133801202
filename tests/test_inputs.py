import pytest
import torch
from oracles import Case, call_of, offsets_of

from jagbench.bias import BucketedBias
from jagbench.inputs import concatenate
from jagbench.reference import jagged_attention
from jagbench.spec import PAIRS, SHARED


@pytest.fixture
def jagged():
    case = Case([2, 0, 3], [1, 4, 2], kv_heads=2, group=2, padding=(2, 1), bias="dense")
    return call_of(case, "jagged_attention", scale=0.5)


@pytest.fixture
def dense():
    return call_of(Case(None, [1, 4, 2], rows=3, bias="bucketed"), "jagged_attention")


# -- views -----------------------------------------------------------------------------------------


def test_sizes_are_read_off_the_offsets(jagged, dense):
    assert jagged.num_sequences == dense.num_sequences == 3
    assert jagged.lengths("q_offsets").tolist() == [2, 0, 3]
    assert dense.lengths("q_offsets") is None
    assert jagged.pair_bounds() == [0, 2, 2, 8]
    assert dense.pair_bounds() == [0, 3, 15, 21]
    assert jagged.dtype == torch.float64
    assert jagged.device == torch.device("cpu")


def test_records_are_seen_by_dotted_path(dense):
    assert list(dense.tensors()) == ["q", "k", "v", "k_offsets", "bias.table", "bias.bucket_ids"]
    assert dense.layout_of("bias.table") == SHARED
    assert dense.layout_of("bias.bucket_ids") == PAIRS


def test_a_dense_query_is_shared(jagged, dense):
    assert dense.layout_of("q") == SHARED
    assert jagged.layout_of("q") == "q_offsets"


def test_a_call_passes_options_and_extra_overrides_them(jagged):
    seen = {}

    def spy(q, k, v, q_offsets, k_offsets, **keywords):
        seen.update(keywords)

    jagged.call(spy, scale=2.0, return_lse=True)
    assert seen["scale"] == 2.0
    assert seen["return_lse"]
    assert seen["align"] == "end"
    assert seen["bias"] is jagged.arguments["bias"]


# -- changes ---------------------------------------------------------------------------------------


def test_casting_leaves_offsets_and_bucket_ids_alone(dense):
    half = dense.to(torch.float16)
    dtypes = {name: tensor.dtype for name, tensor in half.tensors().items()}
    assert dtypes.pop("k_offsets") == torch.int64
    assert dtypes.pop("bias.bucket_ids") == torch.uint8
    assert set(dtypes.values()) == {half.upstream.dtype} == {torch.float16}
    assert dense.dtype == torch.float64


def test_moving_takes_every_tensor(jagged):
    moved = jagged.to(device="meta")
    assert {t.device.type for t in (*moved.tensors().values(), moved.upstream)} == {"meta"}


def test_a_clone_shares_no_memory(dense):
    clone = dense.clone()
    clone.arguments["bias"].table.zero_()
    clone.upstream.zero_()
    assert (dense.arguments["bias"].table != 0).all()
    assert (dense.upstream != 0).all()


def test_replace_changes_one_argument_and_refuses_unknown_ones(jagged):
    changed = jagged.replace(bias=None)
    assert changed.arguments["bias"] is None
    assert jagged.arguments["bias"] is not None
    with pytest.raises(ValueError, match=r"\['mask'\]"):
        jagged.replace(mask=None)


def test_with_options_adds_to_the_options(jagged):
    changed = jagged.with_options(causal=True)
    assert changed.options["scale"] == 0.5
    assert changed.options["causal"] is True
    assert jagged.options["causal"] is False


# -- selection -------------------------------------------------------------------------------------


def test_select_cuts_rows_pairs_offsets_and_upstream(jagged):
    part = jagged.select([2, 1, 2])
    rows = [2, 3, 4, 2, 3, 4]
    assert part.arguments["q_offsets"].tolist() == [0, 3, 3, 6]
    assert part.arguments["k_offsets"].tolist() == [0, 2, 6, 8]
    assert torch.equal(part.arguments["q"], jagged.arguments["q"][rows])
    assert torch.equal(part.upstream, jagged.upstream[rows])
    assert torch.equal(part.arguments["k"], jagged.arguments["k"][[5, 6, 1, 2, 3, 4, 5, 6]])
    pairs = [2, 3, 4, 5, 6, 7] * 2
    assert torch.equal(part.arguments["bias"], jagged.arguments["bias"][pairs])


def test_select_keeps_the_dtype_of_offsets():
    inputs = call_of(Case([2, 1], [1, 4], offsets_dtype=torch.int32), "jagged_attention")
    assert inputs.select([1]).arguments["q_offsets"].dtype == torch.int32


def test_select_drops_padding(jagged):
    assert jagged.arguments["q"].shape[0] == 7
    whole = jagged.select(range(3))
    assert whole.arguments["q"].shape[0] == whole.upstream.shape[0] == 5
    assert whole.arguments["k"].shape[0] == 7


def test_select_of_nothing_is_an_empty_batch(jagged):
    part = jagged.select([])
    assert part.num_sequences == 0
    assert part.arguments["q"].shape == (0, 4, 4)
    assert part.pair_bounds() == [0]


def test_select_keeps_a_dense_query_and_a_table_whole(dense):
    part = dense.select([2, 0])
    assert part.arguments["q"] is dense.arguments["q"]
    assert part.arguments["bias"].table is dense.arguments["bias"].table
    ids = dense.arguments["bias"].bucket_ids
    assert torch.equal(part.arguments["bias"].bucket_ids, torch.cat([ids[15:21], ids[:3]]))
    assert torch.equal(part.upstream, dense.upstream[[2, 0]])


@pytest.mark.parametrize("fixture", ["jagged", "dense"])
def test_the_output_of_a_selection_is_the_selection_of_the_output(fixture, request):
    inputs = request.getfixturevalue(fixture)
    out, lse = inputs.call(jagged_attention, return_lse=True)
    part = inputs.select([2, 0]).call(jagged_attention, return_lse=True)
    assert torch.equal(inputs.cut_output("out", out, [2, 0]), part[0])
    assert torch.equal(inputs.cut_output("lse", lse, [2, 0]), part[1])


def test_gradients_are_cut_like_their_arguments(jagged, dense):
    for name in ("k", "bias"):
        tensor = jagged.arguments[name]
        part = jagged.select([2]).arguments[name]
        assert torch.equal(jagged.cut_output(name, tensor, [2]), part)
    table = dense.arguments["bias"].table
    assert dense.cut_output("bias.table", table, [1]) is table
    assert dense.cut_output("q", dense.arguments["q"], [1]) is dense.arguments["q"]


# -- concatenation ---------------------------------------------------------------------------------


def test_concatenation_of_parts_is_the_whole(jagged):
    whole = concatenate([jagged.select([0, 1]), jagged.select([2])])
    wanted = jagged.select(range(3))
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, wanted.tensors()[name]), name
    assert torch.equal(whole.upstream, wanted.upstream)


def test_concatenation_drops_the_padding_of_every_part(jagged):
    whole = concatenate([jagged, jagged])
    assert whole.arguments["q_offsets"].tolist() == [0, 2, 2, 5, 7, 7, 10]
    assert whole.arguments["q"].shape[0] == 10
    assert not whole.arguments["k"].isnan().any()
    assert not whole.upstream.isnan().any()


def test_concatenation_shares_what_the_parts_share(dense):
    whole = concatenate([dense.select([0]), dense.select([1, 2])])
    assert whole.arguments["q"] is dense.arguments["q"]
    assert isinstance(whole.arguments["bias"], BucketedBias)
    assert torch.equal(whole.arguments["k_offsets"], offsets_of([1, 4, 2]))
    assert torch.equal(whole.arguments["bias"].bucket_ids, dense.arguments["bias"].bucket_ids)
    assert torch.equal(whole.upstream, dense.upstream)
