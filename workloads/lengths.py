"""Laws of sequence lengths, as ranking models meet them (published and production-like).

Every law is a frozen dataclass with `draw(batch, seed) -> list[int]`. Draws use integers,
exact fractions and `decimal` (whose `exp` and `ln` are correctly rounded), never a maths library,
so the lengths are the same on every machine. `law` names the class, so that it enters a digest.
"""

from __future__ import annotations

import bisect
import decimal
import functools
import itertools
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Protocol

from jagbench.workloads import counter

_DECIMAL = decimal.Context(prec=28)


class LengthLaw(Protocol):
    """A law of sequence lengths."""

    @property
    def law(self) -> str:
        """Name of the law."""
        ...

    def draw(self, batch: int, seed: int) -> list[int]:
        """`batch` lengths, each at least 0."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Every sequence has the same length."""

    length: int
    law: str = field(default="fixed", init=False)

    def __post_init__(self) -> None:
        _at_least("length", self.length, 0)

    def draw(self, batch: int, seed: int) -> list[int]:
        """`batch` times the length."""
        return [self.length] * batch


@dataclass(frozen=True)
class Explicit:
    """The lengths themselves (replay, adversarial cases)."""

    values: tuple[int, ...]
    law: str = field(default="explicit", init=False)

    def __post_init__(self) -> None:
        for value in self.values:
            _at_least("length", value, 0)

    def draw(self, batch: int, seed: int) -> list[int]:
        """The values; ValueError where the batch is another size."""
        if batch != len(self.values):
            raise ValueError(f"{len(self.values)} explicit lengths cannot fill a batch of {batch}")
        return list(self.values)


