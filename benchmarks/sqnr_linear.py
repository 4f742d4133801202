"""SQNR of a linear layer's three products, by recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from sqnr_bench import Bench, Row, decibels
from torch import Tensor

from jagbench.mx import ALONG_COLUMNS, LinearRecipe

TOKENS, FEATURES, OUT_FEATURES = 512, 1024, 512
#: Recipes of the layer by name, beside the default.
RECIPES = {
    "default": LinearRecipe(),
    "gradients to nearest": LinearRecipe(gradient_rounding="nearest"),
    "weight in 1x32": LinearRecipe(weight_block=ALONG_COLUMNS),
    "floor": LinearRecipe(scale_mode="floor"),
    "e5m2 gradients": LinearRecipe(gradient_elem_dtype="e5m2"),
    "e2m1 activations and weights": LinearRecipe(elem_dtype="e2m1"),
}
WEIGHT_GRADIENT_DATA = ("normal", "outlier channels", "spikes x16", "spikes x4096")


def _run(
    bench: Bench, recipe: LinearRecipe, x: Tensor, weight: Tensor, upstream: Tensor
) -> dict[str, float]:
    """SQNR of output and gradients against the layer that quantises nothing."""
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    out = bench.get("mx_linear")(*leaves, recipe=recipe)
    gradients = torch.autograd.grad(out, leaves, upstream)
    wide_x, wide_weight, wide_upstream = (t.double() for t in (x, weight, upstream))
    return {
        "forward_db": decibels(out.detach(), wide_x @ wide_weight.T),
        "input_gradient_db": decibels(gradients[0], wide_upstream @ wide_weight),
        "weight_gradient_db": decibels(gradients[1], wide_upstream.T @ wide_x),
    }


def _weight(bench: Bench) -> Tensor:
    return bench.draw("normal", "weight", OUT_FEATURES, FEATURES) / math.sqrt(FEATURES)


def linear(bench: Bench) -> Iterator[Row]:
    """Output and input gradient by recipe."""
    for data in ("normal", "outlier channels", "Student t, 3"):
        x = bench.draw(data, "x", TOKENS, FEATURES)
        upstream = bench.draw("normal", "upstream", TOKENS, OUT_FEATURES)
        for name, recipe in RECIPES.items():
            found = _run(bench, recipe, x, _weight(bench), upstream)
            del found["weight_gradient_db"]  # in the next table: here it is not quantised
            yield Row({"data": data, "recipe": name}, found)


def weight_gradient(bench: Bench) -> Iterator[Row]:
    """The weight gradient in bf16 and quantised, by element type and transform.

    bf16 is the layer that does not quantise it, on arguments rounded to bfloat16; the truth is that
    of the arguments before.

    Gradients are rounded to nearest, so that the transform alone is seen; the last recipe, with a
    stochastic rounding, is `mxfp8_wgrad_mx`.
    """
    weight = _weight(bench)
    for data in WEIGHT_GRADIENT_DATA:
        x = bench.draw(data, "x", TOKENS, FEATURES)
        upstream = bench.draw("normal", "upstream", TOKENS, OUT_FEATURES)

        def db(
            recipe: LinearRecipe, x: Tensor = x, upstream: Tensor = upstream
        ) -> dict[str, float]:
            return {"sqnr_db": _run(bench, recipe, x, weight, upstream)["weight_gradient_db"]}

        yield Row({"data": data, "products": "bf16"}, {"sqnr_db": _in_bf16(bench, x, upstream)})
        for elem in ("e4m3", "e2m1"):
            for size in (None, 16, 32, 64):
                recipe = LinearRecipe(
                    elem, elem, weight_gradient="mx", hadamard=size, gradient_rounding="nearest"  # type: ignore[arg-type]
                )  # fmt: skip
                name = "no transform" if size is None else f"transform of {size}"
                yield Row({"data": data, "products": f"{elem}, {name}"}, db(recipe))
        yield Row(
            {"data": data, "products": "e4m3, transform of 32, stochastic"},
            db(LinearRecipe(weight_gradient="mx")),
        )


def _in_bf16(bench: Bench, x: Tensor, upstream: Tensor) -> float:
    low = [t.bfloat16() for t in (x, _weight(bench), upstream)]
    weight = low[1].requires_grad_()
    out = bench.get("mx_linear")(low[0], weight, recipe=LinearRecipe())
    (found,) = torch.autograd.grad(out, [weight], low[2])
    return decibels(found, upstream.double().T @ x.double())


LINEAR_MEASURES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "linear": linear,
    "weight_gradient": weight_gradient,
}
