"""Which role a layer has in a model: declared, or read off the names on the way to it."""

from __future__ import annotations

from typing import get_args

from torch import nn

from jagbench.impl.precision.recipe import Role

#: Names of a module list whose last member is the last block.
BLOCK_LISTS = ("blocks", "layers")
_OVER_ARCH = ("over_arch", "overarch")


def role_of(model: nn.Module, name: str) -> Role:
    """Role of the module called `name` ("" is the model itself).

    The innermost module on the way to it, itself included, that has a role gives it:
    an attribute `precision_role` first; else its name: "head", "heads" or "..._head(s)" is a head,
    "over_arch" the over-arch, a name with "embedding" an embedding, and the last member of a
    ModuleList called "blocks" or "layers" the last block. Everything else is a "block".

    Raises ValueError for a `precision_role` that is no role.
    """
    parts = name.split(".") if name else []
    found: list[Role] = []
    module, above = model, None
    for i in range(len(parts) + 1):
        part = parts[i - 1] if i else ""
        if i:
            above, module = module, module.get_submodule(part)
        own = _declared(module, ".".join(parts[:i])) or _named(part)
        if own is None and isinstance(above, nn.ModuleList) and i > 1:
            last = part == str(len(above) - 1)
            own = "last_block" if parts[i - 2] in BLOCK_LISTS and last else None
        if own is not None:
            found.append(own)
    return found[-1] if found else "block"


def _declared(module: nn.Module, name: str) -> Role | None:
    role: Role | None = getattr(module, "precision_role", None)
    if role is not None and role not in get_args(Role):
        raise ValueError(f"{name or 'the model'} has the precision_role {role!r}; roles are "
                         f"{get_args(Role)}")  # fmt: skip
    return role


def _named(part: str) -> Role | None:
    if part in ("head", "heads") or part.endswith(("_head", "_heads")):
        return "head"
    if part in _OVER_ARCH:
        return "over_arch"
    return "embedding" if "embedding" in part else None
