"""Which keys a query sees, in the form that ops and kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from jagbench.impl.kernels.arguments import check_align, window_bounds
from jagbench.impl.kernels.tiles import LAST, LAST_CAUSAL, PREFIX
from jagbench.pairs import Align, check_beyond_the_window, visible_pairs

#: A bound or count past this sees everything; clipped so that position arithmetic cannot wrap.
CLIP = 1 << 29


@dataclass(frozen=True)
class Mask:
    """Bounds of the window with -1 for unbounded, the alignment, and what lies beyond the window.

    prefix, last_full: as in `jagbench.pairs`, 0 where they show nothing that the window hides.
    causal: whether causality binds the last queries (a right bound of 0 alone does not).
    """

    left: int
    right: int
    align_end: bool
    prefix: int = 0
    last_full: int = 0
    causal: bool = False

    def encode(self) -> list[int]:
        """As custom ops take it."""
        return [
            self.left, self.right, int(self.align_end),
            self.prefix, self.last_full, int(self.causal),
        ]  # fmt: skip

    @staticmethod
    def decode(numbers: list[int]) -> Mask:
        """The mask that `encode` wrote."""
        left, right, align_end, prefix, last_full, causal = numbers
        return Mask(left, right, bool(align_end), prefix, last_full, bool(causal))

    @property
    def bounded(self) -> bool:
        """Whether any pair is hidden."""
        return self.left >= 0 or self.right >= 0

    @property
    def beyond(self) -> int:
        """Bits of what shows more than the window: the kernels' BEYOND."""
        last = LAST.value | (LAST_CAUSAL.value if self.causal else 0)
        return (PREFIX.value if self.prefix else 0) | (last if self.last_full else 0)

    @property
    def constants(self) -> dict[str, bool]:
        """Compile-time parameters of the window, of every tier."""
        return {
            "HAS_LEFT": self.left >= 0,
            "HAS_RIGHT": self.right >= 0,
            "ALIGN_END": self.align_end and self.bounded,
        }

    @property
    def portable(self) -> dict[str, int]:
        """Compile-time parameters of the portable kernels."""
        return {**self.constants, "BEYOND": self.beyond}

    @property
    def numbers(self) -> tuple[int, int, int | None, int | None]:
        """Run-time parameters of the portable kernels; None where the compiled form reads none."""
        return self.left, self.right, self.prefix or None, self.last_full or None

    @property
    def span(self) -> int | None:
        """Most rows of the other side that most rows can see; None if unbounded.

        The few long rows beyond the window do not count: this orders tiles by work.
        """
        if self.left < 0 or self.right < 0:
            return None
        return self.left + self.right + 1 + self.prefix

    def pairs(self, q_lengths: Tensor, k_lengths: Tensor) -> int:
        """Visible pairs of a batch."""
        align: Align = "end" if self.align_end else "start"
        left, right = (None if side < 0 else side for side in (self.left, self.right))
        found = visible_pairs(
            q_lengths, k_lengths, causal=self.causal, align=align, window=(left, right),
            prefix=self.prefix, last_full=self.last_full,
        )  # fmt: skip
        return int(found.sum())


def mask_of(
    operator: str, causal: bool, align: str, window: object, prefix: int, last_full: int
) -> Mask:
    """The mask of a call; raises ValueError, with the numbers, for what is none.

    A prefix without any bound, and last queries without a window, say nothing and become 0.
    """
    align_end = check_align(operator, align)
    left, right = window_bounds(operator, causal, window)
    try:
        check_beyond_the_window(prefix, last_full)
    except ValueError as problem:
        raise ValueError(f"{operator}: {problem}") from None
    bounded = left >= 0 or right >= 0
    windowed = left >= 0 or (right >= 0 and not causal)
    return Mask(
        left, right, align_end,
        prefix=min(prefix, CLIP) if bounded else 0,
        last_full=min(last_full, CLIP) if windowed else 0,
        causal=bool(causal) and windowed and last_full > 0,
    )  # fmt: skip
