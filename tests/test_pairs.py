import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import quick

from jagbench.pairs import attention_flops, visible_pairs, visible_range

lengths = st.integers(0, 12)
side = st.none() | st.integers(0, 14)


def count(q_length, k_length, causal, align, window):
    left, right = window or (None, None)
    shift = k_length - q_length if align == "end" else 0
    return sum(
        not (
            (causal and key > query + shift)
            or (left is not None and key < query + shift - left)
            or (right is not None and key > query + shift + right)
        )
        for query in range(q_length)
        for key in range(k_length)
    )


@quick
@given(
    st.lists(st.tuples(lengths, lengths), max_size=6),
    st.booleans(),
    st.sampled_from(["start", "end"]),
    st.none() | st.tuples(side, side),
)
def test_the_closed_form_is_the_count(pairs, causal, align, window):
    q_lengths = torch.tensor([m for m, _ in pairs], dtype=torch.int32)
    k_lengths = torch.tensor([n for _, n in pairs], dtype=torch.int32)
    found = visible_pairs(q_lengths, k_lengths, causal=causal, align=align, window=window)
    assert found.dtype == torch.int64
    assert found.tolist() == [count(m, n, causal, align, window) for m, n in pairs]


@pytest.mark.parametrize(("m", "n", "wanted"), [(5, 2, 3), (2, 5, 9), (8, 8, 36)])
def test_causal_counts_by_hand(m, n, wanted):
    assert visible_pairs(torch.tensor([m]), torch.tensor([n]), causal=True).tolist() == [wanted]


def test_a_window_is_cut_at_the_ends_of_the_sequence():
    found = visible_pairs(torch.tensor([10]), torch.tensor([10]), window=(2, 2))
    assert found.tolist() == [10 * 5 - 2 * (1 + 2)]


def test_counts_past_32_bits_are_exact():
    length = torch.tensor([100_000], dtype=torch.int32)
    assert visible_pairs(length, length).tolist() == [10_000_000_000]
    assert visible_pairs(length, length, causal=True).tolist() == [5_000_050_000]


def test_causal_closes_the_right_side():
    assert visible_range(False, None) == (None, None)
    assert visible_range(True, (3, 5)) == (3, 0)
    assert visible_range(True, None) == (None, 0)


@pytest.mark.parametrize(("window", "message"), [((-1, 0), "left .* -1"), ((0, -2), "right .* -2")])
def test_a_negative_window_is_refused_with_its_number(window, message):
    with pytest.raises(ValueError, match=message):
        visible_range(False, window)


def test_a_pair_costs_two_flop_a_head_and_dim_of_each_product():
    assert attention_flops(1, 1, 64, 64) == 4 * 64
    assert attention_flops(3, 2, 192, 128) == 3 * 2 * 2 * 320
