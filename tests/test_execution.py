import dataclasses

import pytest
import torch
from oracles import Case, call_of

from jagbench.execution import gradient_name, run
from jagbench.reference import jagged_attention


@pytest.fixture
def inputs():
    return call_of(Case([2, 3], [3, 1], bias="bucketed"), "jagged_attention")


def test_outputs_are_named_in_order(inputs):
    assert list(run(jagged_attention, inputs)) == ["out"]
    assert list(run(jagged_attention, inputs.with_options(return_lse=True))) == ["out", "lse"]


def test_every_differentiable_argument_that_is_given_has_a_gradient(inputs):
    found = run(jagged_attention, inputs, backward=True)
    assert list(found) == ["out", "grad q", "grad k", "grad v", "grad bias.table"]
    for name in ("q", "k", "v", "bias.table"):
        assert found[gradient_name(name)].shape == inputs.tensors()[name].shape
        assert not found[gradient_name(name)].requires_grad


def test_the_callers_tensors_never_require_a_gradient(inputs):
    run(jagged_attention, inputs, backward=True)
    assert not any(t.requires_grad or t.grad is not None for t in inputs.tensors().values())


def test_a_function_that_writes_its_inputs_writes_the_callers(inputs):
    def vandal(q, *rest, **options):
        with torch.no_grad():
            q.zero_()
        return jagged_attention(q, *rest, **options)

    run(vandal, inputs)
    assert (inputs.arguments["q"] == 0).all()


def test_arguments_that_the_output_does_not_use_have_zero_gradient(inputs):
    def only_values(q, k, v, q_offsets, k_offsets, **options):
        return torch.zeros(5, 1, 4, dtype=v.dtype) + v.sum()

    found = run(only_values, inputs, backward=True)
    assert (found["grad q"] == 0).all()
    assert found["grad q"].shape == inputs.arguments["q"].shape
    torch.testing.assert_close(
        found["grad v"], inputs.upstream.sum().expand_as(inputs.arguments["v"])
    )


def test_an_output_without_a_graph_is_an_error(inputs):
    def detached(*arguments, **options):
        return jagged_attention(*arguments, **options).detach()

    with pytest.raises(RuntimeError, match="cut off"):
        run(detached, inputs, backward=True)


def test_a_backward_needs_an_upstream_gradient(inputs):
    bare = dataclasses.replace(inputs, upstream=None)
    assert list(run(jagged_attention, bare)) == ["out"]
    with pytest.raises(ValueError, match="no upstream"):
        run(jagged_attention, bare, backward=True)
