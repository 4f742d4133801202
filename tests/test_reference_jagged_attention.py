import importlib
import math
from pathlib import Path

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import MASKS, Case, assert_same, attention_oracle, call_of, cases, offsets_of, quick
from refusals import BAD, GOOD

import jagbench.reference
from jagbench.execution import run
from jagbench.inputs import concatenate
from jagbench.reference import OPERATORS, jagged_attention


def test_the_package_offers_the_function_and_not_the_module():
    importlib.import_module("jagbench.reference.jagged_attention")
    assert callable(jagbench.reference.jagged_attention)
    assert jagbench.reference.jagged_attention is OPERATORS["jagged_attention"].reference
    # The way back from codes is no operator: nothing is measured of it.
    assert set(jagbench.reference.__all__) == {"OPERATORS", "mx_dequantize", *OPERATORS}


@quick
@given(cases(biases=("none", "dense", "bucketed")), st.sampled_from([None, 0.3, -1.5]))
def test_reference_and_oracle_agree_in_outputs_and_gradients(case, scale):
    inputs = call_of(case, "jagged_attention", scale=scale, return_lse=True)
    found = run(jagged_attention, inputs, backward=True)
    assert_same(found, attention_oracle(inputs))


@pytest.mark.parametrize("bias", ["none", "dense", "bucketed"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("q_lengths", [[5, 2, 0, 65, 3], None], ids=["jagged", "dense query"])
def test_reference_and_oracle_agree_on_unequal_lengths(q_lengths, mask, bias):
    case = Case(
        q_lengths, [2, 5, 3, 64, 0], kv_heads=2, group=2, v_dim=6, padding=(2, 3), bias=bias, **mask
    )
    inputs = call_of(case, "jagged_attention", return_lse=True)
    assert_same(run(jagged_attention, inputs, backward=True), attention_oracle(inputs))


@pytest.mark.parametrize("bias", ["none", "dense", "bucketed"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_gradients_are_those_of_numerical_differentiation(mask, bias):
    case = Case([2, 3, 1], [3, 1, 0], group=2, qk_dim=2, v_dim=3, bias=bias, **mask)
    inputs = call_of(case, "jagged_attention", return_lse=True)
    names = [n for n in inputs.operator.differentiable if n in inputs.tensors()]

    def out_and_finite_lse(*values):
        given_values = dict(zip(names, values, strict=True))
        out, lse = inputs.map(lambda n, t: given_values.get(n, t)).call(jagged_attention)
        return out, torch.where(lse == -math.inf, 0.0, lse)

    leaves = [inputs.tensors()[n].clone().requires_grad_() for n in names]
    assert torch.autograd.gradcheck(out_and_finite_lse, leaves)


# -- masks -----------------------------------------------------------------------------------------


def keys_seen(q_length, k_length, **mask):
    """Keys that get weight in each row, when all scores are equal and values are one-hot."""
    q, k = torch.zeros(q_length, 1, 2), torch.zeros(k_length, 1, 2)
    v = torch.eye(k_length)[:, None]
    ends = offsets_of([q_length]), offsets_of([k_length])
    out = jagged_attention(q, k, v, *ends, **mask)
    return [set(row.nonzero().flatten().tolist()) for row in out[:, 0]]


def test_causal_puts_the_last_query_beside_the_last_key():
    assert keys_seen(5, 2, causal=True) == [set(), set(), set(), {0}, {0, 1}]
    assert keys_seen(2, 5, causal=True) == [{0, 1, 2, 3}, {0, 1, 2, 3, 4}]


def test_causal_with_start_alignment_puts_the_first_query_beside_the_first_key():
    assert keys_seen(5, 2, causal=True, align="start") == [{0}, {0, 1}, {0, 1}, {0, 1}, {0, 1}]
    assert keys_seen(2, 5, causal=True, align="start") == [{0}, {0, 1}]


def test_a_window_counts_its_sides_about_the_query():
    assert keys_seen(4, 4, window=(1, 0)) == [{0}, {0, 1}, {1, 2}, {2, 3}]
    assert keys_seen(4, 4, window=(None, 1)) == [{0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3}]
    assert keys_seen(2, 4, window=(0, 1)) == [{2, 3}, {3}]
    assert keys_seen(3, 3, window=(1, 2), causal=True) == [{0}, {0, 1}, {1, 2}]


def test_a_window_as_wide_as_the_sequence_is_no_window():
    inputs = call_of(Case([7, 4], [7, 4]), "jagged_attention")
    wide = inputs.with_options(window=(6, 6))
    assert_same(
        run(jagged_attention, wide, backward=True), run(jagged_attention, inputs, backward=True)
    )


def test_a_prefix_is_seen_by_every_query_and_sees_every_key():
    window = {"window": (0, 0), "prefix": 2}
    assert keys_seen(5, 5, **window) == [set(range(5))] * 2 + [{0, 1, 2}, {0, 1, 3}, {0, 1, 4}]
    causal = {"causal": True, "prefix": 2}
    assert keys_seen(4, 4, **causal) == [{0, 1, 2, 3}] * 2 + [{0, 1, 2}, {0, 1, 2, 3}]


def test_a_prefix_is_counted_in_places_of_keys():
    # Two queries at places 2 and 3: neither belongs to the context.
    assert keys_seen(2, 4, window=(0, 0), prefix=1) == [{0, 2}, {0, 3}]
    # Three queries at places -1, 0, 1: the first lies before the sequence, and sees the context.
    assert keys_seen(3, 2, causal=True, prefix=1) == [{0}, {0, 1}, {0, 1}]
    start = {"window": (0, 0), "prefix": 1, "align": "start"}
    assert keys_seen(2, 4, **start) == [{0, 1, 2, 3}, {0, 1}]


def test_the_last_queries_see_past_the_window_but_not_into_the_future():
    window = {"window": (0, 0), "last_full": 2}
    assert keys_seen(4, 4, **window) == [{0}, {1}, {0, 1, 2, 3}, {0, 1, 2, 3}]
    causal = {**window, "causal": True}
    assert keys_seen(4, 4, **causal) == [{0}, {1}, {0, 1, 2}, {0, 1, 2, 3}]
    assert keys_seen(2, 4, **causal, align="start") == [{0}, {0, 1}]
    assert keys_seen(2, 4, **causal) == [{0, 1, 2}, {0, 1, 2, 3}]


@pytest.mark.parametrize("causal", [False, True])
def test_more_last_queries_than_a_sequence_has_are_no_window(causal):
    inputs = call_of(Case([7, 4], [7, 4], causal=causal), "jagged_attention")
    late = inputs.with_options(window=(1, 1), last_full=9)
    assert_same(
        run(jagged_attention, late, backward=True), run(jagged_attention, inputs, backward=True)
    )


@pytest.mark.parametrize("causal", [False, True])
def test_a_prefix_longer_than_a_sequence_is_no_mask(causal):
    inputs = call_of(Case([7, 4], [7, 4]), "jagged_attention")
    whole = inputs.with_options(causal=causal, window=(1, 1), prefix=7)
    assert_same(
        run(jagged_attention, whole, backward=True), run(jagged_attention, inputs, backward=True)
    )


def test_keys_outside_every_window_get_no_gradient():
    case = Case([4], [16], causal=True, window=(4, None))
    found = run(jagged_attention, call_of(case, "jagged_attention"), backward=True)
    for name in ("grad k", "grad v"):
        assert (found[name][:8] == 0).all()
        assert (found[name][8:] != 0).all()


# -- empty, unseen, padded -------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [False, True])
def test_an_empty_batch_gives_empty_outputs_and_zero_gradients(dense):
    inputs = call_of(Case(None if dense else [], []), "jagged_attention", return_lse=True)
    found = run(jagged_attention, inputs, backward=True)
    assert found["out"].shape == ((0, 3, 1, 4) if dense else (0, 1, 4))
    assert found["lse"].shape == ((0, 3, 1) if dense else (0, 1))
    assert (found["grad q"] == 0).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
@pytest.mark.parametrize("dense", [False, True])
def test_an_empty_batch_has_a_gradient_of_each_tensor_alone(name, dense):
    case = Case(None if dense else [], [], padding=(0 if dense else 2, 2), bias="dense")
    inputs = call_of(case, "jagged_attention")
    value = inputs.arguments[name].zero_().requires_grad_()
    (gradient,) = torch.autograd.grad(inputs.call(jagged_attention).sum(), value)
    assert torch.equal(gradient, torch.zeros_like(value))


def test_a_sequence_without_keys_gives_zero_output_and_infinite_lse():
    inputs = call_of(Case([0, 5], [7, 0], qk_dim=8), "jagged_attention", return_lse=True)
    found = run(jagged_attention, inputs, backward=True)
    assert (found["lse"] == -math.inf).all()
    assert all((found[name] == 0).all() for name in found if name != "lse")


def test_a_sequence_without_queries_gives_its_keys_zero_gradient():
    inputs = call_of(Case([0, 64], [64, 64], kv_heads=2), "jagged_attention", causal=True)
    found = run(jagged_attention, inputs, backward=True)
    alone = run(jagged_attention, inputs.select([1]), backward=True)
    for name in ("grad k", "grad v"):
        assert (found[name][:64] == 0).all()
        assert torch.equal(found[name][64:], alone[name])


def test_rows_that_see_no_key_have_zero_gradient_with_far_more_queries_than_keys():
    inputs = call_of(Case([76, 34, 146], [1, 1, 1], qk_dim=32), "jagged_attention", torch.float16)
    inputs = inputs.with_options(causal=True, return_lse=True)
    inputs = inputs.map(
        lambda n, t: torch.ones_like(t) if n == "upstream" else t * (3 if n in "qkv" else 1)
    )
    found = run(jagged_attention, inputs, backward=True)
    last = [75, 109, 255]
    unseen = [i for i in range(256) if i not in last]
    assert all(found[f"grad {n}"].isfinite().all() for n in "qkv")
    assert (found["grad q"][unseen] == 0).all()
    assert (found["out"][unseen] == 0).all()
    assert (found["lse"][unseen] == -math.inf).all()


def test_a_row_hidden_by_a_bias_of_minus_infinity_is_a_row_that_sees_nothing():
    inputs = call_of(Case([3], [2], bias="dense"), "jagged_attention", return_lse=True)
    bias = inputs.arguments["bias"].clone()
    bias[2:4] = -math.inf
    found = run(jagged_attention, inputs.replace(bias=bias), backward=True)
    assert (found["out"][1] == 0).all()
    assert (found["lse"][1] == -math.inf).all()
    assert all(value.isfinite().all() for name, value in found.items() if name != "lse")


def test_rows_past_the_last_offset_are_zero_and_never_read():
    inputs = call_of(Case([144, 30], [144, 30], padding=(2, 2)), "jagged_attention")
    assert inputs.arguments["k"][-1].isnan().all()
    assert inputs.upstream[-1].isnan().all()
    found = run(jagged_attention, inputs.with_options(return_lse=True), backward=True)
    for value in found.values():
        assert (value[174:] == 0).all()
        assert value.isfinite().all()


def test_nan_in_one_sequence_stays_in_it():
    inputs = call_of(Case([3, 4, 2], [3, 4, 2]), "jagged_attention")
    clean = run(jagged_attention, inputs, backward=True)
    poisoned = inputs.clone()
    for name in "qkv":
        poisoned.arguments[name][3:7] = math.nan
    found = run(jagged_attention, poisoned, backward=True)
    rows = [0, 1, 2, 7, 8]
    for name, value in found.items():
        assert torch.equal(value[rows], clean[name][rows])


def test_nan_in_a_key_or_query_that_takes_part_in_no_pair_never_leaks():
    inputs = call_of(Case([5], [2], causal=True), "jagged_attention")
    inputs.arguments["q"][:3] = math.nan
    flipped = call_of(Case([2], [5], causal=True, align="start"), "jagged_attention")
    flipped.arguments["k"][2:] = math.nan
    flipped.arguments["v"][2:] = math.nan
    for poisoned in (inputs, flipped):
        found = run(jagged_attention, poisoned, backward=True)
        assert all(value.isfinite().all() for value in found.values())


# -- identities ------------------------------------------------------------------------------------


def test_the_order_of_sequences_does_not_matter():
    inputs = call_of(Case([3, 0, 5, 2], [4, 1, 0, 7]), "jagged_attention")
    order = [2, 3, 0, 1]
    found = run(jagged_attention, inputs.select(order), backward=True)
    whole = run(jagged_attention, inputs, backward=True)
    for name, value in found.items():
        assert torch.equal(value, inputs.cut_output(name.removeprefix("grad "), whole[name], order))


def test_a_batch_may_be_split_and_merged():
    inputs = call_of(Case([3, 0, 5], [4, 1, 2], bias="dense"), "jagged_attention")
    merged = concatenate([inputs.select([0]), inputs.select([1, 2])])
    assert_same(
        run(jagged_attention, merged, backward=True), run(jagged_attention, inputs, backward=True)
    )


def test_a_dense_query_is_the_same_query_in_every_sequence():
    dense = call_of(Case(None, [4, 0, 2], rows=3), "jagged_attention")
    jagged = dense.replace(q=dense.arguments["q"].repeat(3, 1, 1), q_offsets=offsets_of([3, 3, 3]))
    jagged = jagged.map(lambda n, t: t.flatten(0, 1) if n == "upstream" else t)
    found, wanted = (run(jagged_attention, x, backward=True) for x in (dense, jagged))
    torch.testing.assert_close(found["out"].flatten(0, 1), wanted["out"])
    torch.testing.assert_close(found["grad q"], wanted["grad q"].reshape(3, 3, 1, 4).sum(0))


def test_bucketed_bias_is_its_dense_bias():
    case = Case([3, 2], [4, 5], kv_heads=2, bias="bucketed")
    inputs = call_of(case, "jagged_attention")
    bias = inputs.arguments["bias"]
    dense = inputs.replace(bias=bias.table[bias.bucket_ids.long()])
    assert torch.equal(inputs.call(jagged_attention), dense.call(jagged_attention))


def test_gradients_do_not_need_every_argument_to_require_one():
    inputs = call_of(Case([3, 2], [4, 5], bias="dense"), "jagged_attention")
    wanted = run(jagged_attention, inputs, backward=True)["grad bias"]
    bias = inputs.arguments["bias"].clone().requires_grad_()
    out = inputs.replace(bias=bias).call(jagged_attention)
    (found,) = torch.autograd.grad(out, bias, inputs.upstream)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_output_keeps_the_dtype_and_lse_is_at_least_float32(dtype):
    inputs = call_of(Case([3, 2], [4, 5]), "jagged_attention", dtype, return_lse=True)
    out, lse = inputs.call(jagged_attention)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_do_not_fit_are_refused_with_their_numbers(name):
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        jagged_attention(**{**GOOD, **changes})


def test_fitting_arguments_are_accepted():
    extra = {"max_q_len": 4, "max_k_len": 9, "deterministic": True, "bias": torch.zeros(22, 1)}
    out = jagged_attention(**GOOD, **extra)
    assert out.shape == (6, 4, 3)


def test_the_oracles_share_nothing_with_the_reference():
    source = Path(oracles.__file__).read_text()
    assert "reference.activations" not in source
    assert "jagbench.pairs" not in source
