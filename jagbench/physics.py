"""Which times cannot be: two clocks that disagree, and the floor physics sets."""

from __future__ import annotations

from jagbench import result

#: How far two clocks may be apart before a record says so: share, and seconds.
CLOCKS_APART, CLOCKS_APART_SECONDS = 0.03, 2e-6
#: What an undocumented device may do beyond its measured ceilings before a time is impossible.
BEYOND_MEASURED = 1.35


def clocks_apart(first: float, second: float) -> str | None:
    """What to say of two clocks that disagree; None if they agree."""
    allowed = max(CLOCKS_APART * first, CLOCKS_APART_SECONDS)
    if abs(first - second) <= allowed:
        return None
    return f"clocks disagree: {first:.3e} s by the first, {second:.3e} s by the second"


def physical_floor(
    amount: result.Work, datasheet: result.Ceiling | None, measured: result.Ceiling | None
) -> float | None:
    """Least seconds physics allows; None where no ceiling is known.

    Model FLOP are counted: an implementation that keeps its scores need not recompute them. A
    device that is not in the table may do somewhat better than its measured ceilings.
    """
    floors = []
    for name, asked in (
        ("flop_per_second", amount.model_flop),
        ("bytes_per_second", amount.bytes_moved),
    ):
        known = getattr(datasheet, name, None)
        seen = getattr(measured, name, None)
        best = max(known, seen or 0.0) if known else (BEYOND_MEASURED * seen if seen else None)
        if best:
            floors.append(asked / best)
    return max(floors) if floors else None
