"""Wrong PFFN blocks."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from wrong import sandwich
from wrong.right import RIGHT
from wrong.sandwich import unit


def _by_head(q: Tensor, eps: float) -> Tensor:
    return unit(q - q.mean(2, keepdim=True), eps, (2,))


#: LayerNorm is taken of every head for itself.
enters_by_head = replace(RIGHT, enter=_by_head)


def _uncentred(q: Tensor, eps: float) -> Tensor:
    return unit(q, eps)


#: The first norm is an RMSNorm.
never_centres = replace(RIGHT, enter=_uncentred)


def _as_given(q: Tensor, inside: Tensor) -> Tensor:
    return q


#: The attention sees the queries before the norm.
attends_to_raw_queries = replace(RIGHT, attend_to=_as_given)


def _no_inner(attended: Tensor, inside: Tensor, q: Tensor, eps: float) -> Tensor:
    return unit(attended, eps) + q


#: The inner residual is forgotten.
forgets_the_inner_residual = replace(RIGHT, leave=_no_inner)


def _raw_inner(attended: Tensor, inside: Tensor, q: Tensor, eps: float) -> Tensor:
    return unit(attended + q, eps) + q


#: The inner residual is the query before its norm.
adds_raw_queries_inside = replace(RIGHT, leave=_raw_inner)


def _no_outer(attended: Tensor, inside: Tensor, q: Tensor, eps: float) -> Tensor:
    return unit(attended + inside, eps)


#: The outer residual is forgotten.
forgets_the_outer_residual = replace(RIGHT, leave=_no_outer)


def _normed_outer(attended: Tensor, inside: Tensor, q: Tensor, eps: float) -> Tensor:
    return unit(attended + inside, eps) + inside


#: The outer residual is the normalised query.
adds_normalised_queries_outside = replace(RIGHT, leave=_normed_outer)


def _late(attended: Tensor, inside: Tensor, q: Tensor, eps: float) -> Tensor:
    return unit(attended + inside + q, eps)


#: The second norm is taken after the outer residual (post-norm).
normalises_after_both_residuals = replace(RIGHT, leave=_late)


def _leaves_by_head(attended: Tensor, inside: Tensor, q: Tensor, eps: float) -> Tensor:
    return unit(attended + inside, eps, (2,)) + q


#: RMSNorm is taken of every head for itself.
leaves_by_head = replace(RIGHT, leave=_leaves_by_head)


def _twice_layer(attended: Tensor, inside: Tensor, q: Tensor, eps: float) -> Tensor:
    return sandwich.enter(attended + inside, eps) + q


#: The second norm is a LayerNorm.
centres_twice = replace(RIGHT, leave=_twice_layer)


def _constant_inside(attended: Tensor, inside: Tensor, q: Tensor, eps: float) -> Tensor:
    return unit(attended + inside.detach(), eps) + q


#: The gradient of the inner residual is lost.
inner_residual_has_no_gradient = replace(RIGHT, leave=_constant_inside)


def _constant_outside(attended: Tensor, inside: Tensor, q: Tensor, eps: float) -> Tensor:
    return unit(attended + inside, eps) + q.detach()


#: The gradient of the outer residual is lost.
outer_residual_has_no_gradient = replace(RIGHT, leave=_constant_outside)


def _constant_statistics(attended: Tensor, inside: Tensor, q: Tensor, eps: float) -> Tensor:
    inner = attended + inside
    factor = (inner.detach().square().mean((1, 2), keepdim=True) + eps) ** -0.5
    return inner * factor + q


#: The second norm's factor is taken for a constant in the backward.
second_norm_has_no_backward = replace(RIGHT, leave=_constant_statistics)


def _eps_of_the_first_alone(attended: Tensor, inside: Tensor, q: Tensor, eps: float) -> Tensor:
    return unit(attended + inside, 0.0) + q


#: eps is used in the first norm and forgotten in the second.
second_norm_has_no_eps = replace(RIGHT, leave=_eps_of_the_first_alone)
