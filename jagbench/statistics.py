"""Is one faster? Ratio of medians with an honest interval, tests of difference and of equivalence.

The interval has two parts. *Within a session* samples are autocorrelated (clocks, heat), so the
median's error comes from a circular block bootstrap, with blocks as long as the autocorrelation
asks for and quantiles of Student's t with one degree of freedom a block. *Between sessions* every
process has an offset of its own (clocks, memory placement, another unit of the same device) that no
number of samples in one process shows. It is estimated from the sessions there are, and never taken
below `SESSION_SPREAD`, which alone stands for it where there is one session a side.

Sources: Politis and White 2004, with the correction of 2009 (block length); Schuirmann 1987 (TOST);
Benjamini and Hochberg 1995, Benjamini and Yekutieli 2001 (false discoveries).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import special, stats

Verdict = Literal["faster", "slower", "same", "undecided"]
Floats = np.ndarray[Any, np.dtype[np.float64]]

#: Standard deviation of the log ratio of two sessions of one program, for reasons no sample within
#: a session shows. A convention, not a measurement: `jagbench.compare.a_a` on two sessions of one
#: implementation says whether a machine keeps it.
SESSION_SPREAD = 0.005
#: The same where both sides ran in one session: what they share cancels.
SHARED_SESSION_SPREAD = 0.0025
#: The spreads above count as this many degrees of freedom, less where sessions show a larger one.
SPREAD_FREEDOM = 4
#: Fewer samples in a session show neither their spread nor their autocorrelation.
MINIMUM_SAMPLES = 8
#: Resamples: they add 4 % to what the standard error is uncertain by, far less than the samples do.
RESAMPLES = 400
#: Fixed, so that a comparison of the same records says the same.
SEED = 2026


@dataclass(frozen=True)
class Estimate:
    """Candidate's seconds over baseline's, and what is known of it.

    ratio: of medians; above 1 the candidate is slower.
    low, high: confidence interval of the ratio at level 1 - alpha, not adjusted for the family.
    p: two-sided, of no difference. p_same: of a difference beyond the band (TOST).
    standard_error: of the natural log of the ratio; freedom: its degrees of freedom.
    """

    ratio: float
    low: float
    high: float
    p: float
    p_same: float
    standard_error: float
    freedom: float

    @property
    def speed_up(self) -> float:
        """Baseline's seconds over candidate's: above 1 the candidate is faster."""
        return 1.0 / self.ratio


@dataclass(frozen=True)
class Judgement:
    """Verdict on one estimate of a family; q and q_same are p and p_same adjusted for it."""

    q: float
    q_same: float
    verdict: Verdict


@dataclass(frozen=True)
class _Side:
    """Log median and its variance within a session, of one side or of a ratio, by session."""

    logs: Floats
    variances: Floats
    freedom: float


def estimate(
    baseline: Mapping[str, Sequence[float]],
    candidate: Mapping[str, Sequence[float]],
    *,
    band: float = 0.02,
    alpha: float = 0.05,
) -> Estimate:
    """Ratio of medians of two sides, each session -> samples in seconds, in order of time.

    Where both sides have the same sessions, the ratio is taken within each (what the two share
    cancels); otherwise the sides are independent. Several sessions count alike.

    Raises ValueError for a side without sessions, fewer than `MINIMUM_SAMPLES` samples in one,
    samples that are not positive and finite, or a band or alpha outside of (0, 1).
    """
    _check(baseline, candidate, band, alpha)
    random = np.random.default_rng(SEED)
    if set(baseline) == set(candidate):
        parts = [_of_pairs(baseline, candidate, random)]
        spread = SHARED_SESSION_SPREAD
    else:
        parts = [_of_side(candidate, random), _of_side(baseline, random)]
        spread = SESSION_SPREAD / math.sqrt(2.0)
    signs = (1.0, -1.0)
    log_ratio = float(sum(s * part.logs.mean() for s, part in zip(signs, parts, strict=False)))
    variance, freedom = _total([_components(part, spread) for part in parts])
    return _tested(log_ratio, math.sqrt(variance), freedom, band, alpha)


def judge(
    estimates: Sequence[Estimate],
    *,
    band: float = 0.02,
    alpha: float = 0.05,
    method: Literal["bh", "by"] = "bh",
) -> list[Judgement]:
    """Verdicts on a family of estimates made with the same band and alpha.

    same: a difference beyond the band is rejected (q_same <= alpha), whether or not there is one.
    slower, faster: not that; no difference is rejected (q <= alpha) and the ratio is beyond the
        band. The interval then lies wholly on one side of 1; q speaks for the direction, the
        estimate for the size.
    undecided: neither. More samples or more sessions may decide it.

    The tests of difference are one family and those of equivalence another. Both are adjusted by
    Benjamini-Hochberg: cases of one comparison share device, process and code, so a dip of clocks
    moves their ratios the same way, and under positive dependence it holds its level.
    Benjamini-Yekutieli ("by") holds under any dependence and asks 5 to 6 times more of 100 to 200
    cases: for families of which that cannot be said.
    """
    if not estimates:
        return []
    q = stats.false_discovery_control([e.p for e in estimates], method=method)
    q_same = stats.false_discovery_control([e.p_same for e in estimates], method=method)
    return [
        Judgement(float(a), float(b), _verdict(e.ratio, float(a), float(b), band, alpha))
        for e, a, b in zip(estimates, q, q_same, strict=True)
    ]


def seconds_of(side: Mapping[str, Sequence[float]]) -> float:
    """Seconds of one side: its median, or the geometric mean of the medians of its sessions."""
    return geometric_mean([math.exp(float(np.median(np.log(s)))) for s in side.values()])


def geometric_mean(ratios: Sequence[float]) -> float:
    """Exp of the mean log. Raises ValueError for no ratios."""
    if not ratios:
        raise ValueError("a mean of 0 ratios")
    return math.exp(math.fsum(math.log(r) for r in ratios) / len(ratios))


def _check(
    baseline: Mapping[str, Sequence[float]],
    candidate: Mapping[str, Sequence[float]],
    band: float,
    alpha: float,
) -> None:
    for name, value in (("band", band), ("alpha", alpha)):
        if not 0.0 < value < 1.0:
            raise ValueError(f"{name} is {value}, want one between 0 and 1")
    for name, side in (("baseline", baseline), ("candidate", candidate)):
        if not side:
            raise ValueError(f"{name} has 0 sessions")
        for session, samples in side.items():
            if len(samples) < MINIMUM_SAMPLES:
                raise ValueError(
                    f"{name} has {len(samples)} samples in session {session!r}, "
                    f"want at least {MINIMUM_SAMPLES}"
                )
            if not all(0.0 < s < math.inf for s in samples):
                raise ValueError(f"{name} has samples that are not positive and finite")


def _of_side(side: Mapping[str, Sequence[float]], random: np.random.Generator) -> _Side:
    found = [_within([np.log(samples)], random) for samples in side.values()]
    return _collected(found)


def _of_pairs(
    baseline: Mapping[str, Sequence[float]],
    candidate: Mapping[str, Sequence[float]],
    random: np.random.Generator,
) -> _Side:
    found = [
        _within([np.log(candidate[session]), np.log(baseline[session])], random)
        for session in candidate
    ]
    return _collected(found)


def _collected(found: Sequence[tuple[float, float, float]]) -> _Side:
    logs, variances, freedoms = (np.array(column) for column in zip(*found, strict=True))
    return _Side(logs, variances, float(freedoms.sum()))


def _within(logs: Sequence[Floats], random: np.random.Generator) -> tuple[float, float, float]:
    """Log median (of the first series over the second, if two), its variance, degrees of freedom.

    Two series of equal length are resampled by the same places: samples of one place are
    neighbours in time where the two were interleaved, and what they share then cancels.
    """
    lengths = [len(series) for series in logs]
    block = max(block_length(series) for series in logs)
    block = min(block, min(lengths) // 4)
    places = [_places(length, block, random) for length in dict.fromkeys(lengths)]
    by_length = dict(zip(dict.fromkeys(lengths), places, strict=True))
    drawn = [np.median(series[by_length[len(series)]], axis=1) for series in logs]
    medians = [float(np.median(series)) for series in logs]
    blocks = min(lengths) / block
    value = medians[0] - (medians[1] if len(logs) == 2 else 0.0)
    difference = drawn[0] - drawn[1] if len(logs) == 2 else drawn[0]
    # Resampled blocks vary about their own mean: a share block / length of the variance is lost.
    variance = float(difference.var()) * blocks / (blocks - 1.0)
    variance += sum(_resolution(series) for series in logs)
    return value, variance, blocks - 1.0


def block_length(series: Floats) -> int:
    """Samples a block needs for the variance of a mean: Politis and White for a series AR(1).

    Half as long again as they find best: coverage matters more here than the variance of the
    variance. At least the cube root of the length, at most a quarter of it.
    """
    length = len(series)
    centred = np.clip(series - np.median(series), *_fences(series))
    power = float(centred @ centred)
    rho = float(centred[1:] @ centred[:-1]) / power if power > 0.0 else 0.0
    # Kendall's correction: a short series looks less correlated than it is.
    rho = min(max(rho + (1.0 + 3.0 * rho) / length, 0.0), 0.97)
    wanted = 1.5 * math.cbrt(6.0 * rho**2 / (1.0 - rho**2) ** 2 * length)
    return max(min(math.ceil(max(wanted, math.cbrt(length))), length // 4), 1)


def _fences(series: Floats) -> tuple[float, float]:
    """Where the centred series is clipped: one outlier must not hide the correlation."""
    low, high = np.quantile(series, (0.2, 0.8))
    reach = 3.0 * float(high - low)
    return (-reach, reach) if reach > 0.0 else (-math.inf, math.inf)


def _places(length: int, block: int, random: np.random.Generator) -> Any:
    """Places `[RESAMPLES, length]` of samples, drawn by blocks around a circle."""
    starts = random.integers(0, length, size=(RESAMPLES, math.ceil(length / block), 1))
    places = (starts + np.arange(block)) % length
    return places.reshape(RESAMPLES, -1)[:, :length]


def _resolution(logs: Floats) -> float:
    """Variance of rounding to the clock's tick, taken as the least gap between samples."""
    gaps = np.diff(np.unique(logs))
    return float(gaps.min()) ** 2 / 12.0 if len(gaps) else 0.0


