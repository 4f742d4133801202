"""A number that counts the arithmetic it takes part in: brute force for FLOP formulas."""

from __future__ import annotations

from collections.abc import Callable


def _counting(name: str) -> Callable[[Counted, float], Counted]:
    def operation(self: Counted, other: float) -> Counted:
        Counted.count += 1
        return Counted(getattr(float, name)(self, other))

    return operation


class Counted(float):
    """A float; every sum, difference and product of one adds 1 to `Counted.count`."""

    count = 0

    __add__, __sub__, __mul__ = map(_counting, ("__add__", "__sub__", "__mul__"))
