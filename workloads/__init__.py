"""Named, seeded, production-like jagged inputs."""

from jagbench.workloads.attention import AttentionRecipe
from jagbench.workloads.catalogue import CATALOGUE, select
from jagbench.workloads.normed import NormLinearRecipe
from jagbench.workloads.packed import BlockRecipe, RotaryRecipe
from jagbench.workloads.pffn import PffnRecipe
from jagbench.workloads.replay import workload_from_text

__all__ = [
    "CATALOGUE",
    "AttentionRecipe",
    "BlockRecipe",
    "NormLinearRecipe",
    "PffnRecipe",
    "RotaryRecipe",
    "select",
    "workload_from_text",
]
