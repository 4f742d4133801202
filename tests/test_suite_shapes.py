"""What the suite knows of an operator's arguments: hand-made calls, idle rows, meaningful pairs."""

import math

import pytest
import torch
from oracles import offsets_of

from jagbench.execution import run
from jagbench.reference import OPERATORS
from jagbench.suite import changes, shapes, zeros

ALL = pytest.mark.parametrize("operator", [n for n, o in OPERATORS.items() if o.offsets_arguments])


@ALL
def test_a_hand_made_call_of_every_operator_runs(operator):
    inputs = shapes.attention(operator, [5, 0, 9], [7, 2, 6], heads=4, kv_heads=2)
    outcome = run(inputs.operator.reference, inputs, backward=True)
    first = next(iter(outcome.values()))
    alike = inputs.tensors()["x"] if inputs.upstream is None else inputs.upstream
    assert first.shape == alike.shape
    assert inputs.num_sequences == 3


def test_key_lengths_are_for_operators_that_have_keys_of_their_own():
    assert shapes.attention("gdpa", [5], [7]).tensors()["k"].shape[0] == 7
    assert shapes.attention("block_attention", [5], [7]).tensors()["k"].shape[0] == 5
    assert [shapes.has_keys(o) for o in OPERATORS.values()] == [
        "k_offsets" in o.layout.values() for o in OPERATORS.values()
    ]


@ALL
def test_a_tiled_batch_repeats_sequences_and_no_shared_argument(operator):
    inputs = shapes.attention(operator, [5, 9])
    once, many = (
        run(i.operator.reference, i, backward=True) for i in (inputs, shapes.tiled(inputs, 3))
    )
    for name in once:
        if name == "grad weight":
            torch.testing.assert_close(many[name], 3 * once[name])
            continue
        copies = once[name].repeat(3, *[1] * (once[name].dim() - 1))
        # A product of other rows may round another way.
        torch.testing.assert_close(many[name], copies)


@ALL
def test_packed_arguments_are_those_of_values_with_rows(operator):
    inputs = shapes.attention(operator, [5])
    wanted = ("x",) if "x" in inputs.arguments else ("q", "k", "v")
    assert changes.packed(inputs) == wanted


def test_under_one_offsets_argument_only_padding_takes_part_in_nothing():
    inputs = changes.with_padding(shapes.attention("block_attention", [3, 0, 2]), 2, math.nan)
    assert zeros.takes_part(inputs)["offsets"].tolist() == [True] * 5 + [False] * 2
    outcome = dict(run(inputs.operator.reference, inputs, backward=True))
    assert zeros.strays(inputs, outcome) == zeros.of_padding(inputs, outcome) == []
    outcome["grad k"] = outcome["grad k"].clone()
    outcome["grad k"][6, 1, 0] = 0.5
    (found,) = zeros.strays(inputs, outcome)
    assert "grad k holds 0.5 in row 6" in found


def test_a_table_from_a_later_position_is_the_rest_of_the_table():
    whole = shapes.rotary_table(9, 8, torch.float16, "cpu")
    assert whole.dtype == torch.float32
    assert torch.equal(shapes.rotary_table(4, 8, torch.float16, "cpu", first=5), whole[5:])
    assert torch.equal(shapes.offsets([2, 3]), offsets_of([2, 3]))
