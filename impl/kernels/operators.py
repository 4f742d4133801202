"""Custom ops with less of the host's time: what `torch.library.custom_op` does for ours.

That wrapper is general (defaults, keyword arguments, trees of tensors, results checked for aliases)
and costs more than our own checks. These ops have positional arguments only and return new tensors;
torch.compile, fake tensors, `torch.library.opcheck` and FLOP counters see them as they see others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

NAMESPACE = "jagbench"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")

#: Keeps the inputs and outputs that a backward needs: (ctx, inputs, result).
Setup = Callable[[Any, tuple[Any, ...], Any], None]
#: Gradients of the inputs from (ctx, which of them are wanted, gradients of the outputs).
Backward = Callable[..., tuple[Any, ...]]


def define(name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register `jagbench::name` for every device; its schema is that of the annotations.

    fake: shapes of the results from those of the arguments. Returns the op, to be called with
    positional arguments.
    """
    schema = torch.library.infer_schema(kernel, mutates_args=())
    _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    # A compiled graph must not look into the kernel, whatever its back end lets Dynamo see.
    opaque = _disable_dynamo(kernel)
    _library.impl(name, opaque, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def differentiable(op: Any, setup: Setup, backward: Backward) -> Callable[..., Any]:
    """Register the first derivative of an op; asking for the second raises RuntimeError.

    Returns the op as our own functions call it. In eager mode that call does itself what the
    dispatcher would call back for, which saves one of two passes through it: dispatch modes, the
    profiler and compiled graphs see the op all the same.
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *inputs: Any) -> Any:
            result = _below(op, keyset, inputs)
            setup(ctx, inputs, result)
            return result

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            return None, *backward(ctx, ctx.needs_input_grad[1:], *gradients)

    def kernel(keyset: Any, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(value, Tensor) and value.requires_grad for value in inputs
        ):
            return Differentiable.apply(keyset, *inputs)
        return _below(op, keyset, inputs)

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return op(*inputs)
        return kernel(None, *inputs)

    _library.impl(op._schema.name.partition("::")[2], kernel, "Autograd", with_keyset=True)
    return call


def _below(op: Any, keyset: Any, inputs: tuple[Any, ...]) -> Any:
    """The op without autograd; the next of its kernels, if the dispatcher is at it already."""
    with torch._C._AutoDispatchBelowAutograd():
        if keyset is None:
            return op(*inputs)
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)
