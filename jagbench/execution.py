"""Run a function on `Inputs` and name what comes out: outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from jagbench.inputs import Inputs

#: Output name -> tensor; gradients are named "grad q", "grad bias.table", ...
Outcome = Mapping[str, Tensor]

#: One-byte floats in which an implementation may return codes: they are judged as bytes.
BYTE_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def gradient_name(argument: str) -> str:
    """Name of the gradient of a tensor argument in an `Outcome`."""
    return f"grad {argument}"


def run(function: Callable[..., Any], inputs: Inputs, *, backward: bool = False) -> Outcome:
    """Call `function` on `inputs` and return its outputs and, if asked, every gradient.

    The caller's tensors are never given `requires_grad`; the function sees aliases of them, so an
    implementation that writes its inputs is seen to. Gradients of arguments that the graph does not
    reach come back as zeros, as autograd means them. An operator without gradients has none.
    """
    wanted = (
        [n for n in inputs.operator.differentiable if n in inputs.tensors()] if backward else []
    )
    live = inputs.map(lambda n, t: t.detach().requires_grad_() if n in wanted else t.detach())
    result = live.call(function)
    outputs = named_outputs(inputs, result)
    outcome = {name: value.detach() for name, value in outputs.items()}
    if backward and inputs.operator.differentiable:
        if inputs.upstream is None:
            raise ValueError(f"{inputs.operator.name}: the inputs carry no upstream gradient")
        leaves = live.tensors()
        for name, gradient in zip(wanted, _gradients(outputs, leaves, wanted, inputs), strict=True):
            outcome[gradient_name(name)] = gradient
    return outcome


def named_outputs(inputs: Inputs, result: Any) -> dict[str, Tensor]:
    """What a call returned, by the operator's names; codes as bytes."""
    outputs = dict(zip(inputs.operator.output_layout, _as_tuple(result), strict=False))
    if inputs.operator.codes is None:
        return outputs
    return {
        n: x.view(torch.uint8) if isinstance(x, Tensor) and x.dtype in BYTE_FLOATS else x
        for n, x in outputs.items()
    }


def _gradients(
    outputs: Mapping[str, Tensor], leaves: Mapping[str, Tensor], wanted: list[str], inputs: Inputs
) -> list[Tensor]:
    out = outputs["out"]
    arguments = [leaves[name] for name in wanted]
    if not out.requires_grad:
        raise RuntimeError(f"{inputs.operator.name}: the output is cut off from its arguments")
    found = torch.autograd.grad(out, arguments, inputs.upstream, allow_unused=True)
    return [
        torch.zeros_like(a) if g is None else g.detach()
        for a, g in zip(arguments, found, strict=True)
    ]


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
