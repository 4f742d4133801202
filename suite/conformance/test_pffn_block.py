"""The PFFN block: what its two norms and two residuals make of a GDPA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from jagbench.execution import Outcome
from jagbench.inputs import Inputs
from jagbench.reference import gdpa
from jagbench.suite import changes, shapes
from jagbench.suite.candidate import Candidate
from jagbench.suite.identities import broken, naive_of, truth_of

Check = Callable[[Inputs, Outcome], None]

pytestmark = pytest.mark.operator("pffn_block")


def _draw(
    candidate: Candidate, q: Sequence[int] = (20, 9), k: Sequence[int] = (31, 12), **options: Any
) -> Inputs:
    settings = candidate.settings
    options = {"heads": 4, "kv_heads": 2, "pre_scale": 0.2, "eps": 1e-5, **options}
    return shapes.attention(
        "pffn_block", q, k, dtype=settings.main_dtype, device=settings.device, **options
    )


def _holds(candidate: Candidate, inputs: Inputs, truth: Mapping[str, Tensor]) -> None:
    """The implementation on `inputs` gives `truth`."""
    __tracebackhide__ = True
    found = broken(inputs, candidate.run(inputs, backward=True), truth, naive_of(inputs))
    if found:
        pytest.fail("the identity does not hold: " + "; ".join(found), pytrace=False)


def _beside(inputs: Inputs, out: Tensor) -> Tensor:
    """The output without its last residual, float64 `[rows, heads * head_dim]`."""
    return (out.double() - inputs.tensors()["q"].double()).flatten(1)


def test_it_is_a_gdpa_between_the_norms_of_torch(candidate: Candidate) -> None:
    """LayerNorm over all heads together, GDPA and a residual, RMSNorm and a residual."""
    inputs = _draw(candidate, activation="gelu", eps=1e-3)
    wide = inputs.to(torch.float64)
    wide = wide.map(lambda _, t: t.requires_grad_() if t.is_floating_point() else t)
    t = wide.tensors()
    q, shape = t["q"], (4 * 32,)
    ln = functional.layer_norm(q.flatten(1), shape, eps=1e-3).view_as(q)
    offsets = t["q_offsets"], t["k_offsets"]
    inner = gdpa(ln, t["k"], t["v"], *offsets, activation="gelu", pre_scale=0.2) + ln
    out = functional.rms_norm(inner.flatten(1), shape, eps=1e-3).view_as(q) + q
    gradients = torch.autograd.grad(out, [t[n] for n in "qkv"], wide.upstream)
    truth = {"out": out.detach()}
    truth |= {f"grad {n}": g for n, g in zip("qkv", gradients, strict=True)}
    _holds(candidate, inputs, truth)


def test_beside_its_residual_every_row_has_unit_size_over_all_heads(candidate: Candidate) -> None:
    """RMSNorm with eps 0: the mean square over the features of all heads together is 1."""
    inputs = _draw(candidate, eps=0.0)
    out = candidate.run(inputs)["out"]
    square = _beside(inputs, out).square().mean(1)
    # What was added to q and taken off again was rounded in between.
    assert float((square - 1).abs().max()) <= 16 * torch.finfo(inputs.dtype).eps
    by_head = (out.double() - inputs.tensors()["q"].double()).square().mean(2)
    assert float((by_head - 1).abs().max()) > 0.01, "each head has its own norm"


@pytest.mark.parametrize("factor", [8.0, 0.25])
def test_beside_its_residual_a_factor_of_the_queries_changes_nothing(
    candidate: Candidate, factor: float
) -> None:
    """LayerNorm comes first: with no eps a longer query is the same query to all that follows."""
    inputs = _draw(candidate, eps=0.0)
    louder = changes.floats(inputs, lambda x: x * factor, names=("q",))
    truth = truth_of(inputs)
    queries = inputs.tensors()["q"].double()
    through = truth["grad q"] - inputs.upstream.double()  # type: ignore[union-attr]
    truth["out"] = truth["out"] - queries + factor * queries
    truth["grad q"] = through / factor + inputs.upstream.double()  # type: ignore[union-attr]
    _holds(candidate, louder, truth)


def test_a_query_without_keys_is_normalised_all_the_same(
    candidate: Candidate, check: Check
) -> None:
    """RMSNorm of LayerNorm, which is LayerNorm, and the residual."""
    inputs = _draw(candidate, (7, 5), (0, 9), eps=1e-5)
    outcome = candidate.run(inputs, backward=True)
    alone = _beside(inputs, outcome["out"])[:7]
    rows = inputs.tensors()["q"].double().flatten(1)[:7]
    expected = functional.layer_norm(rows, rows.shape[1:], eps=1e-5)
    allowed = 16 * torch.finfo(inputs.dtype).eps * float(expected.abs().max())
    assert float((alone - expected).abs().max()) <= allowed + 2e-5
    check(inputs, outcome)


def test_without_an_upstream_gradient_on_a_row_its_query_has_none(candidate: Candidate) -> None:
    """Residuals and norms stay within a row; keys and values alone gather over rows."""
    inputs = _draw(candidate)
    rows = torch.arange(29, device=inputs.device) % 3 == 0
    some = changes.floats(
        inputs, lambda x: torch.where(rows[:, None, None], x, 0.0), names=("upstream",)
    )
    gradient = candidate.run(some, backward=True)["grad q"]
    assert (gradient[~rows] == 0).all()
    assert (gradient[rows] != 0).any(2).any(1).all()


def test_an_upstream_gradient_along_the_normalised_row_passes_the_residual_alone(
    candidate: Candidate,
) -> None:
    """RMSNorm has no gradient along what it gives: q receives the upstream gradient as it is."""
    inputs = _draw(candidate, eps=0.0)
    truth = truth_of(inputs)
    along = (truth["out"] - inputs.tensors()["q"].double()).to(inputs.dtype)
    found = candidate.run(
        changes.floats(inputs, lambda _: along, names=("upstream",)), backward=True
    )
    eps = torch.finfo(inputs.dtype).eps
    error = float((found["grad q"].double() - along.double()).norm() / along.double().norm())
    assert error <= 64 * eps, f"{error:.3g} of the gradient came through the norms"
