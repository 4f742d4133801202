"""A workload: named, frozen, seeded, hashed inputs of one operator."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

import torch

from jagbench.inputs import Inputs

#: Raise when the same recipe and seed begin to give other bytes: old and new results then differ
#: in digest.
GENERATOR_VERSION = 1

#: Purposes a workload can serve, smallest first.
PURPOSES = ("smoke", "conformance", "full")


class Recipe(Protocol):
    """How a workload's inputs are drawn: frozen dataclasses, hashed field by field."""

    def draw(self, seed: int, dtype: torch.dtype, device: torch.device, upstream: bool) -> Inputs:
        """Inputs for a seed; the same bytes on every machine."""
        ...

    def lengths(self, seed: int) -> Mapping[str, list[int]]:
        """Offsets argument -> drawn sequence lengths."""
        ...

    def statistics(self, seed: int) -> Mapping[str, float]:
        """Realised statistics: tokens, pairs, visible pairs, fill, max over mean."""
        ...


@dataclass(frozen=True)
class Workload:
    """Named inputs of one operator.

    name: unique in the catalogue; reads as a phrase ("gdpa-self-l1024-fill0.5-jagged").
    operator: name of the operator.
    recipe: frozen dataclass that draws the inputs.
    seed: seed of lengths and values.
    purposes: subset of `PURPOSES`.
    tags: properties tests select by ("adversarial", "causal", "bias", ...).
    source: where the shape was published; "" for our own.
    differentiable: whether its operator has gradients, so that a backward can be measured.
    """

    name: str
    operator: str
    recipe: Recipe
    seed: int = 2026
    purposes: frozenset[str] = frozenset({"conformance"})
    tags: frozenset[str] = frozenset()
    source: str = ""
    differentiable: bool = True

    def __post_init__(self) -> None:
        unknown = self.purposes - set(PURPOSES)
        if unknown:
            raise ValueError(f"workload {self.name}: purposes {sorted(unknown)} not in {PURPOSES}")

    def inputs(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        upstream: bool = True,
    ) -> Inputs:
        """Draw the inputs (and the upstream gradient, unless not wanted)."""
        return self.recipe.draw(self.seed, dtype, torch.device(device), upstream)

    @property
    def statistics(self) -> Mapping[str, float]:
        """Realised statistics of the drawn lengths."""
        return self.recipe.statistics(self.seed)

    @property
    def digest(self) -> str:
        """Hash of all that decides the bytes: recipe, seed, drawn lengths, generator version.

        16 hex digits of SHA-256. The name is left out: a renamed workload is the same workload.
        """
        content: dict[str, Any] = {
            "generator": GENERATOR_VERSION,
            "operator": self.operator,
            "recipe": type(self.recipe).__name__,
            "fields": _fields(self.recipe),
            "seed": self.seed,
            "lengths": {k: list(v) for k, v in self.recipe.lengths(self.seed).items()},
        }
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def later(default: Any) -> Any:
    """A recipe's field that its kind has not always had.

    At its default it is left out of the digest, so that workloads from before keep theirs.
    """
    return field(default=default, metadata={"later": True})


def _fields(recipe: Recipe) -> dict[str, Any]:
    """Fields of a recipe, those left out that came later and are at their default."""
    content: dict[str, Any] = asdict(recipe)  # type: ignore[call-overload]
    for entry in fields(recipe):  # type: ignore[arg-type]
        if entry.metadata.get("later") and getattr(recipe, entry.name) == entry.default:
            del content[entry.name]
    return content
