"""Laws of tensor values, drawn by counter on the target device with the same bytes everywhere.

A law fills a `Block` (some rows of one tensor) in float32; `draw_values` rounds it into the dtype
asked for. Float steps are limited to single IEEE operations (multiply, divide, square root) on
exactly known operands, so CPU and GPU agree to the bit; sums are taken over integers. `law` names
the class, so that it enters a digest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from jagbench.workloads import counter

#: Elements drawn at a time: bounds the scratch memory of a draw to about a gigabyte.
CHUNK = 1 << 24


@dataclass(frozen=True)
class Block:
    """Rows `first` to `first + rows - 1` of a tensor `[.., heads, dim]`.

    role: "q", "k", "v", "upstream", "bias" or "bias.table".
    seed: key of the tensor.
    """

    role: str
    seed: int
    first: int
    rows: int
    heads: int
    dim: int
    device: torch.device

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the block."""
        return self.rows, self.heads, self.dim

    def normal_units(self) -> Tensor:
        """Standard normals in units of `1 / counter.UNIT`, int32 of the block's shape."""
        width = self.heads * self.dim
        flat = counter.normal_units_tensor(
            self.seed, self.first * width, self.rows * width, self.device
        )
        return flat.view(self.shape)

    def normal(self, scale: float) -> Tensor:
        """Normals of a deviation, float32 of the block's shape."""
        return self.normal_units().to(torch.float32) * (scale / counter.UNIT)

    def uniform(self) -> Tensor:
        """Uniform on multiples of 2^-16 in [0, 1), float32 of the block's shape."""
        width = self.heads * self.dim
        flat = counter.lanes_tensor(self.seed, self.first * width, self.rows * width, self.device)
        return flat.to(torch.float32).view(self.shape) / counter.LANE

    def row_uniform(self) -> Tensor:
        """As `uniform`, one number a row and head: float32 `[rows, heads, 1]`."""
        key = counter.stream(self.seed, "rows")
        first, count = self.first * self.heads, self.rows * self.heads
        flat = counter.lanes_tensor(key, first, count, self.device)
        return flat.to(torch.float32).view(self.rows, self.heads, 1) / counter.LANE


class ValueLaw(Protocol):
    """A law of tensor values."""

    @property
    def law(self) -> str:
        """Name of the law."""
        ...

    def draw(self, block: Block) -> Tensor:
        """The block's values, float32."""
        ...


@dataclass(frozen=True)
class Normal:
    """N(0, scale^2) in every tensor."""

    scale: float = 1.0
    law: str = field(default="normal", init=False)

    def draw(self, block: Block) -> Tensor:
        """The block's values, float32."""
        return block.normal(self.scale)


@dataclass(frozen=True)
class QKNormalised:
    """q and k with unit RMS in every row and head (QK-norm without an affine); others N(0, 1).

    |q . k| is at most head_dim. The squares are summed as integers, the norm and the quotient are
    IEEE float64 operations, and the result is rounded to multiples of 2^-10.
    """

    law: str = field(default="qk_normalised", init=False)

    def draw(self, block: Block) -> Tensor:
        """The block's values, float32."""
        if block.role not in ("q", "k"):
            return block.normal(1.0)
        units = block.normal_units().to(torch.int64)
        squares = (units * units).sum(-1, keepdim=True).clamp(min=1)
        quotient = units.to(torch.float64) / (squares.to(torch.float64) / block.dim).sqrt()
        return ((quotient * 1024).round() / 1024).to(torch.float32)


