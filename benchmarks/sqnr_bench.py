"""What the measurements of SQNR share: laws of values, and the two figures of an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jagbench.implementation import Implementation
from jagbench.workloads.values import HeavyTailed, Normal, draw_values

Case = dict[str, str | int | None]


@dataclass(frozen=True)
class Row:
    """case: what was varied. values: what was measured by name, of one seed."""

    case: Case
    values: Mapping[str, float]


@dataclass(frozen=True)
class Bench:
    """One seed of a measurement of an implementation; arguments are rounded to dtype first."""

    implementation: Implementation
    dtype: torch.dtype
    device: torch.device
    seed: int

    def get(self, operator: str) -> Callable[..., Any]:
        """An operator of the implementation; NotImplementedError where it has none."""
        return self.implementation.get(operator)

    def draw(self, law: str, role: str, *shape: int) -> Tensor:
        """Values of a law `[rows, columns]` or `[rows, heads, dim]`; a role has its own stream."""
        full = (shape[0], 1, shape[1]) if len(shape) == 2 else (shape[0], shape[1], shape[2])
        return LAWS[law](self, role, full).view(shape).to(self.dtype)

    def normal(self, role: str, shape: tuple[int, int, int]) -> Tensor:
        """N(0, 1), float32."""
        return draw_values(Normal(), role, shape, self.seed, torch.float32, self.device)


def _outlier_channels(bench: Bench, role: str, shape: tuple[int, int, int]) -> Tensor:
    # Roles other than q, k and v have no outliers by that law.
    law = HeavyTailed(scale=1.0, outlier=64.0)
    seed = bench.seed + 1000 * sum(map(ord, role))
    return draw_values(law, "q", shape, seed, torch.float32, bench.device)


def _student(bench: Bench, role: str, shape: tuple[int, int, int]) -> Tensor:
    squares = sum(bench.normal(f"{role} {i}", shape).double().square() for i in range(3))
    assert isinstance(squares, Tensor)
    return (bench.normal(role, shape).double() / (squares / 3).sqrt()).float()


def _log_normal(bench: Bench, role: str, shape: tuple[int, int, int]) -> Tensor:
    sign = bench.normal(f"{role} sign", shape).sign()
    return (sign * (3 * bench.normal(role, shape).double()).exp()).float()


def _spikes(bench: Bench, role: str, shape: tuple[int, int, int], factor: float) -> Tensor:
    values = bench.normal(role, shape)
    index = torch.arange(values.numel(), device=values.device).view(values.shape)
    return torch.where(index % 37 == 5, factor * values, values)


#: Laws of values by name.
LAWS: dict[str, Callable[[Bench, str, tuple[int, int, int]], Tensor]] = {
    "normal": lambda bench, role, shape: bench.normal(role, shape),
    "outlier channels": _outlier_channels,
    "Student t, 3": _student,
    "log-normal, 3": _log_normal,
    "spikes x16": lambda bench, role, shape: _spikes(bench, role, shape, 16.0),
    "spikes x4096": lambda bench, role, shape: _spikes(bench, role, shape, 4096.0),
}


def decibels(found: Tensor, truth: Tensor) -> float:
    """SQNR in dB, float64."""
    wide = truth.double()
    noise = float((found.double() - wide).square().sum())
    return 10 * math.log10(float(wide.square().sum()) / noise) if noise else math.inf


def cosine(found: Tensor, truth: Tensor) -> float:
    """Cosine of the angle between two tensors taken as vectors."""
    a, b = found.double().flatten(), truth.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))
