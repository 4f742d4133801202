import dataclasses
import decimal
import hashlib

import numpy as np
import pytest

from jagbench.workloads import counter
from jagbench.workloads.lengths import (
    HEAVY_TAILS,
    Bimodal,
    ExactTotal,
    Explicit,
    Fixed,
    Gaussian,
    LogNormal,
    OneGiant,
    StochasticCut,
    UniformFill,
    ZeroInflated,
    Zipf,
)

DRAWS = 20_000
LAWS = [
    Fixed(7),
    UniformFill(0.3, 100),
    UniformFill(0.7, 100, allow_empty=True),
    LogNormal(24, 1.0, 1, 120),
    Gaussian(40),
    Zipf(1.2, 90),
    Bimodal(UniformFill(0.5, 16), Fixed(96), 0.3),
    ZeroInflated(UniformFill(0.6, 60), 0.4),
    OneGiant(110, 12),
    StochasticCut(UniformFill(0.5, 1000), 1000, 1.5),
    ExactTotal(UniformFill(0.5, 100), 3000, 100),
]


def moments(lengths, maximum):
    """Fill, quadratic waste and coefficient of variation."""
    values = np.array(lengths, dtype=np.float64)
    fill = values.mean() / maximum
    return fill, 1 - (values**2).mean() / maximum**2, values.std() / values.mean()


def fingerprint(lengths):
    return hashlib.sha256(str(lengths).encode()).hexdigest()[:12]


@pytest.mark.parametrize(
    ("fill", "quadratic_waste", "variation"),
    [(0.3, 0.88, 0.58), (0.5, 0.667, 0.58), (0.7, 0.48, 0.25), (0.9, 0.187, 0.064),
     (0.95, 0.097, 0.031)],
)  # fmt: skip
def test_uniform_lengths_have_the_published_fill_waste_and_variation(
    fill, quadratic_waste, variation
):
    found = moments(UniformFill(fill, 2000).draw(DRAWS, 1), 2000)
    assert found == pytest.approx((fill, quadratic_waste, variation), rel=0.02, abs=0.006)


@pytest.mark.parametrize(
    ("name", "fill", "quadratic_waste", "variation"),
    [("median300", 0.119, 0.967, 1.17), ("median800", 0.156, 0.946, 1.11),
     ("median800-wide", 0.097, 0.971, 1.46), ("median1500", 0.246, 0.899, 0.82)],
)  # fmt: skip
def test_heavy_tails_have_the_stated_fill_waste_and_variation(
    name, fill, quadratic_waste, variation
):
    law = HEAVY_TAILS[name]
    found = moments(law.draw(DRAWS, 1), law.high)
    assert found == pytest.approx((fill, quadratic_waste, variation), rel=0.03)


def test_uniform_bounds_are_inclusive_exact_and_reached():
    assert UniformFill(0.95, 2000).bounds == (1800, 2000)
    assert UniformFill(0.3, 2000).bounds == (1, 1200)
    assert UniformFill(0.3, 2000, allow_empty=True).bounds == (0, 1200)
    assert UniformFill(1.0, 64).bounds == (64, 64)
    assert set(UniformFill(0.5, 4).draw(200, 3)) == {1, 2, 3, 4}
    assert 0 in UniformFill(0.5, 4, allow_empty=True).draw(200, 3)


def test_gaussian_lengths_deviate_by_a_quarter_of_their_mean():
    lengths = Gaussian(1000, floor=400).draw(DRAWS, 1)
    assert np.mean(lengths) == pytest.approx(1000, rel=0.01)
    assert np.std(lengths) == pytest.approx(250, rel=0.03)
    assert min(lengths) == 400


def test_zipf_lengths_follow_the_power():
    lengths = np.array(Zipf(2.0, 50).draw(DRAWS, 1))
    assert np.sum(lengths == 1) / np.sum(lengths == 2) == pytest.approx(4, rel=0.1)
    assert lengths.min() == 1
    assert lengths.max() <= 50


