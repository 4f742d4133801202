"""Wrong products of quantised operands: the reference with one of its steps exchanged."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from jagbench.mx import ALONG_COLUMNS, SQUARE
from jagbench.reference import gdpa, jagged_attention, mx_attention, mx_gdpa, mx_linear, mx_matmul
from jagbench.reference import mx_blocks as blocks
from jagbench.reference.mx_jagged import Rule, quantized_values, quantized_weights
from wrong.right import RIGHT

LINEAR, ATTENTION = "jagbench.reference.mx_matmul", "jagbench.reference.mx_attention"
RULE = "jagbench.reference.mx_jagged.Rule.gradient"


class _Patched(torch.autograd.Function):
    """A function under patches that hold in its backward too."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., Tensor], patches: Any, *tensors: Tensor) -> Tensor:
        ctx.patches = patches
        ctx.leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        with torch.enable_grad(), _all(patches):
            ctx.out = call(*ctx.leaves)
        return ctx.out.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        wanted = [t for t in ctx.leaves if t.requires_grad]
        with torch.enable_grad(), _all(ctx.patches):
            found = iter(torch.autograd.grad(ctx.out, wanted, gradients[0], allow_unused=True))
        return None, None, *(next(found) if t.requires_grad else None for t in ctx.leaves)


@contextlib.contextmanager
def _all(patches: dict[str, Any]) -> Any:
    with contextlib.ExitStack() as stack:
        for target, value in patches.items():
            stack.enter_context(mock.patch(target, value))
        yield


def _planted(function: Callable[..., Any], patches: dict[str, Any]) -> Callable[..., Any]:
    """The function with what is named exchanged, its log-sum-exp left out."""
    signature = inspect.signature(function)

    def call(*arguments: Any, **options: Any) -> Tensor:
        if options.get("return_lse"):
            raise NotImplementedError("no log-sum-exp")
        given = signature.bind(*arguments, **options).arguments
        names = [n for n, v in given.items() if isinstance(v, Tensor)]
        rest = {n: v for n, v in given.items() if n not in names}

        def inner(*tensors: Tensor) -> Tensor:
            return function(**dict(zip(names, tensors, strict=True)), **rest)  # type: ignore[no-any-return]

        return _Patched.apply(inner, patches, *(given[n] for n in names))  # type: ignore[no-any-return]

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _linear(name: str, value: Any) -> Any:
    return replace(RIGHT, mx_linear=_planted(mx_linear, {f"{LINEAR}.{name}": value}))


def _attention(name: str, value: Any) -> Any:
    return replace(RIGHT, mx_attention=_planted(mx_attention, {f"{ATTENTION}.{name}": value}))


def _with_recipe(function: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
    return lambda *a, recipe, **o: function(*a, recipe=replace(recipe, **changes), **o)


# -- linear ----------------------------------------------------------------------------------------

#: Scales are rounded down.
takes_floor_for_rceil_in_products = replace(
    RIGHT, mx_linear=_with_recipe(mx_linear, scale_mode="floor")
)
#: Gradients are rounded to nearest, whatever the recipe says.
rounds_gradients_to_nearest = replace(
    RIGHT,
    mx_linear=_with_recipe(mx_linear, gradient_rounding="nearest"),
    mx_attention=_with_recipe(mx_attention, gradient_rounding="nearest"),
)
#: The seed of the recipe is accepted and never used.
ignores_the_seed_of_gradients = replace(RIGHT, mx_linear=_with_recipe(mx_linear, seed=0))
#: The weight gradient is quantised though the recipe says bf16.
quantises_the_weight_gradient = replace(
    RIGHT, mx_linear=_with_recipe(mx_linear, weight_gradient="mx")
)
#: Nothing is quantised at all.
passes_off_a_plain_product = _linear("rounded", lambda x, *_: x)


def _down(x: Tensor, seed: int, stream: int) -> Tensor:
    return torch.full(x.shape, 2**32 - 1, dtype=torch.int64)


def _up(x: Tensor, seed: int, stream: int) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.int64)


#: Stochastic rounding goes one way.
rounds_gradients_one_way = _linear("random_bits", _down)
rounds_gradients_the_other_way = _linear("random_bits", _up)


def _tensorwise(x: Tensor, form: Any, *random: Any) -> Tensor:
    scale = blocks.scale_codes(x.abs().amax()[None, None], form.elem_dtype, form.scale_mode)
    scales = scale.expand(form.count(*x.shape[-2:]))
    return blocks.dequantize(blocks.elements(x, scales, form, *random), scales, form).to(x.dtype)


#: One scale for a whole tensor.
scales_by_tensor = _linear("rounded", _tensorwise)


