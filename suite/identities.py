"""Budgets for identities: an outcome against a truth that was got another way."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jagbench.accuracy import difference
from jagbench.execution import Outcome, run
from jagbench.inputs import Inputs


def truth_of(inputs: Inputs) -> dict[str, Tensor]:
    """Outputs and gradients of the reference in float64."""
    return dict(run(inputs.operator.reference, inputs.to(torch.float64), backward=True))


def naive_of(inputs: Inputs) -> dict[str, Tensor]:
    """Outputs and gradients of the reference in the call's own dtype."""
    return dict(run(inputs.operator.reference, inputs, backward=True))


def broken(
    inputs: Inputs, outcome: Outcome, truth: Mapping[str, Tensor], naive: Mapping[str, Tensor]
) -> list[str]:
    """What of an outcome is further from `truth` than the operator's budget allows.

    truth: float64, by name; tensors it lacks are not compared.
    naive: the same quantities from a naive run in the outcome's dtype.
    """
    found = []
    for name in truth:
        if outcome[name].shape != truth[name].shape:
            found.append(f"{name} has shape {tuple(outcome[name].shape)}")
            continue
        error, slip = difference(outcome[name], truth[name]), difference(naive[name], truth[name])
        size = torch.where(torch.isfinite(truth[name]), truth[name], 0.0).abs()
        floor = inputs.operator.floor(inputs, outcome[name].dtype)
        multiple = inputs.operator.budget.multiple(name)
        allowed = multiple * _norm(slip) + floor * _norm(size)
        worst = multiple * _peak(slip) + 2 * floor * _peak(size)
        if not (_norm(error) <= allowed and _peak(error) <= worst):
            found.append(
                f"{name}: error {_norm(error):.3e} (budget {allowed:.3e}), worst element "
                f"{_peak(error):.3e} (budget {worst:.3e})"
            )
    return found


def _norm(x: Tensor) -> float:
    return float(x.square().sum().sqrt())


def _peak(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0
