"""Put a model's layers under a recipe, and take them back: nothing else of the model changes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from jagbench.impl.precision.layers import (
    OWN,
    AttentionPrecision,
    DeclaresAttention,
    Functions,
    LayerPrecision,
    Moment,
    RecipeLinear,
)
from jagbench.impl.precision.named import recipe_named
from jagbench.impl.precision.recipe import Recipe, TensorwisePrecision
from jagbench.impl.precision.roles import role_of
from jagbench.impl.precision.tensorwise import MULTIPLE

#: They read the weights of their linear layers themselves, whose forward then does not run.
_READ_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class Applied:
    """What a recipe did to a model: names of the layers under it; of the others with the reason."""

    recipe: Recipe
    linear: tuple[str, ...]
    attention: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """One line a layer, for a log."""
        lines = [f"recipe {self.recipe.name}"]
        lines += [f"  {name}: linear" for name in self.linear]
        lines += [f"  {name}: attention" for name in self.attention]
        lines += [f"  {name}: kept, {reason}" for name, reason in self.kept]
        return "\n".join(lines)


def apply(model: nn.Module, recipe: Recipe | str, *, functions: Functions = OWN) -> Applied:
    """Put every nn.Linear, and every attention that declares itself, of a model under a recipe.

    model: changed in place: a layer's class and one plain attribute of it. Parameters, buffers,
        hooks, names and the state dict stay. Wrap in FSDP afterwards.
    recipe: a recipe or the name of one. functions: the operators that layers call.

    A recipe that the model already is under is taken back first, so that a second call with the
    same one changes nothing, and with "bf16" undoes it. Layers start at step 0 (`set_step`).

    Raises ValueError, and changes nothing, for an unknown name, a pattern that matches nothing, and
    a recipe under which no layer of the model would run.
    """
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe must be a Recipe or a name, got {type(recipe).__name__}")
    layers = _layers(model)
    _check_patterns(recipe, [name for names in layers.values() for name in names])
    linear: list[tuple[str, nn.Linear]] = []
    attention: list[tuple[str, nn.Module]] = []
    kept: list[tuple[str, str]] = []
    for module, names in layers.items():
        reason = _reason(model, module, names, recipe)
        if reason is not None:
            kept.append((names[0], reason))
        elif isinstance(module, nn.Linear):
            linear.append((names[0], module))
        else:
            attention.append((names[0], module))
    if (recipe.linear or recipe.attention) and not (linear or attention):
        why = "; ".join(f"{name}: {reason}" for name, reason in kept[:5])
        raise ValueError(
            f"no layer of {len(layers)} would run under recipe {recipe.name!r} ({why or 'none'})"
        )
    revert(model)
    _put(linear, attention, recipe, functions)
    return Applied(
        recipe, tuple(name for name, _ in linear), tuple(name for name, _ in attention),
        tuple(kept),
    )  # fmt: skip


def _put(
    linear: list[tuple[str, nn.Linear]],
    attention: list[tuple[str, nn.Module]],
    recipe: Recipe,
    functions: Functions,
) -> None:
    """Give layers, by name, their precision."""
    for name, module in linear:
        if recipe.linear is not None:
            own = LayerPrecision(name, recipe.linear, functions, Moment())
            # Written past nn.Module: neither a parameter nor a buffer nor a child.
            vars(module)["precision"] = own
            _give_class(module, RecipeLinear)
    for name, declared in attention:
        if recipe.attention is not None and isinstance(declared, DeclaresAttention):
            declared.attention_precision = AttentionPrecision(
                name, recipe.attention, functions, Moment()
            )


def revert(model: nn.Module) -> tuple[str, ...]:
    """Take every layer of a model back from its recipe; returns their names.

    Raises ValueError, and changes nothing, if a layer's class was changed since, as by FSDP.
    """
    under = [(name, m) for name, m in model.named_modules() if isinstance(m, RecipeLinear)]
    for name, module in under:
        if type(module) is not RecipeLinear:
            raise ValueError(f"{name}: a {type(module).__name__} now, which cannot be taken back")
    found = [name for name, _ in under]
    for _, module in under:
        del module.precision
        _give_class(module, nn.Linear)
    for name, module in model.named_modules():
        if isinstance(module, DeclaresAttention) and module.attention_precision is not None:
            module.attention_precision = None
            found.append(name)
    return tuple(found)


def set_step(model: nn.Module, step: int, *, rank: int = 0) -> None:
    """Say which step comes next, before its forward: seeds are of a layer, a step and a rank.

    step: counts forward-backward passes, so micro-batches one by one; the same step has the same
        bits. rank: of the data-parallel group; ranks of one tensor-parallel group share a number.

    Where no step was ever said it is 0: every pass then has the same bits, and stochastic rounding
    adds the same error each time.

    Raises ValueError for what is no whole number from 0 up and a model that is under no recipe.
    """
    if type(step) is not int or type(rank) is not int:
        raise ValueError(f"step and rank must be whole numbers, got {step!r} and {rank!r}")
    if step < 0 or rank < 0:
        raise ValueError(f"step and rank must be at least 0, got {step} and {rank}")
    moments = [m.precision.moment for m in model.modules() if isinstance(m, RecipeLinear)]
    moments += [
        m.attention_precision.moment
        for m in model.modules()
        if isinstance(m, DeclaresAttention) and m.attention_precision is not None
    ]
    if not moments:
        raise ValueError("no layer of the model is under a recipe: there is no seed to set")
    for moment in moments:
        moment.step, moment.rank = step, rank


def _give_class(module: nn.Linear, kind: type[nn.Linear]) -> None:
    """Exchange a layer's class, which keeps all that others know it by."""
    module.__class__ = kind


