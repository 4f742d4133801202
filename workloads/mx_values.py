"""Laws of values at which a block format decides: its largest magnitudes, and what is no number.

Drawn from the bits of float32, so that no step rounds. `tall` and `wide` are the rows and columns
that share a largest magnitude, counted from the first row of the tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jagbench.workloads import counter
from jagbench.workloads.values import Block

_FRACTION_BITS = 23  # of a float32
_BIAS = 127
_LARGEST = 0x7F7FFFFF
#: Binades that the other elements of a block lie below its largest at most: E5M2 has 32.
_BINADES = 34
#: Fractions of a float32 at which a scale mode turns: of 1, of the largest numbers of E2M1 (1.5)
#: and of E4M3 and E5M2 (1.75), and those from which EVEN rounds up (1.75, 1.875, 1.9375).
_FRACTIONS = (0, 0x400000, 0x600000, 0x700000, 0x780000)
#: Neighbours: none, and steps of float32, float16 and bfloat16.
_STEPS = (0, 1, -1, 1 << 13, -(1 << 13), 1 << 16, -(1 << 16))


@dataclass(frozen=True)
class BoundaryMaxima:
    """Blocks whose largest magnitude is a boundary times 2^low to 2^high, or a neighbour of it."""

    tall: int = 1
    wide: int = 32
    low: int = -9
    high: int = 9
    law: str = field(default="boundary_maxima", init=False)

    def draw(self, block: Block) -> Tensor:
        """The block's values, float32."""
        lanes = _of_group(block, self.tall, self.wide)
        fraction, lanes = _pick(_FRACTIONS, lanes)
        step, lanes = _pick(_STEPS, lanes)
        exponent = self.low + lanes % (self.high - self.low + 1)
        return _under(block, ((exponent + _BIAS) << _FRACTION_BITS) + fraction + step)


@dataclass(frozen=True)
class EndScales:
    """Blocks whose largest magnitude lies at either end of float32: 0, subnormal, least, most."""

    tall: int = 1
    wide: int = 32
    law: str = field(default="end_scales", init=False)

    def draw(self, block: Block) -> Tensor:
        """The block's values, float32."""
        lanes = _of_group(block, self.tall, self.wide)
        subnormal, lanes = _pick((0, 1, 2, 0x1FFF, 0x400000, 0x7FFFFF), lanes)
        fraction, lanes = _pick(_FRACTIONS, lanes)
        step, lanes = _pick((0, 1, -1), lanes)
        low = ((1 + lanes % 16) << _FRACTION_BITS) + fraction + step
        high = ((247 + lanes % 8) << _FRACTION_BITS) + fraction + step
        kind = (lanes >> 4) % 4
        peak = torch.where(kind == 0, subnormal, torch.where(kind == 1, high, low))
        return _under(block, torch.where((kind == 1) & (lanes % 8 == 7), _LARGEST, peak))


@dataclass(frozen=True)
class NotNumbers:
    """N(0, 1) with an infinity or a NaN in some blocks, and others of zeros of either sign."""

    tall: int = 1
    wide: int = 32
    law: str = field(default="not_numbers", init=False)

    def draw(self, block: Block) -> Tensor:
        """The block's values, float32."""
        kind = _of_group(block, self.tall, self.wide) % 16
        values, place = block.normal(1.0), _top(block)
        for number, value in enumerate((math.inf, -math.inf, math.nan)):
            values = torch.where((kind == number) & place, value, values)
        values = torch.where(kind == 3, 0.0, values)
        return torch.where(kind == 4, -0.0, values)


def _of_group(block: Block, tall: int, wide: int) -> Tensor:
    """A 16-bit number for every `tall` x `wide` elements, int64 of the block's shape."""
    across = -(-block.dim // wide)
    rows = (block.first + torch.arange(block.rows, device=block.device)) // tall
    heads = torch.arange(block.heads, device=block.device)
    columns = torch.arange(block.dim, device=block.device) // wide
    first = block.first // tall * block.heads * across
    group = (rows[:, None, None] * block.heads + heads[:, None]) * across + columns - first
    count = int(group.max()) + 1 if group.numel() else 0
    key = counter.stream(block.seed, "groups")
    return counter.lanes_tensor(key, first, count, block.device)[group]


def _pick(choices: tuple[int, ...], lanes: Tensor) -> tuple[Tensor, Tensor]:
    """One of some numbers for every lane, and what is left of the lane."""
    table = torch.tensor(choices, dtype=torch.int64, device=lanes.device)
    return table[lanes % len(choices)], lanes // len(choices)


def _top(block: Block) -> Tensor:
    """One element of every 32 along a row, and along a column; bool of the block's shape."""
    rows = block.first + torch.arange(block.rows, device=block.device)
    columns = torch.arange(block.dim, device=block.device)
    return ((rows[:, None, None] + columns) % 32 == 0).expand(block.shape)


def _under(block: Block, peak: Tensor) -> Tensor:
    """Values of either sign at most as large as those of the bits `peak`, and some as large."""
    lanes = (block.uniform() * counter.LANE).to(torch.int64)
    # Floats of one sign are ordered as their bits are. The square favours those near the largest.
    share = (lanes >> 1) ** 2
    below = (peak - (share * (_BINADES << _FRACTION_BITS) >> 30)).clamp(min=0)
    magnitude = torch.where(_top(block), peak, below).to(torch.int32).view(torch.float32)
    return torch.where(lanes % 2 == 1, -magnitude, magnitude)