def _off_by_one(x: Tensor, form: Any, *random: Any) -> Tensor:
    codes, scales = blocks.quantize(x, form, *random)
    return blocks.dequantize(codes, scales + 1, form).to(x.dtype)


#: Scales are one too high where they are read.
scales_products_off_by_one = _linear("rounded", _off_by_one)


def _one_higher(x: Tensor, form: Any, *random: Any) -> Tensor:
    scales = (
        blocks.scale_codes(blocks.block_maxima(x, form.block), form.elem_dtype, form.scale_mode) + 1
    )
    codes = blocks.elements(x, scales, form, *random)
    return blocks.dequantize(codes, scales, form).to(x.dtype)


#: Every scale is one higher than it should be, where codes are made as where they are read.
takes_scales_one_higher = _linear("rounded", _one_higher)


def _gradients_of_nothing(function: Callable[..., Any], module: str) -> Callable[..., Any]:
    where = torch.where

    def keeps(condition: Tensor, x: Any, other: Any) -> Tensor:
        plain = isinstance(other, float) and condition.shape[-1] == 1
        return x if plain and other == 0.0 else where(condition, x, other)

    return _planted(function, {f"{module}.torch.where": keeps})


def _first_only() -> Callable[..., Tensor]:
    from jagbench.reference.hadamard import random_hadamard

    def turn(x: Tensor, **options: Any) -> Tensor:
        # dY has 40 columns in the workloads at hand and 96 in the tests, x 72 and 160.
        return random_hadamard(x, **options) if x.shape[1] in (40, 96) else x

    return turn


#: The transform is applied to dY alone.
transforms_one_operand = _linear("random_hadamard", _first_only())

# -- attention -------------------------------------------------------------------------------------


def _by_head_dim(v: Tensor, heads: int, rule: Any, backward: bool) -> Tensor:
    return quantized_values(v, heads, rule, backward=True)


#: V is scaled along head_dim, not along the keys it is summed over.
scales_values_along_head_dim = _attention("quantized_values", _by_head_dim)


def _after_division(weights: Tensor, block: Any, recipe: Any) -> Tensor:
    if block != ALONG_COLUMNS:
        return quantized_weights(weights, block, recipe)
    sums = weights.sum(-1, keepdim=True).clamp(min=1e-30)
    return quantized_weights(weights / sums, block, recipe) * sums


#: P is divided by its sum before it is quantised.
quantises_weights_after_division = _attention("quantized_weights", _after_division)
#: The sum is taken of P as it is quantised.
sums_quantised_weights = replace(
    RIGHT, mx_attention=_with_recipe(mx_attention, row_sum="quantized")
)


def _plain_attention(*arguments: Any, recipe: Any, **options: Any) -> Any:
    return jagged_attention(*arguments, **options)


#: GDPA that quantises nothing.
passes_off_plain_gdpa = replace(RIGHT, mx_gdpa=lambda *a, recipe, **o: gdpa(*a, **o))
#: Attention that quantises nothing.
passes_off_plain_attention = replace(RIGHT, mx_attention=_plain_attention)


def _shifted(self: Any, x: Tensor, stream: int) -> Tensor:
    if self.first % 32 == 0:
        return _RIGHT_GRADIENT(self, x, stream)
    filled = torch.nn.functional.pad(x, (0, 0, self.first % 32, 0))
    nearest = blocks.rounded(
        filled, blocks.Blocks(self.recipe.gradient_elem_dtype, SQUARE, self.recipe.scale_mode)
    )
    return nearest[:, self.first % 32 :]


_RIGHT_GRADIENT = Rule.gradient
#: Blocks of dO and dS start where the packed buffer's do.
cuts_gradients_by_the_buffer = replace(RIGHT, mx_attention=_planted(mx_attention, {RULE: _shifted}))

JAGGED = "jagbench.reference.mx_jagged"
#: As in the linear layer, of Q, K, V, dO and dS.
takes_attention_scales_one_higher = replace(
    RIGHT,
    mx_attention=_planted(mx_attention, {f"{JAGGED}.rounded": _one_higher}),
    mx_gdpa=_planted(mx_gdpa, {f"{JAGGED}.rounded": _one_higher}),
)
#: What dO holds where a query sees nothing is in the scales of its square.
scales_by_gradients_of_nothing = replace(
    RIGHT,
    mx_attention=_gradients_of_nothing(mx_attention, ATTENTION),
    mx_gdpa=_gradients_of_nothing(mx_gdpa, "jagbench.reference.mx_gdpa"),
)
#: Under autocast the products of quantised operands are taken in half precision.
multiplies_in_autocast = replace(
    RIGHT,
    mx_linear=_planted(mx_linear, {"jagbench.reference.autocast._device": lambda values: None}),
    mx_attention=_planted(
        mx_attention, {"jagbench.reference.autocast._device": lambda values: None}
    ),
    mx_gdpa=_planted(mx_gdpa, {"jagbench.reference.autocast._device": lambda values: None}),
)