def _layers(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Linear layers, attentions and other modules with parameters of their own, and all names."""
    found: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        has_own = next(module.parameters(recurse=False), None) is not None
        if has_own or isinstance(module, nn.Linear | DeclaresAttention):
            found[module].append(name)
    return dict(found)


def _check_patterns(recipe: Recipe, names: list[str]) -> None:
    for kind, patterns in (("keep", recipe.keep), ("only", recipe.only)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"recipe {recipe.name!r}: {kind} {pattern!r} matches none of {len(names)} "
                    f"layers: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
                )


def _reason(model: nn.Module, module: nn.Module, names: list[str], recipe: Recipe) -> str | None:
    """Why a layer stays as it is; None if it does not. One of its names is enough to keep it."""
    if not isinstance(module, nn.Linear | DeclaresAttention):
        return f"a {type(module).__name__} multiplies no matrices here"
    if isinstance(module, nn.Linear) and type(module) not in (nn.Linear, RecipeLinear):
        return f"a {type(module).__name__} has a forward of its own"
    if (recipe.linear if isinstance(module, nn.Linear) else recipe.attention) is None:
        return f"recipe {recipe.name!r} leaves this kind as it is"
    for name in names:
        role = role_of(model, name)
        if role in recipe.keep_roles:
            return f"role {role}"
        above = model.get_submodule(name.rpartition(".")[0])
        if above is not module and isinstance(above, _READ_WEIGHTS):
            return f"{type(above).__name__} reads its weight itself"
        pattern = next((p for p in recipe.keep if fnmatchcase(name, p)), None)
        if pattern is not None:
            return f"keep {pattern!r}"
    if recipe.only and not any(fnmatchcase(n, p) for n in names for p in recipe.only):
        return f"only {recipe.only} run under the recipe"
    if isinstance(module, nn.Linear) and isinstance(recipe.linear, TensorwisePrecision):
        shape = tuple(module.weight.shape)
        if shape[0] % MULTIPLE or shape[1] % MULTIPLE:
            return f"weight {shape}: an FP8 product needs multiples of {MULTIPLE}"
    return None
