"""Precision recipes: low precision for the layers of a model, as data and by name."""

from jagbench.impl.precision.apply import Applied, apply, revert, set_step
from jagbench.impl.precision.layers import (
    AttentionPrecision,
    DeclaresAttention,
    Functions,
    RecipeLinear,
    seed_of,
)
from jagbench.impl.precision.named import RECIPES, recipe_named
from jagbench.impl.precision.recipe import LinearPrecision, Recipe, TensorwisePrecision
from jagbench.impl.precision.roles import role_of

__all__ = [
    "RECIPES",
    "Applied",
    "AttentionPrecision",
    "DeclaresAttention",
    "Functions",
    "LinearPrecision",
    "Recipe",
    "RecipeLinear",
    "TensorwisePrecision",
    "apply",
    "recipe_named",
    "revert",
    "role_of",
    "seed_of",
    "set_step",
]
