"""What the element type holds under the right scale passes a product of quantised operands exactly.

An eight-bit float is as precise under a scale that is twice too large, until its small numbers are
subnormal. Here every block holds the largest number of its type, where the product does not read
it, and odd multiples of the smallest: a scale one off, blocks across the wrong dim, or a step more
between codes and product change what comes out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.mx import ALONG_COLUMNS, SQUARE, AttentionRecipe, ElemDtype, LinearRecipe
from jagbench.reference import OPERATORS
from jagbench.reference.mx_formats import format_of
from jagbench.suite import shapes
from jagbench.suite.candidate import Candidate

TYPES = pytest.mark.parametrize("elem", ["e4m3", "e5m2", "e2m1"])


def _small(elem: ElemDtype, rows: int, columns: int, every: int = 1) -> Tensor:
    """Odd multiples of the smallest number, of either sign; other columns than one in `every` 0."""
    form = format_of(elem)
    step = 2.0 ** (form.smallest_exponent - form.mantissa_bits)
    index = torch.arange(rows)[:, None] * 5 + torch.arange(columns) * 3
    odd = 2 * (index % max(1, 2 ** (form.mantissa_bits - 1))) + 1
    signed = torch.where(index % 2 == 0, odd, -odd) * step
    kept = (torch.arange(rows)[:, None] + torch.arange(columns)) % every == every - 1
    return torch.where(kept, signed, 0.0)


def _run_linear(
    candidate: Candidate, recipe: LinearRecipe, x: Tensor, weight: Tensor, upstream: Tensor
) -> dict[str, Tensor]:
    settings = candidate.settings
    inputs = Inputs(
        OPERATORS["mx_linear"], {"x": x, "weight": weight}, {"recipe": recipe}, upstream
    )
    outcome = candidate.run(inputs.to(settings.main_dtype, settings.device), backward=True)
    return {name: value.double().cpu() for name, value in outcome.items()}


@pytest.mark.operator("mx_linear")
@TYPES
def test_a_linear_layer_of_representable_inputs_is_exact(
    candidate: Candidate, elem: ElemDtype
) -> None:
    """Peaks of x and dY, and then of the weight, stand against zeros of the other operand."""
    peak = format_of(elem).largest
    peaked, upstream = (_small(elem, 64, 64, every=16) for _ in range(2))
    peaked[:, ::32] = upstream[:, ::32] = peak
    ones = torch.ones(64, 64)
    ones[:, ::32] = ones[::32] = 0.0
    recipe = LinearRecipe(elem, elem)
    found = _run_linear(candidate, recipe, peaked, ones, upstream)
    assert torch.equal(found["out"], (peaked @ ones.T).double())
    assert torch.equal(found["grad x"], (upstream @ ones).double())
    for block in (SQUARE, ALONG_COLUMNS):
        weight = _small(elem, 64, 64, every=16)
        weight[:, ::32] = weight[::32] = peak
        recipe = LinearRecipe(elem, elem, weight_block=block)
        found = _run_linear(candidate, recipe, ones, weight, ones)
        wanted = (ones @ weight.T).double()
        assert torch.equal(found["out"][:, 1:32], wanted[:, 1:32])
        assert torch.equal(found["grad x"][:, 1:32], (ones @ weight).double()[:, 1:32])


@pytest.mark.operator("mx_linear")
@TYPES
def test_a_quantised_weight_gradient_of_representable_inputs_is_exact(
    candidate: Candidate, elem: ElemDtype
) -> None:
    """Peaks in one token of 32, in which the other operand is 0."""
    recipe = LinearRecipe(elem, elem, weight_gradient="mx", hadamard=None)
    peaked = _small(elem, 64, 64, every=16)
    peaked[::32] = format_of(elem).largest
    ones = torch.ones(64, 64)
    ones[::32] = 0.0
    weight = torch.ones(64, 64)
    found = _run_linear(candidate, recipe, peaked, weight, ones)
    assert torch.equal(found["grad weight"], (ones.T @ peaked).double())
    found = _run_linear(candidate, recipe, ones, weight, peaked)
    assert torch.equal(found["grad weight"], (peaked.T @ ones).double())


def _attention(candidate: Candidate, operator: str, elem: ElemDtype, **options: Any) -> Inputs:
    """Every query sees its own key alone."""
    settings = candidate.settings
    recipe = AttentionRecipe(elem, elem)
    return shapes.attention(
        operator, [64], heads=1, dim=32, dtype=settings.main_dtype, device=settings.device,
        window=(0, 0), recipe=recipe, **options,
    )  # fmt: skip


def _filled(like: Tensor, values: Tensor) -> Tensor:
    return values[:, None].to(like)


@pytest.mark.operator("mx_attention")
@TYPES
def test_attention_of_each_query_to_its_own_key_is_exact(
    candidate: Candidate, elem: ElemDtype
) -> None:
    """One weight, of 1: the output is V, the gradient of V is dO, the log-sum-exp is the score."""
    inputs = candidate.every_output(_attention(candidate, "mx_attention", elem, scale=1.0))
    t, peak = inputs.tensors(), format_of(elem).largest
    values = _small(elem, 64, 32)
    values[::32] = peak
    queries = _small(elem, 64, 32, every=16)
    queries[:, 0] = peak
    keys = torch.ones(64, 32)
    keys[:, 0] = 0.0
    for a, b in ((queries, keys), (keys, queries)):
        call = inputs.replace(q=_filled(t["q"], a), k=_filled(t["k"], b), v=_filled(t["v"], values))
        upstream = _filled(t["v"], values)
        call = dataclasses.replace(call, upstream=upstream)
        outcome = candidate.run(call, backward=True)
        assert torch.equal(outcome["out"], call.tensors()["v"])
        assert torch.equal(outcome["grad v"], upstream)
        if "lse" in outcome:
            score = (queries * keys).sum(1, keepdim=True).to(outcome["lse"])
            torch.testing.assert_close(outcome["lse"], score, rtol=1e-6, atol=1e-7)


@pytest.mark.operator("mx_gdpa")
@TYPES
def test_gdpa_of_each_query_to_its_own_key_is_exact(candidate: Candidate, elem: ElemDtype) -> None:
    """The identity of one score, itself the smallest numbers: the output, where V is 1."""
    inputs = _attention(candidate, "mx_gdpa", elem, activation="identity")
    t, peak = inputs.tensors(), format_of(elem).largest
    queries = _small(elem, 64, 32, every=32)
    score = queries.sum(1, keepdim=True).expand(64, 32)
    queries[:, 0] = torch.where(queries[:, 0] == 0, peak, queries[:, 0])
    keys, ones = torch.ones(64, 32), torch.ones(64, 32)
    score = torch.where(queries[:, :1] == peak, score, 0.0)
    keys[:, 0] = 0.0
    for a, b in ((queries, keys), (keys, queries)):
        call = inputs.replace(q=_filled(t["q"], a), k=_filled(t["k"], b), v=_filled(t["v"], ones))
        outcome = candidate.run(call)
        assert torch.equal(outcome["out"], _filled(t["v"], score))
    values = _small(elem, 64, 32)
    values[::32] = peak
    call = inputs.replace(q=torch.ones_like(t["q"]), k=torch.ones_like(t["k"]) / 32)
    call = call.replace(v=_filled(t["v"], values))
    upstream = _filled(t["v"], values)
    call = dataclasses.replace(call, upstream=upstream)
    outcome = candidate.run(call, backward=True)
    assert torch.equal(outcome["out"], call.tensors()["v"])
    assert torch.equal(outcome["grad v"], upstream)
