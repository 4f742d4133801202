"""Random numbers by counter: the same bits on every machine, in any order, on any device.

Number `i` of a stream is SplitMix64's finaliser applied to `key + (i + 1) * gamma` (Steele, Lea
and Flood, OOPSLA 2014), in wrapping 64-bit integer arithmetic. No generator of numpy or torch takes
part, so no release of either can change a workload.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import scipy.special
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31

#: Values a 16-bit lane can take.
LANE = 1 << 16
#: Normals are whole multiples of 1 / UNIT.
UNIT = 1 << 12


def stream(seed: int, *names: str) -> int:
    """Key of a named stream of a seed, in `[0, 2^64)`."""
    text = "/".join((str(seed), *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def bits(key: int, index: int) -> int:
    """64 random bits: number `index` of a stream."""
    x = (key + (index + 1) * _GAMMA) & _MASK
    for shift, factor in _ROUNDS:
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> _LAST_SHIFT)


def below(key: int, index: int, limit: int) -> int:
    """Uniform integer in `[0, limit)`."""
    return (bits(key, index) * limit) >> 64


@functools.cache
def normal_table() -> tuple[int, ...]:
    """Quantiles of the standard normal at `(i + 1/2) / 2^16`, in units of `1 / UNIT`.

    Rounding to the unit removes the last bits of the quantile, where maths libraries differ.
    """
    grid = (np.arange(LANE, dtype=np.float64) + 0.5) / LANE
    return tuple(np.rint(scipy.special.ndtri(grid) * UNIT).astype(np.int64).tolist())


def normal_units(key: int, index: int) -> int:
    """Standard normal in units of `1 / UNIT`."""
    return normal_table()[bits(key, index) >> 48]


def bits_tensor(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """`bits(key, first)` and its `count - 1` successors as int64 `[count]`."""
    x = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    x.mul_(_signed(_GAMMA)).add_(_signed(key))
    for shift, factor in _ROUNDS:
        x.bitwise_xor_(_shift_right(x, shift)).mul_(_signed(factor))
    return x.bitwise_xor_(_shift_right(x, _LAST_SHIFT))


def lanes_tensor(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """`count` 16-bit numbers of a stream from number `first` on, int64, four to a hash."""
    start, stop = first // 4, -(-(first + count) // 4)
    words = bits_tensor(key, start, stop - start, device)
    shifts = torch.tensor([0, 16, 32, 48], dtype=torch.int64, device=device)
    lanes = ((words[:, None] >> shifts) & (LANE - 1)).flatten()
    return lanes[first - 4 * start :][:count]


def normal_units_tensor(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Standard normals in units of `1 / UNIT`, int32 `[count]`, drawn from `lanes_tensor`."""
    return _table_on(device)[lanes_tensor(key, first, count, device)]


@functools.cache
def _table_on(device: torch.device) -> Tensor:
    return torch.tensor(normal_table(), dtype=torch.int32, device=device)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit integer."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, shift: int) -> Tensor:
    """Logical shift: torch's own drags the sign along."""
    return (x >> shift) & (_MASK >> shift)