def test_a_mixture_holds_its_shares():
    lengths = Bimodal(Fixed(3), Fixed(90), 0.3).draw(DRAWS, 1)
    assert lengths.count(90) / DRAWS == pytest.approx(0.3, abs=0.01)
    lengths = ZeroInflated(Fixed(3), 0.4).draw(DRAWS, 1)
    assert lengths.count(0) / DRAWS == pytest.approx(0.4, abs=0.01)


def test_one_giant_stands_among_tiny_sequences():
    lengths = sorted(OneGiant(500, 4).draw(64, 9))
    assert lengths[-1] == 500
    assert lengths[-2] <= 4
    assert lengths[0] >= 1


def test_a_stochastic_cut_of_exponent_two_cuts_nothing():
    base = UniformFill(0.5, 1024)
    assert StochasticCut(base, 1024, 2.0).draw(500, 1) == base.draw(500, 1)


def test_a_stochastic_cut_shortens_long_histories_to_its_threshold():
    base = Fixed(1024)
    lengths = StochasticCut(base, 1024, 1.5).draw(DRAWS, 1)
    # 1024 ** 0.75 = 181.02; kept with probability 1024 ** 1.5 / 1024 ** 2 = 1 / 32.
    assert set(lengths) == {181, 1024}
    assert lengths.count(1024) / DRAWS == pytest.approx(1 / 32, abs=0.004)


def test_an_exact_total_is_met():
    lengths = ExactTotal(UniformFill(0.75, 2000), 1_735_537, 2000).draw(1152, 2026)
    assert sum(lengths) == 1_735_537
    assert 1 <= min(lengths) <= max(lengths) <= 2000


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.law)
def test_a_law_repeats_itself_and_heeds_its_seed(law):
    first = law.draw(60, 11)
    assert first == law.draw(60, 11)
    assert len(first) == 60
    if law.law != "fixed":
        assert first != law.draw(60, 12)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.law)
def test_an_empty_batch_has_no_lengths(law):
    law = dataclasses.replace(law, total=0) if isinstance(law, ExactTotal) else law
    assert law.draw(0, 1) == []


def test_lengths_do_not_heed_the_caller_s_decimal_context():
    law = LogNormal(300, 1.0, 16, 4096)
    expected = law.draw(50, 1)
    with decimal.localcontext(prec=3, rounding=decimal.ROUND_DOWN):
        assert law.draw(50, 1) == expected


def test_drawn_lengths_are_those_of_every_other_machine():
    found = [fingerprint(law.draw(60, 2026)) for law in LAWS]
    assert found == GOLDEN


def test_the_normal_table_is_that_of_every_other_machine():
    table = counter.normal_table()
    assert fingerprint(table) == TABLE
    assert table[0] == -table[-1]
    assert sum(table) == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: UniformFill(1.2, 10), "fill must lie in .* got 1.2"),
        (lambda: UniformFill(0.5, 0), "maximum must be at least 1, got 0"),
        (lambda: Fixed(-1), "length must be at least 0, got -1"),
        (lambda: Explicit((3, -2)), "length must be at least 0, got -2"),
        (lambda: Explicit((1, 2)).draw(3, 0), "2 explicit lengths cannot fill a batch of 3"),
        (lambda: LogNormal(5, 1.0, 9, 3), "high must be at least 9, got 3"),
        (lambda: ExactTotal(Fixed(4), 99, 4).draw(2, 0), "cannot sum to 99"),
    ],
)
def test_an_impossible_law_is_refused_with_its_numbers(make, words):
    with pytest.raises(ValueError, match=words):
        make()


GOLDEN = [
    "4a5e13f9f2a0",
    "7f6617afe9e1",
    "4f91143dd8e9",
    "e6a1e79903d7",
    "ca8f9640e43a",
    "66718382d913",
    "adc180711623",
    "686a9543c8a2",
    "5cf17295cad8",
    "fb5435ee3ed3",
    "7cb05a23cd27",
]
TABLE = "4644e1c5ee1f"