@dataclass(frozen=True)
class UniformFill:
    """Integer uniform by mean fill of a maximum (the "sparsity" of public kernel benchmarks).

    fill >= 1/2: uniform on [(2 fill - 1) maximum, maximum]; below: on [1, 2 fill maximum]; bounds
    inclusive. The least length is 1, or 0 with `allow_empty`.
    """

    fill: float
    maximum: int
    allow_empty: bool = False
    law: str = field(default="uniform_fill", init=False)

    def __post_init__(self) -> None:
        _share("fill", self.fill)
        _at_least("maximum", self.maximum, 1)

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and greatest length, both inclusive."""
        twice = 2 * _exact(self.fill) * self.maximum
        least = 0 if self.allow_empty else 1
        low = max(least, int(twice) - self.maximum)
        return low, max(low, min(self.maximum, int(twice)))

    def draw(self, batch: int, seed: int) -> list[int]:
        """`batch` independent lengths."""
        low, high = self.bounds
        key = counter.stream(seed, self.law)
        return [low + counter.below(key, i, high - low + 1) for i in range(batch)]


@dataclass(frozen=True)
class LogNormal:
    """Log-normal, rounded and clipped into [low, high]: the heavy tail of user histories."""

    median: int
    sigma: float
    low: int
    high: int
    law: str = field(default="log_normal", init=False)

    def __post_init__(self) -> None:
        _at_least("median", self.median, 1)
        _at_least("low", self.low, 0)
        _at_least("high", self.high, self.low)

    def draw(self, batch: int, seed: int) -> list[int]:
        """`batch` independent lengths."""
        key = counter.stream(seed, self.law)
        return [self._length(counter.normal_units(key, i)) for i in range(batch)]

    def _length(self, normal: int) -> int:
        with decimal.localcontext(_DECIMAL):
            exponent = Decimal(str(self.sigma)) * normal / counter.UNIT
            length = int((self.median * exponent.exp()).to_integral_value())
        return min(max(length, self.low), self.high)


@dataclass(frozen=True)
class Gaussian:
    """Normal with deviation mean / 4 and a floor, as the DLRMv3 generator draws histories."""

    mean: int
    floor: int = 1
    deviation_divisor: int = 4
    law: str = field(default="gaussian", init=False)

    def __post_init__(self) -> None:
        _at_least("mean", self.mean, 1)
        _at_least("floor", self.floor, 0)
        _at_least("deviation_divisor", self.deviation_divisor, 1)

    def draw(self, batch: int, seed: int) -> list[int]:
        """`batch` independent lengths."""
        key = counter.stream(seed, self.law)
        unit = self.deviation_divisor * counter.UNIT
        units = (counter.normal_units(key, i) for i in range(batch))
        return [max(self.floor, self.mean + (self.mean * u + unit // 2) // unit) for u in units]


@dataclass(frozen=True)
class Zipf:
    """Length n in [1, maximum] with probability proportional to n ** -exponent."""

    exponent: float
    maximum: int
    law: str = field(default="zipf", init=False)

    def __post_init__(self) -> None:
        _at_least("maximum", self.maximum, 1)

    def draw(self, batch: int, seed: int) -> list[int]:
        """`batch` independent lengths."""
        key = counter.stream(seed, self.law)
        cumulated = _zipf_cumulated(self.exponent, self.maximum)
        total = cumulated[-1]
        return [
            1 + bisect.bisect_right(cumulated, counter.below(key, i, total)) for i in range(batch)
        ]


@dataclass(frozen=True)
class Bimodal:
    """A mixture: a share of long sequences among short ones."""

    short: LengthLaw
    long: LengthLaw
    long_share: float
    law: str = field(default="bimodal", init=False)

    def __post_init__(self) -> None:
        _share("long_share", self.long_share)

    def draw(self, batch: int, seed: int) -> list[int]:
        """`batch` independent lengths."""
        chosen = _coins(batch, self.long_share, counter.stream(seed, self.law))
        short = self.short.draw(batch, counter.stream(seed, "short"))
        long = self.long.draw(batch, counter.stream(seed, "long"))
        return [b if c else a for a, b, c in zip(short, long, chosen, strict=True)]


@dataclass(frozen=True)
class ZeroInflated:
    """Another law with a share of empty sequences (users without history)."""

    base: LengthLaw
    empty_share: float
    law: str = field(default="zero_inflated", init=False)

    def __post_init__(self) -> None:
        _share("empty_share", self.empty_share)

    def draw(self, batch: int, seed: int) -> list[int]:
        """`batch` independent lengths."""
        empty = _coins(batch, self.empty_share, counter.stream(seed, self.law))
        base = self.base.draw(batch, seed)
        return [0 if e else n for n, e in zip(base, empty, strict=True)]


@dataclass(frozen=True)
class OneGiant:
    """One giant sequence, at a drawn place, among many of 1 to `tiny` tokens."""

    giant: int
    tiny: int
    law: str = field(default="one_giant", init=False)

    def __post_init__(self) -> None:
        _at_least("tiny", self.tiny, 1)
        _at_least("giant", self.giant, self.tiny)

    def draw(self, batch: int, seed: int) -> list[int]:
        """`batch` lengths; the giant takes one of the places."""
        key = counter.stream(seed, self.law)
        lengths = [1 + counter.below(key, i, self.tiny) for i in range(batch)]
        if batch:
            lengths[counter.below(key, batch, batch)] = self.giant
        return lengths


@dataclass(frozen=True)
class StochasticCut:
    """The "stochastic length" of HSTU training: long histories are cut to L ** (alpha / 2).

    A length n above that threshold is cut to it with probability 1 - L ** alpha / n ** 2, L being
    `maximum`; alpha = 2 cuts nothing.
    """

    base: LengthLaw
    maximum: int
    alpha: float
    law: str = field(default="stochastic_cut", init=False)

    def __post_init__(self) -> None:
        _at_least("maximum", self.maximum, 1)

    def draw(self, batch: int, seed: int) -> list[int]:
        """`batch` independent lengths."""
        key = counter.stream(seed, self.law)
        with decimal.localcontext(_DECIMAL):
            half = _power(self.maximum, Decimal(str(self.alpha)) / 2)
            # The digits of a whole power are all nines at worst: round them before the floor.
            threshold, kept = (int(x.quantize(Decimal("1e-9"))) for x in (half, half * half))
        lengths = self.base.draw(batch, seed)
        return [
            threshold if n > threshold and counter.below(key, i, n * n) >= kept else n
            for i, n in enumerate(lengths)
        ]


@dataclass(frozen=True)
class ExactTotal:
    """Another law brought to a published number of tokens by steps of one a sequence in turn."""

    base: LengthLaw
    total: int
    maximum: int
    law: str = field(default="exact_total", init=False)

    def draw(self, batch: int, seed: int) -> list[int]:
        """`batch` lengths in [1, maximum] whose sum is `total`; ValueError where there are none."""
        if not batch <= self.total <= batch * self.maximum:
            raise ValueError(f"{batch} lengths in [1, {self.maximum}] cannot sum to {self.total}")
        lengths = [min(max(n, 1), self.maximum) for n in self.base.draw(batch, seed)]
        missing = self.total - sum(lengths)
        step = 1 if missing > 0 else -1
        for i in itertools.cycle(range(batch)):
            if missing == 0:
                return lengths
            if 1 <= lengths[i] + step <= self.maximum:
                lengths[i] += step
                missing -= step
        return lengths


def _exact(value: float) -> Fraction:
    """The decimal fraction that a float was written as."""
    return Fraction(str(value))


def _coins(count: int, share: float, key: int) -> list[bool]:
    limit = int(_exact(share) * (1 << 64))
    return [counter.bits(key, i) < limit for i in range(count)]


def _power(base: int, exponent: Decimal) -> Decimal:
    with decimal.localcontext(_DECIMAL):
        return (exponent * Decimal(base).ln()).exp()


@functools.cache
def _zipf_cumulated(exponent: float, maximum: int) -> list[int]:
    """Running sum of the weights n ** -exponent in units of 2^-40, at least one unit each."""
    power = Decimal(str(-exponent))
    unit = Decimal(1 << 40)
    weights = (
        max(1, int(_DECIMAL.multiply(_power(n, power), unit))) for n in range(1, maximum + 1)
    )
    return list(itertools.accumulate(weights))


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")


#: Heavy-tailed histories: clipped log-normals calibrated on "hundreds to tens of thousands".
HEAVY_TAILS: dict[str, LogNormal] = {
    "median300": LogNormal(300, 1.0, 16, 4096),
    "median800": LogNormal(800, 1.0, 16, 8192),
    "median800-wide": LogNormal(800, 1.2, 16, 16384),
    "median1500": LogNormal(1500, 0.8, 16, 8192),
}
