"""Layers under a recipe: a linear layer with its products, an attention with its recipe, seeds."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from jagbench.impl.precision.recipe import LinearPrecision, TensorwisePrecision
from jagbench.impl.precision.tensorwise import tensorwise_linear
from jagbench.mx import AttentionRecipe, ElemDtype, LinearRecipe, ScaleMode


def _own(name: str) -> Callable[..., Any]:
    """The implementation's operator, found when it is called."""

    def call(*inputs: Any, **options: Any) -> Any:
        found = getattr(importlib.import_module("jagbench.impl"), name, None)
        if found is None:
            raise NotImplementedError(f"jagbench.impl has no {name}")
        return found(*inputs, **options)

    return call


@dataclass(frozen=True)
class Functions:
    """The operators that layers call, with the signatures of `jagbench.reference`."""

    linear: Callable[..., Any]
    attention: Callable[..., Any]
    gdpa: Callable[..., Any]
    quantize: Callable[..., Any]
    dequantize: Callable[..., Any]

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Our own are stored by name: a model under a recipe can be copied and pickled."""
        return super().__reduce__() if self is not OWN else "OWN"


#: Those of `jagbench.impl`.
OWN = Functions(*(
    _own(name) for name in ("mx_linear", "mx_attention", "mx_gdpa", "mx_quantize", "mx_dequantize")
))  # fmt: skip


def seed_of(seed: int, layer: str, step: int, rank: int) -> int:
    """Seed of a layer in a step on a rank: 63 bits of BLAKE2b of the four, written as text.

    Stochastic rounding that repeats its bits from step to step, or shares them among layers or
    ranks, adds the same error each time. No two of the four's values share a seed, so bits repeat
    where the step does: in a step that is run again, in calls of one layer within a step, and
    throughout if `set_step` is never called.
    """
    text = f"{seed}/{layer}/{step}/{rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass
class Moment:
    """Where a layer is in training: what `set_step` changes."""

    step: int = 0
    rank: int = 0


@dataclass(frozen=True)
class LayerPrecision:
    """What a linear layer does under a recipe. layer: its name in the model."""

    layer: str
    precision: LinearPrecision | TensorwisePrecision
    functions: Functions
    moment: Moment

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """X weight^T + bias with the products that the precision names quantised.

        Under autocast the operands are converted first, as for nn.Linear.
        """
        x, weight, bias = _in_autocast_dtype(x, weight, bias)
        if isinstance(self.precision, TensorwisePrecision):
            return tensorwise_linear(x, weight, bias, self.precision)
        recipe = self.recipe(self.precision)
        elem_dtype = self.precision.activation_elem_dtype
        if elem_dtype is not None and elem_dtype != recipe.elem_dtype:
            x = _Rounded.apply(  # type: ignore[no-untyped-call]
                x, elem_dtype, recipe.scale_mode, self.functions
            )
        if self.precision.forward and self.precision.input_gradient:
            out: Tensor = self.functions.linear(x, weight, bias, recipe=recipe)
            return out
        out = _Products.apply(  # type: ignore[no-untyped-call]
            x, weight, self.functions.linear, recipe, self.precision
        )
        return out if bias is None else out + bias

    def recipe(self, precision: LinearPrecision) -> LinearRecipe:
        """The recipe of the present step: its seed is of the layer, the step and the rank."""
        own = precision.recipe
        seed = seed_of(own.seed, self.layer, self.moment.step, self.moment.rank)
        return replace(own, seed=seed)


@dataclass(frozen=True)
class AttentionPrecision:
    """What an attention module finds in `attention_precision` under a recipe."""

    layer: str
    own: AttentionRecipe
    functions: Functions
    moment: Moment

    def recipe(self) -> AttentionRecipe:
        """The recipe of the present step: its seed is of the layer, the step and the rank."""
        seed = seed_of(self.own.seed, self.layer, self.moment.step, self.moment.rank)
        return replace(self.own, seed=seed)


@runtime_checkable
class DeclaresAttention(Protocol):
    """A module whose attention can run under a recipe.

    Its class has `attention_precision = None`. In its forward it computes in its own precision
    while that is None, and else calls `attention_precision.functions.attention` (or `.gdpa`) with
    `recipe=attention_precision.recipe()`.
    """

    attention_precision: AttentionPrecision | None


class RecipeLinear(nn.Linear):
    """An nn.Linear under a recipe: the same parameters, buffers and hooks, another forward."""

    #: Set by `apply`.
    precision: LayerPrecision

    def forward(self, input: Tensor) -> Tensor:
        """Input weight^T + bias."""
        return self.precision.linear(input, self.weight, self.bias)


def _in_autocast_dtype(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class _Rounded(torch.autograd.Function):
    """x as its codes in blocks of 1 x 32 have it; the gradient passes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, elem_dtype: ElemDtype, scale_mode: ScaleMode, functions: Functions
    ) -> Tensor:
        """Q(x) in x's dtype."""
        rows = x.detach().reshape(-1, x.shape[-1])
        codes, scales = functions.quantize(rows, elem_dtype=elem_dtype, scale_mode=scale_mode)
        back: Tensor = functions.dequantize(codes, scales, elem_dtype=elem_dtype, dtype=x.dtype)
        if x.dtype == torch.float16:
            # 65520 and more round to a code times a scale that float16 has as infinity. Its largest
            # number has the same code.
            most = torch.finfo(torch.float16).max
            back = back.clamp(-most, most)
        return back.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """As it came."""
        return grad, None, None, None


class _Products(torch.autograd.Function):
    """A linear layer of which the forward or the gradient of x is not quantised.

    What is quantised comes from the operator: one product of it that nobody reads is the price.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        linear: Callable[..., Any],
        recipe: LinearRecipe,
        precision: LinearPrecision,
    ) -> Tensor:
        """X weight^T."""
        ctx.save_for_backward(x, weight)
        ctx.options = linear, recipe, precision
        if not precision.forward:
            return functional.linear(x, weight)
        out: Tensor = linear(x, weight, None, recipe=recipe)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """DX and dW, each quantised or not."""
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        linear, recipe, precision = ctx.options
        wanted = ctx.needs_input_grad[:2]

        def gradients(quantised: bool) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                out = (
                    linear(x, weight, None, recipe=recipe)
                    if quantised
                    else functional.linear(x, weight)
                )
                return torch.autograd.grad(out, (x, weight), grad)

        forms = (precision.input_gradient, recipe.weight_gradient == "mx")
        found = {form: gradients(form) for form, want in zip(forms, wanted, strict=True) if want}
        dx, dw = (found[form][i] if wanted[i] else None for i, form in enumerate(forms))
        return dx, dw, None, None, None
