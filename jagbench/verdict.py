"""What a judgement of one output or gradient says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accuracy:
    """Error of one tensor against float64, beside the error it was allowed.

    Of codes, which have no error, `error` is the number of bytes that differ and `allowed` how many
    may (those of computed numbers, where they lie beside a rounding boundary); `worst_error` is the
    distance of the first one that is wrong, and none is allowed.

    name: "out", "lse", "grad q", ...
    error, allowed: normwise, ||x - truth|| and its budget.
    worst_error, worst_allowed: largest element of |x - truth| and its budget.
    worst_index: index of that element; worst_sequence, worst_position: the sequence that holds it
        and the row within that sequence (None for an argument shared by all sequences).
    bad_sequence: the sequence whose own normwise error is furthest over its budget, if any is.
    snr_db: 10 log10(||truth||^2 / ||x - truth||^2); inf for an exact result.
    naive_error: normwise error of the reference in the same dtype.
    problem: what is wrong, in words; None if the tensor is within every budget.
    codes: whether the tensor holds codes.
    """

    name: str
    error: float
    allowed: float
    naive_error: float
    worst_error: float
    worst_allowed: float
    worst_index: tuple[int, ...]
    worst_sequence: int | None
    worst_position: int | None
    bad_sequence: int | None
    snr_db: float
    problem: str | None
    codes: bool = False

    @property
    def ok(self) -> bool:
        """Whether the tensor is within every budget."""
        return self.problem is None
