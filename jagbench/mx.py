"""Names and records of the MX formats: how numbers are quantised, and where a layer does so.

An MX block is 32 numbers along one dim, or a square of 32 x 32, that share one power of two.
Source: OCP Microscaling Formats (MX) Specification, version 1.0. Defaults are the recipe of arXiv
2506.08027 (E4M3 everywhere, scales rounded up) with 32 x 32 squares for weights, queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, get_args

ElemDtype = Literal["e4m3", "e5m2", "e2m1"]
ScaleMode = Literal["rceil", "floor", "ceil", "even"]
Rounding = Literal["nearest", "stochastic"]
#: Rows and columns of a block.
Block = tuple[int, int]
WeightGradient = Literal["bf16", "mx"]
#: Scale of the attention weights: one a block, or 2^-8 for all (they are at most 1).
WeightScale = Literal["block", "fixed"]
RowSum = Literal["unquantized", "quantized"]

BLOCK_SIZE = 32
ALONG_COLUMNS: Block = (1, BLOCK_SIZE)
ALONG_ROWS: Block = (BLOCK_SIZE, 1)
SQUARE: Block = (BLOCK_SIZE, BLOCK_SIZE)
BLOCKS = (ALONG_COLUMNS, ALONG_ROWS, SQUARE)
#: E8M0: scale 2^(code - 127); code 255 is NaN.
SCALE_BIAS = 127
LARGEST_SCALE_CODE = 254
NAN_SCALE_CODE = 255
#: Sizes of the Hadamard transform.
HADAMARD_SIZES = (16, 32, 64)
SEEDS = 2**63


class Stream(IntEnum):
    """Which random numbers of a seed belong to what, so that no two uses share any."""

    QUANTISE = 0
    SIGNS = 1
    GRADIENT_FOR_INPUT = 2
    GRADIENT_FOR_WEIGHT = 3
    GRADIENT_OF_OUTPUT = 4
    GRADIENT_OF_SCORES = 5


def check_elem_dtype(elem_dtype: str) -> None:
    """Refuse an element type that is none of `ElemDtype`."""
    _check_name("elem_dtype", elem_dtype, get_args(ElemDtype))


def check_block(block: Block) -> None:
    """Refuse a block that is none of `BLOCKS`."""
    if not _one_of(block, BLOCKS):
        raise ValueError(f"block must be one of {BLOCKS} (rows, columns), got {block!r}")


def _one_of(block: object, allowed: tuple[Block, ...]) -> bool:
    """Whether a block is one of some; (32.0, 32.0) equals (32, 32) and is none."""
    return isinstance(block, tuple) and block in allowed and all(type(n) is int for n in block)


def check_scale_mode(scale_mode: str) -> None:
    """Refuse a scale mode that is none of `ScaleMode`."""
    _check_name("scale_mode", scale_mode, get_args(ScaleMode))


def check_rounding(rounding: str, seed: int | None) -> None:
    """Refuse an unknown rounding, and a seed that is missing, unused or out of range."""
    _check_name("rounding", rounding, get_args(Rounding))
    if rounding == "stochastic":
        check_seed(seed)
    elif seed is not None:
        raise ValueError(f"rounding to nearest uses no seed, got {seed!r}")


def check_seed(seed: int | None) -> None:
    """Refuse what is no whole number in [0, 2^63)."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1, got {seed!r}")


def check_hadamard(size: int | None) -> None:
    """Refuse a size of the Hadamard transform that is none of `HADAMARD_SIZES` and not None."""
    if size is not None and (type(size) is not int or size not in HADAMARD_SIZES):
        raise ValueError(f"hadamard must be None or one of {HADAMARD_SIZES}, got {size!r}")


