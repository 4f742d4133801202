"""How far an implementation is from the truth, and how far it may be.

The truth is the reference in float64. The allowance is a stated multiple of the error the same
reference makes when it runs in the implementation's own dtype, plus a floor of a few
roundoffs (`Budget`). Both are taken normwise over the tensor and by worst element, for
outputs also normwise in every single sequence, so that one bad sequence cannot hide among many.

Truth is computed over slices of the batch, so that full-size workloads fit in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from jagbench.codes import judge_codes
from jagbench.exact import exact_maths
from jagbench.execution import Outcome, run
from jagbench.inputs import Inputs
from jagbench.spec import PAIRS, ROWS, SHARED, Flips
from jagbench.verdict import Accuracy as Accuracy

#: Query-key pairs (visible or not) a slice of the truth may hold: bounds its float64 scores.
PAIRS_PER_SLICE = 1 << 22
#: The same on a GPU, which is idle between slices and has the room.
PAIRS_PER_SLICE_GPU = 1 << 23
#: Mean pairs a sequence below which a CPU gets through a slice sooner than a GPU launches it.
PAIRS_FOR_A_GPU = 2048


def judge(
    inputs: Inputs, outcome: Outcome, *, pairs_per_slice: int | None = None
) -> list[Accuracy]:
    """Accuracy of every tensor of an outcome, judged against the operator's reference.

    inputs: the call, with its upstream gradient if the outcome holds gradients.
    outcome: what the implementation returned (`execution.run`).
    """
    if inputs.operator.codes is not None:
        return judge_codes(inputs, outcome)
    with exact_maths():
        return _judge(inputs, outcome, pairs_per_slice)


def _judge(inputs: Inputs, outcome: Outcome, pairs_per_slice: int | None) -> list[Accuracy]:
    backward = any(name.startswith("grad ") for name in outcome)
    options = {"return_lse": True} if "lse" in outcome else {}
    operator = inputs.operator
    floors = {
        n: operator.floor(inputs, _coarser(x.dtype, inputs.dtype)) for n, x in outcome.items()
    }
    gpu = inputs.device.type != "cpu"
    if gpu and _work_bounds(inputs)[-1] < PAIRS_FOR_A_GPU * inputs.num_sequences:
        inputs, gpu = inputs.to(device="cpu"), False
        outcome = {name: value.cpu() for name, value in outcome.items()}
    meters = {
        name: _Meter(name, inputs, value, floors[name], operator.flips(inputs, name))
        for name, value in outcome.items()
    }
    limit = pairs_per_slice or (PAIRS_PER_SLICE_GPU if gpu else PAIRS_PER_SLICE)
    for part in _slices(inputs, limit):
        piece = inputs.select(part).with_options(**options)
        naive = run(operator.reference, piece, backward=backward)
        truth = run(operator.reference, piece.to(torch.float64), backward=backward)
        for name, meter in meters.items():
            meter.update(part, truth[name], naive[name])
        del piece, naive, truth  # the next slice is made while these would still be held
    verdicts = [meter.finish() for meter in meters.values()]
    over = [a.name for a in verdicts if not a.ok and a.name.startswith("grad ")]
    if operator.uncancelled is None or not over:
        return verdicts
    for part in _slices(inputs, limit):
        piece = inputs.select(part).to(torch.float64)
        terms = run(operator.uncancelled, piece, backward=True)
        for name in over:
            meters[name].add_terms(part, terms[name])
    return [meter.finish() for meter in meters.values()]


def _slices(inputs: Inputs, limit: int) -> Iterator[range]:
    """Ranges of sequences with at most `limit` query-key pairs each (at least one sequence).

    One range of all where the rows' numbers in the whole batch matter.
    """
    bounds = _work_bounds(inputs)
    if inputs.operator.by_row_number(inputs) and len(bounds) > 1:
        yield range(len(bounds) - 1)
        return
    start, count = 0, len(bounds) - 1
    while start < count:
        stop = start + 1
        while stop < count and bounds[stop + 1] - bounds[start] <= limit and stop - start < 512:
            stop += 1
        yield range(start, stop)
        start = stop


def _work_bounds(inputs: Inputs) -> list[int]:
    """Running count of query-key pairs before each sequence, `[batch + 1]`.

    Without offsets the largest tensor stands for the one sequence there is. Under a single offsets
    argument the rows take the memory: each counts as its head's elements, or as its features where
    it has no heads.
    """
    bounds = inputs.pair_bounds()
    if not inputs.operator.offsets_arguments:
        return [0, max(t.numel() for t in inputs.tensors().values())]
    if len(inputs.operator.offsets_arguments) != 1:
        return bounds
    width = max((t.shape[-1] for t in inputs.tensors().values() if t.dim() >= 2), default=1)
    return [width * bound for bound in bounds]


@dataclass
class _Meter:
    """Accumulates the error of one tensor over slices of the batch."""

    name: str
    inputs: Inputs
    value: Tensor
    floor: float
    flips: Flips | None = None
    problem: str | None = None
    squares: dict[str, float] = field(default_factory=lambda: dict.fromkeys("ent", 0.0))
    peaks: dict[str, float] = field(default_factory=lambda: dict.fromkeys("ent", 0.0))
    worst: tuple[int, tuple[int, ...]] | None = None
    sequences: list[tuple[float, float, float]] = field(default_factory=list)
    shared: dict[str, Tensor] = field(default_factory=dict)
    settled: bool = False
    terms_square: float = 0.0
    terms_peak: float = 0.0
    terms_sequences: list[float] = field(default_factory=list)

    @property
    def argument(self) -> str:
        return self.name.removeprefix("grad ")

    @property
    def layout(self) -> str:
        operator = self.inputs.operator
        if self.name in operator.output_layout:
            layout = operator.output_layout[self.name]
            return SHARED if layout == ROWS else layout
        return self.inputs.layout_of(self.argument)

    def update(self, part: Sequence[int], truth: Tensor, naive: Tensor) -> None:
        """Account for one slice; shared arguments are summed over slices, compared at the end."""
        if self.layout == SHARED:
            for key, tensor in (("t", truth), ("n", naive)):
                total = self.shared.get(key)
                wide = tensor.to(torch.float64)
                self.shared[key] = wide if total is None else total + wide
            return
        want = (self._rows(), *truth.shape[1:])
        if self.value.shape != want:
            self.problem = f"shape {tuple(self.value.shape)}, want {want}"
            return
        self._add(self.inputs.cut_output(self.argument, self.value, part), truth, naive, part)

    def add_terms(self, part: Sequence[int], terms: Tensor) -> None:
        """Account for the size of the terms that cancel in a slice of this gradient.

        For an argument shared by all sequences the sizes are added, not the terms.
        """
        sizes = terms.abs()
        self.terms_square += float(sizes.square().sum())
        self.terms_peak = max(self.terms_peak, float(sizes.max()) if sizes.numel() else 0.0)
        if self.layout != SHARED:
            self.terms_sequences += self._norms(sizes, part)

    def _rows(self) -> int:
        """Rows of the whole tensor, those past the last offset included."""
        tensors = self.inputs.tensors()
        if self.argument in tensors and self.name not in self.inputs.operator.output_layout:
            return int(tensors[self.argument].shape[0])
        if self.inputs.arguments[self.layout] is None:
            return self.inputs.num_sequences
        layouts = self.inputs.operator.layout
        return next(int(t.shape[0]) for n, t in tensors.items() if layouts.get(n) == self.layout)

    def _add(self, value: Tensor, truth: Tensor, naive: Tensor, part: Sequence[int] | None) -> None:
        # A naive run that overflows where the truth does not excuses nothing.
        over = torch.isfinite(truth) & ~torch.isfinite(naive)
        errors = {
            "e": difference(value, truth),
            "n": torch.where(over, 0.0, difference(naive, truth)),
            "t": torch.where(torch.isfinite(truth), truth, 0.0).abs(),
        }
        for key, error in errors.items():
            self.squares[key] += float(error.square().sum())
            peak = float(error.max()) if error.numel() else 0.0
            if key == "e" and (self.worst is None or not peak <= self.peaks["e"]) and error.numel():
                flat = int(error.argmax())
                first = part[0] if part is not None else 0
                self.worst = (first, tuple(int(i) for i in _unravel(flat, error.shape)))
            self.peaks[key] = max(self.peaks[key], peak) if peak == peak else math.inf
        if part is not None:
            self._add_sequences(errors, part)

    def _add_sequences(self, errors: Mapping[str, Tensor], part: Sequence[int]) -> None:
        """Normwise error, naive error and truth of every sequence of the slice."""
        norms = [self._norms(errors[key], part) for key in ("e", "n", "t")]
        self.sequences += list(zip(*norms, strict=True))

    def _norms(self, values: Tensor, part: Sequence[int]) -> list[float]:
        """Norm of every sequence of a slice."""
        counts = torch.tensor(self._rows_of(part))
        rows = values.shape[0]
        flat = values.reshape(rows, math.prod(values.shape[1:])).square().sum(1)
        total = torch.zeros(len(part), dtype=torch.float64, device=flat.device)
        index = torch.repeat_interleave(torch.arange(len(part)), counts).to(flat.device)
        norms: list[float] = total.index_add_(0, index, flat).sqrt().tolist()
        return norms

    @cached_property
    def bounds(self) -> list[int] | None:
        """First row of every sequence in this tensor; None if each has one (a dense query).

        Read from the device once: a look at every length in every slice would wait each time.
        """
        if self.layout == PAIRS:
            return self.inputs.pair_bounds()
        offsets = self.inputs.offsets(self.layout)
        return None if offsets is None else offsets.tolist()

    def _rows_of(self, part: Sequence[int]) -> list[int]:
        """Rows that each sequence of the slice has in this tensor."""
        bounds = self.bounds
        return [1] * len(part) if bounds is None else [bounds[s + 1] - bounds[s] for s in part]

    def finish(self) -> Accuracy:
        """The verdict, once every slice is in."""
        if self.layout == SHARED and self.shared and not self.settled:
            self.settled = True
            want = self.shared["t"].shape
            if self.value.shape != want:
                self.problem = f"shape {tuple(self.value.shape)}, want {tuple(want)}"
            else:
                self._add(self.value, self.shared["t"], self.shared["n"], None)
        multiple = self.inputs.operator.budget.multiple(self.name)
        floor = self.floor
        norm = {key: math.sqrt(square) for key, square in self.squares.items()}
        allowed = multiple * norm["n"] + floor * _size(norm["t"], math.sqrt(self.terms_square))
        worst_allowed = multiple * self.peaks["n"]
        worst_allowed += 2 * floor * _size(self.peaks["t"], self.terms_peak)
        if self.flips is not None:
            allowed += self.flips.error * norm["t"]
            worst_allowed += self.flips.step * self.peaks["t"]
        bad = self._bad_sequence(multiple, floor, norm)
        sequence, position, index = self._locate()
        problem = self.problem
        if problem is None:
            problem = _verdict(norm["e"], allowed, self.peaks["e"], worst_allowed, bad)
        return Accuracy(
            name=self.name,
            error=norm["e"],
            allowed=allowed,
            naive_error=norm["n"],
            worst_error=self.peaks["e"],
            worst_allowed=worst_allowed,
            worst_index=index,
            worst_sequence=sequence,
            worst_position=position,
            bad_sequence=bad,
            snr_db=_decibels(norm["t"], norm["e"]),
            problem=problem,
        )

    def _bad_sequence(self, multiple: float, floor: float, norm: Mapping[str, float]) -> int | None:
        """The sequence furthest over twice its own budget.

        A gradient may cancel to nearly nothing in one sequence (one visible key makes dq exactly
        0), so a share of the mean size of all sequences is allowed on top there.
        """
        ordinary = norm["t"] / math.sqrt(max(1, sum(1 for s in self.sequences if s[2] > 0)))
        slack = (8 if self.name.startswith("grad ") else 1) * floor * ordinary
        worst, over = None, 1.0
        terms = self.terms_sequences or [0.0] * len(self.sequences)
        for sequence, (error, naive, truth) in enumerate(self.sequences):
            allowed = 2 * (multiple * naive + 2 * floor * _size(truth, terms[sequence])) + slack
            allowed += 0.0 if self.flips is None else self.flips.step * truth
            ratio = error / allowed if allowed > 0 else (math.inf if error > 0 else 0.0)
            if not ratio <= over:
                worst, over = sequence, ratio
        return worst

    def _locate(self) -> tuple[int | None, int | None, tuple[int, ...]]:
        """Sequence, position and index (in the whole tensor) of the worst element."""
        if self.worst is None:
            return None, None, ()
        first, index = self.worst
        if self.layout == SHARED or not index:
            return None, None, index
        bounds = self.bounds
        if bounds is None:
            return first + index[0], None, (first + index[0], *index[1:])
        row = bounds[first] + index[0]
        sequence = max(s for s in range(len(bounds) - 1) if bounds[s] <= row)
        return sequence, row - bounds[sequence], (row, *index[1:])


def _verdict(
    error: float, allowed: float, worst: float, worst_allowed: float, bad: int | None
) -> str | None:
    if error == math.inf:
        return "not finite where the truth is"
    if not error <= allowed:
        return f"normwise error {error:.3e} is over its budget {allowed:.3e}"
    if not worst <= worst_allowed:
        return f"worst element is off by {worst:.3e}, budget {worst_allowed:.3e}"
    if bad is not None:
        return f"sequence {bad} alone is over its budget"
    return None


def _coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The one with the larger roundoff: a float32 log-sum-exp of fp16 scores is as good as they."""
    return a if torch.finfo(a).eps > torch.finfo(b).eps else b


def _size(truth: float, terms: float) -> float:
    """What a floor is taken of: the truth, or its terms where those are 8 times as large."""
    return truth if 8 * truth > terms else terms


def difference(value: Tensor, truth: Tensor) -> Tensor:
    """|value - truth| in float64; equal infinities differ by 0, a NaN or stray infinity by inf.

    An infinity is right, too, where the truth is beyond the range of the value's dtype.
    """
    wide = value.to(torch.float64)
    gap = (wide - truth).abs()
    beyond = torch.isinf(wide) & (wide * truth > 0) & (truth.abs() > torch.finfo(value.dtype).max)
    right = (wide == truth) | beyond
    return torch.where(right, 0.0, torch.where(torch.isfinite(gap), gap, math.inf))


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return tuple(reversed(index))


def _decibels(truth: float, error: float) -> float:
    if error == 0:
        return math.inf
    return -math.inf if truth == 0 or error == math.inf else 20 * math.log10(truth / error)