def _components(part: _Side, spread: float) -> list[tuple[float, float]]:
    """Parts of the variance of a side's mean over its sessions, each with its freedom."""
    sessions = len(part.logs)
    within = float(part.variances.mean())
    seen = max(float(part.logs.var(ddof=1)) - within, 0.0) if sessions > 1 else 0.0
    between = max(seen, spread**2)
    freedom = sessions - 1 + SPREAD_FREEDOM * (spread**2 / between) ** 2
    return [(between / sessions, freedom), (within / sessions, part.freedom)]


def _total(components: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """Sum of variances and its degrees of freedom (Welch, Satterthwaite)."""
    flat = [component for part in components for component in part]
    variance = sum(v for v, _ in flat)
    return variance, variance**2 / sum(v**2 / freedom for v, freedom in flat)


def _tested(
    log_ratio: float, standard_error: float, freedom: float, band: float, alpha: float
) -> Estimate:
    """Interval and both tests by Student's t; the band is symmetric on the log scale."""
    reach = float(special.stdtrit(freedom, 1.0 - alpha / 2.0)) * standard_error
    edge = math.log1p(band)
    return Estimate(
        ratio=math.exp(log_ratio),
        low=math.exp(log_ratio - reach),
        high=math.exp(log_ratio + reach),
        p=2.0 * float(special.stdtr(freedom, -abs(log_ratio) / standard_error)),
        p_same=float(special.stdtr(freedom, (abs(log_ratio) - edge) / standard_error)),
        standard_error=standard_error,
        freedom=freedom,
    )


def _verdict(ratio: float, q: float, q_same: float, band: float, alpha: float) -> Verdict:
    if q_same <= alpha:
        return "same"
    if q <= alpha and abs(math.log(ratio)) > math.log1p(band):
        return "slower" if ratio > 1.0 else "faster"
    return "undecided"
