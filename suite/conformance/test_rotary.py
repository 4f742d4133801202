"""Rotary embedding: what a rotation keeps, undoes and leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.reference import rotary
from jagbench.rotary import TokenTable
from jagbench.suite import changes, shapes
from jagbench.suite.candidate import Candidate
from jagbench.suite.identities import broken, naive_of, truth_of

pytestmark = pytest.mark.operator("rotary")

FORMS = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half-split"])


def _draw(candidate: Candidate, *lengths: int, turned: int = 32, **options: Any) -> Inputs:
    """A call whose table turns the first `turned` of 32 elements of a head."""
    settings = candidate.settings
    dtype, device = settings.main_dtype, settings.device
    inputs = shapes.attention("rotary", lengths, dtype=dtype, device=device, **options)
    return inputs.replace(table=shapes.rotary_table(max(lengths), turned, dtype, device))


def _of_known_angle(candidate: Candidate, x: list[float], **options: Any) -> list[float]:
    """One token of one head under the angle whose sine is 0.6 and cosine 0.8."""
    settings = candidate.settings
    inputs = shapes.attention("rotary", [1], heads=1, dim=len(x), device=settings.device, **options)
    half = len(x) // 2
    values = torch.tensor(x, device=settings.device)
    table = torch.tensor([[0.6] * half + [0.8] * half], device=settings.device)
    out = candidate.run(inputs.replace(x=values[None, None], table=table))["out"]
    return [round(value, 6) for value in out.flatten().tolist()]


def test_sines_come_first_and_pairs_are_turned_counter_clockwise(candidate: Candidate) -> None:
    """(1, 0) goes to (cos, sin) and (0, 1) to (-sin, cos)."""
    assert _of_known_angle(candidate, [1.0, 0.0]) == [0.8, 0.6]
    assert _of_known_angle(candidate, [0.0, 1.0]) == [-0.6, 0.8]
    assert _of_known_angle(candidate, [1.0, 0.0], inverse=True) == [0.8, -0.6]


def test_pairs_are_neighbours_or_halves_apart(candidate: Candidate) -> None:
    """The first element is paired with the second, or with the first of the second half."""
    x = [1.0, 0.0, 0.0, 0.0]
    assert _of_known_angle(candidate, x) == [0.8, 0.6, 0.0, 0.0]
    assert _of_known_angle(candidate, x, interleaved=False) == [0.8, 0.0, 0.6, 0.0]


@FORMS
@pytest.mark.parametrize("turned", [32, 12])
def test_norms_are_kept(candidate: Candidate, interleaved: bool, turned: int) -> None:
    """Every head keeps its length, and its gradient keeps that of the upstream gradient."""
    inputs = _draw(candidate, 70, 0, 9, turned=turned, interleaved=interleaved)
    outcome = candidate.run(inputs, backward=True)
    assert inputs.upstream is not None
    for after, before in (
        (outcome["out"], inputs.tensors()["x"]),
        (outcome["grad x"], inputs.upstream),
    ):
        ratio = after.double().norm(dim=-1) / before.double().norm(dim=-1)
        worst = float((ratio - 1).abs().max())
        assert worst <= 2 * torch.finfo(inputs.dtype).eps, f"a norm changed by {worst:.3g}"


@FORMS
@pytest.mark.parametrize("turned", [32, 12])
def test_the_inverse_undoes_a_rotation(
    candidate: Candidate, interleaved: bool, turned: int
) -> None:
    """Forth and back is the identity, but for two roundings."""
    inputs = _draw(candidate, 70, 0, 9, turned=turned, interleaved=interleaved)
    there = candidate.run(inputs)["out"]
    back = candidate.run(inputs.replace(x=there).with_options(inverse=True))["out"].double()
    x = inputs.tensors()["x"].double()
    error = float(((back - x).norm(dim=-1) / x.norm(dim=-1)).max())
    assert error <= 2 * torch.finfo(inputs.dtype).eps, f"off by {error:.3g} after there and back"


@FORMS
def test_the_gradient_is_the_upstream_gradient_turned_back(
    candidate: Candidate, interleaved: bool
) -> None:
    """The backward is the rotation by the negative angle (flash-attention 569)."""
    inputs = _draw(candidate, 70, 0, 9, interleaved=interleaved)
    wide = inputs.to(torch.float64)
    assert wide.upstream is not None
    turned_back = wide.replace(x=wide.upstream).with_options(inverse=True)
    truth = {"grad x": turned_back.call(rotary)}
    found = broken(inputs, candidate.run(inputs, backward=True), truth, naive_of(inputs))
    assert not found, "; ".join(found)


@FORMS
def test_scores_depend_on_the_difference_of_positions_alone(
    candidate: Candidate, interleaved: bool
) -> None:
    """The same query and key at every position: one score for each difference."""
    inputs = _draw(candidate, 90, heads=2, interleaved=interleaved)
    same = changes.floats(inputs, lambda x: x[:1].expand(90, -1, -1).contiguous(), names=("x",))
    q, k = candidate.run(same)["out"].double().unbind(1)
    scores = q @ k.mT
    size = float(q[0].norm() * k[0].norm())
    for shift in (-89, -64, -33, -1, 0, 1, 17, 63, 64, 88):
        spread = float(scores.diagonal(shift).max() - scores.diagonal(shift).min())
        assert spread <= 4 * torch.finfo(inputs.dtype).eps * size, f"difference {shift}: {spread}"
    assert float((scores - scores.mT).abs().max()) > 0.01 * size, "a rotation has a sense"


@pytest.mark.parametrize("before", [1, 32, 65])
def test_positions_are_counted_from_the_start_of_each_sequence(
    candidate: Candidate, before: int
) -> None:
    """What a sequence gives does not hang on where in the buffer it starts."""
    inputs = _draw(candidate, before, 70)
    alone = inputs.select([1])
    outcome = candidate.run(inputs, backward=True)
    rows = {n: x[before:] for n, x in outcome.items()}
    found = broken(alone, rows, truth_of(alone), naive_of(alone))
    assert not found, "; ".join(found)


def test_the_half_split_form_is_the_interleaved_form_of_permuted_elements(
    candidate: Candidate,
) -> None:
    """The two forms differ by the order of elements and nothing else."""
    inputs = _draw(candidate, 70, 9)
    order = torch.arange(32, device=inputs.device).reshape(2, 16).T.flatten()

    def permuted(x: Tensor) -> Tensor:
        return x[..., order].contiguous()

    truth = {n: permuted(x) for n, x in truth_of(inputs.with_options(interleaved=False)).items()}
    other = changes.floats(inputs, permuted, names=("x", "upstream"))
    found = broken(other, candidate.run(other, backward=True), truth, naive_of(other))
    assert not found, "; ".join(found)


@FORMS
def test_elements_beyond_the_table_pass_through_unchanged(
    candidate: Candidate, interleaved: bool
) -> None:
    """A partial rotary_dim leaves the bits of the other elements, and of their gradients."""
    inputs = _draw(candidate, 70, 9, turned=12, interleaved=interleaved)
    outcome = candidate.run(inputs, backward=True)
    assert inputs.upstream is not None
    assert torch.equal(outcome["out"][..., 12:], inputs.tensors()["x"][..., 12:])
    assert torch.equal(outcome["grad x"][..., 12:], inputs.upstream[..., 12:])


def test_an_angle_of_zero_changes_no_bit(candidate: Candidate) -> None:
    """Position 0 of every sequence stays as it is."""
    inputs = _draw(candidate, 70, 1, 9)
    outcome = candidate.run(inputs, backward=True)
    assert inputs.upstream is not None
    for row in (0, 70, 71):
        assert torch.equal(outcome["out"][row], inputs.tensors()["x"][row])
        assert torch.equal(outcome["grad x"][row], inputs.upstream[row])


def test_a_table_by_token_of_positions_is_the_table_by_position(candidate: Candidate) -> None:
    """One row a token: the same angles, given the other way."""
    inputs = _draw(candidate, 9, 0, 70)
    table = inputs.tensors()["table"]
    by_token = inputs.replace(table=TokenTable(torch.cat([table[:9], table[:70]])))
    found = broken(by_token, candidate.run(by_token, backward=True), truth_of(inputs),
                   naive_of(by_token))  # fmt: skip
    assert not found, "; ".join(found)
