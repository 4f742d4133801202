"""What the harness must know of an operator to judge any implementation of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jagbench.inputs import Inputs

#: Layout of an argument that belongs to no sequence (a bias table, one dense query for all).
SHARED = "shared"
#: Layout of an argument with one row per query-key pair, row-major per sequence.
PAIRS = "pairs"
#: Layout of an output whose rows the operator itself places (`Codes.rows`).
PLACED = "placed"
#: Layout of an argument whose rows belong to no sequence: its first dim may be any tensor's rows.
ROWS = "rows"
_NO_OFFSETS = (SHARED, PAIRS, ROWS)


@dataclass(frozen=True)
class Budget:
    """How far an implementation may be from the float64 truth.

    Allowed error = multiple x (error of the reference run in the implementation's own dtype)
    + floor x (size of the truth), by worst element twice that floor.

    forward, gradient: the multiples.
    roundoffs: floor in unit roundoffs of the output's dtype: a result is rounded once at the end.
    float32_roundoffs: floor in unit roundoffs of float32, in which kernels compute: exponentials in
        units of log 2 and the hardware's exp2 (2 ulp) cost a few that the reference does not pay.
    """

    forward: float = 2.0
    gradient: float = 3.0
    roundoffs: float = 1.0
    float32_roundoffs: float = 4.0

    def multiple(self, name: str) -> float:
        """Multiple for an output ("out") or a gradient ("grad q")."""
        return self.gradient if name.startswith("grad ") else self.forward

    def floor(self, dtype: torch.dtype) -> float:
        """Floor for an output of a dtype, relative to the size of the truth."""
        own, single = (torch.finfo(t).eps / 2 for t in (dtype, torch.float32))
        return self.roundoffs * own + self.float32_roundoffs * min(single, own)


@dataclass(frozen=True)
class Comparison:
    """Codes of an output beside the truth, bool of their shape.

    wrong: codes that no honest computation gives. flipped: right ones on the other side of a
    rounding boundary than the truth's, which are counted (`Codes.share`).
    """

    wrong: Tensor
    flipped: Tensor


@dataclass(frozen=True)
class CodePiece:
    """The truth of some rows of every output of codes.

    rows: output -> int64 `[n]`, rows of the whole output. wanted: output -> uint8 `[n, ...]`.
    free: output -> bool `[n, ...]`, codes that may be anything; outputs it lacks have none.
    compare: of the codes found in those rows, by output, which are wrong, where that is more than
        being another than the one wanted; None where it is not.
    """

    rows: Mapping[str, Tensor]
    wanted: Mapping[str, Tensor]
    free: Mapping[str, Tensor]
    compare: Callable[[Mapping[str, Tensor]], Mapping[str, Comparison]] | None = None


@dataclass(frozen=True)
class Codes:
    """That an operator's outputs are codes of a byte, which have no error but are equal or not.

    Its budget is exact: every byte is compared but those that are free. Where the codes are of
    numbers that the operator has computed, a piece of the truth says itself which of them an order
    of sums leaves open. Rows of an output that belong to no sequence hold 0.

    shapes: the shape of every output of a call.
    rows: first row, and the one behind the last, that a sequence of a call has in an output; asked
        for outputs of the layout `PLACED` alone.
    truth: of a call, in pieces of about so many elements.
    share: output -> which part of its codes may be flipped (`Comparison`), rounded up; 0 of those
        it lacks.
    """

    shapes: Callable[[Inputs], Mapping[str, tuple[int, ...]]]
    rows: Callable[[Inputs, str, int], tuple[int, int]]
    truth: Callable[[Inputs, int], Iterator[CodePiece]]
    share: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Flips:
    """Codes inside an operator that an honest kernel may have one step beside the truth's.

    A number that is computed in float32 and then quantised comes to the other side of a rounding
    boundary now and then; so does a stochastic rounding, by whole steps as well.

    share: of the codes of an operand, at most. step: a code's largest step, relative to its value.
    """

    share: float
    step: float

    @property
    def error(self) -> float:
        """Normwise error of a product with such an operand, relative to its size."""
        return float(self.step * self.share**0.5)


def no_flips(_: Inputs, name: str) -> Flips | None:
    """Flips of an operator that quantises nothing it has computed."""
    return None


def never(_: Inputs) -> bool:
    """What holds of no call."""
    return False


def exact(_: Inputs) -> float:
    """Approximation of an operator that states none."""
    return 0.0


@dataclass(frozen=True)
class Operator:
    """An operator: its truth, its arguments, its cost.

    name: the callable an implementation must offer.
    reference: the truth; its signature is the operator's signature.
    layout: tensor argument -> the offsets argument that packs its rows, or `SHARED`, or `PAIRS`.
        The arguments of records are named by a dotted path ("bias.table").
    output_layout: the same for every output ("out", "lse"), or `PLACED`.
    differentiable: tensor arguments that have a gradient; none where the outputs are codes.
    flops: useful FLOP of a forward pass (visible pairs only).
    bytes_moved: least bytes of a forward pass: each input read once, each output written once.
    backward_flops_ratio: kernel FLOP of the backward over the forward (2.5: scores are recomputed);
        the model FLOP of MFU count 2.
    paper: where the operator is defined.
    uncancelled: a function of the same signature whose gradients have the size of the terms that
        cancel in the operator's own; None if nothing cancels. Where a gradient is over its budget,
        the floor is taken of that size too: no kernel can be nearer than the rounding of its terms.
    unread_in_backward: tensor arguments that no gradient depends on (a linear operator's own).
    bandwidth_bound: whether memory binds it on any device, so that reports show GB/s of the least
        traffic and its share of a copy's rate, and neither FLOP/s nor MFU.
    residual: the queries pass through beside the attention: one that sees no key has an output and
        a gradient, and the output is linear in nothing.
    approximation: relative error that the inputs' named approximations (a hardware tanh) state for
        themselves; the judge adds it, four times, to the floor.
    codes: how outputs that are codes are judged; None where they are numbers with a budget.
    flips: of a call and the name of an output or gradient: which of its codes need not be the
        truth's. The judge adds the flips' `error` to the floor, and for single elements and
        sequences a whole step.
    by_row_number: whether a call's result hangs on the numbers of its rows in the whole batch, as
        bits of stochastic rounding do: its truth is then taken of the whole batch.
    quantised: operands are quantised in blocks inside, so that identities which move rows or scale
        by other factors than powers of two do not hold.
    """

    name: str
    reference: Callable[..., Any]
    layout: Mapping[str, str]
    output_layout: Mapping[str, str]
    differentiable: tuple[str, ...]
    flops: Callable[[Inputs], int]
    bytes_moved: Callable[[Inputs], int]
    paper: str
    budget: Budget = Budget()
    approximation: Callable[[Inputs], float] = exact
    uncancelled: Callable[..., Any] | None = None
    unread_in_backward: tuple[str, ...] = ()
    bandwidth_bound: bool = False
    residual: bool = False
    codes: Codes | None = None
    flips: Callable[[Inputs, str], Flips | None] = no_flips
    by_row_number: Callable[[Inputs], bool] = never
    quantised: bool = False
    backward_flops_ratio: float = 2.5
    model_backward_flops_ratio: float = 2.0

    @property
    def signature(self) -> inspect.Signature:
        """Signature that every implementation keeps."""
        return inspect.signature(self.reference)

    def floor(self, inputs: Inputs, dtype: torch.dtype) -> float:
        """Error allowed whatever the reference's own, relative to the size of the truth.

        An approximation's bound is on one weight; the tails of an activation, where weights are
        small and the bound is not, and its derivative take up to four times that in the norm.
        """
        return self.budget.floor(dtype) + 4.0 * self.approximation(inputs)

    @property
    def offsets_arguments(self) -> tuple[str, ...]:
        """Names of the offsets arguments, in the order in which they pack the inputs."""
        return tuple(dict.fromkeys(v for v in self.layout.values() if v not in _NO_OFFSETS))
