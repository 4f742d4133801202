import pytest
import torch
from oracles import offsets_of

from jagbench.bias import BucketedBias, log_time_bias, log_time_bucket


@pytest.mark.parametrize("power", range(53))
def test_buckets_are_exact_at_powers_of_two(power):
    seconds = torch.tensor([2**power - 1, 2 ** (power + 1) - 2])
    assert log_time_bucket(seconds, 64).tolist() == [power, power]


def test_buckets_are_the_floor_of_the_binary_logarithm_of_one_more():
    seconds = torch.tensor([0, 1, 2, 3, 6, 7, 8, 1_000_000])
    assert log_time_bucket(seconds, 64).tolist() == [0, 1, 1, 2, 2, 3, 3, 19]


def test_the_sign_of_a_time_difference_does_not_matter():
    seconds = torch.arange(-100, 101)
    assert torch.equal(log_time_bucket(seconds, 8), log_time_bucket(-seconds, 8))


def test_fractions_of_a_second_are_rounded_down():
    assert log_time_bucket(torch.tensor([0.9, 1.9, 2.99, 3.0]), 8).tolist() == [0, 1, 1, 2]


def test_late_buckets_are_clipped_to_the_last():
    assert log_time_bucket(torch.tensor([0, 100, 10**9]), 3).tolist() == [0, 2, 2]


def test_no_buckets_are_refused():
    with pytest.raises(ValueError, match="got 0"):
        log_time_bucket(torch.tensor([1]), 0)


def test_bucket_ids_are_packed_pair_by_pair_in_each_sequence():
    table = torch.zeros(8, 2)
    q_times, k_times = torch.tensor([10, 20, 100]), torch.tensor([10, 13, 0, 99, 100])
    bias = log_time_bias(table, q_times, k_times, offsets_of([2, 1]), offsets_of([2, 3]))
    assert isinstance(bias, BucketedBias)
    assert bias.table is table
    assert bias.bucket_ids.dtype == torch.int32
    gaps = torch.tensor([10 - 10, 13 - 10, 20 - 10, 20 - 13, 100 - 0, 100 - 99, 100 - 100])
    assert bias.bucket_ids.tolist() == log_time_bucket(gaps, 8).tolist()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_pairs_have_no_bucket_ids(lengths):
    none = torch.zeros(0, dtype=torch.int64)
    bias = log_time_bias(torch.zeros(4, 1), none, none, offsets_of(lengths), offsets_of(lengths))
    assert bias.bucket_ids.shape == (0,)
