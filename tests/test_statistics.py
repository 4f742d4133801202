import math

import numpy as np
import pytest

from jagbench import statistics
from jagbench.statistics import (
    MINIMUM_SAMPLES,
    SESSION_SPREAD,
    SHARED_SESSION_SPREAD,
    block_length,
    estimate,
    geometric_mean,
    judge,
    seconds_of,
)

#: Simulated comparisons; the standard error of a share of 5 % is then 1.5 %.
REPEATS = 200
ALPHA = 0.05


def simulated(random, *, samples=40, spread=0.01, correlation=0.0, factor=1.0):
    """Seconds of an AR(1) series of logs about a millisecond."""
    shocks = random.normal(size=samples)
    logs = np.empty(samples)
    logs[0] = shocks[0]
    for i in range(1, samples):
        logs[i] = correlation * logs[i - 1] + math.sqrt(1 - correlation**2) * shocks[i]
    return tuple(1e-3 * factor * np.exp(spread * logs))


def estimates(seed, *, shared, candidate_factor=1.0, repeats=REPEATS, **options):
    random = np.random.default_rng(seed)
    return [
        estimate(
            {"one": simulated(random, **options)},
            {"one" if shared else "two": simulated(random, factor=candidate_factor, **options)},
        )
        for _ in range(repeats)
    ]


def share(verdict, judgements):
    return sum(j.verdict == verdict for j in judgements) / len(judgements)


@pytest.fixture
def within_only(monkeypatch):
    """The noise of one session alone, as the simulations have it."""
    for name in ("SESSION_SPREAD", "SHARED_SESSION_SPREAD"):
        monkeypatch.setattr(statistics, name, 1e-9)


@pytest.mark.parametrize("shared", [False, True])
def test_an_implementation_is_the_same_as_itself_and_gives_no_false_alarm(shared):
    judgements = judge(estimates(1, shared=shared))
    assert share("faster", judgements) + share("slower", judgements) < ALPHA
    assert share("same", judgements) >= 0.95


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("shared", [False, True])
def test_alarms_stay_below_their_level_under_autocorrelation(shared, correlation):
    found = estimates(2, shared=shared, correlation=correlation, repeats=80)
    assert np.mean([e.p <= ALPHA for e in found]) <= ALPHA
    # Each alone, without the adjustment for a family, is no alarm either.
    alone = [judge([e])[0].verdict for e in found]
    assert not {"faster", "slower"} & set(alone)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "slower"), (1 / 1.1, "faster")])
def test_a_change_of_a_tenth_is_found(shared, factor, verdict):
    found = estimates(3, shared=shared, candidate_factor=factor, correlation=0.3, repeats=60)
    assert share(verdict, judge(found)) > 0.95
    assert share(verdict, [judge([e])[0] for e in found]) > 0.95


def test_a_slow_case_is_found_among_many_that_are_the_same():
    (slow,) = estimates(4, shared=False, candidate_factor=1.1, repeats=1)
    judgements = judge([*estimates(5, shared=False, repeats=99), slow])
    assert judgements[-1].verdict == "slower"
    assert share("same", judgements[:-1]) >= 0.95


@pytest.mark.usefixtures("within_only")
@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("shared", [False, True])
def test_the_interval_covers_at_about_its_level(shared, correlation):
    found = estimates(6, shared=shared, correlation=correlation, candidate_factor=1.05)
    covered = np.mean([e.low <= 1.05 <= e.high for e in found])
    assert 0.92 <= covered <= 0.99


def several(random, sessions, spread):
    """Sessions with an offset each; the ratio of two has `spread`."""
    return {
        random.random(): simulated(
            random, samples=24, factor=math.exp(random.normal() * spread / math.sqrt(2))
        )
        for _ in range(sessions)
    }


# One session a side shows no more than what the constant stands for; several do.
@pytest.mark.parametrize(
    ("sessions", "spread"), [(1, SESSION_SPREAD), (2, SESSION_SPREAD), (4, 4 * SESSION_SPREAD)]
)
def test_the_interval_covers_what_differs_between_sessions(sessions, spread):
    random = np.random.default_rng(7)
    found = [
        estimate(several(random, sessions, spread), several(random, sessions, spread))
        for _ in range(100)
    ]
    assert np.mean([e.low <= 1.0 <= e.high for e in found]) >= 0.88


def test_one_process_alone_never_makes_a_small_difference_certain():
    steady = [1e-3 + 1e-9 * (i % 7) for i in range(400)]
    found = estimate({"a": steady}, {"b": [1.01 * s for s in steady]})
    assert found.standard_error >= SESSION_SPREAD
    assert found.p > ALPHA
    shared = estimate({"a": steady}, {"a": [1.01 * s for s in steady]})
    assert SHARED_SESSION_SPREAD <= shared.standard_error < SESSION_SPREAD


def test_more_sessions_narrow_the_interval():
    random = np.random.default_rng(8)
    widths = []
    for sessions in (1, 4, 16):
        found = estimate(several(random, sessions, 0.001), several(random, sessions, 0.001))
        widths.append(math.log(found.high / found.low))
    assert widths == sorted(widths, reverse=True)


