import pytest
import torch
from hypothesis import given
from oracles import Case, call_of, cases, quick

from jagbench.reference import OPERATORS
from jagbench.reference.gdpa import gdpa_bytes, gdpa_flops
from jagbench.reference.jagged_attention import jagged_attention_bytes, jagged_attention_flops

OPTIONS = {"jagged_attention": {}, "gdpa": {"activation": "gelu"}}


def visible_pairs_by_hand(case):
    """Walk over every pair of a case and ask whether the query sees the key."""
    left, right = case.window or (None, None)
    count = 0
    q_lengths = case.q_lengths or [case.rows] * len(case.k_lengths)
    for q_length, k_length in zip(q_lengths, case.k_lengths, strict=True):
        for query in range(q_length):
            position = query + (k_length - q_length if case.align == "end" else 0)
            for key in range(k_length):
                hidden = case.causal and key > position
                hidden |= left is not None and key < position - left
                hidden |= right is not None and key > position + right
                hidden &= key >= case.prefix and not 0 <= position < case.prefix
                late = query + case.last_full >= q_length
                hidden &= not (late and (key <= position or not case.causal))
                count += not hidden
    return count


@pytest.mark.parametrize("operator", OPTIONS)
@quick
@given(case=cases())
def test_flops_are_those_of_the_pairs_counted_by_hand(operator, case):
    inputs = call_of(case, operator, **OPTIONS[operator])
    a_pair = 2 * case.heads * (case.qk_dim + case.v_dim)
    assert OPERATORS[operator].flops(inputs) == a_pair * visible_pairs_by_hand(case)


@pytest.mark.parametrize("operator", OPTIONS)
def test_flops_do_not_count_padding(operator):
    case = Case([128, 64], [128, 64], kv_heads=8, qk_dim=64, v_dim=64, padding=(64, 64))
    inputs = call_of(case, operator, torch.bfloat16, **OPTIONS[operator])
    assert OPERATORS[operator].flops(inputs) == 41_943_040


@pytest.mark.parametrize("operator", OPTIONS)
def test_a_causal_sequence_of_8_has_36_pairs(operator):
    case = Case([8], [8], causal=True, qk_dim=1, v_dim=1)
    inputs = call_of(case, operator, **OPTIONS[operator])
    assert OPERATORS[operator].flops(inputs) == 36 * 4


def test_flops_read_the_head_dim_and_do_not_derive_it():
    case = Case([2], [3], kv_heads=2, group=2, qk_dim=128, v_dim=80)
    assert jagged_attention_flops(call_of(case, "jagged_attention")) == 6 * 4 * 2 * (128 + 80)
    assert gdpa_flops(call_of(case, "gdpa", activation="relu")) == 6 * 4 * 2 * (128 + 80)


def test_bytes_read_each_input_once_and_write_each_output_once():
    case = Case([3, 2], [4, 1], kv_heads=2, group=2, qk_dim=8, v_dim=6, padding=(5, 7))
    q, k, v, out, offsets = 5 * 4 * 8, 5 * 2 * 8, 5 * 2 * 6, 5 * 4 * 6, 2 * 3 * 8
    wanted = 2 * (q + k + v + out) + offsets
    assert gdpa_bytes(call_of(case, "gdpa", torch.float16, activation="relu")) == wanted
    inputs = call_of(case, "jagged_attention", torch.float16)
    assert jagged_attention_bytes(inputs) == wanted
    assert jagged_attention_bytes(inputs.with_options(return_lse=True)) == wanted + 4 * 5 * 4


def test_bytes_count_a_dense_query_once_and_its_output_in_every_sequence():
    case = Case(None, [4, 1, 2], rows=3, qk_dim=8, v_dim=6, offsets_dtype=torch.int32)
    wanted = 4 * (3 * 8 + 7 * 8 + 7 * 6 + 3 * 3 * 6) + 4 * 4
    assert jagged_attention_bytes(call_of(case, "jagged_attention", torch.float32)) == wanted


@pytest.mark.parametrize(("bias", "extra"), [("dense", 4 * 14 * 2), ("bucketed", 4 * 4 * 2 + 14)])
def test_bytes_count_the_bias_whole(bias, extra):
    case = Case([3, 2], [4, 1], kv_heads=2, causal=True)
    plain = jagged_attention_bytes(call_of(case, "jagged_attention", torch.float32))
    biased = call_of(
        Case([3, 2], [4, 1], kv_heads=2, causal=True, bias=bias), "jagged_attention", torch.float32
    )
    assert jagged_attention_bytes(biased) == plain + extra


@pytest.mark.parametrize("operator", OPTIONS)
def test_an_empty_batch_costs_its_offsets_only(operator):
    inputs = call_of(Case([], []), operator, **OPTIONS[operator])
    assert OPERATORS[operator].flops(inputs) == 0
    assert OPERATORS[operator].bytes_moved(inputs) == 16