@dataclass(frozen=True)
class LinearRecipe:
    """How a linear layer y = x W^T quantises its three products.

    forward    x in blocks along the features, W in `weight_block`.
    input gradient   dY W: dY in blocks along its features; W is the same codes as in the forward
        where it is in squares, else quantised again along the other dim.
    weight gradient  dY^T x: both in blocks along the tokens, behind a random Hadamard transform
        along the tokens (`weight_gradient="mx"`), or not quantised ("bf16").

    elem_dtype, gradient_elem_dtype: element type of x and W; of dY.
    scale_mode: rule of every scale.
    weight_block: `SQUARE`, or `ALONG_COLUMNS`: along the contracted dim of each product.
    hadamard: size of the transform, None for none; only the quantised weight gradient has one.
    gradient_rounding: rounding of dY; x and W are rounded to nearest.
    seed: of the stochastic rounding and of the signs of the transform.

    Raises ValueError for a value that is none of these.
    """

    elem_dtype: ElemDtype = "e4m3"
    gradient_elem_dtype: ElemDtype = "e4m3"
    scale_mode: ScaleMode = "rceil"
    weight_block: Block = SQUARE
    weight_gradient: WeightGradient = "bf16"
    hadamard: int | None = 32
    gradient_rounding: Rounding = "stochastic"
    seed: int = 0

    def __post_init__(self) -> None:
        check_elem_dtype(self.elem_dtype)
        check_elem_dtype(self.gradient_elem_dtype)
        check_scale_mode(self.scale_mode)
        if not _one_of(self.weight_block, (SQUARE, ALONG_COLUMNS)):
            raise ValueError(
                f"weight_block must be {SQUARE} or {ALONG_COLUMNS}, got {self.weight_block!r}"
            )
        _check_name("weight_gradient", self.weight_gradient, get_args(WeightGradient))
        check_hadamard(self.hadamard)
        _check_name("gradient_rounding", self.gradient_rounding, get_args(Rounding))
        check_seed(self.seed)


@dataclass(frozen=True)
class AttentionRecipe:
    """How attention and GDPA quantise the five products of their forward and backward.

    Q, K, dO and dS are quantised in squares, so that both uses read the same codes. Blocks start at
    the start of each sequence.

    elem_dtype, gradient_elem_dtype: element type of Q, K, V and P; of dO and dS.
    scale_mode: rule of every scale.
    value_block: `ALONG_ROWS`: V along the keys for P V, quantised again along its head_dim for
        dO V^T; or `SQUARE`: the same codes in both.
    weight_scale: P, in blocks along the contracted dim of each product, has a scale a block or the
        fixed scale 2^-8 (attention alone: the weights of GDPA have no bound).
    row_sum: whether the normaliser of the softmax adds P as it was or as it is quantised.
    gradient_rounding: rounding of dO and dS; the rest is rounded to nearest.
    seed: of the stochastic rounding.

    Raises ValueError for a value that is none of these.
    """

    elem_dtype: ElemDtype = "e4m3"
    gradient_elem_dtype: ElemDtype = "e4m3"
    scale_mode: ScaleMode = "rceil"
    value_block: Block = ALONG_ROWS
    weight_scale: WeightScale = "block"
    row_sum: RowSum = "unquantized"
    gradient_rounding: Rounding = "stochastic"
    seed: int = 0

    def __post_init__(self) -> None:
        check_elem_dtype(self.elem_dtype)
        check_elem_dtype(self.gradient_elem_dtype)
        check_scale_mode(self.scale_mode)
        if not _one_of(self.value_block, (SQUARE, ALONG_ROWS)):
            raise ValueError(
                f"value_block must be {SQUARE} or {ALONG_ROWS}, got {self.value_block!r}"
            )
        _check_name("weight_scale", self.weight_scale, get_args(WeightScale))
        if self.weight_scale == "fixed" and self.elem_dtype == "e2m1":
            raise ValueError("weight_scale 'fixed' is 2^-8, and weights up to 256 exceed e2m1's 6")
        _check_name("row_sum", self.row_sum, get_args(RowSum))
        _check_name("gradient_rounding", self.gradient_rounding, get_args(Rounding))
        check_seed(self.seed)


def _check_name(called: str, value: str, names: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{called} must be one of {names}, got {value!r}")