def test_a_drift_that_interleaved_series_share_cancels():
    random = np.random.default_rng(9)
    drift = np.exp(0.05 * np.linspace(-1, 1, 60))
    a, b = (tuple(np.array(simulated(random, samples=60)) * drift) for _ in range(2))
    together, apart = estimate({"s": a}, {"s": b}), estimate({"s": a}, {"t": b})
    assert together.standard_error < 0.5 * apart.standard_error
    assert judge([together])[0].verdict == "same"
    assert judge([apart])[0].verdict == "undecided"


def test_a_coarse_clock_widens_the_interval():
    ticks = [1e-5] * 20 + [1.1e-5] * 20
    found = estimate({"a": ticks[:39]}, {"b": ticks[:39]})
    assert found.standard_error > math.log(1.1) / math.sqrt(12)


def test_outliers_do_not_move_the_ratio():
    random = np.random.default_rng(10)
    a, b = simulated(random), list(simulated(random))
    b[5], b[20] = 10 * b[5], 50 * b[20]
    assert estimate({"a": a}, {"b": b}).ratio == pytest.approx(1.0, abs=0.01)


def test_both_directions_say_the_same():
    (there,) = estimates(11, shared=False, candidate_factor=1.1, repeats=1)
    random = np.random.default_rng(11)
    a, b = simulated(random), simulated(random, factor=1.1)
    back = estimate({"two": b}, {"one": a})
    assert back.ratio == pytest.approx(there.speed_up)
    assert back.low == pytest.approx(1 / there.high, rel=1e-3)
    assert there == estimate({"one": a}, {"two": b})


def known(ratio, standard_error):
    return statistics._tested(math.log(ratio), standard_error, 1e6, 0.02, ALPHA)


@pytest.mark.parametrize(
    ("ratio", "standard_error", "verdict"),
    [
        (1.000, 0.004, "same"),
        (1.010, 0.001, "same"),  # different, and too little to matter
        (1.000, 0.020, "undecided"),  # no difference found is no proof that there is none
        (1.015, 0.004, "undecided"),  # slower, perhaps beyond the band, perhaps not
        (1.030, 0.020, "undecided"),
        (1.030, 0.008, "slower"),
        (1 / 1.03, 0.008, "faster"),
    ],
)
def test_verdicts_follow_their_definitions(ratio, standard_error, verdict):
    assert judge([known(ratio, standard_error)])[0].verdict == verdict


def test_the_band_is_as_wide_below_1_as_above():
    above, below = known(1.02, 0.01), known(1 / 1.02, 0.01)
    assert above.p_same == pytest.approx(0.5)
    assert below.p_same == pytest.approx(0.5)


def test_a_weak_finding_does_not_survive_a_large_family():
    weak = known(1.05, 0.022)
    assert judge([weak])[0].verdict == "slower"
    family = [weak, *(known(1.0, 0.05) for _ in range(30))]
    assert judge(family)[0].verdict == "undecided"
    assert judge(family)[0].q > weak.p


def test_any_dependence_is_allowed_at_a_price():
    family = [known(1.05, 0.015), *(known(1.0, 0.05) for _ in range(9))]
    assert judge(family, method="by")[0].q == pytest.approx(
        min(1.0, judge(family)[0].q * sum(1 / i for i in range(1, 11)))
    )


def test_an_empty_family_has_no_verdicts():
    assert judge([]) == []


def test_blocks_grow_with_the_correlation():
    random = np.random.default_rng(12)
    lengths = [
        block_length(np.log(simulated(random, samples=200, correlation=c))) for c in (0, 0.5, 0.9)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] >= 200 ** (1 / 3)
    assert lengths[-1] <= 50


def test_equal_samples_are_no_trouble():
    found = estimate({"a": [1e-3] * 10}, {"b": [2e-3] * 10})
    assert found.ratio == pytest.approx(2.0)
    assert judge([found])[0].verdict == "slower"


def test_seconds_of_two_sessions_are_their_geometric_mean():
    assert seconds_of({"a": [1.0] * 3, "b": [4.0] * 3}) == pytest.approx(2.0)
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="0 ratios"):
        geometric_mean([])


GOOD = {"a": [1e-3] * MINIMUM_SAMPLES}


@pytest.mark.parametrize(
    ("side", "options", "message"),
    [
        ({}, {}, "0 sessions"),
        ({"a": [1e-3] * 7}, {}, r"7 samples in session 'a', want at least 8"),
        ({"a": [1e-3] * 8 + [0.0]}, {}, "not positive"),
        ({"a": [1e-3] * 8 + [math.inf]}, {}, "not positive and finite"),
        (GOOD, {"band": 0.0}, "band is 0.0"),
        (GOOD, {"alpha": 1.0}, "alpha is 1.0"),
    ],
)
def test_what_cannot_be_estimated_is_refused(side, options, message):
    with pytest.raises(ValueError, match=message):
        estimate(GOOD, side, **options)
