"""An implementation under test: any module or object with callables named after the operators."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Entry-point group in which packages offer implementations by a short name.
ENTRY_POINT_GROUP = "jagbench.implementations"


@dataclass(frozen=True)
class Prepared:
    """A call with all done that a caller could do once beforehand: padding, masks, plans, layout.

    A namespace may offer `prepare(operator, inputs) -> Prepared | None`; its calls are then timed
    with the preparation and without it.

    tensors: the leaves ("q", "k", "v") in the kernel's own layout; call: the kernel alone, taking
        them by keyword and returning the output.
    upstream: gradient of the output, in the output's layout.
    unpack: brings "out" or a gradient ("grad q") into the packed layout `[rows, heads, head_dim]`.
    """

    tensors: Mapping[str, Tensor]
    call: Callable[..., Tensor]
    upstream: Tensor
    unpack: Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Implementation:
    """What `--impl` named.

    name: as given on the command line.
    namespace: module or object that holds the operators.
    version: its `__version__`, or that of its distribution, or "unknown".
    module: module it was loaded from; None for loose functions.
    """

    name: str
    namespace: Any
    version: str
    module: ModuleType | None = None

    @property
    def source(self) -> ModuleType | None:
        """What its source is: the package it was loaded from, or a module in no package."""
        package = getattr(self.module, "__package__", None)
        return sys.modules.get(package, self.module) if package else self.module

    def get(self, operator: str) -> Callable[..., Any]:
        """The callable for an operator.

        Raises NotImplementedError where the namespace has no such name: unsupported, not wrong.
        """
        function = getattr(self.namespace, operator, None)
        if function is None:
            raise NotImplementedError(f"{self.name} has no {operator}")
        if not callable(function):
            raise TypeError(f"{self.name}.{operator} is {type(function).__name__}, not callable")
        return function  # type: ignore[no-any-return]

    def describe(self, device: torch.device) -> str:
        """What it says of itself on a device, in a few words; empty if it says nothing.

        A namespace may offer `describe(device) -> str`: which of its kernels a session will meet.
        """
        function = getattr(self.namespace, "describe", None)
        return str(function(device)) if callable(function) else ""


def load(name: str) -> Implementation:
    """Load an implementation by entry-point name, module path, or `module:attribute`.

    Raises ValueError if nothing answers to `name`, with the known entry points. An import error
    from inside the module is passed on unchanged: it is the implementer's to see.
    """
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    namespace: Any
    for entry in entry_points:
        if entry.name == name:
            namespace = entry.load()
            module = sys.modules[entry.value.partition(":")[0]]
            return Implementation(name, namespace, _version(entry.value), module)
    module_name, _, attribute = name.partition(":")
    try:
        namespace = module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        known = sorted(entry.name for entry in entry_points)
        raise ValueError(
            f"--impl={name}: no module {error.name!r}, and no entry point of that name in group "
            f"{ENTRY_POINT_GROUP} (known: {', '.join(known) or 'none'})"
        ) from error
    for part in filter(None, attribute.split(".")):
        try:
            namespace = getattr(namespace, part)
        except AttributeError as error:
            raise ValueError(f"--impl={name}: {error}") from error
    return Implementation(name, namespace, _version(module_name, namespace), module)


def of_functions(name: str, **functions: Callable[..., Any]) -> Implementation:
    """An implementation made of plain functions (tests of the suite use it)."""
    return Implementation(name, SimpleNamespace(**functions), "unknown")


def _version(module_name: str, namespace: Any = None) -> str:
    version = getattr(namespace, "__version__", None)
    if isinstance(version, str):
        return version
    top = module_name.partition(":")[0].partition(".")[0]
    for distribution in importlib.metadata.packages_distributions().get(top, []):
        return importlib.metadata.version(distribution)
    return str(getattr(importlib.import_module(top), "__version__", "unknown"))