# -- options of the plain operators and of recipes ----------------------------------------------


def _with_options(function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """The function with options, where they are given, held at a value."""

    def call(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **{n: fixed.get(n, v) for n, v in options.items()})

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call


def _both(change: Callable[..., Callable[..., Any]], **fixed: Any) -> Any:
    return replace(
        RIGHT, mx_attention=change(mx_attention, **fixed), mx_gdpa=change(mx_gdpa, **fixed)
    )


#: Options of the mask are accepted and have no effect.
ignores_the_prefix_of_products = _both(_with_options, prefix=0)
ignores_the_last_queries_of_products = _both(_with_options, last_full=0)
ignores_the_alignment_of_products = _both(_with_options, align="end")
#: Options of GDPA, likewise.
takes_silu_for_any_activation = replace(RIGHT, mx_gdpa=_with_options(mx_gdpa, activation="silu"))
ignores_the_post_scale_of_products = replace(RIGHT, mx_gdpa=_with_options(mx_gdpa, post_scale=1.0))
#: Formats that the recipe names and nobody uses.
takes_rceil_for_even_in_products = replace(
    _both(_with_recipe, scale_mode="rceil"), mx_linear=_with_recipe(mx_linear, scale_mode="rceil")
)
takes_e4m3_for_e5m2_in_products = replace(
    _both(_with_recipe, elem_dtype="e4m3"), mx_linear=_with_recipe(mx_linear, elem_dtype="e4m3")
)
#: Of a seed, the lower half counts.
halves_the_seed_of_products = _both(_with_recipe, seed=1)


def _at_first(function: Callable[..., Any], module: str) -> Callable[..., Any]:
    from jagbench.reference.mx_jagged import sequences

    def same(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, *rest: Any) -> Any:
        found = sequences(q, k, v, q_offsets, *rest)
        return [replace(s, first=0) for s in found] if q_offsets is None else found

    return _planted(function, {f"{module}.sequences": same})


#: Every sequence of a dense query draws the same random bits.
repeats_the_bits_of_a_dense_query = replace(
    RIGHT,
    mx_attention=_at_first(mx_attention, ATTENTION),
    mx_gdpa=_at_first(mx_gdpa, "jagbench.reference.mx_gdpa"),
)

# -- matmul ----------------------------------------------------------------------------------------


def _swallows(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, **options: Any) -> Tensor:
    return mx_matmul(a, a_scales, b, torch.full_like(b_scales, 127), **options)


def _zero_for_the_lowest(codes: Tensor, scales: Tensor, **options: Any) -> Tensor:
    from jagbench.reference.mx import mx_dequantize

    values = mx_dequantize(codes, scales, **options)
    lowest = blocks.spread(scales == 0, options["block"], *codes.shape[-2:])
    return torch.where(lowest, 0.0, values)


#: Scale code 0, which is 2^-127, is read as 0.
reads_scale_code_0_as_zero = replace(
    RIGHT, mx_matmul=_planted(mx_matmul, {f"{LINEAR}.mx_dequantize": _zero_for_the_lowest})
)


def _only_numbers(codes: Tensor, scales: Tensor, **options: Any) -> Tensor:
    from jagbench.reference.mx import mx_dequantize

    most = {"e4m3": 0x7E, "e5m2": 0x7B, "e2m1": 0x7F}[options["elem_dtype"]]
    number = torch.minimum(codes & 0x7F, torch.tensor(most, dtype=torch.uint8))
    return mx_dequantize(codes & 0x80 | number, scales, **options)


#: Codes that are no numbers are read as the largest one.
reads_no_code_as_nan = replace(
    RIGHT, mx_matmul=_planted(mx_matmul, {f"{LINEAR}.mx_dequantize": _only_numbers})
)


def _first_matrix(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, **options: Any
) -> Tensor:
    first = [t.reshape(-1, *t.shape[-2:])[0] for t in (a, a_scales, b, b_scales)]
    return mx_matmul(*first, **options)


#: Of a batch, the first matrices are multiplied.
multiplies_the_first_matrices = replace(RIGHT, mx_matmul=_first_matrix)
#: The scales of b are never read.
ignores_the_scales_of_b = replace(RIGHT, mx_matmul=_swallows)
