"""The recipe of inputs for norm_linear."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.workloads import counter
from jagbench.workloads.attention import OffsetsType, jagged_statistics, offsets_of
from jagbench.workloads.lengths import LengthLaw
from jagbench.workloads.values import AboutOne, Normal, ValueLaw, draw_values

NormName = Literal["rms", "layer"]
ParameterType = Literal["none", "float32", "values"]

DEFAULT_VALUES = Normal()


@dataclass(frozen=True)
class NormLinearRecipe:
    """Draws the inputs of norm_linear.

    batch: sequences. features, out_features: columns of x and of the output.
    sequence_lengths: law of the lengths. values: law of x (its "q") and of the upstream gradient.
    norm_weight, norm_bias: "none" leaves the parameter out, else its dtype: float32 in every call,
        or that of the values. bias: whether the linear layer has one.
    padding: rows past the last offset, drawn like any other.
    """

    batch: int
    features: int
    out_features: int
    sequence_lengths: LengthLaw
    norm: NormName = "rms"
    eps: float = 1e-6
    values: ValueLaw = DEFAULT_VALUES
    bias: bool = False
    norm_weight: ParameterType = "none"
    norm_bias: ParameterType = "none"
    padding: int = 0
    offsets_type: OffsetsType = "int64"

    def __post_init__(self) -> None:
        if self.features < 1 or self.out_features < 1:
            raise ValueError(
                f"features and out_features must be at least 1, got {self.features} and "
                f"{self.out_features}"
            )
        if self.norm == "rms" and self.norm_bias != "none":
            raise ValueError(f"RMSNorm has no norm_bias, got {self.norm_bias!r}")

    @property
    def heads(self) -> int:
        """Rows have no heads."""
        return 1

    @property
    def num_kv_heads(self) -> int:
        """Rows have no heads."""
        return 1

    @property
    def qk_dim(self) -> int:
        """Columns of the wider of x and the output."""
        return max(self.features, self.out_features)

    @property
    def value_dim(self) -> int:
        """Columns of the output."""
        return self.out_features

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options of the call."""
        return {"norm": self.norm, "eps": self.eps}

    def lengths(self, seed: int) -> dict[str, list[int]]:
        """Drawn lengths by offsets argument."""
        key = counter.stream(seed, "q_lengths")
        return {"offsets": self.sequence_lengths.draw(self.batch, key)}

    def statistics(self, seed: int) -> dict[str, float]:
        """Realised statistics, named as those of `AttentionRecipe`; no row sees another."""
        drawn = self.lengths(seed)["offsets"]
        return jagged_statistics(drawn, drawn, sum(drawn))

    def draw(self, seed: int, dtype: torch.dtype, device: torch.device, upstream: bool) -> Inputs:
        """Inputs of a seed on a device; the same bytes on every machine."""
        from jagbench.reference import OPERATORS

        drawn = self.lengths(seed)["offsets"]
        rows, inside, outside = sum(drawn) + self.padding, self.features, self.out_features

        def values(law: ValueLaw, role: str, height: int, width: int, kind: torch.dtype) -> Tensor:
            return draw_values(law, role, (height, 1, width), seed, kind, device)[:, 0]

        arguments: dict[str, Any] = {
            "x": values(self.values, "q", rows, inside, dtype),
            "weight": values(Normal(1 / math.sqrt(inside)), "weight", outside, inside, dtype),
            "offsets": offsets_of(drawn, self.offsets_type, device),
        }
        if self.bias:
            arguments["bias"] = values(Normal(0.5), "bias", 1, outside, dtype)[0]
        laws: tuple[tuple[str, ParameterType, ValueLaw], ...] = (
            ("norm_weight", self.norm_weight, AboutOne()),
            ("norm_bias", self.norm_bias, Normal(0.25)),
        )
        for name, kind, law in laws:
            if kind != "none":
                width = torch.float32 if kind == "float32" else dtype
                arguments[name] = values(law, name, 1, inside, width)[0]
        gradient = values(self.values, "upstream", rows, outside, dtype) if upstream else None
        return Inputs(OPERATORS["norm_linear"], arguments, self.options, gradient)
