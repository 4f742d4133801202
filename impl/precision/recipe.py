"""A precision recipe as data: which layers of a model, which of their products, in which format.

Defaults and their sources are in docs/precision.md. A recipe is a value: it can be compared, stored
in a record as JSON and read back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from jagbench.mx import AttentionRecipe, Block, ElemDtype, LinearRecipe, check_elem_dtype

#: Of the form in which recipes are stored.
VERSION = 1
#: What a layer is in a model; `roles.py` says how a layer's role is found.
Role = Literal["head", "over_arch", "last_block", "embedding", "norm", "block"]
#: Layers that stay in BF16 unless a recipe says otherwise.
KEPT_ROLES: tuple[Role, ...] = ("head", "over_arch", "last_block", "embedding", "norm")
Float8 = Literal["e4m3", "e5m2"]


@dataclass(frozen=True)
class LinearPrecision:
    """How linear layers compute their products under MX.

    recipe: element types, scales, blocks, rounding, Hadamard transform, and whether the weight
        gradient is quantised ("mx") or not ("bf16").
    forward, input_gradient: whether these products are quantised.
    activation_elem_dtype: type that activations are rounded to first, in blocks of 1 x 32, for the
        forward and the weight gradient alike (the gradient passes as if by the identity); None
        for the recipe's own.

    Raises ValueError for an unknown type, for no quantised product at all, and for activations in a
    type that the recipe's cannot hold exactly.
    """

    recipe: LinearRecipe = field(default_factory=LinearRecipe)
    forward: bool = True
    input_gradient: bool = True
    activation_elem_dtype: ElemDtype | None = None

    def __post_init__(self) -> None:
        if not (self.forward or self.input_gradient or self.recipe.weight_gradient == "mx"):
            raise ValueError("no product is quantised: leave linear None instead")
        if self.activation_elem_dtype is None:
            return
        check_elem_dtype(self.activation_elem_dtype)
        if self.activation_elem_dtype not in ("e2m1", self.recipe.elem_dtype):
            raise ValueError(
                f"activation_elem_dtype {self.activation_elem_dtype!r} is not exact in the "
                f"recipe's elem_dtype {self.recipe.elem_dtype!r}"
            )


@dataclass(frozen=True)
class TensorwisePrecision:
    """FP8 with one float32 scale a tensor, max|x| / largest, for all three products.

    elem_dtype: of x and W; gradient_elem_dtype: of dY. Both are rounded to nearest, the scales are
    of the tensor at hand. Source: the tensorwise recipe of torchao's float8 training.
    """

    elem_dtype: Float8 = "e4m3"
    gradient_elem_dtype: Float8 = "e5m2"

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value not in get_args(Float8):
                raise ValueError(f"{name} must be one of {get_args(Float8)}, got {value!r}")
        if self.elem_dtype == self.gradient_elem_dtype == "e5m2":
            raise ValueError("elem_dtype and gradient_elem_dtype are both 'e5m2': no instruction")


@dataclass(frozen=True)
class Recipe:
    """Which layers of a model run in low precision, and how.

    linear: of nn.Linear; None leaves them as they are. attention: of modules that declare
    themselves (`layers.DeclaresAttention`); None leaves them as they are.
    keep_roles: roles of layers that stay in BF16.
    keep: names of further layers that stay, as patterns of `fnmatch` ("tower.*.proj"); each must
        match something. only: if any, no other layers than these run under the recipe.

    Raises ValueError for an unknown role or a malformed value.
    """

    name: str
    linear: LinearPrecision | TensorwisePrecision | None = None
    attention: AttentionRecipe | None = None
    keep_roles: tuple[Role, ...] = KEPT_ROLES
    keep: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a string that is not empty, got {self.name!r}")
        if not isinstance(self.linear, LinearPrecision | TensorwisePrecision | None):
            raise ValueError(f"linear is no precision of a layer: {self.linear!r}")
        if not isinstance(self.attention, AttentionRecipe | None):
            raise ValueError(f"attention must be an AttentionRecipe or None: {self.attention!r}")
        for name in ("keep_roles", "keep", "only"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(isinstance(v, str) for v in values):
                raise ValueError(f"{name} must be a tuple of strings, got {values!r}")
        unknown = [role for role in self.keep_roles if role not in get_args(Role)]
        if unknown:
            raise ValueError(f"roles are {get_args(Role)}, got {unknown}")

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, with the version of the form."""
        linear = None if self.linear is None else {
            "kind": "tensorwise" if isinstance(self.linear, TensorwisePrecision) else "mx",
            **asdict(self.linear),
        }  # fmt: skip
        plain = {"version": VERSION, **asdict(self), "linear": linear}
        loaded: dict[str, Any] = json.loads(json.dumps(plain))
        return loaded

    def to_json(self) -> str:
        """One line, keys in order: equal recipes have equal text."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @staticmethod
    def from_dict(stored: Mapping[str, Any]) -> Recipe:
        """Inverse of `to_dict`. ValueError for another version, missing and unknown fields."""
        version = stored.get("version")
        if version != VERSION:
            raise ValueError(f"a recipe of version {VERSION} is read, got version {version!r}")
        values = _fields(Recipe, {k: v for k, v in stored.items() if k != "version"})
        values["linear"] = _linear(values["linear"])
        if values["attention"] is not None:
            attention = _fields(AttentionRecipe, values["attention"])
            attention["value_block"] = _block(attention["value_block"])
            values["attention"] = AttentionRecipe(**attention)
        for name in ("keep_roles", "keep", "only"):
            if not isinstance(values[name], list):
                raise ValueError(f"{name} must be a list of strings, got {values[name]!r}")
            values[name] = tuple(values[name])
        return Recipe(**values)

    @staticmethod
    def from_json(text: str) -> Recipe:
        """Inverse of `to_json`. Raises ValueError for anything else."""
        stored = json.loads(text)
        if not isinstance(stored, dict):
            raise ValueError(f"a recipe is a JSON object, got {type(stored).__name__}")
        return Recipe.from_dict(stored)


def _fields(kind: type[Any], stored: object) -> dict[str, Any]:
    """The stored fields of a dataclass; ValueError unless they are exactly its own."""
    wanted = {own.name for own in fields(kind)}
    if not isinstance(stored, Mapping) or set(stored) != wanted:
        found = sorted(stored) if isinstance(stored, Mapping) else stored
        raise ValueError(f"{kind.__name__} has the fields {sorted(wanted)}, got {found}")
    return dict(stored)


def _linear(stored: Any) -> LinearPrecision | TensorwisePrecision | None:
    if stored is None:
        return None
    kind = stored.get("kind") if isinstance(stored, Mapping) else stored
    if kind not in ("mx", "tensorwise"):
        raise ValueError(f"linear must be of the kind 'mx' or 'tensorwise', got {kind!r}")
    own = {name: value for name, value in stored.items() if name != "kind"}
    if kind == "tensorwise":
        return TensorwisePrecision(**_fields(TensorwisePrecision, own))
    values = _fields(LinearPrecision, own)
    recipe = _fields(LinearRecipe, values["recipe"])
    recipe["weight_block"] = _block(recipe["weight_block"])
    return LinearPrecision(**{**values, "recipe": LinearRecipe(**recipe)})


def _block(stored: Any) -> Block:
    if not isinstance(stored, list) or len(stored) != 2:
        raise ValueError(f"a block is two numbers, rows and columns, got {stored!r}")
    return stored[0], stored[1]
