"""The implementation under test, called so that nothing it does can flatter it."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jagbench.accuracy import Accuracy, judge
from jagbench.execution import Outcome, run
from jagbench.inputs import Inputs
from jagbench.spec import Operator
from jagbench.suite import shapes
from jagbench.suite.cases import Case
from jagbench.suite.room import room_for
from jagbench.suite.settings import Settings
from jagbench.suite.zeros import strays


@dataclass(frozen=True)
class Verdict:
    """What one run on a workload showed; holds no tensor, so a session can keep them all.

    accuracies: of every output and, if the backward came through, every gradient.
    written: arguments the implementation wrote to.
    strays: values of rows that take part in nothing, where they are not 0 (`zeros.strays`).
    backward_error: what the backward raised, if it did.
    """

    accuracies: tuple[Accuracy, ...]
    written: tuple[str, ...]
    strays: tuple[str, ...]
    backward_error: Exception | None = None


@dataclass
class Candidate:
    """The implementation, on the session's device."""

    settings: Settings
    verdicts: dict[Case, Verdict] = field(default_factory=dict)
    refuses_further: dict[tuple[str, torch.dtype], bool] = field(default_factory=dict)

    def run(self, inputs: Inputs, *, backward: bool = False) -> Outcome:
        """Call the implementation on a copy of the inputs. Unsupported: NotImplementedError."""
        function = self.settings.implementation.get(inputs.operator.name)
        return run(function, inputs.clone(), backward=backward)

    def run_in_place(self, inputs: Inputs, *, backward: bool = False) -> Outcome:
        """Call the implementation on these very tensors, strides and all."""
        function = self.settings.implementation.get(inputs.operator.name)
        return run(function, inputs, backward=backward)

    def every_output(self, inputs: Inputs) -> Inputs:
        """The call that asks for every output the implementation supports.

        One that has no log-sum-exp is judged on the rest; that it has none is counted once
        (`test_outputs_have_the_pinned_shapes_and_dtypes`).
        """
        # Asked in the dtype of the call: another dtype may be the one that kills the process.
        key, further = (inputs.operator.name, inputs.dtype), further_outputs(inputs.operator)
        if not further:
            return inputs
        if key not in self.refuses_further:
            plain = shapes.attention(
                inputs.operator, [2], dtype=inputs.dtype, device=self.settings.device
            )
            try:
                self.run(plain.with_options(**further))
                self.refuses_further[key] = False
            except Exception as error:
                self.refuses_further[key] = isinstance(error, NotImplementedError)
        return inputs if self.refuses_further[key] else inputs.with_options(**further)

    def verdict(self, case: Case) -> Verdict:
        """Forward and backward on a workload, judged once and remembered.

        Raises what the forward raises.
        """
        if case not in self.verdicts:
            self.verdicts[case] = self._verdict(case)
        return self.verdicts[case]

    def _verdict(self, case: Case) -> Verdict:
        with room_for(case.memory, self.settings.device):
            return self._judge(case)

    def _judge(self, case: Case) -> Verdict:
        inputs = self.every_output(case.inputs(self.settings.device))
        given = inputs.clone()
        error: Exception | None = None
        try:
            outcome = self.run_in_place(given, backward=True)
        except Exception as raised:
            error = raised.with_traceback(None)
            traceback.clear_frames(raised.__traceback__)
            outcome = self.run_in_place(given)
        written = changed(inputs, given)
        found = tuple(strays(inputs, outcome))
        return Verdict(tuple(judge(inputs, outcome)), written, found, error)


def further_outputs(operator: Operator) -> dict[str, bool]:
    """Options that ask for every output beside `out`."""
    wanted = {f"return_{n}": True for n in operator.output_layout if n != "out"}
    return {n: v for n, v in wanted.items() if n in operator.signature.parameters}


def repeatable(inputs: Inputs) -> Inputs:
    """The call that promises bit-equal gradients, where the operator has that option."""
    if "deterministic" not in inputs.operator.signature.parameters:
        return inputs
    return inputs.with_options(deterministic=True)


def option_names(operator: Operator) -> set[str]:
    """Keyword-only parameters of an operator."""
    parameters = operator.signature.parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def has_scale(operator: Operator, **others: Any) -> bool:
    """Whether an operator has an option that scales its scores (`combinations`)."""
    return bool({"scale", "pre_scale"} & option_names(operator))


def scales_queries(operator: Operator, **others: Any) -> bool:
    """Whether that scale is one of the queries as they are given: no norm stands before it."""
    return has_scale(operator) and not operator.residual


def changed(before: Inputs, after: Inputs) -> tuple[str, ...]:
    """Names of tensors (and "upstream") whose bits differ."""
    names = []
    later = dict(after.tensors(), upstream=after.upstream)
    for name, tensor in {**before.tensors(), "upstream": before.upstream}.items():
        other = later[name]
        if tensor is not None and (other is None or not same_bits(tensor, other)):
            names.append(name)
    return tuple(names)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes, NaN payloads and signs of zero included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(word), b.contiguous().view(word))


def differing(a: Outcome, b: Outcome) -> list[str]:
    """Names of the outputs and gradients whose bits differ, with the first place they do."""
    return [_difference(n, a[n], b[n]) for n in a if not same_values(a[n], b[n])]


def same_values(a: Tensor, b: Tensor) -> bool:
    """Bit-equal but for the sign of zero and NaN payloads, which no contract speaks of."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_plain(a), _plain(b))


def _plain(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    normal = torch.where(x == 0, torch.zeros_like(x), x)
    return torch.where(torch.isnan(x), torch.full_like(x, float("nan")), normal).view(word)


def _difference(name: str, a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{name} ({a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)})"
    unequal = (a != b) & ~(torch.isnan(a) & torch.isnan(b))
    index = tuple(int(i) for i in unequal.nonzero()[0])
    place = ", ".join(map(str, index))
    return f"{name} (first at [{place}]: {float(a[index])!r} against {float(b[index])!r})"


@contextmanager
def memory_full_of_nan(device: torch.device, like: Mapping[str, Tensor]) -> Iterator[None]:
    """Within: memory that is allocated but not written holds NaN (or the largest integer).

    torch fills what `torch.empty` and its kin return; on a GPU freed blocks of the sizes at hand
    are full of NaN too, for allocators that go round torch's functions.
    """
    was = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    # torch's module of settings, whose attributes its stubs do not name.
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    if device.type != "cpu":
        gc.collect()
        blocks = [torch.full_like(t, float("nan"), dtype=torch.float32) for t in like.values()]
        blocks += [torch.full((1 << n,), float("nan"), device=device) for n in range(8, 26)]
        del blocks
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn)
        memory.fill_uninitialized_memory = fill
