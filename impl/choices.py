"""What the harness may ask of our kernels beyond the operators: what ran, and to pin tiles."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from jagbench.impl.kernels.hopper.support import device_problem
from jagbench.impl.kernels.norm_linear_launch import pin_norm_tiles
from jagbench.impl.kernels.tuning import Schedule, Tier, as_schedule, pin_tiles, take_used
from jagbench.inputs import Inputs


def configuration(operator: str, inputs: Inputs) -> Mapping[str, str]:
    """Tiles of every kernel launched since this was last asked, for a record.

    Kernels called "hopper_..." are of that tier, all others are portable.
    """
    return take_used()


def pin(choices: Mapping[str, str]) -> None:
    """Pin tiles in place of the table's; see `pin_tiles`, and `pin_norm_tiles` for "norm_..."."""
    norms = {name: text for name, text in choices.items() if name.startswith("norm_")}
    pin_norm_tiles(norms)
    pin_tiles({name: text for name, text in choices.items() if name not in norms})


def describe(device: torch.device, schedule: Schedule | Tier = "auto") -> str:
    """Which tier a schedule takes on a device, for a header."""
    plan = as_schedule("describe", schedule)
    if plan.forward_tier == "portable":
        return "tier portable"
    problem = device_problem(device)
    if plan.tier == "hopper":
        return "tier hopper" + ("" if problem is None else f", which cannot be had: {problem}")
    if problem is not None:
        return f"tier portable (hopper {problem})"
    return "tier hopper for calls it can take, else portable"
