"""Precision recipes: low precision for the layers of a model, as data and by name."""

from jagbench.impl.precision.apply import Applied, apply, revert, set_step
from jagbench.impl.precision.gathers import QuantizedGather, plain_gathers, quantize_gathers
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
from jagbench.impl.precision.shards import (
    ShardFormat,
    dequantize_weight,
    join_shards,
    payload_bits,
    quantize_shard,
    rows_of_shards,
)

__all__ = [
    "RECIPES",
    "Applied",
    "AttentionPrecision",
    "DeclaresAttention",
    "Functions",
    "LinearPrecision",
    "QuantizedGather",
    "Recipe",
    "RecipeLinear",
    "ShardFormat",
    "TensorwisePrecision",
    "apply",
    "dequantize_weight",
    "join_shards",
    "payload_bits",
    "plain_gathers",
    "quantize_gathers",
    "quantize_shard",
    "recipe_named",
    "revert",
    "role_of",
    "rows_of_shards",
    "seed_of",
    "set_step",
]