@dataclass(frozen=True)
class HeavyTailed:
    """N(0, scale^2) with outlier channels: one in 32 of each head is `outlier` times larger."""

    scale: float = 0.5
    outlier: float = 8.0
    law: str = field(default="heavy_tailed", init=False)

    def draw(self, block: Block) -> Tensor:
        """The block's values, float32; upstream gradients have no outliers."""
        values = block.normal(self.scale)
        if block.role not in ("q", "k", "v"):
            return values
        key = counter.stream(block.seed, "channels")
        factors = torch.ones(block.heads, block.dim)
        per_head = max(1, block.dim // 32)
        for i in range(block.heads * per_head):
            factors[i // per_head, counter.below(key, i, block.dim)] = self.outlier
        return values * factors.to(block.device)


@dataclass(frozen=True)
class StronglyNegativeScores:
    """q near +c and k near -c in every channel, so that scale * q . k is about -12 to -20.

    c ** 2 * sqrt(dim) = `score` for scale 1 / sqrt(dim). A zero-filled padded key then outweighs
    every real one, which is what a masking by subtraction must survive.
    """

    score: float = 16.0
    law: str = field(default="strongly_negative_scores", init=False)

    def draw(self, block: Block) -> Tensor:
        """The block's values, float32."""
        if block.role not in ("q", "k"):
            return block.normal(1.0)
        centre = round(math.sqrt(self.score / math.sqrt(block.dim)) * 1024) / 1024
        # 1 + noise / 8, in exact float32 steps, times a row factor in [0.75, 1.25) for the keys.
        values = (block.normal_units().to(torch.float32) / (8 * counter.UNIT) + 1) * centre
        if block.role == "q":
            return values
        return -values * (block.row_uniform() / 2 + 0.75)


@dataclass(frozen=True)
class UniformUnit:
    """U[0, 1), upstream gradients 0.01 U[0, 1): what public benchmarks draw; for reproduction only.

    All-positive values hide sign cancellation: never the only inputs of a correctness test.
    """

    law: str = field(default="uniform_unit", init=False)

    def draw(self, block: Block) -> Tensor:
        """The block's values, float32."""
        values = block.uniform()
        return values * 0.01 if block.role == "upstream" else values


@dataclass(frozen=True)
class Small:
    """U(-bound, bound), upstream gradients N(0, 1): the law of HSTU's benchmark (bound 0.01)."""

    bound: float = 0.01
    law: str = field(default="small", init=False)

    def draw(self, block: Block) -> Tensor:
        """The block's values, float32."""
        if block.role == "upstream":
            return block.normal(1.0)
        return (block.uniform() * 2 - 1) * self.bound


@dataclass(frozen=True)
class LargeOffset:
    """N(0, 1) beside a constant of its own in every row, from U(-offset, offset); others N(0, 1).

    mean(x^2) - mean(x)^2 cancels there. Offsets are added as integers.
    """

    offset: int = 64
    law: str = field(default="large_offset", init=False)

    def draw(self, block: Block) -> Tensor:
        """The block's values, float32."""
        if block.role != "q":
            return block.normal(1.0)
        lanes = (block.row_uniform() * counter.LANE).to(torch.int64) * 2 - counter.LANE
        units = block.normal_units() + lanes * (self.offset * counter.UNIT) // counter.LANE
        return units.to(torch.float32) / counter.UNIT


@dataclass(frozen=True)
class ConstantRows:
    """Every element of a row is the same multiple of 1/8 in [-offset, offset); others N(0, 1).

    Its variance is 0, so that LayerNorm divides what rounding left by sqrt(eps).
    """

    offset: int = 16
    law: str = field(default="constant_rows", init=False)

    def draw(self, block: Block) -> Tensor:
        """The block's values, float32."""
        if block.role != "q":
            return block.normal(1.0)
        steps = (block.row_uniform() * (16 * self.offset)).to(torch.int64) - 8 * self.offset
        return (steps.to(torch.float32) / 8).expand(block.shape)


@dataclass(frozen=True)
class RowsOfZeros:
    """N(0, 1), with a share of the rows that is 0 throughout (a token that was never filled)."""

    share: float = 0.25
    law: str = field(default="rows_of_zeros", init=False)

    def draw(self, block: Block) -> Tensor:
        """The block's values, float32; upstream gradients have no such rows."""
        values = block.normal(1.0)
        if block.role != "q":
            return values
        return torch.where(block.row_uniform() < self.share, 0.0, values)


@dataclass(frozen=True)
class AboutOne:
    """1 + N(0, 1) / 4: the weight of a norm."""

    law: str = field(default="about_one", init=False)

    def draw(self, block: Block) -> Tensor:
        """The block's values, float32."""
        return (block.normal_units() + 4 * counter.UNIT).to(torch.float32) / (4 * counter.UNIT)


def draw_values(
    law: ValueLaw,
    role: str,
    shape: tuple[int, int, int],
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A contiguous tensor `[rows, heads, dim]` of a law, rounded from float32 into `dtype`.

    seed: of the workload; every role has its own stream of it.
    """
    rows, heads, dim = shape
    values = torch.empty(shape, dtype=dtype, device=device)
    key = counter.stream(seed, "values", role)
    step = max(1, CHUNK // max(1, heads * dim))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        values[first : first + count] = law.draw(Block(role, key, first, count, heads, dim, device))
    return values
