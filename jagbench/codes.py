"""Whether outputs that are codes are those of the truth, byte for byte."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from jagbench.execution import Outcome
from jagbench.inputs import Inputs
from jagbench.spec import PLACED, CodePiece, Comparison
from jagbench.verdict import Accuracy

#: Elements of a piece of the truth: bounds its float64 and int64 copies.
ELEMENTS = 1 << 21
#: The same on a GPU, which has the room.
ELEMENTS_GPU = 1 << 25


def judge_codes(inputs: Inputs, outcome: Outcome, *, elements: int | None = None) -> list[Accuracy]:
    """Verdict on every output of an operator whose outputs are codes.

    Every byte is compared, but for those that the operator leaves free. Where a piece of the truth
    compares by itself, some bytes may be flipped, at most `Codes.share` of an output. Rows of an
    output that no piece of the truth speaks of must hold 0.

    elements: of the values that a piece of the truth is made of.
    """
    codes = inputs.operator.codes
    assert codes is not None
    meters = [
        _Meter(n, outcome.get(n), shape, codes.share.get(n, 0.0))
        for n, shape in codes.shapes(inputs).items()
    ]
    limit = elements or (ELEMENTS if inputs.device.type == "cpu" else ELEMENTS_GPU)
    formed = all(meter.problem is None for meter in meters)
    for piece in codes.truth(inputs, limit):
        compared: Mapping[str, Comparison] = {}
        if piece.compare is not None and formed:
            compared = piece.compare({m.name: m.value[piece.rows[m.name]] for m in meters})
        for meter in meters:
            meter.update(piece, compared.get(meter.name))
    return [meter.finish(inputs) for meter in meters]


@dataclass(frozen=True)
class _Difference:
    """The first byte that is wrong: where, what it is, what it should be."""

    index: tuple[int, ...]
    found: int
    wanted: int


class _Meter:
    """Counts the bytes of one output that are not those of the truth."""

    def __init__(
        self, name: str, value: Tensor | None, shape: tuple[int, ...], share: float
    ) -> None:
        self.name = name
        self.share = share
        self.problem = _wrong_form(value, shape)
        self.value = value if value is not None else torch.zeros(shape, dtype=torch.uint8)
        self.differing = self.compared = self.flipped = 0
        self.first: _Difference | None = None
        self.used = torch.zeros(self.value.shape[:1], dtype=torch.bool, device=self.value.device)

    def update(self, piece: CodePiece, compared: Comparison | None) -> None:
        """Account for a piece of the truth."""
        if self.problem is None:
            rows = piece.rows[self.name]
            self.used[rows] = True
            self._compare(rows, piece.wanted[self.name], piece.free.get(self.name), compared)

    def _compare(
        self,
        rows: Tensor,
        wanted: Tensor,
        free: Tensor | None,
        compared: Comparison | None = None,
    ) -> None:
        found = self.value[rows]
        wrong = found != wanted if compared is None else compared.wrong.clone()
        self.flipped += 0 if compared is None else int(compared.flipped.sum())
        if free is not None:
            wrong &= ~free
        self.compared += wrong.numel() - (0 if free is None else int(free.sum()))
        count = int(wrong.sum())
        if count and self.first is None:
            place = tuple(int(i) for i in wrong.nonzero()[0])
            index = (int(rows[place[0]]), *place[1:])
            self.first = _Difference(index, int(found[place]), int(wanted[place]))
        self.differing += count

    def finish(self, inputs: Inputs) -> Accuracy:
        """The verdict, once every piece is in."""
        if self.problem is None:
            idle = (~self.used).nonzero()[:, 0]
            self._compare(idle, torch.zeros_like(self.value[idle]), None)
        first = self.first or _Difference((), 0, 0)
        if self.problem is None and self.first is not None:
            self.problem = (
                f"{self.differing} of {self.compared} bytes differ, the first is "
                f"{first.found:#04x}, want {first.wanted:#04x}"
            )
        allowed = math.ceil(self.share * self.compared)
        if self.problem is None and self.flipped > allowed:
            self.problem = (
                f"{self.flipped} of {self.compared} codes are a step beside the truth's, "
                f"at most {allowed} may be"
            )
        sequence, position = _place(inputs, self.name, first.index)
        return Accuracy(
            name=self.name,
            error=float(self.differing + self.flipped),
            allowed=float(allowed),
            naive_error=0.0,
            worst_error=float(abs(first.found - first.wanted)),
            worst_allowed=0.0,
            worst_index=first.index,
            worst_sequence=sequence,
            worst_position=position,
            bad_sequence=None,
            snr_db=math.inf if self.problem is None else -math.inf,
            problem=self.problem,
            codes=True,
        )


def _wrong_form(value: Tensor | None, shape: tuple[int, ...]) -> str | None:
    """What is wrong with an output before its bytes are looked at."""
    if value is None:
        return "did not come back"
    if value.dtype != torch.uint8:
        return f"dtype {value.dtype}, want torch.uint8"
    if tuple(value.shape) != shape:
        return f"shape {tuple(value.shape)}, want {shape}"
    return None


def _place(inputs: Inputs, name: str, index: tuple[int, ...]) -> tuple[int | None, int | None]:
    """Sequence that owns a row of an output, and the row's number within it."""
    if not index or not inputs.is_jagged:
        return None, None
    codes, layout = inputs.operator.codes, inputs.operator.output_layout[name]
    assert codes is not None
    bounds = [] if layout == PLACED else inputs.tensors()[layout].tolist()
    for sequence in range(inputs.num_sequences):
        start, stop = (
            bounds[sequence : sequence + 2] if bounds else codes.rows(inputs, name, sequence)
        )
        if start <= index[0] < stop:
            return sequence, index[0] - start
    return None, None
