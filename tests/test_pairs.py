import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import quick

from jagbench.pairs import attention_flops, visible_pairs, visible_range

lengths = st.integers(0, 12)
side = st.none() | st.integers(0, 14)


def sees(query, key, q_length, shift, causal, window, prefix, last_full):
    left, right = window or (None, None)
    place = query + shift
    if key < prefix or 0 <= place < prefix:
        return True
    if causal and key > place:
        return False
    if query >= q_length - last_full:
        return True
    return not (
        (left is not None and key < place - left)
        or (right is not None and not causal and key > place + right)
    )


def count(q_length, k_length, causal, align, window, prefix=0, last_full=0):
    shift = k_length - q_length if align == "end" else 0
    return sum(
        sees(query, key, q_length, shift, causal, window, prefix, last_full)
        for query in range(q_length)
        for key in range(k_length)
    )


@quick
@given(
    st.lists(st.tuples(lengths, lengths), max_size=6),
    st.booleans(),
    st.sampled_from(["start", "end"]),
    st.none() | st.tuples(side, side),
    st.integers(0, 14),
    st.integers(0, 14),
)
def test_the_closed_form_is_the_count(pairs, causal, align, window, prefix, last_full):
    q_lengths = torch.tensor([m for m, _ in pairs], dtype=torch.int32)
    k_lengths = torch.tensor([n for _, n in pairs], dtype=torch.int32)
    options = {
        "causal": causal, "align": align, "window": window,
        "prefix": prefix, "last_full": last_full,
    }  # fmt: skip
    found = visible_pairs(q_lengths, k_lengths, **options)
    assert found.dtype == torch.int64
    assert found.tolist() == [count(m, n, **options) for m, n in pairs]


@pytest.mark.parametrize("align", ["start", "end"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_closed_form_is_the_count_for_every_small_shape(align, causal):
    sizes = [(m, n) for m in range(6) for n in range(6)]
    q_lengths, k_lengths = torch.tensor(sizes).T
    for window in (None, (1, 0), (0, 2), (None, 1), (2, None)):
        for prefix in range(7):
            for last_full in range(7):
                options = {
                    "causal": causal, "align": align, "window": window,
                    "prefix": prefix, "last_full": last_full,
                }  # fmt: skip
                found = visible_pairs(q_lengths, k_lengths, **options)
                assert found.tolist() == [count(m, n, **options) for m, n in sizes], options


def test_a_prefix_and_last_queries_are_counted_by_hand():
    # Length 10, window 1 to the left, causal: 1 + 9 * 2 pairs.
    length = torch.tensor([10])
    options = {"causal": True, "window": (1, None)}
    assert visible_pairs(length, length, **options).tolist() == [19]
    # The first 2 rows see 10 keys each, the row after them 3, each of the rest the context and 2.
    assert visible_pairs(length, length, prefix=2, **options).tolist() == [20 + 3 + 7 * 4]
    # The last 3 rows see 8, 9 and 10 keys.
    assert visible_pairs(length, length, last_full=3, **options).tolist() == [1 + 6 * 2 + 27]


@pytest.mark.parametrize(("name", "value"), [("prefix", -3), ("last_full", -3), ("prefix", 1.5)])
def test_what_is_no_number_of_tokens_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*{value}"):
        visible_pairs(torch.tensor([4]), torch.tensor([4]), **{name: value})


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
    late = visible_pairs(length, length, causal=True, window=(0, 0), last_full=100_000)
    assert late.tolist() == [5_000_050_000]


def test_causal_closes_the_right_side():
    assert visible_range(False, None) == (None, None)
    assert visible_range(True, (3, 5)) == (3, 0)
    assert visible_range(True, None) == (None, 0)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ((-1, 0), "left .* -1"),
        ((0, -2), "right .* -2"),
        ((0.5, 0), "left .* 0.5"),
        ((None, True), "right .* True"),
        (("1", None), "left .* '1'"),
    ],
)
def test_a_window_of_no_whole_numbers_is_refused_with_its_side(window, message):
    with pytest.raises(ValueError, match=message):
        visible_range(False, window)


def test_a_pair_costs_two_flop_a_head_and_dim_of_each_product():
    assert attention_flops(1, 1, 64, 64) == 4 * 64
    assert attention_flops(3, 2, 192, 128) == 3 * 2 * 2 * 320
