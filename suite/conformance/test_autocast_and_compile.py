"""Inside torch's own machinery: autocast, checkpointing, compilation, fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from jagbench.execution import Outcome, run
from jagbench.inputs import Inputs
from jagbench.spec import Operator
from jagbench.suite import changes, shapes
from jagbench.suite.candidate import Candidate, differing, repeatable

Check = Callable[[Inputs, Outcome], None]
LOW = torch.bfloat16


def _draw(candidate: Candidate, operator: Operator, dtype: torch.dtype, **options: Any) -> Inputs:
    device = candidate.settings.device
    return shapes.attention(
        operator, [21, 0, 9], [14, 3, 30], dtype=dtype, device=device, **options
    )


def _autocast(candidate: Candidate) -> torch.autocast:
    return torch.autocast(candidate.settings.device.type, dtype=LOW)


@pytest.mark.quantised
@pytest.mark.differentiable
def test_autocast_keeps_low_precision_results(
    candidate: Candidate, operator: Operator, check: Check
) -> None:
    """Arguments that are in the low precision already mean what they mean without autocast."""
    inputs = _draw(candidate, operator, LOW)
    with _autocast(candidate):
        outcome = candidate.run(inputs, backward=True)
    assert outcome["out"].dtype == LOW
    check(inputs, outcome)


@pytest.mark.quantised
@pytest.mark.differentiable
def test_autocast_returns_gradients_in_each_input_dtype(
    candidate: Candidate, operator: Operator, check: Check
) -> None:
    """float32 arguments under autocast: gradients float32, right as in the low precision.

    The backward of a custom function once ran in another dtype (pytorch 87979).
    """
    inputs = _draw(candidate, operator, LOW)
    with _autocast(candidate):
        outcome = candidate.run(inputs.to(torch.float32), backward=True)
    for name, tensor in outcome.items():
        if name.startswith("grad "):
            assert tensor.dtype == torch.float32, name
    check(inputs, {name: tensor.to(LOW) for name, tensor in outcome.items()})


@pytest.mark.differentiable
def test_checkpointing_under_autocast_gives_the_same_gradients(
    candidate: Candidate, operator: Operator
) -> None:
    """A recompute under autocast gave other metadata than the first run (pytorch 141896)."""
    inputs = repeatable(_draw(candidate, operator, torch.float32, v_dim=32))
    function = candidate.settings.implementation.get(operator.name)
    names = changes.packed(inputs)
    weight = torch.linspace(-0.4, 0.6, 32 * 32, device=inputs.device).reshape(32, 32)

    def block(*leaves: Tensor) -> Tensor:
        # The same weight twice where there are two to project: autocast caches its cast.
        values = dict(zip(names, leaves, strict=False))
        for name in names[: max(1, len(names) - 1)]:
            values[name] = (values[name] @ leaves[-1]).to(values[name].dtype)
        return inputs.replace(**values).call(function)  # type: ignore[no-any-return]

    assert inputs.upstream is not None
    upstream = inputs.upstream

    def gradients(wrapped: bool) -> dict[str, Tensor]:
        t = inputs.tensors()
        leaves = [t[n].clone().requires_grad_() for n in names]
        leaves.append(weight.clone().requires_grad_())
        with _autocast(candidate):
            out = checkpoint(block, *leaves, use_reentrant=False) if wrapped else block(*leaves)
            loss = (out.float() * upstream).sum()
        found = torch.autograd.grad(loss, leaves)
        return dict(zip([f"grad {n}" for n in (*names, "weight")], found, strict=True))

    assert not differing(gradients(False), gradients(True))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile without what earlier tests left, and leaving nothing."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_results_are_within_budget(
    candidate: Candidate, operator: Operator, check: Check
) -> None:
    """torch.compile, with or without graph breaks, leaves outputs and gradients right.

    On a second shape too: what the compiler took for constant must not be.
    """
    function = candidate.settings.implementation.get(operator.name)
    # The eager backend traces everything, where custom ops break, and needs no C compiler.
    compiled = torch.compile(function, backend="aot_eager")
    for lengths in ([21, 0, 9], [5, 33]):
        inputs = shapes.attention(
            operator,
            lengths,
            dtype=candidate.settings.main_dtype,
            device=candidate.settings.device,
        )
        check(inputs, run(compiled, inputs.clone(), backward=True))


@pytest.mark.quantised
@pytest.mark.operators_with("recipe")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_operator_that_quantises_is_within_budget(
    candidate: Candidate, operator: Operator, check: Check
) -> None:
    """As above, on one sequence and one shape: a truth that quantises is long to trace."""
    function = candidate.settings.implementation.get(operator.name)
    compiled = torch.compile(function, backend="aot_eager", dynamic=False)
    settings = candidate.settings
    inputs = shapes.attention(
        operator, [33], heads=1, dtype=settings.main_dtype, device=settings.device
    )
    check(inputs, run(compiled, inputs.clone(), backward=True))


@pytest.mark.quantised
def test_fake_tensors_have_the_strides_of_real_ones(
    candidate: Candidate, operator: Operator
) -> None:
    """dv was allocated like k when traced, like v when run (pytorch 119500)."""
    inputs = _draw(candidate, operator, candidate.settings.main_dtype, heads=4, kv_heads=2)
    inputs = changes.floats(inputs, changes.transposed, names=changes.packed(inputs)[::2])
    function = candidate.settings.implementation.get(operator.name)
    real = run(function, inputs, backward=True)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = inputs.map(lambda _, t: mode.from_tensor(t))
        try:
            fake = run(function, fakes, backward=True)
        except Exception as error:
            if not _reads_values(error):
                raise
            pytest.skip(f"cannot be traced: it reads values of tensors ({type(error).__name__})")
    for name, tensor in real.items():
        traced = fake[name]
        found = (tuple(traced.shape), traced.dtype, traced.device.type, traced.stride())
        expected = (tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.stride())
        assert found == expected, f"{name} is {found} traced, {expected} run"


def _reads_values(error: BaseException) -> bool:
    """Whether tracing stopped because the function looked into a tensor."""
    kinds = (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "GuardOnDataDependentSymNode",
    )
    return any(type(e).__name__ in kinds for e in (error, error.__cause__, error.__context__) if e)
