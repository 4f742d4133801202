"""The recipes of inputs of mx_linear, mx_matmul, mx_attention and mx_gdpa."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE, ElemDtype, LinearRecipe
from jagbench.mx import AttentionRecipe as Quantised
from jagbench.workloads.attention import AttentionRecipe, jagged_statistics
from jagbench.workloads.values import Normal, ValueLaw, draw_values

_NORMAL = Normal()
#: mx operator -> the operator without quantisation whose inputs it takes.
PLAIN = {"mx_attention": "jagged_attention", "mx_gdpa": "gdpa"}


@dataclass(frozen=True)
class Matrices:
    """What recipes of matrices share: one sequence of rows, no heads."""

    rows: int

    @property
    def batch(self) -> int:
        """Rows belong to no sequence."""
        return 1

    @property
    def heads(self) -> int:
        """Rows have no heads."""
        return 1

    @property
    def num_kv_heads(self) -> int:
        """Rows have no heads."""
        return 1

    @property
    def padding(self) -> int:
        """Every row counts."""
        return 0

    def lengths(self, seed: int) -> dict[str, list[int]]:
        """Rows, as those of one sequence."""
        return {"rows": [self.rows]}

    def statistics(self, seed: int) -> dict[str, float]:
        """Statistics named as those of `AttentionRecipe`; no row sees another."""
        return jagged_statistics([self.rows], [self.rows], self.rows)


@dataclass(frozen=True)
class LinearInputs(Matrices):
    """Draws the inputs of mx_linear.

    features, out_features: columns of x and of the output. recipe: of the call.
    values: law of x (its "q") and of the upstream gradient. bias: whether the layer has one.
    """

    features: int
    out_features: int
    recipe: LinearRecipe
    values: ValueLaw = _NORMAL
    bias: bool = False

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
        return {"recipe": self.recipe}

    def draw(self, seed: int, dtype: torch.dtype, device: torch.device, upstream: bool) -> Inputs:
        """Inputs of a seed on a device; the same bytes on every machine."""
        from jagbench.reference import OPERATORS

        inside, outside = self.features, self.out_features

        def values(law: ValueLaw, role: str, height: int, width: int) -> Tensor:
            return draw_values(law, role, (height, 1, width), seed, dtype, device)[:, 0]

        arguments: dict[str, Any] = {
            "x": values(self.values, "q", self.rows, inside),
            "weight": values(Normal(1 / math.sqrt(inside)), "weight", outside, inside),
        }
        if self.bias:
            arguments["bias"] = values(Normal(0.5), "bias", 1, outside)[0]
        gradient = values(self.values, "upstream", self.rows, outside) if upstream else None
        return Inputs(OPERATORS["mx_linear"], arguments, self.options, gradient)


@dataclass(frozen=True)
class MatmulInputs(Matrices):
    """Draws the inputs of mx_matmul: the codes and scales of matrices of a law.

    columns, contracted: of the product `[rows, columns]`. squares: whether blocks are 32 x 32,
        else they lie along the contracted dim.
    """

    columns: int
    contracted: int
    squares: bool = False
    a_elem_dtype: ElemDtype = "e4m3"
    b_elem_dtype: ElemDtype = "e4m3"
    values: ValueLaw = _NORMAL

    @property
    def qk_dim(self) -> int:
        """Columns of the wider matrix."""
        return max(self.columns, self.contracted)

    @property
    def value_dim(self) -> int:
        """Columns of the product."""
        return self.columns

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options of the call but its dtype."""
        return {
            "a_elem_dtype": self.a_elem_dtype,
            "b_elem_dtype": self.b_elem_dtype,
            "a_block": SQUARE if self.squares else ALONG_COLUMNS,
            "b_block": SQUARE if self.squares else ALONG_ROWS,
        }

    def draw(self, seed: int, dtype: torch.dtype, device: torch.device, upstream: bool) -> Inputs:
        """Inputs of a seed on a device; there is no upstream. dtype: of the product.

        Codes are those of float32 numbers, whatever the dtype.
        """
        from jagbench.reference import OPERATORS, mx_quantize

        arguments: dict[str, Any] = {}
        for name, role, height, width in (
            ("a", "q", self.rows, self.contracted),
            ("b", "k", self.contracted, self.columns),
        ):
            shape = (height, 1, width)
            x = draw_values(self.values, role, shape, seed, torch.float32, device)[:, 0]
            options = self.options
            arguments[name], arguments[f"{name}_scales"] = mx_quantize(
                x, elem_dtype=options[f"{name}_elem_dtype"], block=options[f"{name}_block"]
            )
        return Inputs(OPERATORS["mx_matmul"], arguments, {**self.options, "dtype": dtype})


@dataclass(frozen=True)
class QuantisedAttention:
    """Draws the inputs of mx_attention or mx_gdpa: those of the plain operator, and a recipe.

    plain: of jagged_attention or gdpa. recipe: of the call.
    """

    plain: AttentionRecipe
    recipe: Quantised

    @property
    def operator(self) -> str:
        """Name of the operator."""
        return next(name for name, plain in PLAIN.items() if plain == self.plain.operator)

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.plain.batch

    @property
    def heads(self) -> int:
        """Heads of q."""
        return self.plain.heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of k and v."""
        return self.plain.num_kv_heads

    @property
    def qk_dim(self) -> int:
        """head_dim of q and k."""
        return self.plain.qk_dim

    @property
    def value_dim(self) -> int:
        """head_dim of v and of the output."""
        return self.plain.value_dim

    @property
    def padding(self) -> int:
        """Rows of the keys past the last offset."""
        return self.plain.k_padding

    @property
    def values(self) -> ValueLaw:
        """Law of the tensors."""
        return self.plain.values

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options of the call."""
        return {**self.plain.options, "recipe": self.recipe}

    def lengths(self, seed: int) -> dict[str, list[int]]:
        """Drawn lengths by offsets argument."""
        return self.plain.lengths(seed)

    def statistics(self, seed: int) -> dict[str, float]:
        """Realised statistics of the lengths."""
        return self.plain.statistics(seed)

    def draw(self, seed: int, dtype: torch.dtype, device: torch.device, upstream: bool) -> Inputs:
        """Inputs of a seed on a device; the same bytes on every machine."""
        from jagbench.reference import OPERATORS

        drawn = self.plain.draw(seed, dtype, device, upstream)
        return dataclasses.replace(drawn, operator=OPERATORS[self.operator], options=self.options)
