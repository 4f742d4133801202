"""The recipes that have names. docs/precision.md gives the source of every decision in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jagbench.impl.precision.recipe import LinearPrecision, Recipe, TensorwisePrecision
from jagbench.mx import AttentionRecipe, LinearRecipe

_MXFP8 = Recipe("mxfp8", LinearPrecision(), AttentionRecipe())
_WGRAD_MX = LinearRecipe(weight_gradient="mx")
#: All that keeps training stable left out at once.
_ROUGH = LinearRecipe(
    elem_dtype="e5m2", gradient_elem_dtype="e5m2", scale_mode="floor", weight_gradient="mx",
    hadamard=None, gradient_rounding="nearest",
)  # fmt: skip
_ROUGH_ATTENTION = AttentionRecipe(
    elem_dtype="e5m2", gradient_elem_dtype="e5m2", scale_mode="floor",
    gradient_rounding="nearest",
)  # fmt: skip

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        # No layer is changed.
        Recipe("bf16"),
        # The defaults of `jagbench.mx`: E4M3, RCEIL, the weight gradient not quantised.
        _MXFP8,
        # The weight gradient said to be in BF16, whatever the default becomes.
        replace(
            _MXFP8, name="mxfp8_wgrad_bf16",
            linear=LinearPrecision(LinearRecipe(weight_gradient="bf16")),
        ),
        # The weight gradient quantised too, behind a random Hadamard transform of 32.
        replace(_MXFP8, name="mxfp8_wgrad_mx", linear=LinearPrecision(_WGRAD_MX)),
        # The same without the transform.
        replace(
            _MXFP8, name="mxfp8_no_rht", linear=LinearPrecision(replace(_WGRAD_MX, hadamard=None))
        ),
        # Scales by the text of the OCP standard, under which the largest elements saturate.
        replace(
            _MXFP8, name="mxfp8_floor", linear=LinearPrecision(LinearRecipe(scale_mode="floor")),
            attention=AttentionRecipe(scale_mode="floor"),
        ),
        # A negative control: every linear layer, E5M2 under FLOOR. A parity gate must fail it.
        Recipe("mxfp8_everything", LinearPrecision(_ROUGH), _ROUGH_ATTENTION, keep_roles=()),
        # What a peer does: FP8 with a scale a tensor, attention as it is.
        Recipe("fp8_tensorwise", TensorwisePrecision()),
        # Activations in MXFP4, also as the weight gradient reads them; weights and gradients MXFP8.
        replace(
            _MXFP8, name="mxfp4_activations",
            linear=LinearPrecision(activation_elem_dtype="e2m1"),
        ),
    )
}  # fmt: skip


def recipe_named(name: str) -> Recipe:
    """A recipe by its name. Raises ValueError that lists the names there are."""
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(f"recipes are called {', '.join(RECIPES)}; got {name!r}")
    return RECIPES[name]
