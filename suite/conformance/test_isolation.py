"""What lies beside a sequence, behind it, or in recycled memory, changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from jagbench.execution import Outcome
from jagbench.inputs import Inputs
from jagbench.spec import SHARED, Operator
from jagbench.suite import changes, shapes
from jagbench.suite.candidate import (
    Candidate,
    changed,
    differing,
    repeatable,
    same_values,
)
from jagbench.suite.cases import Case

Change = Callable[[Tensor], Tensor]
Check = Callable[[Inputs, Outcome], None]


def _inputs(candidate: Candidate, case: Case) -> Inputs:
    return repeatable(candidate.every_output(case.inputs(candidate.settings.device)))


def _others(inputs: Inputs, outcome: Outcome, sequence: int) -> Outcome:
    """What an outcome holds of all sequences but one; sums over sequences are left out."""
    rest = [s for s in range(inputs.num_sequences) if s != sequence]
    cut = {}
    for name, tensor in outcome.items():
        argument = name.removeprefix("grad ")
        is_sum = name.startswith("grad ") and changes.layout_of(inputs, argument) == SHARED
        if not is_sum:
            cut[name] = inputs.cut_output(argument, tensor, rest)
    return cut


def _sequences(inputs: Inputs) -> Iterator[int]:
    """The first and the last sequence that have both queries and keys."""
    counts = [b - a for a, b in zip(inputs.pair_bounds(), inputs.pair_bounds()[1:], strict=False)]
    busy = [s for s, count in enumerate(counts) if count]
    yield from dict.fromkeys((busy[0], busy[-1]))


@pytest.mark.quantised
@pytest.mark.cases(limit=2)
def test_nan_in_one_sequence_leaves_the_others_bit_unchanged(
    candidate: Candidate, case: Case
) -> None:
    """NaN in every argument of one sequence reaches no output or gradient of another."""
    inputs = _inputs(candidate, case)
    clean = candidate.run(inputs, backward=True)
    for sequence in _sequences(inputs):
        poisoned = changes.in_sequence(inputs, sequence, lambda x: torch.full_like(x, math.nan))
        outcome = candidate.run(poisoned, backward=True)
        found = differing(_others(inputs, clean, sequence), _others(inputs, outcome, sequence))
        assert not found, f"NaN in sequence {sequence} changed other sequences' {'; '.join(found)}"


@pytest.mark.cases(limit=1)
def test_a_sequence_does_not_depend_on_its_neighbours(candidate: Candidate, case: Case) -> None:
    """Other values beside a sequence leave its output and gradients bit-equal."""
    inputs = _inputs(candidate, case)
    clean = candidate.run(inputs, backward=True)
    for sequence in _sequences(inputs):
        loud = changes.in_sequence(inputs, sequence, lambda x: 6 * x.flip(0) + 1)
        outcome = candidate.run(loud, backward=True)
        found = differing(_others(inputs, clean, sequence), _others(inputs, outcome, sequence))
        assert not found, f"values of sequence {sequence} changed others' {'; '.join(found)}"


@pytest.mark.quantised
@pytest.mark.cases(limit=2)
def test_nan_past_the_last_offset_changes_nothing(candidate: Candidate, case: Case) -> None:
    """Padding rows full of NaN or of 0 give the same bits, and 0 on themselves."""
    inputs = _inputs(candidate, case)
    zero = candidate.run(changes.with_padding(inputs, 5, 0.0), backward=True)
    nan = candidate.run(changes.with_padding(inputs, 5, math.nan), backward=True)
    assert not differing(zero, nan)
    assert not [n for n, t in nan.items() if torch.isnan(t).any()]


@pytest.mark.cases(limit=2)
def test_recycled_memory_full_of_nan_changes_nothing(
    candidate: Candidate,
    case: Case,
    nan_memory: Callable[[Inputs], AbstractContextManager[None]],
) -> None:
    """No result holds what was in memory before it: padded and blind rows are written too."""
    inputs = changes.with_padding(_inputs(candidate, case), 3, 1.0)
    clean = candidate.run(inputs, backward=True)
    with nan_memory(inputs):
        again = candidate.run(inputs, backward=True)
    assert not differing(clean, again)


@pytest.mark.quantised
@pytest.mark.cases(limit=2)
def test_inputs_are_unchanged_bit_for_bit(candidate: Candidate, case: Case) -> None:
    """Neither forward nor backward writes to an argument or to the upstream gradient."""
    inputs = changes.with_padding(_inputs(candidate, case), 2, math.nan)
    given = inputs.clone()
    candidate.run_in_place(given, backward=True)
    written = changed(inputs, given)
    assert not written, f"the implementation wrote to {', '.join(written)}"


@pytest.mark.cases(limit=1)
def test_outputs_share_no_memory_with_inputs_or_earlier_outputs(
    candidate: Candidate, case: Case
) -> None:
    """A later call with other values leaves the results of an earlier one alone."""
    inputs = _inputs(candidate, case).clone()
    first = candidate.run_in_place(inputs, backward=True)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    other = changes.floats(inputs, lambda x: 0.5 - x)
    second = candidate.run_in_place(other, backward=True)
    assert not differing(kept, first), "a later call changed the results of an earlier one"
    theirs = [*inputs.tensors().values(), inputs.upstream, *first.values()]
    storages = {t.untyped_storage().data_ptr() for t in theirs if t is not None and t.numel()}
    shared = [
        n for n, t in second.items() if t.numel() and t.untyped_storage().data_ptr() in storages
    ]
    assert not shared, f"{shared} of a call lie in memory that belongs to something else"


@pytest.mark.cases(limit=1)
def test_what_follows_the_offsets_in_memory_is_not_read(candidate: Candidate, case: Case) -> None:
    """Offsets that are a slice of a longer tensor, with huge values behind, say the same."""
    inputs = _inputs(candidate, case)
    names = case.operator.offsets_arguments
    longer = inputs.map(lambda n, t: changes.behind(t) if n in names else t)
    result = candidate.run_in_place(longer, backward=True)
    assert not differing(candidate.run(inputs, backward=True), result)


@pytest.mark.cases(limit=1)
def test_offsets_that_are_not_contiguous_say_the_same(candidate: Candidate, case: Case) -> None:
    """Offsets that are a column of a matrix mean what their contiguous copies mean."""
    inputs = _inputs(candidate, case)
    names = case.operator.offsets_arguments
    odd = inputs.map(lambda n, t: changes.column(t) if n in names else t)
    result = candidate.run_in_place(odd, backward=True)
    assert not differing(candidate.run(inputs, backward=True), result)


def test_offsets_changed_in_place_are_followed(
    candidate: Candidate, operator: Operator, check: Check
) -> None:
    """Nothing that was worked out for the offsets outlives the values they had then."""
    settings = candidate.settings
    inputs = shapes.attention(
        operator, [3, 0, 20], [30, 5, 7], dtype=settings.main_dtype, device=settings.device
    )
    candidate.run_in_place(inputs, backward=True)
    for name in operator.offsets_arguments:
        offsets = inputs.tensors()[name]
        offsets.copy_(offsets[-1] - offsets.flip(0))
    check(inputs, candidate.run_in_place(inputs, backward=True))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided"])
@pytest.mark.cases(limit=1)
def test_strided_inputs_give_the_same_result(
    candidate: Candidate, case: Case, layout: str, check: Check
) -> None:
    """Arguments that are not contiguous mean what their contiguous copies mean."""
    inputs = _inputs(candidate, case)
    change: Change = getattr(changes, layout)
    names = [n for n in inputs.tensors() if n in case.operator.layout]
    odd = changes.floats(inputs, change, names=names)
    check(inputs, candidate.run_in_place(odd, backward=True))


@pytest.mark.operators_with("q", "k", "v")
def test_views_of_one_packed_tensor_give_the_same_result(
    candidate: Candidate, operator: Operator, check: Check
) -> None:
    """q, k and v as views of one [total, 3, heads, dim], its gradient in one piece too.

    The backward of packed arguments had never run (flash-attention 569).
    """
    settings = candidate.settings
    inputs = shapes.attention(
        operator, [21, 0, 70], dtype=settings.main_dtype, device=settings.device
    )
    t, function = inputs.tensors(), settings.implementation.get(operator.name)
    leaf = torch.stack([t[n] for n in "qkv"], 1).requires_grad_()
    views = dict(zip("qkv", leaf.unbind(1), strict=True))
    result = inputs.replace(**views).call(function)
    out = result[0] if isinstance(result, tuple) else result
    (gradient,) = torch.autograd.grad(out, leaf, inputs.upstream)
    found = {f"grad {n}": g for n, g in zip("qkv", gradient.unbind(1), strict=True)}
    check(inputs, {"out": out.detach(), **found})


@pytest.mark.cases(limit=1)
def test_expanded_inputs_give_the_same_result(
    candidate: Candidate, case: Case, check: Check
) -> None:
    """One head expanded over all heads (stride 0) means what its copy means."""
    inputs = _inputs(candidate, case)
    inputs = changes.floats(inputs, changes.expanded, names=changes.packed(inputs))
    check(inputs.map(lambda _, t: t.contiguous()), candidate.run_in_place(inputs, backward=True))


@pytest.mark.differentiable
@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "expanded"])
@pytest.mark.cases(limit=1)
def test_strided_upstream_gradients_give_the_same_gradients(
    candidate: Candidate, case: Case, layout: str, check: Check
) -> None:
    """An upstream gradient by transpose, slice, stride or expand means what its copy means."""
    change: Change = getattr(changes, layout)
    odd = changes.floats(_inputs(candidate, case), change, names=("upstream",))
    check(odd.map(lambda _, t: t.contiguous()), candidate.run_in_place(odd, backward=True))


def _busy() -> None:
    """Keep the current stream busy for about 0.1 s, longer than any launch takes."""
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]


@pytest.mark.needs_gpu("a CPU has no streams")
@pytest.mark.cases(limit=3)
def test_work_on_a_side_stream_is_ordered(candidate: Candidate, case: Case) -> None:
    """On the caller's stream: after what filled the inputs, before what reads the outputs."""
    inputs = _inputs(candidate, case)
    expected = candidate.run(inputs, backward=True)
    late = changes.floats(inputs, lambda x: torch.full_like(x, math.nan))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        _busy()
        sources = {**inputs.tensors(), "upstream": inputs.upstream}
        late.map(lambda n, t: t.copy_(sources[n]) if t.is_floating_point() else t)  # type: ignore[arg-type]
        outcome = candidate.run_in_place(late, backward=True)
        copies = {name: tensor.clone() for name, tensor in outcome.items()}
    stream.synchronize()
    assert not differing(expected, copies)
    assert all(same_values(outcome[n], copies[n]) for n in copies), "written after the stream's end"
