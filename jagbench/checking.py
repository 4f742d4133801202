"""Check what a timed call computed, on random sequences, against the truth."""

from __future__ import annotations

import random
import secrets

import torch
from torch import Tensor

from jagbench import accuracy, result
from jagbench.codes import judge_codes
from jagbench.inputs import Inputs
from jagbench.spec import SHARED
from jagbench.timing import Outputs
from jagbench.verdict import Accuracy

#: Query-key pairs of the sequences that are judged after a timed call.
JUDGED_PAIRS = 1 << 22
#: Most sequences judged after a timed call.
JUDGED_SEQUENCES = 8


class Wrong(Exception):
    """A timed call computed something else than the operator."""


def check(inputs: Inputs, outputs: Outputs) -> list[result.Accuracy]:
    """Accuracies of a call's outputs in the packed layout; raises Wrong with the numbers.

    Shapes and NaN are looked for everywhere, values in random sequences. Gradients of shared
    arguments are sums over all sequences and are judged only where all of them are chosen.
    """
    for name, tensor in outputs.items():
        _check_form(name, tensor, inputs)
    return [
        result.Accuracy(
            name=verdict.name,
            error=verdict.error,
            allowed=verdict.allowed,
            naive=verdict.naive_error,
        )
        for verdict in _right(inputs, outputs)
    ]


def _right(inputs: Inputs, outputs: Outputs) -> list[Accuracy]:
    """Verdicts; raises Wrong where one of them is no."""
    verdicts = _verdicts(inputs, outputs)
    for verdict in verdicts:
        if not verdict.ok:
            raise Wrong(f"{verdict.name}: {verdict.problem}")
    return verdicts


def _verdicts(inputs: Inputs, outputs: Outputs) -> list[Accuracy]:
    """Of every code, or of the numbers of some sequences."""
    if inputs.operator.codes is not None:
        return judge_codes(inputs, outputs)
    chosen = _some_sequences(inputs)
    every = len(chosen) == inputs.num_sequences
    cut = {
        name: inputs.cut_output(name.removeprefix("grad "), tensor, chosen)
        for name, tensor in outputs.items()
        if every or not _is_shared(name, inputs)
    }
    if not chosen or not cut:
        return []
    return accuracy.judge(inputs.select(chosen), cut)


def plain(name: str, tensor: object) -> None:
    """Raises Wrong for anything but a torch tensor (or torch's own nested one).

    A subclass may put its work off until somebody looks at it, after the clock has stopped.
    """
    own = isinstance(tensor, Tensor) and (type(tensor) is Tensor or tensor.is_nested)
    if not own:
        raise Wrong(f"{name} is of type {type(tensor).__name__}, want a plain Tensor")


def unwritten(now: Inputs, given: Inputs) -> None:
    """Raises Wrong where a call has written into its arguments."""
    pairs = [(name, tensor, given.tensors()[name]) for name, tensor in now.tensors().items()]
    if now.upstream is not None and given.upstream is not None:
        pairs.append(("the upstream gradient", now.upstream, given.upstream))
    for name, tensor, held in pairs:
        same = tensor == held
        if tensor.is_floating_point():
            same |= tensor.isnan() & held.isnan()
        if not bool(same.all()):
            raise Wrong(f"{int((~same).sum())} values of {name} were written by the call")


def brief(value: object, most: int) -> str:
    """Text of a value that JSON can hold, cut to a length."""
    text = str(value).encode("utf-8", "replace").decode()
    return text if len(text) <= most else f"{text[:most]}..."


def outcome_of(error: Exception) -> tuple[result.Outcome, str]:
    """The typed outcome of what an implementation raised, and the reason to record."""
    text = brief(f"{type(error).__name__}: {error}".strip(), 600)
    if isinstance(error, NotImplementedError):
        return "unsupported", brief(error, 600) or "NotImplementedError without a reason"
    if isinstance(error, Wrong):
        return "wrong", brief(error, 600)
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return "out of memory", text
    return "crashed", text


def _check_form(name: str, tensor: Tensor, inputs: Inputs) -> None:
    """Type, dtype and shape of the whole; NaN anywhere is found here, not only where it is judged.

    A coarser dtype would be judged by its own roundoff: an output has the dtype of the inputs, a
    gradient that of its argument.
    """
    plain(name, tensor)
    argument = name.removeprefix("grad ")
    like = inputs.upstream if name == "out" else inputs.tensors().get(argument)
    if like is not None and (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
        raise Wrong(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, want {like.dtype} {tuple(like.shape)}"
        )
    if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
        raise Wrong(f"{name} holds {int(torch.isnan(tensor).sum())} NaN")


def _is_shared(name: str, inputs: Inputs) -> bool:
    """Whether a gradient is summed over all sequences, so that some of them do not give it."""
    return name.startswith("grad ") and inputs.layout_of(name.removeprefix("grad ")) == SHARED


def _some_sequences(inputs: Inputs) -> list[int]:
    """Random sequences, as many as the pairs to judge allow, at least one."""
    order = list(range(inputs.num_sequences))
    if inputs.operator.by_row_number(inputs):
        return order
    random.Random(secrets.randbits(64)).shuffle(order)
    bounds = inputs.pair_bounds()
    chosen: list[int] = []
    pairs = 0
    for sequence in order:
        count = bounds[sequence + 1] - bounds[sequence]
        if chosen and (pairs + count > JUDGED_PAIRS or len(chosen) == JUDGED_SEQUENCES):
            break
        chosen.append(sequence)
        pairs += count
    return sorted(chosen)
